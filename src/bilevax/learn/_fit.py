"""Fitting the lower level alone, or both levels.

Where there are many rows, a fit begins with a sample of them that has rows of every group. It finds
η, λ and a model that are right to a few digits, at a fraction of the cost. From there Newton's
method on all rows needs a few steps instead of dozens.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from sklearn.exceptions import ConvergenceWarning

from bilevax.arguments import warn
from bilevax.learn._certificate import Judged, judge, saddle_gap
from bilevax.learn._newton import Lower, Preconditioner, minimise
from bilevax.learn._risk import Risk, group_risk, tail_risk
from bilevax.learn._rows import Rows
from bilevax.learn._tuning import Levels, Step, Tuned, Tuner

#: The tuning aims at this share of the tolerance.
AIM = 1e-2
#: The rows of a sample: at least this many, and this many for each parameter.
SAMPLE_ROWS, ROWS_A_PARAMETER = 20_000, 50
#: A sample is taken where there are this many times as many rows.
MANY_TIMES = 4


def fit_lower(
    lower: Callable[[Rows, Risk, np.ndarray], Lower],
    rows: Rows,
    risk: Risk,
    tolerance: float,
    most: int,
    solver: str,
) -> tuple[Lower, float, int, str]:
    """The lower level's saddle point, a bound on its gap, the Newton steps, and the solver.

    `lower` is the lower level of some rows and their risk, at given parameters.
    """
    solver = chosen(solver, rows)
    kept = Preconditioner()

    def newton(rows: Rows, risk: Risk, start: np.ndarray) -> Lower:
        return minimise(
            lambda w: lower(rows, risk, w),
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
    warn_of_separation(at)
    warn_of_collapse(at)
    return at, gap, kept.steps, solver


def warn_of_separation(at: Lower) -> None:
    """Without a penalty, a model that is right on every row is better the longer it is."""
    if at.l2 == 0 and at.rows.separated(at.w):
        warn(
            f"the model is right on all {len(at.rows)} training rows: with l2=0 the loss falls "
            "towards 0 without end as coef_ grows, and no model is the solution; give l2 > 0",
            ConvergenceWarning,
        )


def warn_of_collapse(at: Lower) -> None:
    """Name a solution at which the lower level is not smooth."""
    if at.collapsed:
        warn(at.collapsed, ConvergenceWarning)


@dataclass(frozen=True)
class TunedFit:
    """The solution of the bilevel problem, its certificate, and how it was found."""

    tuned: Tuned
    judged: Judged
    history: list[Step]
    solver: str


def fit_levels(
    levels: Levels, tolerance: float, solver: str, report: Callable[[int, Step], None]
) -> TunedFit:
    """Tune x = (η, λ, …), and certify the answer."""
    solver = chosen(solver, levels.train)
    adversary = levels.held_risk.adversary
    # μ changes what x2 gains by μ·(x2 − b)/c, and so the certificate by as much at the most.
    farthest = np.maximum(adversary.cap - adversary.even, adversary.even) / adversary.price
    smoothing = tolerance / 4 / float(np.linalg.norm(farthest))
    tuner = Tuner(levels, AIM * tolerance, min(smoothing, AIM * tolerance), report)
    if solver == "newton":
        tuned = tuner.run()
    else:
        few = levels.fewer(lambda rows, risk: sampled(rows, risk))
        rough = dataclasses.replace(tuner, levels=few).run()
        tuned = tuner.go_on(rough.x, rough.lower.w)
    judged = judge(levels, tuned, tuner.kept, tolerance)
    warn_of_separation(tuned.lower)
    warn_of_collapse(tuned.lower)
    tuner.warn_of_runaway(tuned)
    if not judged.certificate.certified(tolerance):
        warn(
            f"ε-KKT is certified at ε = {judged.certificate.epsilon:.2g} only, not at "
            f"tol={tolerance:g}; scale the features, or give a larger tol",
            ConvergenceWarning,
        )
    return TunedFit(tuned, judged, tuner.history, solver)


def chosen(solver: str, rows: Rows) -> str:
    """The solver of that name; "auto" chooses by the number of rows."""
    match solver:
        case "auto":
            return "sampled" if len(rows) >= MANY_TIMES * sample_rows(rows) else "newton"
        case "newton" | "sampled":
            return solver
        case "minibatch":
            raise ValueError(
                "solver='minibatch' was removed, because it was slower for every number of rows; "
                "use 'auto', or 'sampled' to begin with a sample of the rows"
            )
        case _:
            raise ValueError(f"solver must be 'auto', 'newton' or 'sampled', not {solver!r}")


def sample_rows(rows: Rows) -> int:
    """How many of the rows a sample has."""
    return min(max(SAMPLE_ROWS, ROWS_A_PARAMETER * math.prod(rows.shape)), len(rows))


def sampled(rows: Rows, risk: Risk) -> tuple[Rows, Risk]:
    """Some rows of every group, the same ones in every run."""
    draw = np.random.default_rng(0)
    group = np.zeros(len(rows), int) if risk.group is None else risk.group
    groups = 1 if risk.group is None else risk.items
    each = -(-sample_rows(rows) // groups)
    members = (np.flatnonzero(group == g) for g in range(groups))
    parts = [own if len(own) <= each else draw.permutation(own)[:each] for own in members]
    kept = np.sort(np.concatenate(parts))
    if risk.group is not None:
        return rows.taken(kept), group_risk(group[kept], groups, risk.share[kept])
    return rows.taken(kept), tail_risk(risk.worst, risk.share[kept])
