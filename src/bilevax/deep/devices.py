"""Where arrays are: the rows of a batch divided among devices, everything else on each."""

from __future__ import annotations

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from bilevax.data import replicated
from bilevax.trees import Tree


class Devices:
    """All devices of all processes, in one row."""

    def __init__(self) -> None:
        # The devices of a process are neighbours, as are the rows that it sends.
        devices = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
        counts = np.bincount([device.process_index for device in devices])
        if len(set(counts.tolist())) > 1:
            raise ValueError(f"processes must have equally many devices, not {counts.tolist()}")
        self.mesh = Mesh(np.asarray(devices), ("rows",))

    @property
    def count(self) -> int:
        return self.mesh.size

    def everywhere(self, tree: Tree) -> Tree:
        """A copy of each array on every device."""
        return replicated(tree, self.mesh)

    def sharding(self, axis: int = 0) -> NamedSharding:
        """Rows, which are along this axis, divided among the devices."""
        return NamedSharding(self.mesh, PartitionSpec(*[None] * axis, "rows"))

    def spread(self, rows: np.ndarray, axis: int = 0) -> Array:
        """An array that every process has whole, with its rows divided."""
        return jax.make_array_from_callback(rows.shape, self.sharding(axis), rows.__getitem__)

    def own(self, count: int) -> slice:
        """Which of so many rows are for the devices of this process."""
        each = count // jax.process_count()
        return slice(each * jax.process_index(), each * (jax.process_index() + 1))

    def joined(self, own: np.ndarray, count: int) -> Array:
        """The array of `count` rows of which every process gives its own."""
        return jax.make_array_from_process_local_data(self.sharding(), own, (count, *own.shape[1:]))

    def gathered(self, rows: Array) -> np.ndarray:
        """All rows of an array whose rows are divided, on every process."""
        if jax.process_count() > 1:
            rows = multihost_utils.process_allgather(rows, tiled=True)
        return np.asarray(rows)


def first() -> bool:
    """Whether this process is the one that writes and prints."""
    return jax.process_index() == 0
