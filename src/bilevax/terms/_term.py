"""What a proximable convex term is, over one array or any pytree."""

from __future__ import annotations

import abc
import dataclasses
import functools
import operator
from typing import Any, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from bilevax.arguments import positive, tracing
from bilevax.trees import Tree, dot, norm

Scalar: TypeAlias = Array
Number: TypeAlias = float | np.ndarray | Array


def parameter(value: Number) -> Any:
    """Keep a term's number as a float array: a new value then needs no new compilation."""
    if isinstance(value, jax.Array):
        return value.astype(jnp.result_type(float))
    array = np.asarray(value)
    return array.astype(float) if array.dtype.kind in "biuf" else array


def cast(value: Number, like: Array) -> Array:
    """The parameter `value` in the dtype and shape of `like`."""
    return jnp.broadcast_to(jnp.asarray(value, like.dtype), like.shape)


def scalar(value: Number, like: Array) -> Array:
    """The parameter `value` as a scalar in the dtype of `like`."""
    return jnp.asarray(value, like.dtype)


def as_step(step: Number) -> Array:
    """The step of a prox as a float. A whole number would round what it is multiplied with."""
    step = jnp.asarray(step)
    return step if jnp.issubdtype(step.dtype, jnp.inexact) else step.astype(float)


def is_term(value: Any) -> bool:
    return isinstance(value, Term)


def tree_sum(tree: Tree) -> Scalar:
    """Sum of the scalars in a tree; zero for an absent block."""
    leaves = jax.tree.leaves(tree)
    return functools.reduce(operator.add, leaves) if leaves else jnp.zeros(())


def _show(value: Any) -> str:
    """A parameter for a reader: a number, or the shape of an array."""
    if isinstance(value, np.ndarray | jax.Array) and not tracing(value):
        return f"{value:g}" if value.ndim == 0 else f"array{value.shape}"
    return repr(value)


class Term(eqx.Module):
    """A proper closed convex function φ of one block of variables.

    Solvers and certificates see φ through the methods below and nothing else. Each takes an array
    or any pytree of arrays.
    """

    @abc.abstractmethod
    def value(self, x: Tree) -> Scalar:
        """φ(x); infinite outside the domain, up to rounding."""

    @abc.abstractmethod
    def prox(self, v: Tree, step: Number) -> Tree:
        """argmin over u of ½‖u − v‖² + step·φ(u)."""

    @abc.abstractmethod
    def project(self, v: Tree) -> Tree:
        """The point of the domain of φ nearest to v."""

    @abc.abstractmethod
    def diameter(self, like: Tree) -> Scalar:
        """max ‖u − v‖ over the domain, for a block shaped like `like`; infinite if unbounded."""

    @abc.abstractmethod
    def linear_oracle(self, g: Tree) -> Tree:
        """A maximiser of ⟨g, s⟩ over the domain; infinite entries where there is none."""

    @abc.abstractmethod
    def conjugate(self, g: Tree) -> Scalar:
        """φ*(g) = sup over s of ⟨g, s⟩ − φ(s). For a set this is max ⟨g, s⟩ over it."""

    @abc.abstractmethod
    def residual(self, x: Tree, g: Tree) -> Tree:
        """The shortest vector of g + ∂φ(x), for x in the domain. Its norm is dist(0, g + ∂φ(x))."""

    @abc.abstractmethod
    def supremum(self, like: Tree) -> Scalar:
        """An upper bound on φ over its domain; infinite if there is none."""

    @abc.abstractmethod
    def check_block(self, x: Tree, name: str) -> None:
        """Raise a `ValueError` that names the block if `x` has a shape φ cannot take."""

    def support(self, g: Tree) -> Scalar:
        """max ⟨g, s⟩ over the domain of φ."""
        return dot(g, self.linear_oracle(g))

    @property
    def is_polyhedral(self) -> bool:
        """Whether φ is known to be made of flat pieces on a domain with flat faces."""
        return False

    @property
    def is_entrywise(self) -> bool:
        """Whether φ is known to be a sum over entries, so that its prox takes each by itself."""
        return False

    # For a bound on max over s of ⟨g, s − z⟩ − φ(s) where the conjugate is infinite.

    @property
    def endless(self) -> bool:
        """Whether φ* may be infinite somewhere; not to know is to say yes."""
        return True

    def known_excess(self, z: Tree, g: Tree) -> Scalar:
        """max over s of ⟨g, s − z⟩ − φ(s) over the parts where that is finite, −φ(z) over others.

        A part is what a sum over parts has as one; without such, the whole.
        """
        excess = self.conjugate(g) - dot(g, z)
        return jnp.where(jnp.isfinite(excess), excess, -self.value(z))

    def endless_slope(self, z: Tree, g: Tree) -> Tree:
        """The shortest vector of ∂φ(z) − g over these others, and zero over the rest.

        With v this vector, ⟨g, s − z⟩ − φ(s) ≤ −φ(z) − ⟨v, s − z⟩ over them, for every s.
        """
        known = jnp.isfinite(self.conjugate(g) - dot(g, z))
        slope = self.residual(z, jax.tree.map(jnp.negative, g))
        return jax.tree.map(lambda v: jnp.where(known, jnp.zeros_like(v), v), slope)

    # For interior methods: φ with a barrier b of the flat faces of its domain. A term without one
    # stays as it is.

    def barrier(self, x: Tree) -> Scalar:
        """b(x), finite inside of the domain."""
        return jnp.zeros(())

    def barrier_prox(self, v: Tree, step: Number, weight: Number) -> Tree:
        """argmin over u of ½‖u − v‖² + step·φ(u) + weight·b(u)."""
        return self.prox(v, step)

    def box(self, like: Tree) -> tuple[Tree, Tree] | None:
        """The bounds of all entries where φ is zero on a box, and infinite elsewhere."""
        return None

    def violation(self, x: Tree) -> Scalar:
        """The distance from x to the domain of φ."""
        return norm(jax.tree.map(jnp.subtract, x, self.project(x)))

    def __repr__(self) -> str:
        given = [f.name for f in dataclasses.fields(self) if f.init]
        shown = (f"{name}={_show(getattr(self, name))}" for name in given)
        return f"{type(self).__name__}({', '.join(shown)})"

    def __add__(self, other: Term) -> Term:
        if not is_term(other):
            return NotImplemented
        from bilevax.terms.norms import add

        return add(self, other)

    def __mul__(self, factor: Number) -> Term:
        if is_term(factor):
            return NotImplemented
        return Scaled(self, factor)

    __rmul__ = __mul__


