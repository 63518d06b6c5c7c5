"""The solvers against a transcription of the paper, closed forms and real call counts."""

import dataclasses
import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bilevax as bx
import transcription
from bilevax import terms, trees
from bilevax.problems import library
from bilevax.problems.validation import validate
from bilevax.solvers.optfom import OPEN
from instances import get, same

FAR = jnp.asarray(10**9)


@eqx.filter_jit
def one_step(solver, problem, state):
    return solver.step(problem, state, FAR)


@eqx.filter_jit
def advance(solver, problem, state, limit):
    return solver.advance(problem, state, limit)


def random_saddle(seed, sigma_x=1.0, sigma_y=0.3, sizes=(6, 4)):
    """h = ½xᵀPx + xᵀAy − ½yᵀQy + bᵀx − cᵀy on boxes, with its constants, in NumPy and in JAX."""
    rng = np.random.default_rng(seed)
    n, m = sizes

    def definite(size, sigma):
        root = rng.normal(size=(size, size)) / np.sqrt(size)
        return root @ root.T + sigma * np.eye(size)

    P, Q = definite(n, sigma_x), definite(m, sigma_y)
    A, b, c = rng.normal(size=(n, m)), rng.normal(size=n), rng.normal(size=m)
    L = np.linalg.norm(np.block([[P, A], [A.T, -Q]]), 2)

    def objective(x, y, data):
        P, Q, A, b, c = data
        return 0.5 * x @ P @ x + x @ A @ y - 0.5 * y @ Q @ y + b @ x - c @ y

    problem = bx.MinimaxProblem(
        objective,
        terms.Box(-0.6, 0.6),
        terms.Box(-0.5, 0.5),
        data=(P, Q, A, b, c),
        smoothness=L,
    )
    gradient = lambda x, y: (P @ x + A @ y + b, A.T @ x - Q @ y - c)
    return problem, gradient, L


def clip(bound):
    return lambda v, t: np.clip(v, -bound, bound)


@pytest.mark.parametrize(
    ("seed", "sigma_x", "sigma_y"), [(0, 1.0, 0.3), (1, 1.0, 0.001), (2, 0.1, 1.0), (3, 2.0, 2.0)]
)
def test_optfom_follows_the_paper_step_by_step(seed, sigma_x, sigma_y):
    problem, gradient, L = random_saddle(seed, sigma_x, sigma_y)
    x0, y0 = np.full(6, 0.2), np.full(4, -0.1)
    run = transcription.optfom(
        gradient, clip(0.6), clip(0.5), x0, y0, L, sigma_x, sigma_y, 1e-7, 400
    )
    solver = bx.OptFOM(strong_convexity=sigma_x, strong_concavity=sigma_y, tolerance=1e-7)
    start = bx.Point(x=jnp.asarray(x0), y=jnp.asarray(y0))
    solver = solver.prepare(problem, start, 1e-7)
    state = solver.init(problem, start)
    assert len(run.trace) > 100
    for count, landing in enumerate(run.trace, start=1):
        state = one_step(solver, problem, state)
        np.testing.assert_allclose(state.landed, np.r_[landing.x, landing.y], rtol=0, atol=1e-9)
        assert int(state.gradients) == 2 * count
        assert (int(state.mode) == OPEN) == (landing.kind == "closing")
    assert bool(state.finished) == run.converged


