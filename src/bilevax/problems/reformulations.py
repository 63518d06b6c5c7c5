"""From one problem form to the next: penalty, lower level, proximal subproblem."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array

from bilevax import trees
from bilevax.arguments import one_number, positive, tracing
from bilevax.problems.bilevel import BilevelProblem
from bilevax.problems.lagrangian import LowerLagrangian, UpperLagrangian
from bilevax.problems.minimax import MinimaxProblem
from bilevax.problems.point import Point
from bilevax.problems.validation import require_taken
from bilevax.terms import PerLeaf
from bilevax.trees import Tree, square, subtract


class PenaltyFunction(eqx.Module):
    """P1 = f1(x1, x2, y1, y2) + ρ·(f~1(x1, y1, z2) − f~1(x1, z1, y2)), paper `eq:P1`."""

    upper: Callable[..., Array]
    lower: Callable[..., Array]
    rho: Array

    def __call__(self, x: Tree, y: Tree, *data: Tree) -> Array:
        (x1, y1, y2), (x2, z1, z2) = x, y
        at = lambda y1, y2: self.lower(x1, y1, y2, *data)
        values = at_both(at, (y1, z2), (z1, y2))
        gap = values[0] - values[1]
        return self.upper(x1, x2, y1, y2, *data) + self.rho.astype(gap.dtype) * gap


class LagrangianPenalty(eqx.Module):
    """P1 where f~1 is a Lagrangian, with every constraint evaluated once at y1 and once at z1.

    P1 = f1 + λ_GᵀG + (ρ·z2 + λ')ᵀc(x1, y1) + ρ·g1(x1, y1) − ρ·(g1 + y2ᵀc)(x1, z1), where λ_G and λ'
    are the two parts of x2: `PenaltyFunction` would go through c(x1, y1) twice, for z2 and for λ'.
    """

    upper: UpperLagrangian
    lower: LowerLagrangian
    rho: Array

    def __call__(self, x: Tree, y: Tree, *data: Tree) -> Array:
        (x1, y1, y2), (x2, z1, z2) = x, y
        own, shared = (None, None) if x2 is None else x2
        below = self.lower
        at = lambda y: (below.lower(x1, y, *data), below.constrained.values(x1, y, data))
        objectives, constraints = at_both(at, (y1,), (z1,))
        at_y, at_z = (jax.tree.map(lambda v, k=k: v[k], constraints) for k in (0, 1))
        rho = self.rho.astype(objectives.dtype)
        whole = trees.scale(rho, z2)
        whole = whole if shared is None else jax.tree.map(jnp.add, whole, shared)
        value = self.upper.upper(x1, y1, *data) + rho * (objectives[0] - objectives[1])
        value += self.upper.own(own, x1, y1, data, value.dtype)
        value += below.constrained.weighed(whole, at_y, value.dtype)
        return value - rho * below.constrained.weighed(y2, at_z, value.dtype)


def at_both(function: Callable[..., Tree], first: tuple, second: tuple) -> Tree:
    """A function at two places, its values stacked.

    Batched into one call, so that what depends on x1 alone is computed once, and each matrix in the
    data is read once for both, forwards and backwards. What cannot be batched is called twice.
    """
    stack = lambda *parts: jax.tree.map(lambda *leaves: jnp.stack(leaves), *parts)
    try:
        return jax.vmap(function)(*stack(first, second))
    except NotImplementedError:  # such as a callback to the host that does not say how
        return stack(function(*first), function(*second))


class PenaltyProblem(MinimaxProblem):
    """A `penalty`: a minimax problem in x = (x1, y1, y2) and y = (x2, z1, z2).

    An absent block is None in its place. `point` and `stated_point` go there and back.
    """

    @property
    def rho(self) -> Array:
        """The weight ρ of the lower level's gap."""
        function: Any = self.objective
        return function.rho

    def point(self, point: Point) -> Point:
        """A point of the bilevel problem as one of this; without z1, z2 these are y1, y2."""
        if not (isinstance(point, Point) and point.x1 is not None and point.y1 is not None):
            raise TypeError(
                "point takes a point of the bilevel problem, bilevax.Point(x1=…, y1=…), not "
                f"{point!r}"
            )
        x, y = penalty_blocks(point)
        return Point(x=x, y=y)

    def stated_point(self, point: Point) -> Point:
        """The way back: a point of the bilevel problem with its witnesses z1, z2 and rho."""
        triple = lambda block: isinstance(block, tuple) and len(block) == 3
        if not (isinstance(point, Point) and triple(point.x) and triple(point.y)):
            raise TypeError(
                "stated_point takes a point of the penalty problem, bilevax.Point(x=(x1, y1, y2), "
                f"y=(x2, z1, z2)), not {point!r}"
            )
        return penalty_point(point.x, point.y).replace(rho=self.rho)


def penalty(problem: BilevelProblem, rho: ArrayLike) -> PenaltyProblem:
    """The minimax problem that a bilevel problem becomes for a weight ρ > 0 of the gap.

    min over (x1, y1, y2), max over (x2, z1, z2) of
    P_ρ = f(x1, x2, y1, y2) + ρ·(f~(x1, y1, z2) − f~(x1, z1, y2)), `eq:lagrange`. Its maximum is
    max over x2 of f, and ρ times the gap of (y1, y2) in the lower level. Its smooth part is P1
    (`eq:P1`); its terms are P2 = f2(x1) + ρ·f~2(y1) + ρ·f~3(y2) (`eq:P2`) and
    P3 = f3(x2) + ρ·f~2(z1) + ρ·f~3(z2) (`eq:P3`). Where the problem has both of its smoothness
    constants, this one has L_f + 2ρ·L_f~.

    The two variables are x = (x1, y1, y2) and y = (x2, z1, z2), None for an absent block:

        penalised = bilevax.penalty(problem, 100.0)
        solution = bilevax.solve(penalised, penalised.point(start))
        bilevax.certify(problem, penalised.stated_point(solution.point))
    """
    require_taken(problem, BilevelProblem, "penalty")
    one_number(rho, "rho")
    positive(rho, "rho")
    made = penalty_problem(problem, rho)
    constants = (problem.upper_smoothness, problem.lower_smoothness, rho)
    if any(known is None or tracing(known) for known in constants):
        return made
    upper, lower, weight = (float(np.asarray(known)) for known in constants)
    return dataclasses.replace(made, smoothness=upper + 2 * weight * lower)


def penalty_problem(problem: BilevelProblem, rho: ArrayLike) -> PenaltyProblem:
    """`penalty` without its checks, for a ρ that may be traced."""
    rho = jnp.asarray(rho)
    y1 = rho * problem.y1
    y2 = None if problem.y2 is None else rho * problem.y2
    upper, lower = problem.upper, problem.lower
    function = PenaltyFunction(upper, lower, rho)
    if isinstance(upper, UpperLagrangian) and isinstance(lower, LowerLagrangian):
        function = LagrangianPenalty(upper, lower, rho)
    return PenaltyProblem(
        objective=function,
        x=PerLeaf((problem.x1, y1, y2)),
        y=PerLeaf((problem.x2, y1, y2)),
        data=problem.data,
    )


def penalty_blocks(point: Point) -> tuple[Tree, Tree]:
    """A bilevel point as the two variables of its penalty problem; responses start at (y1, y2)."""
    z1 = point.y1 if point.z1 is None else point.z1
    z2 = point.y2 if point.z2 is None else point.z2
    return (point.x1, point.y1, point.y2), (point.x2, z1, z2)


def penalty_point(x: Tree, y: Tree) -> Point:
    """The inverse of `penalty_blocks`."""
    (x1, y1, y2), (x2, z1, z2) = x, y
    return Point(x1=x1, x2=x2, y1=y1, y2=y2, z1=z1, z2=z2)


class LowerFunction(eqx.Module):
    """f~1(x1, ·, ·) at a fixed x1."""

    lower: Callable[..., Array]
    x1: Tree

    def __call__(self, y1: Tree, y2: Tree, *data: Tree) -> Array:
        return self.lower(self.x1, y1, y2, *data)


def lower_level(problem: BilevelProblem, x1: Tree) -> MinimaxProblem:
    """The saddle point problem that (y1, y2) must solve, at a fixed x1."""
    return MinimaxProblem(
        LowerFunction(problem.lower, x1),
        problem.y1,
        PerLeaf(None) if problem.y2 is None else problem.y2,
        data=problem.data,
    )


class ProximalFunction(eqx.Module):
    """h(x, y) + a/2·‖x − x̂‖² − b/2·‖y − ŷ‖², paper `eq:minmax_prox`."""

    objective: Callable[..., Array]
    x_center: Tree
    y_center: Tree
    x_weight: Array
    y_weight: Array

    def __call__(self, x: Tree, y: Tree, *data: Tree) -> Array:
        value = self.objective(x, y, *data)
        near_x = self.x_weight / 2 * square(subtract(x, self.x_center))
        near_y = self.y_weight / 2 * square(subtract(y, self.y_center))
        return value + near_x.astype(value.dtype) - near_y.astype(value.dtype)


def proximal(
    problem: MinimaxProblem, x_center: Tree, y_center: Tree, x_weight: Array, y_weight: Array
) -> MinimaxProblem:
    """The strongly-convex-strongly-concave subproblem around (x_center, y_center)."""
    return MinimaxProblem(
        ProximalFunction(problem.objective, x_center, y_center, x_weight, y_weight),
        problem.x,
        problem.y,
        data=problem.data,
    )
