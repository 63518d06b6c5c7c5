"""Samples that the stochastic method needs, with and without variance reduction.

    python benchmarks/stochastic.py --json benchmarks/results/stochastic.json \\
        --plot benchmarks/results/stochastic.png

Problems of the library with noise of known variance added, whose answer without noise is known.

Part `nearly`: the random answer of the algorithm at ε = 0.1 on every problem (`library.noisy`, 1000
samples), over 20 keys: how far from it a deterministic polish finds an ε-KKT point, and the ε of
that; the mean of the larger one is to be ≤ 0.1.

Part `default`: `bx.solve` at ε = 0.1 without any setting, on the same problems and keys.

Part `growth`: samples, drawn independently, until the last iterate is nearly ε-KKT in the mean over
20 keys, for ρ = 1/ε, by the best of twelve choices of constants for each estimator: twelve lengths
of steps for `Plain`, three with four momenta each for `Recursive`. Nearly ε-KKT is bounded by the
less of the iterate's own ε and of its distance from where the method ends without noise (or the ε
of that point, if larger); where that holds first it is measured again with 20 other keys. What is
not reached is recorded as such.

Part `average`: the same for what `bx.solve` does by default: it solves the problem of the mean over
N samples, drawn independently, with no constant to choose. N grows until the answer is nearly ε-KKT
in the mean over 20 keys.

With `--json` the parts that are not asked for stay in the file as they are.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import math
import multiprocessing
import shlex
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import bilevax as bx
from bilevax import trees
from bilevax.certificates import judge
from bilevax.certificates.kkt import KKT
from bilevax.data.source import Source, as_key
from bilevax.problems import library

KEYS, DEVIATION, BATCH = 20, 0.3, 10
# Part one: subproblems and steps of each, the estimator's momentum, the steps' 1/(τL).
OUTER, STEPS, MOMENTUM, SLOWNESS = 600, 10, 0.05, 2.0
# Part two.
GROWING = ("unique_saddle", "matrix_game", "least_squares")
EPSILONS = (0.4, 0.28, 0.2, 0.14, 0.1, 0.07, 0.05)
PLAIN = [(s, 1.0) for s in np.geomspace(2.0, 8192.0, 12)]
RECURSIVE = [(s, a) for s in (4.0, 16.0, 64.0) for a in (0.1, 0.01, 0.001, 0.0001)]
# Short steps need as many more of them for each subproblem: T·τ·L stays the same.
REACH = 5.0
MOST, GROWTH = 1_000_000, 1.2


class Signs(Source):
    """Independent noise for both levels, ±δ/√size in each entry: what the theorem supposes."""

    batch: int = eqx.field(static=True)
    sizes: dict[str, int] = eqx.field(static=True)
    deviation: float = eqx.field(static=True)

    def init(self, key: Any) -> SignsState:
        return SignsState(jax.random.key_data(as_key(key)), jnp.zeros((), int))

    def draw(self, state: SignsState) -> tuple[SignsState, Any]:
        key = jax.random.fold_in(jax.random.wrap_key_data(state.key), state.drawn)
        places = np.arange(sum(self.sizes.values()), dtype=np.uint32)
        noise = 1.0 - 2.0 * (jax.random.bits(key, (), jnp.uint32) >> places & 1)
        rows, begin = {}, 0
        for level, size in self.sizes.items():
            rows[level] = noise[None, begin : begin + size] * self.deviation / np.sqrt(size)
            begin += size
        return SignsState(state.key, state.drawn + 1), rows

    def ready(self, state: SignsState, count: int = 1) -> Any:
        return jnp.asarray(True)

    def refilled(self, state: SignsState) -> SignsState:
        return state

    def everything(self) -> Any:
        """The mean over all there could be."""
        return {level: jnp.zeros((1, size)) for level, size in self.sizes.items()}


class SignsState(eqx.Module):
    key: Any
    drawn: Any


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
def begun(solver: Any, problem: Any, start: bx.Point, lanes: Any) -> Any:
    return jax.vmap(lambda lane: personal(solver, lane).init(problem, start))(lanes)


@eqx.filter_jit
def advanced(
    solver: Any, problem: Any, states: Any, lanes: Any, limit: Any, near: Any
) -> tuple[Any, Any]:
    """All lanes together, and how nearly KKT each one's answer is."""
    everything = problem.complete()

    def one(state: Any, lane: Any) -> tuple[Any, Any]:
        mine = personal(solver, lane)
        state = mine.advance(problem, state, limit)
        answer = mine.output(problem, state)
        lines = KKT().residuals(everything, answer)
        names = ("stationarity", "response_x2", "response_z1", "response_z2", "gap")
        own = jnp.max(jnp.stack([lines[name] for name in names]))
        if near is None:
            return state, own
        point, epsilon = near
        blocks = lambda p: (p.x1, p.y1, p.y2)
        off = trees.norm(trees.subtract(blocks(answer), blocks(point)))
        return state, jnp.minimum(own, jnp.maximum(epsilon, off))

    return jax.vmap(one)(states, lanes)


