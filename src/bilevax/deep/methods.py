"""What a method is: how one batch changes its state.

Every step runs the encoder forward once and backward once, on all rows of its batch together.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any, ClassVar, Generic, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array

from bilevax.deep.layers import Statistics
from bilevax.deep.networks import Encoder, Model, split
from bilevax.trees import Tree

State = TypeVar("State")


class Batch(eqx.Module):
    """Images ready for the network; the first `train` rows are training rows, then validation."""

    images: Array
    label: Array
    group: Array
    train: int = eqx.field(static=True)


class Method(eqx.Module, Generic[State]):
    """How to train: the constants of a method. What changes is in its state."""

    #: Whether half of a batch are validation rows, and whether every group is in each batch.
    takes_validation: ClassVar[bool] = False
    takes_groups: ClassVar[bool] = True

    @abc.abstractmethod
    def init(self, model: Model) -> State:
        """The state before the first step."""

    @abc.abstractmethod
    def step(self, state: State, batch: Batch) -> State:
        """The state after one batch."""

    @abc.abstractmethod
    def model(self, state: State) -> Model:
        """The network of a state."""

    @abc.abstractmethod
    def seen(self, state: State) -> dict[str, Array]:
        """Numbers worth showing: the loss of the last batch, η, weights of groups."""


def encoded(
    encoder: Encoder, images: Array, statistics: Statistics
) -> tuple[Array, Callable[[Array], Tree], Encoder]:
    """Features, a function that takes their gradient to the parameters, and the moved encoder.

    That function is the one backward pass; the encoder has new statistics of batch norm.
    """
    trained, fixed = split(encoder)

    def features(trained: Tree) -> tuple[Array, Encoder]:
        return eqx.combine(trained, fixed)(images, statistics)

    found, pull, moved = jax.vjp(features, trained, has_aux=True)
    return found, lambda cotangent: pull(cotangent)[0], moved


def cross_entropy(logits: Array, label: Array) -> Array:
    """−log of the share that softmax gives to the label, row by row."""
    own = jnp.take_along_axis(logits, label[:, None], axis=1)[:, 0]
    return jax.nn.logsumexp(logits, axis=1) - own


def group_means(values: Array, group: Array, groups: int) -> Array:
    """The mean of each group's rows; 0 for a group without any."""
    member = (group[:, None] == jnp.arange(groups, dtype=group.dtype)[None, :]).astype(jnp.float32)
    return jnp.matmul(values, member, precision="highest") / jnp.maximum(member.sum(axis=0), 1)


def stepped(optimizer: Any, gradient: Tree, memory: Any, at: Tree) -> tuple[Tree, Any]:
    """`at` after a step of an optax transformation, and that transformation's new state."""
    change, memory = optimizer.update(gradient, memory, at)
    return jax.tree.map(lambda a, d: a + d.astype(a.dtype), at, change), memory


def with_trained(encoder: Encoder, trained: Tree) -> Encoder:
    """The encoder with these parameters and its own running statistics."""
    return eqx.combine(trained, split(encoder)[1])
