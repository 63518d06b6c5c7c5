"""Table `tab:clo` and Figure `fig:clbo` as they were published: the same methods, limits and stop.

    python benchmarks/published.py --json benchmarks/results/published.json \
        --plot benchmarks/results/published.png

FOP, SMO and the paper's method, all at ε = 0.01 from (0, 0): with its bound on L, which has 2L_ḡ,
with L_ḡ once, which is half of it and suffices for these problems, and with L = 6.
OptFOM has at most 200 iterations, and so has the proximal point method (in each stage). The paper
ends a run as soon as ε_k ≤ 0.01, the violation is at most 0.01 and so is the lower level's gap.
That is looked for after every iteration of the proximal point method, with the exact gap from
HiGHS. `at_stop` is the first point where it holds, `at_end` the point at which the method's own
test, its limits or its last stage end it. Of both the record has what the point is worth once the
lower level is solved again, and the certificate's ε. Runs that are in the file already are not made
again, unless time ran out for them.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import bilevax as bx
import versions
from bilevax.bench import output
from bilevax.bench.linear import MULTIPLIER_BOUND, TUNED, paper_smoothness
from bilevax.problems import linear
from bilevax.problems.library import LinearInstance, bilevel_linear
from bilevax.problems.validation import validate
from bilevax.programs import optimised
from bilevax.solvers import OptFOM, PenaltyMethod, ProximalPoint, Solver, Task
from bilevax.solvers.composite import composed
from bilevax.solvers.stages import Stages
from paper_tables import NAMES

SIZES, METHODS = (100, 200, 300, 400, 500), ("fop", "smo", "paper", "single", "tuned")
EPSILON, MOST = 0.01, 200
SHOWN = (400, 0)  # the size and the seed of the figure
SPREAD = 50  # the instances whose exact optima say how far instances are apart
CURVES = ("gradients", "objective", "lower_gap", "violation")


def method(name: str, instance: LinearInstance) -> tuple[Any, Solver]:
    """A method with the published limits, and the problem as it is told it."""
    inner = OptFOM(max_iterations=MOST)
    if name in ("fop", "smo"):
        kind = bx.FOP if name == "fop" else bx.SMO
        outer = ProximalPoint(inner=inner)
        return instance.problem, kind(max_iterations=MOST, extra_stages=0, outer=outer)
    problem = dataclasses.replace(instance.problem, multiplier_bound=MULTIPLIER_BOUND)
    smoothness = TUNED if name == "tuned" else paper_smoothness(instance, EPSILON)
    smoothness = smoothness / 2 if name == "single" else smoothness
    outer = ProximalPoint(max_iterations=MOST, inner=inner)
    # The published runs begin at (0, 0), without a search for a small gap.
    return problem, PenaltyMethod(smoothness=smoothness, starter=None, outer=outer)


@optimised
def _step(solver: Solver, problem: Any, state: Any) -> tuple[Any, bx.Point, Any]:
    """One iteration of the proximal point method, or one warm start of a stage."""
    state = solver.step(problem, state, jnp.asarray(jnp.iinfo(int).max // 2))
    return state, solver.output(problem, state), solver.done(problem, state)


def measured(n: int, seed: int, name: str, seconds: float, end: float) -> dict[str, Any] | None:
    """One run: where the published stop first holds, and where the run ends.

    It has so many seconds, and ends at the time `end` at the latest; there is none after that.
    """
    seconds = min(seconds, end - time.time())
    if seconds <= 0:
        return None
    jax.config.update("jax_enable_x64", True)
    instance = bilevel_linear(n, n, max(1, n // 20), seed)
    problem, asked = method(name, instance)
    start = validate(problem, instance.start)
    solver = composed(asked, problem).prepared_for(Task(problem, start, EPSILON))
    state = solver.init(problem, start)
    best = linear.optimum(instance.data)
    record: dict[str, Any] = {"n": n, "instance": seed, "method": name, "optimum": best.value}
    curves: dict[str, list[float]] = {column: [] for column in CURVES}
    begun, iterations, stop = time.perf_counter(), 0, None
    while True:
        in_last = last_stage(solver, state)  # a step that ends a stage says the next one's number
        state, point, ended = _step(solver, problem, state)
        done, iterations = bool(ended), iterations + 1
        seen = worth(instance, point) | {"gradients": int(state.gradients)}
        for column, values in curves.items():
            values.append(seen[column])
        small = seen["violation"] <= EPSILON and seen["lower_gap"] <= EPSILON
        if stop is None and small and in_last:
            stop = point, seen | {"iterations": iterations}
        if done or time.perf_counter() - begun > seconds:
            break
    record["at_end"] = seen | {"iterations": iterations} | judged(instance, problem, point)
    record["at_stop"] = None if stop is None else stop[1] | judged(instance, problem, stop[0])
    record["cut_short"] = bool(solver.cut_short(state))
    record["out_of_time"] = not done
    record["seconds"] = time.perf_counter() - begun
    if (n, seed) == SHOWN:
        record["curves"] = curves
    return record


def last_stage(solver: Solver, state: Any) -> bool:
    """Whether ε_k ≤ ε: always, or in the last stage of FOP and SMO, its warm start over."""
    part, inner = solver.part, getattr(state, "inner", state)
    if not isinstance(part, Stages):
        return True
    return int(inner.stage) + 1 >= int(part.stages) and not bool(inner.warming)


def worth(instance: LinearInstance, point: bx.Point) -> dict[str, float]:
    x, y = np.asarray(point.x), np.asarray(point.y)
    data = instance.data
    return {
        "objective": float(data.c @ x + data.d @ y),
        "violation": linear.violation(data, x, y),
        "lower_gap": linear.lower_gap(data, x, y),
    }


def judged(instance: LinearInstance, problem: Any, point: bx.Point) -> dict[str, float]:
    """What the x of a point is worth, and the certificate's ε."""
    return {
        "repaired": linear.repair(instance.data, np.asarray(point.x)).objective,
        "epsilon": float(bx.certify(problem, point).epsilon),
    }


