"""What a step of SAPD costs beyond the gradients that it needs, with a million parameters.

A network's parameters against the weights of four groups, in float32, minibatches sampled inside
the loop. The bare loop draws the same minibatches and computes the same partial gradients, which it
only keeps. Both are taken in turns, in this process; the best of each counts.

python benchmarks/sapd_overhead.py --json benchmarks/results/sapd_overhead.json
"""

from __future__ import annotations

import argparse
import itertools
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
from jax import lax

import bilevax as bx
from bilevax import terms

WIDTHS, GROUPS, SAMPLES = (512, 1024, 480, 10), 4, 20_000
ROUNDS = 7


def loss(network: list, weights: Any, batch: dict[str, Any]) -> Any:
    """Σ_g weights_g·(mean cross-entropy of group g), with a little of each weight's square."""
    signal = batch["inputs"]
    for k, (matrix, offset) in enumerate(network):
        signal = signal @ matrix + offset
        signal = jax.nn.relu(signal) if k + 1 < len(network) else signal
    picked = jnp.take_along_axis(jax.nn.log_softmax(signal), batch["labels"][:, None], 1)[:, 0]
    member = jax.nn.one_hot(batch["groups"], GROUPS, axis=0)
    return -weights @ (member @ picked) / picked.size - 0.1 * jnp.sum(weights**2)


def problem_of(batch: int) -> tuple[bx.MinimaxProblem, bx.Point]:
    rng = np.random.default_rng(0)
    arrays = {
        "inputs": rng.normal(size=(SAMPLES, WIDTHS[0])).astype(np.float32),
        "labels": rng.integers(0, WIDTHS[-1], SAMPLES).astype(np.int32),
        "groups": rng.integers(0, GROUPS, SAMPLES).astype(np.int32),
    }
    layers = [
        (rng.normal(size=(n, m)).astype(np.float32) / np.sqrt(n), np.zeros(m, np.float32))
        for n, m in itertools.pairwise(WIDTHS)
    ]
    problem = bx.MinimaxProblem(
        loss, terms.Box(-5.0, 5.0), terms.Simplex(), data=bx.data.Arrays(arrays, batch)
    )
    start = bx.Point(
        x=jax.tree.map(jnp.asarray, layers), y=jnp.full(GROUPS, 1 / GROUPS, jnp.float32)
    )
    return problem, start


@eqx.filter_jit
def stepped(solver: Any, problem: Any, state: Any, steps: Any) -> Any:
    return lax.fori_loop(0, steps, lambda _, s: solver.step(problem, s, jnp.asarray(0)), state)


@eqx.filter_jit
def bare(problem: Any, points: list[tuple[Any, Any]], stream: Any, steps: Any) -> Any:
    """At each point a partial gradient in y from one minibatch and one in x from another."""

    def once(_: Any, carry: Any) -> Any:
        stream = carry[0]
        stream, at = problem.drawn(stream)
        in_y = [jax.grad(at.smooth, argnums=1)(*p) for p in points]
        stream, at = problem.drawn(stream)
        in_x = [jax.grad(at.smooth, argnums=0)(*p) for p in points]
        return stream, in_y, in_x

    zeros = jax.tree.map(jnp.zeros_like, ([y for _, y in points], [x for x, _ in points]))
    return lax.fori_loop(0, steps, once, (stream, *zeros))


def measure(batch: int, steps: int, name: str, solver: Any, times: int) -> dict[str, Any]:
    problem, start = problem_of(batch)
    solver = solver.prepare(problem, start, 1e-3)
    state = solver.init(problem, start)
    stream = problem.data.init(jax.random.key(0))
    many = jnp.asarray(steps)
    # Arrays of their own, which no compiler can take for multiples of one another.
    points = [(jax.tree.map(lambda a, k=k: a + k / 1e3, start.x), start.y) for k in range(times)]
    runs = (
        lambda: stepped(solver, problem, state, many),
        lambda: bare(problem, points, stream, many),
    )
    best = [np.inf, np.inf]
    for turn in range(ROUNDS + 1):
        for k, run in enumerate(runs):
            begun = time.perf_counter()
            jax.block_until_ready(jax.tree.leaves(run()))
            if turn:  # the first one compiles
                best[k] = min(best[k], (time.perf_counter() - begun) / steps)
    return {
        "method": name,
        "batch": batch,
        "parameters": sum(a.size for a in jax.tree.leaves(start.x)),
        "step_microseconds": best[0] * 1e6,
        "gradients_microseconds": best[1] * 1e6,
        "overhead": best[0] / best[1] - 1,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--json", type=Path, help="write the results there")
    args = parser.parse_args()
    given: dict[str, Any] = {"iterations": 10**6, "tau": 1e-3, "sigma": 1e-3, "theta": 0.9}
    recursive = bx.SAPD(estimator=bx.Recursive(), **given)
    within = bx.StochasticProximalPoint(
        iterations=10**6, smoothness=1.0, y_weight=0.1, inner=bx.SAPD(**given)
    )
    methods = (
        ("SAPD", bx.SAPD(**given), 1),
        ("SAPD, recursive estimates", recursive, 2),
        ("SAPD in StochasticProximalPoint", within, 1),
    )
    rows = []
    for batch in args.batches:
        for name, solver, times in methods:
            rows.append(row := measure(batch, args.steps, name, solver, times))
            print(
                f"{name}, batch {batch}: {row['step_microseconds']:.0f} µs a step, "
                f"{row['gradients_microseconds']:.0f} µs its gradients: "
                f"{100 * row['overhead']:.1f} % on top",
                flush=True,
            )
    if args.json:
        record = {
            "command": shlex.join(["python", *sys.argv]),
            "device": jax.devices()[0].device_kind,
            "results": rows,
        }
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
