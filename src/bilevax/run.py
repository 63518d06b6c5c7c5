"""The only loop on the host: compiled chunks of steps, and between them what a person sees."""

from __future__ import annotations

import dataclasses
import math
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from bilevax import trees
from bilevax.arguments import warn
from bilevax.certificates import Certificate, SampledCertificate
from bilevax.certificates.judging import Judging
from bilevax.certificates.sizes import line_sizes
from bilevax.checkpoint import RunState, check_same_run, fingerprint, load, save
from bilevax.diagnose import where_not_finite
from bilevax.lift import Lift, first_lift, watched
from bilevax.problems import BilevelProblem, ConstrainedBilevelProblem, MinimaxProblem, Point
from bilevax.problems.lagrangian import bilevel_point, constrained_point, lagrangian
from bilevax.problems.reformulate import penalty_blocks, penalty_point
from bilevax.problems.stochastic import reference
from bilevax.solution import History, Solution, Status
from bilevax.solvers import (
    Adaptive,
    PenaltyMethod,
    Solver,
)

# The certificate is looked at when the gradients have grown by this factor since the last look: a
# schedule that depends on the iterates' count alone, so that no run depends on the clock.
CHECK_FIRST, CHECK_GROWTH = 64, 1.05
# Looks at all samples are dear where steps take minibatches: between two lie ten times their cost.
CHECK_SPARING = 10
# Between looks the program returns to the host this often, to show progress and to hear Ctrl-C.
PIECE_SECONDS = 0.2
# Stalled: over this factor in gradients, in which the point moved this often, ε fell by less than
# that share. (A point that has not moved is being worked on: a subproblem can be long.)
STALL_SPAN, STALL_MOVES, STALL_SHARE = 8.0, 30, 1e-3
# No verdict of stalling before so many gradients: in its first steps a method learns.
STALL_LEAST = 50_000


RUNNING = Status("running", "Still running.")


@eqx.filter_jit
def _init(solver: Solver, problem: Any, start: Point) -> Any:
    return solver.init(problem, start)


@eqx.filter_jit
def _advance(solver: Solver, problem: Any, state: Any, limit: Array) -> tuple[Any, Array, Array]:
    """Steps up to `limit` gradients; with whether the method is done and the state finite."""
    state = solver.advance(problem, state, limit)
    return state, solver.done(problem, state), trees.all_finite(state)


@eqx.filter_jit
def _output(solver: Solver, problem: Any, state: Any) -> Point:
    return solver.output(problem, state)


