"""SampleAverage: many samples by a method for plain data, on growing subsets of them."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from bilevax import trees
from bilevax.arguments import whole
from bilevax.certificates import judge
from bilevax.certificates.streamed import deviation
from bilevax.data import Source
from bilevax.data.source import minibatches
from bilevax.problems import Form, Point
from bilevax.problems.means import (
    Chunks,
    Correction,
    first_corrections,
    on_chunks,
    places,
    slopes,
)
from bilevax.programs import entries, quick
from bilevax.solvers.base import Solver, Task, check_part, default_solver
from bilevax.solvers.composite import composed
from bilevax.solvers.penalty import PenaltyMethod
from bilevax.solvers.stochastic_proximal_point import practical
from bilevax.trees import Tree

# Each subset has so many times the samples of the one before. The largest is that share of all
# samples, and the smallest that share of it, squared.
GROWTH = 8
# A subset has at least so many samples, and so many for each entry of the start.
LEAST_SAMPLES, SAMPLES_AN_ENTRY = 128, 4
# The problem of a subset of n samples is solved up to this share of 1/√n of the sizes at hand, or
# as exactly as is asked for: more would be lost with the next subset.
SUBSET_SHARE = 0.3
# All samples are taken at once if they have at most so many numbers.
FEW_NUMBERS = 1 << 22
# A subset of what is not in memory has at most so many numbers and minibatches.
MOST_NUMBERS, MOST_BATCHES = 1 << 24, 10_000
# The slopes of a subset are corrected at most so often, and until what they are off has not fallen
# to this share so many times in turn. The problem is then solved up to the last share of it.
MOST_CORRECTIONS, SHRINKS, PATIENCE, CORRECTED_SHARE = 12, 0.5, 2, 0.003
# The same for samples that are not in memory. A first correction is from at most eight times the
# subset, the next ones from at most so many times it: so many that their slopes should be off by
# this share of the tolerance, by what the deviations of so many chunks or more say.
MOST_ON_HOST, LARGEST_CORRECTION, NOISE_SHARE, FEW_CHUNKS = 3, 32, 0.25, 8
# Before so many corrections no long look pays.
ROUGH = 2

NOTHING = np.zeros((), int)


def _stochastic() -> Solver:
    return PenaltyMethod(starter=None, outer=practical())


class SampleState(eqx.Module):
    """The state of the method at work, and what its gradients count for."""

    inner: Any
    solved: Array  # whether the problem of this subset is
    minibatches: Array  # that one of its gradients takes
    spent: Array  # gradients of minibatches before its first step

    @property
    def gradients(self) -> Array:
        return self.inner.gradients * self.minibatches + self.spent


class Subset(eqx.Module):
    """Some of the samples, and how the work on them stands. One program serves all its sizes."""

    chunks: Chunks
    stream: Any  # where the samples after these begin, of a source on the host
    times: Any  # how often slopes were corrected
    error: Any  # by how much they were off the last time
    strikes: Any  # how often in turn that has not helped
    batches: int = eqx.field(static=True)  # minibatches in a chunk

    @property
    def most(self) -> int:
        """How many chunks there are."""
        return jax.tree.leaves(self.chunks.samples)[0].shape[0]

    def correction_batches(self, total: int) -> int:
        """The minibatches of the next correction, at most: all of them, or of a source on the host
        so many times as the subset has."""
        if self.stream is None:
            return total
        return LARGEST_CORRECTION * self.most * self.batches

    def grown(self) -> Subset | None:
        """With more of its chunks in use."""
        count = int(self.chunks.count)
        if count == self.most:
            return None
        following = GROWTH * count if GROWTH * count <= self.most / 2 else self.most
        chunks = dataclasses.replace(self.chunks, count=np.asarray(following))
        return dataclasses.replace(self, chunks=chunks)


class SampleAverage(Solver[SampleState]):
    """A problem whose data is a source of minibatches, by a method that takes all its data.

    The mean over a subset of the samples stands for the mean over all. The method solves that
    problem, then that of a subset eight times as large, which has the smaller one in it, from
    there, and so on, up to an eighth of all samples.

    Then the slopes of that subset's functions are corrected: by linear and quadratic terms, with
    which they have the gradients of all samples where the method has ended. That costs one gradient
    of all samples, and brings the answer nearer by the share to which the curvature of the subset
    is that of all. It is done again as long as this helps; a problem of all samples comes at last.

    Where samples are few, that comes first. Where they are not in memory, subsets grow as far as
    memory allows, corrections are from up to 32 times the samples, as many as the tolerance asks
    for, and `last`, a stochastic method, goes on. A run is judged whenever a subset's problem is
    solved, on all samples or on minibatches that were held out, and ends as soon as the certificate
    holds.

    `solver` is the one for a problem with plain data, by default the one that `solve` takes. `key`
    decides on the subsets. Gradients are counted in those of a minibatch: one of all samples counts
    for as many as there are minibatches.
    """

    form: ClassVar[type[Form]] = Form
    takes_samples: ClassVar[bool] = True

    solver: Solver | None = None
    last: Solver = eqx.field(default_factory=_stochastic)
    key: int = eqx.field(static=True, default=0)
    now: Solver | None = None
    subset: Subset | None = None
    spent: Any = None  # gradients of minibatches before the first step: those of a correction
    total: int = eqx.field(static=True, default=1)  # minibatches that one gradient takes at last

    def __check_init__(self):
        whole(self.key, "SampleAverage: key", 0)
        if self.solver is not None:
            check_part(self, "solver", Solver)
        check_part(self, "last", Solver)

    @property
    def _now(self) -> Solver:
        assert self.now is not None, "SampleAverage is prepared first"
        return self.now

    @property
    def part(self) -> Solver:
        return self if self.now is None else self.now.part

    @property
    def in_passing(self) -> bool:
        return self.subset is not None

    @property
    def provisional(self) -> bool:
        """Of samples on the host, a subset is followed by corrections."""
        subset = self.subset
        return subset is not None and subset.stream is not None and int(subset.times) < ROUGH

    @property
    def each(self) -> Any:
        """How many minibatches one gradient takes."""
        return self.total if self.subset is None else self.subset.chunks.count * self.subset.batches

    @property
    def gradients_per_step(self) -> int:
        return int(self.each) * self._now.gradients_per_step

    @property
    def handover_gradients(self) -> int:
        """Where all chunks are in use, slopes are corrected next."""
        subset = self.subset
        if subset is None or int(subset.chunks.count) < subset.most:
            return self.gradients_per_step
        return self.gradients_per_step + subset.correction_batches(self.total)

    def review_gradients(self, state: SampleState) -> int:
        return int(self.each) * self._now.review_gradients(state.inner)

    def prepare(self, problem: Any, start: Point, tolerance: float) -> SampleAverage:
        return self.prepared_for(Task(problem, start, tolerance))

    def prepared_for(self, task: Task) -> SampleAverage:
        source = task.problem.data
        if not task.problem.sampled:
            raise ValueError(
                "SampleAverage is for data that is a source of minibatches, such as "
                "bilevax.data.Arrays(…)"
            )
        known = source.everything() is not None
        total = math.ceil(minibatches(source)) if known else 1
        first = _first_subset(task, self.key)
        chosen = dataclasses.replace(self, total=total, subset=first, spent=NOTHING)
        seen = chosen._task(task)
        asked = chosen._asked(seen.problem)
        if not seen.problem.sampled:  # what is chosen for a first subset holds for all
            asked = asked.chosen_for(seen)
            chosen = dataclasses.replace(chosen, solver=asked)
        return dataclasses.replace(chosen, now=asked.prepared_for(seen))

    @property
    def stage(self) -> tuple:
        return (self.in_passing, *self._now.stage)

    def prepared_at(self, stage: tuple, task: Task) -> SampleAverage:
        in_passing, *rest = stage
        first = self.prepared_for(task)
        chosen = first if in_passing else dataclasses.replace(first, subset=None)
        seen = chosen._task(task)
        now = chosen._asked(seen.problem).prepared_at(tuple(rest), seen)
        return dataclasses.replace(chosen, now=now)

    def _asked(self, seen: Form) -> Solver:
        """The method for the problem at hand."""
        given = self.last if seen.sampled else self.solver
        return composed(default_solver(seen) if given is None else given, seen)

    def seen(self, problem: Any) -> Any:
        """The problem of this subset, of all samples, or the stated one."""
        if self.subset is None:
            return problem.complete() or problem
        return on_chunks(problem, self.subset.chunks)

    def view(self, problem: Any) -> Any:
        return problem if self.subset is None else problem.on(())

    def _task(self, task: Task) -> Task:
        """What is asked of the method here."""
        tolerance, relative = task.tolerance, task.relative
        noisy = self.subset is not None and self.subset.stream is not None
        if self.subset is not None and self.subset.times and not noisy:
            tolerance = max(tolerance, CORRECTED_SHARE * float(self.subset.error))
        elif self.subset is not None and not self.subset.times:
            samples = int(self.each) * task.problem.data.batch
            relative = max(relative, SUBSET_SHARE / samples**0.5)
        return Task(self.seen(task.problem), task.start, tolerance, relative, noisy)

    # What is asked of it is in the prepared one, too.

    def prepared_again(self, prepared: SampleAverage, task: Task) -> SampleAverage:
        seen = prepared._task(task)
        now = prepared._asked(seen.problem).prepared_again(prepared._now, seen)
        return dataclasses.replace(prepared, now=now, spent=NOTHING)

    def prepared_anew(
        self, prepared: SampleAverage, task: Task, state: SampleState
    ) -> SampleAverage:
        seen = prepared._task(task)
        now = prepared._asked(seen.problem).prepared_anew(prepared._now, seen, state.inner)
        return dataclasses.replace(prepared, now=now, spent=NOTHING)

    def relieved(
        self, prepared: SampleAverage, task: Task, state: SampleState
    ) -> SampleAverage | None:
        """Another method where this one is lost; a larger subset; corrected slopes; all samples."""
        seen, subset = prepared._task(task), prepared.subset
        if subset is None or not prepared._has_ended(seen.problem, state):
            now = prepared._asked(seen.problem).relieved(prepared._now, seen, state.inner)
            if now is not None or subset is None:
                anew = dataclasses.replace(prepared, now=now, spent=NOTHING)
                return None if now is None else anew
        assert subset is not None
        following, spent = subset.grown(), 0
        if following is None:
            following, spent = _corrected(task, subset, prepared.total)
        chosen = dataclasses.replace(prepared, subset=following, spent=np.asarray(spent))
        seen = chosen._task(task)
        asked = chosen._asked(seen.problem)
        if seen.problem.sampled:  # by another method
            return dataclasses.replace(chosen, now=asked.prepared_for(seen))
        return dataclasses.replace(
            chosen, now=asked.prepared_anew(prepared._now, seen, state.inner)
        )

    def _has_ended(self, seen: Form, state: SampleState) -> bool:
        """Whether the problem of the subset is solved."""
        return bool(state.solved) or bool(self._now.is_ready(seen, state.inner))

    def reviewed(
        self, prepared: SampleAverage, task: Task, state: SampleState, signals: Tree
    ) -> tuple[SampleAverage, SampleState | None, bool]:
        """That of the method; and whether the problem of this subset is solved by now."""
        seen = prepared._task(task)
        asked = prepared._asked(seen.problem)
        now, inner, changed = asked.reviewed(prepared._now, seen, state.inner, signals)
        following = dataclasses.replace(prepared, now=now)
        if inner is None:
            return following, None, changed
        if prepared.in_passing and not now.part.in_stages:
            found = judge(seen.problem, now.output(seen.problem, inner), sizes=True)
            solved = found.certified(seen.tolerance, seen.relative)
            state = dataclasses.replace(state, solved=jnp.asarray(solved))
        return following, dataclasses.replace(state, inner=inner), changed

    def init(self, problem: Any, start: Point) -> SampleState:
        inner = self._now.init(self.seen(problem), start)
        each, spent = jnp.asarray(self.each, int), jnp.asarray(self.spent, int)
        return SampleState(inner, jnp.zeros((), bool), each, spent)

    def step(self, problem: Any, state: SampleState, limit: Array) -> SampleState:
        inner = self._now.step(self.seen(problem), state.inner, _share(state, limit))
        return dataclasses.replace(state, inner=inner)

    def advance(self, problem: Any, state: SampleState, limit: Array) -> SampleState:
        seen = self.seen(problem)
        onwards = lambda: self._now.advance(seen, state.inner, _share(state, limit))
        inner = lax.cond(state.solved, lambda: state.inner, onwards)
        return dataclasses.replace(state, inner=inner)

    def done(self, problem: Any, state: SampleState) -> Array:
        """Where the method asks for a check, it has solved the problem of its subset."""
        seen = self.seen(problem)
        done = self._now.done(seen, state.inner)
        if self.subset is None:
            return done
        return done | state.solved | self._now.is_ready(seen, state.inner)

    def is_ready(self, problem: Any, state: SampleState) -> Array:
        if self.subset is not None:
            return jnp.zeros((), bool)
        return self._now.is_ready(self.seen(problem), state.inner)

    def linear_solves(self, state: SampleState) -> Any:
        return self._now.linear_solves(state.inner)

    def output(self, problem: Any, state: SampleState) -> Point:
        return self._now.output(self.seen(problem), state.inner)

    def signals(self, problem: Any, state: SampleState) -> Tree:
        return self._now.signals(self.seen(problem), state.inner)

    def stream(self, state: SampleState) -> Any:
        return self._now.stream(state.inner)

    def with_stream(self, state: SampleState, stream: Any) -> SampleState:
        return dataclasses.replace(state, inner=self._now.with_stream(state.inner, stream))


def _share(state: SampleState, limit: Array) -> Array:
    """How many gradients of the method itself fit in so many of minibatches."""
    return (limit - state.spent) // state.minibatches


def _first_subset(task: Task, key: int) -> Subset | None:
    """The samples of all subsets, with the smallest one in use; None where samples are few."""
    source, everything = task.problem.data, task.problem.data.everything()
    least = math.ceil(max(LEAST_SAMPLES, SAMPLES_AN_ENTRY * entries(task.start)) / source.batch)
    if everything is None:
        shapes = jax.eval_shape(lambda: source.draw(source.init(key))[1])
        most = max(least, min(MOST_NUMBERS // entries(shapes), MOST_BATCHES))
    else:
        most = int(minibatches(source)) // GROWTH
        if entries(everything) <= FEW_NUMBERS or most < least:
            return None
    batches = max(least, most // GROWTH**2)
    number = most // batches
    stream, drawn = first_minibatches(source, number * batches, key)
    samples = jax.tree.map(lambda a: a.reshape(number, -1, *a.shape[1:]), drawn)
    corrections = first_corrections(task.problem, task.start)
    chunks = Chunks(samples, np.ones((), int), corrections)
    unknown = np.full((), math.inf)
    return Subset(chunks, stream, NOTHING, error=unknown, strikes=NOTHING, batches=batches)


def first_minibatches(source: Source, count: int, key: int) -> tuple[Any, Tree]:
    """The first minibatches of a source as one, and where a source on the host stands then."""
    if source.everything() is not None:
        return None, _drawn(source, count, key)
    after, batches = source.init(key), []
    for after, batch in itertools.islice(source.batches(after), count):  # noqa: B007, B020
        batches.append(batch)
    return after, jax.tree.map(lambda *leaves: jnp.asarray(np.concatenate(leaves)), *batches)


@quick
def _drawn(source: Source, count: int, key: int) -> Tree:
    batches = lax.scan(lambda s, _: source.draw(s), source.init(key), None, length=count)[1]
    return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), batches)


def _corrected(task: Task, subset: Subset, total: int) -> tuple[Subset | None, int]:
    """The subset with slopes corrected at the start of a task, and the minibatches that this took.

    There is none where corrections do not help.
    """
    problem, point = task.problem, task.start
    known, stream = problem.complete(), subset.stream
    most = MOST_ON_HOST if known is None else MOST_CORRECTIONS
    if int(subset.times) == most or _constraints_vary(problem, subset.chunks, point):
        return None, 0
    if known is not None:
        spent, exact = total, _slopes(known, point)
    else:
        spent = _correction_batches(task, subset)
        stream, exact = _mean_slopes(problem, point, stream, spent)
    error, corrections = _corrections(problem.on(()), subset.chunks, point, exact)
    strikes = 0 if float(error) < SHRINKS * float(subset.error) else int(subset.strikes) + 1
    if strikes == PATIENCE:
        return None, spent
    corrected = dataclasses.replace(
        subset,
        chunks=dataclasses.replace(subset.chunks, corrections=corrections),
        stream=stream,
        times=np.asarray(int(subset.times) + 1),
        error=np.asarray(error, float),
        strikes=np.asarray(strikes),
    )
    return corrected, spent


_slopes = quick(slopes)


def _correction_batches(task: Task, subset: Subset) -> int:
    """The minibatches whose mean slopes should be as exact as is asked for."""
    own = subset.most * subset.batches
    most = (LARGEST_CORRECTION if subset.times else GROWTH) * own
    if subset.most < FEW_CHUNKS:
        return GROWTH * own
    apart = deviation(task.problem.on(()), task.start, subset.chunks.samples)
    wanted = subset.batches * (apart / (NOISE_SHARE * task.tolerance)) ** 2
    return math.ceil(min(max(own, wanted), most))


def _mean_slopes(problem: Any, point: Point, stream: Any, count: int) -> tuple[Any, Tree]:
    """The mean of the slopes over the next minibatches of a source on the host."""
    total, after = None, stream
    for after, batch in itertools.islice(problem.data.batches(stream), count):  # noqa: B007
        found = _slopes(problem.on(batch), point)
        total = found if total is None else jax.tree.map(jnp.add, total, found)
    return after, trees.scale(1 / count, total)


@quick
def _corrections(
    problem: Any, chunks: Chunks, point: Point, exact: dict[str, list]
) -> tuple[Array, dict[str, Correction]]:
    """How far the subset's slopes are off, and what corrects them. ρ weighs the lower level's."""
    at = places(problem, point)
    zero = jax.tree.map(jnp.zeros_like, chunks.corrections)
    own = slopes(on_chunks(problem, chunks), point)
    bare = slopes(on_chunks(problem, dataclasses.replace(chunks, corrections=zero)), point)
    error = jnp.zeros(())
    for name, slope in exact.items():
        weight = jnp.asarray(point.rho if name == "lower" and point.rho is not None else 1.0)
        error = jnp.hypot(error, weight * trees.norm(trees.subtract(slope, own[name])))
    off = {name: trees.subtract(exact[name], bare[name]) for name in exact}
    return error, {name: Correction.of(at[name], off[name]) for name in exact}


def _constraints_vary(problem: Form, chunks: Chunks, point: Point) -> bool:
    """Whether there are constraints that depend on samples: these are not corrected."""
    calls = [call for call in problem.calls(point) if call.name in problem.array_functions]
    first = jax.tree.map(lambda a: a[0, : a.shape[1] // 2], chunks.samples)
    second = jax.tree.map(lambda a: a[0, a.shape[1] // 2 :], chunks.samples)
    one, two = ([c(*c.blocks.values(), half) for c in calls] for half in (first, second))
    return not all(np.allclose(a, b) for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(two)))
