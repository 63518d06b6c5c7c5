"""Adaptive: the penalty and proximal point method with nothing assumed known."""

from __future__ import annotations

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from bilevax import trees
from bilevax.certificates.gap import grounded_excess, lower_ground
from bilevax.problems import BilevelProblem, Point
from bilevax.problems.reformulations import at_both, penalty_blocks, penalty_point
from bilevax.problems.validation import require
from bilevax.programs import quick, steady
from bilevax.solvers.base import Solver, Task, check_positive
from bilevax.solvers.continuation import Continuation, Seen
from bilevax.solvers.curvature import SAFETY, X2, Y2, Z1, Z2, Blocks, Curvature, products
from bilevax.solvers.endgame import SYSTEMS, ended, free_entries, size_for
from bilevax.solvers.penalised import Engine, Penalised, first_penalty
from bilevax.solvers.reach import evened, extent, lengths, renewed
from bilevax.trees import Tree

# A new anchor is set when the residual has fallen by this factor since the last one, or after this
# share of all gradients.
ANCHOR_FALL, ANCHOR_GRADIENTS = 0.4, 0.36
# Steps between two questions whether something is due.
AT_A_TIME = 16
# What may be due after a step.
NOTHING, RESTART, CONCLUDE, BEGIN = range(4)
# Largest step·‖F(u) − F(w)‖/‖u − w‖ at which an extragradient step is taken, and how steps grow.
RATIO, GROW, SHRINK, OVERFLOW = 0.95, 1.05, 0.65, 0.05
# A subproblem is solved until its residual is this share of the proximal term's gradient, or of its
# first residual, or until it has taken this share of all gradients so far, and at least so many.
INNER_SHARE, INNER_FALL, INNER_GRADIENTS, INNER_LEAST = 0.3, 0.05, 0.25, 400
# Proximal weights grow by this factor where a subproblem turns out not to be monotone, or by what
# the step lacks. The next subproblem gives a block without weight this share of its own curvature.
BOOST, LITTLE = 1.5, 0.01
# Weights that have grown by this factor say that the problem is not of its stated class.
MISTRUST = 1e6
# Steps are about 1 in units of what the curvatures allow. So many subproblems in a row that end
# with steps below this say that slopes jump: else steps would have grown a thousandfold meanwhile.
TINY, STUCK = 1e-5, 3
# How often all curvatures are measured at first; later they are renewed when the gradients have
# grown by this factor.
FIRST_ROUNDS, REFRESH = 3, 1.5
# End games: not before so many gradients, for their programs have to be compiled, and where one
# more system is at most this share of all gradients with those before; it takes about as long as so
# many gradients for each of its unknowns. Its columns have at most so many numbers. One has arrived
# when its residual is this share of the target.
END_GRADIENTS, END_SHARE, END_PRICE = 3000, 0.1, 2
MOST_NUMBERS, ARRIVED = 10_000_000, 0.3


class AdaptiveState(eqx.Module):
    """Flat vectors over the six blocks, and what has been learnt about the problem."""

    iterate: Array  # of the extragradient method
    half: Array  # the point in the middle of its step, at which the residual is known
    anchor: Array  # the point towards which steps are drawn
    center: Array  # of the proximal term: the last outer iterate
    slope: Array  # the operator (∇ₓP, −∇ᵧP) at `half`
    residual: Array  # of the subproblem at `half`, in the `metric`
    anchored: Array  # the residual when the anchor was set
    opened: Array  # the residual when the subproblem began
    step_size: Array
    continuation: Continuation  # of ρ
    origin: Array  # where the run began
    extent: Array  # the diameter of each block's domain: the unit of the block
    reach: Array  # how far each block has to go, up to a common factor
    boost: Array  # the factor on the proximal weights, > 1 where subproblems were not monotone
    weights: Array  # of the proximal term, per block
    surprised: Array  # whether this subproblem was not monotone with the weights it began with
    curved: Array  # 6 × 6: how strongly blocks are coupled in the subproblem
    metric: Array  # 1/curvature per block, in which residuals are measured
    curvature: Curvature
    probing: Array  # products still to be done before the next subproblem
    refreshed: Array  # gradients when the curvatures were last measured
    stuck: Array  # how many subproblems in a row have ended with tiny steps
    settled: Array  # whether the subproblem is solved well enough
    event: Array  # what is due now, NOTHING if nothing
    since: Array  # steps since the anchor
    inner: Array  # gradients of this subproblem
    outer: Array
    ended: Array  # the value of `outer` when free entries were counted last, for an end game
    free: Array  # how many there were
    systems: Array  # what the end games took, in gradients
    ready: Array  # whether one has arrived: a check is asked for
    linear_solves: Array
    gradients: Array
    blocks: Blocks = eqx.field(static=True)

    @property
    def rho(self) -> Array:
        return self.continuation.rho


