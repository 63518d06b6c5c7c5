"""Adversaries' answers in closed form, against projections, SciPy's minimisers and a known answer.

Three tasks, squared loss: for the rows' losses ℓ the lower answer is the nearest point of the
simplex to (η/n + ν·c + ℓ)/(η + ν), the upper one that of the capped simplex to c + ℓ/μ, with
centers c.
"""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import optimize

import bilevax as bx
from bilevax.problems import meta_learning, tail_tuning
from bilevax.solvers.best_response import BestResponse
from bilevax.solvers.responses import Answered, Parts, parts_of
from bilevax.trees import Layout
from tail_reference import on_capped, squared

A = jnp.asarray
RHO, MU, NU, ETA, LAM = 7.0, 0.2, 0.1, 0.7, 0.3
W = np.array([0.5, -1.0])


@pytest.fixture(scope="module")
def tasks():
    draw, tasks = np.random.default_rng(1), []
    for n, m in ((8, 6), (5, 7), (10, 4)):
        own = W + 0.5 * draw.standard_normal(2)
        x = draw.standard_normal((n + m, 2))
        b = x @ own + 0.5 * draw.standard_normal(n + m)
        tasks.append(((x[:n], b[:n]), (x[n:], b[n:])))
    return tasks


@pytest.fixture(scope="module")
def stated(tasks):
    return meta_learning(tasks, intercept=False)


def answered(problem, start):
    """Its reformulation, with centers off the even weights."""
    uneven = lambda weights: weights * (1 + 0.2 * jnp.cos(jnp.arange(weights.size)))
    centers = [problem.x2.project(uneven(start.x2.ravel()).reshape(start.x2.shape))]
    centers.append(problem.y2.project(uneven(start.y2.ravel()).reshape(start.y2.shape)))
    layout, parts = Layout.of(start.x1), Parts.of(start.y1, 3)
    return Answered(problem, A(RHO), A(MU), A(NU), *centers, layout, parts)


def levels_of(task, x2_center, y2_center, x1):
    """Ψ's two parts, ψ and φ~, of one task, with their slopes in y: loops in NumPy."""
    (x, b), validation = task
    w, eta, lam = x1[:2], x1[2], x1[3]
    n, m = len(b), len(validation[1])

    def below(y):
        losses, slopes = squared(y, x, b)
        c = y2_center[:n]
        q = on_capped((eta / n + NU * c + losses) / (eta + NU), 1.0)
        value = q @ losses - eta / 2 * np.sum((q - 1 / n) ** 2) - NU / 2 * np.sum((q - c) ** 2)
        return value + lam / 2 * np.sum((y - w) ** 2), x.T @ (q * slopes) + lam * (y - w)

    def above(y):
        losses, slopes = squared(y, *validation)
        c = x2_center[:m]
        q = on_capped(c + losses / MU, 1 / (0.5 * m))
        return q @ losses - MU / 2 * np.sum((q - c) ** 2), validation[0].T @ (q * slopes)

    return above, below


def value_and_places(tasks, at, x1):
    """φ(x1), and where its inner problems have their solutions, by BFGS."""
    least = lambda f: optimize.minimize(f, W, jac=True, method="BFGS", options={"gtol": 1e-11})
    value, places = 0.0, np.zeros((2, 3, 2))
    centers = np.asarray(at.x2_center), np.asarray(at.y2_center)
    for k, task in enumerate(tasks):
        above, below = levels_of(task, centers[0][k], centers[1][k], x1)
        both = lambda y, a=above, b=below: [u + RHO * v for u, v in zip(a(y), b(y))]
        upper, lower = least(both), least(below)
        value += upper.fun - RHO * lower.fun
        places[0, k], places[1, k] = upper.x, lower.x
    return value, places


def test_values_and_slopes_are_those_of_scipys_minimisers(tasks, stated):
    problem, start = stated
    at = answered(problem, start)
    flat = lambda x1: at.layout.ravel({"w": A(x1[:2]), "eta": A(x1[2]), "lam": A(x1[3])})
    order = np.asarray(flat(np.arange(4.0))).astype(int)  # a dictionary's entries are sorted
    x1 = np.array([*W, ETA, LAM])
    value, places = value_and_places(tasks, at, x1)
    above, in_y1, in_z1 = at.values(flat(x1), A(places))
    assert float(above + RHO * (in_y1 - in_z1)) == pytest.approx(value, abs=1e-9)
    slopes = at.slopes(flat(x1), A(places))
    np.testing.assert_allclose(slopes.of_parts, 0, atol=1e-6)
    step = 1e-4
    for j, of_j in zip(order, np.asarray(slopes.of_x1)):
        ends = [value_and_places(tasks, at, x1 + s * np.eye(4)[j])[0] for s in (step, -step)]
        assert of_j == pytest.approx((ends[0] - ends[1]) / (2 * step), abs=1e-5)


