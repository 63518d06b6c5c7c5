"""Problems: estimated constants, sampling checks, reformulations, and the library's answers."""

import dataclasses

import cvxpy as cp
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bilevax as bx
from bilevax import terms, trees
from bilevax.problems import constants, library
from bilevax.problems.reformulations import lower_level, penalty_blocks, penalty_point
from instances import get

BOX = terms.Box(-1.0, 1.0)
START = bx.Point(x1=jnp.zeros(2), x2=jnp.zeros(2), y1=jnp.zeros(2), y2=jnp.zeros(2))


def bilevel(upper=None, lower=None, **given):
    """A sound problem, of which a test may spoil one part."""
    upper = upper or (lambda x1, x2, y1, y2: jnp.sum(x1 * y1 + x2 * y2 - x2**2))
    lower = lower or (lambda x1, y1, y2: jnp.sum((y1 - x1) ** 2 + y1 * y2 - y2**2))
    return bx.BilevelProblem(upper, lower, x1=BOX, x2=BOX, y1=BOX, y2=BOX, **given)


def test_smoothness_of_a_quadratic_is_found():
    rng = np.random.default_rng(0)
    root = rng.normal(size=(8, 8))
    H = root + root.T
    estimate = constants.estimate_smoothness(
        lambda a, b: 0.5 * jnp.concatenate([a, b]) @ H @ jnp.concatenate([a, b]),
        terms.PerLeaf((terms.Free(), BOX)),
        (jnp.zeros(3), jnp.zeros(5)),
        None,
        "upper",
    )
    true = np.linalg.norm(H, 2)
    assert 0.97 * true <= estimate <= 1.06 * true


def test_smoothness_looks_beyond_the_start():
    """exp is flat at −4 and steep at 2: only samples over the domain see that."""
    estimate = constants.estimate_smoothness(
        lambda a: jnp.sum(jnp.exp(a)),
        terms.PerLeaf((terms.Box(-4.0, 2.0),)),
        (jnp.full(1, -4.0),),
        None,
        "upper",
    )
    assert estimate > 0.5


def test_smoothness_looks_inside_each_block_on_its_own_scale():
    """A wide block beside a narrow one must not push all samples of the narrow one to its faces."""
    curve = lambda x, y: jnp.sum(x) * 0 + jnp.sum(jax.nn.softplus(40 * (y - 0.5)))
    term = terms.PerLeaf((terms.Box(-1000.0, 1000.0), terms.Box(0.0, 1.0)))
    start = (jnp.zeros(20), jnp.full(20, 0.3))
    estimate = constants.estimate_smoothness(curve, term, start, None, "upper")
    assert estimate > 300  # 40²/4 = 400 at the middle


def test_given_constants_are_taken_as_they_are():
    problem = bilevel(upper_smoothness=11.0, lower_smoothness=13.0)
    assert constants.upper_smoothness_of(problem, START) == 11.0
    assert constants.lower_smoothness_of(problem, START) == 13.0


@jax.custom_vjp
def wrong_square(v):
    return jnp.sum(v**2)


wrong_square.defvjp(lambda v: (jnp.sum(v**2), v), lambda v, ct: (ct * v,))


# Each breach has a weight in the data, so that one program serves all of them.
def spoilt_upper(x1, x2, y1, y2, d):
    sound = jnp.sum(x1 * y1 + x2 * y2 - x2**2)
    return sound + d["convex"] * jnp.sum(3 * x2**2) + d["upper's gradient"] * wrong_square(x1)


def spoilt_lower(x1, y1, y2, d):
    sound = jnp.sum((y1 - x1) ** 2 + y1 * y2 - y2**2)
    waves = d["not convex"] * jnp.sum(jnp.sin(3 * y1) - (y1 - x1) ** 2)
    root = jnp.sum(jnp.sqrt(jnp.where(d["not finite"] > 0, 0.5 - y1, 1.0)))
    bend = d["not concave"] * jnp.sum(y2**4 + y2**2)
    return sound + waves + bend + d["lower's gradient"] * wrong_square(y1) + root


