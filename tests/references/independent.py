"""The certificates once more, from their definitions: NumPy, SciPy and CVXPY, nothing of bilevax.

Blocks are flat vectors, gradients are written by hand, and each residual exists twice: in closed
form, and as a least-norm problem over the subdifferential that CVXPY solves. The gap of the lower
level is exact: best responses come from enumerating the faces of the domain, or from CVXPY.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import cvxpy as cp
import numpy as np
from scipy.optimize import brentq, root

Vector = np.ndarray
Point = dict[str, Any]  # flat blocks by name; None for an absent one, and "rho"
Model = tuple[Any, list]  # a CVXPY expression and the constraints that go with it

INF = float("inf")
BLOCKS = ("x1", "x2", "y1", "y2")
LINES = ("stationarity", "response_x2", "response_z1", "response_z2", "gap")
OWNERS = {"x1": "x1", "x2": "x2", "y1": "y1", "y2": "y2", "z1": "y1", "z2": "y2"}
OUTSIDE = 1e-9  # what lies farther than this from the domain is outside
FLAT = 1e-9  # determinants below this are singular; those of the problems here are not near it
ON_SPHERE = 1e-13  # relative: a curved boundary cannot be met exactly in floats


def solve(cost: Any, held: list) -> float:
    """The least cost, as tightly as the solver can vouch for it, and to 1e-7 at the least."""
    problem = cp.Problem(cp.Minimize(cost), held)
    for tolerance in (1e-10, 1e-9, 1e-8, 1e-7):
        names = ("tol_gap_abs", "tol_gap_rel", "tol_feas", "tol_ktratio")
        with warnings.catch_warnings(), contextlib.suppress(cp.SolverError):
            warnings.filterwarnings("ignore", message="Solution may be inaccurate")
            problem.solve(solver=cp.CLARABEL, **dict.fromkeys(names, tolerance))
        if problem.status == cp.OPTIMAL:
            return float(problem.value)
    raise ArithmeticError(f"CVXPY ended with {problem.status}")


# ---------------------------------------------------------------------------------------------
# Terms. Every domain is bounded and every curvature small enough to enumerate faces.
# ---------------------------------------------------------------------------------------------


class Term(abc.ABC):
    """A convex function φ of a flat vector, with what its definition says and nothing else."""

    @abc.abstractmethod
    def value(self, x: Vector) -> float:
        """φ(x) for x in the domain."""

    @abc.abstractmethod
    def project(self, v: Vector) -> Vector:
        """The nearest point of the domain."""

    @abc.abstractmethod
    def distance(self, x: Vector, g: Vector, scale: float = 1.0) -> float:
        """dist(0, g + scale·∂φ(x)), in closed form."""

    @abc.abstractmethod
    def subdifferential(self, x: Vector, scale: float = 1.0) -> Model:
        """Any element of scale·∂φ(x), for CVXPY to choose."""

    @abc.abstractmethod
    def model(self, u: Any) -> Model:
        """φ(u) and u ∈ dom φ, for CVXPY."""

    @abc.abstractmethod
    def argmin(self, H: Vector, g: Vector) -> Vector:
        """A minimiser of ½uᵀHu + gᵀu + φ(u), for a positive semidefinite H."""

    @abc.abstractmethod
    def sample(self, n: int, rng: np.random.Generator) -> Vector:
        """A random point of the domain, on its faces and kinks as often as not."""

    @abc.abstractmethod
    def middle(self, n: int) -> Vector:
        """A point inside the domain."""

    @abc.abstractmethod
    def subgradient(self, x: Vector, rng: np.random.Generator) -> Vector:
        """A random element of ∂φ(x)."""

    def violation(self, x: Vector) -> float:
        return float(np.linalg.norm(x - self.project(x)))


def cheapest(candidates: Iterator[Vector], H: Vector, g: Vector, term: Term) -> Vector:
    """The best of some feasible points; when a minimiser is among them, exact in its value.

    Faces that tie up to rounding leave the point itself uncertain by the root of that, 1e-8.
    """
    return min(candidates, key=lambda u: 0.5 * u @ H @ u + g @ u + term.value(u))


@dataclasses.dataclass(frozen=True)
class Interval(Term):
    """l1·‖x‖₁ + ridge/2·‖x‖² on lower ≤ x ≤ upper."""

    lower: float
    upper: float
    l1: float = 0.0
    ridge: float = 0.0

    def value(self, x: Vector) -> float:
        return float(self.l1 * np.sum(np.abs(x)) + self.ridge / 2 * np.sum(x**2))

    def project(self, v: Vector) -> Vector:
        return np.clip(v, self.lower, self.upper)

    def _ends(self, x: Vector, scale: float) -> tuple[Vector, Vector]:
        """The ends of scale·∂φ(x), entry by entry."""
        slope, kink = scale * self.ridge * x, scale * self.l1
        low = slope + np.where(x > 0, kink, -kink)
        high = slope + np.where(x < 0, -kink, kink)
        return np.where(x <= self.lower, -INF, low), np.where(x >= self.upper, INF, high)

    def distance(self, x: Vector, g: Vector, scale: float = 1.0) -> float:
        low, high = self._ends(x, scale)
        return float(np.linalg.norm(np.maximum(g + low, 0) + np.minimum(g + high, 0)))

    def subdifferential(self, x: Vector, scale: float = 1.0) -> Model:
        sign, out = cp.Variable(x.size), cp.Variable(x.size)
        held = [sign[i] == np.sign(v) if v != 0 else cp.abs(sign[i]) <= 1 for i, v in enumerate(x)]
        for i, v in enumerate(x):
            if self.lower < v < self.upper:
                held.append(out[i] == 0)
            elif self.lower < v:
                held.append(out[i] >= 0)
            elif v < self.upper:
                held.append(out[i] <= 0)
        return scale * (self.l1 * sign + self.ridge * x) + out, held

    def model(self, u: Any) -> Model:
        cost = self.l1 * cp.norm1(u) + self.ridge / 2 * cp.sum_squares(u)
        return cost, [u >= self.lower, u <= self.upper]

    def argmin(self, H: Vector, g: Vector) -> Vector:
        if g.size > 1 and np.array_equal(H, np.diag(np.diag(H))):
            return np.concatenate(
                [self.argmin(H[i : i + 1, i : i + 1], g[i : i + 1]) for i in range(g.size)]
            )
        signs, kinks = ((-1.0, 1.0), [0.0]) if self.l1 else ((0.0,), [])
        fixed = [self.lower, self.upper, *(k for k in kinks if self.lower < k < self.upper)]
        states = [(True, v) for v in fixed] + [(False, s) for s in signs]
        curved = H + self.ridge * np.eye(g.size)

        def candidates() -> Iterator[Vector]:
            for face in itertools.product(states, repeat=g.size):
                held = np.array([is_fixed for is_fixed, _ in face])
                given = np.array([v for _, v in face])
                u, free = np.where(held, given, 0.0), ~held
                inner = curved[np.ix_(free, free)]
                if free.any():
                    if abs(np.linalg.det(inner)) < FLAT:
                        continue  # flat: a smaller face holds a minimiser too
                    pull = g + curved @ u + self.l1 * given
                    u[free] = np.linalg.solve(inner, -pull[free])
                if np.all((u >= self.lower) & (u <= self.upper)):
                    yield u

        return cheapest(candidates(), H, g, self)

    def sample(self, n: int, rng: np.random.Generator) -> Vector:
        x = rng.uniform(self.lower, self.upper, n)
        special = np.array([self.lower, self.upper, np.clip(0.0, self.lower, self.upper)])
        return np.where(rng.random(n) < 0.5, special[rng.integers(0, 3, n)], x)

    def middle(self, n: int) -> Vector:
        return np.full(n, 0.4 * self.lower + 0.6 * self.upper)

    def subgradient(self, x: Vector, rng: np.random.Generator) -> Vector:
        low, high = self._ends(x, 1.0)
        low = np.where(np.isfinite(low), low, np.where(np.isfinite(high), high, 0) - 1)
        high = np.where(np.isfinite(high), high, low + 1)
        return rng.uniform(low, high)


@dataclasses.dataclass(frozen=True)
class Simplex(Term):
    """ridge/2·‖x‖² on 0 ≤ x ≤ cap, Σ x = 1."""

    cap: float = INF
    ridge: float = 0.0

    def value(self, x: Vector) -> float:
        return float(self.ridge / 2 * np.sum(x**2))

    def project(self, v: Vector) -> Vector:
        return dataclasses.replace(self, ridge=0.0).argmin(np.eye(v.size), -v)

    def violation(self, x: Vector) -> float:
        return float(max(abs(x.sum() - 1), np.max(-x), np.max(x - self.cap), 0.0))

    def distance(self, x: Vector, g: Vector, scale: float = 1.0) -> float:
        """N(x) = {λ1 − μ + ν}, μ ≥ 0 where x = 0, ν ≥ 0 where x = cap: a search for λ alone."""
        g = g + scale * self.ridge * x
        low, high = x <= 0, x >= self.cap

        def residual(level: float) -> Vector:
            shifted = g + level
            return np.where(
                low, np.minimum(shifted, 0), np.where(high, np.maximum(shifted, 0), shifted)
            )

        breaks = np.unique(-g)
        between = [breaks[0] - 1, *((breaks[1:] + breaks[:-1]) / 2), breaks[-1] + 1]
        levels = [*breaks, *between]
        for level in between:  # on each piece the square is a parabola: add its lowest point
            active = residual(level) != 0
            levels += [-np.mean(g[active])] if active.any() else []
        return float(min(np.linalg.norm(residual(level)) for level in levels))

    def subdifferential(self, x: Vector, scale: float = 1.0) -> Model:
        level, out = cp.Variable(), cp.Variable(x.size)
        held = []
        for i, v in enumerate(x):
            if v <= 0:
                held.append(out[i] <= 0)
            else:
                held.append(out[i] >= 0 if v >= self.cap else out[i] == 0)
        return scale * self.ridge * x + level + out, held

    def model(self, u: Any) -> Model:
        held = [u >= 0, cp.sum(u) == 1] + ([u <= self.cap] if self.cap < INF else [])
        return self.ridge / 2 * cp.sum_squares(u), held

    def argmin(self, H: Vector, g: Vector) -> Vector:
        states = [0.0, None] + ([self.cap] if self.cap < INF else [])
        curved = H + self.ridge * np.eye(g.size)

        def candidates() -> Iterator[Vector]:
            for face in itertools.product(states, repeat=g.size):
                free = np.array([v is None for v in face])
                u = np.array([0.0 if v is None else v for v in face])
                k, rest = int(free.sum()), 1 - u.sum()
                if k == 0 and abs(rest) > 1e-12:
                    continue
                if k == 1:
                    u[free] = rest
                elif k > 1:
                    border = np.ones((k + 1, k + 1))
                    border[:k, :k], border[k, k] = curved[np.ix_(free, free)], 0.0
                    if abs(np.linalg.det(border)) < FLAT:
                        continue  # flat: a smaller face holds a minimiser too
                    pull = (g + curved @ u)[free]
                    u[free] = np.linalg.solve(border, np.append(-pull, rest))[:k]
                if np.all((u >= 0) & (u <= self.cap)):
                    yield u

        return cheapest(candidates(), H, g, self)

    def sample(self, n: int, rng: np.random.Generator) -> Vector:
        return self.project(self.middle(n) + rng.choice([0.2, 1.0]) * rng.normal(size=n))

    def middle(self, n: int) -> Vector:
        return np.full(n, 1 / n)

    def subgradient(self, x: Vector, rng: np.random.Generator) -> Vector:
        push = rng.random(x.size)
        out = np.where(x <= 0, -push, np.where(x >= self.cap, push, 0))
        return self.ridge * x + rng.normal() + out


@dataclasses.dataclass(frozen=True)
class Ball(Term):
    """ridge/2·‖x‖² on ‖x − center‖ ≤ radius."""

    radius: float
    center: float = 0.0
    ridge: float = 0.0

    def value(self, x: Vector) -> float:
        return float(self.ridge / 2 * np.sum(x**2))

    def project(self, v: Vector) -> Vector:
        offset = v - self.center
        size = np.linalg.norm(offset)
        return v if size <= self.radius else self.center + self.radius / size * offset

    def _outward(self, x: Vector) -> Vector | None:
        """The direction of the normal cone, where there is one."""
        offset = x - self.center
        size = np.linalg.norm(offset)
        return offset / size if size >= self.radius * (1 - ON_SPHERE) else None

    def distance(self, x: Vector, g: Vector, scale: float = 1.0) -> float:
        g, out = g + scale * self.ridge * x, self._outward(x)
        if out is not None:
            g = g + max(0.0, -float(g @ out)) * out
        return float(np.linalg.norm(g))

    def subdifferential(self, x: Vector, scale: float = 1.0) -> Model:
        out, length = self._outward(x), cp.Variable(nonneg=True)
        cone = np.zeros(x.size) if out is None else length * out
        return scale * self.ridge * x + cone, []

    def model(self, u: Any) -> Model:
        return self.ridge / 2 * cp.sum_squares(u), [cp.norm(u - self.center) <= self.radius]

    def argmin(self, H: Vector, g: Vector) -> Vector:
        """A trust-region step from the center: (H + λI)d = −slope with the right λ ≥ 0."""
        curved = H + self.ridge * np.eye(g.size)
        center = np.full(g.size, self.center)
        values, basis = np.linalg.eigh(curved)
        values = np.maximum(values, 0)
        slope = basis.T @ (g + curved @ center)

        def step(shift: float) -> Vector:
            return np.where(slope == 0, 0, -slope / np.maximum(values + shift, 1e-300))

        if np.linalg.norm(step(0.0)) <= self.radius:
            return center + basis @ step(0.0)
        most = np.linalg.norm(slope) / self.radius
        excess = lambda shift: 1 / np.linalg.norm(step(shift)) - 1 / self.radius
        shift = brentq(excess, 0.0, most, xtol=1e-300, rtol=8.9e-16) if excess(most) > 0 else most
        offset = basis @ step(shift)
        return center + self.radius / np.linalg.norm(offset) * offset

    def sample(self, n: int, rng: np.random.Generator) -> Vector:
        direction = rng.normal(size=n)
        direction /= np.linalg.norm(direction)
        return self.center + self.radius * direction * rng.choice([0.0, rng.random(), 1.0, 1.0])

    def middle(self, n: int) -> Vector:
        return np.full(n, self.center)

    def subgradient(self, x: Vector, rng: np.random.Generator) -> Vector:
        out = self._outward(x)
        return self.ridge * x + (0 if out is None else rng.random() * out)


@dataclasses.dataclass(frozen=True)
class Product(Term):
    """One term for each part of the vector, one behind the other."""

    parts: tuple[tuple[int, Term], ...]

    def split(self, *vectors: Vector) -> Iterator[tuple[Any, ...]]:
        begin = 0
        for size, term in self.parts:
            yield term, *(v[begin : begin + size] for v in vectors)
            begin += size

    def value(self, x: Vector) -> float:
        return sum(t.value(a) for t, a in self.split(x))

    def project(self, v: Vector) -> Vector:
        return np.concatenate([t.project(a) for t, a in self.split(v)])

    def violation(self, x: Vector) -> float:
        return float(np.linalg.norm([t.violation(a) for t, a in self.split(x)]))

    def distance(self, x: Vector, g: Vector, scale: float = 1.0) -> float:
        return float(np.linalg.norm([t.distance(a, b, scale) for t, a, b in self.split(x, g)]))

    def subdifferential(self, x: Vector, scale: float = 1.0) -> Model:
        models = [t.subdifferential(a, scale) for t, a in self.split(x)]
        return cp.hstack([expr for expr, _ in models]), [h for _, held in models for h in held]

    def model(self, u: Any) -> Model:
        models = [t.model(a) for t, a in self.split(u)]
        return sum(cost for cost, _ in models), [h for _, held in models for h in held]

    def argmin(self, H: Vector, g: Vector) -> Vector:
        diagonal = np.diag(H)
        assert np.array_equal(H, np.diag(diagonal)), "the parts must not be coupled"
        return np.concatenate([t.argmin(np.diag(h), b) for t, h, b in self.split(diagonal, g)])

    def sample(self, n: int, rng: np.random.Generator) -> Vector:
        return np.concatenate([t.sample(k, rng) for k, t in self.parts])

    def middle(self, n: int) -> Vector:
        return np.concatenate([t.middle(k) for k, t in self.parts])

    def subgradient(self, x: Vector, rng: np.random.Generator) -> Vector:
        return np.concatenate([t.subgradient(a, rng) for t, a in self.split(x)])


# ---------------------------------------------------------------------------------------------
# Problems
# ---------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Reference:
    """A bilevel problem by its terms and the hand-written derivatives of its two functions.

    `upper_gradient` and `lower_gradient` return one vector per block. `curvatures` returns the
    Hessians of f~1 in y1 and of −f~1 in y2: f~1 is quadratic in each of them, the other fixed.
    """

    terms: dict[str, Term | None]
    sizes: dict[str, int]
    upper_gradient: Callable[[Point], Point]
    lower: Callable[[Vector, Vector, Any], float]
    lower_gradient: Callable[[Vector, Vector, Any], Point]
    curvatures: Callable[[Vector, Vector, Any], tuple[Vector, Any]]

    @property
    def blocks(self) -> tuple[str, ...]:
        """The names of a point's blocks, witnesses included."""
        return tuple(name for name, owner in OWNERS.items() if self.terms[owner] is not None)

    def sample(self, rng: np.random.Generator) -> Point:
        """A random point of the domain with random witnesses."""
        blocks = {n: self.term(n).sample(self.sizes[OWNERS[n]], rng) for n in self.blocks}
        return dict.fromkeys(OWNERS) | blocks | {"rho": 10 ** rng.uniform(-1, 1.5)}

    def term(self, block: str) -> Term:
        term = self.terms[OWNERS[block]]
        assert term is not None
        return term

    def outside(self, p: Point, names: Iterable[str] = tuple(OWNERS)) -> bool:
        """Whether one of these blocks lies outside its domain."""
        present = [name for name in names if name in self.blocks]
        return any(self.term(name).violation(p[name]) > OUTSIDE for name in present)


