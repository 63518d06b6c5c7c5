"""Endless streams of the numbers 0, …, m−1: one permutation behind the other, none of them stored.

A permutation is computed where it is asked for, by swap-or-not rounds (Hoang, Morris & Rogaway
2012): round r takes i to K_r − i modulo m if a hash of the larger of both says so, and keeps it if
not. That is its own inverse, so every round is a permutation whatever the hash. A draw costs some
thousand operations a number and a state a few bytes, however many samples there are; nothing is
sorted, nothing waits for the end of an epoch, and an accelerator never asks the host.
"""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

# The rounds are a loop of so many, each compiled as one: to start one takes longer than a round.
# Without the loop XLA would compute all rounds anew for each column of the rows that are then read.
PARTS = 4


class Shuffle(eqx.Module):
    """For each of G lists of lengths m: π₀ π₁ π₂ …, with πₑ from the list's key and e.

    The next number of a list is πₑ(offset), with 0 ≤ offset < m. All fields have G rows.
    """

    keys: Array
    epoch: Array
    offset: Array

    @classmethod
    def begin(cls, keys: Array) -> Shuffle:
        zeros = jnp.zeros(keys.shape, jnp.int32)
        return cls(jax.random.key_data(keys), zeros, zeros)  # typed keys could not be stored

    def take(self, quotas: tuple[int, ...], sizes: Array, rounds: int) -> tuple[Shuffle, Array]:
        """The next `quotas` numbers of the lists of these sizes, one list's behind the other's."""
        lists = np.repeat(np.arange(len(quotas)), quotas)
        ranks = np.concatenate([np.arange(q, dtype=np.int32) for q in quotas])
        places, size = self.offset[lists] + ranks, sizes[lists]
        epochs = self.epoch[lists] + places // size
        numbers = permuted(places % size, size, self.keys[lists], epochs, rounds)
        end = self.offset + np.asarray(quotas, np.int32)
        return Shuffle(self.keys, self.epoch + end // sizes, end % sizes), numbers


def rounds_for(size: int) -> int:
    """As many as make permutations of up to `size` numbers look random, see the tests."""
    return PARTS * (6 + size.bit_length() // 2)


def permuted(numbers: Array, size: Array, keys: Array, epochs: Array, rounds: int) -> Array:
    """Where the permutations of these keys and epochs take numbers below `size`."""
    i, size, epochs = (a.astype(jnp.uint32) for a in (numbers, size, epochs))
    one = mixed(mixed(keys[:, 0] + epochs) ^ keys[:, 1])
    other = mixed(mixed(keys[:, 1] + epochs) ^ keys[:, 0])

    def part(i: Array, number: Array) -> tuple[Array, None]:
        for r in range(rounds // PARTS):
            count = (number * np.uint32(rounds // PARTS) + np.uint32(r)) * np.uint32(0x9E3779B9)
            mirror = scaled(mixed(one + count), size)
            partner = jnp.where(mirror >= i, mirror - i, mirror + size - i)
            swap = mixed(jnp.maximum(i, partner) ^ mixed(other ^ count)) >> 31
            i = jnp.where(swap == 1, partner, i)
        return i, None

    ended, _ = lax.scan(part, i, jnp.arange(PARTS, dtype=jnp.uint32))
    return ended.astype(jnp.int32)


def scaled(x: Array, size: Array) -> Array:
    """About x·size/2³², by 32 bits at a time; below `size`."""
    high, low = x >> 16, x & 0xFFFF
    above, below = size >> 16, size & 0xFFFF
    return high * above + ((high * below) >> 16) + ((low * above) >> 16)


def mixed(x: Array) -> Array:
    """A hash of 32 bits: the finaliser of MurmurHash3 (Appleby)."""
    x = (x ^ (x >> 16)) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * np.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
