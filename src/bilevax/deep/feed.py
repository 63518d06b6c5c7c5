"""How rows become batches on the device, and batches become steps."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from bilevax.deep.augment import augmented, prepare
from bilevax.deep.batches import Balanced, Uniform
from bilevax.deep.devices import Devices, memory
from bilevax.deep.methods import Batch, Method, cross_entropy
from bilevax.deep.networks import Model
from bilevax.deep.pixels import Images, stream

#: The share of a device's memory that pixels may take; the rest is for the network.
SHARE = 0.4


@dataclasses.dataclass(frozen=True)
class View:
    """What the network sees of stored pixels: part of a compiled program."""

    size: tuple[int, int]
    dtype: Literal["float32", "bfloat16"]
    augment: bool
    train: int  # rows of a batch that are training rows

    def batch(self, pixels: Array, label: Array, group: Array, key: Array) -> Batch:
        dtype = jnp.dtype(self.dtype)
        if self.augment:
            images = augmented(key, pixels, self.size, dtype=dtype)
        else:
            images = prepare(pixels, self.size, dtype=dtype)
        return Batch(images, label, group, self.train)


class Rows:
    """The rows of batch i: training rows, then the validation rows of a method that takes them."""

    def __init__(self, images: Images, method: type[Method], batch: int, seed: int):
        train = images.rows("train")
        if method.takes_groups:
            self.train: Any = Balanced(train, images.group[train], batch, seed)
        else:
            self.train = Uniform(train, batch, seed)
        self.held = None
        if method.takes_validation:
            held = images.rows("validation")
            # Streams of their own, numbered behind those of the training rows.
            self.held = Balanced(held, images.group[held], batch, seed, first=len(images.groups))
        self.batch = batch if self.held is None else 2 * batch
        self.epoch_batches: int = self.train.epoch_batches

    def __getitem__(self, i: int) -> np.ndarray:
        if self.held is None:
            return self.train[i]
        return np.concatenate([self.train[i], self.held[i]])


class Feed:
    """Takes a method through its batches, and judges a model on a split.

    Where all pixels fit on a device they are put there once, and a chunk of steps is one compiled
    loop; else each batch is decoded ahead, or taken from the host's memory, and sent. The batches
    are the same. Every process sends only its own rows. `steps` are those of the whole run.
    """

    def __init__(
        self, images: Images, rows: Rows, view: View, devices: Devices, seed: int, *,
        steps: int, chunk: int, workers: int = 0, resident: bool | None = None,
    ):  # fmt: skip
        devices.check(rows.batch, "the rows of a batch")
        self.images, self.rows, self.view, self.devices = images, rows, view, devices
        self.steps, self.chunk, self.workers = steps, chunk, workers
        self._ahead: tuple[int, Any] | None = None  # a batch's number, and a stream from it on
        self.seed = devices.everywhere(np.asarray(seed, np.uint32))
        self.resident: Any = None
        if resident is None:
            # XLA's convolutions for CPUs are many times slower inside a compiled loop.
            pixels = images.pixels
            fits = pixels is not None and pixels.nbytes <= SHARE * memory()
            resident = fits and jax.default_backend() != "cpu"
        if resident:
            self.resident = devices.everywhere((images.pixels, images.label, images.group))

    def advance(self, method: Method, state: Any, first: int, count: int) -> Any:
        """The state after the batches first … first + count − 1."""
        for start in range(first, first + count, self.chunk):
            steps = min(self.chunk, first + count - start)
            run = self._here if self.resident is not None else self._sent
            state = run(method, state, start, steps)
        return state

    def _here(self, method: Method, state: Any, first: int, count: int) -> Any:
        numbers = np.zeros((self.chunk, self.rows.batch), np.int32)
        numbers[:count] = [self.rows[first + i] for i in range(count)]
        given = (
            method, self.resident, self.devices.spread(numbers, axis=1), jnp.asarray(count),
            jnp.asarray(first), self.seed, self.view, self.devices.sharding(),
        )  # fmt: skip
        return _chunk(given, state)

    def _sent(self, method: Method, state: Any, first: int, count: int) -> Any:
        sent = self._from(first)
        for i in range(first, first + count):
            pixels, rows = next(sent), self.rows[i]
            label, group = (
                self.devices.spread(a[rows]) for a in (self.images.label, self.images.group)
            )
            batch = (self.devices.joined(pixels, len(rows)), label, group)
            state = _step((method, batch, jnp.asarray(i), self.seed, self.view), state)
        self._ahead = first + count, sent
        return state

    def _from(self, first: int) -> Any:
        """A stream of this process's pixels from a batch on; the open one, if it stands there."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead[0] == first:
            return ahead[1]
        if ahead is not None:
            ahead[1].close()
        mine = _Own(self.rows, self.devices.own(self.rows.batch))
        return stream(self.images, mine, first, self.steps - first, self.workers)

    def close(self) -> None:
        """End the decoding ahead."""
        if self._ahead is not None:
            self._ahead[1].close()
            self._ahead = None

    def judge(self, model: Model, split: str) -> dict[str, Any]:
        """Accuracy and mean loss on a split: of all rows, of the worst group, of each group."""
        rows, size = self.images.rows(split), self.rows.batch
        batches = _Padded(rows, size)
        total: Any = None
        view = dataclasses.replace(self.view, augment=False, train=size)
        sent = None
        if self.resident is None:
            own = self.devices.own(size)
            sent = stream(self.images, _Own(batches, own), 0, len(batches), self.workers)
        for i in range(len(batches)):
            numbers = batches[i]
            inside = np.arange(size) + i * size < len(rows)
            pixels: Any
            if sent is not None:
                pixels = (self.devices.joined(next(sent), size), None)
            else:
                assert self.resident is not None
                pixels = (self.resident[0], self.devices.spread(numbers))
            label, group, inside = (
                self.devices.spread(a)
                for a in (self.images.label[numbers], self.images.group[numbers], inside)
            )
            given = (model, pixels, label, group, inside, view, len(self.images.groups))
            found = _judged(given)
            total = found if total is None else jax.tree.map(jnp.add, total, found)
        right, loss = (np.asarray(part, float) for part in total)
        count = np.bincount(self.images.group[rows], minlength=len(right))
        accuracies = right / count
        return {
            "average": float(right.sum() / count.sum()),
            "worst": float(accuracies.min()),
            "groups": accuracies.tolist(),
            "loss": float(loss.sum() / count.sum()),
            "worst_loss": float((loss / count).max()),
        }


