"""An endless stream of the numbers 0, …, m−1: one permutation behind the other."""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from bilevax.data.source import GENERATOR


class Shuffle(eqx.Module):
    """π₀ π₁ π₂ …, where epoch e's permutation πₑ is drawn with fold_in(key, e).

    The next number is πₑ(offset), with 0 ≤ offset < m. `order` is πₑ, so that a permutation is
    computed once an epoch, not once a draw.
    """

    key: Array
    order: Array
    epoch: Array
    offset: Array

    @classmethod
    def begin(cls, key: Array, size: int) -> Shuffle:
        data = jax.random.key_data(key)  # a typed key could not be stored
        zero = jnp.zeros((), jnp.int32)
        return cls(data, permutation(data, zero, size), zero, zero)

    def take(self, count: int) -> tuple[Shuffle, Array]:
        """The next `count` numbers; they may reach into later epochs."""
        size = self.order.shape[0]
        later = -(-count // size)  # as many epochs can begin in this draw
        places = self.offset + jnp.arange(count, dtype=jnp.int32)
        end = self.offset + count

        def renewed() -> tuple[Array, Array]:
            epochs = self.epoch + 1 + jnp.arange(later, dtype=jnp.int32)
            new = lax.map(lambda e: permutation(self.key, e, size), epochs)
            orders = jnp.concatenate([self.order[None], new])
            return orders[end // size], orders[places // size, places % size]

        def same() -> tuple[Array, Array]:
            return self.order, self.order[places]

        order, numbers = renewed() if count >= size else lax.cond(end >= size, renewed, same)
        return Shuffle(self.key, order, self.epoch + end // size, end % size), numbers


def permutation(key: Array, epoch: Array, size: int) -> Array:
    typed = jax.random.fold_in(jax.random.wrap_key_data(key, impl=GENERATOR), epoch)
    return jax.random.permutation(typed, jnp.arange(size, dtype=jnp.int32))
