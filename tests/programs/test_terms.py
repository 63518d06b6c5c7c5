"""The terms against the definitions of `term_cases`: properties, CVXPY, derivatives, dtypes."""

from __future__ import annotations

import functools
from typing import Any

import cvxpy as cp
import hypothesis.extra.numpy as hnp
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from jax.flatten_util import ravel_pytree

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
    NonNegative,
    PerLeaf,
    Ridge,
    Simplex,
    Term,
    as_term,
)
from term_cases import BOX, CASES, EACH_CLASS, INF, NAMED, VECTORS, Case, each, flat


@functools.partial(jax.jit, static_argnums=0)
def _call(method, term, *args):
    return getattr(term, method)(*args)


@jax.jit
def _evaluate(term, x, g, step):
    """All methods at once: one program for each kind of term and block."""
    return {
        "value": term.value(x),
        "prox": term.prox(x, step),
        "project": term.project(x),
        "violation": term.violation(x),
        "residual": term.residual(x, g),
        "linear_oracle": term.linear_oracle(g),
        "support": term.support(g),
        "conjugate": term.conjugate(g),
        "diameter": term.diameter(x),
        "supremum": term.supremum(x),
    }


def evaluate(case: Case, x: Any, g: Any = None, step: float = 1.0, dtype: Any = np.float64) -> dict:
    """The methods of a term at flat vectors: vectors as flat vectors again, scalars as numbers."""
    g = x if g is None else g
    out = _evaluate(case.term, case.tree(x, dtype), case.tree(g, dtype), np.asarray(step, dtype))
    assert {leaf.dtype for leaf in jax.tree.leaves(out)} == {np.dtype(dtype)}
    return {name: flat(v) if name in VECTORS else float(v) for name, v in out.items()}


def call(case: Case, method: str, *args: Any, dtype: Any = np.float64) -> Any:
    """One method of the term at flat vectors and plain numbers."""
    given = {"step": args[1]} if method == "prox" else {"g": args[-1]}
    return evaluate(case, args[0], **given, dtype=dtype)[method]


# ---------------------------------------------------------------------------------------------
# Properties
# ---------------------------------------------------------------------------------------------

# Arrays of hypothesis have many equal entries, and zeros, which is where the ties are.
numbers = st.floats(-50, 50, allow_subnormal=False)
vectors = hnp.arrays(np.float64, 6, elements=numbers)
steps = st.floats(0.05, 5.0)
generators = st.integers(0, 2**32 - 1).map(np.random.default_rng)
phases = (Phase.generate, Phase.shrink)
quick = settings(max_examples=15, deadline=None, derandomize=True, database=None, phases=phases)


@each()
@quick
@given(v=vectors, w=vectors, step=steps, rng=generators)
def test_prox_and_projection(case, v, w, step, rng):
    """The point x is prox(v) exactly when ⟨v − x, s − x⟩ ≤ step·(φ(s) − φ(x)) on the domain.

    Moreau: v = x + step·g with x the prox of φ and g that of φ*. So g is a subgradient at x, also
    where rounding moved x a little off the boundary, and φ(x) + φ*(g) = ⟨x, g⟩. The prox is firmly
    nonexpansive. `project` is the nearest point of the domain, and `violation` how near it is.
    """
    v, w = np.resize(v, case.size), np.resize(w, case.size)
    at_v = evaluate(case, v, step=step)
    x, near = at_v["prox"], at_v["project"]
    g, scale = (v - x) / step, 1 + np.abs(v).max()
    at_x = evaluate(case, x, -g)
    assert max(case.gap(x), case.gap(near)) <= 1e-12 * scale
    assert at_x["value"] == pytest.approx(case.value(x), rel=1e-12, abs=1e-12)
    assert np.linalg.norm(at_x["residual"]) <= 1e-11 * scale / step
    assert at_v["violation"] == pytest.approx(np.linalg.norm(v - near), rel=1e-12, abs=1e-12)
    for s in case.samples(rng):
        gain = (v - x) @ (s - x) - step * (case.value(s) - case.value(x))
        assert gain <= 1e-10 * scale**2
        assert (v - near) @ (s - near) <= 1e-10 * scale**2
    if case.is_set:
        np.testing.assert_allclose(near, x, rtol=0, atol=1e-13 * scale)
    # The g of a norm lies on the boundary of the domain of φ*: step inside.
    g = g * (1 - 1e-9)
    conjugate = evaluate(case, near, g)["conjugate"]
    size = 1 + np.abs(x) @ np.abs(g)
    assert case.value(x) + conjugate == pytest.approx(x @ g, abs=1e-8 * size)
    at_w = evaluate(case, w, step=step)
    for name in ("prox", "project"):
        moved = at_v[name] - at_w[name]
        assert moved @ moved <= moved @ (v - w) + 1e-11 * (1 + np.abs(v - w).max()) ** 2
    np.testing.assert_allclose(call(case, "project", near), near, rtol=0, atol=1e-13 * scale)


