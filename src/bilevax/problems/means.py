"""Means over some of the samples, with slopes that are corrected by those over more of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from bilevax import trees
from bilevax.problems.form import Call, Form
from bilevax.problems.point import Point
from bilevax.problems.tangents import pushed
from bilevax.trees import Tree


class Correction(eqx.Module):
    """c(w) with ∇c = `slope` at `place`, and ∇c = `slope` + `change` at `place` + `way`.

    c(w) = s·v + (e·v)(d·v)/‖d‖² − ½(d·e)(d·v)²/‖d‖⁴ with v = w − place, d = way and e = change: the
    symmetric secant correction of least size (Powell).
    """

    place: Tree
    slope: Tree
    way: Tree
    change: Tree

    @classmethod
    def none(cls, place: Tree) -> Correction:
        zero = jax.tree.map(jnp.zeros_like, place)
        return cls(jax.tree.map(jnp.asarray, place), zero, zero, zero)

    @classmethod
    def of(cls, places: Sequence[Tree], errors: Sequence[Tree]) -> Correction:
        """From the errors of slopes at a first and a last place, which may be the same.

        Where these are so near that their difference is rounding, the change is none.
        """
        way = trees.subtract(places[-1], places[0])
        near = jnp.sqrt(jnp.finfo(trees.dtype_of(way)).eps) * (1 + trees.norm(places[0]))
        far = jnp.where(trees.norm(way) > near, 1, 0)
        change = trees.scale(far, trees.subtract(errors[-1], errors[0]))
        return cls(places[0], errors[0], way, change)

    def __call__(self, w: Tree) -> Array:
        v = trees.subtract(w, self.place)
        long = trees.square(self.way)
        share = trees.dot(self.way, v) / jnp.where(long > 0, long, 1)
        bent = trees.dot(self.change, v) - trees.dot(self.way, self.change) * share / 2
        return trees.dot(self.slope, v) + share * bent


class Chunks(eqx.Module):
    """Samples along a second axis, in equal chunks along the first, of which `count` are in use.

    `corrections` has one for each function that has any, by its name.
    """

    samples: Tree
    count: Any
    corrections: dict[str, Correction]


class ChunkMean(eqx.Module):
    """The mean of a function over the chunks in use, however many these are: one program for all.

    JAX cannot differentiate a loop of unknown length backwards, so the derivative is written out:
    the mean of the derivatives.
    """

    function: Callable[..., Tree]
    name: str = eqx.field(static=True)

    def __call__(self, *arguments: Any) -> Tree:
        *blocks, chunks = arguments
        value = _mean(self.function)(tuple(blocks), chunks.samples, chunks.count)
        correction = chunks.corrections.get(self.name)
        return value if correction is None else value + correction(tuple(blocks))


def _mean(function: Callable[..., Tree]) -> Callable[..., Tree]:
    def at(blocks: tuple, samples: Tree, index: Array) -> Tree:
        chunk = jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, index, 0, False), samples)
        return function(*blocks, chunk)

    def over(of: Callable[[Array], Tree], count: Array) -> Tree:
        zero = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(of, count))
        onwards = lambda i, total: jax.tree.map(jnp.add, total, of(i))
        total = lax.fori_loop(0, count, onwards, zero)
        return jax.tree.map(lambda t: t / count.astype(t.dtype), total)

    @jax.custom_jvp
    def mean(blocks: tuple, samples: Tree, count: Array) -> Tree:
        return over(lambda i: at(blocks, samples, i), count)

    @mean.defjvp
    def _(primals: tuple, tangents: tuple) -> tuple[Tree, Tree]:
        (blocks, samples, count), (ways, *_) = primals, tangents

        def both(i: Array) -> tuple[Tree, Tree]:
            twice = lambda b: (lambda value: (value, value))(at(b, samples, i))
            slope, value = jax.jacrev(twice, has_aux=True)(blocks)
            return value, slope

        value, slope = over(both, count)

        structure = jax.tree.structure(value)
        each = structure.flatten_up_to(slope)
        return value, jax.tree.unflatten(structure, [pushed(part, ways) for part in each])

    return mean


def on_chunks(problem: Form, chunks: Chunks) -> Any:
    """The problem whose functions are means over these chunks."""
    names = [name for name in problem.function_names if getattr(problem, name) is not None]
    where = lambda p: [getattr(p, name) for name in names]
    means = [ChunkMean(getattr(problem, name), name) for name in names]
    return eqx.tree_at(where, problem, means).on(chunks)


def first_corrections(problem: Form, point: Point) -> dict[str, Correction]:
    """Corrections that are none yet, for the functions that return numbers."""
    return {call.name: Correction.none(_place(call)) for call in _numbers(problem, point)}


def slopes(problem: Form, point: Point) -> dict[str, list[tuple]]:
    """The gradients of the functions that return numbers, everywhere they are called at a point."""
    found: dict[str, list[tuple]] = {}
    for call in _numbers(problem, point):
        slope = jax.grad(lambda place, call=call: call(*place, *problem.extra))(_place(call))
        found.setdefault(call.name, []).append(slope)
    return found


def places(problem: Form, point: Point) -> dict[str, list[tuple]]:
    """Where that is."""
    found: dict[str, list[tuple]] = {}
    for call in _numbers(problem, point):
        found.setdefault(call.name, []).append(_place(call))
    return found


def _numbers(problem: Form, point: Point) -> list[Call]:
    return [c for c in problem.all_calls(point) if c.name not in problem.array_functions]


def _place(call: Call) -> tuple:
    return tuple(call.blocks.values())
