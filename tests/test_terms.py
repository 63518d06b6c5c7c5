"""The terms against their definitions, written down again here in NumPy and CVXPY.

Each case of the table pairs a term with a reference that shares no code with it. A reference works
on the flattened block: a list of parts, each a domain and a sum of penalties on some of the
entries, so rows along an axis, leaves of a pytree and pytrees of terms are the same thing to it.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import itertools
from collections.abc import Iterator
from typing import Any

import cvxpy as cp
import hypothesis.extra.numpy as hnp
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from jax.flatten_util import ravel_pytree

from bilevax.terms import (
    L1,
    Box,
    CappedSimplex,
    ElasticNet,
    Free,
    GroupL2,
    L1Ball,
    L2Ball,
    LInfBall,
    NonNegative,
    PerLeaf,
    Ridge,
    Scaled,
    Simplex,
    Term,
    as_term,
)
from bilevax.terms._waterfill import waterfill

INF = np.inf

# ---------------------------------------------------------------------------------------------
# References: domains of a vector
# ---------------------------------------------------------------------------------------------


def cone(up: np.ndarray, down: np.ndarray) -> Any:
    """The vectors that are ≥ 0 where `up` holds, ≤ 0 where `down` does, and 0 elsewhere."""
    rays = np.concatenate([np.diag(up.astype(float))[up], -np.diag(down.astype(float))[down]])
    return rays.T @ cp.Variable(len(rays), nonneg=True) if len(rays) else np.zeros(up.size)


class Polytope(abc.ABC):
    """A bounded domain known by its vertices."""

    bounded = True

    @abc.abstractmethod
    def vertices(self, n: int) -> np.ndarray: ...

    def support(self, g: np.ndarray) -> float:
        return float(np.max(self.vertices(g.size) @ g))

    def diameter(self, n: int) -> float:
        corners = self.vertices(n)
        gaps = np.sum((corners[:, None] - corners[None]) ** 2, axis=-1)
        return float(np.sqrt(gaps.max()))

    def tame(self, g: np.ndarray) -> np.ndarray:
        """A direction close to g in which the domain is bounded."""
        return g


class Interval(Polytope):
    """lower ≤ x ≤ upper, with finite or infinite bounds."""

    def __init__(self, lower=-INF, upper=INF):
        self.lower, self.upper = lower, upper
        self.bounded = bool(np.all(np.isfinite(lower)) and np.all(np.isfinite(upper)))

    def bounds(self, n: int) -> tuple[np.ndarray, np.ndarray]:
        return np.broadcast_to(self.lower, n), np.broadcast_to(self.upper, n)

    def face(self, rng: np.random.Generator, n: int) -> np.ndarray:
        """A point that lies on some of the bounds and inside the others."""
        low, high = self.bounds(n)
        near = np.where(np.isfinite(low), low, np.minimum(high, 0) - 4)
        far = np.where(np.isfinite(high), high, np.maximum(low, 0) + 4)
        inner = rng.uniform(near, far)
        pick = rng.integers(3, size=n)
        at_low, at_high = (pick == 0) & np.isfinite(low), (pick == 1) & np.isfinite(high)
        return np.where(at_low, low, np.where(at_high, high, inner))

    def vertices(self, n: int) -> np.ndarray:
        return np.array(list(itertools.product(*zip(*self.bounds(n), strict=True))))

    def support(self, g: np.ndarray) -> float:
        low, high = self.bounds(g.size)
        return sum(max(a * b, a * c) if a else 0.0 for a, b, c in zip(g, low, high, strict=True))

    def diameter(self, n: int) -> float:
        return super().diameter(n) if self.bounded else INF

    def tame(self, g: np.ndarray) -> np.ndarray:
        low, high = self.bounds(g.size)
        return np.clip(g, np.where(np.isfinite(low), -INF, 0), np.where(np.isfinite(high), INF, 0))

    def gap(self, x: np.ndarray) -> float:
        low, high = self.bounds(x.size)
        return float(np.max(np.maximum(low - x, x - high)))

    def constraints(self, u: cp.Expression) -> list:
        low, high = self.bounds(u.size)
        held = [u[i] >= low[i] for i in np.flatnonzero(np.isfinite(low))]
        return held + [u[i] <= high[i] for i in np.flatnonzero(np.isfinite(high))]

    def normal(self, x: np.ndarray) -> tuple[Any, list]:
        low, high = self.bounds(x.size)
        return cone(x >= high, x <= low), []


class Weights(Polytope):
    """0 ≤ x ≤ cap with sum `total`."""

    def __init__(self, total=1.0, cap=INF):
        self.total, self.cap = total, cap

    def corner(self, n: int) -> np.ndarray:
        left, corner = self.total, np.zeros(n)
        for i in range(n):
            corner[i] = min(left, self.cap)
            left -= corner[i]
        return corner

    @functools.cache  # noqa: B019 (the table lives as long as the tests)
    def vertices(self, n: int) -> np.ndarray:
        return np.unique(list(itertools.permutations(self.corner(n))), axis=0)

    def face(self, rng: np.random.Generator, n: int) -> np.ndarray:
        # Halves of equal numbers add up exactly, so entries at 0 and at the cap stay there.
        corner = self.corner(n)
        return 0.5 * rng.permutation(corner) + 0.5 * rng.permutation(corner)

    def gap(self, x: np.ndarray) -> float:
        return max(np.max(-x), np.max(x - self.cap), abs(x.sum() - self.total))

    def constraints(self, u: cp.Expression) -> list:
        top = [u <= self.cap] if np.isfinite(self.cap) else []
        return [u >= 0, cp.sum(u) == self.total, *top]

    def normal(self, x: np.ndarray) -> tuple[Any, list]:
        return cp.Variable() + cone(x >= self.cap, x <= 0), []


class Diamond(Polytope):
    """‖x‖₁ ≤ radius."""

    def __init__(self, radius: float):
        self.radius = radius

    def vertices(self, n: int) -> np.ndarray:
        return self.radius * np.concatenate([np.eye(n), -np.eye(n)])

    def face(self, rng: np.random.Generator, n: int) -> np.ndarray:
        size = rng.dirichlet(np.ones(n)) * (rng.uniform(size=n) < 0.6)
        size[rng.integers(n)] += 0.25
        return self.radius * size / size.sum() * rng.choice([-1.0, 1.0], n)

    def gap(self, x: np.ndarray) -> float:
        return np.abs(x).sum() - self.radius

    def constraints(self, u: cp.Expression) -> list:
        return [cp.norm1(u) <= self.radius]

    def normal(self, x: np.ndarray) -> tuple[Any, list]:
        if np.abs(x).sum() < self.radius * (1 - 1e-9):
            return np.zeros(x.size), []
        ray, rest = cp.Variable(nonneg=True), cp.Variable(x.size)
        return ray * np.sign(x) + cp.multiply(x == 0, rest), [cp.abs(rest) <= ray]


class Disc:
    """‖x − center‖ ≤ radius."""

    bounded = True

    def __init__(self, radius: float, center: Any = 0.0):
        self.radius, self.center = radius, center

    def face(self, rng: np.random.Generator, n: int) -> np.ndarray:
        out = rng.normal(size=n)
        return self.center + self.radius * out / np.linalg.norm(out)

    def support(self, g: np.ndarray) -> float:
        return float(np.sum(self.center * g) + self.radius * np.linalg.norm(g))

    def diameter(self, n: int) -> float:
        return 2 * self.radius

    def tame(self, g: np.ndarray) -> np.ndarray:
        return g

    def gap(self, x: np.ndarray) -> float:
        return float(np.linalg.norm(x - self.center)) - self.radius

    def constraints(self, u: cp.Expression) -> list:
        return [cp.norm2(u - self.center) <= self.radius]

    def normal(self, x: np.ndarray) -> tuple[Any, list]:
        if self.gap(x) < -1e-9:
            return np.zeros(x.size), []
        return cp.Variable(nonneg=True) * (x - self.center), []


FREE = Interval()


# ---------------------------------------------------------------------------------------------
# References: parts, and cases made of them
# ---------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class Part:
    """l1·‖x‖₁ + group·‖x‖ + ridge/2·‖x − center‖² on a domain, for the entries at `index`."""

    index: np.ndarray
    domain: Any
    l1: float = 0.0
    group: float = 0.0
    ridge: float = 0.0
    center: Any = 0.0

    def value(self, x: np.ndarray) -> float:
        square = self.ridge / 2 * np.sum((x - self.center) ** 2)
        return float(self.l1 * np.abs(x).sum() + self.group * np.linalg.norm(x) + square)

    def face(self, rng: np.random.Generator) -> np.ndarray:
        """A point on the boundary of the domain, or on a kink of the penalties, or on both."""
        n = self.index.size
        x = self.domain.face(rng, n)
        if self.l1:
            low, high = self.domain.bounds(n)
            x = np.where((rng.uniform(size=n) < 0.4) & (low <= 0) & (high >= 0), 0.0, x)
        if self.group and rng.uniform() < 0.5:
            x = np.zeros(n)
        return x

    def expression(self, u: cp.Expression) -> Any:
        terms = [
            self.l1 * cp.norm1(u) if self.l1 else 0.0,
            self.group * cp.norm2(u) if self.group else 0.0,
            self.ridge / 2 * cp.sum_squares(u - self.center) if self.ridge else 0.0,
        ]
        return sum(terms)

    def subgradient(self, x: np.ndarray) -> tuple[cp.Expression, list]:
        out, held = self.domain.normal(x)
        out = cp.Constant(self.ridge * (x - self.center)) + out
        if self.l1:
            slope = cp.Variable(x.size)
            out = out + self.l1 * (np.sign(x) + cp.multiply(x == 0, slope))
            held = [*held, cp.abs(slope) <= 1]
        if self.group and np.any(x):
            out = out + self.group * x / np.linalg.norm(x)
        elif self.group:
            slope = cp.Variable(x.size)
            out, held = out + self.group * slope, [*held, cp.norm2(slope) <= 1]
        return out, held


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """A term, a block it acts on, and the parts it must be the sum of."""

    name: str
    term: Term
    like: Any
    parts: tuple[Part, ...]

    @functools.cached_property
    def size(self) -> int:
        return sum(part.index.size for part in self.parts)

    def tree(self, flat: np.ndarray, dtype: Any = np.float64) -> Any:
        leaves, structure = jax.tree.flatten(self.like)
        ends = np.cumsum([leaf.size for leaf in leaves])
        pieces = np.split(np.asarray(flat, dtype), ends[:-1])
        shaped = [jnp.asarray(a.reshape(b.shape)) for a, b in zip(pieces, leaves, strict=True)]
        return jax.tree.unflatten(structure, shaped)

    def gather(self, pieces: list[np.ndarray]) -> np.ndarray:
        flat = np.empty(self.size)
        for part, piece in zip(self.parts, pieces, strict=True):
            flat[part.index] = piece
        return flat

    def value(self, x: np.ndarray) -> float:
        return sum(part.value(x[part.index]) for part in self.parts)

    def gap(self, x: np.ndarray) -> float:
        """How far x is from meeting the constraints; at most 0 inside."""
        return max(part.domain.gap(x[part.index]) for part in self.parts)

    def face(self, rng: np.random.Generator) -> np.ndarray:
        return self.gather([part.face(rng) for part in self.parts])

    def samples(self, rng: np.random.Generator, count: int = 8) -> Iterator[np.ndarray]:
        """Points of the domain: on a face, and anywhere between two faces."""
        for mix in np.where(np.arange(count) % 2, rng.uniform(size=count), 0.0):
            yield mix * self.face(rng) + (1 - mix) * self.face(rng)

    def tame(self, g: np.ndarray) -> np.ndarray:
        return self.gather([part.domain.tame(g[part.index]) for part in self.parts])

    def support(self, g: np.ndarray) -> float:
        return sum(part.domain.support(g[part.index]) for part in self.parts)

    def diameter(self) -> float:
        return np.sqrt(sum(part.domain.diameter(part.index.size) ** 2 for part in self.parts))

    @property
    def bounded(self) -> bool:
        return all(part.domain.bounded for part in self.parts)

    @property
    def is_set(self) -> bool:
        return not any(part.l1 or part.group or part.ridge for part in self.parts)

    @property
    def conjugate_finite(self) -> bool:
        return all(part.domain.bounded or part.ridge for part in self.parts)

    def model(self, u: cp.Expression) -> tuple[Any, list]:
        pieces = [(part, u[part.index]) for part in self.parts]
        cost = sum(part.expression(piece) for part, piece in pieces)
        return cost, [held for part, piece in pieces for held in part.domain.constraints(piece)]


def rows(shape: tuple[int, ...], axis: int | None) -> list[np.ndarray]:
    """The flat indices of each row along `axis`, or of the whole array."""
    index = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    if axis is None:
        return [index.ravel()]
    return list(np.moveaxis(index, axis, -1).reshape(-1, shape[axis]))


def on_array(name, term, domain, shape=(6,), axis=None, **penalties) -> Case:
    parts = tuple(Part(index, domain, **penalties) for index in rows(shape, axis))
    return Case(name, term, np.zeros(shape), parts)


def on_tree(name, term, like, *leaves) -> Case:
    """`leaves` gives, for each leaf in order, its axis, its domain and its penalties."""
    parts, start = [], 0
    for leaf, (axis, domain, penalties) in zip(jax.tree.leaves(like), leaves, strict=True):
        parts += [Part(start + i, domain, **penalties) for i in rows(leaf.shape, axis)]
        start += leaf.size
    return Case(name, term, like, tuple(parts))


LOW, HIGH = np.array([-1.0, 0.0, 0.5]), np.array([-0.2, 2.0, 3.0])
HALF_LOW = np.array([-INF, -1.0, -INF, 0.5, -0.3, -INF])
HALF_HIGH = np.array([0.5, INF, INF, 1.5, 0.3, -1.0])
CENTER = np.array([0.5, -1.0, 0.0, 2.0, -0.3, 0.8])
CENTERS = {"u": np.array([1.0, -1.0]), "v": np.array([0.5, 0.0, -2.0])}
PAIR = {"u": np.zeros(2), "v": np.zeros((2, 3))}
NESTED = {"a": np.zeros(3), "b": (np.zeros((2, 2)), np.zeros(()))}
MIXED = as_term({"a": Simplex(), "b": (GroupL2(0.6, axis=1), L1(0.4))}, "x")
PREFIX = as_term({"a": 2.0 * ElasticNet(0.2, 0.9), "b": L2Ball(0.7)}, "x")
BOX, UNIT, HALF = Box(-0.5, 1.0), Interval(-0.5, 1.0), Interval(HALF_LOW, HALF_HIGH)
SQUARED, SQUARE = Ridge(0.7, CENTER), {"ridge": 0.7, "center": CENTER}

# Terms that differ only in their numbers stand together, on blocks of one shape: they share what
# is compiled.
CASES = [
    on_array("Free", Free(), FREE),
    on_array("Box", Box(-1.0, 2.0), Interval(-1.0, 2.0)),
    on_array("Box-half", Box(-0.5, INF), Interval(-0.5)),
    on_array("NonNegative", NonNegative(), Interval(0.0)),
    on_array("LInfBall", LInfBall(0.7), Interval(-0.7, 0.7)),
    on_array("Box-mixed", Box(HALF_LOW, HALF_HIGH), HALF),
    on_array("Box-arrays", Box(LOW, HIGH), Interval(np.tile(LOW, 2), np.tile(HIGH, 2)), (2, 3)),
    on_array("Simplex", Simplex(), Weights()),
    on_array("Simplex-total", Simplex(3.5), Weights(3.5)),
    on_array("CappedSimplex", CappedSimplex(0.3), Weights(1.0, 0.3)),
    on_array("CappedSimplex-vertex", CappedSimplex(0.5), Weights(1.0, 0.5)),
    on_array("CappedSimplex-tight", CappedSimplex(0.17), Weights(1.0, 0.17)),
    on_array("Simplex-axis", Simplex(2.5, axis=-2), Weights(2.5), (3, 2), axis=0),
    on_array("CappedSimplex-axis", CappedSimplex(0.9, 2.0, -2), Weights(2.0, 0.9), (3, 2), axis=0),
    on_array("L2Ball", L2Ball(1.3), Disc(1.3)),
    on_array("L2Ball-far", L2Ball(0.05, 20.0), Disc(0.05, 20.0)),
    on_array("L2Ball-center", L2Ball(0.8, CENTER), Disc(0.8, CENTER)),
    on_array("L2Ball-axis", L2Ball(0.5, 0.2, axis=0), Disc(0.5, 0.2), (3, 2), axis=0),
    on_array("L1Ball", L1Ball(1.2), Diamond(1.2), (2, 3)),
    on_array("L1Ball-axis", L1Ball(0.8, axis=1), Diamond(0.8), (2, 3), axis=1),
    on_array("L1", L1(0.4), FREE, l1=0.4),
    on_array("L1+Box", L1(0.4) + BOX, UNIT, l1=0.4),
    on_array("L1+NonNegative", L1(0.4) + NonNegative(), Interval(0.0), l1=0.4),
    on_array("L1+Box-mixed", Box(HALF_LOW, HALF_HIGH) + L1(0.4), HALF, l1=0.4),
    on_array("GroupL2", GroupL2(0.6), FREE, (2, 3), axis=1, group=0.6),
    on_array("GroupL2-axis", GroupL2(0.6, axis=0), FREE, (3, 2), axis=0, group=0.6),
    on_array("GroupL2-whole", GroupL2(1.5, axis=None), FREE, (2, 3), group=1.5),
    on_array("Ridge", Ridge(0.7), FREE, ridge=0.7),
    on_array("Ridge-center", SQUARED, FREE, **SQUARE),
    on_array("ElasticNet", ElasticNet(0.4, 0.9), FREE, l1=0.4, ridge=0.9),
    on_array("ElasticNet+Box", BOX + ElasticNet(0.4, 0.9), UNIT, l1=0.4, ridge=0.9),
    on_array("Ridge+Box", SQUARED + BOX, UNIT, **SQUARE),
    on_array("Ridge+Simplex", Simplex() + SQUARED, Weights(), **SQUARE),
    on_array("Ridge+CappedSimplex", CappedSimplex(0.3) + SQUARED, Weights(1.0, 0.3), **SQUARE),
    on_array("Ridge+GroupL2", Ridge(0.8) + GroupL2(0.6), FREE, ridge=0.8, group=0.6),
    on_array("Scaled-L1", 2.0 * L1(0.4), FREE, l1=0.8),
    on_array("Scaled-ElasticNet+Box", 0.5 * (ElasticNet(0.4, 0.9) + BOX), UNIT, l1=0.2, ridge=0.45),
    on_tree(
        "Ridge-tree",
        Ridge(1.6, CENTERS),
        PAIR,
        (None, FREE, {"ridge": 1.6, "center": CENTERS["u"]}),
        (None, FREE, {"ridge": 1.6, "center": np.tile(CENTERS["v"], 2)}),
    ),
    on_tree(
        "leafwise-CappedSimplex", CappedSimplex(0.6), PAIR, *[(None, Weights(1.0, 0.6), {})] * 2
    ),
    on_tree(
        "PerLeaf",
        MIXED,
        NESTED,
        (None, Weights(), {}),
        (1, FREE, {"group": 0.6}),
        (None, FREE, {"l1": 0.4}),
    ),
    on_tree(
        "PerLeaf-prefix",
        PREFIX,
        NESTED,
        (None, FREE, {"l1": 0.4, "ridge": 1.8}),
        (None, Disc(0.7), {}),
        (None, Disc(0.7), {}),
    ),
    on_tree(
        "Ridge+PerLeaf",
        Ridge(0.5) + as_term({"u": BOX, "v": L2Ball(0.7, axis=1)}, "x"),
        PAIR,
        (None, UNIT, {"ridge": 0.5}),
        (1, Disc(0.7), {"ridge": 0.5}),
    ),
]
NAMED = {case.name: case for case in CASES}
# One of each class, for the tests that compile much and look at few points.
CLASSES = ["Box-mixed", "CappedSimplex", "Simplex-axis", "L2Ball-center", "L1Ball-axis", "L1+Box"]
CLASSES += ["GroupL2", "Ridge+Simplex", "Scaled-ElasticNet+Box", "PerLeaf-prefix"]
EACH_CLASS = [NAMED[name] for name in CLASSES]
METHODS = {
    "value": lambda t, x: t.value(x),
    "prox": lambda t, x: t.prox(x, 0.3),
    "project": lambda t, x: t.project(x),
    "diameter": lambda t, x: t.diameter(x),
    "linear_oracle": lambda t, x: t.linear_oracle(x),
    "conjugate": lambda t, x: t.conjugate(x),
    "residual": lambda t, x: t.residual(x, x),
    "supremum": lambda t, x: t.supremum(x),
    "support": lambda t, x: t.support(x),
    "violation": lambda t, x: t.violation(x),
}
VECTORS = ("prox", "project", "linear_oracle", "residual")


def each(cases=CASES):
    # The module scope makes pytest run the tests of one case together, so it compiles once.
    return pytest.mark.parametrize("case", cases, ids=lambda case: case.name, scope="module")


def flat(tree: Any) -> np.ndarray:
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])


@functools.partial(jax.jit, static_argnums=0)
def _call(method, term, *args):
    return getattr(term, method)(*args)


def call(case: Case, method: str, *args: Any, dtype: Any = np.float64) -> Any:
    """A method of the term at flat vectors and plain numbers: compiled, with the term traced."""
    trees = [case.tree(a, dtype) if np.ndim(a) else jnp.asarray(a, dtype) for a in args]
    out = _call(method, case.term, *trees)
    assert {leaf.dtype for leaf in jax.tree.leaves(out)} == {np.dtype(dtype)}
    return flat(out) if method in VECTORS else float(out)


# ---------------------------------------------------------------------------------------------
# Properties
# ---------------------------------------------------------------------------------------------

# Arrays of hypothesis have many equal entries, and zeros, which is where the ties are.
numbers = st.floats(-50, 50, allow_subnormal=False)
vectors = hnp.arrays(np.float64, 6, elements=numbers)
steps = st.floats(0.05, 5.0)
generators = st.integers(0, 2**32 - 1).map(np.random.default_rng)
phases = (Phase.generate, Phase.shrink)
quick = settings(max_examples=30, deadline=None, derandomize=True, database=None, phases=phases)


@each()
@quick
@given(v=vectors, step=steps, rng=generators)
def test_prox_satisfies_the_variational_inequality(case, v, step, rng):
    """The point x is prox(v) exactly when ⟨v − x, s − x⟩ ≤ step·(φ(s) − φ(x)) on the domain."""
    v = np.resize(v, case.size)
    x = call(case, "prox", v, step)
    assert case.gap(x) <= 1e-12 * (1 + np.abs(v).max())
    assert call(case, "value", x) == pytest.approx(case.value(x), rel=1e-12, abs=1e-12)
    for s in case.samples(rng):
        gain = (v - x) @ (s - x) - step * (case.value(s) - case.value(x))
        assert gain <= 1e-10 * (1 + np.abs(v).max()) ** 2


@each()
@quick
@given(v=vectors, step=steps)
def test_prox_has_no_residual_and_meets_fenchel_young(case, v, step):
    """Moreau: v = x + step·g with x the prox of φ and g that of φ*.

    So g is a subgradient at x, also where rounding moved x a little off the boundary, and
    φ(x) + φ*(g) = ⟨x, g⟩.
    """
    v = np.resize(v, case.size)
    x = call(case, "prox", v, step)
    g = (v - x) / step
    scale = (1 + np.abs(v).max()) / step
    assert np.linalg.norm(call(case, "residual", x, -g)) <= 1e-11 * scale
    g = g * (1 - 1e-9)  # the g of a norm lies on the boundary of the domain of φ*: step inside
    scale = 1 + np.abs(x) @ np.abs(g)
    assert case.value(x) + call(case, "conjugate", g) == pytest.approx(x @ g, abs=1e-8 * scale)


@each()
@quick
@given(v=vectors, w=vectors, step=steps)
def test_prox_is_firmly_nonexpansive(case, v, w, step):
    v, w = np.resize(v, case.size), np.resize(w, case.size)
    moved = call(case, "prox", v, step) - call(case, "prox", w, step)
    assert moved @ moved <= moved @ (v - w) + 1e-11 * (1 + np.abs(v - w).max()) ** 2


@each()
@quick
@given(v=vectors, step=steps, rng=generators)
def test_projection(case, v, step, rng):
    """`project` is the nearest point of the domain, and `violation` how near it is."""
    v = np.resize(v, case.size)
    near = call(case, "project", v)
    scale = 1 + np.abs(v).max()
    assert case.gap(near) <= 1e-12 * scale
    np.testing.assert_allclose(call(case, "project", near), near, rtol=0, atol=1e-13 * scale)
    if case.is_set:
        np.testing.assert_allclose(call(case, "prox", v, step), near, rtol=0, atol=1e-13 * scale)
    distance = np.linalg.norm(v - near)
    assert call(case, "violation", v) == pytest.approx(distance, rel=1e-12, abs=1e-12)
    for s in case.samples(rng):
        assert (v - near) @ (s - near) <= 1e-10 * scale**2


@each()
@quick
@given(g=vectors, rng=generators)
def test_linear_oracle_and_conjugate(case, g, rng):
    """The oracle attains the support, φ*(g) ≥ ⟨g, s⟩ − φ(s), and for a set φ* is the support."""
    g = case.tame(np.resize(g, case.size))
    scale = 1e-11 * (1 + np.abs(g).sum())
    best, support = call(case, "linear_oracle", g), call(case, "support", g)
    conjugate = call(case, "conjugate", g)
    assert np.all(np.isfinite(best))
    assert case.gap(best) <= 1e-12
    assert best @ g == pytest.approx(support, abs=scale)
    assert case.support(g) == pytest.approx(support, abs=scale)
    assert not np.isnan(conjugate)
    if case.is_set:
        assert case.support(g) == pytest.approx(conjugate, abs=scale)
    for s in case.samples(rng):
        assert g @ s <= support + scale
        assert g @ s - case.value(s) <= conjugate + scale


@each([case for case in CASES if not case.bounded])
def test_unbounded_domains(case):
    """Where the domain has no end, the support, the oracle and the diameter say so."""
    g = np.where(np.arange(case.size) % 2, -1.0, 1.0)
    best = call(case, "linear_oracle", g)
    ended = case.tame(g) == g
    assert call(case, "support", g) == INF
    np.testing.assert_array_equal(best[~ended], g[~ended] * INF)
    assert np.all(np.isfinite(best[ended]))
    assert call(case, "diameter", g) == INF


@each([case for case in CASES if not case.conjugate_finite])
def test_conjugate_is_infinite_beyond_its_domain(case):
    """A term that grows at most linearly has an infinite conjugate at a steep slope."""
    steep = np.where(case.tame(np.ones(case.size)) == 0, 3.0, -3.0)
    assert call(case, "conjugate", steep) == INF


@each()
def test_diameter_and_supremum(case):
    """The farthest two points, by trying all pairs of vertices, and a bound on every value."""
    like = np.zeros(case.size)
    diameter, supremum = call(case, "diameter", like), call(case, "supremum", like)
    assert diameter == pytest.approx(case.diameter(), rel=1e-12)
    rng = np.random.default_rng(0)
    for _ in range(50):
        x, y = case.face(rng), case.face(rng)
        assert np.linalg.norm(x - y) <= diameter * (1 + 1e-12)
        assert case.value(x) <= supremum * (1 + 1e-12)
    assert np.isfinite(supremum) == (case.bounded or case.is_set)


@each([case for case in CASES if case.bounded])
def test_value_is_infinite_outside(case):
    """A point pushed out of the domain by a millionth has no finite value; neither has NaN."""
    rng = np.random.default_rng(2)
    inside = next(case.samples(rng))
    assert call(case, "value", inside) == pytest.approx(case.value(inside), rel=1e-12)
    v = 4 * rng.normal(size=case.size)
    x = call(case, "project", v)
    assert call(case, "value", x + 1e-6 * (v - x) / np.linalg.norm(v - x)) == INF
    if case.is_set:
        assert call(case, "value", np.full(case.size, np.nan)) == INF


@each()
@pytest.mark.parametrize("scale", [1e2, 1e5, 1e8])
def test_prox_from_far_away(case, scale):
    """However far v is, the prox lies in the domain, and its residual sees which face it is on."""
    noise = np.random.default_rng(3).normal(size=(2, case.size))
    for v in (scale * noise[0], scale + noise[1]):
        x = call(case, "prox", v, 0.7)
        assert case.gap(x) <= 1e-13 * (1 + np.abs(x).max())
        assert call(case, "value", x) == pytest.approx(case.value(x), rel=1e-12)
        assert np.linalg.norm(call(case, "residual", x, (x - v) / 0.7)) <= 1e-12 * scale


# ---------------------------------------------------------------------------------------------
# Agreement with CVXPY
# ---------------------------------------------------------------------------------------------


def solve(cost: Any, held: list) -> float:
    problem = cp.Problem(cp.Minimize(cost), held)
    tight = dict.fromkeys(("tol_gap_abs", "tol_gap_rel", "tol_feas", "tol_ktratio"), 1e-9)
    return problem.solve(solver=cp.CLARABEL, **tight)


@each()
def test_prox_and_projection_agree_with_cvxpy(case):
    rng = np.random.default_rng(10)
    for step in (0.2, 1.0, 3.0):
        v = 2 * rng.normal(size=case.size)
        u = cp.Variable(case.size)
        cost, held = case.model(u)
        solve(cp.sum_squares(u - v) / 2 + step * cost, held)
        np.testing.assert_allclose(call(case, "prox", v, step), u.value, rtol=0, atol=2e-6)
    solve(cp.sum_squares(u - v), held)
    np.testing.assert_allclose(call(case, "project", v), u.value, rtol=0, atol=2e-6)
    assert call(case, "violation", v) == pytest.approx(np.linalg.norm(u.value - v), abs=1e-6)


@each([case for case in CASES if case.conjugate_finite])
def test_conjugate_agrees_with_cvxpy(case):
    rng = np.random.default_rng(12)
    for _ in range(2):
        g = 2 * rng.normal(size=case.size)
        u = cp.Variable(case.size)
        cost, held = case.model(u)
        assert call(case, "conjugate", g) == pytest.approx(-solve(cost - g @ u, held), abs=1e-6)


@each()
def test_residual_agrees_with_cvxpy(case):
    """The shortest vector of g + ∂φ(x) at corners, faces and kinks, and at points between.

    A shallow g can lie inside −∂φ(x), and the residual is zero; a steep one cannot.
    """
    rng = np.random.default_rng(13)
    points = [*(case.face(rng) for _ in range(4)), *case.samples(rng, 2)]
    for x, size in zip(points, [2.0, 0.2] * 3, strict=True):
        g = size * rng.normal(size=case.size)
        pieces = [(part, *part.subgradient(x[part.index])) for part in case.parts]
        costs = [cp.sum_squares(g[part.index] + out) for part, out, _ in pieces]
        solve(sum(costs), [h for _, _, held in pieces for h in held])
        shortest = case.gather([g[part.index] + out.value for part, out, _ in pieces])
        got = call(case, "residual", x, g)
        np.testing.assert_allclose(got, shortest, rtol=0, atol=2e-6)
        assert np.linalg.norm(got) == pytest.approx(np.linalg.norm(shortest), abs=1e-6)


# ---------------------------------------------------------------------------------------------
# Transformations and dtypes
# ---------------------------------------------------------------------------------------------


@each([case for case in EACH_CLASS if not case.is_set])
def test_whole_numbers_as_step(case):
    """`prox(v, 1)` is `prox(v, 1.0)`: no weight may be rounded to a whole number."""
    v = 2 * np.random.default_rng(20).normal(size=case.size)
    got = flat(jax.jit(lambda term, a: term.prox(a, 1))(case.term, case.tree(v)))
    np.testing.assert_allclose(got, call(case, "prox", v, 1.0), rtol=0, atol=1e-13)


@each([NAMED["Simplex"], NAMED["ElasticNet+Box"]])
def test_eager_calls_are_the_compiled_ones(case):
    v = 2 * np.random.default_rng(21).normal(size=case.size)
    got = case.term.prox(case.tree(v), 0.6)
    np.testing.assert_allclose(flat(got), call(case, "prox", v, 0.6), rtol=0, atol=1e-14)
    got = case.term.residual(got, case.tree(v))
    expected = call(case, "residual", call(case, "prox", v, 0.6), v)
    np.testing.assert_allclose(flat(got), expected, rtol=0, atol=1e-13)


def test_new_parameters_do_not_recompile():
    """A term's numbers are arrays, so a sweep over them compiles once."""
    traces = []

    @jax.jit
    def prox(term, v):
        traces.append(term)
        return term.prox(v, 1.0)

    v = jnp.arange(3.0)
    np.testing.assert_allclose(prox(L1(0.5), v), [0.0, 0.5, 1.5])
    np.testing.assert_allclose(prox(L1(1.5), v), [0.0, 0.0, 0.5])
    assert len(traces) == 1


