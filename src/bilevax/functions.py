"""A user's function, traced once for each shape of its arguments."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, cast

import equinox as eqx
import jax
from jax.extend.core import jaxprs_in_params


class Function(eqx.Module):
    """A function that a user wrote, called from many places of many programs.

    Without `jit` its Python code would run again at each of them. With it JAX records at the first
    call with arguments of some shapes what the code computes, and every program has the record
    itself in it, not a call.
    """

    function: Callable[..., Any]

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return jax.jit(self.function, inline=True)(*arguments, **named)


def as_function(function: Any, name: str) -> Callable[..., Any]:
    """What a user gave as a function of the variables; refuses what cannot be called."""
    if not callable(function):
        raise TypeError(f"{name} must be a function of the variables, not {function!r}")
    called = cast(Callable[..., Any], function)
    # A module has arrays of its own, which are arguments of a program and no part of a record.
    is_module = not jax.tree_util.treedef_is_leaf(jax.tree.structure(called))
    return called if is_module or not _recordable(called) else Function(called)


def _recordable(function: Callable[..., Any]) -> bool:
    """Whether JAX can keep a record for an object: it needs a hash and weak references."""
    try:
        hash(function)
        weakref.ref(function)
    except TypeError:
        return False
    return True


def plain(function: Any) -> Any:
    """The function as the user wrote it."""
    return function.function if isinstance(function, Function) else function


def operations(function: Callable[..., Any], *arguments: Any) -> int:
    """How many operations a function is traced to, about: what it costs to compile."""

    def count(jaxpr: Any) -> int:
        inner = [sub for eqn in jaxpr.eqns for sub in jaxprs_in_params(eqn.params)]
        return len(jaxpr.eqns) + sum(map(count, inner))

    return count(jax.make_jaxpr(function)(*arguments).jaxpr)
