"""The tuning problem as a `bilevax.BilevelProblem`, for any of the library's solvers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from bilevax import terms
from bilevax.learn._certificate import INTERCEPT_BOUND
from bilevax.learn._risk import Risk
from bilevax.learn._rows import Rows
from bilevax.learn._soft import SoftLevels, SoftRows
from bilevax.learn._tuning import Levels
from bilevax.problems import BilevelProblem, Point


def as_block(rows: Rows, w: np.ndarray) -> dict[str, Array]:
    """The parameters as a block of a problem: coefficients, and intercepts where there are any."""
    block = jnp.asarray(w)
    if not rows.intercept:
        return {"coef": block}
    return {"coef": block[:, :-1], "intercept": block[:, -1]}


def as_arrays(rows: Rows, risk: Risk) -> dict[str, np.ndarray]:
    """The rows of a level, as the data of a problem."""
    x = rows.x.toarray() if hasattr(rows.x, "toarray") else rows.x
    arrays = {"x": x, "label": rows.label, "share": risk.share}
    if isinstance(rows, SoftRows):
        return {**arrays, "allowed": rows.allowed}
    return arrays if risk.group is None else {**arrays, "group": risk.group}


def row_losses(w: dict[str, Array], data: dict[str, Array]) -> Array:
    """ℓ of each row."""
    return score_losses(scores_of(w, data), data["label"])


def scores_of(w: dict[str, Array], data: dict[str, Array]) -> Array:
    """The scores of each row."""
    scores = data["x"] @ w["coef"].T
    return scores + w["intercept"][None, :] if "intercept" in w else scores


def score_losses(scores: Array, label: Array) -> Array:
    """The logistic loss of each row's scores."""
    if scores.shape[1] == 1:
        sign = (2 * label - 1).astype(scores.dtype)
        return jnp.logaddexp(0.0, -sign * scores[:, 0])
    own = jnp.take_along_axis(scores, label[:, None], axis=1)[:, 0]
    return jax.nn.logsumexp(scores, axis=1) - own


def item_losses(w: Any, q: Array, data: Any) -> Array:
    """The losses that the adversary weighs with q: mean losses of groups, or losses of rows."""
    losses = row_losses(w, data)
    return group_means(losses, q, data) if "group" in data else losses


def group_means(losses: Array, q: Array, data: Any) -> Array:
    """The mean loss of each group."""
    return jax.ops.segment_sum(data["share"] * losses, data["group"], len(q))


def moved_item_losses(radii: Array, w: Any, q: Array, data: Any) -> Array:
    """The mean losses of groups whose rows are moved by their radii (`_moved`)."""
    scores, label = scores_of(w, data), data["label"]
    coef = w["coef"]
    if len(coef) == 1:
        coef = jnp.concatenate([jnp.zeros_like(coef), coef])
    apart = jnp.sum((coef[None, :] - coef[:, None]) ** 2, axis=2)
    some = apart > 0  # the norm has a slope of zero at zero, which is one of its subgradients
    norms = jnp.where(some, jnp.sqrt(jnp.where(some, apart, 1.0)), 0.0)
    if scores.shape[1] == 1:
        norms = norms[:, 1:] - norms[:, :1]
    moved = scores + radii[data["group"]][:, None] * norms[label]
    return group_means(score_losses(moved, label), q, data)


def _weights(risk: Risk) -> terms.Term:
    """The weights that the adversary may choose."""
    return terms.Simplex() if not risk.rowwise else terms.CappedSimplex(risk.adversary.cap)


def log_probabilities(v: Array, data: Any) -> Array:
    """log p of the groups that each row may be in (`_soft`); far below zero for the others."""
    d = data["x"].shape[1]
    z = data["x"] @ v[:, :d].T + v[:, d:].T[data["label"]]
    return jax.nn.log_softmax(jnp.where(data["allowed"], z, -1e30), axis=1)


def soft_item_losses(v: Array, w: Any, q: Array, data: Any) -> Array:
    """The mean losses of groups in which rows are with probabilities (`_soft`)."""
    weight = data["share"][:, None] * jnp.exp(log_probabilities(v.reshape(len(q), -1), data))
    return (row_losses(w, data) @ weight) / jnp.sum(weight, axis=0)


