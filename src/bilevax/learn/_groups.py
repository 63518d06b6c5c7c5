"""Groups of rows: their names, and whether there are enough rows of each."""

from __future__ import annotations

from typing import Any

import numpy as np

from bilevax.arguments import warn

#: Fewer validation rows than this say little about a group.
FEW = 5


def coded(groups: Any, count: int, name: str) -> tuple[np.ndarray, np.ndarray]:
    """The distinct groups, sorted, and the number of its group for each row."""
    groups = np.asarray(groups)
    if groups.shape != (count,):
        raise ValueError(
            f"{name} must have one entry for each of the {count} rows, not shape {groups.shape}"
        )
    missing = sum(g is None or g != g for g in groups.tolist())
    if missing:
        raise ValueError(f"{name}: {missing} rows have no group (NaN or None); name one for them")
    try:
        return np.unique(groups, return_inverse=True)
    except TypeError:
        raise TypeError(f"{name} must all be of one kind, such as strings or numbers") from None


def coded_like(groups: Any, names: np.ndarray, count: int, name: str) -> np.ndarray:
    """The numbers of other rows' groups among those names."""
    own, code = coded(groups, count, name)
    unknown, absent = np.setdiff1d(own, names), np.setdiff1d(names, own)
    if len(unknown):
        raise ValueError(f"{name} has groups without any training row: {unknown.tolist()}")
    if len(absent):
        raise ValueError(
            f"{name} has no row of the groups {absent.tolist()}, whose loss can then not be judged"
        )
    return np.searchsorted(names, own)[code]


def check_enough(names: np.ndarray, code: np.ndarray, weight: np.ndarray, part: str) -> None:
    """Refuse a group without rows that weigh anything; warn of a very small one."""
    counts = np.bincount(code[weight > 0], minlength=len(names))
    if not counts.all():
        empty = [str(names[g]) for g in np.flatnonzero(counts == 0)]
        raise ValueError(f"the {part} part has no row, or only rows of weight 0, of {empty}")
    if part == "validation" and counts.min() < FEW:
        few = {str(names[g]): int(counts[g]) for g in np.flatnonzero(counts < FEW)}
        said = ", ".join(f"{name!r} ({count})" for name, count in few.items())
        warn(
            f"these groups have fewer than {FEW} validation rows, so that their loss is hardly "
            f"known: {said}",
            UserWarning,
        )
