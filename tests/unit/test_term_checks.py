"""What terms say about parameters and blocks that they cannot take. Nothing here is compiled."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bilevax.terms import (
    L1,
    Box,
    CappedSimplex,
    ElasticNet,
    Free,
    GroupL2,
    L1Ball,
    L2Ball,
    LInfBall,
    PerLeaf,
    Ridge,
    Scaled,
    Simplex,
    as_term,
)
from bilevax.terms._waterfill import host_level
from term_cases import EACH_CLASS, INF, MIXED, NAMED, NESTED, VECTORS, each

PAIR_OF_NUMBERS = np.ones(2)
BAD = {
    "Box-order": (lambda: Box(1.0, 0.0), "lower"),
    "Box-order-array": (lambda: Box(np.array([0.0, 2.0]), 1.0), "lower"),
    "Box-lower-nan": (lambda: Box(np.nan, 1.0), "lower"),
    "Box-upper-nan": (lambda: Box(0.0, np.array([1.0, np.nan])), "upper"),
    "Box-shapes": (lambda: Box(np.zeros(2), np.ones(3)), "upper"),
    "Box-text": (lambda: Box("low", 1.0), "lower"),
    "Box-empty-at-infinity": (lambda: Box(INF, INF), "lower"),
    "Box-empty-at-minus-infinity": (lambda: Box(-INF, -INF), "upper"),
    "LInfBall-negative": (lambda: LInfBall(-1.0), "radius"),
    "LInfBall-nan": (lambda: LInfBall(np.nan), "radius"),
    "CappedSimplex-cap-zero": (lambda: CappedSimplex(0.0), "cap"),
    "CappedSimplex-cap-nan": (lambda: CappedSimplex(np.nan), "cap"),
    "CappedSimplex-cap-negative": (lambda: CappedSimplex(np.array([1.0, -0.5])), "cap"),
    "CappedSimplex-cap-array-nan": (lambda: CappedSimplex(np.array([1.0, np.nan])), "cap"),
    "CappedSimplex-cap-text": (lambda: CappedSimplex("much"), "cap"),
    "CappedSimplex-total-zero": (lambda: CappedSimplex(1.0, 0.0), "total"),
    "CappedSimplex-axis": (lambda: CappedSimplex(1.0, axis=0.5), "axis"),
    "Simplex-total-negative": (lambda: Simplex(-1.0), "total"),
    "Simplex-total-array": (lambda: Simplex(PAIR_OF_NUMBERS), "total"),
    "Simplex-total-infinite": (lambda: Simplex(INF), "total"),
    "Simplex-axis": (lambda: Simplex(axis="rows"), "axis"),
    "L2Ball-negative": (lambda: L2Ball(-1.0), "radius"),
    "L2Ball-array": (lambda: L2Ball(PAIR_OF_NUMBERS), "radius"),
    "L2Ball-center-nan": (lambda: L2Ball(1.0, np.nan), "center"),
    "L2Ball-axis": (lambda: L2Ball(1.0, axis=0.5), "axis"),
    "L1Ball-zero": (lambda: L1Ball(0.0), "radius"),
    "L1Ball-nan": (lambda: L1Ball(np.nan), "radius"),
    "L1Ball-array": (lambda: L1Ball(PAIR_OF_NUMBERS), "radius"),
    "L1Ball-axis": (lambda: L1Ball(1.0, axis=0.5), "axis"),
    "L1-negative": (lambda: L1(-1.0), "weight"),
    "L1-nan": (lambda: L1(np.nan), "weight"),
    "L1-infinite": (lambda: L1(INF), "weight"),
    "L1-array": (lambda: L1(PAIR_OF_NUMBERS), "weight"),
    "L1-order": (lambda: L1(1.0, 1.0, 0.0), "lower"),
    "L1-empty-sum": (lambda: L1(1.0) + Box(0.0, 1.0) + Box(2.0, 3.0), "lower"),
    "GroupL2-negative": (lambda: GroupL2(-1.0), "weight"),
    "GroupL2-infinite": (lambda: GroupL2(INF), "weight"),
    "GroupL2-array": (lambda: GroupL2(PAIR_OF_NUMBERS), "weight"),
    "GroupL2-axis": (lambda: GroupL2(1.0, axis=0.5), "axis"),
    "Ridge-zero": (lambda: Ridge(0.0), "weight"),
    "Ridge-infinite": (lambda: Ridge(INF), "weight"),
    "Ridge-array": (lambda: Ridge(PAIR_OF_NUMBERS), "weight"),
    "ElasticNet-l1": (lambda: ElasticNet(-1.0, 1.0), "l1"),
    "ElasticNet-l1-array": (lambda: ElasticNet(PAIR_OF_NUMBERS, 1.0), "l1"),
    "ElasticNet-l2": (lambda: ElasticNet(1.0, 0.0), "l2"),
    "ElasticNet-l2-array": (lambda: ElasticNet(1.0, PAIR_OF_NUMBERS), "l2"),
    "Ridge-center-nan": (lambda: Ridge(1.0, {"u": np.nan}), "center"),
    "Ridge-base": (lambda: Ridge(1.0, 0.0, 3.0), "base"),
    "PerLeaf-parts": (lambda: PerLeaf({"u": 1.0}), "parts"),
    "Scaled-term": (lambda: Scaled(1.0, 2.0), "term"),
    "Scaled-zero": (lambda: 0.0 * L1(1.0), "factor"),
    "Scaled-negative": (lambda: -2.0 * L1(1.0), "factor"),
    "Scaled-nan": (lambda: np.nan * L1(1.0), "factor"),
    "Scaled-infinite": (lambda: INF * L1(1.0), "factor"),
    "Scaled-array": (lambda: Scaled(L1(1.0), PAIR_OF_NUMBERS), "factor"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_parameters_are_named(name):
    make, parameter = BAD[name]
    with pytest.raises((ValueError, TypeError), match=rf"\b{parameter}\b"):
        make()


@pytest.mark.parametrize(
    ("spec", "found"),
    [
        (None, "empty"),
        ({}, "empty"),
        (1.0, "float"),
        ({"a": Box(0.0, 1.0), "b": 2.0}, "float"),
        (Simplex, r"Simplex\("),
    ],
    ids=["nothing", "empty", "number", "mixed", "constructor"],
)
def test_as_term_names_the_block(spec, found):
    with pytest.raises(TypeError, match=rf"lower_term.*{found}"):
        as_term(spec, "lower_term")


def test_as_term_keeps_a_term():
    term = Simplex()
    assert as_term(term, "x") is term


CENTERED = Ridge(1.0, {"u": 0.0, "v": np.zeros(3)})
MISFITS = {
    "lower": (Box(np.zeros(4), 1.0), np.zeros(3), r"^w: .*lower.*\(4,\).*\(3,\)"),
    "upper": (Box(0.0, np.ones((2, 3))), np.zeros(3), r"^w: .*upper.*\(2, 3\).*\(3,\)"),
    "l1-bound": (L1(1.0, np.zeros(4)), np.zeros(3), r"^w: .*lower"),
    "leaf": (Box(np.zeros(4), 1.0), {"a": np.zeros(4), "b": (np.zeros(3),)}, r"^w\['b'\]\[0\]: "),
    "simplex-axis": (Simplex(axis=1), np.zeros(3), r"^w: .*axis=1.*\(3,\)"),
    "group-axis": (GroupL2(1.0), np.zeros(()), r"^w: .*axis=-1.*\(\)"),
    "l1ball-axis": (L1Ball(1.0, axis=-3), np.zeros((2, 2)), r"^w: .*axis=-3"),
    "l2ball-axis": (L2Ball(1.0, axis=2), np.zeros((2, 2)), r"^w: .*axis=2"),
    "l2ball-center": (L2Ball(1.0, np.zeros(2)), np.zeros(3), r"^w: .*center.*\(2,\)"),
    "cap": (CappedSimplex(0.2), np.zeros(4), r"^w: .*empty.*cap must be at least total/4"),
    "cap-row": (CappedSimplex(0.2, axis=1), np.zeros((9, 4)), r"^w: .*empty"),
    "caps": (
        CappedSimplex(np.full(4, 0.2)),
        np.zeros(4),
        r"^w: .*empty: caps with the sum 0\.8",
    ),
    "caps-row": (
        CappedSimplex(np.array([[1.0, 1.0], [0.2, 0.2]]), axis=1),
        np.zeros((2, 2)),
        r"^w: .*empty: caps with the sum 0\.4",
    ),
    "caps-shape": (CappedSimplex(np.ones(3)), np.zeros(4), r"^w: .*cap of shape \(3,\)"),
    "caps-axis": (CappedSimplex(np.ones(4), axis=0), np.zeros((3, 4)), r"^w: .*cap .*\(4, 1\)"),
    "capped-no-entries": (CappedSimplex(0.2), np.zeros(0), r"^w: .*empty"),
    "simplex-no-entries": (Simplex(), np.zeros(0), r"^w: "),
    "simplex-empty-row": (Simplex(axis=1), np.zeros((2, 0)), r"^w: "),
    "ridge-shape": (Ridge(1.0, np.zeros(4)), np.zeros(3), r"^w: .*center.*\(4,\)"),
    "ridge-leaf": (CENTERED, {"u": np.zeros(2), "v": np.zeros(2)}, r"^w.*center.*\(3,\)"),
    "ridge-tree": (CENTERED, {"u": np.zeros(2)}, r"^w: .*center"),
    "ridge-base": (Ridge(1.0) + Simplex(axis=1), np.zeros(3), r"^w: .*axis=1"),
    "scaled": (2.0 * Simplex(axis=1), np.zeros(3), r"^w: .*axis=1"),
    "per-leaf-tree": (MIXED, {"a": np.zeros(3)}, r"^w: .*does not match"),
    "per-leaf-array": (MIXED, np.zeros(3), r"^w: .*does not match"),
    "per-leaf-part": (
        MIXED,
        NESTED | {"b": (np.zeros(4), np.zeros(()))},
        r"^w\['b'\]\[0\]: .*axis=1",
    ),
    "per-leaf-deep": (
        as_term({"a": Simplex(axis=1), "b": Free()}, "x"),
        {"a": [np.zeros((1, 2)), np.zeros(2)], "b": np.zeros(2)},
        r"^w\['a'\]\[1\]: .*axis=1",
    ),
}


@pytest.mark.parametrize("name", MISFITS)
def test_check_block_names_the_block(name):
    term, block, message = MISFITS[name]
    with pytest.raises(ValueError, match=message):
        term.check_block(block, "w")


@each()
def test_check_block_accepts_what_fits(case):
    """Arrays, and their shapes alone."""
    case.term.check_block(case.tree(np.zeros(case.size)), "w")
    case.term.check_block(jax.eval_shape(lambda: case.tree(np.zeros(case.size))), "w")


def test_repr_shows_numbers_as_numbers():
    assert repr(Box(-1.0, np.ones(3))) == "Box(lower=-1, upper=array(3,))"
    assert repr(2.0 * L1(0.5)) == "Scaled(term=L1(weight=0.5, lower=-inf, upper=inf), factor=2)"


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (Simplex(), Box(0.0, 1.0)),
        (L1(1.0), Simplex()),
        (GroupL2(1.0), Box(0.0, 1.0)),
        (GroupL2(1.0), L1(1.0)),
        (L2Ball(1.0), L1Ball(1.0)),
        (Ridge(1.0), Ridge(2.0)),
        (Ridge(1.0) + Simplex(), L1(1.0)),
        (as_term((L1(1.0), Free()), "x"), Box(0.0, 1.0)),
    ],
    ids=lambda term: type(term).__name__,
)
def test_unknown_sums_raise(left, right):
    """A sum whose prox has no closed form is refused by name, in both orders."""
    for a, b in ((left, right), (right, left)):
        with pytest.raises(TypeError, match=r"prox of \w+ \+ \w+ is not known"):
            a + b


@pytest.mark.parametrize("wrong", [1.0, None, "Box", np.zeros(2)], ids=str)
def test_sums_with_other_things_raise(wrong):
    with pytest.raises(TypeError):
        L1(1.0) + wrong
    with pytest.raises(TypeError):
        Simplex() * Simplex()


METHODS = {
    "value": lambda t, x: t.value(x),
    "prox": lambda t, x: t.prox(x, 0.3),
    "project": lambda t, x: t.project(x),
    "diameter": lambda t, x: t.diameter(x),
    "linear_oracle": lambda t, x: t.linear_oracle(x),
    "conjugate": lambda t, x: t.conjugate(x),
    "residual": lambda t, x: t.residual(x, x),
    "supremum": lambda t, x: t.supremum(x),
    "support": lambda t, x: t.support(x),
    "violation": lambda t, x: t.violation(x),
}


@each([*EACH_CLASS, NAMED["Free"], NAMED["Ridge-tree"]])
def test_every_method_keeps_dtype_and_shape(case):
    """In single precision, where one double parameter would widen the result."""
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, np.float32), case.like)
    for name, method in METHODS.items():
        got = jax.eval_shape(method, case.term, shapes)
        if name in VECTORS:
            assert jax.tree.structure(got) == jax.tree.structure(shapes), name
            for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(shapes), strict=True):
                assert (a.shape, a.dtype) == (b.shape, b.dtype), name
        else:
            assert (got.shape, got.dtype) == ((), np.float32), name


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(
    st.lists(st.floats(-50, 50), min_size=1, max_size=50),
    st.floats(1.0, 4.0),
    st.sampled_from([1e-3, 1.0, 1e3]),
)
def test_the_level_on_the_host_makes_the_sum_one(values, room, scale):
    """For few and many entries, ties, and caps that only just suffice."""
    v = scale * np.array(values)
    rate = 1.0 + np.arange(len(v)) % 3
    cap = room * rate / rate.sum()
    level = host_level(v, cap, rate)
    total = np.clip(rate * (v - level), 0, cap).sum()
    assert total == pytest.approx(1, abs=1e-12 * (1 + np.abs(v).max() * len(v)))
