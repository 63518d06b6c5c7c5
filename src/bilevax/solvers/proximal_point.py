"""The inexact proximal point method for nonconvex-concave minimax problems."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Literal

import equinox as eqx
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from bilevax import trees
from bilevax.arguments import tracing
from bilevax.problems import Form, MinimaxProblem, Point
from bilevax.problems.constants import smoothness_of
from bilevax.problems.reformulations import proximal
from bilevax.problems.validation import require, require_bounded
from bilevax.solvers.base import (
    InnerSolver,
    Solver,
    check_center,
    check_most,
    check_part,
    check_positive,
    reached,
)
from bilevax.solvers.optfom import OptFOM
from bilevax.trees import Tree

# The constants of a proximal point method.
CONSTANTS = ("tolerance", "inner_tolerance", "smoothness", "y_diameter", "x_weight", "y_weight")


class ProximalPointState(eqx.Module):
    """The outer iterate, the centre of the dual regulariser, and the inner solver's state.

    `cut` says whether a limit on iterations has ended the method, or any of its subproblems.
    """

    x: Tree
    y: Tree
    y_center: Tree
    inner: Any
    iteration: Array
    finished: Array
    cut: Array
    gradients: Array


class ProximalPoint(Solver[ProximalPointState]):
    """Algorithm `alg:first-order` of the paper (Lu and Mei 2023, Algorithm 2).

    (x, y)^{k+1} ≈ argmin max of H(x, y) + x_weight/2·‖x − x^k‖² − y_weight/2·‖y − y⁰‖² by `inner`,
    to stationarity inner_tolerance/(k+1), until ‖x^{k+1} − x^k‖ ≤ tolerance/(4L). Then
    dist(0, ∂H) ≤ tolerance. In the paper x_weight = 2L and y_weight = tolerance/(2·D_q).

    Left unset, L (`smoothness`) is the problem's or estimated, D_q (`y_diameter`) comes from the
    term, and inner_tolerance is tolerance/2. `inner` is `OptFOM()` or another `InnerSolver`.
    `center="last"` regularises y around the last iterate, as `eq:minmax_prox` has it, instead of
    the first, which is what the theorem covers. With `max_iterations` it ends after so many
    subproblems at the latest, which no theorem covers; `inner` may have a limit of its own.
    """

    form: ClassVar[type[Form]] = MinimaxProblem
    has_theorem: ClassVar[bool] = True

    tolerance: Any = None
    inner_tolerance: Any = None
    smoothness: Any = None
    y_diameter: Any = None
    x_weight: Any = None
    y_weight: Any = None
    center: Literal["start", "last"] = eqx.field(static=True, default="start")
    inner: InnerSolver = eqx.field(default_factory=OptFOM)
    max_iterations: int | None = eqx.field(static=True, default=None)

    def __check_init__(self):
        check_positive(self, *CONSTANTS)
        check_most(self)
        check_center(self, self.center)
        check_part(self, "inner", InnerSolver)

    @property
    def gradients_per_step(self) -> int:
        return self.inner.gradients_per_step

    def prepare(self, problem: MinimaxProblem, start: Point, tolerance: float) -> ProximalPoint:
        require(problem, MinimaxProblem, "ProximalPoint")
        diameter = None
        if self.y_diameter is None and self.y_weight is None:
            require_bounded(problem.y, start.y, "y", "ProximalPoint")
            diameter = float(problem.y.diameter(start.y))
        smoothness = smoothness_of(problem, start) if self.smoothness is None else None
        return self.completed(smoothness, diameter, tolerance, None, trees.dtype_of(start))

    def completed(
        self, smoothness: Any, diameter: Any, tolerance: Any, inner_tolerance: Any, dtype: Any
    ) -> ProximalPoint:
        """The same method with every constant set; those it was given stay. All may be traced."""

        def first(*values: Any) -> Any:
            value = next(value for value in values if value is not None)
            return value if tracing(value) else float(value)

        tolerance = first(self.tolerance, tolerance)
        smoothness = first(self.smoothness, smoothness)
        spread = first(self.y_diameter, diameter, 1.0)
        # Over a domain of a single point any weight serves.
        spread = spread if tracing(spread) or spread > 0 else 1.0
        constants = {
            "tolerance": tolerance,
            "inner_tolerance": first(self.inner_tolerance, inner_tolerance, tolerance / 2),
            "smoothness": smoothness,
            "y_diameter": spread,
            "x_weight": first(self.x_weight, 2 * smoothness),
            "y_weight": first(self.y_weight, tolerance / (2 * spread)),
        }
        arrays = {name: jnp.asarray(value, dtype) for name, value in constants.items()}
        return dataclasses.replace(self, **arrays)

    def _subproblem(self, problem: MinimaxProblem, state: ProximalPointState):
        """The subproblem of iteration k, and the inner solver with its constants, `eq:mapbarL`."""
        sub = proximal(problem, state.x, state.y_center, self.x_weight, self.y_weight)
        count = (state.iteration + 1).astype(self.smoothness.dtype)
        inner = self.inner.tuned(
            self.smoothness + jnp.maximum(self.x_weight, self.y_weight),
            # h + x_weight/2‖·‖² is convex enough by what the weight exceeds L, and never less than
            # a fraction of it: a weight chosen below 2L is the user's bet that h is less nonconvex.
            jnp.maximum(self.x_weight - self.smoothness, self.x_weight / 2),
            self.y_weight,
            self.inner_tolerance / count,
        )
        return sub, inner

    def init(self, problem: MinimaxProblem, start: Point) -> ProximalPointState:
        zero = jnp.zeros((), int)
        no = jnp.asarray(False)
        state = ProximalPointState(start.x, start.y, start.y, None, zero, no, no, zero)
        sub, inner = self._subproblem(problem, state)
        return dataclasses.replace(state, inner=inner.init(sub, start))

    def step(
        self, problem: MinimaxProblem, state: ProximalPointState, limit: Array
    ) -> ProximalPointState:
        sub, inner = self._subproblem(problem, state)
        before = state.inner.gradients
        advanced = inner.advance(sub, state.inner, limit - state.gradients + before)
        spent = state.gradients + advanced.gradients - before
        state = dataclasses.replace(state, inner=advanced, gradients=spent)

        def next_subproblem() -> ProximalPointState:
            point = inner.output(sub, advanced)
            moved = trees.norm(trees.subtract(point.x, state.x))
            met = moved <= self.tolerance / (4 * self.smoothness)
            last = reached(state.iteration + 1, self.max_iterations)
            following = ProximalPointState(
                x=point.x,
                y=point.y,
                y_center=point.y if self.center == "last" else state.y_center,
                inner=None,
                iteration=state.iteration + 1,
                finished=met | last,
                cut=state.cut | jnp.asarray(inner.cut_short(advanced)) | (last & ~met),
                gradients=spent,
            )
            sub_, inner_ = self._subproblem(problem, following)
            return dataclasses.replace(following, inner=inner_.init(sub_, point))

        return lax.cond(inner.done(sub, advanced), next_subproblem, lambda: state)

    def done(self, problem: MinimaxProblem, state: ProximalPointState) -> Array:
        return state.finished

    def cut_short(self, state: ProximalPointState) -> Array:
        return state.cut

    def output(self, problem: MinimaxProblem, state: ProximalPointState) -> Point:
        return Point(x=state.x, y=state.y)
