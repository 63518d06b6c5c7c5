"""Bilevel linear problems whose rows are known by samples only: how nearly ε-KKT the answers are.

    python benchmarks/stochastic_constrained.py \\
        --json benchmarks/results/stochastic_constrained.json

The problems of the paper's Appendix `sec:clo_instances`, small ones. Every one of 1000 samples is
the instance with independent normal noise on its entries, recentred so that the mean over all
samples is the instance itself. Noise on `rows` is on A, B, b and d̃, with the standard deviation of
the entries of A and B, 0.01; noise on `objectives` is on c, d (with 0.3) and d̃ (with 0.01).

Part `named`: the paper's stochastic method with practical constants, ρ = 1/ε for its own ε = 0.05,
for 20 keys: how far from its last iterate a deterministic polish finds an ε-KKT point, and the ε of
that. The mean of the larger one is to be ≤ 0.1. `scale` multiplies A, B, b and d̃, and the noise
with them: the bilevel problem stays the same, but its lower level weighs more against 0.1.

Part `default`: `bx.solve` at 0.05 without any setting, on 20 draws of 1000 noisy rows that are not
recentred: how nearly ε-KKT the answer of each is for the instance itself.

Beside these is what x is worth: the upper objective with the lower level's best exact answer to it,
above the exact optimum (`bilevax.problems.linear`).
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import bilevax as bx
from bilevax.certificates.constrained import LINES, ConstrainedKKT
from bilevax.problems import linear
from bilevax.solvers.composite import composed
from bilevax.solvers.stochastic_proximal_point import practical
from versions import write

KEYS, SAMPLES, BATCH, BOUND = 20, 1000, 10, 10.0
TOLERANCE, OWN_EPSILON = 0.1, 0.05
NOISE = {
    "rows": {"A": 0.01, "B": 0.01, "b": 0.01, "d_tilde": 0.01},
    "objectives": {"c": 0.3, "d": 0.3, "d_tilde": 0.01},
}
SCALED = ("A", "B", "b", "d_tilde")
# n = m, l, seed, what is noisy, scale, gradients.
CASES = (
    *[(10, 3, seed, kind, 1.0, 100_000) for kind in NOISE for seed in range(3)],
    (20, 5, 0, "rows", 1.0, 100_000),
    (10, 3, 0, "rows", 10.0, 1_000_000),
    (10, 3, 0, "rows", 100.0, 1_000_000),
)
BOX = bx.terms.Box(-1.0, 1.0)


def mean(rows: Any) -> Any:
    return jnp.mean(rows, axis=0)


def upper(x: Any, y: Any, s: Any) -> Any:
    return mean(s["c"]) @ x + mean(s["d"]) @ y


def lower(x: Any, y: Any, s: Any) -> Any:
    return mean(s["d_tilde"]) @ y


def constraints(x: Any, y: Any, s: Any) -> Any:
    return mean(s["A"]) @ x + mean(s["B"]) @ y - mean(s["b"])


def problem(data: Any, **options: Any) -> bx.ConstrainedBilevelProblem:
    return bx.ConstrainedBilevelProblem(
        upper, lower, constraints=constraints, x=BOX, y=BOX, data=data, **options
    )


def scaled(data: linear.LinearData, scale: float) -> dict[str, np.ndarray]:
    return {k: v * (scale if k in SCALED else 1.0) for k, v in vars(data).items()}


def noisy(
    data: linear.LinearData, kind: str, scale: float, seed: int, recentred: bool
) -> dict[str, np.ndarray]:
    """SAMPLES rows of every array, those that are noisy with noise."""
    rng, rows = np.random.default_rng([seed, 1]), {}
    for name, exact in scaled(data, scale).items():
        size = NOISE[kind].get(name, 0.0) * (scale if name in SCALED else 1.0)
        noise = size * rng.normal(size=(SAMPLES, *exact.shape))
        rows[name] = exact + noise - (noise.mean(axis=0) if recentred else 0.0)
    return rows


@eqx.filter_jit
def ended(solver: Any, problem: Any, start: bx.Point, limit: Any) -> tuple[bx.Point, Any]:
    """The answers of all keys together, and the lines of their certificates on all samples."""

    def one(key: Any) -> tuple[bx.Point, Any]:
        keys = lambda s: (s.inner.outer.key, s.inner.outer.inner.key)
        mine = eqx.tree_at(keys, solver, (key, key))
        state = mine.advance(problem, mine.init(problem, start), limit)
        answer = mine.output(problem, state)
        lines = ConstrainedKKT().residuals(problem.complete(), answer)
        return answer, jnp.stack([lines[name] for name in LINES])

    return jax.vmap(one)(jnp.arange(KEYS))


def measured(data: linear.LinearData, exact: Any, answers: list[bx.Point]) -> dict[str, Any]:
    """How nearly KKT the answers are on the instance itself, and what they are worth."""
    near = [bx.polish(exact, answer, TOLERANCE / 2) for answer in answers]
    best = linear.optimum(data)
    worth = [linear.repair(data, np.asarray(answer.x)).objective for answer in answers]
    return {
        "keys": len(answers),
        "mean_distance": float(np.mean([p.distance for p in near])),
        "mean_nearby_epsilon": float(np.mean([p.certificate.epsilon for p in near])),
        "mean_nearly_epsilon": float(np.mean([p.epsilon for p in near])),
        "largest_nearly_epsilon": float(np.max([p.epsilon for p in near])),
        "optimum": best.value,
        "proven": best.proven,
        "median_above_optimum": float(np.median(worth)) - best.value,
        "largest_above_optimum": float(np.max(worth)) - best.value,
    }


def named(case: tuple) -> dict[str, Any]:
    n, l, seed, kind, scale, gradients = case  # noqa: E741
    data = linear.generate(n, n, l, seed)
    rows = noisy(data, kind, scale, seed, recentred=True)
    stated = problem(bx.data.Arrays(rows, batch=BATCH), multiplier_bound=BOUND)
    start = bx.Point(x=np.zeros(n), y=np.zeros(n))
    method = bx.PenaltyMethod(epsilon=OWN_EPSILON, starter=None, outer=practical())
    solver = composed(method, stated).prepare(stated, start, OWN_EPSILON)
    answers, lines = ended(solver, stated, start, jnp.asarray(gradients))
    own = np.max(np.asarray(lines), axis=1)
    each = [jax.tree.map(lambda a, k=k: a[k], answers) for k in range(KEYS)]
    found = {"gradients": gradients, "mean_epsilon_of_the_answer": float(np.mean(own))}
    return label(case) | found | measured(data, stated, each)


def default(case: tuple) -> dict[str, Any]:
    n, l, seed, kind, scale, _ = case  # noqa: E741
    data = linear.generate(n, n, l, seed)
    start, answers, gradients, certified = bx.Point(x=np.zeros(n), y=np.zeros(n)), [], [], 0
    for key in range(KEYS):
        rows = noisy(data, kind, scale, 1000 + key, recentred=False)
        stated = problem(bx.data.Arrays(rows, batch=BATCH))
        found = bx.solve(stated, start, tolerance=TOLERANCE / 2, progress=False)
        answers.append(found.point)
        gradients.append(found.gradients)
        certified += found.certified
    exact = {name: value[None] for name, value in scaled(data, scale).items()}
    median = {"gradients": float(np.median(gradients)), "certified_on_their_samples": certified}
    return label(case) | median | measured(data, problem(exact), answers)


def label(case: tuple) -> dict[str, Any]:
    return dict(zip(("n", "l", "seed", "noisy", "scale"), case))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the results there")
    parser.add_argument("--parts", nargs="+", default=["named", "default"])
    args = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    record: dict[str, Any] = {"samples": SAMPLES, "batch": BATCH, "keys": KEYS}
    record |= {"tolerance": TOLERANCE, "own_epsilon": OWN_EPSILON}
    for part, measure in (("named", named), ("default", default)):
        if part not in args.parts:
            continue
        record[part] = []
        for case in CASES:
            if part == "default" and case[3] != "rows":
                continue
            record[part].append(row := measure(case))
            print(
                {k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}, flush=True
            )
            if args.json:
                write(args.json, record)


if __name__ == "__main__":
    main()
