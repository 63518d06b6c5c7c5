"""The quadratic model of φ(x1) around a point, and where it is least."""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from bilevax import trees
from bilevax.solvers.semismooth import irregular
from bilevax.terms import Term
from bilevax.trees import Layout

# The least point is sought in at most so many steps, or until a step gains no more than this share.
STEPS, GAINED = 30, 1e-6
# The shares of a Newton step that are tried: where bounds cut it, a full one may lead up, and that
# of a model that is nearly flat is many times too long.
SHARES = tuple(4.0**-k for k in range(11))
# The weight grows by this factor until the model is convex, from this share of the curvature on.
GROWTH, LEAST_WEIGHT, MOST_GROWTHS = 4.0, 1e-6, 60


class Model(eqx.Module):
    """m(d) = ⟨g, d⟩ + ½⟨d, B·d⟩ + Φ(x + d) − Φ(x), for a term Φ."""

    bent: Array
    slope: Array
    x: Array
    step: Array  # of the natural map at x
    term: Term
    layout: Layout = eqx.field(static=True)
    scale: Array | None = None  # of each entry in the norm; 1 unless given

    @property
    def _metric(self) -> Array:
        """‖d‖² = ⟨d, S·d⟩ with this diagonal S."""
        return jnp.diag(jnp.ones_like(self.x) if self.scale is None else self.scale)

    def value(self, d: Array, weight: Array) -> Array:
        """m(d) + weight/2·‖d‖²"""
        term = lambda x: self.term.value(self.layout.unravel(x)).astype(d.dtype)
        square = jnp.vdot(d, self.bent @ d) + weight * jnp.vdot(d, self._metric @ d)
        return jnp.vdot(self.slope, d) + square / 2 + term(self.x + d) - term(self.x)

    def least(self, weight: Array) -> tuple[Array, Array, Array]:
        """d where m(d) + weight/2·‖d‖² is least, how far m falls, and the weight.

        The weight is the least one from the given one on, in steps of a factor, with which the
        model is convex in the entries that their term does not hold. Each step is the best one of
        some: a step of the prox, and shares of semismooth Newton's with one of the prox after it.
        """
        weight = self._convex(weight)
        eye = jnp.eye(self.x.size, dtype=self.x.dtype)
        bent = self.bent + weight * self._metric
        step = 1 / jnp.maximum(jnp.max(jnp.sum(jnp.abs(bent), axis=1)), 1 / self.step)
        prox = lambda v: self._prox(v, step)
        pulled = lambda d: self.x + d - step * (self.slope + bent @ d)

        def stepped(carry: tuple) -> tuple:
            d, now, count, _ = carry
            at = pulled(d)
            plain = prox(at) - self.x
            pushed = jax.vmap(lambda t: jax.jvp(prox, (at,), (t,))[1], 1, 1)(eye - step * bent)
            way = jnp.linalg.solve(eye - pushed, d - plain)
            some = lambda share: self._projected(self.x + d - share * way) - self.x
            tried = jax.vmap(lambda share: prox(pulled(some(share))) - self.x)(shares)
            tried = jnp.concatenate([tried, plain[None]])
            values = jax.vmap(lambda d: self.value(d, weight))(tried)
            values = jnp.where(jnp.isnan(values), jnp.inf, values)
            best = jnp.argmin(values)
            least, new = values[best], tried[best]
            over = ~(least < now - GAINED * jnp.abs(now))
            return jnp.where(least < now, new, d), jnp.minimum(least, now), count + 1, over

        shares = jnp.asarray(SHARES, self.x.dtype)
        going = lambda carry: ~carry[3] & (carry[2] < STEPS)
        zero = jnp.zeros((), weight.dtype)
        first = (jnp.zeros_like(self.x), zero, jnp.zeros((), int), jnp.zeros((), bool))
        d = lax.while_loop(going, stepped, first)[0]
        return d, -self.value(d, zero), weight

    def _convex(self, weight: Array) -> Array:
        at, prox = self.x - self.step * self.slope, lambda v: self._prox(v, self.step)
        free = jax.jvp(prox, (at,), (irregular(at),))[1] != 0
        both, eye = free[:, None] & free[None, :], jnp.eye(at.size, dtype=at.dtype)
        size = jnp.max(jnp.sum(jnp.abs(self.bent), axis=1))

        def tried(weight: Array) -> Array:
            root = jnp.linalg.cholesky(jnp.where(both, self.bent + weight * self._metric, eye))
            return trees.all_finite(root)

        def grown(carry: tuple) -> tuple:
            weight = jnp.maximum(GROWTH * carry[0], LEAST_WEIGHT * size)
            return weight, carry[1] + 1, tried(weight)

        going = lambda carry: ~carry[2] & (carry[1] < MOST_GROWTHS)
        return lax.while_loop(going, grown, (weight, jnp.zeros((), int), tried(weight)))[0]

    def _prox(self, v: Array, step: Array) -> Array:
        return self.layout.ravel(self.term.prox(self.layout.unravel(v), step))

    def _projected(self, v: Array) -> Array:
        return self.layout.ravel(self.term.project(self.layout.unravel(v)))
