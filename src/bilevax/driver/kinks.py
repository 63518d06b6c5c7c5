"""A function whose gradient jumps, seen by its slopes on both sides of where a run stands still."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from bilevax import trees
from bilevax.problems import Form, Point
from bilevax.problems.form import Call
from bilevax.programs import quick
from bilevax.trees import Tree

# Slopes are compared in so many directions, at these distances, in units of 1 + the size of an
# entry, and at this share of them.
WAYS, DISTANCES, NEARER = 8, (1e-3, 1e-4, 1e-5), 0.01
# Between the two distances the difference of a smooth function's slopes falls by that share, and
# that of slopes on both sides of a kink stays. It is one where it is this share of what it was, and
# this share of the slopes.
STAYS, NOTABLE = 0.5, 1e-3


def kink(problem: Form, point: Point) -> str:
    """A clause that says which function's gradient jumps at a point, and where; empty if none."""
    found = jax.device_get(_jumps(problem, point))
    for call, (jumps, size, difference) in zip(problem.all_calls(point), found):
        if jumps:
            return f"the gradient of {call.name} jumps by {size:.2g} at {_entry(call, difference)}"
    return ""


@quick
def _jumps(problem: Form, point: Point) -> list[tuple[Array, Array, Tree]]:
    """For every call whether its gradient jumps, by how much, and that difference."""
    return [_jump(problem, call) for call in problem.all_calls(point)]


def _jump(problem: Form, call: Call) -> tuple[Array, Array, Tree]:
    blocks = tuple(call.blocks.values())
    layout = trees.Layout.of(blocks)
    at = layout.ravel(blocks)
    total = lambda u: trees.total(call(*layout.unravel(u), *problem.extra))
    slope = jax.grad(total)

    def across(way: Array) -> tuple[Array, Array]:
        above, below = slope(at + way), slope(at - way)
        return above - below, trees.norm(above) + trees.norm(below)

    def look(drawn: tuple[Array, Array]) -> tuple[Array, Array, Array]:
        key, distance = drawn
        way = distance * (1 + jnp.abs(at)) * jax.random.normal(key, at.shape, at.dtype)
        (far, _), (near, slopes) = across(way), across(NEARER * way)
        size = trees.norm(near)
        jumps = (size > STAYS * trees.norm(far)) & (size > NOTABLE * slopes)
        return jumps, jnp.where(jumps, size, 0), near

    keys = jax.random.split(jax.random.key(0), WAYS * len(DISTANCES))
    distances = jnp.asarray(np.repeat(DISTANCES, WAYS), at.dtype)
    jumps, sizes, near = lax.map(look, (keys, distances))
    worst = jnp.argmax(sizes)
    return jnp.any(jumps), sizes[worst], layout.unravel(near[worst])


def _entry(call: Call, difference: Any) -> str:
    """The entry in which the gradient jumps most, and its value."""
    best, words = -1.0, ""
    for (name, block), part in zip(call.blocks.items(), difference):
        leaves = jax.tree_util.tree_leaves_with_path(block)
        for (path, leaf), change in zip(leaves, jax.tree.leaves(part)):
            sizes, values = np.abs(np.atleast_1d(change)), np.atleast_1d(np.asarray(leaf))
            if not sizes.size or np.max(sizes) <= best:
                continue
            where = np.unravel_index(np.argmax(sizes), sizes.shape)
            index = "" if np.ndim(leaf) == 0 else str([int(i) for i in where])
            best = float(sizes[where])
            words = f"{name}{jax.tree_util.keystr(path)}{index} = {values[where]:.3g}"
    return words