@dataclasses.dataclass(frozen=True)
class _Own:
    """This process's part of each batch."""

    rows: Any
    part: slice

    def __getitem__(self, i: int) -> np.ndarray:
        return self.rows[i][self.part]


@dataclasses.dataclass(frozen=True)
class _Padded:
    """Rows in order, in batches of one size; the last is filled up with its first row."""

    rows: np.ndarray
    size: int

    def __len__(self) -> int:
        return -(-len(self.rows) // self.size)

    def __getitem__(self, i: int) -> np.ndarray:
        part = self.rows[i * self.size : (i + 1) * self.size]
        return np.concatenate([part, np.full(self.size - len(part), part[0], part.dtype)])


@eqx.filter_jit(donate="all-except-first")
def _chunk(given: tuple, state: Any) -> Any:
    """Steps first … first + count − 1 as one loop; one compilation for every count."""
    method, (pixels, label, group), numbers, count, first, seed, view, sharding = given
    key = augmentation_key(seed)

    def step(i: Array, state: Any) -> Any:
        rows = numbers[i]
        taken = [a.at[rows].get(mode="promise_in_bounds") for a in (pixels, label, group)]
        taken = lax.with_sharding_constraint(taken, sharding)
        return method.step(state, view.batch(*taken, jax.random.fold_in(key, first + i)))

    return lax.fori_loop(0, count, step, state)


@eqx.filter_jit(donate="all-except-first")
def _step(given: tuple, state: Any) -> Any:
    method, batch, number, seed, view = given
    return method.step(
        state, view.batch(*batch, jax.random.fold_in(augmentation_key(seed), number))
    )


def augmentation_key(seed: Array) -> Array:
    """Apart from the key of the first parameters, which has the seed itself."""
    return jax.random.fold_in(jax.random.key(seed), 0x617567)


@eqx.filter_jit
def _judged(given: tuple) -> tuple[Array, Array]:
    """How many rows of each group are right, and the sum of their losses."""
    model, (pixels, rows), label, group, inside, view, groups = given
    if rows is not None:
        pixels = pixels.at[rows].get(mode="promise_in_bounds")
    logits = model.logits(prepare(pixels, view.size, dtype=jnp.dtype(view.dtype)))
    member = (group[:, None] == jnp.arange(groups, dtype=group.dtype)[None, :]) & inside[:, None]
    member = member.astype(jnp.float32)
    right = (jnp.argmax(logits, axis=1).astype(label.dtype) == label).astype(jnp.float32)
    return right @ member, cross_entropy(logits, label) @ member