class Run:
    """One run of a solver on a problem, from check to check."""

    def __init__(
        self, stated: Any, solver: Any, start: Point, tolerance: float, relative: float = 0.0
    ):
        self.stated, self.unprepared, self.start = stated, solver, start
        self.judging = Judging.of(stated, sizes=relative > 0)
        self.between = max(CHECK_FIRST, CHECK_SPARING * self.judging.cost)
        # Certificates from samples are tried on others: so often yet, and the best point or not.
        self.confirmations, self.confirmed = 0, False
        self.tolerance, self.relative = tolerance, relative
        # Several processes run the same program: what one does, all must do.
        self.together = jax.process_count() > 1
        self.fell_back_at: int | None = None
        self.lift: Lift | None = None
        if isinstance(stated, ConstrainedBilevelProblem) and not solver.takes_constraints:
            self.lift = first_lift(stated, start)
        begin = self._build()
        begun = time.perf_counter()
        self.state = self._refilled(_init(self.solver, self.problem, begin))
        # Zero steps: what this takes is compilation.
        zero = jnp.asarray(0)
        jax.block_until_ready(_advance(self.solver, self.problem, self.state, zero))
        self.best = self._stated_point(_output(self.solver, self.problem, self.state))
        self.certificate = self._judged(self.best)
        self.compile_seconds = time.perf_counter() - begun
        self.begun = time.perf_counter()
        self.history: dict[str, list[float]] = {}
        self.fingerprint = fingerprint((stated, self.problem), self.solver, start)
        self.next_check, self.check_gradients, self.seconds_before = CHECK_FIRST, 0, 0.0
        self.piece = 8
        self.looked_at, self.watched_at = 0, self.next_check
        self._record(self.certificate)

    def _build(self) -> Point:
        """The problem in the form that the solver takes, the solver prepared, the start there."""
        self.problem, start = self.stated, self.start
        if self.lift is not None:
            self.problem = lagrangian(self.stated, self.lift.bounds)
            start = bilevel_point(start, self.lift.bounds)
        solver, tolerance = self.unprepared, self.tolerance
        if self.relative and isinstance(solver, Adaptive):
            target = self.tolerance if solver.target is None else solver.target
            solver = dataclasses.replace(solver, target=target, relative=self.relative)
        elif self.relative:
            tolerance += self.relative * _slope(reference(self.problem), start)
        self.solver = solver.prepare(self.problem, start, tolerance)
        return start

    def _refilled(self, state: Any) -> Any:
        """With samples from the host for the steps to come, if the data are there."""
        stream = self.solver.stream(state)
        if stream is None:
            return state
        return self.solver.with_stream(state, self.problem.data.refilled(stream))

    def _holds(self, certificate: Certificate) -> bool:
        return certificate.certified(self.tolerance, self.relative)

    def _confirmed(self) -> bool:
        """Whether the best point is certified; if samples say so, whether others agree."""
        if self._holds(self.certificate):
            self._confirm()
        return self._holds(self.certificate)

    def _confirm(self) -> None:
        """Have the best point's certificate from samples that had no part in choosing it."""
        if self.judging.exact or self.confirmed:
            return
        self.confirmations, self.confirmed = self.confirmations + 1, True
        self.check_gradients += self.judging.cost
        self.certificate = self.judging.confirmed(self.best, self.confirmations)

    def _judged(self, point: Point) -> Certificate:
        return self.judging(point, self.confirmations + 1)

    def _excess(self, certificate: Certificate) -> float:
        """What is to become small: ε, or the largest line against what it may be."""
        if not self.relative:
            return certificate.epsilon
        allowed = certificate.allowed(self.tolerance, self.relative)
        lines = certificate.lines().items()
        shares = [v / allowed[k] if allowed[k] > 0 else math.inf for k, v in lines if v != 0]
        return max((math.inf if math.isnan(v) else v for v in shares), default=0.0)

    def _stated_point(self, point: Point) -> Point:
        return point if self.lift is None else constrained_point(point, self.lift.bounds)

    @property
    def earlier(self) -> int:
        """Gradients before the solver last began anew, with other bounds or as another method."""
        return max(self.fell_back_at or 0, 0 if self.lift is None else int(self.lift.gradients))

    @property
    def gradients(self) -> int:
        return self.earlier + int(self.state.gradients)

    @property
    def seconds(self) -> float:
        return self.seconds_before + time.perf_counter() - self.begun

    def snapshot(self) -> RunState:
        return RunState(
            solver_state=self.state,
            best=self.best,
            lift=self.lift,
            next_check=self.next_check,
            check_gradients=self.check_gradients,
            seconds=self.seconds,
            history={name: list(column) for name, column in self.history.items()},
            fingerprint=self.fingerprint,
            fell_back_at=self.fell_back_at,
            confirmations=self.confirmations,
            confirmed=self.confirmed,
        )

    def _fresh(self, fell_back_at: int | None) -> RunState:
        """A snapshot of this run as it was when it began, or when the paper's method took over."""
        if fell_back_at is not None and self.fell_back_at is None:
            self._take_over(self.start, fell_back_at)
        return self.snapshot()

    def _take_over(self, start: Point, gradients: int) -> None:
        """Go on from there with the paper's method; its constants are those at the run's start."""
        adaptive = self.unprepared
        self.unprepared = PenaltyMethod()
        try:
            self._build()
        except ValueError:
            self.unprepared = adaptive
            self._build()
            raise
        self.fell_back_at = gradients
        begin = start if self.lift is None else bilevel_point(start, self.lift.bounds)
        self.state = _init(self.solver, self.problem, begin)

    def _falls_back(self) -> str:
        """Let the paper's method go on where `Adaptive` does not; else why that cannot be."""
        begun = time.perf_counter()
        try:
            self._take_over(self.best, self.gradients)
        except ValueError as error:
            return f" The paper's method cannot take over: {error}."
        # Zero steps: what this takes is compilation, which no limit counts.
        jax.block_until_ready(_advance(self.solver, self.problem, self.state, jnp.asarray(0)))
        taken = time.perf_counter() - begun
        self.compile_seconds, self.begun = self.compile_seconds + taken, self.begun + taken
        self.next_check = max(self.next_check, self.gradients + self.between)
        return ""

    def resume(self, source: RunState | str | Path) -> None:
        saved = load(source, self._fresh) if isinstance(source, str | Path) else source
        if not isinstance(saved, RunState):
            raise TypeError(f"resume must be a solution's state or a file, not {source!r}")
        check_same_run(saved, self._fresh(saved.fell_back_at), "this state")
        self.state, self.best, self.lift = saved.solver_state, saved.best, saved.lift
        self._build()
        self.next_check, self.check_gradients = saved.next_check, saved.check_gradients
        self.seconds_before, self.watched_at = saved.seconds, saved.next_check
        self.confirmations, self.confirmed = saved.confirmations, saved.confirmed
        self.looked_at = int(saved.history["gradients"][-1])
        self.history = {name: list(column) for name, column in saved.history.items()}
        self.certificate = self._judged(self.best)
        if self.confirmed:
            self.certificate = self.judging.confirmed(self.best, self.confirmations)

    def until(
        self,
        max_gradients: int | None,
        max_seconds: float | None,
        callback: Callable[[Solution], Any] | None,
        checkpoint: str | Path | None,
        bar: Progress,
    ) -> Callable[[], Status]:
        """Run until something ends it: what to say then, if the answer is not certified."""
        # A 32-bit counter of gradients, which is what JAX has without x64, ends somewhere.
        countable = int(jnp.iinfo(self.state.gradients.dtype).max) // 2
        most = countable if max_gradients is None else min(int(max_gradients), countable)
        seconds_before, why_not = self.seconds, ""
        try:
            while True:
                if self._confirmed():
                    return self._certified
                done, finite = self._to_next_check(most, max_seconds, seconds_before, bar)
                if not finite:
                    return partial(self._not_finite, most)
                done &= not self._look()
                certified = self._confirmed()  # before anyone is shown it
                bar.show(self.gradients, self.certificate.epsilon)
                if checkpoint is not None:
                    save_or_warn(checkpoint, self.snapshot())
                stop = callback is not None and _asks_to_stop(callback(self.solution(RUNNING)))
                if certified:
                    return self._certified
                if stop:
                    return partial(self._interrupted, "Stopped by the callback.")
                no_room = self.gradients + self.solver.gradients_per_step > most
                late = self._late(max_seconds, seconds_before)
                stalled = self._stalled()
                gives_up = isinstance(self.solver, Adaptive) and (done or stalled)
                if gives_up and not (no_room or late) and not (why_not := self._falls_back()):
                    continue
                if done:
                    return partial(self._stopped_itself, why_not)
                if no_room:
                    return partial(self._spent, f"max_gradients={most}")
                if late:
                    return partial(self._spent, f"max_seconds={max_seconds:g}")
                if stalled:
                    return partial(self._has_stalled, why_not)
        except KeyboardInterrupt:
            return partial(self._interrupted, "Interrupted.")

    def concluded(self, ended: Callable[[], Status]) -> Status:
        """How it ended; from samples, once others have said what the best point is worth."""
        if not (self.judging.exact or self.confirmed):
            self._confirm()
            if self._holds(self.certificate):
                return self._certified()
        return ended()

    def _to_next_check(
        self, most: int, max_seconds: float | None, seconds_before: float, bar: Progress
    ) -> tuple[bool, bool]:
        """Pieces of steps up to the next check; whether the method is done, and all is finite."""
        while True:
            mark = min(self.next_check, most)
            limit = min(mark, self.gradients + self.piece)
            begun, before = time.perf_counter(), self.gradients
            state, done, finite = self._advanced(limit)
            done, finite = bool(done), bool(finite)  # waits for the piece
            taken = time.perf_counter() - begun
            if not finite:
                return done, False
            self.state = state
            self.state = self._refilled(state)  # which may fail: what was done until here stays
            if self.together:
                self.piece = 1 << 30  # no process may go by its own clock
            elif self.gradients > before and self.gradients - before >= self.piece // 2:
                grow = np.clip(PIECE_SECONDS / max(taken, 1e-6), 0.25, 4.0)
                self.piece = int(np.clip(self.piece * grow, 8, 1 << 30))
            bar.show(self.gradients, self.certificate.epsilon)
            over = self._late(max_seconds, seconds_before)
            reached = self.gradients + self.solver.gradients_per_step > mark
            if reached and self.next_check <= most:
                following = math.ceil(self.next_check * CHECK_GROWTH)
                self.next_check = max(following, self.next_check + self.between)
            elif self.gradients == before and not done and not reached:
                self.piece *= 2  # one step needs more gradients than a piece had room for
            if done or over or reached:
                return done, True

    def _late(self, max_seconds: float | None, seconds_before: float) -> bool:
        if max_seconds is None:
            return False
        late = self.seconds - seconds_before > max_seconds
        if not self.together:
            return late
        from jax.experimental.multihost_utils import broadcast_one_to_all

        return bool(broadcast_one_to_all(np.asarray(late)))

    def _advanced(self, limit: int) -> tuple[Any, Any, Any]:
        """Steps up to `limit` gradients in all."""
        own = jnp.asarray(limit - self.earlier)
        return _advance(self.solver, self.problem, self.state, own)

    def _look(self) -> bool:
        """Judge the current point, keep it if it is the best, and record what was seen.

        Says whether the multiplier bounds have just grown, and the solver begun anew from here.
        """
        if self.looked_at == self.gradients:
            return False
        self.looked_at = self.gradients
        point = _output(self.solver, self.problem, self.state)
        stated = self._stated_point(point)
        certificate = self._judged(stated)
        self.check_gradients += self.judging.cost
        if self._excess(certificate) <= self._excess(self.certificate):
            self.best, self.certificate, self.confirmed = stated, certificate, False
        self._record(certificate)
        # Only looks on the schedule count for the bounds: one at the end of a budget must leave no
        # trace in a run that is then resumed.
        scheduled = self.next_check > self.watched_at
        if self.lift is None or not scheduled or self._holds(certificate):
            return False
        self.watched_at = self.next_check
        before = self.lift
        self.lift = watched(before, self.stated, point, self.gradients)
        if self.lift.bounds is before.bounds:
            return False
        if self.solver.keeps_state:
            self.lift = dataclasses.replace(self.lift, gradients=before.gradients)
            self.problem = lagrangian(self.stated, self.lift.bounds)
            return True
        self._build()
        begin = bilevel_point(stated, self.lift.bounds)
        self.state = _init(self.solver, self.problem, begin)
        return True

    def _record(self, certificate: Certificate) -> None:
        row = {"gradients": self.gradients, "seconds": self.seconds} | certificate.as_dict()
        for name, value in row.items():
            self.history.setdefault(name, []).append(value)

    def _stalled(self) -> bool:
        if self.solver.in_stages:
            return False
        rows = zip(self.history["gradients"], self.history["epsilon"])
        since = self.fell_back_at or 0
        rows = [(g - since, e) for g, e in rows if g >= since]
        counts, seen = [g for g, _ in rows], [e for _, e in rows]
        early = [e for g, e in rows if g * STALL_SPAN <= counts[-1]]
        late = seen[len(early) :]
        if counts[-1] < STALL_LEAST or len(set(late)) < STALL_MOVES or not early:
            return False
        return min(late) > (1 - STALL_SHARE) * min(early)

    def _so_far(self) -> str:
        return (
            f"The best point is certified at ε = {self.certificate.epsilon:.3g} only, not "
            f"{self._wanted() if self.relative else f'at {self.tolerance:g}'}, after "
            f"{self.gradients:,} gradients.{self._fallen()}"
        )

    def _advice(self) -> str:
        lines = self.certificate.lines()
        worst = max(lines, key=lambda name: lines[name])
        if worst in ("gap", "lower_gap"):
            return f"What keeps it is the lower-level gap; {self._tighter()}, or a larger rho."
        return f"What keeps it is {worst}; {self._tighter()}, or look at problem.check(start)."

    def _tighter(self) -> str:
        """The call to try next: the theorem promises a multiple of ε, not ε itself."""
        if isinstance(self.solver, PenaltyMethod):
            return f"try solver=bilevax.PenaltyMethod(epsilon={float(self.solver.epsilon) / 4:g})"
        if isinstance(self.solver, Adaptive):
            return (
                "try another start, or solver=bilevax.Adaptive(rho=…) with a larger first penalty"
            )
        return "try a smaller tolerance for the solver"

    def _certified(self) -> Status:
        sure = ""
        if isinstance(self.certificate, SampledCertificate):
            sure = f", with probability {self.certificate.confidence:g} over the samples looked at,"
        return Status(
            "certified",
            f"Certified: ε = {self.certificate.epsilon:.3g} {self._wanted()}{sure} after "
            f"{self.gradients:,} gradients.{self._fallen()}",
        )

    def _wanted(self) -> str:
        if self.relative:
            return f"within {self.tolerance:g} + {self.relative:g}·size on every line"
        return f"≤ {self.tolerance:g}"

    def _fallen(self) -> str:
        """Which method the answer is of, where it is not the one that was asked."""
        if self.fell_back_at is None:
            return ""
        return (
            f" Adaptive made no progress any more after {self.fell_back_at:,} of them; since then "
            "the paper's method went on, with its safe constants."
        )

    def _spent(self, what: str) -> Status:
        return Status(
            "budget spent",
            f"The budget {what} is spent. {self._so_far()} Give a larger one, which resume="
            "solution.state can go on with.",
        )

    def _stopped_itself(self, why_not: str = "") -> Status:
        return Status(
            "stalled",
            f"{type(self.solver).__name__}'s own stopping test holds. {self._so_far()} "
            f"{self._advice()}{why_not}",
        )

    def _has_stalled(self, why_not: str) -> Status:
        return Status(
            "stalled",
            f"Stalled: ε has not fallen since {self.gradients / STALL_SPAN:.0f} gradients. "
            f"{self._so_far()} {self._advice()}{why_not}",
        )

    def _interrupted(self, how: str) -> Status:
        return Status("interrupted", f"{how} {self._so_far()}")

    def _not_finite(self, most: int) -> Status:
        limit = min(self.next_check, most, self.gradients + self.piece)
        output = lambda state: self._stated_point(self.solver.output(self.problem, state))
        where, self.state = where_not_finite(
            self.judging.problem, output, self._advanced, self.state, self.gradients, limit
        )
        return Status("not finite", f"Not finite: {where}. {self._so_far()}")

    def solution(self, status: Status) -> Solution:
        columns = {name: np.asarray(column) for name, column in self.history.items()}
        return Solution(
            status=status,
            point=self.best,
            certificate=self.certificate,
            tolerance=self.tolerance,
            relative_tolerance=self.relative,
            gradients=self.gradients,
            check_gradients=self.check_gradients,
            seconds=self.seconds,
            compile_seconds=self.compile_seconds,
            history=History(columns),
            solver=self.solver,
            state=self.snapshot(),
        )


