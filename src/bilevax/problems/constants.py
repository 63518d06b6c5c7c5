"""Constants of a problem that the theory needs: given by the user, or estimated by sampling."""

from __future__ import annotations

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from bilevax import trees
from bilevax.problems.bilevel import BilevelProblem
from bilevax.problems.minimax import MinimaxProblem
from bilevax.problems.point import Point
from bilevax.terms import PerLeaf, Term
from bilevax.terms._term import is_term
from bilevax.trees import Tree

# Power iteration approaches the largest curvature from below: this much is added on top.
SAFETY = 1.05
SAMPLES = 16
ITERATIONS = 40


@eqx.filter_jit
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


@eqx.filter_jit
def _curvature(function: Callable[..., Array], point: Tree, data: Tree, key: Array) -> Array:
    """The largest ‖∇²f·v‖/‖v‖ that power iteration meets at one point."""
    slope = jax.grad(lambda p: function(*p) if data is None else function(*p, data))

    def advance(_: Array, carry: tuple[Tree, Array]) -> tuple[Tree, Array]:
        v, best = carry
        _, bent = jax.jvp(slope, (point,), (v,))
        size = trees.norm(bent)
        flat = size == 0
        v = trees.scale(jnp.where(flat, 0, 1 / jnp.where(flat, 1, size)), bent)
        return v, jnp.maximum(best, size)

    leaves, structure = jax.tree.flatten(point)
    keys = jax.random.split(key, len(leaves))
    v = jax.tree.unflatten(
        structure, [jax.random.normal(k, leaf.shape, leaf.dtype) for leaf, k in zip(leaves, keys)]
    )
    v = trees.scale(1 / trees.norm(v), v)
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
