"""Certificates from minibatches: what their radii are, how often they hold, and heavy tails."""

import jax.numpy as jnp
import numpy as np
import pytest

import bilevax as bx
from bilevax import terms
from bilevax.certificates import judge
from bilevax.certificates.sampled import (
    averaged,
    estimation_cost,
    largest_normal_share,
    sampled_certificate,
)

BOX = terms.Box(-1.0, 1.0)
# Minimise mean(d)·x: at 0 the line is |mean(d)|.
PROBLEM = bx.MinimaxProblem(
    lambda x, y, d: jnp.mean(d) * x + 0 * y, BOX, BOX, data=bx.data.Arrays(np.zeros((9, 1)), 1)
)
POINT = bx.Point(x=np.zeros(()), y=np.zeros(()))


def one_number(rows):
    """The certificate from minibatches of rows."""
    estimate = judge(averaged(PROBLEM, rows), POINT)
    return sampled_certificate(PROBLEM, POINT, rows, estimate, 0.95)


def test_normal_losses_are_covered_as_often_as_is_said():
    rng = np.random.default_rng(0)
    draws = [one_number(100 + rng.normal(size=(8, 1))) for _ in range(200)]
    assert np.mean([c.lines()["x"] >= 100 for c in draws]) >= 0.95
    assert np.mean([c.interval("x")[0] <= 100 <= c.interval("x")[1] for c in draws]) >= 0.95
    assert not any(c.heavy_tailed for c in draws)


def test_the_radius_is_chebyshevs_times_students_quantile():
    """Of −4, −2, 2, 4 and four zeros the variance is 40/7; t/z = 2.364624/1.959964 for m = 8."""
    for shift in (0.0, 1e6):  # the deviations of large numbers are small ones
        found = one_number(shift + np.array([-4.0, -2.0, 2.0, 4.0, 0.0, 0.0, 0.0, 0.0])[:, None])
        wanted = (40 / 7 / 8 / 0.05) ** 0.5 * 2.364624252 / 1.959963985
        assert found.radii["x"] == pytest.approx(wanted, rel=1e-7)
        assert found.largest_share == pytest.approx(16 / 40)
        assert not found.heavy_tailed


def test_heavy_tails_are_named():
    rng = np.random.default_rng(0)
    found = one_number(rng.lognormal(0, 3, (64, 1)))
    assert found.heavy_tailed
    assert "the confidence 0.95 is not to be trusted" in str(found)
    normal = one_number(rng.normal(size=(64, 1)))
    assert not normal.heavy_tailed
    assert "trusted" not in str(normal)
    # Minibatches that differ by rounding only have no tails.
    alike = np.full((64, 1), 1.0)
    alike[5] += 2e-16
    assert one_number(alike).largest_share == 0


@pytest.mark.parametrize("batches", [8, 16, 64])
def test_normal_losses_are_seldom_called_heavy_tailed(batches):
    squares = np.random.default_rng(0).normal(size=(20_000, batches))
    squares = (squares - squares.mean(axis=1, keepdims=True)) ** 2
    shares = squares.max(axis=1) / squares.sum(axis=1)
    assert np.mean(shares > largest_normal_share(batches)) < 0.002


def test_fewer_than_eight_batches_are_refused():
    with pytest.raises(ValueError, match="batches must be a whole number ≥ 8, not 7"):
        bx.certify(PROBLEM, POINT, batches=7)
    with pytest.raises(ValueError, match="batches must be a whole number ≥ 8, not 2"):
        one_number(np.ones((2, 1)))


def test_what_the_estimate_costs_falls_to_nothing_and_is_finite_for_any_confidence():
    assert estimation_cost(8, 0.05) == pytest.approx(1.206, abs=1e-3)
    assert 1 < estimation_cost(10**6, 0.05) < 1 + 1e-5
    assert 1 < estimation_cost(8, 1e-17) < np.inf
