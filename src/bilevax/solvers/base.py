"""What a solver is: a frozen module that begins, steps, says when it is done, shows its point."""

from __future__ import annotations

import abc
import dataclasses
from typing import Any, ClassVar, Generic, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from bilevax.arguments import positive, whole
from bilevax.certificates.definition import slope_at
from bilevax.certificates.sampled import CONFIDENCE
from bilevax.problems import Form, Point, registered
from bilevax.programs import quick
from bilevax.trees import Tree

State = TypeVar("State")


@dataclasses.dataclass(frozen=True)
class Task:
    """What is asked of a solver: a problem, where to begin, and how exact to be."""

    problem: Any
    start: Point
    tolerance: float
    relative: float = 0.0
    # Whether points are judged on samples: then lines are off by what grows with ρ.
    noisy: bool = False
    confidence: float = CONFIDENCE  # of a certificate from samples


class Solver(eqx.Module, Generic[State]):
    """One method. It holds constants only; what changes between steps is its state.

    Nothing here loops on the host: the driver compiles `step` into a loop. A state has a field
    `gradients`, the exact number of gradient evaluations so far, and holds finite numbers only
    unless the user's functions gave others.

    `form` is the problem form that it solves. Solvers are composed: `part` is the one at work.
    """

    form: ClassVar[type[Form]]
    # When the problem changes in a run, as multiplier bounds grow, the method goes on from its
    # state; else it begins anew from where it is, with constants for the new problem.
    keeps_state: ClassVar[bool] = False
    # A theorem says that it arrives: it is not called stalled while its objective still falls.
    has_theorem: ClassVar[bool] = False
    # It goes by stages, between which ε rises: it is never called stalled.
    in_stages: ClassVar[bool] = False
    # Many digits of its answers cost hardly more than a few.
    is_tight: ClassVar[bool] = False
    # It takes data that is a source of minibatches; then `stream` is where that source stands.
    takes_samples: ClassVar[bool] = False
    draws_per_step: ClassVar[int] = 2  # of a method that takes samples

    @property
    def title(self) -> str:
        """How sentences name it."""
        return type(self).__name__

    @property
    def begins_anew(self) -> bool:
        """Whether it begins at the start, and not at the best point, where it follows another."""
        return False

    @property
    def handover_gradients(self) -> int:
        """What another method that goes on may take before it is checked, at most."""
        return self.gradients_per_step

    @property
    def in_passing(self) -> bool:
        """Whether another goes on by plan where this one ends: then nothing is wrong."""
        return False

    @property
    def provisional(self) -> bool:
        """Whether points at hand are to be improved by plan, so that no long look at them pays."""
        return False

    @abc.abstractmethod
    def prepare(self, problem: Any, start: Point, tolerance: float) -> Solver:
        """On the host, before anything runs: the same solver with every constant set.

        Refuses, with the reason, a problem outside of what the method can solve.
        """

    @abc.abstractmethod
    def init(self, problem: Any, start: Point) -> State:
        """The state at the start; evaluates no gradient."""

    @abc.abstractmethod
    def step(self, problem: Any, state: State, limit: Array) -> State:
        """One iteration, begun only if it ends with at most `limit` gradients in all."""

    @abc.abstractmethod
    def done(self, problem: Any, state: State) -> Array:
        """Whether the method's own stopping test holds."""

    @abc.abstractmethod
    def output(self, problem: Any, state: State) -> Point:
        """The point that the method would return now, with its witnesses."""

    @property
    @abc.abstractmethod
    def gradients_per_step(self) -> int:
        """The most gradients that one indivisible step takes."""

    def cut_short(self, state: State) -> Any:
        """Whether a limit on its iterations has ended it, or a part of it, before its own test."""
        return False

    def output_index(self, state: State) -> Any:
        """Which of its iterates `output` is, counted from 1; None of a method that draws none."""
        return None

    def is_ready(self, problem: Any, state: State) -> Array:
        """Whether the point may be certified now: a check is asked for."""
        return jnp.zeros((), bool)

    def linear_solves(self, state: State) -> Any:
        """The exact number of linear systems so far, of a method that solves such."""
        return 0

    def stream(self, state: State) -> Any:
        """Where the data source is in its samples; None if there is none."""
        return None

    def with_stream(self, state: State, stream: Any) -> State:
        return state

    def advance(self, problem: Any, state: State, limit: Array) -> State:
        """Step until done, or until another step would need more than `limit` gradients.

        Or until a step has asked for a check, or a data source on the host has to be asked for
        more.
        """

        def going(carry: tuple[Any, Array]) -> Array:
            s, ready = carry
            room = s.gradients + self.gradients_per_step <= limit
            stream = self.stream(s)
            there = stream is None or problem.data.ready(stream, self.draws_per_step)
            return room & there & ~ready & ~self.done(problem, s)

        def onwards(carry: tuple[Any, Array]) -> tuple[Any, Array]:
            s = self.step(problem, carry[0], limit)
            return s, self.is_ready(problem, s)

        return lax.while_loop(going, onwards, (state, jnp.zeros((), bool)))[0]

    def view(self, problem: Any) -> Any:
        """The problem without the data that no step reads: what programs of steps are given."""
        return problem

    # How a solver takes part in a run. All of this is on the host. `self` is the solver as it was
    # asked for; `prepared` is what `prepared_for` made of it.

    def prepared_for(self, task: Task) -> Solver:
        """`prepare`; a relative tolerance is a share of the slopes at the start."""
        tolerance = task.tolerance
        if task.relative:
            tolerance += task.relative * slope_at(task.problem, task.start)
        return self.prepare(task.problem, task.start, tolerance)

    @property
    def stage(self) -> tuple:
        """Which of its parts is at work, as plain values: a saved run needs no more to go on."""
        return ()

    def prepared_at(self, stage: tuple, task: Task) -> Solver:
        """The solver as it was prepared at that stage, but for its numbers."""
        return self.prepared_for(task)

    def chosen_for(self, task: Task) -> Solver:
        """The same method with the choices made that it makes by looking at a problem."""
        return self

    def prepared_again(self, prepared: Any, task: Task) -> Solver:
        """The constants of the part at work, for a problem that has changed."""
        return self.prepared_for(task)

    @property
    def part(self) -> Solver:
        """The method at work, of one that is composed of several."""
        return self

    def signals(self, problem: Any, state: State) -> Tree:
        """What a check needs besides the point. It is computed in the compiled program."""
        return ()

    def reviewed(
        self, prepared: Any, task: Task, state: State, signals: Tree
    ) -> tuple[Solver, State | None, bool]:
        """After a scheduled check: what to go on with, and whether that sees another problem now.

        Without a state it begins anew from where it is.
        """
        return prepared, state, False

    def review_gradients(self, state: State) -> int:
        """The most gradients that `reviewed` takes from this state."""
        return 0

    def relieved(self, prepared: Any, task: Task, state: State) -> Solver | None:
        """The method that goes on, prepared, where this one has given up; None if none does."""
        return None

    def prepared_anew(self, prepared: Any, task: Task, state: State) -> Solver:
        """Prepared to begin anew at a start with all its witnesses, and to stay near it."""
        return self.prepared_for(task)

    def advice(self) -> str:
        """What to try where an answer is not certified."""
        return "try a smaller tolerance for the solver"


