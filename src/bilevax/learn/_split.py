"""Splitting off validation rows, by group."""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy import sparse

_ODD = np.uint64(0x9E3779B97F4A7C15)  # 2⁶⁴ over the golden ratio


def _mixed(bits: np.ndarray) -> np.ndarray:
    """Steele, Lea and Flood's finaliser (SplitMix64): one bit of the input changes half of all."""
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


def row_hashes(x: Any, seed: int) -> np.ndarray:
    """A random number for each *content* of a row: the same rows, dense or sparse, get the same."""
    x = sparse.csr_matrix(x) if sparse.issparse(x) else x
    with np.errstate(over="ignore"):
        salt = _mixed((np.arange(x.shape[1], dtype=np.uint64) + np.uint64(1)) * _ODD)
        salt = _mixed(salt + np.uint64(seed) * _ODD)
        total = np.zeros(x.shape[0], np.uint64)
        if isinstance(x, np.ndarray):
            for j in range(x.shape[1]):
                column = np.ascontiguousarray(x[:, j])
                hashed = _mixed(column.view(np.uint64) ^ salt[j])
                total += np.where(column != 0, hashed, np.uint64(0))
        else:
            x.eliminate_zeros()
            hashed = _mixed(x.data.view(np.uint64) ^ salt[x.indices])
            row = np.repeat(np.arange(x.shape[0]), np.diff(x.indptr))
            np.add.at(total, row, hashed)
        return _mixed(total + np.uint64(seed))


def held_out(
    x: Any, label: np.ndarray, group: np.ndarray, weight: np.ndarray, fraction: float, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Which rows train and which validate: of each group the given share, by weight, at random.

    The choice depends on a row's content alone. So copies of a row never stand on both sides, the
    order of the rows does not matter, and a weight of two is the same as the row twice. A group
    that is one row, or copies of one, has to do both.
    """
    hashes = row_hashes(x, seed) ^ _mixed(label.astype(np.uint64) + np.uint64(1))
    trains = np.ones(len(label), bool)
    validates = np.zeros(len(label), bool)
    for g in np.unique(group):
        members = np.flatnonzero(group == g)
        _, place = np.unique(hashes[members], return_inverse=True)
        weights = np.bincount(place, weight[members])
        upto = np.cumsum(weights) - weights / 2  # nearest, for few and heavy rows
        takes = upto < fraction * weights.sum()
        takes[0] = True
        takes[1:][-1:] = False
        validates[members] = takes[place]
        trains[members] = ~takes[place] if len(weights) > 1 else True
    return trains, validates