PARAMETRIC = {
    "L1": (L1, [0.1, 0.7, 2.0]),
    "LInfBall": (LInfBall, [0.1, 0.7, 2.0]),
    "CappedSimplex": (CappedSimplex, [0.3, 0.5, 4.0]),
    "Simplex": (Simplex, [0.3, 0.5, 4.0]),
    "L1Ball": (L1Ball, [0.3, 0.5, 4.0]),
    "L2Ball": (L2Ball, [0.3, 0.5, 4.0]),
    "GroupL2": (GroupL2, [0.0, 0.5, 4.0]),
    "ElasticNet": (lambda w: ElasticNet(w, 2 * w), [0.1, 0.7, 2.0]),
    "L1+Box": (lambda w: L1(w) + Box(-w, 2 * w), [0.1, 0.7, 2.0]),
    "Scaled": (lambda w: w * L1(0.5), [0.1, 0.7, 2.0]),
}


@pytest.mark.parametrize("name", PARAMETRIC)
def test_vmap_over_parameters(name):
    """A term can be built from traced numbers, and a batch of them is a batch of terms."""
    make, values = PARAMETRIC[name]
    v = jnp.asarray([0.4, -1.0, 2.0, 0.1])
    got = jax.jit(jax.vmap(lambda w: make(w).prox(v, 0.5)))(jnp.asarray(values))
    for row, value in zip(got, values, strict=True):
        np.testing.assert_allclose(row, _call("prox", make(value), v, 0.5), atol=1e-14)


