"""Rigorous bounds on the gap of a saddle point problem, from one gradient and the terms.

A convex F with slope g at z lies above its tangent, so with a term φ it falls from F(z) by at most
φ*(−g) + ⟨g, z⟩. Where that is infinite, as along a variable without bounds, the bound needs ground
to stand on. With v the shortest vector of g + ∂φ(z), over the parts of the block where it is so,
F + φ falls from z to s by at most −⟨v, s − z⟩ there:

- If F is m-strongly convex, −⟨v, s − z⟩ − m/2·‖s − z‖² ≤ ‖v‖²/(2m), for every s.
- Without such a modulus, −⟨v, s − z⟩ ≤ ‖v‖·(R + ‖z − y‖), for every s within R of the answer y.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array

from bilevax import trees
from bilevax.problems.minimax import MinimaxProblem
from bilevax.terms import Term
from bilevax.trees import Tree

# Unless a radius is given, the answer y is compared with all within so many times 1 + ‖y‖.
RADIUS = 10.0


class Ground(NamedTuple):
    """What a bound stands on where a term allows any fall: a modulus m > 0, or else a radius."""

    center: Tree  # the answer y, of which the radius is measured
    radius: Array
    modulus: Array  # 0 where there is none


class Excess(NamedTuple):
    """A bound, and whether tangent and term alone give it."""

    bound: Array
    alone: Array


def ground(center: Tree, radius: Any = None, modulus: Any = None) -> Ground:
    """With this radius, or RADIUS·(1 + ‖center‖), and this modulus where it is finite and > 0."""
    dtype = trees.dtype_of(center)
    usual = RADIUS * (1 + trees.norm(center)).astype(dtype)
    m = jnp.zeros((), dtype) if modulus is None else jnp.asarray(modulus).astype(dtype)
    fits = (m > 0) & jnp.isfinite(m)
    given = usual if radius is None else jnp.asarray(radius, dtype)
    return Ground(center, given, jnp.where(fits, m, jnp.zeros_like(m)))


def lower_ground(problem: Any, block: str, x: Tree, y: Tree) -> Ground | None:
    """What a bound over a block of the lower level at x stands on; None if its term is enough."""
    term = getattr(problem, block)
    if term is None or not term.endless:
        return None
    modulus = problem.lower_modulus
    if callable(modulus):
        modulus = jnp.asarray(modulus(x))
        if modulus.shape:
            raise TypeError(f"lower_modulus must return one number, not shape {modulus.shape}")
    return ground(y, problem.radius, modulus)


def linear_excess(term: Term | None, z: Tree, g: Tree) -> Array:
    """max over s of ⟨g, s − z⟩ − φ(s): how much a concave function can rise from z, at the most.

    A concave F with ∇F(z) = g lies below F(z) + ⟨g, s − z⟩, so max (F − φ) ≤ F(z) + this.
    """
    if term is None:
        return trees.dot(z, g)  # an absent block: zero
    return term.conjugate(g) - trees.dot(g, z)


def grounded_excess(term: Term | None, z: Tree, g: Tree, on: Ground | None) -> Excess:
    """`linear_excess` where it is finite, and elsewhere what holds on this ground."""
    excess = linear_excess(term, z, g)
    if term is None or on is None:
        return Excess(excess, jnp.asarray(True))
    alone = jnp.isfinite(excess)
    slope = trees.norm(term.endless_slope(z, g)).astype(excess.dtype)
    way = on.radius + trees.norm(trees.subtract(z, on.center))
    strong = on.modulus > 0
    curved = slope * (slope / (2 * jnp.where(strong, on.modulus, 1)).astype(slope.dtype))
    most = jnp.where(strong, curved, slope * way.astype(slope.dtype))
    return Excess(jnp.where(alone, excess, term.known_excess(z, g) + most), alone)


def sampled_change(
    problem: Any, block: str, blocks: tuple[Tree, Tree, Tree], steep: float, delta: float
) -> float:
    """By how much `grounded_excess` over a block of the lower level changes, at most, with slopes.

    `blocks` are x, y and z; the slope at z is off by `delta`, and its shortest vector with the
    term's subdifferential is at most `steep` long. The excess is the greatest of −⟨g, s − z⟩ and
    terms that stay as they are, over s: it changes by `delta` times the diameter. Without bounds it
    holds within a radius, and changes by `delta` times the way to there. Or it rests on a modulus
    m: with g off by e it is at most its estimate and the greatest of −⟨e, s − z⟩ − m/2·‖s − z‖²
    along with −⟨v, s − z⟩, so it changes by (‖v‖·‖e‖ + ‖e‖²/2)/m.
    """
    term, (x, y, z) = getattr(problem, block), blocks
    if term is None:
        return 0.0
    diameter = float(term.diameter(y))
    if math.isfinite(diameter):
        return diameter * delta
    on = lower_ground(problem, block, x, y)
    if on is not None and float(on.modulus) > 0:
        return (steep + delta / 2) * delta / float(on.modulus)
    radius = ground(y, problem.radius).radius
    return float(radius + trees.norm(trees.subtract(z, y))) * delta


def sampled_footing(
    problem: Any, block: str, x: Tree, y: Tree, rests: tuple[float, float]
) -> tuple[float, float]:
    """The radius and the modulus that a bound over a block rests on besides `rests`.

    Other samples have other slopes, so over a block without bounds it never stands on its term
    alone.
    """
    term, (radius, modulus) = getattr(problem, block), rests
    if term is None or math.isfinite(float(term.diameter(y))):
        return rests
    on = lower_ground(problem, block, x, y)
    if on is not None and float(on.modulus) > 0:
        return radius, float(on.modulus)
    return min(radius, float(ground(y, problem.radius).radius)), modulus


def saddle_gap(
    problem: MinimaxProblem,
    x: Tree,
    y: Tree,
    gx: Tree,
    gy: Tree,
    on: tuple[Ground | None, Ground | None] = (None, None),
) -> Array:
    """An upper bound on max_y H(x, ·) − min_x H(·, y), from the gradients at (x, y) alone.

    `on` is what it stands on over x and over y, where these have no bounds.
    """
    rise = grounded_excess(problem.y, y, gy, on[1]).bound
    fall = grounded_excess(problem.x, x, trees.scale(-1, gx), on[0]).bound
    # An absent block has no dtype of its own.
    dtype = trees.dtype_of((x, y))
    parts = (rise, fall, problem.x.value(x), problem.y.value(y))
    return jnp.sum(jnp.stack([part.astype(dtype) for part in parts]))


class Footing(NamedTuple):
    """What a certificate rests on: radii are infinite, and moduli zero, where it does not."""

    radius: Array
    modulus: Array


def footing(bounds: list[tuple[Ground, Array, Array]]) -> Footing:
    """Of bounds with their ground, whether they stand alone, and how rounding changes that.

    A slope that vanishes only by rounding is one that the bound does not stand on.
    """
    if not bounds:
        return Footing(jnp.asarray(jnp.inf), jnp.zeros(()))
    radii, moduli = [], []
    for on, alone, changes in bounds:
        rests, strong = ~alone | (changes > 0.5), on.modulus > 0
        radii.append(jnp.where(rests & ~strong, on.radius, jnp.inf))
        moduli.append(jnp.where(rests & strong, on.modulus, 0))
    return Footing(functools.reduce(jnp.minimum, radii), functools.reduce(jnp.maximum, moduli))
