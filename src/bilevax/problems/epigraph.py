"""The epigraph form: absolute values and maxima of a lower level as variables and constraints."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal
from jaxtyping import Array

from bilevax import trees
from bilevax.arguments import tracing
from bilevax.functions import applied, inlined
from bilevax.problems.constants import sample_domain
from bilevax.problems.constrained import ConstrainedBilevelProblem
from bilevax.problems.point import Point
from bilevax.problems.validation import check_point, require
from bilevax.terms import Free
from bilevax.trees import Tree

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
# So many places of the domains are looked at, with t at these shares of its values there, along at
# most so many entries of t.
PLACES, SHARES, ENTRIES = 12, (3.0, 1.0, 0.3, 0.1, 0.01), 256
# What is less than this share of the sizes at hand is rounding.
ROUNDING = 1e-6


def epigraph_form(
    problem: ConstrainedBilevelProblem, start: Any
) -> tuple[ConstrainedBilevelProblem, Point]:
    """The same problem without kinks: |a| and max(a, b) become variables t of the lower level.

    Each |a(x, y)| in `lower` or `constraints` is replaced by t with the constraints a ≤ t and
    −a ≤ t, each max(a, b) by t with a ≤ t and b ≤ t, and the maximum of an array likewise. The
    solutions y are the same if nothing falls where t grows, neither a function nor the argument of
    another maximum, and if a is affine in y inside of |a|. Both are checked at some places of the
    domains. Then both functions are smooth, as the methods ask for. The new y is {"y": y, "t": the
    new variables}; shapes are those of `start`, which is returned with the values of t there.

    Minima and norms such as √Σwᵢ² are left as they are, and so is what a loop or a branch computes.
    Constants of the stated lower level, such as `lower_modulus`, do not hold for the new one and
    are dropped.
    """
    require(problem, ConstrainedBilevelProblem, "epigraph_form")
    start = check_point(problem, start, "start")
    functions = {name: getattr(problem, name) for name in LIFTED}
    known = problem.reference()
    lifts = {name: _lift(f, known, start) for name, f in functions.items() if f is not None}
    kinks = {name: lift.kinks(start.x, start.y, *known.extra) for name, lift in lifts.items()}
    if not any(kinks.values()):
        raise ValueError("epigraph_form: no absolute value and no maximum of y was found")
    _refuse_kinks_of_samples(problem, start, lifts, kinks)
    for name, lift in lifts.items():
        if kinks[name]:
            _check(name, lift, known, start)
    others = [name for name in problem.function_names if name not in LIFTED]
    stated = {name: getattr(problem, name) for name in others}
    smooth = dataclasses.replace(
        problem,
        lower=SmoothLower(lifts["lower"]),
        constraints=Epigraph(lifts),
        y={"y": problem.y, "t": Free()},
        data=None,  # functions of one level choose their data themselves
        **{name: None if f is None else WithoutT(f) for name, f in stated.items()},
        **dict.fromkeys(NO_LONGER_KNOWN),
    )
    dtype = trees.dtype_of(start.y)
    values = {name: [k.value.astype(dtype) for k in found] for name, found in kinks.items()}
    return smooth.on(problem.data), Point(x=start.x, y={"y": start.y, "t": values})


@dataclasses.dataclass(frozen=True)
class Kink:
    """An absolute value or a maximum that depends on y: its arguments and its value."""

    operation: str
    arguments: list[Array]
    value: Array
    axes: tuple[int, ...] = ()  # of a maximum over an array
    nested: bool = False  # whether the arguments have other kinks in them

    def above(self, t: Array) -> list[Array]:
        """What must not be positive so that t is at least the value."""
        if self.operation == "abs":
            (a,) = self.arguments
            return [a - t, -a - t]
        if self.operation == "max":
            return [_below(a, t) for a in jnp.broadcast_arrays(*self.arguments)]
        (a,) = self.arguments
        return [_below(a, jnp.expand_dims(t, self.axes))]


def _below(a: Array, t: Array) -> Array:
    """a − t; what is −∞, as entries that a mask leaves out, is below by far."""
    out = jnp.isneginf(a)
    return jnp.where(out, -1, jnp.where(out, 0, a) - t)


class Lift(eqx.Module):
    """A function of (x, y, *data) that takes the values of its kinks as an argument."""

    function: Callable[..., Tree]
    smooth: tuple[int, ...] = eqx.field(static=True, default=())  # which kinks are none

    def kinks(self, x: Tree, y: Tree, *data: Any) -> list[Kink]:
        """The kinks, at their own values."""
        return self.with_kinks(x, y, None, *data)[1]

    def __call__(self, x: Tree, y: Tree, t: Sequence[Array], *data: Any) -> tuple[Tree, list]:
        """The value with t for the kinks, and what must not be positive."""
        result, kinks = self.with_kinks(x, y, t, *data)
        return result, [part for kink, value in zip(kinks, t) for part in kink.above(value)]

    def with_kinks(
        self, x: Tree, y: Tree, t: Sequence[Array] | None, *data: Any
    ) -> tuple[Tree, list[Kink]]:
        """The value with t for the kinks, or with their own values, and the kinks."""
        traced, shape = jax.make_jaxpr(self.function, return_shape=True)(x, y, *data)
        count = lambda *parts: len(jax.tree.leaves(parts))
        marks = [NEITHER] * count(x) + [OF_Y] * count(y) + [NEITHER] * count(data)
        run = _Run(t, self.smooth)
        live = [True] * len(traced.jaxpr.outvars)
        leaves = jax.tree.leaves((x, y, data))
        results, _ = run.run(traced.jaxpr, traced.consts, leaves, marks, live)
        return jax.tree.unflatten(jax.tree.structure(shape), results), run.kinks


class SmoothLower(eqx.Module):
    """The lower level's function of (x, {"y", "t"})."""

    lift: Lift

    def __call__(self, x: Tree, y: Tree, *data: Any) -> Array:
        return self.lift(x, y["y"], y["t"]["lower"], *data)[0]


