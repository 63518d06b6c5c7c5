"""What the theorems ask for, and whether it holds for a problem, a start and a method."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import numpy as np
from jaxtyping import Array

from bilevax import trees
from bilevax.certificates.gap import linear_excess
from bilevax.certificates.witnesses import best_response
from bilevax.functions import up_to_date
from bilevax.problems import (
    BilevelProblem,
    Form,
    MinimaxProblem,
    Point,
    registered,
)
from bilevax.problems.constants import lower_lipschitz_of, smoothness_of
from bilevax.problems.lagrangian import fixed
from bilevax.problems.validation import (
    diameter,
    require,
    require_form,
    require_precision,
    validate,
)
from bilevax.programs import quick
from bilevax.solvers import (
    SAPD,
    OptFOM,
    PenaltyMethod,
    Plain,
    ProximalPoint,
    StochasticProximalPoint,
)

# Steps by which a best response at the start is sought, at most.
STEPS = 2000
WORDS = {True: "holds", False: "does not hold", None: "unknown"}


@dataclasses.dataclass(frozen=True)
class Precondition:
    """One thing that a theorem asks for, and whether it holds.

    `holds` is None where it is unknown. `value` and `limit` are the numbers that are compared,
    None where there are none. `note` says what they are.
    """

    name: str
    holds: bool | None
    value: float | None
    limit: float | None
    note: str

    def __str__(self) -> str:
        return f"{WORDS[self.holds]:<14} {self.name}: {self.note}"


def preconditions(
    problem: Form,
    start: Point,
    tolerance: float = 1e-2,
    solver: PenaltyMethod | ProximalPoint | StochasticProximalPoint | None = None,
) -> tuple[Precondition, ...]:
    """What the theorem behind a method asks of a problem, and whether it holds.

    Bounded domains; a start with a small gap (`eq:initial_condition`); constants that are given,
    not estimated, and are the theorem's; for a constrained problem ε ≤ ρ·L/4 and ε ≤ ρ·G/4
    (`thm:constrained`) and the multiplier bound of `eq:cons_y1`. Convexity and the like are what
    `problem.check` looks at. Unlike `predict` it takes domains without bounds, and says so.
    """
    case = Case.of(problem, start, tolerance, solver)
    return preconditions_of(case.prepared_for() if case.bounded else case)


@dataclasses.dataclass(frozen=True)
class Case:
    """A method, and a problem and a start as they are stated and as the method sees them.

    `prepared` is the method with its constants, None without bounded domains. A constrained problem
    without them is seen as it is stated.
    """

    stated: Any
    stated_start: Point
    problem: Any
    start: Point
    method: Any
    tolerance: float
    prepared: Any = None

    @classmethod
    def of(cls, problem: Form, start: Point, tolerance: float, solver: Any) -> Case:
        require_form(problem)
        stated = problem = up_to_date(problem)
        start = stated_start = validate(problem.reference(), start)
        require_precision(tolerance, trees.dtype_of(start))
        reformulation = registered(problem, "reformulation")
        form = type(problem) if reformulation is None else reformulation.form
        method: Any = _method(form, problem.sampled) if solver is None else solver
        if not isinstance(method, PenaltyMethod | ProximalPoint | StochasticProximalPoint):
            raise TypeError(f"the paper has no bounds for {type(method).__name__}")
        if reformulation is None:
            require(problem, method.form, type(method).__name__)
        elif _bounded(problem, start):
            seen = reformulation.of(problem, start)
            problem, start = seen.problem(problem), seen.point(start)
        return cls(stated, stated_start, problem, start, method, float(tolerance))

    def prepared_for(self) -> Case:
        """The same with the method's constants."""
        prepared = self.method.prepare(self.problem, self.start, self.tolerance)
        return dataclasses.replace(self, prepared=prepared)

    @property
    def bounded(self) -> bool:
        return _bounded(self.problem, self.start)

    @property
    def constrained(self) -> bool:
        return hasattr(self.stated, "slater_margin")

    @property
    def penalised(self) -> bool:
        return isinstance(self.method, PenaltyMethod)

    @property
    def outer(self) -> Any:
        return self.prepared.outer if self.penalised else self.prepared

    @property
    def sampled(self) -> bool:
        return isinstance(self.outer, StochasticProximalPoint)

    @property
    def epsilon(self) -> float:
        own = self.method.epsilon if self.penalised else self.method.tolerance
        return float(self.tolerance if own is None else own)

    @property
    def rho(self) -> float:
        return 1 / self.epsilon if self.method.rho is None else float(self.method.rho)


def _method(form: type[Form], sampled: bool) -> Any:
    """The paper's method for a form."""
    stochastic = StochasticProximalPoint if sampled else ProximalPoint
    methods = {BilevelProblem: PenaltyMethod, MinimaxProblem: stochastic}
    for known in form.__mro__:
        if known in methods:
            return methods[known]()
    raise TypeError(f"the paper has no bounds for a {form.__name__}")


