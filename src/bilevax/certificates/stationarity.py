"""How far a point is from primal-dual stationarity of a minimax problem."""

from __future__ import annotations

import dataclasses

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array

from bilevax import trees
from bilevax.certificates.certificate import Certificate, line
from bilevax.certificates.rounding import gradient_and_noise
from bilevax.problems import MinimaxProblem, Point


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


@eqx.filter_jit
def stationarity(problem: MinimaxProblem, point: Point) -> dict[str, Array]:
    """The numbers of a `StationarityCertificate`; costs two gradients."""
    (gx, gy), (noise_x, noise_y) = gradient_and_noise(
        lambda q: q.gradient, problem, (problem.x, problem.y), (point.x, point.y)
    )
    # Outside a domain, or where h itself is not a number, there is nothing to be close to.
    objective = problem.value(point.x, point.y)
    in_domain = jnp.isfinite(objective) & jnp.isfinite(problem.x.value(point.x))
    x = trees.norm(problem.x.residual(point.x, gx)) + noise_x
    y = trees.norm(problem.y.residual(point.y, trees.scale(-1, gy))) + noise_y
    return {
        "x": jnp.where(in_domain & ~jnp.isnan(x), x, jnp.inf),
        "y": jnp.where(in_domain & ~jnp.isnan(y), y, jnp.inf),
        "objective": objective,
    }
