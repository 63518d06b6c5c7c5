"""Look at a problem and a start before anything runs, and say what is wrong with them."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from bilevax import trees
from bilevax.arguments import one_number, positive, warn
from bilevax.problems.bilevel import LOWER, UPPER, BilevelProblem
from bilevax.problems.constrained import CONSTRAINTS, ConstrainedBilevelProblem
from bilevax.problems.minimax import MinimaxProblem
from bilevax.problems.point import Point
from bilevax.terms import Term
from bilevax.terms._term import is_term
from bilevax.trees import Tree

# Arrays that a function captures are compiled into the program; more than this deserves a warning.
CAPTURED_BYTES = 1 << 20

BLOCKS = {
    BilevelProblem: UPPER,
    ConstrainedBilevelProblem: ("x", "y"),
    MinimaxProblem: ("x", "y"),
}
# What a point may carry besides its blocks, as witnesses of how good it is.
WITNESSES = {
    BilevelProblem: ("z1", "z2", "rho"),
    ConstrainedBilevelProblem: ("z", "rho", "multipliers"),
    MinimaxProblem: (),
}
# The multipliers of each constraint function.
OWNERS = {
    "constraints": ("lam", "lam_bar"),
    "equalities": ("nu", "nu_bar"),
    "upper_constraints": ("upper_lam",),
    "upper_equalities": ("upper_nu",),
}
Problem = BilevelProblem | ConstrainedBilevelProblem | MinimaxProblem


class StartWarning(UserWarning):
    """The start was moved into the domain."""


class CapturedArrayWarning(UserWarning):
    """A function captures large arrays instead of taking them through `data`."""


def require(problem: Any, form: type, solver: str) -> None:
    """Refuse a problem of a form that a solver does not take."""
    if not isinstance(problem, form):
        raise TypeError(f"{solver} solves a {form.__name__}, not a {type(problem).__name__}")


def validate(problem: Problem, start: Any) -> Point:
    """The start as arrays inside the domain; raises an error that names what is wrong."""
    start = check_point(problem, start, "start")
    blocks = {name: _inside(term, block, name) for name, term, block in _pairs(problem, start)}
    point = dataclasses.replace(start, **blocks)
    check_functions(problem, point)
    for function, label, arguments in _functions(problem, point):
        _check_finite(function, label, arguments, problem.data)
    return point


def check_functions(problem: Any, point: Point) -> None:
    """Refuse functions that cannot be called on the point or do not return one float."""
    for function, label, arguments in _functions(problem, point):
        _check_function(function, label, arguments, problem.data)


def check_point(problem: Any, point: Any, what: str = "point") -> Point:
    """The point as arrays of one dtype, with the blocks and shapes that the problem has."""
    if type(problem) not in BLOCKS:
        raise TypeError(
            "problem must be a bilevax.BilevelProblem, a bilevax.ConstrainedBilevelProblem or a "
            f"bilevax.MinimaxProblem, not a {type(problem).__name__}"
        )
    names = BLOCKS[type(problem)]
    if not isinstance(point, Point):
        wanted = ", ".join(f"{name}=…" for name in names)
        raise TypeError(f"{what} must be a bilevax.Point({wanted}), not a {type(point).__name__}")
    _check_blocks(problem, point, names, what)
    point = _as_floats(point, what)
    for name, term, block in _pairs(problem, point):
        term.check_block(block, f"{what}.{name}")
    for name, owner in (("z1", "y1"), ("z2", "y2"), ("z", "y")):
        given, like = getattr(point, name), getattr(point, owner)
        if given is not None and trees.Layout.of(given) != trees.Layout.of(like):
            raise ValueError(
                f"{what}.{name} must be shaped like {what}.{owner}, but has shapes "
                f"{jax.tree.map(jnp.shape, given)} against {jax.tree.map(jnp.shape, like)}"
            )
    if point.multipliers is not None:
        _check_multipliers(problem, point, what)
    return point


def _check_multipliers(problem: ConstrainedBilevelProblem, point: Point, what: str) -> None:
    """Refuse multipliers that are missing, superfluous, or not shaped like their constraints."""
    for function, names in OWNERS.items():
        wanted = jax.eval_shape(lambda x, y, f=function: problem.called(f, x, y), point.x, point.y)
        for name in names:
            given = getattr(point.multipliers, name)
            if (given is None) != (wanted is None):
                verb = "lacks" if given is None else "has"
                has = "has" if wanted is not None else "has no"
                raise ValueError(
                    f"{what}.multipliers {verb} {name}, but the problem {has} {function}; give all "
                    "multipliers of its constraints, or leave multipliers out"
                )
            if wanted is not None and trees.Layout.of(given) != trees.Layout.of(wanted):
                raise ValueError(
                    f"{what}.multipliers.{name} must be shaped like what {function} returns, "
                    f"{jax.tree.map(jnp.shape, wanted)}, not {jax.tree.map(jnp.shape, given)}"
                )


def _pairs(problem: Any, point: Point) -> list[tuple[str, Term, Tree]]:
    """Each block that the point has, with its name and term."""
    owners = {name: name for name in BLOCKS[type(problem)]}
    if isinstance(problem, BilevelProblem):
        owners |= {"z1": "y1", "z2": "y2"}
    if isinstance(problem, ConstrainedBilevelProblem):
        owners |= {"z": "y"}
    return [
        (name, getattr(problem, owner), getattr(point, name))
        for name, owner in owners.items()
        if getattr(point, name) is not None
    ]


def _check_blocks(problem: Any, start: Point, names: tuple[str, ...], what: str) -> None:
    for name in names:
        present, given = getattr(problem, name) is not None, getattr(start, name) is not None
        if present and not given:
            raise ValueError(f"{what} lacks {name}: the problem has a term for it")
        if given and not present:
            raise ValueError(
                f"{what} has {name}, but the problem has no term for it; leave it out of the "
                f"{what}, or give the problem {name}=bilevax.terms.Free() or another term"
            )
    allowed = (*names, *WITNESSES[type(problem)])
    for name, block in vars(start).items():
        if name not in allowed and block is not None:
            raise ValueError(f"{what} has {name}, but a {type(problem).__name__} has only {names}")
    if start.z2 is not None and getattr(problem, "y2", None) is None:
        raise ValueError(f"{what} has z2, but the problem has no y2")


def _as_floats(start: Point, what: str) -> Point:
    """Every leaf a floating array of one dtype, without NaN."""
    for name, block in vars(start).items():
        if isinstance(block, list | tuple) and block and all(isinstance(b, float) for b in block):
            raise TypeError(
                f"{what}.{name} is a {type(block).__name__} of numbers, which JAX takes for many "
                f"variables of one number; write jnp.asarray({list(block)})"
            )
    dtypes: dict[Any, str] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(start, is_leaf=is_term):
        where = f"{what}{jax.tree_util.keystr(path)}"
        try:
            if isinstance(leaf, str) or is_term(leaf):
                raise TypeError
            dtype = jnp.result_type(leaf)
        except (TypeError, ValueError):
            raise TypeError(f"{where} must be an array of floats, not {leaf!r}") from None
        if where.endswith(".rho"):
            continue  # a number, whose dtype is the blocks'
        if not jnp.issubdtype(dtype, jnp.floating):
            raise TypeError(f"{where} must be floating, not {dtype}; write 0.0 instead of 0")
        if dtype not in (jnp.float32, jnp.float64):
            raise TypeError(f"{where} must be float32 or float64, not {dtype}")
        array = jnp.asarray(leaf)
        if not isinstance(leaf, float):
            dtypes.setdefault(array.dtype, where)
        if not bool(jnp.all(jnp.isfinite(array))):
            raise ValueError(f"{where} holds NaN or infinity")
    if not jax.tree.leaves(start):
        raise ValueError(f"the {what} holds no arrays at all")
    if len(dtypes) > 1:
        seen = ", ".join(f"{where} is {dtype}" for dtype, where in dtypes.items())
        raise TypeError(f"all blocks of the {what} must share one dtype, but {seen}")
    dtype = next(iter(dtypes)) if dtypes else jnp.result_type(float)
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), start)


@eqx.filter_jit
def _nearest(term: Term, block: Tree) -> tuple[Tree, Array, Array]:
    """The projection of a block, how far it is, and whether the block was inside already."""
    nearest = term.project(block)
    moved = trees.norm(trees.subtract(block, nearest))
    return nearest, moved, jnp.isfinite(term.value(block))


def _inside(term: Term, block: Tree, name: str) -> Tree:
    """The block, projected into its domain with a warning if it was outside."""
    nearest, distance, inside = _nearest(term, block)
    if not np.isfinite(distance):
        raise ValueError(f"start.{name} cannot be projected into the domain of {term}")
    if not inside:
        warn(
            f"start.{name} lies outside the domain of {term} and was projected into it, a distance "
            f"of {distance:.3g}",
            StartWarning,
        )
    return nearest


def _functions(problem: Any, point: Point) -> list[tuple[Callable[..., Array], str, dict]]:
    """Each user function with the name of its argument and the blocks it is called with."""
    if isinstance(problem, MinimaxProblem):
        return [(problem.objective, "objective", {"x": point.x, "y": point.y})]
    if isinstance(problem, ConstrainedBilevelProblem):
        names = ("upper", "lower", *CONSTRAINTS)
        functions = {name: getattr(problem, name) for name in names}
        blocks = {"x": point.x, "y": point.y}
        return [(f, name, blocks) for name, f in functions.items() if f is not None]
    return [
        (problem.upper, "upper", {name: getattr(point, name) for name in UPPER}),
        (problem.lower, "lower", {name: getattr(point, name) for name in LOWER}),
    ]


def _check_function(function: Any, label: str, blocks: dict[str, Tree], data: Tree) -> None:
    extra = () if data is None else (data,)
    call = f"{label}({', '.join([*blocks, *(['data'] if extra else [])])})"
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        signature = None
    if signature is not None:
        try:
            signature.bind(*blocks.values(), *extra)
        except TypeError as error:
            raise TypeError(
                f"{label} is called as {call}, with None for an absent block, but it takes "
                f"{signature} ({error})"
            ) from None
    # The arrays of a module are arguments of the program; those of a closure are its constants.
    arrays, rest = eqx.partition(function, eqx.is_array)
    called = lambda arrays, *arguments: eqx.combine(arrays, rest)(*arguments)
    try:
        closed, shape = jax.make_jaxpr(called, return_shape=True)(arrays, *blocks.values(), *extra)
    except Exception as error:
        shapes = {name: jax.tree.map(jnp.shape, block) for name, block in blocks.items()}
        error.add_note(f"bilevax called {call} with shapes {shapes}; None for an absent block")
        raise
    dtype = trees.dtype_of(list(blocks.values()))
    if label in CONSTRAINTS:
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


@eqx.filter_jit
def _value_and_gradient(function: Any, blocks: tuple, extra: tuple) -> tuple[Array, tuple]:
    def total(b: tuple) -> tuple[Array, Tree]:
        value = function(*b, *extra)  # one number, or the arrays of constraints
        return trees.total(value), value

    (_, value), gradient = jax.value_and_grad(total, has_aux=True)(blocks)
    return value, gradient


def _check_finite(function: Any, label: str, blocks: dict[str, Tree], data: Tree) -> None:
    """Refuse a start at which the function or one of its gradients is not finite, naming it."""
    extra = () if data is None else (data,)
    value, gradient = _value_and_gradient(function, tuple(blocks.values()), extra)
    if not bool(trees.all_finite(value)):
        shown = f"is {value}" if label not in CONSTRAINTS else _first_bad(value)
        raise ValueError(f"{label} {shown} at the start; choose a start where it is finite")
    for name, part in zip(blocks, gradient):
        if not bool(trees.all_finite(part)):
            raise ValueError(
                f"the gradient of {label} with respect to {name} is not finite at the start; "
                "choose another start, or rewrite the function so that it has a gradient there"
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
    if term is not None and not np.isfinite(float(term.diameter(block))):
        raise ValueError(
            f"{solver} needs bounded domains, and {name} = {term} is unbounded; take a term with a "
            f"bounded domain, such as Box(-R, R), L2Ball(R) or L1(w) + Box(-R, R)"
        )


def require_gap_bound(term: Term | None, block: Tree, name: str, solver: str) -> None:
    """Refuse a lower-level term over which a gap cannot be bounded: its conjugate is infinite."""
    if term is None:
        return
    steep = [jax.tree.map(lambda leaf, s=s: jnp.full_like(leaf, s * 1e6), block) for s in (-1, 1)]
    if not all(np.isfinite(float(term.conjugate(g))) for g in steep):
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