def test_a_limit_on_iterations_ends_a_method_where_it_is():
    problem, gradient, L = random_saddle(0)
    x0, y0 = np.full(6, 0.2), np.full(4, -0.1)
    start = bx.Point(x=jnp.asarray(x0), y=jnp.asarray(y0))
    known = {"strong_convexity": 1.0, "strong_concavity": 0.3, "tolerance": 1e-4}
    # At most 7 iterations and 7 in each inner loop; and none of these limits.
    for most, cut in ((7, True), (None, False)):
        run = transcription.optfom(
            gradient, clip(0.6), clip(0.5), x0, y0, L, 1.0, 0.3, 1e-4, 20_000, most or np.inf
        )
        solver = bx.OptFOM(max_iterations=most, **known).prepare(problem, start, 1e-4)
        state = advance(solver, problem, solver.init(problem, start), FAR)
        np.testing.assert_allclose(state.landed, np.r_[run.point], rtol=0, atol=1e-9)
        assert int(state.gradients) == 2 * len(run.trace)
        assert bool(state.finished)
        assert bool(solver.cut_short(state)) == cut
    # With an L that is too small an inner loop would never end.
    wild = bx.OptFOM(smoothness=L / 8, strong_convexity=L / 8, strong_concavity=1e-3)
    wild = wild.prepare(problem, start, 1e-12)
    state = advance(wild, problem, wild.init(problem, start), jnp.asarray(50_000))
    assert int(state.iteration) > 1
    said = bx.solve(problem, start, tolerance=1e-5, solver=bx.OptFOM(max_iterations=3, **known))
    assert "OptFOM has ended, cut short by a limit on iterations" in str(said.status)
    for options in ({"max_iterations": 1}, {"inner": bx.OptFOM(max_iterations=2)}):
        solver = bx.ProximalPoint(**options).prepare(problem, start, 0.01)
        state = advance(solver, problem, solver.init(problem, start), jnp.asarray(10**6))
        assert bool(solver.cut_short(state))
        assert "inner" in options or (int(state.iteration) == 1 and bool(state.finished))
    for kind in (bx.OptFOM, bx.ProximalPoint, bx.FOP, bx.SMO):
        with pytest.raises(ValueError, match=f"{kind.__name__}: max_iterations must be a whole"):
            kind(max_iterations=0)


@pytest.mark.parametrize("sigma_y", [0.5, 0.01])
def test_optfom_reaches_its_tolerance_linearly(sigma_y):
    problem, _, _ = random_saddle(5, 1.0, sigma_y)
    start = bx.Point(x=jnp.zeros(6), y=jnp.zeros(4))
    spent = []
    for tolerance in (1e-3, 1e-6):
        solver = bx.OptFOM(strong_convexity=1.0, strong_concavity=sigma_y)
        solution = bx.solve(problem, start, tolerance=tolerance, solver=solver)
        assert solution.status == "certified", solution.status
        # Its own stopping test is the certificate's distance, at the point it returns.
        solver = solution.solver
        state = advance(solver, problem, solver.init(problem, start), FAR)
        assert bool(state.finished)
        assert bx.certify(problem, solver.output(problem, state)).epsilon <= tolerance
        spent.append(int(state.gradients))
    assert spent[1] < 3 * spent[0]  # a linear rate doubles the work for twice the digits


@pytest.mark.parametrize("center", ["start", pytest.param("last", marks=pytest.mark.long)])
def test_proximal_point_follows_the_paper(center):
    rng = np.random.default_rng(7)
    A, b = rng.normal(size=(3, 4)), rng.normal(size=4)
    # Nonconvex in x (a concave quadratic plus coupling), linear in y.
    objective = lambda x, y: y @ A @ x - 0.2 * jnp.sum(x**2) + b @ x
    gradient = lambda x, y: (A.T @ y - 0.4 * x + b, A @ x)
    L = float(np.linalg.norm(A, 2)) + 0.4
    problem = bx.MinimaxProblem(objective, terms.Box(-1.0, 1.0), terms.Box(-1.0, 1.0), smoothness=L)
    x0, y0, epsilon = np.full(4, 0.1), np.full(3, 0.2), 0.2
    run = transcription.proximal_point(
        gradient, clip(1.0), clip(1.0), x0, y0, L, 2 * np.sqrt(3), epsilon, epsilon / 2,
        max_outer=200, max_steps=20_000, center=center,
    )  # fmt: skip
    solver = bx.ProximalPoint(center=center)
    start = bx.Point(x=jnp.asarray(x0), y=jnp.asarray(y0))
    solver = solver.prepare(problem, start, epsilon)
    state = solver.init(problem, start)
    assert len(run.outer) > 5
    for x, y in run.outer[1:]:
        state = one_step(solver, problem, state)
        np.testing.assert_allclose(state.x, x, rtol=0, atol=1e-9)
        np.testing.assert_allclose(state.y, y, rtol=0, atol=1e-9)
    assert int(state.gradients) == run.evaluations
    assert bool(state.finished)
    assert run.converged
    assert bx.certify(problem, solver.output(problem, state)).epsilon <= epsilon


