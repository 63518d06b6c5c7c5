"""More rows than memory holds: group-robust logistic regression with a tuned ridge.

    python benchmarks/out_of_memory.py --json benchmarks/results/out_of_memory.json

Rows are generated as they are read, each epoch anew, and none is kept: half of them train the lower
level, the other half, whose labels are noisier and whose law has drifted a little, are what the
upper level's worst group is measured on. `bx.solve` has nothing set but the tolerance and the
confidence. What it returns is then judged on fresh rows, by plain NumPy: the lines of ε-KKT without
any radius. Peak memory is that of the whole process; rows are counted where they are made.
"""

from __future__ import annotations

import argparse
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

COLUMNS, GROUPS = 50, 4
SHARES = np.asarray([0.3, 0.3, 0.2, 0.2])
# Rows that are read, by the epoch from which on they are counted so.
COUNTED = {"rows": 0}


class Law:
    """A logistic law for each group. That of validation rows is weaker, and moved a little."""

    def __init__(self, seed: int, weaker: float, shift: float):
        rng = np.random.default_rng(seed)
        common = rng.normal(size=COLUMNS) / COLUMNS**0.5
        own = rng.normal(size=(GROUPS, COLUMNS)) / COLUMNS**0.5
        moved = rng.normal(size=(GROUPS, COLUMNS)) / COLUMNS**0.5
        self.train = common + 0.5 * own
        self.held = weaker * self.train + shift * moved

    def rows(self, rng: np.random.Generator, count: int, weights: np.ndarray) -> dict[str, Any]:
        """Features times the label's sign, and one over its group's share in the group's column."""
        X = rng.standard_normal((count, COLUMNS), dtype=np.float32)
        groups = rng.choice(GROUPS, size=count, p=SHARES)
        margins = np.einsum("ij,ij->i", X, weights.astype(np.float32)[groups])
        signs = np.where(rng.random(count, np.float32) < 1 / (1 + np.exp(-2 * margins)), 1, -1)
        X *= signs[:, None].astype(np.float32)
        return {"X": X, "g": groups.astype(np.int8)}

    def source(self, level: str, batch: int, rows: int, seed: int) -> bx.data.Host:
        weights = getattr(self, level)

        def make(epoch: int) -> Iterator[dict[str, Any]]:
            rng = np.random.default_rng([seed, epoch, level == "train"])
            for _ in range(rows // batch):
                COUNTED["rows"] += batch
                yield self.rows(rng, batch, weights)

        return bx.data.Host(make, batch=batch)


def group_losses(w: Any, d: Any) -> Any:
    """The mean loss of each group, from rows whose groups have known shares."""
    losses = jax.nn.softplus(-(d["X"] @ w.astype(jnp.float32)).astype(w.dtype))
    members = (d["g"][:, None] == jnp.arange(GROUPS, dtype=d["g"].dtype)).astype(w.dtype)
    return losses @ members / len(losses) / SHARES.astype(w.dtype)


def problem(data: Any) -> bx.BilevelProblem:
    return bx.BilevelProblem(
        upper=lambda x1, x2, y1, y2, d: x2 @ group_losses(y1, d),
        lower=lambda x1, y1, y2, d: y2 @ group_losses(y1, d) + 0.5 * jnp.exp(x1) * jnp.sum(y1**2),
        x1=bx.terms.Box(-6.0, 2.0),
        x2=bx.terms.Simplex(),
        y1=bx.terms.Free(),
        y2=bx.terms.Simplex(),
        lower_modulus=jnp.exp,
        data=data,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=20_000_000, help="of both levels, an epoch")
    parser.add_argument("--fresh", type=int, default=5_000_000, help="rows to check with")
    parser.add_argument("--batch", type=int, default=2048)
    parser.add_argument("--tolerance", type=float, default=1e-2)
    parser.add_argument("--confidence", type=float, default=0.99)
    parser.add_argument("--weaker", type=float, default=0.8, help="validation weights by training")
    parser.add_argument("--shift", type=float, default=0.05, help="of validation weights")
    parser.add_argument("--seeds", type=int, nargs="*", default=[0])
    parser.add_argument("--json", type=Path, help="write the results there")
    args = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    results = []
    for seed in args.seeds:
        results.append(measured(args, seed))
        print(results[-1], flush=True)
    if args.json:
        versions.write(
            args.json,
            {"settings": {k: v for k, v in vars(args).items() if k != "json"}, "results": results},
        )


def measured(args: Any, seed: int) -> dict[str, Any]:
    law = Law(seed, args.weaker, args.shift)
    half = args.rows // 2
    source = bx.data.Levels(
        law.source("held", args.batch, half, seed), law.source("train", args.batch, half, seed)
    )
    even = jnp.full(GROUPS, 1 / GROUPS)
    start = bx.Point(x1=jnp.asarray(-2.0), x2=even, y1=jnp.zeros(COLUMNS), y2=even)
    COUNTED["rows"], begun = 0, time.perf_counter()
    found = bx.solve(
        problem(source), start, tolerance=args.tolerance, confidence=args.confidence, progress=False
    )
    seconds = time.perf_counter() - begun
    read = COUNTED["rows"]
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return {
        "seed": seed,
        "status": found.status.code,
        "says": str(found.status),
        "epsilon": found.certificate.epsilon,
        "lines": found.certificate.lines(),
        "rho": float(found.point.rho),
        "x1": float(found.point.x1),
        "objective": float(found.certificate.objective),
        "batches_of_certificate": getattr(found.certificate, "batches", None),
        "rows_read": read,
        "gigabytes_read": read * (COLUMNS * 4 + 1) / 1e9,
        "seconds": seconds,
        "peak_gibibytes": memory,
        "fresh": fresh_lines(law, found.point, args.fresh // 2, args.batch, seed),
    }


def fresh_lines(law: Law, point: bx.Point, rows: int, batch: int, seed: int) -> dict[str, float]:
    """The lines at a point on rows that nobody has seen, written out in NumPy."""
    p = {k: np.asarray(v, float) for k, v in point.blocks.items()}
    rng = np.random.default_rng([seed, 1, 2, 3])

    def means(weights: np.ndarray, places: list[np.ndarray]) -> list[tuple[np.ndarray, np.ndarray]]:
        """The groups' losses at some w, and their gradients."""
        sums = [(np.zeros(GROUPS), np.zeros((GROUPS, COLUMNS))) for _ in places]
        for _ in range(rows // batch):
            d = law.rows(rng, batch, weights)
            X, members = d["X"].astype(float), np.eye(GROUPS)[d["g"]] / SHARES
            for (losses, slopes), w in zip(sums, places):
                m = X @ w
                losses += members.T @ np.logaddexp(0, -m)
                slopes += (members * (-1 / (1 + np.exp(m)))[:, None]).T @ X
        n = rows // batch * batch
        return [(losses / n, slopes / n) for losses, slopes in sums]

    x1, rho, ridge = float(p["x1"]), float(p["rho"]), np.exp(float(p["x1"]))
    ((f, df),) = means(law.held, [p["y1"]])
    (a, da), (b, db) = means(law.train, [p["y1"], p["z1"]])

    def simplex(v: np.ndarray, g: np.ndarray) -> float:
        """dist(0, g + N(v)) of the simplex: the projection of −g on its tangent cone."""
        on = v > 0
        low = np.min(g[on]) if on.any() else np.min(g)
        best = min(
            np.linalg.norm(np.where(on, g - t, np.minimum(g - t, 0)))
            for t in np.linspace(min(g), max(g), 20001)
        )
        return float(min(best, np.linalg.norm(np.where(on, g - low, np.minimum(g - low, 0)))))

    y1_slope = p["x2"] @ df + rho * (p["z2"] @ da + ridge * p["y1"])
    x1_slope = rho * ridge / 2 * (p["y1"] @ p["y1"] - p["z1"] @ p["z1"])
    bound = (x1 <= -6 and x1_slope >= 0) or (x1 >= 2 and x1_slope <= 0)
    y2_line = simplex(p["y2"], -rho * b)
    z1_slope = p["y2"] @ db + ridge * p["z1"]
    value = lambda losses, y2, w: float(y2 @ losses + ridge / 2 * w @ w)
    gap = np.max(a) + ridge / 2 * p["y1"] @ p["y1"] - value(b, p["y2"], p["z1"])
    gap += z1_slope @ z1_slope / (2 * ridge)
    return {
        "stationarity": float(
            np.sqrt(y1_slope @ y1_slope + (0 if bound else x1_slope**2) + y2_line**2)
        ),
        "response_x2": simplex(p["x2"], -f),
        "response_z1": float(rho * np.linalg.norm(z1_slope)),
        "response_z2": simplex(p["z2"], -rho * a),
        "gap": float(gap),
    }


if __name__ == "__main__":
    main()
