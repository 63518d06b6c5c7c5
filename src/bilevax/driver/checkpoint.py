"""A run's state on disk: everything needed to go on as if it had never stopped."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from bilevax.arguments import warn
from bilevax.files import write_bytes
from bilevax.functions import plain
from bilevax.problems import Point

MAGIC = "bilevax run 10"


@dataclasses.dataclass(frozen=True)
class RunState:
    """Where a run stands: the solver and its state, the best point so far, what the checks saw.

    `earlier` and `earlier_solves` count the gradients and linear systems before the solver last
    began anew; `stage` is which method is at work, and `fell_back_at` the count of gradients at
    which another one took over last, or None. `confirmations` counts how often a certificate from
    samples was tried on other samples, `confirmed` says whether the best point's was, and
    `looked_at` on how many minibatches, if on more than usual; `least` is the least ε of all points
    that were the best.
    `withdrawals` counts the certified points that were left since F fell nearby.
    """

    solver: Any
    solver_state: Any
    best: Point
    next_check: int
    check_gradients: int
    seconds: float
    history: dict[str, list[float]]
    fingerprint: str
    earlier: int = 0
    earlier_solves: int = 0
    stage: tuple = ()
    fell_back_at: int | None = None
    confirmations: int = 0
    confirmed: bool = False
    looked_at: int = 0
    least: float | None = None
    withdrawals: int = 0


# What is kept as arrays; everything else is in the file's header.
ARRAYS = ("solver", "solver_state", "best")


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
    forms = f"{type(problem).__name__} by {type(solver.part).__name__}"
    return f"{forms}: {', '.join(blocks)}; digest {digest.hexdigest()}"


def _content(leaf: Any) -> bytes:
    """What tells one leaf of a problem or solver from another: its numbers, or its code."""
    if isinstance(leaf, jax.Array | np.ndarray | np.generic | float):
        flat = np.asarray(leaf).reshape(-1)
        # All of an array up to 64 MiB; of a larger one every k-th entry.
        every = max(1, flat.nbytes >> 26)
        return repr((flat.dtype, np.shape(leaf))).encode() + flat[::every].tobytes()
    code = getattr(plain(leaf), "__code__", None)
    if code is None:
        return type(plain(leaf)).__name__.encode()
    return code.co_code + repr([c for c in code.co_consts if isinstance(c, float | int)]).encode()


def save(path: str | Path, state: RunState) -> None:
    """Write a state. The file is complete or not there."""
    leaves = io.BytesIO()
    eqx.tree_serialise_leaves(leaves, [getattr(state, name) for name in ARRAYS])
    others = [field.name for field in dataclasses.fields(state) if field.name not in ARRAYS]
    header = {"format": MAGIC, "sha256": hashlib.sha256(leaves.getbuffer()).hexdigest()}
    header |= {name: getattr(state, name) for name in others}
    write_bytes(path, (json.dumps(header) + "\n").encode(), leaves.getbuffer())


def save_or_warn(path: str | Path, state: RunState) -> None:
    """A checkpoint that cannot be written, on a full disk say, must not cost the run.

    Of several processes the first writes it; all can read it, where they share the folder.
    """
    if jax.process_index() > 0:
        return
    try:
        save(path, state)
    except OSError as error:
        warn(f"the checkpoint {path} could not be written: {error}", RuntimeWarning)


def load(path: str | Path, like: Callable[[tuple | None], RunState]) -> RunState:
    """Read a state that fits a run; `like` gives a fresh one, at the stage that it was saved at."""
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"resume: there is no file {path}")
    if path.is_dir():
        raise IsADirectoryError(f"resume: {path} is a folder, not a saved state")
    first, _, rest = path.read_bytes().partition(b"\n")
    header = _header(first, path)
    damaged = ValueError(f"resume: {path} is damaged or cut short")
    names = {field.name for field in dataclasses.fields(RunState)} - set(ARRAYS)
    intact = names <= set(header) and isinstance(header["fingerprint"], str)
    if not intact or hashlib.sha256(rest).hexdigest() != header.get("sha256"):
        raise damaged
    check_same_run(header["fingerprint"], like(None).fingerprint, str(path))
    header["stage"] = tuple(header["stage"])
    fresh = like(header["stage"])
    arrays = [getattr(fresh, name) for name in ARRAYS]
    try:
        found = eqx.tree_deserialise_leaves(io.BytesIO(rest), arrays)
    except (RuntimeError, EOFError):
        raise damaged from None
    found = jax.tree.map(_put_back, found, arrays)
    return RunState(**dict(zip(ARRAYS, found)), **{name: header[name] for name in names})


def _put_back(new: Any, old: Any) -> Any:
    """To the devices where a run has it; what JAX may move as it likes must stay so."""
    placed = isinstance(old, jax.Array) and old.committed
    return jax.device_put(new, old.sharding) if placed else new


def check_same_run(saved: str, current: str, source: str) -> None:
    """Refuse a state of another problem, of other data, or of a solver with other constants."""
    if saved != current:
        raise ValueError(
            f"resume: {source} is of another run: the problem, its data, the tolerance or the "
            f"solver differ.\n  it holds  {saved}\n  this is   {current}"
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
