"""Comparing robust classifiers on one table: what `bilevax robust` does."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import Pipeline

from bilevax import __version__
from bilevax.learn.group import GroupDROClassifier, TunedGroupDROClassifier
from bilevax.learn.table import PARTS, Table, encoder
from bilevax.progress import Progress

#: The grid that a careful person would search, and the η at which the curve is drawn.
ETAS, L2S = np.geomspace(1e-2, 10**1.5, 8), np.geomspace(1, 1e-4, 5)
CURVE = np.geomspace(1e-3, 1e2, 26)
#: Steps of LogisticRegression's own solver.
MOST_STEPS = 5000


@dataclass(frozen=True)
class Fit:
    """A fitted method, and what it took."""

    key: str
    name: str
    model: Any
    seconds: float
    fits: int
    eta: float | None
    l2: float


@dataclass(frozen=True)
class Comparison:
    """All results, as results.json has them, and the tuned model with its encoder."""

    results: dict[str, Any]
    pipeline: Pipeline


class Encoded:
    """The three parts as matrices."""

    def __init__(self, table: Table):
        self.table = table
        train = table.parts["train"]
        self.encoder = encoder(train.X).fit(train.X)
        self.X = {p: self.encoder.transform(table.parts[p].X) for p in PARTS}
        self.y = {p: table.parts[p].y for p in PARTS}
        self.groups = {p: table.parts[p].groups for p in PARTS}

    def counts(self, part: str) -> np.ndarray:
        """Rows of each group."""
        return np.array([np.sum(self.groups[part] == g) for g in self.table.groups])

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
) -> Comparison:
    """Fit every method, and judge each on the test part."""
    data = Encoded(table)
    count = 4 + len(ETAS) * len(L2S)
    with Progress(progress, total=count + len(CURVE), unit="fits", label=table.name) as bar:
        fits = list(_fits(data, tolerance, bar))
        tuned = fits[-1]
        curve = []
        for eta in CURVE:
            curve.append(data.worst_loss(_fitted(GroupDROClassifier(eta, tuned.l2), data)))
            bar.show(count + len(curve), now="loss against η")
    model = tuned.model
    certificate = model.certificate_
    results = {
        "command": command,
        "version": __version__,
        "data": _described(table, data),
        "classes": [str(c) for c in model.classes_],
        "groups": _group_sizes(data),
        "methods": [_judged(fit, data, bootstrap, seed) for fit in fits],
        "loss_against_eta": {
            "l2": tuned.l2,
            "eta": [float(e) for e in CURVE],
            "worst_validation_loss": curve,
            "tuned_eta": tuned.eta,
            "tuned_loss": data.worst_loss(model),
        },
        "history": [dataclasses.asdict(step) for step in model.history_],
        "certificate": {k: float(v) for k, v in certificate.as_dict().items()},
        "tolerance": tolerance,
        "certified": bool(model.converged_),
        "bootstrap": bootstrap,
        "seed": seed,
        "notes": table.notes,
    }
    steps = [("encoder", data.encoder), ("classifier", model)]
    return Comparison(results, Pipeline(steps))


def _fits(data: Encoded, tolerance: float, bar: Progress) -> Iterator[Fit]:
    """The methods, one after the other, each on the training part."""
    X, y, groups = data.X["train"], data.y["train"], data.groups["train"]
    n = len(y)
    plain = LogisticRegression(max_iter=MOST_STEPS)
    sizes = dict(zip(data.table.groups, data.counts("train")))
    weights = np.array([n / (len(sizes) * sizes[g]) for g in groups])
    l2 = 1 / (plain.C * n)  # scikit-learn's C, as a weight of the mean loss's penalty

    done = itertools.count(1)

    def timed(name: str, fit: Callable[[], Any]) -> tuple[Any, float]:
        bar.show(now=name)
        began = time.perf_counter()
        model = fit()
        seconds = time.perf_counter() - began
        bar.show(next(done))
        return model, seconds

    model, seconds = timed("ERM", lambda: plain.fit(X, y))
    yield Fit("erm", "ERM", model, seconds, 1, None, l2)
    again = LogisticRegression(max_iter=MOST_STEPS)
    model, seconds = timed("reweighted", lambda: again.fit(X, y, sample_weight=weights))
    yield Fit("reweighted", "Reweighted", model, seconds, 1, None, l2)
    model, seconds = timed("DRO", lambda: _fitted(GroupDROClassifier(), data))
    yield Fit("dro", "DRO, default η", model, seconds, 1, model.eta, model.l2)

    best, least, seconds = model, np.inf, 0.0
    for l2 in L2S:
        for eta in ETAS:
            name = f"grid, η {eta:.3g}, l2 {l2:.3g}"
            one = GroupDROClassifier(float(eta), float(l2))
            fit = lambda one=one: (_fitted(one, data), data.worst_loss(one))
            (model, loss), took = timed(name, fit)
            seconds += took
            if loss < least:
                best, least = model, loss
    count = len(ETAS) * len(L2S)
    yield Fit("grid", "DRO, grid search", best, seconds, count, best.eta, best.l2)

    tuned = TunedGroupDROClassifier(tol=tolerance)
    held = {
        "X_val": data.X["validation"],
        "y_val": data.y["validation"],
        "groups_val": data.groups["validation"],
    }
    model, seconds = timed("tuned", lambda: tuned.fit(X, y, groups, **held))
    yield Fit("tuned", "DRO, tuned", model, seconds, 1, model.eta_, model.l2_)


def _fitted(model: GroupDROClassifier, data: Encoded) -> GroupDROClassifier:
    return model.fit(data.X["train"], data.y["train"], data.groups["train"])


def _judged(fit: Fit, data: Encoded, bootstrap: int, seed: int) -> dict[str, Any]:
    """Accuracies on the test part, with 95 % intervals from resampling it group by group."""
    right = fit.model.predict(data.X["test"]) == data.y["test"]
    counts = data.counts("test")
    hits = np.array([right[data.groups["test"] == g].sum() for g in data.table.groups])
    # A group resampled with replacement has a binomial number of hits.
    many = (bootstrap, len(counts))
    draws: np.ndarray = np.random.default_rng(seed).binomial(counts, hits / counts, size=many)
    each = [_interval(hits[g] / counts[g], draws[:, g] / counts[g]) for g in range(len(counts))]
    worst = int(np.argmin(hits / counts))
    return {
        "key": fit.key,
        "name": fit.name,
        "seconds": fit.seconds,
        "fits": fit.fits,
        "eta": fit.eta,
        "l2": fit.l2,
        "average": _interval(hits.sum() / counts.sum(), draws.sum(axis=1) / counts.sum()),
        "worst": {**each[worst], "group": str(data.table.groups[worst])},
        "groups": each,
        "worst_validation_loss": data.worst_loss(fit.model),
    }


def _interval(value: float, draws: np.ndarray) -> dict[str, float]:
    low, high = np.quantile(draws, [0.025, 0.975])
    return {"value": float(value), "low": float(low), "high": float(high)}


def _described(table: Table, data: Encoded) -> dict[str, Any]:
    return {
        "name": table.name,
        "rows": sum(len(data.y[p]) for p in PARTS),
        "features": len(data.encoder.get_feature_names_out()),
        "label": table.label,
        "group_columns": list(table.group_columns),
        "with_label": table.with_label,
        "parts": {p: len(data.y[p]) for p in PARTS},
    }


def _group_sizes(data: Encoded) -> list[dict[str, Any]]:
    counts = {p: data.counts(p) for p in PARTS}
    return [
        {"name": str(g), **{p: int(counts[p][i]) for p in PARTS}}
        for i, g in enumerate(data.table.groups)
    ]


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
    return _aligned([head, *rows]) + "\n\n" + _aligned([("group", "test rows", *names), *groups])


def _aligned(rows: list[tuple[str, ...]]) -> str:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths)).rstrip() for row in rows]
    return "\n".join([lines[0], "─" * max(map(len, lines)), *lines[1:]])
