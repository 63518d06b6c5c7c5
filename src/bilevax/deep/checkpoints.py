"""The checkpoints of a training run: complete or not there, and read only if undamaged.

    folder/best.json               the best step, and the one that was best before it
    folder/step-00000120/state/    the arrays, by orbax
                         leaves.json   key, shape and dtype of each array
                         about.json    what the run adds: settings, history, …
                         digests.json  of all these files

A name that ends in ~ belongs to a save under way, or to one that was killed.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from bilevax import arguments
from bilevax.files import write_json
from bilevax.trees import Tree

Which: TypeAlias = Literal["last", "best"]
ARRAYS = jax.Array | np.ndarray
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
STEP = re.compile(r"step-(\d{8,})(\.old~)?")  # .old~: the save that replaced it was killed
LEFTOVER = re.compile(r"step-\d{8,}\.(new|old|gone)~|\.best\.json\..*~|best\.json~")


@dataclass(frozen=True)
class Saved:
    """A checkpoint that was read: the arrays, placed as `like` has them, and what the run added."""

    step: int
    state: Tree
    about: dict[str, Any]


class Checkpoints:
    """The states of a training run in a folder: the last two, and the best.

    With several processes, all of them call each method and see the same folder.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder).absolute()
        self._at: int | None = None  # the step that this run saved or read last

    def steps(self) -> list[int]:
        """The steps in the folder, damaged ones too."""
        if not self.folder.is_dir():
            return []
        found = (STEP.fullmatch(path.name) for path in self.folder.iterdir())
        return sorted({int(match[1]) for match in found if match})

    def save(self, step: int, state: Tree, about: dict[str, Any], *, best: bool) -> None:
        """Save a step, and only then remove the steps that are no longer kept.

        A run that resumed before the last step, because that one is damaged, replaces it.
        """
        arguments.whole(step, "step", 0)
        try:
            json.dumps(about, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise TypeError(f"about must be JSON: {error}") from None
        leaves = _leaves(state, ARRAYS)
        present = self.steps()
        latest = max(present, default=0) if self._at is None else self._at
        if step < latest:
            raise ValueError(
                f"{self.folder} holds step {latest}, later than {step}: resume from it, or save "
                "to another folder"
            )
        earlier = [other for other in present if other <= latest and other != step]
        new = self._place(step, ".new~")

        def begin() -> None:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._tidy()
            need = sum(leaf.nbytes for leaf in leaves.values())
            if shutil.disk_usage(self.folder).free < need:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            new.mkdir()

        def end() -> None:
            write_json(new / "leaves.json", _descriptions(leaves))
            write_json(new / "about.json", about)
            write_json(new / "digests.json", _digests(new))
            for path in [new, *new.rglob("*")]:
                _sync(path)
            # The best step is named before it is there; until then the one named after it counts.
            named = [name for name in self._named() if name in earlier][:1]
            write_json(self.folder / "best.json", [step, *named] if best else named)
            place, old = self._place(step), self._place(step, ".old~")
            if place.exists():
                place.rename(old)
            new.rename(place)
            _sync(self.folder)
            shutil.rmtree(old, ignore_errors=True)
            self._prune({step, *earlier[-1:], *self._named()[:1]})

        try:
            _first(begin)
            _write_arrays(new / "state", list(leaves.values()))
            _first(end)
        except BaseException as error:
            if jax.process_index() == 0:
                shutil.rmtree(new, ignore_errors=True)
            if _no_room(error):
                names = ", ".join(self._place(other).name for other in present)
                kept = f"the earlier {names} are untouched" if present else "none was saved before"
                message = f"no room in {self.folder} for the checkpoint of step {step}; {kept}"
                raise OSError(errno.ENOSPC, f"{message}: free space there and resume") from error
            raise
        self._at = step

    def last(self, like: Tree) -> Saved | None:
        """The last undamaged step, with the shapes and shardings of `like`; None without steps."""
        return self._read("last", like)

    def best(self, like: Tree) -> Saved | None:
        """The best step; with a warning the last, if the best is damaged or was not named."""
        return self._read("best", like)

    def about(self, which: Which = "last") -> dict[str, Any] | None:
        """What the run added at that step: enough to build a `like` from its settings."""
        step = self._choose(which)
        return None if step is None else self._json(step, "about")

    def _read(self, which: Which, like: Tree) -> Saved | None:
        leaves = _leaves(like, ARRAYS | jax.ShapeDtypeStruct)
        step = self._choose(which)
        if step is None:
            return None
        path = self._path(step)
        _check_same(self._json(step, "leaves"), _descriptions(leaves), path)
        arrays = _read_arrays(path / "state", list(leaves.values()))
        self._at = step
        state = jax.tree.unflatten(jax.tree.structure(like), arrays)
        return Saved(step, state, self._json(step, "about"))

    def _json(self, step: int, name: str) -> Any:
        return json.loads((self._path(step) / f"{name}.json").read_bytes())

    def _choose(self, which: Which) -> int | None:
        step = _first(lambda: self._search(which))
        return None if step < 0 else step

    def _search(self, which: Which) -> int:
        """The step to read, -1 if there is none; warns of each damaged step that it passes."""
        steps = self.steps()[::-1]
        if which == "best" and steps:
            best = [step for step in self._named() if step in steps][:1]
            if not best:
                file = self.folder / "best.json"
                why = f"{file} names no step that is there; using the last"
                arguments.warn(why, RuntimeWarning)
            steps = best + [step for step in steps if step not in best]
        then = "the one before it" if which == "last" else "the last undamaged one"
        wrong = []
        for step in steps:
            path = self._path(step)
            damage = _damage(path)
            if damage is None:
                return step
            wrong.append(f"{path}: {damage}")
            if step != steps[-1]:
                arguments.warn(f"{path} is damaged: {damage}; using {then}", RuntimeWarning)
        if wrong:
            advice = "start in another folder, or restore a copy"
            raise ValueError("\n  ".join([f"every checkpoint is damaged; {advice}:", *wrong]))
        return -1

    def _named(self) -> list[int]:
        """The steps named best, latest first; none if the file is missing or damaged."""
        try:
            named = json.loads((self.folder / "best.json").read_bytes())
        except (OSError, ValueError):
            return []
        return [step for step in named if type(step) is int] if isinstance(named, list) else []

    def _place(self, step: int, suffix: str = "") -> Path:
        return self.folder / f"step-{step:08d}{suffix}"

    def _path(self, step: int) -> Path:
        path, old = self._place(step), self._place(step, ".old~")
        return old if not path.exists() and old.exists() else path

    def _tidy(self) -> None:
        """Remove what killed saves left; a step that was being replaced gets its name back."""
        for path in self.folder.iterdir():
            if not LEFTOVER.fullmatch(path.name):
                continue
            name, _, kind = path.name.partition(".")
            if kind == "old~" and not (self.folder / name).exists():
                path.rename(self.folder / name)
            else:
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    def _prune(self, keep: set[int]) -> None:
        for other in set(self.steps()) - keep:
            # Renamed first: a half-removed step must not look like a damaged one. What cannot be
            # removed now is tried again at the next save.
            gone = self._place(other, ".gone~")
            with contextlib.suppress(OSError):
                self._path(other).rename(gone)
                shutil.rmtree(gone)


def _first(work: Callable[[], int | None]) -> int:
    """The result of work that process 0 does; the others wait for it, and fail if it fails."""
    failure, found = None, None
    if jax.process_index() == 0:
        try:
            found = work()
        except Exception as error:
            failure = error
    answer = np.asarray([failure is not None, found or 0], np.int32)
    failed, step = multihost_utils.broadcast_one_to_all(answer)  # a barrier too
    if failure is not None:
        raise failure
    if failed:
        raise RuntimeError("process 0 could not write or read a checkpoint; its error says why")
    return int(step)


# The arrays


def _leaves(tree: Tree, kinds: Any) -> dict[str, Any]:
    """The arrays of a state by their keys. Orbax gets them numbered, whatever holds them."""
    found = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        key = jax.tree_util.keystr(path) or "the state"
        if not isinstance(leaf, kinds):
            raise TypeError(
                f"{key} must be an array, not {type(leaf).__name__}: make it one, or leave it "
                "out by eqx.filter(state, eqx.is_array)"
            )
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            raise TypeError(f"{key} is a typed random key: store jax.random.key_data of it")
        found[key] = leaf
    return found


def _descriptions(leaves: dict[str, Any]) -> list[list[Any]]:
    return [[key, list(leaf.shape), str(leaf.dtype)] for key, leaf in leaves.items()]


def _check_same(saved: list[Any], here: list[Any], path: Path) -> None:
    """Refuse the state of another run, and name the first array that differs."""
    keys, known = [key for key, *_ in here], [key for key, *_ in saved]
    wrong = [f"it has no {key}" for key in keys if key not in known]
    wrong += [f"it has {key}, which this state has not" for key in known if key not in keys]
    for (key, shape, dtype), (name, its_shape, its_dtype) in zip(here, saved):
        if key != name:
            wrong.append(f"{name} is where this state has {key}")
        if shape != its_shape:
            wrong.append(f"{key} has shape {tuple(its_shape)}, not {tuple(shape)}")
        if dtype != its_dtype:
            wrong.append(f"{key} is of {its_dtype}, not {dtype}")
    if wrong:
        raise ValueError(f"{path} is of another run: {wrong[0]}")


def _local(leaf: Any) -> bool:
    """Whether this process has all of an array, so that NumPy can hold it."""
    sharding = getattr(leaf, "sharding", None)
    return sharding is None or sharding.is_fully_addressable


def _numbered(leaves: list[Any]) -> dict[str, Any]:
    """As orbax stores them; it refuses empty arrays."""
    return {f"{i:06d}": leaf for i, leaf in enumerate(leaves) if leaf.size}


def _write_arrays(path: Path, leaves: list[Any]) -> None:
    # With several processes orbax refuses arrays that each holds for itself.
    several = jax.process_count() > 1
    numbered = _numbered([np.asarray(a) if several and _local(a) else a for a in leaves])
    if not numbered:
        raise ValueError("the state holds no numbers to save")
    with _orbax() as (checkpointer, args):
        checkpointer.save(path, args=args.StandardSave(numbered))


def _read_arrays(path: Path, like: list[Any]) -> list[Any]:
    """The stored arrays, each where `like` has it."""
    empty = lambda a: np.empty(a.shape, a.dtype)
    spread = lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding)
    wanted = {key: empty(a) if _local(a) else spread(a) for key, a in _numbered(like).items()}
    with _orbax() as (checkpointer, args):
        found = checkpointer.restore(path, args=args.StandardRestore(wanted))
    return [_put(found.get(f"{i:06d}", empty(leaf)), leaf) for i, leaf in enumerate(like)]


