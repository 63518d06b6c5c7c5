"""The paper's constants and worst-case bounds, so that a user sees them before a run."""

from bilevax.solvers.penalty import PenaltyConstants, penalty_constants
from bilevax.theory.assumptions import Precondition, preconditions
from bilevax.theory.bounds import (
    Bounds,
    StochasticBounds,
    minimax_bounds,
    minimax_level,
    stochastic_distance,
    stochastic_level,
    stochastic_stationarity,
)
from bilevax.theory.predictions import Prediction, predict

__all__ = [
    "Bounds",
    "PenaltyConstants",
    "Precondition",
    "Prediction",
    "StochasticBounds",
    "minimax_bounds",
    "minimax_level",
    "penalty_constants",
    "preconditions",
    "predict",
    "stochastic_distance",
    "stochastic_level",
    "stochastic_stationarity",
]
