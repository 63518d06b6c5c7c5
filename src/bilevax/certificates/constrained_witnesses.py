"""Find the witnesses of constrained KKT for a point that comes without them."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from bilevax import trees
from bilevax.certificates.lagrangians import lower_lagrangian, upper_lagrangian
from bilevax.certificates.settling import settled
from bilevax.certificates.witnesses import MAX_STEPS, best_response, counted_response
from bilevax.problems import ConstrainedBilevelProblem, Multipliers, Point
from bilevax.programs import quick
from bilevax.terms import Box, Free, NonNegative, PerLeaf
from bilevax.trees import Tree

ROUNDS = 60
# Where a round brings the violation down by less than to this share, the penalty grows.
SLOW, GROWTH = 0.25, 4.0
# A round is solved until its residual is this share of the violation.
SHARE = 0.01
# Infeasibility and lack of complementarity that no certificate would notice.
ENOUGH = 1e-12
# The penalty grows no further than this over where it began.
MOST = 1e8
LEAST_RHO = 1e-8


class _Round(NamedTuple):
    z: Tree
    lam: Tree
    nu: Tree
    weight: Array
    rounds: Array
    steps: Array
    residual: Array


def lower_solution(
    problem: ConstrainedBilevelProblem,
    x: Tree,
    start: Tree,
    steps: Array | int | None = None,
    multipliers: tuple[Tree, Tree] | None = None,
) -> tuple[Tree, Tree, Tree]:
    """A solution z of the lower level at x and its multipliers (λ̄, ν̄).

    The augmented Lagrangian method of Rockafellar 1976: z minimises
    g(x, ·) + (‖[λ + μc]₊‖² + ‖ν + μe‖²)/(2μ), then λ ← [λ + μc]₊ and ν ← ν + μe. With `steps`, all
    rounds together take no more than about twice so many. From `multipliers` at a place nearby, a
    few of Newton's steps come first.
    """
    dtype = trees.dtype_of((x, start))
    most = MAX_STEPS if steps is None else steps

    def shifted(z: Tree, lam: Tree, nu: Tree, weight: Array) -> tuple[Tree, Tree]:
        c, e = problem.called("constraints", x, z), problem.called("equalities", x, z)
        up = jax.tree.map(lambda m, v: jnp.maximum(m + weight * v, 0), lam, c)
        return up, jax.tree.map(lambda m, v: m + weight * v, nu, e)

    def advance(s: _Round) -> _Round:
        def augmented(z: Tree) -> Array:
            penalty = trees.square(shifted(z, s.lam, s.nu, s.weight)).astype(dtype)
            return problem.smooth_lower(x, z) + penalty / (2 * s.weight)

        z, taken = counted_response(augmented, problem.y, s.z, most, SHARE * s.residual)
        lam, nu = shifted(z, s.lam, s.nu, s.weight)
        moved = trees.norm(trees.subtract((lam, nu), (s.lam, s.nu))).astype(dtype)
        # The change of the multipliers is weight·(infeasibility and lack of complementarity).
        residual = moved / s.weight
        slow = residual > SLOW * s.residual
        weight = jnp.where(slow, jnp.minimum(GROWTH * s.weight, MOST), s.weight)
        return _Round(z, lam, nu, weight, s.rounds + 1, s.steps + taken, residual)

    def going(s: _Round) -> Array:
        room = True if steps is None else s.steps < steps
        return room & (s.rounds < ROUNDS) & (s.residual > ENOUGH + 16 * jnp.finfo(dtype).eps)

    zeros = lambda name: jax.tree.map(jnp.zeros_like, problem.called(name, x, start))
    one, zero = jnp.ones((), dtype), jnp.asarray(0)
    first = _Round(start, zeros("constraints"), zeros("equalities"), one, zero, zero, one)
    if multipliers is not None:
        near = (start, *multipliers)
        (z, lam, nu), found = _settled(problem, x, near, (first.z, first.lam, first.nu))
        first = first._replace(z=z, lam=lam, nu=nu, residual=jnp.where(found, 0, one))
    last = lax.while_loop(going, advance, first)
    return last.z, last.lam, last.nu


def _settled(
    problem: ConstrainedBilevelProblem, x: Tree, near: tuple, otherwise: tuple
) -> tuple[Tree, Array]:
    """The saddle point (z, λ, ν) of the Lagrangian, if Newton's steps find it; or `otherwise`."""

    def operator(u: Tree) -> Tree:
        z, lam, nu = u
        own = Multipliers(lam_bar=lam, nu_bar=nu)
        slope = jax.grad(lambda z: lower_lagrangian(problem, x, z, own))(z)
        values = [problem.called(name, x, z) for name in ("constraints", "equalities")]
        return (slope, *trees.scale(-1, values))

    terms = (problem.y, NonNegative(), Free())
    present = [t if jax.tree.leaves(u) else None for t, u in zip(terms, near)]
    return settled(operator, PerLeaf(tuple(present)), near, otherwise)


