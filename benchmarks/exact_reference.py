"""The lines of certificates once more, in 80-bit or in 60-digit arithmetic.

Nothing here is of JAX or bilevax: all is written from the definitions, gradients by hand. Arrays
are of `numpy.longdouble` (64 bits of mantissa) or of `decimal.Decimal` (60 digits): the same code
takes both, so that what 80 bits leave open can be settled. `exact(array, kind)` makes them of the
numbers as given.

The functions, for the variables x1, x2, y1, y2 and a dictionary d of arrays:

    loss(x1, y1) = one of LOSSES, of r = A·y1 + E·x1 − b or of y1 alone
                   (½yᵀQ·y; yᵀQ·y − 2qᵀy + c; vᵀ(y − m) + ½Σ u·(y − m)²)
    f~ = loss + p1ᵀy1 + x1ᵀC·y1 + [y1ᵀB·y2 + x1ᵀD·y2 − ½‖F·y2‖² + p2ᵀy2]
    f  = ½x1ᵀS·x1 + s1ᵀx1 + ½‖y1 − Wᵀx1‖² + t1ᵀy1
         + [x2ᵀ(T·x1 + U·y1) − ½Σ w·x2² + s2ᵀx2 + ½‖y2‖² + t2ᵀy2]

In brackets is what problems without x2 and y2 do not have. Constrained problems have no brackets,
and c = (K·y + M·x − k, ½‖N·y‖² − n), e = H·y + J·x − h, G = O·x + P·y − o.
"""

from __future__ import annotations

import dataclasses
import decimal
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import numpy as np

LONG = np.longdouble
# A point counts as on a sphere, as for the library's terms, within so many roundings of the radius
# and two of each entry of the centre.
ON_SPHERE = 64

Vector = np.ndarray
Blocks = dict[str, Any]

decimal.getcontext().prec = 60
for trap in (decimal.Inexact, decimal.Rounded, decimal.Underflow, decimal.Subnormal):
    decimal.getcontext().traps[trap] = False


def exact(value: Any, kind: type = LONG) -> Any:
    """The same numbers as given, in arithmetic of that kind; None and dictionaries too."""
    if value is None:
        return None
    if isinstance(value, dict):
        return {name: exact(part, kind) for name, part in value.items()}
    array = np.asarray(value)
    if kind is LONG:
        return array.astype(LONG)
    if array.dtype == LONG:  # as the sum of two doubles, which it is
        high = array.astype(float)
        low = (array - high).astype(float)
        return exact(high, kind) + exact(low, kind)
    made = np.empty(array.shape, object)
    made[...] = np.vectorize(Decimal, otypes=[object])(array.astype(float)) if array.size else 0
    return made if array.ndim else made[()]


def norm(v: Vector) -> Any:
    return np.sqrt(np.sum(v * v))


def positive(v: Vector) -> Vector:
    return np.maximum(v, 0 * v)


def exponential(v: Vector) -> Vector:
    """e^v for v ≤ 0; what is below e^(−11000) is as good as that."""
    return np.exp(np.maximum(v, 0 * v - 11000))


def logarithm(v: Any) -> Any:
    array = np.asarray(v)
    if array.dtype != object:
        return np.log(v)
    made = np.vectorize(lambda entry: entry.ln(), otypes=[object])(array)
    return made if array.ndim else made[()]


# ---------------------------------------------------------------------------------------------
# Domains: the shortest vector of g + N(x), the support function, the projection
# ---------------------------------------------------------------------------------------------


