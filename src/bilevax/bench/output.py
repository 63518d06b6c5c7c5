"""What every experiment writes and shows: a JSON file with its provenance, tables, progress."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import math
import os
import platform
import shlex
import sys
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import jax
import numpy as np


def write_json(path: Path, command: str, results: dict[str, Any]) -> None:
    """Write results with the command, the date and the versions that made them.

    Null stands for what is unknown or not finite. The file is complete or as it was before: it is
    renamed into place at the end.
    """
    own = ("bilevax", "jax", "jaxlib", "equinox", "numpy", "scipy")
    content = {
        "command": command,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": {"python": platform.python_version()}
        | {name: importlib.metadata.version(name) for name in own},
        "device": str(jax.devices()[0]),
        "cpu": platform.machine(),
    } | results
    text = json.dumps(_finite(content), indent=1, allow_nan=False) + "\n"
    temporary = path.with_name(f".{path.name}.{os.getpid()}~")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _finite(content: Any) -> Any:
    if isinstance(content, dict):
        return {key: _finite(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_finite(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content


def check_output(path: Path, name: str) -> None:
    """Refuse, before a run, a file that could not be written after it."""
    if path.is_dir():
        raise IsADirectoryError(f"{name} must be the path of a file; {path} is a folder")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{name}: there is no folder {path.parent}; make it first")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise PermissionError(f"{name}: {path} cannot be written")


def check_outputs(json: Path | None, plot: Path | None) -> None:
    """Refuse, before a run, files that could not be written."""
    if json is not None:
        check_output(json, "json")
    if plot is None:
        return
    check_output(plot, "plot")
    from matplotlib.backend_bases import FigureCanvasBase

    known = FigureCanvasBase.get_supported_filetypes()
    if plot.suffix.lstrip(".").lower() not in known:
        raise ValueError(f"plot: {plot} must end in one of .{', .'.join(sorted(known))}")


def command_line(name: str, settings: Any, options: Iterable[str]) -> str:
    """The command that runs an experiment with these of its settings."""
    words = ["bilevax", "bench", name]
    for option in options:
        value = getattr(settings, option)
        if value is not None:
            several = value if isinstance(value, tuple) else (value,)
            words += [f"--{option.replace('_', '-')}", *(str(one) for one in several)]
    return shlex.join(words)


def aligned(rows: list[list[str]], left: Collection[int] = ()) -> str:
    """A header and rows, the columns `left` to the left and the others to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join(
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths))
        ).rstrip()
        for row in rows
    ]
    return "\n".join([lines[0], "-" * max(len(line) for line in lines), *lines[1:]])


def median(values: Iterable[float | None]) -> float | None:
    """Of those that are known."""
    known = [value for value in values if value is not None]
    return float(np.median(known)) if known else None


def number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


class Bar:
    """A line that shows which solve is under way, on a terminal; nothing elsewhere."""

    def __init__(self, wanted: bool | None, total: int, name: str):
        if wanted is None:
            wanted = sys.stderr.isatty() and not os.environ.get("CI")
        self.bar: Any = None
        if wanted:
            from tqdm import tqdm

            self.bar = tqdm(total=total, unit=" solves", desc=f"bilevax bench {name}")

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.close()

    def at(self, what: str) -> None:
        if self.bar is not None:
            self.bar.set_postfix_str(what)

    def step(self) -> None:
        if self.bar is not None:
            self.bar.update(1)
