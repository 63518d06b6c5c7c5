"""Fitting: the lower level alone, or both levels."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from sklearn.exceptions import ConvergenceWarning

from bilevax.arguments import warn
from bilevax.learn._certificate import Judged, judge, saddle_gap
from bilevax.learn._large import chosen, sampled, sampled_levels
from bilevax.learn._newton import Lower, Preconditioner, minimise
from bilevax.learn._risk import Risk
from bilevax.learn._rows import Rows
from bilevax.learn._tuning import Levels, Step, Tuned, Tuner

#: The tuning aims at this share of the tolerance.
AIM = 1e-2


@dataclass(frozen=True)
class Fitted:
    """The lower level's saddle point, and how near it is."""

    at: Lower
    gap: float
    steps: int
    solver: str


def fit_lower(
    rows: Rows, risk: Risk, eta: float, l2: float, tolerance: float, most: int, solver: str
) -> Fitted:
    """Solve the lower level to a certified saddle gap."""
    solver = chosen(solver, rows)
    kept = Preconditioner()

    def newton(rows: Rows, risk: Risk, start: np.ndarray) -> Lower:
        return minimise(
            lambda w: Lower(rows, risk, eta, l2, w),
            start,
            kept,
            lambda at: saddle_gap(at) <= tolerance,
            most,
        )

    start = np.zeros(rows.shape)
    if solver == "sampled":
        start = newton(*sampled(rows, risk), start).w
    at = newton(rows, risk, start)
    gap = saddle_gap(at)
    if not gap <= tolerance:
        warn(
            f"the saddle gap is certified at {gap:.2g} only, not at tol={tolerance:g}, after "
            f"{kept.steps} Newton steps; scale the features, or give a larger l2, tol or max_iter",
            ConvergenceWarning,
        )
    return Fitted(at, gap, kept.steps, solver)


@dataclass(frozen=True)
class TunedFit:
    """The answer of the bilevel problem."""

    tuned: Tuned
    judged: Judged
    history: list[Step]
    solver: str


def fit_levels(
    levels: Levels, tolerance: float, solver: str, report: Callable[[int, Step], None]
) -> TunedFit:
    """Tune (η, λ), and certify the answer."""
    solver = chosen(solver, levels.train)
    adversary = levels.held_risk.adversary
    # μ changes what x2 gains by μ·(x2 − b)/c, and so the certificate by as much at the most.
    farthest = np.maximum(adversary.cap - adversary.even, adversary.even) / adversary.price
    smoothing = tolerance / 4 / float(np.linalg.norm(farthest))
    tuner = Tuner(levels, AIM * tolerance, min(smoothing, AIM * tolerance), report)
    if solver == "newton":
        tuned = tuner.run()
    else:
        rough = dataclasses.replace(tuner, levels=sampled_levels(levels)).run()
        tuned = tuner.go_on(rough.x, rough.lower.w)
    judged = judge(levels, tuned, tuner.kept, tolerance)
    if not judged.certificate.certified(tolerance):
        warn(
            f"ε-KKT is certified at ε = {judged.certificate.epsilon:.2g} only, not at "
            f"tol={tolerance:g}; scale the features, or give a larger tol",
            ConvergenceWarning,
        )
    return TunedFit(tuned, judged, tuner.history, solver)