def personal(solver: Any, lane: dict[str, Any]) -> Any:
    """The method with a lane's key, steps and momentum."""
    outer = eqx.tree_at(lambda s: (s.key, s.inner.key), solver.outer, (lane["key"],) * 2)
    if "tau" in lane:
        steps = lambda s: (s.inner.tau, s.inner.sigma, s.inner.iterations)
        outer = eqx.tree_at(steps, outer, (lane["tau"], lane["tau"], lane["steps"]))
    if isinstance(outer.inner.estimator, bx.Recursive) and "momentum" in lane:
        outer = eqx.tree_at(lambda s: s.inner.estimator.momentum, outer, lane["momentum"])
    return eqx.tree_at(lambda s: s.outer, solver, outer)


def samples(states: Any) -> float:
    return float(np.mean(np.asarray(states.outer.inner.stream.drawn)))


def nearly(name: str, momentum: float | None) -> dict[str, Any]:
    """Part one for one problem."""
    instance = library.noisy(name, deviation=DEVIATION, batch=BATCH)
    solver = method(smoothness_of(name, 0.1), 0.1, SLOWNESS, momentum, iterations=OUTER)
    solver = solver.prepare(instance.problem, instance.start, 0.1)
    lanes = {"key": jnp.arange(KEYS)}
    states = begun(solver, instance.problem, instance.start, lanes)
    most = jnp.asarray(10**8)
    states, epsilons = advanced(solver, instance.problem, states, lanes, most, None)
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


def default(name: str) -> dict[str, Any]:
    """`bx.solve` as it comes, for one problem."""
    jax.config.update("jax_enable_x64", True)
    instance = library.noisy(name, deviation=DEVIATION, batch=BATCH)
    found = []
    for key in range(KEYS):
        solver = bx.SampleAverage(key=key)
        options: dict[str, Any] = {"solver": solver, "max_gradients": 200_000, "progress": False}
        found.append(bx.solve(instance.problem, instance.start, tolerance=0.1, **options))
    return {
        "instance": name,
        "keys": KEYS,
        "certified": sum(s.certified for s in found),
        "median_gradients": float(np.median([s.gradients for s in found])),
        "largest_gradients": max(s.gradients for s in found),
        "mean_epsilon": float(np.mean([s.certificate.epsilon for s in found])),
    }


@functools.cache  # the same functions each time: one compilation serves every ε
def with_signs(name: str) -> tuple[bx.BilevelProblem, bx.Point]:
    instance = library.noisy(name, deviation=DEVIATION, samples=2, batch=1)
    sizes = {level: rows.shape[1] for level, rows in instance.problem.data.arrays.items()}
    return dataclasses.replace(instance.problem, data=Signs(1, sizes, DEVIATION)), instance.start


def without_noise(name: str, epsilon: float) -> tuple[bx.Point, Any]:
    """Where the method ends without noise, after many steps, and the ε of that point."""
    problem, start = with_signs(name)
    sizes = problem.data.sizes
    problem = dataclasses.replace(problem, data=Signs(1, sizes, 0.0))
    solver = method(smoothness_of(name, epsilon), epsilon, 4.0, None, iterations=10**9)
    solver = dataclasses.replace(solver, outer=dataclasses.replace(solver.outer, returns="last"))
    solver = solver.prepare(problem, start, epsilon)
    solver = eqx.tree_at(lambda s: s.outer.inner.iterations, solver, jnp.asarray(int(4 * REACH)))
    lane = {"key": jnp.zeros(1, int)}
    states = begun(solver, problem, start, lane)
    states, _ = advanced(solver, problem, states, lane, jnp.asarray(400_000), None)
    answer = solver.output(problem, jax.tree.map(lambda a: a[0], states))
    return answer, jnp.asarray(bx.certify(problem, answer).epsilon)


