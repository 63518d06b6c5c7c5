"""A minimax problem as the upper level of a bilevel problem, for solvers of such."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array

from bilevax import trees
from bilevax.problems.bilevel import BilevelProblem
from bilevax.problems.form import Form, Reformulation
from bilevax.problems.minimax import MinimaxProblem
from bilevax.problems.point import Point
from bilevax.terms import Box
from bilevax.trees import Tree


class Objective(eqx.Module):
    """h(x1, x2), whatever the lower level answers."""

    objective: Callable[..., Array]

    def __call__(self, x1: Tree, x2: Tree, y1: Array, y2: None, *data: Tree) -> Array:
        return self.objective(x1, x2, *data)


class HalfSquare(eqx.Module):
    """½y1², whose minimiser is zero."""

    def __call__(self, x1: Tree, y1: Array, y2: None, *data: Tree) -> Array:
        return y1**2 / 2


class UpperLevel(Reformulation):
    """min over x, max over y of h + p − q, with x1 = x, x2 = y and a lower level that says nothing.

    Its stationarity and its response in x2 are the two lines of the minimax problem.
    """

    form: ClassVar[type[Form]] = BilevelProblem

    @classmethod
    def of(cls, stated: MinimaxProblem, start: Point) -> UpperLevel:
        return cls()

    def problem(self, stated: MinimaxProblem) -> BilevelProblem:
        levels = (Objective(stated.objective), HalfSquare())
        blocks = {"x1": stated.x, "x2": stated.y, "y1": Box(-1.0, 1.0)}
        return BilevelProblem(*levels, **blocks, upper_smoothness=stated.smoothness).on(stated.data)

    def point(self, point: Point) -> Point:
        zero = jnp.zeros((), trees.dtype_of((point.x, point.y)))
        return Point(x1=point.x, x2=point.y, y1=zero, rho=jnp.ones_like(zero))

    def stated_point(self, point: Point) -> Point:
        return Point(x=point.x1, y=point.x2)
