"""What the theorems predict for a solver on a problem, before it runs."""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp

from bilevax.certificates.gap import linear_excess
from bilevax.problems import Form, Point
from bilevax.problems.constants import saddle_range, smoothness_of, start_maximum, upper_range
from bilevax.problems.reformulations import penalty_blocks, penalty_problem
from bilevax.problems.validation import require_bounded
from bilevax.solvers import PenaltyMethod, ProximalPoint, StochasticProximalPoint
from bilevax.theory.assumptions import Case, Precondition, preconditions_of, start_gap
from bilevax.theory.bounds import (
    Bounds,
    StochasticBounds,
    minimax_bounds,
    minimax_level,
    stochastic_distance,
    stochastic_level,
    stochastic_stationarity,
)


@dataclasses.dataclass(frozen=True)
class Prediction:
    """The worst case of a run, before it is run: the constants it rests on, and the bounds.

    `level` bounds max over y of H at the answer (`eq:HxK_bound`); of a penalty, H is P_ρ.
    `gap` bounds the lower level's gap there, (level − f_low)/ρ, by the proof of `thm:connection`;
    None for a minimax problem.
    `stationarity` is the ε for which the answer is ε-primal-dual stationary.
    `distance` is zero except with minibatches. There `level`, `gap` and `stationarity` are
    expectations at a point near the answer, and `distance` bounds how far that one is off, in
    expectation, too (`thm:sapd+_thm`).
    `preconditions` says which assumptions of the theorem hold. Where one does not, the numbers are
    those of the formulas, and nothing is promised.
    """

    constants: dict[str, float]
    bounds: Bounds | StochasticBounds
    level: float
    gap: float | None
    stationarity: float
    distance: float
    preconditions: tuple[Precondition, ...]

    @property
    def holds(self) -> bool | None:
        """Whether all preconditions hold: False if one does not, None if one is unknown."""
        seen = {precondition.holds for precondition in self.preconditions}
        return False if False in seen else None if None in seen else True

    def __str__(self) -> str:
        sampled = isinstance(self.bounds, StochasticBounds)
        where = "expected near the answer" if sampled else "at the answer"
        rows = [f"{name:<18} {value:.6g}" for name, value in self.constants.items()]
        bounds = [("level", self.level, f"max H {where}, at most")]
        if self.gap is not None:
            bounds.append(("gap", self.gap, f"of the lower level {where}, at most"))
        bounds.append(("stationarity", self.stationarity, f"{where}, at most"))
        if sampled:
            bounds.append(("distance", self.distance, "expected from there to the answer, at most"))
        rows += [f"{name:<18} {value:<12.6g} {text}" for name, value, text in bounds]
        return "\n".join([*rows, str(self.bounds), *map(str, self.preconditions)])


def predict(
    problem: Form,
    start: Point,
    tolerance: float = 1e-2,
    solver: PenaltyMethod | ProximalPoint | StochasticProximalPoint | None = None,
) -> Prediction:
    """The theorem's bounds for `PenaltyMethod` (bilevel) or `ProximalPoint` (minimax) on a problem.

    With the constants that the solver would take. The functions' ranges are bounded through
    smoothness and diameters, so these are upper bounds on the paper's numbers; with `f_low` given
    they are smaller. The search for a start with a small gap is not counted. For a constrained
    problem these are the bounds of `thm:constrained`, with the multiplier bounds that a run would
    begin with; `gap` is then that of its Lagrangian. With a source of minibatches they are those of
    `thm:minmax_stoch`, which `PenaltyMethod()` takes (`StochasticProximalPoint()` for a minimax
    problem), not `solve` by default.

    Without bounded domains no bound is finite, and it raises; `preconditions` does not.
    """
    case = Case.of(problem, start, tolerance, solver)
    for name, term, block in case.problem.terms(case.start):
        if name in case.problem.blocks:
            try:
                require_bounded(term, block, name, "The theorem")
            except ValueError as error:
                error.add_note("bilevax.theory.preconditions says what holds and what does not")
                raise
    return _predicted(case.prepared_for())


