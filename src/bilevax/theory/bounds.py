"""The worst-case bounds of the theorems, as formulas of their constants."""

from __future__ import annotations

import dataclasses
import math


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


def minimax_level(
    *, epsilon: float, inner_tolerance: float, smoothness: float, y_diameter: float, top: float
) -> float:
    """The bound `eq:HxK_bound` on max_y H(x^K, y), where `top` bounds max_y H(x⁰, y).

    top + ε·D_q/4 + 2ε̂²·(1/L + 4·D_q²·L/ε²). It holds for every iterate, not only for the last.
    """
    L, Dq, eps, hat = smoothness, y_diameter, epsilon, inner_tolerance
    return top + eps * Dq / 4 + 2 * hat**2 * (1 / L + 4 * Dq**2 * L / eps**2)


def stochastic_distance(
    *, epsilon: float, inner_tolerance: float, smoothness: float, y_diameter: float
) -> float:
    """The bound `eq:distance_stoc_h` on E‖(x, y) − (x̂, ŷ)‖: ε̂/√min(L, ε/(2·D_q))."""
    return inner_tolerance / math.sqrt(min(smoothness, epsilon / (2 * y_diameter)))


def stochastic_stationarity(
    *,
    epsilon: float,
    inner_tolerance: float,
    smoothness: float,
    y_diameter: float,
    descent: float,
    iterations: float,
) -> float:
    """How stationary the nearby (x̂, ŷ) of `thm:sapd+_thm` is in expectation.

    max(2·√(L·((descent + ε·D_q/4)/K + ε̂²)), ε/2), which is max(√(8L)·ε̂, ε/2) for the theorem's
    K; `descent` bounds max_y H(x⁰, y) − H*. The paper has √(2L)·ε̂: the gradient of L·‖x − x^k‖²
    is 2L·(x − x^k), where its proof has half of it.
    """
    L, hat = smoothness, inner_tolerance
    start = (descent + epsilon * y_diameter / 4) / iterations
    return max(2 * math.sqrt(L * (start + hat**2)), epsilon / 2)


def stochastic_level(
    *, epsilon: float, inner_tolerance: float, y_diameter: float, top: float, iterations: float
) -> float:
    """A bound on E[max_y H(x̂, y)] at the nearby point, where `top` bounds max_y H(x⁰, y).

    top + (K − 1)·ε̂² + ε·D_q/4, from the proof of `eq:bound_phik`. With the theorem's K it is at
    most 2·top − H* + ε·D_q/2, which the paper has.
    """
    return top + (iterations - 1) * inner_tolerance**2 + epsilon * y_diameter / 4


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
