"""Wrong calls: each must raise, at once, an error that names what is wrong and says what to do.

The table holds one wrong call a row. Every call is made in a folder with some files in it, which
must be the same afterwards. Notes attached to an exception count as part of its message.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bilevax as bx
from bilevax import terms
from bilevax.problems import library
from bilevax.problems.validation import CapturedArrayWarning, StartWarning

BOX = terms.Box(-1.0, 1.0)
TWO, THREE = jnp.full(2, 0.25), jnp.full(3, 0.25)
PAIR = {"a": TWO, "b": THREE}
NAN, INF = float("nan"), float("inf")
XY = bx.Point(x=TWO, y=TWO)
UPPER_LOWER = bx.Point(x1=TWO, y1=TWO)


def total(tree: Any) -> Any:
    return sum(jnp.sum(leaf) for leaf in jax.tree.leaves(tree))


def h(x: Any, y: Any) -> Any:
    return total(x) ** 2 - total(y) ** 2


def f(x1: Any, x2: Any, y1: Any, y2: Any) -> Any:
    return total((x1, y1, y2)) ** 2 - total(x2) ** 2


def g(x1: Any, y1: Any, y2: Any) -> Any:
    return total((x1, y1)) ** 2 - total(y2) ** 2


def minimax(objective: Any = h, x: Any = BOX, y: Any = BOX, **options: Any) -> bx.MinimaxProblem:
    return bx.MinimaxProblem(objective, x, y, **{"smoothness": 8.0, **options})


def bilevel(upper: Any = f, lower: Any = g, **options: Any) -> bx.BilevelProblem:
    given = {"x1": BOX, "y1": BOX, "upper_smoothness": 8.0, "lower_smoothness": 8.0, **options}
    return bx.BilevelProblem(upper, lower, **given)


def bounded_above(**options: Any) -> bx.ConstrainedBilevelProblem:
    total = lambda x, y: jnp.sum(x * y)
    return bx.ConstrainedBilevelProblem(
        total, total, constraints=lambda x, y: y, x=BOX, y=BOX, **options
    )


FULL = {"x2": BOX, "y2": BOX}


def solve(problem: Any = None, start: Any = XY, **options: Any) -> bx.Solution:
    """Short, should it run at all."""
    problem = minimax() if problem is None else problem
    return bx.solve(problem, start, **{"max_gradients": 8, **options})


def solve_bilevel(problem: Any = None, start: Any = UPPER_LOWER, **options: Any) -> bx.Solution:
    return solve(bilevel() if problem is None else problem, start, **options)


def objective(function: Any, start: Any = XY, **options: Any) -> bx.Solution:
    return solve(minimax(function, **options), start)


def at(x: Any = TWO, y: Any = TWO, **blocks: Any) -> bx.Solution:
    return solve(start=bx.Point(x=x, y=y, **blocks))


def with_y(term: Any, y: Any = TWO) -> bx.Solution:
    return solve(minimax(y=term), bx.Point(x=TWO, y=y))


def certify(point: Any = UPPER_LOWER, **options: Any) -> bx.Certificate:
    return bx.certify(bilevel(), point, **options)


def raises(*_: Any) -> Any:
    raise RuntimeError("my own words")


def without_return(x: Any, y: Any) -> None:
    h(x, y)


def row(name: str, call: Callable[[], Any], exception: type[Exception], message: str) -> Any:
    """A wrong call, the error it must raise, and the parts of its message, between ellipses."""
    return pytest.param(call, exception, message.split(" … "), id=name)


FUNCTIONS = [
    row("objective-number", lambda: minimax(3.0), TypeError, "objective … function"),
    row("upper-none", lambda: bilevel(upper=None), TypeError, "upper … function"),
    row("lower-string", lambda: bilevel(lower="g"), TypeError, "lower … function"),
    row(
        "objective-one-argument",
        lambda: objective(lambda x: total(x)),
        TypeError,
        "objective(x, y) … takes",
    ),
    row(
        "upper-without-absent-blocks",
        lambda: solve_bilevel(bilevel(upper=lambda x1, y1: total((x1, y1)))),
        TypeError,
        "upper(x1, x2, y1, y2) … None for an absent block",
    ),
    row(
        "lower-of-four",
        lambda: solve_bilevel(bilevel(lower=f)),
        TypeError,
        "lower(x1, y1, y2) … takes",
    ),
    row(
        "upper-uses-absent-block",
        lambda: solve_bilevel(bilevel(upper=lambda x1, x2, y1, y2: jnp.sum(x1 + x2))),
        TypeError,
        "upper … None for an absent block",
    ),
    row(
        "data-not-accepted",
        lambda: objective(h, data=TWO),
        TypeError,
        "objective(x, y, data) … takes",
    ),
    row(
        "data-not-given",
        lambda: objective(lambda x, y, data: h(x, y) + jnp.sum(data)),
        TypeError,
        "objective(x, y) … data",
    ),
    row("objective-vector", lambda: objective(lambda x, y: x * y), TypeError, "objective … sum"),
    row(
        "objective-shape-1",
        lambda: objective(lambda x, y: jnp.sum(x * y, keepdims=True)),
        TypeError,
        "objective … shape (1,) … one number",
    ),
    row(
        "objective-with-auxiliary",
        lambda: objective(lambda x, y: (h(x, y), x)),
        TypeError,
        "objective … one number … tuple",
    ),
    row(
        "objective-without-return",
        lambda: objective(without_return),
        TypeError,
        "objective … one number … None",
    ),
    row(
        "objective-integer",
        lambda: objective(lambda x, y: jnp.sum(x > 0)),
        TypeError,
        "objective … float … int",
    ),
    row(
        "objective-boolean",
        lambda: objective(lambda x, y: jnp.all(x > y)),
        TypeError,
        "objective … float … bool",
    ),
    row(
        "objective-complex",
        lambda: objective(lambda x, y: h(x, y).astype(complex)),
        TypeError,
        "objective … float … complex",
    ),
    row(
        "upper-float32",
        lambda: solve_bilevel(bilevel(upper=lambda *b: f(*b).astype(jnp.float32))),
        TypeError,
        "upper … float32 … float64 … one dtype",
    ),
    row("objective-raises", lambda: objective(raises), RuntimeError, "my own words … objective"),
    row(
        "objective-shapes-clash",
        lambda: objective(lambda x, y: jnp.sum(x * y), bx.Point(x=TWO, y=THREE)),
        TypeError,
        "objective(x, y) … (3,)",
    ),
    row(
        "objective-branches",
        lambda: objective(lambda x, y: h(x, y) if x[0] > 0 else 0.0),
        jax.errors.TracerBoolConversionError,
        "objective(x, y)",
    ),
    row(
        "objective-in-numpy",
        lambda: objective(lambda x, y: np.linalg.norm(x)),
        jax.errors.TracerArrayConversionError,
        "objective(x, y)",
    ),
    row(
        "objective-nan-at-start",
        lambda: objective(lambda x, y: h(x, y) + jnp.sum(jnp.log(-x))),
        ValueError,
        "objective is nan … choose a start",
    ),
    row(
        "lower-gradient-nan-at-start",
        lambda: solve_bilevel(
            bilevel(lower=lambda x1, y1, y2: jnp.sqrt(jnp.sum(y1**2)) + jnp.sum(x1)),
            bx.Point(x1=TWO, y1=jnp.zeros(2)),
        ),
        ValueError,
        "gradient of lower with respect to y1 … not finite … another start",
    ),
]

PROBLEMS = [
    row("solve-a-function", lambda: solve(h), TypeError, "problem … MinimaxProblem"),
    row("smoothness-zero", lambda: minimax(smoothness=0.0), ValueError, "smoothness … > 0"),
    row("smoothness-string", lambda: minimax(smoothness="1"), TypeError, "smoothness … number"),
    row("smoothness-complex", lambda: minimax(smoothness=1j), TypeError, "smoothness … number"),
    row("smoothness-vector", lambda: minimax(smoothness=TWO), TypeError, "smoothness … number"),
    row(
        "upper-smoothness-negative",
        lambda: bilevel(upper_smoothness=-1),
        ValueError,
        "upper_smoothness … > 0",
    ),
    row(
        "lower-smoothness-nan",
        lambda: bilevel(lower_smoothness=NAN),
        ValueError,
        "lower_smoothness … finite",
    ),
    row("f-low-nan", lambda: bilevel(f_low=NAN), ValueError, "f_low must be finite"),
    row("f-low-string", lambda: bilevel(f_low="0"), TypeError, "f_low … number"),
    row("f-low-vector", lambda: bilevel(f_low=TWO), TypeError, "f_low … number"),
    row("data-string", lambda: minimax(data={"labels": "cat"}), TypeError, "data … str … numeric"),
    row(
        "data-array-of-strings",
        lambda: bilevel(data={"labels": np.array(["cat", "dog"])}),
        TypeError,
        "data … labels … numeric",
    ),
    row(
        "data-array-of-objects",
        lambda: minimax(data=np.array([None, 1.0])),
        TypeError,
        "data … numeric",
    ),
    row("x-none", lambda: minimax(x=None), TypeError, "x must be a term … Free()"),
    row("y1-number", lambda: bilevel(y1=1.0), TypeError, "y1 must be a term … Box( … float"),
    row("x2-bounds", lambda: bilevel(x2=(-1, 1)), TypeError, "x2 must be a term … Box("),
    row("y2-empty", lambda: bilevel(y2={}), TypeError, "y2 must be a term … empty"),
    row("x-class", lambda: minimax(x=terms.L2Ball), TypeError, "x must be a term … L2Ball"),
    row("y-uncalled", lambda: minimax(y=terms.Simplex), TypeError, "y must be a term … Simplex"),
    row(
        "terms-do-not-match",
        lambda: with_y({"a": BOX, "c": BOX}, PAIR),
        ValueError,
        "start.y … does not match … one term for the whole block",
    ),
    row(
        "terms-lack-a-part",
        lambda: with_y({"a": BOX, "b": None}, PAIR),
        ValueError,
        "start.y … does not match",
    ),
    row(
        "smoothness-not-estimable",
        lambda: objective(
            lambda x, y: jnp.sum(jnp.abs(x) ** 1.5) + h(x, y),
            bx.Point(x=jnp.zeros(2), y=TWO),
            smoothness=None,
        ),
        ValueError,
        "smoothness … objective … Give",
    ),
]

TERMS = [
    row("box-order", lambda: terms.Box(1.0, -1.0), ValueError, "Box … lower must be ≤ upper"),
    row("box-nan", lambda: terms.Box(NAN, 1.0), ValueError, "Box … lower … NaN"),
    row("box-strings", lambda: terms.Box("a", "b"), TypeError, "Box … lower … number"),
    row(
        "box-bounds-clash",
        lambda: terms.Box(np.zeros(2), np.ones(3)),
        ValueError,
        "Box … lower … upper … shape",
    ),
    row("box-at-infinity", lambda: with_y(terms.Box(INF, INF)), ValueError, "y … Box"),
    row(
        "box-shape",
        lambda: with_y(terms.Box(-np.ones(3), 1.0)),
        ValueError,
        "start.y … lower of shape (3,) … (2,)",
    ),
    row(
        "box-intersection-empty",
        lambda: terms.Box(0.0, 1.0) + terms.Box(2.0, 3.0),
        ValueError,
        "Box … lower must be ≤ upper",
    ),
    row(
        "l1-shape",
        lambda: with_y(terms.L1(1.0, upper=np.ones(3)) + BOX),
        ValueError,
        "start.y … of shape (3,)",
    ),
    row("l1-bounds", lambda: terms.L1(1.0, 2.0, 1.0), ValueError, "L1 … lower must be ≤ upper"),
    row("l1-weight-negative", lambda: terms.L1(-0.1), ValueError, "L1: weight must be … ≥ 0"),
    row("l1-weight-infinite", lambda: terms.L1(INF), ValueError, "L1 … weight … finite"),
    row("l1-weight-string", lambda: terms.L1("0.1"), TypeError, "L1 … weight … number"),
    row("group-weight-array", lambda: terms.GroupL2(TWO), TypeError, "GroupL2 … one number"),
    row("ridge-weight-zero", lambda: terms.Ridge(0.0), ValueError, "Ridge: weight must be … > 0"),
    row(
        "ridge-center-nan",
        lambda: terms.Ridge(1.0, NAN),
        ValueError,
        "Ridge: center must be finite",
    ),
    row("ridge-base", lambda: terms.Ridge(1.0, base=2.0), TypeError, "Ridge … base … term"),
    row(
        "ridge-center-tree",
        lambda: with_y(terms.Ridge(1.0, {"a": 0.0}) + BOX, PAIR),
        ValueError,
        "start.y … center … pytree like the block",
    ),
    row(
        "elastic-net-l2",
        lambda: terms.ElasticNet(1.0, 0.0),
        ValueError,
        "ElasticNet: l2 must be … > 0",
    ),
    row("l2-ball-negative", lambda: terms.L2Ball(-1.0), ValueError, "L2Ball: radius must be … ≥ 0"),
    row("l2-ball-nan", lambda: terms.L2Ball(NAN), ValueError, "L2Ball: radius must be … ≥ 0"),
    row("l2-ball-string", lambda: terms.L2Ball("1"), TypeError, "L2Ball … radius … number"),
    row(
        "l2-ball-center-nan",
        lambda: terms.L2Ball(1.0, np.array([0.0, NAN])),
        ValueError,
        "L2Ball: center must be finite",
    ),
    row(
        "l2-ball-axis",
        lambda: with_y(terms.L2Ball(1.0, axis=1)),
        ValueError,
        "start.y … axis=1 … shape (2,)",
    ),
    row(
        "l2-ball-axis-fraction",
        lambda: with_y(terms.L2Ball(1.0, axis=0.5)),
        TypeError,
        "L2Ball … axis … whole number",
    ),
    row(
        "simplex-axis-string",
        lambda: with_y(terms.Simplex(axis="rows")),
        TypeError,
        "Simplex … axis … whole number",
    ),
    row("l1-ball-zero", lambda: terms.L1Ball(0.0), ValueError, "L1Ball: radius must be … > 0"),
    row("linf-ball-negative", lambda: terms.LInfBall(-1.0), ValueError, "LInfBall … radius"),
    row("simplex-total", lambda: terms.Simplex(-1.0), ValueError, "total must be … > 0"),
    row("simplex-infinite", lambda: terms.Simplex(INF), ValueError, "total … finite"),
    row("capped-string", lambda: terms.CappedSimplex("a"), TypeError, "cap … number"),
    row(
        "capped-infeasible",
        lambda: with_y(terms.CappedSimplex(0.4)),
        ValueError,
        "start.y … cannot add up … cap must be at least total/2",
    ),
    row(
        "simplex-of-nothing",
        lambda: with_y(terms.Simplex(), jnp.zeros(0)),
        ValueError,
        "start.y … CappedSimplex … empty",
    ),
    row("sum-unknown", lambda: terms.L2Ball(1.0) + BOX, TypeError, "L2Ball + Box … known sums"),
    row(
        "sum-ridge-unknown",
        lambda: terms.ElasticNet(1.0, 1.0) + terms.Simplex(),
        TypeError,
        "L1 + CappedSimplex … known sums",
    ),
    row("sum-number", lambda: BOX + 1.0, TypeError, "Box … float"),
    row("scale-zero", lambda: 0.0 * terms.L1(1.0), ValueError, "factor … > 0"),
    row("scale-negative", lambda: terms.L1(1.0) * -2.0, ValueError, "factor … > 0"),
    row("scale-infinite", lambda: INF * terms.L1(1.0), ValueError, "factor … finite"),
    row("scale-vector", lambda: terms.L1(1.0) * TWO, TypeError, "factor … one number"),
    row("scale-string", lambda: terms.L1(1.0) * "2", TypeError, "factor … number"),
    row("scale-not-a-term", lambda: terms.Scaled(3.0, 2.0), TypeError, "term"),
    row("per-leaf-not-terms", lambda: terms.PerLeaf({"a": 1.0}), TypeError, "PerLeaf … term"),
]

START = [
    row("start-tuple", lambda: solve(start=(TWO, TWO)), TypeError, "start … Point(x=…, y=…)"),
    row("start-dict", lambda: solve_bilevel(start={"x1": TWO}), TypeError, "start … Point(x1=…"),
    row("start-positional", lambda: bx.Point(TWO, TWO), TypeError, "Point … named … Point(x1=…"),
    row(
        "start-lacks-y1",
        lambda: solve_bilevel(start=bx.Point(x1=TWO)),
        ValueError,
        "start lacks y1 … term",
    ),
    row(
        "start-lacks-x2",
        lambda: solve_bilevel(bilevel(**FULL), bx.Point(x1=TWO, y1=TWO, y2=TWO)),
        ValueError,
        "start lacks x2 … term",
    ),
    row(
        "start-has-y2",
        lambda: solve_bilevel(start=bx.Point(x1=TWO, y1=TWO, y2=TWO)),
        ValueError,
        "start has y2 … leave it out … Free()",
    ),
    row(
        "start-x-for-bilevel",
        lambda: solve_bilevel(start=bx.Point(x1=TWO, y1=TWO, x=TWO)),
        ValueError,
        "start has x … BilevelProblem has only",
    ),
    row("start-x1-for-minimax", lambda: at(x1=TWO), ValueError, "start has x1 … has only"),
    row("start-z1-for-minimax", lambda: at(z1=TWO), ValueError, "start has z1 … has only"),
    row(
        "start-z2-without-y2",
        lambda: solve_bilevel(start=bx.Point(x1=TWO, y1=TWO, z2=TWO)),
        ValueError,
        "start has z2 … no y2",
    ),
    row(
        "start-z1-shape",
        lambda: solve_bilevel(start=bx.Point(x1=TWO, y1=TWO, z1=THREE)),
        ValueError,
        "start.z1 … (3,) … (2,)",
    ),
    row("start-integers", lambda: at(x=jnp.arange(2)), TypeError, "start.x … 0.0 instead of 0"),
    row("start-whole-number", lambda: at(x=1), TypeError, "start.x … floating"),
    row("start-booleans", lambda: at(y=TWO > 0), TypeError, "start.y … floating … bool"),
    row("start-list", lambda: at(x=[0.0, 0.0]), TypeError, "start.x … list … jnp.asarray"),
    row("start-half", lambda: at(x=TWO.astype(jnp.float16)), TypeError, "start.x … float32 or"),
    row("data-key", lambda: minimax(data=jax.random.key(0)), TypeError, "data … PRNG … key_data"),
    row("start-complex", lambda: at(x=TWO + 0j), TypeError, "start.x … floating … complex"),
    row("start-string", lambda: at(x="zero"), TypeError, "start.x … array of floats"),
    row("start-dtype-name", lambda: at(x="float64"), TypeError, "start.x … array of floats"),
    row(
        "start-strings", lambda: at(x=np.array(["a", "b"])), TypeError, "start.x … array of floats"
    ),
    row("start-ragged", lambda: at(x=np.array([None, 1])), TypeError, "start.x … floats"),
    row("start-nan", lambda: at(y=TWO.at[0].set(jnp.nan)), ValueError, "start.y … NaN"),
    row(
        "start-infinite-leaf",
        lambda: at(x={"a": TWO, "b": THREE * jnp.inf}),
        ValueError,
        "start.x['b'] … infinity",
    ),
    row(
        "start-mixed-dtypes",
        lambda: at(y=TWO.astype(jnp.float32)),
        TypeError,
        "start.x is float64 … start.y is float32 … one dtype",
    ),
    row("start-of-nothing", lambda: at(x={}, y=[]), ValueError, "start … no arrays"),
]

SOLVE = [
    row("tolerance-zero", lambda: solve(tolerance=0.0), ValueError, "tolerance … > 0"),
    row("tolerance-negative", lambda: solve(tolerance=-1e-2), ValueError, "tolerance … > 0"),
    row("tolerance-nan", lambda: solve(tolerance=NAN), ValueError, "tolerance … finite"),
    row("tolerance-infinite", lambda: solve(tolerance=INF), ValueError, "tolerance … finite"),
    row(
        "tolerance-string",
        lambda: solve(tolerance="1e-2"),
        TypeError,
        "tolerance must be one number",
    ),
    row("tolerance-tiny", lambda: solve(tolerance=1e-12), ValueError, "tolerance … float64"),
    row(
        "tolerance-for-float32",
        lambda: solve(start=jax.tree.map(lambda a: a.astype(jnp.float32), XY), tolerance=1e-6),
        ValueError,
        "tolerance … float32 … jax_enable_x64",
    ),
    row("solver-name", lambda: solve(solver="OptFOM"), TypeError, "solver … PenaltyMethod()"),
    row("solver-class", lambda: solve(solver=bx.ProximalPoint), TypeError, "solver … ()"),
    row(
        "optfom-for-bilevel",
        lambda: solve_bilevel(solver=bx.OptFOM(1.0, 1.0)),
        TypeError,
        "OptFOM solves a MinimaxProblem … not a BilevelProblem",
    ),
    row(
        "penalty-for-minimax",
        lambda: solve(solver=bx.PenaltyMethod()),
        TypeError,
        "PenaltyMethod solves a BilevelProblem … not a MinimaxProblem",
    ),
    row(
        "extragradient-for-bilevel",
        lambda: solve_bilevel(solver=bx.ExtraGradient()),
        TypeError,
        "ExtraGradient solves a MinimaxProblem",
    ),
    row(
        "proximal-point-for-bilevel",
        lambda: solve_bilevel(solver=bx.ProximalPoint()),
        TypeError,
        "ProximalPoint solves a MinimaxProblem",
    ),
    row("budget-negative", lambda: solve(max_gradients=-1), ValueError, "max_gradients … ≥ 0"),
    row("budget-fraction", lambda: solve(max_gradients=1.5), TypeError, "max_gradients … whole"),
    row("budget-string", lambda: solve(max_gradients="9"), TypeError, "max_gradients … whole"),
    row("seconds-negative", lambda: solve(max_seconds=-1.0), ValueError, "max_seconds … ≥ 0"),
    row("seconds-nan", lambda: solve(max_seconds=NAN), ValueError, "max_seconds … ≥ 0"),
    row("seconds-string", lambda: solve(max_seconds="1"), TypeError, "max_seconds … number"),
    row("callback", lambda: solve(callback="print"), TypeError, "callback … function"),
    row("resume-missing", lambda: solve(resume="none.state"), FileNotFoundError, "resume … none"),
    row("resume-folder", lambda: solve(resume="."), IsADirectoryError, "resume … folder"),
    row("resume-number", lambda: solve(resume=3), TypeError, "resume … state or a file"),
    row(
        "resume-solution",
        lambda: solve(resume=SHARED["solution"]),
        TypeError,
        "resume … solution.state",
    ),
    row("resume-text", lambda: solve(resume="text.state"), ValueError, "resume … not written by"),
    row("resume-empty", lambda: solve(resume="empty.state"), ValueError, "resume … empty.state"),
    row("resume-header", lambda: solve(resume="header.state"), ValueError, "resume … damaged"),
    row("resume-cut", lambda: solve(resume="cut.state"), ValueError, "resume … cut short"),
    row("resume-cut-early", lambda: solve(resume="early.state"), ValueError, "resume … early"),
    row("resume-flipped", lambda: solve(resume="flipped.state"), ValueError, "resume … damaged"),
    row("resume-longer", lambda: solve(resume="longer.state"), ValueError, "resume … damaged"),
    row(
        "resume-of-other-shapes",
        lambda: solve(start=bx.Point(x=TWO, y=THREE), resume="good.state"),
        ValueError,
        "resume … another run … [3]",
    ),
    row(
        "resume-state-of-other-form",
        lambda: solve_bilevel(resume=SHARED["solution"].state),
        ValueError,
        "resume … another run … MinimaxProblem by ProximalPoint",
    ),
    row(
        "resume-of-other-solver",
        lambda: solve(solver=bx.ExtraGradient(), resume=Path("good.state")),
        ValueError,
        "resume … another run … ExtraGradient",
    ),
    row(
        "checkpoint-nowhere",
        lambda: solve(checkpoint="no/such/folder/run.state"),
        FileNotFoundError,
        "checkpoint … folder",
    ),
    row(
        "checkpoint-folder", lambda: solve(checkpoint="."), IsADirectoryError, "checkpoint … folder"
    ),
    row("checkpoint-number", lambda: solve(checkpoint=3), TypeError, "checkpoint … file"),
    row(
        "checkpoint-of-wrong-call",
        lambda: solve(checkpoint="new.state", tolerance=0.0),
        ValueError,
        "tolerance",
    ),
    row(
        "checkpoint-of-wrong-resume",
        lambda: solve(checkpoint="new.state", resume="cut.state"),
        ValueError,
        "resume",
    ),
    row(
        "penalty-unbounded",
        lambda: solve_bilevel(bilevel(y1=terms.Ridge(1.0)), solver=bx.PenaltyMethod()),
        ValueError,
        "y1 = Ridge … unbounded … Box(-R, R)",
    ),
    row(
        "proximal-point-unbounded",
        lambda: with_y({"a": BOX, "b": terms.Free()}, PAIR),
        ValueError,
        "ProximalPoint needs bounded … y = ",
    ),
    row(
        "predict-unbounded",
        lambda: bx.theory.predict(minimax(x=terms.NonNegative()), XY),
        ValueError,
        "x = Box … unbounded … bounded domain",
    ),
    row(
        "predict-tolerance",
        lambda: bx.theory.predict(minimax(), XY, tolerance=0.0),
        ValueError,
        "tolerance … > 0",
    ),
]

REFORMULATIONS = [
    row("penalty-rho", lambda: bx.penalty(bilevel(), 0.0), ValueError, "rho … > 0"),
    row("penalty-nan", lambda: bx.penalty(bilevel(), NAN), ValueError, "rho … finite"),
    row("penalty-array", lambda: bx.penalty(bilevel(), TWO), TypeError, "rho … one number"),
    row("penalty-none", lambda: bx.penalty(bilevel(), None), TypeError, "rho … one number"),  # pyright: ignore[reportArgumentType]
    row("penalty-form", lambda: bx.penalty(minimax(), 1.0), TypeError, "BilevelProblem, not"),  # pyright: ignore[reportArgumentType]
    row(
        "penalty-constrained",
        lambda: bx.penalty(bounded_above(), 1.0),  # pyright: ignore[reportArgumentType]
        TypeError,
        "bilevax.lagrangian(problem, start)",
    ),
    row(
        "penalty-point",
        lambda: bx.penalty(bilevel(), 1.0).stated_point(UPPER_LOWER),
        TypeError,
        "x=(x1, y1, y2)",
    ),
    row(
        "lagrangian-form",
        lambda: bx.lagrangian(bilevel(), UPPER_LOWER),  # pyright: ignore[reportArgumentType]
        TypeError,
        "ConstrainedBilevelProblem, not a BilevelProblem",
    ),
    row(
        "lagrangian-bound",
        lambda: bx.lagrangian(bounded_above(), XY),
        ValueError,
        "multiplier_bound=… … slater_margin",
    ),
    row(
        "lagrangian-upper-bound",
        lambda: bx.lagrangian(
            bounded_above(multiplier_bound=1.0, upper_constraints=lambda x, y: x), XY
        ),
        ValueError,
        "upper_multiplier_bound",
    ),
    row(
        "lagrangian-start",
        lambda: bx.lagrangian(bounded_above(multiplier_bound=1.0), UPPER_LOWER),
        ValueError,
        "start lacks x",
    ),
]

SOLVERS = [
    row("rho", lambda: bx.PenaltyMethod(rho=-1.0), ValueError, "PenaltyMethod: rho … > 0"),
    row("epsilon", lambda: bx.PenaltyMethod(epsilon=NAN), ValueError, "epsilon … finite"),
    row("diameter", lambda: bx.PenaltyMethod(diameter=TWO), TypeError, "diameter … one number"),
    row("x-weight", lambda: bx.ProximalPoint(x_weight=INF), ValueError, "x_weight … finite"),
    row("inner-tolerance", lambda: bx.ProximalPoint(inner_tolerance=0), ValueError, "> 0"),
    row("y-diameter", lambda: bx.ProximalPoint(y_diameter="1"), TypeError, "y_diameter … number"),
    row("step", lambda: bx.ExtraGradient(smoothness=True), TypeError, "smoothness … one number"),
    row("sigma", lambda: bx.OptFOM(strong_convexity=-1), ValueError, "strong_convexity … > 0"),
    row("center", lambda: bx.ProximalPoint(center="middle"), ValueError, "center … 'start'"),
    row("center-inner", lambda: bx.ProximalPoint(center=None), ValueError, "center … 'last'"),
    row(
        "optfom-without-sigma",
        lambda: solve(solver=bx.OptFOM(strong_concavity=1.0)),
        ValueError,
        "OptFOM needs strong_convexity … ProximalPoint()",
    ),
    row(
        "optfom-sigma-above-smoothness",
        lambda: solve(solver=bx.OptFOM(10.0, 1.0, smoothness=1.0)),
        ValueError,
        "strong_convexity … smoothness",
    ),
    row("inner", lambda: bx.ProximalPoint(inner="OptFOM"), TypeError, "inner … OptFOM()"),
    row("inner-other", lambda: bx.ProximalPoint(inner=bx.ProximalPoint()), TypeError, "inner"),
    row(
        "starter",
        lambda: bx.PenaltyMethod(starter=bx.OptFOM()),
        TypeError,
        "starter … ExtraGradient()",
    ),
    row("outer", lambda: bx.PenaltyMethod(outer=bx.OptFOM()), TypeError, "outer … ProximalPoint"),
]

REST = [
    row("certify-rho-zero", lambda: certify(rho=0.0), ValueError, "rho … > 0"),
    row("certify-rho-negative", lambda: certify(rho=-2.0), ValueError, "rho … > 0"),
    row("certify-rho-vector", lambda: certify(rho=TWO), TypeError, "rho … one number"),
    row("certify-rho-string", lambda: certify(rho="1"), TypeError, "rho … number"),
    row(
        "certify-rho-in-point",
        lambda: certify(bx.Point(x1=TWO, y1=TWO, rho=-1.0)),
        ValueError,
        "rho … > 0",
    ),
    row(
        "certify-rho-for-minimax",
        lambda: bx.certify(minimax(), XY, rho=1.0),
        ValueError,
        "rho … MinimaxProblem has none",
    ),
    row("certify-array", lambda: certify(TWO), TypeError, "point … Point(x1=…"),
    row("certify-solution", lambda: bx.certify(minimax(), SHARED["solution"]), TypeError, "point"),
    row("certify-lacks-x1", lambda: certify(bx.Point(y1=TWO)), ValueError, "point lacks x1"),
    row(
        "certify-lacks-x2",
        lambda: bx.certify(bilevel(**FULL), bx.Point(x1=TWO, y1=TWO, y2=TWO)),
        ValueError,
        "point lacks x2",
    ),
    row(
        "certify-term-shape",
        lambda: bx.certify(minimax(x=terms.Box(-np.ones(3), 1.0)), XY),
        ValueError,
        "point.x … (3,)",
    ),
    row(
        "certify-function-shape",
        lambda: bx.certify(minimax(lambda x, y: jnp.sum(x * y)), bx.Point(x=TWO, y=THREE)),
        TypeError,
        "objective(x, y) … (3,)",
    ),
    row(
        "certify-witness-shape",
        lambda: certify(bx.Point(x1=TWO, y1=TWO, z1=THREE, rho=1.0)),
        ValueError,
        "point.z1 … (3,)",
    ),
    row("check-samples-zero", lambda: minimax().check(XY, samples=0), ValueError, "samples … ≥ 1"),
    row(
        "check-samples-fraction",
        lambda: bilevel().check(UPPER_LOWER, samples=2.5),
        TypeError,
        "samples … whole",
    ),
    row("check-seed", lambda: minimax().check(XY, samples=1, seed="a"), TypeError, "seed … whole"),
    row("check-start", lambda: bilevel().check(XY), ValueError, "start lacks x1"),
    row("library", lambda: library.get("saddle"), KeyError, "'saddle' … unique_saddle"),
    row("history", lambda: SHARED["solution"].history["eps"], KeyError, "'eps' … epsilon"),
    row(
        "save-nowhere",
        lambda: SHARED["solution"].save("no/such/folder/run.state"),
        FileNotFoundError,
        "no/such/folder",
    ),
]

SHARED: dict[str, Any] = {}


@pytest.fixture(scope="module", autouse=True)
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one good file of a run, and what can become of such a file."""
    folder = tmp_path_factory.mktemp("runs")
    SHARED["solution"] = solution = solve(tolerance=1e-6)
    solution.save(folder / "good.state")
    good = (folder / "good.state").read_bytes()
    header, leaves = good.split(b"\n", 1)
    spoilt = {
        "text": b"x = 1\n" * 20,
        "empty": b"",
        "header": b'{"format": "bilevax run 1"}\n' + leaves,
        "early": header[: len(header) // 2],
        "cut": good[: -len(leaves) // 2],
        "flipped": good[:-8] + bytes(255 - byte for byte in good[-8:]),
        "longer": good + leaves,
    }
    for name, content in spoilt.items():
        (folder / f"{name}.state").write_bytes(content)
    return folder


def contents(folder: Path) -> dict[str, bytes | None]:
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
    }


@pytest.fixture
def untouched(files: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder as the working directory, in which the test must leave everything as it was."""
    monkeypatch.chdir(files)
    before = contents(files)
    yield files
    after = contents(files)
    for name in after.keys() - before.keys():
        (files / name).unlink()
    assert after == before


@pytest.mark.usefixtures("untouched")
@pytest.mark.parametrize(
    ("call", "exception", "parts"),
    [*FUNCTIONS, *PROBLEMS, *TERMS, *START, *SOLVE, *REFORMULATIONS, *SOLVERS, *REST],
)
def test_wrong_call(call: Callable[[], Any], exception: type[Exception], parts: list[str]):
    with pytest.raises(Exception) as caught:  # noqa: PT011
        call()
    error = caught.value
    message = "\n".join([str(error), *getattr(error, "__notes__", ())])
    assert type(error) is exception, f"{type(error).__name__}: {message}"
    assert [part for part in parts if part not in message] == [], message


@pytest.mark.parametrize("target", ["", "no/such/folder/run.state"])
def test_a_failed_checkpoint_leaves_nothing_behind(untouched: Path, target: str):
    for save in (lambda path: solve(checkpoint=path), SHARED["solution"].save):
        with pytest.raises((IsADirectoryError, FileNotFoundError)):
            save(untouched / target)


def test_a_failed_run_keeps_the_last_checkpoint(tmp_path: Path):
    """An error on the way must not cost the file that is already there."""
    path = tmp_path / "run.state"

    def stop(_: bx.Solution) -> None:
        raise RuntimeError("my own words")

    with pytest.raises(RuntimeError, match="my own words"):
        solve(tolerance=1e-6, max_gradients=200, checkpoint=path, callback=stop)
    assert os.listdir(tmp_path) == ["run.state"]
    assert solve(tolerance=1e-6, max_gradients=100, resume=path).gradients > 8


@pytest.mark.parametrize("answer", [True, np.True_, jnp.asarray(True)], ids=["bool", "np", "jnp"])
def test_every_kind_of_true_stops_a_run(answer: Any):
    """One that is taken for "go on" is a mistake nobody sees."""
    solution = solve(tolerance=1e-6, max_gradients=200, callback=lambda _: answer)
    assert solution.status == "interrupted"


@contextlib.contextmanager
def one_warning(category: type[Warning], *parts: str) -> Iterator[None]:
    """Exactly one warning, of that category, that points at this file and says all parts."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        yield
    assert [warning.category for warning in seen] == [category]
    assert [part for part in parts if part not in str(seen[0].message)] == []
    assert Path(seen[0].filename).resolve() == Path(__file__).resolve(), seen[0].filename


ENTRIES = {
    "solve": lambda problem, start: bx.solve(problem, start, max_gradients=8),
    "check": lambda problem, start: problem.check(start, samples=1),
    "predict": lambda problem, start: bx.theory.predict(problem, start),
}


def entries(*short: tuple[str, str]) -> Any:
    """Every first with every entry, long unless named: all of them call the same validation."""
    firsts = dict.fromkeys(first for first, _ in short)
    return [
        pytest.param(
            *(first, call),
            id=f"{first}-{name}",
            marks=() if (first, name) in short else pytest.mark.long,
        )
        for first in firsts
        for name, call in ENTRIES.items()
    ]


@pytest.mark.parametrize(
    ("block", "entry"),
    entries(
        *((block, "solve") for block in ("x1", "x2", "y1", "y2", "z1")),
        ("x1", "check"),
        ("x1", "predict"),
    ),
)
def test_a_start_outside_is_projected_with_a_warning(entry: Callable[..., Any], block: str):
    blocks = {"x1": TWO, "x2": TWO, "y1": TWO, "y2": TWO, "z1": TWO} | {block: 3 * jnp.ones(2)}
    with one_warning(StartWarning, f"start.{block} ", "outside", "projected"):
        entry(bilevel(**FULL), bx.Point(**blocks))


def test_the_run_begins_at_the_projection():
    with one_warning(StartWarning, "start.x ", "outside"):
        solution = bx.solve(minimax(), bx.Point(x=jnp.full(2, 9.0), y=TWO), max_gradients=0)
    np.testing.assert_array_equal(solution.point.x, np.ones(2))


@pytest.mark.parametrize(
    ("where", "entry"), entries(("upper", "solve"), ("lower", "check"), ("upper", "predict"))
)
def test_a_captured_array_is_warned_about(entry: Callable[..., Any], where: str):
    large = jnp.ones(1 << 18)
    functions = {"upper": f, "lower": g}
    own = functions[where]
    functions[where] = lambda *blocks: own(*blocks) + jnp.mean(large)
    with one_warning(CapturedArrayWarning, where, "2 MiB", "data="):
        entry(bilevel(**functions), UPPER_LOWER)


def test_a_point_where_a_function_is_nan_is_not_certified():
    """Its gradient may well be finite there, as that of log(−x) is at x > 0."""
    problem = minimax(lambda x, y: h(x, y) + jnp.sum(jnp.log(-x)))
    assert not np.isfinite(bx.certify(problem, XY).epsilon)


def test_data_and_arrays_of_a_module_are_not_captured():
    """They are arguments of the compiled program, which is what the warning asks for."""

    class Objective(eqx.Module):
        large: jax.Array

        def __call__(self, x: Any, y: Any, data: Any) -> Any:
            return h(x, y) + jnp.mean(self.large) + jnp.mean(data)

    large = jnp.ones(1 << 18)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        solve(minimax(Objective(large), data=large))
    assert [str(warning.message) for warning in seen] == []
