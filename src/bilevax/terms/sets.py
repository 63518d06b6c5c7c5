"""Convex sets as terms: φ is 0 on the set and infinite outside, so its prox is the projection."""

from __future__ import annotations

import abc

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from bilevax import trees
from bilevax.arguments import (
    axis_or_none,
    finite,
    interval,
    non_negative,
    numbers,
    positive,
    tracing,
)
from bilevax.terms._barriers import interval_barrier, interval_prox, simplex_prox
from bilevax.terms._term import LeafTerm, Number, Scalar, cast, parameter, scalar
from bilevax.terms._waterfill import FEW, along_axis, pairs, waterfill
from bilevax.trees import Tree

# A point lies in a set, or on its curved boundary, when it does up to this many roundings.
ROUNDING = 64


def roundings(x: Array) -> float:
    """What a number of size 1 may be off by and still count as rounded."""
    return ROUNDING * float(jnp.finfo(x.dtype).eps)


def zero_if(inside: Array, like: Array) -> Scalar:
    """0 inside of a set and infinity outside."""
    zero, infinity = (jnp.asarray(value, like.dtype) for value in (0.0, jnp.inf))
    return lax.select(inside, zero, infinity)


def largest_or_one(x: Array, axis: int | None) -> Array:
    """The size of the largest entry along `axis`: in this unit no square vanishes or overflows.

    It is kept as an axis of length one; 1 where all entries are zero, or one is not finite.
    """
    largest = lax.stop_gradient(jnp.max(jnp.abs(x), axis=axis, keepdims=True, initial=0))
    return jnp.where((largest > 0) & jnp.isfinite(largest), largest, jnp.ones_like(largest))


def positive_norm(x: Array, axis: int | None) -> Array:
    """Norms along `axis`, kept as an axis of length one; one number for the whole array.

    The norm of zero is a tiny number instead, with derivative 0: one may divide by it.
    """
    unit = largest_or_one(x, axis)
    square = jnp.sum((x / unit) ** 2, axis=axis, keepdims=axis is not None)
    tiny = jnp.full_like(square, jnp.finfo(x.dtype).tiny)
    return unit.reshape(square.shape) * lax.sqrt(lax.max(square, tiny))


def row_count(x: Array, axis: int | None) -> int:
    return 1 if axis is None else x.size // x.shape[axis]


def row_length(x: Array, axis: int | None) -> int:
    return x.size if axis is None else x.shape[axis]


def check_axis(x: Array, axis: int | None) -> str | None:
    if axis is not None and not -jnp.ndim(x) <= axis < jnp.ndim(x):
        return f"has axis={axis}, but this array has shape {jnp.shape(x)}"
    if axis is not None and 0 in jnp.shape(x):
        return f"needs rows with entries along axis={axis}, but this array has shape {jnp.shape(x)}"
    return None


def check_broadcast(x: Array, **bounds: Number) -> str | None:
    for name, value in bounds.items():
        try:
            fits = jnp.broadcast_shapes(jnp.shape(value), jnp.shape(x)) == jnp.shape(x)
        except ValueError:
            fits = False
        if not fits:
            return f"has {name} of shape {jnp.shape(value)}, but this array has {jnp.shape(x)}"
    return None


class ConvexSet(LeafTerm):
    """What every set shares: its value is 0 or infinite, its prox the projection."""

    @abc.abstractmethod
    def contains(self, x: Array) -> Array:
        """Whether x lies in the set, up to rounding; NaN does not.

        Rounding is measured against the set's own size, so that many small trespasses do not add up
        to a large one.
        """

    def leaf_value(self, x: Array) -> Scalar:
        return zero_if(self.contains(x), x)

    def leaf_prox(self, v: Array, step: Array) -> Array:
        return self.leaf_project(v)

    def leaf_conjugate(self, g: Array) -> Scalar:
        return jnp.sum(g * self.leaf_linear_oracle(g))

    def leaf_supremum(self, like: Array) -> Scalar:
        return jnp.zeros((), like.dtype)


class Bounded(ConvexSet):
    """What the sets without a way to infinity share."""

    @property
    def endless(self) -> bool:
        return False


