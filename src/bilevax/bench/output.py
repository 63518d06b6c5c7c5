"""What every experiment writes and shows: a JSON file with its provenance, and a progress bar."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import math
import os
import platform
import sys
from pathlib import Path
from typing import Any

import jax


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


def check_picture(path: Path) -> None:
    """Refuse, before a run, a figure in a format that matplotlib does not write."""
    from matplotlib.backend_bases import FigureCanvasBase

    known = FigureCanvasBase.get_supported_filetypes()
    if path.suffix.lstrip(".").lower() not in known:
        raise ValueError(f"plot: {path} must end in one of .{', .'.join(sorted(known))}")


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
