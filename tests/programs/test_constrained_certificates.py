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
from bilevax.certificates.constrained_witnesses import constrained_witnesses
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
        """g*(x); infinite where no y is feasible, or so few that CVXPY cannot tell."""
        try:
            return self.solution(x)[0]
        except (ArithmeticError, cp.SolverError):
            return ind.INF

    def solution(self, x: np.ndarray) -> tuple[float, np.ndarray, Point]:
        """g*(x), a solution of the lower level, and its multipliers, from CVXPY."""
        y = cp.Variable(self.sizes[1])
        term, held = self.y.model(y)
        duals, sizes = {}, {}
        for kind, name in (("constraints", "lam_bar"), ("equalities", "nu_bar")):
            if kind in self.kinds:
                rows = self.kinds[kind]
                # The solver has absolute tolerances.
                sizes[name] = max(np.abs(rows.a).max(), np.abs(rows.A).max()) or 1.0
                models = rows.scaled(1 / sizes[name]).models(x, y)
                duals[name] = [row <= 0 if name == "lam_bar" else row == 0 for row in models]
        own = [row for rows in duals.values() for row in rows]
        least = ind.solve(next(self.lower.models(x, y)) + term, [*held, *own])
        bars = {
            name: np.array([np.ravel(row.dual_value)[0] for row in rows]) / sizes[name]
            for name, rows in duals.items()
        }
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
                float(np.sum(np.abs(p[m] * self.kinds[k].values(x, at))))
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


BOX, WIDE = ind.Interval(-1.0, 1.0), ind.Interval(-1.0, 1.5)


@dataclasses.dataclass(frozen=True)
class Family:
    """A shape of problem: sizes, terms, curvature of the lower level, rows of each constraint."""

    sizes: tuple[int, int] = (2, 3)
    x: ind.Term = BOX
    y: ind.Term = WIDE
    curved: bool = True  # the lower level
    bent: bool = True  # its constraints
    exponential: bool = False
    rows: tuple[int, int, int, int] = (2, 0, 0, 0)  # in the order of KINDS
    trees: bool = False


