"""Newton: its direction against NumPy, its answers against nested solves, and how it gives up."""

import dataclasses
import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.optimize import minimize_scalar
from sklearn.linear_model import Lasso

import bilevax as bx
from bilevax import terms
from bilevax.solvers.curvature import Blocks
from bilevax.solvers.engines import Engines
from bilevax.solvers.newton import MOVE, takes
from bilevax.solvers.penalised import Penalised
from bilevax.solvers.semismooth import Natural
from instances import same

RHO = 3.0


def coupled_saddle():
    """f = ½‖x − 1‖² + ½‖y − t‖² + x·u and f~ = ½yᵀQy + xᵀBy + uᵀCy − ½‖u‖², in boxes."""
    rng = np.random.default_rng(1)
    G = rng.normal(size=(3, 3))
    d = {"Q": G @ G.T + np.eye(3), "t": rng.normal(size=3)}
    d |= {"B": rng.normal(size=(2, 3)), "C": rng.normal(size=(2, 3))}
    problem = bx.BilevelProblem(
        lambda x, _, y, u, d: (
            jnp.sum((x - 1) ** 2) / 2 + jnp.sum((y - d["t"]) ** 2) / 2 + jnp.dot(x, u)
        ),
        lambda x, y, u, d: y @ d["Q"] @ y / 2 + x @ d["B"] @ y + u @ d["C"] @ y - jnp.sum(u**2) / 2,
        x1=terms.Box(-1.0, 1.0),
        y1=terms.Box(-0.5, 0.5),
        y2=terms.Box(-0.4, 0.4),
        data=d,
    )
    return problem, d, rng


def test_the_direction_is_that_of_numpy():
    """P is quadratic, its Hessian is written down by blocks, and the prox of a box is a 0/1."""
    problem, d, rng = coupled_saddle()
    Q, B, C = d["Q"], d["B"], d["C"]
    x, y, u, z, v = (rng.uniform(-0.4, 0.4, size=n) for n in (2, 3, 2, 3, 2))
    y[0], u[1] = 0.5, -0.4
    # P = f(x, y, u) + ρ(f~(x, y, v) − f~(x, z, u)), and F = (∂x, ∂y, ∂u, −∂z, −∂v).
    F = np.concatenate(
        [
            (x - 1) + u + RHO * B @ (y - z),
            (y - d["t"]) + RHO * (Q @ y + B.T @ x + C.T @ v),
            x + RHO * (u - C @ z),
            RHO * (Q @ z + B.T @ x + C.T @ u),
            -RHO * (C @ y - v),
        ]
    )
    none = np.zeros
    H = np.block(
        [
            [np.eye(2), RHO * B, np.eye(2), -RHO * B, none((2, 2))],
            [RHO * B.T, np.eye(3) + RHO * Q, none((3, 2)), none((3, 3)), RHO * C.T],
            [np.eye(2), none((2, 3)), RHO * np.eye(2), -RHO * C, none((2, 2))],
            [RHO * B.T, none((3, 3)), RHO * C.T, RHO * Q, none((3, 2))],
            [none((2, 2)), -RHO * C, none((2, 2)), none((2, 3)), RHO * np.eye(2)],
        ]
    )
    sizes, steps = (2, 3, 2, 0, 3, 2), np.array([0.9, 0.2, 0.4, 1.0, 0.2, 0.4])
    s = np.repeat(steps, sizes)
    low = -np.repeat([1.0, 0.5, 0.4, 1.0, 0.5, 0.4], sizes)
    w, W = np.concatenate([x, y, u, z, v]), rng.uniform(0.1, 1.0, size=12)
    moved = w - s * F
    free = (moved > low) & (moved < -low)
    assert 0 < free.sum() < 12
    rest = (w - np.clip(moved, low, -low)) / s
    J = np.where(free[:, None], H + np.diag(W), np.diag(1 / s))
    blocks = Blocks.of((x, y, u), (None, z, v))
    natural = Natural(Penalised(problem, jnp.asarray(RHO), blocks), jnp.asarray(steps))
    flat = jnp.asarray(w)
    slope = natural.penalised.operator(flat)
    hessian = jax.jit(jax.jacfwd(natural.penalised.operator))(flat)
    np.testing.assert_allclose(slope, F, atol=1e-13)
    np.testing.assert_allclose(hessian, H, atol=1e-13)
    np.testing.assert_allclose(natural(flat, slope), rest, atol=1e-13)
    np.testing.assert_array_equal(natural.held(flat, slope), ~free)
    part = np.concatenate([np.zeros(2), np.linalg.solve(J[2:, 2:], -rest[2:])])
    # In all columns, and in those only that are not held, with one that is, and without one.
    wanted = int(np.sum(free | (np.arange(12) < 2)))
    for most in (12, wanted + 1, wanted):

        @jax.jit
        def directions(flat, slope, weights, most=most):
            columns = natural.columns(flat, natural.free(flat, slope), most)
            assert columns.hessian.shape == (12, most)
            whole = natural.direction(flat, slope, columns, weights)
            return whole, natural.direction(flat, slope, columns, weights, 2)

        whole, second = directions(flat, slope, jnp.asarray(W))
        np.testing.assert_allclose(whole, np.linalg.solve(J, -rest), atol=1e-11)
        np.testing.assert_allclose(second, part, atol=1e-11)
    assert int(jnp.sum(natural.free(flat, slope))) == wanted


