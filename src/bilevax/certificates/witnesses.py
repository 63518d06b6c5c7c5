"""Find the witnesses of a definition for a point that comes without them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from bilevax import trees
from bilevax.certificates.residuals import Pieces, pieces, stationarity_and_responses
from bilevax.certificates.settling import settled
from bilevax.problems import BilevelProblem, MinimaxProblem, Point
from bilevax.programs import quick
from bilevax.terms import PerLeaf, Term
from bilevax.trees import Tree

MAX_STEPS = 20_000
# ρ is sought on a logarithmic grid, then on finer ones around the best: ε(ρ) is convex in ρ.
RHO_RANGE = (-8.0, 12.0)
RHO_GRID = 17
RHO_ROUNDS = 9


class _Descent(NamedTuple):
    u: Tree
    ahead: Tree
    momentum: Array
    step: Array
    residual: Array
    steps: Array


def best_response(
    function: Callable[[Tree], Array], term: Term, start: Tree, steps: Array | int = MAX_STEPS
) -> Tree:
    """argmin of function(u) + φ(u) for a smooth convex function, from `start`.

    Accelerated proximal gradient (Beck and Teboulle 2009) with backtracking and the restart of
    O'Donoghue and Candès 2015, until rounding stops it.
    """
    return counted_response(function, term, start, steps)[0]


def counted_response(
    function: Callable[[Tree], Array],
    term: Term,
    start: Tree,
    steps: Array | int,
    enough: Array | float = 0.0,
) -> tuple[Tree, Array]:
    """`best_response`, and the steps that it took; a residual that is `enough` stops it, too.

    The residual is measured in the size of the gradient.
    """
    dtype = trees.dtype_of(start)
    eps = jnp.finfo(dtype).eps
    slope = jax.value_and_grad(function)

    def advance(s: _Descent) -> _Descent:
        value, g = slope(s.ahead)
        u = term.prox(trees.axpy(-s.step, g, s.ahead), s.step)
        moved = trees.subtract(u, s.ahead)
        new_value, new_g = slope(u)
        # Sufficient decrease, by values where they can tell and by gradients where rounding rules.
        square = trees.square(moved)
        model = value + trees.dot(g, moved) + square / (2 * s.step)
        bend = trees.dot(trees.subtract(new_g, g), moved)
        noise = 16 * eps * (jnp.abs(value) + jnp.abs(new_value))
        fits = (new_value <= model) | ((new_value <= model + noise) & (bend <= square / s.step))
        # Relative to the gradient, whose own rounding is the end of what can be reached.
        residual = trees.norm(term.residual(u, new_g)) / (1 + trees.norm(new_g))
        momentum = (1 + jnp.sqrt(1 + 4 * s.momentum**2)) / 2
        backwards = trees.dot(moved, trees.subtract(u, s.u)) < 0
        momentum = jnp.where(backwards, 1.0, momentum).astype(dtype)
        push = jnp.where(backwards, 0, (s.momentum - 1) / momentum)
        ahead = trees.axpy(push, trees.subtract(u, s.u), u)
        taken = _Descent(u, ahead, momentum, 1.1 * s.step, residual, s.steps + 1)
        shorter = s._replace(step=s.step / 2, steps=s.steps + 1)
        return jax.tree.map(lambda a, b: jnp.where(fits, a, b), taken, shorter)

    def going(s: _Descent) -> Array:
        least = jnp.maximum(4 * eps, enough)
        return (s.steps < steps) & (s.residual > least) & (s.step > eps**2)

    one = jnp.ones((), dtype)
    first = _Descent(start, start, one, one, one, jnp.asarray(0))
    last = lax.while_loop(going, advance, first)
    return last.u, last.steps


class _Saddle(NamedTuple):
    u: Tree
    step: Array
    residual: Array
    steps: Array


def saddle_point(
    problem: MinimaxProblem, x: Tree, y: Tree, steps: Array | int = MAX_STEPS
) -> tuple[Tree, Tree]:
    """min over x, max over y of a convex-concave problem, from (x, y), until rounding stops it.

    Extragradient (Korpelevich 1976), whose step shrinks where the slope turns too fast for it.
    """
    if not jax.tree.leaves(y):
        return best_response(lambda u: problem.smooth(u, y), problem.x, x, steps), y
    dtype, term = trees.dtype_of((x, y)), PerLeaf((problem.x, problem.y))
    eps, operator = jnp.finfo(dtype).eps, _operator(problem)

    def advance(s: _Saddle) -> _Saddle:
        here = operator(s.u)
        half = term.prox(trees.axpy(-s.step, here, s.u), s.step)
        there = operator(half)
        turned = s.step * trees.norm(trees.subtract(there, here))
        fits = turned <= 0.9 * trees.norm(trees.subtract(half, s.u)) * (1 + 64 * eps)
        u = term.prox(trees.axpy(-s.step, there, s.u), s.step)
        residual = trees.norm(term.residual(half, there)) / (1 + trees.norm(there))
        taken = _Saddle(u, 1.02 * s.step, residual, s.steps + 1)
        shorter = s._replace(step=0.7 * s.step, steps=s.steps + 1)
        return jax.tree.map(lambda a, b: jnp.where(fits, a, b), taken, shorter)

    def going(s: _Saddle) -> Array:
        return (s.steps < steps) & (s.residual > 4 * eps) & (s.step > eps**2)

    one = jnp.ones((), dtype)
    return lax.while_loop(going, advance, _Saddle((x, y), one, one, jnp.asarray(0))).u


def near_saddle_point(problem: MinimaxProblem, x: Tree, y: Tree) -> tuple[Tree, Tree]:
    """The saddle point, if Newton's steps find it from (x, y); or (x, y)."""
    return settled(_operator(problem), PerLeaf((problem.x, problem.y)), (x, y), (x, y))[0]