class Everywhere(LeafTerm):
    """What the terms whose domain is everything share."""

    def leaf_project(self, v: Array) -> Array:
        return v

    def leaf_diameter(self, like: Array) -> Scalar:
        return jnp.asarray(jnp.inf if like.size else 0.0, like.dtype)

    def leaf_linear_oracle(self, g: Array) -> Array:
        return jnp.where(g == 0, 0, jnp.sign(g) * jnp.inf)


class Free(Everywhere, ConvexSet):
    """No constraint: φ = 0 everywhere."""

    @property
    def is_polyhedral(self) -> bool:
        return True

    @property
    def is_entrywise(self) -> bool:
        return True

    def contains(self, x: Array) -> Array:
        return ~jnp.any(jnp.isnan(x))

    def leaf_residual(self, x: Array, g: Array) -> Array:
        return g

    def leaf_check(self, x: Array) -> str | None:
        return None


def may_be_infinite(*bounds: Number) -> bool:
    """Whether one of some bounds is infinite; while JAX traces one, nobody knows."""
    try:
        return any(tracing(b) or not np.isfinite(np.asarray(b, float)).all() for b in bounds)
    except (TypeError, ValueError):
        return True  # no numbers, which is said elsewhere


class InBox(LeafTerm):
    """What the terms whose domain is a box share.

    Whether the box is `open`, with an infinite bound, is a part of the program, so that those of
    boxes with bounds have nothing to do for others.
    """

    open: eqx.AbstractVar[bool]

    @property
    def is_polyhedral(self) -> bool:
        return True

    @property
    def is_entrywise(self) -> bool:
        return True

    @property
    def endless(self) -> bool:
        return self.open

    @abc.abstractmethod
    def bounds(self, x: Array) -> tuple[Array, Array]:
        """The least and the greatest point of the box, in the shape of x."""

    def contains(self, x: Array) -> Array:
        low, high = self.bounds(x)
        width = high - low
        own = lax.select(jnp.isfinite(width), lax.min(width, jnp.ones_like(x)), jnp.zeros_like(x))
        nearest = lax.clamp(low, x, high)
        return jnp.all(jnp.abs(x - nearest) <= roundings(x) * (own + jnp.abs(nearest)))

    def leaf_project(self, v: Array) -> Array:
        low, high = self.bounds(v)
        return lax.clamp(low, v, high)

    def leaf_diameter(self, like: Array) -> Scalar:
        low, high = self.bounds(like)
        return jnp.sqrt(jnp.sum((high - low) ** 2))

    def leaf_linear_oracle(self, g: Array) -> Array:
        low, high = self.bounds(g)
        zero = jnp.zeros_like(g)
        return lax.select(g > zero, high, lax.select(g < zero, low, lax.clamp(low, zero, high)))

    # Entry by entry: one without a bound takes nothing from what is known of the others.

    @abc.abstractmethod
    def entry_values(self, x: Array) -> Array:
        """φ of every entry, inside of the box."""

    @abc.abstractmethod
    def entry_conjugates(self, g: Array) -> Array:
        """φ* of every entry."""

    def leaf_known_excess(self, z: Array, g: Array) -> Scalar:
        excess = self.entry_conjugates(g) - g * z
        return jnp.sum(jnp.where(jnp.isfinite(excess), excess, -self.entry_values(z)))

    def leaf_endless_slope(self, z: Array, g: Array) -> Array:
        known = jnp.isfinite(self.entry_conjugates(g) - g * z)
        return jnp.where(known, jnp.zeros_like(g), self.leaf_residual(z, -g))


