"""Rows of data and their losses, checked: what `tail_tuning` and `meta_learning` share."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from bilevax.arguments import non_negative, one_number, positive


def logistic(y1: Array, rows: dict[str, Array]) -> Array:
    """log(1 + exp(−b·⟨y1, a⟩)) of each row (a, b), b = ±1."""
    return jnp.logaddexp(0.0, -rows["target"] * (rows["features"] @ y1))


def squared(y1: Array, rows: dict[str, Array]) -> Array:
    """½(⟨y1, a⟩ − b)² of each row (a, b)."""
    return 0.5 * (rows["features"] @ y1 - rows["target"]) ** 2


LOSSES = {"logistic": logistic, "squared": squared}


def loss_function(loss: str | Callable[[Any, Any], Array]) -> Callable[[Any, Any], Array]:
    """The loss of this name, or the user's own."""
    if callable(loss):
        return loss
    if not isinstance(loss, str) or loss not in LOSSES:
        raise ValueError(f"loss must be 'logistic', 'squared' or a function, not {loss!r}")
    return LOSSES[loss]


def of_loss(level: Callable[..., Array], loss: Callable) -> Callable[..., Array]:
    """The function of a level for this loss: one object, so that programs are shared.

    Without a hash of the loss there is a new one each time.
    """
    try:
        return _of_loss(level, loss)
    except TypeError:
        return functools.partial(level, loss)


@functools.lru_cache(maxsize=64)
def _of_loss(level: Callable[..., Array], loss: Callable) -> Callable[..., Array]:
    return functools.partial(level, loss)


def row_losses(loss: Callable, y1: Any, rows: Any, weights: Array) -> Array:
    """The loss of each row, one for each weight."""
    losses = loss(y1, rows)
    if jnp.shape(losses) != weights.shape:
        raise TypeError(
            f"loss must return one number for each of the {len(weights)} rows, not an array of "
            f"shape {jnp.shape(losses)}"
        )
    return losses


def prices(eta: Any, most: Any) -> tuple[float, float]:
    """η to begin with and its upper bound, checked."""
    non_negative(eta, "eta")
    bound = one_number(most, "most_eta")
    if bound is None or not bound > 0:
        raise ValueError(f"most_eta must be > 0, or infinite, not {most}")
    if eta > bound:
        raise ValueError(f"eta={eta} is above most_eta={most}")
    return float(eta), bound


def cap_of(share: Any, cap: Any, rows: int, name: str = "share", task: str = "") -> float:
    """p of the truncated simplex: as given, or such that the worst `share` of the rows count."""
    if cap is None:
        positive(share, name)
        if share > 1:
            raise ValueError(f"{name} must be a share of the rows, at most 1, not {share}")
        return 1 / (float(share) * rows)
    positive(cap, "cap")
    if cap < (1 - 1e-12) / rows:
        raise ValueError(
            f"{task}cap={cap} is less than 1/{rows}: the weights of the {rows} validation rows "
            "cannot add up to 1"
        )
    return float(cap)


def linear_rows(given: Any, name: str, loss: str, intercept: bool) -> dict[str, np.ndarray]:
    """The features and targets of a linear model's rows, checked."""
    try:
        features, target = given
    except (TypeError, ValueError):
        raise TypeError(f"{name} must be a pair (features, targets)") from None
    if not isinstance(intercept, bool):
        raise TypeError(f"intercept must be True or False, not {intercept!r}")
    x, b = numbers(features, f"{name}: features"), numbers(target, f"{name}: targets")
    if x.ndim != 2 or not len(x):
        raise ValueError(f"{name}: features must be a matrix with rows, not of shape {x.shape}")
    if b.shape != x.shape[:1]:
        raise ValueError(
            f"{name}: targets must be one number for each of the {len(x)} rows, not of shape "
            f"{b.shape}"
        )
    if loss == "logistic":
        found = set(np.unique(b).tolist())
        if not (found <= {0, 1} or found <= {-1, 1}):
            raise ValueError(f"{name}: targets must be 0 and 1 or −1 and 1, for loss='logistic'")
        b = np.where(b > 0, 1.0, -1.0)
    return {"features": np.column_stack([x, np.ones(len(x))]) if intercept else x, "target": b}


def require_same_columns(train: Any, validation: Any) -> None:
    """Refuse tables whose columns have other names, or the same in another order."""
    named = [list(table.columns) for table in (train, validation) if hasattr(table, "columns")]
    if len(named) == 2 and named[0] != named[1]:
        raise ValueError(
            f"validation: features must have the columns of train in their order, {named[0]}, not "
            f"{named[1]}"
        )


def numbers(given: Any, name: str) -> np.ndarray:
    """The argument as an array of finite floats."""
    try:
        array = np.asarray(given, float)
    except (TypeError, ValueError):
        raise TypeError(f"{name} must be numbers") from None
    if not np.isfinite(array).all():
        raise ValueError(f"{name} must be finite, but hold NaN or infinity")
    return array


def pytree_rows(rows: Any, name: str) -> Any:
    """The rows for a loss of the user's own, checked."""
    arrays = jax.tree.map(np.asarray, rows)
    lengths = {array.shape[:1] for array in jax.tree.leaves(arrays)}
    if len(lengths) != 1 or lengths <= {(), (0,)}:
        raise ValueError(
            f"{name} must be arrays with a first axis of equal length ≥ 1 for the rows"
        )
    for array in jax.tree.leaves(arrays):
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise ValueError(f"{name} must be finite, but holds NaN or infinity")
    return arrays


def linear_parameters(given: Any, width: int) -> np.ndarray:
    """The parameters of a linear model to begin with; by default zero."""
    if given is None:
        return np.zeros(width)
    found = numbers(given, "parameters")
    if found.shape != (width,):
        raise ValueError(f"parameters must have shape ({width},), not {found.shape}")
    return found


def floats(tree: Any) -> Any:
    """Floating arrays in JAX's own precision; integers, such as labels, as they are."""
    dtype = jnp.result_type(float)
    as_float = lambda a: jnp.asarray(a, dtype if np.asarray(a).dtype.kind == "f" else None)
    return jax.tree.map(as_float, tree)
