"""How much work a certificate may be: where everything is cheap, it looks more closely."""

from __future__ import annotations

from bilevax.problems import Form, Point
from bilevax.programs import entries

# A problem and a point of at most so many entries are small: a gradient takes microseconds.
SMALL = 1 << 16


def is_small(problem: Form, point: Point) -> bool:
    return entries((problem, point)) <= SMALL