class Adaptive(Engine[AdaptiveState]):
    """The paper's reformulation and proximal point method, with every constant found on the way.

    min over x = (x1, y1, y2), max over y = (x2, z1, z2) of P_ρ (`eq:new_minmax`), by
    x^{k+1} ≈ argmin max P_ρ + ½‖x − x^k‖²_W, each subproblem by extragradient in a metric.

    - Extragradient: drawn towards an anchor (Yoon & Ryu 2021), which moves up whenever the
      residual has fallen enough.
    - Step sizes: the local Lipschitz constant that each step shows, in the metric that is best for
      how far each block has to go (`lengths`). How far that is, `reach`, is learnt from how far
      the blocks came between two anchors, as PDLP learns its primal weight (Applegate et al. 2021).
    - W: per block, just above the nonconvexity that Hessian-vector products show. Of two blocks
      with a nonconvex coupling the one with further to go is held less; a block without gets none.
      Where a subproblem is not monotone after all, W grows by what the step shows, in all blocks
      that need it, and curvatures are measured anew after it.
    - Subproblems: solved relative to how far they move the iterate, warm-started.
    - ρ: grows while the gap bound is above the target, and the residual does not explain it; a
      first guess that was too large shrinks.
    - End game: once in a while, after a check, Newton's steps in the entries that no term holds.
      Where these entries are the right ones, a system or two end at rounding.

    `rho` and `step_size` are first guesses. The certificate ends the run; the method itself gives
    up only where no W makes its subproblems monotone, or no step is short enough for them, or after
    `patience` gradients.
    """

    rho: Any = None
    step_size: Any = None
    target: Any = None
    relative: Any = None
    force: Any = None
    patience: Any = None

    def __check_init__(self):
        check_positive(self, "rho", "step_size", "force", "patience")
        self.check_aims()

    @property
    def gradients_per_step(self) -> int:
        return 2

    def review_gradients(self, state: AdaptiveState) -> int:
        return SYSTEMS + 2 if int(state.gradients) >= END_GRADIENTS else 0

    def prepare(self, problem: BilevelProblem, start: Point, tolerance: float) -> Adaptive:
        require(problem, BilevelProblem, "Adaptive")
        dtype = trees.dtype_of(start.replace(rho=None))
        first_rho, steepness = first_penalty(problem, start)
        rho, force = self.rho, steepness if self.force is None else self.force
        if rho is None:
            rho = first_rho if start.rho is None else start.rho
        return Adaptive(
            rho=trees.scalar(rho, dtype),
            step_size=trees.scalar(1.0 if self.step_size is None else self.step_size, dtype),
            target=trees.scalar(tolerance if self.target is None else self.target, dtype),
            relative=trees.scalar(0.0 if self.relative is None else self.relative, dtype),
            force=trees.scalar(force, dtype),
            patience=None if self.patience is None else trees.scalar(self.patience, int),
        )

    def advice(self) -> str:
        return "try another start, or solver=bilevax.Adaptive(rho=…) with a larger first penalty"

    def init(self, problem: BilevelProblem, start: Point) -> AdaptiveState:
        x, y = penalty_blocks(start)
        blocks = Blocks.of(x, y)
        w = blocks.layout.ravel((*x, *y))
        dtype, zero = w.dtype, jnp.zeros((), int)
        one, ones = jnp.ones((), dtype), jnp.ones(6, dtype)
        return AdaptiveState(
            iterate=w,
            half=w,
            anchor=w,
            center=w,
            slope=jnp.zeros_like(w),
            residual=one,
            anchored=one,
            opened=one,
            step_size=self.step_size,
            continuation=Continuation.begin(self.rho, self.target, self.relative, self.force),
            origin=w,
            extent=extent(problem, (*x, *y), dtype),
            reach=jnp.zeros(6, dtype),
            boost=one,
            weights=jnp.zeros(6, dtype),
            surprised=jnp.zeros((), bool),
            curved=jnp.eye(6, dtype=dtype),
            metric=ones,
            curvature=Curvature.unknown(blocks, w),
            probing=zero + FIRST_ROUNDS * len(products(blocks)),
            refreshed=zero,
            stuck=zero,
            settled=jnp.zeros((), bool),
            event=zero + NOTHING,
            since=zero,
            inner=zero,
            outer=zero,
            ended=zero,
            free=zero,
            systems=zero,
            ready=jnp.zeros((), bool),
            linear_solves=zero,
            gradients=zero,
            blocks=blocks,
        )

    def step(self, problem: BilevelProblem, state: AdaptiveState, limit: Array) -> AdaptiveState:
        """Hessian-vector products for the couplings, then extragradient steps up to an event.

        All that happens seldom is a loop of at most one round, not a branch: under `vmap` both
        sides of a branch are computed always, and a loop only while some problem needs it.
        """
        state = dataclasses.replace(state, ready=jnp.zeros((), bool))
        last = limit - self.gradients_per_step
        due = lambda event: lambda s: s.event == event
        probing = lambda s: (s.probing > 0) & (s.gradients <= last)
        s = lax.while_loop(probing, lambda s: _probe(problem, s), state)
        s = _moved(problem, s, last)
        s = lax.while_loop(due(RESTART), _restart, s)
        s = lax.while_loop(due(CONCLUDE), lambda s: _conclude(problem, s), s)
        return lax.while_loop(due(BEGIN), _begin, s)

    def done(self, problem: BilevelProblem, state: AdaptiveState) -> Array:
        """What was learnt cannot be trusted.

        No proximal weight makes the subproblems monotone, or no step is short enough for them.
        """
        lost = (state.boost > MISTRUST) | (state.stuck >= STUCK)
        return lost if self.patience is None else lost | (state.gradients >= self.patience)

    def is_ready(self, problem: BilevelProblem, state: AdaptiveState) -> Array:
        return state.ready

    def linear_solves(self, state: AdaptiveState) -> Array:
        return state.linear_solves

    def reviewed(
        self, prepared: Any, task: Task, state: AdaptiveState, signals: Tree
    ) -> tuple[Solver, AdaptiveState, bool]:
        """An end game, where the outer iterate has moved and a linear system is cheap by now.

        While the number of free entries changes, they are hardly the right ones.
        """
        spent, free, before = int(state.gradients), 0, int(state.free)
        if spent >= END_GRADIENTS and int(state.outer) > int(state.ended):
            state = _with_free_entries(task.problem, state)
            free = int(state.free) if int(state.free) == before else 0
        price, room = END_PRICE * free, END_SHARE * spent - int(state.systems)
        size = size_for(free)
        if 0 < price <= room and size * state.center.size <= MOST_NUMBERS:
            state = _end(task.problem, state, size, np.asarray(price))
        return prepared, state, False

    def output(self, problem: BilevelProblem, state: AdaptiveState) -> Point:
        parts = state.blocks.layout.unravel(state.center)
        return penalty_point(parts[:3], parts[3:]).replace(rho=state.rho)


