"""The methods that `inner.py` compares, each as `init`, `step` and the `point` to judge it by.

All of them see a subproblem through `Subproblem`: an operator, a prox, and a residual.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

import bilevax as bx
from bilevax import trees
from bilevax.solvers import adaptive
from bilevax.solvers.adaptive import ANCHOR_FALL, ANCHOR_GRADIENTS, GROW, RATIO, SHRINK
from bilevax.solvers.curvature import X2
from bilevax.solvers.penalised import Penalised

# The step, of about 1, after which residuals are measured.
TINY = 1e-10
# Steps between two looks at an average, each of two gradients.
PERIOD = 16
# APDB's constants (c_α, c_β) where P is not linear in y, and where it is; and δ.
BENT, FLAT, DELTA = (0.5, 0.2), (0.95, 0.0), 0.01


class Subproblem(eqx.Module):
    """One of Adaptive's, in coordinates u = w/√lengths, in which its metric is the plain one."""

    problem: Any
    state: adaptive.AdaptiveState
    lengths: Array
    flat: Array  # whether P is linear in y

    @property
    def root(self) -> Array:
        return jnp.sqrt(self.state.blocks.spread(self.lengths))

    @property
    def in_x(self) -> np.ndarray:
        return self.state.blocks.owner < X2

    @property
    def penalised(self) -> Penalised:
        return Penalised(self.problem, self.state.rho, self.state.blocks)

    def operator(self, u: Array) -> Array:
        s, w = self.state, self.root * u
        pull = s.blocks.spread(s.weights) * (w - s.center)
        return self.root * (self.penalised.operator(w) + pull)

    def prox(self, u: Array, step: Array) -> Array:
        moved = self.penalised.prox(self.root * u, step * self.lengths)
        return moved / self.root

    def residual(self, u: Array, slope: Array | None = None) -> Array:
        """The distance of 0 from operator (`slope`, if known) and subdifferentials, in the metric.

        After a tiny step: rounding must not take a point on a face of a set for one inside of it.
        """
        slope = self.operator(u) if slope is None else slope
        behind = self.root * (u - TINY * slope)
        near = self.penalised.prox(behind, TINY * self.lengths)
        parts, slopes = (self.state.blocks.layout.unravel(v) for v in (near, slope / self.root))
        none = jnp.zeros((), u.dtype)
        rest = lambda t, a, g: none if t is None else trees.square(t.residual(a, g))
        squares = jnp.stack([rest(*each) for each in zip(self.terms, parts, slopes)])
        return jnp.sqrt(jnp.vdot(self.state.metric, squares))

    def size(self, v: Array) -> Array:
        """The norm in which residuals are measured, of a vector in these coordinates."""
        squares = self.state.blocks.lengths(v / self.root) ** 2
        return jnp.sqrt(jnp.vdot(self.state.metric, squares))

    @property
    def terms(self) -> tuple[Any, ...]:
        p, rho = self.problem, self.state.rho
        y1, y2 = rho * p.y1, None if p.y2 is None else rho * p.y2
        return (p.x1, y1, y2, p.x2, y1, y2)


class Walk(eqx.Module):
    """The state of the methods that are written out here."""

    iterate: Array
    shown: Array  # the point at which the method is judged
    slope: Array  # the operator there
    reflected: Array  # step·(change of the operator) of the last step
    step: Array
    average: Array  # of what was shown since the last restart, and the sum of its weights
    weight: Array
    restarted: Array  # the residual then,
    began: Array  # and the gradients
    since: Array  # steps
    gradients: Array


# A trial step: where it leads, the longest step that its test allows, and the gradients it takes.
Trial = tuple[dict[str, Array], Array, float]


def ratio(a: Array, b: Array) -> Array:
    return jnp.where(b > 0, a / jnp.where(b > 0, b, 1), jnp.inf)


def extragradient(sub: Subproblem, s: Walk) -> Trial:
    here = sub.operator(s.iterate)
    half = sub.prox(s.iterate - s.step * here, s.step)
    there = sub.operator(half)
    iterate = sub.prox(s.iterate - s.step * there, s.step)
    longest = RATIO * ratio(jnp.linalg.norm(half - s.iterate), jnp.linalg.norm(there - here))
    return {"iterate": iterate, "shown": half, "slope": there}, longest, 2.0


