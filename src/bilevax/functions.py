"""A user's function, traced once for each shape of its arguments and state of what it reads."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, TypeVar, cast

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, jaxpr_as_fun, jaxprs_in_params

from bilevax.readings import Reading, reading

T = TypeVar("T")

# Operations that are others by a name of their own: where the other ones are.
INLINED = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "remat": "jaxpr",
    "checkpoint": "jaxpr",
    "remat2": "jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vjp_call_jaxpr": "fun_jaxpr",
}


class Function:
    """A function that a user wrote, called from many places of many programs.

    Without `jit` its Python code would run again at each of them. With it JAX records at the first
    call with arguments of some shapes what the code computes, and every program has the record
    itself in it, not a call.

    There is one for each function and each `reading` of what it reads; another reading makes
    another one, with records and programs of its own. A change that tracing itself makes, such as
    that of a counter, is none: the reading after it is taken for the one before.
    """

    def __init__(self, function: Callable[..., Any], now: Reading):
        self.function = function
        self._readings: set[Reading] = set()
        # Of the problem that was brought up to date last: what they read may be shared.
        self._siblings: weakref.WeakSet[Function] = weakref.WeakSet()
        self._accept(now)
        itself = weakref.ref(self)

        # A function of its own: JAX keeps its records by the function that is given to `jit`.
        @functools.wraps(function, updated=())
        def traced(*arguments: Any, **named: Any) -> Any:
            known = itself()
            assert known is not None
            return known._traced(arguments, named)

        self._recorded = jax.jit(traced, inline=True)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._recorded(*arguments, **named)

    def __repr__(self) -> str:
        return repr(self.function)

    def __reduce__(self) -> Any:
        return recorded, (self.function,)

    def current(self) -> Function:
        """The one for what the function reads now."""
        now = reading(self.function)
        return self if now in self._readings else recorded(self.function, now)

    def _accept(self, now: Reading) -> None:
        self._readings.add(now)
        _known[self.function, now] = self

    def _traced(self, arguments: tuple, named: dict[str, Any]) -> Any:
        fresh = [f for f in {self, *self._siblings} if reading(f.function) in f._readings]
        if self not in fresh:
            self._forget()  # a record of what is read now, made for what was read before
        value = self.function(*arguments, **named)
        for function in fresh:
            function._accept(reading(function.function))
        return value

    def _forget(self) -> None:
        for known in self._readings:
            if _known.get((self.function, known)) is self:
                del _known[self.function, known]
        self._readings.clear()


# The functions in use, so that a function with the same reading is the same one.
_known: weakref.WeakValueDictionary[tuple[Any, Reading], Function] = weakref.WeakValueDictionary()


def recorded(function: Callable[..., Any], now: Reading | None = None) -> Function:
    """The `Function` of a function for what it reads now."""
    now = reading(function) if now is None else now
    return _known.get((function, now)) or Function(function, now)


def up_to_date(tree: T) -> T:
    """The same problem with functions whose records fit what they read now."""
    leaves, structure = jax.tree.flatten(tree)
    new = [leaf.current() if isinstance(leaf, Function) else leaf for leaf in leaves]
    functions = [leaf for leaf in new if isinstance(leaf, Function)]
    for function in functions:
        function._siblings = weakref.WeakSet(f for f in functions if f is not function)
    changed = any(a is not b for a, b in zip(leaves, new))
    return jax.tree.unflatten(structure, new) if changed else tree


def as_function(function: Any, name: str) -> Callable[..., Any]:
    """What a user gave as a function of the variables; refuses what cannot be called."""
    if not callable(function):
        raise TypeError(f"{name} must be a function of the variables, not {function!r}")
    if isinstance(function, Function):
        return function.current()
    called = cast(Callable[..., Any], function)
    # A module has arrays of its own, which are arguments of a program and no part of a record.
    is_module = not jax.tree_util.treedef_is_leaf(jax.tree.structure(called))
    return called if is_module or not _recordable(called) else recorded(called)


def _recordable(function: Callable[..., Any]) -> bool:
    """Whether a record can be kept for an object: it needs a hash."""
    try:
        hash(function)
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


def inlined(eqn: Any) -> ClosedJaxpr | None:
    """What an operation stands for, if it is others by a name of their own."""
    inner = eqn.params.get(INLINED.get(eqn.primitive.name, ""))
    return inner if inner is None or isinstance(inner, ClosedJaxpr) else ClosedJaxpr(inner, ())


def applied(jaxpr: Jaxpr, eqn: Any, values: list[Any]) -> list[Any]:
    """An operation of a function as it is."""
    if any(True for _ in jaxprs_in_params(eqn.params)):
        # One that holds others, of a kind that is not looked into: a program of this one alone.
        places = [v for v in eqn.invars if not isinstance(v, Literal)]
        given = [x for v, x in zip(eqn.invars, values) if not isinstance(v, Literal)]
        parts = {"constvars": [], "invars": places, "outvars": eqn.outvars, "eqns": [eqn]}
        alone = jaxpr.replace(**parts, effects=eqn.effects)
        return list(jaxpr_as_fun(ClosedJaxpr(alone, ()))(*given))
    results = eqn.primitive.bind(*values, **eqn.params)
    return list(results) if eqn.primitive.multiple_results else [results]
