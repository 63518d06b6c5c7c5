"""A stream of its own for each level of a bilevel problem."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
from jaxtyping import Array

from bilevax.data.source import Source, as_key
from bilevax.trees import Tree


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

    def held_out(self, key: int) -> Levels:
        return Levels(self.upper.held_out(key), self.lower.held_out(key))

    def everything(self) -> LevelBatch | None:
        upper, lower = self.upper.everything(), self.lower.everything()
        return None if upper is None or lower is None else LevelBatch(upper, lower)