@each()
@quick
@given(g=vectors, rng=generators)
def test_linear_oracle_and_conjugate(case, g, rng):
    """The oracle attains the support, φ*(g) ≥ ⟨g, s⟩ − φ(s), and for a set φ* is the support."""
    g = case.tame(np.resize(g, case.size))
    scale = 1e-11 * (1 + np.abs(g).sum())
    at = evaluate(case, g)
    best, support, conjugate = at["linear_oracle"], at["support"], at["conjugate"]
    assert np.all(np.isfinite(best))
    assert case.gap(best) <= 1e-12
    assert best @ g == pytest.approx(support, abs=scale)
    assert case.support(g) == pytest.approx(support, abs=scale)
    assert not np.isnan(conjugate)
    if case.is_set:
        assert case.support(g) == pytest.approx(conjugate, abs=scale)
    for s in case.samples(rng):
        assert g @ s <= support + scale
        assert g @ s - case.value(s) <= conjugate + scale


@each([case for case in CASES if not case.bounded])
def test_unbounded_domains(case):
    """Where the domain has no end, the support, the oracle and the diameter say so."""
    g = np.where(np.arange(case.size) % 2, -1.0, 1.0)
    best = call(case, "linear_oracle", g)
    ended = case.tame(g) == g
    assert call(case, "support", g) == INF
    np.testing.assert_array_equal(best[~ended], g[~ended] * INF)
    assert np.all(np.isfinite(best[ended]))
    assert call(case, "diameter", g) == INF


@each([case for case in CASES if not case.conjugate_finite])
def test_conjugate_is_infinite_beyond_its_domain(case):
    """A term that grows at most linearly has an infinite conjugate at a steep slope."""
    steep = np.where(case.tame(np.ones(case.size)) == 0, 3.0, -3.0)
    assert call(case, "conjugate", steep) == INF


@each()
def test_diameter_and_supremum(case):
    """The farthest two points, by trying all pairs of vertices, and a bound on every value."""
    like = np.zeros(case.size)
    diameter, supremum = call(case, "diameter", like), call(case, "supremum", like)
    if case.exact_diameter:
        assert diameter == pytest.approx(case.diameter(), rel=1e-12)
    else:  # an upper bound, at most 10 % above for these
        assert case.diameter() * (1 - 1e-12) <= diameter <= 1.1 * case.diameter()
    rng = np.random.default_rng(0)
    for _ in range(50):
        x, y = case.face(rng), case.face(rng)
        assert np.linalg.norm(x - y) <= diameter * (1 + 1e-12)
        assert case.value(x) <= supremum * (1 + 1e-12)
    assert np.isfinite(supremum) == (case.bounded or case.is_set)


@each([case for case in CASES if case.bounded])
def test_value_is_infinite_outside(case):
    """A point pushed out of the domain by a millionth has no finite value; neither has NaN."""
    rng = np.random.default_rng(2)
    inside = next(case.samples(rng))
    assert call(case, "value", inside) == pytest.approx(case.value(inside), rel=1e-12)
    v = 4 * rng.normal(size=case.size)
    x = call(case, "project", v)
    assert call(case, "value", x + 1e-6 * (v - x) / np.linalg.norm(v - x)) == INF
    if case.is_set:
        assert call(case, "value", np.full(case.size, np.nan)) == INF


