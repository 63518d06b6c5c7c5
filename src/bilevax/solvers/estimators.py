"""How a stochastic method estimates a gradient from its samples: each alone, or recursively."""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array

from bilevax import trees
from bilevax.arguments import tracing
from bilevax.trees import Tree


class Estimator(eqx.Module):
    """From a gradient that one sample gives to an estimate, with what it remembers between."""

    evaluations: ClassVar[int]  # gradients of one sample that an estimate takes
    power: ClassVar[float]  # in theory steps shrink as k to minus this

    @abc.abstractmethod
    def init(self, point: Tree, gradient: Tree) -> Any:
        """The memory before the first estimate; the arguments are there for their shapes."""

    @abc.abstractmethod
    def __call__(
        self, gradient: Callable[[Tree], Tree], point: Tree, memory: Any, shrunk: Array
    ) -> tuple[Tree, Any]:
        """The estimate at a point from one sample's gradient function, and the new memory.

        Steps are `shrunk` times as long as at first.
        """


class Plain(Estimator):
    """g(w; ξ): the gradient of the sample."""

    evaluations: ClassVar[int] = 1
    power: ClassVar[float] = 1 / 2

    def init(self, point: Tree, gradient: Tree) -> None:
        return None

    def __call__(
        self, gradient: Callable[[Tree], Tree], point: Tree, memory: None, shrunk: Array
    ) -> tuple[Tree, None]:
        return gradient(point), None


class RecursiveMemory(eqx.Module):
    point: Tree
    estimate: Tree
    begun: Array


class Recursive(Estimator):
    """Recursive momentum (STORM, Cutkosky & Orabona 2019): what the last estimate knew, kept.

    d_k = g(w_k; ξ_k) + (1 − a)·(d_{k−1} − g(w_{k−1}; ξ_k)), both gradients of the same sample. Its
    error is (1 − a) times the last one plus the noise of a·g and of the *change* of g, which small
    steps make small. With a = 1 it is `Plain`, with a = 0 the recursion of SPIDER and SARAH. a is
    `momentum`, and shrinks as the square of the steps where these do.
    """

    evaluations: ClassVar[int] = 2
    power: ClassVar[float] = 1 / 3

    momentum: Any = 0.1

    def __check_init__(self):
        a = self.momentum
        if not tracing(a) and not (jnp.ndim(a) == 0 and 0 <= float(a) <= 1):
            raise ValueError(f"Recursive: momentum must be a number from 0 to 1, not {a!r}")

    def init(self, point: Tree, gradient: Tree) -> RecursiveMemory:
        # Copies: a state whose leaves are the same buffers could not be donated.
        zeros = lambda tree: jax.tree.map(jnp.zeros_like, tree)
        return RecursiveMemory(zeros(point), zeros(gradient), jnp.zeros((), bool))

    def __call__(
        self, gradient: Callable[[Tree], Tree], point: Tree, memory: RecursiveMemory, shrunk: Array
    ) -> tuple[Tree, RecursiveMemory]:
        here, before = gradient(point), gradient(memory.point)
        momentum = jnp.asarray(self.momentum, trees.dtype_of(here)) * shrunk**2
        keep = jnp.where(memory.begun, 1 - momentum, 0)
        change = trees.subtract(memory.estimate, before)
        # What there was before the first estimate is no point of the domain: it may be anything.
        carried = jax.tree.map(
            lambda c: jnp.where(memory.begun, keep.astype(c.dtype) * c, 0), change
        )
        estimate = jax.tree.map(jnp.add, here, carried)
        return estimate, RecursiveMemory(point, estimate, jnp.ones((), bool))
