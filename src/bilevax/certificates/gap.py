"""Rigorous bounds on the gap of a saddle point problem, from one gradient and the terms."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array

from bilevax import trees
from bilevax.certificates.rounding import ROUNDINGS
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


def excess_and_noise(
    term: Term | None, z: Tree, g: Tree, noise: Array, dtype: jnp.dtype
) -> tuple[Array, Array]:
    """`linear_excess`, and what rounding may hide in it.

    With an error δ of g, ‖δ‖ ≤ n, the best s is another one. Over a domain of diameter D that hides
    n·D at most. If φ is strongly convex with modulus w it hides n·‖s − z‖ + n²/(2w): φ* is smooth.
    If neither is known, anything.
    """
    if term is None:
        return jnp.zeros((), dtype), jnp.zeros((), dtype)
    conjugate, best = jax.value_and_grad(term.conjugate)(g)
    linear = trees.dot(g, z).astype(dtype)
    value = conjugate.astype(dtype) - linear
    noise = noise.astype(dtype)
    over_domain = noise * term.diameter(z).astype(dtype)
    way, modulus = trees.norm(trees.subtract(best, z)).astype(dtype), term.modulus(z).astype(dtype)
    by_modulus = noise * way + noise**2 / (2 * modulus)
    hidden = jnp.where(noise > 0, jnp.fmin(over_domain, by_modulus), 0)
    rounded = ROUNDINGS * jnp.finfo(dtype).eps * (jnp.abs(value) + 2 * jnp.abs(linear))
    return value, rounded + hidden


def saddle_gap(problem: MinimaxProblem, x: Tree, y: Tree, gx: Tree, gy: Tree) -> Array:
    """An upper bound on max_y H(x, ·) − min_x H(·, y), from the gradients at (x, y) alone."""
    rise = linear_excess(problem.y, y, gy)
    fall = linear_excess(problem.x, x, trees.scale(-1, gx))
    # An absent block has no dtype of its own.
    dtype = trees.dtype_of((x, y))
    parts = (rise, fall, problem.x.value(x), problem.y.value(y))
    return jnp.sum(jnp.stack([part.astype(dtype) for part in parts]))