def needed(name: str, epsilon: float, recursive: bool) -> dict[str, Any]:
    """Part two for one problem, ε and estimator."""
    problem, start = with_signs(name)
    L = smoothness_of(name, epsilon)
    solver = method(
        L, epsilon, 2.0, 0.1 if recursive else None, iterations=10**9, returns="last"
    ).prepare(problem, start, epsilon)
    solver = eqx.tree_at(
        lambda s: s.outer.inner.estimator,
        solver,
        bx.Recursive(jnp.asarray(0.1)) if recursive else bx.Plain(),
    )
    near = without_noise(name, epsilon)
    choices = RECURSIVE if recursive else PLAIN

    def lanes_of(keys: range, chosen: list[tuple[float, float]]) -> dict[str, Any]:
        rows = [(key, 1 / (s * L), math.ceil(REACH * s), a) for s, a in chosen for key in keys]
        names = ("key", "tau", "steps", "momentum")
        return {name: jnp.asarray(column) for name, column in zip(names, zip(*rows))}

    lanes = lanes_of(range(KEYS), choices)
    states = begun(solver, problem, start, lanes)
    limit, most, means = 20.0, jnp.asarray(0), np.full(len(choices), np.inf)
    while limit <= MOST and not np.min(means) <= epsilon:
        limit *= GROWTH
        most = jnp.asarray(int(limit) * solver.outer.inner.estimator.evaluations)
        states, seen = advanced(solver, problem, states, lanes, most, near)
        means = np.mean(np.asarray(seen).reshape(len(choices), KEYS), axis=1)
    best = int(np.nanargmin(means))
    again = lanes_of(range(KEYS, 2 * KEYS), [choices[best]] * len(choices))
    _, seen = advanced(solver, problem, begun(solver, problem, start, again), again, most, near)
    other = np.asarray(seen)[:KEYS]
    return {
        "instance": name,
        "epsilon": epsilon,
        "recursive": recursive,
        "slowness": float(choices[best][0]),
        "momentum": choices[best][1],
        "epsilon_without_noise": float(near[1]),
        "reached": bool(means[best] <= epsilon),
        "mean_nearly_epsilon": float(means[best]),
        "mean_nearly_epsilon_with_other_keys": float(np.mean(other)),
        "samples": samples(states),
        "gradients": float(np.mean(np.asarray(states.gradients))),
    }


def average(name: str) -> list[dict[str, Any]]:
    """Part `average` for one problem, from the largest ε to the smallest."""
    jax.config.update("jax_enable_x64", True)
    instance = library.noisy(name, deviation=DEVIATION, samples=2, batch=1)
    sizes = {level: rows.shape[1] for level, rows in instance.problem.data.arrays.items()}
    solved = lambda noise, epsilon: bx.solve(
        instance.problem.on(noise), instance.start, tolerance=epsilon / 2, progress=False
    )
    zero = {level: jnp.zeros((1, size)) for level, size in sizes.items()}
    exact, count, rows, found = instance.problem.on(zero), 10, [], [math.inf]
    for epsilon in EPSILONS:
        near = solved(zero, epsilon)
        while count <= MOST:
            found = [_nearly_by(solved, exact, near, sizes, count, epsilon, k) for k in range(KEYS)]
            if np.mean(found) <= epsilon:
                break
            count = math.ceil(GROWTH**2 * count)
        keys = range(KEYS, 2 * KEYS)
        other = [_nearly_by(solved, exact, near, sizes, count, epsilon, key) for key in keys]
        rows.append(
            {
                "instance": name,
                "epsilon": epsilon,
                "epsilon_without_noise": near.certificate.epsilon,
                "reached": bool(np.mean(found) <= epsilon),
                "mean_nearly_epsilon": float(np.mean(found)),
                "mean_nearly_epsilon_with_other_keys": float(np.mean(other)),
                "samples": float(count),
            }
        )
    return rows