class _Unknowns(NamedTuple):
    rho: Array
    lam: Tree
    nu: Tree
    upper_lam: Tree
    upper_nu: Tree


@quick
def constrained_witnesses(
    problem: ConstrainedBilevelProblem, point: Point, rho: Any = None
) -> Point:
    """The point with z and λ̄ from the lower level at x, and the best ρ and λ for these.

    The stationarity vector is affine in (ρ, λ, ν, …), so the sum of the squares of the lines that
    depend on them is convex, and accelerated gradient finds its minimum.
    """
    x, y = point.x, point.y
    dtype = trees.dtype_of((x, y))
    z, lam_bar, nu_bar = lower_solution(problem, x, y if point.z is None else point.z)
    bars = Multipliers(lam_bar=lam_bar, nu_bar=nu_bar)
    of_z = jax.grad(lambda x, z: lower_lagrangian(problem, x, z, bars), argnums=(0, 1))
    bx, bz = of_z(x, z)
    names = ("constraints", "equalities", "upper_constraints", "upper_equalities")
    values = {name: problem.called(name, x, y) for name in names}
    response = trees.norm(problem.y.residual(z, bz))

    def lines(u: _Unknowns) -> Array:
        m = Multipliers(lam=u.lam, nu=u.nu, upper_lam=u.upper_lam, upper_nu=u.upper_nu)

        def above(x: Tree, y: Tree) -> Array:
            lower = Multipliers(lam_bar=u.lam, nu_bar=u.nu)
            weighed = lower_lagrangian(problem, x, y, lower) - problem.smooth_lower(x, y)
            own = upper_lagrangian(problem, x, y, m)
            return own + weighed + u.rho * problem.smooth_lower(x, y)

        ax, ay = jax.grad(above, argnums=(0, 1))(x, y)
        vector = (
            problem.x.residual(x, trees.axpy(-u.rho, bx, ax)),
            (u.rho * problem.y).residual(y, ay),
        )
        weighed = zip((u.lam, u.nu, u.upper_lam, u.upper_nu), values.values())
        products = [jax.tree.map(jnp.multiply, m, v) for m, v in weighed if m is not None]
        of_products = trees.square(products).astype(dtype)
        return trees.square(vector) + (u.rho * response) ** 2 + of_products

    start = jnp.asarray(1.0 if rho is None else rho, dtype)
    zeros = {name: jax.tree.map(jnp.zeros_like, v) for name, v in values.items()}
    first = _Unknowns(
        start,
        trees.scale(start, lam_bar),
        trees.scale(start, nu_bar),
        zeros["upper_constraints"],
        zeros["upper_equalities"],
    )
    of_rho = Box(LEAST_RHO, jnp.inf) if rho is None else Box(start, start)
    signs = (of_rho, NonNegative(), Free(), NonNegative(), Free())
    parts = [None if not jax.tree.leaves(u) else t for t, u in zip(signs, first)]
    term = PerLeaf(_Unknowns(*parts))  # pyright: ignore[reportArgumentType]
    best = best_response(lambda u: lines(u) / 2, term, first)
    multipliers = Multipliers(best.lam, lam_bar, best.nu, nu_bar, best.upper_lam, best.upper_nu)
    return point.replace(z=z, rho=best.rho, multipliers=multipliers)
