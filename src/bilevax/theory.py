"""The paper's constants and worst-case bounds, so that a user sees them before a run."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax.numpy as jnp

from bilevax import trees
from bilevax.functions import up_to_date
from bilevax.problems import BilevelProblem, Form, MinimaxProblem, Point, registered
from bilevax.problems.constants import saddle_range, smoothness_of, upper_range
from bilevax.problems.reformulations import penalty, penalty_blocks
from bilevax.problems.validation import require_bounded, require_form, require_precision, validate
from bilevax.solvers import PenaltyMethod, ProximalPoint, StochasticProximalPoint
from bilevax.solvers.penalty import PenaltyConstants, penalty_constants

__all__ = [
    "Bounds",
    "PenaltyConstants",
    "Prediction",
    "StochasticBounds",
    "minimax_bounds",
    "penalty_constants",
    "predict",
]


@dataclasses.dataclass(frozen=True)
class Bounds:
    """Theorem `thm:lu_thm`: at most K + 1 subproblems, and N gradients in all."""

    K: float
    N: float
    C: float
    alpha: float
    delta: float

    def __str__(self) -> str:
        return (
            f"at most {self.K:.3g} outer iterations and {self.N:.3g} gradients "
            f"(α = {self.alpha:.3g}, δ = {self.delta:.3g}, C = {self.C:.3g})"
        )


def minimax_bounds(
    *,
    epsilon: float,
    inner_tolerance: float,
    smoothness: float,
    x_diameter: float,
    y_diameter: float,
    descent: float,
    range_below: float,
) -> Bounds:
    """K, C and N of Theorem `thm:lu_thm`.

    `descent` is max_y H(x⁰, y) − H*, `range_below` is H* − H_low; upper bounds on both serve. The
    paper's K has a misplaced parenthesis: the −1 stands outside the product.
    """
    L, Dp, Dq, eps, hat = smoothness, x_diameter, y_diameter, epsilon, inner_tolerance
    alpha = min(1.0, math.sqrt(4 * eps / (Dq * L)))
    delta = (2 + 1 / alpha) * L * Dp**2 + max(eps / Dq, alpha * L / 4) * Dq**2
    K = 16 * (descent + eps * Dq / 4) * L / eps**2
    K += 32 * hat**2 * (1 + 4 * Dq**2 * L**2 / eps**2) / eps**2 - 1
    K = float(max(math.ceil(K), 0))
    sigma_y = eps / (2 * Dq)
    whole = 3 * L + sigma_y
    C = 4 * max(1 / (2 * L), min(Dq / eps, 4 / (alpha * L)))
    C *= delta + 2 / alpha * (range_below + eps * Dq / 4 + L * Dp**2)
    C *= (whole**2 / min(L, sigma_y) + whole) ** 2 / hat**2
    per_iteration = math.ceil(96 * math.sqrt(2) * (1 + (24 * L + 4 * eps / Dq) / L)) + 2
    N = per_iteration * max(2.0, math.sqrt(Dq * L / eps))
    N *= (K + 1) * max(math.log(C), 0.0) + K + 1 + 2 * K * math.log(K + 1)
    return Bounds(K=K, N=N, C=C, alpha=alpha, delta=delta)


@dataclasses.dataclass(frozen=True)
class StochasticBounds:
    """Theorem `thm:minmax_stoch`: K subproblems of T steps, each of two partial gradients."""

    K: float
    T: float

    @property
    def N(self) -> float:
        return 2 * self.K * self.T

    def __str__(self) -> str:
        return (
            f"{self.K:.3g} outer iterations of {self.T:.3g} steps, {self.N:.3g} gradients of one "
            "minibatch each"
        )


@dataclasses.dataclass(frozen=True)
class Prediction:
    """The worst case of a run, before it is run: the constants it rests on, and the bounds."""

    constants: dict[str, float]
    bounds: Bounds | StochasticBounds

    def __str__(self) -> str:
        rows = [f"{name:<18} {value:.6g}" for name, value in self.constants.items()]
        return "\n".join([*rows, str(self.bounds)])


def predict(
    problem: Form,
    start: Point,
    tolerance: float = 1e-2,
    solver: PenaltyMethod | ProximalPoint | StochasticProximalPoint | None = None,
) -> Prediction:
    """The theorem's bounds for `PenaltyMethod` (bilevel) or `ProximalPoint` (minimax) on a problem.

    With the constants that the solver would take, on bounded domains. The function's range is
    bounded through smoothness and diameter, so these are upper bounds on the paper's K and N. The
    search for a start with a small gap is not counted. For a constrained problem these are the
    bounds of `thm:constrained`, with the multiplier bounds that a run would begin with. With a
    source of minibatches they are the K and T of `thm:minmax_stoch`, which `PenaltyMethod()` takes
    (`StochasticProximalPoint()` for a minimax problem), not `solve` by default.
    """
    require_form(problem)
    problem = up_to_date(problem)
    start = validate(problem.reference(), start)
    require_precision(tolerance, trees.dtype_of(start))
    reformulation = registered(problem, "reformulation")
    if reformulation is not None:
        seen = reformulation.of(problem, start)
        problem, start = seen.problem(problem), seen.point(start)
    for name, term, block in problem.terms(start):
        if name in problem.blocks:
            require_bounded(term, block, name, "The theorem")
    method: Any = _method(problem) if solver is None else solver
    return _predicted(method.prepare(problem, start, float(tolerance)), problem, start)


def _method(problem: Form) -> Any:
    """The paper's method for a form."""
    stochastic = StochasticProximalPoint if problem.sampled else ProximalPoint
    methods = {BilevelProblem: PenaltyMethod, MinimaxProblem: stochastic}
    for form in type(problem).__mro__:
        if form in methods:
            return methods[form]()
    raise TypeError(f"the paper has no bounds for a {type(problem).__name__}")


