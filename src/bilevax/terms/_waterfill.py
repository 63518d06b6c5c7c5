"""Shift a vector until its clipped entries add up: the one routine behind every simplex."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

_MAX_ITERATIONS = 200
# Up to so many entries the sum is taken at every break at once: a loop costs more, above all on an
# accelerator, which asks the host before each of its rounds.
_FEW = 32


class _Search(NamedTuple):
    tau: Array
    low: Array  # the sum is too large here, or −∞
    high: Array  # the sum is too small here, or +∞
    excess: Array
    moving: Array
    steps: Array


def waterfill(v: Array, lower: Array, upper: Array, total: Array) -> Array:
    """u = clip(v − τ, lower, upper) with τ such that Σ u = total.

    u is the projection of v on {u : lower ≤ u ≤ upper, Σ u = total}, which must not be empty.
    Bounds may be infinite. The level τ is found by Newton's method on the piecewise linear sum,
    kept in a bracket (for few entries, from the sum at each of its breaks), and then taken once
    more from its closed form on the active set: exact up to rounding, a handful of passes over the
    data, and differentiable in both modes.
    """
    # Far entries hide the digits of those near the level. So the level is sought twice: measured
    # from the first answer, the entries that decide the second are exact.
    w, low, high, sum_ = lax.stop_gradient((v, lower, upper, total))
    w = w - (jnp.sum(w) - sum_) / w.size  # right if no bound held
    level = _level_of_few if w.size <= _FEW else _level
    for _ in range(2):
        w = w - level(w, low, high, sum_)
    w = w + (v - lax.stop_gradient(v))  # the numbers of w, the derivative of v
    at_lower, at_upper = w <= lower, w >= upper
    free = ~(at_lower | at_upper)
    count = jnp.sum(free, dtype=v.dtype)
    bound = jnp.where(at_lower, lower, jnp.where(at_upper, upper, 0))
    rest = (jnp.sum(jnp.where(free, w, bound)) - total) / jnp.maximum(count, 1)
    return jnp.clip(w - jnp.where(count > 0, rest, 0), lower, upper)


def _level_of_few(v: Array, lower: Array, upper: Array, total: Array) -> Array:
    """The same τ as `_level`, without a loop: the sum is linear between two breaks."""
    inf = jnp.asarray(jnp.inf, v.dtype)
    breaks = jnp.concatenate([v - upper, v - lower])
    there = jnp.isfinite(breaks)
    at = jnp.where(there, breaks, 0)
    sum_at = lambda tau: jnp.sum(jnp.clip(v - tau, lower, upper))
    sums = jax.vmap(sum_at)(at)
    left = jnp.max(jnp.where(there & (sums >= total), breaks, -inf))
    right = jnp.min(jnp.where(there & (sums <= total), breaks, inf))
    anchor = jnp.where(jnp.isfinite(left), left, jnp.where(jnp.isfinite(right), right, 0))
    # The slope is counted well inside, because a compiled program may round v twice, differently.
    before, behind = anchor - 1 - jnp.abs(anchor), anchor + 1 + jnp.abs(anchor)
    middle = jnp.where(jnp.isfinite(left), left, before) / 2
    middle += jnp.where(jnp.isfinite(right), right, behind) / 2
    slope = jnp.sum((v - upper < middle) & (v - lower > middle), dtype=v.dtype)
    excess = sum_at(anchor) - total
    tau = anchor + jnp.where(slope > 0, excess / jnp.maximum(slope, 1), 0)
    return jnp.clip(tau, jnp.minimum(left, anchor), jnp.maximum(right, anchor))


def _level(v: Array, lower: Array, upper: Array, total: Array) -> Array:
    """τ with Σ clip(v − τ, lower, upper) = total, sought from 0."""
    inf = jnp.asarray(jnp.inf, v.dtype)
    eps = jnp.finfo(v.dtype).eps
    # As τ grows, an entry leaves its upper bound at v − upper and meets its lower one at v − lower.
    # Beyond the outermost of these the sum is linear, and one Newton step is exact.
    breaks = jnp.stack([v - upper, v - lower])
    leftmost = jnp.min(jnp.where(jnp.isfinite(breaks), breaks, inf))
    rightmost = jnp.max(jnp.where(jnp.isfinite(breaks), breaks, -inf))

    def advance(s: _Search) -> _Search:
        shifted = v - s.tau
        excess = jnp.sum(jnp.clip(shifted, lower, upper)) - total
        slope = jnp.sum((shifted > lower) & (shifted < upper), dtype=v.dtype)
        low = jnp.where(excess > 0, s.tau, s.low)
        high = jnp.where(excess < 0, s.tau, s.high)
        newton = s.tau + excess / jnp.maximum(slope, 1)
        # Newton crawls where the sum is close to a staircase: halve the bracket unless it gains.
        middle = low / 2 + high / 2
        outermost = jnp.where(excess > 0, rightmost, leftmost)
        jump = jnp.where(jnp.isfinite(middle), middle, outermost)
        gains = jnp.abs(excess) <= s.excess / 2
        trusted = (slope > 0) & (newton > low) & (newton < high) & gains
        beyond = jnp.where(excess > 0, s.tau >= rightmost, s.tau <= leftmost)
        tau = jnp.where(trusted | beyond, newton, jump)
        # At the sum's end, or where rounding leaves the set empty, there is nowhere to go.
        over = (excess == 0) | (beyond & (slope == 0)) | ~jnp.isfinite(tau)
        tau = jnp.where(over, s.tau, tau)
        still = jnp.abs(tau - s.tau) <= eps * jnp.abs(s.tau)
        return _Search(tau, low, high, jnp.abs(excess), ~still, s.steps + 1)

    state = _Search(jnp.zeros_like(total), -inf, inf, inf, jnp.asarray(True), jnp.asarray(0))
    going = lambda s: s.moving & (s.steps < _MAX_ITERATIONS)
    return lax.while_loop(going, advance, state).tau


def along_axis(function: Callable[..., Array], axis: int | None, *arrays: Array) -> Array:
    """Apply a function of vectors to every row along `axis`, or to the whole array at once."""
    shape = arrays[0].shape
    if axis is None:
        return function(*(a.reshape(-1) for a in arrays)).reshape(shape)
    moved = [jnp.moveaxis(a, axis, -1) for a in arrays]
    rows = [a.reshape(-1, a.shape[-1]) for a in moved]
    out = jax.vmap(function)(*rows)
    return jnp.moveaxis(out.reshape(moved[0].shape), -1, axis)
