"""Pieces: some steps of a solver in one call of a compiled program."""

from __future__ import annotations

from typing import Any, NamedTuple

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Array

from bilevax import trees
from bilevax.certificates.definition import compile_judge
from bilevax.driver import schedule
from bilevax.driver.judging import Judge
from bilevax.problems import Point
from bilevax.programs import Program, entries, optimised, quick, steady
from bilevax.solvers.base import Solver
from bilevax.trees import Tree


class Piece(NamedTuple):
    """Where some steps ended: the state, and whether the method is done, or asks for a check."""

    state: Any
    done: Array
    ready: Array
    finite: Array  # whether all numbers are
    point: Point
    signals: Tree


def piece_of_steps(solver: Solver, problem: Any, state: Any, limit: Array) -> Piece:
    """Steps up to `limit` gradients."""
    state = solver.advance(problem, state, limit)
    done, ready = solver.done(problem, state), solver.is_ready(problem, state)
    finite = trees.all_finite(state)
    return Piece(
        state, done, ready, finite, solver.output(problem, state), solver.signals(problem, state)
    )


# Steps with a state of more entries than this are in loops over large arrays.
STEADY_ENTRIES = 1000

_quick_steps, _optimised_steps = quick(piece_of_steps), optimised(piece_of_steps)
_steady_steps = steady(piece_of_steps)


def _quick_mark(problem: Any, state: Any) -> int:
    return schedule.quick_gradients(entries((problem, state)))


def _first_steps(state: Any) -> Program:
    return _steady_steps if entries(state) > STEADY_ENTRIES else _quick_steps


def first_piece(problem: Any, state: Any) -> int:
    """How many gradients the first piece has: those before a first check, if they are quick."""
    few = entries((problem, state)) <= schedule.QUICK_ENTRIES
    return schedule.FIRST_CHECK if few else schedule.LEAST_PIECE


def is_quick(solver: Solver, problem: Any, state: Any, earlier: int) -> bool:
    """Whether the next step is one of the program that was compiled quickly."""
    done = earlier + int(state.gradients)
    return done + solver.gradients_per_step <= _quick_mark(problem, state)


def next_steps(solver: Solver, problem: Any, state: Any, earlier: int, limit: int) -> Piece:
    """Steps up to `limit` gradients in all, of which `earlier` ones came before this state."""
    quickly = is_quick(solver, problem, state, earlier)
    steps = _first_steps(state) if quickly else _optimised_steps
    limit = min(limit, _quick_mark(problem, state)) if quickly else limit
    return steps(solver, problem, state, np.asarray(limit - earlier))


def compile_first(solver: Solver, problem: Any, state: Any, judge: Judge) -> None:
    """Compile the program of the first steps in a thread, and that of the checks meanwhile."""
    if jax.process_count() > 1 or not _quick_mark(problem, state):
        return
    ahead = _first_steps(state).ahead(solver, problem, state, np.asarray(0))
    if ahead.done():  # the programs of the checks were compiled then, too
        return
    output = lambda solver, problem, state: solver.output(problem, state)
    shapes = eqx.filter_eval_shape(output, solver, problem, state)
    point = jax.tree.map(lambda shape: np.zeros(shape.shape, shape.dtype), shapes)
    compile_judge(judge.problem, point, judge.relative > 0)
    ahead.result()


def refilled(solver: Solver, problem: Any, state: Any) -> Any:
    """A state with samples from the host for the steps to come, if the data are there."""
    stream = solver.stream(state)
    return state if stream is None else solver.with_stream(state, problem.data.refilled(stream))
