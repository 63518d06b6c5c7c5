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
from bilevax.data.source import HELD_OUT
from bilevax.problems import BilevelProblem, MinimaxProblem, Point
from bilevax.problems.reformulate import penalty, penalty_blocks
from bilevax.problems.stochastic import on
from bilevax.trees import Tree


class Averaged(eqx.Module):
    """The mean of a function over minibatches that are stacked along a first axis."""

    function: Callable[..., Array]

    def __call__(self, *arguments: Any) -> Array:
        *blocks, batches = arguments
        return jnp.mean(jax.lax.map(lambda batch: self.function(*blocks, batch), batches))


def averaged(problem: Any, batches: Tree) -> Any:
    """The problem whose functions are means over these minibatches."""
    names = ("objective",) if isinstance(problem, MinimaxProblem) else ("upper", "lower")
    where = lambda p: [getattr(p, name) for name in names]
    replaced = [Averaged(function) for function in where(problem)]
    return on(eqx.tree_at(where, problem, replaced), batches)


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

    def interval(self, name: str) -> tuple[float, float]:
        """Where a line lies with that probability."""
        value, radius = self.estimate.lines()[name], self.radii[name]
        return max(0.0, value - radius), value + radius


def sampled_certificate(
    problem: BilevelProblem | MinimaxProblem,
    point: Point,
    batches: Tree,
    estimate: Certificate,
    confidence: float,
    share: float = 1.0,
) -> SampledCertificate:
    """From `estimate`, that of `averaged(problem, batches)`, with radii for this confidence.

    Of several statements, which together err with 1 − confidence, this one has a `share` of that.
    """
    count = jax.tree.leaves(batches)[0].shape[0]
    alpha = (1 - confidence) * share / (2 if isinstance(problem, BilevelProblem) else 1)
    slope, value = (float(v) for v in _variances(problem, point, batches))
    if isinstance(problem, BilevelProblem):
        given = problem.upper_deviation, problem.lower_deviation
        if given[0] is not None and given[1] is not None:
            known = 3 * float(given[0]) ** 2 + 6 * (float(point.rho) * float(given[1])) ** 2
            slope = max(slope, known)
    reach = math.sqrt(slope / (count * alpha))
    radii = dict.fromkeys(estimate.lines(), reach)
    if isinstance(problem, BilevelProblem):
        spread = sum(
            float(t.diameter(block))
            for t, block in ((problem.y1, point.y1), (problem.y2, point.y2))
            if t is not None
        )
        # P's slopes in (z1, z2) are those of the lower level times ρ.
        radii["gap"] = math.sqrt(value / (count * alpha)) + spread * reach / float(point.rho)
    return SampledCertificate(
        objective=estimate.objective,
        estimate=estimate,
        radii=radii,
        confidence=confidence,
        batches=count,
        sizes=estimate.sizes,
    )


@eqx.filter_jit
def _variances(problem: Any, point: Point, batches: Tree) -> tuple[Array, Array]:
    """Of one minibatch: E‖g − ∇P‖², and that of f~(x1, y1, z2) − f~(x1, z1, y2)."""
    bilevel = isinstance(problem, BilevelProblem)

    def at(batch: Tree) -> tuple[Tree, Array]:
        here = on(problem, batch)
        if not bilevel:
            return here.gradient(point.x, point.y), jnp.zeros(())
        gap = here.smooth_lower(point.x1, point.y1, point.z2)
        gap -= here.smooth_lower(point.x1, point.z1, point.y2)
        return penalty(here, point.rho).gradient(*penalty_blocks(point)), gap

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


def drawn_batches(problem: Any, count: int, key: int) -> Tree:
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
