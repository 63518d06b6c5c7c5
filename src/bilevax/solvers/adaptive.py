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
from bilevax.certificates.gap import linear_excess
from bilevax.problems import BilevelProblem, Point
from bilevax.problems.constants import sample_domain
from bilevax.problems.reformulate import penalty, penalty_blocks, penalty_point
from bilevax.problems.validate import require, require_gap_bound
from bilevax.solvers.base import Solver, check_positive
from bilevax.terms import PerLeaf, Term
from bilevax.trees import Layout, Tree

# The six blocks of the penalty problem: (x1, y1, y2) are minimised over, (x2, z1, z2) maximised.
X1, Y1, Y2, X2, Z1, Z2 = range(6)
MINIMISED = (X1, Y1, Y2)
# Those that the *user* minimises over, and those that the user maximises over.
PRIMAL, DUAL = (X1, Y1, Z1), (Y2, X2, Z2)
# Pairs of blocks whose coupling can make the penalty function nonconvex.
PAIRS = ((X1, Y1), (X1, Y2), (Y1, Y2))

# Largest step·‖F(u) − F(w)‖/‖u − w‖ at which an extragradient step is taken, and how steps grow.
RATIO, GROW, SHRINK = 0.95, 1.05, 0.65
# A subproblem is solved until its residual is this share of the proximal term's pull, or until it
# has taken this share of all gradients so far.
INNER_SHARE, INNER_GRADIENTS, INNER_LEAST = 0.3, 0.25, 400
# Proximal weights are this much above the nonconvexity that was seen, and grow by BOOST where the
# subproblem still turns out not to be monotone.
SAFETY, BOOST = 1.05, 1.5
# Memory of how far each block moves, and how unequal the weights may become by it.
MEMORY, UNEQUAL = 0.5, 1e3
# Rounds of power iteration at first and later, and how much gradients grow between these.
FIRST_ROUNDS, LATER_ROUNDS, REFRESH = 8, 2, 1.5
# ρ grows when the residual is at most this share of the gradient's length and the gap too large.
LOOSE, RHO_LEAST, RHO_MOST = 0.01, 2.0, 10.0
# A target that is reached and did not end the run becomes this much smaller.
TIGHTEN = 0.25


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Where the six blocks lie in a flat vector."""

    layout: Layout
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, x: Tree, y: Tree) -> Blocks:
        parts = (*x, *y)
        sizes = tuple(sum(leaf.size for leaf in jax.tree.leaves(part)) for part in parts)
        return cls(Layout.of(parts), sizes)

    @property
    def present(self) -> np.ndarray:
        return np.asarray(self.sizes) > 0

    @property
    def owner(self) -> np.ndarray:
        """Which block each entry belongs to."""
        return np.repeat(np.arange(6), self.sizes)

    def spread(self, per_block: Array) -> Array:
        """One number per block, over the entries of the block."""
        return per_block[self.owner]

    def squares(self, v: Array) -> Array:
        """‖v_b‖² for each block."""
        return jax.ops.segment_sum(v * v, self.owner, 6, indices_are_sorted=True)

    def probes(self) -> tuple[tuple[int, int, int], ...]:
        """The Hessian-vector products of one round of power iteration: (vector, from, to).

        Vector 0 approaches the largest curvature of each block, 1 the most negative one of those
        minimised over, and 2, 3, 4 the strongest coupling of each of PAIRS, back and forth.
        """
        here = [b for b in range(6) if self.sizes[b]]
        rounds = [(0, b, b) for b in here]
        rounds += [(1, b, b) for b in MINIMISED if b in here]
        for number, (i, j) in enumerate(PAIRS):
            if i in here and j in here:
                rounds += [(2 + number, j, i), (2 + number, i, j)]
        return tuple(rounds)


class AdaptiveState(eqx.Module):
    """Flat vectors over the six blocks, and what has been learnt about the problem."""

    iterate: Array  # of the extragradient method
    half: Array  # its point in between, at which its residual is known
    center: Array  # of the proximal term: the last outer iterate
    slope: Array  # the operator (∇ₓP, −∇ᵧP) at `half`
    residual: Array  # of the subproblem at `half`
    step_size: Array
    rho: Array
    target: Array
    travel: Array  # how far each block moved lately, from outer iterate to outer iterate
    balance: Array  # steps of primal blocks are longer by this, those of dual blocks shorter
    boost: Array
    weights: Array  # of the proximal term, per block
    metric: Array  # relative step sizes, per block
    couplings: Array  # 6 × 6: ‖∂²P/∂b∂b'‖ as seen
    negative: Array  # −(the least eigenvalue of ∂²P/∂b²), or zero
    probes: Array  # the vectors of power iteration
    probing: Array  # products still to be done before the next subproblem
    refreshed: Array  # gradients when the couplings were last looked at
    reference: Array  # the point since which `balance` measures movement
    referenced: Array  # and the gradients then
    inner: Array  # gradients of this subproblem
    outer: Array
    gradients: Array
    blocks: Blocks = eqx.field(static=True)


class Adaptive(Solver[AdaptiveState]):
    """The paper's reformulation and proximal point method, with every constant found on the way.

    min over x = (x1, y1, y2), max over y = (x2, z1, z2) of P_ρ (`eq:new_minmax`), by
    x^{k+1} ≈ argmin max P_ρ + ½‖x − x^k‖²_W, each subproblem by extragradient in a metric.

    - Step sizes: the local Lipschitz constant that each step shows, in a metric that balances the
      couplings between blocks (as Ruiz 2001 balances rows) and, by how far they have to move,
      primal against dual blocks (as the primal weight of PDLP, Applegate et al. 2021).
    - W: per block, just above the nonconvexity that power iteration on Hessian-vector products
      sees. Only blocks that are coupled nonconvexly get a weight, and of two coupled ones the block
      that moves more gets the smaller share. Where a subproblem is not monotone after all, W grows.
    - Subproblems: solved relative to how far they move the iterate, warm-started.
    - ρ: grows while the gap bound, not the residual, is above the target.

    `rho` and `step_size` are first guesses. It has no stopping test of its own: the certificate
    ends the run.
    """

    rho: Any = None
    step_size: Any = None
    target: Any = None

    def __check_init__(self):
        check_positive(self, "rho", "step_size", "target")

    @property
    def gradients_per_step(self) -> int:
        return 2

    def prepare(self, problem: BilevelProblem, start: Point, tolerance: float) -> Adaptive:
        require(problem, BilevelProblem, "Adaptive")
        for name in ("y1", "y2"):
            require_gap_bound(getattr(problem, name), getattr(start, name), name, "Adaptive")
        dtype = trees.dtype_of(dataclasses.replace(start, rho=None))
        rho = self.rho
        if rho is None:
            rho = start.rho if start.rho is not None else _first_rho(problem, start)
        return Adaptive(
            rho=jnp.asarray(rho, dtype),
            step_size=jnp.asarray(1.0 if self.step_size is None else self.step_size, dtype),
            target=jnp.asarray(tolerance if self.target is None else self.target, dtype),
        )

    def init(self, problem: BilevelProblem, start: Point) -> AdaptiveState:
        x, y = penalty_blocks(start)
        blocks = Blocks.of(x, y)
        w = blocks.layout.ravel((*x, *y))
        dtype, zero = w.dtype, jnp.zeros((), int)
        probes = jax.random.normal(jax.random.key(0), (2 + len(PAIRS), w.size), dtype)
        norms = jnp.sqrt(jax.vmap(blocks.squares)(probes))
        probes = probes / jax.vmap(blocks.spread)(norms)
        ones = jnp.ones(6, dtype)
        return AdaptiveState(
            iterate=w,
            half=w,
            center=w,
            slope=jnp.zeros_like(w),
            residual=jnp.ones((), dtype),
            step_size=self.step_size,
            rho=self.rho,
            target=self.target,
            travel=ones,
            balance=jnp.ones((), dtype),
            boost=jnp.ones((), dtype),
            weights=jnp.zeros(6, dtype),
            metric=ones,
            couplings=jnp.zeros((6, 6), dtype),
            negative=jnp.zeros(6, dtype),
            probes=probes,
            probing=zero + FIRST_ROUNDS * len(blocks.probes()),
            refreshed=zero,
            reference=w,
            referenced=zero,
            inner=zero,
            outer=zero,
            gradients=zero,
            blocks=blocks,
        )

    # One step: a Hessian-vector product for the couplings, or an extragradient step.

    def step(self, problem: BilevelProblem, state: AdaptiveState, limit: Array) -> AdaptiveState:
        return lax.cond(
            state.probing > 0, lambda: _probe(problem, state), lambda: _move(problem, state)
        )

    def done(self, problem: BilevelProblem, state: AdaptiveState) -> Array:
        return jnp.asarray(False)

    def output(self, problem: BilevelProblem, state: AdaptiveState) -> Point:
        parts = state.blocks.layout.unravel(state.center)
        return dataclasses.replace(penalty_point(parts[:3], parts[3:]), rho=state.rho)


def _operator(problem: BilevelProblem, s: AdaptiveState, w: Array) -> Array:
    """(∇ₓP, −∇ᵧP)"""
    parts = s.blocks.layout.unravel(w)
    gx, gy = penalty(problem, s.rho).gradient(parts[:3], parts[3:])
    return s.blocks.layout.ravel((*gx, *trees.scale(-1, gy)))


def _terms(problem: BilevelProblem, rho: Array) -> tuple[Term | None, ...]:
    p = problem
    y1, y2 = rho * p.y1, None if p.y2 is None else rho * p.y2
    return (p.x1, y1, y2, p.x2, y1, y2)


def _prox(problem: BilevelProblem, s: AdaptiveState, v: Array, steps: Array) -> Array:
    parts = s.blocks.layout.unravel(v)
    terms = _terms(problem, s.rho)
    moved = [a if t is None else t.prox(a, steps[b]) for b, (t, a) in enumerate(zip(terms, parts))]
    return s.blocks.layout.ravel(tuple(moved))


def _probe(problem: BilevelProblem, s: AdaptiveState) -> AdaptiveState:
    """One Hessian-vector product of power iteration; after the last one a subproblem begins."""
    table = jnp.asarray(s.blocks.probes())
    vector, source, sink = table[s.probing % len(table)]
    owner = jnp.asarray(s.blocks.owner)
    v = jnp.where(owner == source, s.probes[vector], 0)
    sign = jnp.where(owner < X2, 1, -1).astype(v.dtype)
    _, bent = jax.jvp(lambda w: _operator(problem, s, w), (s.center,), (v,))
    bent = sign * bent  # ∇²P·v
    lengths = jnp.sqrt(s.blocks.squares(bent))
    couplings = s.couplings.at[:, source].set(lengths)
    # Towards the most negative eigenvalue: the same with (largest curvature)·I − ∇²P.
    shifted = vector == 1
    top = s.couplings[source, source]
    onward = jnp.where(owner == sink, jnp.where(shifted, top * v - bent, bent), 0)
    length = jnp.sqrt(jnp.vdot(onward, onward))
    some = length > 0
    found = jnp.where(
        owner == sink, onward / jnp.where(some, length, 1), s.probes[vector]
    )
    probes = s.probes.at[vector].set(jnp.where(some, found, s.probes[vector]))
    own = jnp.where(shifted, top, lengths[source])  # a shifted product measures no curvature
    couplings = couplings.at[source, source].set(own)
    negative = s.negative.at[source].set(
        jnp.where(shifted, jnp.maximum(length - top, 0), s.negative[source])
    )
    s = dataclasses.replace(
        s,
        couplings=couplings,
        negative=negative,
        probes=probes,
        probing=s.probing - 1,
        refreshed=s.gradients,
        gradients=s.gradients + 2,
    )
    return lax.cond(s.probing == 0, lambda: _begin(s), lambda: s)


def _begin(s: AdaptiveState) -> AdaptiveState:
    """A new subproblem: weights and metric from what is known now."""
    present = jnp.asarray(s.blocks.present)
    couplings = jnp.maximum(s.couplings, s.couplings.T)
    minimised = jnp.arange(6) < X2
    # Diagonally dominant in the scale of each block's travel: W + ∇²ₓₓP ⪰ 0.
    both = minimised[:, None] & minimised[None, :] & ~jnp.eye(6, dtype=bool)
    pull = jnp.where(both, couplings * s.travel[None, :] / s.travel[:, None], 0)
    weights = SAFETY * s.boost * (s.negative + jnp.sum(pull, axis=1))
    weights = jnp.where(minimised & present, weights, 0)
    curved = couplings + jnp.diag(weights)
    metric = _balanced(jnp.where(present[:, None] & present[None, :], curved, 0))
    primal = jnp.isin(jnp.arange(6), jnp.asarray(PRIMAL))
    metric = metric * jnp.where(primal, s.balance, 1 / s.balance)
    return dataclasses.replace(
        s,
        iterate=s.center,
        half=s.center,
        weights=weights,
        metric=metric,
        inner=jnp.zeros_like(s.inner),
    )


def _balanced(couplings: Array) -> Array:
    """d with max over b' of √(d_b·d_b')·couplings[b, b'] = 1 for every block b that is coupled."""

    def even(_: Array, d: Array) -> Array:
        rows = jnp.max(couplings * jnp.sqrt(d[:, None] * d[None, :]), axis=1)
        return jnp.where(rows > 0, d / jnp.where(rows > 0, rows, 1), d)

    return lax.fori_loop(0, 30, even, jnp.ones(6, couplings.dtype))


def _move(problem: BilevelProblem, s: AdaptiveState) -> AdaptiveState:
    """One extragradient step on the subproblem."""
    metric = s.blocks.spread(s.metric)
    weights = s.blocks.spread(s.weights)
    along = lambda v: jnp.sqrt(jnp.sum(metric * v * v))  # of gradients
    across = lambda v: jnp.sqrt(jnp.sum(v * v / metric))  # of points
    length, steps = s.step_size * metric, s.step_size * s.metric
    here = _operator(problem, s, s.iterate) + weights * (s.iterate - s.center)
    half = _prox(problem, s, s.iterate - length * here, steps)
    bare = _operator(problem, s, half)
    there = bare + weights * (half - s.center)
    moved, turned = half - s.iterate, there - here
    distance, turn = across(moved), along(turned)
    lipschitz = turn / jnp.where(distance > 0, distance, 1)
    eps = jnp.finfo(half.dtype).eps
    # Not «≤ fails»: NaN must take the step, so that it is seen.
    too_long = s.step_size * turn > RATIO * distance * (1 + 64 * eps)
    iterate = _prox(problem, s, s.iterate - length * there, steps)
    within = RATIO / jnp.where(lipschitz > 0, lipschitz, 1)
    longer = GROW * s.step_size
    longer = jnp.where(lipschitz > 0, jnp.minimum(longer, jnp.maximum(within, s.step_size)), longer)
    step_size = jnp.where(too_long, SHRINK * within, longer)
    residual = along((s.iterate - half) / length + turned)
    # Monotone? If not, the proximal weights are too small.
    turning = jnp.vdot(turned, moved)
    bent = ~too_long & (turning < -1e3 * eps * turn * distance)
    boost = jnp.where(bent, BOOST * s.boost, s.boost)
    weights_now = jnp.where(bent, BOOST * s.weights, s.weights)
    s = dataclasses.replace(
        s,
        iterate=jnp.where(too_long, s.iterate, iterate),
        half=jnp.where(too_long, s.half, half),
        slope=jnp.where(too_long, s.slope, bare),
        residual=jnp.where(too_long, s.residual, residual),
        step_size=step_size,
        boost=boost,
        weights=weights_now,
        inner=s.inner + 2,
        gradients=s.gradients + 2,
    )
    pull = along(s.blocks.spread(s.weights) * (s.half - s.center))
    most = jnp.maximum(INNER_GRADIENTS * s.gradients, INNER_LEAST)
    ends = ~too_long & ((s.residual <= INNER_SHARE * pull) | (s.inner >= most))
    ends |= ~too_long & (s.residual <= 4 * eps * along(s.slope))
    return lax.cond(ends, lambda: _conclude(problem, s), lambda: s)


def _conclude(problem: BilevelProblem, s: AdaptiveState) -> AdaptiveState:
    """The outer iterate moves to where the subproblem ended; then ρ, balance and travel follow."""
    moved = jnp.sqrt(s.blocks.squares(s.half - s.center))
    kept = s.travel ** (1 - MEMORY) * jnp.where(moved > 0, moved, s.travel) ** MEMORY
    minimised = jnp.asarray(s.blocks.present) & (jnp.arange(6) < X2)
    middle = jnp.sum(jnp.where(minimised, jnp.log(kept), 0)) / jnp.maximum(jnp.sum(minimised), 1)
    travel = jnp.clip(kept / jnp.exp(middle), 1 / UNEQUAL, UNEQUAL)
    travel = jnp.where(minimised, travel, 1)

    residual, gap, length = _lines(problem, s)
    reached = (residual <= s.target) & (gap <= s.target)
    raising = ~reached & (residual <= jnp.maximum(s.target, LOOSE * length)) & (gap > s.target)
    factor = jnp.clip(jnp.sqrt(gap / s.target), RHO_LEAST, RHO_MOST)
    rho = jnp.where(raising, s.rho * factor, s.rho)
    target = jnp.where(reached, TIGHTEN * s.target, s.target)

    due = s.gradients > 1.2 * s.referenced + 200
    balance = jnp.where(due, _balance(s), s.balance)
    stale = raising | (s.gradients > REFRESH * s.refreshed)
    rounds = LATER_ROUNDS * len(s.blocks.probes())
    s = dataclasses.replace(
        s,
        center=s.half,
        travel=travel,
        rho=rho,
        target=target,
        balance=balance,
        boost=jnp.maximum(1, 0.9 * s.boost),
        probing=jnp.where(stale, rounds, 0).astype(s.probing.dtype),
        reference=jnp.where(due, s.half, s.reference),
        referenced=jnp.where(due, s.gradients, s.referenced),
        outer=s.outer + 1,
    )
    return lax.cond(stale, lambda: s, lambda: _begin(s))


def _balance(s: AdaptiveState) -> Array:
    """Primal against dual movement since the reference, in the metric without the balance."""
    primal = jnp.isin(jnp.arange(6), jnp.asarray(PRIMAL))
    even = s.metric / jnp.where(primal, s.balance, 1 / s.balance)
    far = s.blocks.squares(s.half - s.reference) / even
    present = jnp.asarray(s.blocks.present)
    of_primal = jnp.sqrt(jnp.sum(jnp.where(primal & present, far, 0)))
    of_dual = jnp.sqrt(jnp.sum(jnp.where(~primal & present, far, 0)))
    both = (of_primal > 0) & (of_dual > 0)
    seen = jnp.where(both, of_primal / jnp.where(both, of_dual, 1), s.balance)
    return jnp.clip(jnp.sqrt(s.balance * seen), 1e-4, 1e4)


def _lines(problem: BilevelProblem, s: AdaptiveState) -> tuple[Array, Array, Array]:
    """The certificate's residual and gap at `half`, from the gradient there, and its length."""
    parts = s.blocks.layout.unravel(s.half)
    slopes = s.blocks.layout.unravel(s.slope)
    terms = _terms(problem, s.rho)
    sizes = [
        jnp.zeros((), s.half.dtype) if t is None else trees.norm(t.residual(a, g))
        for t, a, g in zip(terms, parts, slopes)
    ]
    stationarity = jnp.sqrt(sizes[X1] ** 2 + sizes[Y1] ** 2 + sizes[Y2] ** 2)
    residual = jnp.max(jnp.stack([stationarity, *sizes[X2:]]))
    # The slopes in (z1, z2) are those of −ρ·f~ and ρ·f~ there: what bounds the gap.
    x1, y1, y2, _, z1, z2 = parts
    value = problem.smooth_lower(x1, y1, z2) + problem.y1.value(y1)
    value -= problem.smooth_lower(x1, z1, y2)
    value += 0 if problem.y2 is None else problem.y2.value(y2)
    fall = linear_excess(problem.y1, z1, trees.scale(-1 / s.rho, slopes[Z1]))
    rise = linear_excess(problem.y2, z2, trees.scale(-1 / s.rho, slopes[Z2]))
    gap = value + fall.astype(value.dtype) + rise.astype(value.dtype)
    return residual, gap, jnp.sqrt(jnp.vdot(s.slope, s.slope))


def _first_rho(problem: BilevelProblem, start: Point) -> float:
    """How much steeper the upper level is than the lower, in y1, over the domain."""
    term = PerLeaf((problem.x1, problem.x2, problem.y1, problem.y2))
    blocks = (start.x1, start.x2, start.y1, start.y2)

    @eqx.filter_jit
    def slopes(key: Array) -> tuple[Array, Array]:
        x1, x2, y1, y2 = sample_domain(term, blocks, key)
        upper = problem.upper_gradient(x1, x2, y1, y2)[2]
        lower = problem.lower_gradient(x1, y1, y2)[1]
        return trees.norm(upper), trees.norm(lower)

    seen = np.asarray([slopes(key) for key in jax.random.split(jax.random.key(0), 9)], float)
    upper, lower = np.median(seen, axis=0)
    rho = upper / lower if lower > 0 else 1.0
    return float(np.clip(rho, 1e-3, 1e6)) if np.isfinite(rho) and rho > 0 else 1.0