Pull = dict[str, tuple[Vector, float]]  # by block: the smooth gradient, the factor of the term


def pulls(problem: Reference, p: Point) -> Pull:
    """What `def:epsilon_KKT` asks to be near zero, block by block: g and t of g + t·∂φ."""
    f = problem.upper_gradient(p)
    above = problem.lower_gradient(p["x1"], p["y1"], p["z2"])
    below = problem.lower_gradient(p["x1"], p["z1"], p["y2"])
    rho = p["rho"]
    wanted: Pull = {
        "x1": (f["x1"] + rho * (above["x1"] - below["x1"]), 1.0),
        "y1": (f["y1"] + rho * above["y1"], rho),
        "z1": (rho * below["y1"], rho),
    }
    if problem.terms["x2"] is not None:
        wanted["x2"] = (-f["x2"], 1.0)
    if problem.terms["y2"] is not None:
        wanted["y2"] = (f["y2"] - rho * below["y2"], rho)
        wanted["z2"] = (-rho * above["y2"], rho)
    return wanted


GROUPS = {
    "stationarity": ("x1", "y1", "y2"),
    "response_x2": ("x2",),
    "response_z1": ("z1",),
    "response_z2": ("z2",),
}


def residuals(problem: Reference, p: Point) -> dict[str, float]:
    """The four distances of the definition, in closed form; infinite outside the domain."""
    if problem.outside(p):
        return dict.fromkeys(GROUPS, INF)
    wanted = pulls(problem, p)
    far = {n: problem.term(n).distance(p[n], g, scale) for n, (g, scale) in wanted.items()}
    return {
        line: float(np.linalg.norm([far[n] for n in names if n in far]))
        for line, names in GROUPS.items()
    }


