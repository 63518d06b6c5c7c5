"""Doubt about the images of each group, and about which group an image is of.

Radii. The features z of group g's images may move: its distribution is any within r_g of the one
seen in W∞, so each image moves by at most r_g (Jo et al., arXiv 2510.02818, who take the largest
entry as the norm; here it is Euclid's). For a linear head w with scores s_k = w_kᵀz, label y,

    sup over ‖d‖ ≤ r of log Σ_k exp((w_k − w_y)ᵀ(z + d)) ≤ log Σ_k exp(s_k − s_y + r·‖w_k − w_y‖),

with equality for two classes. The right-hand side is convex in w and increases with r.

Soft groups (after Ghosal and Li, AAAI 2023). Of a row whose group is not known, the share of group
g is m_g = softmax(v·(z, e_y))_g, with e_y the label as a unit vector; of another row m is the unit
vector of its group. L_g is Σ_i m_ig·ℓ_ig / Σ_i m_ig over the rows i of a batch; a sum of shares
below 1 counts as 1. Features are given to v, and v does not shape them: no gradient goes through it
to the encoder.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from bilevax.arguments import tracing
from bilevax.deep.losses import cross_entropy, membership
from bilevax.deep.networks import scores


def as_radii(radii: Any) -> Array | None:
    return None if radii is None else jnp.asarray(radii, jnp.float32)


def check_radii(radii: Array | None, groups: int) -> None:
    """Refuse what is not one finite number ≥ 0 for each group."""
    if radii is None:
        return
    if radii.shape != (groups,):
        raise ValueError(
            f"radii must be one number for each of the {groups} groups, not an array of shape "
            f"{radii.shape}"
        )
    if not tracing(radii) and not (np.isfinite(radii) & (np.asarray(radii) >= 0)).all():
        raise ValueError(f"radii must be finite and ≥ 0, not {np.asarray(radii).tolist()}")


def worst_losses(features: Array, head: Array, label: Array, radii: Array) -> Array:
    """The bound above of every row with the radius of every group, [rows, groups]."""
    logits = scores(features, head)
    own = jnp.take_along_axis(logits, label[:, None], axis=1)
    moved = logits[:, None, :] + radii[None, :, None] * distances(head)[label][:, None, :]
    return jax.nn.logsumexp(moved, axis=2) - own


def distances(head: Array) -> Array:
    """‖w_k − w_y‖ of all pairs of rows; where it is 0, so is its derivative."""
    square = jnp.sum((head[:, None] - head[None]) ** 2, axis=2)
    return jnp.where(square > 0, jnp.sqrt(jnp.where(square > 0, square, 1)), 0)


def new_predictor(groups: int, classes: int, features: int) -> Array:
    """v = 0, with which every group has the same share."""
    return jnp.zeros((groups, features + classes), jnp.float32)


def group_scores(features: Array, label: Array, predictor: Array) -> Array:
    """v·(z, e_y), [rows, groups]."""
    given = jax.nn.one_hot(label, predictor.shape[1] - features.shape[1], dtype=jnp.float32)
    return scores(jnp.concatenate([lax.stop_gradient(features), given], axis=1), predictor)


def shares(features: Array, label: Array, group: Array, predictor: Array) -> Array:
    """m: the share that every row has in every group."""
    guessed = jax.nn.softmax(group_scores(features, label, predictor), axis=1)
    return jnp.where(group[:, None] < 0, guessed, membership(group, predictor.shape[0]))


def group_entropy(features: Array, label: Array, group: Array, predictor: Array) -> Array:
    """The mean cross entropy of m on rows whose groups are known."""
    return jnp.mean(cross_entropy(group_scores(features, label, predictor), group))
