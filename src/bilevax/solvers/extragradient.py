"""Extragradient (mirror-prox with the Euclidean distance) for convex-concave saddle points."""

from __future__ import annotations

import dataclasses
from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from bilevax import trees
from bilevax.certificates.gap import saddle_gap
from bilevax.problems import MinimaxProblem, Point
from bilevax.problems.constants import smoothness_of
from bilevax.problems.validate import require
from bilevax.solvers.base import Solver, check_positive
from bilevax.trees import Layout

# The gap is looked at once in this many steps: the look needs one gradient of its own.
PERIOD = 8
# Largest ratio step·‖F(u) − F(v)‖/‖u − v‖ at which a step is taken; theory asks for at most 1.
RATIO = 0.9


class ExtraGradientState(eqx.Module):
    """Flat vectors w = (x, y): the iterate, the average, and the point of least gap seen."""

    iterate: Array
    average: Array
    weight: Array
    best: Array
    gap: Array
    step_size: Array
    iteration: Array
    looked: Array
    gradients: Array
    layout: Layout = eqx.field(static=True)


class ExtraGradient(Solver[ExtraGradientState]):
    """Korpelevich's method, with the averages of Nemirovski (2004) that make its rate O(1/T).

    w½ = prox(w − sF(w)), w ← prox(w − sF(w½)) with F = (∇ₓh, −∇ᵧh); the step s is halved whenever
    s‖F(w) − F(w½)‖ > 0.9‖w − w½‖, so a wrong `smoothness` costs time and nothing else. Stops when
    the *upper bound* on max_y H(x, ·) − min_x H(·, y), at the last or the average point, is at most
    `tolerance`.
    """

    smoothness: Any = None
    tolerance: Any = None

    def __check_init__(self):
        check_positive(self, "smoothness", "tolerance")

    @property
    def gradients_per_step(self) -> int:
        return 3

    def prepare(self, problem: MinimaxProblem, start: Point, tolerance: float) -> ExtraGradient:
        require(problem, MinimaxProblem, "ExtraGradient")
        dtype = trees.dtype_of((start.x, start.y))
        smoothness = smoothness_of(problem, start) if self.smoothness is None else self.smoothness
        return dataclasses.replace(
            self,
            smoothness=jnp.asarray(smoothness, dtype),
            tolerance=jnp.asarray(tolerance if self.tolerance is None else self.tolerance, dtype),
        )

    def init(self, problem: MinimaxProblem, start: Point) -> ExtraGradientState:
        layout = Layout.of((start.x, start.y))
        w = layout.ravel((start.x, start.y))
        zero = jnp.zeros((), int)
        return ExtraGradientState(
            iterate=w,
            average=w,
            weight=jnp.zeros((), w.dtype),
            best=w,
            gap=jnp.zeros((), w.dtype),
            step_size=RATIO / self.smoothness,
            iteration=zero,
            looked=jnp.asarray(False),
            gradients=zero,
            layout=layout,
        )

    def step(
        self, problem: MinimaxProblem, state: ExtraGradientState, limit: Array
    ) -> ExtraGradientState:
        s, layout = state, state.layout

        def operator(w: Array) -> Array:
            gx, gy = problem.gradient(*layout.unravel(w))
            return layout.ravel((gx, trees.scale(-1, gy)))

        def prox(w: Array) -> Array:
            x, y = layout.unravel(w)
            return layout.ravel((problem.x.prox(x, s.step_size), problem.y.prox(y, s.step_size)))

        here = operator(s.iterate)
        half = prox(s.iterate - s.step_size * here)
        there = operator(half)
        moved, turned = half - s.iterate, there - here
        # Not «≤ fails»: NaN must take the step, so that it is seen.
        too_long = s.step_size * jnp.sqrt(jnp.vdot(turned, turned)) > RATIO * (
            jnp.sqrt(jnp.vdot(moved, moved)) * (1 + 64 * jnp.finfo(half.dtype).eps)
        )
        iterate = jnp.where(too_long, s.iterate, prox(s.iterate - s.step_size * there))
        weight = jnp.where(too_long, s.weight, s.weight + s.step_size)
        share = jnp.where(too_long, 0, s.step_size / weight)
        average = jnp.where(too_long, s.average, s.average + share * (half - s.average))

        def gap(w: Array, direction: Array) -> Array:
            (x, y), (gx, minus_gy) = layout.unravel(w), layout.unravel(direction)
            return saddle_gap(problem, x, y, gx, trees.scale(-1, minus_gy))

        def look() -> tuple[Array, Array]:
            of_average, of_half = gap(average, operator(average)), gap(half, there)
            nearer = of_average < of_half
            return jnp.where(nearer, average, half), jnp.where(nearer, of_average, of_half)

        due = ~too_long & (s.iteration % PERIOD == PERIOD - 1)
        candidate, measured = lax.cond(due, look, lambda: (s.best, s.gap))
        better = due & (~s.looked | (measured < s.gap)) & jnp.isfinite(measured)
        return ExtraGradientState(
            iterate=iterate,
            average=average,
            weight=weight,
            best=jnp.where(better, candidate, s.best),
            gap=jnp.where(better, measured, s.gap),
            step_size=jnp.where(too_long, s.step_size / 2, s.step_size),
            iteration=jnp.where(too_long, s.iteration, s.iteration + 1),
            looked=s.looked | better,
            gradients=s.gradients + jnp.where(due, 3, 2),
            layout=layout,
        )

    def done(self, problem: MinimaxProblem, state: ExtraGradientState) -> Array:
        return state.looked & (state.gap <= self.tolerance)

    def output(self, problem: MinimaxProblem, state: ExtraGradientState) -> Point:
        x, y = state.layout.unravel(jnp.where(state.looked, state.best, state.iterate))
        return Point(x=x, y=y)