PARTS = ind.Product(((2, ind.Interval(-1.0, 1.0)), (1, ind.Interval(-2.0, 0.5, ridge=0.3))))
FAMILIES = {  # some share sizes and terms, and so their compiled programs
    "linear": Family(curved=False, bent=False),
    "quadratic": Family(),
    "exponential": Family(exponential=True),
    "upper": Family(rows=(2, 1, 2, 1)),
    "linear with all": Family(curved=False, bent=False, rows=(2, 1, 2, 1)),
    "only equalities": Family(rows=(0, 2, 0, 0)),
    "only upper": Family(rows=(0, 0, 1, 1)),
    "unconstrained": Family(rows=(0, 0, 0, 0)),
    "L1": Family(
        x=ind.Interval(-1.0, 2.0, l1=0.3), y=ind.Interval(-1.0, 1.0, l1=0.4), rows=(2, 1, 0, 0)
    ),
    "trees": Family((3, 3), PARTS, PARTS, rows=(3, 2, 2, 0), trees=True),
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


def packed(rows: Functions, d: np.ndarray) -> np.ndarray:
    """All numbers of some rows side by side: data of one leaf compile much faster than of many."""
    k = rows.b.size
    columns = (rows.b, rows.w, rows.v, rows.t, np.tile(d, (k, 1)), rows.a, rows.A.reshape(k, -1))
    return np.concatenate([c.reshape(k, -1) for c in columns], axis=1)


def values(x: Any, y: Any, rows: jax.Array) -> jax.Array:
    x, y = flat(x), flat(y)
    u = jnp.concatenate([x, y])
    b, w, v, t, rest = *rows[:, :4].T, rows[:, 4:]
    d, a, A = rest[0, : y.size], rest[:, y.size : y.size + u.size], rest[:, y.size + u.size :]
    bent = 0.5 * A @ jnp.outer(u, u).ravel() + a @ u + b
    waves = w * jnp.sum(jnp.exp(y)) + v * jnp.sum(jnp.sin(WAVE * x))
    return bent + waves + t * (jnp.sum(x) * jnp.sum(y + d))


def as_tree(v: Any) -> Any:
    """What constraints of two rows or more return in the family of trees."""
    return {"first": v[0], "rest": (v[1:].reshape(-1, 1),)}


@functools.cache
def functions(trees: bool, rows: tuple[int, ...]) -> dict[str, Callable]:
    """One set of functions for all problems of a shape, which then share a compiled program."""
    shape = as_tree if trees else lambda v: v
    ends = np.cumsum([1, 1, *rows])
    part = lambda data, i: data[int(ends[i] - (1, 1, *rows)[i]) : int(ends[i])]
    made: dict[str, Callable] = {
        kind: lambda x, y, data, i=i: shape(values(x, y, part(data, i)))
        for i, kind in enumerate(KINDS, 2)
    }
    for i, kind in enumerate(("upper", "lower")):
        made[kind] = lambda x, y, data, i=i: values(x, y, part(data, i))[0]
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
    used = [reference.upper, reference.lower, *reference.kinds.values()]
    data = np.concatenate([packed(rows, large * d) for rows in used]).astype(dtype)
    rows = tuple(reference.kinds[k].b.size if k in reference.kinds else 0 for k in KINDS)
    own = functions(trees, rows)
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


# Long: what "linear", "upper" and "trees" have together: some kinds, and terms that are no sets.
LONG = ("only equalities", "only upper", "unconstrained", "L1")
NAMES = [pytest.param(n, marks=pytest.mark.long) if n in LONG else n for n in FAMILIES]
every_family = pytest.mark.parametrize("name", NAMES)


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
        certificate, wanted = case.judge(p), case.reference.lines(p, None)
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
        assert case.judge(case.planted).epsilon <= 1e-10


# ---------------------------------------------------------------------------------------------
# The gap of the lower level
# ---------------------------------------------------------------------------------------------


def feasible_x(case: Case, rng: np.random.Generator) -> tuple[np.ndarray, Any]:
    """An x near the planted one at which the lower level has a solution, and that."""
    r = case.reference
    for size in 0.4 * 0.5 ** np.arange(10):
        x = r.x.project(case.planted["x"] + size * rng.normal(size=r.sizes[0]))
        try:
            return x, r.solution(x)
        except (ArithmeticError, cp.SolverError):
            continue
    raise AssertionError("no x near the planted one has a feasible y")


@every_family
def test_the_lower_gap_is_a_bound(name):
    """For all y and z, feasible or not, and all multipliers: 480 points in all."""
    rng = np.random.default_rng(seed_of(name) + 1)
    useful = 0
    for seed in range(3):
        case = case_of(name, seed)
        x, (least, y, bars) = feasible_x(case, rng)
        for trial in range(16):
            p = random_point(case, rng, x)
            if trial % 4 == 1:
                p |= {"z": y} | bars
            elif trial % 4 == 2:
                share = 10 ** rng.uniform(-4, -1)
                p |= {"y": y, "z": (1 - share) * y + share * p["z"]} | bars
            truth = max(case.reference.lower_value(x, p["y"]) - least, 0.0)
            assert case.judge(p).lower_gap >= truth - TIGHT
            useful += truth > 1e-3
    assert useful > 6


@every_family
def test_the_lower_gap_is_tight_at_solutions(name):
    """z and its multipliers solve the lower level at the planted x, exactly; y is anything."""
    rng = np.random.default_rng(seed_of(name) + 2)
    for seed in range(3):
        case = case_of(name, seed)
        r, planted = case.reference, case.planted
        least = r.lower_value(planted["x"], planted["y"])
        assert least == pytest.approx(r.least(planted["x"]), abs=TIGHT)
        for _ in range(5):
            p = random_point(case, rng, planted["x"]) | {"z": planted["z"]}
            p |= {name: planted[name] for name in ("lam_bar", "nu_bar") if name in planted}
            truth = max(r.lower_value(p["x"], p["y"]) - least, 0.0)
            assert case.judge(p).lower_gap == pytest.approx(truth, abs=1e-9)


@pytest.mark.parametrize("name", ["linear", "linear with all"])
def test_the_lower_gap_of_linear_programs(name):
    """Against HiGHS."""
    rng = np.random.default_rng(seed_of(name) + 3)
    for seed in range(4):
        case = case_of(name, seed)
        x, (by_cvxpy, y, bars) = feasible_x(case, rng)
        least = case.reference.least_by_highs(x)
        assert least == pytest.approx(by_cvxpy, abs=1e-7)
        p = random_point(case, rng, x)
        assert case.judge(p).lower_gap >= case.reference.lower_value(x, p["y"]) - least - 1e-9
        assert case.judge(p | {"y": y, "z": y} | bars).lower_gap <= TIGHT


def test_a_feasible_z_is_not_a_bound():
    """g(x,y) − g(x,z) bounds the gap from below only; at z = y it is zero, and the gap is not."""
    for name in ("quadratic", "upper"):
        case = case_of(name)
        r, p = case.reference, dict(case.planted)
        p |= {"y": r.y.project(p["y"] + 0.5), "z": r.y.project(p["y"] + 0.5)}
        truth = r.lower_value(p["x"], p["y"]) - r.least(p["x"])
        assert truth > 0.05
        assert case.judge(p).lower_gap >= truth - TIGHT


# ---------------------------------------------------------------------------------------------
# No false certificate
# ---------------------------------------------------------------------------------------------


def extended(p: Point) -> Point:
    """In long doubles, so that the truth at a large ρ is not lost to rounding."""
    return {name: np.asarray(v, np.longdouble) for name, v in p.items()}


def true_lines(case: Case, p: Point, least: float) -> dict[str, float]:
    lines = case.reference.lines(extended(p), None)
    gap = case.reference.lower_value(p["x"].astype(np.longdouble), p["y"]) - least
    return {k: float(v) for k, v in lines.items()} | {"lower_gap": max(gap, 0.0)}


def raised(p: Point, rho: float) -> Point:
    """The planted point with a larger ρ: λ grows with it, and it remains KKT."""
    more = max(rho - p["rho"], 0.0)
    moved = p | {"rho": p["rho"] + more}
    for name, bar in (("lam", "lam_bar"), ("nu", "nu_bar")):
        if name in p:
            moved[name] = p[name] + more * p[bar]
    return moved


def perturbed(case: Case, p: Point, rng: np.random.Generator) -> Point:
    """Some blocks, multipliers and ρ moved: freely, within their domains, or off a face."""
    r, size, moved = case.reference, 10 ** rng.uniform(-9, 0), dict(p)
    kind = rng.choice(["free", "inside", "nudge"], p=[0.1, 0.6, 0.3])
    names = [name for name in p if name != "rho"]
    for name in rng.choice(names, rng.integers(1, 4), replace=False):
        v = p[name]
        step = size * rng.normal(size=v.size)
        if name in MULTIPLIERS:
            moved[name] = v + step * np.abs(v).max(initial=0.1)
            if name in SIGNED and rng.random() < 0.9:
                moved[name] = np.maximum(moved[name], 0)
            continue
        term = r.x if name == "x" else r.y
        if kind == "nudge":
            share = 10 ** rng.uniform(-10, -4)
            moved[name] = (1 - share) * v + share * term.middle(v.size)
        else:
            moved[name] = v + step if kind == "free" else term.project(v + step)
    if rng.random() < 0.3:
        moved["rho"] = p["rho"] * np.exp(size * rng.normal())
    return moved


VARIANTS = ({}, {"scale": 1e-4}, {"scale": 1e4}, {"large": 1e8})
PERTURBATIONS = 44  # for each family: 440 in all


@every_family
def test_no_false_certificate(name):
    """bilevax's ε, and each of its lines, is never below the truth for the same witnesses."""
    rng = np.random.default_rng(seed_of(name) + 4)
    claims, known = [], {}
    for trial in range(PERTURBATIONS):
        case = case_of(name, trial % 2, **VARIANTS[trial % 4])
        rho = 10 ** rng.uniform(0, 8) if trial % 3 else 0.0
        p = perturbed(case, raised(case.planted, rho), rng)
        certificate = case.judge(p)
        claims.append(certificate.epsilon)
        if case.reference.outside(p):
            assert certificate.epsilon == math.inf
            continue
        key = (id(case), p["x"].tobytes())
        if key not in known:
            known[key] = case.reference.least(p["x"])
        wanted = true_lines(case, p, known[key])
        for line, value in wanted.items():
            assert certificate.lines()[line] >= value - TIGHT, (line, p["rho"], trial)
        assert certificate.epsilon >= max(wanted.values()) - TIGHT
    # The test has power: some claims are small, and most are not.
    assert 0.05 <= np.mean(np.array(claims) <= 1e-2) <= 0.8


@every_family
def test_the_allowance_for_rounding_is_small(name):
    """At a KKT point nothing but rounding is left, times ρ: the certificate is not idle."""
    for rho in (1e2, 1e5, 1e8):
        case = case_of(name)
        assert case.judge(raised(case.planted, rho)).epsilon <= 1e-12 * rho + 1e-10


# Constraints have no part in this: one family of each pair of domains is short.
DOMAINS = ("linear", "trees")
EACH_DOMAIN = [n if n in DOMAINS else pytest.param(n, marks=pytest.mark.long) for n in FAMILIES]


@pytest.mark.parametrize("name", EACH_DOMAIN)
def test_outside_its_domain_a_point_is_not_certified(name):
    case = case_of(name)
    for block in "xyz":
        term = case.reference.x if block == "x" else case.reference.y
        parts = [(0, term)]
        if isinstance(term, ind.Product):
            sizes = [k for k, _ in term.parts]
            parts = list(zip(np.cumsum([0, *sizes]), [t for _, t in term.parts]))
        for at, part in parts:
            for end, sign in ((part.lower, -1), (part.upper, 1)):
                for far in (1e-12, 1e-6, 1.0):
                    v = case.planted[block].copy()
                    v[at] = end + sign * far
                    assert case.judge(case.planted | {block: v}).epsilon == math.inf
        if name == "linear":
            assert case.certify(case.planted | {block: v}).epsilon == math.inf


@pytest.mark.parametrize("name", ["upper", "trees"])
def test_multipliers_of_the_wrong_sign_certify_nothing(name):
    case = case_of(name)
    for multiplier in SIGNED:
        for i in range(case.planted[multiplier].size):
            for bad in (-1e-300, -1e-12, -1.0):
                v = case.planted[multiplier].copy()
                v[i] = bad
                assert case.judge(case.planted | {multiplier: v}).epsilon == math.inf
    p = case.planted | {m: -0.0 * case.planted[m] for m in SIGNED}
    assert math.isfinite(case.judge(p).epsilon)


@pytest.mark.parametrize("name", ["upper", "trees"])
def test_numbers_that_are_not_finite_certify_nothing(name):
    case = case_of(name)
    for block in case.planted:
        for bad in (math.nan, math.inf, -math.inf):
            v = np.array(case.planted[block], float)
            v.flat[-1] = bad
            p = case.planted | {block: v}
            assert case.judge(p).epsilon == math.inf, block
            assert not case.judge(p).certified(1e300)
            with pytest.raises(ValueError, match=block):
                case.certify(p)
    for rho in (0.0, -1.0):
        assert case.judge(case.planted | {"rho": np.float64(rho)}).epsilon == math.inf
        with pytest.raises(ValueError, match="rho"):
            case.certify(case.planted | {"rho": np.float64(rho)})


def test_no_line_excuses_another():
    for line in LINES:
        for value in (3.0, math.inf, math.nan):
            plain = (f for f in dataclasses.fields(bx.ConstrainedKKTCertificate) if not f.kw_only)
            fields = {f.name: 0.0 for f in plain}
            certificate = bx.ConstrainedKKTCertificate(**fields | {line: value})
            assert certificate.epsilon == (math.inf if math.isnan(value) else value)
            assert not certificate.certified(1.0)
            assert set(certificate.lines()) == set(LINES)


def test_witnesses_must_fit_the_problem():
    """None left out, none too many, each of the shape of its constraint, and as many of each."""
    case = case_of("upper")
    point = case.point(case.planted)
    for name in MULTIPLIERS:
        for value in (None, jnp.zeros(5), jnp.zeros(()), jnp.zeros((1, 2))):
            changed = dataclasses.replace(point.multipliers, **{name: value})
            with pytest.raises(ValueError, match=name):
                bx.certify(case.problem, point.replace(multipliers=changed))
    with pytest.raises(ValueError, match=r"\.z "):
        bx.certify(case.problem, point.replace(z=jnp.zeros(1)))
    plain = case_of("unconstrained")
    extra = bx.Multipliers(lam=jnp.zeros(2))
    with pytest.raises(ValueError, match="lam"):
        bx.certify(plain.problem, plain.point(plain.planted).replace(multipliers=extra))


# ---------------------------------------------------------------------------------------------
# Points without witnesses
# ---------------------------------------------------------------------------------------------


def rows_of(*rows: tuple[dict[str, float], float]) -> Functions:
    """Functions of (x, y1, y2) from monomials: {"x": 1.0, "xy": …} and a constant."""
    order = {"x": 0, "y": 1, "w": 2}  # w is the second entry of y
    k = len(rows)
    A, a, b = np.zeros((k, 3, 3)), np.zeros((k, 3)), np.zeros(k)
    for row, (monomials, constant) in enumerate(rows):
        b[row] = constant
        for monomial, factor in monomials.items():
            where = [order[letter] for letter in monomial]
            if len(where) == 1:
                a[row, where[0]] += factor
            else:
                A[row, where[0], where[1]] += factor
                A[row, where[1], where[0]] += factor
    return Functions(1, A, a, b, np.zeros(k), np.zeros(k), np.zeros(k))


@dataclasses.dataclass(frozen=True)
class Known:
    """A problem whose bilevel solution is known, with points that are none: (x, y1, y2) each."""

    upper: dict[str, float]
    lower: dict[str, float]
    constraints: tuple  # two of them
    equality: tuple
    upper_constraint: tuple
    solution: tuple[float, float, float]
    moved: tuple[float, float, float]  # feasible and lower-optimal, not stationary
    relaxed: tuple[float, float, float] | None  # stationary without the lower level
    infeasible: tuple[float, float, float] | None


NEVER, VOID = ({}, -1.0), ({}, 0.0)
HALF = math.sqrt(0.5)
KNOWN = {
    # y = min(x + 1, 5 − x), to be made large
    "linear": Known(
        {"y": -1.0},
        {"y": -1.0},
        (({"y": 1.0, "x": -1.0}, -1.0), ({"y": 1.0, "x": 1.0}, -5.0)),
        ({"w": 1.0}, 0.0),
        NEVER,
        (2.0, 3.0, 0.0),
        (1.0, 2.0, 0.0),
        None,
        (1.0, 3.0, 0.0),
    ),
    # y = min(2, x) and w = x; f = ½(x − ½)² + ½(y + 1)² + ½(w − ½)²
    "projection": Known(
        {"xx": 0.5, "x": -0.5, "yy": 0.5, "y": 1.0, "ww": 0.5, "w": -0.5},
        {"yy": 0.5, "y": -2.0},
        (({"y": 1.0, "x": -1.0}, 0.0), NEVER),
        ({"w": 1.0, "x": -1.0}, 0.0),
        NEVER,
        (0.0, 0.0, 0.0),
        (1.0, 1.0, 1.0),
        (0.5, -1.0, 0.5),
        (0.0, 1.0, 0.0),
    ),
    # y = w = x/2; f = ½(x − 2)² + y + w
    "equality": Known(
        {"xx": 0.5, "x": -2.0, "y": 1.0, "w": 1.0},
        {"yy": 0.5, "ww": 0.5},
        (NEVER, NEVER),
        ({"y": 1.0, "w": 1.0, "x": -1.0}, 0.0),
        NEVER,
        (1.0, 0.5, 0.5),
        (2.0, 1.0, 1.0),
        (1.0, 0.9, 0.1),
        (1.0, 1.0, 0.5),
    ),
    # y = x, to be made large under x + y ≤ 2
    "upper constraint": Known(
        {"x": -1.0, "y": -1.0},
        {"y": -1.0},
        (({"y": 1.0, "x": -1.0}, 0.0), NEVER),
        ({"w": 1.0}, 0.0),
        ({"x": 1.0, "y": 1.0}, -2.0),
        (1.0, 1.0, 0.0),
        (0.5, 0.5, 0.0),
        (1.5, 0.5, 0.0),
        (1.5, 1.5, 0.0),
    ),
    # (y, w) on the unit circle towards (1, x); f = ½(x − 1)² + ½y² + ½w²
    "quadratic constraint": Known(
        {"xx": 0.5, "x": -1.0, "yy": 0.5, "ww": 0.5},
        {"y": -1.0, "xw": -1.0},
        (({"yy": 0.5, "ww": 0.5}, -0.5), NEVER),
        VOID,
        NEVER,
        (1.0, HALF, HALF),
        (0.0, 1.0, 0.0),
        (1.0, 0.0, 0.0),
        (1.0, 1.0, 1.0),
    ),
    # y = x and w = 0, nothing active; f = ½(x − 1)² + ½(y − 1)²
    "inactive": Known(
        {"xx": 0.5, "x": -1.0, "yy": 0.5, "y": -1.0},
        {"yy": 0.5, "xy": -1.0, "ww": 0.5},
        (({"y": 1.0}, -5.0), NEVER),
        VOID,
        NEVER,
        (1.0, 1.0, 0.0),
        (0.0, 0.0, 0.0),
        (1.0, 1.0, 1.0),
        (1.0, 5.5, 0.0),
    ),
}
every_known = pytest.mark.parametrize("name", list(KNOWN))


@functools.cache
def known_case(name: str, dtype: Any = np.float64) -> Case:
    known = KNOWN[name]
    kinds = {
        "constraints": rows_of(*known.constraints),
        "equalities": rows_of(known.equality),
        "upper_constraints": rows_of(known.upper_constraint),
    }
    upper, lower = rows_of((known.upper, 0.0)), rows_of((known.lower, 0.0))
    box = ind.Interval(-4.0, 4.0), ind.Interval(-6.0, 6.0)
    return case_from(Reference((1, 2), *box, upper, lower, kinds), {}, 0.0, False, dtype)


def bare(at: tuple[float, float, float]) -> Point:
    return {"x": np.array(at[:1]), "y": np.array(at[1:])}


def witnessed(case: Case, p: Point) -> tuple[bx.ConstrainedKKTCertificate, Point]:
    """What `certify` says of the witnesses that it finds, and these."""
    found = constrained_witnesses(case.problem, case.point(p, witnesses=False))
    certificate = bx.certify(case.problem, found)
    assert isinstance(certificate, bx.ConstrainedKKTCertificate)
    return certificate, case.flat(found)


@pytest.mark.parametrize("name", ["linear", "inactive"])
def test_the_witnesses_found_repeat_the_certificate(name):
    case = known_case(name)
    for at in (KNOWN[name].solution, KNOWN[name].moved):
        first = case.certify(bare(at), witnesses=False).as_dict()
        again = witnessed(case, bare(at))[0].as_dict()
        assert again == pytest.approx(first, rel=1e-12, abs=1e-300)


def assert_true(case: Case, certificate: bx.ConstrainedKKTCertificate, p: Point) -> None:
    """No line is below the truth for these witnesses."""
    assert not case.reference.outside(p)
    for line, value in true_lines(case, p, case.reference.least(p["x"])).items():
        assert certificate.lines()[line] >= value - TIGHT, line


@every_known
def test_solutions_are_certified_without_witnesses(name):
    case = known_case(name)
    certificate, found = witnessed(case, bare(KNOWN[name].solution))
    assert certificate.epsilon <= TIGHT
    assert_true(case, certificate, found)


# Short: every way for a linear and a quadratic constraint, one with nothing active; the test after
# this one moves along the others, too.
EVERY_WAY = ("upper constraint", "quadratic constraint")
NO_SOLUTIONS = [
    (name, kind)
    if name in EVERY_WAY or (name, kind) == ("inactive", "moved")
    else pytest.param(name, kind, marks=pytest.mark.long)
    for name, known in KNOWN.items()
    for kind in ("moved", "relaxed", "infeasible")
    if getattr(known, kind) is not None
]


@pytest.mark.parametrize(("name", "kind"), NO_SOLUTIONS)
def test_what_is_no_solution_is_not_certified(name, kind):
    case = known_case(name)
    p, r = bare(getattr(KNOWN[name], kind)), case.reference
    c, e, G = (r.kinds[k].values(p["x"], p["y"]) for k in list(KINDS)[:3])
    feasible = max(*c, *np.abs(e), *G) <= 1e-9
    gap = r.lower_value(p["x"], p["y"]) - r.least(p["x"])
    assert feasible == (kind != "infeasible")  # the points are what they are said to be
    assert kind == "infeasible" or (gap <= TIGHT) == (kind == "moved")
    certificate, found = witnessed(case, p)
    assert certificate.epsilon >= 1e-2
    assert_true(case, certificate, found)
    for rho in (1e6,) if name == "quadratic constraint" else (1e-6, 1e6):  # each seeks for long
        assert bx.certify(case.problem, case.point(p, witnesses=False), rho=rho).epsilon >= 1e-2


@pytest.mark.parametrize("name", ["linear", "projection", "equality", "upper constraint"])
def test_along_the_lower_solutions_only_the_bilevel_one_is_certified(name):
    """At (x, y(x)) for a grid of x around the solution."""
    case, known = known_case(name), KNOWN[name]
    start, end = np.array(known.solution), np.array(known.moved)
    for share in (0.02, 0.3):
        at = start + share * (end - start)
        p = bare(tuple(at))
        gap = case.reference.lower_value(p["x"], p["y"]) - case.reference.least(p["x"])
        assert gap <= TIGHT
        assert case.certify(p, witnesses=False).epsilon >= 5e-3


# Long: constants that cancel, which the test for rounding below has in sixty problems.
SEARCHED = [*VARIANTS[:3], pytest.param(VARIANTS[3], marks=pytest.mark.long)]
SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in (1, 2))]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    # Long: a known problem above has constraints of the upper level, too.
    "name",
    [
        "linear",
        "quadratic",
        pytest.param("upper", marks=pytest.mark.long),
        pytest.param("linear with all", marks=pytest.mark.long),
    ],
)
def test_planted_points_are_certified_without_witnesses(name, seed):
    case = case_of(name, seed)
    certificate, found = witnessed(case, case.planted)
    assert certificate.epsilon <= TIGHT
    assert_true(case, certificate, found)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", ["quadratic", pytest.param("upper", marks=pytest.mark.long)])
