"""The paper's own method: penalise the lower-level gap, then the proximal point method."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

import equinox as eqx
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from bilevax import trees
from bilevax.arguments import positive
from bilevax.problems import BilevelProblem, Form, Point
from bilevax.problems.constants import smoothness_of, upper_range
from bilevax.problems.deviation import deviation_of
from bilevax.problems.reformulations import (
    lower_level,
    penalty_blocks,
    penalty_point,
    penalty_problem,
)
from bilevax.problems.validation import require, require_bounded, require_gap_bound
from bilevax.solvers.base import Solver, check_part, check_positive
from bilevax.solvers.extragradient import ExtraGradient
from bilevax.solvers.proximal_point import ProximalPoint
from bilevax.solvers.sampled_extragradient import SampledExtraGradient
from bilevax.solvers.stochastic_proximal_point import StochasticProximalPoint
from bilevax.trees import Tree


@dataclasses.dataclass(frozen=True)
class PenaltyConstants:
    """The constants of Algorithm `alg:first-order-new`, lines 2 and 3."""

    epsilon: float
    rho: float
    smoothness: float
    inner_tolerance: float
    diameter: float
    x_weight: float
    y_weight: float


def penalty_constants(
    *,
    epsilon: float,
    upper_smoothness: float,
    lower_smoothness: float,
    diameter: Any,
    rho: Any = None,
    smoothness: Any = None,
    inner_tolerance: Any = None,
) -> PenaltyConstants:
    """ρ = 1/ε, L_P = L_f + 2ρL_f~, ε̂ = min(ε^1.5, ε/2), weights 2L_P and ε/(2D₂), unless given.

    The paper has ε̂ = ε^1.5; its proof needs ε̂ ≤ ε/2 as well, which matters for ε > ¼ only.
    """
    positive(epsilon, "epsilon")
    rho = 1 / epsilon if rho is None else float(rho)
    if smoothness is None:
        smoothness = upper_smoothness + 2 * rho * lower_smoothness
    if inner_tolerance is None:
        inner_tolerance = min(epsilon**1.5, epsilon / 2)
    diameter = float(diameter)
    return PenaltyConstants(
        epsilon=epsilon,
        rho=rho,
        smoothness=float(smoothness),
        inner_tolerance=float(inner_tolerance),
        diameter=diameter,
        x_weight=2 * float(smoothness),
        y_weight=epsilon / (2 * diameter) if diameter > 0 else math.inf,
    )


class PenaltyState(eqx.Module):
    """First a saddle point of the lower level at the first x1, then the outer method."""

    starting: Array
    start_x1: Tree
    starter: Any
    outer: Any

    @property
    def gradients(self) -> Array:
        return self.outer.gradients + (0 if self.starter is None else self.starter.gradients)


class PenaltyMethod(Solver[PenaltyState]):
    """Algorithm `alg:first-order-new` of the paper, deterministic or stochastic.

    With ε = `epsilon` (the tolerance of `solve` if unset) it takes ρ = 1/ε, L_P = L_f + 2ρ·L_f~,
    inner accuracy ε̂ = min(ε^1.5, ε/2), proximal weights 2·L_P and ε/(2·D₂), and starts from a
    (y1, y2) with lower-level gap at most ε, found by `starter` (Remark `remark:initial_condition`).
    Every one of these can be given instead: `rho`, `smoothness` (L_P itself), `inner_tolerance`,
    `diameter` (D₂), `start_gap`; a value given to `outer` or `starter` itself goes before these.
    The theorem promises an O(ε)-KKT point; what it reaches is measured by the certificate. x1 may
    be unbounded, which the theorem does not cover.

    On a problem whose data is a source of minibatches it is the stochastic algorithm: `outer` is
    then a `StochasticProximalPoint`, with δ_P² = 3δ_f² + 6ρ²δ_f~² and K from the proof of
    `thm:minmax_stoch`. The start's (y1, y2) is sought on all samples if these are in memory. If
    not, `SampledExtraGradient` seeks it in the stream of minibatches, until the expectation of its
    gap is at most ε; there y1 and y2 must have bounds. With `starter=None` it stays as given.
    """

    form: ClassVar[type[Form]] = BilevelProblem
    has_theorem: ClassVar[bool] = True
    takes_samples: ClassVar[bool] = True

    epsilon: Any = None
    rho: Any = None
    smoothness: Any = None
    inner_tolerance: Any = None
    diameter: Any = None
    start_gap: Any = None
    starter: Any = eqx.field(default_factory=ExtraGradient)
    outer: Any = None

    def __check_init__(self):
        check_positive(
            self, *("epsilon", "rho", "smoothness", "inner_tolerance", "diameter", "start_gap")
        )
        if self.starter is not None and not isinstance(self.starter, SampledExtraGradient):
            check_part(self, "starter", ExtraGradient)
        if self.outer is not None and not isinstance(self.outer, StochasticProximalPoint):
            check_part(self, "outer", ProximalPoint)

    @property
    def gradients_per_step(self) -> int:
        parts = (self.starter, self.outer)
        return max(part.gradients_per_step for part in parts if part is not None)

    def prepare(self, problem: BilevelProblem, start: Point, tolerance: float) -> PenaltyMethod:
        require(problem, BilevelProblem, "PenaltyMethod")
        # The outer method that the data ask for, and a starter where there can be one.
        kind = StochasticProximalPoint if problem.sampled else ProximalPoint
        outer = kind() if self.outer is None else self.outer
        if not isinstance(outer, kind):
            what = "minibatches" if problem.sampled else "all data at once"
            raise TypeError(
                f"PenaltyMethod: with {what} outer must be a {kind.__name__}, not {outer!r}"
            )
        chosen = dataclasses.replace(self, outer=outer)
        return chosen._prepared(problem.reference(), problem, start, tolerance)

    def _prepared(
        self, problem: BilevelProblem, sampled: BilevelProblem, start: Point, tolerance: float
    ) -> PenaltyMethod:
        """`problem` has all samples, or one minibatch, in the place of the source of `sampled`."""
        if self.diameter is None and self.outer.y_diameter is None:
            for name in ("x2", "y1", "y2"):
                term, block = getattr(problem, name), getattr(start, name)
                require_bounded(term, block, name, "PenaltyMethod")
        for name in ("y1", "y2"):
            require_gap_bound(getattr(problem, name), getattr(start, name), name, "PenaltyMethod")
        lower, diameter = smoothness_of(problem, start, "lower"), self.diameter
        if diameter is None:  # D₂ of `eq:D2`: that of the domain of (x2, z1, z2)
            diameter = float(penalty_problem(problem, 1.0).y.diameter(penalty_blocks(start)[1]))
        constants = penalty_constants(
            epsilon=float(tolerance if self.epsilon is None else self.epsilon),
            upper_smoothness=smoothness_of(problem, start, "upper"),
            lower_smoothness=lower,
            diameter=diameter,
            rho=self.rho,
            smoothness=self.smoothness,
            inner_tolerance=self.inner_tolerance,
        )
        dtype = trees.dtype_of(start.replace(rho=None))
        epsilon = constants.epsilon
        if isinstance(self.outer, ProximalPoint):
            outer = self.outer.completed(
                constants.smoothness, constants.diameter, epsilon, constants.inner_tolerance, dtype
            )
        else:
            outer = self._stochastic(problem, sampled, start, constants, dtype)
        own, starter = self.starter, None
        start_gap = epsilon if self.start_gap is None else self.start_gap
        if own is not None:
            start_gap = start_gap if own.tolerance is None else own.tolerance
            known = {
                "smoothness": jnp.asarray(
                    lower if own.smoothness is None else own.smoothness, dtype
                ),
                "tolerance": jnp.asarray(start_gap, dtype),
            }
            if sampled.complete() is None:
                starter = self._sampled_starter(problem, start, known)
            else:
                starter = dataclasses.replace(own, stop="gap", **known)
        return dataclasses.replace(
            self,
            epsilon=jnp.asarray(epsilon, dtype),
            rho=jnp.asarray(constants.rho, dtype),
            smoothness=outer.smoothness,
            inner_tolerance=outer.inner_tolerance,
            diameter=outer.y_diameter,
            start_gap=jnp.asarray(start_gap, dtype),
            starter=starter,
            outer=outer,
        )

    def _sampled_starter(
        self, problem: BilevelProblem, start: Point, known: dict[str, Array]
    ) -> SampledExtraGradient:
        for name in ("y1", "y2"):
            term, block = getattr(problem, name), getattr(start, name)
            require_bounded(term, block, name, "the start phase of PenaltyMethod on minibatches")
        saddle = lower_level(problem, start.x1)
        seeking = SampledExtraGradient(**known)
        return seeking.prepare(saddle, Point(x=start.y1, y=start.y2), 1.0)

    def _stochastic(
        self, problem: Any, sampled: Any, start: Point, constants: PenaltyConstants, dtype: Any
    ) -> StochasticProximalPoint:
        """The outer method with its constants, K of the proof of `thm:minmax_stoch` among them."""
        own = self.outer
        deviation, rho = own.deviation, constants.rho
        if deviation is None:
            deviation = 0.0  # which nothing asks for
        if own.deviation is None and not own.inner.given:
            upper, lower = (deviation_of(sampled, start, level) for level in ("upper", "lower"))
            deviation = math.sqrt(3 * upper**2 + 6 * rho**2 * lower**2)
        x, _ = penalty_blocks(start)
        x_diameter = float(penalty_problem(problem, rho).x.diameter(x))

        def descent() -> float:
            """max f(x⁰, ·) + 1 − f_low."""
            low, high = upper_range(problem, start, math.hypot(x_diameter, constants.diameter))
            return high + 1 - low

        return own.completed(
            dtype,
            smoothness=constants.smoothness,
            deviation=float(deviation),
            tolerance=constants.epsilon,
            inner_tolerance=constants.inner_tolerance,
            x_diameter=x_diameter,
            y_diameter=constants.diameter,
            descent=descent,
        )

    def init(self, problem: BilevelProblem, start: Point) -> PenaltyState:
        x, y = penalty_blocks(start)
        starter = None
        if self.starter is not None:
            saddle = lower_level(self._seen(problem), start.x1)
            starter = self.starter.init(saddle, Point(x=start.y1, y=start.y2))
            # There is one stream of samples, which the outer method keeps.
            starter = self.starter.with_stream(starter, None)
        return PenaltyState(
            starting=jnp.asarray(starter is not None),
            start_x1=start.x1,
            starter=starter,
            outer=self.outer.init(penalty_problem(problem, self.rho), Point(x=x, y=y)),
        )

    def step(self, problem: BilevelProblem, state: PenaltyState, limit: Array) -> PenaltyState:
        penalised = penalty_problem(problem, self.rho)

        def go() -> PenaltyState:
            left = limit - state.gradients + state.outer.gradients
            return dataclasses.replace(state, outer=self.outer.step(penalised, state.outer, left))

        if self.starter is None:
            return go()
        method, saddle = self.starter, lower_level(self._seen(problem), state.start_x1)

        def start() -> PenaltyState:
            stream = self.outer.stream(state.outer)
            begun = method.with_stream(state.starter, stream)
            starter = method.advance(saddle, begun, limit)
            stream = method.stream(starter) if method.takes_samples else stream
            starter = method.with_stream(starter, None)

            def begin() -> PenaltyState:
                found = method.output(saddle, starter)
                (x1, _, _), (x2, _, _) = state.outer.x, state.outer.y
                point = Point(x=(x1, found.x, found.y), y=(x2, found.x, found.y))
                outer = self.outer.with_stream(self.outer.init(penalised, point), stream)
                return PenaltyState(jnp.asarray(False), state.start_x1, starter, outer)

            outer = self.outer.with_stream(state.outer, stream)
            stay = dataclasses.replace(state, starter=starter, outer=outer)
            return lax.cond(method.done(saddle, starter), begin, lambda: stay)

        return lax.cond(state.starting, start, go)

    def stream(self, state: PenaltyState) -> Any:
        return None if self.outer is None else self.outer.stream(state.outer)

    def with_stream(self, state: PenaltyState, stream: Any) -> PenaltyState:
        return dataclasses.replace(state, outer=self.outer.with_stream(state.outer, stream))

    def advice(self) -> str:
        # The theorem promises a multiple of ε, not ε itself.
        return f"try solver=bilevax.PenaltyMethod(epsilon={float(self.epsilon) / 4:g})"

    def done(self, problem: BilevelProblem, state: PenaltyState) -> Array:
        return ~state.starting & self.outer.done(penalty_problem(problem, self.rho), state.outer)

    def output(self, problem: BilevelProblem, state: PenaltyState) -> Point:
        found = self.outer.output(penalty_problem(problem, self.rho), state.outer)
        return penalty_point(found.x, found.y).replace(rho=self.rho)

    def cut_short(self, state: PenaltyState) -> Any:
        return self.outer.cut_short(state.outer)

    def output_index(self, state: PenaltyState) -> Any:
        return self.outer.output_index(state.outer)

    def _seen(self, problem: BilevelProblem) -> BilevelProblem:
        """What the starter sees: all samples, or the source that it draws from."""
        return problem.complete() or problem
