"""Points: blocks by name, and what JAX, pickle and a reader make of them."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bilevax as bx
from bilevax.problems.point import as_arrays

POINT = bx.Point(y1=np.ones(2), x1=np.zeros(1), rho=np.asarray(3.0))


def test_blocks_are_kept_in_one_order_and_absent_ones_read_as_none():
    assert list(POINT.blocks) == ["x1", "y1", "rho"]
    assert POINT.x2 is None
    assert "x2" not in POINT.blocks
    assert list(bx.Point(x1=1.0, x2=None).blocks) == ["x1"]
    POINT.blocks["x1"] = 5  # a copy
    assert POINT.x1.shape == (1,)


def test_unknown_blocks_are_refused_with_the_known_ones():
    with pytest.raises(TypeError, match=r"no block 'nothing'; the blocks are .*x1"):
        bx.Point(nothing=1.0)
    with pytest.raises(TypeError, match=r"blocks of a Point are named: bilevax.Point\(x1=…"):
        bx.Point(1.0, 2.0)
    with pytest.raises(AttributeError, match="no block 'nothing'"):
        _ = POINT.nothing
    with pytest.raises(TypeError, match="no block 'nothing'"):
        POINT.replace(nothing=1.0)


def test_a_point_does_not_change():
    with pytest.raises(AttributeError, match=r"point.replace\(x1=…\) makes another"):
        POINT.x1 = 1.0
    other = POINT.replace(x1=np.ones(1), rho=None)
    assert list(other.blocks) == ["x1", "y1"]
    assert other.x1 == 1.0
    assert POINT.x1 == 0.0
    assert POINT.rho == 3.0


def test_it_is_a_tree_with_named_leaves():
    leaves = jax.tree_util.tree_leaves_with_path(POINT)
    assert [jax.tree_util.keystr(path) for path, _ in leaves] == [".x1", ".y1", ".rho"]
    doubled = jax.tree.map(lambda a: 2 * a, POINT)
    assert isinstance(doubled, bx.Point)
    assert doubled.rho == 6.0
    # JAX puts None in the place of leaves, which must then still be there.
    emptied = jax.tree.map(lambda a: None, POINT)
    assert jax.tree.structure(emptied, is_leaf=lambda a: a is None) == jax.tree.structure(POINT)
    assert jax.tree.structure(POINT) != jax.tree.structure(POINT.replace(rho=None))


def test_pickled_and_copied_it_is_the_same():
    import copy

    for again in (pickle.loads(pickle.dumps(POINT)), copy.deepcopy(POINT), copy.copy(POINT)):
        assert list(again.blocks) == list(POINT.blocks)
        assert np.array_equal(again.y1, POINT.y1)


def test_it_shows_its_numbers():
    assert repr(bx.Point(x1=np.asarray([0.1234567]))) == "Point(x1=array([0.123457]))"
    inside = bx.Point(x=np.ones(1), multipliers=bx.Multipliers(lam=np.ones(1)))
    assert repr(inside) == "Point(x=array([1.]), multipliers=Multipliers(lam=array([1.])))"


def test_data_become_arrays_and_what_is_not_numeric_is_refused_by_its_place():
    made = as_arrays({"a": 1.0, "b": np.arange(3), "c": True})
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(made))
    assert made["b"].dtype == np.arange(3).dtype
    kept = jnp.ones(2)
    assert as_arrays([kept])[0] is kept
    with pytest.raises(TypeError, match=r"data\['a'\] must be a number .* not a str"):
        as_arrays({"a": "words"})
    with pytest.raises(TypeError, match=r"data\[0\] must be a number .* not a ndarray"):
        as_arrays([np.asarray(["words"])])
    with pytest.raises(TypeError, match=r"data is a PRNG key; pass jax.random.key_data"):
        as_arrays(jax.random.key(0))
