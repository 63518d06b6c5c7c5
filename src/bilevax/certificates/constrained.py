"""How far a point is from KKT of the bilevel problem with a constrained lower level."""

from __future__ import annotations

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array

from bilevax import trees
from bilevax.certificates.certificate import Certificate, line
from bilevax.certificates.gap import excess_and_noise
from bilevax.certificates.rounding import ROUNDINGS, gradient_and_noise
from bilevax.problems import ConstrainedBilevelProblem, Multipliers, Point
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

    @property
    def gap(self) -> float:
        """The lower-level gap, by the name that every bilevel certificate has."""
        return self.lower_gap


def upper_lagrangian(problem: ConstrainedBilevelProblem, x: Tree, y: Tree, m: Multipliers) -> Array:
    """f1 + λ_Gᵀ G + ν_Hᵀ H, at (x, y)"""
    pairs = {"upper_constraints": m.upper_lam, "upper_equalities": m.upper_nu}
    return problem.smooth_upper(x, y) + _weighed(problem, pairs, x, y)


def lower_lagrangian(problem: ConstrainedBilevelProblem, x: Tree, z: Tree, m: Multipliers) -> Array:
    """g1 + λ̄ᵀc + ν̄ᵀe, at (x, z)"""
    pairs = {"constraints": m.lam_bar, "equalities": m.nu_bar}
    return problem.smooth_lower(x, z) + _weighed(problem, pairs, x, z)


def _weighed(problem: ConstrainedBilevelProblem, pairs: dict[str, Tree], x: Tree, y: Tree) -> Array:
    dtype = trees.dtype_of((x, y))
    total = jnp.zeros((), dtype)
    for name, multiplier in pairs.items():
        if multiplier is not None:
            total = total + trees.dot(multiplier, problem.called(name, x, y)).astype(dtype)
    return total


class _Judged(eqx.Module):
    """A problem and multipliers together, so that rounding is measured for all of them at once."""

    problem: ConstrainedBilevelProblem
    multipliers: Multipliers
    data: Tree  # what `gradient_and_noise` moves: the problem's

    def _stated(self) -> ConstrainedBilevelProblem:
        return dataclasses.replace(self.problem, data=self.data)

    def above(self, rho: Array, x: Tree, y: Tree) -> Array:
        """f1 + λ_GᵀG + ρ·g1 + λᵀc: what y and, in part, x see."""
        problem, m = self._stated(), self.multipliers
        pairs = {"constraints": m.lam, "equalities": m.nu}
        own = upper_lagrangian(problem, x, y, m) + _weighed(problem, pairs, x, y)
        return own + rho * problem.smooth_lower(x, y)

    def below(self, x: Tree, z: Tree) -> Array:
        return lower_lagrangian(self._stated(), x, z, self.multipliers)


def _feasibility(
    problem: ConstrainedBilevelProblem, names: tuple[str, str], x: Tree, y: Tree
) -> tuple[Array, Tree, Tree]:
    """‖([c]₊, e)‖, and both trees of values, with the rounding of a large one added."""
    inequalities, equalities = (problem.called(name, x, y) for name in names)
    positive = jax.tree.map(lambda c: jnp.maximum(c, 0), inequalities)
    size = trees.norm((positive, equalities)).astype(trees.dtype_of((x, y)))
    return size, inequalities, equalities


def _absolute(multiplier: Tree, values: Tree, noise: Array) -> Array:
    """|⟨multiplier, values⟩| with its rounding, and what `noise` in the values makes of it."""
    if multiplier is None:
        return jnp.zeros_like(noise)
    products = jax.tree.map(lambda m, v: jnp.sum(jnp.abs(m * v)), multiplier, values)
    eps = jnp.finfo(trees.dtype_of(values)).eps
    rounding = ROUNDINGS * eps * sum(jax.tree.leaves(products))
    return jnp.abs(trees.dot(multiplier, values)) + rounding + trees.norm(multiplier) * noise


def _values_noise(problem: ConstrainedBilevelProblem, names: tuple, x: Tree, y: Tree) -> Array:
    """The rounding in constraint values, as `gradient_and_noise` finds that in gradients."""
    values = lambda q: lambda *b: tuple((q.called(name, *b),) for name in names)
    _, noises = gradient_and_noise(values, problem, (problem.x, problem.y), (x, y))
    return sum(noises, jnp.zeros((), trees.dtype_of((x, y))))


