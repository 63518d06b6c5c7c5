"""From raw columns to numbers and categories: the first step of a saved pipeline.

What is decided once, on the table that a model is made from, is kept: the kind of each column, how
it is written, its range and its categories. The same rows are then read alike in training, by the
saved model and by `bilevax predict`, whether their cells are text or typed already.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from sklearn.base import BaseEstimator, TransformerMixin
from sklearn.utils.validation import check_is_fitted

from bilevax.arguments import warn
from bilevax.learn.columns import (
    DATES,
    MISSING,
    can_have_commas,
    example,
    kind_of,
    read_as,
    shows_commas,
)
from bilevax.learn.datasets import group_names

#: A categorical column keeps this many values, the rest become one.
MOST_CATEGORIES = 50
#: A text column is an id if this share of its values occur once.
DISTINCT = 0.95
#: What columns are called that number the rows, or name them.
_COUNTER = re.compile(r"unnamed: \d+|index|row|", re.IGNORECASE)
_ID = re.compile(r"(.*[_\-. ])?(?i:id|key|no|nr|number)|.*[a-z]I[Dd]")


class TableReader(TransformerMixin, BaseEstimator):
    """Reads the columns of a table that can be learnt from.

    Args:
        drop: columns to leave out.
        groups: the columns that make groups, whose shares are kept to be compared with.

    Fitted: `columns_`, for each column that is used its kind ("number", "truth", "date" or
    "category"), how it is written, its range or its categories, and whether a value was missing;
    `group_counts_`, the rows of each group; `notes_`, what a user should know.

    `transform` gives numbers, NaN where one is missing, and categories, "(missing)" where one is.
    A word that is no number where numbers are expected counts as missing, with a warning.
    """

    def __init__(self, drop: Sequence[str] = (), groups: Sequence[str] = ()):
        self.drop = drop
        self.groups = groups

    def fit(self, X: Any, y: Any = None) -> TableReader:
        self._read(X)
        return self

    def fit_transform(self, X: Any, y: Any = None, **fit_params: Any) -> pd.DataFrame:
        return self._read(X)

    def transform(self, X: Any) -> pd.DataFrame:
        """The columns that are used, read; others of the table are not looked at."""
        self.check_columns(X)
        read = {}
        for name, kind in self.columns_.items():
            read[name], odd = self.read_column(X, name)
            if odd.any():
                example = X[name].to_numpy(dtype=object)[odd][0]
                warn(
                    f"{name}: {odd.sum()} of {len(X)} values are no {kind['kind']} ({example!r}) "
                    "and count as missing",
                    UserWarning,
                )
        return pd.DataFrame(read, index=X.index)

    def read_column(self, X: Any, name: str) -> tuple[np.ndarray, np.ndarray]:
        """The cells of one column, and which ones of them cannot be read and count as missing."""
        kind = self.columns_[name]
        cells, odd = _read_as(X, name, kind)
        if kind["kind"] != "category":
            odd |= np.isinf(cells)
            cells[odd] = np.nan
        return cells, odd

    def check_columns(self, X: Any) -> None:
        """Refuse what is no table, or one that lacks a column."""
        check_is_fitted(self)
        _check_table(X)
        if absent := [name for name in self.columns_ if name not in X]:
            raise ValueError(
                f"there is no column {', '.join(map(repr, absent))}, which the model needs; there "
                f"are {', '.join(map(str, X.columns))}"
            )

    def get_feature_names_out(self, input_features: Any = None) -> np.ndarray:
        check_is_fitted(self)
        return np.array(list(self.columns_), dtype=object)

    def observe(self, features: pd.DataFrame, X: Any) -> list[str]:
        """Keep what these rows hold, as the training part, for new rows to be held against.

        Returns the columns that are used from now on: not those that are constant in these rows.
        """
        self.group_counts_ = group_counts(X, self.groups)
        for name, kind in self.columns_.items():
            kind |= _seen(kind, features[name].to_numpy())
        constant = [name for name in features if _constant(self.columns_[name], features[name])]
        if constant:
            self.notes_.append(
                f"left out, because they are constant in the training part: {', '.join(constant)}"
            )
            self._keep({name: k for name, k in self.columns_.items() if name not in constant})
        return list(self.columns_)

    def _read(self, X: Any) -> pd.DataFrame:
        _check_table(X)
        self.notes_: list[str] = []
        self.group_counts_ = group_counts(X, self.groups)
        constant, read, kinds = [], {}, _kinds(X, self.drop)
        notes = _use_one_comma(X, kinds)
        for name, kind in kinds.items():
            cells, odd = _read_as(X, name, kind)
            match _useless(name, kind, cells):
                case "":
                    read[name] = cells
                    self.notes_ += notes.get(name, [])
                    self.notes_ += _said(X, name, kind, cells, X[name][odd])
                case "constant":
                    constant.append(name)
                case why:
                    self.notes_.append(f"{name} is left out, because {why}")
        if constant:
            self.notes_.append(f"left out, because they are constant: {', '.join(constant)}")
        self._keep({name: kinds[name] | _seen(kinds[name], read[name]) for name in read})
        return pd.DataFrame(read, index=X.index)

    def _keep(self, columns: dict[str, dict[str, Any]]) -> None:
        if not columns:
            raise ValueError("there is no column to learn from")
        self.columns_ = columns
        self.feature_names_in_ = np.array(list(columns), dtype=object)
        self.n_features_in_ = len(columns)


def _seen(kind: dict[str, Any], cells: np.ndarray) -> dict[str, Any]:
    """What cells of a column hold: categories or a range, and whether some are missing."""
    if kind["kind"] == "category":
        values = sorted(map(str, pd.unique(cells)))
        return {"values": values, "missing": MISSING in values}
    known = cells[~np.isnan(cells)]
    low, high = (float(known.min()), float(known.max())) if len(known) else (np.nan, np.nan)
    return {"low": low, "high": high, "missing": len(known) < len(cells)}


def _said(X: Any, name: str, kind: dict[str, Any], cells: np.ndarray, odd: Any) -> list[str]:
    """What a user should know of how a column was read."""
    if kind["kind"] == "category":
        notes = []
        if mixed := kind.pop("mixed", None):
            notes = [f"{name} mixes {', '.join(mixed)}: its words are categories, not numbers"]
        count = len(np.unique(cells[cells != MISSING].astype(str)))
        if count > MOST_CATEGORIES:
            notes.append(
                f"{name} has {count} categories: the {MOST_CATEGORIES - 1} most frequent are "
                "kept, the others count as one"
            )
        return notes
    if infinite := int(np.isinf(cells).sum()):
        raise ValueError(f"the column {name} is infinite in {infinite} rows")
    notes = []
    if kind["kind"] == "date":
        notes.append(
            f"{name} has dates, read as {DATES[kind['written']]} and used as days since 1970"
        )
    if unit := kind.get("unit"):
        shown = example(X[name], kind, "0123456789")
        notes.append(f"{name} has numbers with a unit ({unit}): {shown}")
    if len(odd):
        notes.append(
            f"{name} has {len(odd)} values that are no {kind['kind']}s, such as {odd.iloc[0]!r}, "
            "which count as missing"
        )
    return notes


def _constant(kind: dict[str, Any], cells: Any) -> bool:
    """Whether all cells say the same, or nothing."""
    cells = np.asarray(cells)
    known = cells[cells != MISSING] if kind["kind"] == "category" else cells[~np.isnan(cells)]
    count = len(pd.unique(known))
    return count == 0 or (count == 1 and len(known) == len(cells))


def _kinds(X: Any, drop: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The kind of each column."""
    kinds: dict[str, dict[str, Any]] = {}
    for name in X.columns:
        if name not in drop:
            try:
                kinds[name] = kind_of(X[name])
            except TypeError as error:  # such as lists
                raise ValueError(
                    f"the column {name} holds neither text nor numbers ({error})"
                ) from None
    return kinds


