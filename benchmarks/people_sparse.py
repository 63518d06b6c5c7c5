"""The elastic net and the sparse group lasso with tuned weights: problems 20 and 21.

The elastic net is split, w = p − q, with a square of both parts: so its lower level is strongly
convex and has no terms but bounds. The sparse group lasso is a saddle: every norm is a maximum
over a box or over balls.
"""

from __future__ import annotations

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
from sklearn.linear_model import ElasticNet

import bilevax as bx
from bilevax.terms import Box, L2Ball
from people_data import Split, grouped_regression, sparse_regression
from people_instance import Answer, Array, Person
from people_ipopt import Level, relaxed
from people_ridge import error
from people_search import best, descent

LOW, HIGH = -6.0, 2.0  # of the logarithms of all weights
GROUPS = 30


def held(d: Split, w: np.ndarray) -> tuple[float, np.ndarray]:
    """The validation error and its slope in w."""
    rest = d.held @ w - d.held_target
    return 0.5 * float(np.mean(rest**2)), d.held.T @ rest / len(rest)


def elastic_net(d: Split, weights: np.ndarray) -> np.ndarray:
    """Coordinate descent, then exactly on the entries that it leaves, until the signs agree."""
    X, t = d.train, d.target
    l1, l2 = weights
    model = ElasticNet(
        alpha=l1 + l2, l1_ratio=l1 / (l1 + l2), fit_intercept=False, tol=1e-10, max_iter=100_000
    )
    w = model.fit(X, t).coef_.copy()
    for _ in range(5):
        slope = X.T @ (t - X @ w) / len(t) - l2 * w
        free = (w != 0) | (np.abs(slope) > l1 * (1 + 1e-12))
        signs = np.where(w != 0, np.sign(w), np.sign(slope))[free]
        Z = X[:, free]
        matrix = Z.T @ Z / len(t) + l2 * np.eye(Z.shape[1])
        exact = np.zeros_like(w)
        exact[free] = np.linalg.solve(matrix, Z.T @ t / len(t) - l1 * signs)
        agree = np.sign(exact[free]) == signs
        rest = np.abs(X.T @ (t - X @ exact) / len(t) - l2 * exact)
        if agree.all() and rest[~free].max(initial=0) <= l1 * (1 + 1e-9):
            return exact
        exact[np.flatnonzero(free)[~agree]] = 0
        w = exact
    return model.coef_


def net_value_and_slope(d: Split, x: np.ndarray) -> tuple[float, np.ndarray]:
    l1, l2 = np.exp(x)
    w = elastic_net(d, np.exp(x))
    value, of_w = held(d, w)
    free = w != 0
    Z = d.train[:, free]
    adjoint = np.linalg.solve(Z.T @ Z / len(Z) + l2 * np.eye(Z.shape[1]), of_w[free])
    return value, -np.array([l1 * adjoint @ np.sign(w[free]), l2 * adjoint @ w[free]])


def _net_ipopt(d: Split) -> Answer:
    import casadi as ca

    X, t, V, s = (ca.DM(a) for a in d.arrays().values())
    rows, columns = d.train.shape
    # The rests of both levels are variables of their own, which keeps IPOPT's matrices sparse.
    x, y = ca.MX.sym("x", 2 + len(d.held)), ca.MX.sym("y", 2 * columns + rows)
    parts, rests = y[: 2 * columns], y[2 * columns :]
    w = parts[:columns] - parts[columns:]
    below = 0.5 * ca.sumsqr(rests) / rows + ca.exp(x[0]) * ca.sum1(parts)
    below += 0.5 * ca.exp(x[1]) * ca.sumsqr(parts)
    level = Level(y, below, constraints=-parts, equalities=X @ w - t - rests)
    upper = 0.5 * ca.sumsqr(x[2:]) / len(d.held)
    free = np.full(len(d.held), np.inf)
    bounds = (np.concatenate([[LOW, LOW], -free]), np.concatenate([[HIGH, HIGH], free]))
    start = np.concatenate([np.zeros(2), -d.held_target])
    found = relaxed(x, upper, [level], start, bounds, upper_equalities=V @ w - s - x[2:])
    return dataclasses.replace(found, x=found.x[:2])


def _net(columns: int) -> Person:
    d = sparse_regression(0, columns)

    def lower(x: Array, y: Array, d: Array) -> Array:
        p, q = y["p"], y["q"]
        linear = jnp.exp(x[0]) * jnp.sum(p + q)
        return error(p - q, d["X"], d["t"]) + linear + 0.5 * jnp.exp(x[1]) * jnp.sum(p**2 + q**2)

    problem = bx.ConstrainedBilevelProblem(
        upper=lambda x, y, d: error(y["p"] - y["q"], d["V"], d["s"]),
        lower=lower,
        x=Box(LOW, HIGH),
        y=Box(0.0, 10.0),
        data=d.arrays(),
    )
    of = functools.partial(net_value_and_slope, d)

    def reference() -> float:
        """Descents from the best places of a grid, and from the start."""
        line = np.linspace(-3.0, 1.0, 6) if columns > 1000 else np.linspace(LOW, 1.0, 15)
        grid = [np.array([a, b]) for a in line for b in line]
        found = sorted(grid, key=lambda x: of(x)[0])[:5]
        return best(descent(of, x, (LOW, HIGH), 200) for x in [*found, np.zeros(2)]).F

    zeros = jnp.zeros(columns)
    return Person(
        number=20,
        name=f"elastic net {columns}",
        problem=problem,
        starts=(bx.Point(x=jnp.zeros(2), y={"p": zeros, "q": zeros}),),
        repaired=lambda x: of(np.ravel(x))[0],
        reference=reference,
        nested=lambda: descent(of, np.zeros(2), (LOW, HIGH)),
        ipopt=(lambda: _net_ipopt(d)) if columns < 1000 else None,
    )