BREACHES = {
    "upper is concave in x2": "convex",
    "lower is convex in y1": "not convex",
    "lower is concave in y2": "not concave",
    "upper's gradient is right": "upper's gradient",
    "lower's gradient is right": "lower's gradient",
    "upper_smoothness is large enough": "upper_smoothness",
    "lower_smoothness is large enough": "lower_smoothness",
    "lower and its gradient are finite": "not finite",
}


# A check finds all of them, so that some are looked for together.
TOGETHER = [
    {"convex", "not convex", "upper_smoothness", "lower_smoothness"},
    {"upper's gradient", "not concave", "lower's gradient"},
    {"not finite"},
]


def spoilt(*breaches):
    data = {name: float(name in breaches) for name in BREACHES.values()}
    constants = ("upper_smoothness", "lower_smoothness")
    given = {name: 0.5 if name in breaches else 6.0 for name in constants}
    return bilevel(spoilt_upper, spoilt_lower, data=data, **given)


def test_a_sound_problem_passes_its_check():
    report = spoilt().check(START)
    assert report.ok, str(report)
    assert "convex in y1" in str(report)
    assert {finding.assumption for finding in report.findings} >= set(BREACHES)


@pytest.mark.parametrize("breaches", TOGETHER, ids=lambda breaches: ", ".join(sorted(breaches)))
def test_a_check_finds_the_breach(breaches):
    report = spoilt(*breaches).check(START)
    broken = {finding.assumption for finding in report.findings if not finding.holds}
    wanted = {assumption for assumption, breach in BREACHES.items() if breach in breaches}
    assert wanted <= broken
    assert not report.ok
    assert all(f"NO  {assumption}" in str(report) for assumption in wanted)
    if "not finite" not in breaches:  # which spoils every other sample
        untouched = {a for a, breach in BREACHES.items() if breach not in breaches}
        assert not {a for a in untouched & broken if "smoothness" not in a}


def test_a_minimax_check_finds_the_breach():
    good = bx.MinimaxProblem(lambda x, y: jnp.sum(x * y - y**2), BOX, BOX, smoothness=3.0)
    start = bx.Point(x=jnp.zeros(2), y=jnp.zeros(2))
    assert good.check(start).ok
    bad = bx.MinimaxProblem(lambda x, y: jnp.sum(x * y + y**4), BOX, BOX, smoothness=0.1)
    broken = {f.assumption for f in bad.check(start).findings if not f.holds}
    assert broken == {"objective is concave in y", "smoothness is large enough"}


def test_the_penalty_is_the_papers_formula():
    """With terms that are no sets, which ρ multiplies, too."""
    rho = 7.0
    problem = dataclasses.replace(
        bilevel(), x2=terms.Ridge(0.3), y1=terms.L1(0.7), y2=terms.Ridge(0.4)
    )
    rng = np.random.default_rng(2)
    x1, x2, y1, y2, z1, z2 = (jnp.asarray(rng.uniform(-1, 1, 2)) for _ in range(6))
    penalised = bx.penalty(problem, rho)
    gap = problem.lower_value(x1, y1, z2) - problem.lower_value(x1, z1, y2)
    expected = problem.upper_value(x1, x2, y1, y2) + rho * gap
    np.testing.assert_allclose(penalised.value((x1, y1, y2), (x2, z1, z2)), expected, rtol=1e-14)
    point = bx.Point(x1=x1, x2=x2, y1=y1, y2=y2, z1=z1, z2=z2)
    assert penalty_point(*penalty_blocks(point)) is not point
    for name in ("x1", "x2", "y1", "y2", "z1", "z2"):
        restored = getattr(penalty_point(*penalty_blocks(point)), name)
        assert jnp.all(restored == getattr(point, name))