@each()
@pytest.mark.parametrize("scale", [1e2, 1e5, 1e8])
def test_prox_from_far_away(case, scale):
    """However far v is, the prox lies in the domain, and its residual sees which face it is on."""
    noise = np.random.default_rng(3).normal(size=(2, case.size))
    for v in (scale * noise[0], scale + noise[1]):
        x = call(case, "prox", v, 0.7)
        assert case.gap(x) <= 1e-13 * (1 + np.abs(x).max())
        assert call(case, "value", x) == pytest.approx(case.value(x), rel=1e-12)
        assert np.linalg.norm(call(case, "residual", x, (x - v) / 0.7)) <= 1e-12 * scale


# ---------------------------------------------------------------------------------------------
# Agreement with CVXPY
# ---------------------------------------------------------------------------------------------


def solve(cost: Any, held: list) -> float:
    problem = cp.Problem(cp.Minimize(cost), held)
    tight = dict.fromkeys(("tol_gap_abs", "tol_gap_rel", "tol_feas", "tol_ktratio"), 1e-9)
    return problem.solve(solver=cp.CLARABEL, **tight)


@each()
def test_prox_and_projection_agree_with_cvxpy(case):
    rng = np.random.default_rng(10)
    for step in (0.2, 3.0):
        v = 2 * rng.normal(size=case.size)
        u = cp.Variable(case.size)
        cost, held = case.model(u)
        solve(cp.sum_squares(u - v) / 2 + step * cost, held)
        np.testing.assert_allclose(call(case, "prox", v, step), u.value, rtol=0, atol=2e-6)
    solve(cp.sum_squares(u - v), held)
    np.testing.assert_allclose(call(case, "project", v), u.value, rtol=0, atol=2e-6)
    assert call(case, "violation", v) == pytest.approx(np.linalg.norm(u.value - v), abs=1e-6)


@each()
def test_residual_agrees_with_cvxpy(case):
    """The shortest vector of g + ∂φ(x) at corners, faces and kinks, and at points between.

    A shallow g can lie inside −∂φ(x), and the residual is zero; a steep one cannot.
    """
    rng = np.random.default_rng(13)
    points = [*(case.face(rng) for _ in range(4)), *case.samples(rng, 2)]
    for x, size in zip(points, [2.0, 0.2] * 3, strict=True):
        g = size * rng.normal(size=case.size)
        pieces = [(part, *part.subgradient(x[part.index])) for part in case.parts]
        costs = [cp.sum_squares(g[part.index] + out) for part, out, _ in pieces]
        solve(sum(costs), [h for _, _, held in pieces for h in held])
        shortest = case.gather([g[part.index] + out.value for part, out, _ in pieces])
        got = call(case, "residual", x, g)
        np.testing.assert_allclose(got, shortest, rtol=0, atol=2e-6)
        assert np.linalg.norm(got) == pytest.approx(np.linalg.norm(shortest), abs=1e-6)


# ---------------------------------------------------------------------------------------------
# Transformations and dtypes
# ---------------------------------------------------------------------------------------------


@each([case for case in EACH_CLASS if not case.is_set])
def test_whole_numbers_as_step(case):
    """`prox(v, 1)` is `prox(v, 1.0)`: no weight may be rounded to a whole number."""
    v = 2 * np.random.default_rng(20).normal(size=case.size)
    got = flat(jax.jit(lambda term, a: term.prox(a, 1))(case.term, case.tree(v)))
    np.testing.assert_allclose(got, call(case, "prox", v, 1.0), rtol=0, atol=1e-13)


