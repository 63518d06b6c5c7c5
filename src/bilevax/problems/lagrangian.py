"""From a constrained lower level to a minimax one: the multipliers become variables in boxes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from bilevax import trees
from bilevax.problems.bilevel import BilevelProblem
from bilevax.problems.constrained import CONSTRAINTS, ConstrainedBilevelProblem
from bilevax.problems.point import Multipliers, Point
from bilevax.problems.validation import check_point, diameter, require_bounded, require_taken
from bilevax.terms import Box, PerLeaf, Term
from bilevax.terms.sets import ClosedBox
from bilevax.trees import Tree


class MultiplierBounds(eqx.Module):
    """How large each multiplier may be: pairs (for inequalities, for equalities) of trees.

    They bound multipliers of constraints divided by `lower_scale` and `upper_scale`: ones where the
    user gave a bound, else what each constraint varies by, so that its unit does not matter.

    `lower` bounds y2 and z2, `upper` the part of x2 that belongs to the upper level's constraints.
    `shared`, if there, bounds another part: the lower level's constraints once more, as those of
    the upper level. These change nothing where Slater's condition holds for every x, as in the
    paper. Where the lower level is infeasible for some x, bounded multipliers alone would take such
    an x for a solution.
    """

    lower: tuple[Tree, Tree]
    upper: tuple[Tree, Tree]
    shared: tuple[Tree, Tree] | None
    lower_scale: tuple[Tree, Tree]
    upper_scale: tuple[Tree, Tree]


class Weighed(eqx.Module):
    """Σ ⟨multiplier/scale, function(x, y)⟩ over inequalities and equalities; zero without them."""

    functions: tuple[Callable[..., Tree] | None, ...]
    scales: tuple[Tree, Tree]

    def __call__(self, multipliers: Tree, x: Tree, y: Tree, data: tuple, dtype: jnp.dtype) -> Array:
        return self.weighed(multipliers, self.values(x, y, data), dtype)

    def values(self, x: Tree, y: Tree, data: tuple) -> tuple[Tree, ...]:
        return tuple(None if f is None else f(x, y, *data) for f in self.functions)

    def weighed(self, multipliers: Tree, values: tuple[Tree, ...], dtype: jnp.dtype) -> Array:
        total = jnp.zeros((), dtype)
        if multipliers is None:
            return total
        for value, scale, multiplier in zip(values, self.scales, multipliers):
            if value is not None and multiplier is not None:
                weights = jax.tree.map(jnp.divide, multiplier, scale)
                total = total + trees.dot(weights, value).astype(dtype)
        return total


class LowerLagrangian(eqx.Module):
    """g1(x, y) + λᵀc(x, y) + νᵀe(x, y) for y2 = scale·(λ, ν), paper `eq:tildef_cons`."""

    lower: Callable[..., Array]
    constrained: Weighed

    def __call__(self, x: Tree, y: Tree, y2: Tree, *data: Tree) -> Array:
        value = self.lower(x, y, *data)
        return value + self.constrained(y2, x, y, data, value.dtype)


class UpperLagrangian(eqx.Module):
    """f1(x, y) with the upper level's constraints, and the shared ones, weighed by x2."""

    upper: Callable[..., Array]
    own: Weighed
    shared: Weighed

    def __call__(self, x: Tree, x2: Tree, y: Tree, y2: Tree, *data: Tree) -> Array:
        value = self.upper(x, y, *data)
        own, shared = (None, None) if x2 is None else x2
        value = value + self.own(own, x, y, data, value.dtype)
        return value + self.shared(shared, x, y, data, value.dtype)


def _boxes(bounds: tuple[Tree, Tree] | None) -> tuple[Tree, Tree] | None:
    """[0, B] for multipliers of inequalities, [−B, B] for those of equalities."""
    if bounds is None:
        return None
    inequalities, equalities = bounds
    return (
        jax.tree.map(lambda b: ClosedBox(0 * b, b), inequalities),
        jax.tree.map(lambda b: ClosedBox(-b, b), equalities),
    )


def _term(boxes: Tree) -> Term | None:
    is_box = lambda leaf: isinstance(leaf, Term)
    return PerLeaf(boxes) if jax.tree.leaves(boxes, is_leaf=is_box) else None


