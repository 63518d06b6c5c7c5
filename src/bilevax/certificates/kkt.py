"""How far a point is from KKT of the bilevel minimax problem."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array

from bilevax import trees
from bilevax.arguments import positive
from bilevax.certificates.around import Answer
from bilevax.certificates.breaches import Claim
from bilevax.certificates.certificate import Certificate, line
from bilevax.certificates.definition import Definition, bounded, term_values
from bilevax.certificates.gap import linear_excess, saddle_gap
from bilevax.certificates.residuals import gap_bounds, pieces, stationarity_and_responses
from bilevax.certificates.witnesses import best_response, best_rho, respond, saddle_point
from bilevax.problems import BilevelProblem, Point, register
from bilevax.problems.reformulations import lower_level, penalty, penalty_blocks
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

    def advice(self, line: str) -> tuple[str, str]:
        if line == "gap":
            return "the lower-level gap", "a larger rho"
        return super().advice(line)


class KKT(Definition):
    """`def:epsilon_KKT`: some ρ > 0 and (x2, z1, z2) with every line at most ε.

    A certificate costs four gradients of P_ρ, and thirteen of a small problem.
    """

    @property
    def certificate(self) -> type[KKTCertificate]:
        return KKTCertificate

    def residuals(self, problem: BilevelProblem, point: Point) -> dict[str, Array]:
        parts, terms = pieces(problem, point), term_values(problem, point)
        rho = jnp.asarray(point.rho, trees.dtype_of(point.x1))
        lines, allowances = stationarity_and_responses(problem, point, parts, rho)
        below, lines["gap"], allowances["gap"] = gap_bounds(problem, parts, point)
        # Outside a domain, or where f itself is not a number, there is nothing to be close to.
        objective = parts.values[0] + terms["x1"] - terms.get("x2", 0)
        inside = trees.all_finite(terms) & jnp.isfinite(objective) & (rho > 0)
        notes = {"gap_below": below, "rho": rho, "objective": objective}
        return bounded(lines, allowances, inside) | notes

    def sizes(self, problem: BilevelProblem, point: Point) -> dict[str, Array]:
        """‖∇f‖ for slopes, also those that ρ multiplies; for the gap the larger of its two values.

        The parts that ρ multiplies are larger, but would make the tolerance grow with ρ.
        """
        p = point
        slope = trees.norm(problem.upper_gradient(p.x1, p.x2, p.y1, p.y2))
        primal = problem.lower_value(p.x1, p.y1, p.z2)
        dual = problem.lower_value(p.x1, p.z1, p.y2)
        slopes = ("stationarity", "response_x2", "response_z1", "response_z2")
        return dict.fromkeys(slopes, slope) | {"gap": jnp.maximum(jnp.abs(primal), jnp.abs(dual))}

    def with_witnesses(self, problem: BilevelProblem, point: Point, rho: Any = None) -> Point:
        rho = point.rho if rho is None else rho
        positive(rho, "point.rho")
        if point.z1 is None or (point.z2 is None and problem.y2 is not None):
            point = respond(problem, point)
        dtype = trees.dtype_of(point.x1)
        rho = best_rho(problem, point) if rho is None else jnp.asarray(rho, dtype)
        return point.replace(rho=rho)

    def claims(self, problem: BilevelProblem, point: Point) -> list[Claim]:
        p = point
        below = lambda y1: problem.smooth_lower(p.x1, y1, p.y2)
        claims = [Claim("lower", "y1", "convex", below, problem.y1, p.z1, "gap")]
        if problem.y2 is not None:
            above = lambda y2: -problem.smooth_lower(p.x1, p.y1, y2)
            claims.append(Claim("lower", "y2", "concave", above, problem.y2, p.z2, "gap"))
        if problem.x2 is not None:
            upper = lambda x2: -problem.smooth_upper(p.x1, x2, p.y1, p.y2)
            claims.append(Claim("upper", "x2", "concave", upper, problem.x2, p.x2, "response_x2"))
        return claims

    moving: ClassVar[tuple[str, ...]] = ("x1", "y1", "y2")

    def upper_slope(self, problem: BilevelProblem, point: Point) -> Tree:
        p = point
        return jax.grad(problem.smooth_upper)(p.x1, p.x2, p.y1, p.y2)

    def answer(
        self, problem: BilevelProblem, point: Point, x: Tree, epsilon: Array, steps: Array
    ) -> Answer:
        """F there is f with the best x2, and ρ times the lower level's gap on top."""
        p, saddle = point, lower_level(problem, x)
        y1, y2 = saddle_point(saddle, p.y1, p.y2, steps)
        gap = saddle_gap(saddle, y1, y2, *saddle.gradient(y1, y2))
        f = lambda x2: problem.smooth_upper(x, x2, y1, y2)
        x2 = p.x2
        if problem.x2 is not None:
            x2 = best_response(lambda u: -f(u), problem.x2, x2, steps)
        value, slope = jax.value_and_grad(f)(x2) if x2 is not None else (f(None), None)
        most = value + linear_excess(problem.x2, x2, slope).astype(value.dtype)
        objective = most + problem.x1.value(x) + jnp.asarray(p.rho, value.dtype) * gap
        return Answer(Point(x1=x, x2=x2, y1=y1, y2=y2), objective)

    def sampled_parts(self, problem: BilevelProblem, point: Point) -> tuple[Tree, Array]:
        """∇P, and f~(x1, y1, z2) − f~(x1, z1, y2)."""
        gap = problem.smooth_lower(point.x1, point.y1, point.z2)
        gap -= problem.smooth_lower(point.x1, point.z1, point.y2)
        return penalty(problem, point.rho).gradient(*penalty_blocks(point)), gap

    def statements(self) -> int:
        return 2

    def radii(
        self,
        problem: BilevelProblem,
        point: Point,
        names: tuple[str, ...],
        slope: float,
        value: float,
    ) -> dict[str, float]:
        """The gap's bound changes by the error of its value, and by that of slopes times diameters.

        The slopes of P in (z1, z2) are those of the lower level times ρ.
        """
        spread = sum(
            float(term.diameter(block))
            for term, block in ((problem.y1, point.y1), (problem.y2, point.y2))
            if term is not None
        )
        return dict.fromkeys(names, slope) | {"gap": value + spread * slope / float(point.rho)}

    def least_variance(self, problem: BilevelProblem, point: Point) -> float:
        """3δ_f² + 6ρ²δ_f~², where the user gave both δ."""
        upper, lower = problem.upper_deviation, problem.lower_deviation
        if upper is None or lower is None:
            return 0.0
        return 3 * float(upper) ** 2 + 6 * (float(point.rho) * float(lower)) ** 2


register(BilevelProblem, definition=KKT())
