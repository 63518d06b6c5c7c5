"""Solvers made of others: one after another, one through a reformulation, one on many problems."""

from __future__ import annotations

import dataclasses
from typing import Any

import equinox as eqx
from jaxtyping import Array

from bilevax.problems import Form, Point, Reformulation, registered
from bilevax.programs import quick
from bilevax.solvers.base import Solver, Task
from bilevax.trees import Tree


class Sequence(Solver[Any]):
    """Some solvers one after another: each until it gives up, the next one from the best point.

    One that `begins_anew` begins at the start.

    `Sequence(Adaptive(), PenaltyMethod())` lets the paper's method, with its safe constants, go on
    where the other one stalls: it may take 10⁷ gradients and more (`bilevax.theory`).
    """

    solvers: tuple[Solver, ...]
    at: int = eqx.field(static=True)
    prepared: Solver | None

    def __init__(self, *solvers: Solver, at: int = 0, prepared: Solver | None = None):
        if not solvers:
            raise ValueError("Sequence: give at least one solver")
        self.solvers, self.at, self.prepared = solvers, at, prepared

    @property
    def form(self) -> type[Form]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._now.form

    @property
    def _now(self) -> Solver:
        return self.solvers[self.at] if self.prepared is None else self.prepared

    @property
    def part(self) -> Solver:
        return self._now.part

    @property
    def gradients_per_step(self) -> int:
        return self._now.gradients_per_step

    def review_gradients(self, state: Any) -> int:
        return self._now.review_gradients(state)

    def _with(self, now: Solver, at: int) -> Sequence:
        return Sequence(*self.solvers, at=at, prepared=now)

    def prepare(self, problem: Any, start: Point, tolerance: float) -> Sequence:
        return self.prepared_for(Task(problem, start, tolerance))

    def prepared_for(self, task: Task) -> Sequence:
        return self._with(self.solvers[self.at].prepared_for(task), self.at)

    @property
    def stage(self) -> tuple:
        return (self.at, *self._now.stage)

    def prepared_at(self, stage: tuple, task: Task) -> Sequence:
        at, *rest = stage
        return self._with(self.solvers[at].prepared_at(tuple(rest), task), at)

    # What is asked of a sequence is in the prepared one, too.

    def prepared_again(self, prepared: Sequence, task: Task) -> Sequence:
        return prepared.prepared_for(task)

    def relieved(self, prepared: Sequence, task: Task, state: Any) -> Sequence | None:
        """The next one that takes the problem; why the last one does not, if none does."""
        refusal = None
        for at in range(prepared.at + 1, len(prepared.solvers)):
            try:
                return prepared._with(prepared.solvers[at].prepared_for(task), at)
            except ValueError as error:
                refusal = error
        if refusal is not None:
            raise refusal
        return None

    def prepared_anew(self, prepared: Sequence, task: Task, state: Any) -> Sequence:
        asked = prepared.solvers[prepared.at]
        return prepared._with(asked.prepared_anew(prepared._now, task, state), prepared.at)

    def reviewed(
        self, prepared: Sequence, task: Task, state: Any, signals: Tree
    ) -> tuple[Sequence, Any, bool]:
        asked = prepared.solvers[prepared.at]
        now, state, changed = asked.reviewed(prepared._now, task, state, signals)
        return prepared._with(now, prepared.at), state, changed

    def init(self, problem: Any, start: Point) -> Any:
        return self._now.init(problem, start)

    def step(self, problem: Any, state: Any, limit: Array) -> Any:
        return self._now.step(problem, state, limit)

    def advance(self, problem: Any, state: Any, limit: Array) -> Any:
        return self._now.advance(problem, state, limit)

    def done(self, problem: Any, state: Any) -> Array:
        return self._now.done(problem, state)

    def is_ready(self, problem: Any, state: Any) -> Array:
        return self._now.is_ready(problem, state)

    def linear_solves(self, state: Any) -> Any:
        return self._now.linear_solves(state)

    def output(self, problem: Any, state: Any) -> Point:
        return self._now.output(problem, state)

    def cut_short(self, state: Any) -> Any:
        return self._now.cut_short(state)

    def output_index(self, state: Any) -> Any:
        return self._now.output_index(state)

    def signals(self, problem: Any, state: Any) -> Tree:
        return self._now.signals(problem, state)

    def stream(self, state: Any) -> Any:
        return self._now.stream(state)

    def with_stream(self, state: Any, stream: Any) -> Any:
        return self._now.with_stream(state, stream)


class ReformulatedState(eqx.Module):
    """The state of the inner solver, and the reformulation through which it sees the problem."""

    inner: Any
    reformulation: Reformulation

    @property
    def gradients(self) -> Array:
        return self.inner.gradients


