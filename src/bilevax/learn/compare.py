"""Comparing robust classifiers on one table: what `bilevax robust` does."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import Pipeline

from bilevax import __version__
from bilevax.learn._threads import threads_for
from bilevax.learn.group import GroupDROClassifier, TunedGroupDROClassifier
from bilevax.learn.hierarchical import TunedHierarchicalDROClassifier
from bilevax.learn.table import PARTS, Table, encoder
from bilevax.progress import EVERY, Progress

#: The grid that a careful person would search, and the η at which the curve is drawn.
ETAS, L2S = np.geomspace(1e-2, 10**1.5, 8), np.geomspace(1, 1e-4, 5)
CURVE = np.geomspace(1e-3, 1e2, 26)
#: Steps of LogisticRegression's own solver.
MOST_STEPS = 5000


class Encoded:
    """The three parts as matrices."""

    def __init__(self, table: Table):
        self.table = table
        train = table.parts["train"]
        self.encoder = encoder(train.X).fit(train.X)
        self.X = {p: self.encoder.transform(table.parts[p].X) for p in PARTS}
        self.y = {p: table.parts[p].y for p in PARTS}
        self.groups = {p: table.parts[p].groups for p in PARTS}

    @property
    def columns(self) -> int:
        return len(self.encoder.get_feature_names_out())

    def counts(self, part: str) -> np.ndarray:
        """Rows of each group."""
        return np.array([np.sum(self.groups[part] == g) for g in self.table.groups])

    def served(self, model: Any) -> Pipeline:
        """A fitted model with all that comes before it: it takes rows as they come."""
        steps = [("reader", self.table.reader), ("encoder", self.encoder), ("classifier", model)]
        return Pipeline(steps)

    def fit(self, model: GroupDROClassifier) -> GroupDROClassifier:
        """Fit a model to the training part."""
        return model.fit(self.X["train"], self.y["train"], self.groups["train"])

    def worst_loss(self, model: Any) -> float:
        """The largest mean log loss of a group, on the validation part."""
        own = np.searchsorted(model.classes_, self.y["validation"])
        losses = -model.predict_log_proba(self.X["validation"])[np.arange(len(own)), own]
        of = lambda g: float(losses[self.groups["validation"] == g].mean())
        return max(of(g) for g in self.table.groups)


def compare(
    table: Table,
    *,
    tolerance: float = 1e-3,
    bootstrap: int = 1000,
    seed: int = 0,
    command: str = "",
    progress: bool | None = None,
    fast: bool = False,
) -> tuple[dict[str, Any], Pipeline]:
    """All results, as results.json has them, and the tuned model that takes raw rows.

    `fast` leaves out the grid search, the curve of the loss against η, and rows that move.
    """
    grid, etas = ([], []) if fast else (_grid(), CURVE)
    count = 4 + len(grid) + (not fast)
    total = count + len(etas)
    with Progress(progress, total=total, unit="fits", label=table.name, every=EVERY) as bar:
        bar.show(now="encoding")
        data = Encoded(table)
        with threads_for(len(data.y["train"]), data.columns):  # also of scikit-learn's products
            fits = list(_fits(data, grid, tolerance, bar, fast))
        model, tuned = next(pair for pair in fits if pair[1]["key"] == "tuned")
        curve = []
        for eta in etas:
            curve.append(data.worst_loss(data.fit(GroupDROClassifier(eta, tuned["l2"]))))
            bar.show(count + len(curve), now="loss against η")
    counts = {part: data.counts(part) for part in PARTS}
    sizes = {part: len(data.y[part]) for part in PARTS}
    results = {
        "command": command,
        "version": __version__,
        "data": {
            "name": table.name,
            "rows": sum(sizes.values()),
            "features": data.columns,
            "label": table.label,
            "group_columns": list(table.group_columns),
            "with_label": table.with_label,
            "parts": sizes,
        },
        "classes": [str(c) for c in model.classes_],
        "groups": [
            {"name": str(name), **{part: int(counts[part][g]) for part in PARTS}}
            for g, name in enumerate(table.groups)
        ],
        "methods": [fit | _accuracies(model, data, bootstrap, seed) for model, fit in fits],
        "loss_against_eta": {
            "l2": tuned["l2"],
            "eta": [float(e) for e in etas],
            "worst_validation_loss": curve,
            "tuned_eta": tuned["eta"],
            "tuned_loss": data.worst_loss(model),
        },
        "history": [dataclasses.asdict(step) for step in model.history_],
        "certificate": {k: float(v) for k, v in model.certificate_.as_dict().items()},
        "tolerance": tolerance,
        "certified": bool(model.converged_),
        "bootstrap": bootstrap,
        "seed": seed,
        "notes": table.notes,
    }
    return results, data.served(model)


def _grid() -> list[GroupDROClassifier]:
    return [GroupDROClassifier(float(eta), float(l2)) for l2 in L2S for eta in ETAS]


def _fits(
    data: Encoded, grid: list[GroupDROClassifier], tolerance: float, bar: Progress, fast: bool
) -> Iterator[tuple[Any, dict[str, Any]]]:
    """The methods, one after the other: the fitted model, and what it took."""
    X, y, groups = data.X["train"], data.y["train"], data.groups["train"]
    done, seconds = itertools.count(1), 0.0

    def timed(label: str, fit: Callable[[], Any]) -> Any:
        nonlocal seconds
        bar.show(now=label)
        began = time.perf_counter()
        found = fit()
        seconds += time.perf_counter() - began
        bar.show(next(done))
        return found

    def record(key: str, name: str, eta: float | None, l2: float, fits: int = 1) -> dict[str, Any]:
        nonlocal seconds
        took, seconds = seconds, 0.0
        return {"key": key, "name": name, "seconds": took, "fits": fits, "eta": eta, "l2": l2}

    plain = LogisticRegression(max_iter=MOST_STEPS)
    l2 = 1 / (plain.C * len(y))  # scikit-learn's C, as a weight of the mean loss's penalty
    timed("ERM", lambda: plain.fit(X, y))
    yield plain, record("erm", "ERM", None, l2)

    even = LogisticRegression(max_iter=MOST_STEPS)
    sizes = dict(zip(data.table.groups, data.counts("train")))
    weights = np.array([len(y) / (len(sizes) * sizes[g]) for g in groups])
    timed("reweighted", lambda: even.fit(X, y, sample_weight=weights))
    yield even, record("reweighted", "Reweighted", None, l2)

    dro = timed("DRO", lambda: data.fit(GroupDROClassifier()))
    yield dro, record("dro", "DRO, default η", dro.eta, dro.l2)

    losses = [
        timed(f"grid, η {m.eta:.3g}, l2 {m.l2:.3g}", lambda m=m: data.worst_loss(data.fit(m)))
        for m in grid
    ]
    if grid:
        best = grid[int(np.argmin(losses))]
        yield best, record("grid", "DRO, grid search", best.eta, best.l2, len(grid))

    tuned = TunedGroupDROClassifier(tol=tolerance)
    names = {"X_val": data.X, "y_val": data.y, "groups_val": data.groups}
    held = {name: of["validation"] for name, of in names.items()}
    timed("tuned", lambda: tuned.fit(X, y, groups, **held))
    yield tuned, record("tuned", "DRO, tuned", tuned.eta_, tuned.l2_)

    if fast:
        return
    moved = TunedHierarchicalDROClassifier(tol=tolerance)
    timed("tuned, with moves", lambda: moved.fit(X, y, groups, **held))
    radii = {str(name): float(r) for name, r in zip(moved.groups_, moved.radii_)}
    of_moves = {"radii": radii, "certified": moved.converged_}
    yield moved, record("hierarchical", "DRO, moved rows", moved.eta_, moved.l2_) | of_moves


def _accuracies(model: Any, data: Encoded, bootstrap: int, seed: int) -> dict[str, Any]:
    """Accuracies on the test part, with 95 % intervals from resampling it group by group."""
    right = model.predict(data.X["test"]) == data.y["test"]
    counts = data.counts("test")
    hits = np.array([right[data.groups["test"] == g].sum() for g in data.table.groups])
    # A group resampled with replacement has a binomial number of hits.
    many = (bootstrap, len(counts))
    draws: np.ndarray = np.random.default_rng(seed).binomial(counts, hits / counts, size=many)
    each = [_interval(hits[g] / counts[g], draws[:, g] / counts[g]) for g in range(len(counts))]
    worst = int(np.argmin(hits / counts))
    return {
        "average": _interval(hits.sum() / counts.sum(), draws.sum(axis=1) / counts.sum()),
        "worst": {**each[worst], "group": str(data.table.groups[worst])},
        "groups": each,
        "worst_validation_loss": data.worst_loss(model),
    }


def _interval(value: float, draws: np.ndarray) -> dict[str, float]:
    low, high = np.quantile(draws, [0.025, 0.975])
    return {"value": float(value), "low": float(low), "high": float(high)}


def table_of(results: dict[str, Any]) -> str:
    """The results as text: one row a method, then one row a group."""
    show = lambda a: f"{a['value']:.3f} ({a['low']:.3f} to {a['high']:.3f})"
    number = lambda v: "" if v is None else f"{v:.3g}"
    head = ("method", "average accuracy", "worst group", "which", "η", "l2", "seconds")
    rows = [
        (
            m["name"], show(m["average"]), show(m["worst"]), m["worst"]["group"],
            number(m["eta"]), number(m["l2"]), f"{m['seconds']:.2f}",
        )
        for m in results["methods"]
    ]  # fmt: skip
    names = [m["name"] for m in results["methods"]]
    groups = [
        (g["name"], str(g["test"]), *(f"{m['groups'][i]['value']:.3f}" for m in results["methods"]))
        for i, g in enumerate(results["groups"])
    ]
    return aligned([head, *rows]) + "\n\n" + aligned([("group", "test rows", *names), *groups])


def aligned(rows: list[tuple[str, ...]]) -> str:
    """Rows of text in columns, the first row above a line."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths)).rstrip() for row in rows]
    return "\n".join([lines[0], "─" * max(map(len, lines)), *lines[1:]])
