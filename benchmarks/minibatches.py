"""Rows as a source of minibatches, with default settings, against the same rows as plain data.

    python benchmarks/minibatches.py --json benchmarks/results/minibatches.json

Problems 1, 4, 5, 11 (all of Adult), 13 and 22 of those that people bring, each stated as means over
rows, and three generated ones with many rows. `passes` counts gradients of all rows: a gradient of
one minibatch is its share of that. Checks are not among them.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import bilevax as bx
import versions
from bilevax.data.source import minibatches
from bilevax.terms import Box, Simplex
from people_cleaning import RIDGE, losses
from people_cleaning import data as cleaning_data
from people_data import ADULT, Split, adult, breast_cancer, diabetes
from people_robust import scaled

TOLERANCES, BATCHES = (1e-2, 1e-4), (64, 256)
Array = Any
Rows = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Case:
    """A problem as a function of its data, the rows of both levels, and where to begin."""

    name: str
    problem: Callable[[Any], Any]
    upper: Rows
    lower: Rows
    start: bx.Point

    def source(self, batch: int) -> bx.data.Levels:
        of = lambda rows: bx.data.Arrays(rows, batch=min(batch, len(next(iter(rows.values())))))
        return bx.data.Levels(of(self.upper), of(self.lower))


def rows_of(split: Split) -> tuple[Rows, Rows]:
    """Those to validate with, and those to train with, which have their numbers."""
    below = {"X": split.train, "t": split.target, "i": np.arange(len(split.target))}
    return {"X": split.held, "t": split.held_target}, below


def error(y: Array, d: Array) -> Array:
    return 0.5 * jnp.mean((d["X"] @ y - d["t"]) ** 2)


def ridge(name: str, split: Split, size: int, low: float, high: float) -> Case:
    def problem(data: Any) -> Any:
        return bx.ConstrainedBilevelProblem(
            upper=lambda x, y, d: error(y, d),
            lower=lambda x, y, d: error(y, d) + 0.5 * jnp.sum(jnp.exp(x) * y**2),
            x=Box(low, high),
            y=Box(-10.0, 10.0),
            data=data,
        )

    x = jnp.zeros(()) if size == 1 else jnp.zeros(size)
    start = bx.Point(x=x, y=jnp.zeros(split.train.shape[1]))
    return Case(name, problem, *rows_of(split), start)


def cleaning() -> Case:
    split = cleaning_data()

    def problem(data: Any) -> Any:
        weighted = lambda x, y, d: jnp.mean(x[d["i"]] * losses(y, d["X"], d["t"]))
        return bx.ConstrainedBilevelProblem(
            upper=lambda x, y, d: jnp.mean(losses(y, d["X"], d["t"])),
            lower=lambda x, y, d: weighted(x, y, d) + 0.5 * RIDGE * jnp.sum(y**2),
            x=Box(0.0, 1.0),
            y=Box(-20.0, 20.0),
            data=data,
        )

    start = bx.Point(x=jnp.ones(len(split.target)), y=jnp.zeros((split.train.shape[1], 10)))
    return Case("5 hyper-cleaning", problem, *rows_of(split), start)


def worst_group(
    name: str,
    rows: tuple[Rows, Rows],
    loss: Callable[[Array, Array], Array],
    start: float,
    bounds: Box,
) -> Case:
    """The weight of a ridge, tuned for the worst group; `g` makes of losses those of groups."""

    def problem(data: Any) -> Any:
        groups = lambda w, d: jnp.mean(d["g"] * loss(w, d)[:, None], axis=0)
        return bx.BilevelProblem(
            upper=lambda x1, x2, y1, y2, d: x2 @ groups(y1, d),
            lower=lambda x1, y1, y2, d: y2 @ groups(y1, d) + 0.5 * jnp.exp(x1) * jnp.sum(y1**2),
            x1=bounds,
            x2=Simplex(),
            y1=Box(-10.0, 10.0),
            y2=Simplex(),
            data=data,
        )

    upper, lower = rows
    even = jnp.full(upper["g"].shape[1], 1 / upper["g"].shape[1])
    zeros = jnp.zeros(upper["X"].shape[1])
    return Case(name, problem, upper, lower, bx.Point(x1=start, x2=even, y1=zeros, y2=even))


def members(groups: np.ndarray) -> np.ndarray:
    """For each row one over the share of its group, in the column of that."""
    return np.eye(groups.max() + 1)[groups] * (len(groups) / np.bincount(groups))


def all_of_adult() -> Case:
    split, groups, held_groups = adult(0, 24_421)
    upper = {"X": split.held * split.held_target[:, None], "g": members(held_groups)}
    lower = {"X": split.train * split.target[:, None], "g": members(groups)}
    loss = lambda w, d: jax.nn.softplus(-d["X"] @ w)
    return worst_group("11 groups, all of Adult", (upper, lower), loss, -3.0, Box(-8.0, 2.0))


def targets() -> Case:
    split = scaled()
    count = len(split.target)

    def lower(x1: Array, y1: Array, y2: Array, d: Array) -> Array:
        reach, moves = jnp.exp(x1), y2[d["i"]]
        rest = d["X"] @ y1 - d["t"] + reach * moves
        each = 0.5 * rest**2 - 0.75 * (reach * moves) ** 2
        return count * jnp.mean(each) + 0.01 * jnp.sum(y1**2)

    def problem(data: Any) -> Any:
        return bx.BilevelProblem(
            upper=lambda x1, x2, y1, y2, d: error(y1, d),
            lower=lower,
            x1=Box(-7.0, 0.0),
            y1=Box(-3.0, 3.0),
            y2=Box(-1.0, 1.0),
            data=data,
        )

    start = bx.Point(x1=jnp.asarray(-3.5), y1=jnp.zeros(10), y2=jnp.zeros(count))
    return Case("13 adversarial targets", problem, *rows_of(split), start)


def weighted_machine() -> Case:
    split = breast_cancer(0, 30, 300, 269)
    margins = lambda y, d: d["t"] * (d["X"] @ y["w"] + y["b"])

    def problem(data: Any) -> Any:
        short = lambda y, d: jnp.maximum(1 - margins(y, d), 0) ** 2
        return bx.ConstrainedBilevelProblem(
            upper=lambda x, y, d: jnp.mean(jax.nn.softplus(-margins(y, d))),
            lower=lambda x, y, d: (
                0.5 * jnp.sum(y["w"] ** 2) + 0.5 * jnp.mean(jnp.exp(x[d["i"]]) * short(y, d))
            ),
            x=Box(-6.0, 4.0),
            y={"w": Box(-10.0, 10.0), "b": Box(-10.0, 10.0)},
            data=data,
        )

    start = bx.Point(x=jnp.zeros(300), y={"w": jnp.zeros(30), "b": jnp.zeros(())})
    return Case("22 svm, a weight a row", problem, *rows_of(split), start)


def generated(rows: int, columns: int, seed: int) -> tuple[np.ndarray, np.ndarray, Any]:
    """Correlated features of different sizes, weights for them, and the generator."""
    rng = np.random.default_rng(seed)
    mixed = rng.normal(size=(columns, columns)) / columns**0.5 + np.eye(columns)
    X = rng.normal(size=(rows, columns)) @ mixed * np.geomspace(0.3, 2, columns)
    return X, rng.normal(size=columns) / columns**0.5, rng


def halves(**columns: np.ndarray) -> tuple[Rows, Rows]:
    middle = len(columns["X"]) // 2
    return (
        {k: v[:middle] for k, v in columns.items()},
        {k: v[middle:] for k, v in columns.items()},
    )


def five_groups() -> Case:
    X, w, rng = generated(400_000, 20, 1)
    groups = rng.choice(5, size=len(X), p=[0.5, 0.25, 0.15, 0.07, 0.03])
    shifts = rng.normal(size=(5, 20)) / 20**0.5
    t = np.sum(X * (w + shifts[groups]), axis=1) + 0.5 * rng.normal(size=len(X))
    rows = halves(X=X, t=t, g=members(groups))
    loss = lambda w, d: 0.5 * (d["X"] @ w - d["t"]) ** 2
    return worst_group("five groups, 400,000 rows", rows, loss, 0.0, Box(-6.0, 3.0))


def logistic() -> Case:
    X, w, rng = generated(300_000, 30, 2)
    w[10:] = 0
    label = np.where(rng.random(len(X)) < 1 / (1 + np.exp(-2 * X @ w)), 1.0, -1.0)

    def problem(data: Any) -> Any:
        loss = lambda y, d: jnp.mean(jax.nn.softplus(-d["X"] @ y))
        return bx.ConstrainedBilevelProblem(
            upper=lambda x, y, d: loss(y, d),
            lower=lambda x, y, d: loss(y, d) + 0.5 * jnp.sum(jnp.exp(x) * y**2),
            x=Box(-8.0, 2.0),
            y=Box(-10.0, 10.0),
            data=data,
        )

    start = bx.Point(x=jnp.full(30, -2.0), y=jnp.zeros(30))
    return Case("logistic, a weight a feature", problem, *halves(X=X * label[:, None]), start)


def heavy_tails() -> Case:
    X, w, rng = generated(1_000_000, 10, 3)
    t = X @ w + rng.standard_t(2, size=len(X))

    def problem(data: Any) -> Any:
        loss = lambda y, d: jnp.mean(jnp.sqrt(1 + (d["X"] @ y - d["t"]) ** 2) - 1)
        return bx.ConstrainedBilevelProblem(
            upper=lambda x, y, d: loss(y, d) + 0.01 * jnp.sum(x),
            lower=lambda x, y, d: loss(y, d),
            constraints=lambda x, y, d: jnp.sum(y**2) - x,
            x=Box(0.1, 5.0),
            y=Box(-5.0, 5.0),
            data=data,
        )

    start = bx.Point(x=jnp.full(1, 0.2), y=jnp.zeros(10))
    return Case("heavy tails in a ball", problem, *halves(X=X, t=t), start)


CASES: dict[str, Callable[[], Case]] = {
    "ridge": lambda: ridge("1 ridge", diabetes(0, 221), 1, -10.0, 5.0),
    "features": lambda: ridge("4 ridge, a weight a feature", diabetes(0, 221), 10, -8.0, 4.0),
    "cleaning": cleaning,
    "adult": all_of_adult,
    "targets": targets,
    "machine": weighted_machine,
    "groups": five_groups,
    "logistic": logistic,
    "tails": heavy_tails,
}


def run(case: Case, data: Any, tolerance: float, seconds: float, each: float) -> dict[str, Any]:
    """One solve; `each` is how many of its gradients are one of all rows."""
    begun = time.perf_counter()
    options = {"tolerance": tolerance, "max_seconds": seconds, "progress": False}
    found = bx.solve(case.problem(data), case.start, **options)
    return {
        "case": case.name,
        "tolerance": tolerance,
        "status": found.status.code,
        "epsilon": found.certificate.epsilon,
        "passes": found.gradients / each,
        "linear_solves": found.linear_solves,
        "seconds": found.seconds,
        "wall_seconds": time.perf_counter() - begun,
        "objective": float(found.certificate.objective),
    }


def measured(name: str, seconds: float) -> list[dict[str, Any]]:
    """All runs of one case."""
    case, rows = CASES[name](), []
    for tolerance in TOLERANCES:
        plain = case.source(64).everything()
        rows.append({"batch": None} | run(case, plain, tolerance, seconds, 1.0))
        all_rows = rows[-1]["passes"]
        for batch in BATCHES:
            source = case.source(batch)
            each = math.ceil(minibatches(source))
            found = run(case, source, tolerance, seconds, each)
            rows.append({"batch": batch} | found | {"ratio": found["passes"] / all_rows})
        for row in rows[-3:]:
            print(*row.values(), flush=True)
    return rows


def measured_apart(name: str, seconds: float) -> list[dict[str, Any]]:
    """The same in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.json"
        options = ["--cases", name, "--max-seconds", str(seconds), "--json", str(path)]
        subprocess.run([sys.executable, __file__, *options], check=True)
        return json.loads(path.read_text())["results"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", nargs="*", choices=CASES, default=list(CASES))
    parser.add_argument("--max-seconds", type=float, default=120.0)
    parser.add_argument("--jobs", type=int, default=1, help="cases at once")
    parser.add_argument("--json", type=Path, help="write the results there")
    args = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    if not ADULT.exists():
        print("adult: its data is not there")
    cases = [name for name in args.cases if name != "adult" or ADULT.exists()]
    measure = measured if args.jobs == 1 else measured_apart
    with ThreadPoolExecutor(args.jobs) as pool:
        found = list(pool.map(lambda name: measure(name, args.max_seconds), cases))
    if args.json:
        versions.write(args.json, {"results": [row for rows in found for row in rows]})


if __name__ == "__main__":
    main()
