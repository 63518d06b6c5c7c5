"""A run's state on disk: everything needed to go on as if it had never stopped."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from bilevax.problems import Point

MAGIC = "bilevax run 4"


@dataclasses.dataclass(frozen=True)
class RunState:
    """Where a run stands: the solver's state, the best point so far, and what the checks saw.

    `lift` holds the multiplier bounds of a constrained problem, which grow during a run.
    `fell_back_at` are the gradients after which the paper's method took over, if it did;
    `confirmations` counts the times that a certificate from samples was tried on others, and
    `confirmed` says whether the best point was, well or not.
    """

    solver_state: Any
    best: Point
    lift: Any
    next_check: int
    check_gradients: int
    seconds: float
    history: dict[str, list[float]]
    fingerprint: str
    fell_back_at: int | None = None
    confirmations: int = 0
    confirmed: bool = False


def fingerprint(problem: Any, solver: Any, start: Point) -> str:
    """What a state must share with the run that takes it up: forms, shapes, dtypes and numbers."""
    blocks = [
        f"{jax.tree_util.keystr(path)} {jnp.result_type(leaf)}{list(jnp.shape(leaf))}"
        for path, leaf in jax.tree_util.tree_leaves_with_path(start)
    ]
    digest = hashlib.blake2b(digest_size=8)
    digest.update(str(jax.tree.structure((problem, solver))).encode())  # terms, axes, options
    for leaf in jax.tree.leaves((problem, solver)):
        digest.update(_content(leaf))
    stated = problem[0] if isinstance(problem, tuple) else problem
    forms = f"{type(stated).__name__} by {type(solver).__name__}"
    return f"{forms}: {', '.join(blocks)}; digest {digest.hexdigest()}"


def _content(leaf: Any) -> bytes:
    """What tells one leaf of a problem or solver from another: its numbers, or its code."""
    if isinstance(leaf, jax.Array | np.ndarray | np.generic | float):
        flat = np.asarray(leaf).reshape(-1)
        # All of an array up to 64 MiB; of a larger one every k-th entry.
        every = max(1, flat.nbytes >> 26)
        return repr((flat.dtype, np.shape(leaf))).encode() + flat[::every].tobytes()
    code = getattr(leaf, "__code__", None)
    if code is None:
        return type(leaf).__name__.encode()
    return code.co_code + repr([c for c in code.co_consts if isinstance(c, float | int)]).encode()


def check_writable(path: Any) -> None:
    """Refuse, before a run, a checkpoint that could not be written."""
    if not isinstance(path, str | Path):
        raise TypeError(f"checkpoint must be the path of a file, not {path!r}")
    path = Path(path)
    if path.is_dir():
        raise IsADirectoryError(f"checkpoint must be the path of a file; {path} is a folder")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"checkpoint: there is no folder {path.parent}; make it first")


def save(path: str | Path, state: RunState) -> None:
    """Write a state. The file is complete or not there: it is renamed into place at the end."""
    path = Path(path)
    leaves = io.BytesIO()
    eqx.tree_serialise_leaves(leaves, (state.solver_state, state.best, state.lift))
    header = {
        "format": MAGIC,
        "fingerprint": state.fingerprint,
        "next_check": state.next_check,
        "check_gradients": state.check_gradients,
        "seconds": state.seconds,
        "history": state.history,
        "fell_back_at": state.fell_back_at,
        "confirmations": state.confirmations,
        "confirmed": state.confirmed,
        "sha256": hashlib.sha256(leaves.getbuffer()).hexdigest(),
    }
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix="~")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write((json.dumps(header) + "\n").encode())
            file.write(leaves.getbuffer())
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def load(path: str | Path, like: Callable[[int | None], RunState]) -> RunState:
    """Read a state that fits a run; `like` gives its fresh state, for a `fell_back_at`."""
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"resume: there is no file {path}")
    if path.is_dir():
        raise IsADirectoryError(f"resume: {path} is a folder, not a saved state")
    first, _, rest = path.read_bytes().partition(b"\n")
    header = _header(first, path)
    damaged = ValueError(f"resume: {path} is damaged or cut short")
    try:
        if hashlib.sha256(rest).hexdigest() != header["sha256"]:
            raise damaged
        saved = RunState(
            solver_state=None,
            best=Point(),
            lift=None,
            next_check=int(header["next_check"]),
            check_gradients=int(header["check_gradients"]),
            seconds=float(header["seconds"]),
            history={name: list(column) for name, column in header["history"].items()},
            fingerprint=str(header["fingerprint"]),
            fell_back_at=None if header["fell_back_at"] is None else int(header["fell_back_at"]),
            confirmations=int(header["confirmations"]),
            confirmed=bool(header["confirmed"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError):
        raise damaged from None
    check_same_run(saved, like(None), str(path))
    fresh = like(saved.fell_back_at)
    like_this = (fresh.solver_state, fresh.best, fresh.lift)
    found = eqx.tree_deserialise_leaves(io.BytesIO(rest), like_this)
    # Back to the devices where a run has them.
    put = lambda new, old: jax.device_put(new, old.sharding) if eqx.is_array(old) else new
    solver_state, best, lift = jax.tree.map(put, found, like_this)
    return dataclasses.replace(saved, solver_state=solver_state, best=best, lift=lift)


def check_same_run(saved: RunState, current: RunState, source: str) -> None:
    """Refuse a state of another problem, of other data, or of a solver with other constants."""
    if saved.fingerprint != current.fingerprint:
        raise ValueError(
            f"resume: {source} is of another run: the problem, its data, the tolerance or the "
            f"solver differ.\n  it holds  {saved.fingerprint}\n  this is   {current.fingerprint}"
        )


def _header(line: bytes, path: Path) -> dict[str, Any]:
    try:
        header = json.loads(line)
    except (UnicodeDecodeError, json.JSONDecodeError):
        header = None
    if not (isinstance(header, dict) and header.get("format") == MAGIC):
        raise ValueError(
            f"resume: {path} was not written by this version of bilevax, or is damaged"
        )
    return header
