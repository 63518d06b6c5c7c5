"""What OptFOM's compiled loop costs beyond the gradients that it evaluates.

    python benchmarks/optfom_overhead.py --json benchmarks/results/optfom_overhead.json

For h(x, y) = ½‖x‖² + cᵀx + yᵀAx − 0.05‖y‖² on boxes, n entries of x and m of y, two times are
taken in the same run, in turns, and the best of each is kept:

- `loop`: one gradient inside OptFOM's loop, everything included;
- `bare`: one gradient inside a compiled loop that does nothing else.

The target: loop ≤ 2 × bare at n = 100, 1,000 and 100,000.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import bilevax as bx

SIZES = ((100, 100), (1_000, 1_000), (100_000, 50))
ROUNDS = 7
SECONDS = 0.3


def objective(x: jax.Array, y: jax.Array, data: tuple[jax.Array, jax.Array]) -> jax.Array:
    A, c = data
    return 0.5 * jnp.sum(x**2) + c @ x + y @ (A @ x) - 0.05 * jnp.sum(y**2)


@eqx.filter_jit
def loop(solver: bx.OptFOM, problem: bx.MinimaxProblem, state: Any, limit: jax.Array) -> Any:
    return solver.advance(problem, state, limit)


@eqx.filter_jit
def bare(problem: bx.MinimaxProblem, start: bx.Point, count: jax.Array) -> Any:
    """Gradients one after the other, each at a point that depends on the one before."""

    def body(_: Any, point: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        gx, gy = problem.gradient(*point)
        return 1e-3 * gx, 1e-3 * gy

    return jax.lax.fori_loop(0, count, body, (start.x, start.y))


def seconds_each(run: Callable[[int], Any]) -> Callable[[], float]:
    """A timer of one repetition, with as many repetitions as fill the time."""
    jax.block_until_ready(run(2))
    count, taken = 2, 0.0
    while taken < SECONDS / 4:
        count *= 4
        begun = time.perf_counter()
        jax.block_until_ready(run(count))
        taken = time.perf_counter() - begun
    count = max(2, int(count * SECONDS / taken) // 2 * 2)

    def once() -> float:
        begun = time.perf_counter()
        jax.block_until_ready(run(count))
        return (time.perf_counter() - begun) / count

    return once


def measure(n: int, m: int) -> dict[str, float]:
    rng = np.random.default_rng(0)
    A, c = rng.normal(size=(m, n)) / np.sqrt(max(n, m)), rng.normal(size=n)
    smoothness = float(np.linalg.norm(A, 2)) + 1
    problem = bx.MinimaxProblem(
        objective,
        bx.terms.Box(-1.0, 1.0),
        bx.terms.Box(-5.0, 5.0),
        data=(A, c),
        smoothness=smoothness,
    )
    start = bx.Point(x=jnp.zeros(n), y=jnp.zeros(m))
    solver = bx.OptFOM(strong_convexity=1.0, strong_concavity=0.1).prepare(problem, start, 1e-8)
    endless = eqx.tree_at(lambda s: s.tolerance, solver, jnp.asarray(jnp.nan))  # never done
    state = solver.init(problem, start)

    timers = {
        "loop": seconds_each(lambda k: loop(endless, problem, state, jnp.asarray(k))),
        "bare": seconds_each(lambda k: bare(problem, start, jnp.asarray(k))),
    }
    best = dict.fromkeys(timers, np.inf)
    for _ in range(ROUNDS):  # in turns, so that all see the same machine
        for name, once in timers.items():
            best[name] = min(best[name], once())
    micro = {f"{name}_microseconds": 1e6 * value for name, value in best.items()}
    return {
        "n": n,
        "m": m,
        **micro,
        "loop_over_bare": best["loop"] / best["bare"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the results there")
    args = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    rows = []
    print(f"{'n':>8} {'m':>6} {'loop µs':>10} {'bare µs':>10} {'loop/bare':>10}")
    for n, m in SIZES:
        row = measure(n, m)
        rows.append(row)
        times = [row[f"{k}_microseconds"] for k in ("loop", "bare")]
        shown = " ".join(f"{t:>10.2f}" for t in times)
        print(f"{n:>8} {m:>6} {shown} {row['loop_over_bare']:>10.2f}", flush=True)
    if args.json:
        command = "python benchmarks/optfom_overhead.py --json " + str(args.json)
        where = {"jax": jax.__version__, "device": str(jax.devices()[0]), "cpu": platform.machine()}
        record = {"command": command, "where": where, "results": rows}
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
