"""Nearly ε-KKT: the certified point near the one that a stochastic method ended at."""

from __future__ import annotations

import dataclasses
from typing import Any

from bilevax import trees
from bilevax.certificates import Certificate, judge
from bilevax.certificates.definition import definition_of
from bilevax.driver.entry import solve
from bilevax.driver.solution import Solution
from bilevax.problems import Form, Point
from bilevax.problems.validation import check_point, require_form
from bilevax.solvers.defaults import polisher


@dataclasses.dataclass(frozen=True)
class NearlyCertificate:
    """`def:epsilon_KKT_nearly`: a point at this `distance` from the one asked about is ε-KKT.

    `epsilon` is the larger of that distance, in (x1, y1, y2) or (x, y), and the nearby point's own.
    """

    nearby: Point
    certificate: Certificate
    distance: float

    @property
    def epsilon(self) -> float:
        return max(self.certificate.epsilon, self.distance)

    def certified(self, tolerance: float) -> bool:
        return self.epsilon <= tolerance

    def __str__(self) -> str:
        return (
            f"nearly ε-KKT with ε = {self.epsilon:.3g}: {self.distance:.3g} from it is a point "
            f"with ε = {self.certificate.epsilon:.3g}\n{self.certificate}"
        )


def polish(
    problem: Form, point: Point, tolerance: float = 1e-2, *, max_gradients: int = 20_000
) -> NearlyCertificate:
    """The ε-KKT point near a given one, sought on all samples by a deterministic method.

    Of the points on the way that had the least ε so far, the one for which the larger of ε and the
    distance is least; the given point itself is one of them. The search ends when one has
    ε ≤ `tolerance`, even where F falls nearby. All samples must be in memory. Of a minimax problem
    it is the primal-dual stationary point.
    """
    require_form(problem)
    known = problem.complete()
    if known is None:
        raise ValueError("polish: not all samples are in memory; certify(problem, point) samples")
    best: list[NearlyCertificate] = []
    definition = definition_of(known)
    moving = definition.moving  # of a form with a lower level
    blocks = lambda p: [getattr(p, name) for name in moving or known.blocks]

    def keep(nearby: Point, certificate: Certificate) -> None:
        off = trees.subtract(blocks(nearby), blocks(point))
        here = NearlyCertificate(nearby, certificate, float(trees.norm(off)))
        if not best or here.epsilon < best[0].epsilon:
            best[:] = [here]

    def look(solution: Solution) -> None:
        keep(solution.point, solution.certificate)

    solver = polisher(known, point.rho)
    options: dict[str, Any] = {"tolerance": tolerance, "max_gradients": max_gradients}
    options["look_around"] = False
    itself = definition.with_witnesses(known, check_point(known, point))
    keep(itself, judge(known, itself))
    look(solve(known, point, solver=solver, callback=look, progress=False, **options))
    return best[0]
