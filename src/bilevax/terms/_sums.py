"""Sums of two terms, for the pairs whose prox is known."""

from __future__ import annotations

import jax.numpy as jnp

from bilevax.terms._term import Term
from bilevax.terms.norms import L1, Ridge
from bilevax.terms.sets import Box, Free


def add(a: Term, b: Term) -> Term:
    """a + b as one term."""
    for first, second in ((a, b), (b, a)):
        if isinstance(first, Free):
            return second
        if isinstance(first, Ridge) and not isinstance(second, Ridge):
            return Ridge(first.weight, first.center, add(first.base, second))
    if isinstance(a, Box | L1) and isinstance(b, Box | L1):
        shape = jnp.broadcast_shapes(*(jnp.shape(v) for t in (a, b) for v in (t.lower, t.upper)))
        wide = lambda value: jnp.broadcast_to(jnp.asarray(value), shape)
        lower = jnp.maximum(wide(a.lower), wide(b.lower))
        upper = jnp.minimum(wide(a.upper), wide(b.upper))
        weights = [t.weight for t in (a, b) if isinstance(t, L1)]
        return L1(sum(weights), lower, upper) if weights else Box(lower, upper)
    raise TypeError(
        f"the prox of {type(a).__name__} + {type(b).__name__} is not known in closed form; known "
        "sums are Ridge + any other term, and L1 + Box. Put a smooth part into the function instead"
    )