def _slope(problem: Any, start: Point) -> float:
    """The size of slopes at the start; 1 if there is none."""
    if isinstance(problem, BilevelProblem):
        start = penalty_point(*penalty_blocks(start))
    elif isinstance(problem, ConstrainedBilevelProblem):
        start = dataclasses.replace(start, z=start.y)
    sizes = line_sizes(problem, start)
    slope = float(sizes["x" if isinstance(problem, MinimaxProblem) else "stationarity"])
    return slope if math.isfinite(slope) and slope > 0 else 1.0


def _asks_to_stop(answer: Any) -> bool:
    """Whether a callback returned True, of whatever library; None and other answers go on."""
    return np.ndim(answer) == 0 and np.asarray(answer).dtype == bool and bool(answer)


def save_or_warn(path: str | Path, state: RunState) -> None:
    """A checkpoint that cannot be written, on a full disk say, must not cost the run.

    Of several processes the first writes it; all can read it, where they share the folder.
    """
    if jax.process_index() > 0:
        return
    try:
        save(path, state)
    except OSError as error:
        warn(f"the checkpoint {path} could not be written: {error}", RuntimeWarning)


class Progress:
    """A line that shows gradients and ε, on a terminal; nothing elsewhere."""

    def __init__(self, wanted: bool | None, total: int | None):
        if wanted is None:
            wanted = sys.stderr.isatty() and not os.environ.get("CI")
        self.bar = None
        if wanted:
            from tqdm import tqdm

            self.bar = tqdm(total=total, unit=" gradients", unit_scale=True, desc="bilevax")

    def show(self, gradients: int, epsilon: float) -> None:
        if self.bar is not None:
            self.bar.set_postfix_str(f"ε = {epsilon:.3g}", refresh=False)
            self.bar.update(gradients - self.bar.n)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()
