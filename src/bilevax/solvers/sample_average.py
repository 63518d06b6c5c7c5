"""SampleAverage: many samples by a method for plain data, on growing subsets of them."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from bilevax.arguments import whole
from bilevax.certificates import judge
from bilevax.data import Source
from bilevax.data.source import minibatches
from bilevax.problems import Form, Point
from bilevax.programs import entries, quick
from bilevax.solvers.base import Solver, Task, check_part, default_solver
from bilevax.solvers.composite import composed
from bilevax.solvers.penalty import PenaltyMethod
from bilevax.solvers.stochastic_proximal_point import practical
from bilevax.trees import Tree

# Each subset has so many times the samples of the one before; so many come before all samples.
GROWTH, SUBSETS = 8, 2
# The first one has at least so many samples, and so many for each entry of the start.
LEAST_SAMPLES, SAMPLES_AN_ENTRY = 128, 2
# The problem of a subset of n samples is solved up to this share of 1/√n of the sizes at hand, or
# as exactly as is asked for: more would be lost with the next subset.
SUBSET_SHARE = 0.3
# All samples are taken at once if they have at most so many numbers: each subset has programs of
# its own, which have to be compiled.
FEW_NUMBERS = 1 << 22
# A subset of what is not in memory has at most so many numbers and minibatches.
MOST_NUMBERS, MOST_BATCHES = 1 << 24, 10_000


def _stochastic() -> Solver:
    return PenaltyMethod(starter=None, outer=practical())


class SampleState(eqx.Module):
    """The state of the method at work, and what one of its gradients counts for."""

    inner: Any
    solved: Array  # whether the problem of this subset is
    minibatches: int = eqx.field(static=True)

    @property
    def gradients(self) -> Array:
        return self.inner.gradients * self.minibatches


class SampleAverage(Solver[SampleState]):
    """A problem whose data is a source of minibatches, by a method that takes all its data.

    The mean over a subset of the samples stands for the mean over all. The method solves that
    problem, then that of a subset eight times as large, which has the smaller one in it, from
    there, and so on; at last that of all samples, if they are in memory. Where these are few, they
    come first. A run is judged on all samples whenever a subset's problem is solved, and ends as
    soon as the certificate holds there. Where samples are not in memory, subsets grow as far as
    memory allows, and `last`, a stochastic method, goes on.

    `solver` is the one for a problem with plain data, by default the one that `solve` takes. `key`
    decides on the subsets. Gradients are counted in those of a minibatch: one of all samples counts
    for as many as there are minibatches.
    """

    form: ClassVar[type[Form]] = Form
    takes_samples: ClassVar[bool] = True

    solver: Solver | None = None
    last: Solver = eqx.field(default_factory=_stochastic)
    key: int = eqx.field(static=True, default=0)
    counts: tuple[int, ...] = eqx.field(static=True, default=())
    at: int = eqx.field(static=True, default=0)
    now: Solver | None = None
    subset: Tree = None  # its samples, unless it is all of them

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
    def is_last(self) -> bool:
        return self.at == len(self.counts) - 1

    @property
    def in_passing(self) -> bool:
        return not self.is_last

    @property
    def gradients_per_step(self) -> int:
        return self.counts[self.at] * self._now.gradients_per_step

    def review_gradients(self, state: SampleState) -> int:
        return state.minibatches * self._now.review_gradients(state.inner)

    def prepare(self, problem: Any, start: Point, tolerance: float) -> SampleAverage:
        return self.prepared_for(Task(problem, start, tolerance))

    def prepared_for(self, task: Task) -> SampleAverage:
        if not task.problem.sampled:
            raise ValueError(
                "SampleAverage is for data that is a source of minibatches, such as "
                "bilevax.data.Arrays(…)"
            )
        counts = self.counts or _counts(task)
        return dataclasses.replace(self, counts=counts)._taking(self.at, task, choosing=True)

    def _taking(self, at: int, task: Task, choosing: bool = False) -> SampleAverage:
        """Prepared for one of the subsets; what the first one chooses holds for all."""
        subset = None
        if at < len(self.counts) - 1:
            subset = first_minibatches(task.problem.data, self.counts[at], self.key)
        chosen = dataclasses.replace(self, at=at, now=None, subset=subset)
        seen = chosen._task(task)
        asked = chosen._asked(seen.problem)
        if choosing and not seen.problem.sampled:
            asked = asked.chosen_for(seen)
            chosen = dataclasses.replace(chosen, solver=asked)
        return dataclasses.replace(chosen, now=asked.prepared_for(seen))

    def _asked(self, seen: Form) -> Solver:
        """The method for the problem of this subset."""
        given = self.last if seen.sampled else self.solver
        return composed(default_solver(seen) if given is None else given, seen)

    def seen(self, problem: Any) -> Any:
        """The problem of this subset, of all samples, or the stated one."""
        return problem.complete() or problem if self.is_last else problem.on(self.subset)

    def view(self, problem: Any) -> Any:
        return problem if self.is_last else problem.on(())

    def _task(self, task: Task) -> Task:
        """What is asked of the method on this subset."""
        relative, samples = task.relative, self.counts[self.at] * task.problem.data.batch
        if not self.is_last:
            relative = max(relative, SUBSET_SHARE / samples**0.5)
        return dataclasses.replace(task, problem=self.seen(task.problem), relative=relative)

    # What is asked of it is in the prepared one, too.

    def prepared_again(self, prepared: SampleAverage, task: Task) -> SampleAverage:
        return prepared._taking(prepared.at, task)

    def prepared_anew(
        self, prepared: SampleAverage, task: Task, state: SampleState
    ) -> SampleAverage:
        seen = prepared._task(task)
        now = prepared._asked(seen.problem).prepared_anew(prepared._now, seen, state.inner)
        return dataclasses.replace(prepared, now=now)

    def relieved(
        self, prepared: SampleAverage, task: Task, state: SampleState
    ) -> SampleAverage | None:
        """The next subset; on the last one, what the method itself lets go on."""
        if not prepared.is_last:
            return prepared._taking(prepared.at + 1, task)
        seen = prepared._task(task)
        now = prepared._asked(seen.problem).relieved(prepared._now, seen, state.inner)
        return None if now is None else dataclasses.replace(prepared, now=now)

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
        if not prepared.is_last:
            found = judge(seen.problem, now.output(seen.problem, inner), sizes=True)
            solved = found.certified(seen.tolerance, seen.relative)
            state = dataclasses.replace(state, solved=jnp.asarray(solved))
        return following, dataclasses.replace(state, inner=inner), changed

    def init(self, problem: Any, start: Point) -> SampleState:
        inner = self._now.init(self.seen(problem), start)
        return SampleState(inner, jnp.zeros((), bool), self.counts[self.at])

    def step(self, problem: Any, state: SampleState, limit: Array) -> SampleState:
        inner = self._now.step(self.seen(problem), state.inner, limit // state.minibatches)
        return dataclasses.replace(state, inner=inner)

    def advance(self, problem: Any, state: SampleState, limit: Array) -> SampleState:
        seen, limit = self.seen(problem), limit // state.minibatches
        onwards = lambda: self._now.advance(seen, state.inner, limit)
        inner = lax.cond(state.solved, lambda: state.inner, onwards)
        return dataclasses.replace(state, inner=inner)

    def done(self, problem: Any, state: SampleState) -> Array:
        """Where the method asks for a check, it has solved the problem of its subset."""
        seen = self.seen(problem)
        done = self._now.done(seen, state.inner)
        if self.is_last:
            return done
        return done | state.solved | self._now.is_ready(seen, state.inner)

    def is_ready(self, problem: Any, state: SampleState) -> Array:
        if not self.is_last:
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


def first_minibatches(source: Source, count: int, key: int) -> Tree:
    """The first minibatches of a source, as one."""
    if source.everything() is not None:
        return _drawn(source, count, key)
    stream, batches = source.refilled(source.init(key)), []
    while len(batches) < count:
        if not bool(source.ready(stream)):
            stream = source.refilled(stream)
        stream, batch = source.draw(stream)
        batches.append(jax.tree.map(np.asarray, batch))
    return jax.tree.map(lambda *leaves: jnp.asarray(np.concatenate(leaves)), *batches)


@quick
def _drawn(source: Source, count: int, key: int) -> Tree:
    batches = lax.scan(lambda s, _: source.draw(s), source.init(key), None, length=count)[1]
    return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), batches)


def _counts(task: Task) -> tuple[int, ...]:
    """How many minibatches each subset has; the last one is all of them, or one at a time."""
    source, everything = task.problem.data, task.problem.data.everything()
    least = math.ceil(max(LEAST_SAMPLES, SAMPLES_AN_ENTRY * entries(task.start)) / source.batch)
    if everything is None:
        each = entries(jax.eval_shape(lambda: source.draw(source.init(0))[1]))
        counts = []
        while not counts or (least * each <= MOST_NUMBERS and least <= MOST_BATCHES):
            counts.append(least)
            least *= GROWTH
        return (*counts, 1)
    counts = [math.ceil(minibatches(source))]
    many = entries(everything) > FEW_NUMBERS
    while many and counts[0] >= GROWTH * least and len(counts) <= SUBSETS:
        counts.insert(0, math.ceil(counts[0] / GROWTH))
    return tuple(counts)
