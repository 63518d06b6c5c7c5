"""`bilevax bench NAME`: experiments with known answers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import tyro

from bilevax.bench import growth as growing
from bilevax.bench import suite as published
from bilevax.bench.linear import METHODS, MULTIPLIER_BOUND, SIZES, Settings, experiment, table


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
    return _ended(results.interrupted, json, plot)


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
    return _ended(interrupted, json)


def growth(
    parts: tuple[str, ...] = growing.PARTS,
    methods: tuple[str, ...] = growing.METHODS,
    tolerances: tuple[float, ...] = growing.TOLERANCES,
    n: int = 100,
    instances: int = 3,
    max_seconds: float = 10.0,
    sizes: tuple[int, ...] = growing.SIZES,
    density: float = 0.01,
    size_seconds: float = 120.0,
    exact_sizes: tuple[int, ...] = growing.EXACT_SIZES,
    big_m: float = MULTIPLIER_BOUND,
    exact_seconds: float = 120.0,
    seed: int = 0,
    json: Path | None = None,
    plot: Path | None = None,
) -> int:
    """How the work to a certificate grows on bilevel linear problems.

    Args:
        parts: which parts, of epsilon (gradients against ε), size (seconds and memory against n,
            dense and sparse) and exact (seconds of Adaptive against those of HiGHS on a MILP).
        methods: of epsilon: which methods, of paper, tuned, fop, smo and adaptive.
        tolerances: of epsilon: the ε to certify.
        n: of epsilon: the number n = m of variables of each level; there are n/20 constraints.
        instances: of epsilon: how many problems.
        max_seconds: of epsilon: stop a solve soon after this much time, compilation apart.
        sizes: of size: the numbers n = m of variables.
        density: of size: the share of the entries that are not zero in the sparse problems.
        size_seconds: of size: stop a solve soon after this much time, compilation apart.
        exact_sizes: of exact: the numbers n = m of variables.
        big_m: of exact: what bounds the lower level's multipliers in the MILP.
        exact_seconds: of exact: stop Adaptive and HiGHS each soon after this much time.
        seed: of the first problem of each size.
        json: write all results there, also when interrupted.
        plot: save a figure there, with a panel for each part.
    """
    settings = growing.Settings(
        parts=parts,
        methods=methods,
        tolerances=tolerances,
        n=n,
        instances=instances,
        max_seconds=max_seconds,
        sizes=sizes,
        density=density,
        size_seconds=size_seconds,
        exact_sizes=exact_sizes,
        big_m=big_m,
        exact_seconds=exact_seconds,
        seed=seed,
        json=json,
        plot=plot,
    )
    results = growing.experiment(settings)
    print(growing.table(results))
    return _ended(results.interrupted, json, plot)


def _ended(interrupted: bool, json: Path | None, plot: Path | None = None) -> int:
    """Say where the files are, and whether that was all; the exit code."""
    for what, path in (("Results", json), ("Plot", plot)):
        if path is not None and path.exists():
            print(f"{what}: {path}")
    if interrupted:
        print("Interrupted: the above is what was done until then.")
    return 1 if interrupted else 0
