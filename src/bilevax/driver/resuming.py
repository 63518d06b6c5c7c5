"""Going on from where an earlier run of the same task stood."""

from __future__ import annotations

from pathlib import Path

from bilevax.driver.checkpoint import RunState, check_same_run, load
from bilevax.driver.limits import Clock
from bilevax.driver.loop import Run


def resume(run: Run, source: RunState | str | Path) -> None:
    """Let a run go on from a state, or from the file that it was saved to."""
    fresh = lambda stage: _fresh(run, stage)
    saved = load(source, fresh) if isinstance(source, str | Path) else source
    if not isinstance(saved, RunState):
        raise TypeError(f"resume must be a solution's state or a file, not {source!r}")
    check_same_run(saved.fingerprint, run.fingerprint, "this state")
    run.solver, run.state = saved.solver, saved.solver_state
    run.earlier, run.earlier_solves = saved.earlier, saved.earlier_solves
    run.fell_back_at = saved.fell_back_at
    run.schedule.next_check = run.reviewed_at = saved.next_check
    ready = bool(run.solver.is_ready(run.task.problem, run.state))
    run.checked_at = (int(saved.history["gradients"][-1]), ready)
    run.verdicts.restore(saved)
    run.output = run.solver.output(run.task.problem, run.state)
    run.clock = Clock(saved.seconds)
    run.limits.begin(run.clock, run.state.gradients)


def _fresh(run: Run, stage: tuple | None) -> RunState:
    """A snapshot of a run as it begins, or as the method of a later stage begins."""
    if stage is not None and stage != run.solver.stage:
        run.take_over(run.asked.prepared_at(stage, run.task), run.task.start)
    return run.snapshot()
