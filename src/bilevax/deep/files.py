"""Small files of a run, complete or not there."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def write_json(path: Path, values: dict[str, Any]) -> None:
    temporary = path.with_name(path.name + "~")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            json.dump(values, file, indent=1, ensure_ascii=False, allow_nan=False)
            file.write("\n")
        put_in_place(temporary, path)
    except OSError as error:
        raise OSError(error.errno, f"{path} cannot be written: {error.strerror}") from error
    finally:
        temporary.unlink(missing_ok=True)


def put_in_place(temporary: Path, path: Path) -> None:
    """Down to the disk, then under its name."""
    descriptor = os.open(temporary, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    temporary.replace(path)


def read_run(folder: Path) -> dict[str, Any]:
    """The settings of the run in a folder."""
    path = folder / "settings.json"
    if not path.is_file():
        raise FileNotFoundError(f"{folder} holds no run: there is no {path.name}")
    try:
        return dict(json.loads(path.read_text("utf-8")))
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from None


def holds_anything(folder: Path) -> bool:
    """Whether a folder holds more than what a write that failed left behind."""
    return folder.exists() and any(not path.name.endswith("~") for path in folder.iterdir())
