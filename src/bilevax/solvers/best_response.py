"""BestResponse: the penalty method where both adversaries' answers are in closed form."""

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
from bilevax.solvers.base import check_positive
from bilevax.solvers.model import Model
from bilevax.solvers.newton import BADLY, EASE, MOST_HOLD, RETREAT, TAKEN, TIGHTEN, WELL
from bilevax.solvers.penalised import Engine, first_penalty
from bilevax.solvers.responses import Answered, Parts, Slopes, parts_of, usual_pull
from bilevax.trees import Layout, Tree

# The method gives up after so many linear systems, and after so many in a row without settling.
MOST_SOLVES, PATIENCE = 1500, 150
# After a move of x1 the parts settle in at most so many steps, or the move is taken back.
SETTLING = 20
# A step of a part is halved until its slope along the way is at most this share of what it was, the
# other way; at most so often.
TURNED, HALVINGS = 0.3, 12
# ω, by which the Hessians of the parts are regularised, in shares of their size: the least, and the
# factors by which a full step and a short one change it.
FIRM, LEAST_FIRM, MOST_FIRM, FULL_STEP, SHORT_STEP = 1e-9, 1e-12, 1e2, 0.1, 10.0
# Parts are settled when their slopes are at most this share of the target, or of x1's slope.
SETTLED, SETTLED_SHARE = 0.1, 1e-3
# The least share of the largest curvature by which an entry of x1 is held.
LEAST_SCALE = 1e-4
# Where x1's slope is below this share of ‖∇f‖, ρ grows; below this share of what is due to μ and ν,
# centers go to the answers, and μ and ν fall.
ENOUGH, CENTERED = 1e-2, 0.3
# The first ρ is so many times the one at which both levels pull alike; the first μ is this share of
# ‖∇f‖, and the first ν of f~'s usual slope in y2; the factor by which both fall.
FIRST_RHO, FIRST_MU, FIRST_NU, FALL = 10.0, 0.1, 0.05, 0.7
# ρ grows to this many times where the gap should be small enough, within these factors.
BEYOND, AT_LEAST, MOST_TIMES = 1.5, 2.0, 5.0
# The shares of the target at which a check is asked for: of residuals and of the gap; and by how
# much the target shrinks where a check says no.
READY, READY_GAP, SHRINK = 0.3, 0.01, 0.25
# Slopes take so many gradients: one at the answers, and three to find them, derivatives included.
GRADIENTS = 4
# Parts wider than this, or more upper variables, would make systems too large.
MOST_WIDTH, MOST_X1 = 1000, 1000


class ResponseState(eqx.Module):
    """x1 in a flat vector, y1 and z1 part by part, and what was learnt of the problem."""

    x1: Array
    both: Array
    slopes: Slopes
    known: Array  # whether they have been computed
    x2_center: Tree
    y2_center: Tree
    center: tuple[Array, Array, Slopes]  # where the parts were settled last
    center_value: Array
    foreseen: Array  # how far φ was foreseen to fall by the move since
    moved: Array  # whether x1 has moved since
    moving: Array  # whether it shall move next
    rho: Array
    mu: Array  # the curvature of x2's answer around its center
    nu: Array  # and of y2's
    target: Array
    relative: Array
    step: Array  # of x1's natural map
    hold: Array  # how strongly x1 is held
    firm: Array  # ω of each part
    inner: Array  # steps since x1 moved
    idle: Array  # whether x1 had nowhere to go
    ready: Array
    lost: Array
    linear_solves: Array
    gradients: Array
    layout: Layout = eqx.field(static=True)
    parts: Parts = eqx.field(static=True)


