"""The rule for ρ, on what it may see: each condition turned round changes the answer."""

import jax.numpy as jnp
import numpy as np
import pytest

from bilevax.solvers.continuation import Continuation, Seen

TARGET, FORCE = 1e-4, 1.0
# The end of a subproblem after which ρ should grow: solved, and the lower level is off for certain.
OFF = {"worst": 1e-5, "residual": 1e-5, "blamed": 1e-5, "gap": 4e-3, "below": 4e-3, "values": 0.0}
# And after which it should shrink: the lower level is solved far too well, P is not.
OVER = {"worst": 1.0, "residual": 1.0, "blamed": 1.0, "gap": 1e-7, "below": 0.0, "values": 0.0}


def seen(what, settled=True, gradients=1000):
    numbers = {name: jnp.asarray(value) for name, value in what.items()}
    return Seen(**numbers, settled=jnp.asarray(settled), gradients=jnp.asarray(gradients))


def begun(**options):
    given = {"rho": 10.0, "target": TARGET, "relative": 0.0, "force": FORCE} | options
    return Continuation.begin(**{name: jnp.asarray(value) for name, value in given.items()})


def waiting():
    """Where the residual was looked at before, and has not fallen since."""
    state, times = begun().followed(seen(OVER, gradients=500))
    assert float(times) == 1  # nothing to compare with yet
    return state


def test_a_gap_that_is_there_for_certain_raises_rho():
    state, times = begun().followed(seen(OFF))
    assert float(times) == pytest.approx(np.sqrt(40))  # a gap falls with 1/ρ²
    assert float(state.rho) == pytest.approx(10 * np.sqrt(40))
    assert bool(state.raised)


@pytest.mark.parametrize(
    "otherwise",
    [
        {"below": 0.5e-4},  # the upper bound alone is large: the residuals' doing
        {"below": -1.0},
        {"blamed": 1e-3},  # ρ·gap = 0.04 is what residuals of that size can cause
        {"residual": 0.02},  # P is not solved yet
    ],
)
def test_what_the_residual_explains_does_not(otherwise):
    _, times = begun().followed(seen(OFF | otherwise))
    assert float(times) == 1


def test_a_subproblem_that_was_cut_short_does_not():
    looser = OFF | {"worst": 5e-3, "residual": 5e-3}
    assert float(begun().followed(seen(looser))[1]) > 1
    assert float(begun().followed(seen(looser, settled=False))[1]) == 1


def test_a_gap_that_falls_with_the_residual_does_not():
    first = OFF | {"worst": 5e-3, "residual": 5e-3, "blamed": 1.0}
    state, times = begun().followed(seen(first))
    assert float(times) == 1
    later = OFF | {"worst": 5e-4, "residual": 5e-4, "gap": 1e-3, "below": 1e-3}
    assert float(state.followed(seen(later))[1]) == 1  # a quarter of what it was
    assert float(state.followed(seen(later | {"gap": 3e-3, "below": 3e-3}))[1]) > 1


def test_a_gap_that_stands_while_the_residual_is_at_its_target_raises_rho():
    """In many dimensions the way so far is long: what a residual could do there says little."""
    blamed = OFF | {"blamed": 1.0}
    state, times = begun().followed(seen(blamed, gradients=500))
    assert float(times) == 1  # nothing to compare with yet
    assert float(state.followed(seen(blamed, gradients=900))[1]) == 1  # too soon to tell
    assert float(state.followed(seen(blamed, gradients=5000))[1]) == pytest.approx(np.sqrt(40))
    for otherwise in (
        {"residual": 5e-3},  # P is not solved well enough yet
        {"gap": 1.9e-3, "below": 1.9e-3},  # the gap falls well
        {"below": 0.9e-4},  # it may be at its target
    ):
        assert float(state.followed(seen(blamed | otherwise, gradients=5000))[1]) == 1


@pytest.mark.parametrize(("gap", "times"), [(1e-3, 10**0.5), (1e-4 * 1.1, 2.0), (10.0, 10.0)])
def test_steps_up_are_bounded(gap, times):
    _, found = begun().followed(seen(OFF | {"gap": gap, "below": gap}))
    assert float(found) == pytest.approx(times)


def test_an_overshot_rho_shrinks_until_it_has_grown():
    state, times = waiting().followed(seen(OVER, gradients=5000))
    assert float(times) == pytest.approx(0.1)
    assert float(state.rho) == pytest.approx(1.0)
    grown, _ = begun().followed(seen(OFF, gradients=10))
    looked, _ = grown.followed(seen(OVER, gradients=500))
    assert float(looked.followed(seen(OVER, gradients=50_000))[1]) == 1


@pytest.mark.parametrize(
    ("otherwise", "gradients"),
    [
        ({"gap": 0.5e-4}, 5000),  # not far below its target
        ({"worst": 0.2, "residual": 0.2}, 5000),  # falls well
        ({}, 900),  # too soon to tell
    ],
)
def test_a_rho_that_may_be_right_stays(otherwise, gradients):
    assert float(waiting().followed(seen(OVER | otherwise, gradients=gradients))[1]) == 1


@pytest.mark.parametrize("gap", [0.0, -1e-18, -1e-3])
def test_a_gap_that_rounding_made_negative_leaves_rho_a_number(gap):
    state, times = waiting().followed(seen(OVER | {"gap": gap}, gradients=5000))
    assert float(times) == pytest.approx(0.1)
    assert np.isfinite(float(state.rho))


def test_a_target_that_is_reached_becomes_smaller():
    done = OFF | {"gap": 1e-5, "below": 0.0}
    state, times = begun().followed(seen(done))
    assert (float(times), float(state.target)) == (1, TARGET / 4)
    held = done | {"worst": 1.0}  # y2's residual counts for the certificate
    assert float(begun().followed(seen(held))[0].target) == TARGET


def test_targets_grow_with_the_sizes_they_are_relative_to():
    relative = begun(target=0.0, relative=1e-4, force=50.0)
    state, times = relative.followed(
        seen(
            {
                "worst": 4e-3,
                "residual": 4e-3,
                "blamed": 0.0,
                "gap": 9e-3,
                "below": 0.0,
                "values": 100.0,
            }
        )
    )
    assert (float(times), float(state.relative)) == (1, 1e-4 / 4)
    smaller = OFF | {"gap": 9e-3, "below": 9e-3, "values": 10.0}
    assert float(relative.followed(seen(smaller))[1]) == pytest.approx(3)
