"""The problem forms, their validation, and the reformulations between them."""

from bilevax.problems.bilevel import BilevelProblem
from bilevax.problems.constrained import ConstrainedBilevelProblem
from bilevax.problems.epigraph import epigraph_form
from bilevax.problems.form import Call, Form, Reformulation, register, registered
from bilevax.problems.lagrangian import LagrangianProblem
from bilevax.problems.meta import meta_learning
from bilevax.problems.minimax import MinimaxProblem
from bilevax.problems.point import Multipliers, Point
from bilevax.problems.reformulations import PenaltyProblem
from bilevax.problems.tail import tail_tuning

from bilevax.problems import library, linear  # isort: skip, as they use the forms above

__all__ = [
    "BilevelProblem",
    "Call",
    "ConstrainedBilevelProblem",
    "Form",
    "LagrangianProblem",
    "MinimaxProblem",
    "Multipliers",
    "PenaltyProblem",
    "Point",
    "Reformulation",
    "epigraph_form",
    "library",
    "linear",
    "meta_learning",
    "register",
    "registered",
    "tail_tuning",
]
