"""The constrained form: answers against cvxpy and brute force, bounds, bad input, resuming.

Two families of problems have all their numbers in `data`, so one compilation serves each.
"""

import dataclasses
import functools
import itertools
import warnings

import cvxpy as cp
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import optimize

import bilevax as bx
import transcription
from bilevax import terms
from bilevax.driver.pieces import piece_of_steps
from bilevax.problems import library, linear
from bilevax.problems.lagrangian import bilevel_point, lagrangian_problem
from bilevax.problems.validation import validate
from bilevax.programs import quick
from bilevax.solvers.base import initial
from bilevax.solvers.multipliers import GrowingLagrangian, NoSlaterPoint, first_bounds

NAN, INF = float("nan"), float("inf")
TOLERANCE = 1e-4
MOST = 400_000


def same(a, b):
    return all(jax.tree.leaves(jax.tree.map(lambda u, v: bool(jnp.all(u == v)), a, b)))


# The first family: one x, two y, three convex constraints.


def upper(x, y, d):
    own = 0.5 * jnp.sum((y - d["t"]) ** 2) + 0.5 * d["w"] * jnp.sum((x - d["a"]) ** 2)
    return own * jnp.where(x[0] > d["edge"][0], NAN, 1.0)


def lower(x, y, d):
    logistic = jnp.sum(jnp.logaddexp(0.0, -(d["D"] @ y)))
    own = 0.5 * y @ d["Q"] @ y + (d["C"] @ x + d["q"]) @ y + d["l"] * logistic
    return own * jnp.where(x[0] > d["edge"][1], NAN, 1.0)


def constraints(x, y, d):
    bent = 0.5 * jnp.einsum("i,kij,j->k", y, d["P"], y) + d["s"] * jnp.exp(d["E"] @ y)
    own = bent + d["A"] @ y + d["B"] @ x - d["b"]
    return own * jnp.where(x[0] > d["edge"][2], NAN, 1.0)


def numbers(**given):
    """The data of a problem; unless given, all that can be zero is, and no constraint is active."""
    shapes = {"D": (6, 2), "Q": (2, 2), "C": (2, 1), "q": (2,), "l": (), "P": (3, 2, 2)}
    shapes |= {"A": (3, 2), "s": (3,), "E": (3, 2), "B": (3, 1)}
    data = {name: np.zeros(shape) for name, shape in shapes.items()}
    data |= {"t": [0.5, -0.4], "w": 0.2, "a": [0.3], "b": np.ones(3), "edge": [INF, INF, INF]}
    data |= given
    return {name: np.asarray(value, float) for name, value in data.items()}


DRAWN = np.random.default_rng(0).normal(size=(3, 2, 2))
BALL = np.zeros((3, 2, 2))
BALL[0] = 2 * np.eye(2)
FIRST = np.array([[1.0], [0.0], [0.0]])  # only the first constraint
FAMILY = {
    # three quadratic constraints
    "qcqp": numbers(
        Q=[[1, 0.2], [0.2, 0.5]],
        C=[[1], [-1]],
        q=[0.3, 0.2],
        P=DRAWN @ DRAWN.transpose(0, 2, 1) + 0.1 * np.eye(2),
        A=[[-0.6, -0.7], [0.6, -1.6], [-0.3, -0.2]],
        B=[[0.3], [-0.1], [0.2]],
        b=[0.3, 0.4, 0.5],
    ),
    # logistic regression in a ball ‖y‖² ≤ ½ + x
    "logistic": numbers(
        l=1.0,
        D=np.random.default_rng(1).normal(size=(6, 2)) + np.array([0.8, 0.3]),
        P=BALL,
        B=-FIRST,
        b=[0.5, 1, 1],
    ),
    # a linear objective in a ball ‖y‖² ≤ 0.6 + x/2
    "ball": numbers(q=[-1, 0.5], C=[[0.5], [1]], P=BALL, B=-0.5 * FIRST, b=[0.6, 1, 1]),
    "exponential": numbers(
        Q=0.5 * np.eye(2),
        q=[-1, -1],
        s=[1, 1, 0],
        E=[[1, 0], [0.5, 1], [0, 0]],
        B=[[-0.6], [0.5], [0]],
        b=[1.6, 1.5, 1],
    ),
    "lp": numbers(
        q=[-1, -0.6],
        A=[[1, 1], [1, -0.5], [-0.4, 1]],
        B=[[-1], [0.3], [0.2]],
        b=[0.7, 0.6, 0.5],
    ),
    # y₀ ≥ 3x and y₀ ≤ 2: infeasible for x > 2/3, where the upper level wants to go
    "infeasible for some x": numbers(
        q=[1, 0.5], Q=np.diag([0, 1]), A=-FIRST * [1, 0], B=3 * FIRST, b=[0, 1, 1],
        a=[1], w=4, t=[2, -0.4],
    ),
    # λ = 1 + x: 0.02 at the start x = −0.98, and 80 times that at the answer
    "growing": numbers(
        q=[-1, 0], Q=np.diag([0, 1]), C=[[-1], [0.3]], A=FIRST * [1, 0], B=-0.2 * FIRST,
        b=[0.3, 1, 1], a=[0.6], w=1,
    ),
}  # fmt: skip
STARTS = {"growing": -0.98}