def _penalised(problem: BilevelProblem, s: AdaptiveState) -> Penalised:
    return Penalised(problem, s.rho, s.blocks)


def _curved(problem: BilevelProblem, s: AdaptiveState, v: Array) -> Array:
    """∂²P·v"""
    _, bent = jax.jvp(lambda w: _penalised(problem, s).operator(w), (s.center,), (v,))
    return jnp.where(s.blocks.owner < X2, 1, -1).astype(v.dtype) * bent


def _probe(problem: BilevelProblem, s: AdaptiveState) -> AdaptiveState:
    """One Hessian-vector product; after the last one a subproblem begins."""
    bend = lambda v: _curved(problem, s, v)
    return dataclasses.replace(
        s,
        curvature=s.curvature.looked(s.blocks, bend, s.probing, s.gradients),
        probing=s.probing - 1,
        event=jnp.where(s.probing == 1, BEGIN, NOTHING).astype(s.event.dtype),
        refreshed=s.gradients,
        gradients=s.gradients + 2,
    )


def _begin(s: AdaptiveState) -> AdaptiveState:
    """A new subproblem: weights and metric from what is known now."""
    present = jnp.asarray(s.blocks.present)
    couplings = s.curvature.couplings()
    couplings = jnp.where(present[:, None] & present[None, :], couplings, 0)
    # Before anything has moved: reaches that make all couplings count the same.
    first = jnp.where(present, jnp.sqrt(evened(couplings, s.extent)), 0)
    reach = jnp.where(jnp.any(s.reach > 0), s.reach, first)
    held = s.boost * s.curvature.weights(jnp.where(present, reach, jnp.max(reach))[:X2])
    # With a boost, a block that seemed to need no weight gets a little.
    held += (s.boost - 1) * LITTLE * jnp.diag(couplings)[:X2]
    weights = jnp.where(present, jnp.zeros(6, held.dtype).at[:X2].set(held), 0)
    curved = couplings + jnp.diag(weights)
    return dataclasses.replace(
        s,
        iterate=s.center,
        half=s.center,
        anchor=s.center,
        reach=reach,
        weights=weights,
        curved=curved,
        metric=evened(curved, reach),
        event=jnp.full_like(s.event, NOTHING),
        since=jnp.zeros_like(s.since),
        inner=jnp.zeros_like(s.inner),
    )


