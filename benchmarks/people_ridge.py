"""Ridge regression with tuned weights: problems 1 to 4."""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np

import bilevax as bx
from bilevax.terms import Box, Free, Term
from people_data import Split, diabetes
from people_instance import Answer, Array, Person
from people_ipopt import Level, relaxed
from people_search import best, descent, on_a_line


def error(w: Array, X: Array, t: Array) -> Array:
    return 0.5 * jnp.mean((X @ w - t) ** 2)


def problem(data: Split, x: Term, y: Term) -> bx.ConstrainedBilevelProblem:
    return bx.ConstrainedBilevelProblem(
        upper=lambda x, y, d: error(y, d["V"], d["s"]),
        lower=lambda x, y, d: error(y, d["X"], d["t"]) + 0.5 * jnp.sum(jnp.exp(x) * y**2),
        x=x,
        y=y,
        data=data.arrays(),
    )


def value_and_slope(data: Split, x: np.ndarray) -> tuple[float, np.ndarray]:
    """The validation error of the weights that x gives, and its derivative by the adjoint."""
    X, t = data.train, data.target
    rows, columns = X.shape
    weights = np.broadcast_to(np.exp(x), columns)
    matrix = X.T @ X / rows + np.diag(weights)
    w = np.linalg.solve(matrix, X.T @ t / rows)
    rest = data.held @ w - data.held_target
    adjoint = np.linalg.solve(matrix, data.held.T @ rest / len(rest))
    slope = -adjoint * weights * w
    return 0.5 * float(np.mean(rest**2)), slope if len(x) > 1 else np.array([slope.sum()])


def _ipopt(data: Split, start: np.ndarray, bounds: tuple[float, float]) -> Answer:
    import casadi as ca

    X, t, V, s = (ca.DM(a) for a in data.arrays().values())
    x, y = ca.MX.sym("x", len(start)), ca.MX.sym("y", data.train.shape[1])
    mse = lambda X, t: 0.5 * ca.sumsqr(X @ y - t) / X.shape[0]
    weights = ca.exp(x) if len(start) > 1 else ca.exp(x) * ca.DM.ones(y.shape)
    level = Level(y, mse(X, t) + 0.5 * ca.dot(weights, y**2))
    return relaxed(x, mse(V, s), [level], start, bounds)


def _person(
    number: int, name: str, data: Split, low: float, high: float, size: int, y: Term, known: float
) -> Person:
    """`size` is the number of weights; the one weight of one is a scalar."""
    x = jnp.zeros(()) if size == 1 else jnp.zeros(size)
    start = bx.Point(x=x, y=jnp.zeros(10))
    of = functools.partial(value_and_slope, data)
    rng = np.random.default_rng(0)
    starts = [np.zeros(size), *rng.uniform(low, high, size=(30, size))]
    if size == 1:
        reference = lambda: on_a_line(lambda x: of(x)[0], low, high)
    else:
        reference = lambda: best(descent(of, s, (low, high)) for s in starts).F
    return Person(
        number=number,
        name=name,
        problem=problem(data, Box(low, high), y),
        starts=(start,),
        repaired=lambda x: of(np.atleast_1d(x))[0],
        reference=reference,
        published=known,
        nested=lambda: descent(of, np.zeros(size), (low, high)),
        ipopt=lambda: _ipopt(data, np.zeros(size), (low, high)),
    )


def one_weight() -> Person:
    data = diabetes(0, 221)
    return _person(1, "ridge", data, -10, 5, 1, Box(-10.0, 10.0), 0.2560601)


def in_units() -> Person:
    data = diabetes(0, 221, units=True)
    return _person(2, "ridge in units", data, -10, 5, 1, Box(-200.0, 200.0), 1519.4077)


def unbounded() -> Person:
    return _person(3, "ridge unbounded", diabetes(0, 221), -10, 5, 1, Free(), 0.2560601)


def weight_a_feature() -> Person:
    data = diabetes(0, 221)
    return _person(4, "ridge a feature", data, -8, 4, 10, Box(-10.0, 10.0), 0.246645)