def _diameters(problem: Form, start: Point) -> dict[str, float]:
    return {
        name: float(diameter(term, block))
        for name, term, block in problem.terms(start)
        if name in problem.blocks
    }


def _bounded(problem: Form, start: Point) -> bool:
    return all(math.isfinite(size) for size in _diameters(problem, start).values())


def start_gap(case: Case) -> tuple[float, float]:
    """Two numbers between which the gap lies that the method begins with."""
    method = case.method
    if method.starter is None:
        if case.constrained and case.problem is case.stated:
            return 0.0, math.inf  # without bounds it has not become a bilevel problem
        least, most = map(float, _measured_gap(case.problem.reference(), case.start))
        return least, max(least, most)
    own = method.starter.tolerance
    own = method.start_gap if own is None else own
    return 0.0, float(case.epsilon if own is None else own)


@quick
def _measured_gap(problem: BilevelProblem, start: Point) -> tuple[Array, Array]:
    """A lower and an upper bound on the lower level's gap at a point, from best responses."""
    p, x1, y1, y2 = problem, start.x1, start.y1, start.y2
    below = lambda z1: p.smooth_lower(x1, z1, y2)
    z1 = best_response(below, p.y1, y1, STEPS)
    bottom, slope = jax.value_and_grad(below)(z1)
    here = p.y1.value(y1)
    least = here - bottom - p.y1.value(z1)
    most = here - bottom + linear_excess(p.y1, z1, trees.scale(-1, slope))
    if p.y2 is None:
        top = p.smooth_lower(x1, y1, None)
        return top + least, top + most
    above = lambda z2: -p.smooth_lower(x1, y1, z2)
    z2 = best_response(above, p.y2, y2, STEPS)
    bottom, slope = jax.value_and_grad(above)(z2)
    top = p.y2.value(y2) - bottom
    excess = linear_excess(p.y2, z2, trees.scale(-1, slope))
    return top - p.y2.value(z2) + least, top + excess + most


def preconditions_of(case: Case) -> tuple[Precondition, ...]:
    """Those of the theorem for a case; without the method's constants those that need none."""
    found = [
        Precondition(
            f"bounded {name}", math.isfinite(size), size, math.inf, f"its diameter is {size:.3g}"
        )
        for name, size in _diameters(case.problem, case.start).items()
    ]
    if case.penalised:
        found.append(_of_start(case))
    if case.prepared is not None:
        found += [_of_smoothness(case), _of_constants(case)]
        found += [_of_samples(case)] if case.sampled else []
    if case.constrained:
        found += _of_constraints(case)
    return tuple(found)


def _of_start(case: Case) -> Precondition:
    """The start's gap is at most ε, `eq:initial_condition` and `eq:initial_condition_stoch`."""
    (least, most), eps = start_gap(case), case.epsilon
    if case.method.starter is None:
        note = f"between {least:.3g} and {most:.3g} as it is, against ε = {eps:.3g}"
        holds = True if most <= eps else False if least > eps else None
    else:
        note = f"{most:.3g}, at which the start phase ends, against ε = {eps:.3g}"
        holds = most <= eps
    return Precondition("gap of the start", holds, most, eps, note)


def _of_smoothness(case: Case) -> Precondition:
    """L of the method is at least that of the function."""
    problem, L = case.problem.reference(), float(case.outer.smoothness)
    names = ("upper", "lower") if case.penalised else ("objective",)
    each = [smoothness_of(problem, case.start, name) for name in names]
    needed = each[0] + 2 * case.rho * each[1] if case.penalised else each[0]
    given = [f"{name}_smoothness" if case.penalised else "smoothness" for name in names]
    estimated = any(getattr(problem, name) is None for name in given)
    source = "an estimate from below" if estimated else "from the constants of the problem"
    note = f"L = {L:.4g} against {needed:.4g}, {source}"
    holds = needed * (1 - 1e-6) <= L  # rounding in float32
    return Precondition("smoothness", None if holds and estimated else holds, L, needed, note)


def _of_constants(case: Case) -> Precondition:
    """ε̂ ≤ ε/2, proximal weights 2L and ε/(2D), the dual one around the first iterate, ρ = 1/ε.

    The stochastic theorem takes any ε̂; the deterministic one is for `OptFOM` without limits.
    """
    outer, spread = case.outer, _y_diameter(case)
    L, eps, hat = (float(getattr(outer, n)) for n in ("smoothness", "tolerance", "inner_tolerance"))
    weights = float(outer.x_weight), float(outer.y_weight)
    theirs = 2 * L, eps / (2 * spread) if spread > 0 else weights[1]
    note = (
        f"ε̂ = {hat:.3g} against ε/2 = {eps / 2:.3g}, weights {weights[0]:.4g} and {weights[1]:.4g} "
        f"against 2L = {theirs[0]:.4g} and ε/(2D) = {theirs[1]:.4g}"
    )
    if outer.center != "start":
        note += ', with center="last", which the theorem does not cover'
    holds = outer.center == "start" and (case.sampled or hat <= eps / 2 * (1 + 1e-6))
    if case.penalised and not math.isclose(case.rho * eps, 1, rel_tol=1e-4):
        holds, note = False, f"{note}, ρ = {case.rho:.4g} against 1/ε = {1 / eps:.4g}"
    if not case.sampled and not isinstance(outer.inner, OptFOM):
        holds, note = False, f"{note}, by {outer.inner.title} instead of OptFOM"
    elif not case.sampled and (outer.max_iterations or outer.inner.max_iterations):
        holds, note = False, f"{note}, with a limit max_iterations"
    holds = holds and all(math.isclose(a, b, rel_tol=1e-4) for a, b in zip(weights, theirs))
    return Precondition("constants of the theorem", holds, hat, eps / 2, note)


