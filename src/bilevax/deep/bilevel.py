"""The paper's bilevel method for deep networks: SAPD on the penalty problem, features shared."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Literal, TypeAlias, get_args

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from bilevax.arguments import one_of, positive, tracing
from bilevax.deep.ambiguity import (
    as_radii,
    check_radii,
    group_entropy,
    new_predictor,
    shares,
    worst_losses,
)
from bilevax.deep.losses import cross_entropy, group_means, means, membership
from bilevax.deep.methods import Batch, Method, encoded, stepped
from bilevax.deep.networks import Model, Statistics, scores, split
from bilevax.terms import Simplex

LEAST_ETA = 1e-6
SIMPLEX = Simplex()
SoftGroups: TypeAlias = Literal["none", "predicted", "tuned"]


class Minimised(eqx.Module):
    """x of the penalty problem; x1 is the encoder's parameters or, for one batch, its features."""

    x1: Any
    eta: Array
    y1: Array
    y2: Array
    radii: Array | None = None
    predictor: Array | None = None


class Maximised(eqx.Module):
    """y of the penalty problem."""

    x2: Array
    z1: Array
    z2: Array


class BilevelState(eqx.Module):
    encoder: Any
    eta: Array
    y1: Array
    y2: Array
    y: Maximised
    slope: Maximised  # the last ∇ᵧ
    anchor: Maximised  # y⁰
    centre: Minimised | None  # x^k, for T > 1
    iteration: Array  # of T
    memory: Any
    loss: Array
    radii: Array | None = None
    predictor: Array | None = None
    group_loss: Array | None = None  # of the predictor


