"""Arrays that every device, of every process, has a copy of."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from bilevax.trees import Tree


def replicated(tree: Tree, mesh: Mesh) -> Tree:
    """The arrays of a tree on all devices of a mesh; with several processes each gives the same."""
    everywhere = NamedSharding(mesh, PartitionSpec())

    def put(leaf: Any) -> Any:
        if not eqx.is_array_like(leaf):
            return leaf
        host = np.asarray(leaf)
        return jax.make_array_from_callback(host.shape, everywhere, lambda index: host[index])

    return jax.tree.map(put, tree)
