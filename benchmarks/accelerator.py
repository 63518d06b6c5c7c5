"""Which share of a device's bandwidth Adaptive's loop sustains on one large dense problem.

    python benchmarks/accelerator.py --json benchmarks/results/accelerator.json

A bilevel linear problem of n = m variables and l = n/20 constraints, float64, drawn on the device
and passed to the compiled program as an argument. Per gradient each of its two matrices has to be
read once forwards and once backwards. These bytes, over the time that one gradient takes inside the
compiled loop with all that it does, are set against the bandwidth of a plain copy, measured in
turns with it, and of one matrix read by a matrix-vector product, which writes next to nothing and
is faster. With `--solve`, also the seconds to the certificate at 1e-2.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

import bilevax as bx
from bilevax.problems.lagrangian import bilevel_point, lagrangian_problem
from bilevax.solvers.multipliers import first_bounds

SIZES = (2_000, 5_000, 10_000, 20_000, 50_000)
# Gradients before the clock is started, so that the loop is in its stride, and rounds of the clock.
BEFORE, ROUNDS, SECONDS = 400, 5, 1.0


def drawn(n: int, seed: int = 0) -> tuple[bx.ConstrainedBilevelProblem, bx.Point]:
    """The paper's law, as `library.bilevel_linear`, but drawn by JAX where the data shall lie."""
    l = n // 20  # noqa: E741
    keys = jax.random.split(jax.random.key(seed), 6)
    normal = lambda k, *shape: jax.random.normal(keys[k], shape, jnp.float64)
    A, B = 0.01 * normal(0, l, n), 0.01 * normal(1, l, n)
    data = {"A": A, "B": B, "b": B @ (0.1 * normal(2, n)), "c": normal(3, n), "d": normal(4, n)}
    data["d_tilde"] = -jnp.abs(normal(5, l)) @ B
    problem = bx.ConstrainedBilevelProblem(
        lambda x, y, data: data["c"] @ x + data["d"] @ y,
        lambda x, y, data: data["d_tilde"] @ y,
        constraints=lambda x, y, data: data["A"] @ x + data["B"] @ y - data["b"],
        x=bx.terms.Box(-1.0, 1.0),
        y=bx.terms.Box(-1.0, 1.0),
        data=data,
    )
    return problem, bx.Point(x=jnp.zeros(n), y=jnp.zeros(n))


def timed(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    jax.block_until_ready(eqx.filter(run(), eqx.is_array))
    return time.perf_counter() - start


@eqx.filter_jit
def advanced(solver: Any, problem: Any, state: Any, limit: jax.Array) -> Any:
    return solver.advance(problem, state, limit)


@jax.jit
def copied(array: jax.Array, times: jax.Array) -> jax.Array:
    """Read and written once each time; that numbers change keeps the compiler from skipping it."""
    return jax.lax.fori_loop(0, times, lambda _, a: a + 1, array)


@jax.jit
def read(matrix: jax.Array, vector: jax.Array, times: jax.Array) -> jax.Array:
    body = lambda _, v: v + 1e-300 * jnp.sum(v @ matrix)
    return jax.lax.fori_loop(0, times, body, vector)


def measure(n: int) -> dict[str, Any]:
    stated, start = drawn(n)
    bounds = first_bounds(stated, start)
    problem, begin = lagrangian_problem(stated, bounds), bilevel_point(start, bounds)
    solver = bx.Adaptive().prepare(problem, begin, 1e-9)
    state = advanced(solver, problem, solver.init(problem, begin), jnp.asarray(BEFORE))
    matrices = sum(stated.data[name].nbytes for name in ("A", "B"))
    array = jnp.zeros(matrices // 8)

    A, weights = stated.data["A"], jnp.ones(n // 20)
    timed(lambda: (copied(array, jnp.asarray(1)), read(A, weights, jnp.asarray(1))))  # compiles
    one = timed(lambda: advanced(solver, problem, state, jnp.asarray(BEFORE + 100))) / 100
    more = int(max(100, SECONDS / one))
    copies = int(max(2, SECONDS / timed(lambda: copied(array, jnp.asarray(1)))))
    loop, copy, reading = [], [], []
    for _ in range(ROUNDS):
        before = int(state.gradients)
        clock = time.perf_counter()
        state = advanced(solver, problem, state, jnp.asarray(before + more))
        spent = int(state.gradients) - before  # waits
        loop.append((time.perf_counter() - clock) / spent)
        copy.append(timed(lambda: copied(array, jnp.asarray(copies))) / copies)
        reading.append(timed(lambda: read(A, weights, jnp.asarray(2 * copies))) / (2 * copies))
    by_loop, by_copy = 2 * matrices / min(loop), 2 * array.nbytes / min(copy)
    by_read = A.nbytes / min(reading)
    return {
        "n": n,
        "l": n // 20,
        "matrix_bytes": matrices,
        "gradient_microseconds": 1e6 * min(loop),
        "loop_bytes_per_second": by_loop,
        "copy_bytes_per_second": by_copy,
        "read_bytes_per_second": by_read,
        "loop_over_copy": by_loop / by_copy,
        "loop_over_read": by_loop / by_read,
    }


def solved(n: int, max_seconds: float) -> dict[str, Any]:
    problem, start = drawn(n)
    found = bx.solve(problem, start, max_seconds=max_seconds, progress=False)
    return {
        "status": found.status.code,
        "epsilon": found.certificate.epsilon,
        "gradients": found.gradients,
        "seconds": found.seconds,
        "compile_seconds": found.compile_seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES))
    parser.add_argument("--solve", action="store_true", help="also solve each problem to 1e-2")
    parser.add_argument("--max-seconds", type=float, default=60.0, help="for each solve")
    parser.add_argument("--json", type=Path, help="write the results there")
    args = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    rows = []
    for n in args.sizes:
        row = measure(n)
        if args.solve:
            row["solve"] = solved(n, args.max_seconds)
        rows.append(row)
        print(
            f"n = {n:>6,}  {row['gradient_microseconds']:9.1f} µs a gradient  "
            f"{row['loop_bytes_per_second'] / 1e9:7.1f} GB/s, a copy "
            f"{row['copy_bytes_per_second'] / 1e9:7.1f}: {row['loop_over_copy']:.2f}, "
            f"reading {row['read_bytes_per_second'] / 1e9:7.1f}: {row['loop_over_read']:.2f}",
            row.get("solve", ""),
            flush=True,
        )
        if args.json:
            command = shlex.join(["python", *sys.argv])
            where = {"jax": jax.__version__, "device": jax.devices()[0].device_kind}
            record = {"command": command, "where": where, "results": rows}
            args.json.parent.mkdir(parents=True, exist_ok=True)
            args.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