def levelled(v: Vector, lower: Vector, upper: Vector, total: Any) -> Vector:
    """clip(v − τ, lower, upper) with the τ that makes the sum `total`, from sorted breakpoints.

    Bounds may be infinite. Where no τ does, the nearest sum.
    """
    clip = lambda tau: np.minimum(np.maximum(v - tau, lower), upper)
    infinite = lambda bound: np.array([abs(float(b)) == np.inf for b in bound])
    ends = [e for e, out in zip(v - lower, infinite(lower)) if not out]
    ends += [e for e, out in zip(v - upper, infinite(upper)) if not out]
    ends.sort()
    # The sum falls with τ, and is linear between breakpoints.
    above = [tau for tau in ends if np.sum(clip(tau)) >= total]
    below = [tau for tau in ends if np.sum(clip(tau)) <= total]
    left, right = (above[-1] if above else None), (below[0] if below else None)
    if left is not None and right is not None:
        middle = (left + right) / 2
    elif left is not None:
        middle = left + 1
    else:
        middle = right - 1 if right is not None else v[0] * 0
    moved = v - middle
    free = (moved > lower) & (moved < upper)
    if not np.any(free):
        return clip(middle)
    rest = np.where(free, 0 * v, clip(middle))
    tau = (np.sum(v[free]) + np.sum(rest) - total) / int(np.sum(free))
    return np.where(free, v - tau, rest)


@dataclasses.dataclass(frozen=True)
class Box:
    lower: Vector
    upper: Vector

    def shortest(self, x: Vector, g: Vector) -> Vector:
        g = np.where(x <= self.lower, np.minimum(g, 0 * g), g)
        return np.where(x >= self.upper, np.maximum(g, 0 * g), g)

    def best(self, g: Vector) -> Vector:
        return np.where(g > 0, self.upper, self.lower)

    def project(self, v: Vector) -> Vector:
        return np.minimum(np.maximum(v, self.lower), self.upper)

    def to(self, kind: type) -> Box:
        return Box(exact(self.lower, kind), exact(self.upper, kind))


@dataclasses.dataclass(frozen=True)
class Simplex:
    """{x : 0 ≤ x ≤ caps, Σ x = total}; caps are finite, at most `total`."""

    caps: Vector
    total: Any

    def shortest(self, x: Vector, g: Vector) -> Vector:
        # −g projected on {d : Σ d = 0, d ≥ 0 where x = 0, d ≤ 0 where x = cap}, and turned round
        infinity = exact(np.inf, Decimal if g.dtype == object else LONG)
        lower = np.where(x <= 0, 0 * g, -infinity)
        upper = np.where(x >= self.caps, 0 * g, infinity)
        return -levelled(-g, lower, upper, 0)

    def best(self, g: Vector) -> Vector:
        filled, rest = 0 * g, self.total
        for i in sorted(range(len(g)), key=lambda i: -g[i]):
            filled[i] = min(self.caps[i], rest)
            rest = rest - filled[i]
        return filled

    def project(self, v: Vector) -> Vector:
        return levelled(v, 0 * v, self.caps, self.total)

    def to(self, kind: type) -> Simplex:
        return Simplex(exact(self.caps, kind), exact(self.total, kind))


@dataclasses.dataclass(frozen=True)
class Ball:
    center: Vector
    radius: Any
    eps: float  # a rounding of the points

    def on_sphere(self, x: Vector) -> bool:
        far = 2 * len(x) ** 0.5 * float(np.max(np.abs(self.center)))
        allowed = self.eps * (ON_SPHERE * float(self.radius) + far)
        return float(self.radius - norm(x - self.center)) <= allowed

    def shortest(self, x: Vector, g: Vector) -> Vector:
        if not self.on_sphere(x):
            return g
        unit = (x - self.center) / norm(x - self.center)
        return g - min(np.sum(g * unit), 0) * unit

    def best(self, g: Vector) -> Vector:
        size = norm(g)
        return self.center + (g * (self.radius / size) if size > 0 else 0 * g)

    def project(self, v: Vector) -> Vector:
        far = norm(v - self.center)
        return v if far <= self.radius else self.center + (v - self.center) * (self.radius / far)

    def to(self, kind: type) -> Ball:
        return Ball(exact(self.center, kind), exact(self.radius, kind), self.eps)


Domain = Box | Simplex | Ball


# ---------------------------------------------------------------------------------------------
# Functions: value and gradients
# ---------------------------------------------------------------------------------------------


