"""Steps by optax whose rate is a number of the program, not a part of its code.

So one compilation serves every learning rate; a plain optax transformation may stand for it too.
"""

from __future__ import annotations

import functools
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array

from bilevax.trees import Tree


class Optimizer(eqx.Module):
    """−rate·d with the direction d of an optax transformation.

    With `steps` the rate falls as (1 + cos(π·k/steps))/2 in step k.
    """

    direction: Any = eqx.field(static=True)
    rate: Any
    steps: Any = None

    def init(self, at: Tree) -> tuple[Array, Any]:
        return jnp.zeros((), jnp.int32), self.direction.init(at)

    def update(self, gradient: Tree, memory: Any, at: Tree) -> tuple[Tree, Any]:
        count, inner = memory
        direction, inner = self.direction.update(gradient, inner, at)
        rate = self.rate
        if self.steps is not None:
            share = jnp.clip(count.astype(jnp.float32) / self.steps, 0, 1)
            rate = rate * (1 + jnp.cos(jnp.pi * share)) / 2
        return jax.tree.map(lambda d: -rate * d, direction), (count + 1, inner)


@functools.cache
def direction(name: Literal["sgd", "adam"], momentum: float) -> optax.GradientTransformation:
    """The same object each time, so that a program that was compiled with it is found again."""
    if name == "adam":
        return optax.scale_by_adam(b1=momentum)
    return optax.trace(decay=momentum) if momentum else optax.identity()
