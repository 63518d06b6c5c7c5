"""`bilevax solve NAME`: one of the library's problems, by the default method."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import tyro

from bilevax.cli.report import report
from bilevax.driver.entry import solve as solve_problem
from bilevax.problems import library


def solve(
    name: Annotated[str, tyro.conf.Positional],
    tolerance: float = 1e-2,
    relative_tolerance: float = 0.0,
    max_gradients: int | None = None,
    max_seconds: float | None = None,
    plot: Path | None = None,
    checkpoint: Path | None = None,
    resume: Path | None = None,
) -> int:
    """Solve a problem of the library and compare it with the answer in closed form.

    Args:
        name: the problem; `list` shows them all.
        tolerance: the ε to certify.
        relative_tolerance: how much more a line may be, as a share of the size of what it compares.
        max_gradients: stop before more gradient evaluations than this.
        max_seconds: stop soon after this much time.
        plot: save a convergence plot there.
        checkpoint: write the state of the run there as it goes.
        resume: go on from a state written earlier.
    """
    if name == "list":
        for known, make in library.INSTANCES.items():
            print(f"{known:<16} {(make.__doc__ or '').splitlines()[0]}")
        return 0
    if name not in library.INSTANCES:
        raise ValueError(
            f"no problem {name!r} in the library; there are {', '.join(library.INSTANCES)}"
        )
    instance = library.get(name)
    solution = solve_problem(
        instance.problem,
        instance.start,
        tolerance=tolerance,
        relative_tolerance=relative_tolerance,
        max_gradients=max_gradients,
        max_seconds=max_seconds,
        checkpoint=checkpoint,
        resume=resume,
    )
    return report(solution, plot, instance)
