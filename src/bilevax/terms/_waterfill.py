"""The level at which clipped entries add up: the one equation behind every simplex.

Find τ such that Σᵢ clip(rᵢ·(vᵢ − τ), lowerᵢ, upperᵢ) = total. The sum falls with τ in straight
pieces. With rates rᵢ = 1 its clipped entries are the projection of v on the set
{u : lower ≤ u ≤ upper, Σ u = total}. `waterfill` finds them in a compiled program and `host_level`
finds τ on the host, for any rates.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

_MAX_ITERATIONS = 200
# Up to this many entries a program compares all pairs of them. A loop would cost more, above all
# on an accelerator, which waits for the host before each round.
FEW = 64
# Up to this many entries plain Python is faster than NumPy.
_FEW_ON_HOST = 32


def waterfill(v: Array, lower: Array, upper: Array, total: Array) -> Array:
    """u = clip(v − τ, lower, upper) with τ such that Σ u = total.

    u is the projection of v on {u : lower ≤ u ≤ upper, Σ u = total}, which must not be empty.
    Bounds may be infinite. First it is decided which entries rest at a bound, then τ has a closed
    form on the others. The result is exact up to rounding, and differentiable in both modes.
    """
    sides = _sides_of_few if v.size <= FEW else _sides
    at_lower, at_upper = sides(*lax.stop_gradient((v, lower, upper, total)))
    fixed = at_lower | at_upper
    bound = lax.select(at_upper, upper, lower)
    count = lax.max(jnp.sum(as_float(~fixed, v)), jnp.ones((), v.dtype))
    level = lambda v: (jnp.sum(lax.select(fixed, bound, v)) - total) / count
    # Far entries hide the digits of those near the level. Measured from a first level, they do not.
    v = v - lax.stop_gradient(level(v))
    return lax.select(fixed, bound, lax.clamp(lower, v - level(v), upper))


def as_float(mask: Array, like: Array) -> Array:
    """1 where the mask holds, else 0, in the dtype of `like`."""
    return lax.convert_element_type(mask, like.dtype)


def pairs(a: Array) -> tuple[Array, Array]:
    """Two square matrices: one has a[i] in column i, the other a[j] in row j.

    The compiler may compute a for each of them anew, and round it otherwise the second time: an
    entry need not be equal to itself. What is made of them must bear that.
    """
    square = (a.size, a.size)
    return lax.broadcast_in_dim(a, square, (1,)), lax.broadcast_in_dim(a, square, (0,))


def _sides_of_few(v: Array, lower: Array, upper: Array, total: Array) -> tuple[Array, Array]:
    """Which entries rest at their lower and at their upper bounds, from all pairs of entries.

    Entry j is at its upper bound if τ ≤ vⱼ − upperⱼ, that is, if the sum at this level is at most
    `total`; likewise at its lower bound. Only differences of entries count, so that far ones do no
    harm. A sum that is `total` up to rounding counts as equal: the entry then is at its bound.
    """
    (column, row), (low, low_row), (high, high_row) = map(pairs, (v, lower, upper))
    apart = column - row
    sum_at = lambda bound: jnp.sum(lax.clamp(low, apart + bound, high), axis=1)
    slack = 8 * float(jnp.finfo(v.dtype).eps) * total
    return sum_at(low_row) >= total - slack, sum_at(high_row) <= total + slack


class _Search(NamedTuple):
    tau: Array
    low: Array  # the sum is too large here, or −∞
    high: Array  # the sum is too small here, or +∞
    excess: Array
    moving: Array
    steps: Array


def _sides(v: Array, lower: Array, upper: Array, total: Array) -> tuple[Array, Array]:
    """Which entries rest at their lower and at their upper bounds, from a search for τ."""
    v = v - jnp.max(v)  # exact where entries are alike, which their mean is not
    v = v - (jnp.sum(v) - total) / v.size  # right if no bound held
    # The second search starts at the first answer: there, the entries that decide are exact.
    for _ in range(2):
        v = v - _level(v, lower, upper, total)
    return v <= lower, v >= upper


def _level(v: Array, lower: Array, upper: Array, total: Array) -> Array:
    """τ by Newton's method on the sum, kept in a bracket and begun at 0."""
    inf = jnp.asarray(jnp.inf, v.dtype)
    eps = jnp.finfo(v.dtype).eps
    # As τ grows, an entry leaves its upper bound at v − upper and meets its lower one at v − lower.
    # Beyond the outermost of these the sum is linear, and one Newton step is exact.
    breaks = jnp.stack([v - upper, v - lower])
    leftmost = jnp.min(jnp.where(breaks > -inf, breaks, inf))
    rightmost = jnp.max(jnp.where(breaks < inf, breaks, -inf))

    def advance(s: _Search) -> _Search:
        shifted = v - s.tau
        excess = jnp.sum(lax.clamp(lower, shifted, upper)) - total
        above = excess > 0
        # On the side to which τ will go: an entry at a bound may be about to leave it.
        inside = (shifted > lower) & (shifted < upper)
        leaves = lax.select(above, shifted == upper, shifted == lower) & (lower < upper)
        slope = jnp.sum(as_float(inside | leaves, v))
        low = lax.select(above, s.tau, s.low)
        high = lax.select(excess < 0, s.tau, s.high)
        newton = s.tau + excess / lax.max(slope, jnp.ones((), v.dtype))
        # Newton is slow where the sum is close to a staircase: then halve the bracket.
        middle = low / 2 + high / 2
        jump = jnp.where(lax.is_finite(middle), middle, lax.select(above, rightmost, leftmost))
        gains = jnp.abs(excess) <= s.excess / 2
        trusted = (slope > 0) & (newton > low) & (newton < high) & gains
        beyond = lax.select(above, s.tau >= rightmost, s.tau <= leftmost)
        tau = lax.select(trusted | beyond, newton, jump)
        # At the sum's end, or where rounding leaves the set empty, there is nowhere to go.
        over = (excess == 0) | (beyond & (slope == 0)) | ~lax.is_finite(tau)
        tau = lax.select(over, s.tau, tau)
        moving = jnp.abs(tau - s.tau) > eps * jnp.abs(s.tau)
        return _Search(tau, low, high, jnp.abs(excess), moving, s.steps + 1)

    state = _Search(jnp.zeros_like(total), -inf, inf, inf, jnp.asarray(True), jnp.asarray(0))
    going = lambda s: s.moving & (s.steps < _MAX_ITERATIONS)
    return lax.while_loop(going, advance, state).tau