def _put(found: Any, like: Any) -> Any:
    """The array where `like` is. It is committed to a device only if `like` is: jit refuses
    arrays that are committed to different devices."""
    if isinstance(like, np.ndarray) or isinstance(found, jax.Array):
        return found
    bound = like.sharding is not None and getattr(like, "committed", True)
    return jax.device_put(found, like.sharding if bound else None)


@contextlib.contextmanager
def _orbax() -> Iterator[tuple[Any, Any]]:
    """A checkpointer, and its arguments. Orbax logs the traceback of each thread that fails beside
    the exception; here it is silent."""
    import orbax.checkpoint as ocp

    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as checkpointer:
            yield checkpointer, ocp.args
    finally:
        logger.setLevel(level)


# The files


def _digest(folder: Path, name: str) -> str:
    with (folder / name).open("rb") as file:
        begin = lambda: hashlib.blake2b(name.encode() + b"\0", digest_size=16)
        return hashlib.file_digest(file, begin).hexdigest()


def _digests(folder: Path) -> dict[str, Any]:
    names = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    files = {name: _digest(folder, name) for name in sorted(names)}
    return {"files": files, "all": _digest_of_all(files)}


def _digest_of_all(files: dict[str, str]) -> str:
    listed = json.dumps(sorted(files.items())).encode()
    return hashlib.blake2b(listed, digest_size=16).hexdigest()


def _damage(folder: Path) -> str | None:
    """What is wrong with the first damaged file; None if the checkpoint is undamaged."""
    name = "digests.json"
    try:
        digests = json.loads((folder / name).read_bytes())
        if digests["all"] != _digest_of_all(digests["files"]):
            return f"{name} was changed"
        for name, digest in digests["files"].items():
            if _digest(folder, name) != digest:
                return f"{name} was changed or cut short"
    except FileNotFoundError:
        return f"{name} is missing"
    except OSError as error:
        return f"{name} cannot be read ({error.strerror})"
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{name} was changed or cut short"
    return None


def _sync(path: Path) -> None:
    """Write a file, or the names in a folder, through to the disk."""
    if os.name != "posix" and path.is_dir():
        return
    descriptor = os.open(path, os.O_RDONLY if os.name == "posix" else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _no_room(error: BaseException) -> bool:
    """Whether the disk is full; orbax's errors say so only in their text."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in NO_ROOM
    return any(os.strerror(number) in str(error) for number in NO_ROOM)
