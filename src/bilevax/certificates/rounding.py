"""How much of a value or a gradient may be rounding, so that a penalty does not magnify it unseen.

A number that is a small difference of large ones has the rounding of those, not its own. How large
that is can be seen: everything is evaluated again where every entry of the point and of the data
has moved by a few units in its last place, up or down at random. Then all roundings on the way fall
anew, and what the data lost when they were rounded counts too. It is an estimate: large constants
written into a function that cancel exactly stay unseen.
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

# Moves by which rounding is measured, and how many units in the last place they have, about.
MOVES, UNITS = 3, 4
# How many times the root mean square of the changes is allowed for.
SAFETY = 2.0
# Roundings of a number that are allowed for where they are counted and not measured.
ROUNDINGS = 8
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
    size = lambda part: trees.norm(part).astype(dtype)

    def change(key: Array) -> Array:
        there = evaluate(*_nearby(problem, point, key, eps))
        return jnp.stack([size(trees.subtract(a, b)) for a, b in zip(here, there)])

    # One after the other, so that the data are copied once and not for all moves.
    changes = lax.map(change, jax.random.split(_key(point), MOVES))
    # In shares of the largest, whose squares are no larger than 1.
    largest = jnp.max(changes, axis=0)
    shares = changes / jnp.where(largest > 0, largest, 1)
    measured = SAFETY * largest * jnp.sqrt(jnp.mean(shares**2, axis=0))
    noise = measured + eps * jnp.stack([size(part) for part in here])
    return list(jnp.where(jnp.isfinite(noise), noise, jnp.inf))


def _key(point: Point) -> Array:
    """A key of the point's own, so that nobody can make data for the moves that will be made."""
    words = [jnp.sum(_word(leaf), dtype=jnp.uint32) for leaf in jax.tree.leaves(point)]
    return jax.random.fold_in(jax.random.key(0), jnp.sum(jnp.stack(words), dtype=jnp.uint32))


def _word(leaf: Array) -> Array:
    return lax.bitcast_convert_type(jnp.asarray(leaf, jnp.float32), jnp.uint32)


def _nearby(problem: Form, point: Point, key: Array, eps: float) -> tuple[Any, Point]:
    """The problem with its data moved a little, and a point near the given one in its domain."""
    of_point, of_data = jax.random.split(key)
    moved = _moved({name: block for name, _, block in problem.terms(point)}, of_point, eps)
    inside = {name: term.project(moved[name]) for name, term, _ in problem.terms(point)}
    return _with_data_moved(problem, of_data, eps), point.replace(**inside)


def _moved(tree: Tree, key: Array, eps: float) -> Tree:
    """Every number moved by 1 to `UNITS` times its rounding, up or down, both at random."""
    leaves, structure = jax.tree.flatten(tree)
    bits = jax.random.bits(key, (sum(leaf.size for leaf in leaves),), jnp.uint8)
    moved, begin = [], 0
    for leaf in leaves:
        own = bits[begin : begin + leaf.size].reshape(leaf.shape).astype(jnp.int8)
        units = (1 + (own >> 1) % UNITS) * (2 * (own & 1) - 1)
        moved.append(_moved_by(leaf, units, eps))
        begin += leaf.size
    return jax.tree.unflatten(structure, moved)


def _moved_by(leaf: Array, units: Array, eps: float) -> Array:
    if jnp.issubdtype(leaf.dtype, jnp.inexact):
        own = jnp.finfo(leaf.dtype).eps
        return leaf * (1 + own * units.astype(leaf.dtype))
    # An integer is rounded where it becomes a float that has no room for all of its digits.
    wide = leaf.astype(float)
    rounded = jnp.abs(wide) * eps > 1
    return leaf + jnp.where(rounded, jnp.round(wide * eps * units), 0).astype(leaf.dtype)


def _with_data_moved(problem: Any, key: Array, eps: float) -> Any:
    """The problem with the numbers of its data moved."""
    numbers, rest = eqx.partition(problem.data, _is_number)
    if not 0 < sum(leaf.size for leaf in jax.tree.leaves(numbers)) <= MOVABLE:
        return problem
    moved = eqx.combine(_moved(numbers, key, eps), rest)
    return eqx.tree_at(lambda p: p.data, problem, moved)


def _is_number(leaf: Any) -> bool:
    """Whether a leaf is an array of numbers; integers with few digits are none that are rounded."""
    if eqx.is_inexact_array(leaf):
        return True
    return eqx.is_array(leaf) and jnp.issubdtype(leaf.dtype, jnp.integer) and leaf.dtype.itemsize > 2
