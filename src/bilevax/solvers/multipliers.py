"""How large the multipliers of a constrained problem may be: given, from a Slater point, grown."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from bilevax import trees
from bilevax.certificates.gap import ground, linear_excess
from bilevax.problems import (
    BilevelProblem,
    ConstrainedBilevelProblem,
    Form,
    MinimaxProblem,
    Point,
    Reformulation,
    register,
)
from bilevax.problems.constants import sample_domain
from bilevax.problems.constrained import CONSTRAINTS
from bilevax.problems.lagrangian import (
    MultiplierBounds,
    bilevel_point,
    constrained_point,
    fixed,
    fixed_bounds,
    given_bounds,
    lagrangian_problem,
)
from bilevax.problems.validation import diameter
from bilevax.programs import quick
from bilevax.solvers.base import initial
from bilevax.solvers.extragradient import ExtraGradient
from bilevax.terms import PerLeaf, Simplex, Term
from bilevax.trees import Tree

SAMPLES = 16
# Shares of the way to a sample at which it is looked how near to zero a constraint is.
SHARES = tuple(0.5**k for k in range(10))
# A constraint bends where its slope there is less than this share of what it changes by in all.
BENDS = 0.5
# Gradients for the search of a Slater point, and how small a margin, as a share of what the
# constraints vary by over the domain, counts as none.
SEARCH, LEAST_MARGIN = 40_000, 1e-7
# The search ends when its point has this share of the greatest margin possible.
SHARE = 0.5
# Where y has no bounds, there is no greatest margin: this share of the variation near the start is
# plenty.
PLENTY = 0.05
# What is left of a term in that search.
TRIFLE = 1e-9
# Where samples are not in memory, the first bounds are those of the mean over so many minibatches.
BATCHES = 64
# A multiplier that comes this near to its bound touches it; then the bound grows.
NEAR, GROWTH = 0.99, 4.0


# A bound grows when a multiplier has touched it at so many checks one after the other: in the first
# steps multipliers are often far too large.
PATIENCE = 8


class NoSlaterPoint(ValueError):
    """The lower level has no strictly feasible point; `x` is where."""

    def __init__(self, message: str, x: Tree):
        super().__init__(message)
        self.x = x


def _variation(problem: ConstrainedBilevelProblem, name: str, x: Tree, y: Tree) -> Tree:
    """How much each constraint varies over the domain: of y, or of x and y for the upper level.

    One that bends, such as that of a small ball in a wide box, varies far more elsewhere than where
    it can bind: there its slope counts, times the way.
    """
    if getattr(problem, name) is None:
        return None
    of_both = name.startswith("upper")
    term = PerLeaf((problem.x, problem.y)) if of_both else problem.y
    start = (x, y) if of_both else y
    called = lambda place: problem.called(name, *(place if of_both else (x, place)))

    def change(key: Array) -> Tree:
        drawn = sample_domain(term, start, key)
        there = problem.called(name, *(drawn if of_both else (x, drawn)))
        return jax.tree.map(lambda a, b: jnp.abs(a - b), there, problem.called(name, x, y))

    def slope(key: Array) -> Tree:
        way = trees.subtract(sample_domain(term, start, key), start)
        at = lambda share: jax.jvp(called, (trees.axpy(share, way, start),), (way,))
        found = jax.lax.map(at, jnp.asarray(SHARES, trees.dtype_of(start)))
        return jax.tree.map(_where_it_binds, *found)

    keys = jax.random.split(jax.random.key(0), SAMPLES)
    changes, slopes = jax.lax.map(change, keys), jax.lax.map(slope, keys)
    changes = jax.tree.map(_less_where_it_bends, changes, slopes)
    # The middle of the samples: the largest may be an exponential far out, and say nothing.
    most = jax.tree.map(lambda c: jnp.median(c, axis=0), changes)
    # A constraint that does not vary is as large as it is; one that is zero too has no scale.
    own = jax.tree.map(jnp.abs, problem.called(name, x, y))
    size = jax.tree.map(lambda v, c: jnp.where(v > 0, v, c), most, own)
    return jax.tree.map(lambda v: jnp.where((v > 0) & jnp.isfinite(v), v, 1.0), size)


def _where_it_binds(values: Array, slopes: Array) -> Array:
    """Of several slopes that where the value is nearest to zero, for each entry."""
    off = jnp.where(jnp.isfinite(values) & jnp.isfinite(slopes), jnp.abs(values), jnp.inf)
    return jnp.abs(jnp.take_along_axis(slopes, jnp.argmin(off, axis=0)[None], axis=0)[0])


def _less_where_it_bends(change: Array, slope: Array) -> Array:
    return jnp.where(slope < BENDS * change, jnp.maximum(slope, SHARES[-1] * change), change)


@quick
def _sizes(problem: ConstrainedBilevelProblem, start: Point) -> tuple[dict, Array, Array]:
    """What each constraint varies by, and how far the two objectives can fall from the start."""
    p, x, y = problem, start.x, start.y
    sizes = {name: _variation(p, name, x, y) for name in CONSTRAINTS}
    above = _fall(p.smooth_upper, (x, y), None, PerLeaf((p.x, p.y)))
    return sizes, above, _fall(p.smooth_lower, (x, y), 1, p.y)


def _flat(tree: Tree, like: Tree) -> Array:
    dtype = trees.dtype_of(like)
    leaves = [jnp.reshape(leaf, -1) for leaf in jax.tree.leaves(tree)]
    return jnp.concatenate(leaves) if leaves else jnp.zeros(0, dtype)


class _Worst(eqx.Module):
    """wᵀ(c/s, e/s, −e/s)/total, whose maximum for w ≥ 0, Σw = total is the worst violation at y.

    With `total` the diameter of y's domain both blocks have as far to go, which makes one step
    length right for both.
    """

    problem: ConstrainedBilevelProblem
    x: Tree
    sizes: tuple[Tree, Tree]
    total: Any

    def values(self, y: Tree) -> Array:
        c, e = (self.problem.called(name, self.x, y) for name in CONSTRAINTS[:2])
        c, e = (jax.tree.map(jnp.divide, v, s) for v, s in zip((c, e), self.sizes))
        equal = _flat(e, y)
        return jnp.concatenate([_flat(c, y), equal, -equal])

    def __call__(self, y: Tree, w: Array) -> Array:
        return jnp.sum(w * self.values(y)) / self.total


def _margins(worst: _Worst, y: Tree, w: Array) -> tuple[Array, Array]:
    """The worst violation at y, and a bound below which no y of the domain can bring it.

    Where the domain has no end, no y within the radius of certificates.
    """
    here = jnp.max(worst.values(y))
    value, slope = jax.value_and_grad(worst)(y, w)
    minus = trees.scale(-1, slope)
    term = worst.problem.y
    fall = term.support(minus) - trees.dot(minus, y)
    if term.endless:
        # The term counts with a trifle only, as in the search.
        rest = trees.norm((term * TRIFLE).residual(y, slope)).astype(fall.dtype)
        near = rest * ground(y, worst.problem.radius).radius.astype(fall.dtype)
        fall = jnp.where(jnp.isfinite(fall), fall, near)
    return here, value - fall


@quick
def _search(
    solver: ExtraGradient, saddle: MinimaxProblem, state: Any, limit: Array
) -> tuple[Any, Tree, Array, Array]:
    """Steps of the search; the point they end at, and its margins."""
    state = solver.advance(saddle, state, limit)
    found = solver.output(saddle, state)
    worst: Any = saddle.objective
    return state, found.x, *_margins(worst, found.x, found.y)


def slater_point(problem: ConstrainedBilevelProblem, start: Point, sizes: tuple) -> Tree:
    """A point of the lower level at the start's x where every inequality holds strictly.

    Minimises the worst violation, each constraint on the scale of its own variation. Refuses, with
    the x, a lower level that has no such point. Equalities are met only as far as the search went,
    and with them only infeasibility is refused.
    """
    dtype = trees.dtype_of(start.y)
    reach = float(diameter(problem.y, start.y))
    bounded = reach < np.inf
    total = trees.scalar(reach if 0 < reach < np.inf else 1.0, dtype)
    worst = _Worst(problem, start.x, sizes, total)
    shape = jax.eval_shape(worst.values, start.y).shape
    # The term counts with a trifle only, so that its prox keeps y in its domain.
    saddle = MinimaxProblem(worst, problem.y * TRIFLE, Simplex(total))
    w = np.full(shape, total / shape[0], dtype)
    # Too small a smoothness costs a few halvings of the step; to estimate it costs more.
    solver = ExtraGradient(stop="gap", tolerance=1e-30, smoothness=0.1 / float(total) ** 2)
    solver = solver.prepare(saddle, Point(x=start.y, y=w), 1e-3)
    state = initial(solver, saddle, Point(x=start.y, y=w))
    best, upper, lower = start.y, np.inf, -np.inf
    limit, following = 0, 64
    while True:
        state, y, here, bound = _search(solver, saddle, state, np.asarray(limit))
        here, bound = float(here), float(bound)
        if not np.isfinite(here):
            raise ValueError(
                f"constraints are not finite at x = {_brief(start.x)}, y = {_brief(y)}"
            )
        if here < upper:
            best, upper = y, here
        lower = max(lower, bound) if bounded else bound
        if bounded and lower > LEAST_MARGIN:
            raise NoSlaterPoint(
                f"the lower level is infeasible at x = {_brief(start.x)}: whatever y, some "
                f"constraint is violated by at least {lower:.3g} of its variation over the domain. "
                "Choose a start with another x, or change the constraints",
                start.x,
            )
        strict = problem.equalities is None
        if upper < -LEAST_MARGIN and upper <= SHARE * lower:
            return best
        if not bounded and upper <= -PLENTY:
            return best
        if upper < 0 and following > SEARCH:  # strictly feasible, if barely
            return best
        if not strict and (upper - lower <= LEAST_MARGIN or following > SEARCH):
            return best
        if strict and (upper - lower <= LEAST_MARGIN / 2 or following > SEARCH):
            raise NoSlaterPoint(
                f"the lower level has no Slater point at x = {_brief(start.x)}: no y was found "
                f"with every constraint < 0; the best violates the worst by {upper:.3g} of its "
                "variation over the domain. Choose a start with another x, write pairs of opposite "
                "inequalities as equalities=, or give multiplier_bound",
                start.x,
            )
        limit, following = following, 2 * following


def _brief(tree: Tree) -> str:
    with np.printoptions(precision=6, threshold=6, edgeitems=3):
        return " ".join(str(np.asarray(leaf)) for leaf in jax.tree.leaves(tree))


def first_bounds(problem: ConstrainedBilevelProblem, start: Point) -> MultiplierBounds:
    """The bounds to begin with: given, from `eq:cons_y1`, or from a Slater point at the start.

    With a Slater point ŷ, Σ λᵢ·(−cᵢ(ŷ)) ≤ g(ŷ) − min g for every optimal λ at this x, so
    λᵢ ≤ (g(ŷ) − min g)/(−cᵢ(ŷ)); twice that is taken. Where there is no such margin (equalities,
    the upper level) the bound is what the objective can vary by over what the constraint does.
    """
    p = problem
    sizes, rise, fall = jax.device_get(_sizes(p, start))
    pair = (sizes["constraints"], sizes["equalities"])
    own = (sizes["upper_constraints"], sizes["upper_equalities"])
    ones = lambda tree: jax.tree.map(np.ones_like, tree)
    filled = lambda tree, value: jax.tree.map(lambda s: np.full_like(s, value), tree)
    if p.upper_multiplier_bound is not None:
        upper = given_bounds(p.upper_multiplier_bound, own, "upper_multiplier_bound")
        upper_scale = ones(own)
    else:
        upper, upper_scale = filled(own, 10 * rise), own
    if fixed(p):
        lower = fixed_bounds(p, start.y, pair)
        return MultiplierBounds(lower, upper, None, ones(pair), upper_scale)
    shared = filled(pair, 10 * rise)
    shared = shared if jax.tree.leaves(shared) else None
    lower = _found_bounds(p, start, pair, filled(pair, 10 * fall))
    return MultiplierBounds(lower, upper, shared, pair, upper_scale)


def _found_bounds(
    problem: ConstrainedBilevelProblem, start: Point, sizes: tuple, guess: tuple
) -> tuple:
    """From a Slater point at the start's x, for constraints over their sizes."""
    if not sum(leaf.size for leaf in jax.tree.leaves(sizes)):
        return guess
    inside = slater_point(problem, start, sizes)
    if problem.equalities is not None:
        return guess
    return jax.device_get(_slater_bounds(problem, start.x, inside, sizes[0])), guess[1]