def _moved(problem: BilevelProblem, s: AdaptiveState, last: Array) -> AdaptiveState:
    """Extragradient steps until something is due; none is begun with more than `last` gradients.

    There are only a few at a time, because under `vmap` a problem for which something is due waits
    for all others.
    """
    steps = lengths(s.reach, s.curved)
    spread = (s.blocks.spread(steps), s.blocks.spread(s.metric))

    def going(carry: tuple[AdaptiveState, Array]) -> Array:
        s, count = carry
        room = (s.gradients <= last) & (count < AT_A_TIME)
        return room & (s.event == NOTHING) & (s.probing == 0)

    def onwards(carry: tuple[AdaptiveState, Array]) -> tuple[AdaptiveState, Array]:
        s, count = carry
        return _move(problem, s, steps, *spread), count + 1

    return lax.while_loop(going, onwards, (s, jnp.zeros((), int)))[0]


def _move(
    problem: BilevelProblem, s: AdaptiveState, per_block: Array, metric: Array, measure: Array
) -> AdaptiveState:
    """One step of the anchored extragradient method on the subproblem.

    `metric` is what steps are taken in, `per_block` per entry. Whether the subproblem is solved is
    measured against curvatures instead, `s.metric` per entry: by its step lengths, a block whose
    steps are short would seem to be nearly solved.
    """
    weights = s.blocks.spread(s.weights)
    minimised = (s.reach > 0) & (jnp.arange(6) < X2)
    ease = jnp.where(minimised, 1 / jnp.where(minimised, s.reach, 1) ** 2, 0)  # W grows like this
    length, steps = s.step_size * metric, s.step_size * per_block
    drawn = 1 / (s.since.astype(metric.dtype) + 2)
    base = s.iterate + drawn * (s.anchor - s.iterate)
    here = _penalised(problem, s).operator(s.iterate) + weights * (s.iterate - s.center)
    half = _penalised(problem, s).prox(base - length * here, steps)
    bare = _penalised(problem, s).operator(half)
    pull = weights * (half - s.center)
    there = bare + pull
    iterate = _penalised(problem, s).prox(base - length * there, steps)

    moved, turned = half - s.iterate, there - here
    left = (base - half) / length + turned  # of the subproblem: an element of its operator at half
    rounded = jnp.abs(there) + weights * (jnp.abs(s.iterate) + jnp.abs(s.center))
    # All sums in one, which is several times as fast as one after the other; and roots before
    # squares, which would overflow for slopes that are no larger than they may be.
    root, measured = jnp.sqrt(metric), jnp.sqrt(measure)
    lengths = [moved / root, root * turned, root * rounded]
    lengths += [measured * left, measured * pull, measured * bare]
    energies = [turned * moved, weights * moved * moved, s.blocks.spread(ease) * moved * moved]
    sums = jnp.sum(jnp.stack([*energies, *(v * v for v in lengths)]), axis=1)
    turning, holding, moving = sums[:3]
    distance, turn, rough, residual, pulling, slope = jnp.sqrt(sums[3:])
    lipschitz = turn / jnp.where(distance > 0, distance, 1)
    eps = jnp.finfo(half.dtype).eps
    # Not «≤ fails»: NaN must take the step, so that it is seen.
    too_long = s.step_size * turn > RATIO * distance * (1 + 64 * eps)
    within = RATIO / jnp.where(lipschitz > 0, lipschitz, 1)
    # A slope so large that its square overflows says only that the step was far too long.
    overflows = jnp.isinf(turn) & jnp.isfinite(turning)
    shorter = jnp.where(overflows, OVERFLOW * s.step_size, SHRINK * within)
    longer = jnp.where(distance > 0, GROW, 1) * s.step_size
    longer = jnp.where(lipschitz > 0, jnp.minimum(longer, jnp.maximum(within, s.step_size)), longer)
    # Monotone? If not, the proximal weights are too small.
    noise = eps * distance * (1e3 * turn + 64 * rough)
    bent = ~too_long & (turning < -noise)
    # Where BOOST is not enough for this very step, as for weights of zero, what lacks is added; but
    # no more at once than the largest curvature, for a step that hardly moved these blocks.
    lacks = -turning - (BOOST - 1) * holding
    surprised = bent & (lacks > 0) & (moving > 0)
    added = SAFETY * ease * (lacks / jnp.where(moving > 0, moving, 1))
    added = jnp.where(surprised, jnp.minimum(added, jnp.max(s.curved)), 0)

    taken = lambda new, old: jnp.where(too_long, old, new)
    s = dataclasses.replace(
        s,
        iterate=taken(iterate, s.iterate),
        half=taken(half, s.half),
        slope=taken(bare, s.slope),
        residual=taken(residual, s.residual),
        step_size=jnp.where(too_long, shorter, longer),
        boost=jnp.where(bent, BOOST * s.boost, s.boost),
        weights=jnp.where(bent, BOOST * s.weights, s.weights) + added,
        curved=s.curved + jnp.diag(added),
        surprised=s.surprised | surprised,
        since=taken(s.since + 1, s.since),
        inner=s.inner + 2,
        gradients=s.gradients + 2,
    )
    s = dataclasses.replace(
        s,
        opened=jnp.where(s.inner == 2, s.residual, s.opened),
        anchored=jnp.where(s.since == 1, s.residual, s.anchored),
        settled=taken(_settled(s, pulling), s.settled),
    )
    over = s.settled | _lasted(s) | (s.residual <= 4 * eps * slope)
    event = jnp.where(over, CONCLUDE, jnp.where(_worn(s), RESTART, NOTHING))
    return dataclasses.replace(s, event=taken(event.astype(s.event.dtype), s.event))


