"""How a run ended, in sentences that say what to do."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from bilevax.certificates import Certificate, SampledCertificate
from bilevax.certificates.culprits import culprit
from bilevax.driver.schedule import STALL_SPAN
from bilevax.driver.solution import Status
from bilevax.problems import Form, Point
from bilevax.solvers.base import Solver


@dataclasses.dataclass(frozen=True)
class Summary:
    """What a sentence tells: the best certificate, what was asked for, the work, the method."""

    certificate: Certificate
    tolerance: float
    relative: float
    gradients: int
    method: Solver
    first_method: Solver
    # Where one method has followed another: the gradients of the first.
    fell_back_at: int | None = None
    # Why the method that was to follow could not.
    refused: str = ""
    # Whether a limit of the method on its iterations has ended it, or a part of it.
    cut_short: bool = False
    # The problem as it is judged, and the best point.
    problem: Form | None = None
    point: Point | None = None

    @classmethod
    def of(cls, run: Any) -> Summary:
        """That of a `Run`, as it stands."""
        return cls(
            certificate=run.verdicts.certificate,
            tolerance=run.task.tolerance,
            relative=run.task.relative,
            gradients=run.gradients,
            method=run.solver.part,
            first_method=run.first_method,
            fell_back_at=run.fell_back_at,
            refused=run.refused,
            cut_short=bool(run.solver.cut_short(run.state)),
            problem=run.verdicts.judge.problem,
            point=run.verdicts.best,
        )

    @property
    def wanted(self) -> str:
        if self.relative:
            return f"within {self.tolerance:g} + {self.relative:g}·size on every line"
        return f"≤ {self.tolerance:g}"

    @property
    def so_far(self) -> str:
        wanted = self.wanted if self.relative else f"at {self.tolerance:g}"
        return (
            f"The best point is certified at ε = {self.certificate.epsilon:.3g} only, not "
            f"{wanted}, after {self.gradients:,} gradients.{self.fallback}"
        )

    @property
    def fallback(self) -> str:
        """Which method the answer comes from, where it is not the one that was asked for."""
        if self.fell_back_at is None:
            return ""
        if self.first_method.in_passing:
            return f" The first {self.fell_back_at:,} of them were on some of the samples."
        first, second = self.first_method.title, self.method.title
        return (
            f" {first} stopped making progress after {self.fell_back_at:,} of them; since then "
            f"{second} went on."
        )

    @property
    def provisos(self) -> str:
        """What the certificate rests on besides the point."""
        return "".join(f" {proviso}" for proviso in self.certificate.provisos())

    def _culprit(self, line: str) -> str:
        """Where a line comes from; of one from samples most may be their error."""
        sampled = isinstance(self.certificate, SampledCertificate)
        if self.problem is None or self.point is None or sampled:
            return ""
        return culprit(self.problem, self.point, line)

    @property
    def hint(self) -> str:
        """The line of the certificate that is largest, where it comes from, and what to try."""
        lines = self.certificate.lines()
        worst = max(lines, key=lambda name: lines[name])
        line, remedy = self.certificate.advice(worst)
        where = self._culprit(worst) if math.isfinite(lines[worst]) else ""
        where = where and f", most of all in {where}"
        return f"The largest line is {line}{where}; {self.method.advice()}, or {remedy}."


def certified(run: Summary) -> Status:
    sure, caution = "", ""
    if isinstance(run.certificate, SampledCertificate):
        sure = f", with probability {run.certificate.confidence:g} over the samples looked at,"
        caution = f" {run.certificate.caution}" if run.certificate.heavy_tailed else ""
    return Status(
        "certified",
        f"Certified: ε = {run.certificate.epsilon:.3g} {run.wanted}{sure} after "
        f"{run.gradients:,} gradients.{run.fallback}{caution}{run.provisos}",
    )


def withdrawn(run: Summary) -> Status:
    """A point that satisfies every line, and is no answer all the same."""
    certificate = run.certificate
    if certificate.breach:
        why = f"{certificate.breach}. bilevax certifies nothing outside of the stated class"
    else:
        why = (
            f"{certificate.looked_around}. It is an ε-KKT point, such as a kink or a local maximum "
            "of F, and no local minimum; try another start, or look_around=False"
        )
    return Status("withdrawn", f"Withdrawn after {run.gradients:,} gradients: {why}.")


def budget_spent(run: Summary, budget: str) -> Status:
    return Status(
        "budget spent",
        f"The budget {budget} is spent. {run.so_far} Give a larger one; resume=solution.state "
        "goes on from here.",
    )


def stopped_itself(run: Summary) -> Status:
    why = f"The stopping test of {run.method.title} holds"
    if run.cut_short:
        why = f"{run.method.title} has ended, cut short by a limit on iterations, or a part of it"
    return Status("stalled", f"{why}. {run.so_far} {run.hint}{run.refused}")


def stalled(run: Summary) -> Status:
    return Status(
        "stalled",
        f"Stalled: ε has not fallen since gradient {run.gradients / STALL_SPAN:,.0f}. "
        f"{run.so_far} {run.hint}{run.refused}",
    )


def kinked(run: Summary, where: str) -> Status:
    return Status(
        "stalled",
        f"Stalled at a kink: {where}. Gradients must not jump: bilevax.problems.epigraph_form("
        "problem, start) makes variables of absolute values and maxima in a lower level with "
        f"constraints; elsewhere take a term such as L1. {run.so_far}",
    )


def interrupted(run: Summary, how: str) -> Status:
    return Status("interrupted", f"{how} {run.so_far}")


def not_finite(run: Summary, where: str) -> Status:
    return Status("not finite", f"Not finite: {where}. {run.so_far}")


def unbounded(run: Summary, where: str) -> Status:
    return Status(
        "unbounded",
        f"Unbounded: {where} after {run.gradients:,} gradients. The objective seems to fall "
        "without end that way; give this block a bounded domain, such as Box(-R, R), or another "
        "start. "
        f"{run.so_far}",
    )


def cannot_follow(error: Exception) -> str:
    """Why the method that was to follow could not."""
    return f" No other method can take over: {error}."
