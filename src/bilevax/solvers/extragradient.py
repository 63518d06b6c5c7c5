"""Extragradient (mirror-prox with the Euclidean distance) for convex-concave saddle points."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Literal

import equinox as eqx
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from bilevax import trees
from bilevax.arguments import one_of
from bilevax.certificates.gap import saddle_gap
from bilevax.problems import Form, MinimaxProblem, Point
from bilevax.problems.constants import smoothness_of
from bilevax.problems.validation import require
from bilevax.solvers.base import InnerSolver, check_positive
from bilevax.solvers.optfom import flat_prox, operator
from bilevax.trees import Layout

# The gap is looked at once in this many steps: the look needs one gradient of its own.
PERIOD = 8
# Largest ratio step·‖F(u) − F(v)‖/‖u − v‖ at which a step is taken; theory asks for at most 1.
RATIO = 0.9


class ExtraGradientState(eqx.Module):
    """Flat vectors w = (x, y): the iterate, the average, and the best point seen."""

    iterate: Array
    average: Array
    weight: Array
    half: Array
    slope: Array  # the operator at `half`
    best: Array
    measured: Array  # at `best`: the gap, or the length of a vector of ∂H
    step_size: Array
    iteration: Array
    looked: Array
    due: Array
    gradients: Array
    layout: Layout = eqx.field(static=True)


class ExtraGradient(InnerSolver[ExtraGradientState]):
    """Korpelevich's method, with the averages of Nemirovski (2004) that make its rate O(1/T).

    w½ = prox(w − sF(w)), w ← prox(w − sF(w½)) with F = (∇ₓh, −∇ᵧh); the step s is halved whenever
    s‖F(w) − F(w½)‖ > 0.9‖w − w½‖, so a wrong `smoothness` costs time and nothing else.

    With `stop="residual"` it ends where a vector of ∂H at w½ is at most `tolerance` long, which is
    what a certificate asks. With `stop="gap"` it ends where the *upper bound* on
    max_y H(x, ·) − min_x H(·, y), at w½ or at the average, is at most `tolerance`.
    """

    form: ClassVar[type[Form]] = MinimaxProblem
    has_theorem: ClassVar[bool] = True

    smoothness: Any = None
    tolerance: Any = None
    stop: Literal["residual", "gap"] = eqx.field(static=True, default="residual")

    def __check_init__(self):
        check_positive(self, "smoothness", "tolerance")
        one_of(self.stop, "ExtraGradient: stop", "residual", "gap")

    @property
    def gradients_per_step(self) -> int:
        return 2

    def prepare(self, problem: MinimaxProblem, start: Point, tolerance: float) -> ExtraGradient:
        require(problem, MinimaxProblem, "ExtraGradient")
        dtype = trees.dtype_of((start.x, start.y))
        smoothness = smoothness_of(problem, start) if self.smoothness is None else self.smoothness
        return dataclasses.replace(
            self,
            smoothness=jnp.asarray(smoothness, dtype),
            tolerance=jnp.asarray(tolerance if self.tolerance is None else self.tolerance, dtype),
        )

    def tuned(self, smoothness: Any, sigma_x: Any, sigma_y: Any, tolerance: Any) -> ExtraGradient:
        # An outer method asks for stationarity, whatever this one was to stop on by itself.
        return dataclasses.replace(
            self, smoothness=smoothness, tolerance=tolerance, stop="residual"
        )

    def init(self, problem: MinimaxProblem, start: Point) -> ExtraGradientState:
        layout = Layout.of((start.x, start.y))
        w = layout.ravel((start.x, start.y))
        zero = jnp.zeros((), int)
        return ExtraGradientState(
            iterate=w,
            average=w,
            weight=jnp.zeros((), w.dtype),
            half=w,
            slope=jnp.zeros_like(w),
            best=w,
            measured=jnp.zeros((), w.dtype),
            step_size=RATIO / self.smoothness,
            iteration=zero,
            looked=jnp.asarray(False),
            due=jnp.asarray(False),
            gradients=zero,
            layout=layout,
        )

    def step(
        self, problem: MinimaxProblem, state: ExtraGradientState, limit: Array
    ) -> ExtraGradientState:
        """One extragradient step, of two gradients, or one look at the average, of one."""
        if self.stop == "residual":
            return self._move(problem, state)
        return lax.cond(
            state.due, lambda: self._look(problem, state), lambda: self._move(problem, state)
        )

    def _move(self, problem: MinimaxProblem, s: ExtraGradientState) -> ExtraGradientState:
        prox = lambda w: flat_prox(problem, s.layout, w, s.step_size)
        here = operator(problem, s.layout, s.iterate)
        target = s.iterate - s.step_size * here
        half = prox(target)
        there = operator(problem, s.layout, half)
        moved, turned = half - s.iterate, there - here
        # Not «≤ fails»: NaN must take the step, so that it is seen.
        too_long = s.step_size * jnp.sqrt(jnp.vdot(turned, turned)) > RATIO * (
            jnp.sqrt(jnp.vdot(moved, moved)) * (1 + 64 * jnp.finfo(half.dtype).eps)
        )
        weight = jnp.where(too_long, s.weight, s.weight + s.step_size)
        share = jnp.where(too_long, 0, s.step_size / weight)
        iteration = jnp.where(too_long, s.iteration, s.iteration + 1)
        following = dataclasses.replace(
            s,
            iterate=jnp.where(too_long, s.iterate, prox(s.iterate - s.step_size * there)),
            average=jnp.where(too_long, s.average, s.average + share * (half - s.average)),
            weight=weight,
            half=half,
            slope=there,
            step_size=jnp.where(too_long, s.step_size / 2, s.step_size),
            iteration=iteration,
            due=~too_long & (iteration % PERIOD == 0),
            gradients=s.gradients + 2,
        )
        if self.stop == "gap":
            return following
        rest = there + (target - half) / s.step_size  # in ∂H at `half`
        return self._better(following, half, jnp.sqrt(jnp.vdot(rest, rest)))

    def _look(self, problem: MinimaxProblem, s: ExtraGradientState) -> ExtraGradientState:
        def gap(w: Array, direction: Array) -> Array:
            (x, y), (gx, minus_gy) = s.layout.unravel(w), s.layout.unravel(direction)
            return saddle_gap(problem, x, y, gx, trees.scale(-1, minus_gy))

        of_average = gap(s.average, operator(problem, s.layout, s.average))
        of_half = gap(s.half, s.slope)
        nearer = of_average < of_half
        candidate = jnp.where(nearer, s.average, s.half)
        s = dataclasses.replace(s, due=jnp.asarray(False), gradients=s.gradients + 1)
        return self._better(s, candidate, jnp.where(nearer, of_average, of_half))

    def _better(
        self, s: ExtraGradientState, candidate: Array, measured: Array
    ) -> ExtraGradientState:
        """Keep the candidate if it is the best so far."""
        better = (~s.looked | (measured < s.measured)) & jnp.isfinite(measured)
        return dataclasses.replace(
            s,
            best=jnp.where(better, candidate, s.best),
            measured=jnp.where(better, measured, s.measured),
            looked=s.looked | better,
        )

    def done(self, problem: MinimaxProblem, state: ExtraGradientState) -> Array:
        return state.looked & (state.measured <= self.tolerance)

    def output(self, problem: MinimaxProblem, state: ExtraGradientState) -> Point:
        x, y = state.layout.unravel(jnp.where(state.looked, state.best, state.iterate))
        return Point(x=x, y=y)