def host_level(v: np.ndarray, cap: np.ndarray, rate: np.ndarray) -> float:
    """τ with Σᵢ clip(rateᵢ·(vᵢ − τ), 0, capᵢ) = 1, in NumPy.

    An entry leaves 0 as τ falls below vᵢ, and rests at its cap below vᵢ − capᵢ/rateᵢ.
    """
    rests = v - cap / rate
    above, below = (_piece_of_few if len(v) <= _FEW_ON_HOST else _piece)(v, rests, rate)
    # Exactly, now that it is known which entries are free; a sum of many pieces rounds.
    middle = (above + below) / 2
    free = (v > middle) & (rests < middle)
    if not free.any():
        return below
    spare = 1 - cap[rests >= middle].sum()
    return float((rate[free] @ v[free] - spare) / rate[free].sum())


def _piece(leaves: np.ndarray, rests: np.ndarray, rate: np.ndarray) -> tuple[float, float]:
    """The ends of the straight piece in which the sum is 1."""
    ends = np.concatenate([leaves, rests])
    order = np.argsort(-ends)
    falling = ends[order]
    slopes = np.cumsum(np.concatenate([rate, -rate])[order])
    sums = np.cumsum(-np.diff(falling) * slopes[:-1])
    piece = min(int(np.searchsorted(sums, 1.0)), len(sums) - 1)
    return float(falling[piece]), float(falling[piece + 1])


def _piece_of_few(leaves: np.ndarray, rests: np.ndarray, rate: np.ndarray) -> tuple[float, float]:
    """The same without NumPy, which takes ten times as long for four entries."""
    rates = rate.tolist()
    ends = [*zip(leaves.tolist(), rates), *zip(rests.tolist(), [-r for r in rates])]
    ends.sort(reverse=True)
    total, slope = 0.0, 0.0
    above = below = ends[0][0]
    for end, change in ends:
        above, below = below, end
        total += (above - below) * slope
        if total >= 1:
            break
        slope += change
    return above, below


def along_axis(function: Callable[..., Array], axis: int | None, *arrays: Array) -> Array:
    """Apply a function of vectors to every row along `axis`, or to the whole array at once."""
    shape = arrays[0].shape
    if axis is None:
        return function(*(a.reshape(-1) for a in arrays)).reshape(shape)
    moved = [jnp.moveaxis(a, axis, -1) for a in arrays]
    rows = [a.reshape(-1, a.shape[-1]) for a in moved]
    out = jax.vmap(function)(*rows)
    return jnp.moveaxis(out.reshape(moved[0].shape), -1, axis)
