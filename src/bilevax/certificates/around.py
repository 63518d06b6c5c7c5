"""Look around a point: where the lower level is solved again at an x nearby, does F fall?

ε-KKT admits points that nobody would take for a solution: a kink of the lower level's answer, a
local maximum of F along it. So the lower level is solved at a few x nearby. At an ε-KKT point of a
convex penalty function F could fall by ε times the way, and by what complementarity leaves open, ε
again; where it falls by more than twice that, the point is no candidate, and the better one is a
place to go on from.
"""

from __future__ import annotations

import dataclasses
from concurrent.futures import Future
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from bilevax import trees
from bilevax.certificates.effort import is_small
from bilevax.problems import Form, Point
from bilevax.programs import entries, quick
from bilevax.trees import Tree

# How far x moves, in shares of 1 + ‖x‖ or of its domain's diameter if that is less.
RADII = (1e-3, 1e-2, 1e-1)
# Of a problem that is not small, or has a point of more entries than this, fewer places are looked
# at: at two radii, and along one random direction.
FEW_ENTRIES, FEW_RADII, FEW_RANDOM = 300, RADII[1:], 1
# Besides up and down the slope of the upper level: along the axes, if there are at most so many,
# and along so many random directions.
AXES, RANDOM = 12, 3
PLACES = 48  # about
# A fall of so many times ε·(1 + the way) is explained.
EXPLAINED = 2.0
# Steps of a lower level's solution: as many as have in all this many entries to read, or so few.
LITTLE, LEAST_STEPS, MOST_STEPS = 20_000_000, 50, 2_000


@dataclasses.dataclass(frozen=True)
class Around:
    """What was seen around a point.

    Of `looks` places, at most `radius` away in x, the lower level was solved at `answered` well
    enough to compare. `fall` is by how much F is lower at the best of them, beyond what ε explains;
    it is zero if F falls nowhere. `point` is that place.
    """

    radius: float
    looks: int
    answered: int
    fall: float = 0.0
    point: Point | None = dataclasses.field(default=None, repr=False)

    @property
    def falls(self) -> bool:
        return self.fall > 0

    def __str__(self) -> str:
        places = f"{self.answered} of {self.looks} places within {self.radius:.3g} of x"
        if self.falls:
            return f"F falls nearby, by {self.fall:.3g} more than ε explains (looked at {places})"
        return f"F falls nowhere nearby (looked at {places})"


class Answer(NamedTuple):
    """What the lower level answers at another x, as far as it was solved.

    `objective` bounds F there from above: what is left of the lower level's gap and of violations
    is priced by the multipliers at hand. It is infinite if it cannot be had.
    """

    point: Point
    objective: Array


def look_around(
    definition: Any,
    problem: Form,
    point: Point,
    objective: float,
    epsilon: float,
    steps: int | None = None,
    share: float = 1.0,
) -> Around | None:
    """Look around a point with all its witnesses; None for a form that has no lower level.

    At each place the lower level is solved in at most so many steps, by default as many as cost
    little. With a `share`, places are nearer by that.
    """
    if not definition.moving or not np.isfinite(epsilon):
        return None
    steps = affordable_steps(problem, point) if steps is None else steps
    arguments = _arguments(definition, problem, point, (objective, epsilon, share), steps)
    seen = jax.device_get(_looks(*arguments))
    falls = seen.fall > 0
    return Around(
        radius=float(seen.radius),
        looks=int(seen.looks),
        answered=int(seen.answered),
        fall=float(seen.fall) if falls else 0.0,
        point=seen.best if falls else None,
    )


