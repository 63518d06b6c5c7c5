"""The bilevel problem whose two levels are minimax problems."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import jax
from jaxtyping import Array

from bilevax.functions import as_function
from bilevax.problems.form import Call, Form
from bilevax.problems.levels import of_level
from bilevax.problems.minimax import (
    finite_or_none,
    modulus_or_none,
    non_negative_or_none,
    positive_or_none,
)
from bilevax.problems.point import Point, as_arrays
from bilevax.terms import Term, as_term
from bilevax.trees import Tree

if TYPE_CHECKING:
    from bilevax.problems.checks import Report


class BilevelProblem(Form):
    """min over (x1, y1, y2), max over x2 of f, with (y1, y2) a saddle point of f~(x1, ·, ·).

    f = upper(x1, x2, y1, y2) + f2(x1) − f3(x2) and f~ = lower(x1, y1, y2) + f~2(y1) − f~3(y2).
    `upper` is smooth and concave in x2; `lower` is smooth, convex in y1 and concave in y2. The
    terms `x1`, `x2`, `y1`, `y2` are f2, f3, f~2, f~3. A problem without x2 or y2 leaves that term
    out, and its functions get None in that place. With `data`, both functions get it as a last
    argument; it is passed to the compiled program, never built into it.

    `upper_smoothness` and `lower_smoothness` are the Lipschitz constants of the two gradients, and
    `f_low` is a number that f never falls below. All three are estimated where they are needed, if
    not given.

    `data` may be a source of minibatches (`bilevax.data`): then the functions get a minibatch, f1
    and f~1 are their means over it, and `upper_deviation` and `lower_deviation` are δ with
    E‖∇(minibatch) − ∇‖² ≤ δ². With `data.Levels`, each function gets a minibatch of its own level.

    Where y1 or y2 has no bounds, a certificate's bound on the lower level's gap rests on
    `lower_modulus`, if it is given: m > 0, a number or a function of x1, with which `lower` is
    m-strongly convex in y1, and m-strongly concave in y2 if y2 has no bounds. Without it, it holds
    within a radius: `radius`, or what `bilevax.certificates.gap` takes.
    """

    blocks: ClassVar[tuple[str, ...]] = ("x1", "x2", "y1", "y2")
    witnesses: ClassVar[dict[str, str | None]] = {"z1": "y1", "z2": "y2", "rho": None}
    function_names: ClassVar[tuple[str, ...]] = ("upper", "lower")

    upper: Callable[..., Array]
    lower: Callable[..., Array]
    x1: Term
    y1: Term
    x2: Term | None = None
    y2: Term | None = None
    data: Tree = None
    upper_smoothness: Array | None = None
    lower_smoothness: Array | None = None
    f_low: Any = None
    upper_deviation: Any = None
    lower_deviation: Any = None
    lower_modulus: Any = None
    radius: Any = None

    def __init__(
        self,
        upper: Callable[..., Array],
        lower: Callable[..., Array],
        *,
        x1: Any,
        y1: Any,
        x2: Any = None,
        y2: Any = None,
        data: Tree = None,
        upper_smoothness: Any = None,
        lower_smoothness: Any = None,
        f_low: Any = None,
        upper_deviation: Any = None,
        lower_deviation: Any = None,
        lower_modulus: Any = None,
        radius: Any = None,
    ):
        self.upper = of_level(as_function(upper, "upper"), "upper", data)
        self.lower = of_level(as_function(lower, "lower"), "lower", data)
        self.x1 = as_term(x1, "x1")
        self.y1 = as_term(y1, "y1")
        self.x2 = None if x2 is None else as_term(x2, "x2")
        self.y2 = None if y2 is None else as_term(y2, "y2")
        self.data = as_arrays(data)
        self.upper_smoothness = positive_or_none(upper_smoothness, "upper_smoothness")
        self.lower_smoothness = positive_or_none(lower_smoothness, "lower_smoothness")
        self.f_low = finite_or_none(f_low, "f_low")
        self.upper_deviation = non_negative_or_none(upper_deviation, "upper_deviation")
        self.lower_deviation = non_negative_or_none(lower_deviation, "lower_deviation")
        self.lower_modulus = modulus_or_none(lower_modulus, "lower_modulus")
        self.radius = positive_or_none(radius, "radius")

    def calls(self, point: Point) -> list[Call]:
        p = point
        upper = {"x1": p.x1, "x2": p.x2, "y1": p.y1, "y2": p.y2}
        lower = {"x1": p.x1, "y1": p.y1, "y2": p.y2}
        return [Call("upper", self.upper, upper), Call("lower", self.lower, lower)]

    def all_calls(self, point: Point) -> list[Call]:
        p = self.first_witnesses(point)
        above = {"x1": p.x1, "y1": p.y1, "y2": p.z2}
        below = {"x1": p.x1, "y1": p.z1, "y2": p.y2}
        return self.calls(p)[:1] + [Call("lower", self.lower, at) for at in (above, below)]

    def smooth_upper(self, x1: Tree, x2: Tree, y1: Tree, y2: Tree) -> Array:
        """f1(x1, x2, y1, y2)"""
        return self.upper(x1, x2, y1, y2, *self.extra)

    def smooth_lower(self, x1: Tree, y1: Tree, y2: Tree) -> Array:
        """f~1(x1, y1, y2)"""
        return self.lower(x1, y1, y2, *self.extra)

    def upper_value(self, x1: Tree, x2: Tree, y1: Tree, y2: Tree) -> Array:
        """f = f1 + f2(x1) − f3(x2)"""
        value = self.smooth_upper(x1, x2, y1, y2) + self.x1.value(x1)
        return value if self.x2 is None else value - self.x2.value(x2)

    def lower_value(self, x1: Tree, y1: Tree, y2: Tree) -> Array:
        """f~ = f~1 + f~2(y1) − f~3(y2)"""
        value = self.smooth_lower(x1, y1, y2) + self.y1.value(y1)
        return value if self.y2 is None else value - self.y2.value(y2)

    def upper_gradient(self, x1: Tree, x2: Tree, y1: Tree, y2: Tree) -> tuple[Tree, ...]:
        """∇f1, one entry per block."""
        return jax.grad(self.smooth_upper, argnums=(0, 1, 2, 3))(x1, x2, y1, y2)

    def lower_gradient(self, x1: Tree, y1: Tree, y2: Tree) -> tuple[Tree, ...]:
        """∇f~1, one entry per block."""
        return jax.grad(self.smooth_lower, argnums=(0, 1, 2))(x1, y1, y2)

    def check(self, start: Any, *, samples: int = 32, seed: int = 0) -> Report:
        """Sample and report violations of what the theory assumes."""
        from bilevax.problems.checks import check_bilevel

        return check_bilevel(self.reference(), start, samples=samples, seed=seed)
