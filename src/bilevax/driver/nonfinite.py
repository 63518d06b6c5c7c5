"""Find the first step whose numbers are not finite, and say what produced them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from bilevax import trees
from bilevax.problems import Form, Point


def where_not_finite(
    problem: Form, advance: Callable[[int], Any], last: Any, finite_at: int, broken_at: int
) -> tuple[str, Any]:
    """A clause that says where, and the last piece that is finite; `last` is one to begin with.

    The solver is deterministic: halving the number of gradients allowed finds the first bad step.
    """
    low, high = finite_at, broken_at
    while high - low > 1:
        middle = (low + high) // 2
        piece = advance(middle)
        if bool(piece.finite):
            low, last = middle, piece
        else:
            high = middle
    point = advance(high).point
    if not trees.is_finite(point):
        point = last.point
    culprit = _culprit(problem, point)
    after = f"after {low:,} gradients"
    if culprit:
        return f"{culprit} {after}, at {point}", last
    names = " or ".join(call.name for call in problem.calls(point))
    return (
        f"a gradient of {names}, or what the method makes of it, is not finite {after}, near "
        f"{point}. Methods evaluate gradients a little outside the domain too, where the functions "
        f"must be smooth, and multiply them by ρ, for which {_dtype(point)} must have room",
        last,
    )


def _dtype(point: Point) -> str:
    return jax.numpy.dtype(trees.dtype_of(point.replace(rho=None))).name


def _culprit(problem: Form, point: Point) -> str | None:
    """Which function, and which part of its gradient, is not finite at this very point."""
    for call in problem.all_calls(point):
        places = tuple(range(len(call.blocks)))
        total = lambda *blocks, call=call: trees.total(call(*blocks, *problem.extra))
        value, gradient = jax.value_and_grad(total, argnums=places)(*call.blocks.values())
        if not trees.is_finite(value):
            return f"{call.name} is {value}"
        for name, part in zip(call.blocks, gradient):
            if not trees.is_finite(part):
                return f"the gradient of {call.name} with respect to {name} is not finite"
    return None
