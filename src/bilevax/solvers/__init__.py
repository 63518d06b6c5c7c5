"""How to move: one method a file."""

from bilevax.solvers.adaptive import Adaptive
from bilevax.solvers.base import Solver
from bilevax.solvers.extragradient import ExtraGradient
from bilevax.solvers.optfom import OptFOM
from bilevax.solvers.penalty import PenaltyMethod
from bilevax.solvers.proximal_point import ProximalPoint

__all__ = ["Adaptive", "ExtraGradient", "OptFOM", "PenaltyMethod", "ProximalPoint", "Solver"]
