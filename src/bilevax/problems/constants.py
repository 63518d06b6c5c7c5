"""Constants of a problem that the theory needs: given by the user, or estimated by sampling."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from bilevax import trees
from bilevax.problems.bilevel import BilevelProblem
from bilevax.problems.constrained import ConstrainedBilevelProblem
from bilevax.problems.form import Form
from bilevax.problems.minimax import MinimaxProblem
from bilevax.problems.point import Point
from bilevax.programs import quick
from bilevax.terms import PerLeaf, Term
from bilevax.terms._term import is_term
from bilevax.trees import Tree

# Power iteration approaches the largest curvature from below: this much is added on top.
SAFETY = 1.05
SAMPLES = 16
ITERATIONS = 40


@quick
def sample_domain(term: Term, like: Tree, key: Array) -> Tree:
    """A random point of the domain, spread over it where it is bounded, near `like` if not.

    Each leaf on its own scale; half of the points are drawn back towards `like`, so that the inside
    of a domain is seen and not only its faces.
    """
    if isinstance(term, PerLeaf):
        parts, structure = jax.tree.flatten(term.parts, is_leaf=is_term)
        blocks = structure.flatten_up_to(like)
        keys = jax.random.split(key, max(len(parts), 1))
        drawn = [sample_domain(t, block, k) for t, block, k in zip(parts, blocks, keys)]
        return jax.tree.unflatten(structure, drawn)
    leaves, structure = jax.tree.flatten(like)
    keys = jax.random.split(key, (max(len(leaves), 1), 3))
    drawn = []
    for leaf, k in zip(leaves, keys):
        reach = term.diameter(leaf)
        around = jnp.maximum(1, trees.norm(leaf))
        spread = jnp.where(jnp.isfinite(reach), reach, around) / max(leaf.size, 1) ** 0.5
        drawn.append(leaf + spread * jax.random.normal(k[0], leaf.shape, leaf.dtype))
    far = term.project(jax.tree.unflatten(structure, drawn))
    inward, share = jax.random.bernoulli(keys[0, 1]), jax.random.uniform(keys[0, 2])
    share = jnp.where(inward, share, 1.0)
    return trees.combine(1 - share, like, share, far)


def _unit(v: Tree) -> tuple[Tree, Array]:
    """v/‖v‖ and ‖v‖; zero stays zero."""
    size = trees.norm(v)
    flat = size == 0
    return trees.scale(jnp.where(flat, 0, 1 / jnp.where(flat, 1, size)), v), size


def random_unit(like: Tree, key: Array) -> Tree:
    """A random vector of length one."""
    leaves, structure = jax.tree.flatten(like)
    keys = jax.random.split(key, len(leaves))
    drawn = [jax.random.normal(k, leaf.shape, leaf.dtype) for leaf, k in zip(leaves, keys)]
    return _unit(jax.tree.unflatten(structure, drawn))[0]


@quick
def _curvature(function: Callable[..., Array], point: Tree, data: Tree, key: Array) -> Array:
    """The largest ‖∇²f·v‖/‖v‖ that power iteration meets at one point."""
    slope = jax.grad(lambda p: function(*p) if data is None else function(*p, data))

    def turned(v: Tree) -> tuple[Tree, Array]:
        _, bent = jax.jvp(slope, (point,), (v,))
        return _unit(bent)

    return _largest_of_iterates(turned, random_unit(point, key))


def _largest_of_iterates(turned: Callable[[Tree], tuple[Tree, Array]], start: Tree) -> Array:
    """The largest size that `turned` finds, which makes of a vector the next and a size."""

    def advance(_: Array, carry: tuple[Tree, Array]) -> tuple[Tree, Array]:
        v, size = turned(carry[0])
        return v, jnp.maximum(carry[1], size)

    zero = jnp.zeros((), trees.dtype_of(start))
    return jax.lax.fori_loop(0, ITERATIONS, advance, (start, zero))[1]


def estimate_smoothness(
    function: Callable[..., Array], term: Term, start: Tree, data: Tree, label: str, seed: int = 0
) -> float:
    """A Lipschitz constant for ∇f over the domain: the largest curvature met at sampled points.

    Exact up to a few percent for a quadratic; otherwise an estimate, which can be too small.
    """
    refusal = (f"the smoothness of {label}", "its second derivatives", _constant(label))
    measure = lambda point, key: _curvature(function, point, data, key)
    largest = _largest(measure, term, start, refusal, seed)
    return max(largest, float(jnp.finfo(trees.dtype_of(start)).tiny) * 1e8)


def _largest(
    measure: Callable[[Tree, Array], Array],
    term: Term,
    start: Tree,
    refusal: tuple[str, str, str],
    seed: int = 0,
) -> float:
    """The largest number that `measure` finds at sampled points, and a little more.

    `refusal` says what could not be estimated, what is not finite then, and what to give instead.
    """
    keys = jax.random.split(jax.random.key(seed), 2 * SAMPLES)
    points = [start, *(sample_domain(term, start, k) for k in keys[1:SAMPLES])]
    met = [float(measure(p, k)) for p, k in zip(points, keys[SAMPLES:])]
    if not np.all(np.isfinite(met)):
        what, not_finite, constant = refusal
        raise ValueError(
            f"{what} could not be estimated: {not_finite} are not finite everywhere in the domain. "
            f"Give the problem {constant}, or shrink the domain"
        )
    return SAFETY * max(met)


def blocks_of(problem: Form, start: Point, function: str) -> tuple[Term, tuple[Tree, ...]]:
    """The blocks that the function of that name is called with, and their term."""
    (call,) = (call for call in problem.calls(start) if call.name == function)
    return PerLeaf(tuple(getattr(problem, b) for b in call.blocks)), tuple(call.blocks.values())


def _constant(function: str) -> str:
    return "smoothness" if function == "objective" else f"{function}_smoothness"


def smoothness_of(problem: Any, start: Point, function: str = "objective") -> float:
    """The Lipschitz constant of the function's gradient: as given, or estimated."""
    given = getattr(problem, _constant(function))
    if given is not None:
        return float(given)
    term, blocks = blocks_of(problem, start, function)
    return estimate_smoothness(getattr(problem, function), term, blocks, problem.data, function)


