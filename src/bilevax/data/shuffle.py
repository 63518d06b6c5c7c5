"""Endless streams of the numbers 0, …, m−1: one permutation after another, none of them stored.

A permutation is computed where it is asked for, by swap-or-not rounds (Hoang, Morris & Rogaway
2012): round r maps i to K_r − i modulo m if a hash of the larger of the two says so, and keeps i
otherwise. Each round is its own inverse, so it is a permutation whatever the hash. A number costs
about a thousand operations and a state a few bytes, at any position of a stream and however many
samples there are. JAX arrays in a compiled program and NumPy arrays give the same numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

# In a compiled program the rounds are a loop of so many iterations: starting an iteration costs
# more than a round. Without a loop XLA would repeat all rounds for each column of the rows read.
PARTS = 4


class Shuffle(eqx.Module):
    """For each of G lists of lengths m: π₀ π₁ π₂ …, where πₑ follows from the list's key and e.

    The next number of a list is πₑ(offset), with 0 ≤ offset < m. All fields have G rows.
    """

    keys: Any
    epoch: Any
    offset: Any

    @classmethod
    def begin(cls, keys: jax.Array) -> Shuffle:
        zeros = jnp.zeros(keys.shape, jnp.int32)
        return cls(jax.random.key_data(keys), zeros, zeros)  # typed keys could not be stored

    def take(self, quotas: Sequence[int], sizes: Any, total: int) -> tuple[Shuffle, Any]:
        """The next `quotas` numbers of the lists of these sizes, list after list.

        List 1 is numbered on from list 0, and so on up to `total`, the sum of the sizes.
        """
        lists = np.repeat(np.arange(len(quotas)), quotas)
        ranks = np.concatenate([np.arange(q, dtype=np.int32) for q in quotas])
        places, size = self.offset[lists] + ranks, sizes[lists]
        epochs = self.epoch[lists] + places // size
        # Enough rounds that permutations of so many numbers look random (see the tests).
        rounds = PARTS * (6 + total.bit_length() // 2)
        numbers = permuted(places % size, size, self.keys[lists], epochs, rounds)
        begins = sizes.cumsum(dtype=np.int32) - sizes
        end = self.offset + np.asarray(quotas, np.int32)
        streams = Shuffle(self.keys, self.epoch + end // sizes, end % sizes)
        return streams, begins[lists] + numbers


def permuted(numbers: Any, size: Any, keys: Any, epochs: Any, rounds: int) -> Any:
    """Where the permutations of these keys and epochs take numbers below `size`."""
    i, size, epochs = (a.astype(np.uint32) for a in (numbers, size, epochs))
    one = mixed(mixed(keys[:, 0] + epochs) ^ keys[:, 1])
    other = mixed(mixed(keys[:, 1] + epochs) ^ keys[:, 0])
    counts = (np.arange(rounds, dtype=np.uint64) * 0x9E3779B9).astype(np.uint32)
    xp: Any = np if isinstance(i, np.ndarray) else jnp

    def part(i: Any, counts: Any) -> tuple[Any, None]:
        for r in range(len(counts)):
            mirror = scaled(mixed(one + counts[r]), size)
            partner = xp.where(mirror >= i, mirror - i, mirror + size - i)
            swap = mixed(xp.maximum(i, partner) ^ mixed(other ^ counts[r])) >> 31
            i = xp.where(swap == 1, partner, i)
        return i, None

    if xp is np:
        return part(i, counts)[0].astype(np.int32)
    return lax.scan(part, i, counts.reshape(PARTS, -1))[0].astype(jnp.int32)


def scaled(x: Any, size: Any) -> Any:
    """About x·size/2³², by 32 bits at a time; below `size`."""
    high, low = x >> 16, x & 0xFFFF
    above, below = size >> 16, size & 0xFFFF
    return high * above + ((high * below) >> 16) + ((low * above) >> 16)


def mixed(x: Any) -> Any:
    """A hash of 32 bits: the finaliser of MurmurHash3 (Appleby)."""
    x = (x ^ (x >> 16)) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * np.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
