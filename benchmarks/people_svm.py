"""Support vector machines with many hyper-parameters: problems 9 and 22."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from scipy.special import expit

import bilevax as bx
from bilevax.terms import Box
from people_data import Split, breast_cancer
from people_instance import Answer, Array, Person
from people_ipopt import Level, relaxed
from people_qp import ACTIVE, Program, slope, solve
from people_search import best, descent, hops

LOW, HIGH = 0.01, 2.0  # of the bounds on w
LEAST, MOST = -5.0, 5.0  # of the logarithms of C


def logistic(margins: np.ndarray) -> float:
    return float(np.mean(np.logaddexp(0.0, -margins)))


def held_loss(y: Array, d: Array) -> Array:
    return jnp.mean(jax.nn.softplus(-d["s"] * (d["V"] @ y["w"] + y["b"])))


def margin_rows(y: Array, d: Array) -> Array:
    return 1 - y["slack"] - d["t"] * (d["X"] @ y["w"] + y["b"])


@functools.cache
def few() -> Split:
    return breast_cancer(0, 8, 80, 150)


def bounded_value_and_slope(x: np.ndarray) -> tuple[float, np.ndarray]:
    """The validation loss of the machine with |w| ≤ x, and its derivative."""
    data = few()
    rows, columns = data.train.shape
    size = columns + 1 + rows
    hessian = np.diag(np.concatenate([np.full(columns, 0.1), np.zeros(rows + 1)]))
    linear = np.concatenate([np.zeros(columns + 1), np.full(rows, 1 / rows)])
    signed = data.target[:, None] * np.column_stack([data.train, np.ones(rows)])
    wide, none = np.eye(columns, size), np.zeros((rows, columns + 1))
    slack = np.eye(rows)
    A = np.vstack([np.hstack([-signed, -slack]), np.hstack([none, -slack]), wide, -wide])
    b = np.concatenate([-np.ones(rows), np.zeros(rows), x, x])
    found = solve(Program(hessian, linear, A, b))
    w = found.y[: columns + 1]
    held = data.held_target[:, None] * np.column_stack([data.held, np.ones(len(data.held))])
    margins = held @ w
    value_y = np.zeros(size)
    value_y[: columns + 1] = -held.T @ expit(-margins) / len(margins)
    active = found.lam > ACTIVE
    of_x = np.vstack([np.zeros((2 * rows, columns)), -np.eye(columns), -np.eye(columns)])
    gradient = slope(hessian, A[active], value_y, np.zeros((size, columns)), of_x[active])
    return logistic(margins), gradient


def _bounded_ipopt(start: float) -> Answer:
    import casadi as ca

    X, t, V, s = (ca.DM(a) for a in few().arrays().values())
    x, y = ca.MX.sym("x", 8), ca.MX.sym("y", 89)
    w, b, slack = y[:8], y[8], y[9:]
    rows = ca.vertcat(1 - slack - t * (X @ w + b), w - x, -w - x, -slack)
    level = Level(y, 0.05 * ca.sumsqr(w) + ca.sum1(slack) / 80, constraints=rows)
    upper = ca.sum1(ca.log1p(ca.exp(-s * (V @ w + b)))) / 150
    return relaxed(x, upper, [level], np.full(8, start), (LOW, HIGH))


def bounded() -> Person:
    problem = bx.ConstrainedBilevelProblem(
        upper=lambda x, y, d: held_loss(y, d),
        lower=lambda x, y, d: 0.05 * jnp.sum(y["w"] ** 2) + jnp.mean(y["slack"]),
        constraints=lambda x, y, d: {
            "margin": margin_rows(y, d),
            "high": y["w"] - x,
            "low": -y["w"] - x,
        },
        x=Box(LOW, HIGH),
        y={"w": Box(-2.0, 2.0), "b": Box(-5.0, 5.0), "slack": Box(0.0, 20.0)},
        data=few().arrays(),
    )
    y = {"w": jnp.zeros(8), "b": jnp.zeros(()), "slack": jnp.ones(80)}
    of = bounded_value_and_slope

    def reference() -> float:
        """The best of descents from many starts, and of hops from the best two of them."""
        starts = np.random.default_rng(0).uniform(LOW, 0.5, size=(20, 8))
        found = sorted((descent(of, s, (LOW, HIGH)) for s in starts), key=lambda a: a.F)[:2]
        return best(hops(of, a.x, (LOW, HIGH), 12, 0.1) for a in found).F

    return Person(
        number=9,
        name="svm bounds",
        problem=problem,
        starts=(bx.Point(x=jnp.ones(8), y=y),),
        repaired=lambda x: of(np.ravel(x))[0],
        reference=reference,
        published=0.271382,
        ipopt=lambda: _bounded_ipopt(1.0),
    )


@functools.cache
def many() -> Split:
    return breast_cancer(0, 30, 300, 269)


def weighted_value_and_slope(x: np.ndarray) -> tuple[float, np.ndarray]:
    """The validation loss of the machine with weights e^x, by Newton's method on w and b.

    Without the slacks its objective is ½‖w‖² + ½·mean(e^xᵢ·max(0, 1 − marginᵢ)²).
    """
    data = many()
    rows = len(data.target)
    signed = data.target[:, None] * np.column_stack([data.train, np.ones(rows)])
    ridge = np.diag(np.append(np.ones(signed.shape[1] - 1), 0.0))
    weights = np.exp(x) / rows
    value = lambda w: 0.5 * w @ ridge @ w + 0.5 * weights @ np.maximum(1 - signed @ w, 0) ** 2
    w, short, hessian = np.zeros(signed.shape[1]), np.ones(rows), ridge
    for _ in range(200):
        short = np.maximum(1 - signed @ w, 0)
        gradient = ridge @ w - signed.T @ (weights * short)
        hessian = ridge + (signed * (weights * (short > 0))[:, None]).T @ signed
        if np.linalg.norm(gradient) < 1e-12 * (1 + np.linalg.norm(w)):
            break
        step = np.linalg.lstsq(hessian, gradient, rcond=1e-14)[0]
        size = 1.0
        fall = 1e-4 * gradient @ step
        while size > 1e-8 and value(w - size * step) > value(w) - size * fall + 1e-15:
            size /= 2
        w = w - size * step
    held = data.held_target[:, None] * np.column_stack([data.held, np.ones(len(data.held))])
    margins = held @ w
    of_w = -held.T @ expit(-margins) / len(margins)
    adjoint = np.linalg.lstsq(hessian, of_w, rcond=1e-14)[0]
    return logistic(margins), weights * short * (signed @ adjoint)


def _weighted_ipopt() -> Answer:
    import casadi as ca

    X, t, V, s = (ca.DM(a) for a in many().arrays().values())
    x, y = ca.MX.sym("x", 300), ca.MX.sym("y", 331)
    w, b, slack = y[:30], y[30], y[31:]
    rows = 1 - slack - t * (X @ w + b)
    below = 0.5 * ca.sumsqr(w) + 0.5 * ca.dot(ca.exp(x), slack**2) / 300
    upper = ca.sum1(ca.log1p(ca.exp(-s * (V @ w + b)))) / 269
    return relaxed(x, upper, [Level(y, below, constraints=rows)], np.zeros(300), (LEAST, MOST))


def weighted() -> Person:
    problem = bx.ConstrainedBilevelProblem(
        upper=lambda x, y, d: held_loss(y, d),
        lower=lambda x, y, d: (
            0.5 * jnp.sum(y["w"] ** 2) + 0.5 * jnp.mean(jnp.exp(x) * y["slack"] ** 2)
        ),
        constraints=lambda x, y, d: margin_rows(y, d),
        x=Box(LEAST, MOST),
        y={"w": Box(-10.0, 10.0), "b": Box(-10.0, 10.0), "slack": Box(-100.0, 100.0)},
        data=many().arrays(),
    )
    y = {"w": jnp.zeros(30), "b": jnp.zeros(()), "slack": jnp.ones(300)}
    of = weighted_value_and_slope
    starts = [np.zeros(300), *np.random.default_rng(0).uniform(LEAST, MOST, size=(2, 300))]
    return Person(
        number=22,
        name="svm rows",
        problem=problem,
        starts=(bx.Point(x=jnp.zeros(300), y=y),),
        repaired=lambda x: of(np.ravel(x))[0],
        reference=lambda: best(descent(of, s, (LEAST, MOST)) for s in starts).F,
        nested=lambda: descent(of, np.zeros(300), (LEAST, MOST)),
        ipopt=_weighted_ipopt,
    )