class LagrangianProblem(BilevelProblem):
    """A `lagrangian`: a bilevel problem in x1 = x, y1 = y and the multipliers y2 and x2.

    `point` and `stated_point` go there and back; `bounds` are those of the multipliers.
    """

    bounds: Any = None

    def __init__(self, *functions: Callable[..., Array], bounds: MultiplierBounds, **known: Any):
        super().__init__(*functions, **known)
        self.bounds = bounds

    def point(self, point: Point) -> Point:
        """A point of the constrained problem as one of this; multipliers it lacks are zero."""
        if not (isinstance(point, Point) and point.x is not None and point.y is not None):
            raise TypeError(
                "point takes a point of the constrained problem, bilevax.Point(x=…, y=…), not "
                f"{point!r}"
            )
        return bilevel_point(point, self.bounds)

    def stated_point(self, point: Point) -> Point:
        """The way back: (x, y) = (x1, y1) and z = z1; with rho, λ̄ = y2 and λ = ρ·z2, too."""
        if not (isinstance(point, Point) and point.x1 is not None and point.y1 is not None):
            raise TypeError(
                "stated_point takes a point of the Lagrangian, bilevax.Point(x1=…, y1=…), not "
                f"{point!r}"
            )
        if point.rho is None:
            return Point(x=point.x1, y=point.y1, z=point.z1)
        return constrained_point(point, self.bounds)


def lagrangian(problem: ConstrainedBilevelProblem, start: Point) -> LagrangianProblem:
    """The bilevel problem that a constrained one becomes, `eq:cons_minmax` and `eq:tildef_cons`.

    Its x1 and y1 are x and y, and f stays as it is. Its lower level is
    f~(x, y, y2) = g(x, y) + λᵀc(x, y) + νᵀe(x, y) for y2 = (λ, ν), λ in [0, B] and ν in [−B, B],
    None in the place of one that the problem does not have. Where there are constraints of the
    upper level, x2 = ((λ_G, ν_H), None) weighs them in f.

    B is the problem's `multiplier_bound`, or 2·`lower_lipschitz`·diameter(y)/`slater_margin`
    (`eq:cons_y1`); one of the two must be given, and `upper_multiplier_bound` where the upper level
    has constraints. `solve` does without: it begins with bounds of its own and lets them grow. Of
    `start` only shapes and the dtype matter:

        bilevel = bilevax.lagrangian(problem, start)
        solution = bilevax.solve(bilevel, bilevel.point(start))
        bilevax.certify(problem, bilevel.stated_point(solution.point))
    """
    p = problem
    require_taken(p, ConstrainedBilevelProblem, "lagrangian")
    start = check_point(p, start, "start")
    shapes = {
        name: jax.eval_shape(lambda x, y, f=name: p.reference().called(f, x, y), start.x, start.y)
        for name in CONSTRAINTS
    }
    ones = jax.tree.map(lambda s: np.ones(s.shape, s.dtype), shapes)
    pair, own = (
        tuple(ones[name] for name in names) for names in (CONSTRAINTS[:2], CONSTRAINTS[2:])
    )
    if jax.tree.leaves(pair) and not fixed(p):
        raise ValueError(
            "lagrangian needs a bound on the multipliers of the lower level: give the problem "
            "multiplier_bound=…, or slater_margin=… and lower_lipschitz=…; bilevax.solve finds "
            "bounds by itself"
        )
    if jax.tree.leaves(own) and p.upper_multiplier_bound is None:
        raise ValueError(
            "lagrangian needs a bound on the multipliers of the upper level's constraints: give "
            "the problem upper_multiplier_bound=…; bilevax.solve finds bounds by itself"
        )
    lower = fixed_bounds(p, start.y, pair) if jax.tree.leaves(pair) else pair
    upper = own
    if jax.tree.leaves(own):
        upper = given_bounds(p.upper_multiplier_bound, own, "upper_multiplier_bound")
    bounds = MultiplierBounds(lower, upper, None, pair, own)
    made = lagrangian_problem(p, bounds)
    known = {field.name: getattr(made, field.name) for field in dataclasses.fields(made)}
    functions = (known.pop("upper"), known.pop("lower"))
    data = known.pop("data")
    return LagrangianProblem(*functions, bounds=bounds, **known).on(data)