@pytest.mark.parametrize("variant", SEARCHED, ids=str)
def test_no_false_certificate_without_witnesses(variant, name, seed):
    """The search may find no ρ and λ with which rounding hides what is left."""
    rng, case = np.random.default_rng(seed_of(name) + 5 + seed), case_of(name, seed, **variant)
    size, r = 10.0 ** -rng.integers(1, 9), case.reference
    p = {n: case.planted[n] + size * rng.normal(size=case.planted[n].size) for n in "xy"}
    p = {"x": r.x.project(p["x"]), "y": r.y.project(p["y"])}
    assert_true(case, *witnessed(case, p))


def stiff_upper(x, y, data):
    return jnp.sum(0.5 * (x - data["a"]) ** 2)


def stiff_lower(x, y, data):
    coupling = jnp.sum(data["c"] * y + data["d"])
    return data["h"] * (0.5 * jnp.sum(y**2) - jnp.sum(x) * coupling)


def test_rounding_is_not_magnified_into_a_certificate():
    """The search for ρ must not find the one with which rounding errors cancel a gradient.

    As for problems without constraints: f = ½(x − a)² and g = h(½‖y‖² − x·Σ(c·y + d)) with Σ d = 0,
    where ε ≥ |x − a|/(1 + 2‖c‖) whatever the witness, as lines of the definition add up to x − a.
    """
    box, false = terms.Box(-4.0, 4.0), []
    rng = np.random.default_rng(0)
    for trial in range(60):
        steep = trial % 2
        c = rng.uniform(1, 2, 3) * ([1, 1, 1e-3] if steep else 1)
        far = np.array([0, 0, 1e-14]) if steep else 1e-9
        a, x = rng.uniform(-1, 1), rng.choice([0.5, 1.0])
        d = 0.0 if steep else 1e8
        data = {"h": 1e4 if steep else 1.0, "c": c, "a": a, "d": d * np.array([1.0, -1.0, 0.0])}
        problem = bx.ConstrainedBilevelProblem(stiff_upper, stiff_lower, x=box, y=box, data=data)
        y = c * x * (1 + far * rng.normal(size=3))
        certificate = bx.certify(problem, bx.Point(x=jnp.full(1, x), y=jnp.asarray(y)))
        bound = abs(x - a) / (1 + 2 * float(np.linalg.norm(c)))
        if certificate.epsilon < bound - TIGHT:
            false.append((trial, certificate.epsilon, certificate.rho, bound))
    assert not false


