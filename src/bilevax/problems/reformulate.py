"""From one problem form to the next: penalty, lower level, proximal subproblem."""

from __future__ import annotations

from collections.abc import Callable

import equinox as eqx
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array

from bilevax.problems.bilevel import BilevelProblem
from bilevax.problems.minimax import MinimaxProblem
from bilevax.problems.point import Point
from bilevax.terms import PerLeaf
from bilevax.trees import Tree, square, subtract


class PenaltyFunction(eqx.Module):
    """P1 = f1(x1, x2, y1, y2) + ρ·(f~1(x1, y1, z2) − f~1(x1, z1, y2)), paper `eq:P1`."""

    upper: Callable[..., Array]
    lower: Callable[..., Array]
    rho: Array

    def __call__(self, x: Tree, y: Tree, *data: Tree) -> Array:
        (x1, y1, y2), (x2, z1, z2) = x, y
        gap = self.lower(x1, y1, z2, *data) - self.lower(x1, z1, y2, *data)
        return self.upper(x1, x2, y1, y2, *data) + self.rho.astype(gap.dtype) * gap


def penalty(problem: BilevelProblem, rho: ArrayLike) -> MinimaxProblem:
    """The minimax problem of `eq:new_minmax` in x = (x1, y1, y2) and y = (x2, z1, z2)."""
    rho = jnp.asarray(rho)
    y1 = rho * problem.y1
    y2 = None if problem.y2 is None else rho * problem.y2
    return MinimaxProblem(
        PenaltyFunction(problem.upper, problem.lower, rho),
        PerLeaf((problem.x1, y1, y2)),
        PerLeaf((problem.x2, y1, y2)),
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
