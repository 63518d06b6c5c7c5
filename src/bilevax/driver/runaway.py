"""A variable that runs away: where the objective falls without end, no step is too long."""

from __future__ import annotations

import jax
import numpy as np

from bilevax.problems import Form, Point

# Away is farther than this many times 1 + the size of the start.
FAR = 1e10


def runaway(problem: Form, start: Point, point: Point) -> str:
    """A clause that says which block has run away, and along which entry; empty if none has.

    A witness like a block, the lower level's best answer, may run away while the block is held.
    """
    for name, _, block in problem.terms(point):
        owner = problem.witnesses.get(name) or name
        begun = [np.max(np.abs(leaf), initial=0.0) for leaf in jax.tree.leaves(start.blocks[owner])]
        far = FAR * (1 + max(begun, default=0.0))
        for path, leaf in jax.tree_util.tree_leaves_with_path(block):
            entries = np.atleast_1d(np.asarray(leaf))
            if not entries.size or not np.max(np.abs(entries)) > far:
                continue
            where = np.unravel_index(np.argmax(np.abs(entries)), entries.shape)
            index = "" if np.ndim(leaf) == 0 else str([int(i) for i in where])
            entry = f"{name}{jax.tree_util.keystr(path)}{index}"
            return f"{entry} has run to {entries[where]:.3g}"
    return ""
