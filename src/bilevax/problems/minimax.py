"""min over x, max over y of h(x, y) + p(x) − q(y): what every other form is turned into."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import numpy as np
from jaxtyping import Array

from bilevax.arguments import finite, non_negative, one_number, positive, tracing
from bilevax.functions import as_function
from bilevax.problems.form import Call, Form
from bilevax.problems.point import Point, as_arrays
from bilevax.terms import Term, as_term
from bilevax.trees import Tree

if TYPE_CHECKING:
    from bilevax.problems.checks import Report


class MinimaxProblem(Form):
    """min over x, max over y of h(x, y) + p(x) − q(y).

    `objective` is h(x, y), smooth and concave in y (convexity in x is not asked); it is called as
    h(x, y, data) when `data` is given. `x` and `y` are the terms p and q. `smoothness` is the
    Lipschitz constant of ∇h, estimated where it is needed if not given.
    """

    blocks: ClassVar[tuple[str, ...]] = ("x", "y")
    function_names: ClassVar[tuple[str, ...]] = ("objective",)

    objective: Callable[..., Array]
    x: Term
    y: Term
    data: Tree = None
    smoothness: Array | None = None

    def __init__(
        self,
        objective: Callable[..., Array],
        x: Any,
        y: Any,
        *,
        data: Tree = None,
        smoothness: Any = None,
    ):
        self.objective = as_function(objective, "objective")
        self.x = as_term(x, "x")
        self.y = as_term(y, "y")
        self.data = as_arrays(data)
        self.smoothness = positive_or_none(smoothness, "smoothness")

    def calls(self, point: Point) -> list[Call]:
        return [Call("objective", self.objective, {"x": point.x, "y": point.y})]

    def smooth(self, x: Tree, y: Tree) -> Array:
        """h(x, y)"""
        return self.objective(x, y, *self.extra)

    def value(self, x: Tree, y: Tree) -> Array:
        """H(x, y) = h(x, y) + p(x) − q(y)"""
        return self.smooth(x, y) + self.x.value(x) - self.y.value(y)

    def gradient(self, x: Tree, y: Tree) -> tuple[Tree, Tree]:
        """(∇ₓh, ∇ᵧh): the one thing counted as a gradient evaluation."""
        return jax.grad(self.smooth, argnums=(0, 1))(x, y)

    def check(self, start: Any, *, samples: int = 32, seed: int = 0) -> Report:
        """Sample and report violations of what the theory assumes."""
        from bilevax.problems.checks import check_minimax

        return check_minimax(self.reference(), start, samples=samples, seed=seed)


def finite_or_none(value: Any, name: str) -> Any:
    """A given number, which need not be positive, as an argument of compiled programs."""
    if value is None or tracing(value):
        return value
    one_number(value, name)
    finite(value, name)
    return np.asarray(value, float)


def non_negative_or_none(value: Any, name: str) -> Any:
    """A given constant that may be zero, as an argument of compiled programs."""
    if value is None or tracing(value):
        return value
    non_negative(value, name)
    return np.asarray(value, float)


def modulus_or_none(value: Any, name: str) -> Any:
    """A given modulus: a number > 0, or a function of the upper level's variable."""
    return as_function(value, name) if callable(value) else positive_or_none(value, name)


def positive_or_none(value: Any, name: str) -> Any:
    """A given constant as a number that compiled programs take as an argument."""
    positive(value, name)
    return value if value is None or tracing(value) else np.asarray(value, float)
