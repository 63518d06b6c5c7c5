"""Files that are complete or not there."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any


@contextlib.contextmanager
def replaced(path: str | Path) -> Iterator[Path]:
    """A temporary file beside `path` to write to, which takes its place at the end.

    Where the writing fails, `path` stays as it was and the temporary file goes. The content is on
    the disk before the file gets its name, so a crash leaves the old file or the new one. A file
    that is replaced keeps its permissions, and a link goes on pointing to it.
    """
    path = Path(path).resolve()
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}~")
    os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
    try:
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        if path.exists():
            temporary.chmod(path.stat().st_mode)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_bytes(path: str | Path, *parts: bytes | memoryview) -> None:
    """Write these bytes, one part behind the other."""
    with replaced(path) as temporary, temporary.open("wb") as file:
        for part in parts:
            file.write(part)


def write_json(path: str | Path, values: Any) -> None:
    """Write values as JSON that a person can read. NaN and infinity are refused."""
    text = json.dumps(values, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    write_bytes(path, text.encode())


def check_writable(path: Any, name: str) -> Path:
    """Refuse, before a run, a file that could not be written after it; `name` is the argument."""
    if not isinstance(path, str | Path):
        raise TypeError(f"{name} must be the path of a file, not {path!r}")
    path = Path(path)
    if path.is_dir():
        raise IsADirectoryError(f"{name} must be the path of a file; {path} is a folder")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{name}: there is no folder {path.parent}; make it first")
    if not os.access(path.parent, os.W_OK) or (path.exists() and not os.access(path, os.W_OK)):
        raise PermissionError(f"{name}: {path} cannot be written")
    return path
