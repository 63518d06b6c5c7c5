"""Newton: the penalty method by semismooth Newton steps, with x1 in a trust region."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from bilevax import trees
from bilevax.problems import BilevelProblem, Point
from bilevax.problems.lagrangian import without_bounds
from bilevax.problems.reformulations import penalty_blocks, penalty_point
from bilevax.problems.validation import require
from bilevax.solvers.base import Solver, Task, check_positive
from bilevax.solvers.curvature import X1, Blocks
from bilevax.solvers.model import Model
from bilevax.solvers.penalised import (
    OF_LOWER,
    Engine,
    Penalised,
    first_barrier,
    first_penalty,
    sizes_of,
)
from bilevax.solvers.reach import extent
from bilevax.solvers.semismooth import Equation, Natural
from bilevax.trees import Layout, Tree

# With more entries in all six blocks than this, linear systems are in those only that no term
# holds: they may be so many, and x1 at most half of them; the limit for all entries then.
MOST_ENTRIES, MOST_FREE, TOO_MANY = 3000, 1000, 12_000
# The method gives up after so many linear systems, without and with barriers. Those of a large
# problem are dear: it has so many, and so many more each time that the other blocks have settled.
MOST_SOLVES, MOST_INSIDE = 250, 250
LARGE_SOLVES, LARGE_EACH = 20, 5
# What a step does: bring the other blocks to their places while x1 rests, follow the solution to
# another ρ with all blocks at once, or move x1.
SETTLE, FOLLOW, MOVE = range(3)
# A Newton step is halved at most so often, and must not make the residual larger than by this.
HALVINGS, SLACK = 6, 1e-6
# ω, by which all blocks but x1 are regularised, in shares of their curvature: its first value and
# its least and greatest; the factors by which a full step, a short one and none change it.
FIRM, LEAST_FIRM, MOST_FIRM = 1e-6, 1e-9, 1e9
FULL_STEP, SHORT_STEP, NO_STEP = 0.1, 3.0, 30.0
# After a move of x1 the other blocks settle in at most so many steps, or the move is taken back;
# where x1 has not moved, the method gives up after so many.
SETTLING, PATIENCE = 12, 30
# The other blocks are settled when their residual is at most this share of x1's and this share of
# ‖∇f‖, or else this share of the target.
SETTLED, SETTLED_FORCE, SETTLED_TARGET = 0.03, 0.01, 0.1
# The trust region: the share of the foreseen fall at which a move is taken, and those above which μ
# shrinks and below which it grows; the factors of that, and the one after a move was taken back.
TAKEN, WELL, BADLY = 0.1, 0.75, 0.25
EASE, TIGHTEN, RETREAT = 0.1, 4.0, 8.0
# μ above so many times x1's curvature says that no move of x1 helps.
MOST_HOLD = 1e14
# The first ρ is so many times the one at which both levels pull alike. Once, before x1 moves, it
# grows to where y1 should be within this share of z1, if it is not within twice that; by at most
# this factor.
FIRST_RHO, NEAR, FIRST_TIMES = 10.0, 0.1, 1e4
# Where y1 is not within twice that share after a move, by which φ fell and F rose, ρ is too small
# to be believed: the move is taken back, and ρ grows by this factor.
STEEPER = 10.0
# With barriers: the first factor for ρ and 1/τ, and the share of the target below which τ is zero;
# the residual at which they may change, in shares of ‖∇f‖: the first one, the factor by which it
# shrinks where the solution could not be followed, and the last one.
FIRST_FALL, NO_BARRIER = 5.0, 1e-8
LOOSE, TIGHTER, LEAST_LOOSE = 0.03, 0.1, 1e-6
# Later it grows where the residual is at most this share of ‖∇f‖ and of ρ·gap: to this many times
# where the gap should be small enough, but by at least and at most these factors. The most shrinks
# to its root where that fails, down to the least one, and grows by this power where it does not.
ENOUGH, BEYOND = 0.01, 1.5
AT_LEAST, MOST_TIMES, LEAST_TIMES, REGAIN = 2.0, 100.0, 1.4, 1.5
# Steps that follow a solution to another ρ; and where they end nowhere, and the other blocks have
# settled there, the share of ‖∇f‖ in x1's residual that says that φ has a kink nearby.
FOLLOWING, KICKED = 12, 0.03
# The share of the target at which a check is asked for, of residuals; and by how much the target
# shrinks where a check says no.
READY, SHRINK = 0.3, 0.25
# That of the gap, unless rounding stands above it, and the most: x is off by 1/ρ, the gap by 1/ρ².
READY_GAP, MOST_READY_GAP = 1e-3, 0.1
# Where ρ shall be small, it grows or shrinks so that the gap is the first share of the target, but
# grows only if the gap is above the second; the other blocks are settled where their residual is
# the third.
LOOSE_GAP, LOOSEST_GAP, CLOSE = 0.15, 0.3, 0.03
# Where its root is below that share of the root of what it may be, ρ shrinks; by at most that
# factor at once.
MUCH, LEAST_SHRINK = 0.6, 0.1


class NewtonState(eqx.Module):
    """Flat vectors over the six blocks, and what was learnt of the problem."""

    iterate: Array
    slope: Array  # the operator (∇ₓP, −∇ᵧP) there,
    known: Array  # if it has been computed
    share: Array  # what is left of (y1 − z1, z2 − y2) where the next step begins; 1 where it rests
    center: Array  # the last point at which all blocks but x1 were settled
    center_slope: Array
    center_value: Array  # P there,
    center_repaired: Array  # and F
    foreseen: Array  # how far P was foreseen to fall by the move since
    moved: Array  # whether x1 has moved since
    rho: Array
    tau: Array | None  # the weight of barriers
    center_rho: Array
    center_tau: Array | None
    wished: Array  # the factor by which ρ should grow,
    times: Array  # and the one by which it, and 1/τ, may
    target: Array
    relative: Array
    steps: Array  # of the natural map, per block
    hold: Array  # μ: how strongly x1 is held
    firm: Array  # ω: how strongly the other blocks are, in shares of their curvature
    extent: Array  # the diameter of each block's domain
    phase: Array  # what the next step does
    inner: Array  # steps in this phase
    outer: Array  # how often the other blocks were settled
    loose: Array  # with barriers: the share of ‖∇f‖ at which ρ and τ may change
    idle: Array  # whether x1 had nowhere to go
    tried: Array  # whether the other blocks settle at a ρ to which the solution was not followed
    eased: Array  # whether ρ has shrunk: once is enough
    kinked: Array  # whether a solution could not be followed from beside it: then by its tangent
    ready: Array  # whether the point may be certified: a check is asked for
    lost: Array  # whether the method has given up
    linear_solves: Array
    gradients: Array
    blocks: Blocks = eqx.field(static=True)


class Newton(Engine[NewtonState]):
    """The paper's penalty problem with its curvature used, for problems up to medium size.

    φ(x1) = min over (y1, y2) max over (x2, z1, z2) of P_ρ has the slope ∂P/∂x1 at the saddle point
    (Danskin), and is minimised in a trust region:

    - Settle: at a fixed x1 the other blocks solve a monotone problem, F + ∂Φ ∋ 0. Semismooth Newton
      steps on its natural map R(w) = (w − prox_{sΦ}(w − s·F(w)))/s, halved until ‖R‖ does not grow.
      The system is regularised by ω·curvature (a linearised proximal point step), more where steps
      are cut and less where they are not.
    - Move: x1 goes to where the quadratic model of φ with the weight μ is least in its domain, and
      the others settle again. The move is taken if φ fell by a share of what was foreseen; μ
      follows from how well it was.
    - Where the move made φ fall by leaving the lower level's solution, so that F rose, ρ grows.
    - Follow: where x1 is stationary and the gap is not small yet, ρ grows. (z1, y2) solve the lower
      level whatever ρ is and (y1, z2) are off by 1/ρ, so they start nearer by as much; then all
      blocks take Newton steps at once, and a factor that was too large is tried again by its root,
      along the tangent of the solution, which goes by what is held there.

    Where a bound, a constraint or an adversary's weight changes sides, φ has a kink. With
    `interior`, all blocks but x1 have τ times a logarithmic barrier of their bounds on top, which
    makes φ smooth; τ falls while ρ grows, from a first guess `tau`, as interior-point methods do.

    Linear systems are dense; of a large problem they are in the entries that no term holds, and
    where these are too many, the method gives up. `linear_solves` counts those over all blocks;
    their Hessians are not among the `gradients`, nor small systems in x1 alone among them. `rho` is
    a first guess. With `least_rho`, ρ grows no farther than the gap asks for: for a point that will
    be judged on samples, whose error grows with ρ.
    """

    is_tight: ClassVar[bool] = True
    in_stages: ClassVar[bool] = True  # it knows itself when it is lost

    rho: Any = None
    target: Any = None
    relative: Any = None
    force: Any = None
    tau: Any = None
    interior: bool = eqx.field(static=True, default=False)
    least_rho: bool = eqx.field(static=True, default=False)

    def __check_init__(self):
        check_positive(self, "rho", "force", "tau")
        if self.tau is not None and not self.interior:
            raise ValueError("Newton: tau is the weight of barriers, which need interior=True")
        self.check_aims()

    @property
    def title(self) -> str:
        return "Newton with barriers" if self.interior else "Newton"

    @property
    def begins_anew(self) -> bool:
        """With barriers it does: a path that comes from afar leads to better places."""
        return self.interior

    @property
    def gradients_per_step(self) -> int:
        return HALVINGS + 2

    def prepare(self, problem: BilevelProblem, start: Point, tolerance: float) -> Newton:
        require(problem, BilevelProblem, "Newton")
        entries = sum(sizes_of(start))
        if not takes(start, self.interior):
            raise ValueError(
                f"{self.title} solves linear systems in the entries of all blocks, and {entries} "
                "are too many; use bilevax.Adaptive()"
            )
        dtype = trees.dtype_of(start.replace(rho=None))
        rho, force = first_penalty(problem, start)
        first = 1.0 if self.least_rho else FIRST_RHO
        rho = first * rho if start.rho is None or self.interior else start.rho
        tau = first_barrier(problem, start) if self.interior else None
        given = lambda value, other: trees.scalar(other if value is None else value, dtype)
        return Newton(
            rho=given(self.rho, rho),
            target=given(self.target, tolerance),
            relative=given(self.relative, 0.0),
            force=given(self.force, force),
            tau=None if tau is None else given(self.tau, tau),
            interior=self.interior,
            least_rho=self.least_rho,
        )

    def prepared_for(self, task: Task) -> Solver:
        solver = dataclasses.replace(self, least_rho=True) if task.noisy else self
        return super(Newton, solver).prepared_for(task)

    def prepared_anew(self, prepared: Any, task: Task, state: NewtonState) -> Solver:
        """With barriers that are next to none, which would lead away from the start."""
        tau = task.tolerance if self.interior else None
        return dataclasses.replace(self, rho=task.start.rho, tau=tau).prepared_for(task)

    def advice(self) -> str:
        return "try another start, or solver=bilevax.Adaptive()"

    def init(self, problem: BilevelProblem, start: Point) -> NewtonState:
        problem = without_bounds(problem)
        x, y = penalty_blocks(start)
        blocks = Blocks.of(x, y)
        w = Penalised(problem, jnp.asarray(self.rho), blocks).projected(
            blocks.layout.ravel((*x, *y))
        )
        dtype, zero, no = w.dtype, jnp.zeros((), int), jnp.zeros((), bool)
        one = jnp.ones((), dtype)
        return NewtonState(
            iterate=w,
            slope=jnp.zeros_like(w),
            known=no,
            share=one,
            center=w,
            center_slope=jnp.zeros_like(w),
            center_value=0 * one,
            center_repaired=0 * one,
            foreseen=0 * one,
            moved=no,
            rho=one * self.rho,
            tau=None if self.tau is None else one * self.tau,
            center_rho=one * self.rho,
            center_tau=None if self.tau is None else one * self.tau,
            wished=one,
            times=one * (FIRST_FALL if self.interior else MOST_TIMES),
            target=one * self.target,
            relative=one * self.relative,
            steps=jnp.ones(6, dtype),
            hold=0 * one,
            firm=one * FIRM,
            extent=extent(problem, (*x, *y), dtype),
            phase=zero + SETTLE,
            inner=zero,
            outer=zero,
            loose=one * LOOSE,
            idle=no,
            tried=no,
            eased=no,
            kinked=no,
            ready=no,
            lost=no,
            linear_solves=zero,
            gradients=zero,
            blocks=blocks,
        )

    def step(self, problem: BilevelProblem, state: NewtonState, limit: Array) -> NewtonState:
        """See whether the phase is over, and then one linear system.

        There is none where a check is due, or where another place is to be seen first.
        """
        problem = without_bounds(problem)
        s = dataclasses.replace(state, ready=jnp.zeros((), bool))
        s = _with_slope(problem, _shifted(problem, s))
        astray = s.moved & ~trees.all_finite(s.slope)  # to where functions are undefined
        s = lax.cond(astray, lambda: _taken_back(s), lambda: s)
        seen = _seen(problem, s, self.force, self.least_rho)
        s = lax.cond(seen.over, lambda: _judged(s, seen, self.least_rho), lambda: s)
        return lax.cond(s.ready | ~s.known, lambda: s, lambda: _onwards(problem, s))

    def done(self, problem: BilevelProblem, state: NewtonState) -> Array:
        most = MOST_INSIDE if self.interior else MOST_SOLVES
        if state.iterate.size > MOST_ENTRIES:
            most = jnp.minimum(most, LARGE_SOLVES + LARGE_EACH * state.outer)
        return state.lost | (state.linear_solves >= most)

    def is_ready(self, problem: BilevelProblem, state: NewtonState) -> Array:
        return state.ready

    def linear_solves(self, state: NewtonState) -> Array:
        return state.linear_solves

    def output(self, problem: BilevelProblem, state: NewtonState) -> Point:
        """The iterate, with entries that a term holds exactly where it holds them."""
        problem, s = without_bounds(problem), state
        w = s.iterate - s.blocks.spread(s.steps) * s.slope
        snapped = Penalised(problem, s.rho, s.blocks).prox(w, s.steps)
        w = jnp.where(s.ready, snapped, s.iterate)
        parts = s.blocks.layout.unravel(w)
        return penalty_point(parts[:3], parts[3:]).replace(rho=s.rho)


def takes(start: Point, interior: bool) -> bool:
    """Whether a problem with blocks like these is not too large."""
    sizes = sizes_of(start)
    if interior or sum(sizes) <= MOST_ENTRIES:
        return sum(sizes) <= MOST_ENTRIES
    return sum(sizes) <= TOO_MANY and sizes[X1] <= MOST_FREE // 2


def _penalised(problem: BilevelProblem, s: NewtonState) -> Penalised:
    return Penalised(problem, s.rho, s.blocks, s.tau)


def _natural(problem: BilevelProblem, s: NewtonState) -> Natural:
    return Natural(_penalised(problem, s), s.steps)


def _is_x1(s: NewtonState) -> Array:
    return jnp.asarray(s.blocks.owner == X1)


def _with_slope(problem: BilevelProblem, s: NewtonState) -> NewtonState:
    def found() -> NewtonState:
        slope = _penalised(problem, s).operator(s.iterate)
        known = jnp.ones((), bool)
        return dataclasses.replace(s, slope=slope, known=known, gradients=s.gradients + 1)

    return lax.cond(s.known, lambda: s, found)


class _Seen(eqx.Module):
    """Where a run stands."""

    of_x1: Array  # the residual of x1,
    others: Array  # and that of the other blocks
    without: Array  # that of all blocks without barriers
    gap: Array
    value: Array
    repaired: Array  # F(x1), where the lower level is settled
    noise: Array  # what of the value may be rounding
    force: Array  # ‖∇f‖, about
    aim: Array  # what residuals shall be,
    low: Array  # and what the gap
    enough: Array  # the residual at which ρ may grow
    over: Array  # whether the phase is over


def _seen(problem: BilevelProblem, s: NewtonState, force: Array, least_rho: bool) -> _Seen:
    penalised = _penalised(problem, s)
    rest, x1 = _natural(problem, s)(s.iterate, s.slope), _is_x1(s)
    of_x1, others = trees.norm(jnp.where(x1, rest, 0)), trees.norm(jnp.where(x1, 0, rest))
    without, inside = trees.norm(rest), s.iterate
    if s.tau is not None:
        plain = Natural(Penalised(problem, s.rho, s.blocks), s.steps)
        without = trees.norm(plain(s.iterate, s.slope))
        inside = penalised.projected(s.iterate - s.blocks.spread(s.steps) * rest)
        inside = jnp.where(x1, s.iterate, inside)
    (gap, size), value = penalised.gap(s.iterate), penalised.value(inside)
    aim, gap_aim = s.target + s.relative * force, s.target + s.relative * size
    enough = jnp.maximum(READY * aim, ENOUGH * jnp.minimum(force, s.rho * gap))
    if s.tau is not None:
        enough = jnp.where(s.tau > 0, jnp.maximum(enough, s.loose * force), enough)
    settled = jnp.minimum(SETTLED * of_x1, SETTLED_FORCE * force)
    settled = others <= jnp.maximum((CLOSE if least_rho else SETTLED_TARGET) * aim, settled)
    followed = (of_x1 <= enough) & (others <= enough)
    over = jnp.where(s.phase == FOLLOW, followed, settled) & (s.phase != MOVE)
    eps = float(jnp.finfo(value.dtype).eps)
    unseen = (s.inner == 0) & (s.idle | (s.phase == FOLLOW))  # nothing was done in the phase yet
    low = jnp.clip(64 * eps * size, READY_GAP * gap_aim, MOST_READY_GAP * gap_aim)
    low = LOOSE_GAP * gap_aim if least_rho else low
    return _Seen(
        of_x1=of_x1,
        others=others,
        without=without,
        gap=gap,
        value=value,
        repaired=penalised.repaired(s.iterate),
        noise=1e3 * eps * (jnp.abs(value) + s.rho * size),
        force=force,
        aim=aim,
        low=low,
        enough=enough,
        over=over & (s.linear_solves > 0) & ~unseen,
    )


def _judged(s: NewtonState, seen: _Seen, least_rho: bool) -> NewtonState:
    """A phase is over: take where it led, or take the move back, or change ρ."""
    fall = s.center_value - seen.value
    well = (fall + seen.noise) / (s.foreseen + seen.noise)
    fell = jnp.where(s.foreseen <= seen.noise, fall >= -seen.noise, well >= TAKEN)
    fell &= jnp.isfinite(seen.value)
    kicked = s.tried & (seen.of_x1 > KICKED * seen.force)
    verdict = jnp.where(kicked, 2, jnp.where(fell | ~s.moved, 0, 1))
    if s.tau is None and not least_rho:
        rose = seen.repaired > s.center_repaired + seen.noise
        verdict = jnp.where(s.moved & fell & rose & (_apart(s) > 2 * NEAR), 3, verdict)
    return lax.switch(
        verdict,
        [
            lambda: _taken(s, seen, well, least_rho),
            lambda: _taken_back(s),
            lambda: _nearer(s),
            lambda: _steeper(s),
        ],
    )


def _taken(s: NewtonState, seen: _Seen, well: Array, least_rho: bool) -> NewtonState:
    """A new center; then a check is asked for, or ρ grows, or x1 moves."""
    low = seen.gap <= (LOOSEST_GAP / LOOSE_GAP if least_rho else 1) * seen.low
    lacks = jnp.sqrt(jnp.maximum(seen.gap, 0) / seen.low)
    much = low & (lacks < MUCH) & ~s.eased & (s.tau is None and least_rho)  # ρ need not be so large
    ready = low & ~much & (seen.without <= READY * seen.aim)
    there = low & ~much if s.tau is None else ready | (low & (s.tau == 0))
    growing = ~there & (seen.of_x1 <= seen.enough) & (seen.others <= seen.enough)
    apart = _apart(s) / NEAR
    early = (s.outer == 0) & (apart > 2) & ~ready & (s.tau is None and not least_rho)
    arrived = (s.phase == FOLLOW) | s.tried
    times = jnp.maximum(s.times, 1 / s.times)
    times = jnp.where(arrived, jnp.minimum(times**REGAIN, MOST_TIMES), times)
    beyond, at_least = (1.0, LEAST_TIMES) if least_rho else (BEYOND, AT_LEAST)
    wished = jnp.where(low, 1, jnp.maximum(beyond * lacks, at_least))
    wished = jnp.where(much, jnp.maximum(lacks / MUCH**0.5, LEAST_SHRINK), wished)
    only_rho = growing if s.tau is None else growing & (s.tau == 0)
    times = jnp.where(only_rho, jnp.minimum(wished, times), times)
    grown = jnp.where(growing, jnp.minimum(wished, times), 1)
    grown = jnp.where(early, jnp.minimum(apart, FIRST_TIMES), grown)
    factor = jnp.where(well > WELL, EASE, jnp.where(well < BADLY, TIGHTEN, 1))
    first = jnp.maximum(s.hold, seen.of_x1 / s.extent[X1])
    least = float(jnp.finfo(first.dtype).eps) / s.steps[X1]
    hold = jnp.maximum(jnp.where(s.moved, factor * s.hold, first), least)
    phase = jnp.where(early, SETTLE, jnp.where(growing, FOLLOW, MOVE))
    return dataclasses.replace(
        s,
        known=~early & ~growing,
        share=1 / grown,
        center=s.iterate,
        center_slope=s.slope,
        center_value=seen.value,
        center_repaired=seen.repaired,
        moved=jnp.zeros((), bool),
        rho=s.rho * grown,
        tau=_smaller(s.tau, jnp.where(growing & ~early, times, 1), s.target + s.relative),
        center_rho=s.rho,
        center_tau=s.tau,
        wished=wished,
        times=times,
        target=jnp.where(ready, SHRINK * s.target, s.target),
        relative=jnp.where(ready, SHRINK * s.relative, s.relative),
        hold=hold,
        phase=phase.astype(s.phase.dtype),
        inner=jnp.zeros_like(s.inner),
        outer=s.outer + 1,
        idle=s.idle & ~(growing | early),
        tried=jnp.zeros((), bool),
        eased=s.eased | (much & growing),
        ready=ready,
    )


def _smaller(tau: Array | None, times: Array, target: Array) -> Array | None:
    """τ divided by this; zero where it would be next to nothing."""
    if tau is None:
        return None
    smaller = tau / times
    return jnp.where((smaller < NO_BARRIER * target) & (times > 1), 0, smaller)


def _taken_back(s: NewtonState) -> NewtonState:
    """Back to the center, where x1 is held more strongly."""
    return dataclasses.replace(
        s,
        iterate=s.center,
        slope=s.center_slope,
        moved=jnp.zeros((), bool),
        hold=RETREAT * s.hold,
        phase=jnp.full_like(s.phase, MOVE),
        inner=jnp.zeros_like(s.inner),
    )


def _steeper(s: NewtonState) -> NewtonState:
    """Back to the center, where the other blocks settle at a larger ρ."""
    steeper = _at_another(s, jnp.full_like(s.times, STEEPER), s.center_tau)
    phase = jnp.full_like(s.phase, SETTLE)
    return dataclasses.replace(steeper, moved=jnp.zeros((), bool), phase=phase)


def _apart(s: NewtonState) -> Array:
    """‖y1 − z1‖, in shares of ‖z1‖."""
    parts = s.blocks.layout.unravel(s.iterate)
    y1, z1 = parts[1], parts[4]
    size = trees.norm(z1)
    return trees.norm(trees.subtract(y1, z1)) / jnp.where(size > 0, size, jnp.inf)


def _shifted(problem: BilevelProblem, s: NewtonState) -> NewtonState:
    """From the center to where a larger ρ begins: (y1, z2) nearer to (z1, y2), to that share.

    An entry that its term holds, at a bound say, stays; then it is the other one that moves.
    """

    def shifted() -> Array:
        penalised = Penalised(problem, s.center_rho, s.blocks, s.center_tau)
        held = Natural(penalised, s.steps).held(s.center, s.center_slope)
        x1, y1, y2, x2, z1, z2 = s.blocks.layout.unravel(s.center)
        _, held_y1, held_y2, _, held_z1, held_z2 = s.blocks.layout.unravel(held)
        near = lambda a, b: b + s.share * (a - b)

        def pair(a: Tree, b: Tree, held_a: Tree, held_b: Tree) -> tuple[Tree, Tree]:
            first = lambda a, b, f: jnp.where(f, a, near(a, b))
            second = lambda a, b, f, g: jnp.where(f & ~g, near(b, a), b)
            new_a = jax.tree.map(first, a, b, held_a)
            return new_a, jax.tree.map(second, a, b, held_a, held_b)

        y1, z1 = pair(y1, z1, held_y1, held_z1)
        z2, y2 = pair(z2, y2, held_z2, held_y2)
        return penalised.projected(s.blocks.layout.ravel((x1, y1, y2, x2, z1, z2)))

    iterate = lax.cond(s.share != 1, shifted, lambda: s.iterate)
    return dataclasses.replace(s, iterate=iterate, share=jnp.ones_like(s.share))


def _onwards(problem: BilevelProblem, s: NewtonState) -> NewtonState:
    """One linear system, unless it would have too many unknowns."""
    if s.iterate.size <= MOST_ENTRIES:
        return _solved(problem, s, None)
    at, slope, _ = _base(s)
    free = _natural(problem, s).free(at, slope)
    lost = dataclasses.replace(s, lost=jnp.ones((), bool))
    return lax.cond(jnp.sum(free) > MOST_FREE, lambda: lost, lambda: _solved(problem, s, free))


def _base(s: NewtonState) -> tuple[Array, Array, Array]:
    """Where a linear system is: the point, F there, and whether it is for a tangent.

    A tangent is that of the solution for the last ρ, which goes by what is held there: to see that
    from a place beside it would take exactness of 1/ρ. P has the lower level's terms ρ times: with
    slopes that grew alike, the center is a zero of R still.
    """
    if s.tau is not None:
        return s.iterate, s.slope, jnp.zeros((), bool)
    along = (s.phase == FOLLOW) & s.kinked & (s.inner == 0)
    of_lower = jnp.isin(jnp.asarray(s.blocks.owner), jnp.asarray(OF_LOWER))
    slope = jnp.where(of_lower, s.rho / s.center_rho, 1) * s.center_slope
    return jnp.where(along, s.center, s.iterate), jnp.where(along, slope, s.slope), along


def _solved(problem: BilevelProblem, s: NewtonState, free: Array | None) -> NewtonState:
    """One linear system, of a large problem in free entries, and the step that it leads to."""
    penalised, n = _penalised(problem, s), s.blocks.sizes[X1]
    at, slope, along = _base(s)
    columns = _natural(problem, s).columns(at, free, MOST_FREE)
    rows = jnp.sum(jnp.abs(columns.hessian), axis=1)
    owner = jnp.asarray(s.blocks.owner)
    curved = jnp.stack([jnp.max(jnp.where(owner == b, rows, 0)) for b in range(6)])
    # A step of the natural map leads no farther than the domain does.
    curved = jnp.maximum(curved, s.blocks.lengths(s.slope) / s.extent)
    curved = jnp.where(curved > 0, curved, 1)
    s = dataclasses.replace(s, steps=jnp.where(s.inner == 0, 1 / curved, s.steps))
    weights = s.firm * jnp.where(rows > 0, rows, s.blocks.spread(curved))
    weights = jnp.where(_is_x1(s), s.hold, weights)

    # A firm hold makes for short steps, so that entries are not sent to bounds far away.
    short = jnp.where(along | (s.phase == MOVE), 0, s.firm)
    change = None
    if s.tau is None:
        no_change = lambda: jnp.zeros_like(slope)
        change = lax.cond(along, lambda: penalised.operator(at) - slope, no_change)
    equation = Natural(penalised, s.steps / (1 + short)).equation(
        at, slope, columns, weights, change
    )
    if equation.changed is not None:
        rest = jnp.where(along, equation.changed, equation.rest)
        equation = dataclasses.replace(equation, rest=rest)

    # All blocks but x1 go by −(r + X·d) where x1 goes by d; while they settle, it does not.
    of_rest, of_x1 = equation.rest[n:, None], equation.matrix[n:, :n]
    settled = lambda: jnp.hstack([equation.solved(of_rest, n), jnp.zeros_like(of_x1)])
    others = lambda: equation.solved(jnp.hstack([of_rest, of_x1]), n)
    answer = lax.cond(s.phase == SETTLE, settled, others)
    zero, none = jnp.zeros((), at.dtype), jnp.zeros(n, at.dtype)
    d, foreseen, hold = lax.switch(
        s.phase,
        [
            lambda: (none, zero, s.hold),
            lambda: (_with_others(equation, answer), zero, s.hold),
            lambda: _model(problem, s, equation, answer).least(s.hold),
        ],
    )
    way = equation.spread(jnp.concatenate([d, -answer[:, 0] - answer[:, 1:] @ d]))
    s = dataclasses.replace(
        s, linear_solves=s.linear_solves + 1, gradients=s.gradients + along.astype(int)
    )
    moves = trees.all_finite(way) & ((s.phase != MOVE) | ((foreseen > 0) & jnp.any(d != 0)))
    return _stepped(problem, s, _Way(at, way, along, moves, foreseen, hold))


def _with_others(equation: Equation, answer: Array) -> Array:
    """Newton's step of x1, where it and the other blocks go at once."""
    n = answer.shape[1] - 1
    above, beside = equation.matrix[:n, :n], equation.matrix[:n, n:]
    rest = equation.rest[:n] - beside @ answer[:, 0]
    return jnp.linalg.solve(above - beside @ answer[:, 1:], -rest)