def of_residuals(scalar: Callable[[Vector], tuple[Any, Vector]]) -> Callable[..., tuple]:
    """A loss of r = A·y + E·x − b: its value and its gradients in x and y."""

    def loss(x: Vector, y: Vector, d: Blocks) -> tuple:
        value, slope = scalar(d["A"] @ y + d["E"] @ x - d["b"])
        return value, d["E"].T @ slope, d["A"].T @ slope

    return loss


def quadratic(x: Vector, y: Vector, d: Blocks) -> tuple:
    return y @ (d["Q"] @ y) / 2, 0 * x, (d["Q"] @ y + d["Q"].T @ y) / 2


def expanded(x: Vector, y: Vector, d: Blocks) -> tuple:
    value = y @ (d["Q"] @ y) - 2 * (d["q"] @ y) + d["c"]
    return value, 0 * x, d["Q"] @ y + d["Q"].T @ y - 2 * d["q"]


def centred(x: Vector, y: Vector, d: Blocks) -> tuple:
    off = y - d["m"]
    return d["v"] @ off + d["u"] @ (off * off) / 2, 0 * x, d["v"] + d["u"] * off


def _softplus(r: Vector) -> tuple[Any, Vector]:
    small = exponential(-np.abs(r))
    value = np.sum(positive(r) + logarithm(1 + small))
    return value, np.where(r > 0, 1 / (1 + small), small / (1 + small))


def _logsumexp(r: Vector) -> tuple[Any, Vector]:
    most = np.max(r)
    share = exponential(r - most)
    return most + logarithm(np.sum(share)), share / np.sum(share)


def _huber(r: Vector) -> tuple[Any, Vector]:
    root = np.sqrt(1 + r * r)
    return np.sum(root - 1), r / root


LOSSES: dict[str, Callable[..., tuple]] = {
    "quadratic": quadratic,
    "residuals": of_residuals(lambda r: (np.sum(r * r), 2 * r)),
    "expanded": expanded,
    "centred": centred,
    "softplus": of_residuals(_softplus),
    "logsumexp": of_residuals(_logsumexp),
    "pseudo-Huber": of_residuals(_huber),
}


def lower(loss: str, x1: Vector, y1: Vector, y2: Any, d: Blocks) -> tuple[Any, Blocks]:
    """f~ and its gradient by blocks."""
    value, of_x, of_y = LOSSES[loss](x1, y1, d)
    value = value + d["p1"] @ y1 + x1 @ (d["C"] @ y1)
    slope = {"x1": of_x + d["C"] @ y1, "y1": of_y + d["p1"] + d["C"].T @ x1}
    if y2 is None:
        return value, slope
    image = d["F"] @ y2
    value = value + y1 @ (d["B"] @ y2) + x1 @ (d["D"] @ y2) - image @ image / 2 + d["p2"] @ y2
    slope["x1"] = slope["x1"] + d["D"] @ y2
    slope["y1"] = slope["y1"] + d["B"] @ y2
    slope["y2"] = d["B"].T @ y1 + d["D"].T @ x1 - d["F"].T @ image + d["p2"]
    return value, slope


def upper(x1: Vector, x2: Any, y1: Vector, y2: Any, d: Blocks) -> Blocks:
    """The gradient of f by blocks."""
    off = y1 - d["W"].T @ x1
    slope = {
        "x1": (d["S"] @ x1 + d["S"].T @ x1) / 2 + d["s1"] - d["W"] @ off,
        "y1": off + d["t1"],
    }
    if x2 is None:
        return slope
    slope["x1"] = slope["x1"] + d["T"].T @ x2
    slope["y1"] = slope["y1"] + d["U"].T @ x2
    slope["x2"] = d["T"] @ x1 + d["U"] @ y1 - d["w"] * x2 + d["s2"]
    slope["y2"] = y2 + d["t2"]
    return slope