def test_hessians_are_differences_of_slopes(stated):
    problem, start = stated
    at, draw = answered(problem, start), np.random.default_rng(0)
    x1 = at.layout.ravel({"w": A(W), "eta": A(ETA), "lam": A(LAM)})
    both = A(draw.standard_normal((2, 3, 2)))
    hessians, in_x1 = at.in_parts(x1, both), at.in_x1(x1, both)
    slopes = eqx.filter_jit(at.slopes)
    for j in range(2):
        way = jnp.zeros_like(both).at[..., j].set(1e-6)
        ends = [slopes(x1, both + s * way).of_parts for s in (1, -1)]
        np.testing.assert_allclose(hessians[..., j], (ends[0] - ends[1]) / 2e-6, atol=1e-5)
    for j in range(4):
        way = jnp.zeros_like(x1).at[j].set(1e-6)
        ends = [slopes(x1 + s * way, both) for s in (1, -1)]
        found = (ends[0].of_parts - ends[1].of_parts) / 2e-6
        np.testing.assert_allclose(in_x1.of_parts[..., j], found, atol=1e-5)
        found = (ends[0].of_x1 - ends[1].of_x1) / 2e-6
        np.testing.assert_allclose(in_x1.of_x1[..., j], found, atol=1e-4)


def test_it_is_seen_which_problems_have_such_answers(tasks, stated):
    problem, start = stated
    assert parts_of(problem, start) == 3
    coupled = lambda f: lambda x1, y1, y2, data: f(x1, y1, y2, data) + jnp.sum(y1[0] * y1[1])
    of_lower = lambda lower: dataclasses.replace(problem, lower=lower)
    assert parts_of(of_lower(coupled(problem.lower)), start) == 1
    curved = lambda x1, y1, y2, data: problem.lower(x1, y1, y2, data) - jnp.sum(y2**4)
    assert parts_of(of_lower(curved), start) == 0
    linear = lambda x1, y1, y2, data: problem.lower(x1 | {"eta": 0.0 * LAM}, y1, y2, data)
    assert parts_of(of_lower(linear), start) == 0
    reads = lambda x1, x2, y1, y2, data: problem.upper(x1, x2, y1, y2, data) + jnp.sum(y2)
    assert parts_of(dataclasses.replace(problem, upper=reads), start) == 0
    bounded, at = meta_learning(tasks, intercept=False, y1=bx.terms.Box(-3.0, 3.0))
    assert parts_of(bounded, at) == 0
    with pytest.raises(ValueError, match="answers are in closed form"):
        BestResponse().prepare(bounded, at, 1e-4)
    assert parts_of(*meta_learning(tasks, intercept=False, eta=0.0)) == 3
    alone, at = tail_tuning(*tasks[0], loss="squared", intercept=False)
    assert parts_of(alone, at) == 1


@pytest.mark.parametrize("scale", [1.0, 1e4])
def test_one_simplex_over_all_parts_couples_them(scale):
    """At losses that are far apart its answer is a vertex, which moves with nothing."""
    a = scale * A(np.random.default_rng(0).standard_normal((4, 2)))
    losses = lambda y1: jnp.sum(a * y1, 1) ** 2 / 2 + scale * jnp.arange(4.0)
    near = lambda y1, x1: jnp.sum((y1 - x1) ** 2) / 2
    problem = bx.BilevelProblem(
        lambda x1, x2, y1, y2: near(y1, 1.0) + x1**2,
        lambda x1, y1, y2: jnp.sum(y2 * losses(y1)) - jnp.sum(y2**2) / 2 + near(y1, x1),
        x1=bx.terms.Box(-1.0, 1.0), y1=bx.terms.Free(), y2=bx.terms.Simplex(),
    )  # fmt: skip
    start = bx.Point(x1=A(0.0), y1=jnp.zeros((4, 2)), y2=jnp.full(4, 0.25))
    assert parts_of(problem, start) == 1


def test_an_eta_of_zero_and_resumption():
    """Validation rows are the training rows, (c, c, c, c + 2): the least worst loss of a task is ½.

    At η = 0 its parameter is c + 1 for every w within reach, where even weights lead to c + ½.
    """
    ones = np.ones((4, 1))
    rows = [(ones, c + np.array([0.0, 0.0, 0.0, 2.0])) for c in (0.0, 0.3, 1.0)]
    problem, start = meta_learning([(r, r) for r in rows], share=0.25, intercept=False)
    solver = BestResponse()
    whole = bx.solve(problem, start, tolerance=1e-4, solver=solver)
    assert whole.certified
    assert whole.certificate.objective == pytest.approx(1.5, abs=2e-3)
    part = bx.solve(problem, start, tolerance=1e-4, solver=solver, max_gradients=300)
    assert not part.certified
    assert part.gradients <= 300
    again = bx.solve(problem, start, tolerance=1e-4, solver=solver, resume=part.state)
    assert again.gradients == whole.gradients
    for one, other in zip(jax.tree.leaves(whole.point), jax.tree.leaves(again.point)):
        np.testing.assert_array_equal(one, other)