def numeric(term: Term) -> tuple[np.ndarray, Any]:
    """The finite numbers of a term as one vector, and the way back to a term."""
    leaves, structure = jax.tree.flatten(term)
    start, unravel = ravel_pytree([jnp.asarray(leaf, np.float64) for leaf in leaves])
    finite = np.flatnonzero(np.isfinite(start))

    def rebuild(theta: jax.Array) -> Term:
        filled = start.at[finite].set(theta) if finite.size else start
        return jax.tree.unflatten(structure, unravel(filled))

    return np.asarray(start)[finite], rebuild


@each(EACH_CLASS)
def test_vmap_and_jacobians_of_the_prox(case):
    """Both modes against differences, with respect to the point, the step and the parameters.

    The batch of points for the differences is one `vmap`; a loop in it must not stop for all rows
    when it has converged for one.
    """
    theta, rebuild = numeric(case.term)
    rng = np.random.default_rng(22)
    points = np.array([30.0, 0.1, 1.0, 2.0])[:, None] * rng.normal(size=(4, case.size))
    batch = np.stack([np.concatenate([v, [0.6], theta]) for v in points])
    unravel = ravel_pytree(case.tree(points[0]))[1]

    def prox(z):
        v, step, parameters = z[: case.size], z[case.size], z[case.size + 1 :]
        return ravel_pytree(rebuild(parameters).prox(unravel(v), step))[0]

    steps = 1e-6 * np.eye(batch.shape[1])
    all_points = np.concatenate([batch, batch[-1] + steps, batch[-1] - steps])
    both = jax.jit(lambda z, y: (jax.vmap(prox)(z), jax.jacfwd(prox)(y), jax.jacrev(prox)(y)))
    values, *jacobians = map(np.asarray, both(jnp.asarray(all_points), jnp.asarray(batch[-1])))
    for v, x in zip(points, values[:4], strict=True):
        np.testing.assert_allclose(x, call(case, "prox", v, 0.6), rtol=1e-13, atol=1e-13)
    ahead, behind = np.split(values[4:], 2)
    for jacobian in jacobians:
        np.testing.assert_allclose(jacobian, (ahead - behind).T / 2e-6, rtol=1e-6, atol=1e-7)


