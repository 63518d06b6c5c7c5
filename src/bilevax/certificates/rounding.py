"""How much of a value or a gradient may be rounding, so that a penalty does not magnify it unseen.

A number that is a small difference of large ones has the rounding of those, not its own. How large
that is can be seen: everything is computed again, a few times, with every operation rounded at
random (`rerounding`), and the data moved by half a unit in their last place, which they may have
lost when they were rounded. It is an estimate, but a good one.
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
from bilevax.certificates.effort import is_small
from bilevax.certificates.rerounding import Rerounding, share_of
from bilevax.problems import Form, Point
from bilevax.programs import entries
from bilevax.trees import Tree

# How often everything is computed again: many times where that costs nothing.
TIMES, TIMES_IF_SMALL = 3, 12
# The share of numbers whose rounding may be larger than is allowed for, if it is like that seen;
# and how many times as large the roundings made at random are as true ones.
MISSES, LARGER = 5e-5, 5.0
# Roundings that are allowed for where they are counted and not measured.
FEW = 3
# Data of more entries than this are not copied to be moved.
MOVABLE = 1 << 24


def rounding(
    evaluate: Callable[[Any, Point], Tree],
    parts: Callable[[Tree], Sequence[Tree]],
    problem: Form,
    point: Point,
    here: Tree,
    dtype: Any,
) -> list[Array]:
    """For each of `parts(here)`, with here = evaluate(problem, point), its size if it is rounding.

    What `evaluate` computes is rounded anew, and what `parts` makes of it is not.
    """
    count = times(problem, point)
    size = lambda part: trees.norm(part).astype(dtype)
    known = parts(here)

    arrays, rest = eqx.partition(problem.data, eqx.is_array)
    with_data = lambda arrays: problem.on(eqx.combine(arrays, rest))
    run = Rerounding(lambda arrays, p: evaluate(with_data(arrays), p), arrays, point)
    of_numbers, of_times = jax.random.split(_key(point))
    numbers = run.numbers(of_numbers)

    def change(key: Array) -> Array:
        there = parts(run(numbers, jax.random.bits(key), _moved(arrays, numbers, key), point))
        return jnp.stack([size(trees.subtract(a, b)) for a, b in zip(known, there)])

    # One after the other, so that the data are copied once and not every time.
    changes = lax.map(change, jax.random.split(of_times, count))
    eps = float(jnp.finfo(dtype).eps)
    noise = []
    for part, seen in zip(known, changes.T):
        usual = _allowed(entries(part) * count) * trees.norm(seen) / count**0.5
        # And no less than was seen: where a slope jumps, changes are not normal.
        noise.append(jnp.maximum(usual, jnp.max(seen)) + eps * size(part))
    return [jnp.where(jnp.isfinite(n), n, jnp.inf) for n in noise]


def times(problem: Form, point: Point) -> int:
    """How often a certificate of this point computes everything again."""
    return TIMES_IF_SMALL if is_small(problem, point) else TIMES


def _allowed(samples: int) -> float:
    """How many times the root mean square of the changes is allowed for: Student's t.

    So many numbers were seen. From few of them one knows little, and allows for more.
    """
    from scipy.special import stdtrit

    return -float(stdtrit(max(samples, 1), MISSES / 2)) / LARGER


def _key(point: Point) -> Array:
    """A key of the point's own, so that nobody can make data for the roundings to come."""
    words = [jnp.sum(_word(leaf), dtype=jnp.uint32) for leaf in jax.tree.leaves(point)]
    return jax.random.fold_in(jax.random.key(0), jnp.sum(jnp.stack(words), dtype=jnp.uint32))


def _word(leaf: Array) -> Array:
    return lax.bitcast_convert_type(jnp.asarray(leaf, jnp.float32), jnp.uint32)


def _moved(data: Tree, numbers: Array, key: Array) -> Tree:
    """Data with each number moved by up to half a unit in its last place."""
    floats, rest = eqx.partition(data, eqx.is_inexact_array)
    leaves, structure = jax.tree.flatten(floats)
    if sum(leaf.size for leaf in leaves) > MOVABLE:
        return data
    places = jax.random.bits(jax.random.fold_in(key, 0), (len(leaves),), jnp.uint32)
    half = lambda leaf, place: share_of(numbers, place, leaf) / 2
    moved = [leaf * (1 + half(leaf, place)) for leaf, place in zip(leaves, places)]
    return eqx.combine(jax.tree.unflatten(structure, moved), rest)