@eqx.filter_jit
def constrained_kkt(problem: ConstrainedBilevelProblem, point: Point) -> dict[str, Array]:
    """The numbers of a `ConstrainedKKTCertificate`; costs two gradients of the penalty."""
    x, y, z = point.x, point.y, point.z
    m = Multipliers() if point.multipliers is None else point.multipliers
    dtype = trees.dtype_of((x, y))
    rho = jnp.asarray(point.rho, dtype)
    judged = _Judged(problem, m, problem.data)
    pair, own = ("constraints", "equalities"), ("upper_constraints", "upper_equalities")

    of_above = lambda q: jax.grad(lambda x, y: q.above(rho, x, y), argnums=(0, 1))
    of_below = lambda q: jax.grad(q.below, argnums=(0, 1))
    (ax, ay), (ax_noise, ay_noise) = gradient_and_noise(
        of_above, judged, (problem.x, problem.y), (x, y)
    )
    (bx, bz), (bx_noise, bz_noise) = gradient_and_noise(
        of_below, judged, (problem.x, problem.y), (x, z)
    )
    along_x = trees.norm(problem.x.residual(x, trees.axpy(-rho, bx, ax)))
    along_y = trees.norm((rho * problem.y).residual(y, ay))
    stationary = jnp.sqrt(along_x**2 + along_y**2) + ax_noise + ay_noise + rho * bx_noise
    response = rho * (trees.norm(problem.y.residual(z, bz)) + bz_noise)

    at_y, c_y, e_y = _feasibility(problem, pair, x, y)
    at_z, c_z, e_z = _feasibility(problem, pair, x, z)
    at_top, G, H = _feasibility(problem, own, x, y)
    noise_y = _values_noise(problem, pair, x, y)
    noise_z = _values_noise(problem, pair, x, z)
    noise_top = _values_noise(problem, own, x, y)

    # Weak duality: the constrained minimum is at least min over z of the Lagrangian at (λ̄, ν̄),
    # which is convex in z and lies above its tangent.
    here = problem.lower_value(x, y)
    dual_here = lower_lagrangian(problem, x, z, m)
    fall, fall_noise = excess_and_noise(problem.y, z, trees.scale(-1, bz), bz_noise, dtype)
    size = jnp.abs(here) + jnp.abs(dual_here)
    weights = _absolute(m.lam_bar, c_z, noise_z) + _absolute(m.nu_bar, e_z, noise_z)
    gap_noise = ROUNDINGS * jnp.finfo(dtype).eps * (size + weights) + fall_noise
    gap = jnp.maximum(here - dual_here + fall, 0) + gap_noise

    lines = {
        "stationarity": stationary,
        "response_z": response,
        "feasibility_z": at_z + noise_z,
        "complementarity_z": _absolute(m.lam_bar, c_z, noise_z) + _absolute(m.nu_bar, e_z, noise_z),
        "lower_gap": gap,
        "feasibility": at_y + noise_y,
        "complementarity": _absolute(m.lam, c_y, noise_y) + _absolute(m.nu, e_y, noise_y),
        "upper_feasibility": at_top + noise_top,
        "upper_complementarity": _absolute(m.upper_lam, G, noise_top)
        + _absolute(m.upper_nu, H, noise_top),
    }
    objective = problem.upper_value(x, y)
    inside = _in_domain(problem, point) & jnp.isfinite(objective) & (rho > 0)
    bounded = {
        k: jnp.where(inside & ~jnp.isnan(v), v, jnp.inf).astype(dtype) for k, v in lines.items()
    }
    return bounded | {"rho": rho, "objective": objective}


def _in_domain(problem: ConstrainedBilevelProblem, point: Point) -> Array:
    """x, y and z in their domains, and the multipliers of inequalities not negative."""
    values: list[Any] = [problem.x.value(point.x), problem.y.value(point.y)]
    values.append(problem.y.value(point.z))
    m = Multipliers() if point.multipliers is None else point.multipliers
    signs = [jnp.all(leaf >= 0) for leaf in jax.tree.leaves((m.lam, m.lam_bar, m.upper_lam))]
    finite = trees.all_finite(m)
    return jnp.all(jnp.stack([jnp.isfinite(v) for v in values] + signs + [finite]))
