"""When a run is checked, how long its pieces are, and when it counts as stalled."""

import math

import numpy as np
import pytest

from bilevax.driver import schedule
from bilevax.driver.schedule import Schedule, next_piece


def test_the_first_check_is_early_and_the_others_grow_apart():
    plan, seen = Schedule(cost=2), []
    for _ in range(200):
        seen.append(plan.next_check)
        plan.check_passed()
    assert seen[0] == 64
    steps = np.diff(seen)
    assert np.all(steps >= 64)
    assert np.all(np.diff(steps) >= 0)
    late = [i for i in range(199) if seen[i] > 64 / 0.05]
    assert len(late) > 50
    assert all(seen[i + 1] == math.ceil(1.05 * seen[i]) for i in late)


def test_expensive_checks_are_ten_times_their_cost_apart():
    plan = Schedule(cost=700)
    assert plan.next_check == 7000
    plan.check_passed()
    assert plan.next_check == 14_000
    assert plan.between == 7000
    assert Schedule(cost=1).between == 64


def test_a_method_that_has_just_begun_is_left_in_peace():
    plan = Schedule(cost=20)
    plan.next_check = 5000
    plan.postpone(4000)
    assert plan.next_check == 5000
    plan.postpone(4900)
    assert plan.next_check == 5100


@pytest.mark.parametrize(
    ("piece", "done", "seconds", "following"),
    [
        (100, 100, 0.2, 100),  # just right
        (100, 100, 0.1, 200),
        (100, 100, 0.4, 50),
        (100, 100, 1e-9, 400),  # not more than four times at once
        (100, 100, 100.0, 25),  # nor less than a quarter
        (100, 49, 1e-9, 100),  # ended early: says nothing
        (100, 50, 0.1, 200),
        (100, 0, 0.0, 100),
        (8, 8, 100.0, 8),  # the least
        (1, 0, 1.0, 1),
        (1 << 30, 1 << 30, 1e-9, 1 << 30),  # the most
    ],
)
def test_pieces_take_a_fifth_of_a_second(piece, done, seconds, following):
    assert next_piece(piece, done, seconds) == following


def test_pieces_grow_where_a_step_takes_less_than_it_may():
    # One step that took 1 of the 8 gradients that it might have: the piece had no room for another.
    assert next_piece(8, 1, 1e-9, step=8) == 32
    assert next_piece(32, 8, 1e-9, step=8) == 32  # room for more: it ended early
    assert next_piece(32, 9, 1e-9, step=8) == 128


def test_several_processes_do_not_go_by_their_clocks(monkeypatch):
    monkeypatch.setattr(schedule.jax, "process_count", lambda: 2)
    assert next_piece(8, 8, 5.0) == schedule.MOST_PIECE


def counts(number):
    """Checks at counts that grow as those of a run do."""
    plan, seen = Schedule(cost=2), [0]
    while len(seen) < number:
        seen.append(plan.next_check)
        plan.check_passed()
    return seen


def stalled(epsilons, objectives=None, gradients=None, **options):
    gradients = counts(len(epsilons)) if gradients is None else gradients
    objectives = [0.0] * len(epsilons) if objectives is None else objectives
    return schedule.stalled(gradients, epsilons, objectives, **options)


WANDERING = [1 + float(v) for v in np.random.default_rng(0).uniform(size=200)]


def test_only_a_run_that_moves_and_does_not_improve_is_stalled():
    assert stalled(WANDERING)
    assert not stalled(WANDERING[:40])  # too early to say
    assert not stalled([1.0] * 200)  # a long subproblem: the point has not moved yet
    assert not stalled([1.1**-k for k in range(200)])  # falls


def test_the_numbers_of_the_rule():
    late = [i for i, count in enumerate(counts(200)) if count * 8 > counts(200)[-1]]
    first = late[0]
    # ε must fall by a thousandth below its least before the last factor of eight.
    before = [2.0] * first
    assert stalled(before + [2 - 0.0019 * (i % 2) + 1e-9 * i for i in late])
    assert not stalled(before + [2 - 0.0021 * (i % 2) + 1e-9 * i for i in late])
    # It must have moved thirty times there.
    times = lambda n: before + [2.5 + 0.01 * min(k, n - 1) for k in range(len(late))]
    assert stalled(times(30))
    assert not stalled(times(29))
    # And the method must have had 50,000 gradients.
    many = [0, *range(40, 51)] + [400 + 0.5 * k for k in range(40)]
    rows = [1.0] * 12 + [2 + 0.01 * k for k in range(40)]
    assert stalled(rows, gradients=[v * 50_000 / many[-1] for v in many])
    assert not stalled(rows, gradients=[v * 49_999 / many[-1] for v in many])


def test_a_method_that_followed_another_is_judged_by_its_own_checks():
    epsilons = [0.5] * 100 + [1 + 0.9**k for k in range(200)]
    gradients = counts(100)
    begun = gradients[-1]
    gradients = gradients + [begun + v for v in counts(200)]
    falling = [0.5] * 100 + [0.9**k for k in range(200)]
    assert stalled(epsilons, gradients=gradients)  # worse than what the first had
    assert not stalled(falling, gradients=gradients, since=begun + 1)
    own = [0.5] * 100 + WANDERING
    assert stalled(own, gradients=gradients, since=begun + 1)


def test_checks_at_another_penalty_do_not_count():
    """A larger ρ begins with a larger ε, from which it falls: that is no stall."""
    first = [0.5 + 1e-3 * v for v in WANDERING[:100]]
    after = [2.0 * 0.98**k for k in range(60)]
    penalties = [1.0] * len(first) + [8.0] * len(after)
    assert stalled(first + after)
    assert not stalled(first + after, rho=penalties)
    # Nor is it one where ρ has just changed and nothing is known of it yet.
    assert not stalled([*first, 2.0], rho=penalties[:101])
    # It is where ε stands at the new ρ, too, and where ρ stays what it was.
    assert stalled(first + WANDERING, rho=[1.0] * 100 + [8.0] * 200)
    assert stalled(WANDERING, rho=[1.0] * 200)


def test_a_method_with_a_theorem_is_spared_while_its_objective_falls():
    falling = [-0.01 * k for k in range(200)]
    assert stalled(WANDERING, falling)
    assert not stalled(WANDERING, falling, has_theorem=True)
    assert stalled(WANDERING, [-v for v in falling], has_theorem=True)  # it rises
    assert stalled(WANDERING, [5.0] * 200, has_theorem=True)  # it stands
    assert stalled(WANDERING, [math.nan] * 200, has_theorem=True)
    assert stalled(WANDERING, [-math.inf] * 200, has_theorem=True)
    # A fall below a thousandth of what it is counts as standing.
    assert stalled(WANDERING, [5 - 1e-5 * k for k in range(200)], has_theorem=True)


def test_large_problems_leave_the_quick_program_early():
    assert schedule.quick_gradients(10) == schedule.QUICK_GRADIENTS
    marks = [schedule.quick_gradients(n) for n in (10, 50_000, 1_000_000, 2_000_000)]
    assert marks == sorted(marks, reverse=True)
    assert marks[-1] == 0