class Separable(Term):
    """A term that is a sum over parts of its block, each with a term of its own."""

    @abc.abstractmethod
    def _each(self, method: str, *trees: Tree, numbers: tuple[Number, ...] = ()) -> Tree:
        """What a method of every part's term says of that part."""

    def value(self, x: Tree) -> Scalar:
        return tree_sum(self._each("value", x))

    def prox(self, v: Tree, step: Number) -> Tree:
        return self._each("prox", v, numbers=(step,))

    def project(self, v: Tree) -> Tree:
        return self._each("project", v)

    def diameter(self, like: Tree) -> Scalar:
        return jnp.sqrt(tree_sum(jax.tree.map(lambda d: d**2, self._each("diameter", like))))

    def linear_oracle(self, g: Tree) -> Tree:
        return self._each("linear_oracle", g)

    def conjugate(self, g: Tree) -> Scalar:
        return tree_sum(self._each("conjugate", g))

    def residual(self, x: Tree, g: Tree) -> Tree:
        return self._each("residual", x, g)

    def supremum(self, like: Tree) -> Scalar:
        return tree_sum(self._each("supremum", like))

    def known_excess(self, z: Tree, g: Tree) -> Scalar:
        return tree_sum(self._each("known_excess", z, g))

    def endless_slope(self, z: Tree, g: Tree) -> Tree:
        return self._each("endless_slope", z, g)

    def barrier(self, x: Tree) -> Scalar:
        return tree_sum(self._each("barrier", x))

    def barrier_prox(self, v: Tree, step: Number, weight: Number) -> Tree:
        return self._each("barrier_prox", v, numbers=(step, weight))


