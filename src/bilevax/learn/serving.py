"""Predictions for new rows by a saved pipeline, with what is odd about these rows.

Each cell is held against what its column had in training: its kind, its range, its categories,
whether values were missing. The groups' shares are compared with those of training by Pearson's
test of homogeneity, χ² = Σ (O − E)²/E over both tables, and by the total variation ½ Σ |s − t|.
Where some E is below 5, p is (1 + #{χ² drawn ≥ χ²})/(1 + draws) instead, where the groups of the
new rows are drawn from all rows: the multivariate hypergeometric distribution.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats
from sklearn.pipeline import Pipeline

from bilevax.learn.columns import MISSING
from bilevax.learn.reader import TableReader, group_counts

#: Shares of groups have changed if chance does that less often than CHANCE, and where at least
#: LEAST_MOVED of the rows would have to be of another group.
CHANCE, LEAST_MOVED = 1e-3, 0.02
#: The draws for p where some group is expected less often than FEW.
DRAWS, FEW = 9999, 5
#: The groups, or categories, that a sentence names.
MOST_NAMED = 5


@dataclass(frozen=True)
class Finding:
    """Something odd about a column, and the rows where it is so."""

    column: str
    what: str  # such as "is missing"
    rows: np.ndarray  # of truth values

    def __str__(self) -> str:
        return f"{self.column} {self.what} in {self.rows.sum()} of {len(self.rows)} rows"


@dataclass(frozen=True)
class Served:
    """Predictions for rows of a table."""

    table: pd.DataFrame  # prediction, probabilities, warnings; one row for each
    findings: list[Finding]
    drift: list[str]


def serve(model: Any, rows: pd.DataFrame) -> Served:
    """The predictions of a pipeline that `bilevax robust` wrote."""
    reader: Any = model[0] if isinstance(model, Pipeline) else None
    if not isinstance(reader, TableReader):
        raise ValueError("the model does not read tables: it is none that `bilevax robust` wrote")
    findings = examine(reader, rows)
    with warnings.catch_warnings():
        # The findings say these things, with the rows.
        warnings.filterwarnings("ignore", "Found unknown categories", UserWarning)
        warnings.filterwarnings("ignore", ".* count as missing", UserWarning)
        probability = model[1:].predict_proba(reader.transform(rows))
    found = pd.DataFrame({"prediction": model.classes_[probability.argmax(axis=1)]}, rows.index)
    for place, name in enumerate(model.classes_):
        found[f"probability {name}"] = probability[:, place]
    found["warnings"] = _of_rows(findings, len(rows))
    return Served(found, findings, drift(reader, rows))


def examine(reader: TableReader, rows: pd.DataFrame) -> list[Finding]:
    """What the columns hold that they did not hold in training."""
    reader.check_columns(rows)
    findings: list[Finding] = []
    for name, kind in reader.columns_.items():
        cells, odd = reader.read_column(rows, name)
        findings.append(Finding(name, f"is no {kind['kind']}", odd))
        if kind["kind"] == "category":
            missing = cells == MISSING
            unknown = ~np.isin(cells.astype(str), kind["values"]) & ~missing
            findings.append(Finding(name, "has a category that training had not", unknown))
        else:
            missing = np.isnan(cells) & ~odd
            outside = (cells < kind["low"]) | (cells > kind["high"])
            findings.append(Finding(name, f"is outside of {shown_range(kind)}", outside))
        if not kind["missing"]:
            findings.append(Finding(name, "is missing, which it never was in training", missing))
    return [finding for finding in findings if finding.rows.any()]


def drift(reader: TableReader, rows: pd.DataFrame) -> list[str]:
    """Sentences on how the shares of the groups differ from those of training."""
    before = reader.group_counts_
    if not before or not len(rows):
        return []
    if absent := [column for column in reader.groups if column not in rows]:
        return [f"there is no column {', '.join(absent)}: the shares of groups are not compared"]
    now = group_counts(rows, reader.groups)
    names = sorted(set(before) | set(now))
    counts = np.array([[of.get(name, 0) for name in names] for of in (before, now)])
    said = [
        f"the group {name!r}, {now[name]} of {len(rows)} rows, was not in training: nothing is "
        "known of how the model does there"
        for name in now
        if name not in before
    ]
    shares = counts / counts.sum(axis=1, keepdims=True)
    moved = np.abs(shares[1] - shares[0])
    if len(names) < 2 or moved.sum() / 2 < LEAST_MOVED:
        return said
    chance = homogeneity(counts)
    if chance >= CHANCE:
        return said
    largest = [g for g in np.argsort(-moved)[:MOST_NAMED] if moved[g] > 0]
    changes = [f"{names[g]} {shares[1, g]:.1%} (training {shares[0, g]:.1%})" for g in largest]
    said.append(
        f"the shares of groups differ from training's by more than chance (p = {chance:.1g}): "
        f"{', '.join(changes)}"
    )
    return said


def homogeneity(counts: np.ndarray) -> float:
    """How likely two rows of counts, from the same shares, differ by so much."""
    test: Any = stats.chi2_contingency(counts, correction=False)
    expected = test.expected_freq
    if expected.min() >= FEW:
        return float(test.pvalue)
    draw = np.random.default_rng(0)  # the same answer for the same counts
    both, new = counts.sum(axis=0), int(counts[1].sum())
    drawn = draw.multivariate_hypergeometric(both, new, size=DRAWS, method="marginals")
    # Both tables differ from E by the same counts, as their sum is given.
    found = ((drawn - expected[1]) ** 2 * (1 / expected).sum(axis=0)).sum(axis=1)
    return float(1 + np.sum(found >= test.statistic * (1 - 1e-12))) / (1 + DRAWS)


def shown_range(kind: dict[str, Any]) -> str:
    """What a column had in training, as a reader wants it."""
    if kind["kind"] == "category":
        known = [value for value in kind["values"] if value != MISSING]
        more = len(known) - MOST_NAMED
        return ", ".join(known[:MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
    ends = [kind["low"], kind["high"]]
    if kind["kind"] == "date":
        return " to ".join(str((pd.Timestamp(0) + pd.Timedelta(days=end)).date()) for end in ends)
    return " to ".join(f"{end:g}" for end in ends)


def _of_rows(findings: list[Finding], count: int) -> np.ndarray:
    """The findings of each row in one text."""
    said = np.full(count, "", dtype=object)
    for finding in findings:
        for row in np.flatnonzero(finding.rows):
            said[row] += ("; " if said[row] else "") + f"{finding.column} {finding.what}"
    return said
