"""The lines of ε-KKT of the bilevel minimax problem, from the gradients at a point."""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array

from bilevax import trees
from bilevax.certificates.gap import excess_and_noise
from bilevax.certificates.rounding import ROUNDINGS, rounding
from bilevax.problems import BilevelProblem, Point
from bilevax.problems.reformulations import at_both
from bilevax.terms import Term
from bilevax.trees import Tree


class Pieces(eqx.Module):
    """The values and gradients that every line is made of, with their rounding: none needs ρ."""

    values: tuple[Array, Array, Array]  # f1, and f~1 at (x1, y1, z2) and at (x1, z1, y2)
    upper: tuple[Tree, ...]  # ∇f1 at (x1, x2, y1, y2)
    above: tuple[Tree, ...]  # ∇f~1 at (x1, y1, z2)
    below: tuple[Tree, ...]  # ∇f~1 at (x1, z1, y2)
    noise: tuple[tuple[Array, ...], ...]  # of each part of each of these gradients


def pieces(problem: BilevelProblem, point: Point) -> Pieces:
    """A gradient of the upper function and two of the lower one, and as many for each move."""
    values, (upper, above, below) = _gradients(problem, point)
    parts = lambda problem, point: [part for of in _gradients(problem, point)[1] for part in of]
    here = [*upper, *above, *below]
    noise = rounding(parts, problem, point, here, trees.dtype_of(point.x1))
    of_f, of_a, of_b = tuple(noise[:4]), tuple(noise[4:7]), tuple(noise[7:])
    return Pieces(values, upper, above, below, (of_f, of_a, of_b))


def _gradients(problem: BilevelProblem, point: Point) -> tuple[tuple, tuple[tuple, ...]]:
    """Values and gradients of f1 at the point, and of f~1 at (x1, y1, z2) and (x1, z1, y2)."""
    p = point
    of_upper = jax.value_and_grad(problem.smooth_upper, argnums=(0, 1, 2, 3))
    of_lower = jax.value_and_grad(lambda y1, y2, x1: problem.smooth_lower(x1, y1, y2), (0, 1, 2))
    f, upper = of_upper(p.x1, p.x2, p.y1, p.y2)
    at = lambda y1, y2: of_lower(y1, y2, p.x1)
    lower = at_both(at, (p.y1, p.z2), (p.z1, p.y2))
    (a, (a1, a2, a0)), (b, (b1, b2, b0)) = (
        jax.tree.map(lambda both, k=k: both[k], lower) for k in (0, 1)
    )
    return (f, a, b), (upper, (a0, a1, a2), (b0, b1, b2))


def _distance(term: Term | None, x: Tree, g: Tree) -> Array:
    """dist(0, g + ∂φ(x)); zero for an absent block."""
    return jnp.zeros(()) if term is None else trees.norm(term.residual(x, g))


def _distances(term: Term | None, x: tuple[Tree, Tree], g: tuple[Tree, Tree]) -> Array:
    """The same for two blocks with one term."""
    if term is None:
        return jnp.zeros(2)
    return at_both(lambda x, g: _distance(term, x, g), (x[0], g[0]), (x[1], g[1]))


def stationarity_and_responses(
    problem: BilevelProblem, point: Point, parts: Pieces, rho: Array
) -> dict[str, Array]:
    """The four distances of the definition, for this ρ, with what rounding may add."""
    p, dtype = point, rho.dtype
    f1, f2, f3, f4 = parts.upper
    a1, a2, a3 = parts.above
    b1, b2, b3 = parts.below
    # dist(0, g + ∂(ρφ)(x)) = ρ·dist(0, g/ρ + ∂φ(x)), so that y1 and z1 have the same term.
    per_rho = lambda f, g, sign: jax.tree.map(lambda u, v: u / rho + sign * v, f, g)
    minus = lambda g: trees.scale(-1, g)
    y1, z1 = rho * _distances(problem.y1, (p.y1, p.z1), (per_rho(f3, a2, 1), b2)).astype(dtype)
    y2, z2 = rho * _distances(problem.y2, (p.y2, p.z2), (per_rho(f4, b3, -1), minus(a3))).astype(
        dtype
    )
    x1 = _distance(problem.x1, p.x1, trees.axpy(rho, trees.subtract(a1, b1), f1))
    of_f, of_a, of_b = parts.noise
    noise = of_f[0] + of_f[2] + of_f[3] + rho * (of_a[0] + of_a[1] + of_b[0] + of_b[2])
    return {
        "stationarity": jnp.sqrt(x1**2 + y1**2 + y2**2) + noise,
        "response_x2": _distance(problem.x2, p.x2, minus(f2)).astype(dtype) + of_f[1],
        "response_z1": z1 + rho * of_b[1],
        "response_z2": z2 + rho * of_a[2],
    }


def gap_bounds(
    problem: BilevelProblem, parts: Pieces, point: Point, terms: dict[str, Array]
) -> tuple[Array, Array]:
    """Bounds on p(x1, y1) − d(x1, y2) of `eq:prima_dual_obj`, below and above.

    f~(x1, y1, z2) − f~(x1, z1, y2) bounds it from below at any z. Above, f~1(x1, y1, ·) is concave
    and f~1(x1, ·, y2) convex, so each lies on its side of its tangent at z, and the best that the
    tangent and the term allow together is the term's conjugate. `terms` are the terms' values.
    """
    p, (_, above, below) = point, parts.values
    zero = jnp.zeros_like(above)
    y1, y2, z1, z2 = (terms.get(name, zero) for name in ("y1", "y2", "z1", "z2"))
    primal_here, dual_here = above + y1 - z2, below + z1 - y2
    least = primal_here - dual_here
    _, of_above, of_below = parts.noise
    rise, rise_noise = excess_and_noise(problem.y2, p.z2, parts.above[2], of_above[2], zero.dtype)
    slope = trees.scale(-1, parts.below[1])
    fall, fall_noise = excess_and_noise(problem.y1, p.z1, slope, of_below[1], zero.dtype)
    primal, dual = above + y1 + rise, below - y2 - fall
    # Large values that nearly cancel leave the rounding of the large ones.
    size = jnp.abs(primal_here) + jnp.abs(dual_here) + jnp.abs(primal) + jnp.abs(dual)
    noise = ROUNDINGS * jnp.finfo(zero.dtype).eps * size + rise_noise + fall_noise
    return least, jnp.maximum(jnp.maximum(primal - dual, least), 0) + noise