def net() -> Person:
    return _net(250)


def wide_net() -> Person:
    return _net(2500)


class Grouped:
    """The sparse group lasso at x; each solution begins where the last ended."""

    def __init__(self, d: Split):
        self.d = d
        self.w = np.zeros(d.train.shape[1])
        self.curvature = np.linalg.norm(d.train, 2) ** 2 / len(d.train)

    def solve(self, x: np.ndarray) -> np.ndarray:
        """Proximal steps with momentum until the support holds, then Newton's method on it."""
        weights = np.exp(x)
        for _ in range(40):
            self.w = self._proximal(self.w, weights, 500)
            exact = self._newton(self.w, weights)
            if exact is not None:
                self.w = exact
                break
        return self.w

    def _step(self, w: np.ndarray, weights: np.ndarray) -> np.ndarray:
        """One proximal step: entries shrink by the last weight, then groups by their own."""
        X, t = self.d.train, self.d.target
        v = w - X.T @ (X @ w - t) / len(t) / self.curvature
        v = np.sign(v) * np.maximum(np.abs(v) - weights[-1] / self.curvature, 0)
        v = v.reshape(GROUPS, -1)
        norms = np.linalg.norm(v, axis=1)
        kept = np.maximum(1 - weights[:-1] / self.curvature / np.maximum(norms, 1e-300), 0)
        return (v * kept[:, None]).ravel()

    def _proximal(self, w: np.ndarray, weights: np.ndarray, steps: int) -> np.ndarray:
        ahead, momentum = w, 1.0
        for _ in range(steps):
            new = self._step(ahead, weights)
            if (ahead - new) @ (new - w) > 0:  # it overshoots: begin the momentum anew
                momentum = 1.0
            later = (1 + (1 + 4 * momentum**2) ** 0.5) / 2
            ahead, w, momentum = new + (momentum - 1) / later * (new - w), new, later
        return w

    def system(self, w: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, ...]:
        """The entries that are not zero, the slope there, its Hessian and what x does to it."""
        X, t = self.d.train, self.d.target
        free = np.flatnonzero(w)
        Z, group = X[:, free], free // (len(w) // GROUPS)
        norms = np.linalg.norm(w.reshape(GROUPS, -1), axis=1)[group]
        unit = w[free] / norms
        slope = Z.T @ (Z @ w[free] - t) / len(t)
        slope += weights[group] * unit + weights[-1] * np.sign(w[free])
        same = group[:, None] == group
        bent = (np.eye(len(free)) - same * np.outer(unit, unit)) * (weights[group] / norms)[:, None]
        of_x = np.zeros((len(free), len(weights)))
        of_x[np.arange(len(free)), group] = weights[group] * unit
        of_x[:, -1] = weights[-1] * np.sign(w[free])
        return free, slope, Z.T @ Z / len(t) + bent, of_x

    def _newton(self, w: np.ndarray, weights: np.ndarray) -> np.ndarray | None:
        """The solution with this support and these signs, if it is one."""
        signs = np.sign(w)
        for _ in range(20):
            free, slope, hessian, _ = self.system(w, weights)
            if not len(free) or np.linalg.norm(slope) < 1e-11:
                break
            step = np.linalg.lstsq(hessian, slope, rcond=1e-14)[0]
            w = w.copy()
            w[free] -= step
            if not np.array_equal(np.sign(w), signs):
                return None
        return w if np.linalg.norm(self._step(w, weights) - w) < 1e-9 else None

    def value_and_slope(self, x: np.ndarray) -> tuple[float, np.ndarray]:
        w = self.solve(x)
        value, of_w = held(self.d, w)
        free, _, hessian, of_x = self.system(w, np.exp(x))
        adjoint = np.linalg.lstsq(hessian, of_w[free], rcond=1e-14)[0]
        return value, -of_x.T @ adjoint


def _grouped(columns: int) -> Person:
    d = grouped_regression(0, columns)
    shape = (GROUPS, columns // GROUPS)

    def lower(x1: Array, y1: Array, y2: Array, d: Array) -> Array:
        norms = jnp.exp(x1[:-1]) @ jnp.sum(y2["v"] * y1.reshape(shape), axis=1)
        return error(y1, d["X"], d["t"]) + norms + jnp.exp(x1[-1]) * (y2["u"] @ y1)

    problem = bx.BilevelProblem(
        upper=lambda x1, x2, y1, y2, d: error(y1, d["V"], d["s"]),
        lower=lower,
        x1=Box(LOW, HIGH),
        y1=Box(-20.0, 20.0),
        y2={"v": L2Ball(1.0, axis=1), "u": Box(-1.0, 1.0)},
        data=d.arrays(),
    )
    y2 = {"v": jnp.zeros(shape), "u": jnp.zeros(columns)}
    start = bx.Point(x1=jnp.zeros(GROUPS + 1), y1=jnp.zeros(columns), y2=y2)
    descend = lambda x: descent(Grouped(d).value_and_slope, x, (LOW, HIGH), 300)
    starts = [np.zeros(GROUPS + 1), np.full(GROUPS + 1, -1.0), np.full(GROUPS + 1, -2.0)]
    return Person(
        number=21,
        name=f"group lasso {columns}",
        problem=problem,
        starts=(start,),
        repaired=lambda x: Grouped(d).value_and_slope(np.ravel(x))[0],
        reference=lambda: best(map(descend, starts)).F,
        nested=lambda: descend(np.zeros(GROUPS + 1)),
    )


def group_lasso() -> Person:
    return _grouped(600)


def wide_group_lasso() -> Person:
    return _grouped(1200)