def problem_of(data, **options):
    x, y = terms.Box(-1.0, 1.0), terms.Box(-2.0, 2.0)
    return bx.ConstrainedBilevelProblem(
        upper, lower, x=x, y=y, constraints=constraints, data=data, **options
    )


def start_at(x=0.0):
    return bx.Point(x=jnp.full(1, x), y=jnp.zeros(2))


def solve(data, x=0.0, **options):
    options = {"tolerance": TOLERANCE, "max_gradients": MOST, **options}
    return bx.solve(problem_of(data), start_at(x), solver=bx.Adaptive(), **options)


@functools.cache
def solved(name):
    return solve(FAMILY[name], STARTS.get(name, 0.0))


def quietly(problem):
    """Solve, without the warning that at the edge of feasibility the answer may be inaccurate."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        problem.solve(solver=cp.CLARABEL)


class Lower:
    """The lower level by cvxpy, as a function of x."""

    def __init__(self, d):
        self.x, self.y = cp.Parameter(1), cp.Variable(2)
        x, y = self.x, self.y
        value = 0.5 * cp.quad_form(y, cp.psd_wrap(d["Q"])) + (d["C"] @ x + d["q"]) @ y
        if d["l"] > 0:
            value += d["l"] * cp.sum(cp.logistic(-(d["D"] @ y)))
        self.rows = []
        for k in range(3):
            left = d["A"][k] @ y + d["B"][k] @ x - d["b"][k]
            if np.any(d["P"][k]):
                left += 0.5 * cp.quad_form(y, cp.psd_wrap(d["P"][k]))
            if d["s"][k] > 0:
                left += d["s"][k] * cp.exp(d["E"][k] @ y)
            self.rows.append(left <= 0)
        self.problem = cp.Problem(cp.Minimize(value), [*self.rows, y <= 2, y >= -2])

    def __call__(self, x):
        """(value, y, multipliers), or None where it is infeasible."""
        self.x.value = np.atleast_1d(x)
        quietly(self.problem)
        if self.problem.status not in ("optimal", "optimal_inaccurate"):
            return None
        duals = np.array([float(np.squeeze(row.dual_value)) for row in self.rows])
        return self.problem.value, self.y.value, duals


def brute_force(d):
    """The least f(x, y(x)) over a grid of x, and from there by a line search."""
    below = Lower(d)

    def reduced(x):
        found = below(x)
        if found is None:
            return 1e3
        _, y, _ = found
        return 0.5 * np.sum((y - d["t"]) ** 2) + 0.5 * d["w"] * np.sum((x - d["a"]) ** 2)

    grid = np.linspace(-1, 1, 41)
    best = grid[np.argmin([reduced(x) for x in grid])]
    near = (max(best - 0.05, -1), min(best + 0.05, 1))
    line = optimize.minimize_scalar(reduced, bounds=near, options={"xatol": 1e-6})
    return min(line.fun, reduced(best))


@pytest.mark.parametrize("name", FAMILY)
def test_nonlinear_lower_levels_against_cvxpy_and_brute_force(name):
    d, solution = FAMILY[name], solved(name)
    assert solution.status == "certified", solution.status
    p = solution.point
    x, y = np.asarray(p.x), np.asarray(p.y)
    # Where the lower level is feasible for x ≤ 2/3 only, x may be beyond by the tolerance.
    inside = np.minimum(x, 2 / 3) if name.startswith("infeasible") else x
    value, best, duals = Lower(d)(inside)
    problem = problem_of(d)
    # A point infeasible by ε may have a value that is less by λᵀε.
    slack = 2 * TOLERANCE * (1 + np.sum(duals))
    assert float(problem.lower_value(p.x, p.y)) == pytest.approx(value, abs=slack)
    assert float(jnp.max(problem.called("constraints", p.x, p.y))) <= TOLERANCE
    assert np.all(np.abs(y) <= 2)
    np.testing.assert_allclose(p.z, best, atol=5e-3)
    if not name.startswith("infeasible"):  # there, at the edge, they are anything above 1
        np.testing.assert_allclose(p.multipliers.lam_bar, duals, atol=5e-3)
    assert np.all(np.asarray(p.multipliers.lam_bar) >= 0)
    assert solution.certificate.objective == pytest.approx(brute_force(d), abs=5e-3)


# The second family: two x, three y, every kind of constraint, in trees.


def tree_upper(x, y, d):
    return 0.5 * jnp.sum((y["u"] - d["t"]) ** 2) + 0.25 * jnp.sum((x - d["a"]) ** 2)


def tree_lower(x, y, d):
    u = y["u"]
    return 0.5 * u @ d["Q"] @ u + (d["C"] @ x + d["q"]) @ u


def tree_constraints(x, y, d):
    u = y["u"]
    return {"ball": jnp.sum(u**2) - d["r"] - 0.2 * x[0], "none": jnp.zeros((0, 2), u.dtype)}


def tree_equalities(x, y, d):
    u = y["u"]
    return (jnp.sum(u) - 0.2 - 0.5 * x[0], jnp.reshape(u[0] - u[2] - 0.3 * x[1], (1, 1)))


def tree_above(x, y, d):
    return {"G": d["M"] @ jnp.concatenate([x, y["u"]]) - d["h"]}


def tree_above_equal(x, y, d):
    return d["n"] @ jnp.concatenate([x, y["u"]]) - d["k"]


TREE = {
    "Q": np.array([[2, 0.3, 0], [0.3, 1, 0.2], [0, 0.2, 1.5]]),
    "C": np.array([[1, -0.5], [0.3, 0.8], [-0.6, 0.2]]),
    "q": np.array([0.2, -0.3, 0.1]),
    "r": np.array(0.3),
    "t": np.array([0.5, 0.3, -0.2]),
    "a": np.array([0.6, -0.3]),
    "M": np.zeros((2, 5)),
    "h": np.ones(2),
    "n": np.zeros(5),
    "k": np.array(0.0),
}
TREES = {
    "equalities": TREE,
    # x₀ + y₀ ≤ 0.3 binds, the other row never does
    "coupling": TREE
    | {"M": np.array([[1, 0, 1, 0, 0], [0, 0, 0, 0, 1.0]]), "h": np.array([0.3, 9])},
    "upper equality": TREE | {"n": np.array([1, 1, 0, 1, 0.0]), "k": np.array(0.5)},
}


def tree_problem(data):
    return bx.ConstrainedBilevelProblem(
        tree_upper,
        tree_lower,
        x=terms.Box(-1.0, 1.0),
        y={"u": terms.Box(-2.0, 2.0)},
        constraints=tree_constraints,
        equalities=tree_equalities,
        upper_constraints=tree_above,
        upper_equalities=tree_above_equal,
        data=data,
    )


TREE_START = bx.Point(x=jnp.zeros(2), y={"u": jnp.zeros(3)})


@functools.cache
def solved_tree(name):
    return bx.solve(
        tree_problem(TREES[name]),
        TREE_START,
        tolerance=TOLERANCE,
        solver=bx.Adaptive(),
        max_gradients=MOST,
    )


class TreeLower:
    """The second family's lower level by cvxpy."""

    def __init__(self, d):
        self.x, self.u = cp.Parameter(2), cp.Variable(3)
        x, u = self.x, self.u
        value = 0.5 * cp.quad_form(u, cp.psd_wrap(d["Q"])) + (d["C"] @ x + d["q"]) @ u
        self.ball = cp.sum_squares(u) - d["r"] - 0.2 * x[0] <= 0
        self.equal = [cp.sum(u) == 0.2 + 0.5 * x[0], u[0] - u[2] == 0.3 * x[1]]
        self.problem = cp.Problem(cp.Minimize(value), [self.ball, *self.equal, u <= 2, u >= -2])

    def __call__(self, x):
        self.x.value = np.asarray(x, float)
        quietly(self.problem)
        if self.u.value is None or self.problem.status not in ("optimal", "optimal_inaccurate"):
            return None
        return self.problem.value, self.u.value


