"""Several problems of one shape in one compiled loop, by `vmap`, where that is faster."""

from __future__ import annotations

import math
import time
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from bilevax import trees
from bilevax.run import CHECK_FIRST, CHECK_GROWTH, PIECE_SECONDS, Run
from bilevax.driver.solution import Solution, Status


class Shared(Run):
    """A run among others: `share` is its part of the time that they took together."""

    share = 0.0

    @property
    def seconds(self) -> float:
        return self.share


def _one_advance(solver: Any, problem: Any, state: Any, limit: Array) -> tuple[Any, Array, Array]:
    """As in `solve`; of the state's gradients the number too, and what else the host must know."""
    state = solver.advance(problem, state, limit)
    known = jnp.stack([solver.done(problem, state), trees.all_finite(state)])
    return state, state.gradients, known


_advance_all = eqx.filter_jit(eqx.filter_vmap(_one_advance))


@eqx.filter_jit
def _apart(state: Any) -> list[Any]:
    """A stacked state as a list of states."""
    count = len(jax.tree.leaves(state)[0])
    return [jax.tree.map(lambda a, i=i: a[i], state) for i in range(count)]


def stacked(several: list[Any]) -> Any:
    """Trees of one structure as one tree whose arrays have a first axis more."""
    numeric = lambda leaf: isinstance(leaf, jax.Array | np.ndarray)
    join = lambda *parts: jnp.stack(parts) if numeric(parts[0]) else parts[0]
    return jax.tree.map(join, *several)


def solve_together(runs: list[Shared], max_seconds: float) -> list[Solution]:
    """What `solve` does for one problem of fixed multiplier bounds, for all in step.

    Every run has the checks of a run alone; one that has ended waits for the others.
    """
    begun = time.perf_counter()
    solver, problem, state = stacked([(run.solver, run.problem, run.state) for run in runs])
    none = jnp.zeros(len(runs), int)
    jax.block_until_ready(_apart(_advance_all(solver, problem, state, none)[0]))
    compiling = time.perf_counter() - begun + sum(run.compile_seconds for run in runs)
    for run in runs:
        run.compile_seconds = compiling / len(runs)
    gradients = np.asarray([run.gradients for run in runs])
    ended: dict[int, Solution] = {}
    piece = 8
    while len(ended) < len(runs):
        begun = time.perf_counter()
        going = [i for i in range(len(runs)) if i not in ended]
        limits = [min(run.next_check, n + piece) for run, n in zip(runs, gradients.tolist())]
        limits = jnp.asarray([limit if i in going else 0 for i, limit in enumerate(limits)])
        state, gradients, known = _advance_all(solver, problem, state, limits)
        try:
            gradients, (done, finite) = np.asarray(gradients), np.asarray(known).T  # waits
        except KeyboardInterrupt:
            jax.block_until_ready(state)  # Python must not end while the piece still runs
            raise
        grow = np.clip(PIECE_SECONDS / max(time.perf_counter() - begun, 1e-6), 0.25, 4.0)
        piece = int(np.clip(piece * grow, 8, 1 << 30))
        over = max(runs[i].share for i in going) > max_seconds
        step = runs[0].solver.gradients_per_step
        due = [i for i in going if done[i] or not finite[i] or over]
        due += [i for i in going if i not in due and gradients[i] + step > runs[i].next_check]
        states = _apart(state) if due else []
        for i in due:
            if not finite[i]:
                status = Status("not finite", f"Not finite. {runs[i]._so_far()}")
            else:
                status = _looked(runs[i], states[i], bool(done[i]))
                if status is None and over:
                    status = runs[i]._spent(f"max_seconds={max_seconds:g}")
            if status is not None:
                ended[i] = runs[i].solution(status)
        taken = (time.perf_counter() - begun) / len(going)
        for i in going:
            runs[i].share += taken
    return [ended[i] for i in range(len(runs))]


def _looked(run: Shared, state: Any, done: bool) -> Status | None:
    """Take a run to its new state and look at it; how it ended, if it did."""
    run.state = state
    if run.gradients + run.solver.gradients_per_step > run.next_check:
        following = math.ceil(run.next_check * CHECK_GROWTH)
        run.next_check = max(following, run.next_check + CHECK_FIRST)
    run._look()
    if run.certificate.certified(run.tolerance):
        return run._certified()
    if done:
        return run._stopped_itself()
    if run._stalled():
        return Status("stalled", f"Stalled. {run._so_far()} {run._advice()}")
    return None
