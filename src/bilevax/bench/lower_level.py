"""The lower level solved again at a given x, without bilevax.

Whether the y of an answer is optimal for its x is decided here with SciPy, from derivatives that do
not come from JAX.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from scipy import optimize

from bilevax.bench.expressions import Expression, Linear
from bilevax.bench.records import Record

# Where a variable has no bound, the search goes this far from zero.
FAR = 1e4
# A value is believed when it is proved to within this, relative to 1 + |f|.
BELIEVED = 1e-6
_SOLVED = 1e-10
_FEASIBLE = 1e-7
_ROUNDS = 40
_HIGHS: Any = {"primal_feasibility_tolerance": 1e-10, "dual_feasibility_tolerance": 1e-10}

Smooth = Callable[[np.ndarray], Linear]


@dataclasses.dataclass(frozen=True, eq=False)
class LowerSolution:
    """A minimiser y of f(x, ·), its value f*(x), and how far to trust it.

    For a convex lower level f* lies between `bound` and `value`, up to the `violation` of y. Where
    it is not convex there is no bound (−∞) and nothing is believed. An infeasible lower level has
    the value ∞ and the y of the search's last point; an unbounded one has −∞. Without bounds on y
    the bound holds over the box searched, and is believed when y lies clear of its sides.
    """

    value: float
    bound: float
    y: np.ndarray
    violation: float
    believed: bool
    method: str
    reason: str = ""

    @property
    def exact(self) -> bool:
        """Whether a linear program was solved, so that only rounding stands between."""
        return self.method == "HiGHS" and self.believed


@dataclasses.dataclass(frozen=True)
class LowerGap:
    """gap = f(x, y) − f*(x), which may be negative where y violates the lower level.

    f* was found as a value from above; it may be less by `error`, and the gap more.
    """

    gap: float
    error: float
    lower_violation: float
    upper_violation: float
    exact: bool
    believed: bool
    reason: str = ""


def lower_gap(record: Record, x: np.ndarray, y: np.ndarray, *, relax: float = 0.0) -> LowerGap:
    """How far (x, y) is from solving the lower level at x, and how far from feasible.

    `relax` as in `lower_solution`, for points whose x is feasible only up to rounding.
    """
    x, y = _vector(x, record.n_x, "x"), _vector(y, record.n_y, "y")
    solution = lower_solution(record, x, y, relax=relax)
    solved = bool(np.isfinite(solution.value))
    return LowerGap(
        gap=float(record.lower(x, y)) - solution.value if solved else np.inf,
        error=max(0.0, solution.value - solution.bound) if solved else 0.0,
        lower_violation=lower_violation(record, x, y),
        upper_violation=upper_violation(record, x, y),
        exact=solution.exact,
        believed=solution.believed,
        reason=solution.reason,
    )


def lower_violation(record: Record, x: np.ndarray, y: np.ndarray) -> float:
    """The largest violation of the lower level's constraints; ∞ where one is undefined."""
    bounds = [(y, record.y_bounds)] if record.y_bounds_in_lower_level else []
    return _violation(record, "lower", bounds, x, y)


def upper_violation(record: Record, x: np.ndarray, y: np.ndarray) -> float:
    """The largest violation of the upper level's constraints; ∞ where one is undefined."""
    bounds = [(x, record.x_bounds)]
    if not record.y_bounds_in_lower_level:
        bounds.append((y, record.y_bounds))
    return _violation(record, "upper", bounds, x, y)


def _violation(
    record: Record, level: str, bounds: Sequence[Linear], x: np.ndarray, y: np.ndarray
) -> float:
    excesses = [float(g(x, y)) for g in getattr(record, f"{level}_constraints")]
    excesses += [abs(float(h(x, y))) for h in getattr(record, f"{level}_equalities")]
    for point, box in bounds:
        excesses += [*(box[:, 0] - point), *(point - box[:, 1])]
    return float(np.nan_to_num(np.max([0.0, *excesses]), nan=np.inf, posinf=np.inf))


