"""The only loop on the host: compiled pieces of steps, and between them what a person sees.

Nothing here knows a solver or a problem form by name.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from bilevax.driver import schedule, sentences
from bilevax.driver.checkpoint import RunState, fingerprint, save_or_warn
from bilevax.driver.handover import relief, review
from bilevax.driver.judging import Judge, Verdicts
from bilevax.driver.kinks import kink
from bilevax.driver.limits import Clock, Limits, is_true
from bilevax.driver.nonfinite import where_not_finite
from bilevax.driver.pieces import Piece, compile_first, first_piece, is_quick, next_steps, refilled
from bilevax.driver.runaway import runaway
from bilevax.driver.solution import Solution, Status
from bilevax.problems import Point
from bilevax.programs import compile_seconds
from bilevax.progress import Progress
from bilevax.solvers.base import Solver, Task, initial

RUNNING = Status("running", "Still running.")


class Run:
    """One run of a solver on a problem.

    `limit` says how far the next piece of steps may go, and `receive` takes it: then the run has
    ended, with a status, or goes on. `advanced` computes the piece; so can somebody else, who runs
    several at once.
    """

    def __init__(self, task: Task, solver: Solver, limits: Limits | None = None):
        self.task, self.asked, self.limits = task, solver, limits or Limits()
        self.bar = Progress(False, unit="gradients")
        self.callback: Callable[[Solution], Any] | None = None
        self.checkpoint: str | Path | None = None
        self.look_around = True
        self.solver = solver.prepared_for(task)
        judge = Judge.of(task)
        self.schedule = schedule.Schedule(judge.weight)
        self.earlier, self.earlier_solves, self.refused = 0, 0, ""
        self.fell_back_at: int | None = None
        begun = time.perf_counter()
        state = initial(self.solver, task.problem, task.start)
        self.state = refilled(self.solver, task.problem, state)
        compile_first(self.solver, self._place[0], self.state, judge)
        self.verdicts = Verdicts(judge, self._compiled().point)
        self.compile_seconds = time.perf_counter() - begun
        self.piece, self.output = first_piece(*self._place[:2]), self.verdicts.best
        self.kind, self.clock = self._kind, Clock()
        self.limits.begin(self.clock, self.state.gradients)
        self.fingerprint = fingerprint(task.problem, self.solver, task.start)
        self.checked_at, self.reviewed_at = (0, False), self.schedule.next_check
        self.first_method = self.solver.part
        self.verdicts.record(self.verdicts.certificate, self.gradients, self.clock.seconds)

    @property
    def gradients(self) -> int:
        return self.earlier + int(self.state.gradients)

    @property
    def linear_solves(self) -> int:
        return self.earlier_solves + int(self.solver.linear_solves(self.state))

    def until_ended(self) -> Status:
        """Steps until something ends the run: how it ended."""
        try:
            status = self._concluded() if self.verdicts.confirm() else None
            while status is None:
                status = self.receive(*self.advanced(self.limit()))
            # What the best point is worth, where samples have chosen it.
            self.verdicts.ask_other_samples()
        except KeyboardInterrupt:
            return sentences.interrupted(self.summary, "Interrupted.")
        return sentences.certified(self.summary) if self.verdicts.holds else status

    def limit(self) -> int:
        """How many gradients the run may have after the next piece."""
        return min(self._mark, self.gradients + self.piece)

    def advanced(self, limit: int) -> tuple[Piece, float]:
        """A piece of steps up to `limit` gradients in all, and the seconds that it took."""
        self._leave_out_compilation()
        begun = time.perf_counter()
        piece = jax.block_until_ready(self._steps(limit))
        return piece, time.perf_counter() - begun

    def receive(self, piece: Piece, seconds: float) -> Status | None:
        """Take a piece, and check the run where that is due: how it ended, if it did."""
        if not bool(piece.finite):
            return self._not_finite()
        before, done = self.gradients, bool(piece.done)
        self.state, self.output = piece.state, piece.point
        # This may fail: what was done stays.
        self.state = refilled(self.solver, self.task.problem, piece.state)
        step = self.solver.gradients_per_step
        self.piece = schedule.next_piece(self.piece, self.gradients - before, seconds, step)
        self._show()
        reached = self.gradients + step > self._mark
        if reached and not self._no_review:
            self.schedule.check_passed()
        elif self.gradients == before and not done and not reached:
            self.piece *= 2  # one step needs more gradients than a piece had room for
        due = done or reached or bool(piece.ready) or self.limits.late(self.clock)
        return self._check(piece, done) if due else None

    def _check(self, piece: Piece, done: bool) -> Status | None:
        done &= not self._judge(piece)
        look = schedule.longest_look(self.gradients, self.solver.provisional)
        holds = self.verdicts.confirm(look, lambda: self.limits.late(self.clock))
        status = self._concluded() if holds else None  # before anyone is shown it
        self._show()
        if self.checkpoint is not None:
            save_or_warn(self.checkpoint, self.snapshot())
        stop = self.callback is not None and is_true(self.callback(self.solution(RUNNING)))
        if status is None and stop:
            return sentences.interrupted(self.summary, "Stopped by the callback.")
        if holds:
            return status
        if away := runaway(self.task.problem, self.task.start, piece.point):
            return sentences.unbounded(self.summary, away)
        step = self.solver.handover_gradients if done else self.solver.gradients_per_step
        no_room = self.gradients + step > (self._mark if self._no_review else self.limits.most)
        late, stalled = self.limits.late(self.clock), self._stalled()
        ended = (done or stalled) and not (no_room or late)
        wrong = ended and not self.solver.in_passing
        if wrong and (jump := kink(self.verdicts.judge.problem, piece.point)):
            return sentences.kinked(self.summary, jump)
        if ended and self._fall_back(piece.point):
            return None
        if done and not (self.solver.in_passing and (no_room or late)):
            return sentences.stopped_itself(self.summary)
        if no_room:
            return sentences.budget_spent(self.summary, f"max_gradients={self.limits.most}")
        if late:
            return sentences.budget_spent(self.summary, f"max_seconds={self.limits.max_seconds:g}")
        return sentences.stalled(self.summary) if stalled else None

    def _concluded(self) -> Status | None:
        """The end at a certified point, unless its certificate is withdrawn.

        Where F falls nearby, the run goes on from there: then there is none.
        """
        begun = time.perf_counter()
        self.verdicts.compile_examination(self.look_around)
        self._leave_out(time.perf_counter() - begun)
        self.verdicts.examine(self.gradients, self.look_around, self.task.start)
        if self.verdicts.holds:
            return sentences.certified(self.summary)
        if not self.verdicts.may_leave:
            return sentences.withdrawn(self.summary)
        start = self.verdicts.leave(self.gradients)
        task = dataclasses.replace(self.task, start=start)
        self._begin_anew(self.asked.prepared_anew(self.solver, task, self.state), start)
        self.fell_back_at = None
        self.schedule.postpone(self.gradients)
        return None if not self.verdicts.confirm() else self._concluded()

    def _judge(self, piece: Piece) -> bool:
        """Judge the current point. Says whether the solver sees another problem since then."""
        here, holds = (self.gradients, bool(piece.ready)), False
        if self.checked_at != here:  # a resumed run has judged where it begins
            self.checked_at = here
            certificate = self.verdicts.add(piece.point, self.gradients, self.clock.seconds)
            holds = self.verdicts.judge.holds(certificate)
        # Only checks on the schedule count for the solver: one at the end of a budget must leave no
        # trace in a run that is then resumed.
        scheduled = self.schedule.next_check > self.reviewed_at
        if not scheduled or holds:
            return False
        self.reviewed_at = self.schedule.next_check
        found = review(self.asked, self.solver, self.task, self.state, piece.signals)
        self._leave_out(found.compile_seconds)
        if found.state is None:
            self._begin_anew(found.solver, piece.point)
        else:
            self.solver, self.state = found.solver, found.state
        if found.ready and not bool(piece.ready):
            self.verdicts.add(self._compiled().point, self.gradients, self.clock.seconds)
        return found.changed

    def _stalled(self) -> bool:
        part, since = self.solver.part, self.fell_back_at or 0
        seen = (self.verdicts.history, since, part.has_theorem)
        return not part.in_stages and schedule.history_stalled(*seen)

    def _fall_back(self, last: Point) -> bool:
        """Let another method go on where this one does not, if there is one."""
        begun, before = time.perf_counter(), compile_seconds()
        try:
            points = (self.verdicts.best, last)
            following, start = relief(self.asked, self.solver, self.task, *points, self.state)
        except ValueError as error:
            self.refused = sentences.cannot_follow(error)
            return False
        if following is None:
            return False
        self.take_over(following, start)
        self._leave_out(min(time.perf_counter() - begun, compile_seconds() - before))
        self.schedule.postpone(self.gradients)
        return True

    def _leave_out_compilation(self) -> None:
        """Compile, off the clock, where the next steps need another program than the last ones."""
        if self._kind != self.kind:
            begun = time.perf_counter()
            self._compiled()
            self._leave_out(time.perf_counter() - begun)
            self.kind = self._kind

    def _leave_out(self, seconds: float) -> None:
        """No limit counts the seconds of compilation."""
        self.compile_seconds += seconds
        self.clock.leave_out(seconds)

    @property
    def _kind(self) -> tuple[Any, bool]:
        """What decides on the program."""
        return jax.tree.structure(self.solver), is_quick(self.solver, *self._place)

    @property
    def _place(self) -> tuple[Any, Any, int]:
        return self.solver.view(self.task.problem), self.state, self.earlier

    def take_over(self, following: Solver, start: Point) -> None:
        self.first_method = self.solver if self.solver.in_passing else self.solver.part
        self.fell_back_at = self.gradients
        self._begin_anew(following, start)

    def _begin_anew(self, solver: Solver, start: Point) -> None:
        problem = self.task.problem
        state = refilled(solver, problem, initial(solver, problem, start))
        # All at once: an interruption before this leaves the run as it was.
        self.earlier, self.earlier_solves = self.gradients, self.linear_solves
        self.solver, self.state, self.output = solver, state, start

    def _not_finite(self) -> Status:
        at, broken, problem = self.gradients, self.limit(), self.verdicts.judge.problem
        where, last = where_not_finite(problem, self._steps, self._steps(at), at, broken)
        self.state, self.output = last.state, last.point
        if away := runaway(self.task.problem, self.task.start, last.point):
            return sentences.unbounded(self.summary, away)
        return sentences.not_finite(self.summary, where)

    @property
    def _mark(self) -> int:
        """The gradients at which the next check is due, or the budget ends."""
        return min(self.schedule.next_check, self.limits.most)

    @property
    def _no_review(self) -> bool:
        """Whether the budget has no room for the next check's review: a resumed run has it."""
        most = self.schedule.next_check + self.solver.review_gradients(self.state)
        return most > self.limits.most

    def _steps(self, limit: int) -> Piece:
        return next_steps(self.solver, *self._place, limit)

    def _compiled(self) -> Piece:
        """A piece without a step: what it takes is compilation."""
        return jax.block_until_ready(self._steps(self.gradients))

    def _show(self) -> None:
        self.bar.show(self.gradients, ε=f"{self.verdicts.certificate.epsilon:.3g}")

    @property
    def summary(self) -> sentences.Summary:
        """What the sentences about the run are made of."""
        return sentences.Summary.of(self)

    def snapshot(self) -> RunState:
        """Where the run stands."""
        return RunState(
            solver=self.solver,
            solver_state=self.state,
            next_check=self.schedule.next_check,
            seconds=self.clock.seconds,
            fingerprint=self.fingerprint,
            earlier=self.earlier,
            earlier_solves=self.earlier_solves,
            stage=self.solver.stage,
            fell_back_at=self.fell_back_at,
            **self.verdicts.saved(),
        )

    def solution(self, status: Status) -> Solution:
        """What the run returns if it ends now."""
        counts = {"gradients": self.gradients, "linear_solves": self.linear_solves}
        judged = (self.snapshot(), status, self.verdicts.certificate, self.task, self.output)
        return Solution.of(*judged, **counts, compile_seconds=self.compile_seconds)
