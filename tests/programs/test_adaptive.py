"""Adaptive on problems with known answers: counts, resuming, compilations, float32, bad options."""

import dataclasses
import functools
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bilevax as bx
from bilevax import terms, trees
from bilevax.driver import pieces
from bilevax.problems import library
from bilevax.solvers.adaptive import MISTRUST, _shifted
from bilevax.solvers.multipliers import first_bounds
from instances import get, same


@functools.cache
def solved(name, tolerance=1e-3):
    instance = get(name)
    return bx.solve(
        instance.problem,
        instance.start,
        tolerance=tolerance,
        solver=bx.Adaptive(),
        max_gradients=200_000,
    )


# One in every run of the tests; all of them take minutes to compile. README and test_solvers.py
# have simplices and the nonconvex one, test_newton.py a term that is no set.
SHORT = ("unique_saddle",)
NAMES = [n if n in SHORT else pytest.param(n, marks=pytest.mark.long) for n in library.INSTANCES]


@pytest.mark.parametrize("name", NAMES)
def test_every_instance_is_certified_near_its_answer(name):
    """With a ρ less than 1/ε it may miss the answer by √ε: a gap is the square of a distance."""
    instance, solution = get(name), solved(name)
    assert solution.status == "certified", solution.status
    again = bx.certify(instance.problem, solution.point)
    assert again.as_dict() == solution.certificate.as_dict()
    found, known = solution.point, instance.point
    miss = trees.norm(trees.subtract((found.x1, found.y1), (known.x1, known.y1)))
    assert float(miss) <= instance.modulus * np.sqrt(1e-3)
    assert abs(solution.certificate.objective - instance.value) <= instance.modulus * np.sqrt(1e-3)


def test_tighter_tolerances_cost_little_more(monkeypatch):
    """Another tolerance is an argument of the same program; the answer is nearer for it."""
    instance, loose = get("least_squares"), solved("least_squares")
    monkeypatch.setattr(pieces._quick_steps, "lower", pytest.fail)  # steps are compiled already
    tight = solved("least_squares", 1e-6)
    assert tight.status == "certified", tight.status
    assert tight.gradients < 20 * loose.gradients
    np.testing.assert_allclose(tight.point.x1, instance.point.x1, atol=8e-3)
    assert tight.certificate.objective == pytest.approx(instance.value, abs=8e-3)


@pytest.mark.parametrize("times", [1e-3, 1e3])
def test_a_first_rho_far_off_is_corrected(times, monkeypatch):
    """What was needed, three orders of magnitude off: from above ρ shrinks, from below it grows.

    Without end games, one of which would be certified before ρ has shrunk.
    """
    monkeypatch.setattr("bilevax.solvers.adaptive.END_GRADIENTS", 10**9)
    instance, needed = get("unique_saddle"), float(solved("unique_saddle", 1e-4).point.rho)
    solution = bx.solve(
        instance.problem,
        instance.start,
        tolerance=1e-4,
        solver=bx.Adaptive(rho=times * needed),
        max_gradients=100_000,
    )
    assert solution.status == "certified", solution.status
    assert 0.02 < float(solution.point.rho) / needed < 50


def test_a_new_rho_begins_where_the_lower_level_pulls_as_before():
    """f = x² + y, f~ = (y − x)²/2: at ρ the best y is x − 1/ρ, the best z is x; x1 feels 1 + 2x."""
    problem = bx.BilevelProblem(
        lambda x1, x2, y1, y2: jnp.sum(x1**2 + y1),
        lambda x1, y1, y2: 0.5 * jnp.sum((y1 - x1) ** 2),
        x1=terms.Box(-9.0, 9.0),
        y1=terms.Box(-9.0, 9.0),
    )
    start = bx.Point(x1=jnp.asarray([0.5]), y1=jnp.asarray([0.25]), z1=jnp.asarray([0.5]))
    solver = bx.Adaptive(rho=4.0).prepare(problem, start, 1e-3)
    state = dataclasses.replace(solver.init(problem, start), reach=jnp.ones(6))
    assert not bool(solver.done(problem, state))
    mistrusted = dataclasses.replace(state, boost=jnp.asarray(2 * MISTRUST))
    assert bool(solver.done(problem, mistrusted))  # what it learnt is far from what it sees
    shifted = eqx.filter_jit(_shifted)
    for times in (np.asarray(0.1), np.asarray(5.0)):
        x1, y1, _, _, z1, _ = state.blocks.layout.unravel(shifted(problem, state, 1 / times))
        np.testing.assert_allclose((x1, z1), 0.5, atol=1e-12)
        np.testing.assert_allclose(y1, 0.5 - 1 / (4 * times), rtol=1e-12)


