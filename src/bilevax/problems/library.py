"""Ready problems whose answers are known in closed form, each with its derivation."""
# The functions below read as mathematics; their arguments are blocks of variables.
# pyright: reportMissingParameterType=false

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from bilevax import terms
from bilevax.arguments import non_negative
from bilevax.data import Arrays
from bilevax.problems import linear
from bilevax.problems.bilevel import BilevelProblem
from bilevax.problems.constrained import ConstrainedBilevelProblem
from bilevax.problems.point import Point
from bilevax.trees import Tree

# Lower levels are scaled by this: the paper's constants grow with their curvature, and its method
# slows down with it, while the solutions stay the same.
SCALE = 0.1
# The gradient of a linear function is constant: any number > 0 is a Lipschitz constant of it.
FLAT = 1e-12


@dataclasses.dataclass(frozen=True)
class Instance:
    """A problem, a start, and its solution.

    `point` is the bilevel solution reached from `start`, `value` the upper objective there. An
    ε-KKT point with ρ = 1/ε misses (x1, y1) by at most `modulus`·ε: a penalty moves the answer by
    O(1/ρ) where the upper level pulls (y1, y2) off the saddle point, a residual by O(ε).
    """

    name: str
    problem: BilevelProblem
    start: Point
    point: Point
    value: float
    modulus: float


def _curvature(function: Callable[..., Any], *blocks: Tree) -> float:
    """‖∇²f‖ of a quadratic function, which is the same everywhere."""
    flat, unravel = ravel_pytree(blocks)
    hessian = jax.hessian(lambda v: function(*unravel(v)))(flat)
    return float(np.linalg.norm(np.asarray(hessian, np.float64), 2))


INSTANCES: dict[str, Callable[[], Instance]] = {}
# The two functions, the start, the answer, its value, the modulus, and what the problem is given
# besides: terms, f_low and, unless both functions are quadratic, the two smoothness constants.
Parts = tuple[Callable[..., Any], Callable[..., Any], Point, Point, float, float, dict[str, Any]]


def _instance(parts: Callable[[], Parts]) -> Callable[[], Instance]:
    """Keep an instance in the library, under the name of the function that gives its parts."""

    @functools.wraps(parts)
    def instance() -> Instance:
        upper, lower, start, point, value, modulus, given = parts()
        if "upper_smoothness" not in given:
            given["upper_smoothness"] = _curvature(upper, *_blocks(start)["upper"])
            given["lower_smoothness"] = _curvature(lower, *_blocks(start)["lower"])
        problem = BilevelProblem(upper, lower, **given)
        return Instance(parts.__name__, problem, start, point, value, modulus)

    INSTANCES[parts.__name__] = instance
    return instance


def _blocks(p: Point) -> dict[str, tuple[Tree, ...]]:
    """The arguments of the two functions."""
    return {"upper": (p.x1, p.x2, p.y1, p.y2), "lower": (p.x1, p.y1, p.y2)}


@_instance
def unique_saddle() -> Parts:
    """A strongly-convex-strongly-concave lower level, so one saddle point for every x1.

    f~ = s·(½(y1 − x1)² + y1·y2 − ½y2²) gives y1 = y2 = x1/2. f = ½(x1 − a)² + b·y1 + x2·y2 − ½x2²
    has x2 = y2, so the reduced objective is ½(x1 − a)² + b·x1/2 + x1²/8 and x1 = (a − b/2)/(5/4).
    """
    a, b = jnp.asarray([0.5, -0.4]), jnp.asarray([0.2, 0.1])

    def upper(x1, x2, y1, y2):
        own = 0.5 * jnp.sum((x1 - a) ** 2) + jnp.sum(b * y1)
        return own + jnp.sum(x2 * y2) - 0.5 * jnp.sum(x2**2)

    lower = lambda x1, y1, y2: SCALE * jnp.sum(0.5 * (y1 - x1) ** 2 + y1 * y2 - 0.5 * y2**2)
    x1 = (a - b / 2) / 1.25
    half = x1 / 2
    value = float(jnp.sum(0.5 * (x1 - a) ** 2 + b * half + 0.5 * half**2))
    box, zero = terms.Box(-1.0, 1.0), jnp.zeros(2)
    start = Point(x1=zero, x2=zero, y1=zero, y2=zero)
    point = Point(x1=x1, x2=half, y1=half, y2=half)
    blocks = {"x1": box, "x2": box, "y1": box, "y2": box}
    return upper, lower, start, point, value, 6.0, blocks


