"""Data sets with groups, as tables: from a file, or from OpenML by scikit-learn's client."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from bilevax.learn.columns import MISSING, words


@dataclass(frozen=True)
class Dataset:
    """A table with a label and the columns that make its groups."""

    name: str
    table: pd.DataFrame
    label: str
    group_columns: tuple[str, ...]

    @property
    def X(self) -> pd.DataFrame:
        """The features: all columns but the label, also those that make the groups."""
        return self.table.drop(columns=[self.label])

    @property
    def y(self) -> np.ndarray:
        return self.table[self.label].to_numpy()

    @property
    def groups(self) -> np.ndarray:
        """The group of each row: its label together with the values of the group columns."""
        return group_names(self.table, self.label, self.group_columns)


def group_names(table: pd.DataFrame, label: str | None, columns: Sequence[str]) -> np.ndarray:
    """Groups that say what they are, such as "income >50K, sex Female"."""
    names, code = np.array([""], dtype=object), np.zeros(len(table), dtype=np.int64)
    for column in ([] if label is None else [label]) + list(columns):
        texts, own = words(table[column])
        texts = np.append(texts, MISSING)  # whose place is −1
        both, code = np.unique(code * len(texts) + own % len(texts), return_inverse=True)
        pairs = zip(names[both // len(texts)], texts[both % len(texts)])
        said = [(before, f"{column} {text}") for before, text in pairs]
        names = np.array([", ".join(filter(None, pair)) for pair in said], dtype=object)
    return names.astype(str)[code]


def load_adult(path: str | Path | None = None, attribute: str = "sex") -> Dataset:
    """UCI Adult: income above 50,000 dollars, groups by `attribute`, "sex" or "race".

    Races other than White and Black are one group, "Other". `path` is a CSV file with the columns
    of UCI's; without one OpenML's copy is fetched (`adult`, version 2).
    """
    table = _table(path, attribute, {"name": "adult", "version": 2}, {"class": "income"})
    _need(table, ("income", "sex", "race", "age", "education-num"), "Adult")
    table = table.drop(columns=["fnlwgt", "split"], errors="ignore")
    table["income"] = np.where(table["income"].astype(str).str.contains(">50K"), ">50K", "<=50K")
    race = table["race"].astype(str).str.strip()
    table["race"] = race.where(race.isin(("White", "Black")), "Other")
    return Dataset("Adult", table, "income", (attribute,))


def load_law_school(path: str | Path | None = None, attribute: str = "race") -> Dataset:
    """LSAC's study of who passed the bar, groups by `attribute`: "race" (Black or not) or "sex".

    `path` is a CSV file with the columns LSAT, UGPA, Race_*, Sex_* and PF_1; without one OpenML's
    copy is fetched (data 43890), whose label is `bar` and which has more features.
    """
    table = _table(path, attribute, {"data_id": 43890}, {})
    if "PF_1" in table:
        _need(table, ("LSAT", "UGPA", "Race_Black", "Sex_1"), "Law School")
        table["passed"] = np.where(table["PF_1"] == 1, "yes", "no")
        table["race"] = np.where(table["Race_Black"] == 1, "Black", "other")
        table["sex"] = np.where(table["Sex_1"] == 1, "1", "2")
        # ZFYA, the first year's grades, is another outcome; the rest is said by race and sex.
        left = ["PF_0", "PF_1", "ZFYA", "Race_Black", "Sex_1", "Sex_2"]
    else:
        _need(table, ("bar", "race1", "gender", "lsat", "ugpa"), "Law School")
        passed = table["bar"].astype(str).str.lower().str.strip().isin(("true", "1", "1.0", "yes"))
        table["passed"] = np.where(passed, "yes", "no")
        table["race"] = np.where(table["race1"].astype(str) == "black", "Black", "other")
        table["sex"] = table["gender"].astype(str)
        left = ["bar", "race1", "gender", "ugpagt3"]
    return Dataset("Law School", table.drop(columns=left, errors="ignore"), "passed", (attribute,))


def load_compas(path: str | Path | None = None, attribute: str = "race") -> Dataset:
    """ProPublica's two-year recidivism, groups by `attribute`: "race" (African-American or not) or
    "sex".

    `path` is a CSV file with the columns of ProPublica's; without one OpenML's copy is fetched
    (`compas-two-years`, data 42192). COMPAS's own scores are left out: they are no features.
    """
    table = _table(path, attribute, {"data_id": 42192}, {"twoyearrecid": "two_year_recid"})
    if "race" not in table and "race_African-American" in table:
        black = table["race_African-American"].astype(float) == 1
        table["race"] = np.where(black, "African-American", "other")
        table = table.drop(columns=[c for c in table if c.startswith("race_")])
    _need(table, ("two_year_recid", "race", "sex", "age", "priors_count"), "COMPAS")
    again = table["two_year_recid"].astype(float) == 1
    table["two_year_recid"] = np.where(again, "yes", "no")
    table["race"] = np.where(
        table["race"].astype(str) == "African-American", "African-American", "other"
    )
    kept = [
        "sex", "age", "age_cat", "race", "juv_fel_count", "juv_misd_count", "juv_other_count",
        "priors_count", "c_charge_degree", "two_year_recid",
    ]  # fmt: skip
    kept += [c for c in table if c.startswith(("age_cat_", "c_charge_degree_"))]
    table = table.loc[:, [c for c in kept if c in table]]
    return Dataset("COMPAS", table, "two_year_recid", (attribute,))


def load_digits(correlation: float = 0.85, seed: int = 0) -> Dataset:
    """scikit-learn's digits, odd or even, with a mark that gives the answer away too often.

    A column beside the 64 pixels says with probability `correlation` what the label says. A
    classifier that trusts it fails the digits whose mark is wrong. Needs no file.
    """
    if not 0 <= correlation <= 1:
        raise ValueError(f"correlation must be a probability, not {correlation}")
    from sklearn.datasets import load_digits as digits

    data: Any = digits()
    odd = data.target % 2 == 1
    right = np.random.default_rng(seed).random(len(odd)) < correlation
    mark = np.where(right, odd, ~odd)
    table = pd.DataFrame(data.data, columns=[f"pixel{i}" for i in range(data.data.shape[1])])
    table["mark"] = np.where(mark, "yes", "no")
    table["digit"] = np.where(odd, "odd", "even")
    return Dataset("digits", table, "digit", ("mark",))


def _table(
    path: str | Path | None, attribute: str, openml: dict[str, Any], names: dict[str, str]
) -> pd.DataFrame:
    """The table of a file, or of OpenML with some columns renamed; refuses other attributes."""
    if attribute not in ("race", "sex"):
        raise ValueError(f"attribute must be one of race, sex, not {attribute!r}")
    if path is not None:
        return pd.read_csv(path, skipinitialspace=True, na_values=["?"])
    from sklearn.datasets import fetch_openml

    fetched: Any = fetch_openml(**openml, as_frame=True, parser="auto")
    return fetched.frame.rename(columns=names).replace("?", np.nan)


def _need(table: pd.DataFrame, columns: Sequence[str], name: str) -> None:
    if missing := [c for c in columns if c not in table]:
        raise ValueError(
            f"{name}: the table has no column {', '.join(missing)}; it has "
            f"{', '.join(map(str, table.columns))}"
        )
