"""The penalty problem once its adversaries have answered: smooth convex problems, part by part.

Where f~ has the curvature −c·I in y2, and f in x2, the best answers are one prox step away:

    y2(x1, y) = argmax over v of f~(x1, y, v) = prox_{s·f~3}(v + s·∇f~1(x1, y, v)),  s = 1/c,

from any v. With φ~(x1, y) = f~(x1, y, y2(x1, y)), ψ(x1, y) = max over x2 of f(x1, x2, y) and an f
without y2, the two levels of P_ρ fall apart:

    φ(x1) = min over y1 of Ψ  −  ρ·min over z1 of φ~(x1, z1),   Ψ = ψ(x1, y1) + ρ·φ~(x1, y1)

Both are smooth and convex, with slopes by Danskin's theorem: those of f and f~ at the answers.
Their derivatives go through the prox. Of a linear f the best answer is not smooth: f gets the
curvature μ around a center, and f~ a little, ν, as in the method of multipliers; the centers follow
the answers. So an f~ without curvature, at η = 0, does no harm either.

Often y1 is made of parts, such as tasks, that nothing couples but x1: then Hessians are blocks.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from bilevax import trees
from bilevax.problems import BilevelProblem, Point
from bilevax.problems.constants import sample_domain
from bilevax.problems.reformulations import at_both
from bilevax.programs import quick
from bilevax.terms import Term
from bilevax.terms.sets import Free
from bilevax.trees import Layout, Tree

# So many columns of Hessians are computed at once.
AT_ONCE = 128
# Curvature that differs from c·I by more than this share of it is another one.
ALIKE = 1e-6
# It is looked at so many random places, and at each for so many random halves of the parts, whether
# they are coupled with the others; answers go from their centers by about one over this, at most.
PLACES, HALVES, STIFF = 4, 6, 1e6


@dataclasses.dataclass(frozen=True)
class Parts:
    """y1 as a matrix with a row for each part."""

    structure: object
    shapes: tuple[tuple[int, ...], ...]
    count: int

    @classmethod
    def of(cls, y1: Tree, count: int) -> Parts:
        leaves, structure = jax.tree.flatten(y1)
        return cls(structure, tuple(leaf.shape for leaf in leaves), count)

    @property
    def width(self) -> int:
        return sum(map(math.prod, self.shapes)) // self.count

    def ravel(self, y1: Tree) -> Array:
        rows = [leaf.reshape(self.count, -1) for leaf in jax.tree.leaves(y1)]
        return jnp.concatenate(rows, axis=1)

    def unravel(self, rows: Array) -> Tree:
        leaves, begin = [], 0
        for shape in self.shapes:
            end = begin + math.prod(shape) // self.count
            leaves.append(rows[:, begin:end].reshape(shape))
            begin = end
        return jax.tree.unflatten(self.structure, leaves)


class Slopes(eqx.Module):
    """∇φ, and the slopes of Ψ in y1 and of φ~ in z1, stacked: (2, parts, width)."""

    of_x1: Array
    of_parts: Array


class Answered(eqx.Module):
    """The problem with its adversaries' answers, for x1 in a flat vector and both of y1 and z1."""

    problem: BilevelProblem
    rho: Array
    mu: Array
    nu: Array
    x2_center: Tree
    y2_center: Tree
    layout: Layout = eqx.field(static=True)
    parts: Parts = eqx.field(static=True)

    def y2_at(self, x1: Tree, y1: Tree) -> Tree:
        """The lower level's answer, with the curvature ν on top."""
        assert self.problem.y2 is not None
        slope = lambda y2: jax.grad(self.problem.smooth_lower, argnums=2)(x1, y1, y2)
        return _answer(slope, self.problem.y2, self.y2_center, self.nu)

    def x2_at(self, x1: Tree, y1: Tree) -> Tree:
        """The upper level's answer, with the curvature μ on top."""
        if self.problem.x2 is None:
            return None
        y2 = self.y2_center  # f does not read it
        slope = lambda x2: jax.grad(self.problem.smooth_upper, argnums=1)(x1, x2, y1, y2)
        return _answer(slope, self.problem.x2, self.x2_center, self.mu)

    def slopes(self, x1: Array, both: Array) -> Slopes:
        """By Danskin's theorem, those of f and f~ at the answers."""
        x1, y1, z1 = self._blocks(x1, both)
        lower = lambda y1: self.problem.lower_gradient(x1, y1, self.y2_at(x1, y1))[:2]
        (in_x1, in_y1), (in_x1_too, in_z1) = _at_each(lower, y1, z1)
        above, _, of_y1, _ = self.problem.upper_gradient(x1, self.x2_at(x1, y1), y1, self.y2_center)
        of_x1 = trees.axpy(self.rho, trees.subtract(in_x1, in_x1_too), above)
        of_y1 = trees.axpy(self.rho, in_y1, of_y1)
        of_parts = jnp.stack([self.parts.ravel(of_y1), self.parts.ravel(in_z1)])
        return Slopes(self.layout.ravel(of_x1), of_parts)

    def in_parts(self, x1: Array, both: Array) -> Array:
        """The Hessians of Ψ in y1 and of φ~ in z1, part by part: (2, parts, width, width)."""
        width = both.shape[-1]

        def column(entry: Array) -> Array:
            unit = jax.nn.one_hot(entry, width, dtype=both.dtype)
            way = jnp.broadcast_to(unit, both.shape)
            return jax.jvp(lambda v: self.slopes(x1, v).of_parts, (both,), (way,))[1]

        columns = lax.map(column, jnp.arange(width), batch_size=AT_ONCE)
        return _symmetric(jnp.moveaxis(columns, 0, -1))

    def in_x1(self, x1: Array, both: Array) -> Slopes:
        """How all slopes change with x1, a last axis for its entries."""

        def column(entry: Array) -> Slopes:
            unit = jax.nn.one_hot(entry, x1.size, dtype=x1.dtype)
            return jax.jvp(lambda v: self.slopes(v, both), (x1,), (unit,))[1]

        columns = lax.map(column, jnp.arange(x1.size), batch_size=AT_ONCE)
        return jax.tree.map(lambda leaf: jnp.moveaxis(leaf, 0, -1), columns)

    def values(self, x1: Array, both: Array) -> tuple[Array, Array, Array]:
        """ψ with x1's term, and φ~ at y1 and at z1."""
        x1, y1, z1 = self._blocks(x1, both)
        x2 = self.x2_at(x1, y1)
        above = self.problem.upper_value(x1, x2, y1, self.y2_center)
        if x2 is not None:
            above -= self.mu / 2 * trees.square(trees.subtract(x2, self.x2_center))

        def lower(y1: Tree) -> Array:
            y2 = self.y2_at(x1, y1)
            far = trees.square(trees.subtract(y2, self.y2_center))
            return self.problem.lower_value(x1, y1, y2) - self.nu / 2 * far

        return above, *_at_each(lower, y1, z1)

    def point(self, x1: Array, both: Array) -> Point:
        """With the answers: z2 and x2 to y1, and y2 to z1, the lower level's solution."""
        x1, y1, z1 = self._blocks(x1, both)
        z2, y2 = _at_each(lambda y1: self.y2_at(x1, y1), y1, z1)
        return Point(x1=x1, x2=self.x2_at(x1, y1), y1=y1, y2=y2, z1=z1, z2=z2, rho=self.rho)

    def _blocks(self, x1: Array, both: Array) -> tuple[Tree, Tree, Tree]:
        return self.layout.unravel(x1), *(self.parts.unravel(rows) for rows in both)


