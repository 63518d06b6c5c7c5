"""The tuning problem as a `bilevax.BilevelProblem`, for any of the library's solvers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from bilevax import terms
from bilevax.learn._certificate import INTERCEPT_BOUND
from bilevax.learn._risk import Risk
from bilevax.learn._rows import Rows
from bilevax.learn._tuning import STARTS, Levels
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
    return arrays if risk.group is None else {**arrays, "group": risk.group}


def row_losses(w: dict[str, Array], data: dict[str, Array]) -> Array:
    """ℓ of each row."""
    scores = data["x"] @ w["coef"].T
    if "intercept" in w:
        scores = scores + w["intercept"][None, :]
    if scores.shape[1] == 1:
        sign = (2 * data["label"] - 1).astype(scores.dtype)
        return jnp.logaddexp(0.0, -sign * scores[:, 0])
    own = jnp.take_along_axis(scores, data["label"][:, None], axis=1)[:, 0]
    return jax.nn.logsumexp(scores, axis=1) - own


def item_losses(w: Any, q: Array, data: Any) -> Array:
    """The losses that the adversary weighs with q: mean losses of groups, or losses of rows."""
    losses = row_losses(w, data)
    if "group" not in data:
        return losses
    return jax.ops.segment_sum(data["share"] * losses, data["group"], len(q))


def _weights(risk: Risk) -> terms.Term:
    """The weights that the adversary may choose."""
    return terms.Simplex() if risk.group is not None else terms.CappedSimplex(risk.adversary.cap)


def bilevel_problem(levels: Levels) -> BilevelProblem:
    """`eq:dro_nested` with x1 = (log η, log λ), in a box; where there is no λ, x1 = (log η)."""
    without = levels.without_ridge

    def upper(x1: Array, x2: Array, y1: Any, y2: Array, data: Any) -> Array:
        return jnp.sum(x2 * item_losses(y1, x2, data["upper"]))

    def lower(x1: Array, y1: Any, y2: Array, data: Any) -> Array:
        """f~ of `eq:dro_lower`; a tail's weights cost by the share of each row."""
        eta, data = jnp.exp(x1[0]), data["lower"]
        grouped = "group" in data
        even, price = (1 / len(y2), 1.0) if grouped else (data["share"], data["share"])
        gain = jnp.sum(y2 * item_losses(y1, y2, data))
        far = jnp.sum((y2 - even) ** 2 / price)
        value = gain - eta / 2 * far
        return value if without else value + jnp.exp(x1[1]) / 2 * jnp.sum(y1["coef"] ** 2)

    count = 1 if without else 2
    return BilevelProblem(
        upper,
        lower,
        x1=terms.Box(jnp.asarray(levels.low[:count]), jnp.asarray(levels.high[:count])),
        x2=_weights(levels.held_risk),
        y1=_parameters(levels),
        y2=_weights(levels.risk),
        data={
            "upper": as_arrays(levels.held, levels.held_risk),
            "lower": as_arrays(levels.train, levels.risk),
        },
    )


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
    """Even weights, all parameters zero, and the (η, λ) at which the tuning begins."""
    even = lambda risk: jnp.asarray(risk.adversary.even)
    x = np.clip(np.log(STARTS[0]), levels.low, levels.high)
    w = as_block(levels.train, np.zeros(levels.train.shape))
    x = x[:1] if levels.without_ridge else x
    return Point(x1=jnp.asarray(x), x2=even(levels.held_risk), y1=w, y2=even(levels.risk))