def test_penalty_method_follows_the_paper():
    # The start is a saddle point of the lower level, so that both begin at the same place.
    instance = get("unique_saddle")
    problem, start = instance.problem, validate(instance.problem, instance.start)
    a, b, s = np.array([0.5, -0.4]), np.array([0.2, 0.1]), library.SCALE
    epsilon = 0.2
    run = transcription.penalty_method(
        lambda x1, x2, y1, y2: (x1 - a, y2 - x2, b, x2),
        lambda x1, y1, y2: (s * (x1 - y1), s * (y1 - x1 + y2), s * (y1 - y2)),
        clip(1.0), clip(1.0), clip(1.0), clip(1.0),
        float(problem.upper_smoothness), float(problem.lower_smoothness), 2 * np.sqrt(6), epsilon,
        *[np.zeros(2)] * 6, max_outer=30, max_steps=50_000,
    )  # fmt: skip
    solver = bx.PenaltyMethod().prepare(problem, start, epsilon)
    state = solver.init(problem, start)
    while bool(state.starting):
        state = one_step(solver, problem, state)
    assert len(run.run.outer) > 5
    for x, y in run.run.outer[1:]:
        state = one_step(solver, problem, state)
        np.testing.assert_allclose(np.concatenate(state.outer.x), x, rtol=0, atol=1e-9)
        np.testing.assert_allclose(np.concatenate(state.outer.y), y, rtol=0, atol=1e-9)
    assert int(state.outer.gradients) == run.run.evaluations
    assert bool(solver.done(problem, state)) == run.run.converged


def test_extragradient_finds_the_value_of_a_matrix_game():
    """Against the linear program that the game is."""
    from scipy.optimize import linprog

    rng = np.random.default_rng(3)
    M = rng.normal(size=(5, 7))
    # min t with Mᵀx ≤ t, x in the simplex
    lp = linprog(
        np.r_[np.zeros(5), 1], A_ub=np.c_[M.T, -np.ones(7)], b_ub=np.zeros(7),
        A_eq=[np.r_[np.ones(5), 0]], b_eq=[1], bounds=[(0, None)] * 5 + [(None, None)],
    )  # fmt: skip
    problem = bx.MinimaxProblem(lambda x, y, M: x @ M @ y, terms.Simplex(), terms.Simplex(), data=M)
    start = bx.Point(x=jnp.full(5, 0.2), y=jnp.full(7, 1 / 7))
    # A smoothness far too small: the step must find itself by backtracking.
    for smoothness in (None, 1e-3):
        solver = bx.ExtraGradient(smoothness=smoothness, tolerance=1e-3, stop="gap")
        solver = solver.prepare(problem, start, 1e-3)
        state = advance(solver, problem, solver.init(problem, start), FAR)
        assert bool(solver.done(problem, state))
        point = solver.output(problem, state)
        gap = float(jnp.max(M.T @ point.x) - jnp.min(M @ point.y))  # exact for a matrix game
        assert gap <= 1e-3
        np.testing.assert_allclose(float(state.measured), gap, atol=1e-9)
        assert abs(float(point.x @ M @ point.y) - lp.fun) <= 1e-3


