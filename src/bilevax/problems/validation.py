"""Look at a problem and a start before anything runs, and say what is wrong with them."""

from __future__ import annotations

import inspect
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from bilevax import trees
from bilevax.arguments import one_number, positive, warn
from bilevax.functions import plain
from bilevax.problems.form import Call, Form, registered
from bilevax.problems.point import Point
from bilevax.programs import quick
from bilevax.terms import Term
from bilevax.terms._term import is_term
from bilevax.trees import Tree

# Arrays that a function captures are compiled into the program; more than this deserves a warning.
CAPTURED_BYTES = 1 << 20


class StartWarning(UserWarning):
    """The start was moved into the domain."""


class CapturedArrayWarning(UserWarning):
    """A function captures large arrays instead of taking them through `data`."""


def require(problem: Any, form: type[Form], solver: str) -> None:
    """Refuse a problem of a form that a solver does not take."""
    if not isinstance(problem, form):
        raise TypeError(f"{solver} solves a {form.__name__}, not a {type(problem).__name__}")


def require_taken(problem: Any, form: type[Form], function: str) -> None:
    """Refuse a problem of a form that a reformulation does not take."""
    if not isinstance(problem, form):
        hint = ""
        if registered(problem, "reformulation") is not None:
            hint = "; bilevax.lagrangian(problem, start) makes one of it"
        raise TypeError(f"{function} takes a {form.__name__}, not a {type(problem).__name__}{hint}")


def require_form(problem: Any) -> None:
    """Refuse what is no problem at all."""
    if not isinstance(problem, Form):
        raise TypeError(
            "problem must be a bilevax.BilevelProblem, a bilevax.ConstrainedBilevelProblem, a "
            "bilevax.MinimaxProblem or another bilevax.problems.Form, not a "
            f"{type(problem).__name__}"
        )


def validate(problem: Form, start: Any) -> Point:
    """The start as arrays inside the domain; raises an error that names what is wrong."""
    start = check_point(problem, start, "start")
    check_functions(problem, start)
    found = _inspected(problem, start)
    blocks = {}
    for name, term, _ in problem.terms(start):
        nearest, distance, inside = found.blocks[name]
        blocks[name] = nearest
        if not np.isfinite(distance):
            raise ValueError(f"start.{name} cannot be projected into the domain of {term}")
        if not inside:
            warn(
                f"start.{name} lies outside the domain of {term} and was projected into it, a "
                f"distance of {distance:.3g}",
                StartWarning,
            )
    point = start.replace(**blocks)
    for call, (value_finite, slopes_finite) in zip(problem.calls(point), found.calls):
        if not (value_finite and all(slopes_finite)):
            _refuse(problem, call, slopes_finite)
    return point


class _Inspection(eqx.Module):
    """What one program finds out about a start."""

    blocks: dict[str, tuple[Tree, Array, Array]]  # the projection, how far it is, already inside?
    calls: list[tuple[Array, list[Array]]]  # is the value finite, is each part of the gradient?


@quick
def _inspected(problem: Form, start: Point) -> _Inspection:
    blocks = {}
    for name, term, block in problem.terms(start):
        nearest = term.project(block)
        moved = trees.norm(trees.subtract(block, nearest))
        blocks[name] = nearest, moved, jnp.isfinite(term.value(block))
    point = start.replace(**{name: nearest for name, (nearest, _, _) in blocks.items()})
    calls = []
    for call in problem.calls(point):

        def total(b: tuple, call: Call = call) -> tuple[Array, Tree]:
            value = call(*b, *problem.extra)  # one number, or the arrays of constraints
            return trees.total(value), value

        blocks_of = tuple(call.blocks.values())
        (_, value), gradient = jax.value_and_grad(total, has_aux=True)(blocks_of)
        calls.append((trees.all_finite(value), [trees.all_finite(part) for part in gradient]))
    return _Inspection(blocks, calls)


def _refuse(problem: Form, call: Call, slopes_finite: list[Any]) -> None:
    """Say which value, or which part of a gradient, is not finite at the start."""
    value = call(*call.blocks.values(), *problem.extra)
    if not trees.is_finite(value):
        shown = _first_bad(value) if call.name in problem.array_functions else f"is {value}"
        raise ValueError(f"{call.name} {shown} at the start; choose a start where it is finite")
    name = next(name for name, fine in zip(call.blocks, slopes_finite) if not fine)
    raise ValueError(
        f"the gradient of {call.name} with respect to {name} is not finite at the start; "
        "choose another start, or rewrite the function so that it has a gradient there"
    )


