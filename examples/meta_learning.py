"""Learn from old tasks how to learn a new one: `eq:DRO_meta_tuning`, with one model a task.

Twelve linear regressions have parameters around one common vector, and six rows each: too few for
five features. The meta-parameter w, the price η of uneven weights and λ, which holds a task's
parameters near w, are set so that the worst half of each task's validation rows does well. The
answer is judged in two ways: w is near the common vector, and for every old task the lower level at
(w, η, λ) is solved anew by SciPy. Then a new task is learnt from six rows.

python examples/meta_learning.py
"""

from __future__ import annotations

import jax
import numpy as np
from scipy import optimize

import bilevax as bx

TASKS, FEATURES, ROWS, NOISE = 12, 5, 6, 0.5
COMMON = np.array([1.0, -2.0, 0.5, 0.0, 3.0])


def task(draw: np.random.Generator, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows of a regression of its own."""
    own = COMMON + 0.2 * draw.standard_normal(FEATURES)
    x = draw.standard_normal((rows, FEATURES))
    return x, x @ own + NOISE * draw.standard_normal(rows)


def fitted(x1: dict, x: np.ndarray, b: np.ndarray) -> np.ndarray:
    """min over y, max over q of Σ qᵢ·ℓᵢ(y) − (η/2)‖q − 1/n‖² + (λ/2)‖y − w‖²"""
    w, eta, lam = (np.asarray(x1[name]) for name in ("w", "eta", "lam"))
    n = len(b)

    def risk(y: np.ndarray) -> tuple[float, np.ndarray]:
        off = x @ y - b
        losses = off**2 / 2
        # q = max(1/n + (ℓ − ν)/η, 0), with ν such that Σq = 1.
        excess = lambda v: np.maximum(1 / n + (losses - v) / eta, 0).sum() - 1
        level = optimize.brentq(excess, losses.min() - 1, losses.max() + eta, xtol=1e-15)
        q = np.maximum(1 / n + (losses - level) / eta, 0)
        value = q @ losses - eta / 2 * np.sum((q - 1 / n) ** 2) + lam / 2 * np.sum((y - w) ** 2)
        return value, x.T @ (q * off) + lam * (y - w)

    return optimize.minimize(risk, w, jac=True, tol=1e-10).x


def main() -> dict[str, float]:
    draw = np.random.default_rng(0)
    tasks = []
    for _ in range(TASKS):
        x, b = task(draw, 2 * ROWS)
        tasks.append(((x[:ROWS], b[:ROWS]), (x[ROWS:], b[ROWS:])))
    problem, start = bx.problems.meta_learning(tasks, intercept=False, most_eta=100.0)
    solution = bx.solve(problem, start, tolerance=1e-4)
    print(solution.status, solution.certificate, sep="\n")

    x1 = solution.point.x1
    off = np.abs(np.array([fitted(x1, *train) for train, _ in tasks]) - solution.point.z1).max()
    print(f"η = {float(x1['eta']):.3g}, λ = {float(x1['lam']):.3g}, w = {np.round(x1['w'], 2)}")
    x, b = task(draw, 200)
    known = lambda y: float(np.mean((x[ROWS:] @ y - b[ROWS:]) ** 2))
    adapted = known(fitted(x1, x[:ROWS], b[:ROWS]))
    alone = known(np.linalg.lstsq(x[:ROWS], b[:ROWS])[0])
    print(f"a new task from {ROWS} rows: mean square {adapted:.3f}, by itself {alone:.3f}")
    assert solution.certified
    assert off < 1e-4
    assert np.abs(np.asarray(x1["w"]) - COMMON).max() < 0.5
    assert adapted < alone
    return {"off": float(off), "adapted": adapted, "alone": alone}


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    main()
