"""How large the multipliers of a constrained problem may be: given, from a Slater point, grown."""

from __future__ import annotations

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from bilevax import trees
from bilevax.certificates.gap import linear_excess
from bilevax.problems import ConstrainedBilevelProblem, MinimaxProblem, Point
from bilevax.problems.constants import sample_domain
from bilevax.problems.constrained import CONSTRAINTS
from bilevax.problems.lagrangian import MultiplierBounds
from bilevax.problems.validate import require_bounded
from bilevax.solvers.extragradient import ExtraGradient
from bilevax.terms import PerLeaf, Simplex, Term
from bilevax.trees import Tree

SAMPLES = 16
# Gradients for the search of a Slater point, and how small a margin, as a share of what the
# constraints vary by over the domain, counts as none.
SEARCH, LEAST_MARGIN = 40_000, 1e-7
# The search ends when its point has this share of the greatest margin possible.
SHARE = 0.5
# A multiplier that comes this near to its bound touches it; then the bound grows.
NEAR, GROWTH = 0.99, 4.0


class NoSlaterPoint(ValueError):
    """The lower level has no strictly feasible point; `x` is where."""

    def __init__(self, message: str, x: Tree):
        super().__init__(message)
        self.x = x


@eqx.filter_jit
def _variation(problem: ConstrainedBilevelProblem, name: str, x: Tree, y: Tree) -> Tree:
    """How much each constraint varies over the domain: of y, or of x and y for the upper level."""
    of_both = name.startswith("upper")
    term = PerLeaf((problem.x, problem.y)) if of_both else problem.y
    start = (x, y) if of_both else y

    def change(key: Array) -> Tree:
        drawn = sample_domain(term, start, key)
        there = problem.called(name, *(drawn if of_both else (x, drawn)))
        return jax.tree.map(lambda a, b: jnp.abs(a - b), there, problem.called(name, x, y))

    changes = jax.lax.map(change, jax.random.split(jax.random.key(0), SAMPLES))
    # The middle of the samples: the largest may be an exponential far out, and say nothing.
    most = jax.tree.map(lambda c: jnp.median(c, axis=0), changes)
    # A constraint that does not vary is as large as it is; one that is zero too has no scale.
    own = jax.tree.map(jnp.abs, problem.called(name, x, y))
    size = jax.tree.map(lambda v, c: jnp.where(v > 0, v, c), most, own)
    return jax.tree.map(lambda v: jnp.where((v > 0) & jnp.isfinite(v), v, 1.0), size)


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
    total: Array

    def values(self, y: Tree) -> Array:
        c, e = (self.problem.called(name, self.x, y) for name in CONSTRAINTS[:2])
        c, e = (jax.tree.map(jnp.divide, v, s) for v, s in zip((c, e), self.sizes))
        equal = _flat(e, y)
        return jnp.concatenate([_flat(c, y), equal, -equal])

    def __call__(self, y: Tree, w: Array) -> Array:
        return jnp.sum(w * self.values(y)) / self.total


@eqx.filter_jit
def _margins(worst: _Worst, y: Tree, w: Array) -> tuple[Array, Array]:
    """The worst violation at y, and a bound below which no y of the domain can bring it."""
    here = jnp.max(worst.values(y))
    value, slope = jax.value_and_grad(worst)(y, w)
    minus = trees.scale(-1, slope)
    fall = worst.problem.y.support(minus) - trees.dot(minus, y)
    return here, value - fall


@eqx.filter_jit
def _search(solver: ExtraGradient, saddle: MinimaxProblem, state: Any, limit: Array) -> Any:
    return solver.advance(saddle, state, limit)


