"""Sample a problem over its domain and report where it breaks what the theory assumes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from bilevax import trees
from bilevax.problems.bilevel import BilevelProblem
from bilevax.problems.constants import sample_domain
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
    """Random points of a domain, and one function's behaviour there."""

    def __init__(
        self,
        name: str,
        function: Callable[..., Array],
        blocks: dict[str, Tree],
        terms: dict[str, Term | None],
        samples: int,
        seed: int,
    ):
        self.name, self.samples = name, samples
        self.order = list(blocks)
        term = PerLeaf(tuple(terms[b] for b in self.order))
        start = tuple(blocks[b] for b in self.order)
        keys = jax.random.split(jax.random.key(seed), 3 * samples)
        draw = lambda part: [sample_domain(term, start, k) for k in part]
        self.a, self.b = draw(keys[:samples]), draw(keys[samples : 2 * samples])
        self.keys = keys[2 * samples :]
        self.value = jax.jit(lambda u: function(*u))
        self.gradient = jax.jit(jax.grad(lambda u: function(*u)))
        self.eps = float(jnp.finfo(trees.dtype_of(start)).eps)

    def _worst(self, assumption: str, breaches: list[tuple[float, Any]], allowed: float) -> Finding:
        sized = [(np.inf if np.isnan(size) else size, where) for size, where in breaches]
        size, where = max(sized, key=lambda pair: pair[0])
        shown = dict(zip(self.order, where))
        return Finding(assumption, bool(size <= allowed), float(size), _brief(shown))

    def finite(self) -> Finding:
        def breach(u: Tree) -> float:
            fine = trees.all_finite((self.value(u), self.gradient(u)))
            return 0.0 if bool(fine) else np.inf

        return self._worst(
            f"{self.name} and its gradient are finite", [(breach(u), u) for u in self.a], 0.0
        )

    def curved(self, block: str, sign: int) -> Finding:
        """Midpoint convexity (sign 1) or concavity (sign −1) in one block, the others fixed."""
        index = self.order.index(block)
        breaches = []
        for u, v in zip(self.a, self.b):
            at = lambda t, u=u, v=v: (
                *u[:index],
                trees.combine(1 - t, u[index], t, v[index]),
                *u[index + 1 :],
            )
            ends = float(self.value(at(0.0))), float(self.value(at(1.0)))
            middle = float(self.value(at(0.5)))
            scale = 1 + abs(ends[0]) + abs(ends[1])
            breaches.append((sign * (middle - sum(ends) / 2) / scale, at(0.5)))
        word = "convex" if sign > 0 else "concave"
        return self._worst(f"{self.name} is {word} in {block}", breaches, 256 * self.eps)

    def differentiable(self) -> Finding:
        """Its gradient against central differences, along random directions."""
        step = self.eps ** (1 / 3)
        breaches = []
        for u, key in zip(self.a, self.keys):
            leaves, structure = jax.tree.flatten(u)
            parts = jax.random.split(key, max(len(leaves), 1))
            direction = [jax.random.normal(k, x.shape, x.dtype) for x, k in zip(leaves, parts)]
            d = jax.tree.unflatten(structure, direction)
            d = trees.scale(1 / trees.norm(d), d)
            ahead, behind = self.value(trees.axpy(step, d, u)), self.value(trees.axpy(-step, d, u))
            difference = float((ahead - behind) / (2 * step))
            given = float(trees.dot(self.gradient(u), d))
            scale = 1 + abs(difference) + float(trees.norm(self.gradient(u)))
            scale += abs(float(self.value(u)))
            breaches.append((abs(given - difference) / scale, u))
        allowed = 100 * self.eps ** (2 / 3)
        return self._worst(f"{self.name}'s gradient is right", breaches, allowed)

    def smooth(self, constant: Any, label: str) -> Finding:
        """‖∇(u) − ∇(v)‖ ≤ L‖u − v‖ for the constant that was given."""
        breaches = []
        for u, v in zip(self.a, self.b):
            change = trees.norm(trees.subtract(self.gradient(u), self.gradient(v)))
            distance = trees.norm(trees.subtract(u, v))
            ratio = float(change / jnp.maximum(distance, self.eps)) / float(constant)
            breaches.append((ratio, u))
        finding = self._worst(f"{label} is large enough", breaches, 1 + 1e-6)
        return dataclasses.replace(finding, worst=finding.worst * float(constant))


def _brief(blocks: dict[str, Tree]) -> str:
    with np.printoptions(precision=4, threshold=6, edgeitems=2):
        shown = {
            name: [np.asarray(x) for x in jax.tree.leaves(tree)] for name, tree in blocks.items()
        }
        return ", ".join(f"{name}={' '.join(map(str, xs))}" for name, xs in shown.items() if xs)


def check_minimax(problem: MinimaxProblem, start: Any, *, samples: int, seed: int) -> Report:
    """Is h smooth as stated, and concave in y?"""
    point = validate(problem, start)
    sampler = _Sampler(
        "objective",
        problem.smooth,
        {"x": point.x, "y": point.y},
        {"x": problem.x, "y": problem.y},
        _whole(samples),
        seed,
    )
    findings = [sampler.finite(), sampler.curved("y", -1), sampler.differentiable()]
    if problem.smoothness is not None:
        findings.append(sampler.smooth(problem.smoothness, "smoothness"))
    return Report(tuple(findings), samples)


def check_bilevel(problem: BilevelProblem, start: Any, *, samples: int, seed: int) -> Report:
    """Is f1 concave in x2, f~1 convex in y1 and concave in y2, and are both smooth as stated?"""
    p = validate(problem, start)
    terms = {"x1": problem.x1, "x2": problem.x2, "y1": problem.y1, "y2": problem.y2}
    samples = _whole(samples)
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


def _whole(samples: Any) -> int:
    if isinstance(samples, bool) or not isinstance(samples, int) or samples < 1:
        raise ValueError(f"samples must be a whole number ≥ 1, not {samples!r}")
    return samples