def constraints(x: Vector, y: Vector, d: Blocks) -> tuple[Vector, Vector, Vector]:
    """(c, e, G) at (x, y)."""
    image = d["N"] @ y
    c = np.append(d["K"] @ y + d["M"] @ x - d["k"], image @ image / 2 - d["n"])
    return c, d["H"] @ y + d["J"] @ x - d["h"], d["O"] @ x + d["P"] @ y - d["o"]


def weighed(lam: Vector, nu: Vector, x: Vector, y: Vector, d: Blocks) -> tuple[Vector, Vector]:
    """The gradient of λᵀc + νᵀe in x and in y."""
    of_y = d["K"].T @ lam[:-1] + lam[-1] * (d["N"].T @ (d["N"] @ y)) + d["H"].T @ nu
    return d["M"].T @ lam[:-1] + d["J"].T @ nu, of_y


# ---------------------------------------------------------------------------------------------
# The lines
# ---------------------------------------------------------------------------------------------


def bilevel_parts(loss: str, p: Blocks, d: Blocks) -> Blocks:
    """What the lines are made of: the vectors of f + ρ(f~(x1,y1,z2) − f~(x1,z1,y2)), and values."""
    f = upper(p["x1"], p["x2"], p["y1"], p["y2"], d)
    above, a = lower(loss, p["x1"], p["y1"], p["z2"], d)
    below, b = lower(loss, p["x1"], p["z1"], p["y2"], d)
    return bilevel_vectors(p["rho"], f, a, b, above, below)


def bilevel_vectors(rho: Any, f: Blocks, a: Blocks, b: Blocks, above: Any, below: Any) -> Blocks:
    """From ∇f, from ∇f~ at (x1, y1, z2) and at (x1, z1, y2), and from the values of f~ there."""
    vectors = {
        "above": above,
        "below": below,
        "x1": f["x1"] + rho * (a["x1"] - b["x1"]),
        "y1": f["y1"] + rho * a["y1"],
        "z1": b["y1"],
    }
    if "y2" in f:
        vectors |= {"y2": f["y2"] - rho * b["y2"], "x2": -f["x2"], "z2": -a["y2"]}
    return vectors


DOMAIN_OF = {"z1": "y1", "z2": "y2", "z": "y"}


def bilevel_lines(loss: str, domains: dict[str, Domain], p: Blocks, d: Blocks) -> Blocks:
    """Every line of def:epsilon_KKT; the gap as its bound by tangents at (z1, z2)."""
    parts = bilevel_parts(loss, p, d)
    short = {
        name: domains[DOMAIN_OF.get(name, name)].shortest(p[name], parts[name])
        for name in ("x1", "y1", "y2", "x2", "z1", "z2")
        if name in parts
    }
    zero = 0 * p["rho"]
    together = [short[name] for name in ("x1", "y1", "y2") if name in short]
    length = lambda name: norm(short[name]) if name in short else zero
    rise, fall = excess(domains, p, parts)
    least = parts["above"] - parts["below"]
    return {
        "stationarity": norm(np.concatenate(together)),
        "response_x2": length("x2"),
        "response_z1": p["rho"] * length("z1"),
        "response_z2": p["rho"] * length("z2"),
        "gap": max(least + rise + fall, least, zero),
    }


def excess(domains: dict[str, Domain], p: Blocks, parts: Blocks) -> tuple[Any, Any]:
    """How much the tangents at z2 and at z1 can rise and fall over the domains."""

    def most(name: str) -> Any:
        if name not in parts:
            return 0 * p["rho"]
        g, z = -parts[name], p[name]
        return g @ (domains[DOMAIN_OF[name]].best(g) - z)

    return most("z2"), most("z1")


def gap_below(loss: str, domains: dict[str, Domain], p: Blocks, d: Blocks) -> Any:
    """The largest f~(x1,y1,s2) − f~(x1,s1,y2) at some points (s1, s2) of the domains.

    They are z, and where the tangents at z are best, and between the two.
    """
    parts = bilevel_parts(loss, p, d)

    def tried(name: str) -> list[Vector]:
        domain = domains[DOMAIN_OF[name]]
        z, far = domain.project(p[name]), domain.best(-parts[name])
        return [z, *(z + (far - z) / share for share in (1, 10, 1000, 10**6))]

    least = min(lower(loss, p["x1"], s, p["y2"], d)[0] for s in tried("z1"))
    if "z2" not in parts:
        return parts["above"] - least
    return max(lower(loss, p["x1"], p["y1"], s, d)[0] for s in tried("z2")) - least