def test_the_tangent_leads_to_the_new_solution():
    """P is quadratic: while the same entries are held, the way is exact."""
    problem, *_ = coupled_saddle()
    blocks = Blocks.of((np.zeros(2), np.zeros(3), np.zeros(2)), (None, np.zeros(3), np.zeros(2)))
    steps, none = jnp.full(6, 0.05), jnp.zeros(12)
    at = lambda rho: Natural(Penalised(problem, jnp.asarray(rho), blocks), steps)
    w = jnp.zeros(12)

    @jax.jit
    def step(w):
        natural, slope = at(RHO), at(RHO).penalised.operator(w)
        columns = natural.columns(w, slope, 12)
        return natural.penalised.projected(w + natural.direction(w, slope, columns, none))

    for _ in range(30):  # Newton's steps to the solution at ρ = 3
        w = step(w)
    slope = at(RHO).penalised.operator(w)
    assert float(jnp.abs(at(RHO)(w, slope)).max()) < 1e-10
    assert 0 < int(jnp.sum(at(RHO).held(w, slope))) < 12
    larger = at(1.2 * RHO)
    change = larger.penalised.operator(w) - slope
    columns = larger.columns(w, slope, 12)
    there = w + at(RHO).tangent(w, slope, columns, none, change)
    rest = larger(there, larger.penalised.operator(there))
    assert float(jnp.abs(rest).max()) < 1e-9 < float(jnp.linalg.norm(there - w))


@functools.cache
def regression(seed: int = 5):
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(80, 6)) * [1, 3, 1, 0.3, 1, 1]
    t = X @ [1.0, 0.2, 0.0, 2.0, 0.0, -0.5] + 2 * rng.normal(size=80)
    return {"A": X[:10], "a": t[:10], "B": X[10:], "b": t[10:]}


def squares(w, X, t):
    return jnp.mean((X @ w - t) ** 2) / 2


BOX = terms.Box(-20.0, 20.0)


def ridge(y=BOX, dtype=float):
    data = {name: np.asarray(value, dtype) for name, value in regression().items()}
    problem = bx.ConstrainedBilevelProblem(
        lambda x, w, d: squares(w, d["B"], d["b"]),
        lambda x, w, d: squares(w, d["A"], d["a"]) + jnp.sum(jnp.exp(x)) * jnp.sum(w**2) / 2,
        x=terms.Box(-12.0, 6.0),
        y=y,
        data=data,
    )
    return problem, bx.Point(x=np.zeros(1, dtype), y=np.zeros(6, dtype))


@functools.cache
def best_ridge():
    """By nested solves in NumPy: x and F."""
    d = regression()

    def F(x):
        G = d["A"].T @ d["A"] / 10 + np.exp(x) * np.eye(6)
        w = np.linalg.solve(G, d["A"].T @ d["a"] / 10)
        return np.mean((d["B"] @ w - d["b"]) ** 2) / 2

    grid = np.linspace(-12, 6, 200)
    at = grid[np.argmin([F(x) for x in grid])]
    found = minimize_scalar(
        F, bounds=(at - 0.2, at + 0.2), method="bounded", options={"xatol": 1e-10}
    )
    return float(found.x), float(found.fun)


solved_ridge = functools.cache(lambda: bx.solve(*ridge()))


