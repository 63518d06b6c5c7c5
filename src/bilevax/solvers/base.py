"""What a solver is: a frozen module that begins, steps, says when it is done, shows its point."""

from __future__ import annotations

import abc
from typing import Any, ClassVar, Generic, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from bilevax.arguments import positive, whole
from bilevax.problems import Point
from bilevax.problems.stochastic import ready

State = TypeVar("State")


class Solver(eqx.Module, Generic[State]):
    """One method. It holds constants only; what changes between steps is its state.

    Nothing here loops on the host: `bilevax.solve` compiles `step` into a loop. A state has a field
    `gradients`, the exact number of gradient evaluations so far, and holds finite numbers only
    unless the user's functions gave others.

    A solver of bilevel problems gets a constrained one as its Lagrangian, unless it
    `takes_constraints` as they are. When the bounds of its multipliers grow the solver begins anew
    from where it is, with constants for the new bounds, unless it `keeps_state`. A method that goes
    by stages, between which ε rises, says `in_stages`, and is then not taken for stalled. One that
    `takes_samples` solves problems whose data is a source of minibatches too; where that source is
    in its samples is the `stream` in its state.
    """

    takes_constraints: ClassVar[bool] = False
    keeps_state: ClassVar[bool] = False
    in_stages: ClassVar[bool] = False
    takes_samples: ClassVar[bool] = False
    draws_per_step: ClassVar[int] = 2  # of a method that takes samples

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

    def stream(self, state: State) -> Any:
        """Where the data source is in its samples; None if there is none."""
        return None

    def with_stream(self, state: State, stream: Any) -> State:
        return state

    def advance(self, problem: Any, state: State, limit: Array) -> State:
        """Step until done, or until another step would need more than `limit` gradients.

        Or until a data source on the host has to be asked for more.
        """

        def going(s: Any) -> Array:
            room = s.gradients + self.gradients_per_step <= limit
            there = ready(problem, self.stream(s), self.draws_per_step)
            return room & there & ~self.done(problem, s)

        return lax.while_loop(going, lambda s: self.step(problem, s, limit), state)


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


def check_key(solver: Any) -> None:
    """Refuse what is no whole number; JAX's keys are made from it."""
    key = solver.key
    if not isinstance(key, jax.Array) or jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        whole(key, f"{type(solver).__name__}: key", 0)