@_instance
def many_saddles() -> Parts:
    """A bilinear lower level with a whole line of saddle points, among which the upper one picks.

    f~ = s·y2·(Σ y1 − x1) with y2 in [−1, 1]: y1 is any point with Σ y1 = x1, and y2 = 0. Then
    f = ½(x1 − a)² + ½‖y1 − t‖² is least, on Σ y1 = x1, at y1 = t − m, x1 = Σt − 2m with
    m = (Σt − a)/3.
    """
    a, t = 0.2, jnp.asarray([0.5, 0.3])
    upper = lambda x1, x2, y1, y2: 0.5 * jnp.sum((x1 - a) ** 2) + 0.5 * jnp.sum((y1 - t) ** 2)
    lower = lambda x1, y1, y2: SCALE * jnp.sum(y2 * (jnp.sum(y1) - x1))
    m = (jnp.sum(t) - a) / 3
    x1, y1 = jnp.reshape(jnp.sum(t) - 2 * m, (1,)), t - m
    value = float(0.5 * jnp.sum((x1 - a) ** 2) + 0.5 * jnp.sum((y1 - t) ** 2))
    box = terms.Box(-1.0, 1.0)
    start = Point(x1=jnp.zeros(1), y1=jnp.zeros(2), y2=jnp.zeros(1))
    point = Point(x1=x1, y1=y1, y2=jnp.zeros(1))
    return upper, lower, start, point, value, 4.0, {"x1": box, "y1": box, "y2": box}


@_instance
def least_squares() -> Parts:
    """No inner maximisation in the lower level: y2 is absent.

    f~ = s·½‖y1 − A·x1‖² gives y1 = A·x1. f = ½‖x1 − a‖² + x2·(y1 − b) − ½‖x2‖² has x2 = y1 − b, so
    x1 solves (I + AᵀA)x1 = a + Aᵀb.
    """
    A = jnp.asarray([[0.6, -0.2], [0.3, 0.5], [-0.1, 0.4]])
    a, b = jnp.asarray([0.4, -0.3]), jnp.asarray([0.1, 0.2, -0.1])

    def upper(x1, x2, y1, y2):
        return 0.5 * jnp.sum((x1 - a) ** 2) + jnp.sum(x2 * (y1 - b)) - 0.5 * jnp.sum(x2**2)

    lower = lambda x1, y1, y2: SCALE * 0.5 * jnp.sum((y1 - A @ x1) ** 2)
    x1 = jnp.linalg.solve(jnp.eye(2) + A.T @ A, a + A.T @ b)
    y1 = A @ x1
    value = float(0.5 * jnp.sum((x1 - a) ** 2) + 0.5 * jnp.sum((y1 - b) ** 2))
    start = Point(x1=jnp.zeros(2), x2=jnp.zeros(3), y1=jnp.zeros(3))
    point = Point(x1=x1, x2=y1 - b, y1=y1)
    blocks = {"x1": terms.Box(-1.0, 1.0), "x2": terms.L2Ball(2.0), "y1": terms.L2Ball(1.5)}
    return upper, lower, start, point, value, 8.0, blocks


@_instance
def boundary() -> Parts:
    """Every block ends at a bound: x2 and y2 are absent.

    f~ = s·½(y1 − x1 − ½)² on 0 ≤ y1 ≤ 1 gives y1 = min(x1 + ½, 1). f = ½(x1 − 2)² + y1/10 on
    0 ≤ x1 ≤ 1 falls up to x1 = 1, where y1 = 1.
    """
    upper = lambda x1, x2, y1, y2: 0.5 * jnp.sum((x1 - 2) ** 2) + 0.1 * jnp.sum(y1)
    lower = lambda x1, y1, y2: SCALE * 0.5 * jnp.sum((y1 - x1 - 0.5) ** 2)
    one, unit = jnp.ones(1), terms.Box(0.0, 1.0)
    start = Point(x1=jnp.full(1, 0.2), y1=jnp.full(1, 0.2))
    point = Point(x1=one, y1=one)
    return upper, lower, start, point, 0.6, 2.0, {"x1": unit, "y1": unit}