@pytest.mark.parametrize("name", TREES)
def test_equalities_and_coupling_constraints_against_cvxpy(name):
    d, solution = TREES[name], solved_tree(name)
    assert solution.status == "certified", solution.status
    p, problem = solution.point, tree_problem(TREES[name])
    below = TreeLower(d)
    value, best = below(p.x)
    m = p.multipliers
    weight = float(jnp.abs(m.lam_bar["ball"])) + sum(float(jnp.sum(jnp.abs(v))) for v in m.nu_bar)
    slack = 2 * TOLERANCE * (1 + weight)
    assert float(problem.lower_value(p.x, p.y)) == pytest.approx(value, abs=slack)
    for function in ("constraints", "upper_constraints"):
        for leaf in jax.tree.leaves(problem.called(function, p.x, p.y)):
            assert np.all(np.asarray(leaf) <= TOLERANCE)
    for function in ("equalities", "upper_equalities"):
        for leaf in jax.tree.leaves(problem.called(function, p.x, p.y)):
            assert np.all(np.abs(leaf) <= TOLERANCE)
    np.testing.assert_allclose(p.z["u"], best, atol=5e-3)
    np.testing.assert_allclose(m.lam_bar["ball"], below.ball.dual_value, atol=5e-3)
    for found, row in zip(m.nu_bar, below.equal):
        np.testing.assert_allclose(np.squeeze(found), row.dual_value, atol=5e-3)

    def response(x):
        found = below(np.clip(x, -1, 1))
        return np.full(3, 10.0) if found is None else found[1]

    def reduced(x):
        return 0.5 * np.sum((response(x) - d["t"]) ** 2) + 0.25 * np.sum((x - d["a"]) ** 2)

    both = lambda x: np.r_[x, response(x)]
    limits = [{"type": "ineq", "fun": lambda x: d["h"] - d["M"] @ both(x)}]
    if np.any(d["n"]):
        limits.append({"type": "eq", "fun": lambda x: d["n"] @ both(x) - d["k"]})
    answers = [
        optimize.minimize(
            reduced, x0, bounds=[(-1, 1)] * 2, constraints=limits, method="SLSQP",
            options={"eps": 1e-5, "ftol": 1e-9},
        )
        for x0 in ([0.0, 0.0], [0.4, -0.2])
    ]  # fmt: skip
    least = min(answer.fun for answer in answers if answer.success)
    assert solution.certificate.objective == pytest.approx(least, abs=5e-3)


