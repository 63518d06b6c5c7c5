"""Samples that the stochastic method needs, with and without variance reduction.

    python benchmarks/stochastic.py --json benchmarks/results/stochastic.json

On problems of the library with noise of known variance added (`library.noisy`), all samples of
which together have the known answer. Part one: the random answer of the algorithm at ε = 0.1 on
every problem, over 20 keys: how far from it a deterministic polish finds an ε-KKT point, and its ε;
the mean of the larger one is to be ≤ 0.1. Part two: samples until the mean over 20 keys of the ε of
the iterate itself, measured exactly on all samples, is ≤ ε, for ρ = 1/ε; the best of a grid of
steps (and momenta) for each of both estimators. What is not reached is recorded as such.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import bilevax as bx
from bilevax.certificates.kkt import kkt
from bilevax.problems import library
from bilevax.problems.stochastic import whole

KEYS, DEVIATION, BATCH = 20, 0.3, 10
# Part one: subproblems and steps of each, the estimator's momentum, the steps' 1/(τL).
OUTER, STEPS, MOMENTUM, SLOWNESS = 600, 10, 0.05, 2.0
# Part two.
GROWING = ("unique_saddle", "matrix_game", "least_squares")
EPSILONS = (0.4, 0.2, 0.1, 0.05, 0.025)
SLOWNESSES = (2.0, 8.0, 32.0, 128.0)
MOMENTA = (0.3, 0.1, 0.03)
MOST, GROWTH = 400_000, 1.3


def method(
    smoothness: float, epsilon: float, slowness: float, momentum: float | None, **outer: Any
):
    tau = 1 / (slowness * smoothness)
    estimator = bx.Plain() if momentum is None else bx.Recursive(momentum)
    inner = bx.SAPD(iterations=STEPS, tau=tau, sigma=tau, theta=1.0, estimator=estimator)
    return bx.PenaltyMethod(
        epsilon=epsilon, outer=bx.StochasticProximalPoint(inner=inner, **outer), starter=None
    )


def smoothness_of(name: str, epsilon: float) -> float:
    """L_f + 2ρL_f~ with ρ = 1/ε."""
    instance = library.get(name)
    return float(bx.PenaltyMethod().prepare(instance.problem, instance.start, epsilon).smoothness)


@eqx.filter_jit
def begun(solver: Any, problem: Any, start: bx.Point, keys: Any) -> Any:
    def one(key: Any) -> Any:
        outer = eqx.tree_at(lambda s: (s.key, s.inner.key), solver.outer, (key, key))
        return eqx.tree_at(lambda s: s.outer, solver, outer).init(problem, start)

    return jax.vmap(one)(keys)


@eqx.filter_jit
def advanced(solver: Any, problem: Any, states: Any, limit: Any) -> tuple[Any, Any]:
    """All keys together, and the ε of where each is."""
    states = jax.vmap(lambda s: solver.advance(problem, s, limit))(states)
    everything = whole(problem)

    def epsilon(state: Any) -> Any:
        lines = kkt(everything, solver.output(problem, state))
        names = ("stationarity", "response_x2", "response_z1", "response_z2", "gap")
        return jnp.max(jnp.stack([lines[name] for name in names]))

    return states, jax.vmap(epsilon)(states)


def samples(states: Any) -> float:
    return float(np.mean(np.asarray(states.outer.inner.stream.drawn)))


def nearly(name: str, momentum: float | None) -> dict[str, Any]:
    """Part one for one problem."""
    instance = library.noisy(name, deviation=DEVIATION, batch=BATCH)
    solver = method(smoothness_of(name, 0.1), 0.1, SLOWNESS, momentum, iterations=OUTER)
    solver = solver.prepare(instance.problem, instance.start, 0.1)
    states = begun(solver, instance.problem, instance.start, jnp.arange(KEYS))
    states, epsilons = advanced(solver, instance.problem, states, jnp.asarray(10**8))
    polished = []
    for k in range(KEYS):
        state = jax.tree.map(lambda a, k=k: a[k], states)
        answer = solver.output(instance.problem, state)
        polished.append(bx.polish(instance.problem, answer, 0.05))
    return {
        "instance": name,
        "momentum": momentum,
        "keys": KEYS,
        "samples": samples(states),
        "mean_epsilon_of_the_answer": float(jnp.mean(epsilons)),
        "mean_distance": float(np.mean([p.distance for p in polished])),
        "mean_nearby_epsilon": float(np.mean([p.certificate.epsilon for p in polished])),
        "mean_nearly_epsilon": float(np.mean([p.epsilon for p in polished])),
        "largest_nearly_epsilon": float(np.max([p.epsilon for p in polished])),
    }


def needed(name: str, epsilon: float, slowness: float, momentum: float | None) -> dict[str, Any]:
    """Part two for one problem, ε and choice of constants."""
    instance = library.noisy(name, deviation=DEVIATION, batch=BATCH)
    solver = method(
        smoothness_of(name, epsilon), epsilon, slowness, momentum, iterations=10**9, returns="last"
    ).prepare(instance.problem, instance.start, epsilon)
    states = begun(solver, instance.problem, instance.start, jnp.arange(KEYS))
    limit, mean = 100.0, np.inf
    while limit <= MOST and not mean <= epsilon:
        states, seen = advanced(solver, instance.problem, states, jnp.asarray(int(limit)))
        mean, limit = float(jnp.mean(seen)), limit * GROWTH
    return {
        "instance": name,
        "epsilon": epsilon,
        "slowness": slowness,
        "momentum": momentum,
        "reached": mean <= epsilon,
        "mean_epsilon": mean,
        "samples": samples(states),
    }


def fitted(rows: list[dict[str, Any]]) -> float | None:
    """The slope of log samples against log 1/ε."""
    if len(rows) < 3:
        return None
    logs = np.log([[1 / r["epsilon"], r["samples"]] for r in rows])
    return float(np.polyfit(logs[:, 0], logs[:, 1], 1)[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the results there")
    parser.add_argument("--parts", nargs="+", default=["nearly", "growth"])
    args = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    record: dict[str, Any] = {"command": shlex.join(["python", *sys.argv])}
    record |= {"deviation": DEVIATION, "batch": BATCH, "keys": KEYS}

    def keep() -> None:
        if args.json:
            args.json.parent.mkdir(parents=True, exist_ok=True)
            args.json.write_text(json.dumps(record, indent=1) + "\n")

    if "nearly" in args.parts:
        record["nearly"] = []
        for name in library.INSTANCES:
            for momentum in (None, MOMENTUM):
                record["nearly"].append(row := nearly(name, momentum))
                print({k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()})
                keep()
                sys.stdout.flush()
            jax.clear_caches()
    if "growth" in args.parts:
        record["growth"], record["fits"] = [], []
        for name in GROWING:
            for momenta in ((None,), MOMENTA):
                best = []
                for epsilon in EPSILONS:
                    tried = [
                        needed(name, epsilon, slowness, momentum)
                        for slowness in SLOWNESSES
                        for momentum in momenta
                    ]
                    record["growth"] += tried
                    there = [t for t in tried if t["reached"]]
                    if there:
                        best.append(min(there, key=lambda t: t["samples"]))
                    print(name, momenta, epsilon, best[-1] if there else "not reached", flush=True)
                fit = {"instance": name, "recursive": momenta != (None,), "best": best}
                record["fits"].append(fit | {"exponent": fitted(best)})
                keep()
            jax.clear_caches()
        print([(f["instance"], f["recursive"], f["exponent"]) for f in record["fits"]])


if __name__ == "__main__":
    main()