def test_a_tuned_ridge_is_certified_by_default_in_tens_of_steps():
    solution, (x, F) = solved_ridge(), best_ridge()
    assert solution.status == "certified"
    assert (solution.tolerance, solution.relative_tolerance) == (1e-6, 1e-6)
    assert isinstance(solution.solver, bx.Newton)
    assert 0 < solution.linear_solves <= 40
    assert solution.gradients < 200
    assert abs(float(solution.point.x[0]) - x) < 1e-2
    assert abs(solution.certificate.objective - F) <= solution.objective_shift + 1e-5
    assert abs(solution.extrapolated_objective - F) < 1e-5 * F


def test_a_small_penalty_does_not_lead_away_where_the_lower_level_is_hardly_curved():
    """With fewer rows than features, least λ leave the lower level almost flat, and y1 free."""
    rows, features = 6, 12

    def data(seed):
        rng = np.random.default_rng(seed)
        A, B = rng.normal(size=(2, rows, features))
        w = np.arange(features) < 3
        a, b = A @ w + 0.7 * rng.normal(size=rows), B @ w + 0.7 * rng.normal(size=rows)
        return {"A": A, "a": a, "B": B, "b": b}

    problem = bx.ConstrainedBilevelProblem(
        lambda x, w, d: squares(w, d["B"], d["b"]),
        lambda x, w, d: squares(w, d["A"], d["a"]) + jnp.sum(jnp.exp(x)) * jnp.sum(w**2) / 2,
        x=terms.Box(-8.0, 3.0),
        y=terms.Box(-10.0, 10.0),
        data=data(0),
    )
    for seed in (0, 1, 3):
        d = data(seed)

        def F(x, d=d):
            G = d["A"].T @ d["A"] / rows + np.exp(x) * np.eye(features)
            return (
                np.mean((d["B"] @ np.linalg.solve(G, d["A"].T @ d["a"] / rows) - d["b"]) ** 2) / 2
            )

        start = bx.Point(x=np.zeros(1), y=np.zeros(features))
        solution = bx.solve(dataclasses.replace(problem, data=d), start, solver=bx.Newton())
        assert solution.status == "certified"
        best = min(F(x) for x in np.linspace(-8.0, 3.0, 400))
        assert F(float(solution.point.x[0])) < best + 1e-4


@pytest.mark.long  # test_unbounded.py solves by default without bounds, too
@pytest.mark.parametrize("y", [terms.Free(), terms.Box(-np.inf, 50.0)])
def test_without_bounds_the_answer_is_the_same(y):
    solution = bx.solve(*ridge(y))
    assert solution.status == "certified"
    assert abs(float(solution.point.x[0]) - best_ridge()[0]) < 1e-2


def test_float32_certifies_what_its_rounding_allows():
    solution = bx.solve(*ridge(dtype=np.float32))
    assert solution.tolerance == 1e-3
    assert solution.status == "certified"
    assert solution.point.x.dtype == jnp.float32
    assert abs(float(solution.point.x[0]) - best_ridge()[0]) < 0.3


def test_kinks_of_a_lasso_against_scikit_learn():
    """Its penalty as an adversary u in [−1, 1]: where a weight is zero, u is inside."""
    d = regression()
    problem = bx.BilevelProblem(
        lambda x, _, w, u, d: squares(w, d["B"], d["b"]),
        lambda x, w, u, d: squares(w, d["A"], d["a"]) + jnp.sum(jnp.exp(x) * jnp.dot(u, w)),
        x1=terms.Box(-8.0, 2.0),
        y1=terms.Box(-20.0, 20.0),
        y2=terms.Box(-1.0, 1.0),
        data=d,
    )
    start = bx.Point(x1=np.full(1, -2.0), y1=np.zeros(6), y2=np.zeros(6))
    solution = bx.solve(problem, start)
    assert solution.status == "certified"
    assert solution.linear_solves <= 100

    def F(x):
        model = Lasso(alpha=float(np.exp(x)), fit_intercept=False, tol=1e-12, max_iter=10**6)
        w = model.fit(d["A"], d["a"]).coef_
        return np.mean((d["B"] @ w - d["b"]) ** 2) / 2

    x = float(solution.point.x1[0])
    near = min(F(x + step) for step in np.linspace(-0.05, 0.05, 21) if -8 <= x + step <= 2)
    assert F(x) <= near + 1e-5 * abs(near)