def test_points_are_named_shaped_and_printed():
    solution = solved_tree("coupling")
    m = solution.point.multipliers
    shapes = jax.tree.map(jnp.shape, dataclasses.asdict(m), is_leaf=lambda v: v is None)
    of_c, of_e = {"ball": (), "none": (0, 2)}, ((), (1, 1))
    assert jax.tree.map(jnp.shape, (m.lam, m.lam_bar)) == (of_c, of_c)
    assert jax.tree.map(jnp.shape, (m.nu, m.nu_bar)) == (of_e, of_e)
    assert jax.tree.map(jnp.shape, (m.upper_lam, m.upper_nu)) == ({"G": (2,)}, ())
    assert set(shapes) == {"lam", "lam_bar", "nu", "nu_bar", "upper_lam", "upper_nu"}
    assert float(m.upper_lam["G"][0]) > 0.01  # it binds
    shown = str(solution)
    for part in ("Certified", "epsilon", "lower_gap", "lam_bar", "upper_nu", "rho"):
        assert part in shown, shown
    history = solution.history
    assert set(solution.certificate.lines()) < set(history.names)
    assert history["epsilon"].min() == solution.certificate.epsilon
    again = bx.certify(tree_problem(TREES["coupling"]), solution.point)
    assert again == solution.certificate
    assert solved("lp").point.multipliers.nu is None
    assert "nu" not in str(solved("lp").point)


# Redundant, badly scaled, empty.


def rows(data, order=(0, 1, 2), by=(1.0, 1.0, 1.0)):
    """The same data with its constraints in another order, each multiplied by a number."""
    order, by = list(order), np.asarray(by)
    return data | {
        name: data[name][order] * by.reshape(-1, *[1] * (data[name].ndim - 1))
        for name in ("P", "A", "s", "B", "b")
    } | {"E": data["E"][order]}  # fmt: skip


def test_duplicated_rows_share_their_multiplier():
    """The third row of the LP is not active at its answer: it makes room for another first."""
    once, twice = solved("lp"), solve(rows(FAMILY["lp"], (0, 0, 1)))
    assert twice.status == "certified", twice.status
    np.testing.assert_allclose(twice.point.x, once.point.x, atol=1e-3)
    a, b = np.asarray(once.point.multipliers.lam_bar), np.asarray(twice.point.multipliers.lam_bar)
    np.testing.assert_allclose([b[0] + b[1], b[2]], a[:2], atol=1e-3)


def test_constraints_that_are_never_active_have_no_multiplier():
    lam_bar = np.asarray(solved("ball").point.multipliers.lam_bar)
    assert lam_bar[0] > 0.1
    np.testing.assert_allclose(lam_bar[1:], 0, atol=1e-6)


SCALED = [((2.0, 1.0, 1.0), "lp"), ((1.0, 0.1, 1.0), "lp"), ((1.0, 1.0, 10.0), "lp")]
SCALED += [((1.0, 1e-4, 1e4), "ball"), ((1e-2, 1.0, 1.0), "ball"), ((100.0, 1.0, 1.0), "ball")]
SCALED += [(by, "lp") for by in ((10.0, 0.1, 1.0), (0.01, 1.0, 100.0), (1e-4, 1.0, 1e4))]


@pytest.mark.parametrize(("by", "name"), SCALED)
def test_badly_scaled_rows(by, name):
    once, scaled = solved(name), solve(rows(FAMILY[name], by=by), max_gradients=100_000)
    assert scaled.status == "certified", scaled.status
    np.testing.assert_allclose(scaled.point.x, once.point.x, atol=2e-2)
    found = np.asarray(scaled.point.multipliers.lam_bar) * np.asarray(by)
    np.testing.assert_allclose(found, once.point.multipliers.lam_bar, atol=2e-2)


# No point, no interior.


@pytest.mark.parametrize("x", [0.0, 0.25])
def test_an_infeasible_lower_level_is_named_with_its_x(x):
    data = FAMILY["ball"] | {"b": np.array([-2.0, 1, 1])}
    with pytest.raises(NoSlaterPoint, match="lower level is infeasible at x =") as caught:
        solve(data, x)
    assert isinstance(caught.value, ValueError)
    assert f"[{x if x else '0.'}]" in str(caught.value)
    np.testing.assert_array_equal(caught.value.x, [x])


@pytest.mark.parametrize("case", ["a point", "opposite rows"])
def test_a_lower_level_without_interior_is_named_with_its_x(case):
    opposite = numbers(
        q=[-1, -0.6], A=[[1, 1], [-1, -1], [0, 0]], B=[[-1], [1], [0]], b=[0.5, -0.5, 1]
    )
    data = FAMILY["ball"] | {"b": np.array([0.0, 1, 1])} if case == "a point" else opposite
    with pytest.raises(NoSlaterPoint, match="no Slater point at x =") as caught:
        solve(data)
    for part in ("[0.]", "equalities=", "multiplier_bound"):
        assert part in str(caught.value)


# NaN.