def optimistic(sub: Subproblem, s: Walk) -> Trial:
    w = sub.prox(s.iterate - s.step * s.slope - s.reflected, s.step)
    there = sub.operator(w)
    turned = there - s.slope
    longest = RATIO / 2 * ratio(jnp.linalg.norm(w - s.iterate), jnp.linalg.norm(turned))
    return {"iterate": w, "shown": w, "slope": there, "reflected": s.step * turned}, longest, 1.0


def primal_dual(sub: Subproblem, s: Walk) -> Trial:
    """With σ = τ, as the metric has what the blocks differ in. θ·σ is the step before this one."""
    in_x = sub.in_x
    split = lambda v: (jnp.vdot(v, jnp.where(in_x, v, 0)), jnp.vdot(v, jnp.where(in_x, 0, v)))
    y = sub.prox(s.iterate - s.step * s.slope - s.reflected, s.step)
    between = jnp.where(in_x, s.iterate, y)
    at = sub.operator(between)
    w = jnp.where(in_x, sub.prox(s.iterate - s.step * at, s.step), y)
    there = sub.operator(w)
    # The paper's test, times 2τ. Its Bregman distance of P(·, y) is half of `bend` where P(·, y) is
    # quadratic, as in all problems here; a difference of values would drown in rounding.
    c_alpha, c_beta = jnp.where(sub.flat, jnp.asarray(FLAT), jnp.asarray(BENT))
    (x_way, y_way), bend = split(w - s.iterate), jnp.vdot(there - at, w - between)
    own = jnp.where(sub.flat, 0, split(at - s.slope)[1] / jnp.where(sub.flat, 1, c_beta))
    turn = split(there - at)[1] / c_alpha + own
    room = (1 - DELTA) * x_way + (1 - DELTA - c_alpha - c_beta) * y_way
    longest = ratio(2 * room, bend + jnp.sqrt(bend**2 + 4 * turn * room))
    reflected = s.step * (there - s.slope)
    return {"iterate": w, "shown": w, "slope": there, "reflected": reflected}, longest, 1.0


class Walked(eqx.Module):
    """A method from its trial step: backtracking as in Adaptive, and restarts if wanted."""

    trial: Callable[[Subproblem, Walk], Trial]
    first: float  # gradients before the first step
    restarts: bool = True

    def init(self, sub: Subproblem, u: Array) -> Walk:
        zero, one = jnp.zeros((), u.dtype), jnp.ones((), u.dtype)
        slope, still = sub.operator(u), jnp.zeros_like(u)
        start, none, spent = sub.residual(u, slope), jnp.zeros((), int), zero + self.first
        return Walk(u, u, slope, still, one, u, zero, start, zero, none, spent)

    def step(self, sub: Subproblem, s: Walk) -> Walk:
        there, longest, cost = self.trial(sub, s)
        # Not «≤ fails»: NaN must take the step, so that it is seen.
        too_long = s.step > longest * (1 + 64 * jnp.finfo(s.step.dtype).eps)
        taken = lambda new, old: jnp.where(too_long, old, new)
        weight = s.weight + s.step
        average = s.average + s.step / weight * (there["shown"] - s.average)
        longer = jnp.minimum(GROW * s.step, jnp.maximum(longest, s.step))
        s = dataclasses.replace(
            s,
            **{name: taken(new, getattr(s, name)) for name, new in there.items()},
            step=jnp.where(too_long, SHRINK * longest, longer),
            average=taken(average, s.average),
            weight=taken(weight, s.weight),
            since=taken(s.since + 1, s.since),
            gradients=s.gradients + cost,
        )
        return lax.cond(too_long, lambda: s, lambda: self._restart(sub, s)) if self.restarts else s

    def _restart(self, sub: Subproblem, s: Walk) -> Walk:
        """Start anew by the rule of Adaptive, at the average where that is better."""
        looks = s.since % PERIOD == 0
        last = (s.shown, s.slope, sub.residual(s.shown, s.slope))

        def averaged() -> tuple[Array, Array, Array]:
            # One step onwards: an average seldom lies on the faces that its points lie on.
            u = sub.prox(s.average - s.step * sub.operator(s.average), s.step)
            slope = sub.operator(u)
            return u, slope, sub.residual(u, slope)

        found = lax.cond(looks, averaged, lambda: last)
        better = lambda a, b: jnp.where(found[2] < last[2], a, b)
        u, slope, residual = jax.tree.map(better, found, last)
        s = dataclasses.replace(s, gradients=s.gradients + jnp.where(looks, 2.0, 0.0))
        worn = s.gradients - s.began > ANCHOR_GRADIENTS * s.gradients
        anew = (s.since > 1) & ((residual <= ANCHOR_FALL * s.restarted) | worn)
        points = {"iterate": u, "shown": u, "slope": slope, "reflected": 0 * u, "average": u}
        counts = {"weight": 0 * s.weight, "began": s.gradients, "since": 0 * s.since}
        fresh = dataclasses.replace(s, restarted=residual, **points, **counts)
        return jax.tree.map(lambda a, b: jnp.where(anew, a, b), fresh, s)

    def point(self, sub: Subproblem, s: Walk) -> Array:
        return s.shown


