"""Simplices of many entries, and the two ways to find the level."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.optimize import linprog

from bilevax.terms import CappedSimplex, Simplex
from bilevax.terms._waterfill import FEW, host_level, waterfill

INF = np.inf
N = 300_000


@functools.cache
def entries(kind: str) -> np.ndarray:
    rng = np.random.default_rng(30)
    uniform = rng.uniform(size=N)
    return {
        "normal": lambda: rng.normal(size=N),
        "small": lambda: 1e-6 * rng.normal(size=N),
        "ties": lambda: np.full(N, 0.3),
        "ties-far": lambda: np.full(N, 1e8),
        "few-values": lambda: np.floor(4 * uniform),
        "spread": lambda: 1e8 * (2 * uniform - 1),
        "offset": lambda: 1e8 + uniform,
        "clusters": lambda: np.where(rng.uniform(size=N) < 0.5, 1e8, 0.0) + uniform,
        "geometric": lambda: np.exp(-np.linspace(0, 700, N)),
        "heavy-tail": lambda: 1 / uniform,
        "negative": lambda: -1e4 * uniform - 5.0,
    }[kind]()


CAPS = {
    "none": INF,
    "worst-5%": 1 / (0.05 * N),
    "tenth": 0.1,
    "just-above": (1 + 1e-6) / N,
    "exact": 1 / N,
}
HARD = {
    "normal": ["none", "worst-5%", "exact"],
    "small": ["none"],
    "ties": ["none", "just-above"],
    "ties-far": ["none", "tenth"],
    "few-values": ["none", "worst-5%"],
    "spread": ["none", "just-above"],
    "offset": ["none", "worst-5%"],
    "clusters": ["none", "worst-5%"],
    "geometric": ["none"],
    "heavy-tail": ["worst-5%"],
    "negative": ["none", "just-above"],
}


@jax.jit
def _project(term, v):
    x = term.project(v)
    return x, term.value(x)


def assert_projects(x: np.ndarray, v: np.ndarray, total: float, cap) -> None:
    """The point x is feasible, and one level τ explains it: x = clip(v − τ, 0, cap)."""
    assert abs(x.sum() - total) <= 1e-9 * total
    assert x.min() >= 0
    assert np.all(x <= cap)
    level = v - x
    # An entry above 0 needs τ ≤ v − x, and one below the cap needs τ ≥ v − x.
    least = np.max(level, where=x < cap, initial=-INF)
    most = np.min(level, where=x > 0, initial=INF)
    assert least <= most + 4 * np.finfo(np.float64).eps * (np.abs(v).max() + 1)


@pytest.mark.parametrize(("kind", "cap"), [(kind, cap) for kind in HARD for cap in HARD[kind]])
def test_many_weights(kind, cap):
    """To full precision whatever the input: its size, its spread, its ties, how tight the cap."""
    v = entries(kind)
    x, value = _project(CappedSimplex(CAPS[cap]), jnp.asarray(v))
    assert_projects(np.asarray(x), v, 1.0, CAPS[cap])
    assert float(value) == 0


@pytest.mark.parametrize("total", [1e-3, 250.0])
def test_many_weights_of_other_totals(total):
    v = entries("normal")
    for term, cap in ((Simplex(total), INF), (CappedSimplex(total / 1e4, total), total / 1e4)):
        assert_projects(np.asarray(_project(term, jnp.asarray(v))[0]), v, total, cap)


@pytest.mark.parametrize("cap", [INF, 3 / N])
def test_many_feasible_weights_stay(cap):
    """A point of the set is its own projection."""
    rng = np.random.default_rng(31)
    v = rng.permutation(np.repeat([0.0, 0.5 / N, 1.0 / N, 2.5 / N], N // 4))
    x = np.asarray(_project(CappedSimplex(cap), jnp.asarray(v))[0])
    np.testing.assert_allclose(x, v, rtol=0, atol=1e-15)
    assert_projects(x, v, 1.0, cap)


@pytest.mark.parametrize("axis", [0, 1])
def test_a_thousand_rows_of_weights(axis):
    """Rows of one call converge each in its own time."""
    rng = np.random.default_rng(32)
    v = rng.normal(size=(1000, 200)) * np.logspace(-6, 3, 1000)[:, None]
    v = v if axis == 1 else v.T
    x = np.asarray(_project(CappedSimplex(0.01, axis=axis), jnp.asarray(v))[0])
    for row, source in zip(np.moveaxis(x, axis, 1), np.moveaxis(v, axis, 1), strict=True):
        assert_projects(row, source, 1.0, 0.01)


def test_many_weights_in_single_precision():
    v = entries("normal").astype(np.float32)
    x = np.asarray(_project(CappedSimplex(1e-4), jnp.asarray(v))[0])
    assert x.dtype == np.float32
    exact = np.asarray(_project(CappedSimplex(1e-4), jnp.asarray(v.astype(np.float64)))[0])
    np.testing.assert_allclose(x, exact, rtol=0, atol=1e-6)
    assert x.sum(dtype=np.float64) == pytest.approx(1.0, abs=1e-4)


@pytest.mark.parametrize("share", [0.0123, 1.0])
def test_the_oracle_averages_the_worst_share(share):
    """The largest ⟨g, s⟩ over caps 1/(p·n) is the mean of the largest p·n entries: the CVaR."""
    g = entries("normal")
    term = CappedSimplex(1 / (share * N))
    worst = np.sort(g)[-round(share * N) :]
    assert float(term.support(jnp.asarray(g))) == pytest.approx(worst.mean(), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("total", [1.0, 1.8])  # 1.8: three at their caps is one answer of many
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_few_entries_and_many_have_the_same_level(total, dtype):
    """Entries that cannot move make the vector long: it then takes another way, with a loop."""
    rng = np.random.default_rng(0)
    scale = np.repeat([1e-3, 1.0, 1e3, 1e6], 20)[:, None]
    v = np.round(scale * rng.normal(size=(80, 8)), 6)
    v[::4] = v[::4, :1]  # ties
    cap = np.tile([0.6, 0.6, 0.6, 0.9], 2)
    fill = jax.jit(jax.vmap(waterfill, (0, None, None, None)))
    cast = lambda *arrays: [jnp.asarray(a, dtype) for a in arrays]
    few = fill(*cast(v, np.zeros(8), cap, total))
    still = np.zeros((80, FEW))
    longer = np.concatenate([v, still], axis=1), np.zeros(8 + FEW), np.append(cap, still[0])
    many = fill(*cast(*longer, total))[:, :8]
    eps = float(np.finfo(dtype).eps)
    np.testing.assert_allclose(few, many, atol=50 * eps)
    np.testing.assert_allclose(jnp.sum(few, axis=1), total, atol=20 * eps)


@pytest.mark.parametrize("n", [5, 200])
def test_the_level_of_a_program_is_that_of_the_host(n):
    rng = np.random.default_rng(1)
    v, cap = rng.normal(size=n), rng.uniform(0.5, 4, n) / n
    x = jax.jit(waterfill)(*map(jnp.asarray, (v, np.zeros(n), cap * 4, 1.0)))
    level = host_level(v, cap * 4, np.ones(n))
    np.testing.assert_allclose(x, np.clip(v - level, 0, cap * 4), atol=1e-14)


def test_two_hundred_caps():
    """The projection has one level, and the oracle and the diameter are as scipy's programs say."""
    rng = np.random.default_rng(2)
    cap, v = rng.uniform(0, 0.03, 200), rng.normal(size=200)
    term = CappedSimplex(cap)
    x, value = _project(term, jnp.asarray(v))
    assert_projects(np.asarray(x), v, 1.0, cap)
    assert float(value) == 0
    bounds = np.stack([np.zeros(200), cap], axis=1)
    best = linprog(-v, A_eq=np.ones((1, 200)), b_eq=[1.0], bounds=bounds)
    assert float(term.support(jnp.asarray(v))) == pytest.approx(-best.fun, abs=1e-12)
    diameter = float(term.diameter(jnp.asarray(v)))
    oracle = jax.jit(lambda g: term.linear_oracle(g))
    far = max(
        np.linalg.norm(np.subtract(oracle(g), oracle(-g)))
        for g in (cap - np.median(cap), rng.choice([-1.0, 1.0], 200) * cap)
    )
    assert far <= diameter <= 1.2 * far


@pytest.mark.parametrize(("dtype", "longer"), [(np.float32, 1e-3), (np.float64, 1e-11)])
def test_a_vertex_that_is_a_little_too_long_is_outside(dtype, longer):
    """Many entries that are zero do not excuse what the one that is there is too much."""
    vertex = np.zeros(10_000, dtype)
    vertex[0] = 1
    assert Simplex().value(vertex) == 0
    vertex[0] += longer
    assert Simplex().value(vertex) == np.inf
