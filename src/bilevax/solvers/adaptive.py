"""Adaptive: the penalty and proximal point method with nothing assumed known."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

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
from bilevax.solvers.curvature import X1, X2, Y1, Y2, Z1, Z2, Blocks, Curvature, products
from bilevax.terms import PerLeaf, Term

# Those blocks that the *user* minimises over.
PRIMAL = (X1, Y1, Z1)

# Largest step·‖F(u) − F(w)‖/‖u − w‖ at which an extragradient step is taken, and how steps grow.
RATIO, GROW, SHRINK = 0.95, 1.05, 0.65
# A subproblem is solved until its residual is this share of the proximal term's pull, or until it
# has taken this share of all gradients so far.
INNER_SHARE, INNER_GRADIENTS, INNER_LEAST = 0.3, 0.25, 400
# Without a proximal term to compare with: until the residual has fallen by this factor.
INNER_FALL = 0.05
# Proximal weights grow by this where a subproblem turns out not to be monotone, and by this share
# of a block's own curvature.
BOOST, LITTLE = 1.5, 0.01
# How fast it is forgotten how far a block moved, and how unequal the weights may become by it.
FORGET, UNEQUAL = 1e-2, 1e6
# How often all curvatures are looked at at first, and how much gradients grow between later looks.
FIRST_ROUNDS, REFRESH = 3, 1.5
# ρ grows when the residual is at most this share of ‖∇f‖ and the gap too large.
LOOSE, RHO_LEAST, RHO_MOST = 0.01, 2.0, 10.0
# Too large means: the residual fell by the first factor, and the gap not by the second with it.
FELL, FOLLOWED = 0.2, 0.5
# A target that is reached and did not end the run becomes this much smaller.
TIGHTEN = 0.25


class AdaptiveState(eqx.Module):
    """Flat vectors over the six blocks, and what has been learnt about the problem."""

    iterate: Array  # of the extragradient method
    half: Array  # its point in between, at which its residual is known
    center: Array  # of the proximal term: the last outer iterate
    slope: Array  # the operator (∇ₓP, −∇ᵧP) at `half`
    residual: Array  # of the subproblem at `half`
    opened: Array  # the residual with which the subproblem began
    step_size: Array
    rho: Array
    target: Array
    force: Array  # ‖∇f‖, about
    travel: Array  # how far each block moved lately, from outer iterate to outer iterate
    balance: Array  # steps of primal blocks are longer by this, those of dual blocks shorter
    boost: Array
    weights: Array  # of the proximal term, per block
    metric: Array  # relative step sizes, per block
    curvature: Curvature
    probing: Array  # products still to be done before the next subproblem
    refreshed: Array  # gradients when the couplings were last looked at
    seen: Array  # residual and gap when they were last compared, at this ρ
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
    - W: per block, just above the nonconvexity that Hessian-vector products show. Of two blocks
      with a nonconvex coupling the one that moves more is held less; a block without gets none.
      Where a subproblem is not monotone after all, W grows.
    - Subproblems: solved relative to how far they move the iterate, warm-started.
    - ρ: grows while the gap bound, not the residual, is above the target.

    `rho` and `step_size` are first guesses. It has no stopping test of its own: the certificate
    ends the run.
    """

    keeps_state: ClassVar[bool] = True

    rho: Any = None
    step_size: Any = None
    target: Any = None
    force: Any = None

    def __check_init__(self):
        check_positive(self, "rho", "step_size", "target", "force")

    @property
    def gradients_per_step(self) -> int:
        return 2

    def prepare(self, problem: BilevelProblem, start: Point, tolerance: float) -> Adaptive:
        require(problem, BilevelProblem, "Adaptive")
        for name in ("y1", "y2"):
            require_gap_bound(getattr(problem, name), getattr(start, name), name, "Adaptive")
        dtype = trees.dtype_of(dataclasses.replace(start, rho=None))
        steepness, upper, lower = _steepness(problem, start)
        rho, force = self.rho, steepness if self.force is None else self.force
        if rho is None:
            rho = max(upper, 1e-3 * steepness) / lower if start.rho is None else start.rho
        return Adaptive(
            rho=jnp.asarray(rho, dtype),
            step_size=jnp.asarray(1.0 if self.step_size is None else self.step_size, dtype),
            target=jnp.asarray(tolerance if self.target is None else self.target, dtype),
            force=jnp.asarray(force, dtype),
        )

    def init(self, problem: BilevelProblem, start: Point) -> AdaptiveState:
        x, y = penalty_blocks(start)
        blocks = Blocks.of(x, y)
        w = blocks.layout.ravel((*x, *y))
        dtype, zero = w.dtype, jnp.zeros((), int)
        ones = jnp.ones(6, dtype)
        return AdaptiveState(
            iterate=w,
            half=w,
            center=w,
            slope=jnp.zeros_like(w),
            residual=jnp.ones((), dtype),
            opened=jnp.ones((), dtype),
            step_size=self.step_size,
            rho=self.rho,
            target=self.target,
            force=self.force,
            travel=ones,
            balance=jnp.ones((), dtype),
            boost=jnp.ones((), dtype),
            weights=jnp.zeros(6, dtype),
            metric=ones,
            curvature=Curvature.unknown(blocks, w),
            probing=zero + FIRST_ROUNDS * len(products(blocks)),
            refreshed=zero,
            seen=jnp.asarray([jnp.finfo(dtype).max, 0], dtype),
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


def _curved(problem: BilevelProblem, s: AdaptiveState, v: Array) -> Array:
    """∂²P·v"""
    _, bent = jax.jvp(lambda w: _operator(problem, s, w), (s.center,), (v,))
    return jnp.where(s.blocks.owner < X2, 1, -1).astype(v.dtype) * bent


def _probe(problem: BilevelProblem, s: AdaptiveState) -> AdaptiveState:
    """One Hessian-vector product; after the last one a subproblem begins."""
    bend = lambda v: _curved(problem, s, v)
    s = dataclasses.replace(
        s,
        curvature=s.curvature.looked(s.blocks, bend, s.probing, s.gradients),
        probing=s.probing - 1,
        refreshed=s.gradients,
        gradients=s.gradients + 2,
    )
    return lax.cond(s.probing == 0, lambda: _begin(s), lambda: s)


def _relative(s: AdaptiveState) -> Array:
    """Each minimised block's travel against the largest."""
    ours = jnp.asarray(s.blocks.present) & (jnp.arange(6) < X2)
    most = jnp.max(jnp.where(ours, s.travel, 0))
    share = jnp.where(most > 0, s.travel / jnp.where(most > 0, most, 1), 1)
    return jnp.where(ours, jnp.maximum(share, 1 / UNEQUAL), 1)


def _begin(s: AdaptiveState) -> AdaptiveState:
    """A new subproblem: weights and metric from what is known now."""
    present = jnp.asarray(s.blocks.present)
    couplings = s.curvature.couplings()
    held = s.boost * s.curvature.weights(_relative(s)[:X2])
    # Boosted, also a block that seemed to need none gets some.
    held += (s.boost - 1) * LITTLE * jnp.diag(couplings)[:X2]
    weights = jnp.zeros(6, couplings.dtype).at[:X2].set(held)
    weights = jnp.where(present, weights, 0)
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
    noise = eps * distance * (1e3 * turn + 64 * along(there))
    bent = ~too_long & (turning < -noise)
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
    most = jnp.maximum(INNER_GRADIENTS * s.gradients.astype(half.dtype), INNER_LEAST)
    opening = s.inner == 2
    s = dataclasses.replace(s, opened=jnp.where(opening, s.residual, s.opened))
    ends = ~too_long & (_settled(s) | (s.inner.astype(half.dtype) >= most))
    ends |= ~too_long & (s.residual <= 4 * eps * along(s.slope))
    return lax.cond(ends, lambda: _conclude(problem, s), lambda: s)


def _pull(s: AdaptiveState) -> Array:
    """The length of the proximal term's gradient, in the metric."""
    pull = s.blocks.spread(s.weights) * (s.half - s.center)
    return jnp.sqrt(jnp.sum(s.blocks.spread(s.metric) * pull * pull))


def _settled(s: AdaptiveState) -> Array:
    """Whether the subproblem is solved well enough, for how far it moves the iterate."""
    relative = s.residual <= INNER_SHARE * _pull(s)
    return relative | ((jnp.max(s.weights) == 0) & (s.residual <= INNER_FALL * s.opened))


def _conclude(problem: BilevelProblem, s: AdaptiveState) -> AdaptiveState:
    """The outer iterate moves to where the subproblem ended; then ρ, balance and travel follow."""
    moved = jnp.sqrt(s.blocks.squares(s.half - s.center))
    kept = jnp.sqrt(s.travel * jnp.maximum(moved, FORGET * s.travel))
    travel = jnp.where(s.outer > 0, kept, moved)

    primal, dual, gap = _lines(problem, s)
    residual = jnp.maximum(primal, dual)
    reached = (residual <= s.target) & (gap <= s.target)
    settled = _settled(s)
    loose = (residual <= s.target) | (settled & (residual <= LOOSE * s.force))
    # A gap that falls with the residual will vanish with it: then ρ is large enough.
    seen_residual, seen_gap = s.seen
    fell = (residual <= s.target) | (residual <= FELL * seen_residual)
    raising = ~reached & loose & fell & (gap > s.target) & (gap > FOLLOWED * seen_gap)
    noted = jnp.stack([residual, gap])
    fresh = jnp.asarray([jnp.finfo(noted.dtype).max, 0], noted.dtype)  # nothing seen yet at a new ρ
    seen = jnp.where(raising, fresh, jnp.where(loose & fell, noted, s.seen))
    factor = jnp.clip(jnp.sqrt(gap / s.target), RHO_LEAST, RHO_MOST)
    rho = jnp.where(raising, s.rho * factor, s.rho)
    target = jnp.where(reached, TIGHTEN * s.target, s.target)

    spent = s.gradients.astype(residual.dtype)
    since = s.referenced.astype(spent.dtype)
    due = spent > jnp.where(settled, 1.2, 2.0) * since + 200
    balance = jnp.where(due, _balance(s), s.balance)
    stale = raising | (spent > REFRESH * s.refreshed.astype(spent.dtype))
    rounds = len(products(s.blocks))
    s = dataclasses.replace(
        s,
        center=s.half,
        travel=travel,
        rho=rho,
        target=target,
        balance=balance,
        boost=jnp.maximum(1, 0.9 * s.boost),
        probing=jnp.where(stale, rounds, 0).astype(s.probing.dtype),
        seen=seen,
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
    change = jnp.clip(jnp.sqrt(seen / s.balance), 0.5, 2.0)
    return jnp.clip(s.balance * change, 1e-4, 1e4)


def _lines(problem: BilevelProblem, s: AdaptiveState) -> tuple[Array, Array, Array]:
    """The certificate's residuals at `half`, of primal and of dual blocks, and its gap."""
    parts = s.blocks.layout.unravel(s.half)
    slopes = s.blocks.layout.unravel(s.slope)
    terms = _terms(problem, s.rho)
    sizes = [
        jnp.zeros((), s.half.dtype) if t is None else trees.norm(t.residual(a, g))
        for t, a, g in zip(terms, parts, slopes)
    ]
    of_primal = jnp.maximum(jnp.hypot(sizes[X1], sizes[Y1]), sizes[Z1])
    of_dual = jnp.max(jnp.stack([sizes[Y2], sizes[X2], sizes[Z2]]))
    # The slopes in (z1, z2) are those of −ρ·f~ and ρ·f~ there: what bounds the gap.
    x1, y1, y2, _, z1, z2 = parts
    value = problem.smooth_lower(x1, y1, z2) + problem.y1.value(y1)
    value -= problem.smooth_lower(x1, z1, y2)
    value += 0 if problem.y2 is None else problem.y2.value(y2)
    fall = linear_excess(problem.y1, z1, trees.scale(-1 / s.rho, slopes[Z1]))
    rise = linear_excess(problem.y2, z2, trees.scale(-1 / s.rho, slopes[Z2]))
    gap = value + fall.astype(value.dtype) + rise.astype(value.dtype)
    return of_primal, of_dual, gap


def _steepness(problem: BilevelProblem, start: Point) -> tuple[float, float, float]:
    """‖∇f‖, and ‖∇f‖ and ‖∇f~‖ in y1 alone, over the domain: the middle of a few samples.

    The maximising blocks stay where they start: bounds of multipliers say nothing about a problem.
    Where f~ has no slope in y1 there, as a bilinear one can have none, that in y2 stands in.
    """
    seen = _slopes(problem, start)
    return tuple(_middle(sizes) for sizes in seen)  # pyright: ignore[reportReturnType]


@eqx.filter_jit
def _slopes(problem: BilevelProblem, start: Point) -> tuple[Array, ...]:
    term = PerLeaf((problem.x1, problem.y1))

    def at(key: Array) -> tuple[Array, ...]:
        x1, y1 = sample_domain(term, (start.x1, start.y1), key)
        in_x, _, in_y, _ = problem.upper_gradient(x1, start.x2, y1, start.y2)
        _, lower, other = (trees.norm(g) for g in problem.lower_gradient(x1, y1, start.y2))
        lower = jnp.where(lower < 1e-6 * other, other, lower)
        return trees.norm((in_x, in_y)), trees.norm(in_y), lower

    return lax.map(at, jax.random.split(jax.random.key(0), 9))


def _middle(sizes: Array) -> float:
    found = float(jnp.median(sizes))
    return float(np.clip(found, 1e-6, 1e6)) if np.isfinite(found) else 1.0
