"""How the rows of a minibatch are divided among groups, and which rows they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from bilevax.arguments import whole
from bilevax.data.shuffle import Shuffle, rounds_for


def rows_of(
    streams: Shuffle, members: Any, sizes: Any, quotas: Sequence[int]
) -> tuple[Shuffle, Any]:
    """The next `quotas` rows of each group, group after group; on JAX or on NumPy arrays.

    `members` holds the rows of group 0, then those of group 1, and so on; `sizes` says how many
    each group has. Every group has a stream of permutations of its own.
    """
    streams, numbers = streams.take(quotas, sizes, rounds_for(members.size))
    begins = sizes.cumsum(dtype=np.int32) - sizes
    return streams, members[begins[np.repeat(np.arange(len(quotas)), quotas)] + numbers]


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