def one_dimensional(**functions):
    """x, y in [−1, 1] with y = x below, and constraints that never bind, unless given."""
    given = {
        "upper": lambda x, y: jnp.sum((x - 0.5) ** 2 + y**2),
        "lower": lambda x, y: jnp.sum((y - x) ** 2),
        "constraints": lambda x, y: y - 2.0,
    } | functions
    box = terms.Box(-1.0, 1.0)
    return bx.ConstrainedBilevelProblem(x=box, y=box, **given)


LINE = bx.Point(x=jnp.zeros(1), y=jnp.zeros(1))
NAMES = ["upper", "lower", "constraints", "equalities", "upper_constraints", "upper_equalities"]


@pytest.mark.parametrize("name", NAMES)
def test_nan_at_the_start_names_the_function(name):
    one = (lambda v: jnp.sum(v)) if name in ("upper", "lower") else lambda v: v
    broken = one_dimensional(**{name: lambda x, y: one(jnp.sqrt(y - 0.5))})
    with pytest.raises(ValueError, match=f"{name} .*at the start"):
        bx.solve(broken, LINE, solver=bx.Adaptive())
    steep = one_dimensional(**{name: lambda x, y: one(jnp.sqrt(y))})
    with pytest.raises(ValueError, match=f"gradient of {name} with respect to y .*at the start"):
        bx.solve(steep, LINE, solver=bx.Adaptive())


@pytest.mark.parametrize(("place", "name"), list(enumerate(NAMES[:3])))
def test_nan_away_from_the_start_is_said(place, name):
    """The exponential problem's answer has x = 0.65; beyond x = 0.4 a function is NaN."""
    edge = np.full(3, INF)
    edge[place] = 0.4
    solution = solve(FAMILY["exponential"] | {"edge": edge})
    assert solution.status == "not finite", solution.status
    # It is the solver's own iterate that has left, not the point it would return: so all are named.
    known = (f"{name} is nan", "a gradient of upper or lower or constraints, or")
    assert any(part in str(solution.status) for part in known)
    assert np.isfinite(solution.certificate.epsilon)
    assert not solution.certified


# What functions may return.


BAD_RETURNS = [
    ("ints", lambda x, y: jnp.asarray([1, 2]), TypeError, "must return a float, not int"),
    ("None", lambda x, y: None, TypeError, "must return an array or a pytree"),
    ("an empty tree", lambda x, y: {}, TypeError, "leave {name} out"),
    ("other floats", lambda x, y: y.astype(jnp.float32), TypeError, "returns float32"),
    ("an error", lambda x, y: jnp.zeros((2, 3)) @ y, TypeError, "with shapes"),
    ("one argument", lambda x: x, TypeError, "called as {name}(x, y)"),
]


@pytest.mark.parametrize("name", NAMES[2:])
@pytest.mark.parametrize(
    ("function", "error", "message"),
    [pytest.param(*row[1:], id=row[0]) for row in BAD_RETURNS],
)
def test_constraints_that_return_something_else_are_named(name, function, error, message):
    with pytest.raises(error) as caught:
        bx.solve(one_dimensional(**{name: function}), LINE, solver=bx.Adaptive())
    said = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", ())])
    assert name in said
    assert message.format(name=name) in said


@pytest.mark.parametrize("name", NAMES[2:])
def test_constraints_that_are_no_function_are_named(name):
    with pytest.raises(TypeError, match=f"{name} must be a function"):
        one_dimensional(**{name: 3.0})


def test_an_objective_that_returns_an_array_is_named():
    with pytest.raises(TypeError, match=r"lower must return one number, not shape \(1,\)"):
        bx.solve(one_dimensional(lower=lambda x, y: y), LINE, solver=bx.Adaptive())


EMPTY = pytest.param(lambda x, y: {"a": y[:0], "b": x[:0]}, id="empty")


@pytest.mark.long  # test_newton.py tunes a ridge without constraints
@pytest.mark.parametrize("constraints", [pytest.param(None, id="none"), EMPTY])
def test_without_constraints_it_is_a_plain_bilevel_problem(constraints):
    """y = x, and (x − ½)² + x² is least at x = ¼."""
    problem = one_dimensional(constraints=constraints)
    solution = bx.solve(problem, LINE, tolerance=1e-6, solver=bx.Adaptive(), max_gradients=MOST)
    assert solution.status == "certified", solution.status
    np.testing.assert_allclose([*solution.point.x, *solution.point.y], 0.25, atol=2e-3)
    assert solution.certificate.feasibility == 0
    lam = solution.point.multipliers.lam
    assert (lam is None) == (constraints is None)


def single(tree):
    return jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), tree)


def test_a_float32_start_with_float64_data_is_refused():
    with pytest.raises(jax.dtypes.TypePromotionError) as caught:  # JAX's own, in strict mode
        bx.solve(problem_of(FAMILY["lp"]), single(start_at()))
    assert "bilevax called upper(x, y, data)" in "".join(caught.value.__notes__)


def clipped(bound, **given):
    """y = min(x, bound) below, held by λ̄ = 2(x − y); above, (x − ½)² + y²."""
    box = terms.Box(-1.0, 1.0)
    return bx.ConstrainedBilevelProblem(
        clipped_upper, clipped_lower, constraints=clipped_by, x=box, y=box, data=bound, **given
    )


def clipped_upper(x, y, bound):
    return jnp.sum((x - 0.5) ** 2 + y**2)