def soft_bilevel_problem(levels: SoftLevels) -> BilevelProblem:
    """The problem whose x1 has the group predictor, too, and whose upper level asks R(v) of it."""
    gamma, ridge = levels.gamma, levels.ridge
    share = levels.known.weight / levels.known.weight.sum()

    def own(v: Array, data: Any) -> Array:
        v = v.reshape(data["allowed"].shape[1], -1)
        log_p = jnp.take_along_axis(log_probabilities(v, data), data["group"][:, None], axis=1)
        return gamma * (ridge / 2 * jnp.sum(v**2) - jnp.sum(data["share"] * log_p[:, 0]))

    known = as_arrays(levels.known, replace(levels.risk, share=share)) | {"group": levels.group}
    return bilevel_problem(levels, soft_item_losses, own, known)


#: The losses that the lower level's adversary weighs, of x1 beyond the prices, w, q and the data.
Items = Callable[[Array, Any, Array, Any], Array]


def bilevel_problem(
    levels: Levels,
    items: Items = lambda x1, w, q, data: item_losses(w, q, data),
    own: Callable[[Array, Any], Array] | None = None,
    known: Any = None,
) -> BilevelProblem:
    """`eq:dro_nested` with x1 = (log η, log λ, …), in a box; where there is no λ it is left out."""
    without = levels.without_ridge
    prices = 1 if without else 2
    rowwise = levels.risk.rowwise

    def upper(x1: Array, x2: Array, y1: Any, y2: Array, data: Any) -> Array:
        losses = item_losses(y1, x2, data["upper"])
        value = jnp.sum(x2 * losses)
        return value if own is None else value + own(x1[prices:], data["known"])

    def lower(x1: Array, y1: Any, y2: Array, data: Any) -> Array:
        """f~ of `eq:dro_lower`; a tail's weights cost by the share of each row."""
        eta, data = jnp.exp(x1[0]), data["lower"]
        even, price = (1 / len(y2), 1.0) if not rowwise else (data["share"], data["share"])
        gain = jnp.sum(y2 * items(x1[prices:], y1, y2, data))
        far = jnp.sum((y2 - even) ** 2 / price)
        value = gain - eta / 2 * far
        return value if without else value + jnp.exp(x1[1]) / 2 * jnp.sum(y1["coef"] ** 2)

    kept = _kept(levels)
    return BilevelProblem(
        upper,
        lower,
        x1=terms.Box(jnp.asarray(levels.low[kept]), jnp.asarray(levels.high[kept])),
        x2=_weights(levels.held_risk),
        y1=_parameters(levels),
        y2=_weights(levels.risk),
        data={
            "upper": as_arrays(levels.held, levels.held_risk),
            "lower": as_arrays(levels.train, levels.risk),
            "known": known,
        },
    )


def _kept(levels: Levels) -> np.ndarray:
    """Which entries of x there are in the problem: all, without log λ where there is no λ."""
    kept = np.arange(len(levels.low))
    return kept[kept != 1] if levels.without_ridge else kept


def _parameters(levels: Levels) -> Any:
    """Without a ridge none; else bounds that no solution reaches, as (λ/2)‖w‖² never exceeds the
    loss of w = 0, log K."""
    if levels.without_ridge:
        return terms.Free()
    least_l2, classes = float(np.exp(levels.low[1])), max(levels.train.classes, 2)
    parameters: Any = {"coef": terms.L2Ball(float(2 * np.sqrt(2 * np.log(classes) / least_l2)))}
    if levels.train.intercept:
        parameters["intercept"] = terms.Box(-INTERCEPT_BOUND, INTERCEPT_BOUND)
    return parameters


def start_point(levels: Levels) -> Point:
    """Even weights, all parameters zero, and the x at which the tuning begins."""
    even = lambda risk: jnp.asarray(risk.adversary.even)
    x = levels.starts[0][_kept(levels)]
    w = as_block(levels.train, np.zeros(levels.train.shape))
    return Point(x1=jnp.asarray(x), x2=even(levels.held_risk), y1=w, y2=even(levels.risk))
