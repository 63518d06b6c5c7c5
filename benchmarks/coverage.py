"""How often a certificate from minibatches keeps its word.

    python benchmarks/coverage.py --json benchmarks/results/coverage.json

The loss of a row d is d·x, so the line of a certificate at x = 0 is |mean of d|, which is known.
Rows are drawn anew in each repetition, and the library's own `SampledCertificate` judges them.
Counted is how often its line is at least the true one, as it says with probability `confidence`;
how often the true line is in its interval; how often it says that tails are heavy; and how often
its line is too small and it says nothing. 1024 minibatches are looked at in 64 groups, with radii
from Gaussian concentration; fewer have Chebyshev's.
"""

from __future__ import annotations

import argparse
import math
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import bilevax as bx
from bilevax.bench.output import write_results
from bilevax.certificates import judge
from bilevax.certificates.sampled import averaged, sampled_certificate
from bilevax.certificates.streamed import (
    GROUPS,
    LEAST_IN_GROUP,
    Means,
    streamed_certificate,
    tables,
)

Draw = Callable[[np.random.Generator, tuple[int, int]], np.ndarray]
# Each with its mean.
LOSSES: dict[str, tuple[Draw, float]] = {
    "normal, mean 100": (lambda rng, size: 100 + rng.normal(size=size), 100.0),
    "exponential": (lambda rng, size: rng.exponential(size=size), 1.0),
    "Student t3, mean 100": (lambda rng, size: 100 + rng.standard_t(3, size=size), 100.0),
    "lognormal, σ = 1": (lambda rng, size: rng.lognormal(0, 1, size), math.exp(0.5)),
    "lognormal, σ = 3": (lambda rng, size: rng.lognormal(0, 3, size), math.exp(4.5)),
    "1 in 100 rows is 100": (lambda rng, size: 100.0 * (rng.random(size) < 0.01), 1.0),
}
BATCHES, ROWS, CONFIDENCES = (8, 16, 64, 1024), (1, 32), (0.95, 0.99)


def loss(x: Any, y: Any, rows: Any) -> Any:
    return jnp.mean(rows) * x + 0 * y


def measure(name: str, batches: int, rows: int, repetitions: int) -> list[dict[str, Any]]:
    """What the certificates of so many draws say, for each confidence."""
    draw, mean = LOSSES[name]
    box = bx.terms.Box(-1.0, 1.0)
    problem = bx.MinimaxProblem(loss, box, box, data=bx.data.Arrays(np.zeros((rows, 1)), rows))
    point = bx.Point(x=jnp.zeros(()), y=jnp.zeros(()))
    rng = np.random.default_rng(0)
    covered, inside, heavy, unsaid = (np.zeros(len(CONFIDENCES), int) for _ in range(4))
    for _ in range(repetitions):
        certify = certificate_on(problem, point, draw(rng, (batches, rows)))
        for k, confidence in enumerate(CONFIDENCES):
            said = certify(confidence)
            low, high = said.interval("x")
            covered[k] += said.lines()["x"] >= mean
            inside[k] += low <= mean <= high
            heavy[k] += said.heavy_tailed
            unsaid[k] += said.lines()["x"] < mean and not said.heavy_tailed
    return [
        {
            "losses": name,
            "batches": batches,
            "rows": rows,
            "confidence": confidence,
            "covered": covered[k] / repetitions,
            "inside": inside[k] / repetitions,
            "heavy_tailed": heavy[k] / repetitions,
            "missed_unsaid": unsaid[k] / repetitions,
        }
        for k, confidence in enumerate(CONFIDENCES)
    ]


def certificate_on(problem: Any, point: bx.Point, drawn: np.ndarray) -> Callable[[float], Any]:
    """The certificate from minibatches, as a function of its confidence.

    From many it goes by the means over groups, which are those of larger minibatches.
    """
    if len(drawn) < GROUPS * LEAST_IN_GROUP:
        estimate = judge(averaged(problem, drawn), point)
        return lambda confidence: sampled_certificate(problem, point, drawn, estimate, confidence)
    seen = Means(tables(problem, point, drawn.reshape(GROUPS, -1)), len(drawn))
    return lambda confidence: streamed_certificate(problem, point, seen, {}, confidence)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=1000)
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--json", type=Path, help="write the results there")
    args = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    results, begun = [], time.perf_counter()
    for name in LOSSES:
        for rows in ROWS:
            for batches in args.batches:
                for found in measure(name, batches, rows, args.repetitions):
                    results.append(found)
                    print(
                        f"{name:<22} {batches:>3} batches of {rows:>2}, confidence "
                        f"{found['confidence']}: covered {found['covered']:.3f}, inside "
                        f"{found['inside']:.3f}, heavy-tailed {found['heavy_tailed']:.3f}",
                        flush=True,
                    )
    seconds = time.perf_counter() - begun
    if args.json:
        record = {"repetitions": args.repetitions, "seconds": seconds, "results": results}
        write_results(args.json, shlex.join(["python", *sys.argv]), record)


if __name__ == "__main__":
    main()