@pytest.mark.parametrize("limit", [1, 2, 3, 77, 1000, 1001])
def test_a_limit_is_never_exceeded_and_never_changes_the_iterates(limit):
    instance = get("least_squares")
    start = validate(instance.problem, instance.start)
    solver = bx.PenaltyMethod().prepare(instance.problem, start, 0.1)
    go = functools.partial(advance, solver, instance.problem)
    first = go(solver.init(instance.problem, start), jnp.asarray(limit))
    assert int(first.gradients) <= limit
    assert int(first.gradients) > limit - solver.gradients_per_step
    split = go(first, jnp.asarray(3000))
    whole = go(solver.init(instance.problem, start), jnp.asarray(3000))
    assert same(split, whole)


def counted(function, counter):
    """The same function, counting its evaluations at run time."""

    def wrapped(*args):
        jax.debug.callback(lambda: counter.append(1))
        return function(*args)

    return wrapped


@pytest.mark.parametrize("limit", [5000])
def test_gradient_counts_are_those_of_real_calls(limit):
    instance = get("unique_saddle")
    uppers, lowers = [], []
    problem = dataclasses.replace(
        instance.problem,
        upper=counted(instance.problem.upper, uppers),
        lower=counted(instance.problem.lower, lowers),
    )
    start = instance.start
    solver = bx.PenaltyMethod().prepare(instance.problem, start, 0.1)
    state = solver.init(problem, start)
    state = jax.block_until_ready(
        eqx.filter_jit(solver.advance)(problem, state, jnp.asarray(limit))
    )
    jax.effects_barrier()
    assert int(state.outer.gradients) > 0
    assert len(uppers) == int(state.outer.gradients)  # P₁ has f1 once
    # and f~1 at two places, batched into one call.
    assert len(lowers) == int(state.starter.gradients) + int(state.outer.gradients)


# A nonconvex upper level; README has simplices, test_newton.py a term that is no set,
# test_constrained.py has trees.
SHORT = [("double_well", 0.1), ("double_well", 0.01)]
PAIRS = [(name, epsilon) for name in library.INSTANCES for epsilon in (0.1, 0.01)]
TABLE = [p if p in SHORT else pytest.param(*p, marks=pytest.mark.long) for p in PAIRS]


@pytest.mark.parametrize(("name", "epsilon"), TABLE)
def test_the_papers_method_certifies_every_instance(name, epsilon):
    """Solvers × problems: the certificate, the closed-form answer, and the theorem's bound."""
    instance = get(name)
    bounds = bx.theory.predict(instance.problem, instance.start, epsilon).bounds
    solution = bx.solve(
        instance.problem,
        instance.start,
        tolerance=epsilon,
        solver=bx.PenaltyMethod(),
        max_gradients=60_000_000,
    )
    assert solution.status == "certified", solution.status
    again = bx.certify(instance.problem, solution.point)
    assert again.certified(epsilon)
    assert again.as_dict() == solution.certificate.as_dict()
    assert 0 < solution.gradients <= bounds.N
    found, known = solution.point, instance.point
    miss = trees.norm(trees.subtract((found.x1, found.y1), (known.x1, known.y1)))
    assert float(miss) <= instance.modulus * epsilon
    assert abs(solution.certificate.objective - instance.value) <= instance.modulus * epsilon


def test_the_method_also_stops_by_its_own_test_and_is_then_stationary():
    """Theorem `thm:minmax`: where Algorithm 1 stops, its point is ε-stationary for P_ρ."""
    instance = get("many_saddles")
    start = validate(instance.problem, instance.start)
    epsilon = 0.1
    solver = bx.PenaltyMethod().prepare(instance.problem, start, epsilon)
    state = advance(solver, instance.problem, solver.init(instance.problem, start), FAR)
    assert bool(solver.done(instance.problem, state))
    certificate = bx.certify(instance.problem, solver.output(instance.problem, state))
    for line in ("stationarity", "response_x2", "response_z1", "response_z2"):
        assert getattr(certificate, line) <= epsilon