def _model(problem: BilevelProblem, s: NewtonState, equation: Equation, answer: Array) -> Model:
    """φ around x1: where x1 goes by d, its slope becomes g + B·d with B = H_xx − H_xo·A⁻¹·A_x."""
    n, hessian = s.blocks.sizes[X1], equation.columns.hessian
    bent = hessian[:n, :n] - hessian[:n, n:] @ answer[:, 1:]
    return Model(
        bent=(bent + bent.T) / 2,
        slope=equation.slope[:n] - hessian[:n, n:] @ answer[:, 0],
        x=s.iterate[:n],
        step=s.steps[X1],
        term=problem.x1,
        layout=Layout.of(s.blocks.layout.unravel(s.iterate)[X1]),
    )


class _Way(eqx.Module):
    """What a linear system says: from where and how far to go, and what x1's move should bring."""

    at: Array
    d: Array
    along: Array  # whether it is a tangent
    moves: Array  # whether there is a way at all
    foreseen: Array
    hold: Array


def _stepped(problem: BilevelProblem, s: NewtonState, way: _Way) -> NewtonState:
    """Go that way: by the whole of it if x1 moves, else halved until the residual does not grow.

    The residual is measured in the metric of the curvatures, in which proximal point steps never
    make it larger. Where no step is found, the iterate stays. A tangent is taken or not.
    """
    penalised, natural = _penalised(problem, s), _natural(problem, s)
    moving, settling = s.phase == MOVE, s.phase == SETTLE
    root = jnp.where(settling & _is_x1(s), 0, jnp.sqrt(s.blocks.spread(s.steps)))
    size = lambda w, slope: trees.norm(root * natural(w, slope))
    now, most = size(s.iterate, s.slope), jnp.where(way.along, 1, HALVINGS)

    def tried(carry: tuple) -> tuple:
        share, count, *_ = carry
        w = penalised.projected(way.at + share * way.d)
        slope = penalised.operator(w)
        found = moving | (size(w, slope) <= (1 + SLACK) * now)
        return share / 2, count + 1, w, slope, found

    going = lambda carry: ~carry[-1] & (carry[1] < most)
    begin = (jnp.ones((), now.dtype), jnp.zeros((), int), s.iterate, s.slope, ~way.moves)
    _, count, w, slope, found = lax.while_loop(going, tried, begin)
    found &= way.moves
    s = dataclasses.replace(
        s,
        iterate=jnp.where(found, w, s.iterate),
        slope=jnp.where(found, slope, s.slope),
        gradients=s.gradients + count,
    )
    which = jnp.where(moving, jnp.where(found, 0, 1), jnp.where(settling, 2, 3))
    return lax.switch(
        which,
        [
            lambda: _moved(s, way),
            lambda: _still(s),
            lambda: _settled(_counted(s, way, count, found)),
            lambda: _followed(_counted(s, way, count, found)),
        ],
    )


