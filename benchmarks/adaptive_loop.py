"""What a gradient costs inside Adaptive's loop, against its six matrix-vector products in NumPy.

A gradient of the penalty of a bilevel linear problem needs A·x, B·y, B·z and λᵀA, λᵀB, λ̄ᵀB at
least. Both are taken in turns, in this process; the best of each counts.

python benchmarks/adaptive_loop.py --json benchmarks/results/adaptive_loop.json
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import bilevax as bx
from bilevax.problems import library
from bilevax.problems.lagrangian import bilevel_point, lagrangian
from bilevax.problems.validate import validate
from bilevax.solvers.multipliers import first_bounds

ROUNDS, WARM_UP = 7, 2_000


@eqx.filter_jit
def advanced(solver: Any, problem: Any, state: Any, limit: Any) -> Any:
    return solver.advance(problem, state, limit)


def measure(n: int) -> dict[str, float]:
    instance = library.bilevel_linear(n, n, max(1, n // 20), 0)
    start = validate(instance.problem, instance.start)
    bounds = first_bounds(instance.problem, start)
    problem, point = lagrangian(instance.problem, bounds), bilevel_point(start, bounds)
    solver = bx.Adaptive().prepare(problem, point, 1e-12)  # which is not reached
    state = advanced(solver, problem, solver.init(problem, point), jnp.asarray(WARM_UP))

    A, B = np.asarray(instance.data.A), np.asarray(instance.data.B)
    x, y, z, lam, lam_bar = np.ones(n), np.ones(n), np.ones(n), *np.ones((2, A.shape[0]))
    repeats = max(20, 2_000_000 // (n * A.shape[0]))
    loop, bare = np.inf, np.inf
    for _ in range(ROUNDS):
        done, begun = int(state.gradients), time.perf_counter()
        state = advanced(solver, problem, state, jnp.asarray(done + 2 * repeats))
        jax.block_until_ready(state.gradients)
        loop = min(loop, (time.perf_counter() - begun) / (int(state.gradients) - done))
        begun = time.perf_counter()
        for _ in range(repeats):
            _ = A @ x, B @ y, B @ z, lam @ A, lam @ B, lam_bar @ B
        bare = min(bare, (time.perf_counter() - begun) / repeats)
    return {
        "n": n,
        "l": A.shape[0],
        "loop_microseconds": loop * 1e6,
        "numpy_microseconds": bare * 1e6,
        "loop_over_numpy": loop / bare,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[100, 200, 300, 400, 500, 2000])
    parser.add_argument("--json", type=Path, help="write the results there")
    args = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    rows = []
    for n in args.sizes:
        rows.append(row := measure(n))
        print(
            f"n = {n}: {row['loop_microseconds']:.1f} µs in the loop, "
            f"{row['numpy_microseconds']:.1f} µs in NumPy: {row['loop_over_numpy']:.2f}",
            flush=True,
        )
    if args.json:
        record = {"command": shlex.join(["python", *sys.argv]), "results": rows}
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
