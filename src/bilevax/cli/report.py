"""What a solve prints on the command line."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np

from bilevax.driver.solution import Solution
from bilevax.problems.library import Instance
from bilevax.trees import Tree


def report(solution: Solution, plot: Path | None, instance: Instance) -> int:
    """Print status, certificate and answer, save the plot; exit code 0 if it is certified."""
    print(f"\n{solution.status}\n\n{solution.certificate}\n")
    for name in ("x1", "y1", "y2"):
        found, known = getattr(solution.point, name), getattr(instance.point, name)
        if found is not None:
            print(f"{name} = {_show(found)}   in closed form {_show(known)}")
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


def _show(tree: Tree) -> str:
    parts = [np.array2string(np.asarray(a), precision=4) for a in jax.tree.leaves(tree)]
    return " ".join(parts)
