"""The lasso with a tuned weight, stated in three ways: problems 6 to 8."""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np
from sklearn.linear_model import lars_path

import bilevax as bx
from bilevax.terms import Box
from people_data import Split, diabetes
from people_instance import Answer, Person
from people_ipopt import Level, relaxed
from people_ridge import error
from people_search import descent, on_a_line

KNOWN = 0.3061935


@functools.cache
def data() -> Split:
    return diabetes(3, 60, noise=10)


@functools.cache
def path() -> tuple[np.ndarray, np.ndarray]:
    """All solutions, which are straight between these: falling weights, and a row for each."""
    weights, _, solutions = lars_path(data().train, data().target, method="lasso")
    return weights, solutions.T


def of_weight(weight: float) -> np.ndarray:
    weights, solutions = path()
    return _between(-weights, solutions, -weight)


def of_size(size: float) -> np.ndarray:
    """The solution with Σ|wᵢ| ≤ size."""
    _, solutions = path()
    return _between(np.abs(solutions).sum(axis=1), solutions, size)


def _between(places: np.ndarray, solutions: np.ndarray, place: float) -> np.ndarray:
    return np.array([np.interp(place, places, column) for column in solutions.T])


def held_error(w: np.ndarray) -> float:
    return 0.5 * float(np.mean((data().held @ w - data().held_target) ** 2))


def value_and_slope(x: np.ndarray) -> tuple[float, np.ndarray]:
    """The validation error for the weight e^x; only entries that are not zero move with x."""
    w = of_weight(np.exp(x[0]))
    free = np.abs(w) > 1e-12
    X = data().train[:, free]
    moved = -np.exp(x[0]) * np.linalg.solve(X.T @ X / len(X), np.sign(w[free]))
    rest = data().held @ w - data().held_target
    slope = rest @ (data().held[:, free] @ moved) / len(rest)
    return held_error(w), np.array([slope])


def _split_ipopt() -> Answer:
    import casadi as ca

    X, t, V, s = (ca.DM(a) for a in data().arrays().values())
    x, y = ca.MX.sym("x"), ca.MX.sym("y", 40)
    mse = lambda X, t: 0.5 * ca.sumsqr(X @ (y[:20] - y[20:]) - t) / X.shape[0]
    level = Level(y, mse(X, t), constraints=ca.sum1(y) - x, low=0.0, high=3.0)
    return relaxed(x, mse(V, s), [level], np.array([0.05]), (0.05, 3.0))


def _saddle_ipopt() -> Answer:
    import casadi as ca

    X, t, V, s = (ca.DM(a) for a in data().arrays().values())
    x, w, u = ca.MX.sym("x"), ca.MX.sym("w", 20), ca.MX.sym("u", 20)
    mse = lambda X, t: 0.5 * ca.sumsqr(X @ w - t) / X.shape[0]
    lower = mse(X, t) + ca.exp(x) * ca.dot(u, w)
    levels = [Level(w, lower), Level(u, -lower, low=-1.0, high=1.0)]
    return relaxed(x, mse(V, s), levels, -np.ones(1), (-6.0, 0.0))


def split_in_two() -> Person:
    zeros = jnp.zeros(20)
    problem = bx.ConstrainedBilevelProblem(
        upper=lambda x, y, d: error(y["p"] - y["q"], d["V"], d["s"]),
        lower=lambda x, y, d: error(y["p"] - y["q"], d["X"], d["t"]),
        constraints=lambda x, y, d: jnp.sum(y["p"] + y["q"]) - x,
        x=Box(0.05, 3.0),
        y=Box(0.0, 3.0),
        data=data().arrays(),
    )
    of = lambda x: held_error(of_size(np.ravel(x)[0]))
    return Person(
        number=6,
        name="lasso constraint",
        problem=problem,
        starts=(bx.Point(x=jnp.asarray(0.05), y={"p": zeros, "q": zeros}),),
        repaired=of,
        reference=lambda: on_a_line(of, 0.05, 3.0, 201),
        published=KNOWN,
        ipopt=_split_ipopt,
    )


def literal() -> Person:
    problem = bx.ConstrainedBilevelProblem(
        upper=lambda x, y, d: error(y, d["V"], d["s"]),
        lower=lambda x, y, d: error(y, d["X"], d["t"]),
        constraints=lambda x, y, d: jnp.sum(jnp.abs(y)) - x,
        x=Box(0.05, 3.0),
        y=Box(-3.0, 3.0),
        data=data().arrays(),
    )
    start = bx.Point(x=jnp.asarray(0.05), y=jnp.zeros(20))
    if hasattr(bx.problems, "epigraph_form"):  # 0.1.0 has none
        problem, start = bx.problems.epigraph_form(problem, start)
    of = lambda x: held_error(of_size(np.ravel(x)[0]))
    return Person(
        number=7,
        name="lasso literal",
        problem=problem,
        starts=(start,),
        repaired=of,
        reference=lambda: on_a_line(of, 0.05, 3.0, 201),
        published=KNOWN,
    )


def saddle() -> Person:
    problem = bx.BilevelProblem(
        upper=lambda x1, x2, y1, y2, d: error(y1, d["V"], d["s"]),
        lower=lambda x1, y1, y2, d: error(y1, d["X"], d["t"]) + jnp.exp(x1) * (y2 @ y1),
        x1=Box(-6.0, 0.0),
        y1=Box(-3.0, 3.0),
        y2=Box(-1.0, 1.0),
        data=data().arrays(),
    )
    of = lambda x: held_error(of_weight(np.exp(np.ravel(x)[0])))
    return Person(
        number=8,
        name="lasso saddle",
        problem=problem,
        starts=(bx.Point(x1=jnp.asarray(-1.0), y1=jnp.zeros(20), y2=jnp.zeros(20)),),
        repaired=of,
        reference=lambda: on_a_line(of, -6.0, 0.0, 201),
        published=KNOWN,
        nested=lambda: descent(value_and_slope, -np.ones(1), (-6.0, 0.0)),
        ipopt=_saddle_ipopt,
    )
