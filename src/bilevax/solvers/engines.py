"""Engines: Newton's steps where curvature is what counts, and first-order steps elsewhere."""

from __future__ import annotations

from typing import Any, ClassVar

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
from bilevax.solvers.best_response import BestResponse
from bilevax.solvers.composite import Sequence
from bilevax.solvers.newton import Newton, takes
from bilevax.solvers.penalised import sizes_of
from bilevax.solvers.responses import parts_of, width_of

# Curvature below this share of slopes, over a unit of length, counts as none.
STRAIGHT = 1e-9
# First-order steps that begin leave off after so many gradients: at least so many, and about what
# some tens of Newton's linear systems cost.
PATIENCE, PATIENCE_AN_ENTRY = 5_000, 60
# Best responses begin where their systems take at most this share of the work of Newton's.
CHEAPER = 0.1


class Engines(Sequence):
    """The paper's penalty problem by two engines, `Newton` and `Adaptive`: what `solve` takes.

    Where both adversaries' answers are in closed form, and many weights are theirs, `BestResponse`
    begins. Newton's steps begin where the lower level or its domain is curved, and the problem is
    not too large for their linear systems. Where they end nowhere, those with barriers begin at the
    start, and where these do too, first-order steps go on from the best point. Where the lower
    level is piecewise linear, first-order steps begin, and come once more at the end. `rho` is a
    first guess for all.
    """

    is_tight: ClassVar[bool] = True

    rho: Any

    def __init__(self, rho: Any = None):
        newton, inside = Newton(rho=rho), Newton(rho=rho, interior=True)
        super().__init__(newton, inside, Adaptive(rho=rho))
        self.rho = rho

    def chosen_for(self, task: Task) -> Sequence:
        """With the one first that the problem is for."""
        return Sequence(*self._ordered(task))

    def prepared_for(self, task: Task) -> Sequence:
        return self.chosen_for(task).prepared_for(task)

    def prepared_at(self, stage: tuple, task: Task) -> Sequence:
        return self.chosen_for(task).prepared_at(stage, task)

    def _ordered(self, task: Task) -> list[Solver]:
        others = self._by_curvature(task)
        return [BestResponse(rho=self.rho), *others] if _answers(task) else others

    def _by_curvature(self, task: Task) -> list[Solver]:
        (newton, inside, adaptive), entries = self.solvers, sum(sizes_of(task.start))
        if not takes(task.start, interior=False):
            return [adaptive]
        problem = task.problem
        terms = [term for term in (problem.y1, problem.y2) if term is not None]
        flat = all(term.is_polyhedral for term in terms)
        curved = not flat or bool(_bends(problem, task.start))
        if not takes(task.start, interior=True):
            return [newton, adaptive] if curved else [adaptive]
        if curved:
            return [newton, inside, adaptive]
        patience = max(PATIENCE, PATIENCE_AN_ENTRY * entries)
        return [Adaptive(rho=self.rho, patience=patience), inside, newton, adaptive]


def _answers(task: Task) -> bool:
    """Whether best responses are to begin."""
    if task.noisy or not (parts := parts_of(task.problem, task.start)):
        return False
    width = width_of(task.start, parts)
    return parts * width**3 <= CHEAPER * sum(sizes_of(task.start)) ** 3


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
