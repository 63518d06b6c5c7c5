"""Couplings between blocks and nonconvexity of the penalty function, by Hessian-vector products."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from bilevax import trees
from bilevax.trees import Layout, Tree

# The six blocks of the penalty problem: (x1, y1, y2) are minimised over, (x2, z1, z2) maximised.
X1, Y1, Y2, X2, Z1, Z2 = range(6)
MINIMISED = (X1, Y1, Y2)
# Pairs of blocks whose coupling can make the penalty function nonconvex.
PAIRS = ((X1, Y1), (X1, Y2), (Y1, Y2))
# Kinds of products, and how many steps of Lanczos' method find the least curvature of a block.
COLUMN, PAIR, OWN = range(3)
LANCZOS = 6
# Proximal weights are this much above the nonconvexity that was seen.
SAFETY = 1.05


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Where the six blocks lie in a flat vector."""

    layout: Layout
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, x: Tree, y: Tree) -> Blocks:
        parts = (*x, *y)
        sizes = tuple(sum(leaf.size for leaf in jax.tree.leaves(part)) for part in parts)
        return cls(Layout.of(parts), sizes)

    @property
    def present(self) -> np.ndarray:
        return np.asarray(self.sizes) > 0

    @property
    def owner(self) -> np.ndarray:
        """Which block each entry belongs to."""
        return np.repeat(np.arange(6), self.sizes)

    def spread(self, per_block: Array) -> Array:
        """One number per block, over the entries of the block."""
        return jnp.concatenate(
            [jnp.full(size, per_block[b]) for b, size in enumerate(self.sizes) if size]
        )

    def lengths(self, v: Array) -> Array:
        """‖v_b‖ for each block."""
        # Slices, not a segment sum: that is a scatter, which a CPU does one entry at a time.
        ends = np.cumsum(self.sizes)
        parts = [v[end - size : end] for end, size in zip(ends, self.sizes)]
        return jnp.stack([trees.norm(part) for part in parts])


