"""The certificate of a point that has all its witnesses."""

from __future__ import annotations

import jax

from bilevax.certificates.certificate import Certificate
from bilevax.certificates.constrained import ConstrainedKKTCertificate, constrained_kkt
from bilevax.certificates.kkt import KKTCertificate, kkt
from bilevax.certificates.sizes import line_sizes
from bilevax.certificates.stationarity import StationarityCertificate, stationarity
from bilevax.problems import BilevelProblem, ConstrainedBilevelProblem, MinimaxProblem, Point

Problem = BilevelProblem | ConstrainedBilevelProblem | MinimaxProblem


def judge(problem: Problem, point: Point, *, sizes: bool = False) -> Certificate:
    """The certificate of a point that has all its witnesses; with `sizes`, those of its lines."""
    floats = lambda values: {k: float(v) for k, v in jax.device_get(values).items()}
    measured = floats(line_sizes(problem, point)) if sizes else {}
    if isinstance(problem, MinimaxProblem):
        return StationarityCertificate(**floats(stationarity(problem, point)), sizes=measured)
    if isinstance(problem, ConstrainedBilevelProblem):
        return ConstrainedKKTCertificate(**floats(constrained_kkt(problem, point)), sizes=measured)
    return KKTCertificate(**floats(kkt(problem, point)), sizes=measured)