def _at_each(function: Callable[[Tree], Tree], y1: Tree, z1: Tree) -> tuple[Tree, Tree]:
    """A function at both places, by one batched call."""
    stacked = at_both(function, (y1,), (z1,))
    first, second = (jax.tree.map(lambda leaf, k=k: leaf[k], stacked) for k in (0, 1))
    return first, second


def _symmetric(matrices: Array) -> Array:
    """Without the derivatives that are not finite, as those of |y|^1.5 are at zero."""
    known = jnp.where(jnp.isfinite(matrices), matrices, 0)
    return (known + jnp.swapaxes(known, -1, -2)) / 2


def _curvature(slope: Callable[[Tree], Tree], at: Tree) -> Array:
    """c, where the slope changes by −c times the way."""
    way = _some_way(at)
    bent = jax.jvp(slope, (at,), (way,))[1]
    return -trees.dot(way, bent) / trees.square(way)


def _some_way(like: Tree) -> Tree:
    """A direction with no pattern."""
    wave = lambda leaf: jnp.sin(1 + jnp.arange(leaf.size, dtype=leaf.dtype) ** 2)
    return jax.tree.map(lambda leaf: wave(leaf).reshape(leaf.shape), like)


def _answer(slope: Callable[[Tree], Tree], term: Term, center: Tree, mu: Array) -> Tree:
    """argmax over v of a concave function of constant curvature, less (μ/2)‖v − center‖².

    The first step of the prox leads there; a second one, from there, leads there again, and has the
    right derivatives.
    """
    pull = slope(center)
    step = lax.stop_gradient(1 / (jnp.maximum(_curvature(slope, center), 0) + mu))
    first = lax.stop_gradient(term.prox(trees.axpy(step, pull, center), step))
    pull = trees.axpy(-mu, trees.subtract(first, center), slope(first))
    return term.prox(trees.axpy(step, pull, first), step)


