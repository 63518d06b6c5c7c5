"""Convex functions as terms: norms and squares, with the sums whose prox is known."""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from bilevax.arguments import axis_or_none, finite, interval, non_negative, positive
from bilevax.terms._term import Number, Scalar, Term, as_step, cast, parameter, scalar, tree_sum
from bilevax.terms.sets import (
    Box,
    Everywhere,
    Free,
    InBox,
    check_axis,
    check_broadcast,
    largest_or_one,
    may_be_infinite,
    zero_if,
)
from bilevax.trees import Tree


def shortest(g: Array, low: Array, high: Array) -> Array:
    """The shortest vector of g + [low, high], entry by entry."""
    return lax.clamp(g + low, jnp.zeros_like(g), g + high)


def safe_norm(x: Array, axis: int | None) -> Array:
    """Norms along `axis`, kept as an axis of length one; differentiable at zero."""
    unit = largest_or_one(x, axis)
    square = jnp.sum((x / unit) ** 2, axis=axis, keepdims=True)
    zero = square == 0
    return jnp.where(zero, 0, unit * jnp.sqrt(jnp.where(zero, 1, square)))


class L1(InBox):
    """weight·Σ |xᵢ|, on the box lower ≤ x ≤ upper (everywhere, unless bounds are given)."""

    weight: Number = eqx.field(converter=parameter)
    lower: Number = eqx.field(converter=parameter, default=-np.inf)
    upper: Number = eqx.field(converter=parameter, default=np.inf)
    open: bool = eqx.field(static=True, init=False)

    def __post_init__(self):
        self.open = may_be_infinite(self.lower, self.upper)

    def __check_init__(self):
        non_negative(self.weight, "L1: weight")
        interval(self.lower, self.upper, "L1")

    def bounds(self, x: Array) -> tuple[Array, Array]:
        return cast(self.lower, x), cast(self.upper, x)

    def leaf_value(self, x: Array) -> Scalar:
        return scalar(self.weight, x) * jnp.sum(jnp.abs(x)) + zero_if(self.contains(x), x)

    def leaf_prox(self, v: Array, step: Array) -> Array:
        # One-dimensional and convex, so the box only clips the unconstrained minimiser.
        shrink = lax.broadcast(step * scalar(self.weight, v), v.shape)
        return self.leaf_project(v - lax.clamp(-shrink, v, shrink))

    def entry_values(self, x: Array) -> Array:
        return scalar(self.weight, x) * jnp.abs(x)

    def leaf_conjugate(self, g: Array) -> Scalar:
        return jnp.sum(self.entry_conjugates(g))

    def entry_conjugates(self, g: Array) -> Array:
        low, high = self.bounds(g)
        weight = scalar(self.weight, g)

        def at(s: Array) -> Array:
            slope = g - weight * jnp.sign(s)
            endless = jnp.where(slope == 0, 0, jnp.sign(lax.stop_gradient(slope)) * s)
            finite = jnp.isfinite(s)
            return jnp.where(finite, slope * jnp.where(finite, s, 0), endless)

        inner = jnp.clip(jnp.zeros_like(g), low, high)
        return jnp.maximum(jnp.maximum(at(low), at(high)), at(inner))

    def leaf_residual(self, x: Array, g: Array) -> Array:
        low, high = self.bounds(x)
        weight = scalar(self.weight, x)
        least = jnp.where(x > 0, weight, -weight)
        most = jnp.where(x < 0, -weight, weight)
        return shortest(
            g, jnp.where(x <= low, -jnp.inf, least), jnp.where(x >= high, jnp.inf, most)
        )

    def leaf_supremum(self, like: Array) -> Scalar:
        low, high = self.bounds(like)
        weight = scalar(self.weight, like)
        farthest = jnp.sum(jnp.maximum(jnp.abs(low), jnp.abs(high)))
        return jnp.where(weight == 0, 0, weight * farthest)

    def leaf_check(self, x: Array) -> str | None:
        return check_broadcast(x, lower=self.lower, upper=self.upper)


class GroupL2(Everywhere):
    """weight·Σ ‖row‖ over the rows along `axis`; over the whole array with `axis=None`."""

    weight: Number = eqx.field(converter=parameter)
    axis: int | None = eqx.field(static=True, default=-1)

    def __check_init__(self):
        non_negative(self.weight, "GroupL2: weight")
        axis_or_none(self.axis, "GroupL2")

    def leaf_value(self, x: Array) -> Scalar:
        return scalar(self.weight, x) * jnp.sum(safe_norm(x, self.axis))

    def leaf_prox(self, v: Array, step: Array) -> Array:
        norm = safe_norm(v, self.axis)
        keep = norm > step * scalar(self.weight, v)
        ratio = 1 - step * scalar(self.weight, v) / jnp.where(keep, norm, 1)
        return jnp.where(keep, ratio, 0) * v

    def leaf_conjugate(self, g: Array) -> Scalar:
        within = jnp.all(safe_norm(g, self.axis) <= scalar(self.weight, g))
        return jnp.where(within, 0.0, jnp.inf).astype(g.dtype)

    def leaf_residual(self, x: Array, g: Array) -> Array:
        weight = scalar(self.weight, x)
        size, slope = safe_norm(x, self.axis), safe_norm(g, self.axis)
        smooth = g + weight * x / jnp.where(size == 0, 1, size)
        at_zero = g * jnp.maximum(1 - weight / jnp.where(slope == 0, 1, slope), 0)
        return jnp.where(size == 0, at_zero, smooth)

    def leaf_supremum(self, like: Array) -> Scalar:
        return jnp.where(scalar(self.weight, like) == 0, 0.0, jnp.inf).astype(like.dtype)

    def leaf_check(self, x: Array) -> str | None:
        return check_axis(x, self.axis)


