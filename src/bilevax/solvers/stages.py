"""What FOP and SMO share: stages of a penalised lower level, each a warm start and one solve."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from bilevax import trees
from bilevax.arguments import non_negative, one_of, whole
from bilevax.certificates.gap import linear_excess
from bilevax.problems import ConstrainedBilevelProblem, Form, MinimaxProblem, Multipliers, Point
from bilevax.problems.constants import (
    constraint_values,
    estimate_constraint_lipschitz,
    estimate_constraint_smoothness,
    lower_smoothness_of,
    upper_smoothness_of,
)
from bilevax.problems.validation import require, require_bounded
from bilevax.solvers.base import Solver, check_most, check_part, check_positive
from bilevax.solvers.proximal_point import CONSTANTS, ProximalPoint, ProximalPointState
from bilevax.terms import PerLeaf
from bilevax.trees import Tree


class Stage(NamedTuple):
    """The constants of stage k: ρ_k, the weight w_k of the penalty, ε_k and ε̂_k."""

    rho: Array
    weight: Array
    epsilon: Array
    inner_tolerance: Array


class PenalisedLower(eqx.Module):
    """A(x, z) = g1(x, z) + (‖[λ + w·c(x, z)]₊‖² + ‖ν + w·e(x, z)‖²)/(2w), less a constant.

    With λ = ν = 0 and w = 2µ it is g1 + µ(‖[c]₊‖² + ‖e‖²), the quadratic penalty of FOP. With
    w = µ it is SMO's augmented Lagrangian without −(‖λ‖² + ‖ν‖²)/(2w), which has no gradient and
    falls out of A(x, y) − A(x, z).
    """

    lower: Callable[..., Array]
    constraints: Callable[..., Tree] | None
    equalities: Callable[..., Tree] | None
    shift: tuple[Tree, Tree]  # (λ, ν)
    weight: Array

    def multipliers(self, x: Tree, z: Tree, *data: Tree) -> tuple[Tree, Tree]:
        """([λ + w·c]₊, ν + w·e): ∇A = ∇g1 + (these)ᵀ∇(c, e)."""
        lam, nu = self.shift
        values = lambda function: None if function is None else function(x, z, *data)
        moved = lambda shift, value: shift + self.weight.astype(value.dtype) * value
        above = lambda shift, value: jnp.maximum(moved(shift, value), 0)
        return (
            jax.tree.map(above, lam, values(self.constraints)),
            jax.tree.map(moved, nu, values(self.equalities)),
        )

    def __call__(self, x: Tree, z: Tree, *data: Tree) -> Array:
        value = self.lower(x, z, *data)
        squares = trees.square(self.multipliers(x, z, *data)).astype(value.dtype)
        return value + squares / (2 * self.weight.astype(value.dtype))


class StageFunction(eqx.Module):
    """f1(x, y) + ρ(A(x, y) − A(x, z)), in the variables (x, y) and z."""

    upper: Callable[..., Array]
    lower: PenalisedLower
    rho: Array

    def __call__(self, xy: Tree, z: Tree, *data: Tree) -> Array:
        x, y = xy
        gap = self.lower(x, y, *data) - self.lower(x, z, *data)
        return self.upper(x, y, *data) + self.rho.astype(gap.dtype) * gap


class WarmStart(eqx.Module):
    """Where the accelerated gradient method is: z^j, z^{j−1}, t_j and (t_{j−1} − 1)/t_j."""

    z: Tree
    before: Tree
    t: Array
    momentum: Array

    @classmethod
    def at(cls, z: Tree) -> WarmStart:
        dtype = trees.dtype_of(z)
        return cls(z, z, jnp.ones((), dtype), jnp.zeros((), dtype))


class StagesState(eqx.Module):
    """The stage, its (λ_k, ν_k), its two phases, and the last iterate with its multipliers.

    During a warm start `answer` is still that of the stage before, with the ρ and the multipliers
    of that stage: those of the new one belong to a point that is not found yet.
    """

    stage: Array
    shift: tuple[Tree, Tree]
    warming: Array
    warm: WarmStart
    outer: ProximalPointState
    answer: Point
    finished: Array
    cut: Array  # whether a limit on iterations has ended a stage, or a subproblem
    gradients: Array


class Stages(Solver[StagesState]):
    """Stages k = 0, 1, …, in each of which A_k stands for the lower level (Lu and Mei).

    1. Accelerated gradient on A_k(x, ·) + g2 from y, until its optimality gap is at most ε_k by the
       bound ⟨∇, z⁺⟩ + g2(z⁺) + g2*(−∇) + (L̃/2)‖z⁺ − v‖², ∇ being the gradient at v; this gives ỹ.
    2. `ProximalPoint` on min over (x, y), max over z of f + ρ_k(A_k(x, y) − A_k(x, z)), g2
       included, from ((x, ỹ), ỹ), with tolerance ε_k, inner tolerance ε̂_k and, in the notation of
       `PenalisedLower`, smoothness L = L_f + 2ρ_k·L̃ where
       L̃ = L_g + (‖(λ_k, ν_k)‖ + w_k·c_hi)·L_∇c + w_k·L_c².

    The gradients that are counted are those of the function in 2, which has f once and A_k twice; a
    step of 1, with one gradient of A_k in z alone, counts as one, too. Multipliers come from
    function values, and these are not counted.

    ε is `epsilon`, or the tolerance of `solve`. The constants L_f (`upper_smoothness`), L_g
    (`lower_smoothness`), L_c (`constraint_lipschitz`), L_∇c (`constraint_smoothness`) and
    c_hi ≥ ‖(c, e)‖ (`constraint_bound`) are the solver's if given, else the problem's, else
    estimated; `diameter` is that of y, `stages` the number of stages. A value given to `outer`
    itself goes before the one that a stage would set.

    The run ends after the last stage, or after up to `extra_stages` more (none in theory's
    schedule) while the published stop does not hold: ‖([c]₊, e)‖ ≤ ε and a lower-level gap ≤ ε,
    both at (x, y). `max_iterations` is the most iterations of `ProximalPoint` in a stage; OptFOM
    has the limit of the published runs with
    `outer=ProximalPoint(inner=OptFOM(max_iterations=200))`.
    """

    form: ClassVar[type[Form]] = ConstrainedBilevelProblem

    in_stages: ClassVar[bool] = True
    # Whether a stage begins with the multipliers that the last one found, or with none.
    keeps_multipliers: ClassVar[bool] = False

    epsilon: Any = None
    upper_smoothness: Any = None
    lower_smoothness: Any = None
    constraint_lipschitz: Any = None
    constraint_smoothness: Any = None
    constraint_bound: Any = None
    diameter: Any = None
    stages: Any = None
    extra_stages: int = eqx.field(static=True, default=3)
    max_iterations: int | None = eqx.field(static=True, default=None)
    schedule: Literal["practical", "theory"] = eqx.field(static=True, default="practical")
    outer: ProximalPoint = eqx.field(default_factory=ProximalPoint)

    def __check_init__(self):
        name = type(self).__name__
        check_positive(self, "epsilon", "upper_smoothness", "lower_smoothness", "diameter")
        for constant in ("constraint_lipschitz", "constraint_smoothness", "constraint_bound"):
            value = getattr(self, constant)
            if value is not None:  # zero if there are no constraints, or affine ones
                non_negative(value, f"{name}: {constant}")
        if self.stages is not None and not eqx.is_array(self.stages):
            whole(self.stages, f"{name}: stages", 1)
        whole(self.extra_stages, f"{name}: extra_stages", 0)
        check_most(self)
        one_of(self.schedule, f"{name}: schedule", "practical", "theory")
        check_part(self, "outer", ProximalPoint)

    @abc.abstractmethod
    def count(self, epsilon: float) -> int:
        """How many stages there are."""

    @abc.abstractmethod
    def constants(self, stage: Array) -> Stage:
        """The constants of stage k, inside a compiled program."""

    def enough(self, problem: ConstrainedBilevelProblem, state: StagesState) -> Array:
        """The published stop: ‖([c]₊, e)‖ ≤ ε at (x, y), and a lower-level gap ≤ ε.

        Feasible points have A_k ≤ g, so min g ≥ min A_k; and A_k is convex, so min A_k is at least
        A_k(x, z) less the largest ⟨∇A_k, z − s⟩ + g2(z) − g2(s). With that
        g(x, y) − min g ≤ g(x, y) − A_k(x, z) + this excess.
        """
        p, answer = problem, state.answer
        x, y, z = answer.x, answer.y, answer.z
        above = jax.tree.map(lambda c: jnp.maximum(c, 0), p.called("constraints", x, y))
        violation = trees.norm((above, p.called("equalities", x, y)))
        stage = self.constants(state.stage)
        lower, _ = self._lower(p, stage, state.shift)
        value, slope = jax.value_and_grad(lambda z: lower(x, z, *p.extra))(z)
        value = value - trees.square(state.shift).astype(value.dtype) / (2 * stage.weight)
        excess = linear_excess(p.y, z, trees.scale(-1, slope))
        gap = p.lower_value(x, y) - (value - excess)
        return (violation <= self.epsilon) & (gap <= self.epsilon)

    @property
    def gradients_per_step(self) -> int:
        return self.outer.gradients_per_step + 1  # that of the published stop

    def prepare(self, problem: ConstrainedBilevelProblem, start: Point, tolerance: float) -> Any:
        name = type(self).__name__
        require(problem, ConstrainedBilevelProblem, name)
        for constraint in ("upper_constraints", "upper_equalities"):
            if getattr(problem, constraint) is not None:
                raise ValueError(
                    f"{name} keeps constraints of the lower level only, and the problem has "
                    f"{constraint}; use bilevax.PenaltyMethod() or bilevax.Adaptive()"
                )
        for block in ("x", "y"):
            require_bounded(getattr(problem, block), getattr(start, block), block, name)
        epsilon = float(tolerance if self.epsilon is None else self.epsilon)
        dtype = trees.dtype_of((start.x, start.y))
        diameter = float(problem.y.diameter(start.y) if self.diameter is None else self.diameter)
        constants = self._measured(problem, start) | {
            "epsilon": epsilon,
            # Over a domain of a single point any weight serves.
            "diameter": diameter if diameter > 0 else 1.0,
        }
        arrays = {key: jnp.asarray(value, dtype) for key, value in constants.items()}
        stated = {key: getattr(self.outer, key) for key in CONSTANTS}
        given: dict[str, Any] = {
            key: jnp.asarray(value, dtype) for key, value in stated.items() if value is not None
        }
        stages = self.count(epsilon) if self.stages is None else int(self.stages)
        extra = 0 if self.schedule == "theory" else self.extra_stages
        if self.max_iterations is not None:
            given["max_iterations"] = self.max_iterations
        outer = dataclasses.replace(self.outer, **given)
        arrays["stages"] = jnp.asarray(stages, int)
        return dataclasses.replace(self, extra_stages=extra, outer=outer, **arrays)

    def _measured(self, problem: ConstrainedBilevelProblem, start: Point) -> dict[str, float]:
        """The constants of the problem: the solver's, or else the problem's, or else estimates."""
        term, blocks = PerLeaf((problem.x, problem.y)), (start.x, start.y)

        def bound(problem: ConstrainedBilevelProblem, start: Point) -> float:
            # Never too small where the Lipschitz constant is not; samples would be.
            here = float(trees.norm(constraint_values(problem)(blocks)))
            return here + found["constraint_lipschitz"] * float(term.diameter(blocks))

        found: dict[str, float] = {}
        for name, estimate in (
            ("upper_smoothness", upper_smoothness_of),
            ("lower_smoothness", lower_smoothness_of),
            ("constraint_lipschitz", estimate_constraint_lipschitz),
            ("constraint_smoothness", estimate_constraint_smoothness),
            ("constraint_bound", bound),
        ):
            own, known = getattr(self, name), getattr(problem, name, None)
            known = known if own is None else own
            found[name] = estimate(problem, start) if known is None else float(known)
        return found

    def _lower(
        self, problem: ConstrainedBilevelProblem, stage: Stage, shift: tuple[Tree, Tree]
    ) -> tuple[PenalisedLower, Array]:
        """A_k and its smoothness L̃."""
        p, w = problem, stage.weight
        size = trees.norm(shift).astype(w.dtype)
        bend = (size + w * self.constraint_bound) * self.constraint_smoothness
        smoothness = self.lower_smoothness + bend + w * self.constraint_lipschitz**2
        # A linear A would make steps of any length; these are long enough for it, and finite.
        least = jnp.finfo(w.dtype).eps ** 0.5 * stage.epsilon / self.diameter**2
        lower = PenalisedLower(p.lower, p.constraints, p.equalities, shift, w)
        return lower, jnp.maximum(smoothness, least)

    def _minimax(
        self, problem: Any, stage: Stage, lower: PenalisedLower, smoothness: Array
    ) -> tuple[MinimaxProblem, ProximalPoint]:
        """The problem of a stage's second phase, and the method with its constants."""
        y = stage.rho * problem.y
        function = StageFunction(problem.upper, lower, stage.rho)
        minimax = MinimaxProblem(function, PerLeaf((problem.x, y)), y, data=problem.data)
        whole_smoothness = self.upper_smoothness + 2 * stage.rho * smoothness
        tolerances, dtype = (stage.epsilon, stage.inner_tolerance), self.epsilon.dtype
        return minimax, self.outer.completed(whole_smoothness, self.diameter, *tolerances, dtype)

    def _answer(self, problem: Any, rho: Array, lower: PenalisedLower, xyz: tuple) -> Point:
        """The iterate with (λ, ν) = ρ·`multipliers`(x, y) and (λ̄, ν̄) = `multipliers`(x, z)."""
        x, y, z = xyz
        lam, nu = trees.scale(rho, lower.multipliers(x, y, *problem.extra))
        lam_bar, nu_bar = lower.multipliers(x, z, *problem.extra)
        return Point(x=x, y=y, z=z, rho=rho, multipliers=Multipliers(lam, lam_bar, nu, nu_bar))

    def init(self, problem: ConstrainedBilevelProblem, start: Point) -> StagesState:
        x, y, zero = start.x, start.y, jnp.zeros((), int)
        dtype = trees.dtype_of((x, y))
        values = tuple(problem.called(name, x, y) for name in ("constraints", "equalities"))
        shift = jax.tree.map(lambda v: jnp.zeros(v.shape, dtype), values)
        stage = self.constants(zero)
        lower, smoothness = self._lower(problem, stage, shift)
        minimax, outer = self._minimax(problem, stage, lower, smoothness)
        return StagesState(
            stage=zero,
            shift=shift,
            warming=jnp.asarray(True),
            warm=WarmStart.at(y),
            outer=outer.init(minimax, Point(x=(x, y), y=y)),
            answer=self._answer(problem, stage.rho, lower, (x, y, y)),
            finished=jnp.asarray(False),
            cut=jnp.asarray(False),
            gradients=zero,
        )

    def step(
        self, problem: ConstrainedBilevelProblem, state: StagesState, limit: Array
    ) -> StagesState:
        return lax.cond(
            state.warming,
            lambda: self._warm(problem, state, limit),
            lambda: self._solve(problem, state, limit),
        )

    def _warm(
        self, problem: ConstrainedBilevelProblem, state: StagesState, limit: Array
    ) -> StagesState:
        """Accelerated gradient on A_k(x, ·) + g2, and where it ends the solve begins."""
        stage = self.constants(state.stage)
        lower, smoothness = self._lower(problem, stage, state.shift)
        x, term = state.answer.x, problem.y
        gradient = jax.grad(lambda z: lower(x, z, *problem.extra))

        def going(carry: tuple[WarmStart, Array, Array]) -> Array:
            _, found, gradients = carry
            return ~found & (gradients < limit)

        def descend(carry: tuple[WarmStart, Array, Array]) -> tuple[WarmStart, Array, Array]:
            s, _, gradients = carry
            v = trees.axpy(s.momentum, trees.subtract(s.z, s.before), s.z)
            g = gradient(v)
            z = term.prox(trees.axpy(-1 / smoothness, g, v), 1 / smoothness)
            rise = linear_excess(term, z, trees.scale(-1, g)) + term.value(z)
            gap = rise + smoothness / 2 * trees.square(trees.subtract(z, v))
            t = (1 + jnp.sqrt(1 + 4 * s.t**2)) / 2
            following = WarmStart(z, s.z, t, (s.t - 1) / t)
            return following, gap <= stage.epsilon, gradients + 1

        first = (state.warm, jnp.asarray(False), state.gradients)
        warm, found, gradients = lax.while_loop(going, descend, first)
        state = dataclasses.replace(state, warm=warm, gradients=gradients)

        def begin() -> StagesState:
            minimax, outer = self._minimax(problem, stage, lower, smoothness)
            begun = outer.init(minimax, Point(x=(x, warm.z), y=warm.z))
            return dataclasses.replace(state, warming=jnp.asarray(False), outer=begun)

        return lax.cond(found, begin, lambda: state)

    def _solve(
        self, problem: ConstrainedBilevelProblem, state: StagesState, limit: Array
    ) -> StagesState:
        """One step of the proximal point method, and where it ends the next stage begins."""
        stage = self.constants(state.stage)
        lower, smoothness = self._lower(problem, stage, state.shift)
        minimax, method = self._minimax(problem, stage, lower, smoothness)
        before = state.outer
        outer = method.step(minimax, before, limit - 1 - state.gradients + before.gradients)
        gradients = state.gradients + outer.gradients - before.gradients
        state = dataclasses.replace(state, outer=outer, gradients=gradients)

        def land() -> StagesState:
            (x, y), z = outer.x, outer.y
            answer = self._answer(problem, stage.rho, lower, (x, y, z))
            landed = dataclasses.replace(state, answer=answer, cut=state.cut | outer.cut)
            return lax.cond(outer.finished, lambda: self._next(problem, landed), lambda: landed)

        return lax.cond(outer.iteration > before.iteration, land, lambda: state)

    def _next(self, problem: ConstrainedBilevelProblem, state: StagesState) -> StagesState:
        """The beginning of the next stage, or the end."""
        number = state.stage + 1
        asks = (number >= self.stages) & (number < self.stages + self.extra_stages)
        enough = lambda: self.enough(problem, state)
        finished = lax.cond(asks, enough, lambda: number >= self.stages)
        state = dataclasses.replace(state, gradients=state.gradients + asks.astype(int))
        m = state.answer.multipliers
        kept = (m.lam_bar, m.nu_bar) if self.keeps_multipliers and m is not None else state.shift
        following = dataclasses.replace(
            state,
            stage=state.stage + 1,
            shift=kept,
            warming=jnp.asarray(True),
            warm=WarmStart.at(state.answer.y),
        )
        done = dataclasses.replace(state, finished=finished)
        return lax.cond(finished, lambda: done, lambda: following)

    def done(self, problem: ConstrainedBilevelProblem, state: StagesState) -> Array:
        return state.finished

    def cut_short(self, state: StagesState) -> Array:
        return state.cut

    def output(self, problem: ConstrainedBilevelProblem, state: StagesState) -> Point:
        return state.answer
