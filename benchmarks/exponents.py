"""How fast the work of the theorems' methods grows as ε falls, beside what the theorems say.

    python benchmarks/exponents.py --json benchmarks/results/exponents.json \
        --plot benchmarks/results/exponents.png

Two problems with one variable a level, so small that several ε are certified. The paper's method
(ε⁻⁴), FOP in its theory's schedule (ε⁻⁷) and SMO (ε⁻⁶ for a strongly convex lower level, else ε⁻⁷)
run with their own constants for each ε until `bx.certify` holds at that ε; what is fitted is the
slope of log gradients against log 1/ε over the runs that are certified. Problem, start, constants
of smoothness and the bound on multipliers are the same for every ε; ρ, weights and inner
accuracies follow ε as the theorems have it. Beside it stands the slope of the theorem's own N.

The stochastic method runs the theorem's own K and T on a problem with little noise: there the work
is what the theorem says, 2KT, and what is measured is where the answer is, in the mean over keys.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import bilevax as bx
import versions
from bilevax.bench import output
from bilevax.programs import optimised
from bilevax.solvers import Task
from bilevax.solvers.composite import composed
from bilevax.terms import Box
from paper_tables import STATED, slope

Array = Any
METHODS: dict[str, Callable[[float], Any]] = {
    "the paper's": lambda epsilon: bx.PenaltyMethod(epsilon=epsilon),
    "FOP": lambda epsilon: bx.FOP(epsilon=epsilon, schedule="theory"),
    "SMO": lambda epsilon: bx.SMO(epsilon=epsilon),
}
RATIO, KEYS = 2**-0.25, 5
# The first ε: a little less than that of the start.
FROM = {"curved": 0.475, "linear": 0.8}
STOCHASTIC = (0.5, 0.42, 0.354, 0.297, 0.25)


def problems() -> dict[str, bx.ConstrainedBilevelProblem]:
    """One with a strongly convex lower level, one whose lower level is linear, f not convex."""
    shared: dict[str, Any] = {
        "x": Box(-1.0, 1.0),
        "y": Box(-1.0, 1.0),
        "multiplier_bound": 2.0,
        "constraint_lipschitz": 1.12,
        "constraint_smoothness": 0.0,
    }
    curved = bx.ConstrainedBilevelProblem(
        upper=lambda x, y: 0.5 * (x - 0.5) ** 2 + 0.5 * (y + 0.2) ** 2,
        lower=lambda x, y: 0.5 * (y - x) ** 2,
        constraints=lambda x, y: jnp.stack([y - 0.5 * x - 0.1]),
        upper_smoothness=1.0,
        lower_smoothness=2.0,
        **shared,
    )
    linear = bx.ConstrainedBilevelProblem(
        upper=lambda x, y: -x + 0.5 * y - 0.25 * x**2,
        lower=lambda x, y: -y,
        constraints=lambda x, y: jnp.stack([y + 0.5 * x - 0.3]),
        upper_smoothness=0.5,
        lower_smoothness=1e-8,
        **shared,
    )
    return {"curved": curved, "linear": linear}


def deterministic(seconds: float) -> list[dict[str, Any]]:
    """Gradients to the certificate, for smaller and smaller ε until time runs out."""
    runs, start = [], bx.Point(x=jnp.zeros((), float), y=jnp.zeros((), float))
    assert start.x.dtype == jnp.float64, "the exponents are those of float64"
    for name, problem in problems().items():
        for method, made in METHODS.items():
            epsilon = FROM[name]
            while True:
                options: dict[str, Any] = {"max_seconds": seconds, "progress": False}
                found = bx.solve(problem, start, tolerance=epsilon, solver=made(epsilon), **options)
                run = {
                    "problem": name,
                    "method": method,
                    "epsilon": epsilon,
                    "status": found.status.code,
                    "certified": found.certificate.epsilon,
                    "gradients": found.gradients,
                    "seconds": found.seconds,
                }
                if method == "the paper's":
                    solver = made(epsilon)
                    run["bound"] = bx.theory.predict(problem, start, epsilon, solver).bounds.N
                runs.append(run)
                print(json.dumps(run), flush=True)
                if found.status.code != "certified":
                    break
                epsilon *= RATIO
    return runs


def noisy() -> tuple[bx.BilevelProblem, bx.Point]:
    """Both levels quadratic in one variable, with slopes that samples move a little."""
    moves = 0.01 * np.random.default_rng(0).normal(size=64)
    moves -= moves.mean()

    def upper(x1: Array, x2: Array, y1: Array, y2: Array, d: Array) -> Array:
        return 0.5 * (y1 - 0.5) ** 2 + 0.3 * x1 * y1 + jnp.mean(d) * x1

    problem = bx.BilevelProblem(
        upper=upper,
        lower=lambda x1, y1, y2, d: 0.5 * (y1 - x1) ** 2 + jnp.mean(d) * y1,
        x1=Box(-1.0, 1.0),
        y1=Box(-1.0, 1.0),
        data=bx.data.Arrays(moves, batch=1),
    )
    return problem, bx.Point(x1=jnp.asarray(-1.0), y1=jnp.asarray(1.0))


@optimised
def _advance(solver: Any, problem: Any, state: Any, limit: Array) -> tuple[Any, Any]:
    state = solver.advance(problem, state, limit)
    return state, solver.done(problem, state)


def stochastic(seconds: float) -> list[dict[str, Any]]:
    """The theorem's K and T for each ε: where the answer that it draws is, in the mean of keys."""
    problem, start = noisy()
    whole: Any = problem.complete()
    first = bx.certify(whole, start.replace(rho=jnp.asarray(1.0)))
    print("the start:", first.epsilon)
    runs = []
    for epsilon in STOCHASTIC:
        bound: Any = bx.theory.predict(problem, start, epsilon, bx.PenaltyMethod())
        found, begun, spent = [], time.perf_counter(), 0
        for key in range(KEYS):
            outer = bx.StochasticProximalPoint(key=key)
            solver = composed(bx.PenaltyMethod(epsilon=epsilon, outer=outer), problem)
            solver = solver.prepared_for(Task(problem, start, epsilon))
            state, done = solver.init(problem, start), False
            while not done:
                state, ended = _advance(solver, problem, state, state.gradients + 20_000_000)
                done = bool(ended)
            point, spent = solver.output(problem, state), int(state.gradients)
            nearly = bx.polish(problem, point, tolerance=epsilon / 10)
            found.append((float(nearly.distance), float(nearly.certificate.epsilon)))
            print(epsilon, key, spent, found[-1], flush=True)
            if time.perf_counter() - begun > seconds:
                break
        distances, levels = np.asarray(found).T
        runs.append(
            {
                "epsilon": epsilon,
                "K": bound.bounds.K,
                "T": bound.bounds.T,
                "gradients": spent,
                "bound": bound.bounds.N,
                "distance_bound": float(bound.distance),
                "keys": len(found),
                "mean_distance": float(distances.mean()),
                "mean_level": float(levels.mean()),
                "seconds": time.perf_counter() - begun,
            }
        )
        print(json.dumps(runs[-1]), flush=True)
    return runs


