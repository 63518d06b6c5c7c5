"""`eq:DRO_meta_tuning` of 20 tasks with 50 features by `bilevax.solve`: certified, and how soon?

    python benchmarks/meta_problem.py --json benchmarks/results/meta_problem.json

Each task has 30 to 60 training and as many validation rows, standard normal features, and
parameters around those of all tasks; labels are their scores with noise of 0.3, or the signs. Laws:
"near" tasks (0.3 apart), "far" ones (1.5), and "heavy" noise, of Student's t with two degrees of
freedom. Default settings but for the tolerance. Beside it stands `RobustMetaLearner`'s own way to
solve the equation, in NumPy, which begins at other places; it has l2 = 0 here, as the equation has,
and bounds of η.
"""

from __future__ import annotations

import argparse
import os
import time
import warnings
from pathlib import Path
from typing import Any

import jax
import numpy as np

import bilevax as bx
import versions
from bilevax.learn import RobustMetaLearner, stack_tasks

TASKS, FEATURES, ROWS, NOISE = 20, 50, 60, 0.3
APART = {"near": 0.3, "far": 1.5, "heavy": 0.3}
LAMBDA, ETA = (0.01, 10.0), (1e-6, 1e6)


def drawn(law: str, loss: str, seed: int) -> list[tuple]:
    """Pairs (train, validation) of pairs; the first task is full, so that programs are shared."""
    draw = np.random.default_rng(seed)
    root = FEATURES**0.5
    shared, tasks = draw.standard_normal(FEATURES) / root, []
    for k in range(TASKS):
        n, m = (ROWS if k == 0 else int(draw.integers(ROWS // 2, ROWS)) for _ in range(2))
        own = shared + APART[law] * draw.standard_normal(FEATURES) / root
        x = draw.standard_normal((n + m, FEATURES))
        noise = draw.standard_t(2, n + m) if law == "heavy" else draw.standard_normal(n + m)
        score = x @ own + NOISE * noise
        y = score if loss == "squared" else (score > 0).astype(float)
        tasks.append(((x[:n], y[:n]), (x[n:], y[n:])))
    return tasks


def solved(law: str, loss: str, seed: int, tolerance: float, seconds: float) -> dict[str, Any]:
    problem, start = bx.problems.meta_learning(drawn(law, loss, seed), loss=loss, lam=LAMBDA)
    began, processor = time.perf_counter(), time.process_time()
    found = bx.solve(problem, start, tolerance=tolerance, max_seconds=seconds, progress=False)
    return {
        "law": law,
        "loss": loss,
        "seed": seed,
        "status": found.status.code,
        "epsilon": found.certificate.epsilon,
        "rho": float(found.point.rho),
        "linear_solves": found.linear_solves,
        "gradients": found.gradients,
        "seconds": found.seconds,
        "compile_seconds": found.compile_seconds,
        "wall_seconds": time.perf_counter() - began,
        "cpu_seconds": time.process_time() - processor,  # of all threads, compilation included
        "load": os.getloadavg()[0],
        "objective": float(found.certificate.objective),
        "eta": float(found.point.x1["eta"]),
        "lambda": float(found.point.x1["lam"]),
    }


def learnt(law: str, loss: str, seed: int, tolerance: float) -> dict[str, Any]:
    """The same equation by the estimator."""
    tasks = drawn(law, loss, seed)
    train, held = (stack_tasks([task[k] for task in tasks]) for k in (0, 1))
    learner = RobustMetaLearner(
        0.5, 0.0, loss=loss, tol=tolerance, eta_bounds=ETA, lam_bounds=LAMBDA
    )
    began = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its certificate says how exact it is
        learner.fit(*train, *held)
    return {
        "epsilon": learner.certificate_.epsilon,
        "seconds": time.perf_counter() - began,
        "objective": float(learner.certificate_.objective),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 100, 101, 102])
    parser.add_argument("--tolerance", type=float, default=1e-4)
    parser.add_argument("--max-seconds", type=float, default=60.0)
    parser.add_argument("--estimator", type=int, default=1, help="on so many seeds of each law")
    parser.add_argument("--json", type=Path, help="write the results there")
    args = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    rows = []
    for loss in ("squared", "logistic"):
        for law in APART:
            for k, seed in enumerate(args.seeds):
                row = solved(law, loss, seed, args.tolerance, args.max_seconds)
                if k < args.estimator:
                    row["estimator"] = learnt(law, loss, seed, args.tolerance)
                rows.append(row)
                print(row, flush=True)
                if args.json:
                    content = {"tolerance": args.tolerance, "results": rows}
                    versions.write(args.json, content)


if __name__ == "__main__":
    main()