@each([NAMED["ElasticNet+Box"]])
def test_eager_calls_are_the_compiled_ones(case):
    v = 2 * np.random.default_rng(21).normal(size=case.size)
    got = case.term.prox(case.tree(v), 0.6)
    np.testing.assert_allclose(flat(got), call(case, "prox", v, 0.6), rtol=0, atol=1e-14)
    got = case.term.residual(got, case.tree(v))
    expected = call(case, "residual", call(case, "prox", v, 0.6), v)
    np.testing.assert_allclose(flat(got), expected, rtol=0, atol=1e-13)


def test_new_parameters_do_not_recompile():
    """A term's numbers are arrays, so a sweep over them compiles once."""
    traces = []

    @jax.jit
    def prox(term, v):
        traces.append(term)
        return term.prox(v, 1.0)

    v = jnp.arange(3.0)
    np.testing.assert_allclose(prox(L1(0.5), v), [0.0, 0.5, 1.5])
    np.testing.assert_allclose(prox(L1(1.5), v), [0.0, 0.0, 0.5])
    assert len(traces) == 1


PARAMETRIC = {
    "L1": (L1, [0.1, 0.7, 2.0]),
    "LInfBall": (LInfBall, [0.1, 0.7, 2.0]),
    "CappedSimplex": (CappedSimplex, [0.3, 0.5, 4.0]),
    "Simplex": (Simplex, [0.3, 0.5, 4.0]),
    "L1Ball": (L1Ball, [0.3, 0.5, 4.0]),
    "L2Ball": (L2Ball, [0.3, 0.5, 4.0]),
    "GroupL2": (GroupL2, [0.0, 0.5, 4.0]),
    "ElasticNet": (lambda w: ElasticNet(w, 2 * w), [0.1, 0.7, 2.0]),
    "L1+Box": (lambda w: L1(w) + Box(-w, 2 * w), [0.1, 0.7, 2.0]),
    "Scaled": (lambda w: w * L1(0.5), [0.1, 0.7, 2.0]),
}


@pytest.mark.parametrize("name", PARAMETRIC)
def test_vmap_over_parameters(name):
    """A term can be built from traced numbers, and a batch of them is a batch of terms."""
    make, values = PARAMETRIC[name]
    v = jnp.asarray([0.4, -1.0, 2.0, 0.1])
    got = jax.jit(jax.vmap(lambda w: make(w).prox(v, 0.5)))(jnp.asarray(values))
    for row, value in zip(got, values, strict=True):
        np.testing.assert_allclose(row, _call("prox", make(value), v, 0.5), atol=1e-14)


def numeric(term: Term) -> tuple[np.ndarray, Any]:
    """The finite numbers of a term as one vector, and the way back to a term."""
    leaves, structure = jax.tree.flatten(term)
    start, unravel = ravel_pytree([jnp.asarray(leaf, np.float64) for leaf in leaves])
    finite = np.flatnonzero(np.isfinite(start))

    def rebuild(theta: jax.Array) -> Term:
        filled = start.at[finite].set(theta) if finite.size else start
        return jax.tree.unflatten(structure, unravel(filled))

    return np.asarray(start)[finite], rebuild


@each(EACH_CLASS)
def test_vmap_and_jacobians_of_the_prox(case):
    """Both modes against differences, with respect to the point, the step and the parameters.

    The batch of points for the differences is one `vmap`; a loop in it must not stop for all rows
    when it has converged for one.
    """
    theta, rebuild = numeric(case.term)
    rng = np.random.default_rng(22)
    points = np.array([30.0, 0.1, 1.0, 2.0])[:, None] * rng.normal(size=(4, case.size))
    batch = np.stack([np.concatenate([v, [0.6], theta]) for v in points])
    unravel = ravel_pytree(case.tree(points[0]))[1]

    def prox(z):
        v, step, parameters = z[: case.size], z[case.size], z[case.size + 1 :]
        return ravel_pytree(rebuild(parameters).prox(unravel(v), step))[0]

    steps = 1e-6 * np.eye(batch.shape[1])
    all_points = np.concatenate([batch, batch[-1] + steps, batch[-1] - steps])
    both = jax.jit(lambda z, y: (jax.vmap(prox)(z), jax.jacfwd(prox)(y), jax.jacrev(prox)(y)))
    values, *jacobians = map(np.asarray, both(jnp.asarray(all_points), jnp.asarray(batch[-1])))
    for v, x in zip(points, values[:4], strict=True):
        np.testing.assert_allclose(x, call(case, "prox", v, 0.6), rtol=1e-13, atol=1e-13)
    ahead, behind = np.split(values[4:], 2)
    for jacobian in jacobians:
        np.testing.assert_allclose(jacobian, (ahead - behind).T / 2e-6, rtol=1e-6, atol=1e-7)


