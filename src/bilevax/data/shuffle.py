"""An endless stream of the numbers 0, …, m−1: one permutation behind the other."""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from bilevax.data.source import GENERATOR


class Shuffle(eqx.Module):
    """π₀ π₁ π₂ …, where epoch e's permutation πₑ of 0, …, m−1 is drawn with fold_in(key, e).

    The next number is πₑ(offset), with 0 ≤ offset < m. `order` begins with πₑ, so that it is
    computed once an epoch, not once a draw; it may be longer than m, and m may be traced, so that
    streams of similar lengths can share one program.
    """

    key: Array
    order: Array
    epoch: Array
    offset: Array

    @classmethod
    def begin(cls, key: Array, size: int | Array, capacity: int) -> Shuffle:
        data = jax.random.key_data(key)  # a typed key could not be stored
        zero = jnp.zeros((), jnp.int32)
        return cls(data, permutation(data, zero, size, capacity), zero, zero)

    def take(self, count: int, size: int | Array, least: int) -> tuple[Shuffle, Array]:
        """The next `count` numbers, which may reach into later epochs, for a size ≥ `least`."""
        capacity = self.order.shape[0]
        later = -(-count // least)  # so many epochs can begin in this draw
        places = self.offset + jnp.arange(count, dtype=jnp.int32)
        end = self.offset + count

        def renewed() -> tuple[Array, Array]:
            epochs = self.epoch + 1 + jnp.arange(later, dtype=jnp.int32)
            new = lax.map(lambda e: permutation(self.key, e, size, capacity), epochs)
            orders = jnp.concatenate([self.order[None], new])
            return orders[end // size], orders[places // size, places % size]

        if count >= capacity:
            order, numbers = renewed()
        else:
            # A loop of at most one round, not a branch: under `vmap` both sides of a branch are
            # computed always, and a permutation is dear.
            here = self.order[jnp.minimum(places, capacity - 1)]
            begin = (end >= size, self.order, here)
            once = lambda carry: (jnp.zeros_like(carry[0]), *renewed())
            _, order, numbers = lax.while_loop(lambda carry: carry[0], once, begin)
        return Shuffle(self.key, order, self.epoch + end // size, end % size), numbers


def permutation(key: Array, epoch: Array, size: int | Array, capacity: int) -> Array:
    """0, …, size−1 in random order, and behind them the other numbers below `capacity`."""
    typed = jax.random.fold_in(jax.random.wrap_key_data(key, impl=GENERATOR), epoch)
    numbers = jnp.arange(capacity, dtype=jnp.int32)
    # Two equal ones among these stay in order: a bias of 2⁻³² for a pair of samples.
    ranks = jax.random.bits(typed, (capacity,), jnp.uint32)
    return lax.sort((numbers >= size, ranks, numbers), num_keys=2)[2]
