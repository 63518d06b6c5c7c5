"""What a solver makes of a check: a review of its state, or another method that goes on."""

from __future__ import annotations

import dataclasses
import time
from typing import Any, NamedTuple

import jax

from bilevax.problems import Point
from bilevax.programs import compile_seconds
from bilevax.solvers.base import Solver, Task
from bilevax.trees import Tree


class Review(NamedTuple):
    """What to go on with after a scheduled check; without a state, from the point itself."""

    solver: Solver
    state: Any
    changed: bool  # whether the solver sees another problem now
    ready: bool  # whether it asks for a check of where the review led
    compile_seconds: float


def review(asked: Solver, prepared: Solver, task: Task, state: Any, signals: Tree) -> Review:
    begun, before = time.perf_counter(), compile_seconds()
    solver, state, changed = asked.reviewed(prepared, task, state, jax.device_get(signals))
    ready = state is not None and bool(solver.is_ready(task.problem, state))
    compiling = min(time.perf_counter() - begun, compile_seconds() - before)
    return Review(solver, state, changed, ready, compiling)


def relief(
    asked: Solver, prepared: Solver, task: Task, best: Point, last: Point, state: Any
) -> tuple[Solver | None, Point]:
    """The method that goes on, if there is one, and where: from the best point, or anew.

    Where it goes on by plan, it does so from the last point, and the same method never anew.
    """
    best = last if prepared.in_passing else best
    following = asked.relieved(prepared, dataclasses.replace(task, start=best), state)
    if following is None or not following.part.begins_anew:
        return following, best
    if following.part.title == prepared.part.title:
        return following, best
    return asked.relieved(prepared, task, state), task.start  # with constants from there, too