def residuals_by_cvxpy(problem: Reference, p: Point) -> dict[str, float]:
    """The same, each as the least norm over the subdifferential."""
    wanted, lines = pulls(problem, p), {}
    for line, names in GROUPS.items():
        vectors, held = [], []
        for name in (n for n in names if n in wanted):
            g, scale = wanted[name]
            element, constraints = problem.term(name).subdifferential(p[name], scale)
            vectors.append(g + element)
            held += constraints
        lines[line] = solve(cp.norm(cp.hstack(vectors)), held) if vectors else 0.0
    return lines


def lower_value(problem: Reference, x1: Vector, y1: Vector, y2: Any) -> float:
    """f~ = f~1 + f~2(y1) − f~3(y2)"""
    value = problem.lower(x1, y1, y2) + problem.term("y1").value(y1)
    return value if y2 is None else value - problem.term("y2").value(y2)


def responses(problem: Reference, p: Point) -> Point:
    """Exact best responses (z1, z2) of the lower level to (x1, y1, y2)."""
    x1, y1, y2 = p["x1"], p["y1"], p["y2"]
    H, _ = problem.curvatures(x1, y1, y2)
    slope = problem.lower_gradient(x1, np.zeros_like(y1), y2)["y1"]
    best: Point = {"z1": problem.term("y1").argmin(H, slope), "z2": None}
    if y2 is not None:
        _, H = problem.curvatures(x1, y1, y2)
        slope = problem.lower_gradient(x1, y1, np.zeros_like(y2))["y2"]
        best["z2"] = problem.term("y2").argmin(H, -slope)
    return best