def clipped_lower(x, y, bound):
    return jnp.sum((y - x) ** 2)


def clipped_by(x, y, bound):
    return y - bound


def test_float32_reaches_what_float32_can():
    """With y ≤ 0.1 the answer is x = ½, y = 0.1."""
    problem, start = clipped(np.float32(0.1)), single(LINE)
    solution = bx.solve(problem, start, tolerance=1e-2, solver=bx.Adaptive(), max_gradients=MOST)
    assert solution.status == "certified", solution.status
    leaves = jax.tree.leaves((solution.point, solution.state.solver_state))
    floats = [leaf for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.floating)]
    assert {leaf.dtype for leaf in floats} == {jnp.dtype("float32")}
    assert solution.certificate.objective == pytest.approx(0.01, abs=3e-2)


@pytest.mark.long
def test_float32_reaches_what_it_can_with_exponentials():
    start, d = single(start_at()), FAMILY["exponential"]
    solution = bx.solve(
        problem_of(single(d)), start, tolerance=1e-2, solver=bx.Adaptive(), max_gradients=MOST
    )
    assert solution.status == "certified", solution.status
    leaves = jax.tree.leaves((solution.point, solution.state.solver_state.reformulation.bounds))
    assert {leaf.dtype for leaf in leaves} == {jnp.dtype("float32")}
    objective = solved("exponential").certificate.objective
    assert solution.certificate.objective == pytest.approx(objective, abs=3e-2)


# Bounds of multipliers.


def bounds_of(problem, start=None):
    start = start_at() if start is None else start
    return first_bounds(problem, validate(problem, start))


def test_given_bounds_are_spread():
    d = FAMILY["lp"]
    for given, wanted in ((3.0, [3, 3, 3]), (np.array([1.0, 2, 3]), [1, 2, 3]), (2, [2, 2, 2])):
        bounds = bounds_of(problem_of(d, multiplier_bound=given))
        np.testing.assert_array_equal(bounds.lower[0], wanted)
        assert bounds.shared is None
    pair = lambda x, y: {"a": y, "b": (x, y)}
    given = {"a": 1.0, "b": (np.array([2.0]), 3)}
    bounds = bounds_of(one_dimensional(constraints=pair, multiplier_bound=given), LINE)
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(bounds.lower[0])]
    np.testing.assert_array_equal(leaves, [[1], [2], [3]])


def test_bounds_from_a_slater_margin_are_the_papers():
    """`eq:cons_y1`: B = 2·L·D/G, with D = √32 the diameter of [−2, 2]²."""
    problem = problem_of(FAMILY["lp"], lower_lipschitz=1.5, slater_margin=0.25)
    bounds = bounds_of(problem)
    np.testing.assert_allclose(bounds.lower[0], np.full(3, 2 * 1.5 * np.sqrt(32) / 0.25))
    free = dataclasses.replace(problem, y=terms.Ridge(1.0))
    with pytest.raises(ValueError, match="needs bounded domains, and y = "):
        bounds_of(free)


@pytest.mark.long  # test_unbounded.py has constraints without bounds, too
def test_a_linear_program_without_bounds_on_y_has_the_same_answer():
    """Its constraints bound it; what its certificate rests on is the radius alone."""
    problem = dataclasses.replace(problem_of(FAMILY["lp"]), y=terms.Free())
    free = bx.solve(problem, start_at(), progress=False, tolerance=1e-3, max_gradients=MOST)
    assert free.status == "certified", free.status
    assert np.isfinite(free.certificate.radius)
    np.testing.assert_allclose(free.point.x, solved("lp").point.x, atol=2e-2)
    np.testing.assert_allclose(free.point.y, solved("lp").point.y, atol=2e-2)


def test_a_slater_point_far_from_the_start_is_found():
    """y ≥ 1000 holds nowhere near 0, and a domain without end is no reason to give up there."""
    problem = bx.ConstrainedBilevelProblem(
        lambda x, y: jnp.sum((y - x) ** 2),
        lambda x, y: 0.5 * jnp.sum(y**2),
        x=terms.Free(),
        y=terms.Free(),
        constraints=lambda x, y: 1000 - y,
    )
    start = bx.Point(x=jnp.zeros(1), y=jnp.zeros(1))
    bounds = first_bounds(problem, start)
    assert np.isfinite(bounds.lower[0]).all()


BAD_BOUNDS = [
    ({"multiplier_bound": -1.0}, ValueError, "multiplier_bound must be finite and > 0"),
    ({"multiplier_bound": 0.0}, ValueError, "multiplier_bound must be finite and > 0"),
    ({"multiplier_bound": NAN}, ValueError, "multiplier_bound must be finite and > 0"),
    ({"multiplier_bound": np.array([1.0, -1, 1])}, ValueError, "multiplier_bound must be finite"),
    ({"multiplier_bound": {"a": 0.0}}, ValueError, r"multiplier_bound\['a'\] must be finite"),
    ({"multiplier_bound": "1"}, TypeError, "multiplier_bound must be a number or an array"),
    ({"upper_multiplier_bound": -1.0}, ValueError, "upper_multiplier_bound must be finite and > 0"),
    ({"multiplier_bound": 1.0, "slater_margin": 1.0}, ValueError, "multiplier_bound or slater_ma"),
    ({"slater_margin": 1.0}, ValueError, "slater_margin and lower_lipschitz .* both, or neither"),
    ({"lower_lipschitz": 1.0}, ValueError, "slater_margin and lower_lipschitz"),
    ({"slater_margin": 0.0, "lower_lipschitz": 1.0}, ValueError, "slater_margin must be"),
    ({"slater_margin": 1.0, "lower_lipschitz": -1.0}, ValueError, "lower_lipschitz must be"),
]


