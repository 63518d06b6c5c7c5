"""The model that a step of the tuning minimises: a maximum of planes, and a parabola.

min over d in a box of  φ_μ(V + J·d) + ⟨∇R, d⟩ + ½dᵀBd,  smooth for μ > 0, and convex
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from bilevax.learn._risk import Weighing

#: Newton steps at the most, and the shortest one that is tried.
MOST_STEPS, SHORTEST = 50, 1e-9


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
        h = curvature + jacobian.T @ here.change(jacobian)
        found = along(_newton_step(h, g, free), 1.0) or along(
            *_inner_step(h, g, free, d, low, high)
        )
        if found is None:
            break
        d, here, value = found
    return d, value, here.weights


def _newton_step(h: np.ndarray, g: np.ndarray, free: np.ndarray) -> np.ndarray:
    step = np.zeros(len(g))
    step[free] = -np.linalg.solve(h[np.ix_(free, free)], g[free])
    return step


def _inner_step(
    h: np.ndarray, g: np.ndarray, free: np.ndarray, d: np.ndarray, low: np.ndarray, high: np.ndarray
) -> tuple[np.ndarray, float]:
    """A step of variables that are not at once at a bound, and how far it stays within the box."""
    while True:
        step = _newton_step(h, g, free)
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