upper_smoothness_of = functools.partial(smoothness_of, function="upper")
lower_smoothness_of = functools.partial(smoothness_of, function="lower")


def range_of(
    function: Any, point: tuple, smoothness: float, diameter: float
) -> tuple[float, float]:
    """Bounds on a smooth function within a diameter of a point, from its value and slope there."""
    value, slope = jax.value_and_grad(lambda p: function(*p))(point)
    reach = float(trees.norm(slope)) * diameter + smoothness * diameter**2 / 2
    return float(value) - reach, float(value) + reach


def saddle_range(
    problem: MinimaxProblem, start: Point, smoothness: float, diameter: float
) -> tuple[float, float]:
    """Bounds on H, its terms included, within a diameter of the start."""
    low, high = range_of(problem.smooth, (start.x, start.y), smoothness, diameter)
    return low - float(problem.y.supremum(start.y)), high + float(problem.x.supremum(start.x))


def upper_range(problem: BilevelProblem, start: Point, diameter: float) -> tuple[float, float]:
    """Bounds on f, its terms included, within a diameter of the start; f_low if it is given."""
    smoothness, p = smoothness_of(problem, start, "upper"), start
    low, high = range_of(problem.smooth_upper, (p.x1, p.x2, p.y1, p.y2), smoothness, diameter)
    low -= 0.0 if problem.x2 is None else float(problem.x2.supremum(p.x2))
    low = low if problem.f_low is None else float(problem.f_low)
    return low, high + float(problem.x1.supremum(p.x1))


def start_maximum(problem: BilevelProblem, start: Point, *, moves: bool) -> float:
    """A bound on max over x2 of f at the start, its terms included.

    f1 is concave in x2, so it lies below its tangent. If a start phase `moves` y1 and y2, it is
    the maximum over these, too, at the start's x1: f1 lies below its tangent and L/2·D² more.
    """
    p, here = problem, (start.x1, start.x2, start.y1, start.y2)
    slopes = p.upper_gradient(*here)
    most = float(p.smooth_upper(*here)) + float(p.x1.value(start.x1))
    square = 0.0
    for name, block, slope in list(zip(p.blocks, here, slopes))[1 : None if moves else 2]:
        term = getattr(p, name)
        if term is not None:
            rise = term.conjugate(slope) if name == "x2" else term.support(slope)
            most += float(rise) - float(trees.dot(slope, block))
            square += float(term.diameter(block)) ** 2
    return most + smoothness_of(p, start, "upper") * square / 2 if moves else most


