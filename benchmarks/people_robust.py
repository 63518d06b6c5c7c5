"""Lower levels that guard against the worst case: problems 12 and 13."""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
from scipy.optimize import brentq

import bilevax as bx
from bilevax.terms import Box, L2Ball
from people_data import Split, diabetes
from people_instance import Answer, Array, Person
from people_ipopt import Level, relaxed
from people_ridge import error
from people_search import descent, on_a_line


@functools.cache
def scaled() -> Split:
    """The training rows are divided by √60, so that ‖Xw − t‖² is their mean error."""
    d = diabetes(0, 60)
    return Split(d.train / 60**0.5, d.target / 60**0.5, d.held, d.held_target)


def held_error(d: Split, w: np.ndarray) -> float:
    return 0.5 * float(np.mean((d.held @ w - d.held_target) ** 2))


def robust_weights(x: float) -> np.ndarray:
    """The least of ‖Xw − t‖ + e^x‖w‖: a ridge solution, whose weight solves an equation.

    Where even the largest weight is too small for it, the answer is 0.
    """
    X, t = scaled().train, scaled().target
    eye = np.eye(X.shape[1])
    ridge = lambda weight: np.linalg.solve(X.T @ X + weight * eye, X.T @ t)

    def off(log_weight: float) -> float:
        w = ridge(np.exp(log_weight))
        return np.exp(x) * np.linalg.norm(X @ w - t) - np.exp(log_weight) * np.linalg.norm(w)

    if np.linalg.norm(X.T @ t) <= np.exp(x) * np.linalg.norm(t):
        return np.zeros(X.shape[1])
    root: Any = brentq(off, -30.0, 30.0, xtol=1e-14)
    return ridge(np.exp(root))


def _radius_ipopt() -> Answer:
    import casadi as ca

    X, t, V, s = (ca.DM(a) for a in scaled().arrays().values())
    x, w = ca.MX.sym("x"), ca.MX.sym("w", 10)
    u, v = ca.MX.sym("u", 60), ca.MX.sym("v", 10)
    below = ca.dot(u, X @ w - t) + ca.exp(x) * ca.dot(v, w)
    ball = lambda a: ca.sumsqr(a) - 1
    levels = [
        Level(w, below),
        Level(u, -below, constraints=ball(u), start=0.05),
        Level(v, -below, constraints=ball(v), start=0.05),
    ]
    upper = 0.5 * ca.sumsqr(V @ w - s) / V.shape[0]
    return relaxed(x, upper, levels, np.array([-2.25]), (-5.0, 0.5))


def radius() -> Person:
    problem = bx.BilevelProblem(
        upper=lambda x1, x2, y1, y2, d: error(y1, d["V"], d["s"]),
        lower=lambda x1, y1, y2, d: y2["u"] @ (d["X"] @ y1 - d["t"]) + jnp.exp(x1) * (y2["v"] @ y1),
        x1=Box(-5.0, 0.5),
        y1=L2Ball(3.0),
        y2=L2Ball(1.0),
        data=scaled().arrays(),
    )
    y2 = {"u": jnp.zeros(60), "v": jnp.zeros(10)}
    of = lambda x: held_error(scaled(), robust_weights(float(np.ravel(x)[0])))
    return Person(
        number=12,
        name="robust radius",
        problem=problem,
        starts=(bx.Point(x1=jnp.asarray(-2.25), y1=jnp.zeros(10), y2=y2),),
        repaired=of,
        reference=lambda: on_a_line(of, -5.0, 0.5),
        published=0.2269347,
        ipopt=_radius_ipopt,
    )


def guarded(x: float) -> tuple[np.ndarray, np.ndarray]:
    """The weights against moved targets, by Newton's method, and the Hessian there.

    The worst move of a rest r is clip(2r/e^x, −1, 1), which makes of ½r² the greater
    1½r² while |2r| ≤ e^x, and beyond ½(|r| + e^x)² − ¾e^2x.
    """
    X, t, reach = scaled().train, scaled().target, np.exp(x)

    def parts(r: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        near = 2 * np.abs(r) <= reach
        far = 0.5 * (np.abs(r) + reach) ** 2 - 0.75 * reach**2
        slope = np.where(near, 3 * r, r + reach * np.sign(r))
        return np.where(near, 1.5 * r**2, far), slope, np.where(near, 3.0, 1.0)

    value = lambda w: parts(X @ w - t)[0].sum() + 0.01 * w @ w
    w = np.zeros(X.shape[1])
    hessian = np.eye(len(w))
    for _ in range(200):
        _, slope, bent = parts(X @ w - t)
        gradient = X.T @ slope + 0.02 * w
        hessian = (X * bent[:, None]).T @ X + 0.02 * np.eye(len(w))
        if np.linalg.norm(gradient) < 1e-11:
            break
        step, size = np.linalg.solve(hessian, gradient), 1.0
        fall = 1e-4 * gradient @ step
        while size > 1e-8 and value(w - size * step) > value(w) - size * fall + 1e-15:
            size /= 2
        w = w - size * step
    return w, hessian


def guarded_value_and_slope(x: np.ndarray) -> tuple[float, np.ndarray]:
    d, reach = scaled(), np.exp(x[0])
    w, hessian = guarded(x[0])
    r = d.train @ w - d.target
    rest = d.held @ w - d.held_target
    adjoint = np.linalg.solve(hessian, d.held.T @ rest / len(rest))
    of_x = d.train.T @ np.where(2 * np.abs(r) <= reach, 0.0, reach * np.sign(r))
    return 0.5 * float(np.mean(rest**2)), np.array([-adjoint @ of_x])


def _targets_ipopt() -> Answer:
    import casadi as ca

    X, t, V, s = (ca.DM(a) for a in scaled().arrays().values())
    x, w, move = ca.MX.sym("x"), ca.MX.sym("w", 10), ca.MX.sym("d", 60)
    rest = X @ w - t + ca.exp(x) * move
    below = 0.5 * ca.sumsqr(rest) - 0.75 * ca.exp(2 * x) * ca.sumsqr(move) + 0.01 * ca.sumsqr(w)
    levels = [Level(w, below), Level(move, -below, low=-1.0, high=1.0)]
    upper = 0.5 * ca.sumsqr(V @ w - s) / V.shape[0]
    return relaxed(x, upper, levels, np.array([-3.5]), (-7.0, 0.0))


def targets() -> Person:
    def lower(x1: Array, y1: Array, y2: Array, d: Array) -> Array:
        reach = jnp.exp(x1)
        rest = d["X"] @ y1 - d["t"] + reach * y2
        moved = 0.75 * reach**2 * jnp.sum(y2**2)
        return 0.5 * jnp.sum(rest**2) - moved + 0.01 * jnp.sum(y1**2)

    problem = bx.BilevelProblem(
        upper=lambda x1, x2, y1, y2, d: error(y1, d["V"], d["s"]),
        lower=lower,
        x1=Box(-7.0, 0.0),
        y1=Box(-3.0, 3.0),
        y2=Box(-1.0, 1.0),
        data=scaled().arrays(),
    )
    of = guarded_value_and_slope
    return Person(
        number=13,
        name="adversarial targets",
        problem=problem,
        starts=(bx.Point(x1=jnp.asarray(-3.5), y1=jnp.zeros(10), y2=jnp.zeros(60)),),
        repaired=lambda x: of(np.ravel(x))[0],
        reference=lambda: on_a_line(lambda x: of(x)[0], -7.0, 0.0, 201),
        published=0.2339672,
        nested=lambda: descent(of, np.array([-3.5]), (-7.0, 0.0)),
        ipopt=_targets_ipopt,
    )
