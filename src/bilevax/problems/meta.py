"""Distributionally robust meta-learning: `eq:DRO_meta_tuning`, all tasks at once.

    min over w, η ≥ 0, λ in [low, high] and y1, max over x2^τ in Δ(m^τ, p) of
        Σ_τ Σᵢ x2ᵢ^τ·ℓ(y1^τ; validation row i of τ)
    with (y1^τ, y2^τ) a saddle point: min over y1^τ, max over y2^τ in Δ(n^τ, q) of
        Σᵢ y2ᵢ^τ·ℓ(y1^τ; training row i of τ) − (η/2)‖y2^τ − 1/n^τ‖² + (λ/2)‖y1^τ − w‖²

Δ(n, p) = {y : 0 ≤ y ≤ p, Σy = 1}; q = 1 is the plain simplex. The inner max over y2 is left out in
print, and the last norm is meant squared. The lower levels of the tasks are one saddle point
problem, since their sum has no term of two tasks.

Tasks are stacked, so that programs do not grow with their number: one with fewer rows than another
is filled up by copies of its first row. The weights of copies have the cap 0, and their losses are
multiplied by 0. 1/n^τ counts rows that are there, and is 0 for copies: they add nothing to either
function or its derivatives.

Tasks may be sampled. With a minibatch B of b of the T tasks both sums become (T/b)·Σ over B, but
for (λ/2)‖y1 − w‖², which needs no data and stays a sum over all tasks. So the expectations are f
and f~, and f~ is λ-strongly convex in y1 for every minibatch. y1, y2 and x2 remain blocks of all
tasks: a gradient is zero in the rows of tasks that were not drawn, but for λ(y1 − w), as in
block-coordinate methods. Its variance grows like T/b − 1, and the blocks' memory with T: only the
rows of data are sampled.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from bilevax import terms
from bilevax.arguments import non_negative, one_number
from bilevax.data import Arrays
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
    row_losses,
)
from bilevax.trees import Tree

LEVELS = ("train", "validation")


def meta_learning(
    tasks: Sequence[Any] | Mapping[Any, Any],
    *,
    share: float = 0.5,
    cap: float | None = None,
    train_share: float | None = None,
    loss: str | Callable[..., Array] = "squared",
    parameters: Tree = None,
    intercept: bool = True,
    w: Any = None,
    y1: Any = None,
    lam: tuple[float, float] = (0.01, 10.0),
    eta: float = 1.0,
    most_eta: float = np.inf,
    least_eta: float = 0.0,
    shared: Tree = None,
    batch: int | None = None,
) -> tuple[BilevelProblem, Point]:
    """`eq:DRO_meta_tuning`: the problem, and a start, for `solve`.

    x1 is {"w": the meta-parameter, "eta": η, "lam": λ}. Row τ of y1 are the parameters of task τ,
    row τ of y2 and of x2 the weights of its training and validation rows; where a task has fewer
    rows than another, the last entries of its row are 0. The lower level is λ-strongly convex in
    y1, which the problem says as its `lower_modulus`.

    Args:
        tasks: pairs (train, validation), in a list or under names in a dictionary, each of them a
            pair (features, targets): a matrix and a vector. Numbers of rows may differ, columns are
            the same for all.
        share: the mean is over this share of a task's validation rows, the worst ones:
            p = 1/(share·m^τ).
        cap: p itself, for all tasks, instead of `share`; at least 1/m^τ.
        train_share: the same for training rows, q = 1/(train_share·n^τ); by default q = 1.
        loss: of a linear model: "squared", or "logistic", with targets 0 and 1 or −1 and 1. Or a
            function `loss(y1, rows)` that returns the vector of losses of one task's rows, smooth
            and convex in y1, each of its own row alone; then train and validation of a task are
            pytrees of arrays with a first axis for the rows.
        parameters: w to begin with; by default that of one model for the training rows of all
            tasks. A loss of your own needs it. Each task's parameters begin at its lower level's
            solution for even weights, or with a loss of your own at w.
        intercept: whether a linear model has one: the last entry of w and of each task's y1.
        w: the term of the meta-parameter; by default `Free()`.
        y1: the term of y1, such as `Box(-R, R)` or `L2Ball(R, axis=-1)`; by default `Free()`.
        lam: the least and the greatest λ, > 0; it begins at the root of their product.
        eta: where η begins.
        most_eta: an upper bound of η, which may run away without one, as in `tail_tuning`.
        shared: parameters that a loss of your own shares among the tasks, such as the layers of a
            network that make its features, to begin with. They are x1["shared"], and the loss is
            `loss(y1, rows, shared)`; it need not be convex in them.
        batch: how many tasks a minibatch has; by default all tasks are there at once. Then `data`
            is a `bilevax.data.Arrays` with one sample for each task, for `SampleAverage` and the
            stochastic methods.
        least_eta: a lower bound of η, such as one that keeps the lower level smooth.

    A task may have labels that can be separated, or of one class only: since λ > 0, its lower level
    has a solution for the logistic loss, too. Memory grows with the largest task's rows times the
    number of tasks.
    """
    own, function = callable(loss), loss_function(loss)
    eta, most_eta = prices(eta, most_eta)
    non_negative(least_eta, "least_eta")
    if not 0 <= least_eta <= eta:
        raise ValueError(f"least_eta must be ≥ 0 and at most eta={eta}, not {least_eta}")
    low, high = _range(lam)
    if shared is not None and not own:
        raise ValueError("shared: only a loss of your own has shared parameters")
    if own and parameters is None:
        raise ValueError("parameters: a loss of your own needs w to begin with")
    named = {name: _pair(task, name) for name, task in _named(tasks).items()}
    linear = functools.partial(linear_rows, loss=str(loss), intercept=intercept)
    check = pytree_rows if own else linear
    rows = {
        level: {name: check(pair[k], f"{name}: {level}") for name, pair in named.items()}
        for k, level in enumerate(LEVELS)
    }
    _check_alike(rows, own)
    if not own:
        _check_columns(named)
    lam0 = float(np.sqrt(low * high))
    train = list(rows["train"].values())
    if own:
        tasks_begin = jax.tree.map(lambda a: np.stack([a] * len(named)), parameters)
    else:
        parameters, tasks_begin = _first_models(parameters, train, str(loss), lam0)
    counts = {level: {name: _count(task) for name, task in rows[level].items()} for level in LEVELS}
    caps = [cap_of(share, cap, m, task=f"{name}: ") for name, m in counts["validation"].items()]
    most_y2 = [
        np.inf if train_share is None else cap_of(train_share, None, n, "train_share")
        for n in counts["train"].values()
    ]
    data = {level: _stacked(list(rows[level].values())) for level in LEVELS}
    there = {level: data[level]["there"] for level in LEVELS}
    even = {level: there[level] / there[level].sum(axis=1, keepdims=True) for level in LEVELS}
    data["train"]["even"] = even["train"]
    data = floats(data)
    if batch is not None:
        data = Arrays({"task": jnp.arange(len(named)), **data}, batch)
    extra = {} if shared is None else {"shared": shared}
    problem = BilevelProblem(
        of_loss(_upper, function),
        of_loss(_lower, function),
        x1={
            "w": terms.Free() if w is None else w,
            "eta": terms.Box(float(least_eta), most_eta),
            "lam": terms.Box(low, high),
            **{name: terms.Free() for name in extra},
        },
        x2=terms.CappedSimplex(_caps(caps, there["validation"]), axis=-1),
        y1=terms.Free() if y1 is None else y1,
        y2=terms.CappedSimplex(_caps(most_y2, there["train"]), axis=-1),
        data=data,
        lower_modulus=_lam,
    )
    start = {
        "x1": {"w": parameters, "eta": np.asarray(eta), "lam": np.asarray(lam0), **extra},
        "x2": even["validation"],
        "y1": tasks_begin,
        "y2": even["train"],
    }
    start = floats(start)
    if not own:  # what was fitted knows no bounds
        start["x1"] = problem.x1.project(start["x1"])
        start["y1"] = problem.y1.project(start["y1"])
    return problem, Point(**start)


def _upper(loss: Callable, x1: Any, x2: Array, y1: Any, y2: Array, data: Any) -> Array:
    """f of `eq:DRO_meta_tuning`."""
    times, x2, y1 = _drawn(data, x2, y1)
    return times * jnp.sum(x2 * _losses(_for(loss, x1), y1, data["validation"], x2))


def _lower(loss: Callable, x1: Any, y1: Any, y2: Array, data: Any) -> Array:
    """The sum of f~ of `eq:DRO_meta_tuning` over the tasks."""
    times, y2, own = _drawn(data, y2, y1)
    value = jnp.sum(y2 * _losses(_for(loss, x1), own, data["train"], y2))
    uneven = jnp.sum((y2 - data["train"]["even"]) ** 2)
    apart = lambda y1, w: jnp.sum((y1 - w[None]) ** 2)
    distance = sum(jax.tree.leaves(jax.tree.map(apart, y1, x1["w"])))
    return times * (value - x1["eta"] / 2 * uneven) + x1["lam"] / 2 * distance


def _drawn(data: Any, weights: Array, y1: Any) -> tuple[float, Array, Any]:
    """What a task of the data counts, and the rows of both blocks for these tasks."""
    if "task" not in data:
        return 1.0, weights, y1
    chosen = data["task"]
    taken = lambda block: block[chosen]
    return weights.shape[0] / chosen.shape[0], taken(weights), jax.tree.map(taken, y1)


def _for(loss: Callable, x1: Any) -> Callable:
    """The loss of one task, with what the tasks share put in."""
    if "shared" not in x1:
        return loss
    return lambda y1, rows: loss(y1, rows, x1["shared"])


def _lam(x1: Any) -> Array:
    """With weights ≥ 0 the sum of convex losses is convex, and λ is what the proximity adds."""
    return x1["lam"]


def _losses(loss: Callable, y1: Any, stacked: Any, weights: Array) -> Array:
    """The loss of each row of each task, and 0 where there is none."""
    losses = jax.vmap(functools.partial(row_losses, loss))(y1, stacked["rows"], weights)
    return stacked["there"] * losses


def _first_models(
    given: Any, train: list[dict[str, np.ndarray]], loss: str, lam: float
) -> tuple[np.ndarray, np.ndarray]:
    """w and the parameters of the tasks to begin with.

    From zero, where losses are far apart, an adversary who pays little puts all weight on a few
    rows, and Newton's steps often do not find the lower level's solution.
    """
    none = linear_parameters(None, train[0]["features"].shape[1])
    if given is None:
        w = _fitted(
            {key: np.concatenate([t[key] for t in train]) for key in train[0]}, loss, lam, none
        )
    else:
        w = linear_parameters(given, len(none))
    return w, np.stack([_fitted(task, loss, lam, w) for task in train])


def _fitted(rows: dict[str, np.ndarray], loss: str, lam: float, near: np.ndarray) -> np.ndarray:
    """About the least mean loss + (λ/2)‖y − near‖² over y, in NumPy and SciPy."""
    from scipy import optimize, special

    x, b = rows["features"], rows["target"]

    def value_and_slope(y: np.ndarray) -> tuple[float, np.ndarray]:
        score, off = x @ y, y - near
        if loss == "squared":
            losses, slopes = (score - b) ** 2 / 2, score - b
        else:
            losses, slopes = np.logaddexp(0, -b * score), -b * special.expit(-b * score)
        return losses.mean() + lam / 2 * off @ off, x.T @ slopes / len(b) + lam * off

    return optimize.minimize(value_and_slope, near, jac=True, method="L-BFGS-B").x


def _named(tasks: Any) -> dict[str, Any]:
    """The tasks by what errors call them."""
    if isinstance(tasks, Mapping):
        named = {f"task {name!r}": task for name, task in tasks.items()}
    elif isinstance(tasks, Sequence) and not isinstance(tasks, str):
        named = {f"task {k}": task for k, task in enumerate(tasks)}
    else:
        raise TypeError("tasks must be a list of pairs (train, validation), or a dictionary")
    if not named:
        raise ValueError("tasks: there are none")
    return named


def _pair(task: Any, name: str) -> tuple[Any, Any]:
    try:
        train, validation = task
    except (TypeError, ValueError):
        raise TypeError(f"{name} must be a pair (train, validation)") from None
    return train, validation


def _count(rows: Any) -> int:
    return len(jax.tree.leaves(rows)[0])


def _check_alike(rows: dict[str, dict[str, Any]], own: bool) -> None:
    """Refuse tasks that cannot be stacked: only their numbers of rows may differ."""
    form = lambda task: jax.tree.map(lambda a: (a.shape[1:], a.dtype.kind), task)
    name, task = next(iter(rows["train"].items()))
    for level in LEVELS:
        first = form(task if not own else next(iter(rows[level].values())))
        for other, found in rows[level].items():
            if form(found) == first:
                continue
            if own:
                raise ValueError(
                    f"{other}: {level} must be arrays of the shapes and kinds of {name}'s, but for "
                    "the number of rows"
                )
            raise ValueError(f"{other}: {level}: features must have as many columns as {name}'s")


def _check_columns(named: dict[str, tuple[Any, Any]]) -> None:
    """Refuse tables whose columns have other names than the first one's, or another order."""
    first, known = "", None
    for name, pair in named.items():
        for level, (features, _) in zip(LEVELS, pair):
            columns = list(features.columns) if hasattr(features, "columns") else None
            if columns is None:
                continue
            if known is None:
                first, known = f"{name}: {level}", columns
            elif columns != known:
                raise ValueError(
                    f"{name}: {level}: features must have the columns of {first} in their order, "
                    f"{known}, not {columns}"
                )


def _range(lam: Any) -> tuple[float, float]:
    try:
        low, high = (one_number(end, "lam") for end in lam)
    except (TypeError, ValueError):
        raise TypeError(f"lam must be a pair of numbers (low, high), not {lam!r}") from None
    if low is None or high is None or not 0 < low <= high < np.inf:
        raise ValueError(f"lam must be (low, high) with 0 < low ≤ high, both finite, not {lam}")
    return low, high


def _stacked(tasks: list[Any]) -> dict[str, Any]:
    """The rows of all tasks, each filled up with its first row, and 1 for those that are there."""
    counts = np.asarray([_count(task) for task in tasks])
    there = np.arange(counts.max())[None] < counts[:, None]
    places = np.where(there, np.arange(counts.max())[None], 0)
    taken = [jax.tree.map(lambda a, k=k: a[places[k]], task) for k, task in enumerate(tasks)]
    rows = jax.tree.map(lambda *arrays: np.stack(arrays), *taken)
    return {"rows": rows, "there": there.astype(float)}


def _caps(caps: list[float], there: np.ndarray) -> np.ndarray:
    """The cap of each weight: its task's, and 0 for those of no row."""
    return np.where(there > 0, np.asarray(caps)[:, None], 0.0)