@functools.partial(jax.jit, static_argnums=0)
def _gradient(method, term, x):
    return jax.grad(lambda a: getattr(term, method)(a))(x)


def gradient(case: Case, method: str, x: np.ndarray) -> np.ndarray:
    return flat(_gradient(method, case.term, case.tree(x)))


def slopes(f, x: np.ndarray, h: float = 1e-6) -> np.ndarray:
    """The gradient by central differences."""
    return np.array([(f(x + h * e) - f(x - h * e)) / (2 * h) for e in np.eye(x.size)])


@each(EACH_CLASS)
def test_gradient_of_the_value(case):
    """Inside the domain the value has the gradient of its penalties."""
    rng = np.random.default_rng(24)
    x = np.mean([case.face(rng) for _ in range(8)], axis=0)
    got = gradient(case, "value", x)
    np.testing.assert_allclose(got, slopes(case.value, x), rtol=1e-6, atol=1e-7)


@each([*EACH_CLASS, NAMED["L1"], NAMED["L1+NonNegative"]])
def test_gradient_of_the_conjugate(case):
    """By Danskin it is the maximiser; an infinite bound must not make it NaN."""
    # Slopes for which φ* is finite: shallow ones, in directions in which the domain ends.
    g = np.random.default_rng(23).uniform(-0.2, 0.2, size=case.size)
    for part in case.parts:
        if not (part.l1 or part.group or part.ridge):
            g[part.index] = part.domain.tame(g[part.index])
    moves = np.flatnonzero(g)

    def conjugate(entries: np.ndarray) -> float:
        moved = g.copy()
        moved[moves] = entries
        return call(case, "conjugate", moved)

    got = gradient(case, "conjugate", g)
    assert np.all(np.isfinite(got))
    np.testing.assert_allclose(got[moves], slopes(conjugate, g[moves]), rtol=1e-6, atol=1e-7)


@each([case for case in EACH_CLASS if case.diameter() < INF])
def test_gradient_of_the_violation_outside(case):
    """It is the unit vector away from the domain."""
    v = 5 * np.random.default_rng(25).normal(size=case.size)
    away = v - call(case, "project", v)
    expected = away / np.linalg.norm(away)
    np.testing.assert_allclose(gradient(case, "violation", v), expected, atol=1e-10)


INTERIORS = {"Free": Free(), "Box": Box(-1.0, 1.0), "L2Ball": L2Ball(1.0), "L1Ball": L1Ball(1.0)}


@pytest.mark.parametrize("name", INTERIORS)
def test_gradient_of_the_violation_inside(name):
    """The distance is 0 all around a point inside, and so is its gradient."""
    got = _gradient("violation", INTERIORS[name], jnp.asarray([0.1, -0.2, 0.3]))
    np.testing.assert_array_equal(got, np.zeros(3))


@each(EACH_CLASS)
def test_float32_agrees_with_float64(case):
    single = functools.partial(call, case, dtype=np.float32)
    v = 2 * np.random.default_rng(26).normal(size=case.size)
    x, x32 = call(case, "prox", v, 0.6), single("prox", v, 0.6)
    np.testing.assert_allclose(x32, x, atol=2e-5)
    np.testing.assert_allclose(single("residual", x32, (x32 - v) / 0.6), 0, atol=1e-4)
    assert single("support", case.tame(v)) == pytest.approx(case.support(case.tame(v)), rel=1e-5)


