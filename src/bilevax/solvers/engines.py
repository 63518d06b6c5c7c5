"""Engines: Newton's steps where curvature is what counts, and first-order steps elsewhere."""

from __future__ import annotations

from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from bilevax import trees
from bilevax.problems import BilevelProblem, Point
from bilevax.problems.constants import sample_domain
from bilevax.programs import quick
from bilevax.solvers.adaptive import Adaptive
from bilevax.solvers.base import Solver, Task
from bilevax.solvers.composite import Sequence
from bilevax.solvers.newton import MOST_ENTRIES, Newton
from bilevax.solvers.penalised import entries_of

# Curvature below this share of slopes, over a unit of length, counts as none.
STRAIGHT = 1e-9


class Engines(Sequence):
    """The paper's penalty problem by two engines, `Newton` and `Adaptive`: what `solve` takes.

    Newton's steps begin where the lower level or its domain is curved, and the problem is not too
    large for their linear systems; where they end nowhere, first-order steps go on from the best
    point. Where the lower level is piecewise linear it is the other way round. `rho` is a first
    guess for both.
    """

    is_tight: ClassVar[bool] = True

    first: Solver | None = eqx.field(default=None, init=False)
    second: Solver | None = eqx.field(default=None, init=False)
    at_second: bool = eqx.field(static=True, default=False, init=False)
    rho: Any = None

    def prepared_for(self, task: Task) -> Sequence:
        return self._ordered(task).prepared_for(task)

    def prepared_again(self, prepared: Sequence, task: Task) -> Sequence:
        return self._as(prepared).prepared_again(prepared, task)

    def relieved(self, prepared: Sequence, task: Task, state: Any) -> Sequence | None:
        too_large = entries_of(task.start) > MOST_ENTRIES
        return None if too_large else self._as(prepared).relieved(prepared, task, state)

    def prepared_anew(self, prepared: Sequence, task: Task, state: Any) -> Sequence:
        return self._as(prepared).prepared_anew(prepared, task, state)

    def reviewed(
        self, prepared: Sequence, task: Task, state: Any, signals: Any
    ) -> tuple[Sequence, Any, bool]:
        return self._as(prepared).reviewed(prepared, task, state, signals)

    @property
    def part(self) -> Solver:
        return Newton()

    @property
    def form(self) -> type[BilevelProblem]:
        return BilevelProblem

    def _ordered(self, task: Task) -> Sequence:
        """Which of the two begins, and which one follows."""
        newton, adaptive = Newton(rho=self.rho), Adaptive(rho=self.rho)
        if entries_of(task.start) > MOST_ENTRIES:
            return Sequence(adaptive, None)
        problem = task.problem
        terms = [term for term in (problem.y1, problem.y2) if term is not None]
        flat = all(term.is_polyhedral for term in terms)
        if not flat or bool(_bends(problem, task.start)):
            return Sequence(newton, adaptive)
        return Sequence(adaptive, newton)

    def _as(self, prepared: Sequence) -> Sequence:
        """The order in which a prepared one was."""
        newton, adaptive = Newton(rho=self.rho), Adaptive(rho=self.rho)
        newton_now = isinstance(prepared.part, Newton)
        order = (newton, adaptive) if newton_now != prepared.at_second else (adaptive, newton)
        return Sequence(*order)


@quick
def _bends(problem: BilevelProblem, start: Point) -> Array:
    """Whether ∂²f~/∂y1² is not zero, at a few samples of y1 and with all multipliers at work."""
    y2 = jax.tree.map(jnp.ones_like, start.y2)

    def at(key: Array) -> Array:
        of_y1, of_v = jax.random.split(key)
        y1 = sample_domain(problem.y1, start.y1, of_y1)
        v = sample_domain(problem.y1, start.y1, of_v)
        slope = lambda y1: jax.grad(problem.smooth_lower, argnums=1)(start.x1, y1, y2)
        here, bent = jax.jvp(slope, (y1,), (v,))
        curved = trees.norm(bent) > STRAIGHT * trees.norm(here) * trees.norm(v)
        return curved | ~trees.all_finite((here, bent))  # a straight function is finite

    return jnp.any(lax.map(at, jax.random.split(jax.random.key(0), 3)))
