"""Extragradient for convex-concave saddle points whose samples are read as a stream."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from bilevax import trees
from bilevax.certificates.gap import saddle_gap
from bilevax.problems import Form, MinimaxProblem, Point
from bilevax.problems.constants import smoothness_of
from bilevax.problems.validation import require, require_bounded
from bilevax.solvers.base import Solver, check_key, check_positive
from bilevax.solvers.optfom import flat_prox, operator
from bilevax.trees import Layout

# Steps of the first round, and the minibatches of each of its gradients.
FIRST = 8
# The gap is not judged from fewer minibatches.
FEWEST = 8
# What the next gradient is for.
BEFORE, BETWEEN, TEST = 0, 1, 2


class SampledExtraGradientState(eqx.Module):
    """Flat vectors w = (x, y), and the mean gradient at `place` so far."""

    iterate: Array
    average: Array  # of this round, and what is judged after it
    place: Array  # where gradients are taken
    slope: Array  # their mean
    spread: Array  # Σ‖g − mean‖²
    count: Array  # how many
    kind: Array  # what for: BEFORE, BETWEEN, TEST
    steps: Array  # in this round
    round: Array
    bound: Array  # on the gap, after the last round
    step_size: Array
    accepted: Array
    gradients: Array
    stream: Any
    layout: Layout = eqx.field(static=True)


class SampledExtraGradient(Solver[SampledExtraGradientState]):
    """Mirror-prox from samples (Juditsky, Nemirovski & Tauvel 2011), until E[gap] ≤ `tolerance`.

    Round t = 1, 2, … takes M = 8·2^{t−1} extragradient steps of length 1/(2L), with gradients that
    are means over M minibatches each. Then the average w of the points between is judged, by a mean
    ḡ over new minibatches: the bound G(ḡ) on the gap, `saddle_gap`, is to be at most tolerance/2.
    If it is not, the next round begins at w; with half the step, if the bound has grown. Round 0
    judges the start. Memory holds one minibatch.

    With g the gradient itself and D the diameter of the domain, gap ≤ G(g) ≤ G(ḡ) + D‖ḡ − g‖. The
    test of round t takes as many minibatches as make e_t = D·σ/√m ≤ tolerance/2·2^{−(t+1)/2}, with
    σ² the variance of those. If round t ends the method with probability p_t, then
    E[gap] ≤ tolerance/2 + Σ √p_t·e_t ≤ tolerance/2 + √(Σ e_t²) ≤ tolerance, by Cauchy and Schwarz
    twice. A test that is lost by more than its error ends early, which changes nothing of this.
    A gradient is that of one minibatch.
    """

    form: ClassVar[type[Form]] = MinimaxProblem
    has_theorem: ClassVar[bool] = True
    takes_samples: ClassVar[bool] = True
    draws_per_step: ClassVar[int] = 1

    smoothness: Any = None
    tolerance: Any = None
    diameter: Any = None
    key: Any = 0

    def __check_init__(self):
        check_positive(self, "smoothness", "tolerance", "diameter")
        check_key(self)

    @property
    def gradients_per_step(self) -> int:
        return 1

    def prepare(
        self, problem: MinimaxProblem, start: Point, tolerance: float
    ) -> SampledExtraGradient:
        require(problem, MinimaxProblem, "SampledExtraGradient")
        for name in ("x", "y"):
            term, block = getattr(problem, name), getattr(start, name)
            require_bounded(term, block, name, "SampledExtraGradient")
        smoothness, diameter = self.smoothness, self.diameter
        if smoothness is None:
            smoothness = smoothness_of(problem.reference(), start)
        if diameter is None:
            across = (problem.x.diameter(start.x), problem.y.diameter(start.y))
            diameter = jnp.hypot(*(jnp.asarray(d, float) for d in across))
        return self.completed(
            trees.dtype_of((start.x, start.y)),
            smoothness=smoothness,
            tolerance=tolerance if self.tolerance is None else self.tolerance,
            diameter=diameter,
        )

    def completed(self, dtype: Any, **constants: Any) -> SampledExtraGradient:
        """The same method with these constants."""
        arrays = {name: jnp.asarray(value, dtype) for name, value in constants.items()}
        return dataclasses.replace(self, key=jnp.asarray(self.key), **arrays)

    def init(self, problem: MinimaxProblem, start: Point) -> SampledExtraGradientState:
        layout = Layout.of((start.x, start.y))
        w = layout.ravel((start.x, start.y))
        zero, none = jnp.zeros((), int), jnp.zeros((), w.dtype)
        return SampledExtraGradientState(
            iterate=w,
            average=w,
            place=w,
            slope=jnp.zeros_like(w),
            spread=none,
            count=zero,
            kind=zero + TEST,
            steps=zero,
            round=zero,
            bound=jnp.full_like(none, jnp.finfo(w.dtype).max),
            step_size=1 / (2 * self.smoothness),
            accepted=jnp.asarray(False),
            gradients=zero,
            stream=problem.first_stream(self.key),
            layout=layout,
        )

    def step(
        self, problem: MinimaxProblem, state: SampledExtraGradientState, limit: Array
    ) -> SampledExtraGradientState:
        """One gradient of a minibatch, and what follows if it was the last of its mean."""
        stream, at = problem.drawn(state.stream)
        new = operator(at, state.layout, state.place)
        count = state.count + 1
        off = new - state.slope  # Welford's recursion
        slope = state.slope + off / count.astype(off.dtype)
        s = dataclasses.replace(
            state,
            slope=slope,
            spread=state.spread + jnp.vdot(off, new - slope),
            count=count,
            gradients=state.gradients + 1,
            stream=stream,
        )
        cases = [self._before, self._between, self._test]
        return lax.switch(s.kind, [lambda s=s, f=f: f(problem, s) for f in cases])

    def _many(self, s: SampledExtraGradientState) -> Array:
        """M of this round."""
        return FIRST * 2 ** jnp.maximum(s.round - 1, 0)

    def _moved(self, problem: MinimaxProblem, s: SampledExtraGradientState) -> tuple[Array, Array]:
        """Whether the mean is complete, and where a step with it leads."""
        target = s.iterate - s.step_size * s.slope
        return s.count >= self._many(s), flat_prox(problem, s.layout, target, s.step_size)

    def _before(
        self, problem: MinimaxProblem, s: SampledExtraGradientState
    ) -> SampledExtraGradientState:
        full, there = self._moved(problem, s)
        return _chosen(full, _at(s, there, BETWEEN), s)

    def _between(
        self, problem: MinimaxProblem, s: SampledExtraGradientState
    ) -> SampledExtraGradientState:
        full, there = self._moved(problem, s)
        steps = s.steps + 1
        share = 1 / steps.astype(there.dtype)
        average = s.average + share * (s.place - s.average)
        over = steps >= self._many(s)
        moved = dataclasses.replace(s, iterate=there, average=average, steps=steps)
        following = _chosen(over, _at(moved, average, TEST), _at(moved, there, BEFORE))
        return _chosen(full, following, s)

    def _test(
        self, problem: MinimaxProblem, s: SampledExtraGradientState
    ) -> SampledExtraGradientState:
        (x, y), (gx, minus_gy) = s.layout.unravel(s.place), s.layout.unravel(s.slope)
        bound = saddle_gap(problem, x, y, gx, trees.scale(-1, minus_gy)).astype(s.bound.dtype)
        count = s.count.astype(bound.dtype)
        error = self.diameter * jnp.sqrt(s.spread / jnp.maximum(count - 1, 1) / count)
        half = self.tolerance / 2
        exact = error <= half * 2.0 ** (-(s.round + 1).astype(bound.dtype) / 2)
        enough = s.count >= FEWEST
        passed = enough & exact & (bound <= half)
        lost = enough & (exact | (bound > half + error)) & (bound > half)
        shorter = jnp.where(bound > s.bound, s.step_size / 2, s.step_size)
        again = dataclasses.replace(
            _at(s, s.average, BEFORE),
            iterate=s.average,
            steps=jnp.zeros_like(s.steps),
            round=s.round + 1,
            bound=bound,
            step_size=shorter,
        )
        return _chosen(lost, again, dataclasses.replace(s, accepted=passed))

    def stream(self, state: SampledExtraGradientState) -> Any:
        return state.stream

    def with_stream(self, state: SampledExtraGradientState, stream: Any):
        return dataclasses.replace(state, stream=stream)

    def done(self, problem: MinimaxProblem, state: SampledExtraGradientState) -> Array:
        return state.accepted

    def output(self, problem: MinimaxProblem, state: SampledExtraGradientState) -> Point:
        x, y = state.layout.unravel(state.average)
        return Point(x=x, y=y)


def _at(s: SampledExtraGradientState, place: Array, kind: int) -> SampledExtraGradientState:
    """The next mean gradient is taken there, for that."""
    return dataclasses.replace(
        s,
        place=place,
        slope=jnp.zeros_like(s.slope),
        spread=jnp.zeros_like(s.spread),
        count=jnp.zeros_like(s.count),
        kind=jnp.zeros_like(s.kind) + kind,
    )


def _chosen(which: Array, one: Any, other: Any) -> Any:
    return jax.tree.map(lambda a, b: jnp.where(which, a, b), one, other)
