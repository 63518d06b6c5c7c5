"""Where a run ends without a certificate."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import jax
import numpy as np


class Clock:
    """The seconds of a run, those before a resumption included and compilation left out."""

    def __init__(self, before: float = 0.0):
        self._begun = time.perf_counter() - before

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._begun

    def leave_out(self, seconds: float) -> None:
        self._begun += seconds


@dataclasses.dataclass
class Limits:
    """`max_gradients` counts from the start of a run, `max_seconds` from `begin`."""

    max_gradients: int | None = None
    max_seconds: float | None = None
    begun: float = 0.0
    most: int = 0

    def begin(self, clock: Clock, counter: Any) -> None:
        # A 32-bit counter of gradients, which is what JAX has without x64, ends somewhere.
        countable = int(np.iinfo(counter.dtype).max) // 2
        asked = self.max_gradients
        self.most = countable if asked is None else min(int(asked), countable)
        self.begun = clock.seconds

    def late(self, clock: Clock) -> bool:
        if self.max_seconds is None:
            return False
        late = clock.seconds - self.begun > self.max_seconds
        if jax.process_count() == 1:
            return late
        # Several processes run the same program: what one does, all must do.
        from jax.experimental.multihost_utils import broadcast_one_to_all

        return bool(broadcast_one_to_all(np.asarray(late)))


def is_true(answer: Any) -> bool:
    """Whether a callback returned True, of whatever library; None and other answers go on."""
    return np.ndim(answer) == 0 and np.asarray(answer).dtype == bool and bool(answer)
