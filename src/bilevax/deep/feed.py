"""Which rows make a batch, how they get to the devices, and how batches become steps.

The rows of batch i follow from the seed and from i alone: a resumed run, which only needs to know
i, sees the batches that it would have seen.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterator
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from bilevax.data.checks import check_groups, check_quotas
from bilevax.data.shuffle import Shuffle
from bilevax.data.source import as_key
from bilevax.deep.augmentation import augmented, prepare
from bilevax.deep.devices import Devices
from bilevax.deep.losses import cross_entropy, membership
from bilevax.deep.methods import Batch, Method
from bilevax.deep.networks import Model, scores
from bilevax.deep.pixels import Images, stream
from bilevax.deep.tables import UNKNOWN

#: The share of a device's memory that pixels may take; the rest is for the network.
SHARE = 0.4


class Batches:
    """Batches of row numbers, computed on the host from the streams of `bilevax.data`.

    With `groups`, the group of each row, every batch has every group: the rows that
    `data.Stratified` draws, in the same order. Without, they are those of `data.Arrays`. Each row
    comes once in an epoch of its group.
    """

    def __init__(self, rows: Any, batch: int, key: Any = 0, groups: Any = None):
        rows = np.asarray(rows)
        if rows.ndim != 1 or not len(rows) or not np.issubdtype(rows.dtype, np.integer):
            raise ValueError(
                f"rows must be a list of at least one row number, not an array of {rows.dtype} of "
                f"shape {rows.shape}"
            )
        labels = np.zeros(len(rows), int) if groups is None else groups
        labels = check_groups(labels, len(rows), "Batches")
        self.batch, self.sizes = int(batch), np.bincount(labels)
        self.members = rows[np.argsort(labels, kind="stable")].astype(np.int32)
        self.per_group = check_quotas(None, batch, self.sizes, "Batches")
        key = as_key(key)
        keys = key[None] if groups is None else jax.random.split(key, len(self.sizes))
        self.keys = np.asarray(jax.random.key_data(keys))

    def __len__(self) -> int:
        """Batches with as many rows as there are: an epoch."""
        return -(-len(self.members) // self.batch)

    def __getitem__(self, i: int) -> np.ndarray:
        return self.several(i, 1)[0]

    def several(self, first: int, count: int) -> np.ndarray:
        """The batches first, …, first + count − 1, one in each row."""
        first, quotas = operator.index(first), np.asarray(self.per_group)
        if first < 0:
            raise IndexError(f"batches are numbered from 0, not {first}")
        streams = Shuffle(self.keys, *np.divmod(first * quotas, self.sizes))
        _, places = streams.take((count * quotas).tolist(), self.sizes, len(self.members))
        parts = np.split(self.members[places], np.cumsum(count * quotas)[:-1])
        return np.concatenate([part.reshape(count, -1) for part in parts], axis=1)


class Rows:
    """The rows of batch i: training rows, then the validation rows of a method that takes them.

    A method with validation rows sees the batches of `data.Levels`: validation above, training
    below, each with streams of its own. Training rows of which some have no group are drawn as
    they come.
    """

    def __init__(self, images: Images, method: type[Method], batch: int, seed: int):
        keys = {"train": as_key(seed)}
        if method.takes_validation:
            keys["validation"], keys["train"] = jax.random.split(keys["train"])
        self.parts = []
        for split, key in keys.items():
            rows = images.rows(split)
            groups = images.group[rows] if method.takes_groups else None
            if groups is not None and (groups == UNKNOWN).any():
                groups = None
            self.parts.append(Batches(rows, batch, key, groups))
        self.batch = batch * len(self.parts)
        self.epoch_batches = len(self.parts[0])

    def __getitem__(self, i: int) -> np.ndarray:
        return self.several(i, 1)[0]

    def several(self, first: int, count: int) -> np.ndarray:
        """The batches first, …, first + count − 1, one in each row."""
        return np.concatenate([part.several(first, count) for part in self.parts], axis=1)


@dataclasses.dataclass(frozen=True)
class View:
    """What the network sees of stored pixels: part of a compiled program."""

    size: tuple[int, int]
    dtype: Literal["float32", "bfloat16"]
    augment: bool
    train: int  # rows of a batch that are training rows

    def batch(self, rows: Any, seed: Array, number: Array) -> Batch:
        """Batch `number` of pixels, labels and groups; the number and the seed set its crops."""
        pixels, label, group = rows
        # The seed's own key is that of the first parameters.
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), 0x617567), number)
        given = pixels, self.size, jnp.dtype(self.dtype)
        images = augmented(key, *given) if self.augment else prepare(*given)
        return Batch(images, label, group, self.train)


class Feed:
    """Takes a method through its batches, and judges a model on a split.

    Where all pixels fit on a device they are put there once, and a chunk of steps is one compiled
    loop. Otherwise each batch is decoded ahead, or taken from the host's memory, and sent. The
    batches are the same. Every process sends only its own rows. `steps` counts the whole run.
    """

    def __init__(
        self, images: Images, rows: Rows, view: View, devices: Devices, seed: int, *,
        steps: int, chunk: int, workers: int = 0, resident: bool | None = None,
    ):  # fmt: skip
        if rows.batch % devices.count:
            whole = f"a multiple of the {devices.count} devices, which share them evenly"
            raise ValueError(f"the rows of a batch must be {whole}, not {rows.batch}")
        self.images, self.rows, self.view, self.devices = images, rows, view, devices
        self.steps, self.chunk, self.workers = steps, chunk, workers
        # The open stream of pixels, and the number of the batch that it gives next.
        self._open: tuple[int, Any] | None = None
        self.seed = devices.everywhere(np.asarray(seed, np.uint32))
        self.resident: Any = None
        if resident is None:
            pixels, memory = images.pixels, jax.local_devices()[0].memory_stats() or {}
            limit = SHARE * memory.get("bytes_limit", np.inf)
            # XLA's convolutions for CPUs are many times slower inside a compiled loop.
            on_cpu = jax.default_backend() == "cpu"
            resident = pixels is not None and pixels.nbytes <= limit and not on_cpu
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
        numbers[:count] = self.rows.several(first, count)
        given = (
            method, self.resident, self.devices.spread(numbers, axis=1), jnp.asarray(count),
            jnp.asarray(first), self.seed, self.view, self.devices.sharding(),
        )  # fmt: skip
        return _chunk(given, state)

    def _sent(self, method: Method, state: Any, first: int, count: int) -> Any:
        sent = self._from(first)
        for i in range(first, first + count):
            pixels, rows = next(sent), self.rows[i]
            batch = self.devices.joined(pixels, len(rows)), *self._labels(rows)
            state = _step((method, batch, jnp.asarray(i), self.seed, self.view), state)
        self._open = first + count, sent
        return state

    def _labels(self, rows: np.ndarray) -> tuple[Array, Array]:
        """The labels and groups of some rows, divided among the devices."""
        images, spread = self.images, self.devices.spread
        return spread(images.label[rows]), spread(images.group[rows])

    def _from(self, first: int) -> Any:
        """A stream of this process's pixels from a batch on."""
        if self._open is not None and self._open[0] == first:
            sent, self._open = self._open[1], None  # a stream that fails is not used again
            return sent
        self.close()
        return self._stream(self.rows, first, self.steps - first)

    def _stream(self, batches: Any, first: int, count: int) -> Any:
        own = self.devices.own(self.rows.batch)
        return stream(self.images, batches, first, count, self.workers, own)

    def close(self) -> None:
        """Stop decoding ahead."""
        if self._open is not None:
            self._open[1].close()
            self._open = None

    def judge(self, model: Model, split: str) -> dict[str, Any]:
        """Accuracy and mean loss on a split: of all rows, of the worst group, of each group."""
        return self.judge_and_encode(model, split, keep=False)[0]

    def judge_and_encode(
        self, model: Model, split: str, *, keep: bool = True
    ) -> tuple[dict[str, Any], np.ndarray]:
        """What `judge` says, and the features of the split's rows, in one pass over its images."""
        rows, features = self.images.rows(split), []
        total: Any = None
        for batch in self._in_order(rows):
            *found, encoded = _judged((model, *batch, len(self.images.groups)))
            total = found if total is None else jax.tree.map(jnp.add, total, found)
            if keep:
                features.append(self.devices.gathered(encoded))
        right, loss = (np.asarray(part, float) for part in total)
        groups, known = len(self.images.groups), self.images.group[rows]
        count = np.bincount(np.where(known == UNKNOWN, groups, known), minlength=groups + 1)
        kept = np.concatenate(features)[: len(rows)] if keep else np.empty(0)
        return accuracies(right, loss, count), kept

    def _in_order(self, rows: np.ndarray) -> Iterator[tuple[Any, ...]]:
        """The rows in batches of one size: pixels, label, group, and which of them count.

        The last batch is filled up with the last row, which does not count again.
        """
        size = self.rows.batch
        padded = np.concatenate([rows, np.full(-len(rows) % size, rows[-1], rows.dtype)])
        batches, spread = padded.reshape(-1, size), self.devices.spread
        view = dataclasses.replace(self.view, augment=False, train=size)
        if self.resident is not None:
            pixels = ((self.resident[0], spread(batch)) for batch in batches)
        else:
            sent = self._stream(batches, 0, len(batches))
            pixels = ((self.devices.joined(part, size), None) for part in sent)
        for i, (batch, taken) in enumerate(zip(batches, pixels)):
            inside = np.arange(size) + i * size < len(rows)
            yield taken, *self._labels(batch), spread(inside), view


