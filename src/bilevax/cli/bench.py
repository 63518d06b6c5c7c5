"""`bilevax bench NAME`: experiments with known answers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import tyro

from bilevax.bench import suite as published
from bilevax.bench.linear import METHODS, SIZES, Settings, experiment, table


def linear(
    sizes: tuple[int, ...] = SIZES,
    instances: int = 5,
    methods: tuple[str, ...] = METHODS,
    tolerance: float = 0.01,
    seed: int = 0,
    max_seconds: float = 60.0,
    load: Path | None = None,
    json: Path | None = None,
    plot: Path | None = None,
) -> int:
    """The paper's bilevel linear problems, every method against the exact optimum.

    Args:
        sizes: the numbers n = m of variables of each level; there are n/20 constraints.
        instances: how many problems of each size.
        methods: which methods, of paper, tuned, fop, smo and adaptive.
        tolerance: the ε to certify.
        seed: of the first problem of each size.
        max_seconds: stop a solve soon after this much time, compilation apart.
        load: take the problems from the .npz files of this folder instead of drawing them; sizes,
            instances and seed do not count then.
        json: write all results there, also when interrupted.
        plot: save the paper's figure of one problem there.
    """
    settings = Settings(
        sizes=sizes,
        instances=instances,
        methods=methods,
        tolerance=tolerance,
        seed=seed,
        max_seconds=max_seconds,
        load=load,
        json=json,
        plot=plot,
    )
    results = experiment(settings)
    if results.records:
        print(table(results.records))
    for what, path in (("Results", json), ("Plot", plot)):
        if path is not None and path.exists():
            print(f"{what}: {path}")
    if results.interrupted:
        print("Interrupted: the above is what was done until then.")
    return 1 if results.interrupted else 0


def suite(
    file: Annotated[Path, tyro.conf.Positional],
    tolerance: float = 1e-4,
    starts: int = 8,
    max_gradients: int = 100_000,
    seed: int = 0,
    names: tuple[str, ...] = (),
    all: bool = False,
    json: Path | None = None,
) -> int:
    """Published bilevel problems with best-known values, each from several starts.

    Args:
        file: a suite of problems, in the JSON format that docs/benchmarks.md describes.
        tolerance: the ε to certify.
        starts: how many starts for each problem.
        max_gradients: stop a solve before more gradient evaluations than this.
        seed: of the random starts.
        names: only these problems.
        all: also problems whose lower level is not convex, for which there is no theory.
        json: write all results there, also when interrupted.
    """
    settings = published.Settings(file, tolerance, starts, max_gradients, seed, names, all, json)
    outcomes, interrupted = published.experiment(settings)
    print(published.table(outcomes))
    if json is not None and json.exists():
        print(f"Results: {json}")
    if interrupted:
        print("Interrupted: the above is what was done until then.")
    return 1 if interrupted else 0
