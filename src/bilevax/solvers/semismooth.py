"""Newton's direction for a natural map: the map, its generalised derivative, the linear system."""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array

from bilevax.solvers.curvature import X1
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

    def free(self, w: Array, slope: Array) -> Array:
        """Which entries their term does not hold, and all of x1."""
        return ~self.held(w, slope) | jnp.asarray(self.penalised.blocks.owner == X1)

    def columns(self, w: Array, slope: Array, most: int) -> Columns:
        """∂F, in all its columns or, of more than so many, in those of free entries.

        The entries of x1 come first, and must not be more than that. Where a derivative is not
        finite, as that of |y|^1.5 is at zero, it counts as none: another place will have one.
        """
        known = lambda hessian: jnp.where(jnp.isfinite(hessian), hessian, 0)
        if w.size <= most:
            return Columns(known(self.penalised.jacobian(w)), None)
        index = jnp.argsort(~self.free(w, slope), stable=True)[:most]
        return Columns(known(self.penalised.columns(w, index)), index)

    def equation(self, w: Array, slope: Array, columns: Columns, weights: Array) -> Equation:
        """A = (I − D(I − s(∂F + W)))/s, and R, for Newton's equation A·d = −R.

        W regularises: with it, d is the step to a proximal point around w, linearised. Entries
        that are left out of the columns go to where their term holds them: d = −s·R there.
        """
        s, rest, c = self._spread, self(w, slope), columns
        eye = c.units(w)
        bent = c.hessian + eye * c.chosen(weights)[None, :]
        matrix = c.chosen(eye - self._pushed(w, slope, eye - s[:, None] * bent))
        matrix = matrix / c.chosen(s)[:, None]
        if c.index is None:
            return Equation(matrix, rest, jnp.zeros_like(w), slope, c)
        held = jnp.where(self.held(w, slope), -s * rest, 0).at[c.index].set(0)
        bent_by = jax.jvp(self.penalised.operator, (w,), (held,))[1]
        pushed = self._pushed(w, slope, (held - s * bent_by)[:, None])[:, 0]
        rest = c.chosen(rest + (held - pushed) / s)
        return Equation(matrix, rest, held, slope + bent_by, c)

    def direction(
        self, w: Array, slope: Array, columns: Columns, weights: Array, free: Array
    ) -> Array:
        """d with A·d = −R in the free entries, and zero in the others."""
        equation = self.equation(w, slope, columns, weights)
        free = columns.chosen(free)
        steps = columns.chosen(self._spread)
        matrix = jnp.where(free[:, None], equation.matrix, jnp.diag(1 / steps))
        return equation.spread(jnp.linalg.solve(matrix, jnp.where(free, -equation.rest, 0)))


class Columns(eqx.Module):
    """Some columns of ∂F, by the indices of their entries; None stands for all."""

    hessian: Array
    index: Array | None

    def chosen(self, full: Array) -> Array:
        """The rows of these entries."""
        return full if self.index is None else full[self.index]

    def units(self, like: Array) -> Array:
        """The unit vectors of these entries, as columns."""
        if self.index is None:
            return jnp.eye(like.size, dtype=like.dtype)
        return jax.nn.one_hot(self.index, like.size, dtype=like.dtype, axis=0)


class Equation(eqx.Module):
    """A·d = −R in the chosen entries, where the others go their own way `held`.

    `slope` is what F becomes by that, linearised.
    """

    matrix: Array
    rest: Array
    held: Array
    slope: Array
    columns: Columns

    def spread(self, d: Array) -> Array:
        """The way of all entries, from that of the chosen ones."""
        index = self.columns.index
        return d if index is None else self.held.at[index].set(d)
