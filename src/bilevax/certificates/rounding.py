"""How much of a value or a gradient may be rounding, so that a penalty does not magnify it unseen.

A gradient that is a small difference of large numbers has the rounding of those, not its own. How
large they are shows when every entry of the point and of the data moves a little, up or down at
random, the point within its domain: that is what rounding does to them, only larger. So everything
is evaluated again where everything has moved, twice, since the changes of one move may cancel. It
is an estimate: large constants written into a function that cancel exactly stay unseen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from bilevax import trees
from bilevax.problems import Form, Point
from bilevax.trees import Tree

# Roundings allowed for in one evaluation, and moves by which their size is measured.
ROUNDINGS, MOVES = 8, 2
# Data of more entries than this are not copied to be moved; the point's own moves must do.
MOVABLE = 1 << 24


def rounding(
    evaluate: Callable[[Any, Point], Sequence[Tree]],
    problem: Form,
    point: Point,
    here: Sequence[Tree],
    dtype: Any,
) -> list[Array]:
    """For each part of `here` = evaluate(problem, point), the size that rounding may have in it."""
    eps = float(jnp.finfo(dtype).eps)
    share = eps**0.5
    size = lambda part: trees.norm(part).astype(dtype)

    def change(key: Array) -> Array:
        there = evaluate(*_nearby(problem, point, share, key))
        return jnp.stack([size(trees.subtract(a, b)) for a, b in zip(here, there)])

    # One after the other, so that the data are copied once and not for all moves.
    changes = lax.map(change, jax.random.split(jax.random.key(0), MOVES))
    most = jnp.max(changes, axis=0) / share
    noise = ROUNDINGS * eps * (most + jnp.stack([size(part) for part in here]))
    return list(jnp.where(jnp.isfinite(noise), noise, jnp.inf))


def _nearby(problem: Form, point: Point, share: float, key: Array) -> tuple[Any, Point]:
    """The problem with its data moved a little, and a point near the given one in its domain."""
    point_key, data_key = jax.random.split(key)
    parts = {name: block for name, _, block in problem.terms(point)}
    steps = jax.tree.map(lambda leaf: share * (1 + jnp.abs(leaf)), parts)
    moved = _moved(parts, steps, point_key)
    inside = {name: term.project(moved[name]) for name, term, _ in problem.terms(point)}
    return _with_data_moved(problem, share, data_key), point.replace(**inside)


def _moved(tree: Tree, steps: Tree, key: Array) -> Tree:
    """Every entry moved by 0.5 to 1.5 of its step, up or down, both at random.

    Entries that cancel each other do so after moves of one size; after moves of many they do not.
    """
    leaves, structure = jax.tree.flatten(tree)
    bits = jax.random.bits(key, (sum(leaf.size for leaf in leaves),), jnp.uint16)
    moved, begin = [], 0
    for leaf, step in zip(leaves, jax.tree.leaves(steps)):
        own = bits[begin : begin + leaf.size].reshape(leaf.shape).astype(leaf.dtype)
        far = own / 32768 - 1  # from −1 to 1
        moved.append(leaf + step * (far + jnp.where(far < 0, -0.5, 0.5).astype(leaf.dtype)))
        begin += leaf.size
    return jax.tree.unflatten(structure, moved)


def _with_data_moved(problem: Any, share: float, key: Array) -> Any:
    """The problem with the floating arrays of its data moved by a share of themselves."""
    floats, rest = eqx.partition(problem.data, eqx.is_inexact_array)
    if not 0 < sum(leaf.size for leaf in jax.tree.leaves(floats)) <= MOVABLE:
        return problem
    floats = _moved(floats, jax.tree.map(lambda leaf: share * leaf, floats), key)
    moved = eqx.combine(floats, rest)
    return eqx.tree_at(lambda p: p.data, problem, moved)