def best(n: int, seed: int) -> float:
    """The exact optimum of an instance."""
    return linear.optimum(linear.generate(n, n, max(1, n // 20), seed), prove=False).value


def plot(shown: list[dict[str, Any]], path: Path) -> None:
    """`fig:clbo`: objective, lower-level gap and violation over gradients, of one problem."""
    with output.figure(path, 3, (13, 4)) as (figure, (left, middle, right)):
        for run in shown:
            seen = {name: np.asarray(values, float) for name, values in run["curves"].items()}
            style = {"linewidth": 1.3, "label": NAMES[run["method"]]}
            style["color"] = f"C{METHODS.index(run['method'])}"
            left.plot(seen["gradients"], seen["objective"], **style)
            for axes, column in ((middle, "lower_gap"), (right, "violation")):
                axes.plot(seen["gradients"], np.maximum(np.abs(seen[column]), 1e-12), **style)
            if run["at_stop"] is not None:
                at = run["at_stop"]
                left.plot(at["gradients"], at["objective"], "o", color=style["color"])
        dotted = {"color": "0.4", "linestyle": ":", "linewidth": 1.2}
        left.axhline(shown[0]["optimum"], **dotted, label="optimum")
        for axes, title in zip((left, middle, right), ("objective", "|lower gap|", "violation")):
            axes.set(xscale="log", xlabel="gradient evaluations", title=title)
        for axes in (middle, right):
            axes.axhline(EPSILON, **dotted)
            axes.set(yscale="log")
            axes.set_ylim(1e-6, None)
        handles, labels = left.get_legend_handles_labels()
        right.legend(handles, labels, frameon=False, fontsize="small", loc=(0.02, 0.68))
        n, seed = SHOWN
        figure.suptitle(f"As published: one problem, n = {n} (instance {seed}); ● the stop")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--instances", type=int, default=5)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--max-seconds", type=float, default=3600.0, help="for one run")
    parser.add_argument("--seconds", type=float, default=1e9, help="for all runs")
    parser.add_argument("--jobs", type=int, default=1, help="runs at once")
    parser.add_argument("--json", type=Path, help="write the results there, after every run")
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    known = json.loads(args.json.read_text()) if args.json and args.json.exists() else {}
    job_of = lambda run: (run["n"], run["instance"], run["method"])
    runs = {job_of(run): run for run in known.get("runs", [])}
    asked = [
        (n, seed, name) for n in args.sizes for seed in range(args.instances)
        for name in args.methods
    ]  # fmt: skip
    asked = [job for job in asked if job not in runs or runs[job]["out_of_time"]]
    longest = ("smo", "fop", "paper", "single", "tuned")
    asked.sort(key=lambda job: (longest.index(job[2]), -job[0], job[1]))

    def take(run: dict[str, Any] | None) -> None:
        if run is None:
            return
        runs[job_of(run)] = run
        brief = {key: value for key, value in run.items() if key != "curves"}
        print(json.dumps(brief), flush=True)
        write()

    def write() -> None:
        if args.json:
            ordered = [runs[job] for job in sorted(runs)]
            settings = {"epsilon": EPSILON, "limit": MOST, "optima": optima}
            versions.write(args.json, settings | {"runs": ordered})

    optima = known.get("optima", {})
    for n in {run[0] for run in runs} | set(args.sizes):
        if str(n) not in optima:
            optima[str(n)] = [best(n, seed) for seed in range(SPREAD)]
    optima = {n: optima[n] for n in sorted(optima, key=int)}
    end = time.time() + args.seconds
    with ProcessPoolExecutor(args.jobs, multiprocessing.get_context("spawn")) as pool:
        jobs = [pool.submit(measured, *job, args.max_seconds, end) for job in asked]
        for job in as_completed(jobs):
            take(job.result())
    write()
    if args.plot and any("curves" in run for run in runs.values()):
        plot([run for run in runs.values() if "curves" in run], args.plot)


if __name__ == "__main__":
    main()
