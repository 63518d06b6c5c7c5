"""Certificates of constrained bilevel problems against `def:cons_kkt`, computed without bilevax.

Every random problem exists twice: as arrays that NumPy, SciPy and CVXPY read here, with gradients
written by hand, and as functions that bilevax differentiates. Each has a KKT point planted in it:
the linear parts are chosen so that all lines of the definition vanish there.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import cvxpy as cp
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.optimize import linprog

import bilevax as bx
import independent as ind
from bilevax import terms
from bilevax.certificates import judge
from bilevax.certificates.constrained_witness import constrained_witnesses
from bilevax.problems import library

TIGHT = 1e-6
WAVE = 2.0
# Each kind of constraint with the multipliers that weigh it.
KINDS = {
    "constraints": ("lam", "lam_bar"),
    "equalities": ("nu", "nu_bar"),
    "upper_constraints": ("upper_lam",),
    "upper_equalities": ("upper_nu",),
}
SIGNED = ("lam", "lam_bar", "upper_lam")
MULTIPLIERS = (*SIGNED, "nu", "nu_bar", "upper_nu")
LINES = (
    "stationarity",
    "response_z",
    "feasibility_z",
    "complementarity_z",
    "lower_gap",
    "feasibility",
    "complementarity",
    "upper_feasibility",
    "upper_complementarity",
)

# ---------------------------------------------------------------------------------------------
# The reference: NumPy and CVXPY, nothing of bilevax
# ---------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Functions:
    """½uᵀAu + aᵀu + b + w·Σ exp(y) + v·Σ sin(2x) for each of several rows, with u = (x, y).

    `t` adds t·Σx·Σy, which bilevax is given as t·Σx·Σ(y + d) for large d whose sum is zero.
    """

    n: int  # entries of x in u
    A: np.ndarray
    a: np.ndarray
    b: np.ndarray
    w: np.ndarray
    v: np.ndarray
    t: np.ndarray

    def _coupling(self, size: int) -> np.ndarray:
        cross = np.zeros((size, size))
        cross[: self.n, self.n :] = cross[self.n :, : self.n] = 1.0
        return self.t[:, None, None] * cross

    def values(self, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        u = np.concatenate([x, y])
        bent = 0.5 * np.einsum("kij,i,j->k", self.A, u, u) + self.a @ u + self.b
        bent = bent + self.t * x.sum() * y.sum()
        return bent + self.w * np.exp(y).sum() + self.v * np.sin(WAVE * x).sum()

    def jacobian(self, x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        u = np.concatenate([x, y])
        J = (self.A + self._coupling(u.size)) @ u + self.a
        in_x = J[:, : self.n] + self.v[:, None] * WAVE * np.cos(WAVE * x)
        return in_x, J[:, self.n :] + self.w[:, None] * np.exp(y)

    def scaled(self, factor: float) -> Functions:
        arrays = {n: factor * getattr(self, n) for n in ("A", "a", "b", "w", "v", "t")}
        return dataclasses.replace(self, **arrays)

    def models(self, x: np.ndarray, y: Any) -> Iterator[Any]:
        """Each row as a CVXPY expression in y."""
        n = self.n
        for k in range(self.b.size):
            A = self.A[k]
            linear = A[n:, :n] @ x + self.a[k, n:] + self.t[k] * x.sum()
            constant = 0.5 * x @ A[:n, :n] @ x + self.a[k, :n] @ x + self.b[k]
            constant += self.v[k] * np.sin(WAVE * x).sum()
            cost = linear @ y + constant
            if np.any(A[n:, n:]):
                cost = cost + 0.5 * cp.quad_form(y, cp.psd_wrap(A[n:, n:]))
            if self.w[k]:
                cost = cost + self.w[k] * cp.sum(cp.exp(y))
            yield cost


Point = dict[str, Any]  # flat x, y, z, rho and flat multipliers


@dataclasses.dataclass
class Reference:
    sizes: tuple[int, int]
    x: ind.Term
    y: ind.Term
    upper: Functions
    lower: Functions
    kinds: dict[str, Functions]  # by the name of the constraint; absent ones are left out

    def lower_value(self, x: np.ndarray, y: np.ndarray) -> float:
        return float(self.lower.values(x, y)[0]) + self.y.value(y)

    def least(self, x: np.ndarray) -> float:
        """g*(x), exactly."""
        return self.solution(x)[0]

    def solution(self, x: np.ndarray) -> tuple[float, np.ndarray, Point]:
        """g*(x), a solution of the lower level, and its multipliers, from CVXPY."""
        y = cp.Variable(self.sizes[1])
        term, held = self.y.model(y)
        duals = {}
        for kind, name in (("constraints", "lam_bar"), ("equalities", "nu_bar")):
            if kind in self.kinds:
                rows = list(self.kinds[kind].models(x, y))
                duals[name] = [row <= 0 if name == "lam_bar" else row == 0 for row in rows]
        own = [row for rows in duals.values() for row in rows]
        cost = next(self.lower.models(x, y)) + term
        least = ind.solve(cost, [*held, *own])
        bars = {n: np.array([np.ravel(r.dual_value)[0] for r in rows]) for n, rows in duals.items()}
        if "lam_bar" in bars:
            bars["lam_bar"] = np.maximum(bars["lam_bar"], 0.0)
        return least, self.y.project(np.asarray(y.value)), bars

    def least_by_highs(self, x: np.ndarray) -> float:
        """g*(x) of a linear lower level over a box."""
        n = self.sizes[0]
        assert isinstance(self.y, ind.Interval)
        assert self.y.l1 == self.y.ridge == 0
        zero = np.zeros(self.sizes[1])
        cost = self.lower.jacobian(x, zero)[1][0]
        assert not np.any(self.lower.A[:, n:, n:])
        given: dict[str, Any] = {"A_ub": None, "b_ub": None, "A_eq": None, "b_eq": None}
        for kind, name in (("constraints", "ub"), ("equalities", "eq")):
            if kind in self.kinds:
                rows = self.kinds[kind]
                given[f"A_{name}"] = rows.jacobian(x, zero)[1]
                given[f"b_{name}"] = -rows.values(x, zero)
        answer = linprog(cost, bounds=(self.y.lower, self.y.upper), method="highs", **given)
        assert answer.status == 0
        return float(answer.fun + self.lower.values(x, zero)[0])

    def lines(self, p: Point, least: float | None) -> dict[str, float]:
        """Every line of the definition, without rounding; no gap without `least`."""
        x, y, z, rho = p["x"], p["y"], p["z"], p["rho"]
        fx, fy = (part[0] for part in self.upper.jacobian(x, y))
        gx, gy = (part[0] for part in self.lower.jacobian(x, y))
        bx_, bz = (part[0] for part in self.lower.jacobian(x, z))
        ax, ay = fx + rho * (gx - bx_), fy + rho * gy
        for kind, names in KINDS.items():
            if kind not in self.kinds:
                continue
            Jx, Jy = self.kinds[kind].jacobian(x, y)
            ax, ay = ax + Jx.T @ p[names[0]], ay + Jy.T @ p[names[0]]
            if len(names) == 2:
                Jx, Jz = self.kinds[kind].jacobian(x, z)
                ax, bz = ax - rho * (Jx.T @ p[names[1]]), bz + Jz.T @ p[names[1]]

        def over(kinds: tuple[str, str], at: np.ndarray) -> float:
            most = [0.0]
            for kind in kinds:
                if kind in self.kinds:
                    c = self.kinds[kind].values(x, at)
                    most.append(float(np.linalg.norm(np.maximum(c, 0) if "con" in kind else c)))
            return math.hypot(*most)

        def products(pairs: dict[str, str], at: np.ndarray) -> float:
            return sum(
                abs(float(p[m] @ self.kinds[k].values(x, at)))
                for k, m in pairs.items()
                if k in self.kinds
            )

        below, above = ("constraints", "equalities"), ("upper_constraints", "upper_equalities")
        lines = {
            "stationarity": math.hypot(self.x.distance(x, ax), self.y.distance(y, ay, rho)),
            "response_z": rho * self.y.distance(z, bz),
            "feasibility_z": over(below, z),
            "complementarity_z": products(dict(zip(below, ("lam_bar", "nu_bar"))), z),
            "feasibility": over(below, y),
            "complementarity": products(dict(zip(below, ("lam", "nu"))), y),
            "upper_feasibility": over(above, y),
            "upper_complementarity": products(dict(zip(above, ("upper_lam", "upper_nu"))), y),
        }
        if least is not None:
            lines["lower_gap"] = max(self.lower_value(x, y) - least, 0.0)
        return lines

    def outside(self, p: Point) -> bool:
        """Outside a domain, or with a multiplier of the wrong sign: nothing holds there."""
        blocks = ((self.x, p["x"]), (self.y, p["y"]), (self.y, p["z"]))
        wrong = any(name in p and not np.all(p[name] >= 0) for name in SIGNED)
        return wrong or any(term.violation(v) > ind.OUTSIDE for term, v in blocks)

    def epsilon(self, p: Point) -> float:
        if self.outside(p):
            return ind.INF
        return max(self.lines(p, self.least(p["x"])).values())


@dataclasses.dataclass(frozen=True)
class Family:
    """A shape of problem: sizes, terms, curvature of the lower level, rows of each constraint."""

    sizes: tuple[int, int] = (2, 3)
    x: ind.Term = ind.Interval(-1.0, 1.0)
    y: ind.Term = ind.Interval(-1.0, 1.5)
    curved: bool = True  # the lower level
    bent: bool = True  # its constraints
    exponential: bool = False
    rows: tuple[int, int, int, int] = (2, 0, 0, 0)  # in the order of KINDS
    trees: bool = False


PARTS = ind.Product(((2, ind.Interval(-1.0, 1.0)), (1, ind.Interval(-2.0, 0.5, ridge=0.3))))
FAMILIES = {
    "linear": Family(curved=False, bent=False),
    "linear with equality": Family(curved=False, bent=False, rows=(2, 1, 1, 0)),
    "quadratic": Family(),
    "equalities": Family(rows=(1, 1, 0, 0)),
    "only equalities": Family(rows=(0, 2, 0, 0)),
    "upper": Family(rows=(2, 1, 2, 1)),
    "only upper": Family(rows=(0, 0, 1, 1)),
    "trees": Family((3, 3), PARTS, PARTS, rows=(3, 2, 2, 2), trees=True),
    "unconstrained": Family(rows=(0, 0, 0, 0)),
    "L1": Family(y=ind.Interval(-1.0, 1.0, l1=0.4), rows=(2, 1, 0, 0)),
    "elastic": Family(x=ind.Interval(-1.0, 2.0, l1=0.3), y=ind.Interval(-1.0, 1.0, 0.2, 0.5)),
    "exponential": Family(exponential=True, rows=(2, 0, 1, 0)),
}


def symmetric(size: int, n: int, rng: np.random.Generator, corner: Any) -> np.ndarray:
    """A random matrix with a given yy-block."""
    A = rng.normal(size=(size, size)) / 2
    A = (A + A.T) / 2
    A[n:, n:] = corner
    return A


def draw(family: Family, kind: str, k: int, large: float, rng: np.random.Generator) -> Functions:
    n, m = family.sizes
    size = n + m
    convex = kind in ("lower", "constraints")
    bent = family.curved if kind == "lower" else family.bent and kind == "constraints"

    def corner() -> np.ndarray:
        R = rng.normal(size=(m, m)) / 2
        if convex:
            return bent * (R @ R.T + (0.3 if kind == "lower" else 0.0) * np.eye(m))
        return np.zeros((m, m)) if kind == "equalities" else (R + R.T) / 2

    A = np.stack([symmetric(size, n, rng, corner()) for _ in range(k)])
    a, b = rng.normal(size=(k, size)), rng.normal(size=k)
    w = np.full(k, 0.4 * (family.exponential and convex))
    v = np.full(k, 0.3 * (kind in ("upper", "lower", "constraints")))
    t = np.full(k, 1.0 if large else 0.0)
    return Functions(n, A, a, b, w, v, t)


def planted(family: Family, seed: int, large: float = 0.0) -> tuple[Reference, Point]:
    """A random problem and a KKT point of it: all lines vanish up to rounding."""
    rng = np.random.default_rng(seed)
    n, m = family.sizes
    x, y = family.x.sample(n, rng), family.y.sample(m, rng)
    if not family.curved:  # a vertex, so that the solution of the lower level is the only one
        y[:-1], y[-1] = rng.choice([family.y.lower, family.y.upper], m - 1), 0.3
    upper, lower = (draw(family, kind, 1, large, rng) for kind in ("upper", "lower"))
    kinds = {k: draw(family, k, r, large, rng) for k, r in zip(KINDS, family.rows) if r}
    rho = rng.uniform(0.5, 4.0)
    p: Point = {"x": x, "y": y, "z": y.copy(), "rho": rho}
    for kind, rows in kinds.items():
        k = rows.b.size
        here, signed = rows.values(x, y), "con" in kind
        active = (np.arange(k) != k - 1) | (k == 1) if signed else np.ones(k, bool)
        rows.b = rows.b - here - np.where(active, 0.0, rng.uniform(0.2, 1.0, k))
        draws = rng.uniform(0.3, 1.5, k) if signed else rng.normal(size=k)
        if len(KINDS[kind]) == 2:
            p[KINDS[kind][1]] = active * draws
            draws = rho * draws * rng.uniform(0.4, 1.6, k)
        p[KINDS[kind][0]] = active * draws
    pull = lower.jacobian(x, y)[1][0]
    for kind, name in (("constraints", "lam_bar"), ("equalities", "nu_bar")):
        if kind in kinds:
            pull = pull + kinds[kind].jacobian(x, y)[1].T @ p[name]
    lower.a[0, n:] -= pull + family.y.subgradient(y, rng)
    fx, fy = (part[0] for part in upper.jacobian(x, y))
    fy = fy + rho * (lower.jacobian(x, y)[1][0] + family.y.subgradient(y, rng))
    for kind, rows in kinds.items():
        Jx, Jy = rows.jacobian(x, y)
        weight = p[KINDS[kind][0]]
        fx, fy = fx + Jx.T @ weight, fy + Jy.T @ weight
        if len(KINDS[kind]) == 2:
            fx = fx - rho * (Jx.T @ p[KINDS[kind][1]])
    upper.a[0] -= np.concatenate([fx + family.x.subgradient(x, rng), fy])
    return Reference(family.sizes, family.x, family.y, upper, lower, kinds), p


# ---------------------------------------------------------------------------------------------
# The same problem for bilevax
# ---------------------------------------------------------------------------------------------


def bx_term(term: ind.Term) -> Any:
    if isinstance(term, ind.Product):
        return {f"part{i}": bx_term(part) for i, (_, part) in enumerate(term.parts)}
    assert isinstance(term, ind.Interval)
    base: Any = terms.Box(term.lower, term.upper)
    base = terms.L1(term.l1) + base if term.l1 else base
    return terms.Ridge(term.ridge) + base if term.ridge else base


def flat(*blocks: Any) -> jax.Array:
    return jnp.concatenate([jnp.ravel(leaf) for leaf in jax.tree.leaves(blocks)])


def values(x: Any, y: Any, data: Any, kind: str) -> jax.Array:
    rows = data[kind]
    x, y = flat(x), flat(y)
    u = jnp.concatenate([x, y])
    bent = 0.5 * jnp.einsum("kij,i,j->k", rows["A"], u, u) + rows["a"] @ u + rows["b"]
    waves = rows["w"] * jnp.sum(jnp.exp(y)) + rows["v"] * jnp.sum(jnp.sin(WAVE * x))
    return bent + waves + rows["t"] * (jnp.sum(x) * jnp.sum(y + rows["d"]))


def as_tree(v: Any) -> Any:
    """What constraints of two rows or more return in the family of trees."""
    return {"first": v[0], "rest": (v[1:].reshape(-1, 1),)}


@functools.cache
def functions(trees: bool) -> dict[str, Callable]:
    """One set of functions for all problems, so that they share their compiled programs."""
    shape = as_tree if trees else lambda v: v
    made: dict[str, Callable] = {
        kind: lambda x, y, data, kind=kind: shape(values(x, y, data, kind)) for kind in KINDS
    }
    for kind in ("upper", "lower"):
        made[kind] = lambda x, y, data, kind=kind: values(x, y, data, kind)[0]
    return made


@dataclasses.dataclass(frozen=True)
class Case:
    reference: Reference
    planted: Point
    problem: bx.ConstrainedBilevelProblem
    trees: bool
    dtype: Any

    def block(self, term: ind.Term, vector: np.ndarray) -> Any:
        if not isinstance(term, ind.Product):
            return jnp.asarray(vector, self.dtype)
        parts = np.split(vector, np.cumsum([k for k, _ in term.parts])[:-1])
        return {f"part{i}": jnp.asarray(v.reshape(-1, 1), self.dtype) for i, v in enumerate(parts)}

    def point(self, p: Point, *, witnesses: bool = True) -> bx.Point:
        r = self.reference
        blocks = {"x": self.block(r.x, p["x"]), "y": self.block(r.y, p["y"])}
        if not witnesses:
            return bx.Point(**blocks)
        named = {n: jnp.asarray(p[n], self.dtype) for n in MULTIPLIERS if n in p}
        if self.trees:
            named = {n: as_tree(v) for n, v in named.items()}
        z, rho = self.block(r.y, p["z"]), jnp.asarray(p["rho"], self.dtype)
        return bx.Point(**blocks, z=z, rho=rho, multipliers=bx.Multipliers(**named))

    def flat(self, point: bx.Point) -> Point:
        """The other way round."""
        ravel = lambda tree: np.asarray(flat(tree), np.float64)
        p: Point = {n: ravel(getattr(point, n)) for n in ("x", "y", "z")}
        assert point.multipliers is not None
        p |= {n: ravel(v) for n, v in vars(point.multipliers).items() if v is not None}
        return p | {"rho": float(point.rho)}

    def certify(self, p: Point, **options: Any) -> bx.ConstrainedKKTCertificate:
        certificate = bx.certify(self.problem, self.point(p, **options))
        assert isinstance(certificate, bx.ConstrainedKKTCertificate)
        return certificate

    def judge(self, p: Point) -> bx.ConstrainedKKTCertificate:
        """Without the checks of the point: also for what `certify` refuses."""
        certificate = judge(self.problem, self.point(p))
        assert isinstance(certificate, bx.ConstrainedKKTCertificate)
        return certificate


def case_from(reference: Reference, p: Point, large: float, trees: bool, dtype: Any) -> Case:
    m = reference.sizes[1]
    d = np.resize([1.0, -1.0], m) if m % 2 == 0 else np.append(np.resize([1.0, -1.0], m - 1), 0)
    used = {"upper": reference.upper, "lower": reference.lower} | reference.kinds
    data = {
        kind: {n: np.asarray(getattr(rows, n), dtype) for n in ("A", "a", "b", "w", "v", "t")}
        | {"d": np.asarray(large * d, dtype)}
        for kind, rows in used.items()
    }
    own = functions(trees)
    problem = bx.ConstrainedBilevelProblem(
        own["upper"],
        own["lower"],
        **{kind: own[kind] for kind in reference.kinds},
        x=bx_term(reference.x),
        y=bx_term(reference.y),
        data=data,
    )
    return Case(reference, p, problem, trees, dtype)


@functools.cache
def case_of(
    name: str, seed: int = 0, *, large: float = 0.0, scale: float = 1.0, dtype: Any = np.float64
) -> Case:
    """`large`: constants that cancel; `scale`: of all constraints."""
    family = FAMILIES[name]
    reference, p = planted(family, 100 * list(FAMILIES).index(name) + seed, large)
    reference.kinds = {kind: rows.scaled(scale) for kind, rows in reference.kinds.items()}
    p |= {m: p[m] / scale for m in MULTIPLIERS if m in p}
    return case_from(reference, p, large, family.trees, dtype)


def random_point(case: Case, rng: np.random.Generator, x: np.ndarray | None = None) -> Point:
    """Anywhere in the domain, feasible or not, with multipliers of all sizes, some zero."""
    r = case.reference
    n, m = r.sizes
    p: Point = {"x": r.x.sample(n, rng) if x is None else x}
    p |= {name: r.y.sample(m, rng) for name in ("y", "z")}
    p["rho"] = 10 ** rng.uniform(-2, 2)
    for name in MULTIPLIERS:
        if name in case.planted:
            v = rng.normal(size=case.planted[name].size) * 10 ** rng.uniform(-1, 1)
            p[name] = np.abs(v) * (rng.random(v.size) < 0.7) if name in SIGNED else v
    return p


every_family = pytest.mark.parametrize("name", list(FAMILIES))


def seed_of(name: str) -> int:
    return sum(map(ord, name))


# ---------------------------------------------------------------------------------------------
# Every line
# ---------------------------------------------------------------------------------------------


@every_family
def test_gradients_by_hand_are_right(name):
    """Against central differences: the reference with itself."""
    case, rng = case_of(name, large=1.0), np.random.default_rng(1)
    r = case.reference
    x, y = r.x.sample(r.sizes[0], rng), r.y.sample(r.sizes[1], rng)
    h = 1e-5
    for rows in (r.upper, r.lower, *r.kinds.values()):
        for J, at in zip(rows.jacobian(x, y), ("x", "y")):
            for i in range(J.shape[1]):
                step = np.zeros(J.shape[1])
                step[i] = h
                ends = [
                    rows.values(x + s * step, y) if at == "x" else rows.values(x, y + s * step)
                    for s in (1, -1)
                ]
                np.testing.assert_allclose((ends[0] - ends[1]) / (2 * h), J[:, i], atol=1e-7)


@every_family
def test_lines_agree_with_the_definition(name):
    rng = np.random.default_rng(seed_of(name))
    for trial in range(24):
        case = case_of(name, seed=trial % 3)
        p = random_point(case, rng)
        certificate, wanted = case.certify(p), case.reference.lines(p, None)
        got = certificate.lines()
        assert set(got) == {*wanted, "lower_gap"} == set(LINES)
        for line, value in wanted.items():
            assert got[line] == pytest.approx(value, abs=TIGHT), line
            assert got[line] >= value - 1e-12 * (1 + value), line
        assert certificate.rho == p["rho"]
        assert certificate.epsilon == max(got.values())
        assert certificate.gap == got["lower_gap"]
        objective = float(case.reference.upper.values(p["x"], p["y"])[0])
        assert certificate.objective == pytest.approx(objective + case.reference.x.value(p["x"]))


@every_family
def test_planted_points_are_certified(name):
    """What is KKT by construction is not refused, also where the definition counts all lines."""
    for seed in range(4):
        case = case_of(name, seed)
        assert case.reference.epsilon(case.planted) <= TIGHT
        assert case.certify(case.planted).epsilon <= 1e-10
