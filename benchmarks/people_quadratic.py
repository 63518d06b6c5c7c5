"""Generated problems with quadratic lower levels: problems 14, 16, 18 and 23, and 17."""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np

import bilevax as bx
from bilevax.terms import Box
from people_instance import Answer, Array, Person
from people_ipopt import Level, relaxed
from people_qp import ACTIVE, Program, slope, solve
from people_search import best, descent, on_a_line

Arrays = dict[str, np.ndarray]

# 14: ten programs of six variables, with four rows each, share a price x.
PROGRAMS, GOODS, ROWS = 10, 6, 4


@functools.cache
def observed() -> Arrays:
    rng = np.random.default_rng(0)
    G = rng.normal(size=(PROGRAMS, GOODS, GOODS)) / GOODS**0.5
    d = {
        "Q": G @ G.transpose(0, 2, 1) + 0.5 * np.eye(GOODS),
        "q": rng.normal(size=(PROGRAMS, GOODS)),
        "A": rng.normal(size=(PROGRAMS, ROWS, GOODS)) / GOODS**0.5,
        "b": rng.uniform(0.2, 0.6, size=(PROGRAMS, ROWS)),
    }
    price = rng.normal(size=GOODS)
    answers = np.array([_answer(d, k, price)[0] for k in range(PROGRAMS)])
    return d | {"seen": answers + 0.05 * rng.normal(size=answers.shape)}


