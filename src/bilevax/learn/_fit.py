"""Fitting: the lower level alone, or both levels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from sklearn.exceptions import ConvergenceWarning

from bilevax.arguments import warn
from bilevax.learn._certificate import Judged, judge, saddle_gap
from bilevax.learn._newton import Lower, Preconditioner, minimise
from bilevax.learn._risk import Risk
from bilevax.learn._rows import Rows
from bilevax.learn._tuning import Levels, Step, Tuned, Tuner

#: The tuning aims at this share of the tolerance, and smooths the upper level by as much.
AIM = 1e-2


@dataclass(frozen=True)
class Fitted:
    """The lower level's saddle point, and how near it is."""

    at: Lower
    gap: float
    steps: int


def fit_lower(
    rows: Rows, risk: Risk, eta: float, l2: float, tolerance: float, most: int
) -> Fitted:
    """Solve the lower level to a certified saddle gap."""
    kept = Preconditioner()
    at = minimise(
        lambda w: Lower(rows, risk, eta, l2, w),
        np.zeros(rows.shape),
        kept,
        lambda at: saddle_gap(at) <= tolerance,
        most,
    )
    gap = saddle_gap(at)
    if not gap <= tolerance:
        warn(
            f"the saddle gap is certified at {gap:.2g} only, not at tol={tolerance:g}, after "
            f"{kept.steps} Newton steps; scale the features, or give a larger l2, tol or max_iter",
            ConvergenceWarning,
        )
    return Fitted(at, gap, kept.steps)


@dataclass(frozen=True)
class TunedFit:
    """The answer of the bilevel problem."""

    tuned: Tuned
    judged: Judged
    history: list[Step]
    steps: int


def fit_levels(levels: Levels, tolerance: float, report: Callable[[Step], None]) -> TunedFit:
    """Tune (η, λ), and certify the answer."""
    adversary = levels.held_risk.adversary
    # μ changes the gain of x2 by μ·(x2 − b)/c, at most 1/c·(the largest distance) long.
    farthest = np.linalg.norm(np.maximum(adversary.cap - adversary.even, adversary.even) / adversary.price)
    tuner = Tuner(levels, AIM * tolerance, AIM * tolerance / float(farthest) * 25, report)
    tuned = tuner.run()
    judged = judge(levels, tuned, tuner.kept, tolerance)
    if not judged.certificate.certified(tolerance):
        warn(
            f"ε-KKT is certified at ε = {judged.certificate.epsilon:.2g} only, not at "
            f"tol={tolerance:g}; scale the features, or give a larger tol",
            ConvergenceWarning,
        )
    return TunedFit(tuned, judged, tuner.history, tuner.kept.steps)