def _predicted(prepared: Any, problem: Any, start: Point) -> Prediction:
    """What the theorem of a prepared method says."""
    own = {"rho": float(prepared.rho)} if isinstance(prepared, PenaltyMethod) else {}
    outer = prepared.outer if own else prepared
    if isinstance(outer, StochasticProximalPoint):
        return _stochastic(outer, own)
    if not isinstance(outer, ProximalPoint):
        raise TypeError(f"the paper has no bounds for {type(prepared).__name__}")
    sizes: Any = _penalty if own else _minimax
    constants, Dp, Dq, descent, below = sizes(prepared, problem, start)
    bounds = minimax_bounds(
        epsilon=float(outer.tolerance),
        inner_tolerance=float(outer.inner_tolerance),
        smoothness=float(outer.smoothness),
        x_diameter=Dp,
        y_diameter=max(Dq, 1e-8),  # a domain of one point
        descent=descent,
        range_below=below,
    )
    return Prediction(constants, bounds)


def _stochastic(outer: StochasticProximalPoint, constants: dict[str, float]) -> Prediction:
    names = ("smoothness", "deviation", "inner_tolerance", "x_weight", "y_weight")
    constants |= {name: float(getattr(outer, name)) for name in names}
    constants |= {name: float(getattr(outer.inner, name)) for name in ("tau", "sigma", "theta")}
    # A count at the end of what integers hold here stands for any larger one.
    times = [
        math.inf if count >= jnp.iinfo(count.dtype).max // 2 else float(count)
        for count in (outer.iterations, outer.inner.iterations)
    ]
    return Prediction(constants, StochasticBounds(*times))


# The constants, the two diameters, the descent and the range below of a method's theorem.
Sizes = tuple[dict[str, float], float, float, float, float]


def _minimax(prepared: ProximalPoint, problem: MinimaxProblem, start: Point) -> Sizes:
    L = float(prepared.smoothness)
    Dp, Dq = float(problem.x.diameter(start.x)), float(problem.y.diameter(start.y))
    low, high = saddle_range(problem, start, L, math.hypot(Dp, Dq))
    constants = {"smoothness": L, "x_diameter": Dp, "y_diameter": Dq}
    return constants, Dp, Dq, high - low, high - low


def _penalty(prepared: PenaltyMethod, problem: BilevelProblem, start: Point) -> Sizes:
    rho, gap, L = float(prepared.rho), float(prepared.start_gap), float(prepared.smoothness)
    x, y = penalty_blocks(start)
    penalised = penalty(problem, rho)
    D1, D2 = float(penalised.x.diameter(x)), float(penalised.y.diameter(y))
    # max f(x⁰, ·) − f_low; on top comes ρ times the start's gap, which is 1 in the paper.
    f_low, f_high = upper_range(problem, start, math.hypot(D1, D2))
    # H_low is over z1 and z2 too, where the penalty can be far below f_low (the paper's C has f_low
    # there; it stands inside a logarithm).
    H_low, _ = saddle_range(penalised, Point(x=x, y=y), L, math.hypot(D1, D2))
    top = f_high + rho * gap
    constants = {f"{f}_smoothness": smoothness_of(problem, start, f) for f in ("upper", "lower")}
    constants |= {"rho": rho, "smoothness": L, "inner_tolerance": float(prepared.inner_tolerance)}
    constants |= {"D1": D1, "D2": D2, "f_low": f_low}
    return constants, D1, D2, top - f_low, top - H_low
