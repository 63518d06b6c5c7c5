"""Which rows make batch number i: a function of the seed and of i alone.

A resumed run therefore only needs to know i, and sees the batches it would have seen.
"""

from __future__ import annotations

import operator
from typing import Any

import jax
import numpy as np

from bilevax.data.checks import check_groups, check_quotas
from bilevax.data.shuffle import Shuffle
from bilevax.data.source import as_key
from bilevax.deep.methods import Method
from bilevax.deep.pixels import Images


class Batches:
    """Batches of row numbers, computed on the host from the streams of `bilevax.data`.

    With `groups`, the group of each row, every batch has every group: the rows that
    `data.Stratified` draws, in the same order. Without, they are those of `data.Arrays`. Each row
    comes once in an epoch of its group.
    """

    def __init__(self, rows: Any, batch: int, key: Any = 0, groups: Any = None):
        rows = np.asarray(rows)
        if rows.ndim != 1 or not len(rows) or not np.issubdtype(rows.dtype, np.integer):
            raise ValueError(
                f"rows must be a list of at least one row number, not an array of {rows.dtype} of "
                f"shape {rows.shape}"
            )
        labels = check_groups(
            np.zeros(len(rows), int) if groups is None else groups, len(rows), "Batches"
        )
        self.batch, self.sizes = int(batch), np.bincount(labels)
        self.members = rows[np.argsort(labels, kind="stable")].astype(np.int32)
        self.per_group = check_quotas(None, batch, self.sizes, "Batches")
        key = as_key(key)
        keys = key[None] if groups is None else jax.random.split(key, len(self.sizes))
        self.keys = np.asarray(jax.random.key_data(keys))

    def __len__(self) -> int:
        """Batches with as many rows as there are: an epoch."""
        return -(-len(self.members) // self.batch)

    def __getitem__(self, i: int) -> np.ndarray:
        return self.several(i, 1)[0]

    def several(self, first: int, count: int) -> np.ndarray:
        """The batches first, …, first + count − 1, one in each row."""
        first, quotas = operator.index(first), np.asarray(self.per_group)
        if first < 0:
            raise IndexError(f"batches are numbered from 0, not {first}")
        streams = Shuffle.after(first * quotas, self.sizes, self.keys)
        total = len(self.members)
        _, places = streams.take((count * quotas).tolist(), self.sizes, total)
        parts = np.split(self.members[places], np.cumsum(count * quotas)[:-1])
        return np.concatenate([part.reshape(count, -1) for part in parts], axis=1)


class Rows:
    """The rows of batch i: training rows, then the validation rows of a method that takes them.

    A method with validation rows sees the batches of `data.Levels`: validation above, training
    below, each with streams of its own.
    """

    def __init__(self, images: Images, method: type[Method], batch: int, seed: int):
        key = as_key(seed)
        held_key, train_key = jax.random.split(key) if method.takes_validation else (None, key)

        def batches(split: str, key: Any) -> Batches:
            rows = images.rows(split)
            return Batches(rows, batch, key, images.group[rows] if method.takes_groups else None)

        self.parts = [batches("train", train_key)]
        if method.takes_validation:
            self.parts.append(batches("validation", held_key))
        self.batch = batch * len(self.parts)
        self.epoch_batches = len(self.parts[0])

    def __getitem__(self, i: int) -> np.ndarray:
        return self.several(i, 1)[0]

    def several(self, first: int, count: int) -> np.ndarray:
        """The batches first, …, first + count − 1, one in each row."""
        return np.concatenate([part.several(first, count) for part in self.parts], axis=1)
