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
from bilevax.problems.bilevel import BilevelProblem
from bilevax.problems.constants import sample_domain
from bilevax.problems.constrained import CONSTRAINTS, ConstrainedBilevelProblem
from bilevax.problems.minimax import MinimaxProblem
from bilevax.problems.validate import validate
from bilevax.terms import PerLeaf, Term
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

    def __init__(
        self,
        name: str,
        function: Callable[..., Array],
        blocks: dict[str, Tree],
        terms: dict[str, Term | None],
        samples: int,
        seed: int,
    ):
        self.name, self.order = name, list(blocks)
        self.are, self.its = ("are", "their") if name in CONSTRAINTS else ("is", "its")
        self.values = lambda u: function(*u)  # one number, or arrays of constraints
        self.value = lambda u: trees.total(self.values(u))
        self.gradient = jax.grad(self.value)
        term = PerLeaf(tuple(terms[b] for b in self.order))
        start = tuple(blocks[b] for b in self.order)
        keys = jax.random.split(jax.random.key(seed), (samples, 3))
        draw = jax.jit(lambda ks: lax.map(lambda k: sample_domain(term, start, k), ks))
        self.pairs = (draw(keys[:, 0]), draw(keys[:, 1]), keys[:, 2])
        self.eps = float(jnp.finfo(trees.dtype_of(start)).eps)

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

    def curved(self, block: str, sign: int) -> Finding:
        """Midpoint convexity (sign 1) or concavity (sign −1) in one block, the others fixed."""
        index = self.order.index(block)

        word = "convex" if sign > 0 else "concave"
        bent = lambda values: sign * values
        return self._worst(
            f"{self.name} {self.are} {word} in {block}", self._bend(index, bent), 256 * self.eps
        )

    def affine(self, block: str) -> Finding:
        """Midpoints in one block, the others fixed, on the line between the ends."""
        bend = self._bend(self.order.index(block), jnp.abs)
        return self._worst(f"{self.name} are affine in {block}", bend, 256 * self.eps)

    def _bend(
        self, index: int, measured: Callable[[Array], Array]
    ) -> Callable[[Tree, Tree, Array], Array]:
        """How far the middle of two values lies above the line between them; the worst entry."""

        def breach(u: Tree, v: Tree, key: Array) -> Array:
            def at(t: float) -> Tree:
                mixed = trees.combine(1 - t, u[index], t, v[index])
                return self.values((*u[:index], mixed, *u[index + 1 :]))

            def above(one: Array, middle: Array, other: Array) -> Array:
                size = 1 + jnp.abs(one) + jnp.abs(other)
                return jnp.max(measured(middle - (one + other) / 2) / size, initial=-jnp.inf)

            bends = jax.tree.map(above, at(0.0), at(0.5), at(1.0))
            return jnp.max(jnp.stack(jax.tree.leaves(bends)))

        return breach

    def differentiable(self) -> Finding:
        """Its gradient against central differences, along random directions."""
        step = self.eps ** (1 / 3)

        def breach(u: Tree, v: Tree, key: Array) -> Array:
            leaves, structure = jax.tree.flatten(u)
            keys = jax.random.split(key, len(leaves))
            drawn = [jax.random.normal(k, x.shape, x.dtype) for x, k in zip(leaves, keys)]
            d = jax.tree.unflatten(structure, drawn)
            d = trees.scale(1 / trees.norm(d), d)
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
    whole(samples, "samples", 1)
    whole(seed, "seed", 0)
    point = validate(problem, start)
    sampler = _Sampler(
        "objective",
        problem.smooth,
        {"x": point.x, "y": point.y},
        {"x": problem.x, "y": problem.y},
        samples,
        seed,
    )
    findings = [sampler.finite(), sampler.curved("y", -1), sampler.differentiable()]
    if problem.smoothness is not None:
        findings.append(sampler.smooth(problem.smoothness, "smoothness"))
    return Report(tuple(findings), samples)


def check_constrained(
    problem: ConstrainedBilevelProblem, start: Any, *, samples: int, seed: int
) -> Report:
    """Are g1 and every constraint convex in y, the equalities affine in y, and all smooth?"""
    whole(samples, "samples", 1)
    whole(seed, "seed", 0)
    point = validate(problem, start)
    blocks = {"x": point.x, "y": point.y}
    terms: dict[str, Term | None] = {"x": problem.x, "y": problem.y}
    findings = []
    for number, name in enumerate(("upper", "lower", *CONSTRAINTS)):
        if getattr(problem, name) is None:
            continue
        function = lambda x, y, name=name: getattr(problem, name)(x, y, *problem.extra)
        sampler = _Sampler(name, function, blocks, terms, samples, seed + number)
        findings += [sampler.finite(), sampler.differentiable()]
        if name in ("lower", "constraints"):
            findings.append(sampler.curved("y", 1))
        if name == "equalities":
            findings.append(sampler.affine("y"))
        constant = {"upper": problem.upper_smoothness, "lower": problem.lower_smoothness}.get(name)
        if constant is not None:
            findings.append(sampler.smooth(constant, f"{name}_smoothness"))
    return Report(tuple(findings), samples)


def check_bilevel(problem: BilevelProblem, start: Any, *, samples: int, seed: int) -> Report:
    """Is f1 concave in x2, f~1 convex in y1 and concave in y2, and are both smooth as stated?"""
    whole(samples, "samples", 1)
    whole(seed, "seed", 0)
    p = validate(problem, start)
    terms = {"x1": problem.x1, "x2": problem.x2, "y1": problem.y1, "y2": problem.y2}
    upper_blocks = {"x1": p.x1, "x2": p.x2, "y1": p.y1, "y2": p.y2}
    lower_blocks = {"x1": p.x1, "y1": p.y1, "y2": p.y2}
    upper = _Sampler("upper", problem.smooth_upper, upper_blocks, terms, samples, seed)
    lower = _Sampler("lower", problem.smooth_lower, lower_blocks, terms, samples, seed + 1)
    findings = [upper.finite(), upper.differentiable(), lower.finite(), lower.differentiable()]
    if problem.x2 is not None:
        findings.append(upper.curved("x2", -1))
    findings.append(lower.curved("y1", 1))
    if problem.y2 is not None:
        findings.append(lower.curved("y2", -1))
    if problem.upper_smoothness is not None:
        findings.append(upper.smooth(problem.upper_smoothness, "upper_smoothness"))
    if problem.lower_smoothness is not None:
        findings.append(lower.smooth(problem.lower_smoothness, "lower_smoothness"))
    return Report(tuple(findings), samples)
