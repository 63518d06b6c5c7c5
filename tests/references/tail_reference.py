"""`eq:DRO_tuning` of a linear model by NumPy and SciPy alone, for tests to compare with."""

import numpy as np
from scipy import optimize, special


def on_simplex(v):
    """The nearest point of {q ≥ 0, Σq = 1}, by sorting."""
    falling = np.sort(v)[::-1]
    level = (np.cumsum(falling) - 1) / np.arange(1, len(v) + 1)
    return np.maximum(v - level[np.flatnonzero(falling > level)[-1]], 0)


def on_capped(v, cap):
    """The nearest point of {0 ≤ q ≤ cap, Σq = 1}."""
    if cap >= 1:
        return on_simplex(v)
    excess = lambda level: np.clip(v - level, 0, cap).sum() - 1
    level = optimize.brentq(excess, v.min() - 1, v.max(), xtol=1e-15)
    return np.clip(v - level, 0, cap)


def tail_mean(losses, cap):
    """max ⟨q, ℓ⟩ over 0 ≤ q ≤ cap with Σq = 1: the largest losses take their caps first."""
    falling = np.sort(losses)[::-1]
    return float(falling @ np.clip(1 - cap * np.arange(len(losses)), 0, cap))


def squared(w, x, b):
    off = x @ w - b
    return off**2 / 2, off


def logistic(w, x, b):
    margin = b * (x @ w)
    return np.logaddexp(0, -margin), -b * special.expit(-margin)


def lower_solution(eta, x, b, loss, start=None):
    """w that minimises max over q of Σ qᵢ·ℓᵢ(w) − (η/2)‖q − 1/n‖², for η > 0; and q."""
    n = len(b)

    def value_and_slope(w):
        losses, slopes = loss(w, x, b)
        q = on_simplex(1 / n + losses / eta)
        value = q @ losses - eta / 2 * np.sum((q - 1 / n) ** 2)
        return value, x.T @ (q * slopes)

    first = np.zeros(x.shape[1]) if start is None else start
    options = {"gtol": 1e-10, "maxiter": 5000}
    w = optimize.minimize(value_and_slope, first, jac=True, method="BFGS", options=options).x
    return w, on_simplex(1 / n + loss(w, x, b)[0] / eta)


def tuned_objective(eta, train, validation, cap, loss):
    """The tail risk of the validation rows, for the lower level's w at η."""
    w, _ = lower_solution(eta, *train, loss)
    return tail_mean(loss(w, *validation)[0], cap)
