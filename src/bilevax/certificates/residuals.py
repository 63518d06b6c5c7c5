"""The lines of ε-KKT of the bilevel minimax problem, from the gradients at a point."""

from __future__ import annotations

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array

from bilevax import trees
from bilevax.certificates.definition import term_values
from bilevax.certificates.gap import Footing, Ground, footing, grounded_excess, lower_ground
from bilevax.certificates.rounding import FEW, rounding
from bilevax.problems import BilevelProblem, Point
from bilevax.problems.reformulations import at_both
from bilevax.terms import Term
from bilevax.trees import Tree


class Noise(NamedTuple):
    """How much of each gradient, and of the gap's bound, is rounding."""

    upper: tuple[Array, ...]  # ∇f1 in x1, x2, y1 and y2
    x1: Array  # ∇f~1 at (x1, y1, z2) and at (x1, z1, y2) in x1, together
    y1: Array  # ∇f~1 at (x1, y1, z2) in y1
    z2: Array  # and in z2
    z1: Array  # ∇f~1 at (x1, z1, y2) in z1
    y2: Array  # and in y2
    gap: Array  # the upper bound on the gap
    alone: tuple[Array, ...]  # and whether it stands alone: 1 where rounding changes that


class Pieces(eqx.Module):
    """The values and gradients that every line is made of, with their rounding: none needs ρ."""

    values: tuple[Array, Array, Array]  # f1, and f~1 at (x1, y1, z2) and at (x1, z1, y2)
    upper: tuple[Tree, ...]  # ∇f1 at (x1, x2, y1, y2)
    above: tuple[Tree, ...]  # ∇f~1 at (x1, y1, z2)
    below: tuple[Tree, ...]  # ∇f~1 at (x1, z1, y2)
    noise: Noise


def pieces(problem: BilevelProblem, point: Point) -> Pieces:
    """A gradient of the upper function and two of the lower one, and as many every other time."""
    here = _gradients(problem, point)
    parts = lambda seen: _parts(problem, point, *seen)
    noise = rounding(_gradients, parts, problem, point, here, trees.dtype_of(point.x1))
    values, (upper, above, below) = here
    return Pieces(
        values, upper, above, below, Noise(tuple(noise[:4]), *noise[4:10], alone=tuple(noise[10:]))
    )


def _parts(
    problem: BilevelProblem, point: Point, values: tuple, gradients: tuple[tuple, ...]
) -> list[Tree]:
    """What rounding is measured in, in the order of `Noise`."""
    upper, above, below = gradients
    _, most, alone = _gap_bounds(problem, point, values, above, below)
    return [*upper, (above[0], below[0]), *above[1:], *below[1:], most, *alone]


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
) -> tuple[dict[str, Array], dict[str, Array]]:
    """The four distances of the definition, for this ρ, and what rounding may add to each."""
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
    lines = {
        "stationarity": trees.norm((x1, y1, y2)),
        "response_x2": _distance(problem.x2, p.x2, minus(f2)).astype(dtype),
        "response_z1": z1,
        "response_z2": z2,
    }
    n = parts.noise
    of_x1, of_x2, of_y1, of_y2 = n.upper
    allowances = {
        "stationarity": trees.norm((of_x1 + rho * n.x1, of_y1 + rho * n.y1, of_y2 + rho * n.y2)),
        "response_x2": of_x2,
        "response_z1": rho * n.z1,
        "response_z2": rho * n.z2,
    }
    return lines, allowances


def _gap_bounds(
    problem: BilevelProblem, point: Point, values: tuple, above: tuple, below: tuple
) -> tuple[Array, Array, list[Array]]:
    """Bounds on p(x1, y1) − d(x1, y2) of `eq:prima_dual_obj`, below and above.

    And whether the one above needs no ground to stand on, 1 or 0, over each block that has some.

    f~(x1, y1, z2) − f~(x1, z1, y2) bounds it from below at any z. Above, f~1(x1, y1, ·) is concave
    and f~1(x1, ·, y2) convex, so each lies on its side of its tangent at z, and the best that the
    tangent and the term allow together is the term's conjugate.
    """
    p, (_, a, b), terms = point, values, term_values(problem, point)
    y1, y2, z1, z2 = (terms.get(name, 0) for name in ("y1", "y2", "z1", "z2"))
    of_y1, of_y2 = _grounds(problem, point)
    rises = grounded_excess(problem.y2, p.z2, above[2], of_y2)
    falls = grounded_excess(problem.y1, p.z1, trees.scale(-1, below[1]), of_y1)
    rise, fall = rises.bound.astype(a.dtype), falls.bound.astype(a.dtype)
    pairs = ((of_y1, falls), (of_y2, rises))
    alone = [excess.alone.astype(a.dtype) for on, excess in pairs if on is not None]
    return a - b + y1 + y2 - z1 - z2, a - b + y1 + y2 + rise + fall, alone


def _grounds(problem: BilevelProblem, point: Point) -> tuple[Ground | None, Ground | None]:
    """What a bound over y1, and one over y2, stands on."""
    p = point
    return lower_ground(problem, "y1", p.x1, p.y1), lower_ground(problem, "y2", p.x1, p.y2)


def _sizes(a: Tree, b: Tree) -> Array:
    """Σ|aᵢbᵢ|"""
    return trees.dot(*jax.tree.map(jnp.abs, (a, b)))


def gap_bounds(
    problem: BilevelProblem, parts: Pieces, point: Point
) -> tuple[Array, Array, Array, Footing]:
    """Bounds on the gap, below and above, and what rounding may add to the one above.

    And what that one rests on. The sums and products of the bound itself are rounded a few times
    each.
    """
    p, (_, a, b), terms = point, parts.values, term_values(problem, point)
    least, most, alone = _gap_bounds(problem, point, parts.values, parts.above, parts.below)
    linear = (_sizes(p.z2, parts.above[2]), _sizes(p.z1, parts.below[1]))
    size = sum(jnp.abs(v).astype(a.dtype) for v in (a, b, *terms.values(), *linear, most))
    counted = FEW * jnp.finfo(a.dtype).eps * size
    grounds = [on for on in _grounds(problem, point) if on is not None]
    rests = footing(list(zip(grounds, [share > 0.5 for share in alone], parts.noise.alone)))
    return least, jnp.maximum(jnp.maximum(most, least), 0), parts.noise.gap + counted, rests
