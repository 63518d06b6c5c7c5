"""Newton's direction for a natural map: the map, its generalised derivative, the linear system."""

from __future__ import annotations

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from bilevax.solvers.curvature import X1, X2, Y1, Y2, Z1, Z2, Blocks
from bilevax.solvers.penalised import Penalised

# Of a system with more unknowns than this, the two halves are eliminated one after the other.
IN_HALVES = 150


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

    def _pushed(self, w: Array, slope: Array, tangent: Array) -> Array:
        """An element D of the generalised derivative of the prox at w − s·F, times a vector."""
        prox = lambda v: self.penalised.prox(v, self.steps)
        return jax.jvp(prox, (w - self._spread * slope,), (tangent,))[1]

    def held(self, w: Array, slope: Array) -> Array:
        """Which entries their term holds: the prox does not move with them."""
        return self._pushed(w, slope, irregular(w)) == 0

    def free(self, w: Array, slope: Array) -> Array:
        """Which entries their term does not hold, and all of x1."""
        return ~self.held(w, slope) | jnp.asarray(self.penalised.blocks.owner == X1)

    def columns(self, w: Array, free: Array | None, most: int) -> Columns:
        """∂F, in all its columns or, of more than so many, in those of free entries if told.

        These must not be more than that, and keep their order. Where a derivative is not finite, as
        that of |y|^1.5 is at zero, it counts as none: another place will have one.
        """
        known = lambda hessian: jnp.where(jnp.isfinite(hessian), hessian, 0)
        if free is None or w.size <= most:
            return Columns(known(self.penalised.jacobian(w)), None)
        index = jnp.argsort(~free, stable=True)[:most]
        return Columns(known(self.penalised.columns(w, index)), index)

    def equation(
        self, w: Array, slope: Array, columns: Columns, weights: Array, change: Array | None = None
    ) -> Equation:
        """A = (I − D(I − s(∂F + W)))/s, and R, for Newton's equation A·d = −R.

        W regularises: with it, d is the step to a proximal point around w, linearised. Entries
        that are left out of the columns go to where their term holds them: d = −s·R there. With a
        change of F, there is what it does to R, D·change.
        """
        s, rest, c = self._spread, self(w, slope), columns
        matrix, changed = self._matrix(w, slope, c, weights, change)
        if c.index is None:
            halves = Halves(self.penalised.blocks)
            return Equation(matrix, rest, changed, jnp.zeros_like(w), slope, c, halves)
        held = jnp.where(self.held(w, slope), -s * rest, 0).at[c.index].set(0)
        bent_by = jax.jvp(self.penalised.operator, (w,), (held,))[1]
        pushed = self._pushed(w, slope, held - s * bent_by)
        rest = c.chosen(rest + (held - pushed) / s)
        return Equation(matrix, rest, changed, held, slope + bent_by, c, None)

    def _matrix(
        self, w: Array, slope: Array, c: Columns, weights: Array, change: Array | None
    ) -> tuple[Array, Array | None]:
        """A and D·change in the chosen entries; D is diagonal if the prox is of each entry alone.

        Otherwise both come of one call, which is compiled once.
        """
        s = self._spread
        if self.penalised.is_entrywise:
            share = self._pushed(w, slope, jnp.ones_like(w))
            changed = None if change is None else c.chosen(share * change)
            share = c.chosen(share)
            own = share * c.chosen(weights) + (1 - share) / c.chosen(s)
            return share[:, None] * c.chosen(c.hessian) + jnp.diag(own), changed
        eye = c.units(w)
        bent = c.hessian + eye * c.chosen(weights)[None, :]
        tangents = eye - s[:, None] * bent
        if change is not None:
            tangents = jnp.column_stack([tangents, change])
        pushed = jax.vmap(lambda tangent: self._pushed(w, slope, tangent), 1, 1)(tangents)
        matrix = c.chosen(eye - pushed[:, : eye.shape[1]]) / c.chosen(s)[:, None]
        return matrix, None if change is None else c.chosen(pushed[:, -1])

    def direction(
        self, w: Array, slope: Array, columns: Columns, weights: Array, first: int = 0
    ) -> Array:
        """d with A·d = −R in the entries from the first one on, and zero in those before."""
        return self._direction(self.equation(w, slope, columns, weights), first)

    def tangent(
        self, w: Array, slope: Array, columns: Columns, weights: Array, change: Array
    ) -> Array:
        """From a zero w of R, the way to where it is after F has changed: A·d = −D·change.

        What holds the entries there decides; the columns are those of the new F.
        """
        equation = self.equation(w, slope, columns, weights, change)
        return self._direction(dataclasses.replace(equation, rest=equation.changed), 0)

    def _direction(self, equation: Equation, first: int) -> Array:
        d = equation.solved(-equation.rest[first:, None], first)[:, 0]
        return equation.spread(jnp.concatenate([jnp.zeros(first, d.dtype), d]))


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