def slater_point(problem: ConstrainedBilevelProblem, start: Point, sizes: tuple) -> Tree:
    """A point of the lower level at the start's x where every inequality holds strictly.

    Minimises the worst violation, each constraint on the scale of its own variation. Refuses, with
    the x, a lower level that has no such point. Equalities are met only as far as the search went,
    and with them only infeasibility is refused.
    """
    dtype = trees.dtype_of(start.y)
    reach = float(problem.y.diameter(start.y))
    total = jnp.asarray(reach if 0 < reach < np.inf else 1.0, dtype)
    worst = _Worst(problem, start.x, sizes, total)
    count = worst.values(start.y).size
    # The term counts with a trifle only, so that its prox keeps y in its domain.
    saddle = MinimaxProblem(worst, problem.y * 1e-9, Simplex(total))
    w = jnp.full(count, total / count, dtype)
    # Too small a smoothness costs a few halvings of the step; to estimate it costs more.
    solver = ExtraGradient(stop="gap", tolerance=1e-30, smoothness=0.1 / float(total) ** 2)
    solver = solver.prepare(saddle, Point(x=start.y, y=w), 1e-3)
    state = solver.init(saddle, Point(x=start.y, y=w))
    best, upper, lower = start.y, np.inf, -np.inf
    limit = 64
    while True:
        found = solver.output(saddle, state)
        here, bound = (float(v) for v in _margins(worst, found.x, found.y))
        if not np.isfinite(here):
            raise ValueError(
                f"constraints are not finite at x = {_brief(start.x)}, y = {_brief(found.x)}"
            )
        if here < upper:
            best, upper = found.x, here
        lower = max(lower, bound)
        if lower > LEAST_MARGIN:
            raise NoSlaterPoint(
                f"the lower level is infeasible at x = {_brief(start.x)}: whatever y, some "
                f"constraint is violated by at least {lower:.3g} of its variation over the domain. "
                "Choose a start with another x, or change the constraints",
                start.x,
            )
        strict = problem.equalities is None
        if upper < -LEAST_MARGIN and upper <= SHARE * lower:
            return best
        if upper < 0 and limit > SEARCH:  # strictly feasible, if barely
            return best
        if not strict and (upper - lower <= LEAST_MARGIN or limit > SEARCH):
            return best
        if strict and (upper - lower <= LEAST_MARGIN / 2 or limit > SEARCH):
            raise NoSlaterPoint(
                f"the lower level has no Slater point at x = {_brief(start.x)}: no y was found "
                f"with every constraint < 0; the best violates the worst by {upper:.3g} of its "
                "variation over the domain. Choose a start with another x, write pairs of opposite "
                "inequalities as equalities=, or give multiplier_bound",
                start.x,
            )
        state = _search(solver, saddle, state, jnp.asarray(limit))
        limit *= 2


def _brief(tree: Tree) -> str:
    with np.printoptions(precision=6, threshold=6, edgeitems=3):
        return " ".join(str(np.asarray(leaf)) for leaf in jax.tree.leaves(tree))


def fixed(problem: ConstrainedBilevelProblem) -> bool:
    """Whether the lower level's bounds are the user's own, so that they may not grow."""
    return problem.multiplier_bound is not None or problem.slater_margin is not None


def first_bounds(problem: ConstrainedBilevelProblem, start: Point) -> MultiplierBounds:
    """The bounds to begin with: given, from `eq:cons_y1`, or from a Slater point at the start.

    With a Slater point ŷ, Σ λᵢ·(−cᵢ(ŷ)) ≤ g(ŷ) − min g for every optimal λ at this x, so
    λᵢ ≤ (g(ŷ) − min g)/(−cᵢ(ŷ)); twice that is taken. Where there is no such margin (equalities,
    the upper level) the bound is what the objective can vary by over what the constraint does.
    """
    p, x, y = problem, start.x, start.y
    sizes = {name: _variation(p, name, x, y) if getattr(p, name) else None for name in CONSTRAINTS}
    pair = (sizes["constraints"], sizes["equalities"])
    own = (sizes["upper_constraints"], sizes["upper_equalities"])
    rise = _reach(p.smooth_upper, (x, y), None, PerLeaf((p.x, p.y)))
    ones = lambda tree: jax.tree.map(jnp.ones_like, tree)
    if p.upper_multiplier_bound is not None:
        upper = _given(p.upper_multiplier_bound, own, "upper_multiplier_bound")
        upper_scale = ones(own)
    else:
        upper, upper_scale = jax.tree.map(lambda s: jnp.full_like(s, 10 * rise), own), own
    if fixed(p):
        lower = _fixed_bounds(p, y, pair)
        return MultiplierBounds(lower, upper, None, ones(pair), upper_scale)
    shared = jax.tree.map(lambda s: jnp.full_like(s, 10 * rise), pair)
    shared = shared if jax.tree.leaves(shared) else None
    return MultiplierBounds(_found_bounds(p, start, pair), upper, shared, pair, upper_scale)


def _fixed_bounds(problem: ConstrainedBilevelProblem, y: Tree, sizes: tuple) -> tuple:
    """As given, or from `eq:cons_y1`."""
    p = problem
    if p.multiplier_bound is not None:
        return _given(p.multiplier_bound, sizes, "multiplier_bound")
    require_bounded(p.y, y, "y", "eq:cons_y1")
    most = 2 * jnp.asarray(p.lower_lipschitz) * p.y.diameter(y) / jnp.asarray(p.slater_margin)
    return jax.tree.map(lambda s: jnp.full_like(s, most), sizes)


