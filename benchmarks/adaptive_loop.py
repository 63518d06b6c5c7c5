"""What a gradient costs inside Adaptive's loop, against its six matrix-vector products in NumPy.

    python benchmarks/adaptive_loop.py --json benchmarks/results/adaptive_loop.json
    python benchmarks/adaptive_loop.py --other /path/to/python --check

A gradient of the penalty of a bilevel linear problem needs A·x, B·y, B·z and λᵀA, λᵀB, λ̄ᵀB at
least. Loop and products are timed in turns, in one process, and the best of each counts. With
`--other`, another version is measured in the same run: for each size, the two versions take turns
in processes of their own, and the best of each counts. `--check` then ends with 1 if the loop of
this version takes over 5 % more CPU time, in the median over the sizes. CPU time counts because it
does not depend on what else the machine does, as far as any time does not.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import versions

ROUNDS, WARM_UP = 7, 2_000
TIMES = ("loop_microseconds", "loop_cpu_microseconds", "numpy_microseconds")
# The most that the loop may take, relative to that of the other version.
WITHIN = 1.05


def loop(instance: Any) -> tuple[Callable[[Any, int], Any], Any]:
    """Adaptive's compiled loop on a problem: a function of a state and a limit; the first state.

    All that this benchmark knows of the inside of bilevax is here.
    """
    import equinox as eqx
    import jax.numpy as jnp

    import bilevax as bx
    from bilevax.problems.lagrangian import bilevel_point

    try:
        from bilevax.problems.lagrangian import lagrangian_problem
        from bilevax.problems.validation import validate
    except ImportError:  # 0.1.0
        lagrangian_problem = importlib.import_module("bilevax.problems.lagrangian").lagrangian
        from bilevax.problems.validate import validate  # pyright: ignore[reportMissingImports]
    from bilevax.solvers.multipliers import first_bounds

    start = validate(instance.problem, instance.start)
    bounds = first_bounds(instance.problem, start)
    problem, point = lagrangian_problem(instance.problem, bounds), bilevel_point(start, bounds)
    solver = bx.Adaptive().prepare(problem, point, 1e-12)  # which is not reached
    compiled = eqx.filter_jit(lambda solver, *given: solver.advance(*given))

    def advance(state: Any, limit: int) -> Any:
        return compiled(solver, problem, state, jnp.asarray(limit))

    return advance, solver.init(problem, point)


def measure(n: int) -> dict[str, float]:
    """Both times for one size, in this process."""
    import jax

    from bilevax.problems.library import bilevel_linear

    jax.config.update("jax_enable_x64", True)
    instance = bilevel_linear(n, n, max(1, n // 20), 0)
    advance, state = loop(instance)
    state = advance(state, WARM_UP)
    A, B = np.asarray(instance.data.A), np.asarray(instance.data.B)
    x, y, z, lam, lam_bar = np.ones(n), np.ones(n), np.ones(n), *np.ones((2, A.shape[0]))
    repeats = max(20, 2_000_000 // (n * A.shape[0]))
    best, cpu, bare = np.inf, np.inf, np.inf
    for _ in range(ROUNDS):
        done, begun, begun_cpu = int(state.gradients), time.perf_counter(), time.process_time()
        state = advance(state, done + 2 * repeats)
        jax.block_until_ready(state.gradients)
        ended, ended_cpu, gradients = time.perf_counter(), time.process_time(), int(state.gradients)
        best = min(best, (ended - begun) / (gradients - done))
        cpu = min(cpu, (ended_cpu - begun_cpu) / (gradients - done))
        begun = time.perf_counter()
        for _ in range(repeats):
            _ = A @ x, B @ y, B @ z, lam @ A, lam @ B, lam_bar @ B
        bare = min(bare, (time.perf_counter() - begun) / repeats)
    return {"n": n, "l": A.shape[0], **dict(zip(TIMES, (best * 1e6, cpu * 1e6, bare * 1e6)))}


def compared(n: int, place: str | None, rounds: int) -> dict[str, Any]:
    """The best times for one size, over all rounds, and those of the other version beside them."""
    found: dict[str, list[dict[str, float]]] = {}
    for _ in range(rounds):
        for version in versions.versions(place):
            found.setdefault(version.name, []).extend(version.run(__file__, "--child", str(n)))
    least = lambda name, time: min(one[time] for one in found[name])
    row: dict[str, Any] = found["this"][0] | {time: least("this", time) for time in TIMES}
    row["loop_over_numpy"] = row["loop_microseconds"] / row["numpy_microseconds"]
    if place:
        row |= {f"other_{time}": least("other", time) for time in TIMES}
        for what in ("loop", "loop_cpu"):
            row[f"{what}_over_other"] = (
                row[f"{what}_microseconds"] / row[f"other_{what}_microseconds"]
            )
    return row


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    versions.add_other(parser)
    parser.add_argument("--sizes", type=int, nargs="+", default=[100, 200, 300, 400, 500, 2000])
    parser.add_argument("--rounds", type=int, default=2, help="processes for each size and version")
    parser.add_argument("--check", action="store_true", help="end with 1 if the loop got slower")
    parser.add_argument("--json", type=Path, help="write the results there")
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(measure(args.child)))
        return 0
    rows = []
    for n in args.sizes:
        rows.append(row := compared(n, args.other, args.rounds))
        said = f"n = {n}: {row['loop_microseconds']:.1f} µs in the loop, "
        said += f"{row['numpy_microseconds']:.1f} µs in NumPy: {row['loop_over_numpy']:.2f}"
        if args.other:
            said += f"; this version over the other: {row['loop_over_other']:.3f}"
            said += f", in CPU time {row['loop_cpu_over_other']:.3f}"
        print(said, flush=True)
    slower = False
    if args.other:
        middle = statistics.median(row["loop_cpu_over_other"] for row in rows)
        slower = middle > WITHIN
        print(f"Median of CPU time over the sizes: {middle:.3f}, at most {WITHIN} wanted")
    if args.json:
        versions.write(args.json, {"results": rows})
    return 1 if args.check and slower else 0


if __name__ == "__main__":
    raise SystemExit(main())
