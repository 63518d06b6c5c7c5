"""Random bilevel problems by law, for benchmarks/exact_arithmetic.py: their functions as users
write them in JAX, their data, and points with all witnesses.

A problem differs from another one of its shape in its data, its terms' parameters and its point,
which are all arrays: so a few programs serve thousands of problems.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import bilevax as bx
import exact_reference as ref
from bilevax import terms
from bilevax.problems.point import Multipliers
from exact_reference import LONG, Blocks, Domain, Vector

# ---------------------------------------------------------------------------------------------
# The functions, in JAX
# ---------------------------------------------------------------------------------------------


def _centred(x: Any, y: Any, d: Any) -> Any:
    return d["v"] @ (y - d["m"]) + d["u"] @ (y - d["m"]) ** 2 / 2


def _residuals(x: Any, y: Any, d: Any) -> Any:
    return d["A"] @ y + d["E"] @ x - d["b"]


LOSSES: dict[str, Callable[..., Any]] = {
    "quadratic": lambda x, y, d: y @ (d["Q"] @ y) / 2,
    "residuals": lambda x, y, d: jnp.sum(_residuals(x, y, d) ** 2),
    "expanded": lambda x, y, d: y @ d["Q"] @ y - 2 * d["q"] @ y + d["c"],
    "centred": _centred,
    "softplus": lambda x, y, d: jnp.sum(jax.nn.softplus(_residuals(x, y, d))),
    "logsumexp": lambda x, y, d: jax.nn.logsumexp(_residuals(x, y, d)),
    "pseudo-Huber": lambda x, y, d: jnp.sum(jnp.sqrt(1 + _residuals(x, y, d) ** 2) - 1),
}


def _lower(loss: Callable[..., Any]) -> Callable[..., Any]:
    def lower(x1: Any, y1: Any, y2: Any, d: Any) -> Any:
        value = loss(x1, y1, d) + d["p1"] @ y1 + x1 @ d["C"] @ y1
        if y2 is None:
            return value
        saddle = y1 @ d["B"] @ y2 + x1 @ d["D"] @ y2 + d["p2"] @ y2
        return value + saddle - jnp.sum((d["F"] @ y2) ** 2) / 2

    return lower


def _lower_alone(loss: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, y, d: loss(x, y, d) + d["p1"] @ y + x @ d["C"] @ y


LOWER = {name: _lower(loss) for name, loss in LOSSES.items()}
LOWER_ALONE = {name: _lower_alone(loss) for name, loss in LOSSES.items()}


def upper(x1: Any, x2: Any, y1: Any, y2: Any, d: Any) -> Any:
    value = upper_alone(x1, y1, d)
    if x2 is None:
        return value
    coupled = x2 @ (d["T"] @ x1 + d["U"] @ y1) - jnp.sum(d["w"] * x2**2) / 2 + d["s2"] @ x2
    return value + coupled + jnp.sum(y2**2) / 2 + d["t2"] @ y2


def upper_alone(x: Any, y: Any, d: Any) -> Any:
    quadratic = x @ d["S"] @ x / 2 + jnp.sum((y - d["W"].T @ x) ** 2) / 2
    return quadratic + d["s1"] @ x + d["t1"] @ y


def constraints(x: Any, y: Any, d: Any) -> Any:
    return d["K"] @ y + d["M"] @ x - d["k"], jnp.sum((d["N"] @ y) ** 2) / 2 - d["n"]


def equalities(x: Any, y: Any, d: Any) -> Any:
    return d["H"] @ y + d["J"] @ x - d["h"]


def upper_constraints(x: Any, y: Any, d: Any) -> Any:
    return d["O"] @ x + d["P"] @ y - d["o"]


# ---------------------------------------------------------------------------------------------
# Problems
# ---------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Shape:
    x1: int
    y1: int
    rows: int  # of A
    x2: int = 0
    y2: int = 0
    constraints: int = 0  # affine inequalities, and a round one
    equalities: int = 0
    upper: int = 0


# Of each law: what its blocks lie in, and its shapes. A loss has two of the shapes.
KINDS = {"box": "box", "simplex": "simplex", "ball": "ball", "constrained": "mixed"}
SHAPES = {
    "box": (Shape(2, 3, 5), Shape(12, 12, 40), Shape(1, 1, 1), Shape(5, 8, 300)),
    "simplex": (Shape(3, 4, 6, 5, 3), Shape(12, 10, 12, 7, 11), Shape(1, 2, 3, 1, 2)),
    "ball": (Shape(2, 3, 5, 4, 2), Shape(9, 12, 20, 12, 8), Shape(1, 1, 2, 1, 1)),
    "constrained": (
        Shape(2, 3, 5, constraints=2, equalities=1, upper=1),
        Shape(6, 12, 15, constraints=8, equalities=3, upper=4),
    ),
}


@dataclasses.dataclass(frozen=True)
class Drawn:
    """A problem with a point: for the library, and as plain numbers for the reference."""

    law: str
    loss: str
    how: str  # how the point was made
    problem: Any
    point: bx.Point
    domains: dict[str, Domain]  # in the working precision's numbers
    numbers: Blocks  # the point's blocks and witnesses
    data: Blocks

    @property
    def constrained(self) -> bool:
        return "x" in self.numbers

    def lines(self, kind: type, *, sums: bool) -> dict[str, Any]:
        """Every line, in arithmetic of that kind."""
        p, d = ref.exact(self.numbers, kind), ref.exact(self.data, kind)
        domains = {name: domain.to(kind) for name, domain in self.domains.items()}
        if self.constrained:
            return ref.constrained_lines(self.loss, domains, p, d, sums=sums)
        return ref.bilevel_lines(self.loss, domains, p, d)

    def parts(self) -> Blocks:
        """The vectors and values that the lines are made of, in 80 bits."""
        p, d = ref.exact(self.numbers), ref.exact(self.data)
        made = ref.constrained_parts if self.constrained else ref.bilevel_parts
        return made(self.loss, p, d)

    def gap_below(self, kind: type) -> Any:
        p, d = ref.exact(self.numbers, kind), ref.exact(self.data, kind)
        domains = {name: domain.to(kind) for name, domain in self.domains.items()}
        below = ref.constrained_gap_below if self.constrained else ref.gap_below
        return below(self.loss, domains, p, d)


class Draw:
    """Draws problems of one law, one loss and one shape, in one precision."""

    def __init__(
        self, law: str, loss: str, shape: Shape, dtype: Any, rng: np.random.Generator, scaled: bool
    ):
        self.law, self.loss, self.shape, self.rng = law, loss, shape, rng
        self.dtype, self.eps = dtype, float(np.finfo(dtype).eps)
        # Badly scaled: powers of ten up to this one, for rows, columns, values and variables.
        self.powers = float(rng.choice([2, 4, 8])) if scaled else 0.0
        # Whether the lower level is its loss alone, whose values are not hidden by other terms.
        self.bare = loss == "centred" or rng.random() < 0.25
        # The linear part by which z1 is made a best response.
        self.linear = "v" if loss == "centred" else "p1"

    def round(self, value: Any) -> np.ndarray:
        """The nearest numbers of the working precision."""
        return np.asarray(value).astype(self.dtype)

    def powers_of_ten(self, *size: int) -> Vector:
        return 10.0 ** self.rng.uniform(-self.powers, self.powers, size)

    def matrix(self, rows: int, columns: int) -> Vector:
        made = self.rng.normal(size=(rows, columns))
        if self.powers:
            made = made * self.powers_of_ten(rows)[:, None] * self.powers_of_ten(columns)
        return self.round(made)

    def vector(self, size: int) -> Vector:
        return self.round(self.rng.normal(size=size) * self.powers_of_ten(size))

    # Domains and points in them.

    def domain(self, kind: str, n: int) -> Domain:
        rng = self.rng
        # Some domains lie far from the origin, as those of features or prices do.
        far = float(rng.choice([0, 0, 0, 0, 1e3, 1e5]))
        if kind == "box":
            middle = rng.normal(size=n) + far * rng.choice([-1, 1], n)
            half = rng.uniform(0.1, 2, n)
            scale = self.powers_of_ten(n)
            low, high = self.round((middle - half) * scale), self.round((middle + half) * scale)
            return ref.Box(low, np.maximum(low, high))
        if kind == "ball":
            radius = rng.uniform(0.1, 3)
            far = far if self.eps * far < 1e-5 * radius else 0.0  # where floats make out a sphere
            center = rng.normal(size=n) * rng.choice([0, 1]) + far * rng.choice([-1, 1], n)
            return ref.Ball(self.round(center), self.round(radius), self.eps)
        total = float(rng.choice([1.0, 1.0, rng.uniform(0.1, 10)]))
        caps = np.full(n, total)
        if kind == "capped":
            least = total / n
            caps = np.full(n, least * float(rng.choice([1, 1.5, 2, n])))
            caps = np.minimum(caps * (1 + 1e-6), total)
        return ref.Simplex(self.round(caps), self.round(total))

    def term(self, domain: Domain) -> terms.Term:
        # The library keeps parameters in float64, where the numbers of float32 are themselves.
        plain = lambda value: np.asarray(value, float)
        if isinstance(domain, ref.Box):
            return terms.Box(plain(domain.lower), plain(domain.upper))
        if isinstance(domain, ref.Ball):
            return terms.L2Ball(plain(domain.radius), plain(domain.center))
        return terms.CappedSimplex(plain(domain.caps), plain(domain.total))

    def inside(self, domain: Domain, v: Vector) -> Vector:
        """The projection of v, rounded."""
        long = domain.to(LONG)
        return self.round(long.project(np.asarray(v, LONG)))

    def sample(self, domain: Domain, n: int) -> Vector:
        """A random point, with entries at bounds or on the sphere as often as not."""
        rng = self.rng
        if isinstance(domain, ref.Box):
            low, high = domain.lower.astype(LONG), domain.upper.astype(LONG)
            return self.inside(domain, low + (high - low) * rng.uniform(-0.3, 1.3, n))
        if isinstance(domain, ref.Ball):
            direction = rng.normal(size=n)
            direction /= np.linalg.norm(direction) or 1.0
            reach = float(rng.choice([2.0, rng.uniform(0, 0.9)]))
            return self.inside(domain, domain.center + reach * float(domain.radius) * direction)
        spread = float(domain.total) * float(rng.choice([0.1, 1.0, 10.0]))
        return self.inside(domain, rng.normal(size=n) * spread)

    def target(self, domain: Domain, x: Vector, size: Any) -> Vector:
        """A random −v with v in the normal cone at x: a gradient at which x is stationary."""
        rng, n = self.rng, len(x)
        push = np.abs(rng.normal(size=n)) * rng.choice([0, 1], n) * float(size)
        if isinstance(domain, ref.Ball):
            out = x.astype(LONG) - domain.center
            if not domain.to(LONG).on_sphere(x.astype(LONG)):
                return np.zeros(n, LONG)
            return -push[0] * out / ref.norm(out)
        if isinstance(domain, ref.Box):
            low, high, level = domain.lower, domain.upper, 0.0
        else:
            low, high, level = 0, domain.caps, rng.normal() * float(size)
        return level + np.where(x <= low, push, 0) - np.where(x >= high, push, 0)

    # Data.

    def losses_data(self, x1: Vector, z1: Vector) -> Blocks:
        """The data of the loss, with residuals of moderate size at (x1, z1)."""
        rng, rows = self.rng, self.shape.rows
        if self.loss == "centred":
            m, v = self.round(z1 + rng.normal(size=len(z1))), self.vector(len(z1))
            if len(v) > 1 and rng.random() < 0.5:  # what vᵀm is the sum of cancels
                v = self.round(v - m * (v @ m / (m @ m)))
            curved = np.abs(self.vector(len(z1))) * rng.choice([0, 1])
            return {"m": m, "v": v, "u": self.round(curved)}
        A, E = self.matrix(rows, self.shape.y1), self.matrix(rows, self.shape.x1)
        # Features with a large mean, as years, prices or postcodes have.
        mean = float(rng.choice([0, 0, 1e2, 1e5])) if not self.powers else 0.0
        A = self.round(A + mean)
        if self.loss in ("quadratic", "expanded"):
            tall = A.astype(float)
            Q = tall.T @ tall
            Q = Q + np.diag(np.diag(Q)) * 256 * len(Q) * self.eps  # convex in spite of rounding
            d: Blocks = {"Q": self.round(Q)}
            if self.loss == "quadratic":
                return d
            # ‖A·y − b‖² with b near A·z1: what remains of large terms is small.
            b = tall @ z1.astype(float) + rng.normal(size=rows) * 10.0 ** rng.uniform(-6, 0)
            return d | {"q": self.round(tall.T @ b), "c": self.round(b @ b)}
        there = A.astype(LONG) @ z1 + E.astype(LONG) @ x1
        small = rng.normal(size=rows) * 10.0 ** rng.uniform(-6, 1)
        return {"A": A, "E": E, "b": self.round(there + small)}

    def upper_data(self) -> Blocks:
        s = self.shape
        d = {
            "S": self.matrix(s.x1, s.x1),
            "W": self.matrix(s.x1, s.y1),
            "s1": self.vector(s.x1),
            "t1": self.vector(s.y1),
        }
        if s.x2:
            d |= {"T": self.matrix(s.x2, s.x1), "U": self.matrix(s.x2, s.y1)}
            d |= {"w": np.abs(self.vector(s.x2)), "s2": self.vector(s.x2), "t2": self.vector(s.y2)}
        return d

    def lower_data(self, x1: Vector, z1: Vector) -> Blocks:
        s = self.shape
        d = self.losses_data(x1, z1) | {"p1": self.vector(s.y1), "C": self.matrix(s.x1, s.y1)}
        if s.y2:
            d |= {"B": self.matrix(s.y1, s.y2), "D": self.matrix(s.x1, s.y2)}
            d |= {"F": self.matrix(s.y2, s.y2), "p2": self.vector(s.y2)}
        if self.bare:
            d |= {name: 0 * d[name] for name in ("p1", "C", "B", "D", "p2") if name in d}
        return d

    def near(self, domain: Domain, x: Vector, how: str, rho: float) -> Vector:
        """x itself, or a point near it as a solver would have it, or any other."""
        far = {"same": 0.0, "1/rho": 1 / rho, "near": 10.0 ** self.rng.uniform(-14, -1)}
        if how == "other":
            return self.sample(domain, len(x))
        if far[how] == 0:
            return x
        step = far[how] * (1e-30 + np.abs(x)) * self.rng.normal(size=len(x))
        return self.inside(domain, x.astype(LONG) + step)

    def penalty(self) -> np.ndarray:
        return self.round(10.0 ** self.rng.uniform(-2, 6))

    @property
    def plants_below(self) -> bool:
        return not self.bare or self.loss == "centred"

    def plant(self, d: Blocks, name: str, wanted: Any, found: Any) -> None:
        """Shift a linear part so that a gradient that is `found` is `wanted`, but for rounding."""
        d[name] = self.round(d[name].astype(LONG) + (wanted - found))

    # Whole problems.

    def bilevel(self, number: int) -> Drawn:
        s, rng, rho = self.shape, self.rng, self.penalty()
        kind = KINDS[self.law]
        sizes = {"x1": s.x1, "y1": s.y1} | ({"x2": s.x2, "y2": s.y2} if s.x2 else {})
        kinds = {n: "capped" if kind == "simplex" and n == "x2" else kind for n in sizes}
        if kind == "simplex":
            kinds["x1"] = "box"
        domains = {name: self.domain(kinds[name], n) for name, n in sizes.items()}
        p: Blocks = {name: self.sample(domains[name], n) for name, n in sizes.items()}
        how = "random" if number % 2 else str(rng.choice(["same", "1/rho", "near", "other"]))
        apart = "other" if how == "random" else how
        p["z1"] = self.near(domains["y1"], p["y1"], apart, float(rho))
        if s.y2:
            p["z2"] = self.near(domains["y2"], p["y2"], apart, float(rho))
        p = {"x2": None, "y2": None, "z2": None} | p | {"rho": rho}
        d = self.upper_data() | self.lower_data(p["x1"], p["z1"])
        if how != "random":
            self.plant_bilevel(domains, p, d)
            if rng.random() < 0.25:  # near a solution, not at it
                moved = str(rng.choice([name for name in ("x1", "y1", "z1") if name in p]))
                p[moved] = self.near(
                    domains[ref.DOMAIN_OF.get(moved, moved)], p[moved], "near", float(rho)
                )
        blocks = {name: jnp.asarray(value) for name, value in p.items() if value is not None}
        made = {name: self.term(domain) for name, domain in domains.items()}
        data = {name: jnp.asarray(value) for name, value in d.items()}
        problem = bx.BilevelProblem(upper, LOWER[self.loss], data=data, **made)
        return Drawn(self.law, self.loss, how, problem, bx.Point(**blocks), domains, p, d)

    def plant_bilevel(self, domains: dict[str, Domain], p: Blocks, d: Blocks) -> None:
        """Make the linear parts such that all distances are zero but for rounding."""

        def parts() -> Blocks:
            return ref.bilevel_parts(self.loss, ref.exact(p), ref.exact(d))

        def wanted(name: str, size: Any = 1.0) -> Vector:
            return self.target(domains[ref.DOMAIN_OF.get(name, name)], p[name], size)

        before = parts()
        if self.plants_below:
            self.plant(d, self.linear, wanted("z1"), before["z1"])
        if "z2" in before:
            # `z2` is −∇f~, so that the sign of what p2 adds turns.
            self.plant(d, "p2", before["z2"], wanted("z2"))
        after = parts()
        for name, linear in (("x1", "s1"), ("y1", "t1"), ("y2", "t2")):
            if name in after:
                size = 1.0 if name == "x1" else float(p["rho"])
                self.plant(d, linear, wanted(name, size), after[name])
        if "x2" in after:
            self.plant(d, "s2", after["x2"], wanted("x2"))

    def with_constraints(self, number: int) -> Drawn:
        s, rng, rho = self.shape, self.rng, self.penalty()
        kind = "box" if s.y1 < 5 else "ball"
        domains = {"x": self.domain("box", s.x1), "y": self.domain(kind, s.y1)}
        x, z = self.sample(domains["x"], s.x1), self.sample(domains["y"], s.y1)
        how = "random" if number % 2 else str(rng.choice(["same", "1/rho", "near", "other"]))
        y = self.near(domains["y"], z, "other" if how == "random" else how, float(rho))
        d = self.upper_data() | self.lower_data(x, z)
        mean = float(rng.choice([0, 0, 1e2, 1e5]))
        for name, rows, columns in (
            ("K", s.constraints, s.y1),
            ("M", s.constraints, s.x1),
            ("H", s.equalities, s.y1),
            ("J", s.equalities, s.x1),
            ("O", s.upper, s.x1),
            ("P", s.upper, s.y1),
            ("N", s.y1, s.y1),
        ):
            d[name] = self.round(self.matrix(rows, columns) + mean * (name in "KHP"))
        d |= {"k": self.vector(s.constraints), "h": self.vector(s.equalities)}
        d |= {"o": self.vector(s.upper), "n": self.round(rng.uniform(0, 10))}
        active, active_above = rng.random(s.constraints + 1) < 0.5, rng.random(s.upper) < 0.5
        if how == "random":
            active, active_above = active | True, active_above | True
        else:  # active constraints are zero up to rounding, the others fulfilled
            slack = lambda on: np.where(on, 0, rng.uniform(0, 1, len(on)))
            long = ref.exact(d)
            c, e, _ = ref.constraints(x.astype(LONG), z.astype(LONG), long)
            _, _, G = ref.constraints(x.astype(LONG), y.astype(LONG), long)
            room = slack(active)
            self.plant(d, "k", c[:-1] + room[:-1], 0)
            d["n"] = self.round(long["n"] + c[-1] + room[-1])
            self.plant(d, "h", e, 0)
            self.plant(d, "o", G + slack(active_above), 0)
        drawn = lambda on: np.where(on, np.abs(rng.normal(size=len(on))), 0)
        lam_bar, nu_bar = self.round(drawn(active)), self.vector(s.equalities)
        near = 1 + float(rng.choice([0, 1e-3, 1])) * rng.uniform(-1, 1)
        p: Blocks = {
            **{"x": x, "y": y, "z": z, "rho": rho, "lam_bar": lam_bar, "nu_bar": nu_bar},
            "lam": self.round(lam_bar * float(rho) * near),
            "nu": self.round(nu_bar * float(rho) * near),
            "upper_lam": self.round(drawn(active_above)),
        }
        if how != "random":
            parts = lambda: ref.constrained_parts(self.loss, ref.exact(p), ref.exact(d))
            if self.plants_below:
                self.plant(d, self.linear, self.target(domains["y"], z, 1.0), parts()["z"])
            after = parts()
            self.plant(d, "s1", self.target(domains["x"], x, 1.0), after["x"])
            self.plant(d, "t1", self.target(domains["y"], y, rho), after["y"])
        pair = lambda m: (jnp.asarray(m[:-1]), jnp.asarray(m[-1]))
        multipliers = Multipliers(
            lam=pair(p["lam"]),
            lam_bar=pair(lam_bar),
            nu=jnp.asarray(p["nu"]),
            nu_bar=jnp.asarray(nu_bar),
            upper_lam=jnp.asarray(p["upper_lam"]),
        )
        blocks = {name: jnp.asarray(p[name]) for name in ("x", "y", "z", "rho")}
        problem = bx.ConstrainedBilevelProblem(
            upper_alone,
            LOWER_ALONE[self.loss],
            x=self.term(domains["x"]),
            y=self.term(domains["y"]),
            constraints=constraints,
            equalities=equalities,
            upper_constraints=upper_constraints,
            data={name: jnp.asarray(value) for name, value in d.items()},
        )
        point = bx.Point(**blocks, multipliers=multipliers)
        return Drawn(self.law, self.loss, how, problem, point, domains, p, d)

    def problem(self, number: int) -> Drawn:
        return self.with_constraints(number) if self.law == "constrained" else self.bilevel(number)