@functools.lru_cache(maxsize=256)
def lower_level_is_affine(record: Record) -> bool:
    """Whether f, g and h are affine in y for fixed x: the same slope in y at random points."""
    rng = np.random.default_rng(0)
    functions = (record.lower, *record.lower_constraints, *record.lower_equalities)
    for _ in range(5):
        x = rng.uniform(*clipped(record.x_bounds).T)
        pair = rng.uniform(*clipped(record.y_bounds).T, size=(2, record.n_y))
        slopes, others = (linearised(functions, x, y, slice(record.n_x, None))[1] for y in pair)
        scale = 1 + np.abs(slopes).max(axis=1, keepdims=True)
        # NaN must not count as equal.
        if not np.all(np.abs(slopes - others) <= 1e-12 * scale):
            return False
    return True


def clipped(bounds: np.ndarray, far: float = FAR) -> np.ndarray:
    """The bounds, with finite numbers where there are none."""
    low, high = bounds.T
    low = np.where(np.isfinite(low), low, np.minimum(-far, high - far))
    high = np.where(np.isfinite(high), high, np.maximum(far, low + far))
    return np.stack([low, high], axis=1)


def lower_solution(
    record: Record, x: np.ndarray, y: np.ndarray | None = None, *, relax: float = 0.0
) -> LowerSolution:
    """Minimise f(x, ·) under the lower level's constraints and, if they are its own, bounds on y.

    If it is affine in y, this is a linear program. If it is convex, SLSQP descends to a value, and
    the linear program of all linearisations bounds it from below; the two must meet. Otherwise
    SLSQP runs from many starts, which proves nothing. If the lower level is infeasible, it is
    solved again with constraints, other than bounds, relaxed by `relax`.
    """
    x = _vector(x, record.n_x, "x")
    level = _Level(record, x, 0.0)
    middle = level.box.mean(axis=1)
    start = middle if y is None else _vector(y, record.n_y, "y")
    start = np.clip(np.where(np.isfinite(start), start, middle), *level.box.T)
    if not np.all(np.isfinite(x)):
        return level.infeasible(start, "none", proved=False)
    solution = level.minimise(start)
    if solution.value == np.inf and relax > 0:
        solution = _Level(record, x, relax).minimise(start)
        if solution.believed and solution.value < np.inf:
            reason = f"the lower level is infeasible, but not when relaxed by {relax:g}"
            solution = dataclasses.replace(solution, reason=reason)
    return solution


def _vector(value: np.ndarray, size: int, name: str) -> np.ndarray:
    vector = np.asarray(value, float)
    if vector.shape != (size,):
        raise ValueError(f"{name} must have shape {(size,)}, not {vector.shape}")
    return vector


