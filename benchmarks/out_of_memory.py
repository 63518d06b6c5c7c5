"""Rows that do not fit in memory: worst-group logistic regression with a tuned ridge, streamed.

    python benchmarks/out_of_memory.py --json benchmarks/results/out_of_memory.json

20 million generated rows of 50 features, half for each level, 4 GB in float32, come from `Host`
sources in minibatches. `solve` runs with default settings; then the point is certified with
confidence 0.99 from other minibatches, and at last judged on 5 million rows that were in neither.
"""

from __future__ import annotations

import argparse
import dataclasses
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import bilevax as bx
import versions
from bilevax.terms import Box, Free, Simplex

COLUMNS, GROUPS = 50, 4
UPPER, LOWER, FRESH = range(3)
Array = Any


@dataclasses.dataclass
class Rows:
    """A set of rows in blocks, each from a seed of its own; an epoch has them in a new order."""

    level: int
    blocks: int
    batch: int
    read: int = 0

    def __post_init__(self) -> None:
        rng = np.random.default_rng(0)
        self.mixed = np.eye(COLUMNS) + rng.normal(size=(COLUMNS, COLUMNS)) / (2 * COLUMNS**0.5)
        common, own = rng.normal(size=COLUMNS), rng.normal(size=(GROUPS, COLUMNS))
        self.weights = (3 * common + 2 * own).astype(np.float32)

    def block(self, number: int) -> dict[str, np.ndarray]:
        """As many rows of each group, of length one."""
        rng = np.random.default_rng([self.level, number])
        X = rng.standard_normal((self.batch, COLUMNS), np.float32)
        X = X @ self.mixed.astype(np.float32)
        X /= np.linalg.norm(X, axis=1, keepdims=True)
        groups = np.arange(self.batch) % GROUPS
        score = np.sum(X * self.weights[groups], axis=1)
        sign = np.where(rng.random(self.batch) < 1 / (1 + np.exp(-score)), 1, -1)
        self.read += self.batch
        return {"X": X * sign[:, None].astype(np.float32), "g": groups.astype(np.int32)}

    def __call__(self, epoch: int) -> Iterator[dict[str, np.ndarray]]:
        order = np.random.default_rng([self.level, epoch, 1]).permutation(self.blocks)
        return (self.block(int(number)) for number in order)


def losses(w: Array, d: Array) -> Array:
    """The mean loss of each group."""
    loss = jax.nn.softplus(-d["X"] @ w)
    return GROUPS * jnp.mean(jax.nn.one_hot(d["g"], GROUPS) * loss[:, None], axis=0)


def stated(data: Any) -> bx.BilevelProblem:
    return bx.BilevelProblem(
        upper=lambda x1, x2, y1, y2, d: x2 @ losses(y1, d),
        lower=lambda x1, y1, y2, d: y2 @ losses(y1, d) + 0.5 * jnp.exp(x1) * jnp.sum(y1**2),
        x1=Box(-8.0, 2.0),
        x2=Simplex(),
        y1=Free(),
        y2=Simplex(),
        data=data,
        lower_modulus=jnp.exp,
    )


def start() -> bx.Point:
    even = jnp.full(GROUPS, 1 / GROUPS)
    return bx.Point(x1=jnp.asarray(-3.0), x2=even, y1=jnp.zeros(COLUMNS), y2=even)


def lines_on(rows: Rows, point: bx.Point) -> dict[str, float]:
    """The certificate on all of these rows."""
    both = [rows.block(i) for i in range(rows.blocks)]
    whole = {key: np.concatenate([b[key] for b in both]) for key in both[0]}
    return bx.certify(stated(whole), point, look_around=False).as_dict()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=20_000_000)
    parser.add_argument("--fresh", type=int, default=5_000_000)
    parser.add_argument("--batch", type=int, default=16384)
    parser.add_argument("--tolerance", type=float, default=1e-2)
    parser.add_argument("--max-seconds", type=float, default=600.0)
    parser.add_argument("--json", type=Path, help="write the results there")
    args = parser.parse_args()
    jax.config.update("jax_enable_x64", True)  # the rows stay in float32
    blocks = args.rows // 2 // args.batch
    above, below = (Rows(level, blocks, args.batch) for level in (UPPER, LOWER))
    host = lambda rows: bx.data.Host(rows, batch=args.batch)
    problem = stated(bx.data.Levels(host(above), host(below)))
    begun = time.perf_counter()
    options = {"tolerance": args.tolerance, "max_seconds": args.max_seconds}
    solution = bx.solve(problem, start(), progress=False, **options)
    solved = time.perf_counter() - begun
    certificate = bx.certify(problem, solution.point, confidence=0.99)
    found = {
        "rows": 2 * blocks * args.batch,
        "columns": COLUMNS,
        "batch": args.batch,
        "status": str(solution.status),
        "epsilon": solution.certificate.epsilon,
        "rho": float(solution.point.rho),
        "x1": float(solution.point.x1),
        "epsilon_99": certificate.epsilon,
        "lines_99": certificate.as_dict(),
        "seconds_to_solution": solved,
        "seconds": time.perf_counter() - begun,
        "rows_read": above.read + below.read,
        "peak_gigabytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6,
    }
    print(found, flush=True)
    found["fresh"] = lines_on(Rows(FRESH, args.fresh // args.batch, args.batch), solution.point)
    found["fresh_rows"] = args.fresh // args.batch * args.batch
    print(found["fresh"])
    if args.json:
        versions.write(args.json, found)


if __name__ == "__main__":
    main()
