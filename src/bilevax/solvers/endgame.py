"""The end game of first-order steps: Newton's, in the entries that no term holds."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from bilevax import trees
from bilevax.solvers.penalised import Penalised
from bilevax.solvers.semismooth import Natural

# Once first-order steps have found which entries their terms hold, a system or two end at rounding;
# before, none helps. So each must make the residual this much smaller, and there are so many.
FALL, SYSTEMS = 0.1, 4
# Entries are held by this share of their curvature, where their place does not matter.
HOLD = 1e-9
# Systems have as many unknowns as a number of this series, so that a few programs do for all.
LEAST_SIZE, NEXT_SIZE = 64, 1.5


class Ending(NamedTuple):
    """Where an end game led: the point, the operator there, and what it took."""

    point: Array
    slope: Array
    solves: Array
    gradients: Array


def size_for(free: int) -> int:
    """The number of unknowns of a system in which so many entries are free."""
    size = LEAST_SIZE
    while size < free:
        size = int(NEXT_SIZE * size)
    return size


def free_entries(penalised: Penalised, steps: Array, w: Array) -> Array:
    """How many entries their terms do not hold at w; takes a gradient."""
    held = Natural(penalised, steps).held(w, penalised.operator(w))
    return jnp.sum(~held)


def ended(penalised: Penalised, steps: Array, w: Array, most: int) -> Ending:
    """Newton's steps for the saddle point of P from w on, all blocks at once.

    They are steps of the natural map R with these steps of the prox, in its free entries, of which
    there must not be more than `most`. The last point is the one before a step that failed.
    """
    natural, root = Natural(penalised, steps), jnp.sqrt(penalised.blocks.spread(steps))
    size = lambda w, slope: trees.norm(root * natural(w, slope))

    def onwards(carry: tuple) -> tuple:
        w, slope, now, count, _ = carry
        columns = natural.columns(w, ~natural.held(w, slope), most)
        rows = jnp.sum(jnp.abs(columns.hessian), axis=1)
        weights = HOLD * jnp.where(rows > 0, rows, jnp.max(rows))
        d = natural.direction(w, slope, columns, weights)
        there = penalised.projected(w + d)
        its_slope = penalised.operator(there)
        left = size(there, its_slope)
        fell = left <= FALL * now  # not where it is NaN
        new = (jnp.where(fell, there, w), jnp.where(fell, its_slope, slope))
        return *new, jnp.where(fell, left, now), count + 1, fell

    slope = penalised.operator(w)
    first = (w, slope, size(w, slope), jnp.zeros((), int), jnp.ones((), bool))
    going = lambda carry: carry[4] & (carry[3] < SYSTEMS) & (carry[2] > 0)
    w, slope, _, count, _ = lax.while_loop(going, onwards, first)
    return Ending(w, slope, count, count + 1)
