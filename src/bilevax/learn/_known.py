"""Rows of which some have a known group."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from scipy import sparse

from bilevax.learn._base import Sample, coded
from bilevax.learn._rows import Rows
from bilevax.learn._soft import SoftRows

#: The code of a group that is not known.
UNKNOWN = -1
#: What says so among the groups of a user, besides None, NaN and NA.
UNNAMED = ("-1", "-1.0", "", "na", "nan", "<na>", "none")


def code_known(
    groups: Any, count: int, groups_val: Any, count_val: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The distinct known groups, and the code of each row's group in both parts."""
    parts = [_known(groups, count, "groups"), _known(groups_val, count_val, "groups_val")]
    values = [value for part, known in parts for value in part[known].tolist()]
    if not values:
        raise ValueError(
            "no row has a known group (all are -1, None or NaN): give some in groups, or in "
            "groups_val for the rows of X_val"
        )
    kinds = {str if isinstance(value, str) else float for value in values}
    if len(kinds) > 1:
        raise TypeError("groups and groups_val must all be of one kind, such as strings or numbers")
    names, code = coded(np.array(values), len(values), "groups and groups_val")
    codes = []
    for _, known in parts:
        own = np.full(len(known), UNKNOWN)
        own[known], code = code[: known.sum()], code[known.sum() :]
        codes.append(own)
    return names, codes[0], codes[1]


def _known(groups: Any, count: int, name: str) -> tuple[np.ndarray, np.ndarray]:
    """The groups, and whether each is known."""
    values = np.full(count, None) if groups is None else np.asarray(groups, dtype=object)
    if values.shape != (count,):
        raise ValueError(
            f"{name} must have one entry for each of the {count} rows, not shape {values.shape}"
        )
    absent = [str(v).strip().lower() in UNNAMED for v in values]
    return values, ~(np.asarray(pd.isna(values), bool) | np.array(absent, bool))


def seen_groups(label: np.ndarray, group: np.ndarray, classes: int, groups: int) -> np.ndarray:
    """Which groups known rows of each class have, classes × groups."""
    seen = np.zeros((classes, groups), bool)
    seen[label, group] = True
    return seen


def soft_rows(sample: Sample, seen: np.ndarray) -> SoftRows:
    """The rows, with the groups that each may be in."""
    rows, known = sample.rows, sample.group != UNKNOWN
    own = np.eye(seen.shape[1], dtype=bool)[sample.group]
    allowed = np.where(known[:, None], own, seen[rows.label])
    parts = rows.x, rows.label, rows.classes, rows.intercept
    return SoftRows(*parts, allowed=allowed, weight=sample.weight)


def joined(one: Sample, other: Sample) -> Sample:
    """The rows of both."""
    a, b = one.rows, other.rows
    stack: Any = sparse.vstack if sparse.issparse(a.x) or sparse.issparse(b.x) else np.concatenate
    x = stack([a.x, b.x])
    rows = Rows(
        x.tocsr() if sparse.issparse(x) else x,
        np.concatenate([a.label, b.label]),
        a.classes,
        a.intercept,
    )
    group = np.concatenate([one.group, other.group])
    return Sample(rows, group, np.concatenate([one.weight, other.weight]))


def check_identified(train: Sample, seen: np.ndarray, names: np.ndarray, classes: Any) -> None:
    """Refuse rows of which nothing says the group, and groups that no row can be in."""
    hidden = train.group == UNKNOWN
    asked = np.unique(train.rows.label[hidden])
    if len(lost := asked[~seen[asked].any(axis=1)]):
        raise ValueError(
            f"rows of the classes {classes[lost].tolist()} have no group, and no row of these "
            "classes has a known one: nothing says which groups they may be in"
        )
    reached = np.isin(np.arange(len(names)), train.group) | seen[asked].any(axis=0)
    if not reached.all():
        raise ValueError(
            f"no training row can be in the groups {names[~reached].tolist()}: none is known to "
            "be, and none without a group has a label that these are seen with"
        )
