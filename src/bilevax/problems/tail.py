"""Tuning a distributionally robust model by its tail risk: `eq:DRO_tuning` as it is stated.

    min over η ≥ 0 and y1, max over x2 in Δ(m, p) of  Σᵢ x2ᵢ·ℓ(y1; validation row i)
    with (y1, y2) a saddle point: min over y1, max over y2 in Δ(n, 1) of
        Σᵢ y2ᵢ·ℓ(y1; training row i) − (η/2)‖y2 − 1/n‖²

Δ(n, p) = {y : 0 ≤ y ≤ p, Σy = 1}. The inner max over y2 is left out in print. The upper level is
the mean loss over the worst 1/(p·m) of the m validation rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from bilevax import terms
from bilevax.arguments import non_negative
from bilevax.problems.bilevel import BilevelProblem
from bilevax.problems.point import Point
from bilevax.problems.rows import (
    cap_of,
    floats,
    linear_parameters,
    linear_rows,
    loss_function,
    of_loss,
    prices,
    pytree_rows,
    require_same_columns,
    row_losses,
)
from bilevax.trees import Tree

# Of more training features than this in all it is not asked whether they separate the labels.
MANY = 1_000_000


def tail_tuning(
    train: Any,
    validation: Any,
    *,
    share: float = 0.5,
    cap: float | None = None,
    loss: str | Callable[[Any, Any], Array] = "logistic",
    parameters: Tree = None,
    intercept: bool = True,
    y1: Any = None,
    l2: float = 0.0,
    eta: float = 1.0,
    most_eta: float = np.inf,
) -> tuple[BilevelProblem, Point]:
    """`eq:DRO_tuning`: the problem, and a start, for `solve`.

    x1 is η, y1 the parameters of the model, y2 and x2 the weights of the training and of the
    validation rows. By default there is nothing that the equation has not: no upper bound of η or
    y1, and no ridge.

    Args:
        train: (features, targets) of the training rows: a matrix and a vector.
        validation: the same of the validation rows.
        share: the mean is over this share of the validation rows, the worst ones: p = 1/(share·m).
        cap: p itself, instead of `share`; at least 1/m.
        loss: of a linear model: "logistic", with targets 0 and 1 or −1 and 1, or "squared". Or a
            function `loss(y1, rows)` that returns the vector of losses, smooth and convex in y1;
            then `train` and `validation` are pytrees of arrays with a first axis for the rows.
        parameters: y1 to begin with; by default zero. A loss of your own needs it.
        intercept: whether a linear model has one: the last entry of y1.
        y1: the term of y1, such as `Box(-R, R)`; by default `Free()`.
        l2: (l2/2)‖y1‖² is added to the lower level, the intercept left out.
        eta: where η begins.
        most_eta: an upper bound of η. For η → ∞ all training rows weigh the same, and where that is
            best η has no best value: without a bound it runs away, which a solution's status says.

    Where the training labels can be separated, the logistic loss has no minimiser without l2 and
    without bounds of y1. That is refused.
    """
    own, function = callable(loss), loss_function(loss)
    non_negative(l2, "l2")
    eta, most_eta = prices(eta, most_eta)
    if own:
        if parameters is None:
            raise ValueError("parameters: a loss of your own needs y1 to begin with")
        if l2:
            raise ValueError("l2: add the ridge to y1 instead, as in y1=bilevax.terms.Ridge(l2)")
        rows = {
            "train": pytree_rows(train, "train"),
            "validation": pytree_rows(validation, "validation"),
        }
    else:
        rows = {
            "train": linear_rows(train, "train", str(loss), intercept),
            "validation": linear_rows(validation, "validation", str(loss), intercept),
        }
        require_same_columns(train[0], validation[0])
        parameters = _parameters(parameters, rows)
        if loss == "logistic" and not l2 and y1 is None and _separable(**rows["train"]):
            raise ValueError(
                "train: a linear model separates these labels, or some of them from the rest, so "
                "that the logistic loss falls without end and no y1 is its minimiser; give l2 > 0, "
                "bounds such as "
                "y1=bilevax.terms.Box(-R, R), or loss='squared'"
            )
    n, m = (len(jax.tree.leaves(rows[level])[0]) for level in ("train", "validation"))
    penalised = None
    if l2:
        penalised = np.full(np.shape(parameters), l2)
        penalised[len(penalised) - intercept :] = 0
    weights = {name: np.full(count, 1 / count) for name, count in (("x2", m), ("y2", n))}
    problem = BilevelProblem(
        of_loss(_upper, function),
        of_loss(_lower, function),
        x1=terms.Box(0.0, most_eta),
        x2=terms.CappedSimplex(cap_of(share, cap, m)),
        y1=terms.Free() if y1 is None else y1,
        y2=terms.Simplex(),
        data=floats(rows if penalised is None else rows | {"l2": penalised}),
    )
    return problem, Point(**floats({"x1": np.asarray(eta), "y1": parameters} | weights))


def _upper(loss: Callable, x1: Array, x2: Array, y1: Any, y2: Array, data: Any) -> Array:
    """f of `eq:DRO_tuning`."""
    return jnp.sum(x2 * row_losses(loss, y1, data["validation"], x2))


def _lower(loss: Callable, x1: Array, y1: Any, y2: Array, data: Any) -> Array:
    """f~ of `eq:DRO_tuning`, and the ridge where there is one."""
    value = jnp.sum(y2 * row_losses(loss, y1, data["train"], y2))
    value -= x1 / 2 * jnp.sum((y2 - 1 / len(y2)) ** 2)
    return value + jnp.sum(data["l2"] * y1**2) / 2 if "l2" in data else value


def _parameters(given: Any, rows: dict[str, dict[str, np.ndarray]]) -> np.ndarray:
    """y1 to begin with, for a linear model."""
    width, other = (rows[level]["features"].shape[1] for level in ("train", "validation"))
    if width != other:
        raise ValueError("validation: features must have as many columns as those of train")
    return linear_parameters(given, width)


def _separable(features: np.ndarray, target: np.ndarray) -> bool:
    """Whether some y1 has b·⟨y1, a⟩ ≥ 0 for every row, and > 0 for one.

    Along it no loss rises and one falls for ever, so that with even weights there is no minimiser.
    """
    from scipy import optimize

    if features.size > MANY:
        return False
    scaled = features / np.maximum(np.abs(features).max(axis=0), np.finfo(float).tiny)
    margins = target[:, None] * scaled
    zero = np.zeros(len(target))
    found = optimize.linprog(
        -margins.sum(axis=0), A_ub=-margins, b_ub=zero, bounds=(-1, 1), method="highs"
    )
    return found.status == 0 and bool((margins @ found.x).max() > 1e-6)
