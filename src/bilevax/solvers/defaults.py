"""The solver that `solve` takes for a problem where none is named."""

from __future__ import annotations

from typing import Any

from bilevax.problems import (
    BilevelProblem,
    ConstrainedBilevelProblem,
    Form,
    MinimaxProblem,
    register,
    registered,
)
from bilevax.problems.upper_level import UpperLevel
from bilevax.solvers.adaptive import Adaptive
from bilevax.solvers.base import Solver, default_solver
from bilevax.solvers.composite import Reformulated
from bilevax.solvers.engines import Engines
from bilevax.solvers.proximal_point import ProximalPoint
from bilevax.solvers.sample_average import SampleAverage
from bilevax.solvers.stochastic_proximal_point import practical


def _minimax(problem: MinimaxProblem) -> Solver:
    return practical() if problem.sampled else ProximalPoint()


def _bilevel(problem: BilevelProblem | ConstrainedBilevelProblem) -> Solver:
    return SampleAverage() if problem.sampled else Engines()


def _upper_level(rho: Any) -> Solver:
    return Reformulated(Adaptive(rho=1.0), UpperLevel)


def _near(rho: Any) -> Solver:
    return Adaptive(rho=rho)


def polisher(problem: Form, rho: Any) -> Solver:
    """The method by which `polish` seeks a point nearby."""
    made = registered(problem, "polisher")
    return default_solver(problem) if made is None else made(rho)


__all__ = ["default_solver", "polisher"]

register(MinimaxProblem, solver=_minimax, polisher=_upper_level)
register(BilevelProblem, solver=_bilevel, polisher=_near)
register(ConstrainedBilevelProblem, solver=_bilevel, polisher=_near)
