"""The problem forms, their validation, and the reformulations between them."""

from bilevax.problems.bilevel import BilevelProblem
from bilevax.problems.minimax import MinimaxProblem
from bilevax.problems.point import Point

__all__ = ["BilevelProblem", "MinimaxProblem", "Point"]