def _nearly_by(
    solved: Any, problem: Any, near: Any, sizes: Any, count: int, epsilon: float, key: int
) -> float:
    """How nearly KKT of the problem without noise the answer from so many samples is."""
    rng = np.random.default_rng([key, count])
    signs = lambda size: 2.0 * rng.binomial(count, 0.5, size=(1, size)) / count - 1
    noise = {k: jnp.asarray(DEVIATION * signs(n) / np.sqrt(n)) for k, n in sizes.items()}
    answer = solved(noise, epsilon).point
    blocks = lambda p: (p.x1, p.y1, p.y2)
    off = float(trees.norm(trees.subtract(blocks(answer), blocks(near.point))))
    own = judge(problem, answer).epsilon
    return min(own, max(near.certificate.epsilon, off))


def fitted(rows: list[dict[str, Any]]) -> float | None:
    """The slope of log samples against log 1/ε."""
    if len(rows) < 3:
        return None
    logs = np.log([[1 / r["epsilon"], r["samples"]] for r in rows])
    return float(np.polyfit(logs[:, 0], logs[:, 1], 1)[0])


def plot(record: dict[str, Any], path: Path) -> None:
    """Samples against 1/ε; crosses where ε was not reached with as many."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panes = plt.subplots(1, len(GROWING), figsize=(10, 3.4), sharey=True, layout="tight")
    methods = [(False, "plain", "C0"), (True, "recursive", "C1"), (None, "default", "C2")]
    every = record["growth"] + [{"recursive": None} | r for r in record.get("average", [])]
    for pane, name in zip(panes, GROWING):
        for recursive, label, color in methods:
            rows = [r for r in every if (r["instance"], r["recursive"]) == (name, recursive)]
            exponent = fitted([r for r in rows if r["reached"]])
            for reached, marker in ((True, "o-"), (False, "x")):
                shown = [r for r in rows if r["reached"] == reached]
                slope = "not fitted" if exponent is None else f"$ε^{{-{exponent:.1f}}}$"
                pane.loglog(
                    [1 / r["epsilon"] for r in shown],
                    [r["samples"] for r in shown],
                    marker,
                    color=color,
                    label=f"{label}, {slope}" if reached else None,
                )
        pane.set(title=name, xlabel="1/ε")
        pane.set_xticks([2.5, 5, 10, 20], labels=["2.5", "5", "10", "20"])
        pane.minorticks_off()
        pane.legend(frameon=False, fontsize=8)
    panes[0].set_ylabel("samples")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the results there")
    parser.add_argument("--plot", type=Path, help="write a figure of part growth there")
    parser.add_argument("--parts", nargs="*", default=["nearly", "default", "growth", "average"])
    parser.add_argument("--jobs", type=int, default=1, help="problems at once, of some parts")
    args = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    command, record = shlex.join(["python", *sys.argv]), {}
    if args.json and args.json.exists():
        record = json.loads(args.json.read_text())
    record |= {"deviation": DEVIATION, "batch": BATCH, "keys": KEYS}
    record["commands"] = record.get("commands", {}) | dict.fromkeys(args.parts, command)

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
    if "default" in args.parts:
        record["default"] = []
        for row in each(default, list(library.INSTANCES), args.jobs):
            record["default"].append(row)
            print(row, flush=True)
            keep()
    if "growth" in args.parts:
        record["growth"], record["fits"] = [], []
        for name in GROWING:
            for recursive in (False, True):
                rows = []
                for epsilon in EPSILONS:
                    rows.append(row := needed(name, epsilon, recursive))
                    print(row, flush=True)
                fit = {"instance": name, "recursive": recursive}
                record["growth"] += rows
                record["fits"].append(fit | {"exponent": fitted([r for r in rows if r["reached"]])})
                keep()
                jax.clear_caches()
        print(record["fits"])
    if "average" in args.parts:
        record["average"] = []
        for rows in each(average, list(GROWING), args.jobs):
            record["average"] += rows
            print(*rows, sep="\n", flush=True)
            keep()
    if args.plot:
        plot(record, args.plot)


def each(function: Any, names: list[str], jobs: int) -> Iterator[Any]:
    """The function of each name, in processes of their own where there are several jobs."""
    if jobs == 1:
        for name in names:
            yield function(name)
            jax.clear_caches()
        return
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(function, names)


if __name__ == "__main__":
    main()
