"""Checks of samples and of groups, with messages that say where the bad one is."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bilevax.arguments import tracing, whole
from bilevax.trees import Tree


class DataError(ValueError):
    """Samples that cannot be used. `epoch`, `batch` and `index` (the row) say where, if known."""

    def __init__(
        self,
        message: str,
        epoch: int | None = None,
        batch: int | None = None,
        index: int | None = None,
    ):
        super().__init__(message)
        self.epoch, self.batch, self.index = epoch, batch, index


def numeric(leaf: Any, name: str) -> Any:
    """A JAX array as it is; anything else as a NumPy array of the dtype that JAX gives it.

    An overflow in that dtype is then seen before a device has the array.
    """
    array = leaf if isinstance(leaf, jax.Array) else np.asarray(leaf)
    if not (jnp.issubdtype(array.dtype, np.number) or array.dtype == bool):
        raise TypeError(f"{name} must be an array of numbers, not {type(leaf).__name__} {leaf!r}")
    if isinstance(array, jax.Array):
        return array
    dtype = jax.dtypes.canonicalize_dtype(array.dtype)
    if array.dtype.kind in "iu" and dtype != array.dtype and array.size:
        limits = np.iinfo(dtype)
        if array.min() < limits.min or array.max() > limits.max:
            raise ValueError(
                f"{name} has whole numbers from {array.min()} to {array.max()}, which do not fit "
                f"into {dtype}; enable jax_enable_x64, or number them anew"
            )
    with np.errstate(over="ignore"):
        return array.astype(dtype, copy=False)


def check_finite(array: Any, name: str) -> None:
    """Refuse NaN and infinity, unless JAX is tracing the array."""
    if tracing(array) or not jnp.issubdtype(array.dtype, jnp.inexact):
        return
    xp = jnp if isinstance(array, jax.Array) else np
    bad = ~xp.all(xp.isfinite(array), axis=tuple(range(1, array.ndim)))
    if bool(xp.any(bad)):
        row = int(xp.argmax(bad))
        raise DataError(
            f"{name} has NaN or infinity in row {row}; drop or repair that sample", index=row
        )


def as_samples(tree: Tree, owner: str) -> tuple[Tree, int]:
    """The tree as JAX arrays, and its number of samples, which is the length of every array."""
    leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
    if not leaves:
        raise ValueError(f"{owner}: arrays must be a pytree of arrays, but {tree!r} holds none")
    arrays = []
    for path, leaf in leaves:
        name = f"{owner}: arrays{jax.tree_util.keystr(path)}"
        array = numeric(leaf, name)
        if array.ndim == 0 or len(array) == 0:
            what = "empty" if array.ndim else "a single number"
            raise ValueError(f"{name} is {what}; it must have one row per sample")
        if arrays and len(array) != len(arrays[0]):
            raise ValueError(
                f"{name} has {len(array)} rows, but arrays{jax.tree_util.keystr(leaves[0][0])} has "
                f"{len(arrays[0])}; every array must have one row per sample"
            )
        check_finite(array, name)
        arrays.append(jnp.asarray(array))
    return jax.tree_util.tree_unflatten(structure, arrays), len(arrays[0])


def check_groups(groups: Any, count: int, owner: str) -> np.ndarray:
    """The group of each sample; the groups must be numbered 0, …, G−1 without gaps."""
    labels = np.asarray(groups)
    if labels.dtype.kind not in "biu" or labels.shape != (count,):
        raise ValueError(
            f"{owner}: groups must be {count} whole numbers, one per sample, not an array of "
            f"shape {labels.shape} and dtype {labels.dtype}"
        )
    labels = labels.astype(np.int64)
    if labels.min() < 0:
        row = int(np.argmin(labels))
        raise ValueError(f"{owner}: groups must be ≥ 0, but groups[{row}] is {labels[row]}")
    missing = np.setdiff1d(np.arange(labels.max() + 1), labels)
    if missing.size:
        raise ValueError(
            f"{owner}: group {missing[0]} has no sample, but there is a group {labels.max()}; "
            "number the groups 0, 1, … without gaps"
        )
    return labels


def check_quotas(per_group: Any, batch: Any, sizes: np.ndarray, owner: str) -> tuple[int, ...]:
    """How many rows of a batch each group has.

    Without `per_group` it is ⌊batch/G⌋, and one more for each of the largest groups until `batch`
    is reached.
    """
    groups = len(sizes)
    if per_group is None:
        whole(batch, f"{owner}: batch", 1)
        if batch < groups:
            raise ValueError(
                f"{owner}: batch must be at least {groups}, the number of groups, so that each "
                f"group is in every batch, not {batch}"
            )
        share, left = divmod(int(batch), groups)
        largest = np.argsort(-sizes, kind="stable")[:left].tolist()
        return tuple(share + (g in largest) for g in range(groups))
    if len(per_group) != groups:
        raise ValueError(
            f"{owner}: per_group must have one count for each of {groups} groups, "
            f"not {len(per_group)}"
        )
    for g, quota in enumerate(per_group):
        whole(quota, f"{owner}: per_group[{g}]", 1)
    return tuple(int(quota) for quota in per_group)
