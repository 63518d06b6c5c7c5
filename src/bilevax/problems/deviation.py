"""How far the gradients of minibatches deviate from the whole, and whether they are biased."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from bilevax import trees
from bilevax.problems.bilevel import BilevelProblem
from bilevax.problems.constants import sample_domain
from bilevax.problems.form import Form
from bilevax.problems.minimax import MinimaxProblem
from bilevax.problems.point import Point
from bilevax.programs import quick
from bilevax.terms import PerLeaf, Term

# Minibatches, and points besides the start, at which a deviation is measured.
BATCHES, POINTS = 64, 3


def deviation_of(problem: MinimaxProblem, start: Point) -> float:
    """δ with E‖∇h(x, y; ω) − ∇h(x, y)‖² ≤ δ², estimated; zero without a source."""
    term = PerLeaf((problem.x, problem.y))
    return _deviation(problem, lambda p: p.gradient, term, (start.x, start.y))


def upper_deviation_of(problem: BilevelProblem, start: Point) -> float:
    """δ_f: as given, or estimated."""
    if problem.upper_deviation is not None:
        return float(problem.upper_deviation)
    term = PerLeaf((problem.x1, problem.x2, problem.y1, problem.y2))
    blocks = (start.x1, start.x2, start.y1, start.y2)
    return _deviation(problem, lambda p: p.upper_gradient, term, blocks)


def lower_deviation_of(problem: BilevelProblem, start: Point) -> float:
    """δ_f~: as given, or estimated."""
    if problem.lower_deviation is not None:
        return float(problem.lower_deviation)
    term = PerLeaf((problem.x1, problem.y1, problem.y2))
    blocks = (start.x1, start.y1, start.y2)
    return _deviation(problem, lambda p: p.lower_gradient, term, blocks)


def _deviation(
    problem: Any, gradient: Callable[[Any], Callable], term: Term, start: tuple
) -> float:
    """The largest deviation at the start and at sampled points: an estimate, as the smoothness."""
    if not problem.sampled:
        return 0.0
    keys = jax.random.split(jax.random.key(1), POINTS)
    points = [start, *(sample_domain(term, start, k) for k in keys)]
    squares = [float(_variance(problem, gradient, p)) for p in points]
    if not np.all(np.isfinite(squares)):
        raise ValueError(
            "the deviation of the gradients could not be estimated: they are not finite everywhere "
            "in the domain. Give it, or shrink the domain"
        )
    return max(squares) ** 0.5


def _variance(problem: Any, gradient: Callable[[Any], Callable], point: tuple) -> Array:
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
def _sampled(problem: Any, gradient: Callable[[Any], Callable], point: tuple, stream: Any) -> Any:
    stream, at = problem.drawn(stream)
    return stream, gradient(at)(*point)


def biased(problem: Any, start: Point) -> str | None:
    """What is wrong if the functions' mean over minibatches is not their value on all samples."""
    known = problem.complete()
    if known is None:
        return None
    drawn_values, right_values = _values_of_batches(problem, start), _values(known, start)
    for name, right in right_values.items():
        seen = np.asarray(drawn_values[name])
        mean, error = np.mean(seen), np.std(seen) / BATCHES**0.5
        # Ten standard errors, and what rounding may do.
        if abs(mean - right) > 10 * error + 1e-3 * (abs(mean) + abs(right)):
            return (
                f"{name}: its mean over minibatches is {mean:.4g}, but on all samples it is "
                f"{float(right):.4g}: methods would solve another problem than is certified. It "
                "must be a mean over rows, not a sum, and with Stratified a mean within each group"
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