class BestResponse(Engine[ResponseState]):
    """The paper's penalty problem where both adversaries' answers are in closed form.

    That is so where f~ has the same curvature −c, c > 0, in all entries of y2, as a penalty on
    uneven weights has, f is linear in x2 or has such a curvature, too, and does not read y2; and y1
    has no bounds. Put in, the answers leave φ(x1) = min over y1 of Ψ − ρ·min over z1 of φ~
    (`responses.py`), two smooth convex problems that fall into parts where y1's leading axis counts
    what only x1 couples, such as tasks.

    - Settle: semismooth Newton steps in (y1, z1), each part with a line search of its own.
    - Move: x1 goes to where the quadratic model of φ is least in a trust region. Its slope is
      ∂P/∂x1 (Danskin), its curvature that of the implicit function theorem.
    - Where x1 is stationary, ρ grows as the gap asks for, and the centers of the answers go to the
      answers, with smaller μ and ν.

    Adversaries may have any number of entries, such as weights of rows: linear systems are as large
    as a part of y1. `linear_solves` counts those of all parts as one. `rho`, `mu` and `nu` are
    first guesses.
    """

    is_tight: ClassVar[bool] = True
    in_stages: ClassVar[bool] = True

    rho: Any = None
    target: Any = None
    relative: Any = None
    force: Any = None
    mu: Any = None
    nu: Any = None
    parts: int = eqx.field(static=True, default=0)

    def __check_init__(self):
        check_positive(self, "rho", "force", "mu", "nu")
        self.check_aims()

    @property
    def gradients_per_step(self) -> int:
        return GRADIENTS * (HALVINGS + 2)

    def prepare(self, problem: BilevelProblem, start: Point, tolerance: float) -> BestResponse:
        parts = parts_of(problem, start)
        if not parts:
            raise ValueError(
                "BestResponse needs adversaries whose answers are in closed form: the lower level "
                "with one curvature in all of y2, the upper level linear in x2 and without y2, and "
                "a y1 without bounds; use bilevax.Engines()"
            )
        if (width := Parts.of(start.y1, parts).width) > MOST_WIDTH:
            raise ValueError(f"BestResponse: {width} entries of y1 in one system are too many")
        if (count := sum(leaf.size for leaf in jax.tree.leaves(start.x1))) > MOST_X1:
            raise ValueError(f"BestResponse: {count} entries of x1 are too many")
        dtype = trees.dtype_of(start.replace(rho=None))
        rho, force = first_penalty(problem, start)
        rho = FIRST_RHO * rho if start.rho is None else start.rho
        given = lambda value, other: trees.scalar(other if value is None else value, dtype)
        return BestResponse(
            rho=given(self.rho, rho),
            target=given(self.target, tolerance),
            relative=given(self.relative, 0.0),
            force=given(self.force, force),
            mu=given(self.mu, FIRST_MU * force),
            nu=given(self.nu, FIRST_NU * max(usual_pull(problem, start), 1e-6)),
            parts=parts,
        )

    def advice(self) -> str:
        return "try another start, or solver=bilevax.Engines()"

    def init(self, problem: BilevelProblem, start: Point) -> ResponseState:
        layout, parts = Layout.of(start.x1), Parts.of(start.y1, self.parts)
        x1 = layout.ravel(problem.x1.project(start.x1))
        z1 = start.y1 if start.z1 is None else start.z1
        both = jnp.stack([parts.ravel(start.y1), parts.ravel(z1)])
        zero, no, one = jnp.zeros((), int), jnp.zeros((), bool), jnp.ones((), both.dtype)
        slopes = Slopes(jnp.zeros_like(x1), jnp.zeros_like(both))
        return ResponseState(
            x1=x1,
            both=both,
            slopes=slopes,
            known=no,
            x2_center=start.x2,
            y2_center=start.y2,
            center=(x1, both, slopes),
            center_value=0 * one,
            foreseen=0 * one,
            moved=no,
            moving=no,
            rho=one * self.rho,
            mu=one * self.mu,
            nu=one * self.nu,
            target=one * self.target,
            relative=one * self.relative,
            step=one,
            hold=0 * one,
            firm=jnp.full(both.shape[:2], FIRM, both.dtype),
            inner=zero,
            idle=no,
            ready=no,
            lost=no,
            linear_solves=zero,
            gradients=zero,
            layout=layout,
            parts=parts,
        )

    def step(self, problem: BilevelProblem, state: ResponseState, limit: Array) -> ResponseState:
        """See whether the parts are settled, and then one linear system."""
        s = _with_slopes(problem, dataclasses.replace(state, ready=jnp.zeros((), bool)))
        seen = _seen(problem, s, self.force)
        s = lax.cond(seen.settled & ~s.moving, lambda: _judged(problem, s, seen), lambda: s)
        return lax.cond(s.ready | ~s.known, lambda: s, lambda: _onwards(problem, s, seen))

    def done(self, problem: BilevelProblem, state: ResponseState) -> Array:
        return state.lost | (state.linear_solves >= MOST_SOLVES)

    def is_ready(self, problem: BilevelProblem, state: ResponseState) -> Array:
        return state.ready

    def linear_solves(self, state: ResponseState) -> Array:
        return state.linear_solves

    def output(self, problem: BilevelProblem, state: ResponseState) -> Point:
        """x1 exactly where its term holds it, and the answers to y1 and z1."""
        x1 = _natural(problem, state, state.slopes.of_x1)
        x1 = jnp.where(state.known, x1, state.x1)
        return _answered(problem, state).point(x1, state.both)


