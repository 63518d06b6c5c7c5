"""A point: the blocks of variables by name."""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree


class Multipliers(eqx.Module):
    """The multipliers of a constrained bilevel problem, each shaped like what its function returns.

    `lam` (λ ≥ 0) and `nu` weigh `constraints` and `equalities` at (x, y) in the stationarity of the
    whole; `lam_bar` (λ̄ ≥ 0) and `nu_bar` weigh them at (x, z), where they are the multipliers of
    the lower level. `upper_lam` (≥ 0) and `upper_nu` belong to `upper_constraints` and
    `upper_equalities`. Those of absent functions are None.
    """

    lam: PyTree = None
    lam_bar: PyTree = None
    nu: PyTree = None
    nu_bar: PyTree = None
    upper_lam: PyTree = None
    upper_nu: PyTree = None

    def __repr__(self) -> str:
        return _show_blocks(self)


class Point(eqx.Module):
    """The blocks of a problem's variables; blocks that a problem does not have are left out.

    A bilevel problem has x1, y1 and, where present, x2 and y2; (z1, z2) are the best responses
    that witness how far (y1, y2) is from a saddle point of the lower level, and rho is the penalty
    with which they do. A minimax problem has x and y. A constrained bilevel problem has x and y,
    and as witnesses z (a solution of the lower level at x), rho and the multipliers.
    """

    x1: PyTree = None
    x2: PyTree = None
    y1: PyTree = None
    y2: PyTree = None
    z1: PyTree = None
    z2: PyTree = None
    rho: PyTree = None
    x: PyTree = None
    y: PyTree = None
    z: PyTree = None
    multipliers: Multipliers | None = None

    def __repr__(self) -> str:
        return _show_blocks(self)


def _show_blocks(blocks: eqx.Module) -> str:
    """The blocks that are there, with their numbers."""

    def show(value: PyTree) -> str:
        if isinstance(value, Multipliers):
            return repr(value)
        with np.printoptions(precision=6, suppress=True, threshold=8):
            return eqx.tree_pformat(value, short_arrays=False)

    shown = {name: show(value) for name, value in vars(blocks).items() if value is not None}
    return f"{type(blocks).__name__}({', '.join(f'{k}={v}' for k, v in shown.items())})"


def as_arrays(data: PyTree) -> PyTree:
    """The numbers and NumPy arrays of a data tree as JAX arrays."""

    def leaf(path: tuple, value: object) -> jax.Array:
        if isinstance(value, jax.Array):
            if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
                where = f"data{jax.tree_util.keystr(path)}"
                raise TypeError(f"{where} is a PRNG key; pass jax.random.key_data of it")
            return value
        numeric = isinstance(value, bool | int | float | complex | np.ndarray | np.generic)
        if not (numeric and np.asarray(value).dtype.kind in "biufcV"):
            raise TypeError(
                f"data{jax.tree_util.keystr(path)} must be a number or an array of numbers, not a "
                f"{type(value).__name__}; what is not numeric belongs into the function itself"
            )
        return jnp.asarray(value)

    return jax.tree_util.tree_map_with_path(leaf, data)