@functools.partial(jax.jit, static_argnums=0)
def _gradient(method, term, x):
    return jax.grad(lambda a: getattr(term, method)(a))(x)


def gradient(case: Case, method: str, x: np.ndarray) -> np.ndarray:
    return flat(_gradient(method, case.term, case.tree(x)))


def slopes(f, x: np.ndarray, h: float = 1e-6) -> np.ndarray:
    """The gradient by central differences."""
    return np.array([(f(x + h * e) - f(x - h * e)) / (2 * h) for e in np.eye(x.size)])


@each(EACH_CLASS)
def test_gradient_of_the_value(case):
    """Inside the domain the value has the gradient of its penalties."""
    rng = np.random.default_rng(24)
    x = np.mean([case.face(rng) for _ in range(8)], axis=0)
    got = gradient(case, "value", x)
    np.testing.assert_allclose(got, slopes(case.value, x), rtol=1e-6, atol=1e-7)


@each([*EACH_CLASS, NAMED["L1"], NAMED["L1+NonNegative"]])
def test_gradient_of_the_conjugate(case):
    """By Danskin it is the maximiser; an infinite bound must not make it NaN."""
    # Slopes for which φ* is finite: shallow ones, in directions in which the domain ends.
    g = np.random.default_rng(23).uniform(-0.2, 0.2, size=case.size)
    for part in case.parts:
        if not (part.l1 or part.group or part.ridge):
            g[part.index] = part.domain.tame(g[part.index])
    moves = np.flatnonzero(g)

    def conjugate(entries: np.ndarray) -> float:
        moved = g.copy()
        moved[moves] = entries
        return call(case, "conjugate", moved)

    got = gradient(case, "conjugate", g)
    assert np.all(np.isfinite(got))
    np.testing.assert_allclose(got[moves], slopes(conjugate, g[moves]), rtol=1e-6, atol=1e-7)


