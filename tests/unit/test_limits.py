"""Where a run ends without a certificate: counts and seconds."""

import numpy as np
import pytest

from bilevax.driver import limits
from bilevax.driver.limits import Clock, Limits


class Time:
    """A clock on the wall that a test turns by hand."""

    def __init__(self):
        self.now = 1000.0

    def perf_counter(self):
        return self.now


@pytest.fixture
def wall(monkeypatch):
    time = Time()
    monkeypatch.setattr(limits, "time", time)
    return time


def test_the_clock_counts_earlier_seconds_and_leaves_out_what_it_is_told(wall):
    clock = Clock(before=7.0)
    assert clock.seconds == 7
    wall.now += 5
    assert clock.seconds == 12
    clock.leave_out(4.0)
    assert clock.seconds == 8


def test_seconds_count_from_the_beginning_of_a_call(wall):
    clock, allowed = Clock(before=100.0), Limits(max_seconds=2.0)
    allowed.begin(clock, np.zeros((), int))
    assert not allowed.late(clock)
    wall.now += 2
    assert not allowed.late(clock)
    wall.now += 0.01
    assert allowed.late(clock)
    clock.leave_out(1.0)
    assert not allowed.late(clock)


def test_without_seconds_nothing_is_late(wall):
    clock, allowed = Clock(), Limits(max_gradients=5)
    allowed.begin(clock, np.zeros((), int))
    wall.now += 1e9
    assert not allowed.late(clock)


@pytest.mark.parametrize(
    ("asked", "dtype", "most"),
    [
        (None, np.int32, (2**31 - 1) // 2),
        (None, np.int64, (2**63 - 1) // 2),
        (300, np.int64, 300),
        (0, np.int32, 0),
        (10**12, np.int32, (2**31 - 1) // 2),
        (3e2, np.int64, 300),
    ],
)
def test_the_most_gradients_are_those_asked_for_and_countable(asked, dtype, most):
    allowed = Limits(max_gradients=asked)
    allowed.begin(Clock(), np.zeros((), dtype))
    assert allowed.most == most
    assert isinstance(allowed.most, int)


def test_what_one_process_does_all_do(monkeypatch, wall):
    """The first process's clock decides for all of several."""
    from jax.experimental import multihost_utils

    monkeypatch.setattr(limits.jax, "process_count", lambda: 2)
    heard = []

    def broadcast(value):
        heard.append(bool(value))
        return np.asarray(True)

    monkeypatch.setattr(multihost_utils, "broadcast_one_to_all", broadcast)
    allowed = Limits(max_seconds=5.0)
    allowed.begin(Clock(), np.zeros((), int))
    assert allowed.late(Clock())
    assert heard == [False]
