"""Arithmetic on pytrees of arrays."""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike
from jaxtyping import Array

# A pytree of arrays. Pyright has no type for that; the name says what is meant.
Tree: TypeAlias = Any

# Arrays of at most so many entries are short.
FEW = 64


def scalar(value: Any, dtype: Any) -> np.ndarray:
    """One number as an array on the host: no program is compiled to make it."""
    return np.asarray(value, dtype)


def on_host(leaf: Any) -> np.ndarray:
    """An array as a NumPy array; of one that other processes have parts of, this one's part."""
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        return np.asarray(leaf.addressable_data(0))
    return np.asarray(leaf)


def is_finite(tree: Tree) -> bool:
    """Whether every floating entry is finite, found out on the host."""
    leaves = [on_host(leaf) for leaf in jax.tree.leaves(tree)]
    return all(np.all(np.isfinite(leaf)) for leaf in leaves if leaf.dtype.kind in "fc")


def dtype_of(tree: Tree) -> jnp.dtype:
    """The dtype that the arrays of a tree share."""
    return jnp.result_type(*jax.tree.leaves(tree))


def dot(a: Tree, b: Tree) -> Array:
    """⟨a, b⟩; zero for absent blocks."""
    products = jax.tree.leaves(jax.tree.map(lambda u, v: jnp.sum(u * v), a, b))
    return functools.reduce(operator.add, products) if products else jnp.zeros(())


def total(a: Tree) -> Array:
    """The sum of all entries."""
    return jnp.sum(jnp.stack([jnp.sum(leaf) for leaf in jax.tree.leaves(a)]))


def square(a: Tree) -> Array:
    """‖a‖²"""
    return dot(a, a)


def norm(a: Tree) -> Array:
    """‖a‖, with gradient 0 at 0. No square of an entry overflows or vanishes on the way."""
    unit = lax.stop_gradient(_unit(a))
    squared = square(jax.tree.map(lambda leaf: leaf / unit.astype(leaf.dtype), a))
    zero = squared == 0
    return jnp.where(zero, 0, unit * jnp.sqrt(jnp.where(zero, 1, squared)))


def _unit(a: Tree) -> Array:
    """A power of two to measure huge or tiny entries in; 1 for all others."""
    largest = _largest(a)
    room = 60 if largest.dtype == jnp.float32 else 500  # twice this is a power of two, too
    huge, tiny = largest > 2.0**room, (largest < 2.0**-room) & (largest > 0)
    one = jnp.ones_like(largest)
    return jnp.where(huge, one * 2.0 ** (room + 20), jnp.where(tiny, one / 2.0 ** (room + 20), 1))


def _largest(a: Tree) -> Array:
    """The largest entry, in size."""
    leaves = [jnp.max(jnp.abs(leaf), initial=0) for leaf in jax.tree.leaves(a)]
    return functools.reduce(jnp.maximum, leaves) if leaves else jnp.zeros(())


def axpy(scale: ArrayLike, a: Tree, b: Tree) -> Tree:
    """scale·a + b"""
    return jax.tree.map(lambda u, v: jnp.asarray(scale, u.dtype) * u + v, a, b)


def combine(ca: ArrayLike, a: Tree, cb: ArrayLike, b: Tree) -> Tree:
    """ca·a + cb·b"""
    return jax.tree.map(
        lambda u, v: jnp.asarray(ca, u.dtype) * u + jnp.asarray(cb, v.dtype) * v, a, b
    )


def subtract(a: Tree, b: Tree) -> Tree:
    """a − b"""
    return jax.tree.map(operator.sub, a, b)


def scale(factor: ArrayLike, a: Tree) -> Tree:
    """factor·a"""
    return jax.tree.map(lambda u: jnp.asarray(factor, u.dtype) * u, a)


def all_finite(tree: Tree) -> Array:
    """Whether every floating entry of a tree is finite."""
    leaves = [x for x in jax.tree.leaves(tree) if jnp.issubdtype(jnp.result_type(x), jnp.inexact)]
    # The short ones one behind the other: fewer operations to compile.
    short: dict[Any, list[Array]] = {}
    long = []
    for leaf in map(jnp.asarray, leaves):
        few = leaf.size <= FEW
        (short.setdefault(leaf.dtype, []) if few else long).append(leaf)
    joined = [jnp.concatenate([jnp.ravel(x) for x in some]) for some in short.values()]
    finite = [jnp.all(jnp.isfinite(x)) for x in joined + long]
    return functools.reduce(jnp.logical_and, finite, jnp.asarray(True))


@dataclasses.dataclass(frozen=True)
class Layout:
    """How the leaves of a tree lie one behind the other in a flat vector.

    Solvers that do many small operations keep their state flat: one kernel per operation instead
    of one per leaf. It is hashable, so that it can be a static part of a compiled state.
    """

    structure: Any
    shapes: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, tree: Tree) -> Layout:
        leaves, structure = jax.tree.flatten(tree)
        return cls(structure, tuple(jnp.shape(leaf) for leaf in leaves))

    def ravel(self, tree: Tree) -> Array:
        return jnp.concatenate([jnp.reshape(leaf, -1) for leaf in jax.tree.leaves(tree)])

    def unravel(self, flat: Array) -> Tree:
        leaves, begin = [], 0
        for shape in self.shapes:
            end = begin + math.prod(shape)
            leaves.append(jnp.reshape(flat[begin:end], shape))
            begin = end
        return jax.tree.unflatten(self.structure, leaves)
