"""Two successors of group DRO: rows that may move, and groups that are known of few rows.

python benchmarks/hierarchical.py --json benchmarks/results/hierarchical.json

The first table has the groups of all rows: reweighted logistic regression on the training and
validation rows together, its C by five folds for the worst group's loss; tuned group DRO; the same
with one radius for all groups, the best of a grid by validation loss at the η and l2 found; and all
radii tuned. In the second no training row has a group and k validation rows of each group have one
(all, where there are fewer): plain and class-weighted logistic regression, which need none, group
DRO on the labelled rows alone, PG-DRO (the predictor fitted first, then left), the bilevel problem
in the predictor too, and group DRO with the groups of all training rows. BLAS has one thread.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import StratifiedKFold
from threadpoolctl import threadpool_limits

from bilevax.learn import (
    HierarchicalDROClassifier,
    SoftGroupDROClassifier,
    TunedGroupDROClassifier,
    TunedHierarchicalDROClassifier,
    datasets,
)
from bilevax.learn._soft import SoftLevels
from robust_data import Case, of_table

TRAIN, HELD = 2000, 2000
CS = np.geomspace(1e-4, 1e2, 13)
RADII = (0.003, 0.01, 0.03, 0.1, 0.3)
LABELLED = (20, 50, 200)
Part = tuple[np.ndarray, np.ndarray, np.ndarray]


class PGDROClassifier(SoftGroupDROClassifier):
    """PG-DRO: the predictor is fitted alone, and then only η and l2 are tuned."""

    def _soft_levels(self, *data: Any, **named: Any) -> SoftLevels:
        levels = super()._soft_levels(*data, **named)
        low, high = (np.append(end[:2], levels.first) for end in (levels.low, levels.high))
        return dataclasses.replace(levels, low=low, high=high)


def cases(folder: Path) -> list[Case]:
    tables = {
        "Adult, income × sex": datasets.load_adult(folder / "adult.csv.gz", "sex"),
        "Law School, sex": datasets.load_law_school(folder / "law_school.csv", "sex"),
        "COMPAS, sex": datasets.load_compas(folder / "compas.csv", "sex"),
    }
    return [Case(name, TRAIN, HELD, of_table(t, TRAIN, HELD)) for name, t in tables.items()]


def even(groups: np.ndarray) -> np.ndarray:
    """Weights that make every group count the same."""
    counts = np.bincount(groups)
    return len(groups) / (np.sum(counts > 0) * counts[groups])


def losses(model: Any, part: Part) -> np.ndarray:
    """The mean loss of each group."""
    x, y, groups = part
    own = -model.predict_log_proba(x)[np.arange(len(y)), y]
    return np.bincount(groups, own) / np.bincount(groups)


def regression(c: float, part: Part, weight: np.ndarray | None) -> LogisticRegression:
    return LogisticRegression(C=float(c), max_iter=5000).fit(*part[:2], sample_weight=weight)


def cross_validated(part: Part) -> LogisticRegression:
    """Reweighted by group, C by five folds: the one with the least loss of the worst group."""
    x, y, groups = part
    worst = []
    folds = list(StratifiedKFold(5, shuffle=True, random_state=0).split(x, groups))
    for c in CS:
        sums = np.zeros(groups.max() + 1)
        for kept, left in folds:
            model = regression(c, (x[kept], y[kept], groups[kept]), even(groups[kept]))
            sums += losses(model, (x[left], y[left], groups[left])) / len(folds)
        worst.append(sums.max())
    return regression(CS[int(np.argmin(worst))], part, even(groups))


def named(held: Part) -> dict[str, np.ndarray]:
    return dict(zip(("X_val", "y_val", "groups_val"), held, strict=True))


def fixed_radius(train: Part, held: Part, tuned: TunedGroupDROClassifier) -> Any:
    models = [
        HierarchicalDROClassifier(radius, tuned.eta_, tuned.l2_).fit(*train) for radius in RADII
    ]
    return min(models, key=lambda model: losses(model, held).max())


def timed(fit: Callable[[], Any], test: Part, held: Part) -> tuple[Any, dict[str, Any]]:
    began = time.perf_counter()
    model = fit()
    seconds = time.perf_counter() - began
    x, y, groups = test
    accuracy = np.bincount(groups, model.predict(x) == y) / np.bincount(groups)
    found = {
        "seconds": seconds,
        "worst_accuracy": float(accuracy.min()),
        "accuracy": float(np.mean(model.predict(x) == y)),
        "worst_loss": float(losses(model, test).max()),
        "worst_validation_loss": float(losses(model, held).max()),
    }
    if hasattr(model, "certificate_"):
        found |= {"epsilon": model.certificate_.epsilon, "certified": model.converged_}
        found |= {"eta": model.eta_, "l2": model.l2_, "steps": model.n_iter_}
    if hasattr(model, "radii_"):
        found["radii"] = model.radii_.tolist()
    return model, found


def known_groups(parts: dict[str, Part]) -> dict[str, Any]:
    train, held, test = parts["train"], parts["validation"], parts["test"]
    both: Any = tuple(np.concatenate(pair) for pair in zip(train, held, strict=True))
    given = named(held)
    tuned, of_tuned = timed(lambda: TunedGroupDROClassifier().fit(*train, **given), test, held)
    return {
        "reweighted": timed(lambda: cross_validated(both), test, held)[1],
        "tuned": of_tuned,
        "fixed_radius": timed(lambda: fixed_radius(train, held, tuned), test, held)[1],
        "hierarchical": timed(
            lambda: TunedHierarchicalDROClassifier().fit(*train, **given), test, held
        )[1],
    }


def hidden_groups(parts: dict[str, Part], k: int) -> dict[str, Any]:
    train, test = parts["train"], parts["test"]
    x, y, groups = parts["validation"]
    chosen = [np.flatnonzero(groups == g)[:k] for g in range(groups.max() + 1)]
    rows = np.concatenate(chosen)
    few = x[rows], y[rows], groups[rows]
    given, plain = named(few), train[:2]
    fits = {
        "erm": lambda: regression(1.0, train, None),
        "class_weighted": lambda: regression(1.0, train, even(train[1])),
        "labelled_only": lambda: TunedGroupDROClassifier(random_state=0).fit(*few),
        "pg_dro": lambda: PGDROClassifier().fit(*plain, **given),
        "soft": lambda: SoftGroupDROClassifier().fit(*plain, **given),
        "all_known": lambda: TunedGroupDROClassifier().fit(*train, **given),
    }
    found = {name: timed(fit, test, few) for name, fit in fits.items()}
    for name in ("pg_dro", "soft"):
        right = found[name][0].group_probabilities_.argmax(axis=1) == train[2]
        found[name][1]["groups_right"] = float(right.mean())
    least = min(len(own) for own in chosen)
    return {"k": k, "least": least, "methods": {name: row for name, (_, row) in found.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the results there")
    args = parser.parse_args()
    results = []
    with threadpool_limits(1), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for case in cases(args.data):
            for seed in range(args.seeds):
                parts = case.draw(seed)
                row = {"case": case.name, "seed": seed, "features": parts["train"][0].shape[1]}
                row["known"] = known_groups(parts)
                row["hidden"] = [hidden_groups(parts, k) for k in LABELLED]
                results.append(row)
                shown = {name: round(m["worst_accuracy"], 3) for name, m in row["known"].items()}
                print(case.name, seed, shown, flush=True)
                for one in row["hidden"]:
                    shown = {n: round(m["worst_accuracy"], 3) for n, m in one["methods"].items()}
                    print("  ", one["k"], shown, flush=True)
    if args.json:
        record = {
            "command": shlex.join(["python", *sys.argv]),
            "train": TRAIN,
            "validation": HELD,
            "results": results,
            "warnings": sorted({str(w.message) for w in said}),
        }
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
