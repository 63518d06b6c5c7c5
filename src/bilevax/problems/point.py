"""A point: the blocks of variables by name."""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree


class Point(eqx.Module):
    """The blocks of a problem's variables; blocks that a problem does not have are left out.

    A bilevel problem has x1, y1 and, where present, x2 and y2; (z1, z2) are the best responses
    that witness how far (y1, y2) is from a saddle point of the lower level, and rho is the penalty
    with which they do. A minimax problem has x and y.
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

    def __repr__(self) -> str:
        def show(value: PyTree) -> str:
            with np.printoptions(precision=6, suppress=True, threshold=8):
                return eqx.tree_pformat(value, short_arrays=False)

        blocks = {name: value for name, value in vars(self).items() if value is not None}
        return f"Point({', '.join(f'{name}={show(value)}' for name, value in blocks.items())})"


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
