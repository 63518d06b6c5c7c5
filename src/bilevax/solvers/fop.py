"""FOP, a baseline for constrained lower levels: stages of a quadratic penalty."""

from __future__ import annotations

import itertools

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array

from bilevax import trees
from bilevax.arguments import whole
from bilevax.problems import ConstrainedBilevelProblem
from bilevax.solvers.stages import Stage, Stages, StagesState

GROWTH = 5.0


class FOP(Stages):
    """The first-order penalty method of Lu and Mei (2024), over A_k = g + µ_k(‖[c]₊‖² + ‖e‖²).

    `schedule="practical"`, that of the published runs: ρ_k = 5^{k−1}, µ_k = ρ_k², ε_k = 1/ρ_k, up
    to the first ε_k ≤ ε; then up to `extra_stages` more while the violation ‖([c]₊, e)‖ or the
    lower-level gap of (x, y) is above ε. `"theory"`: one stage, ρ = 1/ε, µ = 1/ε². In both
    ε̂_k = min(ε_k^{5/2}, ε_k/2), where the second part is what the proof needs for ε_k > 0.63.
    λ = 2ρµ[c(x, y)]₊, λ̄ = 2µ[c(x, z)]₊, and likewise ν, ν̄ without [·]₊.

    `stages` is their number before the extra ones; all other options are those of `Stages`.
    """

    extra_stages: int = eqx.field(static=True, default=3)

    def __check_init__(self):
        whole(self.extra_stages, "FOP: extra_stages", 0)

    def count(self, epsilon: float) -> int:
        if self.schedule == "theory":
            return 1
        return next(k + 1 for k in itertools.count() if 1 / GROWTH ** (k - 1) <= epsilon)

    def constants(self, stage: Array) -> Stage:
        dtype = self.epsilon.dtype
        if self.schedule == "theory":
            rho = 1 / self.epsilon
        else:
            rho = jnp.asarray(GROWTH, dtype) ** (stage - 1).astype(dtype)
        epsilon = 1 / rho
        return Stage(rho, 2 * rho**2, epsilon, jnp.minimum(epsilon**2.5, epsilon / 2))

    def enough(self, problem: ConstrainedBilevelProblem, state: StagesState) -> Array:
        """The published test: ‖([c]₊, e)‖ ≤ ε at (x, y), and a lower-level gap ≤ ε.

        The gap is bounded without a gradient. Feasible points have A_k ≤ g, so min g ≥ min A_k; and
        where the stage has ended, dist(0, ρ∂A_k(x, ·)) ≤ ε_k at z, so A_k(x, z) − min A_k is at
        most ε_k·D/ρ_k. Hence g(x, y) − min g ≤ g(x, y) − A_k(x, z) + ε_k·D/ρ_k.
        """
        if self.schedule == "theory":
            return jnp.asarray(True)
        p, answer = problem, state.answer
        x, y, z = answer.x, answer.y, answer.z
        above = jax.tree.map(lambda c: jnp.maximum(c, 0), p.called("constraints", x, y))
        violation = trees.norm((above, p.called("equalities", x, y)))
        stage = self.constants(state.stage)
        lower, _ = self._lower(p, stage, state.shift)
        least = lower(x, z, *p.extra) + p.y.value(z) - stage.epsilon * self.diameter / stage.rho
        gap = p.lower_value(x, y) - least
        met = (violation <= self.epsilon) & (gap <= self.epsilon)
        return met | (state.stage + 1 >= self.stages + self.extra_stages)
