"""The bilevel problem whose lower level is a convex program with constraints."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from bilevax import trees
from bilevax.arguments import non_negative, numbers, tracing
from bilevax.functions import as_function
from bilevax.problems.form import Call, Form
from bilevax.problems.levels import of_level
from bilevax.problems.minimax import finite_or_none, modulus_or_none, positive_or_none
from bilevax.problems.point import Point, as_arrays
from bilevax.terms import Term, as_term
from bilevax.trees import Tree

if TYPE_CHECKING:
    from bilevax.problems.checks import Report

# The functions that return arrays of constraints.
CONSTRAINTS = ("constraints", "equalities", "upper_constraints", "upper_equalities")
# The multipliers of each of them.
MULTIPLIERS = {
    "constraints": ("lam", "lam_bar"),
    "equalities": ("nu", "nu_bar"),
    "upper_constraints": ("upper_lam",),
    "upper_equalities": ("upper_nu",),
}


class ConstrainedBilevelProblem(Form):
    """min over (x, y) of f, with y a solution of min g(x, ·) under c(x, ·) ≤ 0 and e(x, ·) = 0.

    f = upper(x, y) + f2(x) and g = lower(x, y) + g2(y), paper `eq:blo_cons`. `lower` is smooth and
    convex in y; `constraints` c is smooth and convex in y, `equalities` e affine in y; each returns
    an array or a pytree of arrays, or is left out. `upper_constraints` G(x, y) ≤ 0 and
    `upper_equalities` H(x, y) = 0 restrict the upper level, and may couple x and y. The terms `x`
    and `y` are f2 and g2. With `data`, every function gets it as a last argument.

    Multipliers are sought in boxes [0, B] (signs free for equalities). B for the lower level is
    `multiplier_bound`, one number or a pytree shaped like the constraints; or, with
    `lower_lipschitz` (of g in y) and `slater_margin` G, what `eq:cons_y1` makes of these:
    B = 2·lower_lipschitz·diameter(y)/G. With neither, a first bound comes from a Slater point at
    the start, and it grows whenever a multiplier touches it. `upper_multiplier_bound` is likewise
    the bound for the upper level's multipliers.

    `upper_smoothness`, `lower_smoothness` and `constraint_smoothness` are Lipschitz constants of
    the gradients of `upper` and `lower` and of the Jacobian of all lower-level constraints
    together; `constraint_lipschitz` is the Lipschitz constant of these constraints, `f_low` a
    number that f never falls below. All are estimated where they are needed, if not given.

    Where y has no bounds, a certificate's bound on the lower level's gap rests on `lower_modulus`,
    if it is given: m > 0, a number or a function of x, with which `lower` is m-strongly convex in
    y. Without it, it holds within a radius: `radius`, or what `bilevax.certificates.gap` takes.
    """

    blocks: ClassVar[tuple[str, ...]] = ("x", "y")
    witnesses: ClassVar[dict[str, str | None]] = {"z": "y", "rho": None, "multipliers": None}
    function_names: ClassVar[tuple[str, ...]] = ("upper", "lower", *CONSTRAINTS)
    array_functions: ClassVar[tuple[str, ...]] = CONSTRAINTS

    upper: Callable[..., Array]
    lower: Callable[..., Array]
    x: Term
    y: Term
    constraints: Callable[..., Tree] | None = None
    equalities: Callable[..., Tree] | None = None
    upper_constraints: Callable[..., Tree] | None = None
    upper_equalities: Callable[..., Tree] | None = None
    data: Tree = None
    multiplier_bound: Tree = None
    upper_multiplier_bound: Tree = None
    lower_lipschitz: Array | None = None
    slater_margin: Array | None = None
    upper_smoothness: Array | None = None
    lower_smoothness: Array | None = None
    constraint_smoothness: Array | None = None
    constraint_lipschitz: Array | None = None
    f_low: Any = None
    lower_modulus: Any = None
    radius: Any = None

    def __init__(
        self,
        upper: Callable[..., Array],
        lower: Callable[..., Array],
        *,
        x: Any,
        y: Any,
        constraints: Callable[..., Tree] | None = None,
        equalities: Callable[..., Tree] | None = None,
        upper_constraints: Callable[..., Tree] | None = None,
        upper_equalities: Callable[..., Tree] | None = None,
        data: Tree = None,
        multiplier_bound: Any = None,
        upper_multiplier_bound: Any = None,
        lower_lipschitz: Any = None,
        slater_margin: Any = None,
        upper_smoothness: Any = None,
        lower_smoothness: Any = None,
        constraint_smoothness: Any = None,
        constraint_lipschitz: Any = None,
        f_low: Any = None,
        lower_modulus: Any = None,
        radius: Any = None,
    ):
        self.upper = of_level(as_function(upper, "upper"), "upper", data)
        self.lower = of_level(as_function(lower, "lower"), "lower", data)
        self.x = as_term(x, "x")
        self.y = as_term(y, "y")

        def function_or_none(function: Any, name: str, level: str = "lower") -> Any:
            return None if function is None else of_level(as_function(function, name), level, data)

        self.constraints = function_or_none(constraints, "constraints")
        self.equalities = function_or_none(equalities, "equalities")
        self.upper_constraints = function_or_none(upper_constraints, "upper_constraints", "upper")
        self.upper_equalities = function_or_none(upper_equalities, "upper_equalities", "upper")
        self.data = as_arrays(data)
        if multiplier_bound is not None and slater_margin is not None:
            raise ValueError("give multiplier_bound or slater_margin, not both: one sets the other")
        if (slater_margin is None) != (lower_lipschitz is None):
            raise ValueError(
                "slater_margin and lower_lipschitz make the multiplier bound together; "
                "give both, or neither"
            )
        self.multiplier_bound = _bound(multiplier_bound, "multiplier_bound")
        self.upper_multiplier_bound = _bound(upper_multiplier_bound, "upper_multiplier_bound")
        self.lower_lipschitz = positive_or_none(lower_lipschitz, "lower_lipschitz")
        self.slater_margin = positive_or_none(slater_margin, "slater_margin")
        self.upper_smoothness = positive_or_none(upper_smoothness, "upper_smoothness")
        self.lower_smoothness = positive_or_none(lower_smoothness, "lower_smoothness")
        if constraint_smoothness is not None and not tracing(constraint_smoothness):
            non_negative(constraint_smoothness, "constraint_smoothness")  # zero if they are affine
            constraint_smoothness = np.asarray(constraint_smoothness, float)
        self.constraint_smoothness = constraint_smoothness
        self.constraint_lipschitz = positive_or_none(constraint_lipschitz, "constraint_lipschitz")
        self.f_low = finite_or_none(f_low, "f_low")
        self.lower_modulus = modulus_or_none(lower_modulus, "lower_modulus")
        self.radius = positive_or_none(radius, "radius")

    def calls(self, point: Point) -> list[Call]:
        blocks = {"x": point.x, "y": point.y}
        functions = {name: getattr(self, name) for name in self.function_names}
        return [Call(name, f, blocks) for name, f in functions.items() if f is not None]

    def all_calls(self, point: Point) -> list[Call]:
        there = self.first_witnesses(point)
        return self.calls(there) + self.calls(there.replace(y=there.z))

    def check_witnesses(self, point: Point, what: str) -> None:
        """Refuse multipliers that are missing, too many, or not shaped like their constraints."""
        if point.multipliers is None:
            return
        for function, names in MULTIPLIERS.items():
            call = lambda x, y, f=function: self.called(f, x, y)
            wanted = jax.eval_shape(call, point.x, point.y)
            for name in names:
                given = getattr(point.multipliers, name)
                if (given is None) != (wanted is None):
                    verb = "lacks" if given is None else "has"
                    has = "has" if wanted is not None else "has no"
                    raise ValueError(
                        f"{what}.multipliers {verb} {name}, but the problem {has} {function}; give "
                        "all multipliers of its constraints, or leave multipliers out"
                    )
                if wanted is not None and trees.Layout.of(given) != trees.Layout.of(wanted):
                    raise ValueError(
                        f"{what}.multipliers.{name} must be shaped like what {function} returns, "
                        f"{jax.tree.map(jnp.shape, wanted)}, not {jax.tree.map(jnp.shape, given)}"
                    )

    def smooth_upper(self, x: Tree, y: Tree) -> Array:
        """f1(x, y)"""
        return self.upper(x, y, *self.extra)

    def smooth_lower(self, x: Tree, y: Tree) -> Array:
        """g1(x, y)"""
        return self.lower(x, y, *self.extra)

    def upper_value(self, x: Tree, y: Tree) -> Array:
        """f = f1 + f2(x)"""
        return self.smooth_upper(x, y) + self.x.value(x)

    def lower_value(self, x: Tree, y: Tree) -> Array:
        """g = g1 + g2(y)"""
        return self.smooth_lower(x, y) + self.y.value(y)

    def called(self, name: str, x: Tree, y: Tree) -> Tree:
        """What the constraint function of that name returns at (x, y); None if it is absent."""
        function = getattr(self, name)
        return None if function is None else function(x, y, *self.extra)

    def check(self, start: Any, *, samples: int = 32, seed: int = 0) -> Report:
        """Sample and report violations of what the theory assumes."""
        from bilevax.problems.checks import check_constrained

        return check_constrained(self, start, samples=samples, seed=seed)


def _bound(value: Any, name: str) -> Any:
    """A bound on multipliers, one number or a pytree of them, each finite and > 0."""

    def leaf(path: tuple, part: Any) -> Any:
        where = f"{name}{jax.tree_util.keystr(path)}"
        array = numbers(part, where)
        if array is None:
            return part  # traced
        if not (np.all(np.isfinite(array)) and np.all(array > 0)):
            raise ValueError(f"{where} must be finite and > 0, not {part}")
        return array.astype(float)

    return jax.tree_util.tree_map_with_path(leaf, value)