def parts_of(problem: BilevelProblem, start: Point) -> int:
    """Of how many parts y1 is, if both adversaries have such answers; 0 if they have not."""
    free = isinstance(problem.y1, Free)
    if not free or problem.y2 is None or problem.sampled:
        return 0
    lengths = {leaf.shape[:1] for leaf in jax.tree.leaves(start.y1)}
    count = lengths.pop()[0] if len(lengths) == 1 and lengths != {()} else 1
    answered, apart = (bool(found) for found in _seen(problem, start, count))
    return (count if apart else 1) if answered else 0


def width_of(start: Point, count: int) -> int:
    """How many entries of y1 a part has."""
    return Parts.of(start.y1, count).width


@quick
def _seen(problem: BilevelProblem, start: Point, count: int) -> tuple[Array, Array]:
    """Whether the answers are the best ones, and whether parts are coupled by x1 alone.

    At random places: that decides how a problem is solved, and nothing else rests on it.
    """

    def at(key: Array) -> tuple[Array, Array, Array]:
        k = jax.random.split(key, 7)
        x1 = sample_domain(problem.x1, start.x1, k[0])
        y1 = sample_domain(problem.y1, start.y1, k[1])
        y2 = sample_domain(problem.y2, start.y2, k[2])
        x2 = None if problem.x2 is None else sample_domain(problem.x2, start.x2, k[3])
        below = lambda y2: jax.grad(problem.smooth_lower, argnums=2)(x1, y1, y2)
        fine = _is_alike(below, y2, start.y2, k[4])
        if x2 is not None:
            above = lambda x2: jax.grad(problem.smooth_upper, argnums=1)(x1, x2, y1, y2)
            fine &= _is_alike(above, x2, start.x2, k[5])
        fine &= trees.norm(problem.upper_gradient(x1, x2, y1, y2)[3]) == 0
        middle = lambda one, other: None if one is None else trees.combine(0.5, one, 0.5, other)
        centers = middle(start.x2, x2), middle(start.y2, y2)
        apart = _are_apart(problem, x1, y1, centers, count, k[6])
        return fine, _curvature(below, y2) > 0, apart

    fine, curved, apart = lax.map(at, jax.random.split(jax.random.key(0), PLACES))
    return jnp.all(fine) & jnp.any(curved), jnp.all(apart)


def usual_pull(problem: BilevelProblem, start: Point) -> float:
    """The root mean square of f~'s slope in y2, such as of losses, at the start."""
    return float(_pull(problem, start))


@quick
def _pull(problem: BilevelProblem, start: Point) -> Array:
    pull = jax.grad(problem.smooth_lower, argnums=2)(start.x1, start.y1, start.y2)
    return trees.norm(pull) / sum(leaf.size for leaf in jax.tree.leaves(pull)) ** 0.5


def _is_alike(slope: Callable[[Tree], Tree], at: Tree, other: Tree, key: Array) -> Array:
    """Whether a slope changes by −c times the way, with the same c ≥ 0 at both places."""
    leaves, structure = jax.tree.flatten(at)
    keys = jax.random.split(key, len(leaves))
    way = [jax.random.normal(k, leaf.shape, leaf.dtype) for k, leaf in zip(keys, leaves)]
    way = jax.tree.unflatten(structure, way)
    c = _curvature(slope, other)
    off = trees.axpy(c, way, jax.jvp(slope, (at,), (way,))[1])
    nothing = float(jnp.finfo(c.dtype).eps) * trees.norm(slope(at))
    return (c >= -nothing) & (trees.norm(off) <= (ALIKE * jnp.abs(c) + nothing) * trees.norm(way))


def _are_apart(
    problem: BilevelProblem, x1: Tree, y1: Tree, centers: tuple[Tree, Tree], count: int, key: Array
) -> Array:
    """Whether moves of some parts of y1 change the slopes of no other, for a few random halves.

    The answers stay so near to centers that hardly any bound holds them: one that does hides what
    couples them.
    """
    if count == 1:
        return jnp.ones((), bool)
    layout, parts = Layout.of(x1), Parts.of(y1, count)
    pull = jax.grad(problem.smooth_lower, argnums=2)(x1, y1, centers[1])
    stiff = STIFF * (1 + trees.norm(pull))
    answered = Answered(problem, jnp.ones_like(stiff), stiff, stiff, *centers, layout, parts)
    rows = parts.ravel(y1)
    both = jnp.stack([rows, rows])
    slopes = lambda both: answered.slopes(layout.ravel(x1), both).of_parts

    def apart(key: Array) -> Array:
        moved = jax.random.bernoulli(key, shape=(1, count, 1))
        way = jnp.where(moved, _some_way(both), 0)
        change = jax.jvp(slopes, (both,), (way,))[1]
        return jnp.all(jnp.where(moved, 0, change) == 0)

    return jnp.all(lax.map(apart, jax.random.split(key, HALVES)))
