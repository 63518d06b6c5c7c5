"""What all experiments share: their loop, the file of their results, their command and tables."""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import math
import platform
import shlex
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from bilevax.files import check_writable, write_json
from bilevax.progress import Progress

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Job = tuple[str, Callable[[], object]]


def run_jobs(
    jobs: Sequence[Job], name: str, progress: bool | None, save: Callable[[bool], None]
) -> bool:
    """Call the jobs, each of which has a label, one after the other; whether Ctrl-C ended it early.

    At the end, and when a job fails, `save` is called with whether jobs are left.
    """
    unfinished = True
    label = f"bilevax bench {name}"
    try:
        with Progress(progress, total=len(jobs), unit="jobs", label=label) as bar:
            for number, (what, job) in enumerate(jobs):
                bar.show(number, job=what)
                job()
            bar.show(len(jobs))
        unfinished = False
    except KeyboardInterrupt:
        pass
    finally:
        save(unfinished)
    return unfinished


def write_results(path: Path, command: str, results: dict[str, Any]) -> None:
    """Write results with the command, the date and the versions that made them.

    Null stands for what is unknown or not finite.
    """
    packages = ("bilevax", "jax", "jaxlib", "equinox", "numpy", "scipy")
    content = {
        "command": command,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": {"python": platform.python_version()}
        | {name: importlib.metadata.version(name) for name in packages},
        "device": str(jax.devices()[0]),
        "cpu": platform.machine(),
    } | results
    write_json(path, _finite(content))


def _finite(content: Any) -> Any:
    if isinstance(content, dict):
        return {key: _finite(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_finite(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content


def check_outputs(json: Path | None, plot: Path | None = None) -> None:
    """Refuse, before a run, files that could not be written."""
    for path, name in ((json, "json"), (plot, "plot")):
        if path is not None:
            check_writable(path, name)
    if plot is None:
        return
    from matplotlib.backend_bases import FigureCanvasBase

    known = FigureCanvasBase.get_supported_filetypes()
    if plot.suffix.lstrip(".").lower() not in known:
        raise ValueError(f"plot: {plot} must end in one of .{', .'.join(sorted(known))}")


def check_choices(settings: Any, name: str, known: Collection[str] | None = None) -> None:
    """Refuse a setting that is empty, names something twice, or names what is not known."""
    values = getattr(settings, name)
    if not values or len(set(values)) < len(values):
        raise ValueError(f"{name} must be one or more, each once, not {values}")
    if known and (unknown := [value for value in values if value not in known]):
        raise ValueError(f"{name}: there is no {unknown[0]!r}; there are {', '.join(known)}")


def command_line(experiment: str, settings: Any, options: Iterable[str]) -> str:
    """The command that runs an experiment with these of its settings."""
    words = ["bilevax", "bench", *experiment.split()]
    for option in options:
        value = getattr(settings, option)
        if value is not None and value is not False and value != ():
            several = value if isinstance(value, tuple) else () if value is True else (value,)
            words += [f"--{option.replace('_', '-')}", *(str(one) for one in several)]
    return shlex.join(words)


def aligned(rows: list[list[str]], left: Collection[int] = ()) -> str:
    """A header and rows as text, the columns `left` to the left and the others to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join(
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths))
        ).rstrip()
        for row in rows
    ]
    return "\n".join([lines[0], "-" * max(len(line) for line in lines), *lines[1:]])


@contextlib.contextmanager
def figure(path: Path, panels: int, size: tuple[float, float]) -> Iterator[tuple[Figure, Any]]:
    """A figure and its panels side by side, which is saved at the end."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    drawn, axes = plt.subplots(1, panels, figsize=size, layout="constrained", squeeze=False)
    yield drawn, axes[0]
    for own in axes[0]:
        own.grid(alpha=0.3, linewidth=0.4)
    drawn.savefig(path, dpi=150)
    plt.close(drawn)


def mean(values: Iterable[float | None], of: Callable[..., Any] = np.mean) -> float | None:
    """The mean of the values that are known."""
    known = [value for value in values if value is not None]
    return float(of(known)) if known else None


def median(values: Iterable[float | None]) -> float | None:
    """The median of the values that are known."""
    return mean(values, np.median)


def number(value: float | None, form: str) -> str:
    """A number as text; a dash where it is not known."""
    return "-" if value is None else format(value, form)


def numbers(record: Any, **forms: str) -> list[str]:
    """Attributes of a record as text, each in its form."""
    return [number(getattr(record, name), form) for name, form in forms.items()]
