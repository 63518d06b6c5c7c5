"""Rigorous bounds on the gap of a saddle point problem, from one gradient and the terms."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array

from bilevax import trees
from bilevax.problems.minimax import MinimaxProblem
from bilevax.terms import Term
from bilevax.trees import Tree


def linear_excess(term: Term | None, z: Tree, g: Tree) -> Array:
    """max over s of ⟨g, s − z⟩ − φ(s): how much a concave function can rise from z, at the most.

    A concave F with ∇F(z) = g lies below F(z) + ⟨g, s − z⟩, so max (F − φ) ≤ F(z) + this.
    """
    if term is None:
        return trees.dot(z, g)  # an absent block: zero
    return term.conjugate(g) - trees.dot(g, z)


def saddle_gap(problem: MinimaxProblem, x: Tree, y: Tree, gx: Tree, gy: Tree) -> Array:
    """An upper bound on max_y H(x, ·) − min_x H(·, y), from the gradients at (x, y) alone."""
    rise = linear_excess(problem.y, y, gy)
    fall = linear_excess(problem.x, x, trees.scale(-1, gx))
    # An absent block has no dtype of its own.
    dtype = trees.dtype_of((x, y))
    parts = (rise, fall, problem.x.value(x), problem.y.value(y))
    return jnp.sum(jnp.stack([part.astype(dtype) for part in parts]))