def _counted(s: NewtonState, way: _Way, count: Array, found: Array) -> NewtonState:
    """One more step of this phase, and a hold that goes by how often it was halved."""
    cut = jnp.where(count == 1, FULL_STEP, jnp.where(count == 2, 1, SHORT_STEP))
    firm = jnp.clip(jnp.where(found, cut, NO_STEP) * s.firm, LEAST_FIRM, MOST_FIRM)
    # A phase that has no step any more is over.
    over = ~found & (s.phase == FOLLOW) & ~way.along
    return dataclasses.replace(
        s,
        firm=jnp.where(way.along, s.firm, firm),
        inner=s.inner + jnp.where(over, FOLLOWING, 1),
    )


def _moved(s: NewtonState, way: _Way) -> NewtonState:
    """x1 is where the model of φ is least, and the others where this should take them."""
    return dataclasses.replace(
        s,
        foreseen=way.foreseen,
        moved=jnp.ones((), bool),
        idle=jnp.zeros((), bool),
        hold=way.hold,
        lost=way.hold * s.steps[X1] > MOST_HOLD,
        phase=jnp.full_like(s.phase, SETTLE),
        inner=jnp.zeros_like(s.inner),
    )


def _still(s: NewtonState) -> NewtonState:
    """Where x1 has nowhere to go, it is the others that are not exact enough."""
    return dataclasses.replace(
        s,
        lost=s.idle,
        idle=jnp.ones((), bool),
        phase=jnp.full_like(s.phase, SETTLE),
        inner=jnp.zeros_like(s.inner),
    )


