"""Constants of a problem that the theory needs: given by the user, or estimated by sampling."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from bilevax import trees
from bilevax.problems.bilevel import BilevelProblem
from bilevax.problems.constrained import ConstrainedBilevelProblem
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


def _random_unit(like: Tree, key: Array) -> Tree:
    leaves, structure = jax.tree.flatten(like)
    keys = jax.random.split(key, len(leaves))
    drawn = [jax.random.normal(k, leaf.shape, leaf.dtype) for leaf, k in zip(leaves, keys)]
    return _unit(jax.tree.unflatten(structure, drawn))[0]


@quick
def _curvature(function: Callable[..., Array], point: Tree, data: Tree, key: Array) -> Array:
    """The largest ‖∇²f·v‖/‖v‖ that power iteration meets at one point."""
    slope = jax.grad(lambda p: function(*p) if data is None else function(*p, data))

    def advance(_: Array, carry: tuple[Tree, Array]) -> tuple[Tree, Array]:
        v, best = carry
        _, bent = jax.jvp(slope, (point,), (v,))
        v, size = _unit(bent)
        return v, jnp.maximum(best, size)

    v = _random_unit(point, key)
    return jax.lax.fori_loop(0, ITERATIONS, advance, (v, jnp.zeros((), trees.dtype_of(v))))[1]


def estimate_smoothness(
    function: Callable[..., Array], term: Term, start: Tree, data: Tree, label: str, seed: int = 0
) -> float:
    """A Lipschitz constant for ∇f over the domain: the largest curvature met at sampled points.

    Exact up to a few percent for a quadratic; otherwise an estimate, which can be too small.
    """
    keys = jax.random.split(jax.random.key(seed), 2 * SAMPLES)
    points = [start, *(sample_domain(term, start, k) for k in keys[1:SAMPLES])]
    met = [float(_curvature(function, p, data, k)) for p, k in zip(points, keys[SAMPLES:])]
    if not np.all(np.isfinite(met)):
        constant = "smoothness" if label == "objective" else f"{label}_smoothness"
        raise ValueError(
            f"the smoothness of {label} could not be estimated: its second derivatives are not "
            f"finite everywhere in the domain. Give the problem {constant}, or shrink the domain"
        )
    return max(SAFETY * max(met), float(jnp.finfo(trees.dtype_of(start)).tiny) * 1e8)


def smoothness_of(problem: MinimaxProblem, start: Point) -> float:
    """L_∇h: as given, or estimated."""
    if problem.smoothness is not None:
        return float(problem.smoothness)
    term = PerLeaf((problem.x, problem.y))
    return estimate_smoothness(
        problem.objective, term, (start.x, start.y), problem.data, "objective"
    )


def upper_smoothness_of(problem: BilevelProblem, start: Point) -> float:
    """L_∇f1: as given, or estimated."""
    if problem.upper_smoothness is not None:
        return float(problem.upper_smoothness)
    term = PerLeaf((problem.x1, problem.x2, problem.y1, problem.y2))
    blocks = (start.x1, start.x2, start.y1, start.y2)
    return estimate_smoothness(problem.upper, term, blocks, problem.data, "upper")


def lower_smoothness_of(problem: BilevelProblem, start: Point) -> float:
    """L_∇f~1: as given, or estimated."""
    if problem.lower_smoothness is not None:
        return float(problem.lower_smoothness)
    term = PerLeaf((problem.x1, problem.y1, problem.y2))
    blocks = (start.x1, start.y1, start.y2)
    return estimate_smoothness(problem.lower, term, blocks, problem.data, "lower")


def range_of(
    function: Any, point: tuple, smoothness: float, diameter: float
) -> tuple[float, float]:
    """Bounds on a smooth function within a diameter of a point, from its value and slope there."""
    value, slope = jax.value_and_grad(lambda p: function(*p))(point)
    reach = float(trees.norm(slope)) * diameter + smoothness * diameter**2 / 2
    return float(value) - reach, float(value) + reach


def constraint_values(problem: ConstrainedBilevelProblem) -> Callable[[Tree], Tree]:
    """(c, e) as a function of (x, y)."""
    return lambda p: (problem.called("constraints", *p), problem.called("equalities", *p))


@quick
def _slope(problem: ConstrainedBilevelProblem, point: Tree, key: Array) -> Array:
    """The largest ‖Jv‖/‖v‖ that power iteration on JᵀJ meets, J the Jacobian of (c, e)."""
    values = constraint_values(problem)
    _, pull = jax.vjp(values, point)

    def advance(_: Array, carry: tuple[Tree, Array]) -> tuple[Tree, Array]:
        v, best = carry
        _, moved = jax.jvp(values, (point,), (v,))
        (back,) = pull(moved)
        return _unit(back)[0], jnp.maximum(best, trees.norm(moved))

    zero = jnp.zeros((), trees.dtype_of(point))
    return jax.lax.fori_loop(0, ITERATIONS, advance, (_random_unit(point, key), zero))[1]


@quick
def _bend(problem: ConstrainedBilevelProblem, point: Tree, key: Array) -> Array:
    """The largest Σᵢ wᵢ·aᵀ∇²cᵢb over unit w, a, b that taking each in turn as the best one meets.

    That is the norm of the derivative of the Jacobian. Unlike power iteration this can end in a
    local maximum; the points it is called at have each a random start of their own.
    """
    values = constraint_values(problem)

    def along(v: Tree) -> Callable[[Tree], Tree]:
        return lambda p: jax.jvp(values, (p,), (v,))[1]  # J(p)v

    def turned(w: Tree, v: Tree) -> Tree:
        return jax.grad(lambda p: trees.dot(w, along(v)(p)))(point)  # Σ wᵢ∇²cᵢ·v

    def advance(_: Array, carry: tuple[Tree, Tree, Array]) -> tuple[Tree, Tree, Array]:
        a, b, best = carry
        w, _ = _unit(jax.jvp(along(b), (point,), (a,))[1])
        b, _ = _unit(turned(w, a))
        a, size = _unit(turned(w, b))
        return a, b, jnp.maximum(best, size)

    first, second = jax.random.split(key)
    zero = jnp.zeros((), trees.dtype_of(point))
    start = (_random_unit(point, first), _random_unit(point, second), zero)
    return jax.lax.fori_loop(0, ITERATIONS, advance, start)[2]


def estimate_constraint_lipschitz(problem: ConstrainedBilevelProblem, start: Point) -> float:
    """A Lipschitz constant for all of the lower level's constraints together."""
    return _largest(_slope, problem, start, "lipschitz")


def estimate_constraint_smoothness(problem: ConstrainedBilevelProblem, start: Point) -> float:
    """A Lipschitz constant for their Jacobian; zero where they are affine."""
    return _largest(_bend, problem, start, "smoothness")


def _largest(
    measure: Callable[..., Array], problem: ConstrainedBilevelProblem, start: Point, label: str
) -> float:
    """The largest that `measure` finds at sampled points, as `estimate_smoothness` has it."""
    blocks = (start.x, start.y)
    if problem.constraints is None and problem.equalities is None:
        return 0.0
    term = PerLeaf((problem.x, problem.y))
    keys = jax.random.split(jax.random.key(0), 2 * SAMPLES)
    points = [blocks, *(sample_domain(term, blocks, k) for k in keys[1:SAMPLES])]
    met = [float(measure(problem, p, k)) for p, k in zip(points, keys[SAMPLES:])]
    if not np.all(np.isfinite(met)):
        raise ValueError(
            f"constraint_{label} could not be estimated: the derivatives of the constraints are "
            f"not finite everywhere in the domain. Give the problem constraint_{label}, or shrink "
            "the domain"
        )
    return SAFETY * max(met)