@each([case for case in EACH_CLASS if case.diameter() < INF])
def test_gradient_of_the_violation_outside(case):
    """It is the unit vector away from the domain."""
    v = 5 * np.random.default_rng(25).normal(size=case.size)
    away = v - call(case, "project", v)
    expected = away / np.linalg.norm(away)
    np.testing.assert_allclose(gradient(case, "violation", v), expected, atol=1e-10)


INTERIORS = {"Free": Free(), "Box": Box(-1.0, 1.0), "L2Ball": L2Ball(1.0), "L1Ball": L1Ball(1.0)}


@pytest.mark.parametrize("name", INTERIORS)
def test_gradient_of_the_violation_inside(name):
    """The distance is 0 all around a point inside, and so is its gradient."""
    got = _gradient("violation", INTERIORS[name], jnp.asarray([0.1, -0.2, 0.3]))
    np.testing.assert_array_equal(got, np.zeros(3))


@each([*EACH_CLASS, NAMED["Free"], NAMED["Ridge-tree"]])
def test_every_method_keeps_dtype_and_shape(case):
    """In single precision, where one double parameter would widen the result."""
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, np.float32), case.like)
    for name, method in METHODS.items():
        got = jax.eval_shape(method, case.term, shapes)
        if name in VECTORS:
            assert jax.tree.structure(got) == jax.tree.structure(shapes), name
            for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(shapes), strict=True):
                assert (a.shape, a.dtype) == (b.shape, b.dtype), name
        else:
            assert (got.shape, got.dtype) == ((), np.float32), name


@each(EACH_CLASS)
def test_float32_agrees_with_float64(case):
    single = functools.partial(call, case, dtype=np.float32)
    v = 2 * np.random.default_rng(26).normal(size=case.size)
    x, x32 = call(case, "prox", v, 0.6), single("prox", v, 0.6)
    np.testing.assert_allclose(x32, x, atol=2e-5)
    np.testing.assert_allclose(single("residual", x32, (x32 - v) / 0.6), 0, atol=1e-4)
    assert single("support", case.tame(v)) == pytest.approx(case.support(case.tame(v)), rel=1e-5)


