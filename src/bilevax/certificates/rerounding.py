"""Run a function with every operation rounded anew, to see what rounding does to its result.

Monte Carlo arithmetic (Parker 1997): the result of each operation that rounds is changed by a
random part of a unit in its last place. What the function returns then varies as much as rounding
may have changed it, whatever the cause: large terms that cancel, constants in the code, integers
that do not fit, a small term that vanishes beside a large one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, jaxpr_as_fun, jaxprs_in_params
from jaxtyping import Array

from bilevax.functions import applied, inlined
from bilevax.trees import Tree

# Operations whose result is exact.
# fmt: off
EXACT = {
    "abs", "argmax", "argmin", "broadcast_in_dim", "ceil", "clamp", "concatenate", "copy",
    "copy_p", "cummax", "cummin", "device_put", "dynamic_slice", "dynamic_update_slice",
    "expand_dims", "floor", "gather", "imag", "iota", "max", "min", "neg",
    "optimization_barrier", "pad", "real", "reduce_max", "reduce_min",
    "reshape", "rev", "round", "scatter", "select_and_gather_add", "select_n",
    "sharding_constraint", "sign", "slice", "sort", "split", "squeeze", "stack",
    "stop_gradient", "tile", "top_k", "transpose", "unstack",
}
# fmt: on
# Operations that add up products or numbers: each of these is rounded, however little is left of
# the sum. Which of their operands is moved, entry by entry; None for all that are not large, and at
# least the smallest.
SUMS = {
    "dot_general": None,
    "conv_general_dilated": None,
    "reduce_sum": 0,
    "cumsum": 0,
    "cumlogsumexp": 0,
    "reduce_window_sum": 0,
    "reduce_prod": 0,
    "cumprod": 0,
    "scatter-add": 2,
    "scatter_add": 2,
    "fft": 0,
}
# An operand of more entries than this is large.
LARGE = 1 << 16
# Random numbers are drawn once, and come again after so many, a prime. Each operation begins at
# another place among the first of them, which no simple rule takes it to; in a loop the place moves
# on.
PERIOD, SPREAD, SCATTER, ONWARDS = 65_521, 4093, 2_654_435_761, 1_299_709


class Rerounding:
    """A function that is traced once for some arguments, to be run with other roundings."""

    def __init__(self, function: Callable[..., Tree], *arguments: Tree):
        self.traced, shape = jax.make_jaxpr(function, return_shape=True)(*arguments)
        self.structure = jax.tree.structure(shape)
        self.size = _largest(self.traced.jaxpr)

    def numbers(self, key: Array) -> Array:
        """Random units, up or down; none is so small that a result would stay as it is."""
        size = min(self.size, PERIOD) + SPREAD
        far = jax.random.uniform(key, (size,), jnp.float32, -0.49, 0.49)
        return far + jnp.where(far < 0, -0.51, 0.51).astype(far.dtype)

    def __call__(self, numbers: Array, begin: Array, *arguments: Tree) -> Tree:
        """What the function returns, with roundings from there on among the numbers."""
        run = _Run(numbers, begin)
        values = run.run(self.traced.jaxpr, self.traced.consts, jax.tree.leaves(arguments))
        return jax.tree.unflatten(self.structure, values)


class _Run:
    """One run of a traced function; `place` moves on in loops."""

    def __init__(self, numbers: Array, place: Array):
        self.numbers, self.place, self.count = numbers, place.astype(jnp.uint32), 0

    def run(self, jaxpr: Jaxpr, consts: Sequence[Any], arguments: Sequence[Any]) -> list[Any]:
        known: dict[Any, Any] = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *arguments)))
        read = lambda v: v.val if isinstance(v, Literal) else known[v]
        for eqn in jaxpr.eqns:
            results = self._results(jaxpr, eqn, [read(v) for v in eqn.invars])
            known.update(zip(eqn.outvars, results))
        return [read(v) for v in jaxpr.outvars]

    def _results(self, jaxpr: Jaxpr, eqn: Any, values: list[Any]) -> list[Any]:
        name, params = eqn.primitive.name, eqn.params
        if (inner := inlined(eqn)) is not None:
            return self.run(inner.jaxpr, inner.consts, values)
        if name == "scan":
            return self._scan(eqn, values)
        if name == "while":
            return self._while(params, values)
        if name == "cond":
            index, *operands = values
            branch = lambda inner: lambda *v: self.run(inner.jaxpr, inner.consts, v)
            return lax.switch(index, [branch(b) for b in params["branches"]], *operands)
        if name in SUMS:
            values = self._moved(SUMS[name], values)
        results = applied(jaxpr, eqn, values)
        return results if _is_exact(eqn) else [self._rounded(r) for r in results]

    def _scan(self, eqn: Any, values: list[Any]) -> list[Any]:
        params = eqn.params
        inner = params["jaxpr"]
        # Rows have an axis less inside. Versions of JAX name these numbers differently.
        less = lambda outside, inside: sum(
            a.aval.ndim > b.aval.ndim for a, b in zip(outside, inside, strict=True)
        )
        carried = len(eqn.outvars) - less(eqn.outvars, inner.jaxpr.outvars)
        given = len(eqn.invars) - carried - less(eqn.invars, inner.jaxpr.invars)
        consts, first, rows = (
            values[:given],
            values[given : given + carried],
            values[given + carried :],
        )

        def body(carry: tuple[Array, list], row: list) -> tuple[tuple[Array, list], list]:
            turn, state = carry
            results = self._turned(turn, inner, [*consts, *state, *row])
            return (turn + 1, results[:carried]), results[carried:]

        options = {name: params[name] for name in ("length", "reverse", "unroll")}
        (_, last), out = lax.scan(body, (jnp.uint32(0), first), rows, **options)
        return [*last, *out]

    def _while(self, params: dict[str, Any], values: list[Any]) -> list[Any]:
        of_cond, of_body = params["cond_nconsts"], params["body_nconsts"]
        cond, body = params["cond_jaxpr"], params["body_jaxpr"]
        asked, given = values[:of_cond], values[of_cond : of_cond + of_body]
        going = lambda s: jaxpr_as_fun(cond)(*asked, *s[1])[0]
        onwards = lambda s: (s[0] + 1, self._turned(s[0], body, [*given, *s[1]]))
        return lax.while_loop(going, onwards, (jnp.uint32(0), values[of_cond + of_body :]))[1]

    def _turned(self, turn: Array, inner: ClosedJaxpr, values: list[Any]) -> list[Any]:
        """The body of a loop in one of its turns, which has random numbers of its own."""
        outer = self.place
        self.place = outer + (turn + jnp.uint32(1)) * jnp.uint32(ONWARDS)
        results = self.run(inner.jaxpr, inner.consts, values)
        self.place = outer
        return results

    def _moved(self, which: int | None, values: list[Any]) -> list[Any]:
        """The operands of a sum, with each entry of one or of some of them moved."""
        sizes = [math.prod(jnp.shape(value)) for value in values]
        moves = lambda k: sizes[k] <= max(LARGE, min(sizes)) if which is None else k == which
        return [self._rounded(v) if moves(k) else v for k, v in enumerate(values)]

    def _rounded(self, result: Any) -> Any:
        dtype = jnp.result_type(result)
        if not jnp.issubdtype(dtype, jnp.inexact):
            return result
        self.count += 1
        begin = jnp.uint32(self.count * SCATTER % SPREAD)
        return result * (1 + share_of(self.numbers, self.place + begin, result))


def share_of(numbers: Array, place: Array, like: Any) -> Array:
    """Random shares of a unit in the last place, from there on, for an array like this."""
    shape, dtype = jnp.shape(like), jnp.result_type(like)
    size = math.prod(shape)
    drawn = lax.dynamic_slice(numbers, (place % jnp.uint32(SPREAD),), (min(size, PERIOD),))
    if size > PERIOD:
        drawn = jnp.tile(drawn, -(-size // PERIOD))[:size]
    return jnp.finfo(dtype).eps * drawn.reshape(shape).astype(dtype)


def _is_exact(eqn: Any) -> bool:
    name = eqn.primitive.name
    if name == "convert_element_type":
        given, made = eqn.invars[0].aval.dtype, eqn.outvars[0].aval.dtype
        if not jnp.issubdtype(given, jnp.inexact) or not jnp.issubdtype(made, jnp.inexact):
            return jnp.issubdtype(given, jnp.bool_)
        return bool(jnp.finfo(made).eps <= jnp.finfo(given).eps)
    return name in EXACT or (name == "mul" and any(map(_is_power_of_two, eqn.invars)))


def _is_power_of_two(variable: Any) -> bool:
    """Whether an operand is a number that only shifts the exponent of the other."""
    if not isinstance(variable, Literal) or np.ndim(variable.val):
        return False
    value = abs(float(np.real(variable.val)))
    return value == 0 or math.frexp(value)[0] == 0.5


def _largest(jaxpr: Jaxpr) -> int:
    """The number of entries of the largest result or operand of an operation."""
    results = [v.aval for eqn in jaxpr.eqns for v in (*eqn.outvars, *eqn.invars)]
    own = [math.prod(getattr(aval, "shape", ())) for aval in results]
    inner = [_largest(sub) for eqn in jaxpr.eqns for sub in jaxprs_in_params(eqn.params)]
    return max([1, *own, *inner])
