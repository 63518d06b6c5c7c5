"""How far a point is from KKT of the bilevel problem with a constrained lower level."""

from __future__ import annotations

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array

from bilevax import trees
from bilevax.arguments import positive
from bilevax.certificates.certificate import Certificate, line
from bilevax.certificates.constrained_witnesses import constrained_witnesses
from bilevax.certificates.definition import Definition, bounded, term_values
from bilevax.certificates.gap import excess_and_noise
from bilevax.certificates.lagrangians import lower_lagrangian, weighed
from bilevax.certificates.rounding import ROUNDINGS, rounding
from bilevax.problems import ConstrainedBilevelProblem, Multipliers, Point, register
from bilevax.problems.constrained import CONSTRAINTS
from bilevax.trees import Tree


@dataclasses.dataclass(frozen=True)
class ConstrainedKKTCertificate(Certificate):
    """Every line of `def:cons_kkt`, for the point and the witnesses (z, ρ, λ, λ̄) it names.

    Equalities count as two inequalities each. `upper_feasibility` and `upper_complementarity` are
    the same conditions for the upper level's own constraints; they are zero without such. The
    distances come from the terms' closed forms, the lower gap is an upper bound, and each line has
    an allowance for rounding on top.
    """

    stationarity: float = line(
        "dist(0, ∂ of f + ρ(g(x,y) − g(x,z) − λ̄ᵀc(x,z)) + λᵀc(x,y) in (x,y))"
    )
    response_z: float = line("dist(0, ρ·∂ of g(x,z) + λ̄ᵀc(x,z) in z)")
    feasibility_z: float = line("‖[c(x,z)]₊‖")
    complementarity_z: float = line("|λ̄ᵀc(x,z)|")
    lower_gap: float = line("g(x,y) − min g(x,·) under the constraints, an upper bound")
    feasibility: float = line("‖[c(x,y)]₊‖")
    complementarity: float = line("|λᵀc(x,y)|")
    upper_feasibility: float = line("‖[G(x,y)]₊‖")
    upper_complementarity: float = line("|λ_Gᵀ G(x,y)|")
    rho: float = line("the penalty ρ of the witness")

    def lines(self) -> dict[str, float]:
        others = ("objective", "sizes", "rho")
        names = (f.name for f in dataclasses.fields(self) if f.name not in others)
        return {name: getattr(self, name) for name in names}

    def notes(self) -> dict[str, float]:
        return {"rho": self.rho, "objective": self.objective}

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


def _feasibility(values: tuple[Tree, Tree], dtype: Any) -> Array:
    """‖([c]₊, e)‖"""
    inequalities, equalities = values
    positive = jax.tree.map(lambda c: jnp.maximum(c, 0), inequalities)
    return trees.norm((positive, equalities)).astype(dtype)


def _absolute(multiplier: Tree, values: Tree, noise: Array) -> Array:
    """|⟨multiplier, values⟩| with its rounding, and what `noise` in the values makes of it."""
    if multiplier is None:
        return jnp.zeros_like(noise)
    products = jax.tree.map(lambda m, v: jnp.sum(jnp.abs(m * v)), multiplier, values)
    eps = jnp.finfo(trees.dtype_of(values)).eps
    rounding = ROUNDINGS * eps * sum(jax.tree.leaves(products))
    return jnp.abs(trees.dot(multiplier, values)) + rounding + trees.norm(multiplier) * noise


def _signs_hold(m: Multipliers) -> Array:
    """Whether no multiplier of an inequality is negative."""
    signs = [jnp.all(leaf >= 0) for leaf in jax.tree.leaves((m.lam, m.lam_bar, m.upper_lam))]
    return jnp.all(jnp.stack([jnp.asarray(True), *signs]))


class ConstrainedKKT(Definition):
    """`def:cons_kkt`: some ρ > 0, z, λ and λ̄ with every line at most ε.

    A certificate costs three gradients of the penalty.
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
        parts = lambda e: [*e.above, *e.below, *e.at_y, *e.at_z, *e.own]
        evaluate = lambda problem, point: parts(_evaluation(problem, m, rho, point))
        noise = rounding(evaluate, problem, point, parts(here), dtype)
        ax_noise, ay_noise, bx_noise, bz_noise = noise[:4]
        noise_y, noise_z, noise_top = (noise[k] + noise[k + 1] for k in (4, 6, 8))
        (ax, ay), (bx, bz) = here.above, here.below
        (c_y, e_y), (c_z, e_z), (G, H) = here.at_y, here.at_z, here.own
        along_x = trees.norm(problem.x.residual(x, trees.axpy(-rho, bx, ax)))
        along_y = trees.norm((rho * problem.y).residual(y, ay))
        stationary = jnp.sqrt(along_x**2 + along_y**2) + ax_noise + ay_noise + rho * bx_noise
        response = rho * (trees.norm(problem.y.residual(z, bz)) + bz_noise)

        # Weak duality: the constrained minimum is at least min over z of the Lagrangian at (λ̄, ν̄),
        # which is convex in z and lies above its tangent.
        terms = term_values(problem, point)
        value, dual = here.lower + terms["y"], here.dual
        fall, fall_noise = excess_and_noise(problem.y, z, trees.scale(-1, bz), bz_noise, dtype)
        size = jnp.abs(value) + jnp.abs(dual)
        weights = _absolute(m.lam_bar, c_z, noise_z) + _absolute(m.nu_bar, e_z, noise_z)
        gap_noise = ROUNDINGS * jnp.finfo(dtype).eps * (size + weights) + fall_noise
        gap = jnp.maximum(value - dual + fall, 0) + gap_noise

        lines = {
            "stationarity": stationary,
            "response_z": response,
            "feasibility_z": _feasibility(here.at_z, dtype) + noise_z,
            "complementarity_z": weights,
            "lower_gap": gap,
            "feasibility": _feasibility(here.at_y, dtype) + noise_y,
            "complementarity": _absolute(m.lam, c_y, noise_y) + _absolute(m.nu, e_y, noise_y),
            "upper_feasibility": _feasibility(here.own, dtype) + noise_top,
            "upper_complementarity": _absolute(m.upper_lam, G, noise_top)
            + _absolute(m.upper_nu, H, noise_top),
        }
        objective = here.upper + terms["x"]
        inside = trees.all_finite((terms, m)) & _signs_hold(m)
        inside &= jnp.isfinite(objective) & (rho > 0)
        return bounded(lines, inside, dtype) | {"rho": rho, "objective": objective}

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
