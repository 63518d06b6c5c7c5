"""Find the first step whose numbers are not finite, and say what produced them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jaxtyping import Array

from bilevax import trees
from bilevax.problems import BilevelProblem, ConstrainedBilevelProblem, MinimaxProblem, Point
from bilevax.problems.constrained import CONSTRAINTS


def where_not_finite(
    problem: Any,
    output: Callable[[Any], Point],
    advance: Callable[[int], tuple[Any, Any, Any]],
    state: Any,
    finite_at: int,
    broken_at: int,
) -> tuple[str, Any]:
    """A clause that says where, and the last state that is finite.

    The solver is deterministic: halving the number of gradients allowed finds the first bad step.
    """
    low, high, last = finite_at, broken_at, state
    while high - low > 1:
        middle = (low + high) // 2
        candidate, _, finite = advance(middle)
        if bool(finite):
            low, last = middle, candidate
        else:
            high = middle
    broken, _, _ = advance(high)
    point = output(broken)
    if not bool(trees.all_finite(point)):
        point = output(last)
    culprit = _culprit(problem, point)
    after = f"after {low:,} gradients"
    if culprit:
        return f"{culprit} {after}, at {point}", last
    return (
        f"a gradient of {_names(problem)} is not finite {after}, near {point}. Methods evaluate "
        "gradients a little outside the domain too; the functions must be smooth there",
        last,
    )


def _names(problem: Any) -> str:
    if isinstance(problem, ConstrainedBilevelProblem):
        return "upper, lower or a constraint"
    return "upper or lower" if isinstance(problem, BilevelProblem) else "objective"


def _total(function: Callable[..., Any], extra: tuple, x: Any, y: Any) -> Array:
    """The sum of what a function of the constrained problem returns."""
    return trees.total(function(x, y, *extra))


def _culprit(problem: Any, point: Point) -> str | None:
    """Which function, and which part of its gradient, is not finite at this very point."""
    p = point
    if isinstance(problem, MinimaxProblem):
        calls = [("objective", problem.smooth, {"x": p.x, "y": p.y})]
    elif isinstance(problem, ConstrainedBilevelProblem):
        calls = [
            (name, partial(_total, getattr(problem, name), problem.extra), {"x": p.x, "y": there})
            for name in ("upper", "lower", *CONSTRAINTS)
            for there in (p.y, p.z)
            if getattr(problem, name) is not None
        ]
    else:
        calls = [
            ("upper", problem.smooth_upper, {"x1": p.x1, "x2": p.x2, "y1": p.y1, "y2": p.y2}),
            ("lower", problem.smooth_lower, {"x1": p.x1, "y1": p.y1, "y2": p.z2}),
            ("lower", problem.smooth_lower, {"x1": p.x1, "y1": p.z1, "y2": p.y2}),
        ]
    for label, function, blocks in calls:
        places = tuple(range(len(blocks)))
        value, gradient = jax.value_and_grad(function, argnums=places)(*blocks.values())
        if not bool(trees.all_finite(value)):
            return f"{label} is {value}"
        for name, part in zip(blocks, gradient):
            if not bool(trees.all_finite(part)):
                return f"the gradient of {label} with respect to {name} is not finite"
    return None
