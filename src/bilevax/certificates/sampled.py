"""A certificate from some minibatches, where not all can be looked at: with its confidence."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from bilevax import trees
from bilevax.certificates.certificate import Certificate
from bilevax.certificates.definition import Definition, definition_of
from bilevax.data.source import HELD_OUT
from bilevax.problems import Form, Point
from bilevax.programs import quick
from bilevax.trees import Tree

# Minibatches that a certificate looks at where not all samples are in memory, and how sure it is.
BATCHES, CONFIDENCE = 64, 0.95
# The keys of the minibatches that runs are judged on begin here; those of `certify` are below.
RUN_KEYS = 1 << 16


class Averaged(eqx.Module):
    """The mean of a function over minibatches that are stacked along a first axis."""

    function: Callable[..., Array]

    def __call__(self, *arguments: Any) -> Array:
        *blocks, batches = arguments
        values = jax.lax.map(lambda batch: self.function(*blocks, batch), batches)
        return jax.tree.map(lambda value: jnp.mean(value, axis=0), values)


def averaged(problem: Form, batches: Tree) -> Any:
    """The problem whose functions are means over these minibatches."""
    names = [name for name in problem.function_names if getattr(problem, name) is not None]
    where = lambda p: [getattr(p, name) for name in names]
    replaced = [Averaged(function) for function in where(problem)]
    return eqx.tree_at(where, problem, replaced).on(batches)


@dataclasses.dataclass(frozen=True)
class SampledCertificate(Certificate):
    """What `estimate`, the certificate on some minibatches, says of the problem of all samples.

    Each line has its radius on top, so that with probability `confidence` no line of the problem
    itself is larger, over the draw of the m minibatches. Every distance changes by at most the
    error of the gradient, so with r² = E‖ḡ − ∇P‖² it stays within r/√α of its estimate, but for a
    share α of all draws (Chebyshev). The gap's bound changes by the error of the values, and by
    that of the gradients times the diameters. r² is a variance divided by m, and the variance is
    estimated from the same minibatches, so samples too rare to be in any of them stay unseen; with
    `upper_deviation` and `lower_deviation` given it is at least theirs, 3δ_f² + 6ρ²δ_f~².
    """

    estimate: Certificate = dataclasses.field(kw_only=True)
    radii: dict[str, float] = dataclasses.field(kw_only=True)
    confidence: float = dataclasses.field(kw_only=True)
    batches: int = dataclasses.field(kw_only=True)

    def lines(self) -> dict[str, float]:
        return {name: v + self.radii[name] for name, v in self.estimate.lines().items()}

    def notes(self) -> dict[str, float]:
        known = {"estimated_epsilon": self.estimate.epsilon, "confidence": self.confidence}
        return known | {"batches": float(self.batches)} | self.estimate.notes()

    def advice(self, line: str) -> tuple[str, str]:
        return self.estimate.advice(line)

    def interval(self, name: str) -> tuple[float, float]:
        """Where a line lies with that probability."""
        value, radius = self.estimate.lines()[name], self.radii[name]
        return max(0.0, value - radius), value + radius


def sampled_certificate(
    problem: Form,
    point: Point,
    batches: Tree,
    estimate: Certificate,
    confidence: float,
    share: float = 1.0,
) -> SampledCertificate:
    """From `estimate`, that of `averaged(problem, batches)`, with radii for this confidence.

    Of several statements, which together err with 1 − confidence, this one has a `share` of that.
    """
    definition = definition_of(problem)
    count = jax.tree.leaves(batches)[0].shape[0]
    alpha = (1 - confidence) * share / definition.statements()
    slope, value = (float(v) for v in _variances(definition, problem, point, batches))
    slope = max(slope, definition.least_variance(problem, point))
    errors = (math.sqrt(variance / (count * alpha)) for variance in (slope, value))
    return SampledCertificate(
        objective=estimate.objective,
        estimate=estimate,
        radii=definition.radii(problem, point, tuple(estimate.lines()), *errors),
        confidence=confidence,
        batches=count,
        sizes=estimate.sizes,
    )


@quick
def _variances(
    definition: Definition, problem: Form, point: Point, batches: Tree
) -> tuple[Array, Array]:
    """Of one minibatch: the variance of the gradient and of the value in `sampled_parts`."""
    at = lambda batch: definition.sampled_parts(problem.on(batch), point)

    # Welford's recursion: the gradients of all minibatches need not fit in memory together.
    def onwards(carry: tuple, batch: Tree) -> tuple[tuple, None]:
        count, mean, squares = carry
        new = at(batch)
        count = count + 1
        off = trees.subtract(new, mean)
        mean = trees.axpy(1 / count, off, mean)
        rest = trees.subtract(new, mean)
        more = (trees.dot(off[0], rest[0]), trees.dot(off[1], rest[1]))
        squares = jax.tree.map(lambda a, b: a + b.astype(a.dtype), squares, more)
        return (count, mean, squares), None

    shapes = jax.eval_shape(at, jax.tree.map(lambda a: a[0], batches))
    mean = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    zero = jnp.zeros((), trees.dtype_of(mean))
    (count, _, squares), _ = jax.lax.scan(onwards, (zero, mean, (zero, zero)), batches)
    slope, value = (s / jnp.maximum(count - 1, 1) for s in squares)
    return slope, value


def drawn_batches(problem: Form, count: int, key: int) -> Tree:
    """So many minibatches of the problem's source, stacked, on a stream of their own."""
    source = problem.data.held_out(key)
    state, batches = source.init(HELD_OUT + key), []
    draw = eqx.filter_jit(source.draw)
    for _ in range(count):
        if not bool(source.ready(state)):
            state = source.refilled(state)
        state, batch = draw(state)
        batches.append(jax.tree.map(np.asarray, batch))
    return jax.tree.map(lambda *rows: jnp.stack(rows), *batches)
