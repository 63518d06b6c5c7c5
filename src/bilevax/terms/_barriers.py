"""Barriers of flat faces, −Σ log(distance), and proxes with them, which are smooth."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

# Steps to the root of an interval's cubic equation: each solves a quadratic one, and the error is
# squared. Steps to the level of a simplex: the interval it lies in is halved.
ROOT_STEPS, LEVEL_STEPS = 4, 60


def interval_barrier(x: Array, low: Array, high: Array) -> Array:
    """−Σ log(x − low) − Σ log(high − x) over bounds that are finite and apart.

    A distance counts as at least the rounding of its bound: an entry that rounding has put on a
    bound does not make it infinite.
    """

    def distance(d: Array, bound: Array) -> Array:
        there = jnp.isfinite(bound) & (high > low)
        least = jnp.finfo(d.dtype).eps * jnp.maximum(1, jnp.abs(jnp.where(there, bound, 0)))
        return jnp.where(there, jnp.maximum(d, least), jnp.ones_like(d))

    return -jnp.sum(jnp.log(distance(x - low, low)) + jnp.log(distance(high - x, high)))


def interval_prox(v: Array, low: Array, high: Array, weight: Array) -> Array:
    """argmin over u of ½(u − v)² − weight·(log(u − low) + log(high − u)), entry by entry.

    With d the distance to the nearer bound, e how far v is beyond it and w the width, the equation
    is k/d − d − e = k/(w − d). Its right-hand side is put as a line through the last d; the lines
    lie below it, so that d falls to the root. Weight zero gives the projection.
    """
    change = v - lax.stop_gradient(v)  # zero, with the derivative of v
    v, one, k = lax.stop_gradient(v), jnp.ones_like(v), jnp.broadcast_to(weight, v.shape)
    below, above, nearest = jnp.isfinite(low), jnp.isfinite(high), jnp.clip(v, low, high)
    both, bounded = below & above, below | above
    low, high = jnp.where(below, low, 0), jnp.where(above, high, 0)
    width = jnp.where(both, high - low, jnp.inf)
    nearer = jnp.where(both, v < (low + high) / 2, below)
    e = jnp.where(nearer, low - v, v - high)

    def root(e: Array, a: Array) -> Array:
        """d > 0 with k/d − a·d − e = 0."""
        r = jnp.sqrt(e * e + 4 * a * k)
        far = jnp.where(e + r > 0, e + r, one)
        return jnp.minimum(jnp.where(e > 0, 2 * k / far, (r - e) / (2 * a)), width / 2)

    def nearer_root(_: int, d: Array) -> Array:
        line = k / (width - d) ** 2  # zero where there is one bound only
        return root(e + k / (width - d) - line * d, 1 + line)

    d = lax.fori_loop(0, ROOT_STEPS, nearer_root, root(e, one))
    u = jnp.where(bounded & (k > 0), jnp.where(nearer, low + d, high - d), nearest)
    inner = jnp.where(d > 0, d, one)
    bent = 1 + k / inner**2 + k / (width - inner) ** 2
    slope = jnp.where(d > 0, 1 / bent, 0)
    fixed = both & (high <= low)
    u, slope = jnp.where(fixed, low, u), jnp.where(fixed, 0, jnp.where(bounded, slope, one))
    return u + slope * change


def simplex_prox(v: Array, caps: Array, total: Array, weight: Array) -> Array:
    """argmin of ½‖u − v‖² + weight·barrier(u) over 0 ≤ u ≤ caps with Σ u = total, for a vector.

    It is `interval_prox` of v − ν for the level ν at which the entries add up to the total.
    """
    at, zero = lax.stop_gradient(v), jnp.zeros_like(v)
    change = v - at  # zero, with the derivative of v
    entries = lambda level: interval_prox(at - level, zero, caps, weight)
    # At the highest level every entry is below total/n, at the lowest above it and near its cap.
    n, most = v.size, jnp.where(jnp.isfinite(caps), caps, total)
    reach = total + n * n * weight / total
    slack = jnp.where(jnp.isfinite(jnp.sum(caps)), jnp.sum(caps) - total, total)
    near = n * n * weight / jnp.maximum(slack, jnp.finfo(v.dtype).eps * total)
    lowest, highest = jnp.min(at - most) - reach - near, jnp.max(at) + reach

    def halved(_: int, ends: tuple[Array, Array]) -> tuple[Array, Array]:
        middle = (ends[0] + ends[1]) / 2
        more = jnp.sum(entries(middle)) > total
        return jnp.where(more, middle, ends[0]), jnp.where(more, ends[1], middle)

    lowest, highest = lax.fori_loop(0, LEVEL_STEPS, halved, (lowest, highest))
    level = (lowest + highest) / 2
    u, fall = jax.jvp(entries, (level,), (jnp.ones_like(level),))
    rates = -fall
    sum_of_rates = jnp.where(jnp.sum(rates) > 0, jnp.sum(rates), 1)
    u = u + rates * (total - jnp.sum(u)) / sum_of_rates  # what halving has left
    u = jnp.clip(u, 0, caps)
    return u + rates * (change - jnp.sum(rates * change) / sum_of_rates)
