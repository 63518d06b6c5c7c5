"""Proximal weights: K + W ⪰ 0 for the least curvatures K, and no larger than that asks."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bilevax.solvers.curvature import PAIRS, Blocks, Curvature

LIKE = (jnp.zeros(2),) * 3
UNKNOWN = Curvature.unknown(Blocks.of(LIKE, LIKE), jnp.zeros(12))


@jax.jit
def weights(least, pairs, travel):
    return dataclasses.replace(UNKNOWN, least=least, pairs=pairs).weights(travel)


def curvatures(least, pairs):
    K = np.diag(least)
    for norm, (i, j) in zip(pairs, PAIRS):
        K[i, j] = K[j, i] = -norm
    return K


@pytest.mark.parametrize("seed", range(8))
def test_weights_make_the_sum_convex_and_are_not_wasted(seed):
    rng = np.random.default_rng(seed)
    least, pairs = rng.normal(size=3), rng.exponential(size=3) * 10.0 ** rng.integers(-3, 3)
    travel = 10.0 ** rng.uniform(-2, 2, 3)
    W = np.asarray(weights(least, pairs, travel))
    K = curvatures(least, pairs)
    size = np.abs(K).max()
    assert np.all(W >= 0)
    assert np.linalg.eigvalsh(K + np.diag(W))[0] >= -1e-9 * size
    # Ten percent less of every weight is not enough, where any is needed.
    if W.max() > 1e-6 * size:
        assert np.linalg.eigvalsh(K + np.diag(0.9 * W))[0] < 0


def test_without_any_curvature_there_are_no_weights():
    """A determinant of numbers next to nothing would underflow, and make NaN."""
    assert np.all(np.asarray(weights(np.zeros(3), np.zeros(3), np.ones(3))) == 0)
    only_y1 = np.asarray(weights(np.array([0.0, -1.0, 0.0]), np.zeros(3), np.ones(3)))
    assert np.all(np.isfinite(only_y1))
    assert only_y1[1] == pytest.approx(1.05)