@pytest.mark.parametrize(
    "cuts", [pytest.param((9,), marks=pytest.mark.long), (8, 16, 17, 25), "at its end"]
)
def test_resuming_gives_the_same_run(cuts, tmp_path):
    """Also where the last gradients are done, and only a check is not."""
    problem, start = ridge()
    whole, path, resume = solved_ridge(), tmp_path / "run.state", None
    for cut in (whole.gradients,) if cuts == "at its end" else cuts:
        part = bx.solve(problem, start, resume=resume, max_gradients=cut)
        assert part.status == "budget spent"
        part.save(path)
        resume = path
    rest = bx.solve(problem, start, resume=resume)
    assert rest.status == "certified"
    assert (rest.gradients, rest.linear_solves) == (whole.gradients, whole.linear_solves)
    assert same(rest.point, whole.point)


def test_a_step_to_where_functions_are_undefined_is_shortened():
    """y = 1/x minimises xy − log y, and nothing is defined at y ≤ 0."""
    problem = bx.ConstrainedBilevelProblem(
        lambda x, y: jnp.sum((y - 2) ** 2 + 0.1 * x),
        lambda x, y: jnp.sum(x * y - jnp.log(y)),
        x=terms.Box(0.05, 10.0),
        y=terms.Box(0.0, 50.0),
    )
    solution = bx.solve(problem, bx.Point(x=np.full(1, 5.0), y=np.full(1, 10.0)))
    F = minimize_scalar(lambda x: (1 / x - 2) ** 2 + 0.1 * x, bounds=(0.05, 10), method="bounded")
    assert solution.status == "certified"
    assert abs(float(solution.point.x[0]) - F.x) < 1e-3


def test_a_hessian_that_is_not_finite_at_the_start_does_no_harm():
    """g = |y − x|^1.5 + (y − 2)², of which y = x = 0 has no second derivative."""
    problem = bx.ConstrainedBilevelProblem(
        upper=lambda x, y: jnp.sum((y - 1) ** 2) + jnp.sum(x**2),
        lower=lambda x, y: jnp.sum(jnp.abs(y - x) ** 1.5 + (y - 2) ** 2),
        x=terms.Box(-5.0, 5.0),
        y=terms.Box(-10.0, 10.0),
    )
    solution = bx.solve(problem, bx.Point(x=np.zeros(1), y=np.zeros(1)), solver=bx.Newton())
    assert solution.status == "certified"

    def F(x):
        answer = minimize_scalar(
            lambda y: abs(y - x) ** 1.5 + (y - 2) ** 2, bracket=(x, 2.0), tol=1e-12
        )
        return (answer.x - 1) ** 2 + x**2

    best = minimize_scalar(F, bounds=(-5, 5), method="bounded", options={"xatol": 1e-9})
    assert solution.certificate.objective == pytest.approx(best.fun, abs=1e-3)
    assert float(solution.point.x[0]) == pytest.approx(best.x, abs=1e-2)


def test_where_the_lower_level_is_straight_first_order_steps_begin():
    assert terms.Box(0.0, 1.0).is_polyhedral
    assert (2.0 * terms.Simplex()).is_polyhedral
    assert not terms.as_term((terms.L1(1.0), terms.L2Ball(1.0)), "y1").is_polyhedral
    straight = bx.ConstrainedBilevelProblem(
        lambda x, y: jnp.sum((x - 0.3) ** 2 + (y - 0.2) ** 2),
        lambda x, y: jnp.sum((x - 0.5) * y),
        x=terms.Box(0.0, 1.0),
        y=terms.Box(-1.0, 1.0),
    )
    start = bx.Point(x=np.full(1, 0.9), y=np.zeros(1))
    solution = bx.solve(straight, start, max_gradients=200)
    assert isinstance(solution.solver, bx.Adaptive)
    assert solution.linear_solves == 0


@pytest.mark.parametrize("at", [0.3, pytest.param(3.0, marks=pytest.mark.long)])
def test_a_term_of_x_counts(at):
    """½‖y − 1‖² + ½|x| with y = x: soft thresholding says x = ½."""
    problem = bx.BilevelProblem(
        lambda x, _, y, __: jnp.sum((y - 1) ** 2) / 2,
        lambda x, y, _: jnp.sum((y - x) ** 2) / 2,
        x1=terms.L1(0.5),
        y1=terms.Box(-9.0, 9.0),
    )
    solution = bx.solve(problem, bx.Point(x1=np.full(2, at), y1=np.zeros(2)), solver=bx.Newton())
    assert solution.status == "certified"
    assert solution.linear_solves < 60
    np.testing.assert_allclose(solution.point.x1, 0.5, atol=1e-2)


