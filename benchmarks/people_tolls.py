"""Tolls above, flows below: problem 19, where arcs fill up, and a small one with linear costs."""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np
from scipy.optimize import linprog

import bilevax as bx
from bilevax.terms import Box
from people_instance import Answer, Person
from people_ipopt import Level, relaxed
from people_qp import ACTIVE, Program, slope, solve
from people_search import best, descent

NODES, SHARE, MOST, CAPACITY = 12, 0.8, 3.0, 2.0
Arrays = dict[str, np.ndarray]


@functools.cache
def network() -> Arrays:
    """Arcs between random pairs of nodes, a third of them with tolls; four nodes send to four.

    `N` has a row for each node but the last, whose balance follows from the others.
    """
    rng = np.random.default_rng(0)
    pairs = [(i, j) for i in range(NODES) for j in range(NODES) if i != j]
    arcs = np.array(pairs)[rng.random(len(pairs)) < SHARE]
    places = rng.uniform(size=(NODES, 2))
    incidence = np.zeros((NODES, len(arcs)))
    incidence[arcs[:, 0], np.arange(len(arcs))] = 1.0
    incidence[arcs[:, 1], np.arange(len(arcs))] = -1.0
    supply = np.concatenate([rng.uniform(0.5, 1.5, size=4), np.zeros(4)])
    demand = rng.uniform(0.5, 1.5, size=4)
    supply = np.concatenate([supply, -demand * supply.sum() / demand.sum()])
    tolled = np.sort(rng.choice(len(arcs), len(arcs) // 3, replace=False))
    return {
        "N": incidence[:-1],
        "supply": supply[:-1],
        "cost": np.linalg.norm(places[arcs[:, 0]] - places[arcs[:, 1]], axis=1),
        "bent": rng.uniform(0.2, 1.0, size=len(arcs)),
        "T": np.eye(len(arcs))[tolled],  # picks the tolled arcs
    }


def revenue_value_and_slope(x: np.ndarray) -> tuple[float, np.ndarray]:
    """Minus the revenue of the tolls x, and its derivative."""
    m = network()
    size = len(m["cost"])
    eye, hessian = np.eye(size), np.diag(m["bent"])
    rows = np.vstack([-eye, eye])
    ends = np.concatenate([np.zeros(size), np.full(size, CAPACITY)])
    tolls = m["T"].T @ x
    found = solve(Program(hessian, m["cost"] + tolls, rows, ends, m["N"], m["supply"]))
    held = np.vstack([rows[found.lam > ACTIVE], m["N"]])
    change = slope(hessian, held, -tolls, m["T"].T, np.zeros((len(held), len(x))))
    return -float(tolls @ found.y), change - m["T"] @ found.y


def _network_ipopt(start: np.ndarray) -> Answer:
    import casadi as ca

    m = {name: ca.DM(array) for name, array in network().items()}
    incidence = ca.sparsify(m["N"])
    x, y = ca.MX.sym("x", m["T"].shape[0]), ca.MX.sym("y", m["T"].shape[1])
    tolls = ca.sparsify(m["T"]).T @ x
    below = ca.dot(m["cost"] + tolls, y) + 0.5 * ca.dot(m["bent"], y**2)
    balance = incidence @ y - m["supply"]
    level = Level(y, below, equalities=balance, low=0.0, high=CAPACITY)
    return relaxed(x, -ca.dot(tolls, y), [level], start, (0.0, MOST))


def filling() -> Person:
    m = network()
    tolled, arcs = m["T"].shape

    problem = bx.ConstrainedBilevelProblem(
        upper=lambda x, y, m: -x @ (m["T"] @ y),
        lower=lambda x, y, m: (m["cost"] + m["T"].T @ x) @ y + 0.5 * m["bent"] @ y**2,
        equalities=lambda x, y, m: m["N"] @ y - m["supply"],
        x=Box(0.0, MOST),
        y=Box(0.0, CAPACITY),
        data=m,
    )
    of = revenue_value_and_slope

    def reference() -> float:
        """The best of IPOPT and of nested descents from several starts."""
        rng = np.random.default_rng(0)
        starts = [np.zeros(tolled), *rng.uniform(0.0, 1.0, size=(8, tolled))]
        nested = best(descent(of, s, (0.0, MOST), 300) for s in starts).F
        return min(nested, *(of(_network_ipopt(s).x)[0] for s in starts[:5]))

    return Person(
        number=19,
        name="tolls filling",
        problem=problem,
        starts=(bx.Point(x=jnp.zeros(tolled), y=jnp.zeros(arcs)),),
        repaired=lambda x: of(np.clip(np.ravel(x), 0.0, MOST))[0],
        reference=reference,
        ipopt=lambda: _network_ipopt(np.zeros(tolled)),
    )


# One traveller from node 0 to node 5: arcs with their costs, and those with tolls.
ARCS = (
    *((0, 1, 1.0), (1, 2, 1.0), (2, 5, 1.0), (0, 3, 4.0), (3, 5, 1.0)),
    *((1, 4, 3.0), (4, 5, 4.0), (0, 5, 14.0), (2, 4, 1.0), (3, 4, 2.0)),
)
TOLLED = (1, 2, 4)
FINE = 10.0  # the greatest toll
#: Routes that cost at most this much more than the cheapest are cheapest, as answers are not exact.
TIE = 1e-5


@functools.cache
def routes() -> np.ndarray:
    """All routes from the first node to the last, a row of zeros and ones for each."""
    found = []

    def extend(node: int, seen: tuple[int, ...], used: tuple[int, ...]) -> None:
        if node == 5:
            found.append(np.isin(np.arange(len(ARCS)), used).astype(float))
            return
        for arc, (begin, end, _) in enumerate(ARCS):
            if begin == node and end not in seen:
                extend(end, (*seen, end), (*used, arc))

    extend(0, (0,), ())
    return np.array(found)


def taken(x: np.ndarray) -> float:
    """Minus the revenue of the cheapest route; of several the one that brings most."""
    costs = routes() @ np.array([cost for *_, cost in ARCS])
    tolls = routes()[:, TOLLED] @ np.ravel(x)
    cheapest = costs + tolls <= (costs + tolls).min() + TIE
    return -float(tolls[cheapest].max())


def enumerated() -> float:
    """For every route the tolls that bring most while it is cheapest: the best of them."""
    costs = routes() @ np.array([cost for *_, cost in ARCS])
    used = routes()[:, TOLLED]
    bounds = [(0.0, FINE)] * len(TOLLED)
    values = []
    for own, cost in zip(used, costs):
        found = linprog(-own, A_ub=own - used, b_ub=costs - cost, bounds=bounds)
        if found.status == 0:
            values.append(found.fun)
    return float(min(values))


def _linear_ipopt() -> Answer:
    import casadi as ca

    x, y = ca.MX.sym("x", len(TOLLED)), ca.MX.sym("y", len(ARCS))
    cost, balance = ca.DM([cost for *_, cost in ARCS]), ca.DM(_balance())
    revenue = sum(x[i] * y[arc] for i, arc in enumerate(TOLLED))
    level = Level(
        y,
        ca.dot(cost, y) + revenue,
        equalities=balance @ y - ca.DM(_ends()),
        low=0.0,
        high=1.0,
        start=0.5,
    )
    return relaxed(x, -revenue, [level], np.zeros(len(TOLLED)), (0.0, FINE))


def _balance() -> np.ndarray:
    """What leaves each node but the last, less what enters it."""
    matrix = np.zeros((5, len(ARCS)))
    for arc, (begin, end, _) in enumerate(ARCS):
        matrix[begin, arc] += 1.0
        if end < 5:
            matrix[end, arc] -= 1.0
    return matrix


def _ends() -> np.ndarray:
    return np.array([1.0, 0.0, 0.0, 0.0, 0.0])


def _starts() -> list[np.ndarray]:
    """No tolls, and seven draws."""
    drawn = np.random.default_rng(0).uniform(0.0, FINE, size=(7, len(TOLLED)))
    return [np.zeros(len(TOLLED)), *drawn]


def linear() -> Person:
    picked = np.array(TOLLED)
    problem = bx.ConstrainedBilevelProblem(
        upper=lambda x, y, m: -x @ y[picked],
        lower=lambda x, y, m: m["cost"] @ y + x @ y[picked],
        equalities=lambda x, y, m: m["N"] @ y - m["ends"],
        x=Box(0.0, FINE),
        y=Box(0.0, 1.0),
        data={"N": _balance(), "ends": _ends(), "cost": np.array([cost for *_, cost in ARCS])},
    )
    return Person(
        number=24,
        name="tolls linear",
        problem=problem,
        starts=tuple(bx.Point(x=jnp.asarray(x), y=jnp.zeros(len(ARCS))) for x in _starts()),
        repaired=taken,
        reference=enumerated,
        ipopt=_linear_ipopt,
    )
