"""Tune how much a robust model may trust its training rows: `eq:DRO_tuning`, exactly as stated.

Below, an adversary weighs the training rows, by any point of the simplex, at the price
(η/2)‖y2 − 1/n‖² of weights that are not even, and a logistic model answers. Above, η ≥ 0 is set so
that the mean loss over the worst half of the validation rows is least. There is no other
regulariser. The answer is compared with a search over η by SciPy alone.

python examples/tail_tuning.py
"""

from __future__ import annotations

import jax
import numpy as np
from scipy import optimize, special
from sklearn.datasets import load_breast_cancer

import bilevax as bx

SHARE = 0.5


def rows() -> tuple[np.ndarray, np.ndarray]:
    """Forty rows and two features, which no line separates."""
    data = load_breast_cancer()
    chosen = np.random.default_rng(3).permutation(len(data.data))[:40]
    x = data.data[chosen][:, :2]
    return (x - x.mean(0)) / x.std(0), 2.0 * data.target[chosen] - 1


def fitted(eta: float, x: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The lower level's model: min over w, max over q of Σ qᵢ·ℓᵢ(w) − (η/2)‖q − 1/n‖²."""
    n = len(b)

    def risk(w: np.ndarray) -> tuple[float, np.ndarray]:
        margin = b * (x @ w[:-1] + w[-1])
        losses = np.logaddexp(0, -margin)
        # q = max(1/n + (ℓ − ν)/η, 0), with ν such that Σq = 1.
        excess = lambda v: np.maximum(1 / n + (losses - v) / eta, 0).sum() - 1
        level = optimize.brentq(excess, losses.min() - 1, losses.max() + eta, xtol=1e-15)
        q = np.maximum(1 / n + (losses - level) / eta, 0)
        pull = -q * b * special.expit(-margin)
        value = q @ losses - eta / 2 * np.sum((q - 1 / n) ** 2)
        return value, np.append(x.T @ pull, pull.sum())

    return optimize.minimize(risk, np.zeros(x.shape[1] + 1), jac=True, tol=1e-9).x


def tail(w: np.ndarray, x: np.ndarray, b: np.ndarray) -> float:
    """The mean loss over the worst rows."""
    losses = np.logaddexp(0, -b * (x @ w[:-1] + w[-1]))
    return float(np.sort(losses)[::-1][: round(SHARE * len(b))].mean())


def main() -> dict[str, float]:
    x, b = rows()
    train, validation = (x[:20], b[:20]), (x[20:], b[20:])
    problem, start = bx.problems.tail_tuning(train, validation, share=SHARE)
    solution = bx.solve(problem, start)
    print(solution.status, solution.certificate, sep="\n")

    objective = lambda log_eta: tail(fitted(np.exp(log_eta), *train), *validation)
    grid = np.linspace(np.log(0.1), np.log(1e4), 30)
    best = grid[np.argmin([objective(v) for v in grid])]
    step = grid[1] - grid[0]
    known = optimize.minimize_scalar(objective, bounds=(best - step, best + step))
    found = objective(np.log(float(solution.point.x1)))
    print(f"η = {float(solution.point.x1):.4g}, tail risk {found:.6f}")
    print(f"by search: η = {np.exp(known.x):.4g}, tail risk {known.fun:.6f}")
    assert solution.certified
    assert found <= known.fun + 1e-5
    return {"eta": float(solution.point.x1), "risk": found, "known": float(known.fun)}


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    main()
