"""The figure of `bilevax bench growth`: one logarithmic panel for each part."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bilevax.bench.output import figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from bilevax.bench.growth import Results

OPEN = "stopped: not certified, not proven"


def plot(results: Results, path: Path) -> None:
    """Draw the parts that have runs. Open markers are runs not certified or not proven."""
    parts = [part for part, runs in results.runs.items() if runs]
    panels = {"epsilon": _epsilon, "size": _size, "exact": _exact}
    with figure(path, len(parts), (5.5 * len(parts), 4.2)) as (_, axes):
        for own, part in zip(axes, parts):
            panels[part](own, results)
            own.set(xscale="log", yscale="log")
            own.legend(frameon=False, fontsize="small")


def _epsilon(axes: Axes, results: Results) -> None:
    for number, fit in enumerate(results.fits):
        runs = [run for run in results.runs["epsilon"] if run.method == fit.method]
        slope = "no fit" if fit.exponent is None else f"(1/ε)^{fit.exponent:.2f}"
        label = f"{fit.method}: {slope}, {fit.runs} of {fit.all_runs} certified"
        points = [(1 / r.tolerance, r.gradients, r.certified) for r in runs if r.gradients]
        _curve(axes, points, label, number)
    axes.set(xlabel="1/ε", ylabel="gradient evaluations", title="Gradients to the certificate")


def _size(axes: Axes, results: Results) -> None:
    runs = results.runs["size"]
    for number, data in enumerate(dict.fromkeys(run.data for run in runs)):
        own = [run for run in runs if run.data == data and run.seconds is not None]
        _curve(axes, [(run.n, run.seconds, run.certified) for run in own], data, number)
        _whole_calls(axes, own, f"{data}, whole call", number)
    axes.set(xlabel="n = m", ylabel="seconds", title="Time to the certificate")


def _exact(axes: Axes, results: Results) -> None:
    runs = results.runs["exact"]
    own = [(run.n, run.seconds, run.certified) for run in runs if run.seconds is not None]
    _curve(axes, own, "Adaptive", 0)
    _whole_calls(axes, runs, "Adaptive, whole call", 0)
    _curve(axes, [(run.n, run.milp_seconds, run.milp_proven) for run in runs], "HiGHS, MILP", 1)
    axes.set(xlabel="n = m", ylabel="seconds", title="Against an exact solver")


def _whole_calls(axes: Axes, runs: Sequence[Any], label: str, number: int) -> None:
    """The seconds of whole calls as a dotted line, also of runs that did not certify."""
    calls = [(run.n, run.call_seconds) for run in runs if run.call_seconds is not None]
    axes.plot(*_columns(calls), ":", color=f"C{number}", linewidth=1.2, label=label)


def _curve(axes: Axes, points: Sequence[tuple[Any, Any, bool]], label: str, number: int) -> None:
    """Filled points where the goal was reached, with a line through their medians."""
    color = f"C{number}"
    reached = [(x, y) for x, y, goal in points if goal]
    missed = [(x, y) for x, y, goal in points if not goal]
    places = sorted({x for x, _ in reached})
    medians = [np.median([y for x, y in reached if x == place]) for place in places]
    axes.plot(places, medians, color=color, linewidth=1.4, label=label)
    axes.plot(*_columns(reached), "o", color=color, markersize=4)
    # One entry of the legend explains the open markers of all curves.
    seen = axes.get_legend_handles_labels()[1]
    label = OPEN if missed and OPEN not in seen else "_nolegend_"
    axes.plot(*_columns(missed), "o", color=color, markersize=5, mfc="none", label=label)


def _columns(points: Sequence[tuple[Any, Any]]) -> tuple[list[Any], list[Any]]:
    return [x for x, _ in points], [y for _, y in points]
