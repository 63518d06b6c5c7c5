"""What the tuned classifiers solve, through `bilevax.solve`: is it certified, and how soon?

    python benchmarks/model_problem.py --json benchmarks/results/model_problem.json

The tables of `robust_data.py` at 1,500 training rows, `TunedGroupDROClassifier().problem(…)` with
default settings but for the tolerance. Beside it stands the estimator's own answer. It begins at
starts of its own, so that its worst validation loss may be that of another local minimum.
"""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path
from typing import Any

import jax
import numpy as np

import bilevax as bx
import versions
from bilevax.learn import TunedGroupDROClassifier
from robust_data import Case, cases

TRAIN, TOLERANCE = 1500, 1e-5


def solved(case: Case, seed: int, seconds: float) -> dict[str, Any]:
    parts = case.draw(seed)
    x, y, groups = parts["validation"]
    given = (*parts["train"],)
    held = {"X_val": x, "y_val": y, "groups_val": groups}
    problem, start = TunedGroupDROClassifier().problem(*given, **held)
    found = bx.solve(problem, start, tolerance=TOLERANCE, max_seconds=seconds, progress=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says in `epsilon` how exact it is
        own = TunedGroupDROClassifier().fit(*given, **held)
    return {
        "case": case.name,
        "seed": seed,
        "features": x.shape[1],
        "status": found.status.code,
        "epsilon": found.certificate.epsilon,
        "rho": float(found.point.rho),
        "linear_solves": found.linear_solves,
        "gradients": found.gradients,
        "seconds": found.seconds,
        "compile_seconds": found.compile_seconds,
        "objective": float(found.certificate.objective),
        "log_eta_l2": np.asarray(found.point.x1).tolist(),
        "own_objective": own.history_[-1].worst_loss,
        "own_epsilon": own.certificate_.epsilon,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--max-seconds", type=float, default=60.0)
    parser.add_argument("--json", type=Path, help="write the results there")
    args = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    rows = []
    for case in cases(args.data):
        if case.train != TRAIN:
            continue
        for seed in range(args.seeds):
            rows.append(solved(case, seed, args.max_seconds))
            shown = ("case", "seed", "status", "epsilon", "linear_solves", "seconds", "objective")
            print(*(rows[-1][name] for name in shown), flush=True)
    if args.json:
        versions.write(args.json, {"results": rows})


if __name__ == "__main__":
    main()