def affordable_steps(problem: Form, point: Point, taken: int = 0) -> int:
    """How many steps at each place cost little, or no more than `taken` gradients in all."""
    cheap = LITTLE // max(entries((problem, point)), 1)
    return min(max(max(cheap, taken) // PLACES, LEAST_STEPS), MOST_STEPS)


def compile_looks(definition: Any, problem: Form, point: Point) -> Future:
    """Compile, in a thread, what `look_around` runs."""
    return _looks.ahead(*_arguments(definition, problem, point, (0.0, 1.0, 1.0), 1))


def _arguments(
    definition: Any, problem: Form, point: Point, numbers: tuple[float, ...], steps: int
) -> tuple:
    dtype = trees.dtype_of(getattr(point, definition.moving[0]))
    arrays = [np.asarray(number, dtype) for number in numbers]
    return definition, problem, point, *arrays, np.asarray(steps)


class _Seen(NamedTuple):
    fall: Array
    best: Point
    radius: Array
    looks: Array
    answered: Array


@quick
def _looks(
    definition: Any,
    problem: Form,
    point: Point,
    objective: Array,
    epsilon: Array,
    share: Array,
    steps: Array,
) -> _Seen:
    term, x = getattr(problem, definition.moving[0]), getattr(point, definition.moving[0])
    many = is_small(problem, point) and entries(point) <= FEW_ENTRIES
    radii, count = (RADII, RANDOM) if many else (FEW_RADII, FEW_RANDOM)
    directions = _directions(x, definition.upper_slope(problem, point), count)
    scale = share * jnp.minimum(1 + trees.norm(x), term.diameter(x))
    rounded = 64 * jnp.finfo(objective.dtype).eps * (1 + jnp.abs(objective))
    blocks = lambda p: [getattr(p, name) for name in definition.moving]
    way = lambda there: trees.norm(trees.subtract(blocks(there), blocks(point)))
    answer = lambda place: definition.answer(problem, point, place, epsilon, steps)

    def look(carry: tuple, at: tuple[Tree, Array]) -> tuple[tuple, tuple[Array, Array]]:
        least, best = carry
        direction, radius = at
        place = term.project(trees.axpy(radius * scale, direction, x))
        there = answer(place)
        explained = EXPLAINED * epsilon * (1 + way(there.point))
        fall = objective - there.objective - explained - rounded
        away = trees.norm(trees.subtract(place, x))
        fall = jnp.where((away > 0) & ~jnp.isnan(fall), fall, -jnp.inf)
        best = jax.tree.map(lambda a, b: jnp.where(fall > least, a, b), there.point, best)
        answered = (away > 0) & jnp.isfinite(there.objective)
        return (jnp.maximum(fall, least), best), (away, answered)

    count = jax.tree.leaves(directions)[0].shape[0]
    places = [(directions, jnp.full(count, radius, objective.dtype)) for radius in radii]
    every = jax.tree.map(lambda *parts: jnp.concatenate(parts), *places)
    shapes = jax.eval_shape(lambda: answer(x).point)
    nowhere = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    first = (jnp.full_like(objective, -jnp.inf), nowhere)
    (fall, best), (away, answered) = lax.scan(look, first, every)
    return _Seen(fall, best, jnp.max(away), jnp.sum(away > 0), jnp.sum(answered))


def _directions(x: Tree, slope: Tree, count: int) -> Tree:
    """Unit vectors, stacked: down the slope and up, along axes and at random, both ways each."""
    layout = trees.Layout.of(x)
    g, size = layout.ravel(slope), sum(leaf.size for leaf in jax.tree.leaves(x))
    axes = np.eye(size)[: size if size <= AXES else 0]
    drawn = np.random.default_rng(0).normal(size=(count, size))
    drawn = drawn / np.maximum(np.linalg.norm(drawn, axis=1, keepdims=True), 1e-300)
    known = jnp.asarray(np.concatenate([axes, drawn]) if size > 1 else np.ones((1, size)), g.dtype)
    steep = trees.norm(g)
    down = jnp.where(steep > 0, -g / jnp.where(steep > 0, steep, 1), known[0])
    units = jnp.concatenate([down[None], known]) if size > 1 else known
    return jax.vmap(layout.unravel)(jnp.concatenate([units, -units]))
