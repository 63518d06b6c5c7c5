"""`solve`: from a problem and a start to a certified solution."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from bilevax import trees
from bilevax.arguments import non_negative, probability, warn, whole
from bilevax.certificates.sampled import CONFIDENCE
from bilevax.data import DataError
from bilevax.driver.checkpoint import RunState, save_or_warn
from bilevax.driver.limits import Limits
from bilevax.driver.loop import Run
from bilevax.driver.resuming import resume as take_up
from bilevax.driver.solution import Solution, SolveError
from bilevax.files import check_writable
from bilevax.functions import up_to_date
from bilevax.problems import Form, Point
from bilevax.problems.deviation import biased
from bilevax.problems.validation import require_form, require_precision, validate
from bilevax.programs import release_programs
from bilevax.progress import Progress
from bilevax.solvers.base import Solver, Task
from bilevax.solvers.composite import composed
from bilevax.solvers.defaults import default_solver


def solve(
    problem: Form,
    start: Point,
    *,
    tolerance: float | None = None,
    relative_tolerance: float | None = None,
    solver: Solver | None = None,
    max_gradients: int | None = None,
    max_seconds: float | None = None,
    callback: Callable[[Solution], Any] | None = None,
    progress: bool | None = None,
    resume: RunState | str | Path | None = None,
    checkpoint: str | Path | None = None,
    look_around: bool = True,
    radius: float | None = None,
    confidence: float = CONFIDENCE,
    throw: bool = False,
) -> Solution:
    """Solve a problem until its certificate holds at `tolerance`.

    Args:
        problem: what to solve.
        start: `Point(x1=…, y1=…, …)`, or `Point(x=…, y=…)` for a minimax or a constrained problem.
            A start outside the domain is projected into it, with a warning.
        tolerance: ε of the certificate to reach, absolute. Unless one of the two is given, both are
            1e-6 (1e-3 in float32) for `Engines` and `Newton`, the former being the default for a
            bilevel problem on all its data; for other solvers `tolerance` is 1e-2.
        relative_tolerance: what every line may have on top, as a share of how large the things are
            whose difference it is: ‖∇f‖ for slopes, the lower level's value for the gap, what x
            and y contribute for constraints (`certificate.sizes`). With it, `tolerance` may be 0.
        solver: unless named, `Engines()` for a bilevel problem, with constraints or without, and
            `ProximalPoint()` for a minimax problem. On a source of minibatches it is
            `SampleAverage()` for a bilevel problem, and a stochastic method for a minimax problem.
        max_gradients: stop before the solver has evaluated more gradients than this, counted from
            the start of the run, those before a resumption included.
        max_seconds: stop soon after this much time in this call, compilation not counted.
        callback: called with a `Solution` at every check; stops the run by returning True.
        progress: show a progress bar; by default on a terminal, and not in CI.
        resume: the `state` of an earlier solution of the same problem, or a file it was saved to.
            The run goes on with the same iterates as one that was never stopped. A file that is
            also the `checkpoint` need not exist yet, so that one call can begin and go on.
        checkpoint: a file to which the state is written at every check, atomically.
        look_around: at a certified point, solve the lower level again at a few x nearby. Where F
            falls there by more than ε explains, as at a kink or a local maximum, the run goes on
            from there.
        radius: how far from y a certificate looks for a better one, where the lower level has no
            bounds and the problem no `lower_modulus`; by default 10·(1 + ‖y‖).
        confidence: the probability with which a certificate from samples holds, where not all
            samples are in memory.
        throw: raise `SolveError` unless the answer is certified.

    Returns:
        A `Solution`. Its point is the one of least ε seen; its status says how it ended. Ctrl-C
        ends the run with the status "interrupted" and returns it too.
    """
    release_programs()
    require_form(problem)
    problem = up_to_date(problem).within(radius)
    start = validate(problem.reference(), start)
    if solver is not None and not isinstance(solver, Solver):
        raise TypeError(f"solver must be one of bilevax's, such as PenaltyMethod(), not {solver!r}")
    solver = solver or default_solver(problem)
    tolerance, relative = _tolerances(tolerance, relative_tolerance, solver, trees.dtype_of(start))
    _check_limits(max_gradients, max_seconds, callback, checkpoint)
    probability(confidence, "confidence")
    asked = composed(solver, problem)
    _check_samples(problem, asked, start, relative)
    task = Task(problem, start, tolerance, relative, confidence=confidence)
    run = Run(task, asked, Limits(max_gradients, max_seconds))
    same_file = None not in (resume, checkpoint) and str(resume) == str(checkpoint)
    if resume is not None and not (same_file and not Path(str(resume)).exists()):
        take_up(run, resume)
    run.callback, run.checkpoint, run.look_around = callback, checkpoint, look_around
    try:
        with Progress(progress, total=max_gradients, unit="gradients") as run.bar:
            status = run.until_ended()
    except DataError:
        if checkpoint is not None:  # of all steps before, to go on with once the data are mended
            save_or_warn(checkpoint, run.snapshot())
        raise
    solution = run.solution(status)
    if checkpoint is not None:
        save_or_warn(checkpoint, solution.state)
    if throw and not solution.certified:
        raise SolveError(solution)
    return solution


def _tolerances(tolerance: Any, relative: Any, solver: Solver, dtype: Any) -> tuple[float, float]:
    """What is asked for, absolute and relative: where nothing is said, what the method can do."""
    if tolerance is None and relative is None and solver.is_tight:
        tight = 1e-6 if dtype == jnp.float64 else 1e-3
        return tight, tight
    relative = 0.0 if relative is None else relative
    non_negative(relative, "relative_tolerance")
    tolerance = 1e-2 if tolerance is None else tolerance
    if relative and tolerance == 0:
        require_precision(relative, dtype, "relative_tolerance")
    else:
        require_precision(tolerance, dtype)
    return float(tolerance), float(relative)


def _check_samples(problem: Any, solver: Solver, start: Point, relative: float) -> None:
    """Refuse minibatches where they are not understood, and warn where they mislead."""
    if not problem.sampled:
        return
    if not solver.takes_samples:
        raise TypeError(
            f"solver: {solver.part.title} takes all data at once, not minibatches of a "
            f"{type(problem).__name__}; use bilevax.SampleAverage(), or data=source.everything()"
        )
    if relative and problem.data.everything() is None:
        raise ValueError("relative_tolerance: sizes are not known where samples are not in memory")
    if bias := biased(problem, start):
        warn(bias, UserWarning)


def _check_limits(max_gradients: Any, max_seconds: Any, callback: Any, checkpoint: Any) -> None:
    if max_gradients is not None:
        whole(max_gradients, "max_gradients", 0)
    if max_seconds is not None:
        non_negative(max_seconds, "max_seconds")
    if callback is not None and not callable(callback):
        raise TypeError(f"callback must be a function of a Solution, not {callback!r}")
    if checkpoint is not None:
        check_writable(checkpoint, "checkpoint")