def fixed(problem: ConstrainedBilevelProblem) -> bool:
    """Whether the lower level's bounds are the user's own, so that they may not grow."""
    return problem.multiplier_bound is not None or problem.slater_margin is not None


def fixed_bounds(problem: ConstrainedBilevelProblem, y: Tree, like: tuple) -> tuple:
    """The bounds of the lower level's multipliers: as given, or from `eq:cons_y1`."""
    p = problem
    if p.multiplier_bound is not None:
        return given_bounds(p.multiplier_bound, like, "multiplier_bound")
    require_bounded(p.y, y, "y", "eq:cons_y1")
    assert p.lower_lipschitz is not None
    assert p.slater_margin is not None
    most = 2 * float(p.lower_lipschitz) * float(diameter(p.y, y)) / float(p.slater_margin)
    return jax.tree.map(lambda s: np.full_like(s, most), like)


def given_bounds(bound: Tree, like: Tree, name: str) -> Tree:
    """A user's bound, spread over arrays shaped like the multipliers."""
    if np.ndim(bound) == 0 and not isinstance(bound, dict | list | tuple):
        return jax.tree.map(lambda s: np.full_like(s, bound), like)
    (first, _) = like
    try:
        spread = jax.tree.map(
            lambda b, s: np.broadcast_to(np.asarray(b, s.dtype), s.shape), bound, first
        )
    except (ValueError, TypeError):
        raise ValueError(
            f"{name} must be one number or shaped like what the constraints return, "
            f"{jax.tree.map(jnp.shape, first)}, not {jax.tree.map(np.shape, bound)}"
        ) from None
    most = max((float(np.max(leaf)) for leaf in jax.tree.leaves(spread) if leaf.size), default=1.0)
    return spread, jax.tree.map(lambda s: np.full_like(s, most), like[1])


def lagrangian_problem(
    problem: ConstrainedBilevelProblem, bounds: MultiplierBounds
) -> BilevelProblem:
    """`lagrangian` within any bounds, those that were found among them."""
    p = problem
    x2 = _term((_boxes(bounds.upper), _boxes(bounds.shared)))
    pair = Weighed((p.constraints, p.equalities), bounds.lower_scale)
    own = Weighed((p.upper_constraints, p.upper_equalities), bounds.upper_scale)
    lagrangian = BilevelProblem(
        UpperLagrangian(p.upper, own, pair),
        LowerLagrangian(p.lower, pair),
        x1=p.x,
        y1=p.y,
        x2=x2,
        y2=_term(_boxes(bounds.lower)),
        # What is known of f alone does not hold for f with weighed constraints.
        upper_smoothness=p.upper_smoothness if x2 is None else None,
        lower_smoothness=_lower_smoothness(p, bounds),
        f_low=p.f_low,
        lower_modulus=p.lower_modulus,  # weighed constraints are convex: they take nothing from it
        radius=p.radius,
    )
    return lagrangian.on(p.data)  # which its functions take apart themselves


def without_bounds(problem: BilevelProblem) -> BilevelProblem:
    """A `lagrangian` whose multipliers have no bounds but their signs.

    Where the user bounds those of the lower level, all stay as they are. Bounds that were found
    serve first-order steps, whose lengths depend on domains. Without them the lower level's
    constraints need no shared multipliers: these stay at zero.
    """
    if not isinstance(problem.lower, LowerLagrangian) or problem.x2 is None:
        return problem
    own, shared = problem.x2.parts  # pyright: ignore[reportAttributeAccessIssue]
    if shared is None:
        return problem
    is_box = lambda leaf: isinstance(leaf, Box)
    most = lambda bound: jnp.full_like(bound, jnp.inf)

    def signs(boxes: Tree) -> Tree:
        (inequalities, equalities) = boxes
        return (
            jax.tree.map(
                lambda box: Box(0 * box.upper, most(box.upper)), inequalities, is_leaf=is_box
            ),
            jax.tree.map(
                lambda box: Box(-most(box.upper), most(box.upper)), equalities, is_leaf=is_box
            ),
        )

    none = lambda box: ClosedBox(0 * box.upper, 0 * box.upper)
    x2 = PerLeaf((signs(own), jax.tree.map(none, shared, is_leaf=is_box)))
    y2 = PerLeaf(signs(problem.y2.parts))  # pyright: ignore[reportAttributeAccessIssue, reportOptionalMemberAccess]
    at = lambda p: (p.x2, p.y2)
    return eqx.tree_at(at, problem, (x2, y2), is_leaf=lambda leaf: isinstance(leaf, Term))


