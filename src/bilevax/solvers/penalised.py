"""The penalty problem in flat vectors over its six blocks, as both engines see it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from bilevax import trees
from bilevax.arguments import non_negative
from bilevax.functions import operations
from bilevax.problems import BilevelProblem, Form, Point
from bilevax.problems.constants import sample_domain
from bilevax.problems.reformulations import at_both, penalty_blocks, penalty_problem
from bilevax.programs import quick
from bilevax.solvers.base import Solver, State, Task
from bilevax.solvers.curvature import MINIMISED, X1, X2, Y1, Y2, Z1, Z2, Blocks
from bilevax.terms import PerLeaf, Term
from bilevax.terms._barriers import interval_prox
from bilevax.trees import Layout, Tree

# A call of so many operations is batched with another of the same kind.
MANY = 40
# The blocks of the lower level, whose terms P has ρ times.
OF_LOWER = (Y1, Y2, Z1, Z2)
# So many columns of a Hessian are computed at once where it has many.
AT_ONCE = 128
# The first weight of barriers, as a share of what an entry times its slope is.
FIRST_TAU = 0.01


class Engine(Solver[State]):
    """A solver of the penalty problem, with fields `rho`, a first guess, `target` and `relative`.

    These are what every line may be, and which share of its size on top.
    """

    form: ClassVar[type[Form]] = BilevelProblem
    keeps_state: ClassVar[bool] = True

    rho: eqx.AbstractVar[Any]
    target: eqx.AbstractVar[Any]
    relative: eqx.AbstractVar[Any]

    def check_aims(self) -> None:
        for name in ("target", "relative"):
            if getattr(self, name) is not None:
                non_negative(getattr(self, name), f"{type(self).__name__}: {name}")

    def prepared_for(self, task: Task) -> Solver:
        solver = self
        if task.relative:
            target = task.tolerance if self.target is None else self.target
            solver = dataclasses.replace(self, target=target, relative=task.relative)
        return solver.prepare(task.problem, task.start, task.tolerance)

    def prepared_anew(self, prepared: Any, task: Task, state: State) -> Solver:
        """With the ρ that its witnesses are for: another one would lead away from them."""
        return dataclasses.replace(self, rho=task.start.rho).prepared_for(task)


def sizes_of(start: Point) -> tuple[int, ...]:
    """The number of entries in each of the six blocks."""
    return Blocks.of(*penalty_blocks(start)).sizes


class Penalised(eqx.Module):
    """P_ρ of `eq:new_minmax`: minimised over (x1, y1, y2), maximised over (x2, z1, z2).

    With τ all blocks but x1 have τ times the barrier of their terms on top, inside of f and of f~.
    """

    problem: BilevelProblem
    rho: Array
    blocks: Blocks = eqx.field(static=True)
    tau: Array | None = None

    def operator(self, w: Array) -> Array:
        """(∇ₓP, −∇ᵧP)"""
        parts = self.blocks.layout.unravel(w)
        gx, gy = penalty_problem(self.problem, self.rho).gradient(parts[:3], parts[3:])
        return self.blocks.layout.ravel((*gx, *trees.scale(-1, gy)))

    def jacobian(self, w: Array) -> Array:
        """∂F, from the Hessians of f and of f~ at both of its places.

        Each goes through one function only, and no column through one that it is not a variable of.
        """
        p, (x1, y1, y2, x2, z1, z2) = self.problem, self.blocks.layout.unravel(w)
        lower = lambda y1, y2: _hessian(p.lower_gradient, (x1, y1, y2))
        above, below = self.rho * at_both(lower, (y1, z2), (z1, y2))
        of_f = _hessian(p.upper_gradient, (x1, x2, y1, y2))
        table = {(b, c): jnp.zeros((m, n), w.dtype) for b, m in self._sizes for c, n in self._sizes}
        for owners, hessian, sign in (
            ((X1, X2, Y1, Y2), of_f, 1),
            ((X1, Y1, Z2), above, 1),
            ((X1, Z1, Y2), below, -1),
        ):
            ends = np.cumsum([0, *(self.blocks.sizes[b] for b in owners)])
            for i, b in enumerate(owners):
                for j, c in enumerate(owners):
                    if (b, c) in table:
                        part = hessian[ends[i] : ends[i + 1], ends[j] : ends[j + 1]]
                        table[b, c] += (sign if b in MINIMISED else -sign) * part
        return jnp.block([[table[b, c] for c, _ in self._sizes] for b, _ in self._sizes])

    def columns(self, w: Array, index: Array) -> Array:
        """Some columns of ∂F, a few at a time."""

        def column(entry: Array) -> Array:
            unit = jax.nn.one_hot(entry, w.size, dtype=w.dtype)
            return jax.jvp(self.operator, (w,), (unit,))[1]

        return lax.map(column, index, batch_size=AT_ONCE).T

    @property
    def _sizes(self) -> list[tuple[int, int]]:
        """The blocks that are there, and their sizes."""
        return [(b, size) for b, size in enumerate(self.blocks.sizes) if size]

    def value(self, w: Array) -> Array:
        """P with its terms and barriers."""
        parts = self.blocks.layout.unravel(w)
        value = penalty_problem(self.problem, self.rho).value(parts[:3], parts[3:])
        if self.tau is None:
            return value
        barrier = lambda term, block: 0.0 if term is None else term.barrier(block)
        _, y1, y2, x2, z1, z2 = self.per_block(barrier, parts)
        barriers = self.rho * (y1 + y2 - z1 - z2) - x2
        return value + jnp.where(self.tau > 0, self.tau * barriers, 0).astype(value.dtype)

    def prox(self, v: Array, steps: Array) -> Array:
        """The prox of all terms and barriers, with one step for each block."""
        parts = self.blocks.layout.unravel(v)
        if self.tau is None:
            prox = lambda term, block, step: block if term is None else term.prox(block, step)
            return self._flat(self.per_block(prox, parts, steps))

        def inner(term: Term | None, block: Tree, step: Array, weight: Array) -> Tree:
            if term is None or term.box(block) is not None:
                return block
            return term.barrier_prox(block, step, weight)

        # Boxes come all at once, so that their prox is compiled once.
        of_f, of_lower = self.tau * steps, self.rho * self.tau * steps
        weights = jnp.where(jnp.asarray([b in OF_LOWER for b in range(6)]), of_lower, of_f)
        _, *others = self.per_block(inner, parts, steps, weights)
        flat = self._flat((parts[X1], *others))
        flat = interval_prox(flat, *self._boxes(parts), self.blocks.spread(weights))
        x1 = self._flat((self.problem.x1.prox(parts[X1], steps[X1]), *parts[1:]))
        return jnp.where(jnp.asarray(self.blocks.owner == X1), x1, flat)

    def _boxes(self, parts: tuple[Tree, ...]) -> tuple[Array, Array]:
        """The bounds of all entries whose term is a box, but those of x1; infinite for others."""

        def bounds(term: Term | None, block: Tree) -> tuple[Tree, Tree]:
            wide = lambda bound: jax.tree.map(lambda leaf: jnp.full_like(leaf, bound), block)
            box = None if term is None else term.box(block)
            return (wide(-jnp.inf), wide(jnp.inf)) if box is None else box

        p = self.problem
        terms = (None, p.y1, p.y2, p.x2, p.y1, p.y2)
        low, high = zip(*(bounds(term, part) for term, part in zip(terms, parts)))
        return self._flat(low), self._flat(high)

    @property
    def is_entrywise(self) -> bool:
        """Whether the prox takes each entry by itself."""
        p = self.problem
        return all(term is None or term.is_entrywise for term in (p.x1, p.y1, p.y2, p.x2))

    def projected(self, w: Array) -> Array:
        """The nearest point of the domains."""
        project = lambda term, block: block if term is None else term.project(block)
        return self._flat(self.per_block(project, self.blocks.layout.unravel(w)))

    def gap(self, w: Array) -> tuple[Array, Array]:
        """f~(x1, y1, z2) − f~(x1, z1, y2), and the size of what it is the difference of."""
        p, (x1, y1, y2, _, z1, z2) = self.problem, self.blocks.layout.unravel(w)
        above, below = at_both(lambda a, b: p.lower_value(x1, a, b), (y1, z2), (z1, y2))
        return above - below, jnp.maximum(jnp.abs(above), jnp.abs(below))

    def repaired(self, w: Array) -> Array:
        """f at (z1, y2), which solve the lower level whatever ρ is."""
        x1, _, y2, x2, z1, _ = self.blocks.layout.unravel(w)
        return self.problem.upper_value(x1, x2, z1, y2)

    def per_block(self, function: Callable[..., Tree], *columns: Any) -> tuple[Tree, ...]:
        """function(term, …) for each of the six blocks, with one argument from each column.

        y1 and z1 have the same term, and so have y2 and z2. Where a call is many operations, as a
        projection on a simplex is, each pair is one batched call: it is compiled in half the time.
        """
        p, rho = self.problem, self.rho

        def both(term: Term | None, first: tuple, second: tuple) -> tuple[Tree, Tree]:
            called = lambda *arguments: function(None if term is None else rho * term, *arguments)
            if term is None or operations(called, *first) < MANY:
                return called(*first), called(*second)
            pair = at_both(called, first, second)
            return tuple(jax.tree.map(lambda leaf, k=k: leaf[k], pair) for k in (0, 1))

        x1, y1, y2, x2, z1, z2 = zip(*columns)
        (of_y1, of_z1), (of_y2, of_z2) = both(p.y1, y1, z1), both(p.y2, y2, z2)
        return function(p.x1, *x1), of_y1, of_y2, function(p.x2, *x2), of_z1, of_z2

    def _flat(self, parts: tuple[Tree, ...]) -> Array:
        return self.blocks.layout.ravel(parts)


def _hessian(gradient: Callable[..., tuple[Tree, ...]], parts: tuple[Tree, ...]) -> Array:
    """Of a function with this gradient, all its variables in one flat vector."""
    layout = Layout.of(parts)
    flat = lambda v: layout.ravel(gradient(*layout.unravel(v)))
    return jax.jacfwd(flat)(layout.ravel(parts))


def first_penalty(problem: BilevelProblem, start: Point) -> tuple[float, float]:
    """A first ρ, at which both levels pull y1 about as hard, and the size of ∇f."""
    steepness, upper, lower = (_middle(sizes) for sizes in _slopes(problem, start))
    return max(upper, 1e-3 * steepness) / lower, steepness


@quick
def _slopes(problem: BilevelProblem, start: Point) -> tuple[Array, Array, Array]:
    """‖∇f‖, and ‖∇f‖ and ‖∇f~‖ in y1 alone, at a few samples of the domain.

    The maximising blocks stay where they start: bounds of multipliers say nothing about a problem.
    Where f~ has no slope in y1 there, as a bilinear one can have none, that in y2 stands in.
    """
    term = PerLeaf((problem.x1, problem.y1))

    def at(key: Array) -> tuple[Array, Array, Array]:
        x1, y1 = sample_domain(term, (start.x1, start.y1), key)
        in_x, _, in_y, _ = problem.upper_gradient(x1, start.x2, y1, start.y2)
        _, lower, other = (trees.norm(g) for g in problem.lower_gradient(x1, y1, start.y2))
        other = other.astype(lower.dtype)  # of an absent y2 it is a plain zero
        lower = jnp.where(lower < 1e-6 * other, other, lower)
        return trees.norm((in_x, in_y)), trees.norm(in_y), lower

    return lax.map(at, jax.random.split(jax.random.key(0), 9))


def first_barrier(problem: BilevelProblem, start: Point) -> float:
    """A first τ: a share of an entry of y1 times its slope, in the middle of a few samples."""
    return FIRST_TAU * _middle(_products(problem, start))


@quick
def _products(problem: BilevelProblem, start: Point) -> Array:
    term = PerLeaf((problem.x1, problem.y1))

    def at(key: Array) -> Array:
        x1, y1 = sample_domain(term, (start.x1, start.y1), key)
        slope = problem.lower_gradient(x1, y1, start.y2)[1]
        products = jax.tree.map(lambda g, y, first: jnp.abs(g * (y - first)), slope, y1, start.y1)
        return trees.total(products) / sum(leaf.size for leaf in jax.tree.leaves(y1))

    return lax.map(at, jax.random.split(jax.random.key(0), 9))


def _middle(sizes: Array) -> float:
    found = float(np.median(trees.on_host(sizes)))
    return float(np.clip(found, 1e-6, 1e6)) if np.isfinite(found) else 1.0
