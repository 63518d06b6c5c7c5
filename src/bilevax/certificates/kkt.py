"""How far a point is from KKT of the bilevel minimax problem."""

from __future__ import annotations

import dataclasses

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array

from bilevax import trees
from bilevax.certificates.certificate import Certificate, line
from bilevax.certificates.gap import excess_and_noise
from bilevax.certificates.rounding import ROUNDINGS, gradient_and_noise
from bilevax.problems import BilevelProblem, Point
from bilevax.terms import Term
from bilevax.trees import Tree


@dataclasses.dataclass(frozen=True)
class KKTCertificate(Certificate):
    """Every line of `def:epsilon_KKT`, for the point and the witnesses (x2, z1, z2, ρ) it names.

    The distances come from the terms' closed forms, the gap is an upper bound, and each has an
    allowance for rounding on top. So a point certified at ε is an ε-KKT point, for functions of the
    stated class and as far as that allowance, which is an estimate, covers the rounding.
    """

    stationarity: float = line("dist(0, ∂ of f + ρ(f~(x1,y1,z2) − f~(x1,z1,y2)) in (x1,y1,y2))")
    response_x2: float = line("dist(0, ∂ of −f in x2)")
    response_z1: float = line("dist(0, ρ·∂ of f~(x1,z1,y2) in z1)")
    response_z2: float = line("dist(0, ρ·∂ of −f~(x1,y1,z2) in z2)")
    gap: float = line("max f~(x1,y1,·) − min f~(x1,·,y2), an upper bound")
    gap_below: float = line("the same, a lower bound")
    rho: float = line("the penalty ρ of the witness")

    def lines(self) -> dict[str, float]:
        names = ("stationarity", "response_x2", "response_z1", "response_z2", "gap")
        return {name: getattr(self, name) for name in names}

    def notes(self) -> dict[str, float]:
        return {name: getattr(self, name) for name in ("gap_below", "rho", "objective")}


class Pieces(eqx.Module):
    """The gradients that every line is made of, with their rounding: none depends on ρ."""

    upper: tuple[Tree, ...]  # ∇f1 at (x1, x2, y1, y2)
    above: tuple[Tree, ...]  # ∇f~1 at (x1, y1, z2)
    below: tuple[Tree, ...]  # ∇f~1 at (x1, z1, y2)
    noise: tuple[tuple[Array, ...], ...]  # of each part of each of these


def pieces(problem: BilevelProblem, point: Point) -> Pieces:
    """Two gradients of the upper function and four of the lower one, half of them for the noise."""
    p = point
    upper_terms = (problem.x1, problem.x2, problem.y1, problem.y2)
    lower_terms = (problem.x1, problem.y1, problem.y2)
    of_upper, of_lower = lambda q: q.upper_gradient, lambda q: q.lower_gradient
    upper, upper_noise = gradient_and_noise(
        of_upper, problem, upper_terms, (p.x1, p.x2, p.y1, p.y2)
    )
    above, above_noise = gradient_and_noise(of_lower, problem, lower_terms, (p.x1, p.y1, p.z2))
    below, below_noise = gradient_and_noise(of_lower, problem, lower_terms, (p.x1, p.z1, p.y2))
    return Pieces(upper, above, below, (upper_noise, above_noise, below_noise))


def _distance(term: Term | None, x: Tree, g: Tree) -> Array:
    """dist(0, g + ∂φ(x)); zero for an absent block."""
    return jnp.zeros(()) if term is None else trees.norm(term.residual(x, g))