class Box(InBox, ConvexSet):
    """{x : lower ≤ x ≤ upper}, entry by entry; bounds may be arrays, and infinite."""

    lower: Number = eqx.field(converter=parameter)
    upper: Number = eqx.field(converter=parameter)
    open: bool = eqx.field(static=True, init=False)

    def __post_init__(self):
        self.open = may_be_infinite(self.lower, self.upper)

    def __check_init__(self):
        interval(self.lower, self.upper, "Box")

    def bounds(self, x: Array) -> tuple[Array, Array]:
        return cast(self.lower, x), cast(self.upper, x)

    def leaf_barrier(self, x: Array) -> Scalar:
        return interval_barrier(x, *self.bounds(x))

    def leaf_barrier_prox(self, v: Array, step: Array, weight: Array) -> Array:
        return interval_prox(v, *self.bounds(v), weight)

    def box(self, like: Tree) -> tuple[Tree, Tree] | None:
        low, high = (jax.tree.map(lambda a, k=k: self.bounds(a)[k], like) for k in (0, 1))
        return low, high

    def entry_values(self, x: Array) -> Array:
        return jnp.zeros_like(x)

    def entry_conjugates(self, g: Array) -> Array:
        return g * self.leaf_linear_oracle(g)

    def leaf_residual(self, x: Array, g: Array) -> Array:
        # The normal cone adds any number ≤ 0 at the lower bound and any ≥ 0 at the upper one.
        low, high = self.bounds(x)
        zero = jnp.zeros_like(g)
        g = lax.select(x <= low, lax.min(g, zero), g)
        return lax.select(x >= high, lax.max(g, zero), g)

    def leaf_check(self, x: Array) -> str | None:
        return check_broadcast(x, lower=self.lower, upper=self.upper)


class ClosedBox(Box):
    """A box whose bounds are known to be finite, also while JAX traces them."""

    def __post_init__(self):
        self.open = False


def NonNegative() -> Box:
    """{x : x ≥ 0}, which is `Box(0, inf)`."""
    return Box(0.0, np.inf)


def LInfBall(radius: Number) -> Box:
    """{x : max |xᵢ| ≤ radius}, which is `Box(-radius, radius)`."""
    non_negative(radius, "LInfBall: radius")
    return Box(-jnp.asarray(radius), radius)