def constrained_parts(loss: str, p: Blocks, d: Blocks) -> Blocks:
    """What the lines of def:cons_kkt are made of."""
    x, y, z, rho = p["x"], p["y"], p["z"], p["rho"]
    f = upper(x, None, y, None, d)
    value, g = lower(loss, x, y, None, d)
    at_z, b = lower(loss, x, z, None, d)
    c_y, e_y, G = constraints(x, y, d)
    c_z, e_z, _ = constraints(x, z, d)
    wx, wy = weighed(p["lam"], p["nu"], x, y, d)
    bx, bz = weighed(p["lam_bar"], p["nu_bar"], x, z, d)
    below_x, below_z = b["x1"] + bx, b["y1"] + bz
    above_x = f["x1"] + rho * g["x1"] + wx + d["O"].T @ p["upper_lam"]
    return {
        "x": above_x - rho * below_x,
        "y": f["y1"] + rho * g["y1"] + wy + d["P"].T @ p["upper_lam"],
        "z": below_z,
        "value": value,
        "dual": at_z + p["lam_bar"] @ c_z + p["nu_bar"] @ e_z,
        **{"c_y": c_y, "e_y": e_y, "c_z": c_z, "e_z": e_z, "G": G},
    }


def constrained_lines(
    loss: str, domains: dict[str, Domain], p: Blocks, d: Blocks, *, sums: bool
) -> Blocks:
    """Every line of def:cons_kkt; the gap as its bound by weak duality and the tangent at z.

    Complementarity is Σ|λᵢcᵢ| + Σ|νᵢeᵢ| with `sums`, otherwise |λᵀc| + |νᵀe|.
    """
    q = constrained_parts(loss, p, d)
    zero = 0 * p["rho"]
    short = {n: domains[DOMAIN_OF.get(n, n)].shortest(p[n], q[n]) for n in ("x", "y", "z")}
    feasible = lambda c, e: norm(np.append(positive(c), e))
    paired = lambda m, v: np.sum(np.abs(m * v)) if sums else abs(m @ v)
    fall = -q["z"] @ (domains["y"].best(-q["z"]) - p["z"])
    return {
        "stationarity": norm(np.concatenate([short["x"], short["y"]])),
        "response_z": p["rho"] * norm(short["z"]),
        "feasibility_z": feasible(q["c_z"], q["e_z"]),
        "complementarity_z": paired(p["lam_bar"], q["c_z"]) + paired(p["nu_bar"], q["e_z"]),
        "lower_gap": max(q["value"] - q["dual"] + fall, zero),
        "feasibility": feasible(q["c_y"], q["e_y"]),
        "complementarity": paired(p["lam"], q["c_y"]) + paired(p["nu"], q["e_y"]),
        "upper_feasibility": norm(positive(q["G"])),
        "upper_complementarity": paired(p["upper_lam"], q["G"]),
    }


def constrained_gap_below(loss: str, domains: dict[str, Domain], p: Blocks, d: Blocks) -> Any:
    """g(x,y) less the least of the Lagrangian at (λ̄, ν̄) at some points of the domain."""
    q = constrained_parts(loss, p, d)
    domain = domains["y"]
    z, far = domain.project(p["z"]), domain.best(-q["z"])

    def lagrangian(s: Vector) -> Any:
        c, e, _ = constraints(p["x"], s, d)
        value, _ = lower(loss, p["x"], s, None, d)
        return value + p["lam_bar"] @ c + p["nu_bar"] @ e

    tried = [z, *(z + (far - z) / share for share in (1, 10, 1000, 10**6))]
    return q["value"] - min(map(lagrangian, tried))