def _answered(problem: BilevelProblem, s: ResponseState) -> Answered:
    return Answered(problem, s.rho, s.mu, s.nu, s.x2_center, s.y2_center, s.layout, s.parts)


def _natural(problem: BilevelProblem, s: ResponseState, slope: Array) -> Array:
    """Where a step of the prox takes x1."""
    at = s.layout.unravel(s.x1 - s.step * slope)
    return s.layout.ravel(problem.x1.prox(at, s.step))


def _with_slopes(problem: BilevelProblem, s: ResponseState) -> ResponseState:
    def found() -> ResponseState:
        slopes = _answered(problem, s).slopes(s.x1, s.both)
        known = jnp.ones((), bool)
        return dataclasses.replace(s, slopes=slopes, known=known, gradients=s.gradients + GRADIENTS)

    return lax.cond(s.known, lambda: s, found)


class _Seen(eqx.Module):
    """Where a run stands."""

    of_x1: Array  # the residual of x1
    others: Array  # and that of the parts
    aim: Array  # what residuals shall be
    force: Array  # ‖∇f‖, about
    settled: Array


def _seen(problem: BilevelProblem, s: ResponseState, force: Array) -> _Seen:
    of_x1 = trees.norm(s.x1 - _natural(problem, s, s.slopes.of_x1)) / s.step
    above, below = s.slopes.of_parts
    others = trees.norm((above, s.rho * below))
    aim = s.target + s.relative * force
    rough = jnp.where(s.idle, 0, SETTLED_SHARE * of_x1)
    settled = others <= jnp.maximum(SETTLED * aim, rough)
    return _Seen(of_x1, others, aim, force, settled & (s.linear_solves > 0))


def _judged(problem: BilevelProblem, s: ResponseState, seen: _Seen) -> ResponseState:
    """The parts are settled: take where x1's move led, or take it back."""
    above, in_y1, in_z1 = _answered(problem, s).values(s.x1, s.both)
    gap, size = in_y1 - in_z1, jnp.maximum(jnp.abs(in_y1), jnp.abs(in_z1))
    value = above + s.rho * gap
    noise = 1e3 * float(jnp.finfo(value.dtype).eps) * (jnp.abs(value) + s.rho * size)
    fall = s.center_value - value
    well = (fall + noise) / (s.foreseen + noise)
    fell = jnp.where(s.foreseen <= noise, fall >= -noise, well >= TAKEN) & jnp.isfinite(value)
    gap_aim = s.target + s.relative * size
    low = jnp.clip(noise / s.rho, READY_GAP * gap_aim, READY * gap_aim)
    taken = lambda: _taken(problem, s, seen, value, gap, low, well)
    return lax.cond(fell | ~s.moved, taken, lambda: _taken_back(s))


