"""How good a point is. Nothing here imports a solver: any point from anywhere can be judged."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from bilevax import trees
from bilevax.arguments import positive
from bilevax.certificates.certificate import Certificate
from bilevax.certificates.constrained import ConstrainedKKTCertificate, constrained_kkt
from bilevax.certificates.constrained_witness import constrained_witnesses
from bilevax.certificates.kkt import KKTCertificate, kkt
from bilevax.certificates.sizes import line_sizes
from bilevax.certificates.stationarity import StationarityCertificate, stationarity
from bilevax.certificates.witness import best_rho, respond
from bilevax.problems import BilevelProblem, ConstrainedBilevelProblem, MinimaxProblem, Point
from bilevax.problems.validate import check_functions, check_point

__all__ = [
    "Certificate",
    "ConstrainedKKTCertificate",
    "KKTCertificate",
    "StationarityCertificate",
    "certify",
    "judge",
]

Problem = BilevelProblem | ConstrainedBilevelProblem | MinimaxProblem


def certify(problem: Problem, point: Point, *, rho: Any = None) -> Certificate:
    """Judge a point: every residual line of the definition, and their maximum ε.

    For a minimax problem: ε-stationarity of `Point(x=…, y=…)`. For a bilevel problem: ε-KKT of
    (x1, y1, y2), which asks for *some* ρ > 0 and (x2, z1, z2). A point that carries them all, as a
    solution's point does, is judged with them. Otherwise those missing are sought: z1 and z2 as
    best responses, x2 likewise from the x2 given, ρ as the best one for them. For a constrained
    bilevel problem: ε-KKT of (x, y), which asks for some ρ > 0, z, λ and λ̄; a point without all of
    them gets z and λ̄ from its lower level, solved at x, and the best ρ and λ for these. Where
    witnesses are not unique another choice may certify a smaller ε; so what is returned is always a
    true bound, but for a point without witnesses perhaps not the least.

    The point is judged where it is; it is not projected. Outside the domain ε is infinite.
    """
    positive(rho, "rho")
    point = check_point(problem, point)
    check_functions(problem, point)
    if isinstance(problem, MinimaxProblem):
        if rho is not None:
            raise ValueError("rho is the penalty of a bilevel problem; a MinimaxProblem has none")
        return judge(problem, point, sizes=True)
    rho = point.rho if rho is None else rho
    positive(rho, "point.rho")
    if isinstance(problem, ConstrainedBilevelProblem):
        rho = None if rho is None else jnp.asarray(rho, trees.dtype_of((point.x, point.y)))
        if point.z is None or point.multipliers is None or rho is None:
            return judge(problem, constrained_witnesses(problem, point, rho), sizes=True)
        return judge(problem, dataclasses.replace(point, rho=rho), sizes=True)
    if point.z1 is None or (point.z2 is None and problem.y2 is not None):
        point = respond(problem, point)
    dtype = trees.dtype_of(point.x1)
    rho = best_rho(problem, point) if rho is None else jnp.asarray(rho, dtype)
    return judge(problem, dataclasses.replace(point, rho=rho), sizes=True)


def judge(problem: Problem, point: Point, *, sizes: bool = False) -> Certificate:
    """The certificate of a point that has all its witnesses; with `sizes`, those of its lines."""
    floats = lambda values: {k: float(v) for k, v in jax.device_get(values).items()}
    measured = floats(line_sizes(problem, point)) if sizes else {}
    if isinstance(problem, MinimaxProblem):
        return StationarityCertificate(**floats(stationarity(problem, point)), sizes=measured)
    if isinstance(problem, ConstrainedBilevelProblem):
        return ConstrainedKKTCertificate(**floats(constrained_kkt(problem, point)), sizes=measured)
    return KKTCertificate(**floats(kkt(problem, point)), sizes=measured)
