"""Accuracies as text."""

from __future__ import annotations

from typing import Any

from bilevax.deep.tables import SPLITS


def table_of(results: dict[str, Any]) -> str:
    """Average, worst and each group on every split, in percent."""
    names = ["average", "worst group", *results["groups"]]
    width = max(len(name) for name in names)
    lines = [f"{'':{width}}  " + "".join(f"{split:>12}" for split in SPLITS)]
    columns = []
    for split in SPLITS:
        found = results["accuracy"][split]
        columns.append([found["average"], found["worst"], *found["groups"]])
    for name, *row in zip(names, *columns):
        lines.append(f"{name:{width}}  " + "".join(f"{100 * value:10.1f} %" for value in row))
    return "\n".join(lines)