class LeafTerm(Separable):
    """A term defined for one array; a pytree is taken leaf by leaf.

    So `Simplex()` on a pytree of two arrays is the product of two simplices, not one simplex
    spread over both.
    """

    @abc.abstractmethod
    def leaf_value(self, x: Array) -> Scalar: ...

    @abc.abstractmethod
    def leaf_prox(self, v: Array, step: Array) -> Array: ...

    @abc.abstractmethod
    def leaf_project(self, v: Array) -> Array: ...

    @abc.abstractmethod
    def leaf_diameter(self, like: Array) -> Scalar: ...

    @abc.abstractmethod
    def leaf_linear_oracle(self, g: Array) -> Array: ...

    @abc.abstractmethod
    def leaf_conjugate(self, g: Array) -> Scalar: ...

    @abc.abstractmethod
    def leaf_residual(self, x: Array, g: Array) -> Array: ...

    @abc.abstractmethod
    def leaf_supremum(self, like: Array) -> Scalar: ...

    @abc.abstractmethod
    def leaf_check(self, x: Array) -> str | None:
        """What is wrong with an array of this shape, or nothing."""

    def leaf_known_excess(self, z: Array, g: Array) -> Scalar:
        excess = self.leaf_conjugate(g) - jnp.sum(g * z)
        return jnp.where(jnp.isfinite(excess), excess, -self.leaf_value(z))

    def leaf_endless_slope(self, z: Array, g: Array) -> Array:
        known = jnp.isfinite(self.leaf_conjugate(g) - jnp.sum(g * z))
        return jnp.where(known, jnp.zeros_like(g), self.leaf_residual(z, -g))

    def leaf_barrier(self, x: Array) -> Scalar:
        return jnp.zeros((), x.dtype)

    def leaf_barrier_prox(self, v: Array, step: Array, weight: Array) -> Array:
        return self.leaf_prox(v, step)

    def _each(self, method: str, *trees: Tree, numbers: tuple[Number, ...] = ()) -> Tree:
        # A leaf of what only has a shape and a dtype, as for a diameter, may be no array.
        array = _ones if method in ("diameter", "supremum") else jnp.asarray

        def of_leaf(*leaves: Any) -> Any:
            arrays = [array(leaf) for leaf in leaves]
            scalars = [scalar(number, arrays[0]) for number in numbers]
            return getattr(self, f"leaf_{method}")(*arrays, *scalars)

        return jax.tree.map(of_leaf, *trees)

    def check_block(self, x: Tree, name: str) -> None:
        for path, leaf in jax.tree_util.tree_leaves_with_path(x):
            problem = self.leaf_check(leaf)
            if problem:
                raise ValueError(f"{name}{jax.tree_util.keystr(path)}: {self} {problem}")


def _ones(like: Any) -> Array:
    """An array shaped like `like`, which may be only a shape and a dtype."""
    return jnp.ones(jnp.shape(like), jnp.result_type(like))


class PerLeaf(Separable):
    """One term for each part of a block: φ(x) = Σ φᵢ(xᵢ) for a pytree of terms φᵢ.

    `parts` may be a prefix of the block's own tree, so one term can stand for a whole subtree.
    """

    parts: Tree

    def __check_init__(self):
        for part in jax.tree.leaves(self.parts, is_leaf=is_term):
            if not is_term(part):
                raise TypeError(f"PerLeaf: parts must be a pytree of terms, but holds {part!r}")

    @property
    def endless(self) -> bool:
        parts = jax.tree.leaves(self.parts, is_leaf=is_term)
        return any(part.endless for part in parts)

    @property
    def is_polyhedral(self) -> bool:
        parts = jax.tree.leaves(self.parts, is_leaf=is_term)
        return all(part.is_polyhedral for part in parts)

    @property
    def is_entrywise(self) -> bool:
        parts = jax.tree.leaves(self.parts, is_leaf=is_term)
        return all(part.is_entrywise for part in parts)

    def _each(self, method: str, *trees: Tree, numbers: tuple[Number, ...] = ()) -> Tree:
        call = lambda term, *parts: getattr(term, method)(*parts, *numbers)
        return jax.tree.map(call, self.parts, *trees, is_leaf=is_term)

    def box(self, like: Tree) -> tuple[Tree, Tree] | None:
        terms, structure = jax.tree.flatten(self.parts, is_leaf=is_term)
        boxes = [term.box(part) for term, part in zip(terms, structure.flatten_up_to(like))]
        if any(box is None for box in boxes):
            return None
        low, high = (jax.tree.unflatten(structure, [box[k] for box in boxes]) for k in (0, 1))
        return low, high

    def check_block(self, x: Tree, name: str) -> None:
        try:
            pairs = jax.tree.map(lambda *pair: pair, self.parts, x, is_leaf=is_term)
        except (ValueError, TypeError) as error:
            raise ValueError(
                f"{name}: the pytree of terms {self.parts} does not match the block's own pytree "
                f"{jax.tree.structure(x)}; give one term for the whole block, or one per part. "
                f"({error})"
            ) from None
        is_pair = lambda p: isinstance(p, tuple) and len(p) == 2 and is_term(p[0])
        for path, (term, part) in jax.tree_util.tree_leaves_with_path(pairs, is_leaf=is_pair):
            term.check_block(part, f"{name}{jax.tree_util.keystr(path)}")


