"""SMO, a baseline for constrained lower levels: stages of an augmented Lagrangian."""

from __future__ import annotations

import itertools
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array

from bilevax.solvers.stages import Stage, Stages

DECAY = 0.8


class SMO(Stages):
    """The sequential minimax optimisation of Lu and Mei (2025).

    A_k = g + (‖[λ_k + µ_k·c]₊‖² + ‖ν_k + µ_k·e‖² − ‖λ_k‖² − ‖ν_k‖²)/(2µ_k), λ_0 = 0, ν_0 = 0, with
    ε_k = 0.8^k, or ε where that is less in the last stage before the extra ones, ρ_k = 1/ε_k,
    µ_k = ε_k⁻³ and ε̂_k = ε_k/(2√µ_k).
    λ = ρ[λ_k + µc(x, y)]₊, λ̄ = [λ_k + µc(x, z)]₊, which is λ_{k+1}, and likewise ν, ν̄ without
    [·]₊. Only one schedule is published, so both names of `schedule` stand for it. The options are
    those of `Stages`.
    """

    keeps_multipliers: ClassVar[bool] = True

    def count(self, epsilon: float) -> int:
        return next(k + 1 for k in itertools.count() if DECAY**k <= epsilon)

    def constants(self, stage: Array) -> Stage:
        dtype = self.epsilon.dtype
        decayed = jnp.asarray(DECAY, dtype) ** stage.astype(dtype)
        least = jnp.where(stage < self.stages, self.epsilon, 0)
        epsilon = jnp.maximum(decayed, least)
        weight = epsilon**-3
        return Stage(1 / epsilon, weight, epsilon, epsilon / (2 * jnp.sqrt(weight)))