def best_x2(problem: Reference, p: Point) -> Any:
    """The exact best response of the upper level, f1 being quadratic in x2."""
    if p["x2"] is None:
        return None
    slope = lambda x2: -problem.upper_gradient(p | {"x2": x2})["x2"]
    at_zero = slope(np.zeros_like(p["x2"]))
    H = np.stack([slope(unit) - at_zero for unit in np.eye(p["x2"].size)])
    return problem.term("x2").argmin(H * (np.abs(H) > 1e-12), at_zero)


def gap(problem: Reference, p: Point) -> float:
    """p(x1, y1) − d(x1, y2) of `eq:prima_dual_obj`, exactly; infinite outside the domain."""
    if problem.outside(p, BLOCKS):
        return INF
    best = responses(problem, p)
    primal = lower_value(problem, p["x1"], p["y1"], best["z2"])
    return primal - lower_value(problem, p["x1"], best["z1"], p["y2"])


def gap_by_cvxpy(problem: Reference, p: Point) -> float:
    """The same, with both optimisation problems given to CVXPY."""
    x1, y1, y2 = p["x1"], p["y1"], p["y2"]
    H1, H2 = problem.curvatures(x1, y1, y2)

    def least(term: Term, H: Vector, slope: Vector) -> float:
        u = cp.Variable(slope.size)
        values, basis = np.linalg.eigh(H)
        root = np.sqrt(np.maximum(values, 0))[:, None] * basis.T
        cost, held = term.model(u)
        return solve(cp.sum_squares(root @ u) / 2 + slope @ u + cost, held)

    zero = np.zeros_like(y1)
    dual = problem.lower(x1, zero, y2) + least(
        problem.term("y1"), H1, problem.lower_gradient(x1, zero, y2)["y1"]
    )
    if y2 is None:
        return lower_value(problem, x1, y1, None) - dual
    dual -= problem.term("y2").value(y2)
    zero = np.zeros_like(y2)
    primal = problem.lower(x1, y1, zero) + problem.term("y1").value(y1)
    primal -= least(problem.term("y2"), H2, -problem.lower_gradient(x1, y1, zero)["y2"])
    return primal - dual


