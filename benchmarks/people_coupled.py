"""Generated quadratics with rows that are bilinear in x and y: problem 18."""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np

import bilevax as bx
from bilevax.terms import Box
from people_instance import Answer, Array, Person
from people_ipopt import Level, relaxed
from people_qp import ACTIVE, Program, slope, solve
from people_search import best, descent

Arrays = dict[str, np.ndarray]

SIZE, BILINEAR = 60, 20


def coupled_arrays(seed: int) -> Arrays:
    """Both objectives are convex; y = 0 is strictly inside, so that every x has an answer."""
    rng = np.random.default_rng(seed)
    square = lambda n: (lambda G: G @ G.T / n + 0.1 * np.eye(n))(rng.normal(size=(n, n)))
    return {
        "A": square(2 * SIZE),
        "b": rng.normal(size=2 * SIZE),
        "C": square(SIZE),
        "d": rng.normal(size=SIZE),
        "D": rng.normal(size=(SIZE, SIZE)) / SIZE**0.5,
        "E": rng.normal(size=(BILINEAR, SIZE, SIZE)) / SIZE,
        "g": rng.uniform(0.1, 0.5, size=BILINEAR),
    }


def coupled_value_and_slope(m: Arrays, x: np.ndarray) -> tuple[float, np.ndarray]:
    eye = np.eye(SIZE)
    rows = np.vstack([x @ m["E"], eye, -eye])
    ends = np.concatenate([m["g"], np.ones(2 * SIZE)])
    found = solve(Program(m["C"], m["d"] + x @ m["D"], rows, ends))
    z = np.concatenate([x, found.y])
    whole = m["A"] @ z + m["b"]
    lam = found.lam[:BILINEAR]
    active = found.lam > ACTIVE
    of_x = np.vstack([m["E"] @ found.y, np.zeros((2 * SIZE, SIZE))])[active]
    lagrangian_yx = m["D"].T + np.einsum("r,rij->ji", lam, m["E"])
    change = slope(m["C"], rows[active], whole[SIZE:], lagrangian_yx, of_x)
    return float(0.5 * z @ m["A"] @ z + m["b"] @ z), whole[:SIZE] + change


def _coupled_ipopt(m: Arrays, start: np.ndarray) -> Answer:
    import casadi as ca

    x, y = ca.MX.sym("x", SIZE), ca.MX.sym("y", SIZE)
    z = ca.vertcat(x, y)
    a = {name: ca.DM(m[name]) for name in ("A", "b", "C", "d", "D", "g")}
    below = 0.5 * ca.dot(y, a["C"] @ y) + ca.dot(a["d"], y) + ca.dot(x, a["D"] @ y)
    rows = ca.vertcat(*(ca.dot(x, ca.DM(E) @ y) for E in m["E"])) - a["g"]
    upper = 0.5 * ca.dot(z, a["A"] @ z) + ca.dot(a["b"], z)
    level = Level(y, below, constraints=rows, low=-1.0, high=1.0)
    return relaxed(x, upper, [level], start, (-1.0, 1.0))


def coupled() -> Person:
    def upper(x: Array, y: Array, m: Array) -> Array:
        z = jnp.concatenate([x, y])
        return 0.5 * z @ m["A"] @ z + m["b"] @ z

    m = coupled_arrays(4)
    problem = bx.ConstrainedBilevelProblem(
        upper=upper,
        lower=lambda x, y, m: 0.5 * y @ m["C"] @ y + m["d"] @ y + x @ m["D"] @ y,
        constraints=lambda x, y, m: jnp.einsum("i,rij,j->r", x, m["E"], y) - m["g"],
        x=Box(-1.0, 1.0),
        y=Box(-1.0, 1.0),
        data=m,
    )
    of = functools.partial(coupled_value_and_slope, m)

    def reference() -> float:
        """The best of nested descents from several starts, and of IPOPT."""
        starts = [np.zeros(SIZE), *np.random.default_rng(0).uniform(-1, 1, size=(6, SIZE))]
        nested = best(descent(of, s, (-1.0, 1.0), 300) for s in starts).F
        return min(nested, of(_coupled_ipopt(m, starts[0]).x)[0])

    return Person(
        number=18,
        name="coupled",
        problem=problem,
        starts=(bx.Point(x=jnp.zeros(SIZE), y=jnp.zeros(SIZE)),),
        repaired=lambda x: of(np.ravel(x))[0],
        reference=reference,
        ipopt=lambda: _coupled_ipopt(m, np.zeros(SIZE)),
    )
