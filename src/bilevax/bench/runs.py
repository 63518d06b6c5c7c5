"""One solve of an experiment, and how it went."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

from bilevax.driver.entry import solve
from bilevax.driver.solution import Solution
from bilevax.problems import ConstrainedBilevelProblem, Point


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """How one solve went. What a refused solve did not find is None.

    `status` is the code of `Solution.status`, or "refused" where the solver raised an error;
    `sentence` says why. `epsilon` is the best that was certified. `seconds` are those of the
    solver's loop, to which its limit applies. `compile_seconds` are those of compiling that loop,
    and `setup_seconds` all others, such as those of finding first multiplier bounds.
    """

    status: str = "refused"
    sentence: str = ""
    epsilon: float | None = None
    gradients: int | None = None
    seconds: float | None = None
    compile_seconds: float | None = None
    setup_seconds: float | None = None

    @property
    def certified(self) -> bool:
        return self.status == "certified"

    @property
    def refused(self) -> bool:
        return self.status == "refused"

    @property
    def call_seconds(self) -> float | None:
        """The seconds of the whole call."""
        parts = (self.seconds, self.compile_seconds, self.setup_seconds)
        return None if None in parts else sum(part for part in parts if part is not None)


def attempt(
    problem: ConstrainedBilevelProblem, start: Point, **options: Any
) -> tuple[dict[str, Any], Solution | None]:
    """Solve a problem. Returns the fields of `Run`, and the solution if there is one.

    That a solver cannot solve a problem is a result. Ctrl-C, which `solve` answers with a solution,
    is raised.
    """
    begun = time.perf_counter()
    try:
        found = solve(problem, start, progress=False, **options)
    except (ValueError, RuntimeError, MemoryError) as error:
        return {"sentence": str(error)}, None
    if found.status == "interrupted":
        raise KeyboardInterrupt
    return fields(found, time.perf_counter() - begun), found


def fields(found: Solution, call_seconds: float) -> dict[str, Any]:
    """The fields of `Run` of a solution, whose call took that long."""
    return {
        "status": found.status.code,
        "sentence": found.status.sentence,
        "epsilon": float(found.certificate.epsilon),
        "gradients": int(found.gradients),
        "seconds": found.seconds,
        "compile_seconds": found.compile_seconds,
        "setup_seconds": max(0.0, call_seconds - found.seconds - found.compile_seconds),
    }


def certified_of(runs: list[Any]) -> str:
    """How many of the runs certified, as a cell of a table."""
    return f"{sum(run.certified for run in runs)} of {len(runs)}"


def refusals(runs: list[Any]) -> list[str]:
    """A line for each refused run; `where` says which run it is."""
    return [f"Refused: {run.where}: {run.sentence}" for run in runs if run.refused]