class Anchored(eqx.Module):
    """What Adaptive does, less that weights and reaches follow what it learns."""

    def init(self, sub: Subproblem, u: Array) -> adaptive.AdaptiveState:
        w, zero, one = sub.root * u, jnp.zeros((), int), jnp.ones((), u.dtype)
        anew = {"iterate": w, "half": w, "anchor": w, "step_size": one}
        anew |= {"since": zero, "inner": zero, "gradients": zero}
        return dataclasses.replace(sub.state, **anew)

    def step(self, sub: Subproblem, s: adaptive.AdaptiveState) -> adaptive.AdaptiveState:
        metric, measure = (s.blocks.spread(v) for v in (sub.lengths, s.metric))
        s = adaptive._move(sub.problem, s, sub.lengths, metric, measure)
        s = lax.cond(adaptive._worn(s), adaptive._restart, lambda s: s, s)
        return dataclasses.replace(s, weights=sub.state.weights, reach=sub.state.reach)

    def point(self, sub: Subproblem, s: adaptive.AdaptiveState) -> Array:
        return s.half / sub.root


class Optimal(eqx.Module):
    """OptFOM on the subproblem with aₓ/2·‖x − x⁰‖² − aᵧ/2·‖y − y⁰‖² added."""

    added: Array  # (aₓ, aᵧ)
    sigmas: Array  # strong convexity and concavity, these included
    smoothness: Array
    start: Array

    def _posed(self, sub: Subproblem) -> tuple[bx.OptFOM, Any]:
        """The solver, and all of a problem that it asks for."""

        def gradient(x: Array, y: Array) -> tuple[Array, Array]:
            u = jnp.concatenate([x, y])
            slope = sub.operator(u) + jnp.where(sub.in_x, *self.added) * (u - self.start)
            return slope[: x.size], -slope[x.size :]

        def side(mine: np.ndarray) -> Any:
            whole = lambda v: jnp.zeros(mine.size, v.dtype).at[mine].set(v)
            return SimpleNamespace(prox=lambda v, step: sub.prox(whole(v), step)[mine])

        sigma_x, sigma_y = self.sigmas
        solver = bx.OptFOM().tuned(self.smoothness, sigma_x, sigma_y, 0 * sigma_x)
        return solver, SimpleNamespace(gradient=gradient, x=side(sub.in_x), y=side(~sub.in_x))

    def init(self, sub: Subproblem, u: Array) -> Any:
        solver, problem = self._posed(sub)
        return solver.init(problem, bx.Point(x=u[sub.in_x], y=u[~sub.in_x]))

    def step(self, sub: Subproblem, s: Any) -> Any:
        solver, problem = self._posed(sub)
        return solver.step(problem, s, s.gradients + solver.gradients_per_step)

    def point(self, sub: Subproblem, s: Any) -> Array:
        return s.landed


METHODS: dict[str, Any] = {
    "extragradient": Walked(extragradient, 0.0, restarts=False),
    "optimistic": Walked(optimistic, 1.0),
    "anchored": Anchored(),
    "primal-dual": Walked(primal_dual, 0.5),
}