WHOLE = {
    "Box": (lambda: Box(0, 1), Box(0.0, 1.0)),
    "CappedSimplex": (lambda: CappedSimplex(1, 2), CappedSimplex(1.0, 2.0)),
    "L1Ball": (lambda: L1Ball(1), L1Ball(1.0)),
    "L2Ball": (lambda: L2Ball(1, 2), L2Ball(1.0, 2.0)),
    "ElasticNet": (lambda: ElasticNet(1, 2), ElasticNet(1.0, 2.0)),
    "L1+Box": (lambda: L1(1) + Box(0, 1), L1(1.0) + Box(0.0, 1.0)),
    "Scaled": (lambda: 2 * ElasticNet(1, 2), 2.0 * ElasticNet(1.0, 2.0)),
    "float32-bounds": (
        lambda: L1(1.0) + Box(jnp.zeros(4, jnp.float32), jnp.ones(4, jnp.float32)),
        L1(1.0) + Box(0.0, 1.0),
    ),
}


@pytest.mark.parametrize("name", WHOLE)
def test_parameters_of_any_dtype(name):
    """Whole numbers and single precision do as parameters, in sums too, under strict promotion."""
    make, expected = WHOLE[name]
    term = make()
    v = jnp.asarray([0.4, -1.0, 2.5, 1.3])
    for method, args in (("prox", (v, 0.5)), ("conjugate", (v,))):
        got = _call(method, term, *args)
        np.testing.assert_allclose(got, _call(method, expected, *args), rtol=1e-15)


# ---------------------------------------------------------------------------------------------
# Pytrees
# ---------------------------------------------------------------------------------------------


def test_one_term_acts_leaf_by_leaf():
    """Two leaves are two simplices, not one spread over both."""
    x = {"u": jnp.asarray([3.0, 1.0]), "v": (jnp.asarray([[0.0, 0.0]]),)}
    got = _call("project", Simplex(), x)
    np.testing.assert_allclose(got["u"], [1.0, 0.0])
    np.testing.assert_allclose(got["v"][0], [[0.5, 0.5]])
    assert float(_call("diameter", Simplex(), x)) == pytest.approx(2.0)


def test_a_pytree_of_terms_takes_each_part():
    term = as_term({"u": Box(0.0, 1.0), "v": (NonNegative(), 2.0 * L1(0.5))}, "x")
    assert isinstance(term, PerLeaf)
    x = {"u": jnp.asarray([3.0, -1.0]), "v": (jnp.asarray(-2.0), jnp.asarray([[2.0, 0.25]]))}
    got = term.prox(x, 0.5)
    np.testing.assert_allclose(got["u"], [1.0, 0.0])
    np.testing.assert_allclose(got["v"][0], 0.0)
    np.testing.assert_allclose(got["v"][1], [[1.5, 0.0]])


def test_leaves_of_different_precision():
    """Each leaf keeps its own dtype; scalars over all of them follow JAX's promotion."""
    x = {"u": jnp.asarray([2.0], jnp.float32), "v": jnp.asarray([-2.0], jnp.float64)}
    term = ElasticNet(0.5, 1.0) + Box(-1.0, 1.0)
    got = _call("prox", term, x, 1.0)
    assert {k: a.dtype for k, a in got.items()} == {"u": np.float32, "v": np.float64}
    with jax.numpy_dtype_promotion("standard"):
        assert float(_call("violation", term, x)) == pytest.approx(np.sqrt(2))
        assert float(_call("value", term, got)) == pytest.approx(2 * (0.5 * 0.75 + 0.5 * 0.75**2))


def test_empty_block():
    """A block with no arrays in it costs nothing and constrains nothing."""
    term = L1(1.0)
    assert float(term.value({})) == 0
    assert float(term.diameter(())) == 0
    assert term.prox({}, 1.0) == {}


# ---------------------------------------------------------------------------------------------
# Sums, factors, degenerate sets
# ---------------------------------------------------------------------------------------------

POINT = jnp.asarray([2.0, -0.7, 0.1, -3.0])


