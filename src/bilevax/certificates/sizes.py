"""How large the things are whose difference a certificate's line is: what «relative» refers to."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array

from bilevax import trees
from bilevax.certificates.constrained import lower_lagrangian
from bilevax.problems import (
    BilevelProblem,
    ConstrainedBilevelProblem,
    MinimaxProblem,
    Multipliers,
    Point,
)
from bilevax.trees import Tree


@eqx.filter_jit
def line_sizes(problem: Any, point: Point) -> dict[str, Array]:
    """One size per line, in the units of the line.

    - Slopes, also those that ρ multiplies: ‖∇f‖ at the point, of the upper level alone. The parts
      that ρ multiplies are larger, but would make the tolerance grow with ρ.
    - The gap: the larger of the two values whose difference it is.
    - A constraint: how much x and y each contribute to it, to first order.
    - Complementarity: the multipliers times that.
    """
    if isinstance(problem, MinimaxProblem):
        gx, gy = problem.gradient(point.x, point.y)
        slope = trees.norm((gx, gy))
        return {"x": slope, "y": slope}
    if isinstance(problem, ConstrainedBilevelProblem):
        return _constrained(problem, point)
    return _bilevel(problem, point)


def _bilevel(problem: BilevelProblem, point: Point) -> dict[str, Array]:
    p = point
    slope = trees.norm(problem.upper_gradient(p.x1, p.x2, p.y1, p.y2))
    primal = problem.lower_value(p.x1, p.y1, p.z2)
    dual = problem.lower_value(p.x1, p.z1, p.y2)
    slopes = ("stationarity", "response_x2", "response_z1", "response_z2")
    return dict.fromkeys(slopes, slope) | {"gap": jnp.maximum(jnp.abs(primal), jnp.abs(dual))}


def _constrained(problem: ConstrainedBilevelProblem, point: Point) -> dict[str, Array]:
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

    def weighed(multipliers: tuple[Tree, Tree], sizes: tuple[Tree, Tree]) -> Array:
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
        "complementarity_z": weighed((m.lam_bar, m.nu_bar), at_z),
        "lower_gap": jnp.maximum(jnp.abs(primal), jnp.abs(dual)),
        "feasibility": norm(at_y),
        "complementarity": weighed((m.lam, m.nu), at_y),
        "upper_feasibility": norm(at_top),
        "upper_complementarity": weighed((m.upper_lam, m.upper_nu), at_top),
    }