def foreseen() -> list[dict[str, float]]:
    """The theorem's 2KT for ε at which nobody can wait for it."""
    (problem, start), method = noisy(), bx.PenaltyMethod()
    return [
        {"epsilon": e, "bound": bx.theory.predict(problem, start, e, method).bounds.N}
        for e in (0.1, 0.05, 0.02, 0.01)
    ]


def plot(record: dict[str, Any], path: Path) -> None:
    """Gradients over 1/ε, a panel for each problem and one for the stochastic method."""
    with output.figure(path, 3, (13, 4)) as (_, axes):
        for panel, name in zip(axes, ("curved", "linear")):
            for k, method in enumerate(METHODS):
                of = lambda r, m=method, n=name: r["method"] == m and r["problem"] == n
                runs = [r for r in record["deterministic"] if of(r)]
                seen = [r for r in runs if r["status"] == "certified"]
                inverse, work = ([f(r) for r in seen] for f in (_inverse, _work))
                label = f"{method}: {slope(runs)[0]:.1f} (stated {STATED[method, name]})"
                panel.plot(inverse, work, "o-", color=f"C{k}", label=label, markersize=4)
            panel.set(title=f"lower level {name}")
        runs = record["stochastic"]
        label = f"2KT of the theorem: {slope(runs)[0]:.1f} (stated 9)"
        axes[2].plot([_inverse(r) for r in runs], [_work(r) for r in runs], "s-", label=label)
        axes[2].set(title="stochastic, the theorem's K and T")
        for panel in axes:
            panel.set(xscale="log", yscale="log", xlabel="1/ε", ylabel="gradients")
            low, high = panel.get_xlim()
            shown = [tick for tick in (1, 2, 3, 4, 5, 10, 20) if low < tick < high]
            panel.set_xticks(shown, [f"{tick}" for tick in shown])
            panel.set_xticks([], minor=True)
            panel.legend(frameon=False, fontsize="small")


def _inverse(run: dict[str, Any]) -> float:
    return 1 / run["epsilon"]


def _work(run: dict[str, Any]) -> float:
    return run["gradients"]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--max-seconds", type=float, default=120.0, help="for one ε")
    parser.add_argument("--parts", nargs="+", default=["deterministic", "stochastic"])
    parser.add_argument("--json", type=Path, help="write the results there")
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    measures = {"deterministic": deterministic, "stochastic": stochastic}
    record: dict[str, Any] = {}
    if args.json and args.json.exists():
        kept = (*measures, "foreseen")
        record = {k: v for k, v in json.loads(args.json.read_text()).items() if k in kept}
    for part in args.parts:
        record[part] = measures[part](args.max_seconds)
        if part == "stochastic":
            record["foreseen"] = foreseen()
        if args.json:
            versions.write(args.json, record)
    if args.plot:
        plot(record, args.plot)


if __name__ == "__main__":
    main()