def _operator(problem: MinimaxProblem) -> Callable[[Tree], Tree]:
    """(x, y) ↦ (∂ₓh, −∂ᵧh)"""

    def operator(u: Tree) -> Tree:
        gx, gy = problem.gradient(*u)
        return gx, trees.scale(-1, gy)

    return operator


@quick
def respond(problem: BilevelProblem, point: Point) -> Point:
    """The point with x2, and z1 and z2 where it lacks them, as best responses."""
    p = point
    x2, z1, z2 = p.x2, p.z1, p.z2
    if z1 is None:
        z1 = best_response(lambda u: problem.smooth_lower(p.x1, u, p.y2), problem.y1, p.y1)
    if z2 is None and problem.y2 is not None:
        z2 = best_response(lambda u: -problem.smooth_lower(p.x1, p.y1, u), problem.y2, p.y2)
    if problem.x2 is not None:
        x2 = best_response(lambda u: -problem.smooth_upper(p.x1, u, p.y1, p.y2), problem.x2, x2)
    return p.replace(x2=x2, z1=z1, z2=z2)


@quick
def best_rho(problem: BilevelProblem, point: Point) -> Array:
    """The ρ > 0 that makes the largest of the lines that depend on ρ least."""
    dtype = trees.dtype_of(point.x1)
    parts = pieces(problem, point)

    def epsilon(exponent: Array) -> Array:
        lines = _lines(problem, point, parts, 10**exponent)
        return jnp.where(jnp.isnan(lines), jnp.inf, lines)

    def refine(_: Array, window: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = window
        grid = jnp.linspace(low, high, RHO_GRID, dtype=dtype)
        best = jnp.argmin(lax.map(epsilon, grid))
        spacing = (high - low) / (RHO_GRID - 1)
        return grid[best] - spacing, grid[best] + spacing

    ends = (jnp.asarray(RHO_RANGE[0], dtype), jnp.asarray(RHO_RANGE[1], dtype))
    low, high = lax.fori_loop(0, RHO_ROUNDS, refine, ends)
    return 10 ** ((low + high) / 2)


def _lines(problem: BilevelProblem, point: Point, parts: Pieces, rho: Array) -> Array:
    lines, allowances = stationarity_and_responses(problem, point, parts, rho)
    return jnp.max(jnp.stack([line + allowances[name] for name, line in lines.items()]))