WHOLE = {
    "Box": (lambda: Box(0, 1), Box(0.0, 1.0)),
    "CappedSimplex": (lambda: CappedSimplex(1, 2), CappedSimplex(1.0, 2.0)),
    "L1Ball": (lambda: L1Ball(1), L1Ball(1.0)),
    "L2Ball": (lambda: L2Ball(1, 2), L2Ball(1.0, 2.0)),
    "ElasticNet": (lambda: ElasticNet(1, 2), ElasticNet(1.0, 2.0)),
    "L1+Box": (lambda: L1(1) + Box(0, 1), L1(1.0) + Box(0.0, 1.0)),
    "Scaled": (lambda: 2 * ElasticNet(1, 2), 2.0 * ElasticNet(1.0, 2.0)),
    "float32-bounds": (
        lambda: L1(1.0) + Box(jnp.zeros(4, jnp.float32), jnp.ones(4, jnp.float32)),
        L1(1.0) + Box(0.0, 1.0),
    ),
}


@pytest.mark.parametrize("name", WHOLE)
def test_parameters_of_any_dtype(name):
    """Whole numbers and single precision do as parameters, in sums too, under strict promotion."""
    make, expected = WHOLE[name]
    term = make()
    v = jnp.asarray([0.4, -1.0, 2.5, 1.3])
    for method, args in (("prox", (v, 0.5)), ("conjugate", (v,))):
        got = _call(method, term, *args)
        np.testing.assert_allclose(got, _call(method, expected, *args), rtol=1e-15)


# ---------------------------------------------------------------------------------------------
# Pytrees
# ---------------------------------------------------------------------------------------------


def test_one_term_acts_leaf_by_leaf():
    """Two leaves are two simplices, not one spread over both."""
    x = {"u": jnp.asarray([3.0, 1.0]), "v": (jnp.asarray([[0.0, 0.0]]),)}
    got = _call("project", Simplex(), x)
    np.testing.assert_allclose(got["u"], [1.0, 0.0])
    np.testing.assert_allclose(got["v"][0], [[0.5, 0.5]])
    assert float(_call("diameter", Simplex(), x)) == pytest.approx(2.0)


def test_a_pytree_of_terms_takes_each_part():
    term = as_term({"u": Box(0.0, 1.0), "v": (NonNegative(), 2.0 * L1(0.5))}, "x")
    assert isinstance(term, PerLeaf)
    x = {"u": jnp.asarray([3.0, -1.0]), "v": (jnp.asarray(-2.0), jnp.asarray([[2.0, 0.25]]))}
    got = term.prox(x, 0.5)
    np.testing.assert_allclose(got["u"], [1.0, 0.0])
    np.testing.assert_allclose(got["v"][0], 0.0)
    np.testing.assert_allclose(got["v"][1], [[1.5, 0.0]])


def test_leaves_of_different_precision():
    """Each leaf keeps its own dtype; scalars over all of them follow JAX's promotion."""
    x = {"u": jnp.asarray([2.0], jnp.float32), "v": jnp.asarray([-2.0], jnp.float64)}
    term = ElasticNet(0.5, 1.0) + Box(-1.0, 1.0)
    got = _call("prox", term, x, 1.0)
    assert {k: a.dtype for k, a in got.items()} == {"u": np.float32, "v": np.float64}
    with jax.numpy_dtype_promotion("standard"):
        assert float(_call("violation", term, x)) == pytest.approx(np.sqrt(2))
        assert float(_call("value", term, got)) == pytest.approx(2 * (0.5 * 0.75 + 0.5 * 0.75**2))


def test_empty_block():
    """A block with no arrays in it costs nothing and constrains nothing."""
    term = L1(1.0)
    assert float(term.value({})) == 0
    assert float(term.diameter(())) == 0
    assert term.prox({}, 1.0) == {}


# ---------------------------------------------------------------------------------------------
# Sums, factors, degenerate sets
# ---------------------------------------------------------------------------------------------

POINT = jnp.asarray([2.0, -0.7, 0.1, -3.0])


ALIKE = {
    "nested-sum": lambda: ((L1(0.4) + Ridge(0.9)) + BOX, ElasticNet(0.4, 0.9) + BOX),
    "L1+L1": lambda: (L1(0.4) + L1(0.3), L1(0.7)),
    "Box+Box": lambda: (Box(-1.0, 0.5) + NonNegative(), Box(0.0, 0.5)),
    "L1+Box+Box": lambda: (L1(0.4) + Box(-1.0, 0.5) + NonNegative(), L1(0.4, 0.0, 0.5)),
    "Free+": lambda: (Free() + Simplex(), Simplex()),
    "factor-of-a-set": lambda: (2.0 * Simplex(), Simplex()),
    "+Free": lambda: (Simplex() + Free(), Simplex()),
    "Ridge+Free": lambda: (Ridge(0.5) + Free(), Ridge(0.5)),
    "factor-right": lambda: (L1(0.4) * 3.0, L1(1.2)),
    "factor-twice": lambda: (2.0 * (0.5 * L1(0.4)), L1(0.4)),
    "factor-numpy": lambda: (np.float64(2.0) * L1(0.4), L1(0.8)),
    "factor-jax": lambda: (jnp.asarray(2.0) * L1(0.4), L1(0.8)),
    "ranks": lambda: (Box(np.zeros(4), 1.0) + Box(np.full((1, 4), 0.2), 2.0), Box(0.2, 1.0)),
}


@pytest.mark.parametrize("name", ALIKE)
def test_sums_and_factors(name):
    """Two ways to write one term have one prox."""
    left, right = ALIKE[name]()
    v = POINT[None]
    for method, args in (("prox", (v, 0.5)), ("conjugate", (0.1 * v,))):
        got = _call(method, left, *args)
        np.testing.assert_allclose(got, _call(method, right, *args), rtol=0, atol=1e-15)


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (Simplex(), Box(0.0, 1.0)),
        (L1(1.0), Simplex()),
        (GroupL2(1.0), Box(0.0, 1.0)),
        (GroupL2(1.0), L1(1.0)),
        (L2Ball(1.0), L1Ball(1.0)),
        (Ridge(1.0), Ridge(2.0)),
        (Ridge(1.0) + Simplex(), L1(1.0)),
        (as_term((L1(1.0), Free()), "x"), Box(0.0, 1.0)),
    ],
    ids=lambda term: type(term).__name__,
)
def test_unknown_sums_raise(left, right):
    """A sum whose prox has no closed form is refused by name, in both orders."""
    for a, b in ((left, right), (right, left)):
        with pytest.raises(TypeError, match=r"prox of \w+ \+ \w+ is not known"):
            a + b


@pytest.mark.parametrize("wrong", [1.0, None, "Box", np.zeros(2)], ids=str)
def test_sums_with_other_things_raise(wrong):
    with pytest.raises(TypeError):
        L1(1.0) + wrong
    with pytest.raises(TypeError):
        Simplex() * Simplex()


DEGENERATE = {
    "Box-point": (Box(0.7, 0.7), [0.7] * 4),
    "LInfBall-zero": (LInfBall(0.0), [0.0] * 4),
    "L2Ball-zero": (L2Ball(0.0, 0.3), [0.3] * 4),
    "CappedSimplex-point": (CappedSimplex(0.25), [0.25] * 4),
}


@pytest.mark.parametrize("name", DEGENERATE)
def test_sets_of_one_point(name):
    """Its normal cone is everything, its diameter zero, and its support linear."""
    term, point = DEGENERATE[name]
    for method in ("project", "linear_oracle"):
        np.testing.assert_allclose(_call(method, term, POINT), point, atol=1e-15)
    got = _call("residual", term, jnp.asarray(point), POINT)
    np.testing.assert_allclose(got, np.zeros(4), atol=1e-15)
    assert float(_call("diameter", term, POINT)) == pytest.approx(0, abs=1e-15)


# ---------------------------------------------------------------------------------------------
# Simplices with a million entries
# ---------------------------------------------------------------------------------------------

N = 1_000_000


