"""Functions outside of their stated class, caught by what they do at some points of the domain.

A certificate's bounds are tangents: a convex function lies above its own. Where one is found below
the least that its tangent and its term allow together, it is not convex, or its gradient is not
its own, and the bound says nothing. A bound that holds within a radius is asked within that. A
modulus that was given is asked whether the function lies as far above its tangent as that says,
also where a quadratic with the curvature seen would lie lowest. A breach is proof. That there is
none among a few dozen points is not: a dip that is narrow enough stays unseen.
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
from bilevax.certificates.gap import Ground, grounded_excess
from bilevax.problems import Form, Point
from bilevax.problems.constants import random_unit, sample_domain
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
# The claim that a modulus is, of a function without bounds; steps of conjugate gradients towards
# the place where it is most likely wrong, and the shares of the way to there.
STRONG = "strongly convex"
CONJUGATE, STRONG_SHARES = 20, (1.0, 10.0, 0.1)


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
    on: Ground | None = None  # what the bound stands on where there are no bounds
    # The line of the certificate, and its factor, whose allowance is one for the slopes.
    of_slopes: tuple[str, Any] | None = None


def breach_of(definition: Any, problem: Form, point: Point, allowances: dict[str, float]) -> str:
    """The first breach of what a certificate claims, as a sentence; nothing if there is none."""
    found = jax.device_get(_breaches(*_arguments(definition, problem, point, allowances)))
    breached = [number for number, (shortfall, _) in enumerate(found) if shortfall > 0]
    if not breached:
        return ""
    shortfall, where = found[breached[0]]
    return _sentence(definition.claims(problem, point)[breached[0]], float(shortfall), where)


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
    return [_worst(claim, allowed, *counts) for claim in claims]


def _worst(claim: Claim, allowances: dict[str, Array], ways: int, axes: int) -> tuple[Array, Tree]:
    measure = _measure(claim, allowances)
    layout = trees.Layout.of(claim.at)
    at = layout.ravel(claim.at)
    diameter = claim.term.diameter(claim.at).astype(at.dtype)
    bounded = jnp.isfinite(diameter)
    reach = jnp.where(bounded, diameter, 1 + jnp.max(jnp.abs(at), initial=0))

    def between(end: Tree, share: Array) -> Tree:
        return trees.combine(1 - share, claim.at, share, end)

    def drawn(key: Array, share: Array) -> Tree:
        return between(sample_domain(claim.term, claim.at, key), share)

    def far(key: Array, share: Array) -> Tree:
        """As far as the radius, where there are no bounds."""
        assert claim.on is not None
        end = sample_domain(claim.term, claim.at, key)
        way = trees.norm(trees.subtract(end, claim.at)).astype(at.dtype)
        longer = jnp.where(bounded | (way == 0), 1, claim.on.radius / jnp.where(way == 0, 1, way))
        return claim.term.project(between(end, share * longer))

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
    if claim.on is not None:
        found.append(_least(measure, far, (jnp.tile(keys, len(SHARES)), shares)))
    if claim.shape == STRONG:
        found.append(_least(measure, *_likely(claim)))
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


def _likely(claim: Claim) -> tuple[Callable[..., Tree], tuple[Array, Array]]:
    """Places where a modulus is most likely wrong: down the slope v, and where a quadratic with
    the curvature seen falls most, at the solution d of ∇²f·d = v; for a random v, d is flattest."""
    slope = jax.grad(claim.values)
    v = claim.term.residual(claim.at, slope(claim.at))
    bent = lambda d: jax.jvp(slope, (claim.at,), (d,))[1]
    solved = lambda v: jax.scipy.sparse.linalg.cg(bent, v, maxiter=CONJUGATE, tol=0.0)[0]
    drawn = random_unit(claim.at, jax.random.key(1))
    ways = jax.tree.map(lambda *parts: jnp.stack(parts), v, solved(v), solved(drawn))

    def place(which: Array, share: Array) -> Tree:
        way = jax.tree.map(lambda both: both[which], ways)
        length = trees.norm(way)
        unit = (1 + trees.norm(claim.at)) / jnp.where(length > 0, length, 1)
        return claim.term.project(trees.axpy(-share * unit, way, claim.at))

    which, sign, share = (grid.ravel() for grid in np.meshgrid((0, 1, 2), (1, -1), STRONG_SHARES))
    return place, (jnp.asarray(which), jnp.asarray(sign * share, trees.dtype_of(claim.at)))


def _measure(claim: Claim, allowances: dict[str, Array]) -> Callable[[Tree], Array]:
    """By how much a claim is missed at a place, beyond rounding."""
    allowed = allowances[claim.line]
    if claim.shape == "affine":
        return _missed_affinity(claim, allowed)
    if claim.shape == STRONG:
        assert claim.of_slopes is not None
        line, factor = claim.of_slopes
        return _missed_modulus(claim, allowed, allowances[line] / factor)
    return _missed_bound(claim, allowed)


def _missed_modulus(claim: Claim, allowed: Array, of_slopes: Array) -> Callable[[Tree], Array]:
    """By how much f lies below its tangent + m/2·‖s − z‖², over a block without bounds."""
    assert claim.on is not None
    value, slope = jax.value_and_grad(claim.values)(claim.at)
    m = claim.on.modulus
    asked = (m > 0) & ~jnp.isfinite(claim.term.diameter(claim.at))
    eps = ROUNDINGS * jnp.finfo(value.dtype).eps

    def measure(s: Tree) -> Array:
        way = trees.subtract(s, claim.at)
        there, linear, length = claim.values(s), trees.dot(slope, way), trees.norm(way)
        curved = m / 2 * length * length
        size = sum(jnp.abs(part) for part in (there, value, linear, curved))
        missed = value + linear + curved - there - eps * size - allowed - of_slopes * length
        return jnp.where(asked, missed, -jnp.inf)

    return measure


def _missed_bound(claim: Claim, allowed: Array) -> Callable[[Tree], Array]:
    """By how much f + φ lies below the least that the tangent of f and φ allow together."""
    value, slope = jax.value_and_grad(claim.values)(claim.at)
    excess, alone = grounded_excess(claim.term, claim.at, trees.scale(-1, slope), claim.on)
    excess = excess.astype(value.dtype)
    bound = value - excess
    eps = ROUNDINGS * jnp.finfo(value.dtype).eps
    on = claim.on

    def measure(s: Tree) -> Array:
        there, of_term = claim.values(s), claim.term.value(s).astype(value.dtype)
        size = jnp.abs(there) + jnp.abs(of_term) + jnp.abs(value) + jnp.abs(excess)
        missed = bound - there - of_term - eps * size - allowed
        if on is None:
            return missed
        # Beyond its radius a bound says nothing.
        within = alone | (on.modulus > 0)
        within |= trees.norm(trees.subtract(s, on.center)) <= on.radius
        return jnp.where(within, missed, -jnp.inf)

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


def _curved(claim: Claim) -> str:
    return "concave" if claim.block == "y2" else "convex"


def _sentence(claim: Claim, shortfall: float, where: Tree) -> str:
    with np.printoptions(precision=4, threshold=6, edgeitems=2):
        place = " ".join(str(np.asarray(leaf)) for leaf in jax.tree.leaves(where))
    if claim.shape == "affine":
        return f"{claim.function} are not affine in {claim.block}: {shortfall:.3g} off at {place}"
    if claim.shape == STRONG:
        assert claim.on is not None
        return (
            f"{claim.function} is not m-strongly {_curved(claim)} in {claim.block} with the "
            f"lower_modulus m = {float(claim.on.modulus):.4g}: at {claim.block} = {place} it is "
            f"{shortfall:.3g} off what that says"
        )
    side = "above" if claim.shape == "concave" else "below"
    return (
        f"{claim.function} is not {claim.shape} in {claim.block}, or its gradient is not its own: "
        f"at {claim.block} = {place} it is {shortfall:.3g} {side} the bound that its tangent gives"
    )
