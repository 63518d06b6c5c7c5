"""Batches in which every group has its share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding
from jaxtyping import Array

from bilevax.data.checks import as_samples
from bilevax.data.memory import InMemory, check_sharding
from bilevax.data.shuffle import Shuffle
from bilevax.data.source import as_key
from bilevax.data.strata import check_groups, check_quotas, rows_of
from bilevax.trees import Tree


class StratifiedState(eqx.Module):
    streams: Shuffle  # one of each group
    drawn: Array


class Stratified(InMemory[StratifiedState]):
    """Minibatches with `per_group[g]` samples of group g each, in the order of the groups.

    `groups` holds one label 0, …, G−1 per sample. Each group has a stream of permutations of its
    own: every sample of a group comes exactly once in a pass over the group, and small groups are
    passed over more often. Functions must average within each group: a plain mean over rows would
    weigh groups by `per_group`, and on all samples by their sizes. Without `per_group` every group
    gets ⌊batch/G⌋ rows, and each of the largest one more until `batch` is reached; with it, `batch`
    is its sum.
    """

    arrays: Tree
    members: Array  # the samples, group by group
    sizes: Array
    per_group: tuple[int, ...] = eqx.field(static=True)
    batch: int = eqx.field(static=True)
    sharding: Sharding | None = eqx.field(static=True)

    def __init__(
        self,
        arrays: Tree,
        *,
        groups: Any,
        batch: int = 64,
        per_group: Sequence[int] | None = None,
        sharding: Sharding | None = None,
    ):
        self.arrays, count = as_samples(arrays, "Stratified")
        labels = check_groups(groups, count, "Stratified")
        self.members = jnp.asarray(np.argsort(labels, kind="stable"), jnp.int32)
        sizes = np.bincount(labels)
        self.sizes = jnp.asarray(sizes, jnp.int32)
        self.per_group = check_quotas(per_group, batch, sizes, "Stratified")
        self.batch = sum(self.per_group)
        self.sharding = check_sharding(sharding, self.arrays, self.batch, "Stratified")

    def init(self, key: Any) -> StratifiedState:
        keys = jax.random.split(as_key(key), len(self.per_group))
        return StratifiedState(Shuffle.begin(keys), jnp.zeros((), int))

    def draw(self, state: StratifiedState) -> tuple[StratifiedState, Tree]:
        streams, rows = rows_of(state.streams, self.members, self.sizes, self.per_group)
        return StratifiedState(streams, state.drawn + self.batch), self.rows(rows)
