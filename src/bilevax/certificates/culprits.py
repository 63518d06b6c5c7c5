"""Where a line of a certificate comes from: an entry of a block, or a constraint."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from bilevax.certificates.definition import definition_of
from bilevax.problems import Form, Point
from bilevax.programs import quick
from bilevax.trees import Tree


@quick
def _shares(definition: Any, problem: Form, point: Point) -> dict[str, dict[str, Tree]]:
    return definition.shares(problem, point)


def culprit(problem: Form, point: Point, line: str) -> str:
    """The largest entry of what a line is the size of, such as `y1[3]` or `constraints['cap'][0]`.

    Empty for a line that is not the size of a vector.
    """
    shares = jax.device_get(_shares(definition_of(problem), problem, point)).get(line, {})
    sizes = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(shares)[0]:
        leaf = np.nan_to_num(np.abs(np.asarray(leaf)))
        if np.any(leaf > 0):
            at = np.unravel_index(np.argmax(leaf), leaf.shape)
            where = "".join(f"[{int(index)}]" for index in at)
            name = f"{path[0].key}{jax.tree_util.keystr(path[1:])}{where}"
            sizes[name] = float(leaf[at])
    return max(sizes, key=lambda name: sizes[name], default="")
