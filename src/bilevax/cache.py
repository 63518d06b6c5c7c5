"""Compiled programs kept on disk, so that the next process need not compile them again."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import stat
from pathlib import Path

import jax

from bilevax.arguments import warn

VARIABLE = "BILEVAX_CACHE"
# JAX locks the folder between processes only where it may have to make room.
MOST_BYTES = 1 << 29


def enable_cache(folder: str | Path | None = None) -> Path:
    """Keep compiled programs on disk; returns the folder.

    Without `folder` that is one in the user's cache folder, of its own for this machine and these
    versions of Python and JAX. A cache holds code that will be run: the folder must belong to the
    user alone. The commands call this by themselves. The environment variable BILEVAX_CACHE
    does it for any process that imports bilevax: 1 for the usual folder, or a path; 0 turns
    the cache off for the commands too.
    """
    folder = (_usual_folder() if folder is None else Path(folder).expanduser()).resolve()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check_private(folder)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    jax.config.update("jax_compilation_cache_max_size", MOST_BYTES)
    return folder


def enable_cache_as_asked(default: bool = False) -> Path | None:
    """What the environment variable asks for; `default` says what to do without it."""
    asked = os.environ.get(VARIABLE, "1" if default else "0")
    if asked.lower() in ("", "0", "off", "no", "false"):
        return None
    usual = asked.lower() in ("1", "on", "yes", "true")
    return enable_cache(None if usual else asked)


def enable_cache_at_import() -> None:
    """As the environment variable asks; what goes wrong must not keep anybody from computing."""
    try:
        enable_cache_as_asked()
    except OSError as error:
        warn(f"compiled programs are not kept on disk: {error}", RuntimeWarning)


def _usual_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "bilevax" / f"programs-{_machine()}"


def _machine() -> str:
    """What compiled programs depend on: the processor, the system, Python and JAX."""
    versions = [importlib.metadata.version(name) for name in ("jax", "jaxlib")]
    parts = [platform.system(), platform.machine(), platform.python_version(), *versions]
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        told = ("flags", "model name", "Features", "CPU part")
        parts += sorted({line for line in lines if line.startswith(told)})
    except OSError:
        parts.append(platform.processor())
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _check_private(folder: Path) -> None:
    """Refuse a folder into which others could put programs for this user to run."""
    if not hasattr(os, "getuid"):
        return
    found = folder.stat()
    if found.st_uid != os.getuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(
            f"{folder} must belong to you, and others must not be able to write to it: a cache of "
            f"compiled programs is code that will be run. Choose another folder, or chmod 700 it"
        )
