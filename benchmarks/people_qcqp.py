"""A quadratic program with a ball and rows that move with x below: problem 10, in three sizes."""

from __future__ import annotations

import functools
import warnings

import cvxpy as cp
import jax.numpy as jnp
import numpy as np

import bilevax as bx
from bilevax.terms import Box
from people_instance import Answer, Person
from people_ipopt import Level, relaxed
from people_qp import slope
from people_search import best, descent

Arrays = dict[str, np.ndarray]
SIZES = {"small": (4, 6), "medium": (10, 15), "large": (30, 40)}
REACH = 1.0  # of x


def arrays(nx: int, ny: int) -> Arrays:
    """Q has full rank by its 0.1 alone; half as many rows as variables move with x."""
    rng = np.random.default_rng(nx)
    rows = ny // 2
    G = rng.normal(size=(ny, rows)) / ny**0.5
    return {
        "Q": G @ G.T + 0.1 * np.eye(ny),
        "P": rng.normal(size=(ny, nx)) / nx**0.5,
        "q": rng.normal(size=ny),
        "C": 0.25 * rng.normal(size=(ny, nx)) / nx**0.5,
        "A": rng.normal(size=(rows, ny)) / ny**0.5,
        "B": rng.normal(size=(rows, nx)) / nx**0.5,
        "b": rng.uniform(0.3, 0.8, size=rows),
        "x0": rng.normal(size=nx),
        "y0": rng.normal(size=ny),
    }


def problem(d: Arrays) -> bx.ConstrainedBilevelProblem:
    return bx.ConstrainedBilevelProblem(
        upper=lambda x, y, d: 0.5 * jnp.sum((x - d["x0"]) ** 2) + 0.5 * jnp.sum((y - d["y0"]) ** 2),
        lower=lambda x, y, d: 0.5 * y @ d["Q"] @ y + (d["P"] @ x + d["q"]) @ y,
        constraints=lambda x, y, d: {
            "ball": jnp.sum((y - d["C"] @ x) ** 2) - 1,
            "rows": d["A"] @ y - d["b"] - 0.2 * d["B"] @ x,
        },
        x=Box(-REACH, REACH),
        y=Box(-5.0, 5.0),
        data=d,
    )


