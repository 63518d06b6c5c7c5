"""What a source of minibatches is, and the one that has a stream for each of two levels."""

from __future__ import annotations

import abc
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from bilevax.trees import Tree

State = TypeVar("State")

# Certificates use keys and epochs from here on; solvers count theirs from 0.
HELD_OUT = 1 << 30
# One generator for all streams, whatever JAX's default is where a stored state is resumed.
GENERATOR = "threefry2x32"


class Source(eqx.Module, Generic[State]):
    """A stream of minibatches, each a pytree with `batch` rows along axis 0.

    It holds what is constant; where the stream stands is its state, which holds arrays only and
    has a field `drawn`, the number of samples drawn so far.
    """

    batch: eqx.AbstractVar[int]

    @abc.abstractmethod
    def init(self, key: Any) -> State:
        """The state before the first draw. `key` is a typed JAX key or a whole number."""

    @abc.abstractmethod
    def draw(self, state: State) -> tuple[State, Tree]:
        """The next minibatch; may be compiled. Only a state that is `ready` has one."""

    def ready(self, state: State, count: int = 1) -> Array:
        """Whether `draw` has so many batches without the help of the host."""
        return jnp.asarray(True)

    def refilled(self, state: State) -> State:
        """On the host: the same position of the stream, with as many batches as the state holds."""
        return state

    def batches(self, state: State) -> Iterator[tuple[State, Tree]]:
        """On the host: minibatch after minibatch as NumPy arrays, each with the state after it."""
        draw = eqx.filter_jit(self.draw)
        while True:
            if not bool(self.ready(state)):
                state = self.refilled(state)
            state, batch = draw(state)
            yield state, jax.tree.map(np.asarray, batch)

    def everything(self) -> Tree | None:
        """All samples as one batch; None if they are not in memory."""
        return None

    def held_out(self, key: int) -> Source:
        """Where a certificate draws its minibatches, with `init(HELD_OUT + key)`.

        They must not depend on those that a method has drawn.
        """
        return self


class LevelBatch(eqx.Module):
    """A minibatch of the upper and one of the lower level."""

    upper: Tree
    lower: Tree


class LevelsState(eqx.Module):
    upper: Any
    lower: Any

    @property
    def drawn(self) -> Array:
        return self.upper.drawn + self.lower.drawn


class Levels(Source[LevelsState]):
    """Independent minibatches for both levels, such as validation above and training below."""

    upper: Source
    lower: Source
    batch: int = eqx.field(static=True)

    def __init__(self, upper: Source, lower: Source):
        for name, source in (("upper", upper), ("lower", lower)):
            if not isinstance(source, Source):
                raise TypeError(
                    f"Levels: {name} must be a source such as bilevax.data.Arrays(…), not "
                    f"{type(source).__name__}"
                )
        if upper is lower and upper.everything() is None:
            raise ValueError(
                "Levels: upper and lower are the same source, read by the host, and would give the "
                "same batches; make two"
            )
        self.upper, self.lower = upper, lower
        self.batch = upper.batch + lower.batch

    def init(self, key: Any) -> LevelsState:
        above, below = jax.random.split(as_key(key))
        return LevelsState(self.upper.init(above), self.lower.init(below))

    def draw(self, state: LevelsState) -> tuple[LevelsState, LevelBatch]:
        above, upper = self.upper.draw(state.upper)
        below, lower = self.lower.draw(state.lower)
        return LevelsState(above, below), LevelBatch(upper, lower)

    def ready(self, state: LevelsState, count: int = 1) -> Array:
        return self.upper.ready(state.upper, count) & self.lower.ready(state.lower, count)

    def refilled(self, state: LevelsState) -> LevelsState:
        return LevelsState(self.upper.refilled(state.upper), self.lower.refilled(state.lower))

    def batches(self, state: LevelsState) -> Iterator[tuple[LevelsState, LevelBatch]]:
        both = zip(self.upper.batches(state.upper), self.lower.batches(state.lower))
        for (above, upper), (below, lower) in both:
            yield LevelsState(above, below), LevelBatch(upper, lower)

    def held_out(self, key: int) -> Levels:
        return Levels(self.upper.held_out(key), self.lower.held_out(key))

    def everything(self) -> LevelBatch | None:
        upper, lower = self.upper.everything(), self.lower.everything()
        return None if upper is None or lower is None else LevelBatch(upper, lower)


def minibatches(source: Source) -> float:
    """How many minibatches all samples are, of a source that has them in memory."""
    batch = jax.eval_shape(lambda: source.draw(source.init(0))[1])
    size = lambda tree: sum(leaf.size for leaf in jax.tree.leaves(tree))
    return size(source.everything()) / max(size(batch), 1)


def as_key(key: Any) -> Array:
    """A typed key of the one generator, from a typed key of any or from a whole number."""
    if isinstance(key, int | np.integer) and not isinstance(key, bool):
        return jax.random.key(int(key), impl=GENERATOR)
    if isinstance(key, jax.Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        if key.ndim != 0:
            raise TypeError(f"key must be one key, not an array of them of shape {key.shape}")
        data = jax.random.key_data(key)
        if data.shape != (2,):  # a key of another generator
            data = jax.random.bits(key, (2,), jnp.uint32)
        return jax.random.wrap_key_data(data, impl=GENERATOR)
    raise TypeError(f"key must be jax.random.key(seed) or a whole number, not {key!r}")