class Epigraph(eqx.Module):
    """The constraints as they were stated, with t for their kinks, and those that t is above."""

    lifts: dict[str, Lift]

    def __call__(self, x: Tree, y: Tree, *data: Any) -> Tree:
        stated, above = {}, []
        for name, lift in self.lifts.items():
            stated[name], parts = lift(x, y["y"], y["t"][name], *data)
            above += map(jnp.ravel, parts)
        return {"stated": stated.get("constraints", ()), "above": jnp.concatenate(above)}


class WithoutT(eqx.Module):
    """A function of (x, y) as one of (x, {"y", "t"})."""

    function: Callable[..., Tree]

    def __call__(self, x: Tree, y: Tree, *data: Any) -> Tree:
        return self.function(x, y["y"], *data)


# What a value depends on: on neither y nor a kink, on y, or on a kink as well.
NEITHER, OF_Y, OF_A_KINK = range(3)


class _Run:
    """One run of a traced function with t for the kinks, or with their own values."""

    def __init__(self, t: Sequence[Array] | None, smooth: tuple[int, ...]):
        self.t, self.smooth, self.kinks, self.seen = t, smooth, [], 0

    def run(
        self,
        jaxpr: Jaxpr,
        consts: Sequence[Any],
        values: Sequence[Any],
        marks: Sequence[int],
        live: Sequence[bool],
    ) -> tuple[list[Any], list[int]]:
        """What the outputs are, and what they depend on; `live` are those that a slope is of."""
        known = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *values)))
        marked = dict(zip(jaxpr.invars, marks))
        alive = _alive(jaxpr, live)
        read = lambda v: v.val if isinstance(v, Literal) else known[v]
        mark = lambda v: NEITHER if isinstance(v, Literal) else marked.get(v, NEITHER)
        for eqn in jaxpr.eqns:
            given, of = [read(v) for v in eqn.invars], [mark(v) for v in eqn.invars]
            wanted = [v in alive for v in eqn.outvars]
            results, made = self._results(jaxpr, eqn, given, of, wanted)
            known.update(zip(eqn.outvars, results))
            marked.update(zip(eqn.outvars, made))
        return [read(v) for v in jaxpr.outvars], [mark(v) for v in jaxpr.outvars]

    def _results(
        self, jaxpr: Jaxpr, eqn: Any, values: list, marks: list[int], live: list[bool]
    ) -> tuple[list[Any], list[int]]:
        if (inner := _inner(eqn)) is not None:
            return self.run(inner.jaxpr, inner.consts, values, marks, live)
        results, most = applied(jaxpr, eqn, values), max(marks, default=NEITHER)
        if not (any(live) and most and _is_kink(eqn, results, values, marks)):
            return results, [most] * len(results)
        self.seen += 1
        if self.seen - 1 in self.smooth:
            return results, [most]
        kept = results[0] if self.t is None else self.t[len(self.kinks)]
        name, axes = eqn.primitive.name, eqn.params.get("axes", ())
        arguments = [jnp.asarray(v) for v in values]
        self.kinks.append(Kink(name, arguments, results[0], axes, most == OF_A_KINK))
        return [kept], [OF_A_KINK]


