"""Sample a problem over its domain and report where it breaks what the theory assumes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from bilevax import trees
from bilevax.arguments import whole
from bilevax.functions import up_to_date
from bilevax.problems.bilevel import BilevelProblem
from bilevax.problems.constants import blocks_of, random_unit, sample_domain
from bilevax.problems.constrained import ConstrainedBilevelProblem
from bilevax.problems.form import Call, Form
from bilevax.problems.minimax import MinimaxProblem
from bilevax.problems.point import Point
from bilevax.problems.validation import diameter, validate
from bilevax.trees import Tree


@dataclasses.dataclass(frozen=True)
class Finding:
    """One assumption: whether every sample obeyed it, and the worst breach."""

    assumption: str
    holds: bool
    worst: float
    where: str = ""


@dataclasses.dataclass(frozen=True)
class Report:
    """What the samples say. A breach is proof; the absence of one is not."""

    findings: tuple[Finding, ...]
    samples: int

    @property
    def ok(self) -> bool:
        return all(f.holds for f in self.findings)

    def __str__(self) -> str:
        width = max(len(f.assumption) for f in self.findings)
        rows = [
            f"{'ok' if f.holds else 'NO':<3} {f.assumption:<{width}}  worst {f.worst:.3g}"
            + (f"  at {f.where}" if not f.holds else "")
            for f in self.findings
        ]
        return "\n".join([f"{self.samples} samples of each:", *rows])


class _Sampler:
    """Random pairs of points of a domain, and one function's behaviour there."""

    def __init__(self, problem: Form, call: Call, start: Point, samples: int, seed: int):
        self.name, self.order = call.name, list(call.blocks)
        several = call.name in problem.array_functions
        self.are, self.its = ("are", "their") if several else ("is", "its")
        self.values = lambda u: call(*u, *problem.extra)  # one number, or arrays of constraints
        self.value = lambda u: trees.total(self.values(u))
        self.gradient = jax.grad(self.value)
        term, blocks = blocks_of(problem, start, call.name)
        keys = jax.random.split(jax.random.key(seed), (samples, 3))
        draw = jax.jit(lambda ks: lax.map(lambda k: sample_domain(term, blocks, k), ks))
        self.pairs = (draw(keys[:, 0]), draw(keys[:, 1]), keys[:, 2])
        self.eps = float(jnp.finfo(trees.dtype_of(blocks)).eps)

    def _worst(
        self, assumption: str, breach: Callable[[Tree, Tree, Array], Array], allowed: float
    ) -> Finding:
        """The largest breach over the samples; one at a time, so that data of any size will do."""
        sizes = np.asarray(jax.jit(lambda p: lax.map(lambda q: breach(*q), p))(self.pairs))
        sizes = np.where(np.isnan(sizes), np.inf, sizes)
        worst = int(np.argmax(sizes))
        where = jax.tree.map(lambda leaves: leaves[worst], self.pairs[0])
        size = float(sizes[worst])
        return Finding(assumption, size <= allowed, size, _brief(dict(zip(self.order, where))))

    def finite(self) -> Finding:
        def breach(u: Tree, v: Tree, key: Array) -> Array:
            fine = trees.all_finite((self.value(u), self.gradient(u)))
            return jnp.where(fine, 0.0, jnp.inf)

        return self._worst(f"{self.name} and {self.its} gradient are finite", breach, 0.0)

    def bent(self, block: str, shape: str) -> Finding:
        """Midpoint convexity, concavity or both ("affine") in one block, the others fixed.

        The breach is how far the middle of two values lies off the line between them, where it
        may not; of several values, the worst.
        """
        index = self.order.index(block)
        off = {"convex": lambda rise: rise, "concave": jnp.negative, "affine": jnp.abs}[shape]

        def breach(u: Tree, v: Tree, key: Array) -> Array:
            def at(t: float) -> Tree:
                mixed = trees.combine(1 - t, u[index], t, v[index])
                return self.values((*u[:index], mixed, *u[index + 1 :]))

            def above(one: Array, middle: Array, other: Array) -> Array:
                size = 1 + jnp.abs(one) + jnp.abs(other)
                return jnp.max(off(middle - (one + other) / 2) / size, initial=-jnp.inf)

            bends = jax.tree.map(above, at(0.0), at(0.5), at(1.0))
            return jnp.max(jnp.stack(jax.tree.leaves(bends)))

        assumption = f"{self.name} {self.are} {shape} in {block}"
        return self._worst(assumption, breach, 256 * self.eps)

    def strong(self, block: str, modulus: Any, sign: int) -> Finding:
        """That ±f is m-strongly convex in one block: the middle of two values at least m/8·‖u − v‖²
        below the middle of the line. `modulus` is m, or a function of the first block."""
        index = self.order.index(block)

        def breach(u: Tree, v: Tree, key: Array) -> Array:
            def at(t: float) -> Array:
                mixed = trees.combine(1 - t, u[index], t, v[index])
                return sign * self.value((*u[:index], mixed, *u[index + 1 :]))

            m = jnp.asarray(modulus(u[0]) if callable(modulus) else modulus)
            one, middle, other = at(0.0), at(0.5), at(1.0)
            curved = m.astype(one.dtype) / 8 * trees.square(trees.subtract(u[index], v[index]))
            size = 1 + jnp.abs(one) + jnp.abs(other) + curved
            return (middle + curved - (one + other) / 2) / size

        shape = "convex" if sign > 0 else "concave"
        assumption = f"{self.name} {self.are} lower_modulus-strongly {shape} in {block}"
        return self._worst(assumption, breach, 256 * self.eps)

    def differentiable(self) -> Finding:
        """Its gradient against central differences, along random directions."""
        step = self.eps ** (1 / 3)

        def breach(u: Tree, v: Tree, key: Array) -> Array:
            d = random_unit(u, key)
            ahead, behind = self.value(trees.axpy(step, d, u)), self.value(trees.axpy(-step, d, u))
            difference = (ahead - behind) / (2 * step)
            slope = self.gradient(u)
            scale = 1 + jnp.abs(difference) + trees.norm(slope) + jnp.abs(self.value(u))
            return jnp.abs(trees.dot(slope, d) - difference) / scale

        allowed = 100 * self.eps ** (2 / 3)
        whose = f"{self.name}'" if self.are == "are" else f"{self.name}'s"
        return self._worst(f"{whose} gradient is right", breach, allowed)

    def smooth(self, constant: Any, label: str) -> Finding:
        """‖∇(u) − ∇(v)‖ ≤ L‖u − v‖ for the constant that was given; reports the L it saw."""

        def breach(u: Tree, v: Tree, key: Array) -> Array:
            change = trees.norm(trees.subtract(self.gradient(u), self.gradient(v)))
            return change / jnp.maximum(trees.norm(trees.subtract(u, v)), self.eps)

        allowed = float(constant) * (1 + 1e-6)
        return self._worst(f"{label} is large enough", breach, allowed)