class Reformulated(Solver[ReformulatedState]):
    """A solver of one form on a problem of another.

    The reformulation may change in a run, as the bounds of multipliers do when they grow. Then the
    inner solver goes on from its state if it can, or begins anew.
    """

    inner: Solver
    kind: type[Reformulation] = eqx.field(static=True)
    first: Reformulation | None = None

    @property
    def form(self) -> type[Form]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return Form

    @property
    def takes_samples(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.inner.takes_samples

    @property
    def draws_per_step(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.inner.draws_per_step

    @property
    def part(self) -> Solver:
        return self.inner.part

    @property
    def gradients_per_step(self) -> int:
        return self.inner.gradients_per_step

    def review_gradients(self, state: ReformulatedState) -> int:
        return self.inner.review_gradients(state.inner)

    def prepare(self, problem: Any, start: Point, tolerance: float) -> Reformulated:
        return self.prepared_for(Task(problem, start, tolerance))

    def prepared_for(self, task: Task) -> Reformulated:
        first = self.kind.of(task.problem, task.start)
        inner = self.inner.prepared_for(_seen(task, first))
        return Reformulated(inner, self.kind, first)

    @property
    def stage(self) -> tuple:
        return self.inner.stage

    def prepared_at(self, stage: tuple, task: Task) -> Reformulated:
        first = self.kind.of(task.problem, task.start)
        inner = self.inner.prepared_at(stage, _seen(task, first))
        return Reformulated(inner, self.kind, first)

    def chosen_for(self, task: Task) -> Reformulated:
        first = self.kind.of(task.problem, task.start)
        return Reformulated(self.inner.chosen_for(_seen(task, first)), self.kind)

    def relieved(
        self, prepared: Reformulated, task: Task, state: ReformulatedState
    ) -> Reformulated | None:
        now = state.reformulation
        inner = self.inner.relieved(prepared.inner, _seen(task, now), state.inner)
        return None if inner is None else Reformulated(inner, self.kind, now)

    def prepared_anew(
        self, prepared: Reformulated, task: Task, state: ReformulatedState
    ) -> Reformulated:
        now = state.reformulation
        inner = self.inner.prepared_anew(prepared.inner, _seen(task, now), state.inner)
        return Reformulated(inner, self.kind, now)

    def reviewed(
        self, prepared: Reformulated, task: Task, state: ReformulatedState, signals: Tree
    ) -> tuple[Reformulated, ReformulatedState | None, bool]:
        own, its = signals
        new, changed = state.reformulation.reviewed(task.problem, own)
        state = dataclasses.replace(state, reformulation=new)
        if not changed:
            seen = _seen(task, new)
            inner, its, other = self.inner.reviewed(prepared.inner, seen, state.inner, its)
            kept = None if its is None else dataclasses.replace(state, inner=its)
            return Reformulated(inner, self.kind, new), kept, other
        if prepared.part.keeps_state:
            return prepared, state, True
        inner = self.inner.prepared_again(prepared.inner, _seen(task, new))
        return Reformulated(inner, self.kind, new), None, True

    def init(self, problem: Any, start: Point) -> ReformulatedState:
        assert self.first is not None
        seen = self.first.problem(problem)
        return ReformulatedState(self.inner.init(seen, self.first.point(start)), self.first)

    def step(self, problem: Any, state: ReformulatedState, limit: Array) -> ReformulatedState:
        seen = state.reformulation.problem(problem)
        return dataclasses.replace(state, inner=self.inner.step(seen, state.inner, limit))

    def advance(self, problem: Any, state: ReformulatedState, limit: Array) -> ReformulatedState:
        seen = state.reformulation.problem(problem)
        return dataclasses.replace(state, inner=self.inner.advance(seen, state.inner, limit))

    def done(self, problem: Any, state: ReformulatedState) -> Array:
        return self.inner.done(state.reformulation.problem(problem), state.inner)

    def is_ready(self, problem: Any, state: ReformulatedState) -> Array:
        return self.inner.is_ready(state.reformulation.problem(problem), state.inner)

    def linear_solves(self, state: ReformulatedState) -> Any:
        return self.inner.linear_solves(state.inner)

    def _inner_output(self, problem: Any, state: ReformulatedState) -> Point:
        return self.inner.output(state.reformulation.problem(problem), state.inner)

    def output(self, problem: Any, state: ReformulatedState) -> Point:
        return state.reformulation.stated_point(self._inner_output(problem, state))

    def cut_short(self, state: ReformulatedState) -> Any:
        return self.inner.cut_short(state.inner)

    def output_index(self, state: ReformulatedState) -> Any:
        return self.inner.output_index(state.inner)

    def signals(self, problem: Any, state: ReformulatedState) -> Tree:
        own = state.reformulation.signals(self._inner_output(problem, state))
        seen = state.reformulation.problem(problem)
        return own, self.inner.signals(seen, state.inner)

    def stream(self, state: ReformulatedState) -> Any:
        return self.inner.stream(state.inner)

    def with_stream(self, state: ReformulatedState, stream: Any) -> ReformulatedState:
        return dataclasses.replace(state, inner=self.inner.with_stream(state.inner, stream))


@quick
def _point(reformulation: Reformulation, start: Point) -> Point:
    return reformulation.point(start)


def _seen(task: Task, reformulation: Reformulation) -> Task:
    """What is asked of the inner solver."""
    problem, start = reformulation.problem(task.problem), _point(reformulation, task.start)
    return dataclasses.replace(task, problem=problem, start=start)


def composed(solver: Solver, problem: Form) -> Solver:
    """A solver on the problem itself, or through its reformulation."""
    if isinstance(problem, solver.form):
        return solver
    kind = registered(problem, "reformulation")
    if kind is None or not issubclass(kind.form, solver.form):
        raise TypeError(
            f"{type(solver).__name__} solves a {solver.form.__name__}, not a "
            f"{type(problem).__name__}"
        )
    return Reformulated(solver, kind)