def _inner(eqn: Any) -> ClosedJaxpr | None:
    """What an operation stands for; one with a derivative of its own is smooth, but for relu."""
    inner = inlined(eqn)
    custom = eqn.primitive.name.startswith("custom_")
    return None if inner is None or (custom and not _is_maximum(inner.jaxpr)) else inner


def _is_maximum(jaxpr: Jaxpr) -> bool:
    """Whether a function is one maximum and nothing else."""
    if len(jaxpr.eqns) != 1:
        return False
    (eqn,) = jaxpr.eqns
    inner = inlined(eqn)
    return eqn.primitive.name == "max" if inner is None else _is_maximum(inner.jaxpr)


def _is_kink(eqn: Any, results: list, values: list, marks: list[int]) -> bool:
    """Whether it is a maximum or an absolute value of numbers, of which none is always −∞."""
    if eqn.primitive.name not in KINKS or not jnp.issubdtype(results[0].dtype, jnp.floating):
        return False
    constant = [v for v, mark in zip(values, marks) if not mark and not tracing(v)]
    return not any(np.all(np.isneginf(v)) for v in constant)


def _alive(jaxpr: Jaxpr, live: Sequence[bool]) -> set[Any]:
    """The values that an output has a slope in: not those that are compared, or held fixed."""
    alive = {v for v, yes in zip(jaxpr.outvars, live) if yes and not isinstance(v, Literal)}
    for eqn in reversed(jaxpr.eqns):
        has_slope = lambda v: v in alive and jnp.issubdtype(v.aval.dtype, jnp.inexact)
        if eqn.primitive.name != "stop_gradient" and any(map(has_slope, eqn.outvars)):
            alive.update(v for v in eqn.invars if not isinstance(v, Literal))
    return alive


def _refuse_kinks_of_samples(
    problem: Any, start: Point, lifts: dict[str, Lift], kinks: dict[str, list[Kink]]
) -> None:
    """A maximum for each sample has as many variables as there are samples."""
    if not problem.sampled:
        return
    source = problem.data
    _, batch = source.draw(source.refilled(source.init(0)))
    shapes = lambda found: [kink.value.shape for kink in found]
    for name, lift in lifts.items():
        if shapes(lift.kinks(start.x, start.y, batch)) != shapes(kinks[name]):
            raise ValueError(
                f"epigraph_form: {name} has an absolute value or a maximum for each sample, and "
                "minibatches have fewer; give all samples as plain data: data=source.everything()"
            )