@pytest.mark.long  # a whole run for one step of it
def test_a_proximal_weight_that_was_zero_grows():
    """How much to smooth six noisy numbers: at y = 0 the weight e^x couples to nothing."""
    rng = np.random.default_rng(1)
    true = jnp.asarray(np.repeat(2 * rng.normal(size=3), 2))
    noisy = true + 0.5 * jnp.asarray(rng.normal(size=6))
    rough = lambda y: jnp.mean(jnp.sqrt(1 + jnp.diff(y) ** 2))
    problem = bx.BilevelProblem(
        lambda x1, x2, y1, y2: 0.5 * jnp.mean((y1 - true) ** 2),
        lambda x1, y1, y2: 0.5 * jnp.mean((y1 - noisy) ** 2) + jnp.exp(x1[0]) * rough(y1),
        x1=terms.Box(-6.0, 4.0),
        y1=terms.Box(-9.0, 9.0),
    )
    start = bx.Point(x1=jnp.zeros(1), y1=jnp.zeros(6))
    solution = bx.solve(problem, start, tolerance=1e-3, solver=bx.Adaptive(), max_gradients=20_000)
    assert solution.status == "certified", solution.status
    assert isinstance(solution.solver, bx.Adaptive)


def ellipsoids():
    """Two small ellipsoids and three rows in a box a hundred times as wide."""
    rng = np.random.default_rng(0)
    shapes = jnp.asarray(np.stack([rng.normal(size=(4, 4)) / 2 + np.eye(4) for _ in range(2)]))
    shift, wanted, rows, price = (
        jnp.asarray(times * rng.normal(size=size))
        for times, size in ((0.3, (4, 2)), (1.0, 4), (1.0, (3, 4)), (2.0, 4))
    )

    def constraints(x, y):
        around = jnp.sum(jnp.einsum("kij,j->ki", shapes, y - shift @ x) ** 2, axis=1)
        return {"ellipsoids": around - 0.25, "rows": rows @ y - 0.5}

    problem = bx.ConstrainedBilevelProblem(
        lambda x, y: jnp.sum((y - wanted) ** 2) + 0.1 * jnp.sum(x**2),
        lambda x, y: price @ y + 0.05 * jnp.sum(jnp.sqrt(1 + y**2)),
        x=terms.Box(-2.0, 2.0),
        y=terms.Box(-50.0, 50.0),
        constraints=constraints,
    )
    return problem, bx.Point(x=jnp.zeros(2), y=jnp.zeros(4))


def test_a_constraint_that_bends_is_scaled_by_its_slope_where_it_binds():
    scales, _ = first_bounds(*ellipsoids()).lower_scale
    assert np.max(scales["ellipsoids"]) < 3 * np.max(scales["rows"])


@pytest.mark.long  # the scales are what it rests on
def test_a_constraint_that_bends_is_no_obstacle():
    solution = bx.solve(*ellipsoids(), solver=bx.Adaptive(), max_gradients=40_000)
    assert solution.status == "certified", solution.status