def _brief(blocks: dict[str, Tree]) -> str:
    with np.printoptions(precision=4, threshold=6, edgeitems=2):
        shown = {
            name: [np.asarray(x) for x in jax.tree.leaves(tree)] for name, tree in blocks.items()
        }
        return ", ".join(f"{name}={' '.join(map(str, xs))}" for name, xs in shown.items() if xs)


def check_minimax(problem: MinimaxProblem, start: Any, *, samples: int, seed: int) -> Report:
    """Is h smooth as stated, and concave in y?"""
    return _report(problem, start, samples, seed, {("objective", "y"): "concave"})


def check_constrained(
    problem: ConstrainedBilevelProblem, start: Any, *, samples: int, seed: int
) -> Report:
    """Are g1 and every constraint convex in y, the equalities affine in y, and all smooth?"""
    shapes = {("lower", "y"): "convex", ("constraints", "y"): "convex"}
    return _report(problem, start, samples, seed, shapes | {("equalities", "y"): "affine"})


def check_bilevel(problem: BilevelProblem, start: Any, *, samples: int, seed: int) -> Report:
    """Is f1 concave in x2, f~1 convex in y1 and concave in y2, and are both smooth as stated?"""
    shapes = {("upper", "x2"): "concave", ("lower", "y1"): "convex", ("lower", "y2"): "concave"}
    return _report(problem, start, samples, seed, shapes)


def _without_bounds(problem: Any, point: Point, block: str) -> bool:
    return not np.isfinite(float(diameter(getattr(problem, block), getattr(point, block))))


def _report(
    problem: Form, start: Any, samples: int, seed: int, shapes: dict[tuple[str, str], str]
) -> Report:
    """Samples of every function: finite, with the right gradient, as smooth as stated, in shape."""
    whole(samples, "samples", 1)
    whole(seed, "seed", 0)
    problem = up_to_date(problem)
    point = validate(problem, start)
    findings = []
    for call in problem.calls(point):
        own_seed = seed + problem.function_names.index(call.name)
        sampler = _Sampler(problem, call, point, samples, own_seed)
        findings += [sampler.finite(), sampler.differentiable()]
        for (name, block), shape in shapes.items():
            if name == call.name and getattr(problem, block) is not None:
                findings.append(sampler.bent(block, shape))
                if name == "lower" and _without_bounds(problem, point, block):
                    sign = 1 if shape == "convex" else -1
                    modulus = getattr(problem, "lower_modulus", None)
                    findings += [] if modulus is None else [sampler.strong(block, modulus, sign)]
        constant = "smoothness" if call.name == "objective" else f"{call.name}_smoothness"
        if getattr(problem, constant, None) is not None:
            findings.append(sampler.smooth(getattr(problem, constant), constant))
    return Report(tuple(findings), samples)
