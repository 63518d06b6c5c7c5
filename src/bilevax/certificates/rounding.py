"""How much of a gradient may be rounding, so that a penalty does not magnify it unseen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array

from bilevax import trees
from bilevax.problems.stochastic import on
from bilevax.terms import PerLeaf, Term
from bilevax.trees import Tree

# Roundings allowed for in one evaluation.
ROUNDINGS = 8
# Data of more entries than this are not copied to be moved; the point's own moves must do.
MOVABLE = 1 << 24


def gradient_and_noise(
    gradient: Callable[[Any], Callable[..., tuple[Tree, ...]]],
    problem: Any,
    terms: tuple[Term | None, ...],
    blocks: tuple[Tree, ...],
) -> tuple[tuple[Tree, ...], tuple[Array, ...]]:
    """A gradient at some blocks, and for each of its parts the size that rounding may have.

    A gradient that is a small difference of large numbers has the rounding of those, not its own.
    How large they are shows when every entry of the point and of the data moves a little, up or
    down at random, the point within its domain: that is what rounding does to them, only larger.
    Costs a second gradient. It is an estimate: large constants written into a function that cancel
    exactly stay unseen.
    """
    dtype = trees.dtype_of(blocks)
    eps = float(jnp.finfo(dtype).eps)
    share = eps**0.5
    point_key, data_key = jax.random.split(jax.random.key(0))
    steps = jax.tree.map(lambda leaf: share * (1 + jnp.abs(leaf)), blocks)
    moved = PerLeaf(terms).project(_moved(blocks, steps, point_key))
    here, there = (
        gradient(problem)(*blocks),
        gradient(_with_data_moved(problem, share, data_key))(*moved),
    )

    def noise(a: Tree, b: Tree) -> Array:
        sensitivity = trees.norm(trees.subtract(a, b)) / share
        size = ROUNDINGS * eps * (sensitivity + trees.norm(a))
        return jnp.where(jnp.isfinite(size), size, jnp.inf).astype(dtype)

    return here, tuple(noise(a, b) for a, b in zip(here, there))


def _moved(tree: Tree, steps: Tree, key: Array) -> Tree:
    """Every entry moved by its step, up or down at random."""
    leaves, structure = jax.tree.flatten(tree)
    keys = jax.random.split(key, max(len(leaves), 1))
    moved = [
        leaf + step * jax.random.rademacher(k, leaf.shape, leaf.dtype)
        for leaf, step, k in zip(leaves, jax.tree.leaves(steps), keys)
    ]
    return jax.tree.unflatten(structure, moved)


def _with_data_moved(problem: Any, share: float, key: Array) -> Any:
    """The problem with the floating arrays of its data moved by a share of themselves."""
    floats, rest = eqx.partition(problem.data, eqx.is_inexact_array)
    if not 0 < sum(leaf.size for leaf in jax.tree.leaves(floats)) <= MOVABLE:
        return problem
    floats = _moved(floats, jax.tree.map(lambda leaf: share * leaf, floats), key)
    return on(problem, eqx.combine(floats, rest))
