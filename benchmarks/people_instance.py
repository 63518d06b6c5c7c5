"""What a problem that people bring consists of: its statement, a start, and what is known of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

import bilevax as bx

Problem = bx.BilevelProblem | bx.ConstrainedBilevelProblem
Value = Callable[[np.ndarray], float]
#: What functions of JAX take and return.
Array = Any


@dataclass(frozen=True)
class Answer:
    """What another method found: the upper objective as it reports it, and x as one vector."""

    F: float
    x: np.ndarray
    seconds: float
    iterations: int
    success: bool


@dataclass(frozen=True)
class Person:
    """A problem as a person would state it.

    `repaired` solves the lower level at x, one vector, without bilevax and returns the upper
    objective there. `reference` computes the least upper objective that could be found without
    bilevax, and `published` is the one that the list of problems gives, where it gives one.
    `nested` and `ipopt` are what a user would run instead; None where they do not apply.
    """

    number: int
    name: str
    problem: Problem
    starts: tuple[bx.Point, ...]
    repaired: Value
    reference: Callable[[], float]
    published: float | None = None
    nested: Callable[[], Answer] | None = None
    ipopt: Callable[[], Answer] | None = None

    @property
    def start(self) -> bx.Point:
        return self.starts[0]