@eqx.filter_jit(donate="all-except-first")
def _chunk(given: tuple, state: Any) -> Any:
    """Steps first … first + count − 1 as one loop; one compilation for every count."""
    method, arrays, numbers, count, first, seed, view, sharding = given

    def step(i: Array, state: Any) -> Any:
        taken = [a.at[numbers[i]].get(mode="promise_in_bounds") for a in arrays]
        taken = lax.with_sharding_constraint(taken, sharding)
        return method.step(state, view.batch(taken, seed, first + i))

    return lax.fori_loop(0, count, step, state)


@eqx.filter_jit(donate="all-except-first")
def _step(given: tuple, state: Any) -> Any:
    method, rows, number, seed, view = given
    return method.step(state, view.batch(rows, seed, number))


@eqx.filter_jit
def _judged(given: tuple) -> tuple[Array, Array, Array]:
    """How many rows of each group are right, the sum of their losses, and the features."""
    model, (pixels, rows), label, group, inside, view, groups = given
    if rows is not None:
        pixels = pixels.at[rows].get(mode="promise_in_bounds")
    images = prepare(pixels, view.size, dtype=jnp.dtype(view.dtype))
    features, _ = model.encoder(images, "running")
    logits = scores(features, model.head)
    # The last column is of rows whose group is not known.
    group = jnp.where(group == UNKNOWN, groups, group)
    member = membership(group, groups + 1) * inside[:, None].astype(jnp.float32)
    right = (jnp.argmax(logits, axis=1).astype(label.dtype) == label).astype(jnp.float32)
    return right @ member, cross_entropy(logits, label) @ member, features


def accuracies(right: np.ndarray, loss: np.ndarray, count: np.ndarray) -> dict[str, Any]:
    """From the sums over each group, with one more entry for rows whose group is not known.

    A group without rows has no accuracy: None. Where no group has any, nor has the worst one.
    """
    known = np.flatnonzero(count[:-1])
    shares, losses = right[known] / count[known], loss[known] / count[known]
    groups = dict(zip(known.tolist(), shares.tolist()))
    return {
        "average": float(right.sum() / count.sum()),
        "worst": float(shares.min()) if known.size else None,
        "groups": [groups.get(g) for g in range(len(count) - 1)],
        "loss": float(loss.sum() / count.sum()),
        "worst_loss": float(losses.max()) if known.size else None,
    }
