"""`bilevax demo`: a small bilevel minimax problem, its certificate and a plot."""

from __future__ import annotations

from pathlib import Path

from bilevax.cli.report import report
from bilevax.driver.entry import solve
from bilevax.problems import library


def demo(tolerance: float = 1e-6, plot: Path = Path("demo.png")) -> int:
    """Solve a small group-robust fitting problem, print its certificate, save a convergence plot.

    Args:
        tolerance: the ε to certify.
        plot: where to save the plot.
    """
    instance = library.get("worst_group")
    print("Fit one number to two groups, robustly, and tune its shift by the worse of two goals:")
    print("  upper: min over x1, max over x2 in the simplex, of x2·½(x1 − (0.6, 0.2))²")
    print("  lower: min over y1, max over y2 in the simplex, of y2·½(y1 − (−1, 1))² + x1·y1")
    solution = solve(instance.problem, instance.start, tolerance=tolerance)
    return report(solution, plot, instance)
