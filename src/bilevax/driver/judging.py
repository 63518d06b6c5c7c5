"""How a run judges its points: on all samples, or on minibatches that were held out."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, TypeAlias

from bilevax.certificates import Certificate, judge
from bilevax.certificates.afar import look_afar
from bilevax.certificates.around import affordable_steps
from bilevax.certificates.definition import definition_of
from bilevax.certificates.examination import compile_examination, examined
from bilevax.certificates.rounding import TIMES, times
from bilevax.certificates.sampled import (
    PASSES,
    RUN_KEYS,
    averaged,
    batches_in_memory,
    drawn_batches,
    sampled_certificate,
)
from bilevax.certificates.streamed import held_out_means, streamed_certificate, sufficient
from bilevax.data.source import minibatches
from bilevax.driver.checkpoint import RunState
from bilevax.driver.downhill import downhill
from bilevax.problems import Form, Point
from bilevax.solvers.base import Task

Late: TypeAlias = Callable[[], bool]

# How often a run leaves a certified point from which F falls.
WITHDRAWALS = 8
# By how much ρ grows where a run has come back to a point that it had left.
STEEPER = 10.0
# Samples do not tell points apart whose ε differs by less than this factor.
ALIKE = 1.2


@dataclasses.dataclass(frozen=True)
class Judge:
    """`problem` is the stated one with all samples, or with the mean over `batches` of them.

    `cost` is what a check takes, in gradients of one minibatch, and `weight` what it counts for
    where checks are spared: the repeats of a small problem cost nothing that a run would notice.
    """

    stated: Form
    problem: Form
    batches: Any
    cost: int
    weight: int
    tolerance: float
    relative: float
    confidence: float

    @classmethod
    def of(cls, task: Task) -> Judge:
        stated, known, batches, passes, each = task.problem, task.problem.complete(), None, 0, 1.0
        if known is None:
            count = batches_in_memory(stated)
            batches = drawn_batches(stated, count, RUN_KEYS)
            known, passes, each = averaged(stated, batches), PASSES, count
        elif stated.sampled:
            each = minibatches(stated.data)
        repeats = times(known, task.start)
        cost = math.ceil((1 + repeats + passes) * each)
        few = repeats if stated.sampled else min(repeats, TIMES)
        weight = math.ceil((1 + few + passes) * each)
        asked = (task.tolerance, task.relative, task.confidence)
        return cls(stated, known, batches, cost, weight, *asked)

    @property
    def exact(self) -> bool:
        return self.batches is None

    def __call__(self, point: Point, attempt: int) -> Certificate:
        """The certificate of a point.

        From samples, its radii are as wide as those of the confirmation that would follow.
        """
        certificate = judge(self.problem, point, sizes=self.relative > 0)
        if self.exact:
            return certificate
        said = (self.confidence, _share(attempt))
        return sampled_certificate(self.stated, point, self.batches, certificate, *said)

    def sufficient(self, point: Point, certificate: Any, attempt: int, most: int) -> int:
        """How many minibatches would be enough to certify a point, if at most so many; or 0."""
        said = (self.confidence, _share(attempt))
        aims = certificate.allowed(self.tolerance, self.relative)
        return sufficient(self.stated, point, self.batches, certificate, *said, aims, most)

    def confirmed(
        self, point: Point, attempt: int, count: int = 0, late: Late = lambda: False
    ) -> Certificate | None:
        """On minibatches that had no part in choosing the point, `count` of them if that is given.

        There is none where it becomes too late on the way.

        The best of many checks is too good on those it was chosen by. The t-th time may err with
        probability α/(t(t + 1)), so that all times together err with α = 1 − confidence at most.
        """
        key, said, sizes = RUN_KEYS + attempt, (self.confidence, _share(attempt)), self.relative > 0
        if count:
            seen = held_out_means(self.stated, point, count, key, late=late)
            if seen is None:
                return None
            allowances = judge(self.problem, point).allowances
            return streamed_certificate(self.stated, point, seen, allowances, *said, sizes=sizes)
        batches = drawn_batches(self.stated, batches_in_memory(self.stated), key)
        estimate = judge(averaged(self.stated, batches), point, sizes=sizes)
        return sampled_certificate(self.stated, point, batches, estimate, *said)

    def compile_examination(self, point: Point, certificate: Certificate, look: bool) -> None:
        compile_examination(self.problem, point, certificate, look=look and self.exact)

    def examined(
        self, point: Point, certificate: Certificate, gradients: int, look: bool
    ) -> Certificate:
        """The certificate with what can be said against it, after a run of so many gradients.

        To look around must not take longer than the run has; with samples it would.
        """
        options = {"epsilon": self.claimed(certificate), "look": look and self.exact}
        steps = self.steps(point, gradients)
        return examined(self.problem, point, certificate, steps=steps, **options)

    def seen_afar(self, start: Point, point: Point, certificate: Certificate) -> Certificate:
        """The certificate with a warning, where x has run away; with samples nobody looks."""
        if not self.exact:
            return certificate
        asked = (definition_of(self.problem), self.problem, start, point)
        return dataclasses.replace(certificate, ran_away=look_afar(*asked, self.tolerance))

    def steps(self, point: Point, gradients: int) -> int:
        """How many steps a lower level's solution around a point may take."""
        taken = int(gradients * (1 + TIMES) / self.weight)
        return affordable_steps(self.problem, point, taken)

    def claimed(self, certificate: Certificate) -> float:
        """The ε that a certified run claims."""
        allowed = certificate.allowed(self.tolerance, self.relative)
        return max(allowed.values()) if self.relative else self.tolerance

    def holds(self, certificate: Certificate) -> bool:
        return certificate.certified(self.tolerance, self.relative)

    def excess(self, certificate: Any) -> float:
        """What is to become small: ε, or the largest line against what it may be.

        Of samples it is the estimate, since radii are those of few minibatches.
        """
        if not self.exact:
            certificate = certificate.estimate
        if not self.relative:
            return certificate.epsilon
        allowed = certificate.allowed(self.tolerance, self.relative)
        lines = certificate.lines().items()
        shares = [v / allowed[k] if allowed[k] > 0 else math.inf for k, v in lines if v != 0]
        return max((math.inf if math.isnan(v) else v for v in shares), default=0.0)