def epsilon(problem: Reference, p: Point) -> float:
    """The least ε of the definition for these witnesses."""
    return max(*residuals(problem, p).values(), gap(problem, p))


# ---------------------------------------------------------------------------------------------
# Random problems, with a KKT point planted in each
# ---------------------------------------------------------------------------------------------

WAVE = 3.0


@dataclasses.dataclass
class Smooth:
    """½uᵀQu + qᵀu + amplitude·Σ sin(WAVE·first) of u = all blocks, one behind the other."""

    sizes: dict[str, int]
    Q: Vector
    q: Vector
    amplitude: float = 0.0

    def pack(self, blocks: Point) -> Vector:
        return np.concatenate([blocks[name] for name in self.sizes])

    def unpack(self, u: Vector) -> Point:
        ends = np.cumsum(list(self.sizes.values()))[:-1]
        return dict(zip(self.sizes, np.split(u, ends)))

    def slice(self, name: str) -> slice:
        names = list(self.sizes)
        begin = sum(self.sizes[n] for n in names[: names.index(name)])
        return slice(begin, begin + self.sizes[name])

    def value(self, blocks: Point) -> float:
        u = self.pack(blocks)
        first = blocks[next(iter(self.sizes))]
        return float(
            0.5 * u @ self.Q @ u + self.q @ u + self.amplitude * np.sin(WAVE * first).sum()
        )

    def gradient(self, blocks: Point) -> Point:
        grown = self.unpack(self.Q @ self.pack(blocks) + self.q)
        first = next(iter(self.sizes))
        grown[first] = grown[first] + self.amplitude * WAVE * np.cos(WAVE * blocks[first])
        return grown

    def curve(self, name: str, H: Vector) -> None:
        """Replace the curvature in one block."""
        part = self.slice(name)
        self.Q[part, part] = H


