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

from bilevax.arguments import whole
from bilevax.data.checks import as_samples
from bilevax.data.memory import InMemory, check_sharding
from bilevax.data.shuffle import Shuffle, rounds_for
from bilevax.data.source import as_key
from bilevax.trees import Tree


class StratifiedState(eqx.Module):
    streams: Shuffle  # one of each group
    drawn: Array


class Stratified(InMemory[StratifiedState]):
    """Minibatches with `per_group[g]` samples of group g each, in the order of the groups.

    `groups` holds one label 0, …, G−1 per sample. Each group has a stream of permutations of its
    own, so that within a group each sample comes exactly once per pass over the group; small groups
    are passed over more often. Functions must average within each group: a plain mean over rows
    would weigh groups by `per_group`, and on all samples by their sizes. Without `per_group` every
    group gets ⌊batch/G⌋ rows and the largest ones get one more each until `batch` is reached; with
    it, `batch` is its sum.
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
        labels = check_groups(groups, count)
        self.members = jnp.asarray(np.argsort(labels, kind="stable"), jnp.int32)
        sizes = np.bincount(labels)
        self.sizes = jnp.asarray(sizes, jnp.int32)
        self.per_group = check_quotas(per_group, batch, sizes)
        self.batch = sum(self.per_group)
        self.sharding = check_sharding(sharding, self.arrays, self.batch, "Stratified")

    def init(self, key: Any) -> StratifiedState:
        keys = jax.random.split(as_key(key), len(self.per_group))
        return StratifiedState(Shuffle.begin(keys), jnp.zeros((), int))

    def draw(self, state: StratifiedState) -> tuple[StratifiedState, Tree]:
        rounds = rounds_for(self.members.size)
        streams, numbers = state.streams.take(self.per_group, self.sizes, rounds)
        begins = jnp.cumsum(self.sizes, dtype=jnp.int32) - self.sizes
        places = begins[np.repeat(np.arange(len(self.per_group)), self.per_group)] + numbers
        state = StratifiedState(streams, state.drawn + self.batch)
        return state, self.rows(self.members[places])


def check_groups(groups: Any, count: int) -> np.ndarray:
    """The labels, which must be whole numbers 0, …, G−1, one per sample, none left out."""
    labels = np.asarray(groups)
    if labels.dtype.kind not in "biu" or labels.shape != (count,):
        raise ValueError(
            f"Stratified: groups must be {count} whole numbers, one per sample, not an array of "
            f"shape {labels.shape} and dtype {labels.dtype}"
        )
    labels = labels.astype(np.int64)
    if labels.min() < 0:
        row = int(np.argmin(labels))
        raise ValueError(f"Stratified: groups must be ≥ 0, but groups[{row}] is {labels[row]}")
    missing = np.setdiff1d(np.arange(labels.max() + 1), labels)
    if missing.size:
        raise ValueError(
            f"Stratified: group {missing[0]} has no sample, but there is a group {labels.max()}; "
            "number the groups 0, 1, … without gaps"
        )
    return labels


def check_quotas(per_group: Any, batch: Any, sizes: np.ndarray) -> tuple[int, ...]:
    """How many rows of a batch each group has."""
    groups = len(sizes)
    if per_group is None:
        whole(batch, "Stratified: batch", 1)
        if batch < groups:
            raise ValueError(
                f"Stratified: batch must be at least the {groups} groups, so that each is in every "
                f"batch, not {batch}"
            )
        share, left = divmod(int(batch), groups)
        largest = np.argsort(-sizes, kind="stable")[:left].tolist()
        return tuple(share + (g in largest) for g in range(groups))
    if len(per_group) != groups:
        raise ValueError(
            f"Stratified: per_group must have one count for each of {groups} groups, "
            f"not {len(per_group)}"
        )
    for g, quota in enumerate(per_group):
        whole(quota, f"Stratified: per_group[{g}]", 1)
    return tuple(int(quota) for quota in per_group)
