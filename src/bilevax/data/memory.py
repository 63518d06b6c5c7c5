"""Sources whose samples are all in memory, and how arrays are laid out on devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding
from jaxtyping import Array

from bilevax.arguments import whole
from bilevax.data.checks import as_samples, check_groups, check_quotas
from bilevax.data.shuffle import Shuffle
from bilevax.data.source import Source, as_key
from bilevax.trees import Tree


class StreamState(eqx.Module):
    stream: Shuffle  # of all samples, or one of each group
    drawn: Array


class InMemory(Source[StreamState]):
    """A source that has all its samples at once."""

    arrays: eqx.AbstractVar[Tree]
    sharding: eqx.AbstractVar[Sharding | None]

    def everything(self) -> Tree:
        return self.arrays

    def rows(self, indices: Array) -> Tree:
        """These samples as a batch, laid out as `sharding` says."""
        rows = jax.tree.map(lambda a: a.at[indices].get(mode="promise_in_bounds"), self.arrays)
        if self.sharding is None:
            return rows
        return lax.with_sharding_constraint(rows, self.sharding)


class Arrays(InMemory):
    """Minibatches of samples in memory: each sample exactly once an epoch, in random order.

    `arrays` is a pytree of arrays, one row per sample. A batch is the next `batch` entries of the
    stream π₀ π₁ π₂ … of one permutation per epoch; if `batch` does not divide the number of samples
    a batch can lie across two epochs. `sharding` spreads a drawn batch over devices.
    """

    arrays: Tree
    batch: int = eqx.field(static=True)
    sharding: Sharding | None = eqx.field(static=True)

    def __init__(self, arrays: Tree, batch: int = 64, *, sharding: Sharding | None = None):
        whole(batch, "Arrays: batch", 1)
        self.arrays, count = as_samples(arrays, "Arrays")
        self.batch = int(batch)
        if self.batch > count:
            raise ValueError(f"Arrays: batch must be at most the {count} samples, not {batch}")
        self.sharding = check_sharding(sharding, self.arrays, self.batch, "Arrays")

    def init(self, key: Any) -> StreamState:
        return StreamState(Shuffle.begin(as_key(key)[None]), jnp.zeros((), int))

    def draw(self, state: StreamState) -> tuple[StreamState, Tree]:
        count = jax.tree.leaves(self.arrays)[0].shape[0]
        sizes = jnp.asarray([count], jnp.int32)
        stream, indices = state.stream.take((self.batch,), sizes, count)
        return StreamState(stream, state.drawn + self.batch), self.rows(indices)


class Stratified(InMemory):
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

    def init(self, key: Any) -> StreamState:
        keys = jax.random.split(as_key(key), len(self.per_group))
        return StreamState(Shuffle.begin(keys), jnp.zeros((), int))

    def draw(self, state: StreamState) -> tuple[StreamState, Tree]:
        stream, places = state.stream.take(self.per_group, self.sizes, self.members.size)
        rows = self.rows(self.members[places])
        return StreamState(stream, state.drawn + self.batch), rows


def check_sharding(sharding: Any, arrays: Tree, batch: int, owner: str) -> Sharding | None:
    """Refuse a sharding that cannot divide a batch."""
    if sharding is None:
        return None
    if not isinstance(sharding, Sharding):
        raise TypeError(f"{owner}: sharding must be a jax.sharding.Sharding, not {sharding!r}")
    for path, leaf in jax.tree_util.tree_leaves_with_path(arrays):
        rows = jax.ShapeDtypeStruct((batch, *leaf.shape[1:]), leaf.dtype)
        try:
            sharding.shard_shape(rows.shape)  # refuses unequal shards
            jax.eval_shape(lambda r: lax.with_sharding_constraint(r, sharding), rows)
        except ValueError as error:
            raise ValueError(
                f"{owner}: sharding cannot lay out batch={batch} rows of "
                f"arrays{jax.tree_util.keystr(path)}; its mesh axis must divide batch and be Auto, "
                f"as in jax.sharding.Mesh(devices, names). ({error})"
            ) from None
    return sharding


def replicated(tree: Tree, mesh: Mesh) -> Tree:
    """The arrays of a tree on all devices of a mesh; with several processes each gives the same."""
    everywhere = NamedSharding(mesh, PartitionSpec())

    def put(leaf: Any) -> Any:
        if not eqx.is_array_like(leaf):
            return leaf
        host = np.asarray(leaf)
        return jax.make_array_from_callback(host.shape, everywhere, lambda index: host[index])

    return jax.tree.map(put, tree)