class Below:
    """The lower level as a program of cvxpy with x as a parameter."""

    def __init__(self, d: Arrays):
        self.d = d
        ny, nx = d["P"].shape
        self.x, self.y = cp.Parameter(nx), cp.Variable(ny)
        root = np.linalg.cholesky(d["Q"]).T
        linear = d["P"] @ self.x + d["q"]
        self.ball = cp.norm(self.y - d["C"] @ self.x) <= 1
        self.rows = d["A"] @ self.y <= d["b"] + 0.2 * d["B"] @ self.x
        objective = 0.5 * cp.sum_squares(root @ self.y) + linear @ self.y
        self.program = cp.Problem(cp.Minimize(objective), [self.ball, self.rows])

    def solve(self, x: np.ndarray) -> tuple[np.ndarray, float, np.ndarray]:
        """y, the multiplier of ‖y − Cx‖² ≤ 1, and those of the rows."""
        self.x.value = np.asarray(x, float)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # what is not accurate is made so below
            self.program.solve(solver=cp.CLARABEL)
        y, rows = self.y.value, np.ravel(np.asarray(self.rows.dual_value, float))
        if y is None:
            raise RuntimeError("the lower level has no solution at this x")
        # ‖·‖ ≤ 1 and ‖·‖² ≤ 1 have slopes that differ by the factor 2‖·‖, here 2.
        ball = float(np.ravel(np.asarray(self.ball.dual_value, float))[0]) / 2
        for least in (1e-4, 1e-5, 1e-6, 1e-3, 1e-2):
            exact = self._exactly(x, y, ball * (ball > least), rows * (rows > least))
            if exact is not None:
                return exact
        return y, ball, rows

    def _exactly(
        self, x: np.ndarray, y: np.ndarray, ball: float, rows: np.ndarray
    ) -> tuple[np.ndarray, float, np.ndarray] | None:
        """Newton's method on the conditions, with the constraints active whose multipliers count.

        None if what it finds is no solution.
        """
        d, center = self.d, self.d["C"] @ x
        ends = d["b"] + 0.2 * d["B"] @ x
        active, touched = np.flatnonzero(rows), ball > 0
        for _ in range(30):
            out = y - center
            held = [d["A"][active]] + ([2 * out[None]] if touched else [])
            J = np.vstack(held)
            lam = np.concatenate([rows[active], [ball] if touched else []])
            over = np.concatenate(
                [d["A"][active] @ y - ends[active], [out @ out - 1][: int(touched)]]
            )
            rest = np.concatenate([d["Q"] @ y + d["P"] @ x + d["q"] + J.T @ lam, over])
            if np.linalg.norm(rest) < 1e-12:
                break
            hessian = d["Q"] + 2 * ball * np.eye(len(y))
            matrix = np.block([[hessian, J.T], [J, np.zeros((len(J), len(J)))]])
            step = np.linalg.lstsq(matrix, rest, rcond=1e-14)[0]
            y, lam = y - step[: len(y)], lam - step[len(y) :]
            rows = np.zeros_like(rows)
            rows[active] = lam[: len(active)]
            ball = float(lam[-1]) if touched else 0.0
        else:
            return None
        inside = np.sum((y - center) ** 2) <= 1 + 1e-10 and np.all(d["A"] @ y <= ends + 1e-10)
        return (y, ball, rows) if inside and ball >= 0 and np.all(rows >= 0) else None

    def value_and_slope(self, x: np.ndarray) -> tuple[float, np.ndarray]:
        d = self.d
        y, ball, rows = self.solve(x)
        rest_x, rest_y, out = x - d["x0"], y - d["y0"], y - d["C"] @ x
        active = rows > 0
        hessian = d["Q"] + 2 * ball * np.eye(len(y))
        lagrangian_yx = d["P"] - 2 * ball * d["C"]
        of_y, of_x = [d["A"][active]], [-0.2 * d["B"][active]]
        if ball > 0:
            of_y.append(2 * out[None])
            of_x.append(-2 * (d["C"].T @ out)[None])
        change = slope(hessian, np.vstack(of_y), rest_y, lagrangian_yx, np.vstack(of_x))
        return 0.5 * float(rest_x @ rest_x + rest_y @ rest_y), rest_x + change


def _ipopt(d: Arrays, start: np.ndarray) -> Answer:
    import casadi as ca

    m = {name: ca.DM(array) for name, array in d.items()}
    ny, nx = d["P"].shape
    x, y = ca.MX.sym("x", nx), ca.MX.sym("y", ny)
    rows = m["A"] @ y - m["b"] - 0.2 * m["B"] @ x
    constraints = ca.vertcat(ca.sumsqr(y - m["C"] @ x) - 1, rows)
    below = 0.5 * ca.dot(y, m["Q"] @ y) + ca.dot(m["P"] @ x + m["q"], y)
    upper = 0.5 * ca.sumsqr(x - m["x0"]) + 0.5 * ca.sumsqr(y - m["y0"])
    level = Level(y, below, constraints=constraints)
    return relaxed(x, upper, [level], start, (-REACH, REACH))


def _person(size: str) -> Person:
    nx, ny = SIZES[size]
    d = arrays(nx, ny)

    @functools.cache
    def below() -> Below:
        return Below(d)

    def reference() -> float:
        """The best of nested descents and of IPOPT, each from several starts."""
        starts = [np.zeros(nx), *np.random.default_rng(0).uniform(-REACH, REACH, size=(8, nx))]
        of = below().value_and_slope
        nested = best(descent(of, s, (-REACH, REACH), 200) for s in starts).F
        return min(nested, *(of(_ipopt(d, s).x)[0] for s in starts[:4]))

    return Person(
        number=10,
        name=f"qcqp {size}",
        problem=problem(d),
        starts=(bx.Point(x=jnp.zeros(nx), y=jnp.zeros(ny)),),
        repaired=lambda x: below().value_and_slope(np.ravel(x))[0],
        reference=reference,
        ipopt=lambda: _ipopt(d, np.zeros(nx)),
    )


def small() -> Person:
    return _person("small")


def medium() -> Person:
    return _person("medium")


def large() -> Person:
    return _person("large")