def random_smooth(
    sizes: dict[str, int], rng: np.random.Generator, amplitude: float = 0.0
) -> Smooth:
    total = sum(sizes.values())
    Q = rng.normal(size=(total, total)) / 2
    return Smooth(sizes, (Q + Q.T) / 2, rng.normal(size=total) / 2, amplitude)


def random_curvature(kind: str, n: int, rng: np.random.Generator) -> Vector:
    """A positive semidefinite matrix: zero, diagonal or full."""
    if kind == "none":
        return np.zeros((n, n))
    if kind == "diagonal":
        return np.diag(rng.uniform(0.2, 1.5, n))
    root = rng.normal(size=(n, n)) / np.sqrt(n)
    return root @ root.T + 0.1 * np.eye(n)


@dataclasses.dataclass(frozen=True)
class Family:
    """A kind of random problem: its terms with their sizes, and how f~ bends in y1 and y2."""

    x1: tuple[int, Term]
    y1: tuple[int, Term]
    x2: tuple[int, Term] | None = None
    y2: tuple[int, Term] | None = None
    bend: str = "full"


FAMILIES = {
    "box saddle": Family(
        x1=(2, Interval(-1.0, 1.0)),
        x2=(2, Interval(-1.0, 0.5)),
        y1=(3, Interval(-1.0, 1.0)),
        y2=(2, Interval(-0.5, 1.5)),
    ),
    "simplex game": Family(
        x1=(2, Interval(0.0, 1.0)),
        x2=(3, Simplex()),
        y1=(3, Simplex()),
        y2=(3, Simplex(cap=0.5)),
        bend="none",
    ),
    "balls and norms": Family(
        x1=(2, Ball(1.0, ridge=0.3)),
        x2=(3, Ball(0.8, center=0.2, ridge=0.5)),
        y1=(2, Interval(-1.0, 1.0, l1=0.3, ridge=0.5)),
        y2=(3, Ball(1.25, center=-0.25, ridge=0.4)),
    ),
    "without x2": Family(
        x1=(3, Interval(-1.0, 1.0, l1=0.2)), y1=(2, Ball(1.0)), y2=(2, Simplex(ridge=0.3))
    ),
    "without y2": Family(
        x1=(2, Ball(1.0)), x2=(2, Interval(-1.0, 1.0, l1=0.1)), y1=(2, Interval(-1.0, 1.0, l1=0.4))
    ),
    "trees": Family(
        x1=(3, Product(((1, Interval(-1.0, 1.0)), (2, Ball(1.0))))),
        y1=(4, Product(((2, Simplex()), (2, Interval(-1.0, 1.0, l1=0.2))))),
        y2=(2, Interval(0.0, 1.0)),
        bend="diagonal",
    ),
}


@dataclasses.dataclass(frozen=True)
class RandomProblem:
    """A problem of a family with its data, and a point that is exactly KKT.

    f~1 = (a quadratic) + Σ coupling[k,i,j]·x1ₖ·y1ᵢ·y2ⱼ, and f1 a quadratic with waves in x1.
    """

    reference: Reference
    upper: Smooth
    lower: Smooth
    coupling: Any
    planted: Point


def random_problem(family: Family, seed: int) -> RandomProblem:
    rng = np.random.default_rng(seed)
    specs = {name: getattr(family, name) for name in BLOCKS if getattr(family, name) is not None}
    sizes = {name: size for name, (size, _) in specs.items()}
    terms = {name: specs[name][1] if name in specs else None for name in BLOCKS}
    upper = random_smooth(sizes, rng, amplitude=0.3)
    lower = random_smooth({name: n for name, n in sizes.items() if name != "x2"}, rng)
    hessians = {name: random_curvature(family.bend, n, rng) for name, n in sizes.items()}
    lower.curve("y1", hessians["y1"])
    if "y2" in sizes:
        lower.curve("y2", -hessians["y2"])
    if "x2" in sizes:
        upper.curve("x2", -random_curvature("diagonal", sizes["x2"], rng))
    coupling = None
    if "y2" in sizes:
        coupling = rng.normal(size=(sizes["x1"], sizes["y1"], sizes["y2"])) / 2

    def lower_value(x1: Vector, y1: Vector, y2: Any) -> float:
        value = lower.value({"x1": x1, "y1": y1, "y2": y2})
        return value if y2 is None else value + float(y2 @ (y1 @ (x1 @ coupling.swapaxes(0, 1))))

    def lower_gradient(x1: Vector, y1: Vector, y2: Any) -> Point:
        slope = lower.gradient({"x1": x1, "y1": y1, "y2": y2})
        if y2 is not None:
            slope["x1"] = slope["x1"] + np.array([y1 @ C @ y2 for C in coupling])
            mixed = sum(x * C for x, C in zip(x1, coupling))
            slope["y1"] = slope["y1"] + mixed @ y2
            slope["y2"] = slope["y2"] + y1 @ mixed
        return slope

    def curvatures(x1: Vector, y1: Vector, y2: Any) -> tuple[Vector, Any]:
        return hessians["y1"], hessians.get("y2")

    reference = Reference(terms, sizes, upper.gradient, lower_value, lower_gradient, curvatures)
    planted = plant(reference, upper, lower, rng)
    return RandomProblem(reference, upper, lower, coupling, planted)


