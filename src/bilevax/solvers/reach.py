"""Step lengths of the blocks, from how far each has to go and how strongly it is coupled."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from bilevax.problems import BilevelProblem
from bilevax.solvers.curvature import Y2
from bilevax.terms import Term
from bilevax.trees import Tree

# The largest factor by which a reach changes at a time, and by which two reaches may differ.
RENEW, UNEQUAL = 2.0, 1e6
# A block without couplings steps as if it had this share of the largest block's energy.
UNCOUPLED = 1e-3


def extent(problem: BilevelProblem, parts: tuple, dtype: jnp.dtype) -> Array:
    """The diameter of each block's domain; 1 where it is unbounded, or absent."""

    def of(term: Term | None, part: Tree) -> Array:
        size = jnp.ones(()) if term is None else jnp.asarray(term.diameter(part))
        return jnp.where(jnp.isfinite(size) & (size > 0), size, 1).astype(dtype)

    terms = (problem.x1, problem.y1, problem.y2, problem.x2, problem.y1, problem.y2)
    return jnp.stack([of(term, part) for term, part in zip(terms, parts)])


def evened(couplings: Array, lengths: Array) -> Array:
    """d with max over b' of √(d_b·d_b')·couplings[b, b'] = 1 for every block b that is coupled.

    There are many such d; this one is found by scaling rows, beginning with lengths². It does not
    depend on the units in which a block is measured.
    """

    def even(_: Array, d: Array) -> Array:
        root = jnp.sqrt(d)
        rows = jnp.max(couplings * root[:, None] * root[None, :], axis=1)
        return jnp.where(rows > 0, d / jnp.where(rows > 0, rows, 1), d)

    return lax.fori_loop(0, 30, even, jnp.where(lengths > 0, lengths, 1) ** 2)


def lengths(reach: Array, couplings: Array) -> Array:
    """The best step lengths d for blocks with r = reach to go: d = r/(C·r), C the couplings.

    In the metric d the operator's Lipschitz constant is ‖√d·C·√d‖, at most 1 for this d (by Collatz
    and Wielandt, with the vector r/√d), and the squared distance is Σ r²/d. The gradients needed
    grow with their product, and for every d that is at least rᵀCr, which this one attains.
    """
    energy = reach * (couplings @ reach)
    energy = jnp.where(energy > 0, energy, UNCOUPLED * jnp.max(energy))
    return jnp.where(energy > 0, reach * (reach / jnp.where(energy > 0, energy, 1)), 1)


def renewed(reach: Array, moved: Array) -> Array:
    """The geometric mean of the reaches so far and of how far the blocks have moved since.

    Only ratios count, so a common factor is taken out. y2 has no part in that factor, because it
    moves as little as its proximal weight makes it. A block without a reach is absent.
    """
    present, did = reach > 0, moved > 0
    change = jnp.where(did, moved / jnp.where(present, reach, 1), 1)
    counted = did & (jnp.arange(6) != Y2)
    how_many = jnp.maximum(jnp.sum(counted), 1).astype(moved.dtype)
    common = jnp.sum(jnp.where(counted, jnp.log(change), 0)) / how_many
    change = jnp.where(did, jnp.sqrt(change / jnp.exp(common)), 0)
    new = reach * jnp.clip(change, 1 / RENEW, RENEW)
    return jnp.where(present, jnp.maximum(new / jnp.max(new), 1 / UNEQUAL), 0)