@pytest.mark.long  # test_adaptive.py has the first, more tightly
@pytest.mark.parametrize("name", ["double_well", "matrix_game"])
def test_float32_reaches_what_float32_can(name):
    """These functions hold no arrays, so a float32 start makes all of it float32."""
    instance = get(name)
    start = jax.tree.map(lambda a: a.astype(jnp.float32), instance.start)
    solution = bx.solve(instance.problem, start, tolerance=0.1, max_gradients=2_000_000)
    assert solution.status == "certified", solution.status
    assert solution.point.x1.dtype == jnp.float32
    miss = jnp.abs(solution.point.x1[0] - instance.point.x1[0].astype(jnp.float32))
    assert float(miss) <= instance.modulus * 0.1


def test_another_inner_solver_solves_the_same_problem():
    instance = get("many_saddles")
    solver = bx.PenaltyMethod(outer=bx.ProximalPoint(inner=bx.ExtraGradient()))
    solution = bx.solve(instance.problem, instance.start, tolerance=0.1, solver=solver)
    assert solution.status == "certified", solution.status
    miss = trees.norm(trees.subtract(solution.point.y1, instance.point.y1))
    assert float(miss) <= instance.modulus * 0.1


def test_extragradient_solves_to_the_certificate():
    rng = np.random.default_rng(0)
    A, b = rng.normal(size=(5, 5)), rng.normal(size=5)
    box = terms.Box(-1.0, 1.0)
    problem = bx.MinimaxProblem(lambda x, y: y @ (A @ x - b), box, box)
    start = bx.Point(x=jnp.zeros(5), y=jnp.zeros(5))
    options = {"solver": bx.ExtraGradient(), "max_gradients": 200_000}
    solution = bx.solve(problem, start, tolerance=1e-4, **options)
    assert solution.status == "certified", solution.status
    # max over |y| ≤ 1 of yᵀ(Ax − b) is ‖Ax − b‖₁, whose least value a linear program knows.
    from scipy.optimize import linprog

    eye = np.eye(5)
    lp = linprog(
        np.r_[np.zeros(5), np.ones(5)],
        A_ub=np.block([[A, -eye], [-A, -eye]]),
        b_ub=np.r_[b, -b],
        bounds=[(-1, 1)] * 5 + [(0, None)] * 5,
    )
    found = float(jnp.sum(jnp.abs(A @ solution.point.x - b)))
    assert found == pytest.approx(lp.fun, abs=1e-3)


def test_constants_given_to_a_part_stay():
    instance = get("unique_saddle")
    outer = bx.ProximalPoint(
        center="last", inner_tolerance=1e-7, tolerance=1e-5, smoothness=6.0, y_diameter=9.0
    )
    solver = bx.PenaltyMethod(outer=outer, starter=bx.ExtraGradient(tolerance=1e-9))
    prepared = solver.prepare(instance.problem, instance.start, 0.1)
    kept = prepared.outer
    assert (float(kept.tolerance), float(kept.inner_tolerance)) == (1e-5, 1e-7)
    assert (float(kept.smoothness), float(kept.x_weight)) == (6.0, 12.0)
    assert float(kept.y_weight) == pytest.approx(1e-5 / 18)
    assert kept.center == "last"
    assert float(prepared.starter.tolerance) == 1e-9


@pytest.mark.long  # test_terms.py has sets of one point
def test_a_domain_of_one_point_is_no_obstacle():
    """With y1 in a simplex of one entry the lower level has nothing to choose: f = (x1 − y1)²."""
    problem = bx.BilevelProblem(
        lambda x1, x2, y1, y2: jnp.sum((x1 - y1) ** 2),
        lambda x1, y1, y2: jnp.sum(x1 * y1),
        x1=terms.Box(-2.0, 2.0),
        y1=terms.Simplex(),
    )
    start = bx.Point(x1=jnp.zeros(1), y1=jnp.ones(1))
    solution = bx.solve(problem, start, tolerance=0.1, max_gradients=3_000_000)
    assert solution.status == "certified", solution.status
    assert float(solution.point.x1[0]) == pytest.approx(1.0, abs=0.1)
    assert solution.gradients < bx.theory.predict(problem, start, 0.1).bounds.N
