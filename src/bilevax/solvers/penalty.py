"""The paper's own method: penalise the lower-level gap, then the proximal point method."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from bilevax import trees
from bilevax.arguments import positive
from bilevax.problems import BilevelProblem, MinimaxProblem, Point
from bilevax.problems.constants import lower_smoothness_of, upper_smoothness_of
from bilevax.problems.reformulate import lower_level, penalty, penalty_blocks, penalty_point
from bilevax.problems.validate import require, require_bounded, require_gap_bound
from bilevax.solvers.base import Solver, check_part, check_positive
from bilevax.solvers.extragradient import ExtraGradient
from bilevax.solvers.proximal_point import ProximalPoint
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
        return self.starter.gradients + self.outer.gradients


class PenaltyMethod(Solver[PenaltyState]):
    """Algorithm `alg:first-order-new` of the paper, deterministic.

    With ε = `epsilon` (the tolerance of `solve` if unset) it takes ρ = 1/ε, L_P = L_f + 2ρ·L_f~,
    inner accuracy ε̂ = min(ε^1.5, ε/2), proximal weights 2·L_P and ε/(2·D₂), and starts from a
    (y1, y2) with lower-level gap at most ε, found by `starter` (Remark `remark:initial_condition`).
    Every one of these can be given instead: `rho`, `smoothness` (L_P itself), `inner_tolerance`,
    `diameter` (D₂), `start_gap`; a value given to `outer` or `starter` itself goes before these.
    The theorem promises an O(ε)-KKT point; what it reaches is measured by the certificate. x1 may
    be unbounded, which the theorem does not cover.
    """

    epsilon: Any = None
    rho: Any = None
    smoothness: Any = None
    inner_tolerance: Any = None
    diameter: Any = None
    start_gap: Any = None
    starter: ExtraGradient = eqx.field(default_factory=ExtraGradient)
    outer: ProximalPoint = eqx.field(default_factory=ProximalPoint)

    def __check_init__(self):
        check_positive(
            self, *("epsilon", "rho", "smoothness", "inner_tolerance", "diameter", "start_gap")
        )
        check_part(self, "starter", ExtraGradient)
        check_part(self, "outer", ProximalPoint)

    @property
    def gradients_per_step(self) -> int:
        return max(self.starter.gradients_per_step, self.outer.gradients_per_step)

    def prepare(self, problem: BilevelProblem, start: Point, tolerance: float) -> PenaltyMethod:
        require(problem, BilevelProblem, "PenaltyMethod")
        if self.diameter is None and self.outer.y_diameter is None:
            for name in ("x2", "y1", "y2"):
                term, block = getattr(problem, name), getattr(start, name)
                require_bounded(term, block, name, "PenaltyMethod")
        for name in ("y1", "y2"):
            require_gap_bound(getattr(problem, name), getattr(start, name), name, "PenaltyMethod")
        lower = lower_smoothness_of(problem, start)
        constants = penalty_constants(
            epsilon=float(tolerance if self.epsilon is None else self.epsilon),
            upper_smoothness=upper_smoothness_of(problem, start),
            lower_smoothness=lower,
            diameter=_response_diameter(problem, start) if self.diameter is None else self.diameter,
            rho=self.rho,
            smoothness=self.smoothness,
            inner_tolerance=self.inner_tolerance,
        )
        dtype = trees.dtype_of(dataclasses.replace(start, rho=None))
        epsilon = constants.epsilon
        outer = self.outer.completed(
            constants.smoothness, constants.diameter, epsilon, constants.inner_tolerance, dtype
        )
        own = self.starter
        start_gap = epsilon if self.start_gap is None else self.start_gap
        starter = dataclasses.replace(
            own,
            stop="gap",
            smoothness=jnp.asarray(lower if own.smoothness is None else own.smoothness, dtype),
            tolerance=jnp.asarray(start_gap if own.tolerance is None else own.tolerance, dtype),
        )
        return dataclasses.replace(
            self,
            epsilon=jnp.asarray(epsilon, dtype),
            rho=jnp.asarray(constants.rho, dtype),
            smoothness=outer.smoothness,
            inner_tolerance=outer.inner_tolerance,
            diameter=outer.y_diameter,
            start_gap=starter.tolerance,
            starter=starter,
            outer=outer,
        )

    def _penalised(self, problem: BilevelProblem) -> MinimaxProblem:
        return penalty(problem, self.rho)

    def init(self, problem: BilevelProblem, start: Point) -> PenaltyState:
        x, y = penalty_blocks(start)
        return PenaltyState(
            starting=jnp.asarray(True),
            start_x1=start.x1,
            starter=self.starter.init(
                lower_level(problem, start.x1), Point(x=start.y1, y=start.y2)
            ),
            outer=self.outer.init(self._penalised(problem), Point(x=x, y=y)),
        )

    def step(self, problem: BilevelProblem, state: PenaltyState, limit: Array) -> PenaltyState:
        penalised = self._penalised(problem)

        def start() -> PenaltyState:
            saddle = lower_level(problem, state.start_x1)
            starter = self.starter.advance(saddle, state.starter, limit)

            def begin() -> PenaltyState:
                found = self.starter.output(saddle, starter)
                (x1, _, _), (x2, _, _) = state.outer.x, state.outer.y
                point = Point(x=(x1, found.x, found.y), y=(x2, found.x, found.y))
                outer = self.outer.init(penalised, point)
                return PenaltyState(jnp.asarray(False), state.start_x1, starter, outer)

            stay = dataclasses.replace(state, starter=starter)
            return lax.cond(self.starter.done(saddle, starter), begin, lambda: stay)

        def go() -> PenaltyState:
            left = limit - state.starter.gradients
            return dataclasses.replace(state, outer=self.outer.step(penalised, state.outer, left))

        return lax.cond(state.starting, start, go)

    def done(self, problem: BilevelProblem, state: PenaltyState) -> Array:
        return ~state.starting & state.outer.finished

    def output(self, problem: BilevelProblem, state: PenaltyState) -> Point:
        point = penalty_point(state.outer.x, state.outer.y)
        return dataclasses.replace(point, rho=self.rho)


def _response_diameter(problem: BilevelProblem, start: Point) -> float:
    """D₂ of `eq:D2`: the diameter of the domain of (x2, z1, z2)."""
    _, y = penalty_blocks(start)
    return float(penalty(problem, 1.0).y.diameter(y))
