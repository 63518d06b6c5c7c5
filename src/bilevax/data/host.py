"""Minibatches from any Python iterator."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from bilevax.arguments import whole
from bilevax.data.reader import Epochs, Reader, digest, named
from bilevax.data.source import HELD_OUT, Source, as_key
from bilevax.trees import Tree

# The number of epochs between the first epochs of two certificates.
EPOCHS_APART = 1 << 13


@dataclasses.dataclass(frozen=True)
class LaterEpochs:
    """The epochs of a function, counted from `first` on."""

    make: Callable[[int], Iterable[Tree]]
    first: int

    def __call__(self, epoch: int) -> Iterable[Tree]:
        return self.make(self.first + epoch)

    def __repr__(self) -> str:
        return f"LaterEpochs({named(self.make)}, {self.first})"


class HostState(eqx.Module):
    """Some batches, the next one at `cursor`, and how far the epochs were read for them."""

    buffer: Tree
    cursor: Array
    epoch: Array
    fetched: Array
    drawn: Array


class Host(Source[HostState]):
    """Minibatches that Python makes: a grain dataset, a list, or a function `make(epoch)`.

    `make(epoch)` returns an iterable of that epoch's batches, pytrees of arrays with `batch` rows
    each. It must give the same batches each time it is called with the same epoch, because a saved
    state is resumed by reading up to where it stopped. An iterable that can be read once an epoch
    may replace the function. It decides the order: the key of `init` does not change it.

    The state holds `buffer` batches for compiled loops, and a thread reads as many ahead. `example`
    is one batch, or its shapes; without it `init` reads the first batch. An epoch is the whole
    iterable, or its first `batches_per_epoch` batches.

    Certificates draw from epochs that no run reaches, make(2³⁰), make(2³⁰ + 1), …, each of which
    must have an order of its own; or from `held_out(epoch)`, a function like `make` of other
    samples.
    """

    batch: int = eqx.field(static=True)
    buffer: int = eqx.field(static=True)
    reader: Reader = eqx.field(static=True)
    others: LaterEpochs | None = eqx.field(static=True)
    others_per_epoch: int | None = eqx.field(static=True)

    def __init__(
        self,
        make: Callable[[int], Iterable[Tree]] | Iterable[Tree],
        *,
        batch: int,
        example: Tree = None,
        buffer: int = 8,
        batches_per_epoch: int | None = None,
        held_out: Callable[[int], Iterable[Tree]] | None = None,
    ):
        whole(batch, "Host: batch", 1)
        whole(buffer, "Host: buffer", 2)  # of which one step of a method takes two
        if batches_per_epoch is not None:
            whole(batches_per_epoch, "Host: batches_per_epoch", 1)
            batches_per_epoch = int(batches_per_epoch)
        check_make(make, "make")
        self.others = LaterEpochs(make, HELD_OUT) if callable(make) else None
        self.others_per_epoch = batches_per_epoch
        if held_out is not None:
            check_make(held_out, "held_out")
            if not callable(held_out):
                raise TypeError("Host: held_out must be a function held_out(epoch)")
            self.others, self.others_per_epoch = LaterEpochs(held_out, 0), None
        self.batch, self.buffer = int(batch), int(buffer)
        epochs = Epochs(make, self.batch, batches_per_epoch)
        self.reader = Reader(epochs, self.buffer, shapes_of(example, self.batch))

    def init(self, key: Any) -> HostState:
        as_key(key)
        empty = lambda s: jnp.zeros((self.buffer, *s.shape), s.dtype)
        buffer, zero = jax.tree.map(empty, self.reader.shapes()), jnp.zeros((), jnp.int32)
        cursor = jnp.asarray(self.buffer, jnp.int32)
        return HostState(buffer, cursor, epoch=zero, fetched=zero, drawn=jnp.zeros((), int))

    def draw(self, state: HostState) -> tuple[HostState, Tree]:
        # After the last batch come NaNs, which show; the last batch again would not.
        batch = jax.tree.map(lambda b: b.at[state.cursor].get(mode="fill"), state.buffer)
        cursor = jnp.minimum(state.cursor + 1, self.buffer)
        return dataclasses.replace(state, cursor=cursor, drawn=state.drawn + self.batch), batch

    def ready(self, state: HostState, count: int = 1) -> Array:
        return state.cursor + count <= self.buffer

    def refilled(self, state: HostState) -> HostState:
        used = int(state.cursor)
        if used == 0:
            return state
        shapes = jax.tree.map(lambda b: jax.ShapeDtypeStruct(b.shape[1:], b.dtype), state.buffer)
        position = int(state.epoch), int(state.fetched)
        batches, position = self.reader.take(position, used, shapes)
        missing = used - len(batches)  # those that cannot be read; the others come first

        def filled(old: Array, *new: np.ndarray) -> Array:
            return jnp.concatenate([old[:missing], old[used:], np.stack(new)])

        buffer = jax.tree.map(filled, state.buffer, *batches)
        cursor, epoch, fetched = (jnp.asarray(n, jnp.int32) for n in (missing, *position))
        return HostState(buffer, cursor, epoch, fetched, state.drawn)

    def batches(self, state: HostState) -> Iterator[tuple[HostState, Tree]]:
        """Those that the state holds, and then as they are read: no device has them in between."""
        for at in range(int(state.cursor), self.buffer):
            batch = jax.tree.map(lambda b, at=at: np.asarray(b[at]), state.buffer)
            state = dataclasses.replace(
                state, cursor=jnp.asarray(at + 1, jnp.int32), drawn=state.drawn + self.batch
            )
            yield state, batch
        shapes = jax.tree.map(lambda b: jax.ShapeDtypeStruct(b.shape[1:], b.dtype), state.buffer)
        drawn, position = int(state.drawn), (int(state.epoch), int(state.fetched))
        while True:
            (batch,), position = self.reader.take(position, 1, shapes)
            drawn += self.batch
            epoch, fetched = (jnp.asarray(n, jnp.int32) for n in position)
            yield HostState(state.buffer, state.cursor, epoch, fetched, jnp.asarray(drawn)), batch

    def held_out(self, key: int) -> Host:
        if self.others is None:
            raise ValueError(
                "Host: the same batches in each epoch say nothing of a certificate's confidence; "
                "pass a function make(epoch) that shuffles, or held_out=, or hold all samples in "
                "memory with bilevax.data.Arrays"
            )
        make = LaterEpochs(self.others.make, self.others.first + EPOCHS_APART * key)
        check_shuffled(make)
        return Host(
            make,
            batch=self.batch,
            example=self.reader.shapes(),
            buffer=self.buffer,
            batches_per_epoch=self.others_per_epoch,
        )


def check_make(make: Any, name: str) -> None:
    """Refuse a `make` that cannot be read once an epoch."""
    if isinstance(make, Iterator):
        raise TypeError(
            f"Host: {name} is a {type(make).__name__}, which can be read only once; pass a "
            f"function {name}(epoch) that returns a new one, such as the generator function itself"
        )
    if callable(make):
        try:
            inspect.signature(make).bind(0)
        except TypeError as error:
            raise TypeError(f"Host: {name} must take the epoch, as in {name}(0); {error}") from None
        except ValueError:  # a builtin that does not tell its arguments
            pass
    elif not isinstance(make, Iterable):
        raise TypeError(
            f"Host: {name} must be a function {name}(epoch) that returns an iterable of batches, "
            f"or such an iterable, not {make!r}"
        )


def check_shuffled(make: LaterEpochs) -> None:
    """Refuse epochs that begin alike: the same batches again are no new evidence."""
    firsts = [list(itertools.islice(make(epoch), 2)) for epoch in (0, 1)]
    few = any(len(first) < 2 for first in firsts)  # an epoch of one batch has no order
    if not few and len({digest(jax.tree.map(np.asarray, first[0])) for first in firsts}) == 1:
        raise ValueError(
            f"Host: epochs {make.first} and {make.first + 1} begin with the same batch, but "
            "certificates need epochs that are shuffled anew; let make(epoch) shuffle by epoch, or "
            "give held_out="
        )


def shapes_of(example: Tree, rows: int) -> Tree:
    """The shapes of an example batch; None if there is none."""
    if example is None:
        return None

    def leaf(path: tuple, value: Any) -> jax.ShapeDtypeStruct:
        shape, dtype = np.shape(value), jax.dtypes.canonicalize_dtype(jnp.result_type(value))
        if shape[:1] != (rows,):
            raise ValueError(
                f"Host: example{jax.tree_util.keystr(path)} must have batch={rows} rows, but has "
                f"shape {shape}"
            )
        return jax.ShapeDtypeStruct(shape, dtype)

    return jax.tree_util.tree_map_with_path(leaf, example)