def _answer(d: Arrays, k: int, price: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The answer of one program to a price, and its multipliers."""
    found = solve(Program(d["Q"][k], d["q"][k] + price, d["A"][k], d["b"][k]))
    return found.y, found.lam


def price_value_and_slope(x: np.ndarray) -> tuple[float, np.ndarray]:
    d, value, change = observed(), 0.0, np.zeros(GOODS)
    for k in range(PROGRAMS):
        y, lam = _answer(d, k, x)
        rest = y - d["seen"][k]
        active = lam > ACTIVE
        none = np.zeros((active.sum(), GOODS))
        value += 0.5 * float(rest @ rest) / PROGRAMS
        change += slope(d["Q"][k], d["A"][k][active], rest, np.eye(GOODS), none) / PROGRAMS
    return value, change


def _price_ipopt() -> Answer:
    import casadi as ca

    d = observed()
    x, y = ca.MX.sym("x", GOODS), ca.MX.sym("y", GOODS * PROGRAMS)
    upper, below, rows = 0, 0, []
    for k in range(PROGRAMS):
        own = y[k * GOODS : (k + 1) * GOODS]
        Q, q, A, b, seen = (ca.DM(d[name][k]) for name in ("Q", "q", "A", "b", "seen"))
        below += 0.5 * ca.dot(own, Q @ own) + ca.dot(q + x, own)
        rows.append(A @ own - b)
        upper += 0.5 * ca.sumsqr(own - seen) / PROGRAMS
    level = Level(y, below, constraints=ca.vertcat(*rows))
    return relaxed(x, upper, [level], np.zeros(GOODS), (-3.0, 3.0))


def inverse() -> Person:
    def lower(x: Array, y: Array, d: Array) -> Array:
        bent = 0.5 * jnp.einsum("ki,kij,kj->", y, d["Q"], y)
        return bent + jnp.sum((d["q"] + x) * y)

    problem = bx.ConstrainedBilevelProblem(
        upper=lambda x, y, d: 0.5 * jnp.sum((y - d["seen"]) ** 2) / PROGRAMS,
        lower=lower,
        constraints=lambda x, y, d: jnp.einsum("kri,ki->kr", d["A"], y) - d["b"],
        x=Box(-3.0, 3.0),
        y=Box(-10.0, 10.0),
        data=observed(),
    )
    of = price_value_and_slope
    starts = [np.zeros(GOODS), *np.random.default_rng(0).uniform(-3, 3, size=(10, GOODS))]
    return Person(
        number=14,
        name="inverse",
        problem=problem,
        starts=(bx.Point(x=jnp.zeros(GOODS), y=jnp.zeros((PROGRAMS, GOODS))),),
        repaired=lambda x: of(np.ravel(x))[0],
        reference=lambda: best(descent(of, s, (-3.0, 3.0)) for s in starts).F,
        ipopt=_price_ipopt,
    )


# 16: a problem whose answer is x = 1, y₁ = 2, y₂ = −3, with the value 0.
TOY = 100


def toy_value(x: np.ndarray, power: int) -> float:
    """y₁ = x + 1 and Σy₂ is given below; the upper level likes all entries of y₂ equal."""
    y2 = -(np.sum(x**power) + np.sum(x + 1)) / TOY
    return float(np.sum((x - 1) ** 2) + TOY * (y2 + 3) ** 2)


def _toy_ipopt(power: int) -> Answer:
    import casadi as ca

    x, y = ca.MX.sym("x", TOY), ca.MX.sym("y", 2 * TOY)
    y1, y2 = y[:TOY], y[TOY:]
    below = 0.5 * ca.sumsqr(y1) - ca.dot(x, y1) + ca.sum1(y2)
    level = Level(y, below, equalities=ca.sum1(x**power) + ca.sum1(y))
    upper = ca.dot(y1 - 2, x - 1) + ca.sumsqr(y2 + 3)
    return relaxed(x, upper, [level], np.zeros(TOY), (-2.0, 2.0))


def _toy(name: str, power: int) -> Person:
    problem = bx.ConstrainedBilevelProblem(
        upper=lambda x, y: (y["y1"] - 2) @ (x - 1) + jnp.sum((y["y2"] + 3) ** 2),
        lower=lambda x, y: 0.5 * jnp.sum(y["y1"] ** 2) - x @ y["y1"] + jnp.sum(y["y2"]),
        equalities=lambda x, y: jnp.sum(x**power) + jnp.sum(y["y1"]) + jnp.sum(y["y2"]),
        x=Box(-2.0, 2.0),
        y=Box(-20.0, 20.0),
    )
    zeros = jnp.zeros(TOY)
    return Person(
        number=16,
        name=name,
        problem=problem,
        starts=(bx.Point(x=zeros, y={"y1": zeros, "y2": zeros}),),
        repaired=lambda x: toy_value(np.ravel(x), power),
        reference=lambda: toy_value(np.ones(TOY), power),
        published=0.0,
        ipopt=lambda: _toy_ipopt(power),
    )


def linear_toy() -> Person:
    return _toy("toy linear", 1)


def cubic_toy() -> Person:
    return _toy("toy cubic", 3)


# 17: below y = x, since the least of (y − 2x)² lies beyond y ≤ x.
def wavy_value(x: np.ndarray) -> float:
    at = float(np.ravel(x)[0])
    return float(np.exp(2 - at) / (2 + np.cos(6 * at)) + 0.5 * np.log((4 * at - 2) ** 2 + 1))


def _wavy_ipopt() -> Answer:
    import casadi as ca

    x, y = ca.MX.sym("x"), ca.MX.sym("y")
    upper = ca.exp(2 - y) / (2 + ca.cos(6 * x)) + 0.5 * ca.log((4 * x - 2) ** 2 + 1)
    return relaxed(x, upper, [Level(y, (y - 2 * x) ** 2, y - x)], np.zeros(1), (0.0, 3.0))


def wavy() -> Person:
    def upper(x: Array, y: Array) -> Array:
        return jnp.exp(2 - y) / (2 + jnp.cos(6 * x)) + 0.5 * jnp.log((4 * x - 2) ** 2 + 1)

    problem = bx.ConstrainedBilevelProblem(
        upper=upper,
        lower=lambda x, y: (y - 2 * x) ** 2,
        constraints=lambda x, y: y - x,
        x=Box(0.0, 3.0),
        y=Box(-1.0, 4.0),
    )
    places = np.linspace(0.0, 3.0, 8)
    return Person(
        number=17,
        name="many minima",
        problem=problem,
        starts=tuple(bx.Point(x=jnp.asarray(s), y=jnp.asarray(s)) for s in places),
        repaired=wavy_value,
        reference=lambda: on_a_line(wavy_value, 0.0, 3.0, 301),
        published=1.72188,
        ipopt=_wavy_ipopt,
    )


# 18: quadratics in x and y with rows that are bilinear.
SIZE, BILINEAR = 60, 20


def coupled_arrays(seed: int) -> Arrays:
    """Both objectives are convex; y = 0 is strictly inside, so that every x has an answer."""
    rng = np.random.default_rng(seed)
    square = lambda n: (lambda G: G @ G.T / n + 0.1 * np.eye(n))(rng.normal(size=(n, n)))
    return {
        "A": square(2 * SIZE),
        "b": rng.normal(size=2 * SIZE),
        "C": square(SIZE),
        "d": rng.normal(size=SIZE),
        "D": rng.normal(size=(SIZE, SIZE)) / SIZE**0.5,
        "E": rng.normal(size=(BILINEAR, SIZE, SIZE)) / SIZE,
        "g": rng.uniform(0.1, 0.5, size=BILINEAR),
    }


def coupled_value_and_slope(m: Arrays, x: np.ndarray) -> tuple[float, np.ndarray]:
    eye = np.eye(SIZE)
    rows = np.vstack([x @ m["E"], eye, -eye])
    ends = np.concatenate([m["g"], np.ones(2 * SIZE)])
    found = solve(Program(m["C"], m["d"] + x @ m["D"], rows, ends))
    z = np.concatenate([x, found.y])
    whole = m["A"] @ z + m["b"]
    lam = found.lam[:BILINEAR]
    active = found.lam > ACTIVE
    of_x = np.vstack([m["E"] @ found.y, np.zeros((2 * SIZE, SIZE))])[active]
    lagrangian_yx = m["D"].T + np.einsum("r,rij->ji", lam, m["E"])
    change = slope(m["C"], rows[active], whole[SIZE:], lagrangian_yx, of_x)
    return float(0.5 * z @ m["A"] @ z + m["b"] @ z), whole[:SIZE] + change


def _coupled_ipopt(m: Arrays, start: np.ndarray) -> Answer:
    import casadi as ca

    x, y = ca.MX.sym("x", SIZE), ca.MX.sym("y", SIZE)
    z = ca.vertcat(x, y)
    a = {name: ca.DM(m[name]) for name in ("A", "b", "C", "d", "D", "g")}
    below = 0.5 * ca.dot(y, a["C"] @ y) + ca.dot(a["d"], y) + ca.dot(x, a["D"] @ y)
    rows = ca.vertcat(*(ca.dot(x, ca.DM(E) @ y) for E in m["E"])) - a["g"]
    upper = 0.5 * ca.dot(z, a["A"] @ z) + ca.dot(a["b"], z)
    level = Level(y, below, constraints=rows, low=-1.0, high=1.0)
    return relaxed(x, upper, [level], start, (-1.0, 1.0))


def coupled() -> Person:
    def upper(x: Array, y: Array, m: Array) -> Array:
        z = jnp.concatenate([x, y])
        return 0.5 * z @ m["A"] @ z + m["b"] @ z

    m = coupled_arrays(4)
    problem = bx.ConstrainedBilevelProblem(
        upper=upper,
        lower=lambda x, y, m: 0.5 * y @ m["C"] @ y + m["d"] @ y + x @ m["D"] @ y,
        constraints=lambda x, y, m: jnp.einsum("i,rij,j->r", x, m["E"], y) - m["g"],
        x=Box(-1.0, 1.0),
        y=Box(-1.0, 1.0),
        data=m,
    )
    of = functools.partial(coupled_value_and_slope, m)

    def reference() -> float:
        """The best of nested descents from several starts, and of IPOPT."""
        starts = [np.zeros(SIZE), *np.random.default_rng(0).uniform(-1, 1, size=(6, SIZE))]
        nested = best(descent(of, s, (-1.0, 1.0), 300) for s in starts).F
        return min(nested, of(_coupled_ipopt(m, starts[0]).x)[0])

    return Person(
        number=18,
        name="coupled",
        problem=problem,
        starts=(bx.Point(x=jnp.zeros(SIZE), y=jnp.zeros(SIZE)),),
        repaired=lambda x: of(np.ravel(x))[0],
        reference=reference,
        ipopt=lambda: _coupled_ipopt(m, np.zeros(SIZE)),
    )


# 23: a quadratic above a quadratic.
FREE = 100


@functools.cache
def simulated() -> Arrays:
    """Above a convex quadratic of (x, y), below one of y with a term xᵀCy."""
    rng = np.random.default_rng(0)
    spectrum = lambda n, least: np.geomspace(least, 1.0, n)
    turn = lambda n: np.linalg.qr(rng.normal(size=(n, n)))[0]
    bent = lambda n, least: (lambda U: (U * spectrum(n, least)) @ U.T)(turn(n))
    return {
        "A": bent(2 * FREE, 0.01),
        "b": rng.normal(size=2 * FREE) / FREE**0.5,
        "H": bent(FREE, 0.1),
        "C": turn(FREE) * 0.5,
        "h": rng.normal(size=FREE) / FREE**0.5,
    }


def simulated_value_and_slope(x: np.ndarray) -> tuple[float, np.ndarray]:
    """y = −H⁻¹(Cᵀx + h), so that the value is a quadratic of x."""
    m = simulated()
    moved = -np.linalg.solve(m["H"], np.column_stack([m["C"].T, m["h"]]))
    z = np.concatenate([x, moved[:, :-1] @ x + moved[:, -1]])
    whole = m["A"] @ z + m["b"]
    return float(0.5 * z @ m["A"] @ z + m["b"] @ z), whole[:FREE] + moved[:, :-1].T @ whole[FREE:]


def simulated_least() -> float:
    """The least of that quadratic; it lies inside the bounds of x and y."""
    m = simulated()
    moved = -np.linalg.solve(m["H"], np.column_stack([m["C"].T, m["h"]]))
    lift = np.vstack([np.eye(FREE), moved[:, :-1]])
    offset = np.concatenate([np.zeros(FREE), moved[:, -1]])
    x = np.linalg.solve(lift.T @ m["A"] @ lift, -lift.T @ (m["A"] @ offset + m["b"]))
    assert np.abs(x).max() < 10
    assert np.abs(moved[:, :-1] @ x + moved[:, -1]).max() < 50
    return simulated_value_and_slope(x)[0]


def _simulated_ipopt() -> Answer:
    import casadi as ca

    m = {name: ca.DM(array) for name, array in simulated().items()}
    x, y = ca.MX.sym("x", FREE), ca.MX.sym("y", FREE)
    z = ca.vertcat(x, y)
    below = 0.5 * ca.dot(y, m["H"] @ y) + ca.dot(x, m["C"] @ y) + ca.dot(m["h"], y)
    upper = 0.5 * ca.dot(z, m["A"] @ z) + ca.dot(m["b"], z)
    return relaxed(x, upper, [Level(y, below)], np.zeros(FREE), (-10.0, 10.0))


def closed_form() -> Person:
    def upper(x: Array, y: Array, m: Array) -> Array:
        z = jnp.concatenate([x, y])
        return 0.5 * z @ m["A"] @ z + m["b"] @ z

    problem = bx.ConstrainedBilevelProblem(
        upper=upper,
        lower=lambda x, y, m: 0.5 * y @ m["H"] @ y + x @ m["C"] @ y + m["h"] @ y,
        x=Box(-10.0, 10.0),
        y=Box(-50.0, 50.0),
        data=simulated(),
    )
    of = simulated_value_and_slope
    return Person(
        number=23,
        name="closed form",
        problem=problem,
        starts=(bx.Point(x=jnp.zeros(FREE), y=jnp.zeros(FREE)),),
        repaired=lambda x: of(np.ravel(x))[0],
        reference=simulated_least,
        nested=lambda: descent(of, np.zeros(FREE), (-10.0, 10.0)),
        ipopt=_simulated_ipopt,
    )
