"""Proxes with barriers: stationary points of what they minimise, and their derivatives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bilevax import terms

INF = np.inf
V = np.array([-3.0, -0.9, 0.1, 0.2, 0.7, 1.4, 40.0, -600.0])
TERMS = {
    "from below": terms.Box(0.0, INF),
    "from above": terms.Box(-INF, 0.3),
    "both": terms.Box(-1.0, 2.0),
    "ridge": terms.Ridge(0.7, center=0.1, base=terms.Box(-1.0, 2.0)),
    "scaled": 3.0 * terms.Box(-1.0, 2.0),
    "simplex": terms.Simplex(2.0),
    "capped": terms.CappedSimplex(0.3),
}


@pytest.mark.parametrize("weight", [1e-9, 1e-2, 30.0])
@pytest.mark.parametrize("name", TERMS)
def test_it_is_stationary_and_its_derivative_is_right(name, weight):
    term, step, v = TERMS[name], 0.6, jnp.asarray(V)
    prox = jax.jit(lambda v: term.barrier_prox(v, step, weight))
    u = prox(v)
    low, high = {"from below": (0, INF), "from above": (-INF, 0.3), "simplex": (0, INF)}.get(
        name, (0, 0.3) if name == "capped" else (-1, 2)
    )
    above, below = np.asarray(u - low), np.asarray(high - u)
    assert (above > 0).all()
    assert (below > 0).all()
    assert float(term.barrier(u)) == pytest.approx(
        -sum(np.log(d).sum() for d in (above, below) if np.isfinite(d).all()), rel=1e-9
    )
    slope = np.asarray(u - v) - weight / above + weight / below
    bent = 1 + weight / above**2 + weight / below**2
    if name == "ridge":
        slope, bent = slope + step * 0.7 * np.asarray(u - 0.1), bent + step * 0.7
    if name in ("simplex", "capped"):
        # The multiplier of Σ u = total is the slope of the entry that moves most easily.
        assert float(jnp.sum(u)) == pytest.approx(float(term.total), rel=1e-12)
        slope = slope - slope[np.argmin(bent)]
    assert np.abs(slope / bent).max() < 1e-9
    moves = 1e-5 * np.eye(len(V))
    found = np.stack([(prox(V + d) - prox(V - d)) / 2e-5 for d in moves], axis=1)
    assert np.abs(found - jax.jit(jax.jacfwd(prox))(v)).max() < 1e-5


def test_where_caps_hardly_leave_room():
    v = jnp.asarray(np.linspace(-1.0, 3.0, 10))
    term = terms.CappedSimplex(0.1001)
    u = term.barrier_prox(v, 1.0, 1.0)
    assert (np.asarray(u) < 0.1001).all()
    assert float(jnp.sum(u)) == pytest.approx(1.0, rel=1e-12)
    assert np.isfinite(term.barrier(u))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_distance_that_rounding_takes_away_does_not_make_it_infinite(dtype):
    box = terms.Box(10.0, 20.0)
    u = box.barrier_prox(jnp.full(2, 30.0, dtype), 1.0, 1e-18)
    assert np.isfinite(box.barrier(u))


def test_without_weight_it_is_the_projection():
    v = jnp.asarray(V)
    for name in ("from below", "from above", "both"):
        term = TERMS[name]
        np.testing.assert_array_equal(term.barrier_prox(v, 1.0, 0.0), term.project(v))
        near = jax.jacfwd(lambda v, term=term: term.barrier_prox(v, 1.0, 0.0))(v)
        np.testing.assert_array_equal(np.diag(near), np.where(term.project(v) == v, 1.0, 0.0))
    fixed = terms.Box(0.5, 0.5)
    np.testing.assert_array_equal(fixed.barrier_prox(v, 1.0, 2.0), np.full(len(V), 0.5))
    assert float(fixed.barrier(jnp.full(3, 0.5))) == 0.0


def test_a_term_without_flat_faces_stays_as_it_is():
    v = jnp.asarray(V)
    for term in (terms.L2Ball(1.0), terms.L1(0.5), terms.Free()):
        np.testing.assert_array_equal(term.barrier_prox(v, 0.6, 2.0), term.prox(v, 0.6))
    assert float(terms.L2Ball(1.0).barrier(v)) == 0.0


def test_the_bounds_of_boxes_by_leaf():
    block = {"a": jnp.zeros(2), "b": jnp.zeros((1, 2))}
    term = terms.as_term({"a": terms.Box(0.0, INF), "b": 2.0 * terms.Box(-1.0, 3.0)}, "y1")
    low, high = term.box(block)
    np.testing.assert_array_equal(low["a"], [0.0, 0.0])
    np.testing.assert_array_equal(high["b"], [[3.0, 3.0]])
    assert terms.as_term({"a": terms.Box(0.0, 1.0), "b": terms.Simplex()}, "y1").box(block) is None