def check_point(problem: Any, point: Any, what: str = "point") -> Point:
    """The point as arrays of one dtype, with the blocks and shapes that the problem has."""
    require_form(problem)
    if not isinstance(point, Point):
        wanted = ", ".join(f"{name}=…" for name in problem.blocks)
        raise TypeError(f"{what} must be a bilevax.Point({wanted}), not a {type(point).__name__}")
    _check_blocks(problem, point, what)
    point = _as_floats(point, what)
    for name, term, block in problem.terms(point):
        term.check_block(block, f"{what}.{name}")
    for name, owner in problem.witnesses.items():
        given, like = getattr(point, name), None if owner is None else getattr(point, owner)
        compared = given is not None and owner is not None
        if compared and trees.Layout.of(given) != trees.Layout.of(like):
            raise ValueError(
                f"{what}.{name} must be shaped like {what}.{owner}, but has shapes "
                f"{jax.tree.map(jnp.shape, given)} against {jax.tree.map(jnp.shape, like)}"
            )
    problem.check_witnesses(point, what)
    return point


def _check_blocks(problem: Form, point: Point, what: str) -> None:
    names, given = problem.blocks, point.blocks
    for name in names:
        present = getattr(problem, name) is not None
        if present and name not in given:
            raise ValueError(f"{what} lacks {name}: the problem has a term for it")
        if name in given and not present:
            raise ValueError(
                f"{what} has {name}, but the problem has no term for it; leave it out of the "
                f"{what}, or give the problem {name}=bilevax.terms.Free() or another term"
            )
    for name in given:
        if name not in (*names, *problem.witnesses):
            raise ValueError(f"{what} has {name}, but a {type(problem).__name__} has only {names}")
    for name, owner in problem.witnesses.items():
        if name in given and owner is not None and getattr(problem, owner) is None:
            raise ValueError(f"{what} has {name}, but the problem has no {owner}")


def _as_floats(point: Point, what: str) -> Point:
    """Every leaf a floating array of one dtype, without NaN."""
    for name, block in point.blocks.items():
        if isinstance(block, list | tuple) and block and all(isinstance(b, float) for b in block):
            raise TypeError(
                f"{what}.{name} is a {type(block).__name__} of numbers, which JAX takes for many "
                f"variables of one number; write jnp.asarray({list(block)})"
            )
    dtypes: dict[Any, str] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(point, is_leaf=is_term):
        where = f"{what}{jax.tree_util.keystr(path)}"
        try:
            if isinstance(leaf, str) or is_term(leaf):
                raise TypeError
            dtype = jnp.result_type(leaf)
        except (TypeError, ValueError):
            raise TypeError(f"{where} must be an array of floats, not {leaf!r}") from None
        if where.endswith(".rho"):
            continue  # a number, whose dtype is that of the blocks
        if not jnp.issubdtype(dtype, jnp.floating):
            raise TypeError(f"{where} must be floating, not {dtype}; write 0.0 instead of 0")
        if dtype not in (jnp.float32, jnp.float64):
            raise TypeError(f"{where} must be float32 or float64, not {dtype}")
        if not isinstance(leaf, float):
            dtypes.setdefault(dtype, where)
        if not trees.is_finite(leaf):
            raise ValueError(f"{where} holds NaN or infinity")
    if not jax.tree.leaves(point):
        raise ValueError(f"the {what} holds no arrays at all")
    if len(dtypes) > 1:
        seen = ", ".join(f"{where} is {dtype}" for dtype, where in dtypes.items())
        raise TypeError(f"all blocks of the {what} must share one dtype, but {seen}")
    dtype = next(iter(dtypes)) if dtypes else jnp.result_type(float)

    def array(leaf: Any) -> Any:
        same = isinstance(leaf, jax.Array) and leaf.dtype == dtype and not leaf.weak_type
        return leaf if same else np.asarray(leaf, dtype)

    return jax.tree.map(array, point)


def check_functions(problem: Form, point: Point) -> None:
    """Refuse functions that cannot be called on the point or do not return one float."""
    for call in problem.calls(point):
        _check_function(call, problem.extra, call.name in problem.array_functions)


