"""What Hessian-vector products show of the penalty function: couplings, and nonconvexity."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

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

    def squares(self, v: Array) -> Array:
        """‖v_b‖² for each block."""
        # Slices, not a segment sum: that is a scatter, which a CPU does one entry at a time.
        ends = np.cumsum(self.sizes)
        parts = [v[end - size : end] for end, size in zip(ends, self.sizes)]
        return jnp.stack([jnp.sum(part * part) for part in parts])


class Curvature(eqx.Module):
    """What Hessian-vector products have shown of ∂²P, and the vectors with which to look on."""

    columns: Array  # 6 × 6: ‖∂²P/∂b'∂b‖ along the vector of block b
    pairs: Array  # the norm of each coupling of PAIRS
    least: Array  # the least eigenvalue of ∂²P/∂b², for the blocks minimised over
    column_vectors: Array  # one flat vector: for each block its own
    pair_vectors: Array  # one flat vector for each pair
    response: Array  # ∂²P times the part of `column_vectors` that was looked at last
    last: Array  # Lanczos' last two vectors and his matrix
    now: Array
    diagonal: Array
    beside: Array

    @classmethod
    def unknown(cls, blocks: Blocks, like: Array) -> Curvature:
        dtype = like.dtype
        drawn = jax.random.normal(jax.random.key(0), (1 + len(PAIRS), like.size), dtype)
        drawn = drawn / jax.vmap(lambda v: blocks.spread(jnp.sqrt(blocks.squares(v))))(drawn)
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
        """What one more product, the `number`-th from the last, shows; `bend(v)` is ∂²P·v."""
        table = jnp.asarray(products(blocks))
        kind, which, phase = table[(number - 1) % len(table)]
        owner = jnp.asarray(blocks.owner)
        return lax.switch(
            kind,
            (
                lambda: self._column(blocks, bend, owner == which, which, phase),
                lambda: self._pair(bend, owner, which, phase),
                lambda: self._own(bend, owner == which, which, phase, seed),
            ),
        )

    def _column(
        self,
        blocks: Blocks,
        bend: Callable[[Array], Array],
        mine: Array,
        block: Array,
        phase: Array,
    ) -> Curvature:
        """Power iteration on all that a block is coupled to: u = ∂²P·v, then v ← (∂²P·u)_b."""
        forth = phase == 0
        bent = bend(jnp.where(forth, jnp.where(mine, self.column_vectors, 0), self.response))
        lengths = jnp.sqrt(blocks.squares(bent))
        back, _ = _unit(jnp.where(mine, bent, 0), jnp.where(mine, self.column_vectors, 0))
        return dataclasses.replace(
            self,
            columns=jnp.where(forth, self.columns.at[:, block].set(lengths), self.columns),
            column_vectors=jnp.where(~forth & mine, back, self.column_vectors),
            response=jnp.where(forth, bent, self.response),
        )

    def _pair(
        self, bend: Callable[[Array], Array], owner: Array, pair: Array, phase: Array
    ) -> Curvature:
        """Power iteration on the coupling of two blocks, from the second to the first and back."""
        ends = jnp.asarray(PAIRS)[pair]
        source, sink = owner == ends[1 - phase], owner == ends[phase]
        v = self.pair_vectors[pair]
        bent = bend(jnp.where(source, v, 0))
        onward, length = _unit(jnp.where(sink, bent, 0), jnp.where(sink, v, 0))
        return dataclasses.replace(
            self,
            pairs=self.pairs.at[pair].set(length),
            pair_vectors=self.pair_vectors.at[pair].set(jnp.where(sink, onward, v)),
        )

    def _own(
        self,
        bend: Callable[[Array], Array],
        mine: Array,
        block: Array,
        step: Array,
        seed: Array,
    ) -> Curvature:
        """One step of Lanczos' method on one block; its least eigenvalue after the last step."""
        first, dtype = step == 0, self.now.dtype
        key = jax.random.fold_in(jax.random.key(1), seed)
        drawn, _ = _unit(jnp.where(mine, jax.random.normal(key, mine.shape, dtype), 0), self.now)
        now, last = jnp.where(first, drawn, self.now), jnp.where(first, 0, self.last)
        before = jnp.where(first, 0, self.beside[step - 1])
        bent = jnp.where(mine, bend(now), 0) - before * last
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
            return self.least.at[block].set(jnp.linalg.eigvalsh(matrix)[0])

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
        uᵀ∂²ₓₓP·u ≥ aᵀKa for the lengths a of u's blocks, so K + W ⪰ 0 suffices. Of all such W one
        wants the blocks that move to be held least: W = ω/travel² is a first choice, and then each
        weight in turn becomes as small as the others allow.
        """
        K = jnp.diag(self.least)
        for norm, (i, j) in zip(self.pairs, PAIRS):
            K = K.at[i, j].set(-norm).at[j, i].set(-norm)
        scaled = K * travel[:, None] * travel[None, :]
        omega = jnp.maximum(-jnp.linalg.eigvalsh(scaled)[0], 0)
        W = SAFETY * omega / travel**2
        trifle = 1e-12 * jnp.max(jnp.abs(K)) + jnp.finfo(K.dtype).tiny
        for b in (Y1, X1, Y2):
            rest = jnp.asarray([i for i in MINIMISED if i != b])
            others = (K + jnp.diag(W + trifle))[rest][:, rest]
            side = K[b, rest]
            needed = jnp.vdot(side, jnp.linalg.solve(others, side)) - K[b, b]
            W = W.at[b].set(jnp.clip(SAFETY * needed, 0, W[b]))
        return W


def products(blocks: Blocks) -> tuple[tuple[int, int, int], ...]:
    """The Hessian-vector products of one look at all curvatures: (kind, block or pair, phase).

    The last come first: `probing` counts down.
    """
    here = [b for b in range(6) if blocks.sizes[b]]
    pairs = [n for n, (i, j) in enumerate(PAIRS) if i in here and j in here]
    own = [(OWN, b, k) for b in MINIMISED if b in here for k in range(LANCZOS)]
    table = own + [(PAIR, n, k) for n in pairs for k in (0, 1)]
    table += [(COLUMN, b, k) for b in here for k in (0, 1)]
    return tuple(reversed(table))


def _unit(v: Array, instead: Array) -> tuple[Array, Array]:
    """v at length one, or what to take instead of a zero, and its length."""
    length = jnp.sqrt(jnp.vdot(v, v))
    return jnp.where(length > 0, v / jnp.where(length > 0, length, 1), instead), length
