"""FOP, a baseline for constrained lower levels: stages of a quadratic penalty."""

from __future__ import annotations

import itertools

import jax.numpy as jnp
from jaxtyping import Array

from bilevax.solvers.stages import Stage, Stages

GROWTH = 5.0


class FOP(Stages):
    """The first-order penalty method of Lu and Mei (2024), over A_k = g + µ_k(‖[c]₊‖² + ‖e‖²).

    `schedule="practical"`, that of the published runs: ρ_k = 5^{k−1}, µ_k = ρ_k², ε_k = 1/ρ_k, up
    to the first ε_k ≤ ε. `"theory"`: one stage, ρ = 1/ε, µ = 1/ε². In both
    ε̂_k = min(ε_k^{5/2}, ε_k/2), where the second part is what the proof needs for ε_k > 0.63.
    λ = 2ρµ[c(x, y)]₊, λ̄ = 2µ[c(x, z)]₊, and likewise ν, ν̄ without [·]₊.

    The options are those of `Stages`.
    """

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