@dataclasses.dataclass(frozen=True)
class Halves:
    """The blocks but x1 in two halves, (y1, z2, x2) and (z1, y2), by the places of their entries.

    Of the functions only f has variables of both, and y2 alone of the second one. So of the two
    parts of a matrix that couple them, one has nonzeros in the columns of y2 only, and the other in
    its rows.
    """

    blocks: Blocks

    def _places(self, *which: int) -> np.ndarray:
        """Those of some blocks in a vector without x1."""
        places = [np.flatnonzero(self.blocks.owner == b) for b in which]
        return np.concatenate(places) - self.blocks.sizes[X1]

    def solved(self, matrix: Array, sides: Array) -> Array:
        """The inverse of a matrix without x1, times some columns."""
        a, b = self._places(Y1, Z2, X2), self._places(Z1, Y2)
        y2 = self.blocks.sizes[Z1] + np.arange(self.blocks.sizes[Y2])  # its places in b
        part = lambda rows, columns: matrix[np.ix_(rows, columns)]
        answers = jnp.linalg.solve(part(a, a), jnp.hstack([part(a, b[y2]), sides[a]]))
        coupled, alone = answers[:, : len(y2)], answers[:, len(y2) :]
        back = part(b[y2], a)
        rest = part(b, b).at[np.ix_(y2, y2)].add(-back @ coupled)
        of_b = jnp.linalg.solve(rest, sides[b].at[y2].add(-back @ alone))
        of_a = alone - coupled @ of_b[y2]
        return jnp.zeros_like(sides).at[a].set(of_a).at[b].set(of_b)


class Equation(eqx.Module):
    """A·d = −R in the chosen entries, where the others go their own way `held`.

    `slope` is what F becomes by that, linearised; `changed` what a change of F does to R.
    """

    matrix: Array
    rest: Array
    changed: Array | None
    held: Array
    slope: Array
    columns: Columns
    halves: Halves | None = eqx.field(static=True)

    def solved(self, sides: Array, first: int) -> Array:
        """A⁻¹ times some columns, in the entries from the first one on: none, or all but x1's."""
        matrix = self.matrix[first:, first:]
        if self.halves is None or len(matrix) <= IN_HALVES:
            return jnp.linalg.solve(matrix, sides)
        if first:
            return self.halves.solved(matrix, sides)
        n = self.halves.blocks.sizes[X1]
        answers = self.halves.solved(matrix[n:, n:], jnp.hstack([matrix[n:, :n], sides[n:]]))
        moved, alone = answers[:, :n], answers[:, n:]
        rest = matrix[:n, :n] - matrix[:n, n:] @ moved
        of_x1 = jnp.linalg.solve(rest, sides[:n] - matrix[:n, n:] @ alone)
        return jnp.vstack([of_x1, alone - moved @ of_x1])

    def spread(self, d: Array) -> Array:
        """The way of all entries, from that of the chosen ones."""
        index = self.columns.index
        return d if index is None else self.held.at[index].set(d)