@quick
def _slater_bounds(problem: ConstrainedBilevelProblem, x: Tree, inside: Tree, sizes: Tree) -> Tree:
    """2·(g(ŷ) − min g)/(−cᵢ(ŷ)) for the Slater point ŷ."""
    fall = _fall(problem.smooth_lower, (x, inside), 1, problem.y)
    bound = lambda v, s: 2 * fall / jnp.maximum(-v / s, 1e-6)
    return jax.tree.map(bound, problem.called("constraints", x, inside), sizes)


def _fall(function: Any, blocks: tuple, place: int | None, term: Term) -> Array:
    """How far a function can fall from a point, by its tangent and its term; > 0, and finite."""
    slope = jax.grad(function, argnums=(0, 1))(*blocks)
    here, slope = (blocks, slope) if place is None else (blocks[place], slope[place])
    fall = linear_excess(term, here, trees.scale(-1, slope)) + term.value(here)
    steep = trees.norm(slope)
    reach = jnp.where(jnp.isfinite(fall), fall, steep * (1 + trees.norm(here)))
    return jnp.maximum(reach, jnp.finfo(reach.dtype).eps * (1 + steep))


class GrowingLagrangian(Reformulation):
    """A constrained problem as its Lagrangian, with multiplier bounds that grow where they bind.

    `touched` says which multipliers have touched their bounds at the last `checks` checks.
    """

    form: ClassVar[type[Form]] = BilevelProblem

    bounds: MultiplierBounds
    touched: MultiplierBounds
    checks: Array

    @classmethod
    def of(cls, stated: ConstrainedBilevelProblem, start: Point) -> GrowingLagrangian:
        return cls._with(first_bounds(stated.reference(BATCHES), start))

    @classmethod
    def _with(cls, bounds: MultiplierBounds) -> GrowingLagrangian:
        never = jax.tree.map(lambda b: np.zeros(b.shape, bool), bounds)
        return cls(bounds, never, np.zeros((), int))  # pyright: ignore[reportArgumentType]

    def problem(self, stated: ConstrainedBilevelProblem) -> BilevelProblem:
        return lagrangian_problem(stated, self.bounds)

    def point(self, point: Point) -> Point:
        return bilevel_point(point, self.bounds)

    def stated_point(self, point: Point) -> Point:
        return constrained_point(point, self.bounds)

    def signals(self, point: Point) -> MultiplierBounds:
        """Which multipliers touch their bounds, shaped like these."""
        own, shared = (None, None) if point.x2 is None else point.x2
        near = lambda b, m: jnp.abs(m) >= NEAR * b

        def of(limits: Tree, values: Tree) -> Tree:
            if values is None:
                return jax.tree.map(lambda b: jnp.zeros(b.shape, bool), limits)
            return jax.tree.map(near, limits, values)

        bounds = self.bounds
        return MultiplierBounds(
            of(bounds.lower, point.y2),
            of(bounds.upper, own),
            of(bounds.shared, shared),
            of(bounds.lower_scale, None),
            of(bounds.upper_scale, None),
        )

    def reviewed(
        self, stated: ConstrainedBilevelProblem, signals: MultiplierBounds
    ) -> tuple[GrowingLagrangian, bool]:
        now = growable(stated, jax.tree.map(np.asarray, signals))
        still = jax.tree.map(np.logical_and, now, jax.tree.map(np.asarray, self.touched))
        if not any(np.any(leaf) for leaf in jax.tree.leaves(still)):
            return dataclasses.replace(self, touched=now, checks=np.ones((), int)), False
        checks = np.asarray(int(self.checks) + 1)
        if checks < PATIENCE:
            return dataclasses.replace(self, touched=still, checks=checks), False
        grow = lambda b, t: np.where(t, GROWTH * np.asarray(b), np.asarray(b))
        return self._with(jax.tree.map(grow, self.bounds, still)), True


def growable(problem: ConstrainedBilevelProblem, touched: MultiplierBounds) -> MultiplierBounds:
    """Of the bounds that are touched those that bilevax found itself: one that was given stays."""
    never = lambda tree: jax.tree.map(np.zeros_like, tree)
    if fixed(problem):
        touched = dataclasses.replace(touched, lower=never(touched.lower))
    if problem.upper_multiplier_bound is not None:
        touched = dataclasses.replace(touched, upper=never(touched.upper))
    return touched


register(ConstrainedBilevelProblem, reformulation=GrowingLagrangian)
