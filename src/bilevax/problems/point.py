"""A point: the blocks of variables by name."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

# The names of the blocks of all problem forms; each form declares its own.
_NAMES: set[str] = set()


def declare_blocks(*names: str) -> None:
    """Let points have blocks of these names."""
    _NAMES.update(names)


def _order(name: str) -> tuple[int, str]:
    return len(name), name


@jax.tree_util.register_pytree_with_keys_class
class Point:
    """The blocks of a problem's variables; blocks that a problem does not have are left out.

    A bilevel problem has x1, y1 and, where present, x2 and y2. As witnesses of how good it is, its
    point may carry the best responses (z1, z2) of the lower level and the penalty rho. A minimax
    problem has x and y. A constrained bilevel problem has x and y, and as witnesses z (a solution
    of the lower level at x), rho and the multipliers. A block that is left out reads as None.
    """

    __slots__ = ("_blocks",)
    _blocks: dict[str, Any]

    def __init__(self, *unnamed: PyTree, **blocks: PyTree):
        if unnamed:
            raise TypeError("the blocks of a Point are named: bilevax.Point(x1=…, y1=…)")
        if unknown := [name for name in blocks if name not in _NAMES]:
            known = ", ".join(sorted(_NAMES, key=_order))
            raise TypeError(f"a Point has no block {unknown[0]!r}; the blocks are {known}")
        given = {name: blocks[name] for name in sorted(blocks, key=_order)}
        _set(self, {name: block for name, block in given.items() if block is not None})

    @property
    def blocks(self) -> dict[str, Any]:
        """The blocks that are there, by name."""
        return dict(self._blocks)

    def replace(self, **blocks: PyTree) -> Point:
        """The same point with other blocks in the place of these; None takes one out."""
        return Point(**(self._blocks | blocks))

    __replace__ = replace

    def __getattr__(self, name: str) -> Any:
        if name in _NAMES:
            return self._blocks.get(name)
        raise AttributeError(f"a Point has no block {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"a Point does not change; point.replace({name}=…) makes another")

    def __repr__(self) -> str:
        return f"Point({_shown(self._blocks)})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Point) and bool(eqx.tree_equal(self, other))

    def __hash__(self) -> int:
        return hash(jax.tree.structure(self))

    def __reduce__(self) -> tuple:
        return _restored, (dict(self._blocks),)

    def tree_flatten_with_keys(self) -> tuple[list[tuple[Any, Any]], tuple[str, ...]]:
        keyed = [(jax.tree_util.GetAttrKey(name), block) for name, block in self._blocks.items()]
        return keyed, tuple(self._blocks)

    @classmethod
    def tree_unflatten(cls, names: tuple[str, ...], blocks: Any) -> Point:
        # What JAX puts in the place of a block is kept, whatever it is.
        return _restored(dict(zip(names, blocks)))


def _set(point: Point, blocks: dict[str, Any]) -> None:
    object.__setattr__(point, "_blocks", blocks)


def _restored(blocks: dict[str, Any]) -> Point:
    point = object.__new__(Point)
    _set(point, blocks)
    return point


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
        given = {name: block for name, block in vars(self).items() if block is not None}
        return f"Multipliers({_shown(given)})"


def _shown(blocks: dict[str, Any]) -> str:
    """Blocks with their numbers."""

    def show(value: PyTree) -> str:
        if isinstance(value, Multipliers):
            return repr(value)
        with np.printoptions(precision=6, suppress=True, threshold=8):
            return eqx.tree_pformat(value, short_arrays=False)

    return ", ".join(f"{name}={show(block)}" for name, block in blocks.items())


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
