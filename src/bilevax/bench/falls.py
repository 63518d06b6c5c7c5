"""Whether F falls near a point, judged without bilevax: by other solvers of the lower level."""

from __future__ import annotations

import numpy as np

from bilevax.bench.lower_level import lower_solution, upper_violation
from bilevax.bench.records import Record

# How far x moves, in shares of 1 + ‖x‖, and the number of random directions beside the axes.
RADII, RANDOM = (1e-3, 1e-2, 1e-1), 4
# Axes up to this many are all tried.
AXES = 5
# A place that violates the upper level by more than this is none to compare with.
FEASIBLE = 1e-7


def fall_nearby(record: Record, x: np.ndarray, y: np.ndarray, F: float, epsilon: float) -> float:
    """By how much F is lower at the best place nearby than ε explains, 2ε·(1 + the way); or 0."""
    rng = np.random.default_rng(0)
    axes = np.eye(record.n_x)[:AXES]
    drawn = rng.normal(size=(RANDOM if record.n_x > 1 else 0, record.n_x))
    units = np.concatenate([axes, drawn / np.linalg.norm(drawn, axis=1, keepdims=True)])
    low, high = record.x_bounds.T
    most = 0.0
    for radius in RADII:
        for unit in (*units, *-units):
            place = np.clip(x + radius * (1 + np.linalg.norm(x)) * unit, low, high)
            if np.array_equal(place, x):
                continue
            answer = lower_solution(record, place, y)
            solved = answer.believed and np.isfinite(answer.value)
            if not solved or upper_violation(record, place, answer.y) > FEASIBLE:
                continue
            way = float(np.linalg.norm(np.concatenate([place - x, answer.y - y])))
            there = float(record.upper(place, answer.y))
            most = max(most, F - there - 2 * epsilon * (1 + way) - 1e-7 * (1 + abs(F)))
    return most
