"""Small problems with known answers, one linear below and one wavy above: problems 16 and 17."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

import bilevax as bx
from bilevax.terms import Box
from people_instance import Answer, Array, Person
from people_ipopt import Level, relaxed
from people_search import on_a_line

# 16 is a problem whose answer is x = 1, y₁ = 2, y₂ = −3, with the value 0.
TOY = 100


def toy_value(x: np.ndarray, power: int) -> float:
    """y₁ = x + 1 and Σy₂ is given below; the upper level likes all entries of y₂ equal."""
    y2 = -(np.sum(x**power) + np.sum(x + 1)) / TOY
    return float(np.sum((x - 1) ** 2) + TOY * (y2 + 3) ** 2)


def _ipopt(power: int) -> Answer:
    import casadi as ca

    x, y = ca.MX.sym("x", TOY), ca.MX.sym("y", 2 * TOY)
    y1, y2 = y[:TOY], y[TOY:]
    below = 0.5 * ca.sumsqr(y1) - ca.dot(x, y1) + ca.sum1(y2)
    level = Level(y, below, equalities=ca.sum1(x**power) + ca.sum1(y))
    upper = ca.dot(y1 - 2, x - 1) + ca.sumsqr(y2 + 3)
    return relaxed(x, upper, [level], np.zeros(TOY), (-2.0, 2.0))


def _toy(name: str, power: int) -> Person:
    problem = bx.ConstrainedBilevelProblem(
        upper=lambda x, y: (y["y1"] - 2) @ (x - 1) + jnp.sum((y["y2"] + 3) ** 2),
        lower=lambda x, y: 0.5 * jnp.sum(y["y1"] ** 2) - x @ y["y1"] + jnp.sum(y["y2"]),
        equalities=lambda x, y: jnp.sum(x**power) + jnp.sum(y["y1"]) + jnp.sum(y["y2"]),
        x=Box(-2.0, 2.0),
        y=Box(-20.0, 20.0),
    )
    zeros = jnp.zeros(TOY)
    return Person(
        number=16,
        name=name,
        problem=problem,
        starts=(bx.Point(x=zeros, y={"y1": zeros, "y2": zeros}),),
        repaired=lambda x: toy_value(np.ravel(x), power),
        reference=lambda: toy_value(np.ones(TOY), power),
        published=0.0,
        ipopt=lambda: _ipopt(power),
    )


def linear() -> Person:
    return _toy("toy linear", 1)


def cubic() -> Person:
    return _toy("toy cubic", 3)


# 17 has y = x below, since the least of (y − 2x)² lies beyond y ≤ x.
def wavy_value(x: np.ndarray) -> float:
    at = float(np.ravel(x)[0])
    return float(np.exp(2 - at) / (2 + np.cos(6 * at)) + 0.5 * np.log((4 * at - 2) ** 2 + 1))


def _wavy_ipopt() -> Answer:
    import casadi as ca

    x, y = ca.MX.sym("x"), ca.MX.sym("y")
    upper = ca.exp(2 - y) / (2 + ca.cos(6 * x)) + 0.5 * ca.log((4 * x - 2) ** 2 + 1)
    return relaxed(x, upper, [Level(y, (y - 2 * x) ** 2, y - x)], np.zeros(1), (0.0, 3.0))


def wavy() -> Person:
    def upper(x: Array, y: Array) -> Array:
        return jnp.exp(2 - y) / (2 + jnp.cos(6 * x)) + 0.5 * jnp.log((4 * x - 2) ** 2 + 1)

    problem = bx.ConstrainedBilevelProblem(
        upper=upper,
        lower=lambda x, y: (y - 2 * x) ** 2,
        constraints=lambda x, y: y - x,
        x=Box(0.0, 3.0),
        y=Box(-1.0, 4.0),
    )
    places = np.linspace(0.0, 3.0, 8)
    return Person(
        number=17,
        name="many minima",
        problem=problem,
        starts=tuple(bx.Point(x=jnp.asarray(s), y=jnp.asarray(s)) for s in places),
        repaired=wavy_value,
        reference=lambda: on_a_line(wavy_value, 0.0, 3.0, 301),
        published=1.72188,
        ipopt=_wavy_ipopt,
    )
