"""Newton's steps to a saddle point nearby, against closed forms and linear algebra."""

import jax.numpy as jnp
import numpy as np
import pytest

from bilevax.certificates.settling import MOST_ENTRIES, settled
from bilevax.terms import Box, Free, NonNegative, PerLeaf, Simplex

NOWHERE = np.full(2, 7.0)


def test_a_projection_on_a_simplex():
    a = np.array([0.9, 0.5, -0.3, 0.1])
    found, arrived = settled(lambda u: u - a, Simplex(), np.full(4, 0.25), np.full(4, 7.0))
    assert bool(arrived)
    np.testing.assert_allclose(found, [0.7, 0.3, 0.0, 0.0], atol=1e-12)


def test_a_quadratic_program_with_a_multiplier():
    """min ½‖z‖² − 3z₁ with z₁ + z₂ ≤ 1: z = (2, −1) and λ = 1."""

    def operator(u):
        z, lam = u
        return z - jnp.array([3.0, 0.0]) + lam[0], jnp.array([1.0]) - jnp.sum(z)

    start, term = (np.zeros(2), np.zeros(1)), PerLeaf((Box(-5.0, 5.0), NonNegative()))
    (z, lam), arrived = settled(operator, term, start, start)
    assert bool(arrived)
    np.testing.assert_allclose(z, [2.0, -1.0], atol=1e-9)
    np.testing.assert_allclose(lam, [1.0], atol=1e-9)


def test_a_saddle_point_that_linear_algebra_finds():
    rng = np.random.default_rng(0)
    A, b = rng.normal(size=(4, 4)), rng.normal(size=4)
    matrix = A @ A.T / 8 + np.block([[np.zeros((2, 2)), A[:2, 2:]], [-A[:2, 2:].T, np.eye(2)]])
    found, arrived = settled(lambda u: matrix @ u - b, Free(), np.zeros(4), np.zeros(4))
    assert bool(arrived)
    np.testing.assert_allclose(found, np.linalg.solve(matrix, b), atol=1e-8)


@pytest.mark.parametrize(
    "operator",
    [
        lambda u: jnp.where(u > 0.5, jnp.nan, u - 1),  # undefined on the way
        lambda u: jnp.exp(u),  # nowhere zero
    ],
)
def test_where_they_do_not_arrive_it_is_another_place(operator):
    found, arrived = settled(operator, Free(), np.zeros(2), NOWHERE)
    assert not bool(arrived)
    np.testing.assert_array_equal(found, NOWHERE)


def test_a_large_problem_is_left_alone():
    start = np.zeros(MOST_ENTRIES + 1)
    found, arrived = settled(lambda u: u - 1, Free(), start, start)
    assert not bool(arrived)
    np.testing.assert_array_equal(found, start)


def test_infinite_curvature_at_the_start_is_no_arrival():
    """1.5·√u = 1 at u = 4/9, and the slope of √ at zero has no end."""
    found, arrived = settled(
        lambda u: 1.5 * jnp.sqrt(u) - 1, Box(0.0, 5.0), np.zeros(1), -np.ones(1)
    )
    assert not bool(arrived) or abs(float(found[0]) - 4 / 9) < 1e-6


def test_one_stiff_entry_does_not_hide_the_others():
    stiff, at = np.array([1e9, 1.0]), np.array([1.0, 2.0])
    found, arrived = settled(lambda u: stiff * (u - at), Free(), np.zeros(2), NOWHERE)
    assert not bool(arrived) or np.allclose(found, at, atol=1e-7)


def test_single_precision():
    matrix = np.array([[2.0, 1.0], [-1.0, 1.0]], np.float32)
    b = np.array([1.0, 3.0], np.float32)
    zero = np.zeros(2, np.float32)
    found, arrived = settled(
        lambda u: matrix @ u - b, Box(np.float32(-9), np.float32(9)), zero, zero
    )
    assert bool(arrived)
    np.testing.assert_allclose(found, np.linalg.solve(matrix, b), rtol=1e-4, atol=1e-4)
