"""Bilevel optimisation with minimax levels on JAX, with answers that are certified."""

from bilevax import data, problems, terms, theory
from bilevax.certificates import (
    Certificate,
    ConstrainedKKTCertificate,
    KKTCertificate,
    SampledCertificate,
    StationarityCertificate,
    certify,
)
from bilevax.polish import NearlyCertificate, polish
from bilevax.problems import (
    BilevelProblem,
    ConstrainedBilevelProblem,
    MinimaxProblem,
    Multipliers,
    Point,
)
from bilevax.solution import History, Solution, SolveError, Status
from bilevax.solve import solve
from bilevax.solvers import (
    FOP,
    SAPD,
    SMO,
    Adaptive,
    ExtraGradient,
    OptFOM,
    PenaltyMethod,
    Plain,
    ProximalPoint,
    Recursive,
    Solver,
    StochasticProximalPoint,
)

__version__ = "0.1.0"

__all__ = [
    "FOP",
    "SAPD",
    "SMO",
    "Adaptive",
    "BilevelProblem",
    "Certificate",
    "ConstrainedBilevelProblem",
    "ConstrainedKKTCertificate",
    "ExtraGradient",
    "History",
    "KKTCertificate",
    "MinimaxProblem",
    "Multipliers",
    "NearlyCertificate",
    "OptFOM",
    "PenaltyMethod",
    "Plain",
    "Point",
    "ProximalPoint",
    "Recursive",
    "SampledCertificate",
    "Solution",
    "SolveError",
    "Solver",
    "StationarityCertificate",
    "Status",
    "StochasticProximalPoint",
    "certify",
    "data",
    "polish",
    "problems",
    "solve",
    "terms",
    "theory",
]