def plant(problem: Reference, upper: Smooth, lower: Smooth, rng: np.random.Generator) -> Point:
    """Choose the linear parts of both functions so that a random point is exactly KKT."""
    p = problem.sample(rng)
    p |= {"z1": p["y1"], "z2": p["y2"], "rho": rng.uniform(0.5, 3.0)}
    choose = lambda name: problem.term(name).subgradient(p[name], rng)

    def shift(function: Smooth, name: str, wanted: Vector, current: Point) -> None:
        function.q[function.slice(name)] += wanted - current[name]

    # (y1, y2) is a saddle point: −∇f~1 ∈ ∂f~2(y1) and ∇f~1 ∈ ∂f~3(y2).
    signs = {"y1": -1.0} | ({} if p["y2"] is None else {"y2": 1.0})
    for name, sign in signs.items():
        slope = problem.lower_gradient(p["x1"], p["y1"], p["y2"])
        shift(lower, name, sign * choose(name), slope)
    # The upper level pulls within the cones that the penalty can answer.
    slope = problem.lower_gradient(p["x1"], p["y1"], p["y2"])
    pull = {"x1": -choose("x1"), "y1": -p["rho"] * (slope["y1"] + choose("y1"))}
    if p["x2"] is not None:
        pull["x2"] = choose("x2")
    if p["y2"] is not None:
        pull["y2"] = p["rho"] * (slope["y2"] - choose("y2"))
    for name, wanted in pull.items():
        shift(upper, name, wanted, upper.gradient(p))
    return p


# ---------------------------------------------------------------------------------------------
# Instances of bilevax.problems.library, transcribed from their docstrings
# ---------------------------------------------------------------------------------------------

S = 0.1
UNIT = Interval(-1.0, 1.0)


def _saddle(x1: Vector, y1: Vector, y2: Vector) -> float:
    return S * float(np.sum(0.5 * (y1 - x1) ** 2 + y1 * y2 - 0.5 * y2**2))


def _saddle_gradient(x1: Vector, y1: Vector, y2: Vector) -> Point:
    return {"x1": S * (x1 - y1), "y1": S * (y1 - x1 + y2), "y2": S * (y1 - y2)}


def _flat(n1: int, n2: int, h1: float, h2: float) -> Callable[..., tuple[Vector, Any]]:
    return lambda x1, y1, y2: (h1 * np.eye(n1), h2 * np.eye(n2) if n2 else None)


def _tracking(shift: float = 0.0) -> dict[str, Callable]:
    """f~1 = s·½‖y1 − x1 − shift‖² without y2."""

    def gradient(x1: Vector, y1: Vector, y2: Any) -> Point:
        return {"x1": S * (x1 + shift - y1), "y1": S * (y1 - x1 - shift)}

    value = lambda x1, y1, y2: S * 0.5 * float(np.sum((y1 - x1 - shift) ** 2))
    return {"lower": value, "lower_gradient": gradient}


def _terms(**given: Term) -> dict[str, Term | None]:
    return {name: given.get(name) for name in BLOCKS}


def unique_saddle() -> Reference:
    a, b = np.array([0.5, -0.4]), np.array([0.2, 0.1])

    def upper(p: Point) -> Point:
        return {"x1": p["x1"] - a, "x2": p["y2"] - p["x2"], "y1": b, "y2": p["x2"]}

    terms, sizes = _terms(x1=UNIT, x2=UNIT, y1=UNIT, y2=UNIT), dict.fromkeys(BLOCKS, 2)
    return Reference(terms, sizes, upper, _saddle, _saddle_gradient, _flat(2, 2, S, S))


def many_saddles() -> Reference:
    a, t = 0.2, np.array([0.5, 0.3])

    def upper(p: Point) -> Point:
        return {"x1": p["x1"] - a, "y1": p["y1"] - t, "y2": np.zeros(1)}

    def lower(x1: Vector, y1: Vector, y2: Vector) -> float:
        return S * float(y2[0] * (y1.sum() - x1[0]))

    def gradient(x1: Vector, y1: Vector, y2: Vector) -> Point:
        return {"x1": -S * y2, "y1": S * y2[0] * np.ones(2), "y2": S * (y1.sum() - x1)}

    terms, sizes = _terms(x1=UNIT, y1=UNIT, y2=UNIT), {"x1": 1, "y1": 2, "y2": 1}
    return Reference(terms, sizes, upper, lower, gradient, _flat(2, 1, 0.0, 0.0))


