"""SAPD: the stochastic accelerated primal-dual method."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array

from bilevax import trees
from bilevax.arguments import non_negative, one_of, positive, tracing, whole
from bilevax.problems import Form, MinimaxProblem, Point
from bilevax.problems.constants import smoothness_of
from bilevax.problems.deviation import deviation_of
from bilevax.problems.validation import require, require_bounded
from bilevax.solvers.base import Solver, check_key, check_part, check_positive
from bilevax.solvers.estimators import Estimator, Plain
from bilevax.trees import Tree


@dataclasses.dataclass(frozen=True)
class SAPDConstants:
    """T, τ, σ and θ of `eq:sapd_T` to `eq:theta_bound_2-R1`; `rate` is 1 − θ, which θ may hide."""

    iterations: int
    tau: float
    sigma: float
    theta: float
    rate: float


def sapd_constants(
    *,
    smoothness: float,
    sigma_x: float,
    sigma_y: float,
    deviation: float,
    tolerance: float,
    x_diameter: float,
    y_diameter: float,
) -> SAPDConstants:
    """The paper's constants, in float64 and without the cancellation of its formulas.

    A·(√(1 + B) − 1) is computed as A·B/(√(1 + B) + 1): σ's that differ by 1e6 make A tiny and B
    huge. `deviation` is δ, `tolerance` is ε̂ in E[σ_x‖x − x*‖² + σ_y‖y − y*‖²] ≤ ε̂².
    """
    L, sx, sy = float(smoothness), float(sigma_x), float(sigma_y)
    for value, name in ((L, "smoothness"), (sx, "sigma_x"), (sy, "sigma_y")):
        positive(value, name)
    positive(tolerance, "tolerance")
    non_negative(deviation, "deviation")
    beta = min(0.5, sy / sx, sx / sy)
    big = 8 * sx / beta / sy * (L / (L + sx)) ** 2
    rates = [2 * sx / (L + sx) / (math.sqrt(1 + big) + 1)]
    rates += [2 / (math.hypot(1, 8 * L / ((1 - beta) * sy)) + 1)]
    if deviation > 0:
        psi = min(math.sqrt(beta / 2 * sx / sy), (1 - beta) / 4)
        xi = (1 + psi, (27 + 3 * beta) / 2 + sy / sx * psi)
        noise = (tolerance / deviation) ** 2 / 12
        rates += [min(1.0, noise * s / x) for s, x in zip((sx, sy), xi)]
    rate = min(rates)
    theta = 1 - rate
    far = 6 * (sx * x_diameter**2 + sy * y_diameter**2) / tolerance**2
    iterations = 1 + max(0.0, math.log(far) if far > 0 else 0.0) / rate
    return SAPDConstants(
        iterations=math.ceil(iterations),
        tau=rate / (sx * theta),
        sigma=rate / (sy * theta),
        theta=theta,
        rate=rate,
    )


def check_sampling(solver: Any) -> None:
    """Refuse what no stochastic method takes: its deviation, its iterations, its key."""
    name, iterations = type(solver).__name__, solver.iterations
    if solver.deviation is not None:
        non_negative(solver.deviation, f"{name}: deviation")
    if iterations is not None and not isinstance(iterations, jax.Array):
        whole(iterations, f"{name}: iterations", 1)
    check_key(solver)


def as_count(times: Any) -> Array:
    """A number of iterations. A counter of 32 bits ends somewhere; every budget does before."""
    return jnp.asarray(min(int(times), int(jnp.iinfo(jnp.zeros((), int).dtype).max) // 2))


class Pull(eqx.Module):
    """x_weight/2·‖x − x̂‖² − y_weight/2·‖y − ŷ‖², added to h: its gradient needs no sample."""

    x: Tree
    y: Tree
    x_weight: Array
    y_weight: Array


class SAPDState(eqx.Module):
    """The iterate, the last estimate of ∇ᵧ, what the estimator and the data source remember."""

    x: Tree
    y: Tree
    slope: Tree
    memories: tuple[Any, Any]  # of the estimators of ∇ᵧ and ∇ₓ
    average: Tree  # (x, y), None unless wanted
    stream: Any
    iteration: Array
    gradients: Array


class SAPD(Solver[SAPDState]):
    """Algorithm `alg:sapd` of the paper (Zhang, Aybat & Gürbüzbalaban 2024).

    s = ∇̃ᵧ(x, y; ω) + θ·q with q = ∇̃ᵧ(x, y; ω) − ∇̃ᵧ(x⁻, y⁻; ω⁻), and q = 0 at first;
    y ← prox_{σq}(y + σs), x ← prox_{τp}(x − τ∇̃ₓ(x, y; ω')), `iterations` (T) times.

    Each ∇̃ is of a sample of its own, and none is computed twice: an iteration takes two partial
    gradients, which count as one gradient each. `estimator` may be `Recursive()`, which takes two
    of each. On a problem without a data source all samples are the same, and it is deterministic.

    T, τ, σ and θ are the paper's for `sigma_x`, `sigma_y` (moduli of strong convexity and
    concavity), the smoothness, `deviation` (δ, estimated if not given), and ε̂ = `tolerance`;
    or as given. θ = 1, which the formulas do not cover, makes the momentum of y constant; τ and σ
    are then 1/(2L). With `decay` they are multiplied by (1 + k/decay)^{−p} in the k-th iteration of
    the whole run, with p = 1/2 for plain estimates and 1/3 for recursive ones, so that noise does
    not keep it from the answer in the end. `returns="average"` weighs the k-th iterate by θ^{−k}.
    `key` is an int, from which all samples follow.
    """

    form: ClassVar[type[Form]] = MinimaxProblem
    has_theorem: ClassVar[bool] = True
    takes_samples: ClassVar[bool] = True

    iterations: Any = None
    tau: Any = None
    sigma: Any = None
    theta: Any = None
    sigma_x: Any = None
    sigma_y: Any = None
    smoothness: Any = None
    deviation: Any = None
    tolerance: Any = None
    decay: Any = None
    key: Any = 0
    returns: Literal["last", "average"] = eqx.field(static=True, default="last")
    estimator: Estimator = eqx.field(default_factory=Plain)

    def __check_init__(self):
        check_positive(
            self, "tau", "sigma", "sigma_x", "sigma_y", "smoothness", "tolerance", "decay"
        )
        if self.theta is not None:
            non_negative(self.theta, "SAPD: theta")
        check_sampling(self)
        one_of(self.returns, "SAPD: returns", "last", "average")
        check_part(self, "estimator", Estimator)

    @property
    def gradients_per_step(self) -> int:
        return 2 * self.estimator.evaluations

    @property
    def given(self) -> bool:
        """Whether nothing is left for the paper's formulas."""
        return None not in (self.iterations, self.theta) and (
            self.constant or None not in (self.tau, self.sigma)
        )

    @property
    def constant(self) -> bool:
        """Whether θ = 1: steps are then constant, and no formula of the paper's."""
        return self.theta is not None and not tracing(self.theta) and float(self.theta) == 1

    def prepare(self, problem: MinimaxProblem, start: Point, tolerance: float) -> SAPD:
        require(problem, MinimaxProblem, "SAPD")
        known: dict[str, Any] = {}
        if not self.given:
            for name, kind in (("sigma_x", "convexity"), ("sigma_y", "concavity")):
                known[name] = getattr(self, name)
                if known[name] is None:
                    raise ValueError(
                        f"SAPD needs {name}, the modulus of strong {kind}; or give iterations, "
                        "tau, sigma and theta"
                    )
            for name in ("x", "y"):
                term, block = getattr(problem, name), getattr(start, name)
                require_bounded(term, block, name, "SAPD")
                known[f"{name}_diameter"] = float(term.diameter(block))
            own = self.deviation
            known["deviation"] = deviation_of(problem, start) if own is None else own
        if not self.given or None in (self.tau, self.sigma):
            own = self.smoothness
            known["smoothness"] = smoothness_of(problem.reference(), start) if own is None else own
        return self.completed(trees.dtype_of(start), tolerance=tolerance, **known)

    def completed(self, dtype: Any, *, tolerance: Any, **known: Any) -> SAPD:
        """The same method with every constant set; those it was given stay."""
        tolerance = float(tolerance if self.tolerance is None else self.tolerance)
        found: dict[str, Any] = {"tolerance": tolerance}
        if not self.given:
            found |= known | dataclasses.asdict(sapd_constants(tolerance=tolerance, **known))
        elif None in (self.tau, self.sigma):
            L = float(known["smoothness"] if self.smoothness is None else self.smoothness)
            found |= {"tau": 1 / (2 * L), "sigma": 1 / (2 * L), "smoothness": L}
        names = ("tau", "sigma", "theta", "sigma_x", "sigma_y", "smoothness", "deviation", "decay")
        given = {name: getattr(self, name) for name in (*names, "iterations")}
        found |= {name: value for name, value in given.items() if value is not None}
        constants = {name: found[name] for name in (*names, "tolerance") if name in found}
        return dataclasses.replace(
            self,
            iterations=as_count(found["iterations"]),
            key=jnp.asarray(self.key),
            **{name: jnp.asarray(value, dtype) for name, value in constants.items()},
        )

    def init(self, problem: MinimaxProblem, start: Point) -> SAPDState:
        zero = jnp.zeros((), int)
        x, y = start.x, start.y
        memories = (self.estimator.init((x, y), y), self.estimator.init((x, y), x))
        return SAPDState(
            x=x,
            y=y,
            slope=jax.tree.map(jnp.zeros_like, y),
            memories=memories,
            average=(x, y) if self.returns == "average" else None,
            stream=problem.first_stream(self.key),
            iteration=zero,
            gradients=zero,
        )

    def step(self, problem: MinimaxProblem, state: SAPDState, limit: Array) -> SAPDState:
        return self.iterate(problem, state, None)

    def iterate(self, problem: MinimaxProblem, s: SAPDState, pull: Pull | None) -> SAPDState:
        """One iteration on the problem, or on the one with `pull` added."""
        shrunk = self._shrunk(s)
        tau, sigma = self.tau * shrunk, self.sigma * shrunk
        stream, at = problem.drawn(s.stream)
        in_y = lambda w, p=at: jax.grad(p.smooth, argnums=1)(*w)
        slope, y_memory = self.estimator(in_y, (s.x, s.y), s.memories[0], shrunk)
        if pull is not None:
            slope = trees.axpy(-pull.y_weight, trees.subtract(s.y, pull.y), slope)
        theta = jnp.where(s.iteration == 0, 0, self.theta)
        ascent = trees.combine(1 + theta, slope, -theta, s.slope)
        y = problem.y.prox(trees.axpy(sigma, ascent, s.y), sigma)

        stream, at = problem.drawn(stream)
        in_x = lambda w, p=at: jax.grad(p.smooth, argnums=0)(*w)
        descent, x_memory = self.estimator(in_x, (s.x, y), s.memories[1], shrunk)
        if pull is not None:
            descent = trees.axpy(pull.x_weight, trees.subtract(s.x, pull.x), descent)
        x = problem.x.prox(trees.axpy(-tau, descent, s.x), tau)
        return SAPDState(
            x=x,
            y=y,
            slope=slope,
            memories=(y_memory, x_memory),
            average=self._averaged(s, (x, y)),
            stream=stream,
            iteration=s.iteration + 1,
            gradients=s.gradients + self.gradients_per_step,
        )

    def _shrunk(self, s: SAPDState) -> Array:
        if self.decay is None:
            return jnp.ones_like(self.tau)
        k = (s.gradients // self.gradients_per_step).astype(self.tau.dtype)
        return (1 + k / self.decay) ** -self.estimator.power

    def _averaged(self, s: SAPDState, new: tuple[Tree, Tree]) -> Tree:
        """With weights θ^{−k}: a share (1 − θ)/(1 − θ^{k+1}) for the k-th, 1/(k + 1) for θ = 1."""
        if s.average is None:
            return None
        count = (s.iteration + 1).astype(self.theta.dtype)
        rate = 1 - self.theta
        known = -jnp.expm1(count * jnp.log(jnp.maximum(self.theta, 1e-30)))
        share = jnp.where(known > 0, rate / jnp.where(known > 0, known, 1), 1 / count)
        return trees.combine(1 - share, s.average, share, new)

    def restarted(self, s: SAPDState) -> SAPDState:
        """From where it is, for another subproblem: q is 0 again, samples and memories go on."""
        x, y = self.point(s)
        return dataclasses.replace(
            s,
            x=x,
            y=y,
            average=None if s.average is None else (x, y),
            iteration=jnp.zeros_like(s.iteration),
        )

    def point(self, s: SAPDState) -> tuple[Tree, Tree]:
        return (s.x, s.y) if s.average is None else s.average

    def stream(self, state: SAPDState) -> Any:
        return state.stream

    def with_stream(self, state: SAPDState, stream: Any) -> SAPDState:
        return dataclasses.replace(state, stream=stream)

    def done(self, problem: MinimaxProblem, state: SAPDState) -> Array:
        if self.decay is None:
            return state.iteration >= self.iterations
        # Where steps are shorter it takes as many more of them to come as far.
        iteration, enough = (a.astype(self.tau.dtype) for a in (state.iteration, self.iterations))
        return iteration * self._shrunk(state) >= enough

    def output(self, problem: MinimaxProblem, state: SAPDState) -> Point:
        x, y = self.point(state)
        return Point(x=x, y=y)
