"""From a table to rows, labels and groups in three parts, or a sentence that says what is wrong."""

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

from bilevax.learn.datasets import group_names

PARTS = ("train", "validation", "test")
#: What a split column may call the parts.
CALLED = {
    "train": ("train", "training", "0"),
    "validation": ("validation", "val", "valid", "dev", "1"),
    "test": ("test", "testing", "2"),
}
#: The shares of the parts where no column says them.
SHARES = {"train": 0.6, "validation": 0.2, "test": 0.2}
#: A label with more values than this is taken for a number to predict.
MOST_CLASSES = 100
#: A categorical column keeps this many values, the rest become one.
MOST_CATEGORIES = 50


@dataclass(frozen=True)
class Part:
    """Some rows."""

    X: pd.DataFrame
    y: np.ndarray
    groups: np.ndarray


@dataclass(frozen=True)
class Table:
    """What was read, ready to fit."""

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
    for column in (label, *group_columns, *([] if split is None else [split]), *drop):
        _check_column(table, column)
    if label in group_columns:
        raise ValueError(f"{label} is the label; groups are the label together with other columns")
    if not group_columns and not with_label:
        raise ValueError("no columns to make groups of")
    _check_label(table[label], label)
    groups = group_names(table, label if with_label else None, group_columns)
    part = _split_by(table[split], split, groups, seed) if split else _split(groups, seed)
    notes: list[str] = []
    others = table.drop(columns=list({label, *drop, *([] if split is None else [split])}))
    features = _checked_features(others, table[label], notes)
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
    categories = [c for c in features if c not in set(numbers)]
    of_numbers = make_pipeline(
        SimpleImputer(strategy="median", add_indicator=True), StandardScaler()
    )
    of_categories = OneHotEncoder(
        handle_unknown="warn", max_categories=MOST_CATEGORIES, sparse_output=False
    )
    return ColumnTransformer(
        [("numbers", of_numbers, numbers), ("categories", of_categories, categories)]
    )


def _check_column(table: pd.DataFrame, column: str) -> None:
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


def _checked_features(features: pd.DataFrame, label: Any, notes: list[str]) -> pd.DataFrame:
    """The columns that can be learnt from, as numbers or as strings with None for missing."""
    codes = pd.factorize(label)[0]
    left = []
    out = {}
    for name in features:
        column: Any = features[name]
        kinds = column.nunique(dropna=True)
        if kinds == 0 or (kinds == 1 and column.notna().all()):
            left.append(name)
            continue
        if kinds == len(np.unique(codes)) and _same(pd.factorize(column)[0], codes):
            raise ValueError(
                f"the column {name} is a copy of the label {label.name}; leave it out with "
                f"--drop {name}"
            )
        if pd.api.types.is_bool_dtype(column):
            column = column.astype(float)
        elif pd.api.types.is_numeric_dtype(column):
            column = column.astype(float)
            if infinite := int(np.isinf(column).sum()):
                raise ValueError(f"the column {name} is infinite in {infinite} rows")
        else:
            if kinds > MOST_CATEGORIES:
                notes.append(
                    f"{name} has {kinds} categories: the {MOST_CATEGORIES - 1} most frequent are "
                    "kept, the others count as one"
                )
            column = column.astype(object).where(column.notna(), "(missing)").astype(str)
            column = column.astype(object)
        out[name] = column
    if left:
        notes.append(f"left out, because they are constant: {', '.join(left)}")
    if not out:
        raise ValueError("there is no column to learn from")
    return pd.DataFrame(out, index=features.index)


def _same(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether two codings of the rows are one-to-one."""
    pairs = len(np.unique(np.stack([a, b]), axis=1).T)
    return pairs == len(np.unique(a)) == len(np.unique(b))


def _split(groups: np.ndarray, seed: int) -> np.ndarray:
    """The part of each row, with the shares of every group."""
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
    """The parts that a column says; a validation part that it lacks is taken from the training."""
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
        for g in names:
            count = int(np.sum((part == p) & (groups == g)))
            if count < least:
                small.append(f"{str(g)!r} has {count or 'no'} rows in the {p} part")
    if small:
        raise ValueError(
            "groups too small to estimate (fewer than --least "
            f"{least} rows): {'; '.join(small)}. Merge groups, or give fewer --group columns"
        )
