"""From a table to features, labels and groups in three parts; errors say what is wrong with it."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from sklearn.compose import ColumnTransformer
from sklearn.impute import SimpleImputer
from sklearn.model_selection import train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler

from bilevax.learn.columns import kind_of, read_as, words
from bilevax.learn.datasets import group_names
from bilevax.learn.reader import MOST_CATEGORIES, TableReader

PARTS = ("train", "validation", "test")
#: What a split column may call the parts.
CALLED = {
    "train": ("train", "training", "0"),
    "validation": ("validation", "val", "valid", "dev", "1"),
    "test": ("test", "testing", "2"),
}
#: The shares of the parts where no column says them.
SHARES = {"train": 0.6, "validation": 0.2, "test": 0.2}
#: A label with more values than this is refused: it is rather a number to predict.
MOST_CLASSES = 100
#: A group column with more different numbers than this is refused: they are no groups.
MOST_NUMBERS = 20
#: Whole numbers below this are exact in float64; labels that are others stay text.
EXACT = 2.0**53
#: An error names this many groups.
MOST_NAMED = 8


@dataclass(frozen=True)
class Part:
    """The rows to train on, to validate on, or to test on."""

    X: pd.DataFrame
    y: np.ndarray
    groups: np.ndarray


@dataclass(frozen=True)
class Table:
    """A table that was checked and cut into parts."""

    name: str
    label: str
    group_columns: tuple[str, ...]
    with_label: bool
    groups: np.ndarray  # the distinct ones, sorted
    parts: dict[str, Part]
    reader: TableReader  # how the columns were read, for other rows
    notes: list[str]  # what was done that the user should know


def prepare(
    table: Any,
    name: str,
    label: str,
    group_columns: Sequence[str],
    *,
    with_label: bool = True,
    split: str | None = None,
    drop: Sequence[str] = (),
    least: int = 10,
    seed: int = 0,
    drop_unlabelled: bool = False,
    notes: Sequence[str] = (),
) -> Table:
    """Check a table, and cut it into parts with every group in each; `notes` go before its own."""
    splits = [] if split is None else [split]
    for column in (label, *group_columns, *splits, *drop):
        check_column(table, column)
    if label in group_columns:
        raise ValueError(f"{label} is the label; groups are the label together with other columns")
    if not group_columns and not with_label:
        raise ValueError("no columns to make groups of")
    known = words(table[label])[1] >= 0
    notes = list(notes)
    if drop_unlabelled and not known.all():
        notes.append(
            f"{np.sum(~known)} of {len(known)} rows without a label are left out"
            f"{_marks(table[label])}"
        )
        table, known = table[known], known[known]
    y = _labels(table[label], label, int(np.sum(~known)))
    for column in group_columns:
        _check_group_column(table[column], column)
    groups = group_names(table, label if with_label else None, group_columns)
    part = _split_by(table[split], split, groups, seed) if split else _split(groups, seed)
    reader = TableReader(drop=[label, *drop, *splits], groups=list(group_columns))
    features = reader.fit_transform(table)
    refuse_copies(features, y, label)
    names = np.unique(groups)
    _check_groups(names, groups, part, least)
    train = part == "train"
    features = features[reader.observe(features.loc[train], table[train])]
    parts = {p: Part(features.loc[part == p], y[part == p], groups[part == p]) for p in PARTS}
    if absent := sorted(set(map(str, np.unique(y))) - set(map(str, np.unique(parts["train"].y)))):
        raise ValueError(f"the training part has no row of the label {', '.join(absent)}")
    notes += reader.notes_
    return Table(name, label, tuple(group_columns), with_label, names, parts, reader, notes)


def encoder(features: pd.DataFrame) -> ColumnTransformer:
    """Numbers are scaled, categories become one column each; what is missing is said by a column.

    A category that was not seen before counts as a rare one, with a warning.
    """
    numbers = [c for c in features if pd.api.types.is_numeric_dtype(features[c])]
    categories = [c for c in features if c not in numbers]
    of_numbers = make_pipeline(
        SimpleImputer(strategy="median", add_indicator=True), StandardScaler()
    )
    of_categories = OneHotEncoder(
        handle_unknown="warn", max_categories=MOST_CATEGORIES, sparse_output=False
    )
    return ColumnTransformer(
        [("numbers", of_numbers, numbers), ("categories", of_categories, categories)]
    )


def check_column(table: pd.DataFrame, column: str) -> None:
    """Refuse a column that is not there, with the nearest one that is."""
    if column in table:
        return
    near = difflib.get_close_matches(column, list(table.columns), n=1, cutoff=0.5)
    lower = {c.lower(): c for c in table.columns}
    near = [lower[column.lower()]] if column.lower() in lower else near
    hint = f"; did you mean {near[0]!r}?" if near else f"; there are {', '.join(table.columns)}"
    raise ValueError(f"there is no column {column!r}{hint}")


def _labels(column: Any, label: str, missing: int) -> np.ndarray:
    """The label of each row: a whole number or a truth value if every word is one, or its word."""
    if missing:
        raise ValueError(
            f"the label {label} is missing in {missing} of {len(column)} rows"
            f"{_marks(column)}; --drop-unlabelled leaves them out"
        )
    texts, code = words(column)
    if len(texts) < 2:
        raise ValueError(f"the label {label} is {column.iloc[0]!r} in every row")
    if len(texts) > MOST_CLASSES:
        raise ValueError(
            f"the label {label} has {len(texts)} different values; a classifier needs a few classes"
        )
    kind = kind_of(column)
    if kind["kind"] == "truth":
        return read_as(column, kind)[0].astype(bool)
    if kind["kind"] == "number":
        numbers, _ = read_as(column, kind)
        exact = (np.abs(numbers) < EXACT) & (np.floor(numbers) == numbers)
        if exact.all() and len(np.unique(numbers)) == len(texts):
            return numbers.astype(np.int64)
    return texts[code].astype(str)


def _marks(column: Any) -> str:
    """The words of a column that count as missing, as the end of a sentence."""
    texts = pd.unique(column[words(column)[1] < 0])
    marks = sorted({text.strip() for text in texts if isinstance(text, str) and text.strip()})
    verb = "counts" if len(marks) == 1 else "count"
    return f" ({', '.join(map(repr, marks))} {verb} as missing)" if marks else ""


def _check_group_column(column: Any, name: str) -> None:
    """Refuse a column of many numbers, which are rather a quantity than names of groups."""
    count = len(words(column)[0])
    if count <= MOST_NUMBERS or kind_of(column)["kind"] not in ("number", "date"):
        return
    ranges = f"pandas.qcut(table[{name!r}], 4).astype(str)"
    raise ValueError(
        f"the group column {name} has {count} different values, a quantity; make groups of its "
        f"ranges, in a column such as {ranges}"
    )


def refuse_copies(features: pd.DataFrame, y: np.ndarray, label: str) -> None:
    """Refuse a column that says the label in other words."""
    _, own = np.unique(y, return_inverse=True)
    count = own.max() + 1
    for name in features:
        code, kinds = pd.factorize(features[name])
        if (
            len(kinds) == count
            and (code >= 0).all()
            and len(np.unique(code * count + own)) == count
        ):
            raise ValueError(
                f"the column {name} is a copy of the label {label}; leave it out with --drop {name}"
            )


def _split(groups: np.ndarray, seed: int) -> np.ndarray:
    """The part of each row: every group is cut by the same shares."""
    part = np.full(len(groups), "train", dtype=object)
    draw = np.random.default_rng(seed)
    for g in np.unique(groups):
        members = draw.permutation(np.flatnonzero(groups == g))
        first = round(SHARES["train"] * len(members))
        second = first + round(SHARES["validation"] * len(members))
        part[members[first:second]] = "validation"
        part[members[second:]] = "test"
    return part


def _split_by(column: Any, name: str, groups: np.ndarray, seed: int) -> np.ndarray:
    """The part that a column names for each row.

    Where it names no validation rows, a quarter of the training rows become these.
    """
    known = {word: part for part, words in CALLED.items() for word in words}
    words = column.astype(str).str.strip().str.lower().str.removesuffix(".0")
    part = words.map(known)
    if part.isna().any():
        odd = sorted(set(column[part.isna()].astype(str)))[:5]
        raise ValueError(
            f"the split column {name} has values other than train, validation and test: "
            f"{', '.join(odd)}"
        )
    part = part.to_numpy(dtype=object)
    for needed in ("train", "test"):
        if needed not in part:
            raise ValueError(f"the split column {name} has no row for {needed}")
    if "validation" not in part:
        train = np.flatnonzero(part == "train")
        names, counts = np.unique(groups[train], return_counts=True)
        often = np.isin(groups[train], names[counts > 1])
        _, held = train_test_split(
            train[often], test_size=0.25, stratify=groups[train[often]], random_state=seed
        )
        part[held] = "validation"
    return part


def _check_groups(names: np.ndarray, groups: np.ndarray, part: np.ndarray, least: int) -> None:
    small = []
    for p in PARTS:
        own, counts = np.unique(groups[part == p], return_counts=True)
        known = dict(zip(own.tolist(), counts.tolist()))
        few = [(name, known.get(name, 0)) for name in names.tolist() if known.get(name, 0) < least]
        small += [f"{name!r} has {count or 'no'} rows in the {p} part" for name, count in few]
    if small:
        more = len(small) - MOST_NAMED
        said = small[:MOST_NAMED] + ([f"and {more} more"] if more > 0 else [])
        raise ValueError(
            "groups too small to estimate (fewer than --least "
            f"{least} rows): {'; '.join(said)}. Merge groups, or give fewer --group columns"
        )
