"""The meta-learner's problem as a `bilevax.BilevelProblem`, for any of the library's solvers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from bilevax import terms
from bilevax.learn._tasks import Part
from bilevax.problems import BilevelProblem, Point, meta_learning


def softmax_losses(y1: Array, rows: dict[str, Array]) -> Array:
    """log Σ exp(s) − s of the label, s = X·y1, of each row."""
    scores = rows["features"] @ y1.T
    own = jnp.take_along_axis(scores, rows["target"][:, None], axis=1)[:, 0]
    return jax.nn.logsumexp(scores, axis=1) - own


def meta_problem(tasks: Sequence[Sequence[Part]], learner: Any) -> tuple[BilevelProblem, Point]:
    """`eq:DRO_meta_tuning` for (training, validation) rows of tasks, and a start."""
    (low, high), lam = learner.eta_bounds, tuple(map(float, learner.lam_bounds))
    given: dict[str, Any] = {
        "share": float(learner.share),
        "w": terms.Ridge(float(learner.l2)) if learner.l2 else None,
        "train_share": learner.train_share,
        "lam": lam,
        "eta": float(np.sqrt(low * high)),
        "most_eta": float(high),
        "least_eta": float(low),
    }
    classes = len(learner.classes_) if learner.loss == "logistic" else 0
    if classes <= 2:
        pairs = [[(part.x, part.target) for part in task] for task in tasks]
        return meta_learning(
            pairs, loss=learner.loss, intercept=bool(learner.fit_intercept), **given
        )
    ones = lambda x: np.column_stack([x, np.ones(len(x))]) if learner.fit_intercept else x
    pairs = [[{"features": ones(part.x), "target": part.target} for part in task] for task in tasks]
    width = pairs[0][0]["features"].shape[1]
    return meta_learning(
        pairs, loss=softmax_losses, parameters=np.zeros((classes, width)), y1=terms.Free(), **given
    )


def meta_point(learner: Any) -> Point:
    """The point of a fitted learner in the blocks of `meta_problem`, with its witnesses."""
    classes = len(learner.classes_) if learner.loss == "logistic" else 0

    def parameters(coef: np.ndarray, intercept: np.ndarray) -> np.ndarray:
        """As the blocks have them: a vector, or a matrix for three classes or more."""
        both = [coef, intercept[..., None]] if learner.fit_intercept else [coef]
        flat = np.concatenate(both, axis=-1)
        return flat[..., 0, :] if classes == 2 else flat

    z1, z2 = learner.witnesses_["z1"], learner.witnesses_["z2"]
    x1 = {
        "w": parameters(learner.coef_, np.asarray(learner.intercept_)),
        "eta": np.asarray(learner.eta_),
        "lam": np.asarray(learner.lam_),
    }
    blocks = {
        "x1": x1,
        "x2": _padded(learner.validation_weights_),
        "y1": parameters(learner.task_coef_, learner.task_intercept_),
        "y2": _padded(learner.task_weights_),
        "z1": z1 if classes > 2 else z1[:, 0],
        "z2": _padded(z2),
        "rho": np.asarray(learner.witnesses_["rho"]),
    }
    return Point(**jax.tree.map(jnp.asarray, blocks))


def _padded(weights: Sequence[np.ndarray]) -> np.ndarray:
    """One row a task; rows that a task has not weigh 0."""
    full = np.zeros((len(weights), max(map(len, weights))))
    for k, own in enumerate(weights):
        full[k, : len(own)] = own
    return full