def _check_function(call: Call, extra: tuple, returns_arrays: bool) -> None:
    label, blocks = call.name, call.blocks
    shown = f"{label}({', '.join([*blocks, *(['data'] if extra else [])])})"
    try:
        signature = inspect.signature(plain(call.function))
    except (TypeError, ValueError):
        signature = None
    if signature is not None:
        try:
            signature.bind(*blocks.values(), *extra)
        except TypeError as error:
            raise TypeError(
                f"{label} is called as {shown}, with None for an absent block, but it takes "
                f"{signature} ({error})"
            ) from None
    # The arrays of a module are arguments of the program; those of a closure are its constants.
    arrays, rest = eqx.partition(call.function, eqx.is_array)
    called = lambda arrays, *arguments: eqx.combine(arrays, rest)(*arguments)
    try:
        closed, shape = jax.make_jaxpr(called, return_shape=True)(arrays, *blocks.values(), *extra)
    except Exception as error:
        shapes = {name: jax.tree.map(jnp.shape, block) for name, block in blocks.items()}
        error.add_note(f"bilevax called {shown} with shapes {shapes}; None for an absent block")
        raise
    dtype = trees.dtype_of(list(blocks.values()))
    if returns_arrays:
        _check_constraint_shapes(shape, label)
    elif not hasattr(shape, "shape") or shape.shape != ():
        got = f"shape {shape.shape}" if hasattr(shape, "shape") else f"a {type(shape).__name__}"
        raise TypeError(f"{label} must return one number, not {got}; sum or average it")
    for leaf in jax.tree.leaves(shape):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise TypeError(f"{label} must return a float, not {leaf.dtype}")
        if leaf.dtype != dtype:
            raise TypeError(
                f"{label} returns {leaf.dtype} for a start of {dtype}; make the start, the data "
                "and the function's own constants one dtype"
            )
    captured = sum(getattr(c, "nbytes", 0) for c in closed.consts)
    if captured > CAPTURED_BYTES:
        warn(
            f"{label} captures {captured / 2**20:.0f} MiB of arrays, which become constants of the "
            "compiled program; pass them through data= instead",
            CapturedArrayWarning,
        )


def _check_constraint_shapes(shape: Tree, label: str) -> None:
    leaves = jax.tree.leaves(shape)
    if not leaves or any(not hasattr(leaf, "shape") for leaf in leaves):
        raise TypeError(
            f"{label} must return an array or a pytree of arrays, not {shape!r}; leave {label} out "
            "if there are none"
        )


def _first_bad(values: Tree) -> str:
    """The first entry of some arrays that is not finite, in words."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(values):
        bad = np.argwhere(~np.isfinite(np.atleast_1d(leaf)))
        if len(bad):
            where = jax.tree_util.keystr(path) + (f"{bad[0].tolist()}" if leaf.ndim else "")
            return f"holds {np.atleast_1d(leaf)[tuple(bad[0])]} at {where or 'its only entry'}"
    return "is finite"


def require_bounded(term: Term | None, block: Tree, name: str, solver: str) -> None:
    """Refuse an unbounded domain where a method's theory needs a bounded one."""
    if term is not None and not np.isfinite(float(diameter(term, block))):
        raise ValueError(
            f"{solver} needs bounded domains, and {name} = {term} is unbounded; take a term with a "
            f"bounded domain, such as Box(-R, R), L2Ball(R) or L1(w) + Box(-R, R)"
        )


@quick
def diameter(term: Term, block: Tree) -> Array:
    return term.diameter(block)


@quick
def _gap_is_bounded(term: Term, block: Tree) -> Array:
    """Whether the gap over a lower-level block has a bound: its term's conjugate is finite."""
    steep = [jax.tree.map(lambda leaf, s=s: jnp.full_like(leaf, s * 1e6), block) for s in (-1, 1)]
    return jnp.all(jnp.stack([jnp.isfinite(term.conjugate(g)) for g in steep]))


def require_gap_bound(term: Term | None, block: Tree, name: str, solver: str) -> None:
    """Refuse a lower-level term over which a method, whose steps rest on it, has no gap bound."""
    if term is not None and not bool(_gap_is_bounded(term, block)):
        raise ValueError(
            f"{solver} cannot bound the lower-level gap over {name} = {term}; take a term with a "
            "bounded domain, or add a Ridge to it"
        )


def require_precision(tolerance: float, dtype: Any, name: str = "tolerance") -> None:
    """Refuse a tolerance that cannot be told from rounding in this dtype."""
    one_number(tolerance, name)
    positive(tolerance, name)
    # A penalty of size 1/ε magnifies rounding by 1/ε: nothing below √eps can be certified.
    least = float(np.sqrt(jnp.finfo(dtype).eps))
    if tolerance < least:
        raise ValueError(
            f"{name}={tolerance:g} is too small for {jnp.dtype(dtype).name}, which carries "
            f"{least:.1e} at best"
            + (
                "; use float64: jax.config.update('jax_enable_x64', True)"
                if jnp.dtype(dtype) != jnp.float64
                else ""
            )
        )
