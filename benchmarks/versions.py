"""Versions of bilevax side by side: a benchmark starts itself once more under each of them.

A version is this environment, the interpreter of another environment, or another checkout, which
this interpreter then imports.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

# Variables that would let a child use what another process compiled.
CACHES = ("BILEVAX_CACHE", "JAX_COMPILATION_CACHE_DIR")


@dataclasses.dataclass(frozen=True)
class Version:
    """How to start Python with one version of bilevax."""

    name: str
    python: str
    environment: dict[str, str]

    def run(self, script: str, *arguments: str, **variables: str) -> list[Any]:
        """The lines of JSON that the script prints; `variables` are added to its environment.

        Each line is shown while it comes, as is all that the script writes to its standard error.
        """
        command = [self.python, script, *arguments]
        environment = self.environment | variables
        found = []
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            for line in child.stdout:
                print(f"{self.name}: {line[:160].rstrip()}", flush=True)
                found.append(json.loads(line))
        if child.returncode != 0:
            raise RuntimeError(f"{self.name}: {shlex.join(command)} ended with {child.returncode}")
        return found


def this() -> Version:
    return Version("this", sys.executable, _without(*CACHES))


def other(place: str) -> Version:
    """The version of another interpreter, or of the folder of another checkout."""
    path = Path(place)
    if path.is_dir():
        if not (source := path.resolve() / "src").is_dir():
            raise FileNotFoundError(f"{path} is no checkout: it has no folder src")
        return Version("other", sys.executable, _without(*CACHES) | {"PYTHONPATH": str(source)})
    if not os.access(path, os.X_OK):
        raise FileNotFoundError(f"{path} is neither a Python interpreter nor a checkout")
    # Not resolved: an interpreter of an environment is a link to one that is not.
    return Version("other", str(path.absolute()), _without(*CACHES, "PYTHONPATH"))


def add_other(parser: argparse.ArgumentParser) -> None:
    """The option that says which version to compare with."""
    parser.add_argument(
        "--other", metavar="PLACE", help="an interpreter or a checkout with another version"
    )


def versions(place: str | None) -> list[Version]:
    """This version and, where there is a place for it, the other."""
    return [this()] + ([other(place)] if place else [])


def write(path: Path, results: dict[str, Any]) -> None:
    """Write the results with the command that made them."""
    record = {"command": shlex.join(["python", *sys.argv])} | results
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")


def _without(*names: str) -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in names}
