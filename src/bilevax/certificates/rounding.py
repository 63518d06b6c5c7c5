"""How much of a gradient may be rounding, so that a penalty does not magnify it unseen."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array

from bilevax import trees
from bilevax.trees import Tree

# Roundings allowed for in one evaluation.
ROUNDINGS = 8


def gradient_and_noise(
    gradient: Callable[..., tuple[Tree, ...]], blocks: tuple[Tree, ...]
) -> tuple[tuple[Tree, ...], tuple[Array, ...]]:
    """A gradient at some blocks, and for each of its parts the size that rounding may have.

    A gradient that is a small difference of large numbers has the rounding of those, not its own.
    How large they are shows when every entry of the point moves by the same small share up or down,
    at random: that is what rounding does to them, only larger. Costs a second gradient.
    """
    dtype = trees.dtype_of(blocks)
    eps = float(jnp.finfo(dtype).eps)
    share = eps**0.5
    leaves, structure = jax.tree.flatten(blocks)
    keys = jax.random.split(jax.random.key(0), len(leaves))
    moved = [
        leaf * (1 + share * jax.random.rademacher(key, leaf.shape, leaf.dtype))
        for leaf, key in zip(leaves, keys)
    ]
    here = gradient(*blocks)
    there = gradient(*jax.tree.unflatten(structure, moved))

    def noise(a: Tree, b: Tree) -> Array:
        sensitivity = trees.norm(trees.subtract(a, b)) / share
        # Beyond the domain a function may have no gradient; then its own size must do.
        sensitivity = jnp.where(jnp.isfinite(sensitivity), sensitivity, 0)
        return (ROUNDINGS * eps * (sensitivity + trees.norm(a))).astype(dtype)

    return here, tuple(noise(a, b) for a, b in zip(here, there))
