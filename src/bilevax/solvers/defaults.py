"""The solver that `solve` takes for a problem where none is named."""

from __future__ import annotations

from bilevax.problems import (
    BilevelProblem,
    ConstrainedBilevelProblem,
    MinimaxProblem,
    register,
)
from bilevax.solvers.base import Solver, default_solver
from bilevax.solvers.engines import Engines
from bilevax.solvers.proximal_point import ProximalPoint
from bilevax.solvers.sample_average import SampleAverage
from bilevax.solvers.stochastic_proximal_point import practical


def _minimax(problem: MinimaxProblem) -> Solver:
    return practical() if problem.sampled else ProximalPoint()


def _bilevel(problem: BilevelProblem | ConstrainedBilevelProblem) -> Solver:
    return SampleAverage() if problem.sampled else Engines()


__all__ = ["default_solver"]

register(MinimaxProblem, solver=_minimax)
register(BilevelProblem, solver=_bilevel)
register(ConstrainedBilevelProblem, solver=_bilevel)
