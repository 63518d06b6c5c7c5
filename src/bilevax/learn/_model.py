"""The model that a step of the tuning minimises: a maximum of planes, and a parabola.

min over d in a box of  φ_μ(V + J·d) + ⟨∇R, d⟩ + ½dᵀBd,  smooth for μ > 0, and convex
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from scipy import linalg

from bilevax.learn._risk import Weighing

#: Newton steps at the most, and the shortest one that is tried.
MOST_STEPS, SHORTEST = 50, 1e-9
#: So many times more variables than items are many.
MANY_VARIABLES = 10


def box_newton(
    weigh: Callable[[np.ndarray], Weighing],
    jacobian: np.ndarray,
    slope: np.ndarray,
    curvature: np.ndarray,
    low: np.ndarray,
    high: np.ndarray,
    d: np.ndarray,
) -> tuple[np.ndarray, float, np.ndarray]:
    """The minimiser, the minimum, and the weights of φ_μ there; `weigh` gives φ_μ(V + J·d).

    Newton's method moves the variables that no bound holds back. A step is bent at the bounds, or,
    where this leads nowhere, ends at the first of them.
    """
    model = lambda weighing, d: weighing.value + float(slope @ d + d @ curvature @ d / 2)
    newton = Newton(jacobian, curvature)
    here = weigh(d)
    value = model(here, d)

    def along(step: np.ndarray, length: float) -> tuple[np.ndarray, Weighing, float] | None:
        """The first point on the way, of halving lengths, at which the model is lower."""
        while length > SHORTEST:
            trial = np.clip(d + length * step, low, high)
            there = weigh(trial)
            lower = model(there, trial)
            if lower < value and lower <= value + 1e-4 * float(g @ (trial - d)):
                return trial, there, lower
            length /= 2
        return None

    for _ in range(MOST_STEPS):
        g = jacobian.T @ here.weights + slope + curvature @ d
        free = ~(((d <= low) & (g > 0)) | ((d >= high) & (g < 0)))
        if not free.any() or np.abs(g[free]).max() <= 1e-10:
            break
        step = lambda free, g=g, here=here: newton.step(here, g, free)
        found = along(step(free), 1.0) or along(*_inner_step(step, free, d, low, high))
        if found is None:
            break
        d, here, value = found
    return d, value, here.weights


@dataclass
class Newton:
    """Newton steps of the model, whose Hessian is B + Jᵀ·C·J with C the change of the weights.

    Where there are far more variables than items, B is factored, once for each set of variables
    that move, and the rest is eliminated: with Z = B⁻¹Jᵀ, (B + JᵀCJ)⁻¹g = y − Z(1 + CJZ)⁻¹CJy,
    y = B⁻¹g.
    """

    jacobian: np.ndarray
    curvature: np.ndarray
    factors: dict[bytes, tuple[Any, np.ndarray]] = field(default_factory=dict)

    def step(self, here: Weighing, g: np.ndarray, free: np.ndarray) -> np.ndarray:
        """The step of the variables that are free."""
        step, j = np.zeros(len(g)), self.jacobian[:, free]
        few = len(j) * MANY_VARIABLES > len(g)
        if few:
            h = self.curvature[np.ix_(free, free)] + j.T @ here.change(j)
            step[free] = -np.linalg.solve(h, g[free])
            return step
        key = free.tobytes()
        if key not in self.factors:
            factor = linalg.cho_factor(self.curvature[np.ix_(free, free)])
            self.factors[key] = factor, linalg.cho_solve(factor, j.T)
        factor, z = self.factors[key]
        y = linalg.cho_solve(factor, g[free])
        inner = np.eye(len(j)) + here.change(j @ z)
        step[free] = z @ np.linalg.solve(inner, here.change(j @ y)) - y
        return step


def _inner_step(
    newton: Callable[[np.ndarray], np.ndarray],
    free: np.ndarray,
    d: np.ndarray,
    low: np.ndarray,
    high: np.ndarray,
) -> tuple[np.ndarray, float]:
    """A step of variables that are not at once at a bound, and how far it stays within the box."""
    while True:
        step = newton(free)
        room = np.where(step > 0, high - d, d - low)
        stuck = free & (step != 0) & (room <= SHORTEST * np.abs(step))
        if not stuck.any() or not (free & ~stuck).any():
            break
        free = free & ~stuck
    moving = step != 0
    return step, float(min(1.0, (room[moving] / np.abs(step[moving])).min(initial=1.0)))


def bfgs(b: np.ndarray, s: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The BFGS update, with Powell's damping: B stays positive definite where Φ is not convex."""
    bs = b @ s
    size, seen = float(s @ bs), float(s @ y)
    share = 1.0 if seen >= 0.2 * size else 0.8 * size / (size - seen)
    r = share * y + (1 - share) * bs
    return b - np.outer(bs, bs) / size + np.outer(r, r) / float(s @ r)
