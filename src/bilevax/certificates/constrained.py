"""How far a point is from KKT of the bilevel problem with a constrained lower level."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array

from bilevax import trees
from bilevax.arguments import positive
from bilevax.certificates.around import Answer
from bilevax.certificates.breaches import STRONG, Claim
from bilevax.certificates.certificate import Certificate, compared_within, line, strong_convexity
from bilevax.certificates.constrained_witnesses import constrained_witnesses, lower_solution
from bilevax.certificates.definition import Definition, bounded, term_values
from bilevax.certificates.gap import (
    footing,
    grounded_excess,
    lower_ground,
    sampled_change,
    sampled_footing,
)
from bilevax.certificates.lagrangians import lower_lagrangian, weighed
from bilevax.certificates.rounding import FEW, rounding
from bilevax.problems import ConstrainedBilevelProblem, Multipliers, Point, register
from bilevax.problems.constrained import CONSTRAINTS
from bilevax.trees import Tree

# A violation of this share of ε is one that a place nearby may have.
TRIFLE = 0.1
LINES = (
    *("stationarity", "response_z", "feasibility_z", "complementarity_z", "lower_gap"),
    *("feasibility", "complementarity", "upper_feasibility", "upper_complementarity"),
)
# Those that the constraints of a level alone decide on.
OF_LOWER = ("feasibility_z", "complementarity_z", "feasibility", "complementarity")
OF_OWN = ("upper_feasibility", "upper_complementarity")


@dataclasses.dataclass(frozen=True)
class ConstrainedKKTCertificate(Certificate):
    """Every line of `def:cons_kkt`, for the point and the witnesses (z, ρ, λ, λ̄) it names.

    Equalities count as two inequalities each. Complementarity is a sum of sizes, so that a violated
    constraint cannot make up for one with slack; it bounds the paper's |λᵀc|, which is a note.
    `upper_feasibility` and `upper_complementarity` are the same conditions for the upper level's
    own constraints; they are zero without such. The distances come from the terms' closed forms,
    the lower gap is an upper bound, and each line has an allowance for rounding on top.
    """

    stationarity: float = line(
        "dist(0, ∂ of f + ρ(g(x,y) − g(x,z) − λ̄ᵀc(x,z)) + λᵀc(x,y) in (x,y))"
    )
    response_z: float = line("dist(0, ρ·∂ of g(x,z) + λ̄ᵀc(x,z) in z)")
    feasibility_z: float = line("‖[c(x,z)]₊‖")
    complementarity_z: float = line("Σ|λ̄ᵢcᵢ(x,z)|")
    lower_gap: float = line("g(x,y) − min g(x,·) under the constraints, an upper bound")
    feasibility: float = line("‖[c(x,y)]₊‖")
    complementarity: float = line("Σ|λᵢcᵢ(x,y)|")
    upper_feasibility: float = line("‖[G(x,y)]₊‖")
    upper_complementarity: float = line("Σ|λ_Gᵢ Gᵢ(x,y)|")
    product_z: float = line("|λ̄ᵀc(x,z)|, which is what the paper bounds")
    product: float = line("|λᵀc(x,y)|, likewise")
    upper_product: float = line("|λ_Gᵀ G(x,y)|, likewise")
    rho: float = line("the penalty ρ of the witness")
    radius: float = line("how far from y the lower gap was looked at", math.inf)
    modulus: float = line("what its bound assumes of the lower level; 0 if nothing", 0.0)

    def lines(self) -> dict[str, float]:
        return {name: getattr(self, name) for name in LINES}

    def notes(self) -> dict[str, float]:
        names = ("product_z", "product", "upper_product", "rho", "radius", "objective")
        return {name: getattr(self, name) for name in names}

    def assumptions(self) -> list[str]:
        return strong_convexity(self.modulus)

    def provisos(self) -> list[str]:
        return super().provisos() + compared_within(self.radius)

    def advice(self, line: str) -> tuple[str, str]:
        if line == "lower_gap":
            return "the lower-level gap", "a larger rho"
        return super().advice(line)

    @property
    def gap(self) -> float:
        """The lower-level gap, by the name that every bilevel certificate has."""
        return self.lower_gap


class _Evaluation(eqx.Module):
    """All that the lines are made of: values and gradients at (x, y) and at (x, z)."""

    upper: Array  # f1(x, y)
    lower: Array  # g1(x, y)
    dual: Array  # g1 + λ̄ᵀc + ν̄ᵀe at (x, z)
    above: tuple[Tree, Tree]  # ∇ of f1 + λ_GᵀG + ρ·g1 + λᵀc at (x, y), in x and in y
    below: tuple[Tree, Tree]  # ∇ of `dual`, in x and in z
    at_y: tuple[Tree, Tree]  # (c, e) at (x, y)
    at_z: tuple[Tree, Tree]  # and at (x, z)
    own: tuple[Tree, Tree]  # (G, H) at (x, y)


def _evaluation(
    problem: ConstrainedBilevelProblem, m: Multipliers, rho: Array, point: Point
) -> _Evaluation:
    def above(x: Tree, y: Tree) -> tuple[Array, tuple]:
        f, g = problem.smooth_upper(x, y), problem.smooth_lower(x, y)
        c, e, G, H = (problem.called(name, x, y) for name in CONSTRAINTS)
        pairs = ((m.upper_lam, G), (m.upper_nu, H), (m.lam, c), (m.nu, e))
        return weighed(f + rho * g, pairs), (f, g, (c, e), (G, H))

    def below(x: Tree, z: Tree) -> tuple[Array, tuple]:
        c, e = (problem.called(name, x, z) for name in CONSTRAINTS[:2])
        return weighed(problem.smooth_lower(x, z), ((m.lam_bar, c), (m.nu_bar, e))), (c, e)

    slopes = lambda function: jax.value_and_grad(function, argnums=(0, 1), has_aux=True)
    (_, (f, g, at_y, own)), of_above = slopes(above)(point.x, point.y)
    (dual, at_z), of_below = slopes(below)(point.x, point.z)
    return _Evaluation(f, g, dual, of_above, of_below, at_y, at_z, own)


class _Parts(NamedTuple):
    """What rounding is measured in."""

    x: Tree  # the gradient of the penalty with its multipliers in x
    y: Tree  # and in y
    z: Tree  # that of the lower Lagrangian at (λ̄, ν̄) in z
    at_y: Tree
    at_z: Tree
    own: Tree
    products: Array  # Σ|λᵢcᵢ| at y
    products_z: Array  # at z
    upper_products: Array  # of the upper level's own
    gap: Array  # the bound on it
    alone: Array | None = (
        None  # whether that needs no ground to stand on, 1 or 0, where it has some
    )


def _parts(
    problem: ConstrainedBilevelProblem, point: Point, m: Multipliers, rho: Array, e: _Evaluation
) -> _Parts:
    # Weak duality: the constrained minimum is at least min over z of the Lagrangian at (λ̄, ν̄),
    # which is convex in z and lies above its tangent.
    dtype = e.lower.dtype
    on = lower_ground(problem, "y", point.x, point.y)
    fall, alone = grounded_excess(problem.y, point.z, trees.scale(-1, e.below[1]), on)
    return _Parts(
        x=trees.axpy(-rho, e.below[0], e.above[0]),
        y=e.above[1],
        z=e.below[1],
        at_y=e.at_y,
        at_z=e.at_z,
        own=e.own,
        products=_products((m.lam, m.nu), e.at_y, dtype),
        products_z=_products((m.lam_bar, m.nu_bar), e.at_z, dtype),
        upper_products=_products((m.upper_lam, m.upper_nu), e.own, dtype),
        gap=e.lower - e.dual + problem.y.value(point.y) + fall.astype(dtype),
        alone=None if on is None else alone.astype(dtype),
    )


def _feasibility(values: tuple[Tree, Tree], dtype: Any) -> Array:
    """‖([c]₊, e)‖"""
    inequalities, equalities = values
    positive = jax.tree.map(lambda c: jnp.maximum(c, 0), inequalities)
    return trees.norm((positive, equalities)).astype(dtype)


def _products(multipliers: tuple[Tree, Tree], values: tuple[Tree, Tree], dtype: Any) -> Array:
    """Σ|λᵢcᵢ|, of the constraints that have multipliers."""
    absolute = lambda tree: jax.tree.map(jnp.abs, tree)
    return _product(absolute(multipliers), absolute(values), dtype)


def _product(multipliers: tuple[Tree, Tree], values: tuple[Tree, Tree], dtype: Any) -> Array:
    """|λᵀc|"""
    zero = jnp.zeros((), dtype)
    pairs = [(m, v) for m, v in zip(multipliers, values) if m is not None]
    return jnp.abs(sum((trees.dot(m, v).astype(dtype) for m, v in pairs), zero))


def _signs_hold(m: Multipliers) -> Array:
    """Whether no multiplier of an inequality is negative."""
    signs = [jnp.all(leaf >= 0) for leaf in jax.tree.leaves((m.lam, m.lam_bar, m.upper_lam))]
    return jnp.all(jnp.stack([jnp.asarray(True), *signs]))


def _weights(multipliers: tuple[Tree, Tree], values: tuple[Tree, Tree]) -> tuple[Tree, Tree]:
    """√max(1, |λᵢ|·Σ|λ|) for each constraint: 1 where it has no multiplier.

    With c off by d, ‖[c]₊‖ and ‖e‖ change by ‖d‖ at most, and Σ|λᵢcᵢ| by Σ|λᵢdᵢ| ≤
    √(Σ|λ|·Σ|λᵢ|dᵢ²), by Cauchy and Schwarz. So the length of d times these weights bounds both.
    """
    sizes = jax.tree.map(jnp.abs, multipliers)
    sums = [jnp.sum(leaf) for leaf in jax.tree.leaves(sizes)]

    def weight(size: Array) -> Array:
        return jnp.sqrt(jnp.maximum(1, size * sum(s.astype(size.dtype) for s in sums)))

    def each(size: Tree, value: Tree) -> Tree:
        if size is None:
            return jax.tree.map(jnp.ones_like, value)
        return jax.tree.map(weight, size)

    return each(sizes[0], values[0]), each(sizes[1], values[1])


class ConstrainedKKT(Definition):
    """`def:cons_kkt`: some ρ > 0, z, λ and λ̄ with every line at most ε.

    A certificate costs four gradients of the penalty, and thirteen of a small problem.
    """

    @property
    def certificate(self) -> type[ConstrainedKKTCertificate]:
        return ConstrainedKKTCertificate

    def residuals(self, problem: ConstrainedBilevelProblem, point: Point) -> dict[str, Array]:
        x, y, z = point.x, point.y, point.z
        m = Multipliers() if point.multipliers is None else point.multipliers
        dtype = trees.dtype_of((x, y))
        rho = jnp.asarray(point.rho, dtype)
        here = _evaluation(problem, m, rho, point)
        evaluate = lambda problem, point: _evaluation(problem, m, rho, point)
        of = lambda seen: _parts(problem, point, m, rho, seen)
        there = lambda seen: [part for part in of(seen) if part is not None]
        parts, noise = of(here), _Parts(*rounding(evaluate, there, problem, point, here, dtype))
        stationary = (problem.x.residual(x, parts.x), (rho * problem.y).residual(y, parts.y))
        terms, eps = term_values(problem, point), jnp.finfo(dtype).eps
        linear = trees.dot(*jax.tree.map(jnp.abs, (z, parts.z))).astype(dtype)
        sizes = (here.lower, here.dual, terms["y"], linear, parts.gap)
        counted = FEW * eps * sum(jnp.abs(size) for size in sizes)

        lines = {
            "stationarity": trees.norm(stationary),
            "response_z": rho * trees.norm(problem.y.residual(z, parts.z)),
            "feasibility_z": _feasibility(here.at_z, dtype),
            "complementarity_z": parts.products_z,
            "lower_gap": jnp.maximum(parts.gap, 0),
            "feasibility": _feasibility(here.at_y, dtype),
            "complementarity": parts.products,
            "upper_feasibility": _feasibility(here.own, dtype),
            "upper_complementarity": parts.upper_products,
        }
        allowances = {
            "stationarity": trees.norm((noise.x, noise.y)),
            "response_z": rho * noise.z,
            "feasibility_z": noise.at_z,
            "complementarity_z": noise.products_z + FEW * eps * parts.products_z,
            "lower_gap": noise.gap + counted,
            "feasibility": noise.at_y,
            "complementarity": noise.products + FEW * eps * parts.products,
            "upper_feasibility": noise.own,
            "upper_complementarity": noise.upper_products + FEW * eps * parts.upper_products,
        }
        objective = here.upper + terms["x"]
        inside = trees.all_finite((terms, m)) & _signs_hold(m)
        inside &= jnp.isfinite(objective) & (rho > 0)
        notes = {
            "product_z": _product((m.lam_bar, m.nu_bar), here.at_z, dtype),
            "product": _product((m.lam, m.nu), here.at_y, dtype),
            "upper_product": _product((m.upper_lam, m.upper_nu), here.own, dtype),
            "rho": rho,
            "objective": objective,
        }
        on = lower_ground(problem, "y", x, y)
        stands = []
        if on is not None and parts.alone is not None and noise.alone is not None:
            stands.append((on, parts.alone > 0.5, noise.alone))
        rests = footing(stands)
        return bounded(lines, allowances, inside, dtype) | notes | rests._asdict()

    def sizes(self, problem: ConstrainedBilevelProblem, point: Point) -> dict[str, Array]:
        """‖∇f‖ for slopes; for the gap the larger of its two values; for a constraint what x and y
        contribute to it, to first order; for complementarity the multipliers times that.
        """
        x, y, z = point.x, point.y, point.z
        m = Multipliers() if point.multipliers is None else point.multipliers
        slope = trees.norm(jax.grad(problem.smooth_upper, argnums=(0, 1))(x, y))
        primal, dual = problem.lower_value(x, y), lower_lagrangian(problem, x, z, m)
        pair, own = ("constraints", "equalities"), ("upper_constraints", "upper_equalities")

        def contributed(names: tuple[str, str], y: Tree) -> tuple[Tree, Tree]:
            values = lambda x, y: tuple(problem.called(name, x, y) for name in names)
            nothing = lambda tree: jax.tree.map(jnp.zeros_like, tree)
            _, of_x = jax.jvp(values, (x, y), (x, nothing(y)))
            _, of_y = jax.jvp(values, (x, y), (nothing(x), y))
            return jax.tree.map(lambda a, b: jnp.abs(a) + jnp.abs(b), of_x, of_y)

        def products(multipliers: tuple[Tree, Tree], sizes: tuple[Tree, Tree]) -> Array:
            total = jnp.zeros_like(slope)
            for multiplier, size in zip(multipliers, sizes):
                if multiplier is not None:
                    total += trees.dot(jax.tree.map(jnp.abs, multiplier), size).astype(total.dtype)
            return total

        at_y, at_z, at_top = contributed(pair, y), contributed(pair, z), contributed(own, y)
        norm = lambda sizes: trees.norm(sizes).astype(slope.dtype)
        return {
            "stationarity": slope,
            "response_z": slope,
            "feasibility_z": norm(at_z),
            "complementarity_z": products((m.lam_bar, m.nu_bar), at_z),
            "lower_gap": jnp.maximum(jnp.abs(primal), jnp.abs(dual)),
            "feasibility": norm(at_y),
            "complementarity": products((m.lam, m.nu), at_y),
            "upper_feasibility": norm(at_top),
            "upper_complementarity": products((m.upper_lam, m.upper_nu), at_top),
        }

    def claims(self, problem: ConstrainedBilevelProblem, point: Point) -> list[Claim]:
        """The Lagrangian at (λ̄, ν̄) is convex in y, and equalities are affine."""
        m = Multipliers() if point.multipliers is None else point.multipliers
        below = lambda z: lower_lagrangian(problem, point.x, z, m)
        constrained = m.lam_bar is not None or m.nu_bar is not None
        name = "lower with its constraints" if constrained else "lower"
        on = lower_ground(problem, "y", point.x, point.y)
        claims = [Claim(name, "y", "convex", below, problem.y, point.z, "lower_gap", on)]
        if problem.lower_modulus is not None and on is not None:
            of_slopes = ("response_z", point.rho)
            claims.insert(0, claims[0]._replace(shape=STRONG, of_slopes=of_slopes))
        if problem.equalities is not None:
            equal = lambda z: problem.called("equalities", point.x, z)
            shape = ("equalities", "y", "affine")
            claims.append(Claim(*shape, equal, problem.y, point.z, "feasibility_z"))
        return claims

    def shares(
        self, problem: ConstrainedBilevelProblem, point: Point
    ) -> dict[str, dict[str, Tree]]:
        p, m = point, Multipliers() if point.multipliers is None else point.multipliers
        rho = jnp.asarray(p.rho, trees.dtype_of((p.x, p.y)))
        here = _evaluation(problem, m, rho, point)
        parts = _parts(problem, point, m, rho, here)
        lower, own = CONSTRAINTS[:2], CONSTRAINTS[2:]

        def violated(names: tuple[str, ...], values: tuple[Tree, Tree]) -> dict[str, Tree]:
            above = jax.tree.map(lambda c: jnp.maximum(c, 0), values[0])
            return dict(zip(names, (above, values[1])))

        def products(names: tuple[str, ...], by: tuple, values: tuple) -> dict[str, Tree]:
            both = zip(names, by, values)
            return {n: jax.tree.map(jnp.multiply, b, v) for n, b, v in both if b is not None}

        return {
            "stationarity": {
                "x": problem.x.residual(p.x, parts.x),
                "y": (rho * problem.y).residual(p.y, parts.y),
            },
            "response_z": {"z": problem.y.residual(p.z, parts.z)},
            "feasibility_z": violated(lower, here.at_z),
            "complementarity_z": products(lower, (m.lam_bar, m.nu_bar), here.at_z),
            "feasibility": violated(lower, here.at_y),
            "complementarity": products(lower, (m.lam, m.nu), here.at_y),
            "upper_feasibility": violated(own, here.own),
            "upper_complementarity": products(own, (m.upper_lam, m.upper_nu), here.own),
        }

    moving: ClassVar[tuple[str, ...]] = ("x", "y")

    def upper_slope(self, problem: ConstrainedBilevelProblem, point: Point) -> Tree:
        return jax.grad(problem.smooth_upper)(point.x, point.y)

    def answer(
        self,
        problem: ConstrainedBilevelProblem,
        point: Point,
        x: Tree,
        epsilon: Array,
        steps: Array,
    ) -> Answer:
        """F there, ρ times the lower level's gap on top, and violations at their prices.

        A place that violates a constraint by more than a trifle is none to compare with.
        """
        m = Multipliers() if point.multipliers is None else point.multipliers
        y, lam, nu = lower_solution(problem, x, point.y, steps, (m.lam_bar, m.nu_bar))
        own = Multipliers(lam_bar=lam, nu_bar=nu)
        dual, slope = jax.value_and_grad(lambda z: lower_lagrangian(problem, x, z, own))(y)
        dtype = dual.dtype
        on = lower_ground(problem, "y", x, y)
        fall = grounded_excess(problem.y, y, trees.scale(-1, slope), on).bound
        gap = problem.lower_value(x, y) - dual + fall.astype(dtype)
        lower = tuple(problem.called(name, x, y) for name in CONSTRAINTS[:2])
        upper = tuple(problem.called(name, x, y) for name in CONSTRAINTS[2:])
        low, high = _feasibility(lower, dtype), _feasibility(upper, dtype)
        rho = jnp.asarray(point.rho, dtype)
        price = lambda *multipliers: trees.norm(multipliers).astype(dtype)
        objective = problem.smooth_upper(x, y) + problem.x.value(x) + rho * gap
        objective += (rho * price(lam, nu) + price(m.lam, m.nu)) * low
        objective += price(m.upper_lam, m.upper_nu) * high
        trifle = TRIFLE * epsilon
        fits = (low <= trifle) & (high <= trifle)
        return Answer(Point(x=x, y=y), jnp.where(fits, objective, jnp.inf))

    def sampled_parts(self, problem: ConstrainedBilevelProblem, point: Point) -> tuple[Tree, Array]:
        """The slopes of the lines, and the values: the gap's, and each constraint's, weighed.

        The slopes are those of `stationarity` in x and in y, and ρ times that of the Lagrangian at
        (λ̄, ν̄) in z. The values are g(x, y) − (g + λ̄ᵀc + ν̄ᵀe)(x, z), and what the constraints are
        at (x, y) and at (x, z), times `_weights`: all in one vector, whose error no line exceeds.
        """
        m = Multipliers() if point.multipliers is None else point.multipliers
        dtype = trees.dtype_of((point.x, point.y))
        rho = jnp.asarray(point.rho, dtype)
        e = _evaluation(problem, m, rho, point)
        of_x = trees.axpy(-rho, e.below[0], e.above[0])
        slopes = (of_x, e.above[1], trees.scale(rho, e.below[1]))
        pairs = (
            ((m.lam, m.nu), e.at_y),
            ((m.lam_bar, m.nu_bar), e.at_z),
            ((m.upper_lam, m.upper_nu), e.own),
        )
        weighed = [jax.tree.map(jnp.multiply, _weights(*pair), pair[1]) for pair in pairs]
        flat = [jnp.ravel(leaf).astype(dtype) for leaf in jax.tree.leaves(weighed)]
        return slopes, jnp.concatenate([jnp.ravel(e.lower - e.dual), *flat])

    def statements(self) -> int:
        return 2

    def radii(
        self,
        problem: ConstrainedBilevelProblem,
        point: Point,
        lines: dict[str, float],
        slope: float,
        value: float,
    ) -> dict[str, float]:
        """Distances change by the error of slopes, feasibility and complementarity by that of the
        weighed values.

        The gap's bound is by weak duality, which holds for the means over all samples too: λ̄ ≥ 0,
        and (z, λ̄, ν̄) do not depend on the samples that they are judged on. It changes by the error
        of its value and, through the tangent at z, as `sampled_change` says.
        """
        p, rho = point, float(point.rho)
        steep = lines["response_z"] / rho
        change = sampled_change(problem, "y", (p.x, p.y, p.z), steep, slope / rho)
        found = dict.fromkeys(lines, value)
        found |= {"stationarity": slope, "response_z": slope, "lower_gap": value + change}
        own, lower = CONSTRAINTS[2:], CONSTRAINTS[:2]
        for names, absent in ((OF_OWN, own), (OF_LOWER, lower)):
            if all(getattr(problem, name) is None for name in absent):
                found |= dict.fromkeys(names, 0.0)
        return found

    def of_samples(
        self,
        problem: ConstrainedBilevelProblem,
        point: Point,
        estimate: ConstrainedKKTCertificate,
    ) -> ConstrainedKKTCertificate:
        rests = (estimate.radius, estimate.modulus)
        radius, modulus = sampled_footing(problem, "y", point.x, point.y, rests)
        return dataclasses.replace(estimate, radius=radius, modulus=modulus)

    def with_witnesses(
        self, problem: ConstrainedBilevelProblem, point: Point, rho: Any = None
    ) -> Point:
        rho = point.rho if rho is None else rho
        positive(rho, "point.rho")
        rho = None if rho is None else jnp.asarray(rho, trees.dtype_of((point.x, point.y)))
        if point.z is None or point.multipliers is None or rho is None:
            return constrained_witnesses(problem, point, rho)
        return point.replace(rho=rho)


register(ConstrainedBilevelProblem, definition=ConstrainedKKT())