def _taken(
    problem: BilevelProblem, s: ResponseState, seen: _Seen, value: Array, gap: Array, low: Array,
    well: Array,
) -> ResponseState:  # fmt: skip
    """A new center; then a check is asked for, or ρ and μ change, or x1 moves."""
    point, close = _answered(problem, s).point(s.x1, s.both), READY * seen.aim
    apart = lambda a, b: trees.norm(trees.subtract(a, b))
    open_gap, off_x2 = gap > low, jnp.zeros_like(gap)
    if s.x2_center is not None:
        off_x2 = s.mu * apart(point.x2, s.x2_center)
    off_y2 = jnp.maximum(apart(point.y2, s.y2_center), apart(point.z2, s.y2_center))
    off_y2 = s.rho * s.nu * off_y2
    open_x2, open_y2 = off_x2 > close, off_y2 > close
    there = ~open_gap & ~open_x2 & ~open_y2
    ready = there & (seen.of_x1 <= close) & (seen.others <= close)
    rough = ENOUGH * seen.force
    rough = jnp.where(open_gap, rough, jnp.minimum(rough, CENTERED * jnp.maximum(off_x2, off_y2)))
    changing = ~there & (seen.of_x1 <= jnp.maximum(close, rough))
    wished = jnp.clip(BEYOND * jnp.sqrt(jnp.maximum(gap, 0) / low), AT_LEAST, MOST_TIMES)
    grown = jnp.where(changing & open_gap, wished, 1)
    factor = jnp.where(well > WELL, EASE, jnp.where(well < BADLY, TIGHTEN, 1))
    first = jnp.maximum(s.hold, seen.of_x1 / jnp.maximum(1, trees.norm(s.x1)))
    least = float(jnp.finfo(value.dtype).eps) / s.step
    both = jnp.stack([s.both[1] + (s.both[0] - s.both[1]) / grown, s.both[1]])
    for_x2, for_y2 = changing & open_x2, changing & open_y2

    def nearer(which: Array, center: Tree, answer: Tree) -> Tree:
        return jax.tree.map(lambda old, new: jnp.where(which, new, old), center, answer)

    return dataclasses.replace(
        s,
        both=both,
        known=~changing,
        x2_center=nearer(for_x2, s.x2_center, point.x2),
        y2_center=nearer(for_y2, s.y2_center, point.y2),
        center=(s.x1, s.both, s.slopes),
        center_value=value,
        moved=jnp.zeros((), bool),
        moving=~ready & ~changing,
        rho=s.rho * grown,
        mu=jnp.where(for_x2 & ~open_gap, FALL * s.mu, s.mu),
        nu=jnp.where(for_y2 & ~open_gap, FALL * s.nu, s.nu),
        target=jnp.where(ready, SHRINK * s.target, s.target),
        relative=jnp.where(ready, SHRINK * s.relative, s.relative),
        hold=jnp.maximum(jnp.where(s.moved, factor * s.hold, first), least),
        inner=jnp.zeros_like(s.inner),
        idle=s.idle & ~changing,
        ready=ready,
    )


def _taken_back(s: ResponseState) -> ResponseState:
    """Back to the center, where x1 is held more strongly."""
    x1, both, slopes = s.center
    return dataclasses.replace(
        s,
        x1=x1,
        both=both,
        slopes=slopes,
        known=jnp.ones((), bool),
        moved=jnp.zeros((), bool),
        moving=jnp.ones((), bool),
        hold=RETREAT * s.hold,
        inner=jnp.zeros_like(s.inner),
    )


class _Way(eqx.Module):
    """What a linear system says: how far x1 and the parts go, and what that should bring."""

    of_x1: Array
    of_parts: Array
    foreseen: Array
    hold: Array
    step: Array


def _onwards(problem: BilevelProblem, s: ResponseState, seen: _Seen) -> ResponseState:
    """One linear system in each part, and the step that it leads to."""
    hessians = _answered(problem, s).in_parts(s.x1, s.both)
    sizes = jnp.max(jnp.sum(jnp.abs(hessians), axis=-1), axis=-1)
    eye = jnp.eye(hessians.shape[-1], dtype=hessians.dtype)
    firm = s.firm * jnp.where(sizes > 0, sizes, 1)
    held = hessians + firm[..., None, None] * eye[None, None]
    s = dataclasses.replace(s, linear_solves=s.linear_solves + 1)

    def settling() -> _Way:
        zero = jnp.zeros_like(s.foreseen)
        way = -jnp.linalg.solve(held, s.slopes.of_parts[..., None])[..., 0]
        uphill = jnp.sum(way * s.slopes.of_parts, axis=-1, keepdims=True) > 0
        steepest = -s.slopes.of_parts / jnp.where(sizes > 0, sizes, 1)[..., None]
        fine = ~uphill & jnp.isfinite(way).all(axis=-1, keepdims=True)
        return _Way(jnp.zeros_like(s.x1), jnp.where(fine, way, steepest), zero, s.hold, s.step)

    way = lax.cond(s.moving, lambda: _move(problem, s, held), settling)
    return _stepped(problem, s, seen, way)