def _settled(s: AdaptiveState, pull: Array) -> Array:
    """Whether the subproblem is solved well enough, for how far it moves the iterate."""
    return (s.residual <= INNER_SHARE * pull) | (s.residual <= INNER_FALL * s.opened)


def _lasted(s: AdaptiveState) -> Array:
    """Whether the subproblem has taken its share of gradients."""
    spent, inner = (n.astype(s.half.dtype) for n in (s.gradients, s.inner))
    return inner >= jnp.maximum(INNER_GRADIENTS * spent, INNER_LEAST)


def _worn(s: AdaptiveState) -> Array:
    """Whether the anchor has done its work."""
    spent, lasted = (n.astype(s.half.dtype) for n in (s.gradients, 2 * s.since))
    fell = s.residual <= ANCHOR_FALL * s.anchored
    return (s.since > 1) & (fell | (lasted > ANCHOR_GRADIENTS * spent))


def _restart(s: AdaptiveState) -> AdaptiveState:
    """A new anchor; reaches follow from what moved since the old one."""
    return dataclasses.replace(
        s,
        iterate=s.half,
        anchor=s.half,
        reach=renewed(s.reach, s.blocks.lengths(s.half - s.anchor)),
        event=jnp.full_like(s.event, NOTHING),
        since=jnp.zeros_like(s.since),
    )


