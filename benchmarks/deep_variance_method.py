"""The bilevel deep method with less noise: recursive estimates, anchors, batches that grow."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from bilevax.deep.bilevel import LEAST_ETA, BilevelDRO, Maximised, Minimised, _to_simplex
from bilevax.deep.methods import Batch, Method, encoded
from bilevax.deep.networks import Model, split
from bilevax.trees import Tree

#: Steps between two doublings at least, and how much of the old a mean over steps keeps.
HOLD, KEPT = 10, 0.9


class Gathering(eqx.Module):
    """What the minibatches of the present step have given so far, as sums."""

    x: Minimised
    y: Maximised
    squares: Array  # of the norms of single minibatches' gradients in (x1, y1)
    count: Array


class Counts(eqx.Module):
    steps: Array
    drawn: Array  # minibatches
    gradients: Array  # of images: a forward and a backward pass each
    wanted: Array  # minibatches of the present step
    held: Array  # steps since `wanted` grew


class VarianceState(eqx.Module):
    encoder: Any
    x: Minimised  # x1: the encoder's parameters
    y: Maximised
    begin: Maximised  # y⁰
    x_before: Minimised | None
    y_before: Maximised | None
    of_x: Minimised | None  # the last step's estimate of ∇ₓ, without the terms that have no noise
    of_y: Maximised | None
    gathered: Gathering
    ball: Any  # heavy ball of (x1, y1)
    counts: Counts
    noise: Array  # E‖g − ∇‖² of one minibatch
    signal: Array  # ‖∇‖²
    loss: Array


class Quiet(Method[VarianceState]):
    """`BilevelDRO` with T = 1, with a step from the mean of m minibatches, or from a recursion.

    Step k has m_k minibatches ξ, all at the same point, and the estimates
    d_k = mean over ξ of (g(w_k; ξ) − c_k·g(w_{k−1}; ξ)) + c_k·d_{k−1}
    of ∇ᵧP at (x_k, y_k) and of ∇ₓP at (x_k, y_{k+1}). While minibatches are still to come, y_{k+1}
    is what those so far give. The noise-free terms (weight decay of x1, the pull to y⁰) are exact.
    - c = 0, m = 1: the method of the library.
    - STORM: c = 1 − a, m = 1. Two gradients an image.
    - Anchors (PAGE with a fixed period): every `period` steps c = 0 and m = `anchor`; between them
      c = 1 and m = 1, where an image costs two gradients.
    - Growing: c = 0; m doubles, up to `most`, when noise/m > `bound`²·signal, the norm test of Byrd
      et al. 2012, by means over steps of the unbiased estimates: s² = (Σ‖g_i‖² − m‖ḡ‖²)/(m − 1) of
      noise, ‖ḡ‖² − s²/m of signal, both of (x1, y1).
    The rate of (x1, y1) falls as a cosine of the image gradients spent, or (`falls` = 0) not at
    all. With `paced` = p > 0, σ and τ are for p images a step, and in proportion for other numbers.
    """

    takes_validation: ClassVar[bool] = True

    base: BilevelDRO
    rate: Any
    momentum: Any
    budget: Any  # of image gradients
    mixing: Any = 1.0  # a
    period: Any = 1
    anchor: Any = 1
    first: Any = 1
    most: Any = 1
    bound: Any = 1.0
    falls: Any = 1.0
    paced: Any = 0.0
    recursive: bool = eqx.field(static=True, default=False)

    def init(self, model: Model) -> VarianceState:
        begun = self.base.init(model)
        x = Minimised(split(model.encoder)[0], begun.eta, begun.y1, begun.y2)
        zeros = lambda tree: jax.tree.map(jnp.zeros_like, tree)
        none, nil = jnp.zeros((), jnp.int32), jnp.zeros((), jnp.float32)
        y, ball = begun.y, zeros((x.x1, x.y1))
        x_before, y_before, of_x, of_y = None, None, None, None
        if self.recursive:
            x_before, y_before, of_x, of_y = x, y, zeros(x), zeros(y)
        gathered = Gathering(zeros(x), zeros(y), nil, none)
        counts = Counts(none, none, none, jnp.asarray(self.first, jnp.int32), none)
        made = VarianceState(
            model.encoder, x, y, y, x_before, y_before, of_x, of_y, gathered, ball, counts,
            noise=nil, signal=nil, loss=nil,
        )  # fmt: skip
        # Copies: a state whose leaves are the same buffers could not be donated.
        return jax.tree.map(jnp.copy, made)

    def model(self, state: VarianceState) -> Model:
        return Model(state.encoder, state.x.y1)

    def seen(self, state: VarianceState) -> dict[str, Array]:
        return {
            "loss": state.loss,
            "eta": state.x.eta,
            "weights": state.x.y2,
            "validation weights": state.y.x2,
            "steps": state.counts.steps,
            "minibatches": state.counts.drawn,
            "image_gradients": state.counts.gradients,
            "wanted": state.counts.wanted,
            "noise": state.noise,
            "signal": state.signal,
        }

    def _kept(self, counts: Counts) -> Array:
        """c of this step: 0 in the first one and at anchors."""
        fresh = (counts.steps == 0) | ((self.period > 1) & (counts.steps % self.period == 0))
        return jnp.where(fresh, 0.0, 1.0 - self.mixing).astype(jnp.float32)

    def step(self, state: VarianceState, batch: Batch) -> VarianceState:
        """One minibatch; the point moves when the step has all of its minibatches."""
        counts, images = state.counts, len(batch.label)
        c = self._kept(counts) if self.recursive else jnp.zeros((), jnp.float32)
        got, number = state.gathered, (state.gathered.count + 1).astype(jnp.float32)
        pace = jnp.where(self.paced > 0, number * images / jnp.maximum(self.paced, 1), 1.0)

        features, pull_back, encoder = encoded(state.encoder, batch.images, self.base.statistics)
        at = dataclasses.replace(state.x, x1=features)
        own_y = jax.grad(self.base.value, argnums=1, has_aux=True)(at, state.y, batch)[0]
        earlier: Any = None
        if state.x_before is not None:
            old = eqx.combine(state.x_before.x1, split(state.encoder)[1])
            was, pull_old, _ = encoded(old, batch.images, self.base.statistics)
            earlier = dataclasses.replace(state.x_before, x1=was), pull_old
            before = jax.grad(self.base.value, argnums=1, has_aux=True)
            own_y = _less(own_y, c, before(earlier[0], state.y_before, batch)[0])
        sum_y = jax.tree.map(jnp.add, got.y, own_y)
        of_y = _mean(sum_y, number, c, state.of_y)
        y = self._ascended(state, of_y, pace)

        slopes, (loss, _) = jax.grad(self.base.value, has_aux=True)(at, y, batch)
        own_x = dataclasses.replace(slopes, x1=pull_back(slopes.x1))
        squares = got.squares + _square((own_x.x1, own_x.y1))
        if earlier is not None:
            then, pull_old = earlier
            slopes, _ = jax.grad(self.base.value, has_aux=True)(then, state.y, batch)
            own_x = _less(own_x, c, dataclasses.replace(slopes, x1=pull_old(slopes.x1)))
        sum_x = jax.tree.map(jnp.add, got.x, own_x)

        twice = jnp.where(c > 0, 2, 1)
        counts = dataclasses.replace(
            counts, drawn=counts.drawn + 1, gradients=counts.gradients + images * twice
        )
        fixed = split(encoder)[1]  # which has the new statistics
        state = dataclasses.replace(state, encoder=eqx.combine(state.x.x1, fixed), loss=loss)
        gathered = Gathering(sum_x, sum_y, squares, got.count + 1)

        def moved(state: VarianceState) -> VarianceState:
            of_x = _mean(sum_x, number, c, state.of_x)
            return self._moved(state, of_x, of_y, y, counts, gathered, pace)

        def waiting(state: VarianceState) -> VarianceState:
            return dataclasses.replace(state, counts=counts, gathered=gathered)

        return lax.cond(gathered.count >= counts.wanted, moved, waiting, state)

    def _ascended(self, state: VarianceState, of_y: Maximised, pace: Array) -> Maximised:
        weight = self.base.epsilon / (2 * self.base.diameter)
        sigma = pace / (3 * self.base.smoothness + weight)
        risen = lambda a, d, begin: a + sigma * (d - weight * (a - begin))
        y = jax.tree.map(risen, state.y, of_y, state.begin)
        return Maximised(_to_simplex(y.x2), y.z1, _to_simplex(y.z2))

    def _moved(
        self, state: VarianceState, of_x: Minimised, of_y: Maximised, y: Maximised,
        counts: Counts, gathered: Gathering, pace: Array,
    ) -> VarianceState:  # fmt: skip
        """The state after the step's last minibatch."""
        share = jnp.clip(state.counts.gradients.astype(jnp.float32) / self.budget, 0, 1)
        rate = self.rate * (1 - self.falls * (1 - jnp.cos(jnp.pi * share)) / 2)
        own = jax.tree.map(lambda g, a: g + self.base.l2 * a, of_x.x1, state.x.x1)
        ball = jax.tree.map(lambda m, g: self.momentum * m + g, state.ball, (own, of_x.y1))
        at = state.x.x1, state.x.y1
        x1, y1 = jax.tree.map(lambda a, m: a - rate * m, at, ball)
        tau = self.base.tau * pace
        eta = jnp.maximum(state.x.eta - tau * of_x.eta, LEAST_ETA)
        x = Minimised(x1, eta, y1, _to_simplex(state.x.y2 - tau * of_x.y2))
        noise, signal, counts = self._tested(state, gathered, counts)
        memory = {}
        if self.recursive:
            memory = {"x_before": state.x, "y_before": state.y, "of_x": of_x, "of_y": of_y}
        return dataclasses.replace(
            state, encoder=eqx.combine(x1, split(state.encoder)[1]), x=x, y=y, ball=ball,
            gathered=jax.tree.map(jnp.zeros_like, gathered), counts=counts,
            noise=noise, signal=signal, **memory,
        )  # fmt: skip

    def _tested(
        self, state: VarianceState, gathered: Gathering, counts: Counts
    ) -> tuple[Array, Array, Counts]:
        """Noise, signal, and the counts with the number of minibatches of the next step."""
        m = gathered.count.astype(jnp.float32)
        mean = _square((gathered.x.x1, gathered.x.y1)) / m**2
        several = gathered.count > 1
        noise = (gathered.squares - m * mean) / jnp.maximum(m - 1, 1)
        blend = lambda old, new: jnp.where(several, KEPT * old + (1 - KEPT) * new, old)
        noise, signal = blend(state.noise, noise), blend(state.signal, mean - noise / m)
        steps, held = counts.steps + 1, counts.held + 1
        grows = (held >= HOLD) & (noise / m > self.bound**2 * jnp.maximum(signal, 0))
        grown = jnp.minimum(2 * counts.wanted, self.most)
        if self.recursive:
            wanted = jnp.where((self.period > 1) & (steps % self.period == 0), self.anchor, 1)
        else:
            wanted = jnp.where(grows, jnp.maximum(grown, counts.wanted), counts.wanted)
        held = jnp.where(grows, 0, held)
        new = dataclasses.replace(
            counts, steps=steps, held=held, wanted=wanted.astype(counts.wanted.dtype)
        )
        return noise, signal, new


def _less(tree: Tree, c: Array, other: Tree) -> Tree:
    return jax.tree.map(lambda a, b: a - c * b, tree, other)


def _mean(total: Tree, number: Array, c: Array, last: Tree | None) -> Tree:
    """total/number + c·last."""
    mean = jax.tree.map(lambda s: s / number, total)
    return mean if last is None else jax.tree.map(lambda m, d: m + c * d, mean, last)


def _square(tree: Tree) -> Array:
    return sum((jnp.sum(leaf * leaf) for leaf in jax.tree.leaves(tree)), jnp.zeros(()))
