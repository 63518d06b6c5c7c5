"""Quadratic programs of a lower level: their solutions, and how a value of them changes."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import sparse

ACTIVE = 1e-7
# It has no types.
clarabel: Any = importlib.import_module("clarabel")


@dataclass(frozen=True)
class Program:
    """min ½yᵀHy + gᵀy with Ay ≤ b and Ey = e."""

    H: np.ndarray
    g: np.ndarray
    A: np.ndarray
    b: np.ndarray
    E: np.ndarray | None = None
    e: np.ndarray | None = None


@dataclass(frozen=True)
class Solved:
    """A solution with its multipliers; those of the equalities come apart."""

    y: np.ndarray
    lam: np.ndarray
    nu: np.ndarray


def solve(program: Program) -> Solved:
    """The solution by an interior-point method, then exactly from the rows that are active."""
    p = program
    E = np.zeros((0, len(p.g))) if p.E is None else p.E
    e = np.zeros(0) if p.e is None else p.e
    settings = clarabel.DefaultSettings()
    settings.verbose = False
    settings.tol_gap_abs = settings.tol_gap_rel = settings.tol_feas = 1e-11
    cones = [clarabel.ZeroConeT(len(e)), clarabel.NonnegativeConeT(len(p.b))]
    rows = sparse.csc_matrix(np.vstack([E, p.A]))
    upper = sparse.csc_matrix(np.triu(p.H))
    offsets = np.concatenate([e, p.b])
    found = clarabel.DefaultSolver(upper, p.g, rows, offsets, cones, settings).solve()
    if "Solved" not in str(found.status):
        raise RuntimeError(f"the lower level could not be solved: {found.status}")
    duals = np.array(found.z)
    near = Solved(np.array(found.x), duals[len(e) :], duals[: len(e)])
    for least in (1e-6, 1e-7, 1e-8, 1e-5, 1e-4):
        exact = _exactly(p, E, e, near, near.lam > least)
        if exact is not None:
            return exact
    return near


def _exactly(
    p: Program, E: np.ndarray, e: np.ndarray, near: Solved, active: np.ndarray
) -> Solved | None:
    """The solution with these rows active, if it is one; the nearest one to what is known."""
    rows = np.vstack([p.A[active], E])
    count = len(rows)
    matrix = np.block([[p.H, rows.T], [rows, np.zeros((count, count))]])
    known = np.concatenate([near.y, near.lam[active], near.nu])
    right = np.concatenate([-p.g, p.b[active], e])
    try:
        step = np.linalg.solve(matrix, right - matrix @ known)
    except np.linalg.LinAlgError:
        step = np.linalg.lstsq(matrix, right - matrix @ known, rcond=1e-12)[0]
    found = known + step
    lam = np.zeros(len(p.b))
    size, held = len(p.g), int(active.sum())
    y, lam[active] = found[:size], found[size : size + held]
    scale = 1 + np.abs(found).max()
    met = np.abs(matrix @ found - right).max() <= 1e-10 * scale
    inside = np.all(p.A @ y <= p.b + 1e-10 * scale) and np.all(lam >= -1e-12 * scale)
    return Solved(y, lam, found[size + held :]) if met and inside else None


def slope(
    hessian: np.ndarray,
    rows: np.ndarray,
    value_y: np.ndarray,
    lagrangian_yx: np.ndarray,
    rows_x: np.ndarray,
) -> np.ndarray:
    """How a value of the solution changes with x: minus the adjoint times what x does.

    `hessian` is that of the Lagrangian in y, `rows` the slopes in y of the active constraints and
    the equalities, `rows_x` their slopes in x.
    """
    count = len(rows)
    matrix = np.block([[hessian, rows.T], [rows, np.zeros((count, count))]])
    right = np.concatenate([value_y, np.zeros(count)])
    adjoint = np.linalg.lstsq(matrix, right, rcond=1e-13)[0]
    size = len(value_y)
    return -lagrangian_yx.T @ adjoint[:size] - rows_x.T @ adjoint[size:]