def stationarity_and_responses(
    problem: BilevelProblem, point: Point, parts: Pieces, rho: Array
) -> dict[str, Array]:
    """The four distances of the definition, for this ρ, with what rounding may add."""
    p = point
    f1, f2, f3, f4 = parts.upper
    a1, a2, a3 = parts.above
    b1, b2, b3 = parts.below
    y2_term = None if problem.y2 is None else rho * problem.y2
    blocks = [
        _distance(problem.x1, p.x1, trees.axpy(rho, trees.subtract(a1, b1), f1)),
        _distance(rho * problem.y1, p.y1, trees.axpy(rho, a2, f3)),
        _distance(y2_term, p.y2, None if y2_term is None else trees.axpy(-rho, b3, f4)),
    ]
    of_f, of_a, of_b = parts.noise
    noise = of_f[0] + of_f[2] + of_f[3] + rho * (of_a[0] + of_a[1] + of_b[0] + of_b[2])
    minus = lambda g: trees.scale(-1, g)
    dtype = rho.dtype
    return {
        "stationarity": jnp.sqrt(sum(b.astype(dtype) ** 2 for b in blocks)) + noise,
        "response_x2": _distance(problem.x2, p.x2, minus(f2)).astype(dtype) + of_f[1],
        "response_z1": rho * (_distance(problem.y1, p.z1, b2).astype(dtype) + of_b[1]),
        "response_z2": rho * (_distance(problem.y2, p.z2, minus(a3)).astype(dtype) + of_a[2]),
    }


def gap_bounds(problem: BilevelProblem, point: Point, parts: Pieces) -> tuple[Array, Array]:
    """Bounds on p(x1, y1) − d(x1, y2) of `eq:prima_dual_obj`, below and above.

    f~(x1, y1, z2) − f~(x1, z1, y2) bounds it from below at any z. Above, f~1(x1, y1, ·) is concave
    and f~1(x1, ·, y2) convex, so each lies on its side of its tangent at z, and the best that the
    tangent and the term allow together is the term's conjugate.
    """
    p = point
    primal_here = problem.lower_value(p.x1, p.y1, p.z2)
    dual_here = problem.lower_value(p.x1, p.z1, p.y2)
    below = primal_here - dual_here

    def term(t: Term | None, x: Tree) -> Array:
        return jnp.zeros_like(below) if t is None else t.value(x)

    _, of_above, of_below = parts.noise
    rise, rise_noise = excess_and_noise(problem.y2, p.z2, parts.above[2], of_above[2], below.dtype)
    slope = trees.scale(-1, parts.below[1])
    fall, fall_noise = excess_and_noise(problem.y1, p.z1, slope, of_below[1], below.dtype)
    primal = problem.smooth_lower(p.x1, p.y1, p.z2) + term(problem.y1, p.y1) + rise
    dual = problem.smooth_lower(p.x1, p.z1, p.y2) - term(problem.y2, p.y2) - fall
    # Large values that nearly cancel leave the rounding of the large ones.
    size = jnp.abs(primal_here) + jnp.abs(dual_here) + jnp.abs(primal) + jnp.abs(dual)
    noise = ROUNDINGS * jnp.finfo(below.dtype).eps * size + rise_noise + fall_noise
    return below, jnp.maximum(jnp.maximum(primal - dual, below), 0) + noise


def _in_domain(problem: BilevelProblem, point: Point) -> Array:
    pairs = [(problem.x1, point.x1), (problem.x2, point.x2), (problem.y1, point.y1)]
    pairs += [(problem.y2, point.y2), (problem.y1, point.z1), (problem.y2, point.z2)]
    values = [jnp.isfinite(t.value(x)) for t, x in pairs if t is not None]
    return jnp.all(jnp.stack(values))


@eqx.filter_jit
def kkt(problem: BilevelProblem, point: Point) -> dict[str, Array]:
    """The numbers of a `KKTCertificate`; costs two gradients of P_ρ."""
    parts = pieces(problem, point)
    rho = jnp.asarray(point.rho, trees.dtype_of(point.x1))
    below, above = gap_bounds(problem, point, parts)
    lines = stationarity_and_responses(problem, point, parts, rho) | {"gap": above}
    # Outside a domain, or where f itself is not a number, there is nothing to be close to.
    objective = problem.upper_value(point.x1, point.x2, point.y1, point.y2)
    inside = _in_domain(problem, point) & jnp.isfinite(objective)
    bounded = {k: jnp.where(inside & ~jnp.isnan(v), v, jnp.inf) for k, v in lines.items()}
    return bounded | {
        "gap_below": below,
        "rho": rho,
        "objective": objective,
    }