def _y_diameter(case: Case) -> float:
    """The diameter of the domain that is maximised over."""
    sizes = _diameters(case.problem, case.start)
    names = ("x2", "y1", "y2") if case.penalised else ("y",)
    return math.hypot(*(sizes.get(name, 0.0) for name in names))


def _of_samples(case: Case) -> Precondition:
    """T, τ, σ and θ are the theorem's, for a deviation that is given, and so is the answer."""
    outer, own = case.outer, case.method.outer if case.penalised else case.method
    inner = SAPD() if own is None else own.inner
    names = ("iterations", "tau", "sigma", "theta", "decay")
    chosen = [name for name in names if getattr(inner, name) is not None]
    chosen += [] if isinstance(inner.estimator, Plain) else ["estimator"]
    chosen += [] if (inner.returns, outer.returns) == ("last", "random") else ["returns"]
    if chosen:
        note = f"{', '.join(chosen)} not as in the theorem"
        return Precondition("steps of SAPD", False, None, None, note)
    names = ("upper_deviation", "lower_deviation") if case.penalised else ("deviation",)
    given = all(getattr(case.problem, name, None) is not None for name in names)
    given = given or (own is not None and own.deviation is not None)
    deviation = float(outer.deviation)
    note = f"for a deviation of {deviation:.3g}, {'as given' if given else 'which is estimated'}"
    return Precondition("steps of SAPD", True if given else None, deviation, None, note)


def _of_constraints(case: Case) -> list[Precondition]:
    """Those of `thm:constrained`: ε ≤ min(ρL/4, ρG/4), B = 2·L·D/G, inequalities alone.

    `thm:e-kkt` has ε ≤ ρ·G·√l/4, but its proof takes ε ≤ ρ·G/4. L is the Lipschitz constant of the
    lower level's objective, D the diameter of y's domain and G the Slater margin. Any B that is
    larger serves, too.
    """
    p, eps, rho = case.stated, case.epsilon, case.rho
    names = ("equalities", "upper_constraints", "upper_equalities")
    others = [name for name in names if getattr(p, name) is not None]
    found = []
    if others:
        note = f"the theorem has no {', no '.join(others)}"
        found.append(Precondition("inequalities alone", False, None, None, note))
    if p.constraints is None:
        return found
    L, declared = lower_lipschitz_of(p.reference(), case.stated_start)
    D = float(diameter(p.y, case.stated_start.y))
    if math.isfinite(L):
        source = "as given" if declared else "from a slope and the smoothness"
        note = f"ε = {eps:.3g} against {rho * L / 4:.3g}, with L = {L:.4g} {source}"
        found.append(Precondition("ε ≤ ρL/4", eps <= rho * L / 4, eps, rho * L / 4, note))
    else:
        note = "no Lipschitz constant L of the lower level's objective is known"
        found.append(Precondition("ε ≤ ρL/4", None, eps, None, note))
    if p.slater_margin is not None:
        G = float(p.slater_margin)
        note = f"ε = {eps:.3g} against {rho * G / 4:.3g}, with G = {G:.4g} as given"
        found.append(Precondition("ε ≤ ρG/4", eps <= rho * G / 4, eps, rho * G / 4, note))
        B = 2 * L * D / G
        note = f"B = 2LD/G = {B:.4g}, with D = {D:.4g}"
        return [*found, Precondition("multiplier bound", math.isfinite(B), B, B, note)]
    note = f"the Slater margin G is not known; it holds if G ≥ {4 * eps / rho:.3g}"
    found.append(Precondition("ε ≤ ρG/4", None, eps, None, note))
    if not fixed(p):
        note = "it is found at the start and grows where it is touched; G is not known"
        return [*found, Precondition("multiplier bound", None, None, None, note)]
    B = min(float(np.min(leaf)) for leaf in jax.tree.leaves(p.multiplier_bound))
    note = f"B = {B:.4g}, but no L and D are known"
    if math.isfinite(L * D):
        note = f"B = {B:.4g} is 2LD/G or more if G ≥ {2 * L * D / B:.4g}, with D = {D:.4g}"
    return [*found, Precondition("multiplier bound", None, B, None, note)]