class Curvature(eqx.Module):
    """What Hessian-vector products have shown of ∂²P, and the vectors for the next ones."""

    columns: Array  # 6 × 6: ‖∂²P/∂b'∂b‖ along the vector of block b
    pairs: Array  # the norm of each coupling of PAIRS
    least: Array  # the least eigenvalue of ∂²P/∂b², for the blocks minimised over
    column_vectors: Array  # one flat vector: for each block its own
    pair_vectors: Array  # one flat vector for each pair
    response: Array  # ∂²P times the part of `column_vectors` that was multiplied last
    last: Array  # the last two vectors of Lanczos' method, and its tridiagonal matrix
    now: Array
    diagonal: Array
    beside: Array

    @classmethod
    def unknown(cls, blocks: Blocks, like: Array) -> Curvature:
        dtype = like.dtype
        drawn = jax.random.normal(jax.random.key(0), (1 + len(PAIRS), like.size), dtype)
        drawn = drawn / jax.vmap(lambda v: blocks.spread(blocks.lengths(v)))(drawn)
        zeros, several = jnp.zeros_like(like), jnp.zeros(LANCZOS, dtype)
        return cls(
            columns=jnp.zeros((6, 6), dtype),
            pairs=jnp.zeros(len(PAIRS), dtype),
            least=jnp.zeros(len(MINIMISED), dtype),
            column_vectors=drawn[0],
            pair_vectors=drawn[1:],
            response=zeros,
            last=zeros,
            now=zeros,
            diagonal=several,
            beside=several,
        )

    def looked(
        self, blocks: Blocks, bend: Callable[[Array], Array], number: Array, seed: Array
    ) -> Curvature:
        """After one more product, the `number`-th from the end; `bend(v)` is ∂²P·v."""
        table = jnp.asarray(products(blocks))
        kind, which, phase = table[(number - 1) % len(table)]
        owner = jnp.asarray(blocks.owner)
        mine = owner == which
        ends = jnp.asarray(PAIRS)[which % len(PAIRS)]
        source, sink = owner == ends[1 - phase], owner == ends[phase]
        # The vector, one product for all kinds, and then what it shows.
        v = lax.switch(
            kind,
            (
                lambda: jnp.where(
                    phase == 0, jnp.where(mine, self.column_vectors, 0), self.response
                ),
                lambda: jnp.where(source, self.pair_vectors[which % len(PAIRS)], 0),
                lambda: self._lanczos_vector(mine, phase, seed),
            ),
        )
        bent = bend(v)
        return lax.switch(
            kind,
            (
                lambda: self._column(blocks, bent, mine, which, phase),
                lambda: self._pair(bent, sink, which % len(PAIRS)),
                lambda: self._own(v, bent, mine, which, phase),
            ),
        )

    def _column(
        self, blocks: Blocks, bent: Array, mine: Array, block: Array, phase: Array
    ) -> Curvature:
        """Power iteration on all that a block is coupled to: u = ∂²P·v, then v ← (∂²P·u)_b."""
        forth = phase == 0
        lengths = blocks.lengths(bent)
        back, _ = _unit(jnp.where(mine, bent, 0), jnp.where(mine, self.column_vectors, 0))
        return dataclasses.replace(
            self,
            columns=jnp.where(forth, self.columns.at[:, block].set(lengths), self.columns),
            column_vectors=jnp.where(~forth & mine, back, self.column_vectors),
            response=jnp.where(forth, bent, self.response),
        )

    def _pair(self, bent: Array, sink: Array, pair: Array) -> Curvature:
        """Power iteration on the coupling of two blocks, from the second to the first and back."""
        v = self.pair_vectors[pair]
        onward, length = _unit(jnp.where(sink, bent, 0), jnp.where(sink, v, 0))
        return dataclasses.replace(
            self,
            pairs=self.pairs.at[pair].set(length),
            pair_vectors=self.pair_vectors.at[pair].set(jnp.where(sink, onward, v)),
        )

    def _lanczos_vector(self, mine: Array, step: Array, seed: Array) -> Array:
        """A random vector of the block at first, then where the last step led."""
        key = jax.random.fold_in(jax.random.key(1), seed)
        drawn = jax.random.normal(key, mine.shape, self.now.dtype)
        drawn, _ = _unit(jnp.where(mine, drawn, 0), self.now)
        return jnp.where(step == 0, drawn, self.now)

    def _own(self, now: Array, bent: Array, mine: Array, block: Array, step: Array) -> Curvature:
        """One step of Lanczos' method on one block; its least eigenvalue after the last step."""
        first, dtype = step == 0, self.now.dtype
        last = jnp.where(first, 0, self.last)
        before = jnp.where(first, 0, self.beside[step - 1])
        bent = jnp.where(mine, bent, 0) - before * last
        along = jnp.vdot(bent, now)
        following, length = _unit(bent - along * now, jnp.zeros_like(now))
        # An invariant space: what is left is rounding, and the matrix stays as it is.
        some = length > 1e4 * jnp.finfo(dtype).eps * (jnp.abs(along) + before)
        alive = jnp.any(now != 0)
        diagonal = jnp.where(first, along, self.diagonal).at[step].set(along)
        beside = jnp.where(first, 0, self.beside).at[step].set(jnp.where(some, length, 0))
        diagonal = jnp.where(alive, diagonal, self.diagonal)
        beside = jnp.where(alive, beside, self.beside)

        def least() -> Array:
            matrix = jnp.diag(diagonal) + jnp.diag(beside[:-1], 1) + jnp.diag(beside[:-1], -1)
            return self.least.at[block].set(_least_eigenvalue(matrix))

        return dataclasses.replace(
            self,
            least=lax.cond(step == LANCZOS - 1, least, lambda: self.least),
            last=now,
            now=jnp.where(some, following, 0),
            diagonal=diagonal,
            beside=beside,
        )

    def couplings(self) -> Array:
        """‖∂²P/∂b∂b'‖ for all pairs of blocks, about."""
        return jnp.maximum(self.columns, self.columns.T)

    def weights(self, travel: Array) -> Array:
        """Proximal weights W for (x1, y1, y2) with W + ∂²ₓₓP ⪰ 0.

        With K = (least eigenvalues of the blocks on the diagonal, −norms of couplings beside it),
        uᵀ∂²ₓₓP·u ≥ aᵀKa for the lengths a of u's blocks, so K + W ⪰ 0 suffices. Blocks that travel
        far should be held little: W = ω/travel² is a first choice, and then each weight in turn
        becomes as small as the others allow.
        """
        K = self._least_curvatures()
        scaled = K * travel[:, None] * travel[None, :]
        omega = jnp.maximum(-_least_eigenvalue(scaled), 0)
        W = list(SAFETY * omega / travel**2)
        trifle = 1e-12 * jnp.max(jnp.abs(K)) + jnp.finfo(K.dtype).tiny
        for b in (Y1, X1, Y2):
            i, j = (k for k in MINIMISED if k != b)
            # sᵀM⁻¹s for the matrix M of the two other blocks and the side s that joins them to b,
            # by elimination of the larger one: a determinant of trifles would underflow.
            mi, mj, mij = K[i, i] + W[i] + trifle, K[j, j] + W[j] + trifle, K[i, j]
            larger = lambda a, b, second=mj > mi: (jnp.where(second, b, a), jnp.where(second, a, b))
            (first, other), (s1, s2) = larger(mi, mj), larger(K[b, i], K[b, j])
            rest = other - mij * (mij / first)
            left = s2 - mij * (s1 / first)
            needed = (
                s1 * (s1 / first) + left * (left / jnp.where(rest == 0, trifle, rest)) - K[b, b]
            )
            W[b] = jnp.clip(SAFETY * needed, 0, W[b])
        return jnp.stack(W)

    def _least_curvatures(self) -> Array:
        """K: the blocks' least eigenvalues on the diagonal, minus the norms of couplings beside."""
        beside = np.zeros((len(PAIRS), 3, 3))
        for n, (i, j) in enumerate(PAIRS):
            beside[n, i, j] = beside[n, j, i] = 1
        spread = self.pairs[:, None, None] * beside.astype(self.pairs.dtype)
        return jnp.eye(3, dtype=self.least.dtype) * self.least[None, :] - jnp.sum(spread, axis=0)


def products(blocks: Blocks) -> tuple[tuple[int, int, int], ...]:
    """The Hessian-vector products that renew all curvatures: (kind, block or pair, phase).

    They are listed from the last to the first, because `probing` counts down.
    """
    here = [b for b in range(6) if blocks.sizes[b]]
    pairs = [n for n, (i, j) in enumerate(PAIRS) if i in here and j in here]
    own = [(OWN, b, k) for b in MINIMISED if b in here for k in range(LANCZOS)]
    table = own + [(PAIR, n, k) for n in pairs for k in (0, 1)]
    table += [(COLUMN, b, k) for b in here for k in (0, 1)]
    return tuple(reversed(table))


def _least_eigenvalue(matrix: Array) -> Array:
    """Of a symmetric matrix; in units of its largest entry, whose square may overflow."""
    largest = jnp.max(jnp.abs(matrix))
    unit = jnp.where(largest > 0, largest, 1)
    return unit * jnp.linalg.eigvalsh(matrix / unit)[0]


def _unit(v: Array, instead: Array) -> tuple[Array, Array]:
    """v/‖v‖ and ‖v‖; where v is zero, `instead`."""
    length = trees.norm(v)
    return jnp.where(length > 0, v / jnp.where(length > 0, length, 1), instead), length