ALIKE = {
    "nested-sum": lambda: ((L1(0.4) + Ridge(0.9)) + BOX, ElasticNet(0.4, 0.9) + BOX),
    "L1+L1": lambda: (L1(0.4) + L1(0.3), L1(0.7)),
    "Box+Box": lambda: (Box(-1.0, 0.5) + NonNegative(), Box(0.0, 0.5)),
    "L1+Box+Box": lambda: (L1(0.4) + Box(-1.0, 0.5) + NonNegative(), L1(0.4, 0.0, 0.5)),
    "Free+": lambda: (Free() + Simplex(), Simplex()),
    "factor-of-a-set": lambda: (2.0 * Simplex(), Simplex()),
    "+Free": lambda: (Simplex() + Free(), Simplex()),
    "Ridge+Free": lambda: (Ridge(0.5) + Free(), Ridge(0.5)),
    "factor-right": lambda: (L1(0.4) * 3.0, L1(1.2)),
    "factor-twice": lambda: (2.0 * (0.5 * L1(0.4)), L1(0.4)),
    "factor-numpy": lambda: (np.float64(2.0) * L1(0.4), L1(0.8)),
    "factor-jax": lambda: (jnp.asarray(2.0) * L1(0.4), L1(0.8)),
    "ranks": lambda: (Box(np.zeros(4), 1.0) + Box(np.full((1, 4), 0.2), 2.0), Box(0.2, 1.0)),
}


@pytest.mark.parametrize("name", ALIKE)
def test_sums_and_factors(name):
    """Two ways to write one term have one prox."""
    left, right = ALIKE[name]()
    v = POINT[None]
    for method, args in (("prox", (v, 0.5)), ("conjugate", (0.1 * v,))):
        got = _call(method, left, *args)
        np.testing.assert_allclose(got, _call(method, right, *args), rtol=0, atol=1e-15)


DEGENERATE = {
    "Box-point": (Box(0.7, 0.7), [0.7] * 4),
    "LInfBall-zero": (LInfBall(0.0), [0.0] * 4),
    "L2Ball-zero": (L2Ball(0.0, 0.3), [0.3] * 4),
    "CappedSimplex-point": (CappedSimplex(0.25), [0.25] * 4),
}


@pytest.mark.parametrize("name", DEGENERATE)
def test_sets_of_one_point(name):
    """Its normal cone is everything, its diameter zero, and its support linear."""
    term, point = DEGENERATE[name]
    for method in ("project", "linear_oracle"):
        np.testing.assert_allclose(_call(method, term, POINT), point, atol=1e-15)
    got = _call("residual", term, jnp.asarray(point), POINT)
    np.testing.assert_allclose(got, np.zeros(4), atol=1e-15)
    assert float(_call("diameter", term, POINT)) == pytest.approx(0, abs=1e-15)


# ---------------------------------------------------------------------------------------------
# Simplices with a million entries
# ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["Box", "CappedSimplex", "L2Ball-axis", "Ridge+Box"])
def test_shapes_are_enough_for_the_bounds(name):
    """`diameter` and `supremum` need no numbers of the block, only its shape."""
    case = NAMED[name]
    shape = jax.ShapeDtypeStruct(case.like.shape, np.float32)
    assert float(case.term.diameter(shape)) == pytest.approx(case.diameter(), rel=1e-5)
    expected = call(case, "supremum", np.zeros(case.size))
    assert float(case.term.supremum(shape)) == pytest.approx(expected, rel=1e-5)


@each()
def test_an_entrywise_prox_moves_each_entry_by_its_own(case):
    """Where a term says so; and the plain ones do."""
    v = np.random.default_rng(0).normal(scale=2.0, size=case.size)
    prox = lambda v: ravel_pytree(case.term.prox(case.tree(v, np.float64), 0.7))[0]
    shift = lambda i: np.asarray(prox(v + 0.3 * np.eye(case.size)[i]) - prox(v))
    crossed = [np.delete(shift(i), i) for i in range(case.size)]
    assert not case.term.is_entrywise or np.abs(crossed).max() == 0
    assert case.term.is_entrywise or not isinstance(case.term, Box | L1 | Free)
