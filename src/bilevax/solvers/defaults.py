"""The solver that `solve` takes for a problem where none is named."""

from __future__ import annotations

from bilevax.problems import (
    BilevelProblem,
    ConstrainedBilevelProblem,
    Form,
    MinimaxProblem,
    register,
    registered,
)
from bilevax.solvers.base import Solver
from bilevax.solvers.engines import Engines
from bilevax.solvers.estimators import Recursive
from bilevax.solvers.penalty import PenaltyMethod
from bilevax.solvers.proximal_point import ProximalPoint
from bilevax.solvers.sapd import SAPD
from bilevax.solvers.stochastic_proximal_point import StochasticProximalPoint


def _stochastic() -> StochasticProximalPoint:
    """Constants that work, see benchmarks/stochastic.py: the theorem's T is beyond all patience."""
    inner = SAPD(iterations=30, theta=1.0, decay=200, estimator=Recursive())
    return StochasticProximalPoint(iterations=10**9, returns="last", inner=inner)


def _minimax(problem: MinimaxProblem) -> Solver:
    return _stochastic() if problem.sampled else ProximalPoint()


def _bilevel(problem: BilevelProblem) -> Solver:
    return PenaltyMethod(starter=None, outer=_stochastic()) if problem.sampled else Engines()


register(MinimaxProblem, solver=_minimax)
register(BilevelProblem, solver=_bilevel)
register(ConstrainedBilevelProblem, solver=lambda problem: Engines())


def default_solver(problem: Form) -> Solver:
    """The solver that is registered for the form of a problem."""
    made = registered(problem, "solver")
    if made is None:
        name = type(problem).__name__
        raise TypeError(
            f"there is no default solver for a {name}; name one with solver=, or "
            f"bilevax.problems.register({name}, solver=…)"
        )
    return made(problem)
