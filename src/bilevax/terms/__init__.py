"""Proximable convex terms: the part of an objective that is not smooth, and its domain.

Each term knows its `value`, `prox`, `project`, `diameter`, `linear_oracle` and `support` over the
domain, `conjugate`, and `residual` (the exact distance to its subdifferential), for an array or any
pytree. A pytree of terms stands for one term per part.
"""

from bilevax.terms._term import LeafTerm, PerLeaf, Scaled, Term, as_term
from bilevax.terms.norms import L1, ElasticNet, GroupL2, Ridge
from bilevax.terms.sets import (
    Box,
    CappedSimplex,
    Free,
    L1Ball,
    L2Ball,
    LInfBall,
    NonNegative,
    Simplex,
)

__all__ = [
    "L1",
    "Box",
    "CappedSimplex",
    "ElasticNet",
    "Free",
    "GroupL2",
    "L1Ball",
    "L2Ball",
    "LInfBall",
    "LeafTerm",
    "NonNegative",
    "PerLeaf",
    "Ridge",
    "Scaled",
    "Simplex",
    "Term",
    "as_term",
]
