"""The data of the problems that people bring: splits of well-known sets, and generated ones."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from sklearn.datasets import load_breast_cancer, load_diabetes, load_digits

#: Where Adult lies: beside the checkout.
ADULT = Path(__file__).parents[2] / "shared" / "data" / "adult.csv.gz"


@dataclass(frozen=True)
class Split:
    """Rows to train with and rows to validate with."""

    train: np.ndarray
    target: np.ndarray
    held: np.ndarray
    held_target: np.ndarray

    def arrays(self) -> dict[str, np.ndarray]:
        """The data of a problem whose lower level trains and whose upper level validates."""
        return {"X": self.train, "t": self.target, "V": self.held, "s": self.held_target}


def standardised(table: np.ndarray, rows: np.ndarray) -> np.ndarray:
    return (table - table[rows].mean(0)) / table[rows].std(0)


def diabetes(seed: int, train: int, noise: int = 0, units: bool = False) -> Split:
    """Diabetes, standardised on the training rows, with columns of noise; or the target's units."""
    X, t = map(np.asarray, load_diabetes(return_X_y=True))
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(t))
    rows = order[:train]
    X = standardised(X, rows)[order]
    if noise:
        X = np.hstack([X, rng.normal(size=(len(t), noise))])
    t = (t - t[rows].mean() if units else standardised(t, rows))[order]
    return Split(X[:train], t[:train], X[train:], t[train:])


def digits(seed: int, rows: int, wrong: float) -> Split:
    """Digits between 0 and 1 with a constant column; a share of the training labels is wrong."""
    X, t = map(np.asarray, load_digits(return_X_y=True))
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(t))[: 2 * rows]
    X = np.hstack([X[order] / 16, np.ones((2 * rows, 1))])
    t = t[order]
    shifted = rng.choice(rows, round(wrong * rows), replace=False)
    t[shifted] = (t[shifted] + rng.integers(1, 10, size=len(shifted))) % 10
    return Split(X[:rows], t[:rows], X[rows:], t[rows:])


def breast_cancer(seed: int, features: int, train: int, held: int) -> Split:
    """Breast cancer, standardised on the training rows; labels are −1 and 1."""
    X, t = map(np.asarray, load_breast_cancer(return_X_y=True))
    X, t = X[:, :features], 2.0 * t - 1.0
    order = np.random.default_rng(seed).permutation(len(t))
    X = standardised(X, order[:train])
    rows, later = order[:train], order[train : train + held]
    return Split(X[rows], t[rows], X[later], t[later])


@functools.cache
def _adult() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    import pandas as pd

    table = pd.read_csv(ADULT, skipinitialspace=True)
    label = table.pop("income").astype(str).str.contains(">50K").to_numpy()
    sex = (table["sex"] == "Male").to_numpy()
    table = table.drop(columns=[c for c in ("split", "fnlwgt", "education") if c in table])
    coded = pd.get_dummies(table, dtype=float).to_numpy()
    return coded, np.where(label, 1.0, -1.0), 2 * sex + label


def adult(seed: int, rows: int) -> tuple[Split, np.ndarray, np.ndarray]:
    """Adult with one column a category, and the group (sex and label) of every row."""
    X, t, groups = _adult()
    order = np.random.default_rng(seed).permutation(len(t))[: 2 * rows]
    X, t, groups = X[order], t[order], groups[order]
    varied = X[:rows].std(0) > 0
    X = standardised(X[:, varied], np.arange(rows))
    X = np.hstack([X, np.ones((2 * rows, 1))])
    return Split(X[:rows], t[:rows], X[rows:], t[rows:]), groups[:rows], groups[rows:]


def sparse_regression(seed: int, columns: int) -> Split:
    """Correlated features of which 15 count; a ratio of signal to noise of 2; 100 + 100 rows."""
    rng = np.random.default_rng(seed)
    noise = rng.normal(size=(200, columns))
    X = noise.copy()
    for column in range(1, columns):  # correlation 0.5^|i − j|
        X[:, column] = 0.5 * X[:, column - 1] + 0.75**0.5 * noise[:, column]
    return _answered(rng, X, X[:, rng.choice(columns, 15, replace=False)].sum(axis=1))


def grouped_regression(seed: int, columns: int, groups: int = 30) -> Split:
    """Groups of features; in three of them five count, with weights 1 to 5; 100 + 100 rows."""
    rng = np.random.default_rng(seed)
    weights = np.zeros((groups, columns // groups))
    weights[:3, :5] = np.arange(1.0, 6.0)
    X = rng.normal(size=(200, columns))
    return _answered(rng, X, X @ weights.ravel())


def _answered(rng: np.random.Generator, X: np.ndarray, signal: np.ndarray) -> Split:
    """The rows in two halves, with answers that are half as noisy as they vary."""
    t = signal + rng.normal(size=len(X)) * signal.std() / 2
    half = len(X) // 2
    return Split(X[:half], t[:half], X[half:], t[half:])
