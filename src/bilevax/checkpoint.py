"""A run's state on disk: everything needed to go on as if it had never stopped."""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
from pathlib import Path
from typing import Any, BinaryIO

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from bilevax.problems import Point

MAGIC = "bilevax run 1"


@dataclasses.dataclass(frozen=True)
class RunState:
    """Where a run stands: the solver's state, the best point so far, and what the checks saw."""

    solver_state: Any
    best: Point
    next_check: int
    check_gradients: int
    seconds: float
    history: dict[str, list[float]]
    fingerprint: str


def fingerprint(problem: Any, solver: Any, start: Point) -> str:
    """What a state must share with the run that takes it up: the forms, shapes and dtypes."""

    def shape(leaf: Any) -> str:
        is_array = eqx.is_array(leaf) or isinstance(leaf, np.generic | np.ndarray)
        return f"{jnp.result_type(leaf)}{list(np.shape(leaf))}" if is_array else repr(leaf)

    def describe(tree: Any) -> str:
        leaves = jax.tree_util.tree_leaves_with_path(tree)
        return ", ".join(
            f"{jax.tree_util.keystr(path)} {shape(leaf)}"
            for path, leaf in leaves
            if not callable(leaf)
        )

    return f"{type(problem).__name__} by {type(solver).__name__}: {describe(start)}"


def save(path: str | Path, state: RunState) -> None:
    """Write a state. The file is complete or not there: it is renamed into place at the end."""
    path = Path(path)
    header = {
        "format": MAGIC,
        "fingerprint": state.fingerprint,
        "next_check": state.next_check,
        "check_gradients": state.check_gradients,
        "seconds": state.seconds,
        "history": state.history,
    }
    descriptor, temporary = tempfile.mkstemp(dir=path.parent or ".", prefix=path.name, suffix="~")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write((json.dumps(header) + "\n").encode())
            eqx.tree_serialise_leaves(file, (state.solver_state, state.best))
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def load(path: str | Path, like: RunState) -> RunState:
    """Read a state that fits a run whose fresh state is `like`."""
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"resume: there is no file {path}")
    with path.open("rb") as file:
        header = _header(file, path)
        if header["fingerprint"] != like.fingerprint:
            raise ValueError(
                f"resume: {path} is of another run.\n  it holds  {header['fingerprint']}\n"
                f"  this is   {like.fingerprint}"
            )
        try:
            leaves = eqx.tree_deserialise_leaves(file, (like.solver_state, like.best))
        except (EOFError, ValueError, RuntimeError, OSError) as error:
            raise ValueError(f"resume: {path} is damaged or cut short ({error})") from None
    solver_state, best = leaves
    return RunState(
        solver_state=solver_state,
        best=best,
        next_check=int(header["next_check"]),
        check_gradients=int(header["check_gradients"]),
        seconds=float(header["seconds"]),
        history={name: list(column) for name, column in header["history"].items()},
        fingerprint=like.fingerprint,
    )


def _header(file: BinaryIO, path: Path) -> dict[str, Any]:
    try:
        header = json.loads(file.readline())
    except (UnicodeDecodeError, json.JSONDecodeError):
        header = None
    if not (isinstance(header, dict) and header.get("format") == MAGIC):
        raise ValueError(f"resume: {path} was not written by this version of bilevax")
    return header