class _Level:
    """The lower level at one x: minimise f(y) subject to g(y) ≤ 0, h(y) = 0, y in a box."""

    def __init__(self, record: Record, x: np.ndarray, relax: float):
        self.record, self.x, self.relax = record, x, relax
        bounds = record.y_bounds
        if not record.y_bounds_in_lower_level:
            bounds = np.tile([-np.inf, np.inf], (record.n_y, 1))
        self.bounds, self.box = bounds, clipped(bounds)

    def minimise(self, y: np.ndarray) -> LowerSolution:
        if lower_level_is_affine(self.record):
            return self.linear_program(y)
        return self.cutting_planes(y) if self.record.convex else self.many_starts(y)

    def linearised(self, functions: Sequence[Expression], y: np.ndarray) -> Linear:
        """Values and Jacobian in y."""
        return linearised(functions, self.x, y, slice(self.record.n_x, None))

    def inequalities(self, y: np.ndarray) -> Linear:
        """g(y) − relax, and ±h(y) − relax where equalities are relaxed too."""
        g, Dg = self.linearised(self.record.lower_constraints, y)
        if self.relax:
            h, Dh = self.linearised(self.record.lower_equalities, y)
            g, Dg = np.concatenate([g, h, -h]), np.concatenate([Dg, Dh, -Dh])
        return g - self.relax, Dg

    def equalities(self, y: np.ndarray) -> Linear:
        return self.linearised(() if self.relax else self.record.lower_equalities, y)

    def solution(self, y: np.ndarray, bound: float, method: str, reason: str = "") -> LowerSolution:
        value = float(self.record.lower(self.x, y))
        violation = lower_violation(self.record, self.x, y)
        proved = value - bound <= BELIEVED * (1 + abs(value))
        believed = bool(proved and violation <= _FEASIBLE + self.relax) and self.inside(y)
        if not believed:
            reason = reason or f"f* lies in [{bound:.9g}, {value:.9g}], violation {violation:.1e}"
        return LowerSolution(value, bound, y, violation, believed, method, reason)

    def inside(self, y: np.ndarray) -> bool:
        """Whether y stays clear of the box where that is only the limit of the search."""
        artificial = self.box != self.bounds
        return bool(np.all(np.abs(y[:, None] - self.box)[artificial] > 1))

    def infeasible(self, y: np.ndarray, method: str, proved: bool) -> LowerSolution:
        violation = lower_violation(self.record, self.x, y)
        reason = "the lower level is infeasible" if proved else "no feasible y was found"
        return LowerSolution(np.inf, np.inf, y, violation, proved, method, reason)

    def linear_program(self, y: np.ndarray) -> LowerSolution:
        value, slope = self.linearised((self.record.lower,), y)
        g, Dg = self.inequalities(y)
        h, Dh = self.equalities(y)
        if not all(np.all(np.isfinite(numbers)) for numbers in (value, slope, g, Dg, h, Dh)):
            return self.infeasible(y, "HiGHS", proved=False)  # x is outside some function's domain
        result = _linprog(slope[0], (Dg, Dg @ y - g), (Dh, Dh @ y - h), self.bounds)
        if result.status == 0:
            bound = float(value[0] + slope[0] @ (result.x - y))
            return self.solution(result.x, bound, "HiGHS")
        if result.status == 3:
            reason = "the lower level is unbounded"
            return LowerSolution(-np.inf, -np.inf, y, 0.0, True, "HiGHS", reason)
        return self.infeasible(y, "HiGHS", proved=result.status == 2)

    def cutting_planes(self, y: np.ndarray) -> LowerSolution:
        """Kelley's method, with SLSQP to supply good points.

        By convexity f(y') ≥ f(y) + ⟨∇f(y), y' − y⟩, and alike for g: the linear program over all
        points y seen so far is a lower bound on f*, and its minimiser the next start.
        """
        method = "SLSQP and cutting planes"
        n = self.record.n_y
        rows: list[np.ndarray] = []
        sides: list[float] = []
        best, bound = y, -np.inf
        for _ in range(_ROUNDS):
            descended = self.descend(y)
            if self.merit(descended) < self.merit(best):
                best = descended
            for point in (y, descended):
                value, slope = self.linearised((self.record.lower,), point)
                g, Dg = self.inequalities(point)
                cuts = np.concatenate([slope, Dg])
                sides += [*(cuts @ point - np.concatenate([value, g]))]
                # The last variable is the epigraph's: f(y) ≤ s.
                epigraph = np.concatenate([[-1.0], np.zeros(len(g))])
                rows += [*np.concatenate([cuts, epigraph[:, None]], axis=1)]
            usable = np.isfinite(rows).all(axis=1) & np.isfinite(sides)
            h, Dh = self.equalities(best)
            at_most = np.array(rows)[usable], np.array(sides)[usable]
            equal = np.concatenate([Dh, np.zeros((len(h), 1))], axis=1), Dh @ best - h
            bounds = [*self.box, (-np.inf, np.inf)]
            result = _linprog(np.eye(n + 1)[n], at_most, equal, bounds)
            if result.status == 2:
                # Without a Slater point cuts may cross by rounding at a point that is feasible.
                if self.violation(best) > 10 * _SOLVED:
                    return self.infeasible(best, method, proved=True)
                break
            if result.status != 0:
                break
            bound = max(bound, float(result.fun))
            value = float(self.record.lower(self.x, best))
            if value - bound <= _SOLVED * (1 + abs(value)) and self.violation(best) <= _SOLVED:
                break
            y = result.x[:n]
        if self.violation(best) > 1e3 * _FEASIBLE:
            return self.infeasible(best, method, proved=False)
        return self.solution(best, bound, method)

    def many_starts(self, y: np.ndarray) -> LowerSolution:
        method = "SLSQP from many starts"
        rng = np.random.default_rng(0)
        starts = [y, self.box.mean(axis=1), *(rng.uniform(*self.box.T) for _ in range(14))]
        best = min(map(self.descend, starts), key=self.merit)
        if self.violation(best) > 1e3 * _FEASIBLE:
            return self.infeasible(best, method, proved=False)
        return self.solution(best, -np.inf, method, "the lower level is not convex")

    def violation(self, y: np.ndarray) -> float:
        return max(0.0, lower_violation(self.record, self.x, y) - self.relax)

    def merit(self, y: np.ndarray) -> tuple[float, float]:
        """Feasible points by value, others by violation."""
        violation = self.violation(y)
        value = float(self.record.lower(self.x, y))
        feasible = violation <= _FEASIBLE
        return (0.0, np.inf if np.isnan(value) else value) if feasible else (violation, 0.0)

    def descend(self, y: np.ndarray) -> np.ndarray:
        objective = lambda y: self.linearised((self.record.lower,), y)
        return slsqp(objective, self.inequalities, self.equalities, y, self.box)


