"""The least point of a quadratic model in a domain."""

import jax.numpy as jnp
import numpy as np
import pytest
from scipy.optimize import lsq_linear

from bilevax import terms
from bilevax.solvers.model import Model
from bilevax.trees import Layout


def model(B, g, x, term):
    x = jnp.asarray(x, float)
    step = jnp.asarray(1 / np.abs(B).sum(axis=1).max())
    return Model(jnp.asarray(B), jnp.asarray(g), x, step, term, Layout.of(x))


@pytest.mark.parametrize("seed", range(5))
def test_in_a_box_the_slope_is_zero_where_no_bound_holds(seed):
    rng = np.random.default_rng(seed)
    G = rng.normal(size=(12, 12))
    B, g, x = G @ G.T + 0.1 * np.eye(12), 5 * rng.normal(size=12), rng.uniform(-1, 1, 12)
    d, fall, weight = model(B, g, x, terms.Box(-1.0, 1.0)).least(jnp.asarray(0.3))
    assert float(weight) == 0.3
    d = np.asarray(d)
    at, slope = x + d, g + (B + 0.3 * np.eye(12)) @ d
    assert np.abs(np.clip(at - slope, -1, 1) - at).max() < 1e-6
    assert float(fall) == pytest.approx(-(g @ d + d @ B @ d / 2), rel=1e-9)


def test_where_bounds_cut_newtons_step():
    """In a box and of a model that is nearly flat in some directions, by SciPy."""
    rng = np.random.default_rng(0)
    Q, _ = np.linalg.qr(rng.normal(size=(60, 60)))
    B = Q @ np.diag(np.logspace(-4, 2, 60)) @ Q.T + 1e-6 * np.eye(60)
    g, x = 5 * rng.normal(size=60), rng.uniform(-1, 1, 60)
    found, *_ = model(B, g, x, terms.Box(-1.0, 1.0)).least(jnp.asarray(0.0))
    root = np.linalg.cholesky(B).T
    best = lsq_linear(root, -np.linalg.solve(root.T, g - B @ x), (-1, 1), tol=1e-14).x - x
    value = lambda d: g @ d + d @ B @ d / 2
    assert value(np.asarray(found)) <= value(best) + 1e-6 * abs(value(best))


def test_on_a_simplex():
    """½‖x + d‖² + ⟨g, x + d⟩ is least at the projection of −g."""
    g, x = np.array([0.3, -0.2, 0.9]), np.array([0.2, 0.3, 0.5])
    d, *_ = model(np.eye(3), g + x, x, terms.Simplex()).least(jnp.asarray(0.0))
    np.testing.assert_allclose(x + d, terms.Simplex().project(jnp.asarray(-g)), atol=1e-9)


def test_where_it_is_not_convex_the_weight_grows():
    B, x = np.diag([1.0, -2.0]), np.zeros(2)
    found = model(B, np.array([1.0, 1.0]), x, terms.Box(-10.0, 10.0)).least(jnp.asarray(1e-3))
    d, fall, weight = (np.asarray(part) for part in found)
    assert 2 < weight <= 8
    assert fall > 0
    np.testing.assert_allclose(d, -1 / (np.diag(B) + weight), rtol=1e-6)
    # An entry that its bound holds may bend as it likes.
    held = model(B, np.array([1.0, 50.0]), np.array([0.0, -10.0]), terms.Box(-10.0, 10.0))
    assert float(held.least(jnp.asarray(1e-3))[2]) == 1e-3
