"""When a run is checked, how long its pieces are, and when it counts as stalled."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import jax

from bilevax.programs import LARGE

# A run is checked when its gradients have grown by this factor since the last check: a schedule
# that depends on the count of gradients alone, so that no run depends on the clock.
FIRST_CHECK, CHECK_GROWTH = 64, 1.05
# A check on all samples is expensive where steps take minibatches: before every check lie ten times
# its cost.
CHECK_SPARING = 10
# Between checks the program returns to the host this often, to show progress and to hear Ctrl-C.
PIECE_SECONDS = 0.2
LEAST_PIECE, MOST_PIECE = 8, 1 << 30
# Up to so many gradients steps are taken by a program that was compiled quickly, then by one that
# was compiled well: fewer if the problem has more than so many entries. By counts and not by the
# clock, so that a resumed run is the same.
QUICK_GRADIENTS, QUICK_ENTRIES = 100_000, 20_000
# A certificate from samples looks at so many minibatches, or at so many for each gradient of the
# run, at most; at a point that is to be improved by plan, at this share of its gradients.
LONG_LOOK, LONGEST_LOOK, SHORT_LOOK = 8192, 2, 0.25
# Stalled: over this factor in gradients, in which the point moved this often, ε fell by less than
# this share. (A point that has not moved is being worked on: a subproblem can be long.)
STALL_SPAN, STALL_MOVES, STALL_SHARE = 8.0, 30, 1e-3
# No verdict of stalling before so many gradients: in its first steps a method learns.
STALL_LEAST = 50_000


@dataclasses.dataclass
class Schedule:
    """The gradients at which the next check is due; `cost` is what a check takes, in gradients."""

    cost: int
    next_check: int = dataclasses.field(init=False)

    def __post_init__(self):
        self.next_check = self.between

    @property
    def between(self) -> int:
        """The least number of gradients before the first check, and between two."""
        return max(FIRST_CHECK, CHECK_SPARING * self.cost)

    def check_passed(self) -> None:
        following = math.ceil(self.next_check * CHECK_GROWTH)
        self.next_check = max(following, self.next_check + self.between)

    def postpone(self, gradients: int) -> None:
        """Leave a method that has just begun the time until a first check."""
        self.next_check = max(self.next_check, gradients + self.between)


def quick_gradients(entries: int) -> int:
    """The gradients after which the better program takes over, for a problem of so many entries."""
    return 0 if entries > LARGE else QUICK_GRADIENTS // (1 + entries // QUICK_ENTRIES)


def longest_look(gradients: int, provisional: bool) -> int:
    """How many minibatches a certificate may look at, after a run of so many gradients."""
    if provisional:
        return int(SHORT_LOOK * gradients)
    return max(LONG_LOOK, LONGEST_LOOK * gradients)


def next_piece(piece: int, done: int, seconds: float, step: int = 1) -> int:
    """How many gradients the next piece has, after one of `done` gradients in `seconds`.

    A step of a method takes at most `step` gradients, and may take fewer.
    """
    if jax.process_count() > 1:
        return MOST_PIECE  # no process may go by its own clock
    if done + step - 1 < max(piece // 2, 1):
        return piece  # it ended early, and says nothing about time
    factor = min(max(PIECE_SECONDS / max(seconds, 1e-6), 0.25), 4.0)
    return int(min(max(piece * factor, LEAST_PIECE), MOST_PIECE))


def history_stalled(history: Mapping[str, Sequence[float]], since: int, has_theorem: bool) -> bool:
    """`stalled`, by the columns of a history."""
    columns = (history[name] for name in ("gradients", "epsilon", "objective"))
    rho = history.get("rho", ())
    return stalled(*columns, rho=rho, since=since, has_theorem=has_theorem)


def stalled(
    gradients: Sequence[float],
    epsilon: Sequence[float],
    objective: Sequence[float],
    *,
    rho: Sequence[float] = (),
    since: int = 0,
    has_theorem: bool = False,
) -> bool:
    """Whether ε has stopped falling, by what the checks saw since a method began.

    Every ρ has its own ε: a larger one begins with a larger ε. So only checks at the last ρ count.
    A method with a theorem behind it is spared while its objective still falls: the theorem bounds
    ε at the end, not on the way there.
    """
    since = max(since, _changed(gradients, rho))
    kept = [i for i, count in enumerate(gradients) if count >= since]
    counts = [gradients[i] - since for i in kept]
    early = [i for i, count in zip(kept, counts) if count * STALL_SPAN <= counts[-1]]
    late = kept[len(early) :]
    moves = len({epsilon[i] for i in late})
    if counts[-1] < STALL_LEAST or moves < STALL_MOVES or not early:
        return False
    if _least(epsilon, late) <= (1 - STALL_SHARE) * _least(epsilon, early):
        return False
    return not (has_theorem and _falls(objective, early, late))


def _changed(gradients: Sequence[float], rho: Sequence[float]) -> int:
    """The gradients at the first of the last checks that have the same ρ."""
    first = len(rho) - 1
    while first > 0 and rho[first - 1] == rho[-1]:
        first -= 1
    return int(gradients[first]) if first > 0 else 0


def _least(column: Sequence[float], rows: list[int]) -> float:
    return min(column[i] for i in rows)


def _falls(objective: Sequence[float], early: list[int], late: list[int]) -> bool:
    """Whether the objective is lower than it was, by a share of how much it has changed in all."""
    before, now = objective[early[-1]], objective[late[-1]]
    values = [objective[i] for i in early + late if math.isfinite(objective[i])]
    if not (values and math.isfinite(before) and math.isfinite(now)):
        return False
    return before - now > STALL_SHARE * max(max(values) - min(values), abs(before))
