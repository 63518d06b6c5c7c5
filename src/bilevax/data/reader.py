"""The batches of an iterator, epoch after epoch, checked, from any position."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import queue
import threading
from collections.abc import Iterator
from typing import Any, TypeAlias

import jax
import numpy as np

from bilevax.data.checks import DataError, check_finite, numeric
from bilevax.trees import Tree

# An epoch, and how many of its batches have been read.
Position: TypeAlias = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Epochs:
    """The batches of make(0), make(1), …, each of `rows` rows."""

    make: Any
    rows: int
    per_epoch: int | None

    def after(self, position: Position, shapes: Tree) -> Iterator[tuple[Position, Tree]]:
        """The batches after a position, checked, each with the position after it.

        Without `shapes` the first batch sets the shapes of the others.
        """
        epoch, skip = position
        while True:
            seen: dict[bytes, int] = {}
            for number, raw in self._numbered(epoch, skip):
                here = f"batch {number} of epoch {epoch}"
                try:
                    batch = copied(raw, here)
                    if number >= skip:
                        check_batch(batch, shapes, self.rows, here)
                except (DataError, TypeError) as error:
                    index = getattr(error, "index", None)
                    raise DataError(str(error), epoch, number, index) from None
                first = seen.setdefault(digest(batch), number)
                if first != number:
                    why = f"{here} repeats batch {first}; an epoch must give each batch once"
                    why += " (if it does, let an array of each batch number it)"
                    raise DataError(why, epoch, number)
                if number >= skip:
                    shapes = shapes_of(batch)
                    yield (epoch, number + 1), batch
            epoch, skip = epoch + 1, 0

    def _numbered(self, epoch: int, skip: int) -> Iterator[tuple[int, Any]]:
        """One epoch as the iterator gives it; refuses one that ends too early."""
        count = 0
        try:
            batches: Any = self.make(epoch) if callable(self.make) else self.make
            for raw in itertools.islice(batches, self.per_epoch):
                yield count, raw
                count += 1
        except Exception as error:
            why = f"batch {count} of epoch {epoch} could not be read: {error!r}"
            raise DataError(why, epoch, count) from error
        if count == 0:
            why = "gave no batch at all; make(epoch) must return a new iterable each time"
        elif count < (self.per_epoch or 0):
            why = f"ended after {count} batches, not batches_per_epoch={self.per_epoch}"
        elif count < skip:
            why = f"ended after {count} batches, but the state to go on from had read {skip} of it"
        else:
            return
        raise DataError(f"epoch {epoch} {why}", epoch, count)


def copied(raw: Tree, here: str) -> Tree:
    """A batch as NumPy arrays of its own: an iterator may use its arrays again for the next."""
    name = lambda path: f"{here}: batch{jax.tree_util.keystr(path)}"
    own = lambda path, value: np.array(numeric(value, name(path)))
    return jax.tree_util.tree_map_with_path(own, raw)


def check_batch(batch: Tree, shapes: Tree, rows: int, here: str) -> None:
    """Refuse a batch that is short, of other shapes, or not finite."""
    likes = batch if shapes is None else shapes
    structure, wanted = jax.tree.structure(batch), jax.tree.structure(likes)
    if structure != wanted or structure.num_leaves == 0:
        raise DataError(
            f"{here} has the structure {structure}; it must hold arrays, in the structure of the "
            f"first batch, {wanted}"
        )
    named = jax.tree_util.tree_leaves_with_path(batch)
    for (path, leaf), like in zip(named, jax.tree.leaves(likes)):
        name = f"{here}: batch{jax.tree_util.keystr(path)}"
        if leaf.shape[:1] != (rows,):
            short = leaf.ndim == 0 or len(leaf) < rows
            has = f"{len(leaf)} rows" if leaf.ndim else "no rows"
            advice = "drop or pad it" if short else "cut it"
            raise DataError(f"{name} has {has}, not batch={rows}; {advice}")
        if (leaf.shape, leaf.dtype) != (like.shape, like.dtype):
            raise DataError(
                f"{name} has shape {leaf.shape} and dtype {leaf.dtype}, not {like.shape} and "
                f"{like.dtype} like the first"
            )
        check_finite(leaf, name)


def shapes_of(batch: Tree) -> Tree:
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), batch)


def digest(batch: Tree) -> bytes:
    """16 bytes that are the same for the same batch, and for no other."""
    content = hashlib.blake2b(digest_size=16)
    for leaf in jax.tree.leaves(batch):
        # As plain bytes, because bfloat16 has no buffer.
        content.update(np.ascontiguousarray(leaf).reshape(-1).view(np.uint8).data)
    return content.digest()


def read_ahead(items: Iterator[Any], depth: int) -> Iterator[Any]:
    """The items of an endless iterator, up to `depth` of them read in advance by a thread.

    An exception of the iterator is raised where its item is asked for. The thread ends when this
    generator is dropped.
    """
    ahead: queue.Queue[Any] = queue.Queue(depth)
    stop = threading.Event()
    threading.Thread(target=_fill, args=(items, ahead, stop), daemon=True).start()
    try:
        while True:
            item = ahead.get()
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        stop.set()
        with contextlib.suppress(queue.Empty):
            while True:  # make room for the item with which the thread may be waiting
                ahead.get_nowait()


def _fill(items: Iterator, into: queue.Queue, stop: threading.Event) -> None:
    try:
        for item in items:
            into.put(item)
            if stop.is_set():
                return
    except BaseException as error:  # not only Exception, or the reader would wait for ever
        into.put(error)


class Reader:
    """Takes batches from the position of a state.

    From the position where it stopped last it reads on; for any other it reads the epoch again up
    to there. It is not part of a state.
    """

    def __init__(self, epochs: Epochs, depth: int, shapes: Tree):
        self._epochs, self._depth, self._shapes = epochs, depth, shapes
        # The position of the last read, and what comes after it.
        self._live: tuple[Position, Iterator[tuple[Position, Tree]]] | None = None

    def shapes(self) -> Tree:
        """The shapes of a batch, read from the first one if no example was given."""
        if self._shapes is None:
            live = self._at((0, 0), None)
            first = next(live)
            self._live, self._shapes = ((0, 0), itertools.chain([first], live)), shapes_of(first[1])
        return self._shapes

    def take(self, position: Position, count: int, shapes: Tree) -> tuple[list[Tree], Position]:
        """The next batches after a position, and the position after them.

        There are fewer, but at least one, if one of them cannot be read; the next call says why.
        """
        live, batches = self._at(position, shapes), []
        for _ in range(count):
            try:
                position, batch = next(live)
            except DataError:
                if not batches:
                    raise
                return batches, position
            batches.append(batch)
        self._live = position, live
        return batches, position

    def _at(self, position: Position, shapes: Tree) -> Iterator[tuple[Position, Tree]]:
        """The batches after a position. They leave `_live`, and return there unless one fails."""
        live, self._live = self._live, None
        if live is not None and live[0] == position:
            return live[1]
        return read_ahead(self._epochs.after(position, shapes), self._depth)

    def __repr__(self) -> str:
        return f"Reader({named(self._epochs.make)})"


def named(make: Any) -> str:
    """A function's name. As part of a run's fingerprint it is the same in the next process."""
    return getattr(make, "__qualname__", type(make).__name__)