class CappedSimplex(Bounded):
    """{x : 0 ≤ x ≤ cap, Σ x = total}: the truncated simplex, along `axis` or over the whole array.

    `cap` is one number, or an array with a cap for each entry. An array must broadcast to the
    block; where there is an `axis`, a vector holds the caps along it, the same for every row. With
    total 1 and cap = 1/(p·n) this weighs the worst p share of n losses.

    The support is max ⟨g, s⟩ = Σᵢ gᵢ·sᵢ with s filled in the order of falling g: each entry takes
    its cap until `total` is used up.

    The diameter D is exact for one number, where D² = Σᵢ (aᵢ − aₙ₊₁₋ᵢ)² for the vertex
    a = (cap, …, cap, rest, 0, …, 0). For unequal caps c (cut at total), where D is as hard to find
    as an answer to the partition problem, it is the smaller of two upper bounds: that of the set in
    which every entry has the largest cap, and D² ≤ Σᵢ bᵢ², where b fills the largest of the bounds
    min(c, S) first, up to the sum 2·S, for S = min(total, Σ c − total). For d = u − v has d⁺ and d⁻
    of one sum s ≤ total, and min(u, v) ≤ c − |d| adds up to total − s, so that s ≤ Σ c − total:
    b weakly majorises every such |d|.
    """

    cap: Number = eqx.field(converter=parameter)
    total: Number = eqx.field(converter=parameter, default=1.0)
    axis: int | None = eqx.field(static=True, default=None)

    @property
    def is_polyhedral(self) -> bool:
        return True

    def __check_init__(self):
        cap = numbers(self.cap, "CappedSimplex: cap")
        if cap is not None and not (cap > 0 if cap.ndim == 0 else cap >= 0).all():
            least = "> 0" if cap.ndim == 0 else "≥ 0 everywhere"
            raise ValueError(f"CappedSimplex: cap must be {least}, not {self.cap}")
        positive(self.total, "CappedSimplex: total")
        axis_or_none(self.axis, "CappedSimplex")

    def _aligned(self, ndim: int) -> Number:
        """The caps, with those along `axis` on the axis of a block of `ndim` axes."""
        if self.axis is None or jnp.ndim(self.cap) != 1:
            return self.cap
        shape = [-1 if i == self.axis % ndim else 1 for i in range(ndim)]
        return self.cap.reshape(shape)  # pyright: ignore[reportAttributeAccessIssue]

    def _caps(self, like: Array) -> Array:
        """The caps in the shape of a block."""
        return cast(self._aligned(like.ndim), like)

    def leaf_project(self, v: Array) -> Array:
        # On a grid of floats the sum of the entries' caps can miss `total` by rounding; the level
        # search then ends at the nearest level, which is the right answer there too.
        total = scalar(self.total, v)
        row = lambda v, cap: waterfill(v, jnp.zeros_like(v), cap, total)
        return along_axis(row, self.axis, v, self._caps(v))

    def leaf_barrier(self, x: Array) -> Scalar:
        return interval_barrier(x, jnp.zeros_like(x), self._caps(x))

    def leaf_barrier_prox(self, v: Array, step: Array, weight: Array) -> Array:
        total = scalar(self.total, v)
        row = lambda v, cap: simplex_prox(v, cap, total, weight)
        return along_axis(row, self.axis, v, self._caps(v))

    def contains(self, x: Array) -> Array:
        total, caps, length = scalar(self.total, x), self._caps(x), row_length(x, self.axis)
        trespass = jnp.abs(x - lax.clamp(jnp.zeros_like(x), x, caps))
        adds_up = jnp.abs(jnp.sum(x, axis=self.axis) - total) <= roundings(x) * total
        fits = trespass <= roundings(x) * lax.min(caps, jnp.full_like(x, total / length))
        return jnp.all(fits) & jnp.all(adds_up)

    def _filled(self, caps: Array, total: Array) -> Array:
        """Entries that take their caps, in this order, until `total` is used up."""
        before = jnp.concatenate([jnp.zeros_like(caps[:1]), jnp.cumsum(caps)[:-1]])
        return jnp.clip(total - before, 0, caps)

    def _vertex(self, length: int, cap: Array, total: Array) -> Array:
        """The entries of a vertex for equal caps, largest first: full caps, then what remains."""
        return jnp.clip(total - cap * jnp.arange(length, dtype=cap.dtype), 0, cap)

    def leaf_diameter(self, like: Array) -> Scalar:
        total, length = scalar(self.total, like), row_length(like, self.axis)

        def equal(cap: Array) -> Array:
            # Vertices are rearrangements of one vector, so the farthest pair is sorted oppositely.
            vertex = self._vertex(length, cap, total)
            return jnp.sum((vertex - vertex[::-1]) ** 2)

        if jnp.ndim(self.cap) == 0:
            rows = row_count(like, self.axis)
            return jnp.sqrt(rows * equal(jnp.minimum(scalar(self.cap, like), total)))

        def row(caps: Array) -> Array:
            caps = -jnp.sort(-jnp.minimum(caps, total))
            most = jnp.clip(jnp.sum(caps) - total, 0, total)
            filled = self._filled(jnp.minimum(caps, most), 2 * most)
            square = jnp.minimum(equal(caps[0]), jnp.sum(filled**2))
            return jnp.zeros_like(caps).at[0].set(square)

        return jnp.sqrt(jnp.sum(along_axis(row, self.axis, self._caps(like))))

    def leaf_linear_oracle(self, g: Array) -> Array:
        total = scalar(self.total, g)

        def row(g: Array, caps: Array) -> Array:
            caps = lax.min(caps, lax.broadcast(total, caps.shape))  # an infinite cap never binds
            if g.size <= FEW:
                (column, line), (cap, _) = pairs(g), pairs(caps)
                first = np.tri(g.size, k=-1, dtype=bool)  # of equal entries
                ahead = ((column > line) | ((column == line) & first)) & ~np.eye(g.size, dtype=bool)
                before = jnp.sum(lax.select(ahead, cap, jnp.zeros_like(cap)), axis=1)
                return lax.clamp(jnp.zeros_like(g), total - before, caps)
            order = jnp.argsort(-g)
            if jnp.ndim(self.cap) == 0:
                filled = self._vertex(g.size, caps[0], total)
            else:
                filled = self._filled(caps[order], total)
            return jnp.zeros_like(g).at[order].set(filled)

        return along_axis(row, self.axis, g, self._caps(g))

    def leaf_conjugate(self, g: Array) -> Scalar:
        # Of few entries by duality: the least total·τ + Σ capᵢ·max(gᵢ − τ, 0) over τ, which is at
        # one of the entries. At any τ it is an upper bound, so rounding cannot make it too small.
        if row_length(g, self.axis) > FEW:
            return super().leaf_conjugate(g)
        total = scalar(self.total, g)

        def row(g: Array, caps: Array) -> Array:
            (column, line), (cap, _) = pairs(g), pairs(lax.min(caps, jnp.full_like(caps, total)))
            above = jnp.sum(lax.max(column - line, jnp.zeros_like(line)) * cap, axis=1)
            return jnp.zeros_like(g).at[0].set(jnp.min(total * g + above))

        return jnp.sum(along_axis(row, self.axis, g, self._caps(g)))

    def leaf_residual(self, x: Array, g: Array) -> Array:
        # dist(−g, N(x)) is the length of −g projected on the tangent cone
        # {d : Σ d = 0, d ≥ 0 where x = 0, d ≤ 0 where x = cap}.
        def row(x: Array, g: Array, caps: Array) -> Array:
            zero, inf = jnp.zeros_like(x), jnp.full_like(x, jnp.inf)
            lower = lax.select(x <= zero, zero, -inf)
            upper = lax.select(x >= caps, zero, inf)
            return -waterfill(-g, lower, upper, jnp.zeros((), x.dtype))

        return along_axis(row, self.axis, x, g, self._caps(x))

    def leaf_check(self, x: Array) -> str | None:
        wrong = check_axis(x, self.axis) or check_broadcast(x, cap=self._aligned(jnp.ndim(x)))
        if wrong or tracing(self.cap) or tracing(self.total):
            return wrong
        length = row_length(x, self.axis)
        if length == 0:
            return "is empty: a block without entries cannot add up to the total"
        caps = np.broadcast_to(np.asarray(self._aligned(jnp.ndim(x))), jnp.shape(x))
        most, total = float(caps.sum(axis=self.axis).min()), float(self.total)
        if most >= total * (1 - 1e-6):
            return None
        return (
            f"is empty: caps with the sum {most:g} cannot add up to {total:g}; cap must be at "
            f"least total/{length} on average"
        )


