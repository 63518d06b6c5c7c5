"""Many rows: begin with a sample of them.

A sample with every group in it finds prices and a model that are right to a few digits at a
fraction of the cost. From there Newton's method on all rows needs a few steps instead of dozens.
SAPD on minibatches of all rows can come in between; it was slower at every size measured, because
few passes over all rows are left to save (benchmarks/README.md).
"""

from __future__ import annotations

from typing import Literal

import jax.numpy as jnp
import numpy as np

from bilevax.data import Stratified
from bilevax.driver.entry import solve
from bilevax.learn._newton import Lower
from bilevax.learn._problem import as_arrays, as_block, minimax_problem
from bilevax.learn._risk import Risk, group_risk, tail_risk
from bilevax.learn._rows import Rows
from bilevax.learn._tuning import Levels
from bilevax.problems import Point
from bilevax.solvers import SAPD

Solver = Literal["newton", "sampled", "minibatch"]

#: Rows of a sample: at least, and for each parameter. One is taken of so many times as many.
SAMPLE_ROWS, ROWS_A_PARAMETER, MANY_TIMES = 20_000, 50, 4
#: SAPD: its batch, its steps, and the step after which steps shrink.
BATCH, STEPS, DECAY = 256, 5000, 1000


def chosen(solver: str, rows: Rows, risk: Risk) -> Solver:
    """The solver, by the number of rows where it is "auto"."""
    match solver:
        case "auto":
            return "sampled" if len(rows) >= MANY_TIMES * sample_rows(rows) else "newton"
        case "minibatch" if risk.group is None:
            raise ValueError(
                "solver: tail risk has one weight per row, all of which change at every step, so "
                "that minibatches save nothing; use 'auto'"
            )
        case "newton" | "sampled" | "minibatch":
            return solver
        case _:
            raise ValueError(
                f"solver must be 'auto', 'newton', 'sampled' or 'minibatch', not {solver!r}"
            )


def sample_rows(rows: Rows) -> int:
    """How many rows a sample has, of those there are."""
    parameters = rows.shape[0] * rows.shape[1]
    return min(max(SAMPLE_ROWS, ROWS_A_PARAMETER * parameters), len(rows))


def sampled(rows: Rows, risk: Risk) -> tuple[Rows, Risk]:
    """Some rows of every group, the same ones in every run."""
    count = sample_rows(rows)
    draw = np.random.default_rng(0)
    if risk.group is None:
        kept = np.sort(draw.permutation(len(rows))[:count])
        worst = float(risk.adversary.even[0] / risk.adversary.cap[0])
        return rows.taken(kept), tail_risk(worst, risk.share[kept])
    each = -(-count // risk.items)
    parts = []
    for g in range(risk.items):
        members = np.flatnonzero(risk.group == g)
        parts.append(members if len(members) <= each else draw.permutation(members)[:each])
    kept = np.sort(np.concatenate(parts))
    return rows.taken(kept), group_risk(risk.group[kept], risk.items, risk.share[kept])


def sampled_levels(levels: Levels) -> Levels:
    """Both levels on samples."""
    train, held = sampled(levels.train, levels.risk), sampled(levels.held, levels.held_risk)
    return Levels(*train, *held, levels.low, levels.high)


def by_minibatches(rows: Rows, risk: Risk, start: Lower) -> np.ndarray:
    """The lower level by SAPD on minibatches of all rows, from its solution on a sample."""
    source = Stratified(as_arrays(rows, risk), groups=risk.group, batch=max(BATCH, risk.items))
    problem = minimax_problem(rows, risk, start.eta, start.l2, source)
    step = 0.5 / largest_curvature(start)
    solver = SAPD(iterations=STEPS, tau=step, sigma=step, theta=1.0, decay=DECAY)
    weights = jnp.asarray(start.weighing.weights)
    begin = Point(x=as_block(rows, start.w), y=weights)
    solution = solve(problem, begin, solver=solver, tolerance=1e-3, max_gradients=2 * STEPS)
    x = solution.point.x
    w = np.asarray(x["coef"], np.float64)
    if rows.intercept:
        w = np.column_stack([w, np.asarray(x["intercept"], np.float64)])
    return w


def largest_curvature(at: Lower) -> float:
    """About the largest eigenvalue of the lower level's Hessian in w, or of its coupling with q."""
    v = np.random.default_rng(0).standard_normal(at.w.shape)
    size = 1.0
    for _ in range(20):
        v = at.curve(v / np.linalg.norm(v))
        size = float(np.linalg.norm(v))
    return size
