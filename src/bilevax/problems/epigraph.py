"""The epigraph form: absolute values and maxima of a lower level as variables and constraints."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr, Literal
from jaxtyping import Array

from bilevax import trees
from bilevax.functions import applied, inlined
from bilevax.problems.constrained import ConstrainedBilevelProblem
from bilevax.problems.point import Point
from bilevax.problems.validation import check_point, require
from bilevax.terms import Free
from bilevax.trees import Tree

# Where slopes and midpoints are looked at: so many places, at this distance from the start.
PLACES, DISTANCE = 4, 1.0
# What is less than this share of the sizes at hand is rounding.
ROUNDING = 1e-6
# The functions in which kinks are lifted.
LIFTED = ("lower", "constraints")
# What is known of the lower level as it was stated, and not of the new one.
NO_LONGER_KNOWN = (
    "multiplier_bound",
    "lower_lipschitz",
    "slater_margin",
    "lower_smoothness",
    "constraint_smoothness",
    "constraint_lipschitz",
    "lower_modulus",
)
# The operations with kinks.
KINKS = ("abs", "max", "reduce_max")


def epigraph_form(
    problem: ConstrainedBilevelProblem, start: Any
) -> tuple[ConstrainedBilevelProblem, Point]:
    """The same problem without kinks: |a| and max(a, b) become variables t of the lower level.

    Each |a(x, y)| in `lower` or `constraints` is replaced by t with the constraints a ≤ t and
    −a ≤ t, each max(a, b) by t with a ≤ t and b ≤ t, and the maximum of an array likewise. The
    solutions y are the same if neither function falls where t grows, and if a is affine in y
    inside of |a|: both are checked at some places around the start. Then both functions are smooth,
    as the methods ask for. The new y is {"y": y, "t": the new variables}; shapes are those of
    `start`, which is returned with the values of t there.

    Norms such as √Σwᵢ² are left as they are, and so is what a loop or a branch computes. Constants
    of the stated lower level, such as `lower_modulus`, do not hold for the new one and are dropped.
    """
    require(problem, ConstrainedBilevelProblem, "epigraph_form")
    start = check_point(problem, start, "start")
    functions = {name: getattr(problem, name) for name in LIFTED}
    lifts = {name: Lift(f) for name, f in functions.items() if f is not None}
    extra = problem.reference().extra
    kinks = {name: lift.kinks(start.x, start.y, *extra) for name, lift in lifts.items()}
    if not any(kinks.values()):
        raise ValueError("epigraph_form: no absolute value and no maximum of y was found")
    for name in kinks:
        if kinks[name]:
            lifts[name].check(name, start, extra)

    def constraints(x: Tree, y: Tree, *data: Any) -> Tree:
        stated, above = {}, []
        for name, lift in lifts.items():
            stated[name], parts = lift(x, y["y"], y["t"][name], *data)
            above += map(jnp.ravel, parts)
        return {"stated": stated.get("constraints", ()), "above": jnp.concatenate(above)}

    def without_t(name: str) -> Callable[..., Tree] | None:
        function = getattr(problem, name)
        return None if function is None else lambda x, y, *data: function(x, y["y"], *data)

    others = {name: without_t(name) for name in problem.function_names if name not in LIFTED}
    smooth = dataclasses.replace(
        problem,
        lower=lambda x, y, *data: lifts["lower"](x, y["y"], y["t"]["lower"], *data)[0],
        constraints=constraints,
        y={"y": problem.y, "t": Free()},
        **others,
        **dict.fromkeys(NO_LONGER_KNOWN),
    )
    t = {name: [kink.value for kink in found] for name, found in kinks.items()}
    return smooth, start.replace(y={"y": start.y, "t": t})


@dataclasses.dataclass(frozen=True)
class Kink:
    """An absolute value or a maximum that depends on y: its arguments and its value."""

    operation: str
    arguments: list[Array]
    value: Array
    axes: tuple[int, ...] = ()  # of a maximum over an array

    def above(self, t: Array) -> list[Array]:
        """What must not be positive so that t is at least the value."""
        if self.operation == "abs":
            (a,) = self.arguments
            return [a - t, -a - t]
        if self.operation == "max":
            return [a - t for a in jnp.broadcast_arrays(*self.arguments)]
        (a,) = self.arguments
        return [a - jnp.expand_dims(t, self.axes)]


class Lift:
    """A function of (x, y, *data) that takes the values of its kinks as an argument."""

    def __init__(self, function: Callable[..., Tree]):
        self.function = function

    def kinks(self, x: Tree, y: Tree, *data: Any) -> list[Kink]:
        """The kinks, at their own values."""
        return self._run(x, y, None, data)[1]

    def __call__(self, x: Tree, y: Tree, t: Sequence[Array], *data: Any) -> tuple[Tree, list]:
        """The value with t for the kinks, and what must not be positive."""
        result, kinks = self._run(x, y, t, data)
        return result, [part for kink, value in zip(kinks, t) for part in kink.above(value)]

    def _run(self, x: Tree, y: Tree, t: Sequence[Array] | None, data: tuple) -> tuple[Tree, list]:
        traced, shape = jax.make_jaxpr(self.function, return_shape=True)(x, y, *data)
        count = lambda *parts: len(jax.tree.leaves(parts))
        of_y = [False] * count(x) + [True] * count(y) + [False] * count(data)
        run = _Run(t)
        results, _ = run.run(traced.jaxpr, traced.consts, jax.tree.leaves((x, y, data)), of_y)
        return jax.tree.unflatten(jax.tree.structure(shape), results), run.kinks

    def check(self, name: str, start: Point, extra: tuple) -> None:
        """Refuse kinks that have no epigraph which is convex."""
        layout = trees.Layout.of(start.y)
        at, rng = np.asarray(layout.ravel(start.y)), np.random.default_rng(0)
        for _ in range(PLACES):
            ways = DISTANCE * (1 + np.abs(at)) * rng.normal(size=(2, at.size))
            ends = [layout.unravel(jnp.asarray(at + way, at.dtype)) for way in ways]
            middle = layout.unravel(jnp.asarray(at + ways.mean(axis=0), at.dtype))
            one, two, between = (self.kinks(start.x, y, *extra) for y in (*ends, middle))
            for a, b, c in zip(one, two, between):
                bent = [(u + v) / 2 - w for u, v, w in zip(a.arguments, b.arguments, c.arguments)]
                if c.operation == "abs" and not _is_little(bent, c.arguments):
                    raise ValueError(
                        f"epigraph_form: {name} has the absolute value of what is not affine in y"
                    )
            of_t = jax.jacobian(lambda t, y=middle: self(start.x, y, t, *extra)[0])
            slopes = jax.tree.leaves(of_t([kink.value for kink in between]))
            if any(np.min(s, initial=0.0) < -ROUNDING * np.max(np.abs(s)) for s in slopes):
                raise ValueError(
                    f"epigraph_form: {name} falls where one of its absolute values or maxima "
                    "grows, so that it is not convex in y"
                )


class _Run:
    """One run of a traced function with t for the kinks, or with their own values."""

    def __init__(self, t: Sequence[Array] | None):
        self.t, self.kinks = t, []

    def run(
        self, jaxpr: Jaxpr, consts: Sequence[Any], values: Sequence[Any], of_y: Sequence[bool]
    ) -> tuple[list[Any], list[bool]]:
        """What the outputs are, and which of them depend on y."""
        known = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *values)))
        depends = {v for v, yes in zip(jaxpr.invars, of_y) if yes}
        read = lambda v: v.val if isinstance(v, Literal) else known[v]
        moves = lambda v: not isinstance(v, Literal) and v in depends
        for eqn in jaxpr.eqns:
            results, moved = self._results(
                jaxpr, eqn, [read(v) for v in eqn.invars], [moves(v) for v in eqn.invars]
            )
            known.update(zip(eqn.outvars, results))
            depends.update(v for v, yes in zip(eqn.outvars, moved) if yes)
        return [read(v) for v in jaxpr.outvars], [moves(v) for v in jaxpr.outvars]

    def _results(
        self, jaxpr: Jaxpr, eqn: Any, values: list, of_y: list[bool]
    ) -> tuple[list[Any], list[bool]]:
        name, params = eqn.primitive.name, eqn.params
        if (inner := inlined(eqn)) is not None:
            return self.run(inner.jaxpr, inner.consts, values, of_y)
        results = applied(jaxpr, eqn, values)
        real = jnp.issubdtype(results[0].dtype, jnp.floating) if results else False
        if name not in KINKS or not any(of_y) or not real:
            return results, [any(of_y)] * len(results)
        kept = results[0] if self.t is None else self.t[len(self.kinks)]
        axes = params.get("axes", ())
        self.kinks.append(Kink(name, [jnp.asarray(v) for v in values], results[0], axes))
        return [kept], [True]


def _is_little(parts: Sequence[Array], of: Sequence[Array]) -> bool:
    """Whether these are rounding beside those."""
    size = max(1.0, *(float(np.max(np.abs(a), initial=0.0)) for a in of))
    return all(float(np.max(np.abs(p), initial=0.0)) <= ROUNDING * size for p in parts)
