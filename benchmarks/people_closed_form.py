"""A quadratic above a quadratic: problem 23."""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np

import bilevax as bx
from bilevax.terms import Box
from people_instance import Answer, Array, Person
from people_ipopt import Level, relaxed
from people_search import descent

Arrays = dict[str, np.ndarray]

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