def flat_sum():
    """y = Σ x in every entry below."""
    return bx.ConstrainedBilevelProblem(
        lambda x, y: jnp.sum((y - 1) ** 2) + jnp.sum(x**2),
        lambda x, y: jnp.sum((y - jnp.sum(x)) ** 2),
        x=terms.Box(-3.0, 3.0),
        y=terms.Box(-5.0, 5.0),
    )


def test_what_newton_cannot_take_is_refused():
    start = bx.Point(x=np.zeros(1), y=np.zeros(15_000))
    with pytest.raises(ValueError, match=r"linear systems .* 30001 are too many"):
        bx.solve(flat_sum(), start, solver=bx.Newton())
    # Nor is it asked where x alone would fill its systems.
    wide = bx.Point(x1=np.zeros(501), y1=np.zeros(1600))
    assert not takes(wide, interior=False)
    assert takes(wide.replace(x1=np.zeros(500)), interior=False)
    assert not takes(wide.replace(x1=np.zeros(500)), interior=True)


@pytest.mark.long  # test_fallback.py hands over, too
def test_with_too_many_free_entries_newton_gives_up_at_once(monkeypatch):
    """All entries are few enough, but none of them is held."""
    problem = flat_sum()
    monkeypatch.setattr("bilevax.solvers.newton.MOST_ENTRIES", 100)
    monkeypatch.setattr("bilevax.solvers.newton.MOST_FREE", 41)
    start = bx.Point(x=np.zeros(1), y=np.zeros(60))
    solution = bx.solve(problem, start, solver=Engines(), tolerance=1e-2)
    assert solution.status == "certified"
    assert isinstance(solution.solver, bx.Adaptive)
    assert solution.linear_solves == 0


@pytest.mark.long  # the direction in few columns is short, above
def test_a_large_problem_is_solved_in_its_free_entries(monkeypatch):
    """A positive lasso with many weights at zero, against scikit-learn."""
    monkeypatch.setattr("bilevax.solvers.newton.MOST_ENTRIES", 100)
    monkeypatch.setattr("bilevax.solvers.newton.MOST_FREE", 41)
    rng = np.random.default_rng(2)
    A, B = rng.normal(size=(2, 25, 60))
    w = np.arange(60) < 4
    d = {"A": A, "a": A @ w + rng.normal(size=25), "B": B, "b": B @ w + rng.normal(size=25)}
    problem = bx.ConstrainedBilevelProblem(
        lambda x, w, d: squares(w, d["B"], d["b"]),
        lambda x, w, d: squares(w, d["A"], d["a"]) + jnp.sum(jnp.exp(x)) * jnp.sum(w),
        x=terms.Box(-5.0, 1.0),
        y=terms.Box(0.0, 10.0),
        data=d,
    )
    solution = bx.solve(problem, bx.Point(x=np.zeros(1), y=np.zeros(60)), solver=bx.Newton())
    assert solution.status == "certified"

    def F(x):
        model = Lasso(
            alpha=np.exp(x), fit_intercept=False, positive=True, tol=1e-12, max_iter=10**6
        )
        return np.mean((d["B"] @ model.fit(A, d["a"]).coef_ - d["b"]) ** 2) / 2

    x = float(solution.point.x[0])
    near = min(F(x + step) for step in np.linspace(-0.05, 0.05, 21))
    assert F(x) <= near + 1e-5 * near


def test_it_gives_up_by_itself_and_says_so(monkeypatch):
    monkeypatch.setattr("bilevax.solvers.newton.MOST_SOLVES", 3)
    jax.clear_caches()
    problem, start = ridge(terms.Box(-19.0, 20.0))
    alone = bx.solve(problem, start, solver=bx.Newton())
    jax.clear_caches()
    assert alone.status == "stalled"
    assert alone.linear_solves == 3
    assert "Newton" in str(alone.status)