@pytest.mark.parametrize(("options", "error", "message"), BAD_BOUNDS)
def test_bad_bounds_are_named(options, error, message):
    with pytest.raises(error, match=message):
        problem_of(FAMILY["lp"], **options)


@pytest.mark.parametrize("given", [np.ones(2), np.ones((3, 1)), {"a": 1.0}, (1.0, 1.0)])
def test_bounds_of_another_shape_are_named(given):
    with pytest.raises(ValueError, match=r"multiplier_bound must be .* shaped like .*3"):
        bx.solve(problem_of(FAMILY["lp"], multiplier_bound=given), start_at(), solver=bx.Adaptive())


@pytest.mark.parametrize("name", ["qcqp", "logistic", "ball", "exponential", "lp"])
def test_a_bound_found_is_one(name):
    """At the start's x no multiplier is larger."""
    _, _, duals = Lower(FAMILY[name])(0.0)
    bounds = np.asarray(bounds_of(problem_of(FAMILY[name])).lower[0])
    assert np.all(bounds >= duals)
    assert np.max(bounds) < 1e4 * (1 + np.max(duals))


def test_a_bound_too_small_grows():
    first = np.asarray(bounds_of(problem_of(FAMILY["growing"]), start_at(-0.98)).lower[0])
    solution = solved("growing")
    reached = float(solution.point.multipliers.lam_bar[0])
    last = np.asarray(solution.state.solver_state.reformulation.bounds.lower[0])
    assert reached > 50 * 0.02
    assert first[0] < reached < last[0]
    assert last[0] == pytest.approx(first[0] * 4 ** round(np.log(last[0] / first[0]) / np.log(4)))
    assert np.all(last[1:] == first[1:])  # those that were not touched stay


@pytest.mark.parametrize("given", ["multiplier_bound", "upper_multiplier_bound"])
def test_a_bound_grows_unless_it_is_the_one_given(given):
    """Every multiplier touches its bound at every look: those that bilevax found must grow."""
    problem = one_dimensional(upper_constraints=lambda x, y: x + y - 1.5, **{given: 3.0})
    lagrangian = GrowingLagrangian.of(problem, LINE)
    first = lagrangian.bounds
    at_bound = bx.Point(y2=first.lower, x2=(first.upper, first.shared))
    for _ in range(20):
        lagrangian, _ = lagrangian.reviewed(problem, lagrangian.signals(at_bound))
        if lagrangian.checks == 0:  # they grew, and nothing touches the new ones
            break
    grew = {
        "multiplier_bound": np.all(lagrangian.bounds.lower[0] > first.lower[0]),
        "upper_multiplier_bound": np.all(lagrangian.bounds.upper[0] > first.upper[0]),
    }
    assert grew == {name: name != given for name in grew}


def test_the_smoothness_of_f_is_not_taken_for_that_of_f_with_weighed_constraints():
    plain = one_dimensional(constraints=None, upper_smoothness=2.0)
    assert lagrangian_problem(plain, bounds_of(plain, LINE)).upper_smoothness == 2.0
    found = one_dimensional(upper_smoothness=2.0)  # its constraints are shared with the upper level
    assert lagrangian_problem(found, bounds_of(found, LINE)).upper_smoothness is None
    given = one_dimensional(upper_smoothness=2.0, multiplier_bound=3.0)
    assert lagrangian_problem(given, bounds_of(given, LINE)).upper_smoothness == 2.0


@functools.cache
def solved_within(bound):
    problem = clipped(np.asarray(0.1), multiplier_bound=bound)
    return bx.solve(problem, LINE, tolerance=TOLERANCE, solver=bx.Adaptive(), max_gradients=20_000)


def test_a_given_bound_is_used_and_kept():
    """At x = ½, λ̄ = 0.8 fits into a bound of 2. A bound too small must not be overstepped."""
    fine, tight = solved_within(2.0), solved_within(0.5)
    assert fine.status == "certified", fine.status
    np.testing.assert_allclose(fine.point.multipliers.lam_bar, 0.8, atol=1e-3)
    assert np.all(np.asarray(tight.point.multipliers.lam_bar) <= 0.5)
    np.testing.assert_array_equal(tight.state.solver_state.reformulation.bounds.lower[0], [0.5])
    assert tight.status != "certified" or tight.certificate.epsilon <= TOLERANCE


# Resuming.


@functools.cache
def growth_counts(name):
    """Gradients at which the bounds grew, from the history of a run's looks."""
    seen = []

    def look(solution):
        bounds = jax.tree.leaves(solution.state.solver_state.reformulation.bounds)
        seen.append((solution.gradients, np.concatenate([np.ravel(b) for b in bounds])))

    solve(FAMILY[name], STARTS.get(name, 0.0), callback=look)
    return [g for (_, a), (g, b) in itertools.pairwise(seen) if not np.array_equal(a, b)]