@pytest.mark.long  # test_constrained.py asks the same of another problem
def test_the_point_of_a_solution_repeats_its_certificate():
    instance = library.bilevel_linear(3, 3, 2, 0)
    solution = bx.solve(instance.problem, instance.start, tolerance=1e-3)
    assert solution.certified
    again = bx.certify(instance.problem, solution.point)
    assert again.as_dict() == pytest.approx(solution.certificate.as_dict(), rel=1e-12, abs=1e-15)


# ---------------------------------------------------------------------------------------------
# Single precision
# ---------------------------------------------------------------------------------------------


def rounded(case: Case) -> Case:
    """The problem with the numbers that single precision has, for both sides."""
    r = case.reference
    single = lambda v: np.asarray(v, np.float32).astype(np.float64)
    fields = ("A", "a", "b", "w", "v", "t")
    both = lambda rows: dataclasses.replace(rows, **{n: single(getattr(rows, n)) for n in fields})
    kinds = {kind: both(rows) for kind, rows in r.kinds.items()}
    reference = dataclasses.replace(r, upper=both(r.upper), lower=both(r.lower), kinds=kinds)
    p = {name: single(v) for name, v in case.planted.items()}
    return case_from(reference, p, 0.0, case.trees, np.float32)


@pytest.mark.parametrize(
    "name", ["upper", *(pytest.param(n, marks=pytest.mark.long) for n in ("unconstrained", "L1"))]
)
def test_float32(name):
    """No line is below the truth, nor far above it."""
    rng = np.random.default_rng(seed_of(name) + 6)
    case = rounded(case_of(name))
    single = lambda p: {n: np.asarray(v, np.float32).astype(np.float64) for n, v in p.items()}
    for trial in range(12):
        p = single(perturbed(case, case.planted, rng) if trial % 2 else random_point(case, rng))
        certificate = case.judge(p)
        if case.reference.outside(p):
            assert certificate.epsilon == math.inf
            continue
        wanted = case.reference.lines(p, None)
        for line, value in wanted.items():
            got = certificate.lines()[line]
            assert got >= value * (1 - 1e-6) - 1e-7, line
            assert got == pytest.approx(value, rel=1e-4, abs=1e-3), line


@pytest.mark.long
def test_float32_finds_witnesses():
    for name in ("linear", "equality", "inactive"):
        case = known_case(name, np.float32)
        certificate, found = witnessed(case, bare(KNOWN[name].solution))
        assert certificate.epsilon <= 1e-2
        for line, value in case.reference.lines(found, None).items():
            assert certificate.lines()[line] >= value * (1 - 1e-6) - 1e-7, line
        assert case.certify(bare(KNOWN[name].moved), witnesses=False).epsilon >= 1e-2
