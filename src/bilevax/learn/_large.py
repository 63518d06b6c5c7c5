"""Many rows: begin with a sample of them.

A sample with every group in it finds prices and a model that are right to a few digits at a
fraction of the cost. From there Newton's method on all rows needs a few steps instead of dozens.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from bilevax.learn._risk import Risk, group_risk, tail_risk
from bilevax.learn._rows import Rows
from bilevax.learn._tuning import Levels

Solver = Literal["newton", "sampled"]

#: Rows of a sample: at least, and for each parameter. One is taken of so many times as many.
SAMPLE_ROWS, ROWS_A_PARAMETER, MANY_TIMES = 20_000, 50, 4


def chosen(solver: str, rows: Rows) -> Solver:
    """The solver, by the number of rows where it is "auto"."""
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