def default_solver(problem: Form) -> Solver:
    """The solver that is registered for the form of a problem."""
    made = registered(problem, "solver")
    if made is None:
        name = type(problem).__name__
        raise TypeError(
            f"there is no default solver for a {name}; name one with solver=, or "
            f"bilevax.problems.register({name}, solver=…)"
        )
    return made(problem)


@quick
def initial(solver: Solver, problem: Any, start: Point) -> Any:
    """The state at a start."""
    return solver.init(problem, start)


class InnerSolver(Solver[State]):
    """A solver of strongly-convex-strongly-concave problems that an outer method can steer."""

    @abc.abstractmethod
    def tuned(self, smoothness: Any, sigma_x: Any, sigma_y: Any, tolerance: Any) -> InnerSolver:
        """The same method with these constants, which may be traced."""


def check_part(solver: Solver, name: str, kind: type) -> None:
    """Refuse a part of a solver that is not of its kind."""
    part = getattr(solver, name)
    if not isinstance(part, kind):
        whole, wanted = type(solver).__name__, kind.__name__
        example = "OptFOM" if kind is InnerSolver else wanted
        raise TypeError(f"{whole}: {name} must be one such as bilevax.{example}(), not {part!r}")


def check_center(solver: Solver, center: str) -> None:
    """Refuse a centre of the dual regulariser that is neither the first nor the last iterate."""
    if center not in ("start", "last"):
        raise ValueError(
            f"{type(solver).__name__}: center must be 'start' or 'last', not {center!r}"
        )


def check_positive(solver: Solver, *names: str) -> None:
    """Refuse constants of a solver that are given and not one positive finite number."""
    for name in names:
        positive(getattr(solver, name), f"{type(solver).__name__}: {name}")


def check_most(solver: Any) -> None:
    """Refuse a limit on iterations that is given and no whole number from 1 on."""
    if solver.max_iterations is not None:
        whole(solver.max_iterations, f"{type(solver).__name__}: max_iterations", 1)


def reached(count: Array, most: int | None) -> Array:
    """Whether a count of iterations is at its limit; None is no limit."""
    return jnp.zeros((), bool) if most is None else count >= most


def check_key(solver: Any) -> None:
    """Refuse what is no whole number; JAX's keys are made from it."""
    key = solver.key
    if not isinstance(key, jax.Array) or jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        whole(key, f"{type(solver).__name__}: key", 0)