def _share(attempt: int) -> float:
    """Of the probability of an error, what the t-th confirmation has: Σ 1/(t(t + 1)) = 1."""
    return 1 / (attempt * (attempt + 1))


class Verdicts:
    """What the checks of a run have said: the best point, its certificate, and the history.

    A certificate from samples is tried on others before anyone is shown it: `confirmations` counts
    how often, `confirmed` says whether the best point's was, and `looked_at` on how many
    minibatches, if on more than usual. `checked` is what the best point's own check said.
    `withdrawals` counts the certified points from which F fell.
    """

    def __init__(self, judge: Judge, start: Point):
        self.judge, self.best = judge, start
        self.confirmations, self.confirmed, self.looked_at, self.withdrawals = 0, False, 0, 0
        self.gradients = 0  # of the checks
        self.certificate: Certificate = judge(start, 1)
        self.checked: Certificate = self.certificate
        self.least = judge.excess(self.checked)  # ε of the points that were kept
        self.history: dict[str, list[float]] = {}

    @property
    def holds(self) -> bool:
        return self.judge.holds(self.certificate)

    def record(self, certificate: Certificate, gradients: int, seconds: float) -> None:
        row = {"gradients": gradients, "seconds": seconds} | certificate.as_dict()
        for name, value in row.items():
            self.history.setdefault(name, []).append(value)

    def add(self, point: Point, gradients: int, seconds: float) -> Certificate:
        """Judge a point, keep it if it is the best, and record what was seen."""
        certificate = self.judge(point, self.confirmations + 1)
        self.gradients += self.judge.cost
        excess, alike = self.judge.excess(certificate), 1.0 if self.judge.exact else ALIKE
        if excess <= alike * self.least:
            self._keep(point, certificate)
        self.record(certificate, gradients, seconds)
        return certificate

    def _keep(self, point: Point, certificate: Certificate) -> None:
        self.best, self.certificate, self.checked = point, certificate, certificate
        self.least = min(self.least, self.judge.excess(certificate))
        self.confirmed, self.looked_at = False, 0

    def confirm(self, most: int = 0, late: Late = lambda: False) -> bool:
        """Whether the best point is certified; if samples say so, whether other samples agree.

        Where more minibatches, `most` of them at the most, would make its lines small enough, these
        are asked, unless it becomes too late.
        """
        if self.holds:
            self.ask_other_samples()
        elif not self.judge.exact and not self.confirmed and most:
            attempt = self.confirmations + 1
            if count := self.judge.sufficient(self.best, self.checked, attempt, most):
                self.ask_other_samples(count, late)
        return self.holds

    def compile_examination(self, look: bool) -> None:
        self.judge.compile_examination(self.best, self.certificate, look)

    def examine(self, gradients: int, look: bool, start: Point) -> None:
        """Look for what can be said against the best point's certificate.

        And, where that holds, whether the point has run away from the start.
        """
        self.certificate = self.judge.examined(self.best, self.certificate, gradients, look)
        if self.holds:
            self.certificate = self.judge.seen_afar(start, self.best, self.certificate)

    @property
    def may_leave(self) -> bool:
        """Whether F falls around the best point, and the run has not left too many like it."""
        around = self.certificate.looked_around
        return around is not None and around.falls and self.withdrawals < WITHDRAWALS

    def leave(self, gradients: int) -> Point:
        """Leave the best point, from which F falls, for where it falls to."""
        steps = self.judge.steps(self.best, gradients)
        rho = self.best.rho * (STEEPER if self.withdrawals else 1.0)
        start = downhill(
            self.judge.problem, self.certificate, self.judge.claimed(self.certificate), rho, steps
        )
        self.least = math.inf
        self._keep(start, self.judge(start, 1))
        self.gradients += self.judge.cost
        self.withdrawals += 1
        return start

    def ask_other_samples(self, count: int = 0, late: Late = lambda: False) -> None:
        if self.judge.exact or self.confirmed:
            return
        attempt = self.confirmations + 1
        # This may be interrupted.
        certificate = self.judge.confirmed(self.best, attempt, count, late)
        if certificate is None:
            return
        self.gradients += count or self.judge.cost
        self.confirmations, self.confirmed, self.certificate = attempt, True, certificate
        self.looked_at = count

    def saved(self) -> dict[str, Any]:
        """What a `RunState` keeps of this."""
        return {
            "best": self.best,
            "check_gradients": self.gradients,
            "history": {name: list(column) for name, column in self.history.items()},
            "confirmations": self.confirmations,
            "confirmed": self.confirmed,
            "looked_at": self.looked_at,
            "least": self.least,
            "withdrawals": self.withdrawals,
        }

    def restore(self, saved: RunState) -> None:
        """Go on with what an earlier run's checks have said."""
        self.best, self.gradients = saved.best, saved.check_gradients
        self.confirmations, self.confirmed = saved.confirmations, saved.confirmed
        self.withdrawals = saved.withdrawals
        self.history = {name: list(column) for name, column in saved.history.items()}
        self.looked_at = saved.looked_at
        self.certificate = self.checked = self.judge(self.best, self.confirmations + 1)
        self.least = self.judge.excess(self.checked) if saved.least is None else saved.least
        if self.confirmed:
            again = self.judge.confirmed(self.best, self.confirmations, self.looked_at)
            assert again is not None  # it is never too late
            self.certificate = again