@_instance
def soft_threshold() -> Parts:
    """A lower level with a term that is not a set: w‖y1‖₁.

    f~ = s·½‖y1 − x1‖² + s·w‖y1‖₁ gives y1 = soft(x1, w). f = ½‖y1 − t‖² is 0 where soft(x1, w) = t,
    at x1 = t + w·sign(t).
    """
    w, t = 0.2, jnp.asarray([0.3, -0.5])
    upper = lambda x1, x2, y1, y2: 0.5 * jnp.sum((y1 - t) ** 2)
    lower = lambda x1, y1, y2: SCALE * 0.5 * jnp.sum((y1 - x1) ** 2)
    start = Point(x1=jnp.asarray([0.3, -0.4]), y1=jnp.zeros(2))
    point = Point(x1=t + w * jnp.sign(t), y1=t)
    y1 = terms.L1(SCALE * w) + terms.Box(-1.0, 1.0)
    return upper, lower, start, point, 0.0, 12.0, {"x1": terms.Box(-1.0, 1.0), "y1": y1}


@_instance
def trees_of_blocks() -> Parts:
    """Pytrees of unequal leaves in every block, with one term for all or one per leaf.

    Leaf by leaf, f~ = s·(½(y1 − x1)² + y1·y2 − ½y2²) gives y1 = y2 = x1/2, and
    f = ½‖x1 − a‖² + ½‖y1‖² is least at x1 = a/(5/4).
    """
    a = {"small": jnp.asarray([0.6]), "large": jnp.asarray([[0.2, -0.5], [0.4, -0.1]])}
    map_ = jax.tree.map
    total = lambda tree: sum(jnp.sum(leaf) for leaf in jax.tree.leaves(tree))

    def upper(x1, x2, y1, y2):
        own = total(map_(lambda u, c: 0.5 * (u - c) ** 2, x1, a))
        return own + total(map_(lambda u: 0.5 * u**2, y1))

    form = lambda x, u, v: 0.5 * (u - x) ** 2 + u * v - 0.5 * v**2
    lower = lambda x1, y1, y2: SCALE * total(map_(form, x1, y1, y2))
    x1 = map_(lambda c: c / 1.25, a)
    half, zero = map_(lambda u: u / 2, x1), map_(jnp.zeros_like, a)
    value = float(upper(x1, None, half, half))
    per_leaf = {"small": terms.Box(-1.0, 1.0), "large": terms.L2Ball(1.0)}
    blocks = {"x1": per_leaf, "y1": terms.L2Ball(1.0), "y2": terms.Box(-1.0, 1.0)}
    start, point = Point(x1=zero, y1=zero, y2=zero), Point(x1=x1, y1=half, y2=half)
    return upper, lower, start, point, value, 8.0, blocks


@_instance
def double_well() -> Parts:
    """A nonconvex upper level: two wells, of which the start lies in the right one.

    f~ = s·½(y1 − x1)² gives y1 = x1; f = ¼(x1² − 1)² + ½(y1 − 1)² is 0 at x1 = y1 = 1 and nowhere
    else. |∂²f/∂x1²| = |3x1² − 1| ≤ 3.32 on |x1| ≤ 1.2.
    """
    wells = lambda x1: 0.25 * jnp.sum((x1**2 - 1) ** 2)
    upper = lambda x1, x2, y1, y2: wells(x1) + 0.5 * jnp.sum((y1 - 1) ** 2)
    lower = lambda x1, y1, y2: SCALE * 0.5 * jnp.sum((y1 - x1) ** 2)
    box, one = terms.Box(-1.2, 1.2), jnp.ones(1)
    start, point = Point(x1=jnp.full(1, 0.6), y1=jnp.full(1, 0.6)), Point(x1=one, y1=one)
    constants = {"upper_smoothness": 3.32, "lower_smoothness": 2 * SCALE, "f_low": 0.0}
    return upper, lower, start, point, 0.0, 3.0, {"x1": box, "y1": box} | constants


