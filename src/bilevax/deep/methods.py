"""What a method is: how one batch changes its state; and the two of one loss, ERM and group DRO.

Every step runs the encoder forward once and backward once, on all rows of its batch together.
"""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable
from typing import Any, ClassVar, Generic, Literal, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array

from bilevax.deep.ambiguity import as_radii, check_radii, worst_losses
from bilevax.deep.losses import cross_entropy, group_means
from bilevax.deep.networks import Encoder, Model, Statistics, scores, split
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


def stepped(optimizer: Any, gradient: Tree, memory: Any, at: Tree) -> tuple[Tree, Any]:
    """`at` after a step of an optax transformation, and that transformation's new state."""
    change, memory = optimizer.update(gradient, memory, at)
    return jax.tree.map(lambda a, d: a + d.astype(a.dtype), at, change), memory


class Optimizer(eqx.Module):
    """−rate·d with the direction d of an optax transformation.

    The rate is a number of the program, not a part of its code, so one compilation serves every
    rate. With `steps` it falls as (1 + cos(π·k/steps))/2 in step k.
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


class WeightedState(eqx.Module):
    encoder: Any
    head: Array
    weights: Array  # q, of the groups
    memory: Any  # the optimizer's
    loss: Array


class Weighted(Method[WeightedState]):
    """A method that minimises one weighted loss of the training rows, plus l2/2·‖(x1, y1)‖².

    It has the fields `optimizer`, `groups`, `l2` and `statistics`.
    """

    def losses(self: Any, features: Array, head: Array, batch: Batch) -> Array:
        """One loss a row, or one for each group that it may be of."""
        return cross_entropy(scores(features, head), batch.label)

    @abc.abstractmethod
    def weigh(self, losses: Array, group: Array, weights: Array) -> tuple[Array, Array]:
        """The loss that the losses of the rows make, and the new weights of the groups."""

    def init(self: Any, model: Model) -> WeightedState:
        return WeightedState(
            encoder=model.encoder,
            head=model.head,
            weights=jnp.full(self.groups, 1 / self.groups, jnp.float32),
            memory=self.optimizer.init((split(model.encoder)[0], model.head)),
            loss=jnp.zeros((), jnp.float32),
        )

    def model(self, state: WeightedState) -> Model:
        return Model(state.encoder, state.head)

    def step(self: Any, state: WeightedState, batch: Batch) -> WeightedState:
        def loss_of(features: Array, head: Array) -> tuple[Array, Array]:
            return self.weigh(self.losses(features, head, batch), batch.group, state.weights)

        features, pull, encoder = encoded(state.encoder, batch.images, self.statistics)
        slopes_of = jax.value_and_grad(loss_of, argnums=(0, 1), has_aux=True)
        (loss, weights), (of_features, of_head) = slopes_of(features, state.head)
        at = (split(state.encoder)[0], state.head)
        gradient = jax.tree.map(lambda g, a: g + self.l2 * a, (pull(of_features), of_head), at)
        (trained, head), memory = stepped(self.optimizer, gradient, state.memory, at)
        encoder = eqx.combine(trained, split(encoder)[1])  # which has the new statistics
        return WeightedState(encoder, head, weights, memory, loss)


class ERM(Weighted):
    """min over (x1, y1) of the mean loss over all rows, plus l2/2·‖(x1, y1)‖²."""

    takes_groups: ClassVar[bool] = False

    optimizer: Any  # optax's, or an `Optimizer`
    groups: int = eqx.field(static=True)
    l2: Any = 0.0
    statistics: Statistics = eqx.field(static=True, default="batch")

    def weigh(self, losses: Array, group: Array, weights: Array) -> tuple[Array, Array]:
        return jnp.sum(losses * (1 / losses.shape[0])), weights

    def seen(self, state: WeightedState) -> dict[str, Array]:
        return {"loss": state.loss}


class GroupDRO(Weighted):
    """Group DRO as published (Sagawa et al. 2020), with the regulariser of `eq:dro_lower`.

    With L_g the batch's mean loss of group g and n_g its training rows:
    q_g ← q_g·exp(s·(L_g + C/√n_g − η·(q_g − 1/G))), scaled to sum 1; then a step of the optimizer
    on Σ_g q_g·L_g + l2/2·‖(x1, y1)‖². As published, η = 0; C is `adjustment`, s is `step_q`. With
    `radii`, one a group, the losses are those of features that move so far (see `ambiguity`).
    """

    optimizer: Any
    counts: Array = eqx.field(converter=lambda n: jnp.asarray(n, jnp.float32))  # n_g
    eta: Any = 0.0
    adjustment: Any = 0.0
    step_q: Any = 0.01
    l2: Any = 0.0
    statistics: Statistics = eqx.field(static=True, default="batch")
    radii: Any = eqx.field(converter=as_radii, default=None)

    def __check_init__(self):
        check_radii(self.radii, self.groups)

    @property
    def groups(self) -> int:
        return self.counts.shape[0]

    def losses(self, features: Array, head: Array, batch: Batch) -> Array:
        if self.radii is None:
            return super().losses(features, head, batch)
        return worst_losses(features, head, batch.label, self.radii)

    def weigh(self, losses: Array, group: Array, weights: Array) -> tuple[Array, Array]:
        means = group_means(losses, group, self.groups)
        far = weights - 1 / self.groups
        gain = means + self.adjustment * self.counts**-0.5 - self.eta * far
        new = jax.nn.softmax(jnp.log(weights) + self.step_q * jax.lax.stop_gradient(gain))
        new = jnp.maximum(new, 1e-12)  # a weight that underflows could never come back
        return jnp.sum(new * means), new

    def seen(self, state: WeightedState) -> dict[str, Array]:
        return {"loss": state.loss, "weights": state.weights}
