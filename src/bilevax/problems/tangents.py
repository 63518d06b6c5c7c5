"""Functions that are known by their values and slopes at the places where they are called."""

from __future__ import annotations

import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array

from bilevax import trees
from bilevax.problems.form import Form
from bilevax.problems.point import Point
from bilevax.trees import Tree


class Tangent(eqx.Module):
    """v + S·(w − place): a function with this value and this slope at a place."""

    place: tuple
    value: Tree
    slope: Tree

    def __call__(self, w: tuple) -> Tree:
        way, structure = trees.subtract(w, self.place), jax.tree.structure(self.value)
        slopes = structure.flatten_up_to(self.slope)
        values = jax.tree.leaves(self.value)
        risen = [v + pushed(s, way).astype(v.dtype) for v, s in zip(values, slopes, strict=True)]
        return jax.tree.unflatten(structure, risen)


def pushed(slope: Tree, way: Tree) -> Array:
    """What a slope, the derivative of one array in all variables, makes of a way."""
    parts = zip(jax.tree.leaves(slope), jax.tree.leaves(way), strict=True)
    return functools.reduce(jnp.add, [jnp.tensordot(s, w, w.ndim) for s, w in parts])


def tangents(problem: Form, point: Point) -> dict[str, list[Tangent]]:
    """Those of each function, everywhere it is called at a point. It is traced."""
    found: dict[str, list[Tangent]] = {}
    for call in problem.all_calls(point):
        place = tuple(call.blocks.values())
        twice = lambda at, call=call: (lambda v: (v, v))(call(*at, *problem.extra))
        slope, value = jax.jacrev(twice, has_aux=True)(place)
        found.setdefault(call.name, []).append(Tangent(place, value, slope))
    return found


class Tabulated(eqx.Module):
    """A function of which some tangents are known: the one of the nearest place."""

    name: str = eqx.field(static=True)

    def __call__(self, *arguments: Any) -> Tree:
        *blocks, table = arguments
        known = table[self.name]
        far = [trees.square(trees.subtract(tuple(blocks), tangent.place)) for tangent in known]
        nearest = jnp.argmin(jnp.stack(far))
        values = [tangent(tuple(blocks)) for tangent in known]
        return jax.tree.map(lambda *leaves: jnp.stack(leaves)[nearest], *values)


def tabulated(problem: Form, table: dict[str, list[Tangent]]) -> Any:
    """The problem whose functions are known by these tangents."""
    names = [name for name in problem.function_names if getattr(problem, name) is not None]
    where = lambda p: [getattr(p, name) for name in names]
    return eqx.tree_at(where, problem, [Tabulated(name) for name in names]).on(table)