@pytest.mark.long  # three methods; the test below has two, and test_fallback.py others
def test_where_it_gives_up_barriers_and_first_order_steps_go_on(monkeypatch):
    monkeypatch.setattr("bilevax.solvers.newton.MOST_SOLVES", 3)
    jax.clear_caches()
    problem, start = ridge(terms.Box(-19.0, 20.0))
    # Barriers come next, and first-order steps where these end nowhere, too.
    both = bx.solve(problem, start, tolerance=1e-2)
    assert both.status == "certified"
    assert "since then Newton with barriers went on" in str(both.status)
    monkeypatch.setattr("bilevax.solvers.newton.MOST_INSIDE", 3)
    monkeypatch.setattr("bilevax.solvers.adaptive.END_GRADIENTS", 10**9)  # no systems of end games
    jax.clear_caches()
    three = bx.solve(problem, start, tolerance=1e-2)
    assert three.status == "certified"
    assert isinstance(three.solver, bx.Adaptive)
    assert "Newton with barriers stopped making progress" in str(three.status)
    assert three.linear_solves == 6
    jax.clear_caches()


def test_a_move_after_which_the_objective_is_higher_is_taken_back():
    """F = cos 3x + x²/20 with y = x: from near a crest, Newton's steps go too far at first."""
    problem = bx.BilevelProblem(
        lambda x, _, y, __: jnp.sum(jnp.cos(3 * y) + y**2 / 20),
        lambda x, y, _: jnp.sum((y - x) ** 2),
        x1=terms.Box(-20.0, 20.0),
        y1=terms.Box(-20.0, 20.0),
    )
    start = bx.Point(x1=np.asarray([0.3, 7.0, -9.1]), y1=np.zeros(3))
    solver = bx.Newton(rho=100.0).prepare(problem, start, 1e-6)
    step = eqx.filter_jit(lambda state: solver.step(problem, state, jnp.asarray(10**6)))
    state, values, back = solver.init(problem, start), {}, 0
    while not (state.ready or solver.done(problem, state)):
        before, state = state, step(state)
        back += bool(state.phase == MOVE) and bool(before.moved)
        if state.outer > before.outer:
            values.setdefault(float(before.rho), []).append(float(state.center_value))
    assert state.ready
    for seen in values.values():
        assert np.all(np.diff(seen) <= 1e-9)
    x = np.asarray(solver.output(problem, state).x1)
    np.testing.assert_allclose(3 * np.sin(3 * x), x / 10, atol=0.05)
    assert np.all(-9 * np.cos(3 * x) > 0)


@functools.cache
def toll():
    """The road costs 1 + x, another one 4: x = 3 earns 3, and more earns nothing.

    The lower level is linear, so that its answer jumps there.
    """
    problem = bx.ConstrainedBilevelProblem(
        lambda x, y: -jnp.sum(x * y[0]),
        lambda x, y: (1 + x[0]) * y[0] + 4 * y[1],
        equalities=lambda x, y: jnp.sum(y) - 1,
        x=terms.Box(0.0, 10.0),
        y=terms.Box(0.0, 1.0),
    )
    return problem, bx.Point(x=np.ones(1), y=np.zeros(2))


def test_with_barriers_it_follows_a_lower_level_that_jumps():
    solution = bx.solve(*toll(), solver=bx.Newton(interior=True), tolerance=1e-6)
    assert solution.status == "certified"
    assert abs(float(solution.point.x[0]) - 3) < 1e-4
    assert solution.certificate.objective == pytest.approx(-3, abs=1e-4)


def test_resuming_with_barriers_gives_the_same_run(tmp_path):
    solve = functools.partial(bx.solve, *toll(), solver=bx.Newton(interior=True), tolerance=1e-6)
    whole, path, resume = solve(), tmp_path / "run.state", None
    for cut in (8, 11, 14, 17, 20, 23, 26, 29, 50, 60):
        part = solve(resume=resume, max_gradients=cut)
        assert part.status == "budget spent"
        part.save(path)
        resume = path
    rest = solve(resume=resume)
    assert (rest.gradients, rest.linear_solves) == (whole.gradients, whole.linear_solves)
    assert same(rest.point, whole.point)


@pytest.mark.long  # test_fallback.py hands over, too
def test_first_order_steps_leave_off_where_they_earn_nothing(monkeypatch):
    """They go on for ever at the jump; Newton with barriers takes over from them."""
    monkeypatch.setattr("bilevax.solvers.engines.PATIENCE", 2000)
    monkeypatch.setattr("bilevax.solvers.engines.PATIENCE_AN_ENTRY", 1)
    solution = bx.solve(*toll(), tolerance=1e-6)
    assert solution.status == "certified"
    assert solution.certificate.objective == pytest.approx(-3, abs=1e-4)
