"""How a constrained problem is run: as its Lagrangian, with multiplier bounds that may grow."""

from __future__ import annotations

import dataclasses

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array

from bilevax.problems import ConstrainedBilevelProblem, Point
from bilevax.problems.lagrangian import MultiplierBounds
from bilevax.solvers.multipliers import (
    any_touching,
    both_touching,
    first_bounds,
    growable,
    grown,
    touching,
)

# A bound grows when a multiplier has touched it at so many looks one after the other: in its first
# steps a method throws multipliers about.
PATIENCE = 8


class Lift(eqx.Module):
    """The bounds now in force, which multipliers have touched them and for how many looks."""

    bounds: MultiplierBounds
    touched: MultiplierBounds
    looks: Array
    gradients: Array  # those spent before the bounds grew for the last time


def first_lift(problem: ConstrainedBilevelProblem, start: Point) -> Lift:
    bounds = first_bounds(problem, start)
    zero = jnp.zeros((), int)
    return Lift(bounds, touching(bounds, Point()), zero, zero)


def watched(lift: Lift, problem: ConstrainedBilevelProblem, point: Point, gradients: int) -> Lift:
    """What to go on with after a look at a point: the same bounds, or grown ones."""
    now = growable(problem, touching(lift.bounds, point))
    still = both_touching(now, lift.touched)
    if not any_touching(still):
        return dataclasses.replace(lift, touched=now, looks=jnp.ones((), int))
    if int(lift.looks) + 1 < PATIENCE:
        return dataclasses.replace(lift, touched=still, looks=lift.looks + 1)
    bounds = grown(lift.bounds, still)
    zero = jnp.zeros((), int)
    return Lift(bounds, touching(bounds, Point()), zero, jnp.asarray(gradients))