def _predicted(case: Case) -> Prediction:
    """What the theorem of a prepared method says."""
    outer, sizes = case.outer, _of_penalty(case) if case.penalised else _of_minimax(case)
    common = {
        "epsilon": float(outer.tolerance),
        "inner_tolerance": float(outer.inner_tolerance),
        "y_diameter": max(sizes.y_diameter, 1e-8),  # a domain of one point
    }
    constants, distance, descent = sizes.constants, 0.0, sizes.top - sizes.low
    smooth = common | {"smoothness": float(outer.smoothness)}
    if case.sampled:
        constants |= _of_samples(outer)
        bounds = _spent(outer)
        level = stochastic_level(**common, top=sizes.top, iterations=bounds.K)
        stationarity = stochastic_stationarity(**smooth, descent=descent, iterations=bounds.K)
        distance = stochastic_distance(**smooth)
    else:
        below = sizes.top - sizes.bottom
        bounds = minimax_bounds(
            **smooth, x_diameter=sizes.x_diameter, descent=descent, range_below=below
        )
        level = minimax_level(**smooth, top=sizes.top)
        eps = common["epsilon"]
        stationarity = max(eps, eps / 2 + common["inner_tolerance"])
    gap = (level - sizes.low) / case.rho if case.penalised else None
    return Prediction(constants, bounds, level, gap, stationarity, distance, preconditions_of(case))


def _of_samples(outer: StochasticProximalPoint) -> dict[str, float]:
    names = ("deviation", "inner_tolerance", "x_weight", "y_weight")
    constants = {name: float(getattr(outer, name)) for name in names}
    inner = ("tau", "sigma", "theta")
    return constants | {name: float(getattr(outer.inner, name)) for name in inner}


def _spent(outer: StochasticProximalPoint) -> StochasticBounds:
    # A count at the end of what integers hold here stands for any larger one.
    times = [
        math.inf if count >= jnp.iinfo(count.dtype).max // 2 else float(count)
        for count in (outer.iterations, outer.inner.iterations)
    ]
    return StochasticBounds(*times)


@dataclasses.dataclass(frozen=True)
class _Sizes:
    """What a theorem rests on besides the constants of its method."""

    constants: dict[str, float]
    x_diameter: float
    y_diameter: float
    top: float  # at least max_y H(x⁰, y)
    low: float  # at most H*; of a penalty, f_low
    bottom: float  # at most H_low


def _of_minimax(case: Case) -> _Sizes:
    problem, start, L = case.problem.reference(), case.start, float(case.outer.smoothness)
    Dp, Dq = float(problem.x.diameter(start.x)), float(problem.y.diameter(start.y))
    low, _ = saddle_range(problem, start, L, math.hypot(Dp, Dq))
    # H(x⁰, ·) is concave: it lies below its tangent.
    _, slope = problem.gradient(start.x, start.y)
    value = problem.smooth(start.x, start.y) + problem.x.value(start.x)
    top = float(value) + float(linear_excess(problem.y, start.y, slope))
    constants = {"smoothness": L, "x_diameter": Dp, "y_diameter": Dq}
    return _Sizes(constants, Dp, Dq, top, low, low)


def _of_penalty(case: Case) -> _Sizes:
    prepared, problem, start = case.prepared, case.problem.reference(), case.start
    rho, L = case.rho, float(prepared.smoothness)
    x, y = penalty_blocks(start)
    penalised = penalty_problem(problem, rho)
    D1, D2 = float(penalised.x.diameter(x)), float(penalised.y.diameter(y))
    low, _ = upper_range(problem, start, math.hypot(D1, D2))
    # H_low is over z1 and z2 too, where the penalty can be far below f_low (the paper's C has f_low
    # there; it stands inside a logarithm).
    bottom, _ = saddle_range(penalised, Point(x=x, y=y), L, math.hypot(D1, D2))
    # max P(x⁰, ·) is max f(x⁰, ·) and ρ times the start's gap, which is 1 in the paper.
    moves = prepared.starter is not None
    top = start_maximum(problem, start, moves=moves) + rho * start_gap(case)[1]
    constants = {f"{f}_smoothness": smoothness_of(problem, start, f) for f in ("upper", "lower")}
    constants |= {"rho": rho, "smoothness": L, "inner_tolerance": float(prepared.inner_tolerance)}
    constants |= {"D1": D1, "D2": D2, "f_low": low}
    return _Sizes(constants, D1, D2, top, low, bottom)
