"""How far the gradients of minibatches deviate from the whole, and whether they are biased."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from bilevax import trees
from bilevax.problems.constants import blocks_of, sample_domain
from bilevax.problems.form import Form
from bilevax.problems.point import Point
from bilevax.programs import quick

# Minibatches, and points besides the start, at which a deviation is measured.
BATCHES, POINTS = 64, 3


def deviation_of(problem: Any, start: Point, function: str = "objective") -> float:
    """δ with E‖∇(minibatch) − ∇‖² ≤ δ² for one of the functions: as given, or estimated.

    Zero without a source. The estimate is the largest at the start and at sampled points.
    """
    given = getattr(problem, f"{function}_deviation", None)
    if given is not None:
        return float(given)
    if not problem.sampled:
        return 0.0
    gradient = "gradient" if function == "objective" else f"{function}_gradient"
    term, blocks = blocks_of(problem, start, function)
    keys = jax.random.split(jax.random.key(1), POINTS)
    points = [blocks, *(sample_domain(term, blocks, k) for k in keys)]
    squares = [float(_variance(problem, gradient, p)) for p in points]
    if not np.all(np.isfinite(squares)):
        raise ValueError(
            "the deviation of the gradients could not be estimated: they are not finite everywhere "
            "in the domain. Give it, or shrink the domain"
        )
    return max(squares) ** 0.5


def _variance(problem: Any, gradient: str, point: tuple) -> Array:
    """Σ‖gᵢ − ḡ‖²/(m − 1) over m minibatches, which estimates E‖g − ∇h‖² without bias."""
    source = problem.data
    stream = source.refilled(source.init(0))
    mean, spread, count = None, 0.0, 0
    while count < BATCHES:
        if not bool(source.ready(stream)):
            stream = source.refilled(stream)
        stream, g = _sampled(problem, gradient, point, stream)
        count += 1
        if mean is None:
            mean = g
            continue
        off = trees.subtract(g, mean)  # Welford's recursion
        mean = trees.axpy(1 / count, off, mean)
        spread = spread + trees.square(off) * (1 - 1 / count)
    return jnp.asarray(spread) / max(count - 1, 1)


@quick
def _sampled(problem: Any, gradient: str, point: tuple, stream: Any) -> Any:
    stream, at = problem.drawn(stream)
    return stream, getattr(at, gradient)(*point)


def biased(problem: Any, start: Point) -> str | None:
    """What is wrong if the functions' mean over minibatches is not their value on all samples."""
    known = problem.complete()
    if known is None:
        return None
    drawn_values, right_values = _values_of_batches(problem, start), _values(known, start)
    for name, values in right_values.items():
        for drawn, right in zip(jax.tree.leaves(drawn_values[name]), jax.tree.leaves(values)):
            seen, right = np.asarray(drawn), np.asarray(right)
            mean, error = np.mean(seen, axis=0), np.std(seen, axis=0) / BATCHES**0.5
            # Ten standard errors, and what rounding may do.
            off = np.abs(mean - right) - 10 * error - 1e-3 * (np.abs(mean) + np.abs(right))
            if off.size and np.max(off) > 0:
                worst = np.unravel_index(np.argmax(off), off.shape)
                return (
                    f"{name}: its mean over minibatches is {mean[worst]:.4g}, but on all samples "
                    f"it is {right[worst]:.4g}: methods would solve another problem than is "
                    "certified. It must be a mean over rows, not a sum, and with Stratified a mean "
                    "within each group"
                )
    return None


@quick
def _values(problem: Form, start: Point) -> dict[str, Array]:
    return problem.values(start)


@quick
def _values_of_batches(problem: Form, start: Point) -> dict[str, Array]:
    def one(stream: Any, _: None) -> tuple[Any, dict[str, Array]]:
        stream, at = problem.drawn(stream)
        return stream, at.values(start)

    return lax.scan(one, problem.data.init(0), None, length=BATCHES)[1]