class Ridge(Term):
    """weight/2·‖x − center‖² + base(x); `base` is `Free()` unless a sum put a term there.

    Completing the square gives all it needs from `base` alone:
    prox_{tφ}(v) = prox_{s·base}((v + t·w·c)/(1 + t·w)) with s = t/(1 + t·w), and the supremum in
    φ*(g) is attained at prox_{base/w}(c + g/w).
    """

    weight: Number = eqx.field(converter=parameter)
    center: Tree = eqx.field(converter=lambda c: jax.tree.map(parameter, c), default=0.0)
    base: Term = eqx.field(default_factory=Free)

    def __check_init__(self):
        positive(self.weight, "Ridge: weight")
        for center in jax.tree.leaves(self.center):
            finite(center, "Ridge: center")
        if not isinstance(self.base, Term):
            raise TypeError(f"Ridge: base must be a term, not {self.base!r}")

    @property
    def endless(self) -> bool:
        return False  # the square outgrows every slope

    @property
    def is_entrywise(self) -> bool:
        return self.base.is_entrywise

    def _centers(self, like: Tree) -> Tree:
        """The center in the shape of `like`: one for all leaves, or one per leaf."""
        if jax.tree.structure(self.center) == jax.tree.structure(0):
            return jax.tree.map(lambda a: cast(self.center, a), like)
        return jax.tree.map(lambda c, a: cast(c, a), self.center, like)

    def value(self, x: Tree) -> Scalar:
        square = lambda a, c: scalar(self.weight, a) / 2 * jnp.sum((a - c) ** 2)
        return tree_sum(jax.tree.map(square, x, self._centers(x))) + self.base.value(x)

    def _completed(self, v: Tree, step: Number) -> tuple[Tree, Array]:
        """The point and the step for a prox of the base."""
        step = as_step(step)
        grown = 1 + step * scalar(self.weight, step)

        def complete(a: Array, c: Array) -> Array:
            pull = scalar(step, a) * scalar(self.weight, a)
            return (a + pull * c) / (1 + pull)

        return jax.tree.map(complete, v, self._centers(v)), step / grown

    def prox(self, v: Tree, step: Number) -> Tree:
        return self.base.prox(*self._completed(v, step))

    def barrier(self, x: Tree) -> Scalar:
        return self.base.barrier(x)

    def barrier_prox(self, v: Tree, step: Number, weight: Number) -> Tree:
        grown = 1 + as_step(step) * scalar(self.weight, as_step(step))
        return self.base.barrier_prox(*self._completed(v, step), weight / grown)

    def project(self, v: Tree) -> Tree:
        return self.base.project(v)

    def diameter(self, like: Tree) -> Scalar:
        return self.base.diameter(like)

    def linear_oracle(self, g: Tree) -> Tree:
        return self.base.linear_oracle(g)

    def conjugate(self, g: Tree) -> Scalar:
        moved = jax.tree.map(lambda a, c: c + a / scalar(self.weight, a), g, self._centers(g))
        best = self.base.prox(moved, 1 / jnp.asarray(self.weight))
        linear = tree_sum(jax.tree.map(lambda a, b: jnp.sum(a * b), g, best))
        return linear - self.value(best)

    def residual(self, x: Tree, g: Tree) -> Tree:
        pulled = lambda b, a, c: b + scalar(self.weight, a) * (a - c)
        return self.base.residual(x, jax.tree.map(pulled, g, x, self._centers(x)))

    def supremum(self, like: Tree) -> Scalar:
        # Any point of the domain is within a diameter of the one nearest to the center.
        zeros = jax.tree.map(lambda a: jnp.zeros(jnp.shape(a), jnp.result_type(a)), like)
        centers = self._centers(zeros)
        gaps = jax.tree.map(lambda a, c: jnp.sum((a - c) ** 2), self.project(centers), centers)
        reach = jnp.sqrt(tree_sum(gaps)) + self.diameter(like)
        return scalar(self.weight, reach) / 2 * reach**2 + self.base.supremum(like)

    def check_block(self, x: Tree, name: str) -> None:
        self.base.check_block(x, name)
        single = jax.tree.structure(self.center) == jax.tree.structure(0)
        if not single and jax.tree.structure(self.center) != jax.tree.structure(x):
            raise ValueError(
                f"{name}: Ridge's center must be a number, an array, or a pytree like the block's, "
                f"{jax.tree.structure(x)}, not {jax.tree.structure(self.center)}"
            )
        centers = jax.tree.map(lambda _: self.center, x) if single else self.center
        for center, leaf in zip(jax.tree.leaves(centers), jax.tree.leaves(x)):
            wrong = check_broadcast(leaf, center=center)
            if wrong:
                raise ValueError(f"{name}: Ridge {wrong}")


def ElasticNet(l1: Number, l2: Number) -> Ridge:
    """l1·Σ |xᵢ| + l2/2·‖x‖², which is `Ridge(l2, base=L1(l1))`; l2 > 0."""
    non_negative(l1, "ElasticNet: l1")
    positive(l2, "ElasticNet: l2")
    return Ridge(l2, base=L1(l1))


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
