"""Methods that minimise one weighted loss of the training rows: ERM and group DRO."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array

from bilevax.deep.layers import Statistics
from bilevax.deep.methods import (
    Batch,
    Method,
    cross_entropy,
    encoded,
    group_means,
    stepped,
    with_trained,
)
from bilevax.deep.networks import Model, scores, split


class WeightedState(eqx.Module):
    encoder: Any
    head: Array
    weights: Array  # q, of the groups
    memory: Any  # the optimizer's
    loss: Array


def begin(self: Any, model: Model) -> WeightedState:
    """The state before the first step."""
    return WeightedState(
        encoder=model.encoder,
        head=model.head,
        weights=jnp.full(self.groups, 1 / self.groups, jnp.float32),
        memory=self.optimizer.init((split(model.encoder)[0], model.head)),
        loss=jnp.zeros((), jnp.float32),
    )


def model_of(self: Any, state: WeightedState) -> Model:
    """The network of a state."""
    return Model(state.encoder, state.head)


class ERM(Method[WeightedState]):
    """min over (x1, y1) of the mean loss over all rows, plus l2/2·‖(x1, y1)‖²."""

    takes_groups: ClassVar[bool] = False

    optimizer: Any  # optax's, or an `Optimizer`
    groups: int = eqx.field(static=True)
    l2: Any = 0.0
    statistics: Statistics = eqx.field(static=True, default="batch")

    init, model = begin, model_of

    def step(self, state: WeightedState, batch: Batch) -> WeightedState:
        share = jnp.full(batch.label.shape, 1 / batch.label.shape[0], jnp.float32)
        return descended(
            self, state, batch, lambda losses: (jnp.sum(share * losses), state.weights)
        )

    def seen(self, state: WeightedState) -> dict[str, Array]:
        return {"loss": state.loss}


class GroupDRO(Method[WeightedState]):
    """Group DRO as published (Sagawa et al. 2020), with the regulariser of `eq:dro_lower`.

    With L_g the batch's mean loss of group g and n_g its training rows:
    q_g ← q_g·exp(s·(L_g + C/√n_g − η·(q_g − 1/G))), scaled to sum 1; then a step of the optimizer
    on Σ_g q_g·L_g + l2/2·‖(x1, y1)‖². As published, η = 0; C is `adjustment`, s is `step_q`.
    """

    optimizer: Any
    counts: Array = eqx.field(converter=lambda n: jnp.asarray(n, jnp.float32))  # n_g
    eta: Any = 0.0
    adjustment: Any = 0.0
    step_q: Any = 0.01
    l2: Any = 0.0
    statistics: Statistics = eqx.field(static=True, default="batch")

    @property
    def groups(self) -> int:
        return self.counts.shape[0]

    init, model = begin, model_of

    def step(self, state: WeightedState, batch: Batch) -> WeightedState:
        q = state.weights

        def weigh(losses: Array) -> tuple[Array, Array]:
            means = group_means(losses, batch.group, self.groups)
            gain = means + self.adjustment * self.counts**-0.5 - self.eta * (q - 1 / self.groups)
            new = jax.nn.softmax(jnp.log(q) + self.step_q * jax.lax.stop_gradient(gain))
            # A weight that underflows could never come back.
            new = jnp.maximum(new, 1e-12)
            return jnp.sum(new * means), new

        return descended(self, state, batch, weigh)

    def seen(self, state: WeightedState) -> dict[str, Array]:
        return {"loss": state.loss, "weights": state.weights}


def descended(method: Any, state: WeightedState, batch: Batch, weigh: Any) -> WeightedState:
    """A step on the loss that `weigh` makes of the rows' losses; it gives new group weights too."""
    features, pull, encoder = encoded(state.encoder, batch.images, method.statistics)
    loss_of = lambda features, head: weigh(cross_entropy(scores(features, head), batch.label))
    (loss, weights), slopes = jax.value_and_grad(loss_of, argnums=(0, 1), has_aux=True)(
        features, state.head
    )
    at = (split(state.encoder)[0], state.head)
    gradient = jax.tree.map(lambda g, a: g + method.l2 * a, (pull(slopes[0]), slopes[1]), at)
    (trained, head), memory = stepped(method.optimizer, gradient, state.memory, at)
    return dataclasses.replace(
        state,
        encoder=with_trained(encoder, trained),
        head=head,
        weights=weights,
        memory=memory,
        loss=loss,
    )
