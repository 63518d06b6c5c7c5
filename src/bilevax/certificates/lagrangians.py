"""The two levels of a constrained problem with their constraints weighed by multipliers."""

from __future__ import annotations

from collections.abc import Iterable

from jaxtyping import Array

from bilevax import trees
from bilevax.problems import ConstrainedBilevelProblem, Multipliers
from bilevax.trees import Tree


def weighed(value: Array, pairs: Iterable[tuple[Tree, Tree]]) -> Array:
    """value + Σ ⟨multiplier, constraint values⟩ over the pairs that are there."""
    for multiplier, values in pairs:
        if multiplier is not None:
            value = value + trees.dot(multiplier, values).astype(value.dtype)
    return value


def upper_lagrangian(problem: ConstrainedBilevelProblem, x: Tree, y: Tree, m: Multipliers) -> Array:
    """f1 + λ_Gᵀ G + ν_Hᵀ H, at (x, y)"""
    called = lambda name: problem.called(name, x, y)
    pairs = (m.upper_lam, called("upper_constraints")), (m.upper_nu, called("upper_equalities"))
    return weighed(problem.smooth_upper(x, y), pairs)


def lower_lagrangian(problem: ConstrainedBilevelProblem, x: Tree, z: Tree, m: Multipliers) -> Array:
    """g1 + λ̄ᵀc + ν̄ᵀe, at (x, z)"""
    called = lambda name: problem.called(name, x, z)
    pairs = (m.lam_bar, called("constraints")), (m.nu_bar, called("equalities"))
    return weighed(problem.smooth_lower(x, z), pairs)
