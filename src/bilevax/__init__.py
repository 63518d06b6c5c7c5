"""Bilevel optimisation with minimax levels on JAX, with answers that are certified."""

from bilevax import data, problems, terms, theory
from bilevax.cache import enable_cache, enable_cache_at_import
from bilevax.certificates import (
    Certificate,
    ConstrainedKKTCertificate,
    KKTCertificate,
    SampledCertificate,
    StationarityCertificate,
    certify,
)
from bilevax.driver.entry import solve
from bilevax.driver.nearby import NearlyCertificate, polish
from bilevax.driver.solution import History, Solution, SolveError, Status
from bilevax.problems import (
    BilevelProblem,
    ConstrainedBilevelProblem,
    MinimaxProblem,
    Multipliers,
    Point,
)
from bilevax.problems.lagrangian import lagrangian
from bilevax.problems.reformulations import penalty
from bilevax.solvers import (
    FOP,
    SAPD,
    SMO,
    Adaptive,
    BestResponse,
    Engines,
    ExtraGradient,
    Newton,
    OptFOM,
    PenaltyMethod,
    Plain,
    ProximalPoint,
    Recursive,
    SampleAverage,
    Sequence,
    Solver,
    StochasticProximalPoint,
)

__version__ = "0.2.0.dev0"

__all__ = [
    "FOP",
    "SAPD",
    "SMO",
    "Adaptive",
    "BestResponse",
    "BilevelProblem",
    "Certificate",
    "ConstrainedBilevelProblem",
    "ConstrainedKKTCertificate",
    "Engines",
    "ExtraGradient",
    "History",
    "KKTCertificate",
    "MinimaxProblem",
    "Multipliers",
    "NearlyCertificate",
    "Newton",
    "OptFOM",
    "PenaltyMethod",
    "Plain",
    "Point",
    "ProximalPoint",
    "Recursive",
    "SampleAverage",
    "SampledCertificate",
    "Sequence",
    "Solution",
    "SolveError",
    "Solver",
    "StationarityCertificate",
    "Status",
    "StochasticProximalPoint",
    "certify",
    "data",
    "enable_cache",
    "lagrangian",
    "penalty",
    "polish",
    "problems",
    "solve",
    "terms",
    "theory",
]

enable_cache_at_import()
