"""How long 64 bilevel linear problems take together under `vmap`, against one of them alone.

    python benchmarks/many.py --json benchmarks/results/many.json

Problems of one size, differing in their data, are taken to ε = 1e-2 by Adaptive: each
alone, compiled once, and all in one compiled program under `vmap`, which works on until the last of
them is certified. Both look at the certificates after the same counts of gradients. Times are
without compilation, the best of a few rounds.
"""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import bilevax as bx
from bilevax.bench.batch import stacked
from bilevax.certificates.constrained import ConstrainedKKT
from bilevax.problems import library
from bilevax.problems.lagrangian import bilevel_point, constrained_point, lagrangian_problem
from bilevax.solvers.multipliers import first_bounds

TOLERANCE, MOST, ROUNDS = 1e-2, 200_000, 3
NOTES = ("rho", "objective")


def begun(n: int, seed: int) -> tuple[Any, ...]:
    instance = library.bilevel_linear(n, n, n // 20, seed)
    bounds = first_bounds(instance.problem, instance.start)
    problem, start = (
        lagrangian_problem(instance.problem, bounds),
        bilevel_point(instance.start, bounds),
    )
    solver = bx.Adaptive().prepare(problem, start, TOLERANCE)
    return solver, problem, instance.problem, bounds, solver.init(problem, start)


def _advanced(solver: Any, problem: Any, stated: Any, bounds: Any, state: Any, limit: Any) -> Any:
    """Steps up to a limit, and ε there."""
    state = solver.advance(problem, state, limit)
    point = constrained_point(solver.output(problem, state), bounds)
    lines = ConstrainedKKT().residuals(stated, point)
    return state, jnp.max(jnp.stack([v for k, v in lines.items() if k not in NOTES]))


alone: Any = eqx.filter_jit(_advanced)
mapped = eqx.if_array(0)
together: Any = eqx.filter_jit(eqx.filter_vmap(_advanced, in_axes=(*[mapped] * 5, None)))


def certified(advance: Any, run: tuple[Any, ...]) -> tuple[float, int, float]:
    """Seconds until every ε seen has been small enough, the limit then, the largest of the ε."""
    *fixed, state = run
    limit, best, begin = 64, np.inf, time.perf_counter()
    while True:
        state, epsilon = advance(*fixed, state, jnp.asarray(limit))
        best = np.minimum(best, np.asarray(epsilon))
        if np.all(best <= TOLERANCE) or limit > MOST:
            return time.perf_counter() - begin, limit, float(np.max(best))
        limit = int(1.25 * limit)


def measure(n: int, count: int) -> dict[str, Any]:
    runs = [begun(n, seed) for seed in range(count)]
    all_at_once = stacked(runs)
    for advance, run in ((alone, runs[0]), (together, all_at_once)):  # compile
        *fixed, state = run
        jax.block_until_ready(eqx.filter(advance(*fixed, state, jnp.asarray(64)), eqx.is_array))
    single = [min(certified(alone, run) for _ in range(ROUNDS)) for run in runs]
    seconds, gradients, epsilon = min(certified(together, all_at_once) for _ in range(ROUNDS))
    slowest = max(single)
    one = statistics.mean(s for s, _, _ in single)
    return {
        "n": n,
        "count": count,
        "one_seconds": one,
        "slowest_seconds": slowest[0],
        "together_seconds": seconds,
        "together_over_one": seconds / one,
        "together_over_slowest": seconds / slowest[0],
        "together_over_all_in_turn": seconds / (count * one),
        "gradients_of_the_slowest": gradients,
        "epsilon": epsilon,
        "certified": epsilon <= TOLERANCE,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[100])
    parser.add_argument("--count", type=int, default=64)
    parser.add_argument("--json", type=Path, help="write the results there")
    args = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    rows = []
    for n in args.sizes:
        row = measure(n, args.count)
        rows.append(row)
        print(
            f"n = {n}: one {row['one_seconds']:.3f} s, {args.count} together "
            f"{row['together_seconds']:.3f} s, {row['together_over_one']:.1f} times",
            flush=True,
        )
    if args.json:
        device = jax.devices()[0].device_kind
        where = {"jax": jax.__version__, "device": device, "cpu": platform.machine()}
        command = shlex.join(["python", *sys.argv])
        record = {"command": command, "where": where, "results": rows}
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
