"""Inverse optimisation, a price from the answers to it: problem 14."""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np

import bilevax as bx
from bilevax.terms import Box
from people_instance import Answer, Array, Person
from people_ipopt import Level, relaxed
from people_qp import ACTIVE, Program, slope, solve
from people_search import best, descent

Arrays = dict[str, np.ndarray]

# Ten programs of six variables, with four rows each, share a price x.
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
