"""A certificate from many minibatches, of which none is kept."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from bilevax import trees
from bilevax.certificates.certificate import Certificate
from bilevax.certificates.definition import Definition, definition_of, judge
from bilevax.certificates.sampled import (
    SampledCertificate,
    largest_share,
)
from bilevax.data.source import HELD_OUT
from bilevax.problems import Form, Point
from bilevax.problems.tangents import tabulated, tangents
from bilevax.programs import quick, steady
from bilevax.trees import Tree

# Minibatches are averaged in so many groups, whose means are compared with each other.
GROUPS = 64
# A group has at least so many minibatches: then its mean is close to normal.
LEAST_IN_GROUP = 16
# The share of what lines may be, below which they are foreseen before minibatches are asked; and
# how often their number is doubled for that.
MARGIN, MOST_DOUBLINGS = 0.9, 12
# What is left, at least, of a line that is no distance.
LEFT = 0.4


@dataclasses.dataclass(frozen=True)
class Means:
    """The tangents of all functions at a point, in the mean over each of `GROUPS` groups.

    Leaves have the groups along a first axis.
    """

    tables: Tree
    batches: int  # minibatches in all groups together

    @property
    def total(self) -> Tree:
        return jax.tree.map(
            lambda leaf: leaf.mean(axis=0, dtype=float).astype(leaf.dtype), self.tables
        )


_table = steady(tangents)


def means(
    problem: Form,
    point: Point,
    batches: Iterator[Tree],
    count: int,
    late: Callable[[], bool] = lambda: False,
) -> Means | None:
    """From the next `count` minibatches, or a few more. Each is read once and dropped.

    There are none where it has become too late to go on.
    """
    size, groups = math.ceil(count / GROUPS), []
    for _ in range(GROUPS):
        if late():
            return None
        groups.append(_mean(problem, point, itertools.islice(batches, size)))
    return Means(jax.tree.map(lambda *leaves: np.stack(leaves), *groups), size * GROUPS)


def _mean(problem: Form, point: Point, batches: Iterator[Tree]) -> Tree:
    """Of some minibatches. The sum is in double precision, whatever the functions return."""
    total, count, table = None, 0, None
    for batch in batches:
        table, count = jax.device_get(_table(problem.on(batch), point)), count + 1
        seen = jax.tree.map(lambda leaf: np.asarray(leaf, float), table)
        total = seen if total is None else jax.tree.map(np.add, total, seen)
    return jax.tree.map(lambda leaf, like: (leaf / count).astype(like.dtype), total, table)


def held_out_means(
    problem: Form,
    point: Point,
    count: int,
    key: int,
    skip: int = 0,
    late: Callable[[], bool] = lambda: False,
) -> Means | None:
    """From minibatches of a stream of their own, without the first ones."""
    source = problem.data.held_out(key)
    stream = itertools.islice(source.batches(source.init(HELD_OUT + key)), skip, None)
    return means(problem, point, (batch for _, batch in stream), count, late)


@dataclasses.dataclass(frozen=True)
class Spread:
    """How far the means of groups are apart: the deviations of each from the mean of all."""

    gradient: Tree
    value: Any  # one number, or several, for each group

    @classmethod
    def of(cls, definition: Definition, problem: Form, point: Point, seen: Means) -> Spread:
        parts = jax.device_get(_parts(definition, problem, point, seen.tables))
        from_mean = lambda leaf: np.asarray(leaf, float) - np.mean(leaf, axis=0, dtype=float)
        return cls(*jax.tree.map(from_mean, parts))

    def flat(self, tree: Tree) -> np.ndarray:
        """A row for each group."""
        count = len(jax.tree.leaves(self.gradient)[0])
        leaves = [leaf.reshape(count, -1) for leaf in jax.tree.leaves(tree)]
        return np.concatenate(leaves, axis=1) if leaves else np.zeros((count, 0))


@quick
def _parts(definition: Definition, problem: Form, point: Point, tables: Tree) -> tuple[Tree, Tree]:
    at = lambda table: definition.sampled_parts(tabulated(problem, table), point)
    return jax.lax.map(at, tables)


def normal_error(deviations: np.ndarray, alpha: float) -> float:
    """By how much a line on the mean of m normal vectors is too small, but for a share α of draws.

    A line is a convex function of the mean with a slope of at most 1. In expectation it is what it
    should be on the true mean, or more (Jensen), and it is below that by more than s with
    probability exp(−m·s²/(2λ)) at most, where λ is the largest eigenvalue of the covariance of one
    vector (Gaussian concentration). The estimate of λ from the same vectors is independent of their
    mean and at least λ·χ²/(m − 1) with m − 1 degrees of freedom. In the mean over these, with
    s² = (m − 1)(α^(−2/(m − 1)) − 1)/m times the estimate, the probability is α.
    """
    m = len(deviations)
    if deviations.shape[1] == 0:
        return 0.0
    gram = deviations @ deviations.T / (m - 1)
    if not np.all(np.isfinite(gram)):
        return math.inf
    largest = max(float(np.linalg.eigvalsh(gram)[-1]), 0.0)
    return math.sqrt((m - 1) * math.expm1(-2 * math.log(alpha) / (m - 1)) * largest / m)


def _share_of_error(lines: dict[str, float], alpha: float) -> float:
    """What each statement may err with: one a line, and the gap has a value and two slopes."""
    return alpha / (len(lines) + 2)


def streamed_certificate(
    problem: Form,
    point: Point,
    seen: Means,
    allowances: dict[str, float],
    confidence: float,
    share: float = 1.0,
    sizes: bool = False,
) -> SampledCertificate:
    """What the means over many minibatches say of the problem of all samples.

    `allowances` are those for rounding of a certificate at the same point that has evaluated the
    functions themselves: a table of their values has no rounding to show.
    """
    definition = definition_of(problem)
    estimate = judge(tabulated(problem, seen.total), point, sizes=sizes)
    estimate = definition.of_samples(problem, point, _rounded(estimate, allowances))
    spread, lines = Spread.of(definition, problem, point, seen), estimate.lines()
    own = definition.own_slopes(spread.gradient)
    alpha = _share_of_error(lines, (1 - confidence) * share)
    least = math.sqrt(definition.least_variance(problem, point) / seen.batches)
    least *= math.sqrt(2 * math.log(1 / alpha))
    error = lambda part: max(least, normal_error(spread.flat(part), alpha))
    whole = error(spread.gradient)
    slopes = {line: error(own[line]) if line in own else whole for line in lines}
    value = normal_error(spread.flat(spread.value), alpha)
    radii = {
        line: definition.radii(problem, point, lines, slopes[line], value)[line] for line in lines
    }
    squares = [np.sum(spread.flat(part) ** 2, axis=1) for part in (spread.gradient, spread.value)]
    dtype = trees.dtype_of(seen.total)
    middle = jax.device_get(_parts(definition, problem, point, _one(seen.total)))
    of_means = [float(trees.norm(part)) for part in middle]
    return SampledCertificate(
        objective=estimate.objective,
        estimate=estimate,
        radii=radii,
        confidence=confidence,
        batches=seen.batches,
        groups=GROUPS,
        largest_share=max(
            largest_share(s.astype(dtype), size) for s, size in zip(squares, of_means)
        ),
        sizes=estimate.sizes,
        allowances=estimate.allowances,
        breach=estimate.breach,
    )


def sufficient(
    problem: Form,
    point: Point,
    batches: Tree,
    certificate: SampledCertificate,
    confidence: float,
    share: float,
    aims: dict[str, float],
    most: int,
) -> int:
    """How many minibatches would show that a point's lines are below their aims; 0 if too many.

    A guess from some minibatches and the certificate on these. The square of a distance on b of
    them has about its variance divided by b on top, so that less of it is left on more of them.
    """
    definition, lines = definition_of(problem), certificate.estimate.lines()
    if not all(lines[k] - certificate.radii[k] <= aim for k, aim in aims.items()):
        return 0  # whatever others say
    seen = Means(tables(problem, point, batches), len(jax.tree.leaves(batches)[0]))
    spread = Spread.of(definition, problem, point, seen)
    own = definition.own_slopes(spread.gradient)
    alpha = _share_of_error(lines, (1 - confidence) * share)
    now = seen.batches
    off = lambda part: math.sqrt(np.sum(spread.flat(part) ** 2) / (now - 1) / now)
    parts = {line: own.get(line, spread.gradient) for line in lines}
    slopes = {line: off(part) for line, part in parts.items()}
    errors = {line: normal_error(spread.flat(part), alpha) for line, part in parts.items()}
    chance = {line: _by_chance(spread.flat(part)) for line, part in parts.items()}
    value, value_error = off(spread.value), normal_error(spread.flat(spread.value), alpha)

    def enough(count: int) -> bool:
        less = math.sqrt(now / count)
        for line, aim in aims.items():
            by = lambda s, v, line=line: definition.radii(problem, point, lines, s, v)[line]
            if line in own and by(slopes[line], 0.0) == slopes[line]:  # a distance
                rest = max(lines[line] ** 2 - chance[line] * slopes[line] ** 2, 0.0)
                there = math.sqrt(rest + (less * slopes[line]) ** 2)
            else:
                there = max(LEFT * lines[line], lines[line] - by(slopes[line], value))
            if not there + by(less * errors[line], less * value_error) <= MARGIN * aim:
                return False
        return True

    counts = (GROUPS * int(LEAST_IN_GROUP * 2 ** (k / 2)) for k in range(2 * MOST_DOUBLINGS))
    return next((c for c in counts if c <= most and enough(c)), 0)


def _by_chance(deviations: np.ndarray) -> float:
    """How many times its mean ‖e‖² is without much luck: 1 + 2√(2/d), with d = (tr S)²/tr S²."""
    gram = deviations @ deviations.T
    squares = float(np.sum(gram**2))
    return 1 + 2 * math.sqrt(2 * squares) / float(np.trace(gram)) if squares > 0 else 1.0


def deviation(problem: Form, point: Point, batches: Tree) -> float:
    """√E‖g − E g‖², estimated, of the gradient g that lines are made of on one of these."""
    seen = Means(tables(problem, point, batches), len(jax.tree.leaves(batches)[0]))
    spread = Spread.of(definition_of(problem), problem, point, seen)
    return math.sqrt(np.sum(spread.flat(spread.gradient) ** 2) / (seen.batches - 1))


@quick
def tables(problem: Form, point: Point, batches: Tree) -> Tree:
    """The tangents on each of some minibatches in memory."""
    return jax.lax.map(lambda batch: tangents(problem.on(batch), point), batches)


def _one(tree: Tree) -> Tree:
    return jax.tree.map(lambda leaf: leaf[None], tree)


def _rounded(estimate: Certificate, allowances: dict[str, float]) -> Any:
    """The certificate with at least these allowances in its lines."""
    more = {
        line: max(0.0, allowances.get(line, 0.0) - estimate.allowances.get(line, 0.0))
        for line in estimate.lines()
    }
    lines = {line: value + more[line] for line, value in estimate.lines().items()}
    allowed = {line: estimate.allowances.get(line, 0.0) + more[line] for line in lines}
    return dataclasses.replace(estimate, **lines, allowances=allowed)
