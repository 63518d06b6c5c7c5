"""How far a point is from KKT of the bilevel minimax problem."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array

from bilevax import trees
from bilevax.arguments import positive
from bilevax.certificates.around import Answer
from bilevax.certificates.breaches import STRONG, Claim
from bilevax.certificates.certificate import Certificate, compared_within, line, strong_convexity
from bilevax.certificates.definition import Definition, bounded, term_values
from bilevax.certificates.gap import (
    Ground,
    ground,
    grounded_excess,
    lower_ground,
    saddle_gap,
    sampled_change,
    sampled_footing,
)
from bilevax.certificates.residuals import gap_bounds, pieces, stationarity_and_responses
from bilevax.certificates.witnesses import (
    best_response,
    best_rho,
    near_saddle_point,
    respond,
    saddle_point,
)
from bilevax.problems import BilevelProblem, Point, register
from bilevax.problems.reformulations import lower_level, penalty_blocks, penalty_problem
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
    radius: float = line("how far from (y1, y2) the gap was looked at", math.inf)
    modulus: float = line("what the gap's bound assumes of the lower level; 0 if nothing", 0.0)

    def lines(self) -> dict[str, float]:
        names = ("stationarity", "response_x2", "response_z1", "response_z2", "gap")
        return {name: getattr(self, name) for name in names}

    def notes(self) -> dict[str, float]:
        names = ("gap_below", "rho", "radius", "objective")
        return {name: getattr(self, name) for name in names}

    def assumptions(self) -> list[str]:
        return strong_convexity(self.modulus)

    def provisos(self) -> list[str]:
        return super().provisos() + compared_within(self.radius)

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
        below, lines["gap"], allowances["gap"], rests = gap_bounds(problem, parts, point)
        # Outside a domain, or where f itself is not a number, there is nothing to be close to.
        objective = parts.values[0] + terms["x1"] - terms.get("x2", 0)
        inside = trees.all_finite(terms) & jnp.isfinite(objective) & (rho > 0)
        notes = {"gap_below": below, "rho": rho, "objective": objective}
        return bounded(lines, allowances, inside) | notes | rests._asdict()

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
        of_y1 = lower_ground(problem, "y1", p.x1, p.y1)
        of_y2 = lower_ground(problem, "y2", p.x1, p.y2)
        claims = [Claim("lower", "y1", "convex", below, problem.y1, p.z1, "gap", of_y1)]
        if problem.y2 is not None:
            above = lambda y2: -problem.smooth_lower(p.x1, p.y1, y2)
            claims.append(Claim("lower", "y2", "concave", above, problem.y2, p.z2, "gap", of_y2))
        if problem.lower_modulus is not None:
            lines = ("response_z1", "response_z2")
            strong = [
                claim._replace(shape=STRONG, of_slopes=(line, p.rho))
                for claim, line in zip(claims, lines)
                if claim.on is not None
            ]
            claims = [*strong, *claims]
        if problem.x2 is not None:
            upper = lambda x2: -problem.smooth_upper(p.x1, x2, p.y1, p.y2)
            at = (problem.x2, p.x2, "response_x2", _ground_of_x2(problem, p.x2))
            claims.append(Claim("upper", "x2", "concave", upper, *at))
        return claims

    def shares(self, problem: BilevelProblem, point: Point) -> dict[str, dict[str, Tree]]:
        whole, (x, y) = penalty_problem(problem, point.rho), penalty_blocks(point)
        of_x, of_y = whole.gradient(x, y)
        distances = whole.x.residual(x, of_x), whole.y.residual(y, trees.scale(-1, of_y))
        (x1, y1, y2), (x2, z1, z2) = distances
        return {
            "stationarity": {"x1": x1, "y1": y1, "y2": y2},
            "response_x2": {"x2": x2},
            "response_z1": {"z1": z1},
            "response_z2": {"z2": z2},
        }

    moving: ClassVar[tuple[str, ...]] = ("x1", "y1", "y2")

    def upper_slope(self, problem: BilevelProblem, point: Point) -> Tree:
        p = point
        return jax.grad(problem.smooth_upper)(p.x1, p.x2, p.y1, p.y2)

    def answer(
        self, problem: BilevelProblem, point: Point, x: Tree, epsilon: Array, steps: Array
    ) -> Answer:
        """F there is f with the best x2, and ρ times the lower level's gap on top."""
        p, saddle = point, lower_level(problem, x)
        y1, y2 = saddle_point(saddle, *near_saddle_point(saddle, p.y1, p.y2), steps)
        on = (lower_ground(problem, "y1", x, y1), lower_ground(problem, "y2", x, y2))
        gap = saddle_gap(saddle, y1, y2, *saddle.gradient(y1, y2), on)
        f = lambda x2: problem.smooth_upper(x, x2, y1, y2)
        x2 = p.x2
        if problem.x2 is not None:
            x2 = best_response(lambda u: -f(u), problem.x2, x2, steps)
        value, slope = jax.value_and_grad(f)(x2) if x2 is not None else (f(None), None)
        on_x2 = _ground_of_x2(problem, x2)
        most = value + grounded_excess(problem.x2, x2, slope, on_x2).bound.astype(value.dtype)
        objective = most + problem.x1.value(x) + jnp.asarray(p.rho, value.dtype) * gap
        return Answer(Point(x1=x, x2=x2, y1=y1, y2=y2), objective)

    def sampled_parts(self, problem: BilevelProblem, point: Point) -> tuple[Tree, Array]:
        """∇P, and f~(x1, y1, z2) − f~(x1, z1, y2)."""
        gap = problem.smooth_lower(point.x1, point.y1, point.z2)
        gap -= problem.smooth_lower(point.x1, point.z1, point.y2)
        return penalty_problem(problem, point.rho).gradient(*penalty_blocks(point)), gap

    def statements(self) -> int:
        return 2

    def own_slopes(self, gradient: Tree) -> dict[str, Tree]:
        of_x, (x2, z1, z2) = gradient
        lines = {"stationarity": of_x, "response_x2": x2, "response_z1": z1, "response_z2": z2}
        return lines | {"gap": (z1, z2)}

    def radii(
        self,
        problem: BilevelProblem,
        point: Point,
        lines: dict[str, float],
        slope: float,
        value: float,
    ) -> dict[str, float]:
        """The gap's bound changes by the error of its value, and as `sampled_change` says.

        The slopes of P in (z1, z2) are those of the lower level times ρ.
        """
        p, rho, change = point, float(point.rho), 0.0
        for block, y, z in (("y1", p.y1, p.z1), ("y2", p.y2, p.z2)):
            steep = lines[f"response_z{block[1]}"] / rho
            change += sampled_change(problem, block, (p.x1, y, z), steep, slope / rho)
        return dict.fromkeys(lines, slope) | {"gap": value + change}

    def of_samples(
        self, problem: BilevelProblem, point: Point, estimate: KKTCertificate
    ) -> KKTCertificate:
        p, rests = point, (estimate.radius, estimate.modulus)
        for block, y in (("y1", p.y1), ("y2", p.y2)):
            rests = sampled_footing(problem, block, p.x1, y, rests)
        return dataclasses.replace(estimate, radius=rests[0], modulus=rests[1])

    def least_variance(self, problem: BilevelProblem, point: Point) -> float:
        """3δ_f² + 6ρ²δ_f~², where the user gave both δ."""
        upper, lower = problem.upper_deviation, problem.lower_deviation
        if upper is None or lower is None:
            return 0.0
        return 3 * float(upper) ** 2 + 6 * (float(point.rho) * float(lower)) ** 2


def _ground_of_x2(problem: BilevelProblem, x2: Tree) -> Ground | None:
    return None if problem.x2 is None or not problem.x2.endless else ground(x2)


register(BilevelProblem, definition=KKT())
