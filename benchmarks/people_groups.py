"""The worst group's loss with a tuned ridge: problem 11, in two sizes."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from scipy.optimize import minimize
from scipy.special import expit

import bilevax as bx
from bilevax.terms import Box, Simplex
from people_data import adult
from people_instance import Answer, Array, Person
from people_ipopt import Level, relaxed
from people_search import on_a_line

LOW, HIGH, GROUPS = -8.0, 2.0, 4
Arrays = dict[str, np.ndarray]


@functools.cache
def arrays(rows: int) -> Arrays:
    """Rows times their labels, and matrices that make of the rows' losses the groups' means."""
    split, groups, held_groups = adult(0, rows)
    means = lambda g: np.eye(GROUPS)[g].T / np.bincount(g, minlength=GROUPS)[:, None]
    return {
        "X": split.train * split.target[:, None],
        "M": means(groups),
        "V": split.held * split.held_target[:, None],
        "N": means(held_groups),
    }


def group_losses(w: Array, X: Array, M: Array) -> Array:
    return M @ jax.nn.softplus(-X @ w)


def losses_of(d: Arrays, w: np.ndarray) -> np.ndarray:
    return d["M"] @ np.logaddexp(0, -d["X"] @ w)


def trained(d: Arrays, mix: np.ndarray, ridge: float, w: np.ndarray) -> np.ndarray:
    """The least of the mixed group losses and the ridge, by Newton's method from w."""
    X, weights = d["X"], mix @ d["M"]
    value = lambda w: weights @ np.logaddexp(0, -X @ w) + 0.5 * ridge * w @ w
    for _ in range(100):
        p = expit(-X @ w)
        gradient = -X.T @ (weights * p) + ridge * w
        if np.linalg.norm(gradient) < 1e-12:
            break
        hessian = (X * (weights * p * (1 - p))[:, None]).T @ X + ridge * np.eye(len(w))
        step = np.linalg.solve(hessian, gradient)
        size = 1.0
        while value(w - size * step) > value(w) - 1e-4 * size * gradient @ step + 1e-15:
            size /= 2
            if size < 1e-8:
                return w
        w = w - size * step
    return w


class Saddle:
    """The saddle point at x: the concave dual in the groups' mix, Newton's method in w."""

    def __init__(self, d: Arrays):
        self.d = d
        self.w = np.zeros(d["X"].shape[1])
        self.mix = np.full(GROUPS, 1 / GROUPS)

    def solve(self, x: float) -> np.ndarray:
        ridge = np.exp(x)

        def negative(mix: np.ndarray) -> tuple[float, np.ndarray]:
            self.w = trained(self.d, mix, ridge, self.w)
            losses = losses_of(self.d, self.w)
            return -float(mix @ losses + 0.5 * ridge * self.w @ self.w), -losses

        total = {"type": "eq", "fun": lambda mix: mix.sum() - 1, "jac": lambda mix: np.ones(GROUPS)}
        found = minimize(
            negative,
            self.mix,
            jac=True,
            bounds=[(0, 1)] * GROUPS,
            constraints=[total],
            method="SLSQP",
            options={"ftol": 1e-15, "maxiter": 200},
        )
        mix = np.clip(found.x, 0, 1)
        self.mix = mix / mix.sum()
        self.w = self._exactly(ridge)
        return self.w

    def _exactly(self, ridge: float) -> np.ndarray:
        """Newton's method on the conditions of w, the mix of the groups in it, and their loss."""
        d = self.d
        inside = np.flatnonzero(self.mix > 1e-6)
        count, M = len(inside), d["M"][inside]
        w, mix, worst = self.w.copy(), self.mix[inside], (losses_of(d, self.w)[inside]).max()
        for _ in range(30):
            p = expit(-d["X"] @ w)
            slopes = -(M * p) @ d["X"]
            rest = np.concatenate(
                [mix @ slopes + ridge * w, losses_of(d, w)[inside] - worst, [mix.sum() - 1]]
            )
            if np.linalg.norm(rest) < 1e-13:
                break
            bent = (d["X"] * ((mix @ M) * p * (1 - p))[:, None]).T @ d["X"] + ridge * np.eye(len(w))
            border = np.ones((count, 1))
            matrix = np.block(
                [
                    [bent, slopes.T, np.zeros((len(w), 1))],
                    [slopes, np.zeros((count, count)), -border],
                    [np.zeros((1, len(w))), border.T, np.zeros((1, 1))],
                ]
            )
            step = np.linalg.solve(matrix, rest)
            w, mix = w - step[: len(w)], mix - step[len(w) : -1]
            worst -= step[-1]
        # Rather the answer of the dual than one of other groups.
        held = losses_of(d, w).max() <= worst + 1e-9 and mix.min() >= -1e-9
        return w if held else self.w

    def worst(self, x: np.ndarray) -> float:
        w = self.solve(float(np.ravel(x)[0]))
        return float((self.d["N"] @ np.logaddexp(0, -self.d["V"] @ w)).max())


def _ipopt(d: Arrays) -> Answer:
    import casadi as ca

    m = {name: ca.DM(array) for name, array in d.items()}
    x, w = ca.MX.sym("x", 2), ca.MX.sym("w", d["X"].shape[1])  # x, and the worst group's loss
    mix = ca.MX.sym("mix", GROUPS)
    of_groups = lambda X, M: M @ ca.log1p(ca.exp(-X @ w))
    below = ca.dot(mix, of_groups(m["X"], m["M"])) + 0.5 * ca.exp(x[0]) * ca.sumsqr(w)
    total = ca.sum1(mix) - 1
    levels = [Level(w, below), Level(mix, -below, equalities=total, low=0.0, start=1 / GROUPS)]
    bounds = (np.array([LOW, -np.inf]), np.array([HIGH, np.inf]))
    over = of_groups(m["V"], m["N"]) - x[1]
    found = relaxed(x, x[1], levels, np.array([-3.0, 1.0]), bounds, upper_constraints=over)
    return dataclasses.replace(found, x=found.x[:1])


def _person(rows: int) -> Person:
    d = arrays(rows)
    columns = d["X"].shape[1]
    problem = bx.BilevelProblem(
        upper=lambda x1, x2, y1, y2, d: x2 @ group_losses(y1, d["V"], d["N"]),
        lower=lambda x1, y1, y2, d: (
            y2 @ group_losses(y1, d["X"], d["M"]) + 0.5 * jnp.exp(x1) * jnp.sum(y1**2)
        ),
        x1=Box(LOW, HIGH),
        x2=Simplex(),
        y1=Box(-10.0, 10.0),
        y2=Simplex(),
        data=d,
    )
    even = jnp.full(GROUPS, 1 / GROUPS)
    start = bx.Point(x1=jnp.asarray(-3.0), x2=even, y1=jnp.zeros(columns), y2=even)
    return Person(
        number=11,
        name=f"groups {rows}",
        problem=problem,
        starts=(start,),
        repaired=lambda x: Saddle(d).worst(x),
        reference=lambda: on_a_line(Saddle(d).worst, LOW, HIGH, 41),
        ipopt=lambda: _ipopt(d),
    )


def few() -> Person:
    return _person(600)


def many() -> Person:
    return _person(1500)