def _conclude(problem: BilevelProblem, s: AdaptiveState) -> AdaptiveState:
    """The outer iterate moves to where the subproblem ended; then ρ follows."""
    continuation, times = s.continuation.followed(_seen(problem, s))
    spent = s.gradients.astype(times.dtype)
    stale = (times != 1) | s.surprised | (spent > REFRESH * s.refreshed.astype(spent.dtype))
    rounds = len(products(s.blocks))
    return dataclasses.replace(
        s,
        center=_shifted(problem, s, 1 / times),
        reach=renewed(s.reach, s.blocks.lengths(s.half - s.anchor)),
        continuation=continuation,
        boost=jnp.maximum(1, 0.9 * s.boost),
        stuck=jnp.where(s.step_size < TINY, s.stuck + 1, 0),
        surprised=jnp.zeros((), bool),
        probing=jnp.where(stale, rounds, s.probing).astype(s.probing.dtype),
        event=jnp.where(stale | (s.probing > 0), NOTHING, BEGIN).astype(s.event.dtype),
        outer=s.outer + 1,
    )


def _shifted(problem: BilevelProblem, s: AdaptiveState, share: Array) -> Array:
    """The point to begin with when ρ becomes ρ/share: the lower level pulls there as it did here.

    (z1, y2) solve the lower level whatever ρ is, and (y1, z2) are off by about 1/ρ. So their
    distance is scaled by `share`, except for entries that a term holds, at a bound say.
    """
    x1, y1, y2, x2, z1, z2 = s.blocks.layout.unravel(s.half)
    off = lambda a, b: jax.tree.map(lambda p, q: q + share * (p - q), a, b)
    there = s.blocks.layout.ravel((x1, off(y1, z1), y2, x2, z1, off(z2, y2)))
    steps = lengths(s.reach, s.curved)
    onwards = s.half - s.blocks.spread(steps) * s.slope
    tiny = jnp.finfo(there.dtype).eps
    prox = jax.vmap(lambda v, scale: _penalised(problem, s).prox(v, scale * steps))
    held, inside = prox(jnp.stack([onwards, there]), jnp.asarray([1, tiny], there.dtype))
    free = held == onwards
    return jnp.where(free & (share != 1), inside, s.half)