# A budget that ends between two looks makes one more look, which must not count for the bounds.
@pytest.mark.parametrize(
    "where",
    ["before", "many", *(pytest.param(w, marks=pytest.mark.long) for w in ("early", "after"))],
)
def test_resuming_gives_the_same_run_across_a_growth_of_bounds(where, tmp_path):
    whole = solved("growing")
    grew = growth_counts("growing")
    assert grew
    first, last = grew[0], whole.gradients
    late = int(whole.history["gradients"][-2]) + 3  # not so late that the look there certifies
    cuts = {
        "early": [1],
        "before": [first - 3],
        "after": [first + 1],
        "many": [130, first - 1, first, (first + last) // 2, late],
    }[where]
    path, resume = tmp_path / "run.state", None
    for cut in sorted(cuts):
        part = solve(FAMILY["growing"], -0.98, resume=resume, max_gradients=cut)
        part.save(path)
        resume = path
    rest = solve(FAMILY["growing"], -0.98, resume=path)
    assert rest.gradients == whole.gradients
    assert same(rest.point, whole.point)
    assert same(rest.state.solver_state, whole.state.solver_state)
    assert rest.certificate == whole.certificate


def test_the_state_of_another_constrained_run_is_refused():
    with pytest.raises(ValueError, match="another run"):
        solve(FAMILY["lp"], resume=solved_within(2.0).state)


# The paper's method on the Lagrangian.


@eqx.filter_jit
def advance(solver, problem, state, limit):
    return solver.step(problem, state, limit)


def test_the_penalty_method_follows_the_paper_on_a_linear_problem():
    """From where its starter ends, landing by landing, against the Lagrangian by hand in NumPy."""
    data, bound, epsilon = linear.generate(8, 8, 2, 0), 4.0, 0.1
    A, B, b, c, d, cost = data.A, data.B, data.b, data.c, data.d, data.d_tilde
    instance = library.bilevel_linear_from(data)
    stated = dataclasses.replace(instance.problem, multiplier_bound=np.asarray(bound))
    start = validate(stated, instance.start)
    bounds = first_bounds(stated, start)
    problem, begin = lagrangian_problem(stated, bounds), bilevel_point(start, bounds)
    solver = bx.PenaltyMethod().prepare(problem, begin, epsilon)
    state = solver.init(problem, begin)
    far = jnp.asarray(10**9)
    while bool(state.starting):
        state = advance(solver, problem, state, far)
    begun = int(state.gradients)
    y, lam = np.asarray(state.outer.x[1]), np.asarray(state.outer.x[2][0])
    # The starter's promise, in closed form: max over λ' minus min over y' of the Lagrangian.
    most = cost @ y + bound * np.sum(np.maximum(B @ y - b, 0))
    least = -np.sum(np.abs(cost + B.T @ lam)) - lam @ b
    assert most - least <= epsilon

    slope = np.linalg.norm(np.hstack([A, B]), 2)
    run = transcription.penalty_method(
        lambda x1, x2, y1, y2: (c, np.zeros(0), d, np.zeros(2)),
        lambda x, y, m: (A.T @ m, cost + B.T @ m, A @ x + B @ y - b),
        lambda v, t: np.clip(v, -1, 1),
        lambda v, t: v,
        lambda v, t: np.clip(v, -1, 1),
        lambda v, t: np.clip(v, 0, bound),
        library.FLAT,
        library.FLAT + slope,
        np.sqrt(8 * 4 + 2 * bound**2),
        epsilon,
        np.zeros(8), np.zeros(0), y, lam, y, lam,
        max_outer=3, max_steps=20_000,
    )  # fmt: skip
    flat = lambda tree: np.concatenate([np.ravel(v) for v in jax.tree.leaves(tree)])
    for count, landing in enumerate(run.run.trace[:400], start=1):
        before = int(state.outer.iteration)
        state = advance(solver, problem, state, state.gradients + 2)
        closed = int(state.outer.iteration) > before
        landed = flat((state.outer.x, state.outer.y)) if closed else state.outer.inner.landed
        np.testing.assert_allclose(landed, np.r_[landing.x, landing.y], rtol=0, atol=1e-9)
        assert int(state.gradients) == begun + 2 * count


@pytest.mark.long  # test_compilation.py solves one with other data, and compiles nothing
def test_data_is_an_argument_and_not_a_constant_of_the_program():
    """Four megabytes of data would be four megabytes of program text if they were built in."""
    large = np.random.default_rng(0).normal(size=(250_000, 2))
    given = {"multiplier_bound": 3.0, "upper_smoothness": 9.0, "lower_smoothness": 9.0}
    stated = problem_of(FAMILY["logistic"] | {"D": large}, **given)
    start = validate(stated, start_at())
    bounds = first_bounds(stated, start)
    problem, begin = lagrangian_problem(stated, bounds), bilevel_point(start, bounds)
    solver = bx.Adaptive().prepare(problem, begin, TOLERANCE)
    state = initial(solver, problem, begin)
    text = quick(piece_of_steps).lower(solver, problem, state, jnp.asarray(4)).as_text()
    assert len(text) < 2_000_000