class Scaled(Term):
    """The term factor·φ, for a factor > 0."""

    term: Term
    factor: Number = eqx.field(converter=parameter)

    def __check_init__(self):
        if not is_term(self.term):
            raise TypeError(f"Scaled: term must be a term, not {self.term!r}")
        positive(self.factor, "the factor of a term")

    def _times(self, tree: Tree, inverse: bool = False) -> Tree:
        def leaf(a: Array) -> Array:
            factor = scalar(self.factor, a)
            return a / factor if inverse else a * factor

        return jax.tree.map(leaf, tree)

    def value(self, x: Tree) -> Scalar:
        return self._times(self.term.value(x))

    def prox(self, v: Tree, step: Number) -> Tree:
        step = as_step(step)
        return self.term.prox(v, step * scalar(self.factor, step))

    def project(self, v: Tree) -> Tree:
        return self.term.project(v)

    def diameter(self, like: Tree) -> Scalar:
        return self.term.diameter(like)

    def linear_oracle(self, g: Tree) -> Tree:
        return self.term.linear_oracle(g)

    def conjugate(self, g: Tree) -> Scalar:
        return self._times(self.term.conjugate(self._times(g, inverse=True)))

    def residual(self, x: Tree, g: Tree) -> Tree:
        return self._times(self.term.residual(x, self._times(g, inverse=True)))

    @property
    def endless(self) -> bool:
        return self.term.endless

    @property
    def is_polyhedral(self) -> bool:
        return self.term.is_polyhedral

    @property
    def is_entrywise(self) -> bool:
        return self.term.is_entrywise

    def known_excess(self, z: Tree, g: Tree) -> Scalar:
        return self._times(self.term.known_excess(z, self._times(g, inverse=True)))

    def barrier(self, x: Tree) -> Scalar:
        return self.term.barrier(x)

    def barrier_prox(self, v: Tree, step: Number, weight: Number) -> Tree:
        step = as_step(step)
        return self.term.barrier_prox(v, step * scalar(self.factor, step), weight)

    def box(self, like: Tree) -> tuple[Tree, Tree] | None:
        return self.term.box(like)

    def endless_slope(self, z: Tree, g: Tree) -> Tree:
        return self._times(self.term.endless_slope(z, self._times(g, inverse=True)))

    def supremum(self, like: Tree) -> Scalar:
        bound = self.term.supremum(like)
        return jnp.where(bound == 0, 0, self._times(bound))

    def check_block(self, x: Tree, name: str) -> None:
        self.term.check_block(x, name)


def as_term(spec: Any, name: str) -> Term:
    """A term from what a user may write for a block: a term, or a pytree of terms."""
    if is_term(spec):
        return spec
    leaves = jax.tree.leaves(spec, is_leaf=is_term)
    wrong = [leaf for leaf in leaves if not is_term(leaf)]
    if wrong and callable(wrong[0]):
        called = getattr(wrong[0], "__name__", wrong[0])
        raise TypeError(
            f"{name} must be a term, not the constructor {called}; call it: {called}(…)"
        )
    if wrong or not leaves:
        found = type(wrong[0]).__name__ if wrong else "an empty tree"
        raise TypeError(
            f"{name} must be a term such as bilevax.terms.Box(-1.0, 1.0), or a pytree of terms, "
            f"not {found}; use bilevax.terms.Free() for no constraint"
        )
    return PerLeaf(spec)