def lower_lipschitz_of(problem: ConstrainedBilevelProblem, start: Point) -> tuple[float, bool]:
    """The Lipschitz constant of the lower level's objective in y, and whether it was given.

    If not, ‖∇ᵧg1‖ at the start and the smoothness times the diameter of the domain: infinite where
    that has no bounds, or where y has a term that is no set, whose slopes are not known.
    """
    if problem.lower_lipschitz is not None:
        return float(problem.lower_lipschitz), True
    reach = float(PerLeaf((problem.x, problem.y)).diameter((start.x, start.y)))
    if not np.isfinite(reach) or float(problem.y.supremum(start.y)) != 0:
        return float("inf"), False
    slope = jax.grad(problem.smooth_lower, argnums=1)(start.x, start.y)
    return float(trees.norm(slope)) + lower_smoothness_of(problem, start) * reach, False


def constraint_values(problem: ConstrainedBilevelProblem) -> Callable[[Tree], Tree]:
    """(c, e) as a function of (x, y)."""
    return lambda p: (problem.called("constraints", *p), problem.called("equalities", *p))


@quick
def _slope(problem: ConstrainedBilevelProblem, point: Tree, key: Array) -> Array:
    """The largest ‖Jv‖/‖v‖ that power iteration on JᵀJ meets, J the Jacobian of (c, e)."""
    values = constraint_values(problem)
    _, pull = jax.vjp(values, point)

    def turned(v: Tree) -> tuple[Tree, Array]:
        _, moved = jax.jvp(values, (point,), (v,))
        (back,) = pull(moved)
        return _unit(back)[0], trees.norm(moved)

    return _largest_of_iterates(turned, random_unit(point, key))


@quick
def _bend(problem: ConstrainedBilevelProblem, point: Tree, key: Array) -> Array:
    """The largest Σᵢ wᵢ·aᵀ∇²cᵢb over unit w, a, b that taking each in turn as the best one meets.

    That is the norm of the derivative of the Jacobian. Unlike power iteration this can end in a
    local maximum; the points it is called at have each a random start of their own.
    """
    values = constraint_values(problem)

    def along(v: Tree) -> Callable[[Tree], Tree]:
        return lambda p: jax.jvp(values, (p,), (v,))[1]  # J(p)v

    def weighed(w: Tree, v: Tree) -> Tree:
        return jax.grad(lambda p: trees.dot(w, along(v)(p)))(point)  # Σ wᵢ∇²cᵢ·v

    def turned(pair: tuple[Tree, Tree]) -> tuple[Tree, Array]:
        a, b = pair
        w, _ = _unit(jax.jvp(along(b), (point,), (a,))[1])
        b, _ = _unit(weighed(w, a))
        a, size = _unit(weighed(w, b))
        return (a, b), size

    first, second = jax.random.split(key)
    return _largest_of_iterates(turned, (random_unit(point, first), random_unit(point, second)))


def estimate_constraint_lipschitz(problem: ConstrainedBilevelProblem, start: Point) -> float:
    """A Lipschitz constant for all of the lower level's constraints together."""
    return _of_constraints(_slope, problem, start, "constraint_lipschitz")


def estimate_constraint_smoothness(problem: ConstrainedBilevelProblem, start: Point) -> float:
    """A Lipschitz constant for their Jacobian; zero where they are affine."""
    return _of_constraints(_bend, problem, start, "constraint_smoothness")


def _of_constraints(
    measure: Callable[..., Array], problem: ConstrainedBilevelProblem, start: Point, constant: str
) -> float:
    if problem.constraints is None and problem.equalities is None:
        return 0.0
    refusal = (constant, "the derivatives of the constraints", constant)
    at = lambda point, key: measure(problem, point, key)
    return _largest(at, PerLeaf((problem.x, problem.y)), (start.x, start.y), refusal)