@functools.cache
def million(kind: str) -> np.ndarray:
    rng = np.random.default_rng(30)
    uniform = rng.uniform(size=N)
    return {
        "normal": lambda: rng.normal(size=N),
        "small": lambda: 1e-6 * rng.normal(size=N),
        "ties": lambda: np.full(N, 0.3),
        "ties-far": lambda: np.full(N, 1e8),
        "few-values": lambda: np.floor(4 * uniform),
        "spread": lambda: 1e8 * (2 * uniform - 1),
        "offset": lambda: 1e8 + uniform,
        "clusters": lambda: np.where(rng.uniform(size=N) < 0.5, 1e8, 0.0) + uniform,
        "geometric": lambda: np.exp(-np.linspace(0, 700, N)),
        "heavy-tail": lambda: 1 / uniform,
        "negative": lambda: -1e4 * uniform - 5.0,
    }[kind]()


CAPS = {
    "none": INF,
    "worst-5%": 1 / (0.05 * N),
    "tenth": 0.1,
    "just-above": (1 + 1e-6) / N,
    "exact": 1 / N,
}
HARD = {
    "normal": ["none", "worst-5%", "exact"],
    "small": ["none"],
    "ties": ["none", "just-above"],
    "ties-far": ["none", "tenth"],
    "few-values": ["none", "worst-5%"],
    "spread": ["none", "just-above"],
    "offset": ["none", "worst-5%"],
    "clusters": ["none", "worst-5%"],
    "geometric": ["none"],
    "heavy-tail": ["worst-5%"],
    "negative": ["none", "just-above"],
}


@jax.jit
def _project(term, v):
    x = term.project(v)
    return x, term.value(x)


def assert_projects(x: np.ndarray, v: np.ndarray, total: float, cap: float) -> None:
    """The point x is feasible, and one level τ explains it: x = clip(v − τ, 0, cap)."""
    assert abs(x.sum() - total) <= 1e-9 * total
    assert x.min() >= 0
    assert x.max() <= cap
    level = v - x
    # An entry above 0 needs τ ≤ v − x, and one below the cap needs τ ≥ v − x.
    least = np.max(level, where=x < cap, initial=-INF)
    most = np.min(level, where=x > 0, initial=INF)
    assert least <= most + 4 * np.finfo(np.float64).eps * (np.abs(v).max() + 1)


@pytest.mark.parametrize(("kind", "cap"), [(kind, cap) for kind in HARD for cap in HARD[kind]])
def test_a_million_weights(kind, cap):
    """To full precision whatever the input: its size, its spread, its ties, how tight the cap."""
    v = million(kind)
    x, value = _project(CappedSimplex(CAPS[cap]), jnp.asarray(v))
    assert_projects(np.asarray(x), v, 1.0, CAPS[cap])
    assert float(value) == 0


@pytest.mark.parametrize("total", [1e-3, 250.0])
def test_a_million_weights_of_other_totals(total):
    v = million("normal")
    for term, cap in ((Simplex(total), INF), (CappedSimplex(total / 1e4, total), total / 1e4)):
        assert_projects(np.asarray(_project(term, jnp.asarray(v))[0]), v, total, cap)