def _places(problem: Any, start: Point) -> list[tuple[Tree, Tree, Tree]]:
    """Some x of the domain, with two y each."""
    found = []
    for key in jax.random.split(jax.random.key(0), PLACES):
        of_x, *of_y = jax.random.split(key, 3)
        x = sample_domain(problem.x, start.x, of_x)
        found.append((x, *(sample_domain(problem.y, start.y, k) for k in of_y)))
    return found


def _lift(function: Callable[..., Tree], problem: Any, start: Point) -> Lift:
    """Without the absolute values of what is never zero, such as a sum of exponentials."""
    lift = Lift(function)
    seen = [lift.kinks(x, y, *problem.extra) for x, y, _ in _places(problem, start)]
    same = lambda parts: np.all(np.stack(parts) > 0) or np.all(np.stack(parts) < 0)
    never = [k[0].operation == "abs" and same([v.arguments[0] for v in k]) for k in zip(*seen)]
    return Lift(function, tuple(i for i, yes in enumerate(never) if yes))


def _check(name: str, lift: Lift, problem: Any, start: Point) -> None:
    """Refuse kinks that have no epigraph which is convex, as far as some places show."""
    for x, one, two in _places(problem, start):
        middle = trees.combine(0.5, one, 0.5, two)
        at_one, at_two, kinks = (lift.kinks(x, y, *problem.extra) for y in (one, two, middle))
        for a, b, c in zip(at_one, at_two, kinks):
            if c.operation == "abs" and not _is_straight(a, b, c):
                raise ValueError(
                    f"epigraph_form: {name} has the absolute value of what is not affine in y"
                )
        t = [kink.value for kink in kinks]
        falls = _falls(lambda t, x=x, y=middle: lift.with_kinks(x, y, t, *problem.extra), t)
        if any(falls(trees.scale(share, t)) for share in SHARES):
            raise ValueError(
                f"epigraph_form: {name} falls where one of its absolute values or maxima grows, or "
                "has them in another one that does; then it need not be convex in y"
            )


def _is_straight(one: Kink, two: Kink, middle: Kink) -> bool:
    """Whether the argument of an absolute value is half-way where y is."""
    (a,), (b,), (c,) = one.arguments, two.arguments, middle.arguments
    size = 1 + max(float(jnp.max(jnp.abs(v), initial=0.0)) for v in (a, b))
    return float(jnp.max(jnp.abs((a + b) / 2 - c), initial=0.0)) <= ROUNDING * size


def _falls(function: Callable[..., tuple[Tree, list[Kink]]], t: list[Array]) -> Callable:
    """Whether something falls where an entry of t grows: to be asked at values of t."""
    layout = trees.Layout.of(t)
    size = layout.ravel(t).size
    entries = np.random.default_rng(0).permutation(size)[:ENTRIES]
    ways = jnp.eye(size)[entries] if size <= ENTRIES else jax.nn.one_hot(entries, size)

    def parts(flat: Array) -> list[Array]:
        """The results; maxima of kinks; and absolute values of kinks with both signs."""
        result, kinks = function(layout.unravel(flat))
        nested = [(k.operation, a) for k in kinks if k.nested for a in k.arguments]
        both = [-a for operation, a in nested if operation == "abs"]
        return [*jax.tree.leaves(result), *(a for _, a in nested), *both]

    @jax.jit
    def falls(t: list[Array]) -> Array:
        flat = layout.ravel(t)
        along = lambda way: jax.jvp(parts, (flat,), (way.astype(flat.dtype),))[1]
        slopes = jax.vmap(along)(ways)
        least = [jnp.min(s, initial=0.0) < -ROUNDING * (1 + jnp.max(jnp.abs(s))) for s in slopes]
        unknown = [~jnp.all(jnp.isfinite(s)) for s in slopes]
        return jnp.any(jnp.stack(least + unknown))

    return lambda t: bool(falls(t))