def _steps(s: AdaptiveState) -> Array:
    """The step lengths of the blocks, as the last subproblem had them."""
    return s.step_size * lengths(s.reach, s.curved)


@quick
def _with_free_entries(problem: BilevelProblem, s: AdaptiveState) -> AdaptiveState:
    """How many entries of the outer iterate no term holds; nobody need ask again until it moves."""
    free = free_entries(_penalised(problem, s), _steps(s), s.center)
    return dataclasses.replace(s, ended=s.outer, free=free, gradients=s.gradients + 1)


@steady
def _end(problem: BilevelProblem, s: AdaptiveState, most: int, price: Array) -> AdaptiveState:
    """An end game from the outer iterate: its end, if it arrives, is that of a subproblem."""
    ending = ended(_penalised(problem, s), _steps(s), s.center, most)
    s = dataclasses.replace(
        s,
        systems=s.systems + price * ending.solves,
        linear_solves=s.linear_solves + ending.solves,
        gradients=s.gradients + ending.gradients,
    )
    there = dataclasses.replace(
        s, half=ending.point, anchor=ending.point, slope=ending.slope, settled=jnp.ones((), bool)
    )
    aim = s.continuation.target + s.continuation.relative * s.continuation.force
    arrived = _seen(problem, there).worst <= ARRIVED * aim
    there = _conclude(problem, there)
    # Where ρ stays, the end may be certified.
    there = dataclasses.replace(there, ended=there.outer, ready=there.rho == s.rho)
    return lax.cond(arrived, lambda: there, lambda: s)


def _seen(problem: BilevelProblem, s: AdaptiveState) -> Seen:
    """The residuals of P at `half`, and the gap there."""
    parts = s.blocks.layout.unravel(s.half)
    slopes = s.blocks.layout.unravel(s.slope)
    zero = jnp.zeros((), s.half.dtype)
    rest = lambda term, block, g: zero if term is None else trees.norm(term.residual(block, g))
    lines = jnp.stack(_penalised(problem, s).per_block(rest, parts, slopes))
    # y2's residual counts for the certificate, not for ρ: while y2 is held fast it says only that.
    telling = jnp.where(jnp.arange(6) != Y2, lines, 0)
    # How much of the gap the residual may explain: what it could change P by over the way so far.
    came = s.blocks.lengths(s.half - s.origin)
    # The slopes in (z1, z2) are those of −ρ·f~ and ρ·f~ there: what bounds the gap.
    x1, y1, y2, _, z1, z2 = parts
    of_y1 = at_both(problem.y1.value, (y1,), (z1,))
    of_y2 = jnp.zeros(2) if problem.y2 is None else at_both(problem.y2.value, (y2,), (z2,))
    of_y2 = of_y2.astype(zero.dtype)
    lower = lambda y1, y2: problem.smooth_lower(x1, y1, y2)
    above, below = at_both(lower, (y1, z2), (z1, y2))
    primal, dual = above + of_y1[0], below - of_y2[0]
    on_y1, on_y2 = lower_ground(problem, "y1", x1, y1), lower_ground(problem, "y2", x1, y2)
    fall = grounded_excess(problem.y1, z1, trees.scale(-1 / s.rho, slopes[Z1]), on_y1).bound
    rise = grounded_excess(problem.y2, z2, trees.scale(-1 / s.rho, slopes[Z2]), on_y2).bound
    return Seen(
        worst=jnp.max(lines),
        residual=jnp.max(telling),
        blamed=jnp.sum(telling * came),
        gap=primal - dual + fall.astype(primal.dtype) + rise.astype(primal.dtype),
        below=primal - dual - of_y1[1] - of_y2[1],
        values=jnp.maximum(jnp.abs(primal), jnp.abs(dual)),
        settled=s.settled,
        gradients=s.gradients,
    )