def _found_bounds(problem: ConstrainedBilevelProblem, start: Point, sizes: tuple) -> tuple:
    """From a Slater point at the start's x, for constraints over their sizes."""
    p, x, y = problem, start.x, start.y
    guess = jax.tree.map(lambda s: 10 * _reach(p.smooth_lower, (x, y), 1, p.y) + 0 * s, sizes)
    if not sum(leaf.size for leaf in jax.tree.leaves(sizes)):
        return guess
    inside = slater_point(p, start, sizes)
    if p.equalities is not None:
        return guess
    fall = _reach(p.smooth_lower, (x, inside), 1, p.y)
    bound = lambda v, s: 2 * fall / jnp.maximum(-v / s, 1e-6)
    return jax.tree.map(bound, p.called("constraints", x, inside), sizes[0]), guess[1]


@eqx.filter_jit
def _reach(function: Any, blocks: tuple, place: int | None, term: Term) -> Array:
    """How far a function can fall from a point, by its tangent and its term; > 0, and finite."""
    slope = jax.grad(function, argnums=(0, 1))(*blocks)
    here, slope = (blocks, slope) if place is None else (blocks[place], slope[place])
    fall = linear_excess(term, here, trees.scale(-1, slope)) + term.value(here)
    steep = trees.norm(slope)
    reach = jnp.where(jnp.isfinite(fall), fall, steep * (1 + trees.norm(here)))
    return jnp.maximum(reach, jnp.finfo(reach.dtype).eps * (1 + steep))


def _given(bound: Tree, like: Tree, name: str) -> Tree:
    """A user's bound, spread over arrays shaped like the multipliers."""
    if np.ndim(bound) == 0 and not isinstance(bound, dict | list | tuple):
        return jax.tree.map(lambda s: jnp.full_like(s, bound), like)
    (first, _) = like
    try:
        spread = jax.tree.map(
            lambda b, s: jnp.broadcast_to(jnp.asarray(b, s.dtype), s.shape), bound, first
        )
    except (ValueError, TypeError):
        raise ValueError(
            f"{name} must be one number or shaped like what the constraints return, "
            f"{jax.tree.map(jnp.shape, first)}, not {jax.tree.map(np.shape, bound)}"
        ) from None
    most = max((float(jnp.max(leaf)) for leaf in jax.tree.leaves(spread) if leaf.size), default=1.0)
    return spread, jax.tree.map(lambda s: jnp.full_like(s, most), like[1])


def growable(problem: ConstrainedBilevelProblem, touched: MultiplierBounds) -> MultiplierBounds:
    """Of the bounds that are touched those that bilevax found itself: one that was given stays."""
    never = lambda tree: jax.tree.map(jnp.zeros_like, tree)
    if fixed(problem):
        touched = dataclasses.replace(touched, lower=never(touched.lower))
    if problem.upper_multiplier_bound is not None:
        touched = dataclasses.replace(touched, upper=never(touched.upper))
    return touched


@eqx.filter_jit
def touching(bounds: MultiplierBounds, point: Point) -> MultiplierBounds:
    """Which multipliers of a point of the Lagrangian touch their bounds, shaped like these."""
    own, shared = (None, None) if point.x2 is None else point.x2
    near = lambda b, m: jnp.abs(m) >= NEAR * b

    def of(limits: Tree, values: Tree) -> Tree:
        if values is None:
            return jax.tree.map(lambda b: jnp.zeros(b.shape, bool), limits)
        return jax.tree.map(near, limits, values)

    return MultiplierBounds(
        of(bounds.lower, point.y2),
        of(bounds.upper, own),
        of(bounds.shared, shared),
        of(bounds.lower_scale, None),
        of(bounds.upper_scale, None),
    )


@eqx.filter_jit
def grown(bounds: MultiplierBounds, touched: MultiplierBounds) -> MultiplierBounds:
    """Larger bounds for the multipliers that touch theirs."""
    return jax.tree.map(lambda b, t: jnp.where(t, GROWTH * b, b), bounds, touched)


def any_touching(touched: MultiplierBounds) -> bool:
    return any(bool(jnp.any(leaf)) for leaf in jax.tree.leaves(touched))


def both_touching(a: MultiplierBounds, b: MultiplierBounds) -> MultiplierBounds:
    return jax.tree.map(jnp.logical_and, a, b)