def _move(problem: BilevelProblem, s: ResponseState, hessians: Array) -> _Way:
    """To where the quadratic model of φ is least; the parts go along by the implicit function."""
    change = _answered(problem, s).in_x1(s.x1, s.both)
    along = jnp.linalg.solve(hessians, change.of_parts)
    weight = jnp.stack([jnp.ones_like(s.rho), -s.rho])[:, None, None, None]
    bent = change.of_x1 - jnp.einsum("ktmi,ktmj->ij", weight * change.of_parts, along)
    bent = jnp.where(jnp.isfinite(bent), bent, 0)
    bent = (bent + bent.T) / 2
    curved = jnp.max(jnp.sum(jnp.abs(bent), axis=1))
    step = jnp.where(curved > 0, 1 / jnp.where(curved > 0, curved, 1), s.step)
    scale = jnp.maximum(jnp.abs(jnp.diag(bent)) / jnp.where(curved > 0, curved, 1), LEAST_SCALE)
    model = Model(bent, s.slopes.of_x1, s.x1, step, problem.x1, s.layout, scale)
    d, foreseen, hold = model.least(s.hold)
    return _Way(d, -(along @ d), foreseen, hold, step)


def _stepped(problem: BilevelProblem, s: ResponseState, seen: _Seen, way: _Way) -> ResponseState:
    """Go that way: x1 by the whole of it, else each part by as much as its line search allows."""
    answered = _answered(problem, s)
    now = jnp.sum(s.slopes.of_parts * way.of_parts, axis=-1)
    share_each = 0.1 * SETTLED * seen.aim / s.both.shape[1] ** 0.5
    small = jnp.stack([share_each, share_each / s.rho])

    def tried(carry: tuple) -> tuple:
        lengths, count, _, _ = carry
        both = s.both + lengths[..., None] * way.of_parts
        slopes = answered.slopes(s.x1 + way.of_x1, both)
        there = jnp.sum(slopes.of_parts * way.of_parts, axis=-1)
        least = jnp.linalg.norm(slopes.of_parts, axis=-1) <= small[:, None]
        found = s.moving | (there <= -TURNED * now) | least
        return jnp.where(found, lengths, lengths / 2), count + 1, slopes, found

    going = lambda carry: ~jnp.all(carry[3]) & (carry[1] < HALVINGS)
    begin = (jnp.ones_like(now), jnp.zeros((), int), s.slopes, jnp.zeros(now.shape, bool))
    lengths, count, slopes, found = lax.while_loop(going, tried, begin)
    lengths = jnp.where(found, lengths, 2 * lengths)  # the last ones that were tried
    s = dataclasses.replace(s, gradients=s.gradients + GRADIENTS * count)
    fine = trees.all_finite(slopes)
    moves = (way.foreseen > 0) & jnp.any(way.of_x1 != 0)
    there = dataclasses.replace(s, both=s.both + lengths[..., None] * way.of_parts, slopes=slopes)
    which = jnp.where(s.moving, jnp.where(~moves, 1, jnp.where(fine, 0, 2)), 3)
    return lax.switch(
        which,
        [
            lambda: _moved(there, way),
            lambda: _still(s),
            lambda: dataclasses.replace(s, hold=RETREAT * s.hold, lost=s.hold * s.step > MOST_HOLD),
            lambda: _settling(lax.cond(fine, lambda: there, lambda: s), lengths),
        ],
    )


def _moved(s: ResponseState, way: _Way) -> ResponseState:
    return dataclasses.replace(
        s,
        x1=s.x1 + way.of_x1,
        foreseen=way.foreseen,
        moved=jnp.ones((), bool),
        moving=jnp.zeros((), bool),
        idle=jnp.zeros((), bool),
        hold=way.hold,
        step=way.step,
        lost=way.hold * way.step > MOST_HOLD,
        inner=jnp.zeros_like(s.inner),
    )


def _still(s: ResponseState) -> ResponseState:
    """Where x1 has nowhere to go, it is the parts that are not exact enough."""
    return dataclasses.replace(
        s,
        lost=s.idle,
        idle=jnp.ones((), bool),
        moving=jnp.zeros((), bool),
        inner=jnp.zeros_like(s.inner),
    )


def _settling(s: ResponseState, lengths: Array) -> ResponseState:
    """One more step; a move after which the parts do not settle is taken back."""
    factor = jnp.where(lengths == 1, FULL_STEP, jnp.where(lengths < 0.2, SHORT_STEP, 1))
    firm = jnp.clip(factor * s.firm, LEAST_FIRM, MOST_FIRM)
    s = dataclasses.replace(s, firm=firm, inner=s.inner + 1)
    late = s.inner > jnp.where(s.moved, SETTLING, PATIENCE)
    s = dataclasses.replace(s, lost=late & ~s.moved)
    return lax.cond(late & s.moved, lambda: _taken_back(s), lambda: s)
