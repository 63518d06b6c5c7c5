"""The tables of rows that move and of groups that few rows have."""

from __future__ import annotations

import math
import statistics
from typing import Any

from table_text import read, table

KNOWN = {
    "reweighted": "reweighted, C by folds",
    "tuned": "group DRO, tuned",
    "fixed_radius": "one radius, by a grid",
    "hierarchical": "all radii tuned",
}
HIDDEN = {
    "erm": "ERM",
    "class_weighted": "weighted by class",
    "labelled_only": "group DRO, labelled rows",
    "pg_dro": "PG-DRO",
    "soft": "bilevel",
    "all_known": "all groups known",
}


def _shown(values: list[float]) -> str:
    """The mean, and the standard error of it."""
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return f"{statistics.fmean(values):.3f} ± {error:.3f}"


def _certified(found: list[dict[str, Any]]) -> str:
    return f"{sum(bool(m['certified']) for m in found)} of {len(found)}"


def hierarchical() -> str:
    record = read("hierarchical")
    cases: dict[str, list[dict[str, Any]]] = {}
    for row in record["results"]:
        cases.setdefault(row["case"], []).append(row)
    known, hidden = [], []
    for name, found in cases.items():
        for key, shown in KNOWN.items():
            of = [row["known"][key] for row in found]
            mean = lambda what, of=of: _shown([m[what] for m in of])
            seconds = statistics.fmean(m["seconds"] for m in of)
            certified = _certified(of) if "certified" in of[0] else ""
            known.append(
                [
                    name, shown, mean("worst_accuracy"), mean("worst_loss"),
                    mean("worst_validation_loss"), mean("accuracy"), f"{seconds:.2f}", certified,
                ]
            )  # fmt: skip
        for i, one in enumerate(found[0]["hidden"]):
            of = [row["hidden"][i] for row in found]
            cells = [_shown([m["methods"][key]["worst_accuracy"] for m in of]) for key in HIDDEN]
            least = min(m["least"] for m in of)
            rows = f"{one['k']}" if least >= one["k"] else f"{one['k']} (at least {least})"
            right = statistics.fmean(m["methods"]["soft"]["groups_right"] for m in of)
            certified = _certified([m["methods"]["soft"] for m in of])
            hidden.append([name, rows, *cells, f"{right:.2f}", certified])
    seeds = len(next(iter(cases.values())))
    header = ["data", "method", "worst accuracy", "worst loss", "validation loss", "accuracy"]
    header_hidden = ["data", "labelled a group", *HIDDEN.values(), "groups right", "certified"]
    return f"""## Rows that move, and groups that few rows have

{record["train"]:,} training and {record["validation"]:,} validation rows, {seeds} splits; the
others are test rows. Means with their standard errors; “worst” is the worst group's, “certified” at
ε = 0.001. The reweighted regression is trained on the training and validation rows together, so its
validation loss is one of rows it has seen. Tuned radii lower the validation loss, for which they
are tuned; on test rows the differences are within two standard errors. `{record["command"]}`

{table([*header, "seconds", "certified"], known)}

With no group of a training row known, and so many validation rows of each group that have one:
accuracy in the worst group of the test rows. PG-DRO fits the predictor of groups and leaves it;
bilevel (`SoftGroupDROClassifier`) tunes it. “Groups right” says how many training rows have their
group as the most probable one, after tuning: the sex is among the features here, so that few rows
tell the groups.

{table(header_hidden, hidden)}
"""