def _linprog(cost: np.ndarray, at_most: Linear, equal: Linear, bounds: Any) -> Any:
    (A_ub, b_ub), (A_eq, b_eq) = at_most, equal
    return optimize.linprog(cost, A_ub, b_ub, A_eq, b_eq, bounds, options=_HIGHS)


def linearised(
    functions: Sequence[Expression], x: np.ndarray, y: np.ndarray, wanted: slice = slice(None)
) -> Linear:
    """Values of the functions and the wanted columns of their Jacobian in (x, y)."""
    pairs = [function.linearised(x, y) for function in functions]
    width = len(range(len(x) + len(y))[wanted])
    values = np.array([value for value, _ in pairs])
    return values, np.array([slope[wanted] for _, slope in pairs]).reshape(len(pairs), width)


def slsqp(
    objective: Smooth, inequalities: Smooth, equalities: Smooth, start: np.ndarray, box: np.ndarray
) -> np.ndarray:
    """Minimise subject to inequalities ≤ 0, equalities = 0 and a box; each gives (values, slopes).

    The point may be infeasible or not optimal: SLSQP's own word is not taken for it.
    """
    # SLSQP asks for values and slopes one after the other, at the same point.
    f, g, h = (_remember_last(function) for function in (objective, inequalities, equalities))
    constraints = [
        {"type": kind, "fun": lambda z, c=c: -c(z)[0], "jac": lambda z, c=c: -c(z)[1]}
        for kind, c in (("ineq", g), ("eq", h))
        if len(c(start)[0])
    ]
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        result = optimize.minimize(
            lambda z: float(f(z)[0][0]),
            start,
            jac=lambda z: f(z)[1][0],
            bounds=box,
            constraints=constraints,
            method="SLSQP",
            options={"ftol": 1e-14, "maxiter": 200},
        )
    return np.clip(result.x, *box.T) if np.all(np.isfinite(result.x)) else start


def _remember_last(function: Smooth) -> Smooth:
    last = functools.lru_cache(1)(lambda numbers: function(np.frombuffer(numbers)))
    return lambda z: last(np.asarray(z, float).tobytes())