def Simplex(total: Number = 1.0, axis: int | None = None) -> CappedSimplex:
    """{x : x ≥ 0, Σ x = total}, along `axis` or over the whole array."""
    return CappedSimplex(np.inf, total, axis)


class L2Ball(Bounded):
    """{x : ‖x − center‖ ≤ radius}, along `axis` or over the whole array."""

    radius: Number = eqx.field(converter=parameter)
    center: Number = eqx.field(converter=parameter, default=0.0)
    axis: int | None = eqx.field(static=True, default=None)

    def __check_init__(self):
        non_negative(self.radius, "L2Ball: radius")
        finite(self.center, "L2Ball: center")
        axis_or_none(self.axis, "L2Ball")

    def _from_center(self, x: Array) -> tuple[Array, Array, Array]:
        offset = x - cast(self.center, x)
        return offset, positive_norm(offset, self.axis), scalar(self.radius, x)

    def contains(self, x: Array) -> Array:
        offset, _, radius = self._from_center(x)
        # By `trees.norm`, in which no square vanishes.
        rows = offset.reshape(1, -1) if self.axis is None else jnp.moveaxis(offset, self.axis, -1)
        lengths = jax.vmap(trees.norm)(rows.reshape(-1, rows.shape[-1]))
        return jnp.all(lengths <= radius * (1 + roundings(x)) + self._blur(x))

    def _blur(self, x: Array) -> Array:
        """What a centre far from the origin costs in digits of the distance from it."""
        center = jnp.abs(jnp.asarray(self.center, x.dtype))
        center = center if center.ndim == 0 else jnp.max(center, initial=0)
        return 2 * float(jnp.finfo(x.dtype).eps) * row_length(x, self.axis) ** 0.5 * center

    def leaf_project(self, v: Array) -> Array:
        offset, norm, radius = self._from_center(v)
        shrunk = cast(self.center, v) + offset * (radius / norm)
        outside = norm > radius
        return lax.select(jnp.broadcast_to(outside, v.shape), shrunk, v)

    def leaf_diameter(self, like: Array) -> Scalar:
        rows = jnp.asarray(row_count(like, self.axis), like.dtype)
        return 2 * scalar(self.radius, like) * jnp.sqrt(rows)

    def leaf_linear_oracle(self, g: Array) -> Array:
        norm = positive_norm(g, self.axis)
        return cast(self.center, g) + g * (scalar(self.radius, g) / norm)

    def leaf_conjugate(self, g: Array) -> Scalar:
        length = jnp.sum(positive_norm(g, self.axis))
        return jnp.sum(g * cast(self.center, g)) + scalar(self.radius, g) * length

    def leaf_residual(self, x: Array, g: Array) -> Array:
        # On the boundary the normal cone is the ray outwards: drop g's inward part.
        offset, norm, radius = self._from_center(x)
        unit = offset / norm
        boundary = norm >= radius * (1 - roundings(x)) - self._blur(x)
        along = jnp.sum(g * unit, axis=self.axis, keepdims=self.axis is not None)
        inward = lax.select(boundary, lax.min(along, jnp.zeros_like(along)), jnp.zeros_like(along))
        zero = lax.broadcast(radius == 0, x.shape)  # the normal cone of a point is everything
        return lax.select(zero, jnp.zeros_like(g), g - inward * unit)

    def leaf_check(self, x: Array) -> str | None:
        wrong = check_axis(x, self.axis) or check_broadcast(x, center=self.center)
        if wrong or tracing(self.center) or tracing(self.radius):
            return wrong
        blur = float(jnp.finfo(jnp.result_type(x)).eps) * float(np.max(np.abs(self.center)))
        if blur > 1e-4 * float(self.radius) > 0:
            return (
                f"has a center too far away for its radius in {jnp.result_type(x)}; move the origin"
            )
        return None