@_instance
def matrix_game() -> Parts:
    """A two-by-two game whose pay-off x1 sets; bilinear in (y1, y2), trilinear in all.

    f~ = s·(x1·y1₀·y2₀ + y1₁·y2₁) on two simplices has y1 = y2 = (1, x1)/(1 + x1). f = 5(y1₀ − 0.6)²
    is 0 where 1/(1 + x1) = 0.6, at x1 = 2/3. ‖∇²f~‖ is largest at x1 = y1₀ = y2₀ = 1, where it is
    2s.
    """
    upper = lambda x1, x2, y1, y2: 5 * (y1[0] - 0.6) ** 2
    lower = lambda x1, y1, y2: SCALE * (x1[0] * y1[0] * y2[0] + y1[1] * y2[1])
    even, answer = jnp.full(2, 0.5), jnp.asarray([0.6, 0.4])
    start = Point(x1=jnp.ones(1), y1=even, y2=even)
    point = Point(x1=jnp.full(1, 2 / 3), y1=answer, y2=answer)
    blocks = {"x1": terms.Box(0.2, 1.0), "y1": terms.Simplex(), "y2": terms.Simplex()}
    constants = {"upper_smoothness": 10.0, "lower_smoothness": 2 * SCALE, "f_low": 0.0}
    return upper, lower, start, point, 0.0, 8.0, blocks | constants


@_instance
def worst_group() -> Parts:
    """Group-robust fitting in miniature: simplices in both levels.

    f~ = s·(Σ y2_g·½(y1 − m_g)² + x1·y1) with m = (−1, 1): both groups weigh, so their losses are
    equal and y1 = 0; then y2₀ − y2₁ + x1 = 0 gives y2 = (1 − x1, 1 + x1)/2 for |x1| < 1.
    f = x2₀·½(x1 − 0.6)² + x2₁·½(x1 − 0.2)² is the larger of the two, least at x1 = 0.4, where both
    weigh alike: x2 = (½, ½). In (x1, x2) ∇²f is [[1, v], [vᵀ, 0]] with ‖v‖² ≤ 1.7 here, of norm at
    most (1 + √7.8)/2; ∇²f~ is s·[[0, 1, 0], [1, 1, v], [0, vᵀ, 0]] with ‖v‖² = 2 + 2y1² ≤ 2.5, of
    norm at most (1 + √15)/2·s.
    """
    m, targets = jnp.asarray([-1.0, 1.0]), jnp.asarray([0.6, 0.2])
    upper = lambda x1, x2, y1, y2: jnp.sum(x2 * 0.5 * (x1[0] - targets) ** 2)
    weighed = lambda y1, y2: jnp.sum(y2 * 0.5 * (y1[0] - m) ** 2)
    lower = lambda x1, y1, y2: SCALE * (weighed(y1, y2) + x1[0] * y1[0])
    even = jnp.full(2, 0.5)
    start = Point(x1=jnp.zeros(1), x2=even, y1=jnp.full(1, 0.3), y2=even)
    point = Point(x1=jnp.full(1, 0.4), x2=even, y1=jnp.zeros(1), y2=jnp.asarray([0.3, 0.7]))
    blocks = {"x1": terms.Box(-0.5, 0.8), "y1": terms.Box(-0.5, 0.5)}
    blocks |= {"x2": terms.Simplex(), "y2": terms.Simplex()}
    smoothness = {"upper": (1 + 7.8**0.5) / 2, "lower": (1 + 15**0.5) / 2 * SCALE}
    constants = {f"{level}_smoothness": value for level, value in smoothness.items()}
    return upper, lower, start, point, 0.02, 8.0, blocks | constants | {"f_low": 0.0}


class Noisy(eqx.Module):
    """f(·; ξ) = f + ξᵀ(·), with the mean ξ of the minibatch's rows for this level."""

    function: Callable[..., Any]
    level: str = eqx.field(static=True)

    def __call__(self, *arguments: Any) -> Any:
        *blocks, batch = arguments
        flat, _ = ravel_pytree(tuple(blocks))
        return self.function(*blocks) + jnp.sum(jnp.mean(batch[self.level], axis=0) * flat)


