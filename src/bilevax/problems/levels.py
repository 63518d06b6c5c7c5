"""Functions of one level, where the data has minibatches for each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
from jaxtyping import Array

from bilevax.data import LevelBatch, Levels


class OfLevel(eqx.Module):
    """A function of one level, called with the minibatches of both levels."""

    function: Callable[..., Array]
    level: str = eqx.field(static=True)

    def __call__(self, *arguments: Any) -> Array:
        *blocks, data = arguments
        return self.function(*blocks, getattr(data, self.level))


def of_level(function: Callable[..., Array], level: str, data: Any) -> Callable[..., Array]:
    """The function, with its own level's part of the data if these are apart."""
    apart = isinstance(data, Levels | LevelBatch) and not isinstance(function, OfLevel)
    return OfLevel(function, level) if apart else function
