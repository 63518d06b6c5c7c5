"""Newton's direction for a natural map: the map, its generalised derivative, the linear system."""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array

from bilevax.solvers.penalised import Penalised


def irregular(like: Array) -> Array:
    """A vector that a derivative takes to zero in those entries only that it takes to zero."""
    return 2 + jnp.sin(jnp.arange(like.size, dtype=like.dtype) ** 2)


class Natural(eqx.Module):
    """R(w) = (w − prox_{sΦ}(w − s·F(w)))/s, whose zeros are the saddle points of P_ρ.

    F = (∇ₓP, −∇ᵧP), Φ are the terms, and s is one step for each block.
    """

    penalised: Penalised
    steps: Array

    def __call__(self, w: Array, slope: Array) -> Array:
        """R at a point where F is known."""
        s = self._spread
        return (w - self.penalised.prox(w - s * slope, self.steps)) / s

    @property
    def _spread(self) -> Array:
        return self.penalised.blocks.spread(self.steps)

    def _pushed(self, w: Array, slope: Array, tangents: Array) -> Array:
        """An element D of the generalised derivative of the prox at w − s·F, times each column."""
        prox = lambda v: self.penalised.prox(v, self.steps)
        at = w - self._spread * slope
        return jax.vmap(lambda t: jax.jvp(prox, (at,), (t,))[1], 1, 1)(tangents)

    def held(self, w: Array, slope: Array) -> Array:
        """Which entries their term holds: the prox does not move with them."""
        return self._pushed(w, slope, irregular(w)[:, None])[:, 0] == 0

    def system(self, w: Array, slope: Array, hessian: Array, weights: Array) -> tuple[Array, Array]:
        """(I − D(I − s(∂F + W)))/s and R of Newton's equation A·d = −R.

        W regularises: with it, d is the step to a proximal point around w, linearised.
        """
        s, eye = self._spread, jnp.eye(w.size, dtype=w.dtype)
        bent = hessian + jnp.diag(weights)
        moved = self._pushed(w, slope, eye - s[:, None] * bent)
        return (eye - moved) / s[:, None], self(w, slope)

    def direction(
        self, w: Array, slope: Array, hessian: Array, weights: Array, free: Array
    ) -> Array:
        """d with A·d = −R in the free entries, and zero in the others."""
        matrix, rest = self.system(w, slope, hessian, weights)
        matrix = jnp.where(free[:, None], matrix, jnp.diag(1 / self._spread))
        return jnp.linalg.solve(matrix, jnp.where(free, -rest, 0))
