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


def test_levels_by_hand():
    """With ε = ½, ε̂ = ¼, L = 2, D = 3: ε·D/4 = 3/8."""
    common = {"epsilon": 0.5, "inner_tolerance": 0.25, "y_diameter": 3.0}
    level = bx.theory.minimax_level(**common, smoothness=2.0, top=1.0)
    assert level == pytest.approx(1 + 3 / 8 + 2 / 16 * (1 / 2 + 4 * 9 * 2 * 4))
    # σ_y = ε/(2D) = 1/12 is less than L; a small L takes its place.
    assert bx.theory.stochastic_distance(**common, smoothness=2.0) == pytest.approx(0.25 * 12**0.5)
    assert bx.theory.stochastic_distance(**common, smoothness=0.01) == pytest.approx(2.5)
    # The theorem's K = (descent + 3/8)·16 is 16 for descent = 5/8.
    spent = {"descent": 5 / 8, "iterations": 16.0}
    stationarity = bx.theory.stochastic_stationarity(**common, smoothness=2.0, **spent)
    assert stationarity == pytest.approx(math.sqrt(8 * 2.0) * 0.25)
    few = {"descent": 5 / 8, "iterations": 4.0}
    more = bx.theory.stochastic_stationarity(**common, smoothness=2.0, **few)
    assert more == pytest.approx(2 * math.sqrt(2 * (1 / 4 + 1 / 16)))
    assert bx.theory.stochastic_stationarity(**common, smoothness=1e-4, **spent) == 0.25
    # eq:bound_phik: 2·top − H* + ε·D/2 with H* = top − descent, and K − 1 in the place of K.
    level = bx.theory.stochastic_level(**common, top=1.0, iterations=16.0)
    assert level == pytest.approx(2 * 1.0 - (1.0 - 5 / 8) + 3 / 4 - 1 / 16)


def test_the_papers_stationarity_misses_a_factor_of_two():
    """H = −x²/2 on [−2.1, 2.1] from x⁰ = 1, L = 1: with K = 1 the subproblem's solution is x̂ = 2.

    It minimises H + L(x − x⁰)², so |H'(x̂)| = 2L·|x̂ − x⁰| = 2, and √(2L)·ε̂ of the paper is less.
    """
    descent = (2.1**2 - 1) / 2
    hat = math.sqrt(1.01 * descent)  # for which K = ⌈(descent + ε·D/4)/ε̂²⌉ is 1
    grid = np.linspace(-2.1, 2.1, 42_001)
    near = grid[np.argmin(-(grid**2) / 2 + (grid - 1) ** 2)]
    assert near == pytest.approx(2, abs=1e-3)
    assert near > math.sqrt(2) * hat * 1.05
    mine = bx.theory.stochastic_stationarity(
        epsilon=1e-9, inner_tolerance=hat, smoothness=1.0, y_diameter=1e-9, descent=descent,
        iterations=1.0,
    )  # fmt: skip
    assert near <= mine <= math.sqrt(8) * hat


def test_the_level_is_above_what_inexact_subproblems_can_add():
    """Iterate k adds at most ε_k²·(1/(2σ_x) + 1/(2σ_y)) with ε_k = ε̂/(k + 1), by duality gaps."""
    for epsilon, hat, L, _, Dq in CASES:
        errors = [(hat / (k + 1)) ** 2 * (1 / (2 * L) + Dq / epsilon) for k in range(10_000)]
        mine = bx.theory.minimax_level(
            epsilon=epsilon, inner_tolerance=hat, smoothness=L, y_diameter=Dq, top=0.0
        )
        assert mine >= epsilon * Dq / 4 + sum(errors)


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
