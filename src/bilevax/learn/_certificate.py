"""How good a fitted linear model is, in closed form: the same lines as `bilevax.certify` has.

For the lower level alone, the saddle gap. For the tuned model, ε-KKT of the bilevel problem
(`def:epsilon_KKT`), with the witnesses

    z1, y2  the lower level's saddle point at x1 = (log η, log λ, …),
    y1      the minimiser of ⟨x2, V(y1)⟩ + ρ·F(y1), and z2 the adversary's answer to it,

so that ρ·(∂f~(x1, y1, z2) − ∂f~(x1, z1, y2))/∂x1 is the gradient of the upper level in x1 up to
O(1/ρ). NumPy does it without compiling anything; tests hold it against `bilevax.certify`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from bilevax.certificates import KKTCertificate
from bilevax.certificates.gap import RADIUS
from bilevax.learn._newton import Local, Lower, Penalised, Preconditioner, Weighted, minimise
from bilevax.learn._risk import ROUNDING
from bilevax.learn._tuning import Levels, Tuned

#: Intercepts, which are not penalised, are bounded by this.
INTERCEPT_BOUND = 1e4
#: The penalties tried, until one certifies the tolerance.
RHOS = (1e5, 1e4, 1e3, 1e2)


def saddle_gap(at: Lower) -> float:
    """An upper bound on max f~(w, ·) − min f~(·, q), q the adversary's answer to w.

    f~(·, q) is λ-strongly convex in the coefficients, so it falls from w by at most ‖∇‖²/(2λ); in
    the intercepts it is convex, and falls by at most |∂|·(distance to the end of their range).
    Where λ = 0 it falls by at most ‖∇‖·`radius`, within that radius of w. Where f~ is not smooth
    this is said of a smooth function below it, and the difference at w is added.
    """
    (apart, gradient), slack = at.minorant(), noise(at)
    if at.l2 == 0:
        steep = float(np.linalg.norm(gradient)) + slack
        return float(steep * radius(at) + apart + ROUNDING * abs(at.value))
    penalised = np.linalg.norm(at.rows.penalised * gradient) + slack
    gap = penalised**2 / (2 * at.l2) + apart
    if at.rows.intercept:
        distance = INTERCEPT_BOUND + np.abs(at.w[:, -1])
        if distance.max() > 2 * INTERCEPT_BOUND:  # outside the range that the bound is for
            return np.inf
        gap += float((np.abs(gradient[:, -1]) + slack) @ distance)
    return float(gap + ROUNDING * abs(at.value))


def radius(at: Lower) -> float:
    """How far around w the bound of the gap holds: infinite, unless there is no penalty."""
    return RADIUS * (1 + float(np.linalg.norm(at.w))) if at.l2 == 0 else np.inf


def noise(at: Lower | Weighted) -> float:
    """A bound on the rounding error of a gradient, from the sizes of the terms that it adds up."""
    size = float(at.row_weights @ np.abs(at.losses.slope).sum(axis=1)) * at.rows.widest
    if isinstance(at, Lower):
        size += float(at.l2 * (np.linalg.norm(at.w) + np.linalg.norm(at.centre)))
    return ROUNDING * size


@dataclass(frozen=True)
class Judged:
    """A certificate, and the blocks of the point that it certifies."""

    certificate: KKTCertificate
    y1: np.ndarray
    y2: np.ndarray
    x2: np.ndarray
    z1: np.ndarray
    z2: np.ndarray


def judge(levels: Levels, tuned: Tuned, kept: Preconditioner, tolerance: float) -> Judged:
    """The first certificate that holds at the tolerance, for one ρ of a few; else the best."""
    tried = []
    for rho in RHOS:
        tried.append(_judge(levels, tuned, kept, tolerance, rho))
        if tried[-1].certificate.certified(tolerance):
            break
    return min(tried, key=lambda judged: judged.certificate.epsilon)


def _judge(
    levels: Levels, tuned: Tuned, kept: Preconditioner, tolerance: float, rho: float
) -> Judged:
    x, x2 = tuned.x, tuned.x2
    enough = 1e-2 * tolerance / rho

    def done(at: Local) -> bool:
        return bool(np.linalg.norm(at.gradient) <= enough)

    lower = lambda w: levels.lower(x, w) if tuned.lower.collapsed else levels.lower(x, w).exact
    z = minimise(lower, tuned.lower.w, kept, done)
    weights = levels.held_risk.of_rows(x2)
    y = minimise(
        lambda w: Penalised(lower(w), Weighted(levels.held, weights, w), rho),
        z.w,
        kept,
        done,
    )
    z, y = z.exact, Penalised(y.lower.exact, y.upper, rho)
    adversary, own = z.risk.adversary, levels.own(x)
    y2, z2 = z.weighing.weights, y.lower.weighing.weights
    (rise, rise_size), (fall, fall_size) = y.lower.of_prices(z2), z.of_prices(y2)
    of_x1 = levels.normal(x, own.slope + rho * (rise - fall))
    gain = lambda at: (
        at.item_losses - z.eta * (at.weighing.weights - adversary.even) / adversary.price
    )
    slack_z, slack_y = noise(z), noise(y.lower)
    slack_prices = 2 * ROUNDING * float(np.sum(rise_size + fall_size + own.size / rho))
    stationarity = np.sqrt(
        np.sum(of_x1**2)
        + rho**2 * np.sum(y.gradient**2)
        + (rho * adversary.distance(y2, gain(z))) ** 2
    )
    upper = levels.held_risk.of_items(y.upper.losses.value)
    below = y.lower.value - z.value
    gap = max(below, 0.0) + saddle_gap(z) + ROUNDING * (abs(y.lower.value) + abs(z.value))
    stationarity += rho * (slack_y + slack_prices) + noise(y.upper)
    if z.collapsed or y.lower.collapsed:  # f~ has no gradient there, and ε-KKT is not defined
        stationarity = np.inf
    certificate = KKTCertificate(
        objective=float(upper @ x2) + own.value,
        stationarity=float(stationarity),
        response_x2=levels.held_risk.adversary.distance(x2, upper),
        response_z1=float(rho * (np.linalg.norm(z.gradient) + slack_z)),
        response_z2=float(rho * adversary.distance(z2, gain(y.lower))),
        gap=float(gap),
        gap_below=float(below),
        rho=rho,
        radius=radius(z),
    )
    return Judged(certificate, y.w, y2, x2, z.w, z2)
