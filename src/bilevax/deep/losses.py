"""Losses of rows, and their means over groups."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array


def cross_entropy(logits: Array, label: Array) -> Array:
    """−log of the share that softmax gives to the label, row by row."""
    own = jnp.take_along_axis(logits, label[:, None], axis=1)[:, 0]
    return jax.nn.logsumexp(logits, axis=1) - own


def membership(group: Array, groups: int) -> Array:
    """1 where a row is of a group, [rows, groups]; all 0 for a row whose group is not known."""
    return jax.nn.one_hot(group, groups, dtype=jnp.float32)


def group_means(values: Array, group: Array, groups: int) -> Array:
    """The mean of each group's rows; 0 for a group without any."""
    return means(values, membership(group, groups))


def means(values: Array, member: Array) -> Array:
    """The means of the rows' values, or of one column of values a group, by their shares."""
    if values.ndim == 1:
        total = jnp.matmul(values, member, precision="highest")
    else:
        total = jnp.sum(values * member, axis=0)
    return total / jnp.maximum(member.sum(axis=0), 1)
