"""Rigorous bounds on the gap of a saddle point problem, from one gradient and the terms."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
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


class Excess(NamedTuple):
    """`linear_excess`, and how it is made: for what rounding may change in it."""

    value: Array
    way: Array  # from z to the best s, over the root of the number of entries
    size: Array  # of the terms that it is a difference of


def excess(term: Term | None, z: Tree, g: Tree, dtype: Any) -> Excess:
    """`linear_excess` with what its rounding depends on."""
    if term is None:
        return Excess(*(jnp.zeros((), dtype) for _ in range(3)))
    conjugate, best = jax.value_and_grad(term.conjugate)(g)
    conjugate, linear = conjugate.astype(dtype), trees.dot(g, z).astype(dtype)
    entries = max(sum(leaf.size for leaf in jax.tree.leaves(z)), 1)
    way = trees.norm(trees.subtract(best, z)).astype(dtype) / entries**0.5
    return Excess(conjugate - linear, way, jnp.abs(conjugate) + jnp.abs(linear))


def gap_allowance(measured: Array, parts: Iterable[tuple[Excess, Array]], size: Array) -> Array:
    """What rounding may hide in a gap, of which `measured` is what was seen.

    A few samples of one number can all be small by chance. So the errors that the slopes have,
    over the ways on which they count, are added as if they pointed anywhere; and a rounding or two
    of the values, of this `size`, and of all else that is added up.
    """
    for of_excess, noise in parts:
        on_the_way = jnp.where(noise > 0, noise * of_excess.way, 0)
        measured, size = measured + on_the_way, size + of_excess.size
    return measured + 2 * jnp.finfo(size.dtype).eps * size


def saddle_gap(problem: MinimaxProblem, x: Tree, y: Tree, gx: Tree, gy: Tree) -> Array:
    """An upper bound on max_y H(x, ·) − min_x H(·, y), from the gradients at (x, y) alone."""
    rise = linear_excess(problem.y, y, gy)
    fall = linear_excess(problem.x, x, trees.scale(-1, gx))
    # An absent block has no dtype of its own.
    dtype = trees.dtype_of((x, y))
    parts = (rise, fall, problem.x.value(x), problem.y.value(y))
    return jnp.sum(jnp.stack([part.astype(dtype) for part in parts]))