@pytest.mark.parametrize("cap", [INF, 3 / N])
def test_a_million_feasible_weights_stay(cap):
    """A point of the set is its own projection."""
    rng = np.random.default_rng(31)
    v = rng.permutation(np.repeat([0.0, 0.5 / N, 1.0 / N, 2.5 / N], N // 4))
    x = np.asarray(_project(CappedSimplex(cap), jnp.asarray(v))[0])
    np.testing.assert_allclose(x, v, rtol=0, atol=1e-15)
    assert_projects(x, v, 1.0, cap)


@pytest.mark.parametrize("axis", [0, 1])
def test_a_thousand_rows_of_weights(axis):
    """Rows of one call converge each in its own time."""
    rng = np.random.default_rng(32)
    v = rng.normal(size=(1000, 200)) * np.logspace(-6, 3, 1000)[:, None]
    v = v if axis == 1 else v.T
    x = np.asarray(_project(CappedSimplex(0.01, axis=axis), jnp.asarray(v))[0])
    for row, source in zip(np.moveaxis(x, axis, 1), np.moveaxis(v, axis, 1), strict=True):
        assert_projects(row, source, 1.0, 0.01)


def test_a_million_weights_in_single_precision():
    v = million("normal").astype(np.float32)
    x = np.asarray(_project(CappedSimplex(1e-4), jnp.asarray(v))[0])
    assert x.dtype == np.float32
    exact = np.asarray(_project(CappedSimplex(1e-4), jnp.asarray(v.astype(np.float64)))[0])
    np.testing.assert_allclose(x, exact, rtol=0, atol=1e-6)
    assert x.sum(dtype=np.float64) == pytest.approx(1.0, abs=1e-4)


@pytest.mark.parametrize("share", [0.0123, 1.0])
def test_the_oracle_averages_the_worst_share(share):
    """The largest ⟨g, s⟩ over caps 1/(p·n) is the mean of the largest p·n entries: the CVaR."""
    g = million("normal")
    term = CappedSimplex(1 / (share * N))
    worst = np.sort(g)[-round(share * N) :]
    assert float(term.support(jnp.asarray(g))) == pytest.approx(worst.mean(), rel=1e-9, abs=1e-12)


# ---------------------------------------------------------------------------------------------
# Errors
# ---------------------------------------------------------------------------------------------

PAIR_OF_NUMBERS = np.ones(2)
BAD = {
    "Box-order": (lambda: Box(1.0, 0.0), "lower"),
    "Box-order-array": (lambda: Box(np.array([0.0, 2.0]), 1.0), "lower"),
    "Box-lower-nan": (lambda: Box(np.nan, 1.0), "lower"),
    "Box-upper-nan": (lambda: Box(0.0, np.array([1.0, np.nan])), "upper"),
    "Box-shapes": (lambda: Box(np.zeros(2), np.ones(3)), "upper"),
    "Box-text": (lambda: Box("low", 1.0), "lower"),
    "Box-empty-at-infinity": (lambda: Box(INF, INF), "lower"),
    "Box-empty-at-minus-infinity": (lambda: Box(-INF, -INF), "upper"),
    "LInfBall-negative": (lambda: LInfBall(-1.0), "radius"),
    "LInfBall-nan": (lambda: LInfBall(np.nan), "radius"),
    "CappedSimplex-cap-zero": (lambda: CappedSimplex(0.0), "cap"),
    "CappedSimplex-cap-nan": (lambda: CappedSimplex(np.nan), "cap"),
    "CappedSimplex-cap-array": (lambda: CappedSimplex(PAIR_OF_NUMBERS), "cap"),
    "CappedSimplex-total-zero": (lambda: CappedSimplex(1.0, 0.0), "total"),
    "CappedSimplex-axis": (lambda: CappedSimplex(1.0, axis=0.5), "axis"),
    "Simplex-total-negative": (lambda: Simplex(-1.0), "total"),
    "Simplex-total-array": (lambda: Simplex(PAIR_OF_NUMBERS), "total"),
    "Simplex-total-infinite": (lambda: Simplex(INF), "total"),
    "Simplex-axis": (lambda: Simplex(axis="rows"), "axis"),
    "L2Ball-negative": (lambda: L2Ball(-1.0), "radius"),
    "L2Ball-array": (lambda: L2Ball(PAIR_OF_NUMBERS), "radius"),
    "L2Ball-center-nan": (lambda: L2Ball(1.0, np.nan), "center"),
    "L2Ball-axis": (lambda: L2Ball(1.0, axis=0.5), "axis"),
    "L1Ball-zero": (lambda: L1Ball(0.0), "radius"),
    "L1Ball-nan": (lambda: L1Ball(np.nan), "radius"),
    "L1Ball-array": (lambda: L1Ball(PAIR_OF_NUMBERS), "radius"),
    "L1Ball-axis": (lambda: L1Ball(1.0, axis=0.5), "axis"),
    "L1-negative": (lambda: L1(-1.0), "weight"),
    "L1-nan": (lambda: L1(np.nan), "weight"),
    "L1-infinite": (lambda: L1(INF), "weight"),
    "L1-array": (lambda: L1(PAIR_OF_NUMBERS), "weight"),
    "L1-order": (lambda: L1(1.0, 1.0, 0.0), "lower"),
    "L1-empty-sum": (lambda: L1(1.0) + Box(0.0, 1.0) + Box(2.0, 3.0), "lower"),
    "GroupL2-negative": (lambda: GroupL2(-1.0), "weight"),
    "GroupL2-infinite": (lambda: GroupL2(INF), "weight"),
    "GroupL2-array": (lambda: GroupL2(PAIR_OF_NUMBERS), "weight"),
    "GroupL2-axis": (lambda: GroupL2(1.0, axis=0.5), "axis"),
    "Ridge-zero": (lambda: Ridge(0.0), "weight"),
    "Ridge-infinite": (lambda: Ridge(INF), "weight"),
    "Ridge-array": (lambda: Ridge(PAIR_OF_NUMBERS), "weight"),
    "ElasticNet-l1": (lambda: ElasticNet(-1.0, 1.0), "l1"),
    "ElasticNet-l1-array": (lambda: ElasticNet(PAIR_OF_NUMBERS, 1.0), "l1"),
    "ElasticNet-l2": (lambda: ElasticNet(1.0, 0.0), "l2"),
    "ElasticNet-l2-array": (lambda: ElasticNet(1.0, PAIR_OF_NUMBERS), "l2"),
    "Ridge-center-nan": (lambda: Ridge(1.0, {"u": np.nan}), "center"),
    "Ridge-base": (lambda: Ridge(1.0, 0.0, 3.0), "base"),
    "PerLeaf-parts": (lambda: PerLeaf({"u": 1.0}), "parts"),
    "Scaled-term": (lambda: Scaled(1.0, 2.0), "term"),
    "Scaled-zero": (lambda: 0.0 * L1(1.0), "factor"),
    "Scaled-negative": (lambda: -2.0 * L1(1.0), "factor"),
    "Scaled-nan": (lambda: np.nan * L1(1.0), "factor"),
    "Scaled-infinite": (lambda: INF * L1(1.0), "factor"),
    "Scaled-array": (lambda: Scaled(L1(1.0), PAIR_OF_NUMBERS), "factor"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_parameters_are_named(name):
    make, parameter = BAD[name]
    with pytest.raises((ValueError, TypeError), match=rf"\b{parameter}\b"):
        make()


@pytest.mark.parametrize(
    ("spec", "found"),
    [
        (None, "empty"),
        ({}, "empty"),
        (1.0, "float"),
        ({"a": Box(0.0, 1.0), "b": 2.0}, "float"),
        (Simplex, r"Simplex\("),
    ],
    ids=["nothing", "empty", "number", "mixed", "constructor"],
)
def test_as_term_names_the_block(spec, found):
    with pytest.raises(TypeError, match=rf"lower_term.*{found}"):
        as_term(spec, "lower_term")


def test_as_term_keeps_a_term():
    term = Simplex()
    assert as_term(term, "x") is term


CENTERED = Ridge(1.0, {"u": 0.0, "v": np.zeros(3)})
MISFITS = {
    "lower": (Box(np.zeros(4), 1.0), np.zeros(3), r"^w: .*lower.*\(4,\).*\(3,\)"),
    "upper": (Box(0.0, np.ones((2, 3))), np.zeros(3), r"^w: .*upper.*\(2, 3\).*\(3,\)"),
    "l1-bound": (L1(1.0, np.zeros(4)), np.zeros(3), r"^w: .*lower"),
    "leaf": (Box(np.zeros(4), 1.0), {"a": np.zeros(4), "b": (np.zeros(3),)}, r"^w\['b'\]\[0\]: "),
    "simplex-axis": (Simplex(axis=1), np.zeros(3), r"^w: .*axis=1.*\(3,\)"),
    "group-axis": (GroupL2(1.0), np.zeros(()), r"^w: .*axis=-1.*\(\)"),
    "l1ball-axis": (L1Ball(1.0, axis=-3), np.zeros((2, 2)), r"^w: .*axis=-3"),
    "l2ball-axis": (L2Ball(1.0, axis=2), np.zeros((2, 2)), r"^w: .*axis=2"),
    "l2ball-center": (L2Ball(1.0, np.zeros(2)), np.zeros(3), r"^w: .*center.*\(2,\)"),
    "cap": (CappedSimplex(0.2), np.zeros(4), r"^w: .*empty.*cap must be at least"),
    "cap-row": (CappedSimplex(0.2, axis=1), np.zeros((9, 4)), r"^w: .*empty"),
    "capped-no-entries": (CappedSimplex(0.2), np.zeros(0), r"^w: .*empty"),
    "simplex-no-entries": (Simplex(), np.zeros(0), r"^w: "),
    "simplex-empty-row": (Simplex(axis=1), np.zeros((2, 0)), r"^w: "),
    "ridge-shape": (Ridge(1.0, np.zeros(4)), np.zeros(3), r"^w: .*center.*\(4,\)"),
    "ridge-leaf": (CENTERED, {"u": np.zeros(2), "v": np.zeros(2)}, r"^w.*center.*\(3,\)"),
    "ridge-tree": (CENTERED, {"u": np.zeros(2)}, r"^w: .*center"),
    "ridge-base": (Ridge(1.0) + Simplex(axis=1), np.zeros(3), r"^w: .*axis=1"),
    "scaled": (2.0 * Simplex(axis=1), np.zeros(3), r"^w: .*axis=1"),
    "per-leaf-tree": (MIXED, {"a": np.zeros(3)}, r"^w: .*does not match"),
    "per-leaf-array": (MIXED, np.zeros(3), r"^w: .*does not match"),
    "per-leaf-part": (
        MIXED,
        NESTED | {"b": (np.zeros(4), np.zeros(()))},
        r"^w\['b'\]\[0\]: .*axis=1",
    ),
    "per-leaf-deep": (
        as_term({"a": Simplex(axis=1), "b": Free()}, "x"),
        {"a": [np.zeros((1, 2)), np.zeros(2)], "b": np.zeros(2)},
        r"^w\['a'\]\[1\]: .*axis=1",
    ),
}


@pytest.mark.parametrize("name", MISFITS)
def test_check_block_names_the_block(name):
    term, block, message = MISFITS[name]
    with pytest.raises(ValueError, match=message):
        term.check_block(block, "w")


@each()
def test_check_block_accepts_what_fits(case):
    """Arrays, and their shapes alone."""
    case.term.check_block(case.tree(np.zeros(case.size)), "w")
    case.term.check_block(jax.eval_shape(lambda: case.tree(np.zeros(case.size))), "w")


@pytest.mark.parametrize("name", ["Box", "CappedSimplex", "L2Ball-axis", "Ridge+Box"])
def test_shapes_are_enough_for_the_bounds(name):
    """`diameter` and `supremum` need no numbers of the block, only its shape."""
    case = NAMED[name]
    shape = jax.ShapeDtypeStruct(case.like.shape, np.float32)
    assert float(case.term.diameter(shape)) == pytest.approx(case.diameter(), rel=1e-5)
    expected = call(case, "supremum", np.zeros(case.size))
    assert float(case.term.supremum(shape)) == pytest.approx(expected, rel=1e-5)


def test_repr_shows_numbers_as_numbers():
    assert repr(Box(-1.0, np.ones(3))) == "Box(lower=-1, upper=array(3,))"
    assert repr(2.0 * L1(0.5)) == "Scaled(term=L1(weight=0.5, lower=-inf, upper=inf), factor=2)"


@pytest.mark.parametrize("total", [1.0, 1.8])  # 1.8: three at their caps is one answer of many
def test_few_entries_and_many_have_the_same_level(total):
    """Entries that cannot move make the vector long: it then takes another way, with a loop."""
    rng = np.random.default_rng(0)
    for scale in (1e-3, 1.0, 1e6):
        v = np.round(scale * rng.normal(size=(20, 8)), 6)
        v[:5] = v[:5, :1]  # ties
        bounds = np.zeros(8), np.full(8, 0.6)
        for row in v:
            few = waterfill(*map(jnp.asarray, (row, *bounds, total)))
            longer = [np.concatenate([a, np.zeros(40)]) for a in (row, *bounds)]
            many = waterfill(*map(jnp.asarray, (*longer, total)))
            np.testing.assert_allclose(few, many[:8], atol=1e-12)
            np.testing.assert_allclose(jnp.sum(few), total, atol=1e-12)
