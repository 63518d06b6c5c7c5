"""Functions outside of their stated class, caught by what they do at some points of the domain.

A certificate's bounds are tangents: a convex function lies above its own. Where one is found below
the least that its tangent and its term allow together, it is not convex, or its gradient is not
its own, and the bound says nothing. A breach is proof. That there is none among a few dozen points
is not: a dip that is narrow enough stays unseen.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from bilevax import trees
from bilevax.certificates.effort import is_small
from bilevax.certificates.gap import linear_excess
from bilevax.problems import Form, Point
from bilevax.problems.constants import sample_domain
from bilevax.programs import quick
from bilevax.terms import Term
from bilevax.trees import Tree

# Points of the domain that are looked at: so many ways from where the bound was taken, each at
# these shares of its length. A gradient that is wrong only there shows at the short ones.
WAYS, FEW_WAYS, SHARES = 10, 2, (1.0, 0.3, 0.03, 1e-3)
# And up to so many entries, by themselves, each to both ends of the domain and a part of the way;
# fewer where a value takes long.
AXES, FEW_AXES, AXIS_SHARES = 64, 2, (1.0, 0.1)
# Roundings of the values that do not count as a breach.
ROUNDINGS = 1024


class Claim(NamedTuple):
    """That a function is convex, concave or affine in one block, which a bound rests on.

    `values` has it as a function of this block alone; a concave one has changed its sign.
    """

    function: str
    block: str
    shape: str
    values: Callable[[Tree], Tree]
    term: Term
    at: Tree  # where the bound was taken
    line: str  # of the certificate, whose allowance for rounding is also one for these values


def breach_of(definition: Any, problem: Form, point: Point, allowances: dict[str, float]) -> str:
    """The first breach of what a certificate claims, as a sentence; nothing if there is none."""
    found = jax.device_get(_breaches(*_arguments(definition, problem, point, allowances)))
    for claim, (shortfall, where) in zip(definition.claims(problem, point), found):
        if shortfall > 0:
            return _sentence(claim, float(shortfall), where)
    return ""


def compile_breaches(
    definition: Any, problem: Form, point: Point, allowances: dict[str, float]
) -> Future:
    """Compile, in a thread, what `breach_of` runs."""
    return _breaches.ahead(*_arguments(definition, problem, point, allowances))


def _arguments(
    definition: Any, problem: Form, point: Point, allowances: dict[str, float]
) -> tuple[Any, Form, Point, dict[str, np.ndarray]]:
    dtype = trees.dtype_of(point.replace(rho=None))
    allowed = {name: np.asarray(value, dtype) for name, value in allowances.items()}
    return definition, problem, point, allowed


@quick
def _breaches(
    definition: Any, problem: Form, point: Point, allowed: dict[str, Array]
) -> list[tuple[Array, Tree]]:
    """For every claim by how much it is missed at the worst point, beyond rounding, and where."""
    counts = (WAYS, AXES) if is_small(problem, point) else (FEW_WAYS, FEW_AXES)
    claims = definition.claims(problem, point)
    return [_worst(claim, allowed[claim.line], *counts) for claim in claims]


def _worst(claim: Claim, allowed: Array, ways: int, axes: int) -> tuple[Array, Tree]:
    missed = _missed_affinity if claim.shape == "affine" else _missed_bound
    measure = missed(claim, allowed)
    layout = trees.Layout.of(claim.at)
    at = layout.ravel(claim.at)
    diameter = claim.term.diameter(claim.at).astype(at.dtype)
    reach = jnp.where(jnp.isfinite(diameter), diameter, 1 + jnp.max(jnp.abs(at), initial=0))

    def between(end: Tree, share: Array) -> Tree:
        return trees.combine(1 - share, claim.at, share, end)

    def drawn(key: Array, share: Array) -> Tree:
        return between(sample_domain(claim.term, claim.at, key), share)

    def along(entry: Array, sign: Array, share: Array) -> Tree:
        end = claim.term.project(layout.unravel(at.at[entry].add(sign * reach)))
        return between(end, share)

    # One place at a time: all of them together may be too many numbers.
    chosen = np.random.default_rng(0).permutation(at.size)[:axes]
    keys = jax.random.split(jax.random.key(0), ways)
    number = lambda values: jnp.asarray(np.asarray(values), at.dtype)
    shares = number(np.repeat(SHARES, ways))
    entry, sign, share = (grid.ravel() for grid in np.meshgrid(chosen, (1, -1), AXIS_SHARES))
    found = [_least(measure, drawn, (jnp.tile(keys, len(SHARES)), shares))]
    if at.size:
        found.append(_least(measure, along, (jnp.asarray(entry), number(sign), number(share))))
    shortfalls = jnp.stack([shortfall for shortfall, _ in found])
    first = jnp.argmax(shortfalls)
    places = jax.tree.map(lambda *parts: jnp.stack(parts), *(place for _, place in found))
    return shortfalls[first], jax.tree.map(lambda part: part[first], places)


def _least(measure: Callable, place: Callable, every: tuple) -> tuple[Array, Tree]:
    """The largest shortfall at places made of these arguments, and the place."""
    shortfalls = lax.map(lambda arguments: measure(place(*arguments)), every)
    shortfalls = jnp.where(jnp.isnan(shortfalls), -jnp.inf, shortfalls)
    worst = jnp.argmax(shortfalls)
    return shortfalls[worst], place(*(part[worst] for part in every))


def _missed_bound(claim: Claim, allowed: Array) -> Callable[[Tree], Array]:
    """By how much f + φ lies below the least that the tangent of f and φ allow together."""
    value, slope = jax.value_and_grad(claim.values)(claim.at)
    excess = linear_excess(claim.term, claim.at, trees.scale(-1, slope)).astype(value.dtype)
    bound = value - excess
    eps = ROUNDINGS * jnp.finfo(value.dtype).eps

    def measure(s: Tree) -> Array:
        there, of_term = claim.values(s), claim.term.value(s).astype(value.dtype)
        size = jnp.abs(there) + jnp.abs(of_term) + jnp.abs(value) + jnp.abs(excess)
        return bound - there - of_term - eps * size - allowed

    return measure


def _missed_affinity(claim: Claim, allowed: Array) -> Callable[[Tree], Array]:
    """By how much a value lies off the middle of those at the same distance on both sides."""
    here = claim.values(claim.at)

    def measure(s: Tree) -> Array:
        middle = claim.values(trees.combine(0.5, s, 0.5, claim.at))

        def off(a: Array, m: Array, b: Array) -> Array:
            size = ROUNDINGS * jnp.finfo(a.dtype).eps * (jnp.abs(a) + jnp.abs(b) + jnp.abs(m))
            return jnp.max(jnp.abs(m - (a + b) / 2) - size, initial=-jnp.inf)

        offs = jax.tree.leaves(jax.tree.map(off, claim.values(s), middle, here))
        return jnp.max(jnp.stack(offs)).astype(allowed.dtype) - ROUNDINGS * allowed

    return measure


def _sentence(claim: Claim, shortfall: float, where: Tree) -> str:
    with np.printoptions(precision=4, threshold=6, edgeitems=2):
        place = " ".join(str(np.asarray(leaf)) for leaf in jax.tree.leaves(where))
    if claim.shape == "affine":
        return f"{claim.function} are not affine in {claim.block}: {shortfall:.3g} off at {place}"
    side = "above" if claim.shape == "concave" else "below"
    return (
        f"{claim.function} is not {claim.shape} in {claim.block}, or its gradient is not its own: "
        f"at {claim.block} = {place} it is {shortfall:.3g} {side} the bound that its tangent gives"
    )
