"""Searches for the least value of a function of x alone, as a user would write them with SciPy."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable

import numpy as np
from scipy.optimize import minimize, minimize_scalar

from people_instance import Answer, Value

Slope = Callable[[np.ndarray], tuple[float, np.ndarray]]


def on_a_line(value: Value, low: float, high: float, points: int = 61) -> float:
    """The least value on an interval: a grid, and a bracket around each of its lowest places."""
    grid = np.linspace(low, high, points)
    values = np.array([value(np.array([x])) for x in grid])
    ends = lambda i: (grid[max(i - 1, 0)], grid[min(i + 1, points - 1)])
    lowest = [values.min()]
    padded = np.concatenate([[np.inf], values, [np.inf]])
    valleys = np.flatnonzero((values <= padded[:-2]) & (values <= padded[2:]))
    for i in sorted(valleys, key=lambda i: values[i])[:3]:
        options = {"xatol": 1e-9}
        found = minimize_scalar(
            lambda x: value(np.array([x])), bounds=ends(i), method="bounded", options=options
        )
        lowest.append(found.fun)
    return float(min(lowest))


def descent(
    value_and_slope: Slope,
    start: np.ndarray,
    bounds: tuple[float, float] | list[tuple[float, float]],
    iterations: int = 1000,
) -> Answer:
    """L-BFGS-B on the value of x with its gradient."""
    begun = time.perf_counter()
    pairs = [bounds] * len(start) if isinstance(bounds, tuple) else bounds
    options = {"maxiter": iterations, "maxfun": 2 * iterations, "ftol": 1e-13, "gtol": 1e-8}
    found = minimize(
        value_and_slope, start, jac=True, bounds=pairs, method="L-BFGS-B", options=options
    )
    seconds = time.perf_counter() - begun
    return Answer(float(found.fun), found.x, seconds, int(found.nit), bool(found.success))


def hops(
    value_and_slope: Slope,
    start: np.ndarray,
    bounds: tuple[float, float],
    count: int,
    size: float,
    seed: int = 0,
) -> Answer:
    """Descents from random places near the best so far, for values with kinks and many valleys.

    The size of the hops alternates between `size` and a tenth of it.
    """
    rng = np.random.default_rng(seed)
    found = descent(value_and_slope, start, bounds)
    for hop in range(count):
        reach = size if hop % 2 else size / 10
        near = np.clip(found.x + reach * rng.normal(size=len(start)), *bounds)
        found = best([found, descent(value_and_slope, near, bounds)])
    return found


def polished(
    value: Value, x: np.ndarray, inside: Callable[[np.ndarray], np.ndarray], seconds: float
) -> float:
    """The least value that a local search from x finds in some seconds, without slopes.

    Nelder and Mead's method for a few variables, L-BFGS with differences for more; `inside` brings
    a place back to the domain.
    """
    lowest, ends = value(x), time.perf_counter() + seconds

    class Late(Exception):
        pass

    def at(place: np.ndarray) -> float:
        nonlocal lowest
        if time.perf_counter() > ends:
            raise Late
        found = value(inside(place))
        lowest = min(lowest, found)
        return found

    few = len(x) <= 10
    near = np.vstack([x, x + 1e-3 * (1 + np.abs(x)) * np.eye(len(x))]) if few else None
    options = {"initial_simplex": near, "xatol": 1e-10, "fatol": 1e-14} if few else {"maxiter": 50}
    with contextlib.suppress(Late):
        minimize(at, x, method="Nelder-Mead" if few else "L-BFGS-B", options=options)
    return float(lowest)


def best(answers: Iterable[Answer]) -> Answer:
    return min(answers, key=lambda answer: answer.F)