def test_a_kink_ends_the_run_and_is_named():
    """Least absolute deviations, written literally: the lower level's gradient jumps."""
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(60, 4))
    targets = rows @ np.ones(4) + rng.laplace(size=60)
    (A, B), (a, b) = ((jnp.asarray(v[:30]), jnp.asarray(v[30:])) for v in (rows, targets))
    problem = bx.BilevelProblem(
        lambda x1, x2, y1, y2: 0.5 * jnp.mean((B @ y1 - b) ** 2),
        lambda x1, y1, y2: jnp.mean(jnp.abs(A @ y1 - a)) + 0.5 * jnp.exp(x1[0]) * jnp.sum(y1**2),
        x1=terms.Box(-6.0, 2.0),
        y1=terms.Box(-9.0, 9.0),
    )
    start = bx.Point(x1=jnp.zeros(1), y1=jnp.zeros(4))
    solution = bx.solve(problem, start, tolerance=1e-3, max_gradients=20_000)
    assert solution.status == "stalled", solution.status
    assert re.search(
        r"kink: the gradient of lower jumps by .* at [yz]1\[\d\] = ", str(solution.status)
    )
    assert solution.state.fell_back_at is None


def counted(function, seen):
    """The same function, counting at run time its values, first and second derivatives.

    A derivative is seen where JAX differentiates the arguments, forwards or backwards, and the
    derivative of that derivative likewise: that is a Hessian-vector product.
    """

    def note(kind):
        jax.debug.callback(lambda: seen.append(kind))

    @jax.custom_jvp
    def once_differentiated(blocks):
        return blocks

    @once_differentiated.defjvp
    def _(primals, tangents):
        note("product")
        return primals[0], tangents[0]

    @jax.custom_jvp
    def watched(blocks):
        note("value")
        return blocks

    @watched.defjvp
    def _(primals, tangents):
        note("gradient")
        return once_differentiated(primals[0]), tangents[0]

    return lambda *blocks: function(*watched(blocks))


@functools.cache
def counted_solver():
    """least_squares with counters, and a compiled `advance` for it."""
    instance, uppers, lowers = get("least_squares"), [], []
    problem = dataclasses.replace(
        instance.problem,
        upper=counted(instance.problem.upper, uppers),
        lower=counted(instance.problem.lower, lowers),
    )
    solver = bx.Adaptive().prepare(instance.problem, instance.start, 1e-3)
    return solver, problem, instance.start, uppers, lowers, eqx.filter_jit(solver.advance)


@pytest.mark.parametrize("limit", [0, 2, 50, 51, 1300])
def test_gradient_counts_are_those_of_real_calls(limit):
    """A gradient of the penalty is one of f1 and one of f~, batched over both of its places; a
    Hessian-vector product counts two.

    Such a product differentiates a gradient once more, so it shows as a gradient *and* a product
    here. What is not counted: the values of f~ at both places, in one call for each outer iterate,
    to bound its gap.
    """
    solver, problem, start, uppers, lowers, advance = counted_solver()
    state = solver.init(problem, start)
    jax.effects_barrier()
    uppers.clear()
    lowers.clear()
    state = jax.block_until_ready(advance(problem, state, jnp.asarray(limit)))
    jax.effects_barrier()
    gradients, products = uppers.count("gradient"), uppers.count("product")
    assert int(state.gradients) == gradients + products
    assert limit - solver.gradients_per_step < int(state.gradients) <= limit
    assert lowers.count("gradient") == gradients
    assert lowers.count("product") == products
    assert uppers.count("value") == 0
    assert lowers.count("value") == int(state.outer)
    if limit == 1300:
        assert products > 0
        assert gradients > 2 * products
        assert int(state.outer) > 3


@pytest.mark.parametrize("cuts", [(52,), (64, 65, 700, 701)])
def test_resuming_gives_the_same_run(cuts, tmp_path):
    """Cut anywhere, while curvatures are looked at too, and taken up from a file: bit for bit."""
    instance, whole = get("least_squares"), solved("least_squares")
    run = functools.partial(
        bx.solve, instance.problem, instance.start, tolerance=1e-3, solver=bx.Adaptive()
    )
    path, resume = tmp_path / "run.state", None
    for cut in cuts:
        part = run(resume=resume, max_gradients=cut)
        assert cut - 2 < part.gradients <= cut
        part.save(path)
        resume = path
    rest = run(resume=path)
    assert rest.gradients == whole.gradients
    assert same(rest.point, whole.point)
    assert same(rest.state.solver_state, whole.state.solver_state)
    assert rest.certificate == whole.certificate
    assert set(whole.history["gradients"]) <= set(rest.history["gradients"])


