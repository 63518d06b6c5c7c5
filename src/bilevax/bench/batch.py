"""Several problems of one shape in one compiled loop, by `vmap`, where that is faster."""

from __future__ import annotations

import time
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from bilevax.driver.limits import Clock, Limits
from bilevax.driver.loop import Run
from bilevax.driver.pieces import Piece, piece_of_steps
from bilevax.driver.solution import Solution, Status
from bilevax.programs import optimised, quick
from bilevax.solvers import Solver, Task
from bilevax.solvers.composite import composed


class ShareClock(Clock):
    """Each run's part of the time that all of them took together."""

    def __init__(self) -> None:
        super().__init__()
        self.share = 0.0

    @property
    def seconds(self) -> float:
        return self.share


def stacked(several: list[Any]) -> Any:
    """Trees of one structure as one tree whose arrays have a first axis more."""
    numeric = lambda leaf: isinstance(leaf, jax.Array | np.ndarray)
    join = lambda *parts: jnp.stack(parts) if numeric(parts[0]) else parts[0]
    return jax.tree.map(join, *several)


_stacked = quick(stacked)


@optimised
def _pieces(solver: Solver, problem: Any, states: list[Any], limits: Any) -> list[Piece]:
    """A piece of steps for every problem."""
    pieces = eqx.filter_vmap(piece_of_steps)(solver, problem, stacked(states), limits)
    return [jax.tree.map(lambda leaf, i=i: leaf[i], pieces) for i in range(len(states))]


def solve_batch(tasks: list[Task], solvers: list[Solver], max_seconds: float) -> list[Solution]:
    """What `solve` does for one problem, for all in step.

    Every run has the checks of a run alone; one that has ended waits for the others.
    """
    begun = time.perf_counter()
    runs = [
        Run(task, composed(solver, task.problem), Limits(max_seconds=max_seconds))
        for task, solver in zip(tasks, solvers)
    ]
    clocks = [ShareClock() for _ in runs]
    for run, clock in zip(runs, clocks):
        run.clock = clock
    fixed = _stacked([(run.solver, run.task.problem) for run in runs])
    arguments = lambda limits: (*fixed, [run.state for run in runs], np.asarray(limits))
    jax.block_until_ready(_pieces(*arguments([0] * len(runs))))
    for run in runs:
        run.compile_seconds = (time.perf_counter() - begun) / len(runs)
    ended: dict[int, Status] = {}
    while len(ended) < len(runs):
        going = [i for i in range(len(runs)) if i not in ended]
        begun = time.perf_counter()
        limits = [run.limit() if i in going else 0 for i, run in enumerate(runs)]
        pieces = _pieces(*arguments(limits))
        jax.block_until_ready(pieces)
        seconds = time.perf_counter() - begun
        for i in going:
            status = runs[i].receive(pieces[i], seconds)
            if status is not None:
                ended[i] = status
        for i in going:
            clocks[i].share += (time.perf_counter() - begun) / len(going)
    return [run.solution(ended[i]) for i, run in enumerate(runs)]
