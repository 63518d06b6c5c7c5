"""How to move: one method a file."""

from bilevax.solvers.adaptive import Adaptive
from bilevax.solvers.base import Solver, Task
from bilevax.solvers.best_response import BestResponse
from bilevax.solvers.composite import Reformulated, Sequence
from bilevax.solvers.defaults import default_solver
from bilevax.solvers.engines import Engines
from bilevax.solvers.estimators import Estimator, Plain, Recursive
from bilevax.solvers.extragradient import ExtraGradient
from bilevax.solvers.fop import FOP
from bilevax.solvers.multipliers import GrowingLagrangian
from bilevax.solvers.newton import Newton
from bilevax.solvers.optfom import OptFOM
from bilevax.solvers.penalty import PenaltyMethod
from bilevax.solvers.proximal_point import ProximalPoint
from bilevax.solvers.sample_average import SampleAverage
from bilevax.solvers.sapd import SAPD
from bilevax.solvers.smo import SMO
from bilevax.solvers.stochastic_proximal_point import StochasticProximalPoint

__all__ = [
    "FOP",
    "SAPD",
    "SMO",
    "Adaptive",
    "BestResponse",
    "Engines",
    "Estimator",
    "ExtraGradient",
    "GrowingLagrangian",
    "Newton",
    "OptFOM",
    "PenaltyMethod",
    "Plain",
    "ProximalPoint",
    "Recursive",
    "Reformulated",
    "SampleAverage",
    "Sequence",
    "Solver",
    "StochasticProximalPoint",
    "Task",
    "default_solver",
]
