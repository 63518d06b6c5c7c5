"""The inexact proximal point method for nonconvex-concave minimax problems, from samples."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, ClassVar, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from bilevax import trees
from bilevax.arguments import one_of
from bilevax.problems import Form, MinimaxProblem, Point
from bilevax.problems.constants import saddle_range, smoothness_of
from bilevax.problems.deviation import deviation_of
from bilevax.problems.validation import require, require_bounded
from bilevax.solvers.base import Solver, check_center, check_part, check_positive
from bilevax.solvers.estimators import Recursive
from bilevax.solvers.proximal_point import CONSTANTS
from bilevax.solvers.sapd import SAPD, Pull, SAPDState, as_count, check_sampling
from bilevax.trees import Tree


class StochasticProximalPointState(eqx.Module):
    """The inner method's state, the centres, and one of the iterates so far, drawn uniformly."""

    inner: SAPDState
    x_center: Tree
    y_center: Tree
    chosen: tuple[Tree, Tree]
    index: Array  # which one that is: k' + 1 of the paper, 0 before the first
    key: Array  # of the next draw, as plain numbers
    iteration: Array

    @property
    def gradients(self) -> Array:
        return self.inner.gradients

    @property
    def x(self) -> Tree:
        return self.x_center

    @property
    def y(self) -> Tree:
        return self.chosen[1]


