"""Look afar: an x that is far from its start, and F no higher even farther, has run away.

Along a block without bounds F may fall towards a limit that it never reaches, as 1/x does. Its
slope vanishes on the way, so that some x far out is an ε-KKT point for every ε, and which one is
chance. So F is computed, with the lower level solved again, where an entry that is far is larger
still. At an answer that is rightly large, such as one in units of 1e-6, F is higher there.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from bilevax import trees
from bilevax.certificates.around import affordable_steps
from bilevax.problems import Form, Point
from bilevax.programs import quick
from bilevax.trees import Layout, Tree

# Far is this many times 1 + the size of the start's entry. So many entries are looked at.
FAR, MOST = 100.0, 3
# F is compared with that at so many times the entries that are far.
TIMES = (2.0, 4.0)
# What a place may be off its domain by, as a share of x.
ROUNDED = 1e-3


def look_afar(definition: Any, problem: Form, start: Point, point: Point, slack: float) -> str:
    """A sentence that says which entry of x has run away; empty if none has.

    The entries that are farthest, each against its own start, are looked at one at a time. One has
    not run away where F is higher by more than `slack`·(1 + |F|) at one of the places, or a bound
    is in the way. What is left of the lower level's gap there, times ρ, is how well F is known:
    that must be less than half of what F fell from the start, or else nothing is said. For an
    answer that is rightly large F rises about as much on its far side as it fell on the near one.
    """
    if not definition.moving:
        return ""
    name = definition.moving[0]
    x, first = (jax.tree.map(np.asarray, getattr(at, name)) for at in (point, start))
    layout = Layout.of(x)
    raveled = lambda block: np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(block)])
    flat, begun = (raveled(block).astype(np.float64) for block in (x, first))
    times = np.abs(flat) / (1 + np.abs(begun))
    far = np.argsort(-times)[:MOST]
    far = np.resize(far, MOST)  # of fewer entries some stand twice, so that one program serves
    if not (times[far] > FAR).any():
        return ""
    moved = np.repeat(flat[None], MOST * len(TIMES), axis=0)
    for row, (entry, scale) in zip(moved, ((e, t) for e in far for t in TIMES)):
        row[entry] *= scale
    places: Any = [layout.unravel(jnp.asarray(place)) for place in (begun, flat, *moved)]
    places = jax.tree.map(lambda *leaves: np.stack(leaves), *places)
    places = jax.tree.map(lambda leaf, like: leaf.astype(like.dtype), places, x)
    steps = np.asarray(affordable_steps(problem, point))
    numbers = np.asarray(slack, trees.dtype_of(x)), steps
    seen = jax.device_get(_objectives(definition, problem, point, places, *numbers))
    values, unknown, off = (np.asarray(column, np.float64) for column in seen)
    here, fell = values[1], values[0] + unknown[0] - values[1]
    for k, entry in enumerate(far):
        own = slice(2 + k * len(TIMES), 2 + (k + 1) * len(TIMES))
        known = np.isfinite([*values[own], *unknown[own], here, fell]).all()
        if not times[entry] > FAR or not known or (off[own] > abs(flat[entry]) * ROUNDED).any():
            continue
        higher = values[own] - unknown[own] > here + unknown[1] + slack * (1 + abs(here))
        if not higher.any() and (np.append(unknown[own], unknown[1]) <= fell / 2).all():
            return (
                f"{_named(name, x, int(entry))} has run to {flat[entry]:.3g}, {times[entry]:.3g} "
                f"times as far as the start, and F is no higher at {TIMES[0]:g} and {TIMES[1]:g} "
                f"times as much: that way F may have no minimum, only a limit. If another {name} "
                "is meant, give it a bound, such as Box(-R, R)."
            )
    return ""


@quick
def _objectives(
    definition: Any, problem: Form, point: Point, places: Tree, slack: Array, steps: Array
) -> tuple[Array, Array, Array]:
    """F at each place, how well it is known, and how far the place is from the domain.

    F is an answer's objective without the penalty of the lower level's gap, ρ·gap.
    """
    term = getattr(problem, definition.moving[0])

    def look(place: Tree) -> tuple[Array, Array, Array]:
        moved = trees.norm(trees.subtract(term.project(place), place))
        if point.rho is None:
            there = definition.answer(problem, point, place, slack, steps)
            return there.objective, jnp.zeros_like(there.objective), moved

        def priced(rho: Array) -> Array:
            at = point.replace(rho=rho)
            return definition.answer(problem, at, place, slack, steps).objective

        rho = jnp.asarray(point.rho, trees.dtype_of(place))
        objective, gap = jax.jvp(priced, (rho,), (jnp.ones_like(rho),))
        return objective - rho * gap, jnp.abs(rho * gap), moved

    return jax.lax.map(look, places)


def _named(name: str, x: Tree, entry: int) -> str:
    """An entry of a flattened block, by its place in the block."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(x):
        if entry < np.size(leaf):
            index = (
                [int(i) for i in np.unravel_index(entry, np.shape(leaf))] if np.ndim(leaf) else ""
            )
            return f"{name}{jax.tree_util.keystr(path)}{index}"
        entry -= np.size(leaf)
    raise IndexError("there is no such entry")
