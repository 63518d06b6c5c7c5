"""The terms' definitions, written down again in NumPy and CVXPY.

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
import jax
import jax.numpy as jnp
import numpy as np
import pytest

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
    Ridge,
    Simplex,
    Term,
    as_term,
)

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
    """0 ≤ x ≤ cap with sum `total`, for one cap or one for each entry."""

    def __init__(self, total=1.0, cap=INF):
        self.total, self.cap = total, cap
        self.equal = np.ndim(cap) == 0 or np.ptp(cap) == 0

    @functools.cache  # noqa: B019 (the table lives as long as the tests)
    def vertices(self, n: int) -> np.ndarray:
        """Entries take their caps one after the other, in every order."""
        caps, corners = np.broadcast_to(self.cap, n), set()
        for order in itertools.permutations(range(n)):
            left, corner = self.total, np.zeros(n)
            for i in order:
                corner[i] = min(left, caps[i])
                left -= corner[i]
            corners.add(tuple(corner))
        return np.array(sorted(corners))

    def face(self, rng: np.random.Generator, n: int) -> np.ndarray:
        # Halves of equal numbers add up exactly, so entries at 0 and at the cap stay there.
        corners = self.vertices(n)
        return 0.5 * corners[rng.integers(len(corners))] + 0.5 * corners[rng.integers(len(corners))]

    def gap(self, x: np.ndarray) -> float:
        return max(np.max(-x), np.max(x - self.cap), abs(x.sum() - self.total))

    def constraints(self, u: cp.Expression) -> list:
        top = [u <= self.cap] if np.all(np.isfinite(self.cap)) else []
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
    def exact_diameter(self) -> bool:
        return all(getattr(part.domain, "equal", True) for part in self.parts)

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
    """`domain` is one for all rows, or a list of one for each."""
    indices = rows(shape, axis)
    domains = domain if isinstance(domain, list) else [domain] * len(indices)
    parts = tuple(Part(i, d, **penalties) for i, d in zip(indices, domains, strict=True))
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
CAPS = np.array([0.1, 0.5, 0.3, 0.9, 0.0, 0.2])
COLUMN = np.array([0.4, 0.9, 1.5])
BLOCK = np.array([[0.4, 2.5], [0.9, 0.5], [1.5, 0.7]])
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
    on_array("CappedSimplex-caps", CappedSimplex(CAPS), Weights(1.0, CAPS)),
    on_array("CappedSimplex-caps-equal", CappedSimplex(0.3 + 0 * CAPS), Weights(1.0, 0.3)),
    on_array("CappedSimplex-caps-few", CappedSimplex(CAPS, 1.9), Weights(1.9, CAPS)),
    on_array(
        "CappedSimplex-caps-axis", CappedSimplex(COLUMN, 2.0, 0), Weights(2.0, COLUMN), (3, 2), 0
    ),
    on_array(
        "CappedSimplex-caps-block",
        CappedSimplex(BLOCK, 2.0, 0),
        [Weights(2.0, column) for column in BLOCK.T],
        (3, 2),
        0,
    ),
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
VECTORS = ("prox", "project", "linear_oracle", "residual")


# Long: programs of their own for what others have in another shape or another sum.
LONG = ["L2Ball-axis", "CappedSimplex-caps-axis", "CappedSimplex-caps-block", "GroupL2-whole"]
LONG += ["leafwise-CappedSimplex", "PerLeaf", "Ridge+PerLeaf", "Ridge+GroupL2", "Ridge-tree"]
LONG += ["Scaled-L1", "Box-arrays", "L1+Box-mixed"]
assert set(LONG) <= set(NAMED)


def each(cases=CASES):
    given = [pytest.param(c, marks=pytest.mark.long) if c.name in LONG else c for c in cases]
    # The module scope makes pytest run the tests of one case together, so it compiles once.
    return pytest.mark.parametrize("case", given, ids=lambda case: case.name, scope="module")


def flat(tree: Any) -> np.ndarray:
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])
