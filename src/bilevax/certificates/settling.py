"""From near a saddle point to it, by a few of Newton's steps."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from bilevax import trees
from bilevax.terms import Term
from bilevax.trees import Layout, Tree

# With more entries, linear systems would cost too much.
MOST_ENTRIES = 300
# The steps, and how often one is halved.
STEPS, HALVINGS = 12, 4
# In shares of the root of the rounding: by how much of the curvature systems are made regular, and
# what is left of the slope, over 1 + its size, where they have arrived.
FIRM, ARRIVED = 0.01, 0.1


def settled(
    operator: Callable[[Tree], Tree], term: Term, start: Tree, otherwise: Tree
) -> tuple[Tree, Array]:
    """Where 0 ∈ F + ∂Φ for a monotone F, if semismooth Newton steps get there from the start.

    They go by the natural map R(w) = w − prox_{sΦ}(w − s·F(w)), with one step s from the curvature
    at the start, and end where a step, halved a few times, does not make R smaller. Where they do
    not arrive, and for a large problem, it is the place `otherwise`. Says whether they have.
    """
    layout = Layout.of(start)
    w = layout.ravel(start)
    if w.size > MOST_ENTRIES:
        return otherwise, jnp.zeros((), bool)
    flat = lambda w: layout.ravel(operator(layout.unravel(w)))
    most = jnp.max(jnp.sum(jnp.abs(jax.jacfwd(flat)(w)), axis=1))
    s = jnp.where(jnp.isfinite(most) & (most > 0), 1 / most, 1)
    root, eye = jnp.finfo(w.dtype).eps ** 0.5, jnp.eye(w.size, dtype=w.dtype)

    def rest(w: Array) -> Array:
        return w - layout.ravel(term.prox(layout.unravel(w - s * flat(w)), s))

    def advance(carry: tuple) -> tuple:
        w, now, count, _ = carry
        d = jnp.linalg.solve(jax.jacfwd(rest)(w) + FIRM * root * eye, -rest(w))

        def halved(carry: tuple) -> tuple:
            share, _, _ = carry
            there = w + share * d
            return share / 2, there, trees.norm(rest(there))

        longer = lambda carry: ~(carry[2] < now) & (carry[0] > 0.5**HALVINGS)
        tried = lax.while_loop(longer, halved, (jnp.ones((), w.dtype), w, now))
        better = tried[2] < now
        over = ~better | (tried[2] <= jnp.finfo(w.dtype).eps * trees.norm(w))
        return jnp.where(better, tried[1], w), jnp.minimum(tried[2], now), count + 1, over

    going = lambda carry: ~carry[3] & (carry[2] < STEPS)
    first = (w, trees.norm(rest(w)), jnp.zeros((), int), jnp.zeros((), bool))
    w, left, _, _ = lax.while_loop(going, advance, first)
    arrived = left / s <= ARRIVED * root * (1 + trees.norm(flat(w)))
    found = term.project(layout.unravel(w))
    return jax.tree.map(lambda a, b: jnp.where(arrived, a, b), found, otherwise), arrived