def _lower_smoothness(problem: ConstrainedBilevelProblem, bounds: MultiplierBounds) -> Array | None:
    """L_∇f~ ≤ L_∇g + ‖B‖·L_∇c + L_c, if the problem knows all three (the paper has 2·L_c).

    For constraints as they are written: with a scale of their own it is estimated instead.
    """
    p = problem
    if p.constraints is None and p.equalities is None:
        return p.lower_smoothness
    objective, bend, slope = p.lower_smoothness, p.constraint_smoothness, p.constraint_lipschitz
    if objective is None or bend is None or slope is None or bounds.shared is not None:
        return None
    return objective + trees.norm(bounds.lower) * bend + slope


def bilevel_point(point: Point, bounds: MultiplierBounds) -> Point:
    """A constrained point as one of its `lagrangian`; multipliers it lacks begin at zero."""
    m = Multipliers() if point.multipliers is None else point.multipliers
    m = _rescaled(m, bounds, jnp.multiply)

    def within(values: tuple, limits: tuple | None) -> Tree:
        if limits is None:
            return None
        zero = jax.tree.map(jnp.zeros_like, limits)
        filled = tuple(z if v is None else v for v, z in zip(values, zero))
        boxes = _term(_boxes(limits))
        return filled if boxes is None else boxes.project(filled)

    has_rho = point.rho is not None
    rho = point.rho if has_rho else 1.0
    y2 = within((m.lam_bar, m.nu_bar), bounds.lower)
    # λ = ρ·z2 + (the shared part of x2); what z2 cannot hold goes there.
    whole = (m.lam, m.nu) if has_rho else (None, None)
    z2 = within(jax.tree.map(lambda v: v / rho, whole), bounds.lower)
    z2 = y2 if m.lam is None and m.nu is None else z2
    rest = jax.tree.map(lambda v, z: v - rho * z, whole, z2) if has_rho else (None, None)
    x2 = (within((m.upper_lam, m.upper_nu), bounds.upper), within(rest, bounds.shared))
    return Point(
        x1=point.x,
        x2=x2 if jax.tree.leaves(x2) else None,
        y1=point.y,
        y2=y2 if jax.tree.leaves(y2) else None,
        z1=point.y if point.z is None else point.z,
        z2=z2 if jax.tree.leaves(y2) else None,
        rho=point.rho,
    )


def _rescaled(m: Multipliers, bounds: MultiplierBounds, by: Callable[..., Array]) -> Multipliers:
    """Multipliers times or over the scales of their constraints."""

    def each(values: Tree, scale: Tree) -> Tree:
        return None if values is None else jax.tree.map(by, values, scale)

    (lam, nu), (upper_lam, upper_nu) = bounds.lower_scale, bounds.upper_scale
    return Multipliers(
        lam=each(m.lam, lam),
        lam_bar=each(m.lam_bar, lam),
        nu=each(m.nu, nu),
        nu_bar=each(m.nu_bar, nu),
        upper_lam=each(m.upper_lam, upper_lam),
        upper_nu=each(m.upper_nu, upper_nu),
    )


def constrained_point(point: Point, bounds: MultiplierBounds) -> Point:
    """A point of a `lagrangian` as one of the constrained problem: λ̄ = y2, λ = ρ·z2 + shared,
    in the units of the constraints as they are written.
    """
    p = point
    own, shared = (None, None) if p.x2 is None else p.x2
    upper_lam, upper_nu = (None, None) if own is None else own
    lam_bar, nu_bar = (None, None) if p.y2 is None else p.y2
    whole = None if p.z2 is None else trees.scale(p.rho, p.z2)
    if shared is not None and whole is not None:
        whole = jax.tree.map(jnp.add, whole, shared)
    lam, nu = (None, None) if whole is None else whole
    scaled = Multipliers(lam, lam_bar, nu, nu_bar, upper_lam, upper_nu)
    multipliers = _rescaled(scaled, bounds, jnp.divide)
    return Point(x=p.x1, y=p.y1, z=p.z1, rho=p.rho, multipliers=multipliers)