class StochasticProximalPoint(Solver[StochasticProximalPointState]):
    """Algorithm `alg:first-order-stoch` of the paper: SAPD+ with a random output.

    (x, y)^{k+1} ≈ argmin max of H(x, y) + x_weight/2·‖x − x^k‖² − y_weight/2·‖y − y⁰‖² by T steps
    of `inner`, K = `iterations` times; then one of (x, y)¹, …, (x, y)^K, each as likely. At any
    time before, one of those so far. `returns="last"` gives the last one instead. `solution.output`
    is that iterate, and `solution.output_index` says which one it is, k' + 1 of the paper.

    Left unset, constants are those of `thm:sapd+_thm` with ε = `tolerance` and ε̂ =
    `inner_tolerance`: x_weight = 2L, y_weight = ε/(2·D_q), K = ⌈(max H(x⁰, ·) − H* + ε·D_q/4)/ε̂²⌉
    with H* bounded through L and the diameters. `center` is as in `ProximalPoint`.
    """

    form: ClassVar[type[Form]] = MinimaxProblem
    has_theorem: ClassVar[bool] = True
    takes_samples: ClassVar[bool] = True

    iterations: Any = None
    tolerance: Any = None
    inner_tolerance: Any = None
    smoothness: Any = None
    deviation: Any = None
    y_diameter: Any = None
    x_weight: Any = None
    y_weight: Any = None
    key: Any = 0
    center: Literal["start", "last"] = eqx.field(static=True, default="start")
    returns: Literal["random", "last"] = eqx.field(static=True, default="random")
    inner: SAPD = eqx.field(default_factory=SAPD)

    def __check_init__(self):
        check_positive(self, *CONSTANTS)
        check_sampling(self)
        check_center(self, self.center)
        one_of(self.returns, "StochasticProximalPoint: returns", "random", "last")
        check_part(self, "inner", SAPD)
        if not isinstance(self.inner.key, jax.Array) and self.inner.key != 0:
            raise ValueError(
                "StochasticProximalPoint: give key to it, not to its inner method, which takes the "
                "same"
            )

    @property
    def gradients_per_step(self) -> int:
        return self.inner.gradients_per_step

    def prepare(
        self, problem: MinimaxProblem, start: Point, tolerance: float
    ) -> StochasticProximalPoint:
        require(problem, MinimaxProblem, "StochasticProximalPoint")
        tolerance = float(tolerance if self.tolerance is None else self.tolerance)
        at = problem.reference()
        if self.y_diameter is None and self.y_weight is None:
            require_bounded(problem.y, start.y, "y", "StochasticProximalPoint")
        x_diameter, y_diameter = float(at.x.diameter(start.x)), float(at.y.diameter(start.y))
        smoothness = smoothness_of(at, start) if self.smoothness is None else float(self.smoothness)
        deviation = self.deviation
        if deviation is None:
            deviation = 0.0 if self.inner.given else deviation_of(problem, start)

        def descent() -> float:
            diameter = math.hypot(x_diameter, y_diameter)
            low, high = saddle_range(at, start, smoothness, diameter)
            return high - low

        return self.completed(
            trees.dtype_of(start),
            smoothness=smoothness,
            deviation=deviation,
            tolerance=tolerance,
            inner_tolerance=tolerance / 2,
            x_diameter=x_diameter,
            y_diameter=y_diameter,
            descent=descent,
        )

    def completed(
        self, dtype: Any, *, x_diameter: float, descent: Callable[[], float], **found: float
    ) -> StochasticProximalPoint:
        """The same method with every constant set; those it was given stay, `found` has the others.

        `descent` gives a bound on max H(x⁰, ·) − H* when it is called, if it is called.
        """

        def given(name: str, value: float | None = None) -> float:
            own = getattr(self, name)
            return float((found[name] if value is None else value) if own is None else own)

        names = ("tolerance", "inner_tolerance", "smoothness", "deviation", "y_diameter")
        tolerance, hat, L, delta, spread = map(given, names)
        spread = spread if spread > 0 else 1.0  # over a domain of a single point any weight serves
        x_weight = given("x_weight", 2 * L)
        y_weight = given("y_weight", tolerance / (2 * spread))
        times = self.iterations
        if times is None:
            times = math.ceil(min((descent() + tolerance * spread / 4) / hat**2, 2.0**62))
        if not self.inner.given and not math.isfinite(x_diameter):
            raise ValueError(
                "StochasticProximalPoint takes SAPD's constants from the diameter of x's domain, "
                "which is unbounded. Bound it, or give inner=bilevax.SAPD(iterations=…, tau=…, "
                "sigma=…, theta=…)"
            )
        inner = dataclasses.replace(self.inner, key=self.key).completed(
            dtype,
            tolerance=hat,
            smoothness=L + max(x_weight, y_weight),
            sigma_x=max(x_weight - L, x_weight / 2),
            sigma_y=y_weight,
            deviation=delta,
            x_diameter=x_diameter,
            y_diameter=spread,
        )
        values = dict(zip(names, (tolerance, hat, L, delta, spread)))
        values |= {"x_weight": x_weight, "y_weight": y_weight}
        return dataclasses.replace(
            self,
            iterations=as_count(max(int(times), 1)),
            key=jnp.asarray(self.key),
            inner=inner,
            **{name: jnp.asarray(value, dtype) for name, value in values.items()},
        )

    def init(self, problem: MinimaxProblem, start: Point) -> StochasticProximalPointState:
        own = jax.random.fold_in(jax.random.key(self.key), 1)  # the source has the key itself
        return StochasticProximalPointState(
            inner=self.inner.init(problem, start),
            x_center=start.x,
            y_center=start.y,
            chosen=(start.x, start.y),
            index=jnp.zeros((), int),
            key=jax.random.key_data(own),
            iteration=jnp.zeros((), int),
        )

    def step(
        self, problem: MinimaxProblem, state: StochasticProximalPointState, limit: Array
    ) -> StochasticProximalPointState:
        pull = Pull(state.x_center, state.y_center, self.x_weight, self.y_weight)
        inner = self.inner.iterate(problem, state.inner, pull)
        state = dataclasses.replace(state, inner=inner)
        over = self.inner.done(problem, inner)
        return lax.cond(over, lambda: self._following(state), lambda: state)

    def _following(self, s: StochasticProximalPointState) -> StochasticProximalPointState:
        """The next subproblem; the k-th iterate is the chosen one with probability 1/k."""
        inner = self.inner.restarted(s.inner)
        key, chance = jax.random.split(jax.random.wrap_key_data(s.key))
        count = (s.iteration + 1).astype(self.smoothness.dtype)
        taken = jax.random.uniform(chance, (), count.dtype) * count < 1
        if self.returns == "last":
            taken = jnp.ones_like(taken)
        choose = lambda new, old: jnp.where(taken, new, old)
        return StochasticProximalPointState(
            inner=inner,
            x_center=inner.x,
            y_center=inner.y if self.center == "last" else s.y_center,
            chosen=jax.tree.map(choose, (inner.x, inner.y), s.chosen),
            index=choose(s.iteration + 1, s.index),
            key=jax.random.key_data(key),
            iteration=s.iteration + 1,
        )

    def stream(self, state: StochasticProximalPointState) -> Any:
        return self.inner.stream(state.inner)

    def with_stream(
        self, state: StochasticProximalPointState, stream: Any
    ) -> StochasticProximalPointState:
        return dataclasses.replace(state, inner=self.inner.with_stream(state.inner, stream))

    def done(self, problem: MinimaxProblem, state: StochasticProximalPointState) -> Array:
        return state.iteration >= self.iterations

    def output(self, problem: MinimaxProblem, state: StochasticProximalPointState) -> Point:
        x, y = state.chosen
        return Point(x=x, y=y)

    def output_index(self, state: StochasticProximalPointState) -> Array:
        return state.index


def practical() -> StochasticProximalPoint:
    """Constants that work, see benchmarks/stochastic.py: the theorem's T is beyond all patience."""
    inner = SAPD(iterations=30, theta=1.0, decay=200, estimator=Recursive())
    return StochasticProximalPoint(iterations=10**9, returns="last", inner=inner)
