"""IPOPT on the conditions of the lower level, complementarity relaxed from 0.1 to 1e-8.

What a user with constraints below would run instead: casadi brings IPOPT and the derivatives.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from people_instance import Answer

RELAXED = (1e-1, 1e-2, 1e-4, 1e-6, 1e-8)
SECONDS = 60.0


@dataclass(frozen=True)
class Level:
    """One player of the lower level: min over y of `objective` with its constraints.

    A saddle point has two of them, the second of which minimises the negative. Bounds of y that are
    never active may be left out.
    """

    y: Any
    objective: Any
    constraints: Any = None  # ≤ 0
    equalities: Any = None  # = 0
    low: Any = None
    high: Any = None
    start: Any = field(default=0.0)


def relaxed(
    x: Any,
    upper: Any,
    levels: list[Level],
    start: np.ndarray,
    bounds: tuple[Any, Any],
    upper_constraints: Any = None,
    upper_equalities: Any = None,
    seconds: float = SECONDS,
) -> Answer:
    """The answer of a few warm-started runs, each with smaller products of complements."""
    import casadi as ca

    unknowns, first, lows, highs = [x], [np.asarray(start, float)], [bounds[0]], [bounds[1]]
    zero, below, products = [], [], []

    def unknown(symbol: Any, value: Any, low: Any, high: Any) -> None:
        unknowns.append(symbol)
        first.append(value)
        lows.append(low)
        highs.append(high)

    for n, level in enumerate(levels):
        size = level.y.shape[0]
        unknown(
            level.y,
            level.start,
            -np.inf if level.low is None else level.low,
            np.inf if level.high is None else level.high,
        )
        lagrangian, pairs = level.objective, []
        if level.constraints is not None:
            pairs.append((level.constraints, f"lam{n}"))
        if level.low is not None:
            pairs.append((ca.DM(np.broadcast_to(level.low, size)) - level.y, f"low{n}"))
        if level.high is not None:
            pairs.append((level.y - ca.DM(np.broadcast_to(level.high, size)), f"high{n}"))
        for values, name in pairs:
            dual = ca.MX.sym(name, values.shape[0])
            unknown(dual, 0.1, 0.0, np.inf)
            lagrangian += ca.dot(dual, values)
            products.append(-dual * values)
        if level.constraints is not None:
            below.append(level.constraints)
        if level.equalities is not None:
            dual = ca.MX.sym(f"nu{n}", level.equalities.shape[0])
            unknown(dual, 0.0, -np.inf, np.inf)
            lagrangian += ca.dot(dual, level.equalities)
            zero.append(level.equalities)
        zero.append(ca.gradient(lagrangian, level.y))
    if upper_constraints is not None:
        below.append(upper_constraints)
    if upper_equalities is not None:
        zero.append(upper_equalities)

    sizes = [u.shape[0] for u in unknowns]
    spread = lambda values: np.concatenate([np.broadcast_to(v, n) for v, n in zip(values, sizes)])
    point, low, high = spread(first), spread(lows), spread(highs)
    count = lambda parts: sum(p.shape[0] for p in parts)
    least = np.concatenate(
        [np.zeros(count(zero)), np.full(count(below) + count(products), -np.inf)]
    )
    options = {
        "ipopt.print_level": 0,
        "print_time": False,
        "ipopt.sb": "yes",
        "error_on_fail": False,
    }
    options |= {"ipopt.max_iter": 500, "ipopt.tol": 1e-9}
    problem = {"x": ca.vertcat(*unknowns), "f": upper, "g": ca.vertcat(*zero, *below, *products)}

    begun, iterations, success, found = time.perf_counter(), 0, False, float("nan")
    solver, duals = None, {}
    for step, relaxation in enumerate(RELAXED if products else RELAXED[-1:]):
        left = seconds - (time.perf_counter() - begun)
        if left <= 0:
            success = False
            break
        if solver is None or step == 1:  # the later steps begin at the last one's multipliers
            warm = {"ipopt.warm_start_init_point": "yes", "ipopt.mu_init": 1e-4} if step else {}
            timed = {"ipopt.max_wall_time": left / 2 if step else left}
            solver = ca.nlpsol("people", "ipopt", problem, options | warm | timed)
        most = np.concatenate(
            [np.zeros(count(zero) + count(below)), np.full(count(products), relaxation)]
        )
        given = {"x0": point, "lbx": low, "ubx": high, "lbg": least, "ubg": most}
        result = solver(**given, **duals)
        duals = {"lam_x0": result["lam_x"], "lam_g0": result["lam_g"]}
        point = np.asarray(result["x"]).ravel()
        stats = solver.stats()
        iterations, success = iterations + stats["iter_count"], bool(stats["success"])
        found = float(result["f"])
    return Answer(found, point[: sizes[0]], time.perf_counter() - begun, iterations, success)
