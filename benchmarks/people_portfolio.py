"""A portfolio that guards against its worst scenarios: problem 15."""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np

import bilevax as bx
from bilevax.terms import Box, CappedSimplex, Simplex
from people_instance import Answer, Array, Person
from people_ipopt import Level, relaxed
from people_qp import Program, solve
from people_search import on_a_line

STOCKS, SCENARIOS, TAIL = 8, 120, 0.1


@functools.cache
def returns() -> tuple[np.ndarray, np.ndarray]:
    """Early and later returns of eight stocks in per cent, with a common factor and heavy tails."""
    rng = np.random.default_rng(0)
    drift = rng.uniform(0.0, 0.5, size=STOCKS)
    loading = rng.uniform(0.5, 1.5, size=STOCKS)
    market = rng.standard_t(4, size=(2 * SCENARIOS, 1))
    own = rng.standard_t(4, size=(2 * SCENARIOS, STOCKS))
    table = drift + 0.8 * market * loading + own * rng.uniform(0.5, 1.5, size=STOCKS)
    return table[:SCENARIOS], table[SCENARIOS:]


def portfolio(x: float) -> np.ndarray:
    """The least of the tail's mean loss and ½e^x‖y‖², as a program with a level and excesses."""
    R, _ = returns()
    size = STOCKS + 1 + SCENARIOS
    cap = 1 / (TAIL * SCENARIOS)
    hessian = np.zeros((size, size))
    hessian[:STOCKS, :STOCKS] = np.exp(x) * np.eye(STOCKS)
    linear = np.concatenate([np.zeros(STOCKS), [1.0], np.full(SCENARIOS, cap)])
    excess = np.eye(SCENARIOS)
    rows = [
        np.hstack([-R, -np.ones((SCENARIOS, 1)), -excess]),
        np.hstack([np.zeros((SCENARIOS, STOCKS + 1)), -excess]),
        -np.eye(STOCKS, size),
    ]
    zeros = np.zeros(2 * SCENARIOS + STOCKS)
    total = np.concatenate([np.ones(STOCKS), np.zeros(SCENARIOS + 1)])[None]
    return solve(Program(hessian, linear, np.vstack(rows), zeros, total, np.ones(1))).y[:STOCKS]


def mean_variance(y: np.ndarray) -> float:
    later = returns()[1] @ y
    return -float(later.mean()) + 0.5 * float(later.var())


def _tail_ipopt() -> Answer:
    import casadi as ca

    R, later = (ca.DM(a) for a in returns())
    x, y, mix = ca.MX.sym("x"), ca.MX.sym("y", STOCKS), ca.MX.sym("mix", SCENARIOS)
    below = -ca.dot(mix, R @ y) + 0.5 * ca.exp(x) * ca.sumsqr(y)
    one = lambda a: ca.sum1(a) - 1
    cap = 1 / (TAIL * SCENARIOS)
    levels = [
        Level(y, below, equalities=one(y), low=0.0, start=1 / STOCKS),
        Level(mix, -below, equalities=one(mix), low=0.0, high=cap, start=1 / SCENARIOS),
    ]
    got = later @ y
    mean = ca.sum1(got) / SCENARIOS
    upper = -mean + 0.5 * ca.sumsqr(got - mean) / SCENARIOS
    return relaxed(x, upper, levels, np.zeros(1), (-4.0, 4.0))


def tail() -> Person:
    def upper(x1: Array, x2: Array, y1: Array, y2: Array, d: Array) -> Array:
        later = d["later"] @ y1
        return -jnp.mean(later) + 0.5 * jnp.var(later)

    early, later = returns()
    problem = bx.BilevelProblem(
        upper=upper,
        lower=lambda x1, y1, y2, d: -y2 @ (d["early"] @ y1) + 0.5 * jnp.exp(x1) * jnp.sum(y1**2),
        x1=Box(-4.0, 4.0),
        y1=Simplex(),
        y2=CappedSimplex(cap=1 / (TAIL * SCENARIOS)),
        data={"early": early, "later": later},
    )
    start = bx.Point(
        x1=jnp.zeros(()),
        y1=jnp.full(STOCKS, 1 / STOCKS),
        y2=jnp.full(SCENARIOS, 1 / SCENARIOS),
    )
    of = lambda x: mean_variance(portfolio(float(np.ravel(x)[0])))
    return Person(
        number=15,
        name="tail portfolio",
        problem=problem,
        starts=(start,),
        repaired=of,
        reference=lambda: on_a_line(of, -4.0, 4.0),
        ipopt=_tail_ipopt,
    )