def test_other_options_are_another_run():
    instance = get("least_squares")
    state = solved("least_squares").state
    with pytest.raises(ValueError, match="another run"):
        bx.solve(instance.problem, instance.start, solver=bx.PenaltyMethod(), resume=state)


@pytest.mark.long  # test_constrained.py has a state of float32 through and through, too
def test_float32_reaches_what_float32_can():
    """The functions of this one hold no arrays, so a float32 start makes all of it float32."""
    instance = get("double_well")
    start = jax.tree.map(lambda a: a.astype(jnp.float32), instance.start)
    solution = bx.solve(
        instance.problem, start, tolerance=1e-2, solver=bx.Adaptive(), max_gradients=200_000
    )
    assert solution.status == "certified", solution.status
    state = solution.state.solver_state
    floats = [a for a in jax.tree.leaves(state) if jnp.issubdtype(a.dtype, jnp.floating)]
    assert {a.dtype for a in floats} == {jnp.dtype("float32")}
    miss = jnp.abs(solution.point.x1[0] - instance.point.x1[0].astype(jnp.float32))
    assert float(miss) <= instance.modulus * np.sqrt(1e-2)


@pytest.mark.parametrize("name", ["target", "relative"])
@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_bad_targets_are_named(name, value):
    with pytest.raises(ValueError, match=f"Adaptive: {name}.*finite and ≥ 0"):
        bx.Adaptive(**{name: value})


@pytest.mark.parametrize("name", ["rho", "step_size", "force"])
@pytest.mark.parametrize(
    ("value", "error", "words"),
    [
        (0.0, ValueError, "finite and > 0"),
        (-1.0, ValueError, "finite and > 0"),
        (float("nan"), ValueError, "finite and > 0"),
        (float("inf"), ValueError, "finite and > 0"),
        ("1", TypeError, "one number"),
        (True, TypeError, "one number"),
        ([1.0, 2.0], TypeError, "one number"),
    ],
)
def test_bad_options_are_named(name, value, error, words):
    with pytest.raises(error, match=re.escape(f"Adaptive: {name}") + f".*{words}"):
        bx.Adaptive(**{name: value})


def test_unknown_options_and_other_problems_are_refused():
    with pytest.raises(TypeError, match="center"):
        bx.Adaptive(center="start")
    box = terms.Box(-1.0, 1.0)
    minimax = bx.MinimaxProblem(lambda x, y: jnp.sum(x * y), box, box)
    start = bx.Point(x=jnp.zeros(1), y=jnp.zeros(1))
    with pytest.raises(TypeError, match="Adaptive solves a BilevelProblem, not a MinimaxProblem"):
        bx.solve(minimax, start, solver=bx.Adaptive())


def without_bounds():
    lower = lambda x1, y1, y2: jnp.sum((x1 - y1) ** 2)
    upper = lambda x1, x2, y1, y2: jnp.sum((y1 - 1) ** 2)
    problem = bx.BilevelProblem(upper, lower, x1=terms.Box(-1.0, 1.0), y1=terms.Free())
    return problem, bx.Point(x1=jnp.zeros(1), y1=jnp.zeros(1))


@pytest.mark.long  # test_unbounded.py has a ridge regression
def test_a_lower_level_without_bounds_is_taken():
    """Its gap holds within a radius."""
    solution = bx.solve(*without_bounds(), solver=bx.Adaptive(), progress=False)
    assert solution.certified
    np.testing.assert_allclose(solution.point.x1, 1, atol=1e-2)


def test_the_papers_method_refuses_a_lower_level_without_bounds():
    """It needs a diameter."""
    with pytest.raises(ValueError, match="PenaltyMethod needs bounded domains, and y1 = Free"):
        bx.solve(*without_bounds(), solver=bx.PenaltyMethod())
