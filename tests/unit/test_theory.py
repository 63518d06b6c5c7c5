"""The constants and bounds of the theorems, against the transcription and by hand."""

import math

import numpy as np
import pytest

import bilevax as bx
import transcription

CASES = [(0.1, 0.05, 3.0, 2.0, 1.5), (0.01, 0.001, 250.0, 4.0, 3.0), (0.5, 0.2, 0.1, 0.3, 9.0)]


@pytest.mark.parametrize("case", CASES)
def test_bounds_are_those_of_the_theorem(case):
    epsilon, hat, L, Dp, Dq = case
    descent, below = 2.5, 7.0
    mine = bx.theory.minimax_bounds(
        epsilon=epsilon,
        inner_tolerance=hat,
        smoothness=L,
        x_diameter=Dp,
        y_diameter=Dq,
        descent=descent,
        range_below=below,
    )
    theirs = transcription.theory_bounds(L, Dp, Dq, epsilon, hat, descent, below)
    for name in ("alpha", "delta", "K", "C", "N"):
        np.testing.assert_allclose(getattr(mine, name), theirs[name], rtol=1e-12)
    assert "gradients" in str(mine)


def test_bounds_grow_like_the_theorem_says():
    """With L = O(1/ε) and ε̂ = ε^1.5: K like ε⁻³, and N like ε⁻⁴ up to logarithms."""

    def bounds(epsilon):
        return bx.theory.minimax_bounds(
            epsilon=epsilon, inner_tolerance=epsilon**1.5, smoothness=1 / epsilon, x_diameter=1.0,
            y_diameter=1.0, descent=1.0, range_below=1.0,
        )  # fmt: skip

    coarse, fine = bounds(1e-3), bounds(1e-4)
    assert math.log10(fine.K / coarse.K) == pytest.approx(3, abs=0.1)
    assert math.log10(fine.N / coarse.N) == pytest.approx(4, abs=0.3)


def test_penalty_constants_by_hand():
    c = bx.theory.penalty_constants(
        epsilon=0.01, upper_smoothness=2.0, lower_smoothness=0.5, diameter=4.0
    )
    assert (c.rho, c.smoothness) == (100.0, 2.0 + 2 * 100 * 0.5)
    assert c.inner_tolerance == pytest.approx(1e-3)
    assert (c.x_weight, c.y_weight) == (2 * c.smoothness, 0.01 / 8)
    # ε^1.5 exceeds ε/2 above ¼, where the proof needs the smaller one.
    loose = bx.theory.penalty_constants(
        epsilon=0.64, upper_smoothness=1.0, lower_smoothness=1.0, diameter=1.0
    )
    assert loose.inner_tolerance == 0.32
    given = bx.theory.penalty_constants(
        epsilon=0.1, upper_smoothness=1.0, lower_smoothness=1.0, diameter=1.0,
        rho=3.0, smoothness=6.0, inner_tolerance=0.2,
    )  # fmt: skip
    assert (given.rho, given.smoothness, given.inner_tolerance) == (3.0, 6.0, 0.2)
