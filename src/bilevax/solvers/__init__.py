"""How to move: one method a file."""

from bilevax.solvers.adaptive import Adaptive
from bilevax.solvers.base import Solver
from bilevax.solvers.extragradient import ExtraGradient
from bilevax.solvers.fop import FOP
from bilevax.solvers.optfom import OptFOM
from bilevax.solvers.penalty import PenaltyMethod
from bilevax.solvers.proximal_point import ProximalPoint
from bilevax.solvers.smo import SMO

__all__ = [
    "FOP",
    "SMO",
    "Adaptive",
    "ExtraGradient",
    "OptFOM",
    "PenaltyMethod",
    "ProximalPoint",
    "Solver",
]