def _settled(s: NewtonState) -> NewtonState:
    """A move, or a ρ, at which the other blocks do not settle is taken back.

    Without one, the method gives up.
    """
    late = s.inner > jnp.where(s.moved | s.tried, SETTLING, PATIENCE)
    lost = late & ~s.moved & ~s.tried
    which = jnp.where(late & s.moved, 1, jnp.where(late & s.tried, 2, 0))
    s = lax.switch(which, [lambda: s, lambda: _taken_back(s), lambda: _nearer(s)])
    return dataclasses.replace(s, lost=s.lost | lost)


def _followed(s: NewtonState) -> NewtonState:
    """Where the solution could not be followed, the other blocks settle at the new ρ.

    With barriers, whose paths are smooth, it is followed to a nearer one first.
    """
    far = jnp.maximum(s.times, 1 / s.times) > LEAST_TIMES

    def settling() -> NewtonState:
        phase = jnp.full_like(s.phase, SETTLE)
        return dataclasses.replace(_again(s, s.times, True), phase=phase, tried=far)

    def moving() -> NewtonState:
        """Back to the center, to bring x1 nearer to where φ is least before it is followed."""
        return dataclasses.replace(
            s,
            iterate=s.center,
            slope=s.center_slope,
            known=jnp.ones((), bool),
            rho=s.center_rho,
            tau=s.center_tau,
            times=jnp.full_like(s.times, FIRST_FALL),
            loose=s.loose * TIGHTER,
            idle=jnp.zeros((), bool),
            phase=jnp.full_like(s.phase, SETTLE),
            inner=jnp.zeros_like(s.inner),
        )

    def again() -> NewtonState:
        if s.tau is None:
            return settling()
        which = jnp.where(far, 0, jnp.where((s.loose > LEAST_LOOSE) & (s.tau > 0), 1, 2))
        return lax.switch(which, [lambda: _nearer(s), moving, settling])

    return lax.cond(s.inner >= FOLLOWING, again, lambda: s)


def _nearer(s: NewtonState) -> NewtonState:
    """Follow the solution again, to a ρ that is not as far away."""
    return _again(s, jnp.sqrt(s.times), s.tau is not None)


def _again(s: NewtonState, times: Array, beside: bool) -> NewtonState:
    """Follow the solution from the center, or from beside it, with ρ there times this."""
    tau = _smaller(s.center_tau, times, s.target + s.relative)
    nearest = jnp.where(s.wished < 1, jnp.maximum(times, s.wished), jnp.minimum(times, s.wished))
    at = _at_another(s, nearest, tau)
    if not beside:
        at = dataclasses.replace(at, kinked=jnp.ones((), bool))
    return dataclasses.replace(at, times=times, phase=jnp.full_like(s.phase, FOLLOW))


def _at_another(s: NewtonState, times: Array, tau: Array | None) -> NewtonState:
    """From the center, with ρ there times this and another τ."""
    return dataclasses.replace(
        s,
        iterate=s.center,
        slope=s.center_slope,
        known=jnp.zeros((), bool),
        share=1 / times,
        rho=s.center_rho * times,
        tau=tau,
        inner=jnp.zeros_like(s.inner),
        tried=jnp.zeros((), bool),
    )
