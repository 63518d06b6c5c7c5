"""Whether bilevel linear problems of one size are faster together than one after the other.

    python benchmarks/vmap_linear.py --json benchmarks/results/vmap_linear.json

Five problems of n = m variables and l = n/20 constraints are taken to the same number of gradients
by each method, in two ways, in turns, and the best time of each is kept:

- `alone`: the compiled `solver.advance` of each problem, one after the other;
- `together`: one compiled `solver.advance` under `vmap`, over data, constants and states.

Equal counts are the best case for `together`: as soon as problems end at different times, it works
on for all until the last one ends.
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

from bilevax.bench.batch import stacked
from bilevax.bench.linear import METHODS, method
from bilevax.problems import Point, library
from bilevax.problems.lagrangian import bilevel_point, lagrangian_problem
from bilevax.solvers.multipliers import first_bounds

SIZES = (100, 300, 500)
INSTANCES = 5
# Gradients before the clock is started, so that every method is in its main loop.
BEFORE = 2_000
ROUNDS = 5
SECONDS = 0.5


def begun(name: str, size: int, seed: int, tolerance: float) -> tuple[Any, Any, Any]:
    """A method, prepared, with the problem in the form it takes and its state at the start."""
    instance = library.bilevel_linear(size, size, size // 20, seed)
    problem, solver = method(name, instance, tolerance)
    stated: Any = problem
    start: Point = instance.start
    if not isinstance(problem, solver.form):
        bounds = first_bounds(problem, start)
        stated, start = lagrangian_problem(problem, bounds), bilevel_point(start, bounds)
    solver = solver.prepare(stated, start, tolerance)
    return solver, stated, solver.init(stated, start)


def _advance(solver: Any, problem: Any, state: Any, limit: jax.Array) -> Any:
    return solver.advance(problem, state, limit)


advance = eqx.filter_jit(_advance)
advance_all = eqx.filter_jit(
    eqx.filter_vmap(_advance, in_axes=(eqx.if_array(0), eqx.if_array(0), eqx.if_array(0), None))
)


def timed(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    jax.block_until_ready(eqx.filter(run(), eqx.is_array))
    return time.perf_counter() - start


def measure(name: str, size: int) -> dict[str, Any]:
    runs = [begun(name, size, seed, 0.01) for seed in range(INSTANCES)]
    before = jnp.asarray(BEFORE)
    runs = [(s, p, advance(s, p, state, before)) for s, p, state in runs]
    counts = [int(state.gradients) for _, _, state in runs]
    all_at_once = stacked(runs)

    def alone(more: int) -> list[Any]:
        return [
            advance(s, p, state, jnp.asarray(count + more))
            for (s, p, state), count in zip(runs, counts)
        ]

    def together(more: int) -> Any:
        return advance_all(*all_at_once, jnp.asarray(max(counts) + more))

    # As many gradients as fill the time, then both in turns, so that they see the same machine.
    ways = {"alone": alone, "together": together}
    more, taken = 200, 0.0
    for way in ways.values():
        timed(lambda way=way: way(more))
    while (taken := timed(lambda more=more: alone(more))) < SECONDS:
        more = int(more * min(8.0, max(1.5, 1.1 * SECONDS / taken)))
    reached = lambda states: np.asarray([int(g) for g in jnp.ravel(states)]) - counts
    done = {
        "alone": reached(jnp.stack([state.gradients for state in alone(more)])),
        "together": reached(together(more).gradients),
    }
    best = dict.fromkeys(ways, np.inf)
    for _ in range(ROUNDS):
        for key, way in ways.items():
            best[key] = min(best[key], timed(lambda way=way: way(more)))
    # Per gradient of one problem, as a step may end a few gradients before the limit.
    each = {key: 1e6 * best[key] / float(done[key].sum()) for key in ways}
    return {
        "n": size,
        "method": name,
        "instances": INSTANCES,
        "gradients": int(done["alone"].sum()),
        "alone_microseconds": each["alone"],
        "together_microseconds": each["together"],
        "alone_over_together": each["alone"] / each["together"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES))
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--json", type=Path, help="write the results there")
    args = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    rows = []
    print(f"{'n':>5} {'method':<9} {'alone µs':>10} {'together µs':>12} {'alone/together':>15}")
    for size in args.sizes:
        for name in args.methods:
            row = measure(name, size)
            rows.append(row)
            print(
                f"{size:>5} {name:<9} {row['alone_microseconds']:>10.2f} "
                f"{row['together_microseconds']:>12.2f} {row['alone_over_together']:>15.2f}",
                flush=True,
            )
    if args.json:
        command = "python benchmarks/vmap_linear.py --json " + str(args.json)
        where = {"jax": jax.__version__, "device": str(jax.devices()[0]), "cpu": platform.machine()}
        record = {"command": command, "where": where, "results": rows}
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
