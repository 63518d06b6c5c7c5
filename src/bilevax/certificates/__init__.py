"""How good a point is. Nothing here imports a solver: any point from anywhere can be judged."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from bilevax import arguments, trees
from bilevax.arguments import positive
from bilevax.certificates.certificate import Certificate
from bilevax.certificates.constrained import ConstrainedKKTCertificate
from bilevax.certificates.constrained_witness import constrained_witnesses
from bilevax.certificates.judge import Problem, judge
from bilevax.certificates.judging import BATCHES, RUNS
from bilevax.certificates.kkt import KKTCertificate
from bilevax.certificates.sampled import (
    SampledCertificate,
    averaged,
    drawn_batches,
    sampled_certificate,
)
from bilevax.certificates.stationarity import StationarityCertificate
from bilevax.certificates.witness import best_rho, respond
from bilevax.problems import ConstrainedBilevelProblem, MinimaxProblem, Point
from bilevax.problems.stochastic import is_stochastic, whole
from bilevax.problems.validate import check_functions, check_point

__all__ = [
    "Certificate",
    "ConstrainedKKTCertificate",
    "KKTCertificate",
    "SampledCertificate",
    "StationarityCertificate",
    "certify",
    "judge",
]


def certify(
    problem: Problem,
    point: Point,
    *,
    rho: Any = None,
    batches: int | None = None,
    confidence: float = 0.95,
    key: int = 0,
) -> Certificate:
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

    A problem whose data is a source of minibatches is judged on all its samples, exactly, if these
    are in memory. If not, or with `batches`, so many minibatches are drawn (64, from a stream of
    their own for `key`), and a `SampledCertificate` says what holds with probability `confidence`;
    missing witnesses are sought on as many others.
    """
    positive(rho, "rho")
    if is_stochastic(problem):
        known = whole(problem)
        if known is None or batches is not None:
            return _sampled(problem, point, rho, batches, confidence, key)
        problem = known
    elif batches is not None:
        raise ValueError("batches: the problem's data is no source of minibatches")
    return judge(problem, _with_witnesses(problem, point, rho), sizes=True)


def _with_witnesses(problem: Any, point: Point, rho: Any) -> Point:
    """The point with all that its definition asks for; what is missing is sought."""
    point = check_point(problem, point)
    check_functions(problem, point)
    if isinstance(problem, MinimaxProblem):
        if rho is not None:
            raise ValueError("rho is the penalty of a bilevel problem; a MinimaxProblem has none")
        return point
    rho = point.rho if rho is None else rho
    positive(rho, "point.rho")
    if isinstance(problem, ConstrainedBilevelProblem):
        rho = None if rho is None else jnp.asarray(rho, trees.dtype_of((point.x, point.y)))
        if point.z is None or point.multipliers is None or rho is None:
            return constrained_witnesses(problem, point, rho)
        return dataclasses.replace(point, rho=rho)
    if point.z1 is None or (point.z2 is None and problem.y2 is not None):
        point = respond(problem, point)
    dtype = trees.dtype_of(point.x1)
    rho = best_rho(problem, point) if rho is None else jnp.asarray(rho, dtype)
    return dataclasses.replace(point, rho=rho)


def _sampled(
    problem: Any, point: Point, rho: Any, batches: int | None, confidence: float, key: int
) -> SampledCertificate:
    count = BATCHES if batches is None else batches
    arguments.whole(count, "batches", 2)
    arguments.whole(key, "key", 0)
    if key >= RUNS:
        raise ValueError(f"key must be below {RUNS}, not {key}")
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must be a probability between 0 and 1, not {confidence}")
    # Witnesses that fit the samples they are judged on would look better than they are.
    drawn = drawn_batches(problem, 2 * count, key)
    half = lambda begin: jax.tree.map(lambda b: b[begin : begin + count], drawn)
    point = _with_witnesses(averaged(problem, half(0)), point, rho)
    estimate = judge(averaged(problem, half(count)), point, sizes=True)
    return sampled_certificate(problem, point, half(count), estimate, confidence)
