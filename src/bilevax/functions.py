"""A user's function, traced once for each shape of its arguments."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, cast

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun, jaxprs_in_params

from bilevax.arguments import tracing

# What each function was traced to, by the shapes of its arguments.
_TRACES: weakref.WeakKeyDictionary[Any, dict[Any, tuple[ClosedJaxpr, Any]]] = (
    weakref.WeakKeyDictionary()
)

# Settings of JAX that change what a function is traced to.
SETTINGS = (
    "jax_numpy_dtype_promotion",
    "jax_numpy_rank_promotion",
    "jax_default_matmul_precision",
)


class Function(eqx.Module):
    """A function that a user wrote, called from many places of many programs.

    JAX would run the user's Python code again at each of them. Here the first call with arguments
    of some shapes records what the code computes, and the others replay the record.
    """

    function: Callable[..., Any]

    def __call__(self, *arguments: Any) -> Any:
        leaves, structure = jax.tree.flatten(arguments)
        try:
            traces = _TRACES.setdefault(self.function, {})
        except TypeError:  # an object without a hash or without weak references
            return self.function(*arguments)
        key = (structure, *map(_kind, leaves), *_settings())
        if key not in traces:
            shapes = [jax.ShapeDtypeStruct(*_kind(leaf)[:2]) for leaf in leaves]
            called = jax.tree.unflatten(structure, shapes)
            closed, shape = jax.make_jaxpr(self.function, return_shape=True)(*called)
            if any(tracing(constant) for constant in closed.consts):
                return self.function(*arguments)  # it holds numbers of a program being traced
            traces[key] = closed, jax.tree.structure(shape)
        closed, structure = traces[key]
        strong = [jnp.asarray(leaf, jnp.result_type(leaf)) for leaf in leaves]
        return jax.tree.unflatten(structure, jaxpr_as_fun(closed)(*strong))


def _kind(leaf: Any) -> tuple[tuple[int, ...], Any]:
    return jnp.shape(leaf), jnp.result_type(leaf)


def _settings() -> tuple[Any, ...]:
    return (jnp.result_type(float), *(getattr(jax.config, name) for name in SETTINGS))


def as_function(function: Any, name: str) -> Callable[..., Any]:
    """What a user gave as a function of the variables; refuses what cannot be called."""
    if not callable(function):
        raise TypeError(f"{name} must be a function of the variables, not {function!r}")
    # A module has arrays of its own, which are arguments of a program and no part of a record.
    own = isinstance(function, eqx.Module) or bool(jax.tree.leaves(function, is_leaf=callable)[1:])
    called = cast(Callable[..., Any], function)
    return called if own else Function(called)


def plain(function: Any) -> Any:
    """The function as the user wrote it."""
    return function.function if isinstance(function, Function) else function


def operations(function: Callable[..., Any], *arguments: Any) -> int:
    """How many operations a function is traced to, about: what it costs to compile."""

    def count(jaxpr: Any) -> int:
        inner = [sub for eqn in jaxpr.eqns for sub in jaxprs_in_params(eqn.params)]
        return len(jaxpr.eqns) + sum(map(count, inner))

    return count(jax.make_jaxpr(function)(*arguments).jaxpr)


def forget() -> None:
    """Drop all records."""
    _TRACES.clear()