def _use_one_comma(X: Any, kinds: dict[str, dict[str, Any]]) -> dict[str, list[str]]:
    """One clear decimal comma in the table says what points and commas mean in all of it."""
    commas = [name for name, kind in kinds.items() if kind.get("decimal") == ","]
    clear = [name for name in commas if shows_commas(X[name])]
    notes = {}
    for name, kind in kinds.items():
        if name in commas:
            shown = example(X[name], kind, ".,")
            notes[name] = [f"{name} has numbers that are written as 1.234,5: {shown}"]
        elif clear and kind["kind"] == "number" and can_have_commas(X[name]):
            before = example(X[name], kind, ".,")
            kind["decimal"] = ","
            after = example(X[name], kind, ".,")
            notes[name] = [
                f"{name} is read with a decimal comma, as {clear[0]} has one: {after}; by itself "
                f"{before}"
            ]
    return notes


def _read_as(X: Any, name: str, kind: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    try:
        return read_as(X[name], kind)
    except TypeError as error:
        raise ValueError(f"the column {name} holds neither text nor numbers ({error})") from None


def _useless(name: str, kind: dict[str, Any], cells: np.ndarray) -> str:
    """Why nothing can be learnt from a column; "" if something can."""
    if _constant(kind, cells):
        return "constant"
    known = cells[cells != MISSING] if kind["kind"] == "category" else cells[~np.isnan(cells)]
    counts = pd.Series(known).value_counts()
    once = float(np.mean(counts.to_numpy() == 1))
    if kind["kind"] == "category":
        an_id = len(counts) > MOST_CATEGORIES and once >= DISTINCT
        return "it is an id: nearly every row has a value of its own" if an_id else ""
    if kind["kind"] != "number" or len(known) <= 2 or not (np.floor(known) == known).all():
        return ""
    consecutive = known[0] in (0, 1) and bool((np.diff(known) == 1).all())
    if once == 1 and (consecutive or _COUNTER.fullmatch(name)):
        return "it numbers the rows"
    many = len(known) > MOST_CATEGORIES and len(counts) >= DISTINCT * len(known)
    if many and _ID.fullmatch(name):
        return "it is an id: nearly every row has a number of its own"
    return ""


def group_counts(X: Any, columns: Sequence[str]) -> dict[str, int]:
    """How many rows each group of these columns has."""
    if not len(columns):
        return {}
    names, counts = np.unique(group_names(X, None, columns), return_counts=True)
    return {str(name): int(count) for name, count in zip(names, counts)}


def _check_table(X: Any) -> None:
    if not isinstance(X, pd.DataFrame):
        raise TypeError(f"a table with named columns (pandas.DataFrame) is needed, not {type(X)}")
    if odd := [name for name in X.columns if not isinstance(name, str)]:
        raise TypeError(f"the names of columns must be text, not {odd[0]!r}")
    if twice := sorted(set(map(str, X.columns[X.columns.duplicated()]))):
        raise ValueError(f"there is more than one column {', '.join(twice)}")
