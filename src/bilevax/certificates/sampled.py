"""A certificate from some minibatches, where not all can be looked at: with its confidence."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from bilevax import arguments, trees
from bilevax.certificates.certificate import Certificate
from bilevax.certificates.definition import Definition, definition_of
from bilevax.data.source import HELD_OUT
from bilevax.problems import Form, Point
from bilevax.programs import entries, quick
from bilevax.trees import Tree

# Minibatches that a certificate looks at where not all samples are in memory, and how sure it is.
BATCHES, CONFIDENCE = 64, 0.95
# From fewer a variance is a guess.
FEWEST = 8
# Those that are kept in memory have at most so many numbers, unless they are the fewest.
MOST_NUMBERS = 1 << 24
# Gradients of each minibatch that the radii take.
PASSES = 2
# How often minibatches whose losses are normal are called heavy-tailed, at most.
HEAVY_BY_CHANCE = 1e-3
# Means of the same rows in another order differ by so many units of rounding, about.
ROUNDING = 32.0
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
    that of the gradients times the diameters; without bounds, times the radius within which it
    holds, or as much as the modulus allows. r² is a variance divided by m, and the variance is
    estimated from the same minibatches. For that r is multiplied by t/z: Student's quantile for
    m − 1 degrees of freedom over the normal one, both two-sided at α. With `upper_deviation` and
    `lower_deviation` given, r² is at least theirs, (3δ_f² + 6ρ²δ_f~²)/m.

    Where minibatches are many they are averaged in `groups`, whose means are close to normal, and a
    radius is by how much lines on a mean of normal vectors are too small (`streamed.normal_error`).

    The estimate says little where tails are heavy, and nothing of samples too rare to be in any
    minibatch. `largest_share` is what one minibatch, or group, alone makes of the sum of squared
    deviations. Where it is above `largest_normal_share(m)`, which normal losses exceed in less than
    0.1 % of draws, `heavy_tailed` says so, and the confidence is not to be trusted. The reverse is
    no proof.
    """

    estimate: Certificate = dataclasses.field(kw_only=True)
    radii: dict[str, float] = dataclasses.field(kw_only=True)
    confidence: float = dataclasses.field(kw_only=True)
    batches: int = dataclasses.field(kw_only=True)
    largest_share: float = dataclasses.field(
        kw_only=True, metadata={"says": "of the squared deviations, in one minibatch or group"}
    )
    groups: int | None = dataclasses.field(kw_only=True, default=None)

    @property
    def heavy_tailed(self) -> bool:
        """Whether one minibatch or group is so far off that the confidence is not to be trusted."""
        return self.largest_share > largest_normal_share(self.groups or self.batches)

    @property
    def caution(self) -> str:
        """What is to be said of the confidence, in a sentence; empty where there is nothing."""
        if not self.heavy_tailed:
            return ""
        groups = "" if self.groups is None else f"{self.groups} groups of "
        return (
            f"Heavy tails: one of {groups}{self.batches} minibatches makes "
            f"{100 * self.largest_share:.0f} % of the squared deviations, so the confidence "
            f"{self.confidence:g} is not to be trusted; look at more minibatches, or larger ones."
        )

    def lines(self) -> dict[str, float]:
        return {name: v + self.radii[name] for name, v in self.estimate.lines().items()}

    def notes(self) -> dict[str, float]:
        known = {"estimated_epsilon": self.estimate.epsilon, "confidence": self.confidence}
        known |= {"batches": float(self.batches), "largest_share": self.largest_share}
        return known | self.estimate.notes()

    def __str__(self) -> str:
        return "\n".join([super().__str__(), *([self.caution] if self.heavy_tailed else [])])

    def advice(self, line: str) -> tuple[str, str]:
        what, advice = self.estimate.advice(line)
        if self.radii[line] < self.lines()[line] / 2:
            return what, advice
        return f"{what}, most of it what samples leave open", "larger minibatches"

    def assumptions(self) -> list[str]:
        return self.estimate.assumptions()

    def provisos(self) -> list[str]:
        return self.estimate.provisos()

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
    estimate = definition.of_samples(problem, point, estimate)
    count = jax.tree.leaves(batches)[0].shape[0]
    arguments.whole(count, "batches", FEWEST)
    alpha = (1 - confidence) * share / definition.statements()
    parts = jax.device_get(_deviations(definition, problem, point, batches))
    squares = [np.asarray(part, float) for part, _ in parts]
    cost = estimation_cost(count, alpha) ** 2
    slope, value = (cost * float(np.sum(part)) / (count - 1) for part in squares)
    slope = max(slope, definition.least_variance(problem, point))
    errors = (math.sqrt(variance / (count * alpha)) for variance in (slope, value))
    return SampledCertificate(
        objective=estimate.objective,
        estimate=estimate,
        radii=definition.radii(problem, point, estimate.lines(), *errors),
        confidence=confidence,
        batches=count,
        largest_share=max(largest_share(*part) for part in parts),
        sizes=estimate.sizes,
        allowances=estimate.allowances,
        breach=estimate.breach,
    )


