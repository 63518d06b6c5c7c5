"""Which rows make batch number i: a function of the seed and i alone.

So a run that resumes needs to know nothing but i, and sees the batches it would have seen.
"""

from __future__ import annotations

import operator
from typing import Any

import numpy as np

from bilevax.arguments import whole


def shuffled(count: int, *seed: int) -> np.ndarray:
    """A permutation of 0 … count − 1 that every version of NumPy draws alike.

    NumPy keeps the bits of its generators, but not what it makes of them.
    """
    bits = np.random.PCG64(np.random.SeedSequence(seed)).random_raw(count)
    return np.argsort(bits, kind="stable").astype(np.int32)


class Uniform:
    """Every row once per epoch, in an order of its own; a batch may lie across two epochs."""

    def __init__(self, rows: Any, batch: int, seed: int = 0):
        self.rows = _row_numbers(rows)
        _check(batch, seed)
        self.batch, self.seed = int(batch), int(seed)
        self._stream = _Stream(self.rows, self.seed, 0)

    def __getitem__(self, i: int) -> np.ndarray:
        return self._stream.take(_number(i) * self.batch, self.batch)

    @property
    def epoch_batches(self) -> int:
        """Batches until every row was seen."""
        return -(-len(self.rows) // self.batch)


class Balanced:
    """Every group in every batch, whatever its size; each group runs through epochs of its own.

    A batch has ⌊batch/G⌋ rows of each group, and the largest groups fill it up with one more. The
    rows are in the order of the groups: `per_group` says how many there are of each. Another
    `first` gives other orders for the same seed.
    """

    def __init__(self, rows: Any, group_of_rows: Any, batch: int, seed: int = 0, *, first: int = 0):
        self.rows = _row_numbers(rows)
        _check(batch, seed)
        self.batch, self.seed = int(batch), int(seed)
        group = np.asarray(group_of_rows)
        if group.shape != self.rows.shape or not np.issubdtype(group.dtype, np.integer):
            raise ValueError(
                f"group_of_rows must be the group number of each of the {len(self.rows)} rows, not "
                f"an array of {group.dtype} of shape {group.shape}"
            )
        if group.min() < 0:
            raise ValueError(f"group_of_rows must be ≥ 0, not {group.min()}")
        sizes = np.bincount(group)
        if not sizes.all():
            raise ValueError(f"group {np.argmin(sizes)} has no rows, so no batch can have it")
        if self.batch < len(sizes):
            raise ValueError(
                f"batch is {self.batch}, but there are {len(sizes)} groups and each must be in "
                f"every batch; take at least {len(sizes)}"
            )
        each, left = divmod(self.batch, len(sizes))
        more = np.zeros(len(sizes), int)
        more[np.argsort(-sizes, kind="stable")[:left]] = 1
        self.per_group: tuple[int, ...] = tuple((each + more).tolist())
        self._streams = [
            _Stream(self.rows[group == g], self.seed, first + g) for g in range(len(sizes))
        ]

    def __getitem__(self, i: int) -> np.ndarray:
        i = _number(i)
        parts = [s.take(i * k, k) for s, k in zip(self._streams, self.per_group)]
        return np.concatenate(parts)

    @property
    def epoch_batches(self) -> int:
        """Batches with as many rows as there are; the small groups come more than once in them."""
        return -(-len(self.rows) // self.batch)


class _Stream:
    """The rows in one shuffled epoch after the other."""

    def __init__(self, rows: np.ndarray, seed: int, number: int):
        self.rows, self.seed, self.number = rows, seed, number
        self._kept: dict[int, np.ndarray] = {}

    def take(self, start: int, count: int) -> np.ndarray:
        n, parts = len(self.rows), []
        while count:
            epoch, first = divmod(start, n)
            last = min(first + count, n)
            parts.append(self._epoch(epoch)[first:last])
            start, count = start + last - first, count - (last - first)
        return np.concatenate(parts)

    def _epoch(self, epoch: int) -> np.ndarray:
        kept = self._kept.get(epoch)
        if kept is None:
            kept = self.rows[shuffled(len(self.rows), self.seed, self.number, epoch)]
            # Replaced, not changed: threads that decode ahead read it at the same time.
            near = {e: p for e, p in self._kept.items() if abs(e - epoch) == 1}
            self._kept = {**near, epoch: kept}
        return kept


def _row_numbers(rows: Any) -> np.ndarray:
    rows = np.asarray(rows)
    if rows.ndim != 1 or not len(rows) or not np.issubdtype(rows.dtype, np.integer):
        raise ValueError(
            f"rows must be a list of at least one row number, not an array of {rows.dtype} of "
            f"shape {rows.shape}"
        )
    return rows.astype(np.int32)


def _check(batch: int, seed: int) -> None:
    whole(batch, "batch", 1)
    whole(seed, "seed", 0)


def _number(i: int) -> int:
    i = operator.index(i)
    if i < 0:
        raise IndexError(f"batches are numbered from 0, not {i}")
    return i