def test_absent_blocks_reach_the_functions_as_none():
    seen = []

    def upper(x1, x2, y1, y2):
        seen.append((x2, y2))
        return jnp.sum(x1 * y1)

    def lower(x1, y1, y2):
        seen.append((None, y2))
        return jnp.sum((y1 - x1) ** 2)

    problem = bx.BilevelProblem(upper, lower, x1=BOX, y1=BOX)
    bx.certify(problem, bx.Point(x1=jnp.zeros(2), y1=jnp.zeros(2)))
    assert set(seen) == {(None, None)}


def instances(*short, without=()):
    """Those of the library, long but for some."""
    every = (n for n in library.INSTANCES if n not in without)
    return [n if n in short else pytest.param(n, marks=pytest.mark.long) for n in every]


@pytest.mark.parametrize("name", instances())
def test_the_librarys_constants_and_class_are_as_stated(name):
    instance = get(name)
    report = instance.problem.check(instance.start, samples=16)
    assert report.ok, str(report)
    value = instance.problem.upper_value(
        *(getattr(instance.point, b) for b in ("x1", "x2", "y1", "y2"))
    )
    np.testing.assert_allclose(value, instance.value, atol=1e-12)


def saddle(problem, x1, start):
    """The lower level's saddle point at x1, to a tight gap."""
    sub = lower_level(problem, x1)
    solver = bx.ExtraGradient(smoothness=1.0, tolerance=1e-9, stop="gap")
    begin = bx.Point(x=start.y1, y=start.y2)
    solver = solver.prepare(sub, begin, 1e-9)
    return settle(solver, sub, begin)


@eqx.filter_jit
def settle(solver, sub, begin):
    state = solver.advance(sub, solver.init(sub, begin), jnp.asarray(2_000_000))
    return solver.output(sub, state), solver.done(sub, state)


@pytest.mark.parametrize("name", instances("soft_threshold", without=("many_saddles",)))
def test_the_librarys_answers_are_local_solutions(name):
    """At the answer the lower gap is 0; near it, x1 with its saddle point does no better."""
    instance = get(name)
    problem, answer = instance.problem, instance.point
    assert bx.certify(problem, answer).gap <= 1e-9
    key = jax.random.key(0)
    for k in jax.random.split(key, 6):
        noise = constants.sample_domain(terms.Box(-0.05, 0.05), answer.x1, k)
        near = problem.x1.project(trees.axpy(1.0, noise, answer.x1))
        found, done = saddle(problem, near, answer)
        assert bool(done)
        point = bx.Point(x1=near, x2=answer.x2, y1=found.x, y2=found.y)
        value = bx.certify(problem, point).objective  # with x2 its best response
        assert value >= instance.value - 1e-6


def test_the_answer_among_many_saddles_is_that_of_the_program():
    """The upper level chooses on Σ y1 = x1: a quadratic program for cvxpy."""
    x, y = cp.Variable(1), cp.Variable(2)
    objective = 0.5 * cp.sum_squares(x - 0.2) + 0.5 * cp.sum_squares(y - np.array([0.5, 0.3]))
    program = cp.Problem(cp.Minimize(objective), [cp.sum(y) == x[0], cp.abs(y) <= 1])
    program.solve(solver=cp.CLARABEL)
    instance = get("many_saddles")
    np.testing.assert_allclose(instance.point.x1, x.value, atol=1e-6)
    np.testing.assert_allclose(instance.point.y1, y.value, atol=1e-6)
    assert instance.value == pytest.approx(program.value, abs=1e-7)


@pytest.mark.long  # it makes all of them
def test_the_library_covers_what_it_should():
    instances = [get(name) for name in library.INSTANCES]
    assert len(instances) >= 8
    assert any(i.problem.x2 is None for i in instances)
    assert any(i.problem.y2 is None for i in instances)
    assert any(len(jax.tree.leaves(i.start.x1)) > 1 for i in instances)
