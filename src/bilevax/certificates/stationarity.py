"""How far a point is from primal-dual stationarity of a minimax problem."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array

from bilevax import trees
from bilevax.certificates.certificate import Certificate, line
from bilevax.certificates.definition import Definition, bounded, term_values
from bilevax.certificates.rounding import rounding
from bilevax.problems import MinimaxProblem, Point, register
from bilevax.trees import Tree


@dataclasses.dataclass(frozen=True)
class StationarityCertificate(Certificate):
    """`eq:pd_stationary_H` of the paper, at exactly the point it was asked about.

    Both distances come from closed forms, as each term knows the shortest vector of g + ∂φ(x), with
    an allowance for rounding on top.
    """

    x: float = line("dist(0, ∂ₓH(x, y))")
    y: float = line("dist(0, ∂ᵧ(−H)(x, y))")

    def lines(self) -> dict[str, float]:
        return {"x": self.x, "y": self.y}

    def notes(self) -> dict[str, float]:
        return {"objective": self.objective}


class Stationarity(Definition):
    """`eq:pd_stationary_H`: both distances at most ε."""

    @property
    def certificate(self) -> type[StationarityCertificate]:
        return StationarityCertificate

    def residuals(self, problem: MinimaxProblem, point: Point) -> dict[str, Array]:
        value, (gx, gy) = jax.value_and_grad(problem.smooth, argnums=(0, 1))(point.x, point.y)
        dtype = trees.dtype_of((point.x, point.y))
        slopes = lambda problem, point: problem.gradient(point.x, point.y)
        noise_x, noise_y = rounding(slopes, list, problem, point, (gx, gy), dtype)
        # Outside a domain, or where h itself is not a number, there is nothing to be close to.
        terms = term_values(problem, point)
        objective = value + terms["x"] - terms.get("y", 0)
        inside = trees.all_finite(terms) & jnp.isfinite(objective)
        x = trees.norm(problem.x.residual(point.x, gx))
        y = trees.norm(problem.y.residual(point.y, trees.scale(-1, gy)))
        lines, allowances = {"x": x, "y": y}, {"x": noise_x, "y": noise_y}
        return bounded(lines, allowances, inside) | {"objective": objective}

    def sizes(self, problem: MinimaxProblem, point: Point) -> dict[str, Array]:
        """‖∇h‖, for both lines."""
        return dict.fromkeys(("x", "y"), trees.norm(problem.gradient(point.x, point.y)))

    def sampled_parts(self, problem: MinimaxProblem, point: Point) -> tuple[Tree, Array]:
        gradient = problem.gradient(point.x, point.y)
        return gradient, jnp.zeros((), trees.dtype_of(gradient))


register(MinimaxProblem, definition=Stationarity())