def boundary() -> Reference:
    upper = lambda p: {"x1": p["x1"] - 2, "y1": np.full(1, 0.1)}
    unit = Interval(0.0, 1.0)
    terms, sizes = _terms(x1=unit, y1=unit), {"x1": 1, "y1": 1}
    return Reference(terms, sizes, upper, curvatures=_flat(1, 0, S, 0.0), **_tracking(0.5))


def soft_threshold() -> Reference:
    t = np.array([0.3, -0.5])
    upper = lambda p: {"x1": np.zeros(2), "y1": p["y1"] - t}
    terms, sizes = _terms(x1=UNIT, y1=Interval(-1.0, 1.0, l1=S * 0.2)), {"x1": 2, "y1": 2}
    return Reference(terms, sizes, upper, curvatures=_flat(2, 0, S, 0.0), **_tracking())


def double_well() -> Reference:
    upper = lambda p: {"x1": (p["x1"] ** 2 - 1) * p["x1"], "y1": p["y1"] - 1}
    wide = Interval(-1.2, 1.2)
    terms, sizes = _terms(x1=wide, y1=wide), {"x1": 1, "y1": 1}
    return Reference(terms, sizes, upper, curvatures=_flat(1, 0, S, 0.0), **_tracking())


def matrix_game() -> Reference:
    def upper(p: Point) -> Point:
        pull = np.array([10 * (p["y1"][0] - 0.6), 0.0])
        return {"x1": np.zeros(1), "y1": pull, "y2": np.zeros(2)}

    def lower(x1: Vector, y1: Vector, y2: Vector) -> float:
        return S * float(x1[0] * y1[0] * y2[0] + y1[1] * y2[1])

    def gradient(x1: Vector, y1: Vector, y2: Vector) -> Point:
        weights = np.array([x1[0], 1.0])
        return {"x1": S * y1[:1] * y2[:1], "y1": S * weights * y2, "y2": S * weights * y1}

    terms = _terms(x1=Interval(0.2, 1.0), y1=Simplex(), y2=Simplex())
    sizes = {"x1": 1, "y1": 2, "y2": 2}
    return Reference(terms, sizes, upper, lower, gradient, _flat(2, 2, 0.0, 0.0))


def worst_group() -> Reference:
    m, targets = np.array([-1.0, 1.0]), np.array([0.6, 0.2])

    def upper(p: Point) -> Point:
        away = p["x1"] - targets
        zero = {"y1": np.zeros(1), "y2": np.zeros(2)}
        return {"x1": np.array([p["x2"] @ away]), "x2": 0.5 * away**2} | zero

    def lower(x1: Vector, y1: Vector, y2: Vector) -> float:
        return S * float(y2 @ (0.5 * (y1 - m) ** 2) + x1[0] * y1[0])

    def gradient(x1: Vector, y1: Vector, y2: Vector) -> Point:
        pull = np.array([y2 @ (y1 - m) + x1[0]])
        return {"x1": S * y1, "y1": S * pull, "y2": S * 0.5 * (y1 - m) ** 2}

    def curvatures(x1: Vector, y1: Vector, y2: Vector) -> tuple[Vector, Vector]:
        return S * y2.sum() * np.eye(1), np.zeros((2, 2))

    terms = _terms(x1=Interval(-0.5, 0.8), x2=Simplex(), y1=Interval(-0.5, 0.5), y2=Simplex())
    sizes = {"x1": 1, "x2": 2, "y1": 1, "y2": 2}
    return Reference(terms, sizes, upper, lower, gradient, curvatures)


LIBRARY: dict[str, Callable[[], Reference]] = {
    function.__name__: function
    for function in (
        unique_saddle,
        many_saddles,
        boundary,
        soft_threshold,
        double_well,
        matrix_game,
        worst_group,
    )
}


def certified_point(problem: Reference, solution: Point, rho: float) -> Point:
    """A point that is exactly stationary for the penalty ρ, close to the solution of an instance.

    Where the upper level pulls at (y1, y2), no saddle point is stationary: the penalty's own point
    lies O(1/ρ) away, inside all domains of the instances concerned, where it solves an equation.
    """
    p = solution | {"z1": solution["y1"], "z2": solution["y2"], "rho": rho}
    if max(residuals(problem, p).values()) < 1e-9:
        return p
    names = problem.blocks
    ends = np.cumsum([p[name].size for name in names])[:-1]
    unpack = lambda u: p | dict(zip(names, np.split(u, ends)))

    def equations(u: Vector) -> Vector:
        wanted = pulls(problem, unpack(u))
        return np.concatenate([wanted[name][0] for name in names])

    found = root(equations, np.concatenate([p[name] for name in names]), method="lm", tol=1e-15)
    return unpack(found.x)