def noisy(
    name: str, *, deviation: float = 1.0, samples: int = 1000, batch: int = 10, seed: int = 0
) -> Instance:
    """A problem of the library whose gradients only samples give.

    The linear functions added have mean zero over all samples, so the answer is the one in closed
    form, and E‖ξ‖² = deviation² for each of the two levels: of minibatches, that over `batch`, a
    little less because none holds a sample twice.
    """
    non_negative(deviation, "deviation")
    instance = get(name)
    p, rng, rows = instance.problem, np.random.default_rng(seed), {}
    for level, blocks in _blocks(instance.start).items():
        xi = rng.normal(size=(samples, ravel_pytree(blocks)[0].size))
        xi -= xi.mean(0)
        rows[level] = deviation * xi / np.sqrt(np.mean(np.sum(xi**2, axis=1)))
    source = Arrays(jax.tree.map(jnp.asarray, rows), batch)
    of_batches = deviation * np.sqrt((samples - batch) / (batch * max(samples - 1, 1)))
    problem = dataclasses.replace(
        p,
        upper=Noisy(p.upper, "upper"),
        lower=Noisy(p.lower, "lower"),
        data=source,
        upper_deviation=of_batches,
        lower_deviation=of_batches,
    )
    return dataclasses.replace(instance, name=f"noisy {name}", problem=problem)


def get(name: str) -> Instance:
    """The instance of that name."""
    if name not in INSTANCES:
        raise KeyError(f"no instance {name!r} in the library; there are {', '.join(INSTANCES)}")
    return INSTANCES[name]()


@dataclasses.dataclass(frozen=True, eq=False)
class LinearInstance:
    """A bilevel linear problem, `eq:clo`: its arrays, the problem for `solve`, the paper's start.

    `bilevax.problems.linear` has what the arrays say of an answer: `optimum`, `repair`, `violation`
    and `lower_gap`.
    """

    data: linear.LinearData
    problem: ConstrainedBilevelProblem
    start: Point


def bilevel_linear(n: int, m: int, l: int, seed: int) -> LinearInstance:  # noqa: E741
    """A random bilevel linear problem, min cᵀx + dᵀy over boxes, as the paper draws them.

    x has n entries, y has m, and the lower level min d̃ᵀy has l constraints Ax + By ≤ b.
    """
    return bilevel_linear_from(linear.generate(n, m, l, seed))


def bilevel_linear_from(data: linear.LinearData) -> LinearInstance:
    """The bilevel linear problem of given arrays, with its exact constants and the start (0, 0).

    The functions are the same for all data, so one compilation serves all problems of a size.
    """
    problem = linear_problem(
        vars(data),
        upper_smoothness=FLAT,
        lower_smoothness=FLAT,
        constraint_smoothness=0.0,
        # At least FLAT, as constraints without any variable have slope zero.
        constraint_lipschitz=max(float(np.linalg.norm(np.hstack([data.A, data.B]), 2)), FLAT),
        f_low=-float(np.abs(data.c).sum() + np.abs(data.d).sum()),
    )
    start = Point(x=jnp.zeros(data.c.size), y=jnp.zeros(data.d.size))
    return LinearInstance(data, problem, start)


def linear_problem(arrays: Mapping[str, Any], **constants: Any) -> ConstrainedBilevelProblem:
    """`eq:clo` of arrays by the names of `linear.NAMES`, dense or sparse, in boxes of ±1."""
    box = terms.Box(-1.0, 1.0)
    functions = {"constraints": _linear_constraints, "data": arrays}
    return ConstrainedBilevelProblem(
        _linear_upper, _linear_lower, x=box, y=box, **functions, **constants
    )


def _linear_upper(x, y, data):
    return data["c"] @ x + data["d"] @ y


def _linear_lower(x, y, data):
    return data["d_tilde"] @ y


def _linear_constraints(x, y, data):
    return data["A"] @ x + data["B"] @ y - data["b"]
