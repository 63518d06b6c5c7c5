"""From a table to features, labels and groups in three parts; errors say what is wrong with it."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from sklearn.compose import ColumnTransformer
from sklearn.impute import SimpleImputer
from sklearn.model_selection import train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler

from bilevax.learn.datasets import as_text, group_names

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
#: A categorical column keeps this many values, the rest become one.
MOST_CATEGORIES = 50


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
    notes: list[str] = field(default_factory=list)  # what was done that the user should know


def read(path: Path) -> pd.DataFrame:
    """A CSV or Parquet file, by its name."""
    if not path.is_file():
        raise ValueError(f"there is no file {path}")
    kinds = {suffix.lower() for suffix in path.suffixes}
    if not kinds & {".csv", ".tsv", ".parquet", ".pq"}:
        raise ValueError(f"{path}: the name must end in .csv, .tsv or .parquet")
    try:
        if kinds & {".parquet", ".pq"}:
            table = pd.read_parquet(path)
        else:
            between = "\t" if ".tsv" in kinds else ","
            table = pd.read_csv(path, sep=between, skipinitialspace=True, na_values=["?"])
    except pd.errors.EmptyDataError:
        raise ValueError(f"{path} is empty") from None
    except ImportError as error:
        raise ValueError(f"{path}: Parquet files need pip install pyarrow ({error})") from None
    except (ValueError, OSError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    if table.empty:
        raise ValueError(f"{path} has a header but no rows")
    table.columns = table.columns.map(str)
    if twice := sorted(table.columns[table.columns.duplicated()]):
        raise ValueError(f"{path} has the column {', '.join(twice)} more than once")
    return table


def prepare(
    table: pd.DataFrame,
    name: str,
    label: str,
    group_columns: Sequence[str],
    *,
    with_label: bool = True,
    split: str | None = None,
    drop: Sequence[str] = (),
    least: int = 10,
    seed: int = 0,
) -> Table:
    """Check a table, and cut it into parts with every group in each."""
    splits = [] if split is None else [split]
    for column in (label, *group_columns, *splits, *drop):
        check_column(table, column)
    if label in group_columns:
        raise ValueError(f"{label} is the label; groups are the label together with other columns")
    if not group_columns and not with_label:
        raise ValueError("no columns to make groups of")
    _check_label(table[label], label)
    groups = group_names(table, label if with_label else None, group_columns)
    part = _split_by(table[split], split, groups, seed) if split else _split(groups, seed)
    notes: list[str] = []
    features = features_of(table.drop(columns=[label, *drop, *splits]), table[label], notes)
    y = table[label].to_numpy()
    y = y if np.issubdtype(y.dtype, np.number) or y.dtype == bool else y.astype(str)
    names = np.unique(groups)
    _check_groups(names, groups, part, least)
    parts = {p: Part(features.loc[part == p], y[part == p], groups[part == p]) for p in PARTS}
    if absent := sorted(set(map(str, np.unique(y))) - set(map(str, np.unique(parts["train"].y)))):
        raise ValueError(f"the training part has no row of the label {', '.join(absent)}")
    return Table(name, label, tuple(group_columns), with_label, names, parts, notes)


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


def _check_label(values: Any, label: str) -> None:
    if missing := int(values.isna().sum()):
        raise ValueError(f"the label {label} is missing in {missing} of {len(values)} rows")
    kinds = values.nunique()
    if kinds < 2:
        raise ValueError(f"the label {label} is {values.iloc[0]!r} in every row")
    if kinds > MOST_CLASSES:
        raise ValueError(
            f"the label {label} has {kinds} different values; a classifier needs a few classes"
        )


def features_of(columns: pd.DataFrame, label: Any, notes: list[str]) -> pd.DataFrame:
    """The columns that can be learnt from, as numbers or as strings."""
    constant, features = [], {}
    for name in columns:
        column: Any = columns[name]
        kinds, whole = column.nunique(), column.notna().all()
        if kinds == 0 or (kinds == 1 and whole):
            constant.append(name)
            continue
        pairs = label.groupby([column, label], observed=True)
        if whole and kinds == label.nunique() == pairs.ngroups:
            raise ValueError(
                f"the column {name} is a copy of the label {label.name}; leave it out with "
                f"--drop {name}"
            )
        if pd.api.types.is_numeric_dtype(column):  # truth values too
            features[name] = column.astype(float)
            if infinite := int(np.isinf(features[name]).sum()):
                raise ValueError(f"the column {name} is infinite in {infinite} rows")
            continue
        if kinds > MOST_CATEGORIES:
            notes.append(
                f"{name} has {kinds} categories: the {MOST_CATEGORIES - 1} most frequent are "
                "kept, the others count as one"
            )
        features[name] = as_text(column).astype(object)
    if constant:
        notes.append(f"left out, because they are constant: {', '.join(constant)}")
    if not features:
        raise ValueError("there is no column to learn from")
    return pd.DataFrame(features, index=columns.index)


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
    counts = {(p, g): int(np.sum((part == p) & (groups == g))) for p in PARTS for g in names}
    small = [
        f"{str(g)!r} has {count or 'no'} rows in the {p} part"
        for (p, g), count in counts.items()
        if count < least
    ]
    if small:
        raise ValueError(
            "groups too small to estimate (fewer than --least "
            f"{least} rows): {'; '.join(small)}. Merge groups, or give fewer --group columns"
        )
