"""`bilevax solve NAME` and `bilevax demo`: problems of the library, by the default method."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import jax
import numpy as np
import tyro

from bilevax.driver import entry
from bilevax.problems import library
from bilevax.trees import Tree


def demo(tolerance: float = 1e-6, plot: Path = Path("demo.png")) -> int:
    """Solve a small group-robust fitting problem, print its certificate, save a convergence plot.

    Args:
        tolerance: the ε to certify.
        plot: where to save the plot.
    """
    print("Fit one number to two groups, robustly, and tune its shift by the worse of two goals:")
    print("  upper: min over x1, max over x2 in the simplex, of x2·½(x1 − (0.6, 0.2))²")
    print("  lower: min over y1, max over y2 in the simplex, of y2·½(y1 − (−1, 1))² + x1·y1")
    return _solve("worst_group", plot, tolerance=tolerance)


def solve(
    name: Annotated[str, tyro.conf.Positional],
    tolerance: float | None = None,
    relative_tolerance: float | None = None,
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
    return _solve(
        name,
        plot,
        tolerance=tolerance,
        relative_tolerance=relative_tolerance,
        max_gradients=max_gradients,
        max_seconds=max_seconds,
        checkpoint=checkpoint,
        resume=resume,
    )


def _solve(name: str, plot: Path | None, **options: Any) -> int:
    """Print status, certificate and answer, save the plot; exit code 0 if it is certified."""
    instance = library.get(name)
    solution = entry.solve(instance.problem, instance.start, **options)
    print(f"\n{solution.status}\n\n{solution.certificate}\n")
    for block in ("x1", "y1", "y2"):
        found, known = getattr(solution.point, block), getattr(instance.point, block)
        if found is not None:
            print(f"{block} = {_shown(found)}   in closed form {_shown(known)}")
    seconds, compiling = solution.seconds, solution.compile_seconds
    print(
        f"{solution.gradients:,} gradients in {seconds:.2f} s, after {compiling:.2f} s to compile"
    )
    if plot is not None:
        import matplotlib

        matplotlib.use("Agg")
        solution.history.plot(plot)
        print(f"Convergence plot: {plot}")
    return 0 if solution.certified else 1


def _shown(tree: Tree) -> str:
    return " ".join(np.array2string(np.asarray(a), precision=4) for a in jax.tree.leaves(tree))