class BilevelDRO(Method[BilevelState]):
    """`eq:dro_nested`: group DRO gives a head on the training rows, and the encoder and η make the
    worst group of the validation rows do well with it.

    f  = x2ᵀL_val(x1, y1) + l2/2·‖x1‖²,
    f~ = y2ᵀL_train(x1, y1) − η/2·‖y2 − 1/G‖² + l2/2·‖y1‖²; x2, y2, z2 in the simplex, η ≥ 1e-6;
    min over x = (x1, η, y1, y2), max over y = (x2, z1, z2) of
    P = f + ρ·(f~(x1, y1, z2) − f~(x1, z1, y2)).

    An iteration of `alg:sapd` on P + L·‖x − x^k‖² − ε/(4D_y)·‖y − y⁰‖²:
    s = (1 + θ)·∇ᵧ − θ·∇ᵧ⁻ (θ = 0 in the first of T), y ← Π(y + σs), x ← Π(x − τ∇ₓ(x, y)), with
    σ = 1/(3L + ε/(2D_y)) if not given; after T of them x^k ← x. With T = 1 the pull to x^k is 0.
    `optimizer`, any optax transformation, takes the step of x1, y1 and v instead of τ.

    With `radii` the training losses are those of features that move so far (see `ambiguity`), in f~
    only. With a `bound` the radii are in the upper level, too: r ← Π(r − τ∇ᵣP) on [0, bound], and
    ∇ᵣP = ρ·(∇ᵣf~(x1, y1, z2) − ∇ᵣf~(x1, z1, y2)).

    With `soft_groups` training rows may lack groups. The shares that a predictor v gives them are
    in f~, and the upper level has also CE(v) + l2/2·‖v‖², with the cross entropy CE of the groups
    of the validation rows. "tuned" takes the gradient of P as it is,
    ∇ᵥP = ∇ᵥCE + l2·v + ρ·(∇ᵥf~(x1, y1, z2) − ∇ᵥf~(x1, z1, y2)),
    without a derivative of the lower level's answer; "predicted" takes its first two terms only.

    Both half-steps are at the same x1 and use the same batch: features are computed once, all
    three losses and both half-steps of heads and weights use them, and one backward pass takes
    their gradient to x1. (The paper draws another batch for the second half-step.)
    """

    takes_validation: ClassVar[bool] = True

    groups: int = eqx.field(static=True)
    rho: Any = 100.0
    smoothness: Any = 1000.0
    diameter: Any = 100.0
    epsilon: Any = 1.0
    tau: Any = 0.01
    sigma: Any = None
    theta: Any = 0.1
    eta: Any = 1.0
    l2: Any = 0.1
    iterations: int = eqx.field(static=True, default=1)
    optimizer: Any = None
    statistics: Statistics = eqx.field(static=True, default="batch")
    radii: Any = eqx.field(converter=as_radii, default=None)
    bound: Any = None
    soft_groups: SoftGroups = eqx.field(static=True, default="none")

    def __check_init__(self):
        check_radii(self.radii, self.groups)
        one_of(self.soft_groups, "soft_groups", *get_args(SoftGroups))
        if self.bound is not None and self.radii is None:
            raise ValueError("a bound is of radii; give the first ones, too")
        if self.bound is not None and not (tracing(self.bound) or tracing(self.radii)):
            positive(self.bound, "bound")
            if np.any(np.asarray(self.radii) > self.bound):
                raise ValueError(f"radii must be at most bound={self.bound}")

    def init(self, model: Model) -> BilevelState:
        even = jnp.full(self.groups, 1 / self.groups, jnp.float32)
        y = Maximised(even, model.head, even)
        eta = jnp.asarray(self.eta, jnp.float32)
        trained = split(model.encoder)[0]
        v = new_predictor(self.groups, *model.head.shape) if self.soft_groups != "none" else None
        at = Minimised(trained, eta, model.head, even, self.radii, v)
        return BilevelState(
            encoder=model.encoder,
            eta=eta,
            y1=model.head,
            y2=even,
            y=y,
            slope=jax.tree.map(jnp.zeros_like, y),
            anchor=y,
            centre=at if self.iterations > 1 else None,
            iteration=jnp.zeros((), jnp.int32),
            memory=self.optimizer and self.optimizer.init(stepped_by_optimizer(at)),
            loss=jnp.zeros((), jnp.float32),
            radii=self.radii,
            predictor=v,
            group_loss=None if v is None else jnp.zeros((), jnp.float32),
        )

    def model(self, state: BilevelState) -> Model:
        return Model(state.encoder, state.y1)

    def seen(self, state: BilevelState) -> dict[str, Array]:
        found = {
            "loss": state.loss,
            "eta": state.eta,
            "weights": state.y2,
            "validation weights": state.y.x2,
            "radii": state.radii,
            "group loss": state.group_loss,
        }
        return {name: value for name, value in found.items() if value is not None}

    def value(
        self, x: Minimised, y: Maximised, batch: Batch
    ) -> tuple[Array, tuple[Array, Array | None]]:
        """P without l2/2·‖x1‖², at features x.x1; and x2ᵀL_val and CE(v) alone."""
        train, held = slice(batch.train), slice(batch.train, None)
        member = self.shares(x, batch, train)

        def lower(head: Array, weights: Array) -> Array:
            losses = means(self.losses(x, head, batch, train), member)
            far = jnp.sum((weights - 1 / self.groups) ** 2)
            size = jnp.sum(head * head)
            return jnp.sum(weights * losses) - x.eta / 2 * far + self.l2 / 2 * size

        own = cross_entropy(scores(x.x1[held], x.y1), batch.label[held])
        upper = jnp.sum(y.x2 * group_means(own, batch.group[held], self.groups))
        total = upper + self.rho * (lower(x.y1, y.z2) - lower(y.z1, x.y2))
        if x.predictor is None:
            return total, (upper, None)
        of_groups = group_entropy(x.x1[held], batch.label[held], batch.group[held], x.predictor)
        return total + of_groups + self.l2 / 2 * jnp.sum(x.predictor**2), (upper, of_groups)

    def losses(self, x: Minimised, head: Array, batch: Batch, rows: slice) -> Array:
        """Of training rows, one each or, with radii, one for each group."""
        if x.radii is None:
            return cross_entropy(scores(x.x1[rows], head), batch.label[rows])
        return worst_losses(x.x1[rows], head, batch.label[rows], x.radii)

    def shares(self, x: Minimised, batch: Batch, rows: slice) -> Array:
        """The share of each training row in each group."""
        if x.predictor is None:
            return membership(batch.group[rows], self.groups)
        v = x.predictor if self.soft_groups == "tuned" else jax.lax.stop_gradient(x.predictor)
        return shares(x.x1[rows], batch.label[rows], batch.group[rows], v)

    def step(self, state: BilevelState, batch: Batch) -> BilevelState:
        features, pull_back, encoder = encoded(state.encoder, batch.images, self.statistics)
        at = Minimised(features, state.eta, state.y1, state.y2, state.radii, state.predictor)
        y, slope = self._ascended(state, at, batch)
        slopes, (loss, group_loss) = jax.grad(self.value, has_aux=True)(at, y, batch)
        trained = split(state.encoder)[0]
        x = dataclasses.replace(at, x1=trained)
        own = jax.tree.map(lambda g, a: g + self.l2 * a, pull_back(slopes.x1), trained)
        gradient = dataclasses.replace(slopes, x1=own)
        if state.centre is not None:
            pulled = lambda g, a, c: g + 2 * self.smoothness * (a - c)
            gradient = jax.tree.map(pulled, gradient, x, state.centre)
        x, memory = self._descended(x, gradient, state.memory)
        iteration = (state.iteration + 1) % self.iterations
        moved = lambda new, old: jnp.where(iteration == 0, new, old)
        centre = state.centre and jax.tree.map(moved, x, state.centre)
        return dataclasses.replace(
            state,
            encoder=eqx.combine(x.x1, split(encoder)[1]),  # which has the new statistics
            eta=x.eta,
            y1=x.y1,
            y2=x.y2,
            y=y,
            slope=slope,
            centre=centre,
            iteration=iteration,
            memory=memory,
            loss=loss,
            radii=x.radii,
            predictor=x.predictor,
            group_loss=group_loss,
        )

    def _ascended(
        self, state: BilevelState, at: Minimised, batch: Batch
    ) -> tuple[Maximised, Maximised]:
        """y after its step, and ∇ᵧ."""
        weight = self.epsilon / (2 * self.diameter)
        sigma = 1 / (3 * self.smoothness + weight) if self.sigma is None else self.sigma
        theta = jnp.where(state.iteration == 0, 0, self.theta)
        own, _ = jax.grad(self.value, argnums=1, has_aux=True)(at, state.y, batch)
        slope = jax.tree.map(lambda g, a, c: g - weight * (a - c), own, state.y, state.anchor)
        risen = lambda a, s, last: a + sigma * ((1 + theta) * s - theta * last)
        y = jax.tree.map(risen, state.y, slope, state.slope)
        return Maximised(_to_simplex(y.x2), y.z1, _to_simplex(y.z2)), slope

    def _descended(self, x: Minimised, gradient: Minimised, memory: Any) -> tuple[Minimised, Any]:
        new = jax.tree.map(lambda a, g: a - self.tau * g, x, gradient)
        if self.optimizer is not None:
            parts = stepped_by_optimizer(gradient), memory, stepped_by_optimizer(x)
            (x1, y1, *v), memory = stepped(self.optimizer, *parts)
            new = dataclasses.replace(new, x1=x1, y1=y1, predictor=v[0] if v else None)
        radii = x.radii if self.bound is None else jnp.clip(new.radii, 0, self.bound)
        eta, y2 = jnp.maximum(new.eta, LEAST_ETA), _to_simplex(new.y2)
        return dataclasses.replace(new, eta=eta, y2=y2, radii=radii), memory


def stepped_by_optimizer(x: Minimised) -> tuple[Any, ...]:
    """The blocks that an optimizer steps, if there is one."""
    return (x.x1, x.y1) if x.predictor is None else (x.x1, x.y1, x.predictor)


def _to_simplex(weights: Array) -> Array:
    # Entries more than 1 below the largest become 0 anyway; cut off, they cost no digits where
    # losses are huge.
    near = jnp.maximum(weights - jnp.max(weights), -1)
    return SIMPLEX.prox(near, jnp.ones((), weights.dtype))