def estimation_cost(batches: int, alpha: float) -> float:
    """t/z: by what a radius grows because the variance is estimated from so many minibatches."""
    from scipy import special

    return float(special.stdtrit(batches - 1, alpha / 2) / special.ndtri(alpha / 2))


def largest_normal_share(batches: int) -> float:
    """What the largest of so many squared deviations is of their sum, at most, for normal losses.

    Times m/(m − 1) each share is beta distributed, with ½ and (m − 2)/2 (Grubbs' test); that any of
    the m is above this has a probability of `HEAVY_BY_CHANCE` at most.
    """
    from scipy import special

    m = batches
    return (m - 1) / m * float(special.betaincinv(0.5, (m - 2) / 2, 1 - HEAVY_BY_CHANCE / m))


def largest_share(squares: np.ndarray, size: Any) -> float:
    """The largest part of a sum of squares; 0 where all are the rounding of means of this size."""
    most = float(np.max(squares))
    rounding = ROUNDING * float(np.finfo(squares.dtype).eps) * float(size)
    return 0.0 if most <= rounding**2 else most / float(np.sum(squares, dtype=float))


@quick
def _deviations(
    definition: Definition, problem: Form, point: Point, batches: Tree
) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    """‖g − ḡ‖² for each minibatch and ‖ḡ‖, of the gradient and of the value in `sampled_parts`.

    In two passes, the first for the mean: the gradients of all minibatches need not fit in memory.
    """
    at = lambda batch: definition.sampled_parts(problem.on(batch), point)
    first = jax.tree.map(lambda a: a[0], batches)
    zero = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(at, first))

    def onwards(center: Tree, carry: tuple, batch: Tree) -> tuple[tuple, tuple]:
        count, mean = carry
        new, count = at(batch), count + 1
        mean = trees.axpy(1 / count, trees.subtract(new, mean), mean)  # Welford's recursion
        off = trees.subtract(new, center)
        return (count, mean), (trees.square(off[0]), trees.square(off[1]))

    def once(center: Tree, _: None) -> tuple[Tree, tuple]:
        begun = (jnp.zeros((), trees.dtype_of(zero)), zero)
        ended, squares = jax.lax.scan(functools.partial(onwards, center), begun, batches)
        return ended[1], squares

    mean, (slope, value) = jax.lax.scan(once, zero, None, length=PASSES)
    return (slope[-1], trees.norm(mean[0])), (value[-1], trees.norm(mean[1]))


def batches_in_memory(problem: Form) -> int:
    """How many minibatches a run keeps to judge its points on."""
    source = problem.data
    shapes = jax.eval_shape(lambda: source.draw(source.init(0))[1])
    return max(FEWEST, min(BATCHES, MOST_NUMBERS // max(entries(shapes), 1)))


def drawn_batches(problem: Form, count: int, key: int) -> Tree:
    """So many minibatches of the problem's source, stacked, on a stream of their own."""
    source = problem.data.held_out(key)
    stream = source.batches(source.init(HELD_OUT + key))
    batches = [batch for _, batch in itertools.islice(stream, count)]
    return jax.tree.map(lambda *rows: jnp.stack(rows), *batches)