class L1Ball(Bounded):
    """{x : Σ |xᵢ| ≤ radius}, along `axis` or over the whole array."""

    radius: Number = eqx.field(converter=parameter)
    axis: int | None = eqx.field(static=True, default=None)

    @property
    def is_polyhedral(self) -> bool:
        return True

    def __check_init__(self):
        positive(self.radius, "L1Ball: radius")
        axis_or_none(self.axis, "L1Ball")

    def contains(self, x: Array) -> Array:
        sizes = jnp.sum(jnp.abs(x), axis=self.axis)
        return jnp.all(sizes <= scalar(self.radius, x) * (1 + roundings(x)))

    def leaf_project(self, v: Array) -> Array:
        def row(v: Array) -> Array:
            size, radius = jnp.abs(v), scalar(self.radius, v)
            top = jnp.full_like(v, jnp.inf)
            shrunk = jnp.sign(v) * waterfill(size, jnp.zeros_like(v), top, radius)
            return jnp.where(jnp.sum(size) > radius, shrunk, v)

        return along_axis(row, self.axis, v)

    def leaf_diameter(self, like: Array) -> Scalar:
        rows = jnp.asarray(row_count(like, self.axis), like.dtype)
        return 2 * scalar(self.radius, like) * jnp.sqrt(rows)

    def leaf_linear_oracle(self, g: Array) -> Array:
        def row(g: Array) -> Array:
            best = jnp.argmax(jnp.abs(g))
            return jnp.zeros_like(g).at[best].set(jnp.sign(g[best]) * scalar(self.radius, g))

        return along_axis(row, self.axis, g)

    def leaf_residual(self, x: Array, g: Array) -> Array:
        # On the boundary N(x) = {λs : λ ≥ 0, s ∈ ∂‖x‖₁}. The best λ levels −g·sign(x) on the
        # support and |g| above λ off it, which is a waterfilling with sum 0.
        def row(x: Array, g: Array) -> Array:
            support, radius = x != 0, scalar(self.radius, x)
            level = jnp.where(support, -g * jnp.sign(x), jnp.abs(g))
            lower = jnp.where(support, -jnp.inf, 0).astype(x.dtype)
            rest = waterfill(level, lower, jnp.full_like(x, jnp.inf), jnp.zeros((), x.dtype))
            tau = jnp.max(jnp.where(support, level - rest, -jnp.inf))
            signed = jnp.where(support, -jnp.sign(x) * rest, jnp.sign(g) * rest)
            boundary = jnp.sum(jnp.abs(x)) >= radius * (1 - roundings(x))
            return jnp.where(boundary & (tau > 0), signed, g)

        return along_axis(row, self.axis, x, g)

    def leaf_check(self, x: Array) -> str | None:
        return check_axis(x, self.axis)
