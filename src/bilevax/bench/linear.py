"""The paper's experiment on bilevel linear problems (`tab:clo`, `fig:clbo`), judged exactly.

Every method gets the same problems, the same start and the same time. An answer is judged by the
library's certificate, by what its x is worth once the lower level is solved exactly (`repair`), and
against the exact optimum. Problems of one size run together under `vmap` where that was measured
to be faster (`benchmarks/vmap_linear.py`), else one after the other.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bilevax.arguments import non_negative, positive, whole
from bilevax.bench.output import (
    Bar,
    aligned,
    check_outputs,
    command_line,
    median,
    number,
    write_json,
)
from bilevax.bench.together import Shared, solve_together
from bilevax.problems import ConstrainedBilevelProblem, linear
from bilevax.problems.library import LinearInstance, bilevel_linear_from
from bilevax.problems.validate import require_precision
from bilevax.driver.solution import Solution
from bilevax.driver.entry import solve
from bilevax.solvers import FOP, SMO, Adaptive, PenaltyMethod, Solver

METHODS = ("paper", "tuned", "fop", "smo", "adaptive")
SIZES = (100, 200, 300, 400, 500)
# The paper's bound on the multipliers, its smaller L, and the size of its figure.
MULTIPLIER_BOUND, TUNED, SHOWN = 200.0, 6.0, 400
# Up to this n a method is faster under `vmap` over problems, on a CPU: where all take the same
# branch at the same time, and a problem alone is too small to keep the machine busy.
TOGETHER = {"paper": 500, "tuned": 300}
HEADER = ("n", "m", "l", "method", "certified", "objective", "repaired", "optimum", "rel. error")
HEADER += ("gradients", "seconds")
CURVES = ("gradients", "objective", "lower_gap", "feasibility")


@dataclasses.dataclass(frozen=True)
class Settings:
    """What to run. With `load`, a folder of .npz files, nothing is drawn at random."""

    sizes: tuple[int, ...] = SIZES
    instances: int = 5
    methods: tuple[str, ...] = METHODS
    tolerance: float = 0.01
    seed: int = 0
    max_seconds: float = 60.0
    load: Path | None = None
    json: Path | None = None
    plot: Path | None = None

    def __post_init__(self) -> None:
        for size in self.sizes:
            whole(size, "sizes", 1)
        whole(self.instances, "instances", 1)
        whole(self.seed, "seed", 0)
        positive(self.tolerance, "tolerance")
        require_precision(self.tolerance, jnp.zeros(()).dtype)
        non_negative(self.max_seconds, "max_seconds")
        for name, values in (("sizes", self.sizes), ("methods", self.methods)):
            if not values or len(set(values)) < len(values):
                raise ValueError(f"{name} must be one or more, each once, not {values}")
        if unknown := [name for name in self.methods if name not in METHODS]:
            raise ValueError(f"no method {unknown[0]!r}; there are {', '.join(METHODS)}")
        check_outputs(self.json, self.plot)

    @property
    def command(self) -> str:
        """The command that runs just this."""
        own = ("load",) if self.load is not None else ("sizes", "instances", "seed")
        options = (*own, "methods", "tolerance", "max_seconds", "json", "plot")
        return command_line("linear", self, options)


@dataclasses.dataclass(frozen=True)
class Record:
    """One solve. What a refused solve did not find is None.

    `status` is the code of `Solution.status`, or "refused" where the method raised; `sentence` says
    why. `epsilon`, `rho` and `objective` are the certificate's; `violation` and `lower_gap` come
    from HiGHS, as do `repaired_objective` and `optimum`; `relative_error` is that of the former two
    against each other. `optimum` is None where the exact answer is not known. `seconds` of problems
    that ran together, `together` of them, is each one's share.
    """

    n: int
    m: int
    l: int  # noqa: E741
    instance: str
    method: str
    status: str = "refused"
    sentence: str = ""
    epsilon: float | None = None
    rho: float | None = None
    gradients: int | None = None
    seconds: float | None = None
    compile_seconds: float | None = None
    setup_seconds: float | None = None
    together: int = 1
    objective: float | None = None
    violation: float | None = None
    lower_gap: float | None = None
    repaired_objective: float | None = None
    optimum: float | None = None
    optimum_proven: bool = False
    relative_error: float | None = None

    @property
    def size(self) -> tuple[int, int, int]:
        return self.n, self.m, self.l


@dataclasses.dataclass(frozen=True)
class Curves:
    """What every check saw on one problem, by method: the columns `CURVES`."""

    n: int
    instance: str
    optimum: float | None
    tolerance: float
    by_method: dict[str, dict[str, list[float]]]


@dataclasses.dataclass(frozen=True)
class Results:
    records: tuple[Record, ...]
    curves: Curves | None
    interrupted: bool


@dataclasses.dataclass(frozen=True)
class _Case:
    name: str
    data: linear.LinearData

    @property
    def size(self) -> tuple[int, int, int]:
        return self.data.c.size, self.data.d.size, self.data.b.size


def method(
    name: str, instance: LinearInstance, tolerance: float
) -> tuple[ConstrainedBilevelProblem, Solver]:
    """A method of the experiment by its name, and the problem as that method is told it.

    `paper` is Algorithm `alg:first-order-new` with ε = tolerance, ρ = 1/ε, multipliers in [0, B]
    with B = 200 and L = L_f + 2ρ(L_f̄ + B√l·L_∇ḡ + 2L_ḡ); `tuned` has L = 6 instead. `adaptive` is
    told nothing.
    """
    problem = instance.problem
    if name == "adaptive":
        return problem, Adaptive()
    if name == "fop":
        return problem, FOP()
    if name == "smo":
        return problem, SMO()
    bounded = dataclasses.replace(problem, multiplier_bound=MULTIPLIER_BOUND)
    smoothness = TUNED if name == "tuned" else paper_smoothness(instance, tolerance)
    return bounded, PenaltyMethod(epsilon=tolerance, smoothness=smoothness)


def paper_smoothness(instance: LinearInstance, epsilon: float) -> float:
    """L_f + 2ρ(L_f̄ + B√l·L_∇ḡ + 2L_ḡ) with ρ = 1/ε: the paper's bound on L_∇P₁."""
    p = instance.problem
    constants = (
        p.upper_smoothness,
        p.lower_smoothness,
        p.constraint_smoothness,
        p.constraint_lipschitz,
    )
    upper, lower, bend, slope = (float(np.asarray(constant)) for constant in constants)
    many = MULTIPLIER_BOUND * math.sqrt(instance.data.b.size)
    return upper + 2 / epsilon * (lower + many * bend + 2 * slope)


def experiment(settings: Settings, progress: bool | None = None) -> Results:
    """Run it all; write the JSON file and the plot. Ctrl-C ends it with what there is so far."""
    cases = _cases(settings)
    shown = _shown(cases)
    records: list[Record] = []
    curves: Curves | None = None
    interrupted = True
    try:
        with Bar(progress, len(cases) * len(settings.methods), "linear") as bar:
            for size, group in itertools.groupby(cases, key=lambda case: case.size):
                todo = [_Task(case, bilevel_linear_from(case.data)) for case in group]
                for name in settings.methods:
                    together = len(todo) > 1 and _faster_together(name, size[0])
                    for tasks in [todo] if together else [[task] for task in todo]:
                        bar.at(f"n = {size[0]}, {', '.join(t.case.name for t in tasks)}: {name}")
                        for task, outcome in zip(tasks, _outcomes(tasks, name, settings)):
                            records.append(_record(task, name, outcome, len(tasks)))
                            if task.case is shown and isinstance(outcome.found, Solution):
                                curves = _with_curve(curves, task, name, outcome.found)
                            bar.step()
        interrupted = False
    except KeyboardInterrupt:
        pass
    finally:
        results = Results(tuple(records), curves, interrupted)
        if settings.json is not None and records:
            write(settings.json, results, settings)
    if settings.plot is not None and curves is not None:
        plot(curves, settings.plot)
    return results


def _cases(settings: Settings) -> list[_Case]:
    if settings.load is not None:
        data = linear.load_directory(settings.load)
        names = (file.stem for file in sorted(Path(settings.load).glob("*.npz")))
        cases = [_Case(name, one) for name, one in zip(names, data)]
        return sorted(cases, key=lambda case: case.size)
    seeds = range(settings.seed, settings.seed + settings.instances)
    return [
        _Case(str(seed), linear.generate(n, n, max(1, n // 20), seed))
        for n in settings.sizes
        for seed in seeds
    ]


def _shown(cases: list[_Case]) -> _Case:
    """The problem of the figure: the first of the paper's size, else of the largest."""
    of_size = [case for case in cases if case.size[0] == SHOWN]
    return (of_size or [max(cases, key=lambda case: case.size)])[0]


class _Task:
    """A problem with its exact optimum, or None where the data are such that the LP is not it."""

    def __init__(self, case: _Case, instance: LinearInstance):
        self.case, self.instance = case, instance
        try:
            self.best = linear.optimum(case.data)
        except (ValueError, RuntimeError):
            self.best = None

    def told(self, name: str, tolerance: float) -> tuple[Any, Solver]:
        return method(name, self.instance, tolerance)


@dataclasses.dataclass(frozen=True)
class _Outcome:
    """A solution, or why there is none; and the seconds of the whole call."""

    found: Solution | str
    seconds: float


def _outcomes(tasks: list[_Task], name: str, settings: Settings) -> list[_Outcome]:
    """Solve one problem, or several together. Raises KeyboardInterrupt if one was interrupted."""
    begun = time.perf_counter()
    found: list[Any]
    try:
        told = [task.told(name, settings.tolerance) for task in tasks]
        if len(tasks) > 1:
            starts = [task.instance.start for task in tasks]
            runs = [
                Shared(problem, solver, start, settings.tolerance)
                for (problem, solver), start in zip(told, starts)
            ]
            found = solve_together(runs, settings.max_seconds)
        else:
            ((problem, solver),) = told
            found = [
                solve(
                    problem,
                    tasks[0].instance.start,
                    tolerance=settings.tolerance,
                    solver=solver,
                    max_seconds=settings.max_seconds,
                    progress=False,
                )
            ]
    except (ValueError, RuntimeError) as error:
        # That a method cannot do a problem is a result.
        found = [str(error)] * len(tasks)
    if any(isinstance(f, Solution) and f.status == "interrupted" for f in found):
        raise KeyboardInterrupt
    taken = (time.perf_counter() - begun) / len(tasks)
    return [_Outcome(one, taken) for one in found]


def _record(task: _Task, name: str, outcome: _Outcome, together: int) -> Record:
    (n, m, l), best, found = task.case.size, task.best, outcome.found  # noqa: E741
    about = Record(
        *(n, m, l, task.case.name, name),
        together=together,
        optimum=None if best is None else best.value,
        optimum_proven=best is not None and best.proven,
    )
    if isinstance(found, str):
        return dataclasses.replace(about, sentence=found)
    data = task.case.data
    x, y = np.asarray(found.point.x), np.asarray(found.point.y)
    repaired = linear.repair(data, x).objective
    error = None if best is None else (repaired - best.value) / (abs(best.value) or 1.0)
    return dataclasses.replace(
        about,
        status=found.status.code,
        sentence=found.status.sentence,
        epsilon=float(found.certificate.epsilon),
        rho=float(found.certificate.as_dict()["rho"]),
        gradients=int(found.gradients),
        seconds=found.seconds,
        compile_seconds=found.compile_seconds,
        setup_seconds=max(0.0, outcome.seconds - found.seconds - found.compile_seconds),
        objective=float(found.certificate.objective),
        violation=linear.violation(data, x, y),
        lower_gap=linear.lower_gap(data, x, y),
        repaired_objective=repaired,
        relative_error=error,
    )


def _with_curve(curves: Curves | None, task: _Task, name: str, found: Solution) -> Curves:
    value = None if task.best is None else task.best.value
    lines = {} if curves is None else curves.by_method
    own = {column: found.history[column].tolist() for column in CURVES}
    case = task.case
    return Curves(case.size[0], case.name, value, found.tolerance, lines | {name: own})


def _faster_together(name: str, n: int) -> bool:
    return n <= TOGETHER.get(name, 0) and jax.default_backend() == "cpu"


def table(records: Iterable[Record]) -> str:
    """The paper's table, with what its objectives hide, as aligned text."""
    records = list(records)
    rows = [list[str](HEADER)]
    before = None
    for size, name, group in _groups(records):
        solved = [record for record in group if record.status != "refused"]
        first = [str(part) for part in size] if size != before else ["", "", ""]
        certified = sum(record.status == "certified" for record in group)
        star = "" if all(record.optimum_proven for record in group) else "*"
        optima = _mean(record.optimum for record in group)
        rows.append(
            [
                *first,
                name,
                f"{certified} of {len(group)}",
                number(_mean(record.objective for record in solved), ".4f"),
                number(_mean(record.repaired_objective for record in solved), ".4f"),
                "unknown" if optima is None else f"{optima:.4f}{star}",
                number(_mean(record.relative_error for record in solved), ".1e"),
                number(median(record.gradients for record in solved), ",.0f"),
                number(median(record.seconds for record in solved), ".2f"),
            ]
        )
        before = size
    lines = [
        aligned(rows, left=(rows[0].index("method"),)),
        "",
        "Means of objectives and errors, medians of gradients and seconds (compilation apart).",
        "An objective below the optimum is no better answer but a violation exploited, of the",
        "constraints or of the lower level's optimality; `repaired` is what the x found is worth",
        "once the lower level answers it exactly.",
    ]
    if any(record.optimum is not None and not record.optimum_proven for record in records):
        lines.append("* the best value known; not proven to be the optimum for every instance.")
    if refused := [record for record in records if record.status == "refused"]:
        lines.append("Refused, and left out of the means:")
        lines += [f"  n = {r.n}, {r.instance}, {r.method}: {r.sentence}" for r in refused]
    return "\n".join(lines)


def _groups(records: list[Record]) -> Iterator[tuple[tuple[int, int, int], str, list[Record]]]:
    """Records by size and method, each in the order of their first appearance."""
    keys = dict.fromkeys((record.size, record.method) for record in records)
    sizes = list(dict.fromkeys(size for size, _ in keys))
    for size, name in sorted(keys, key=lambda key: sizes.index(key[0])):
        yield size, name, [r for r in records if r.size == size and r.method == name]


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None


def write(path: Path, results: Results, settings: Settings) -> None:
    """Write the results with the command that made them."""
    content = {
        "interrupted": results.interrupted,
        "records": [dataclasses.asdict(record) for record in results.records],
        "curves": None if results.curves is None else dataclasses.asdict(results.curves),
    }
    write_json(path, settings.command, content)


def plot(curves: Curves, path: Path) -> None:
    """Three panels as in `fig:clbo`: objective, lower-level gap, infeasibility, over gradients."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(13, 4), layout="constrained")
    for name, columns in curves.by_method.items():
        seen = {column: np.asarray(values, float) for column, values in columns.items()}
        moved = seen["gradients"] > 0  # the start itself has no place on a logarithmic axis
        gradients = seen["gradients"][moved]
        style = {"linewidth": 1.4, "label": name, "color": f"C{METHODS.index(name)}"}
        if name == "adaptive":
            style["marker"] = "."
        left.plot(gradients, seen["objective"][moved], **style)
        for axes, column in ((middle, "lower_gap"), (right, "feasibility")):
            # A residual of zero is drawn at the lower edge, where it goes out of the picture.
            axes.plot(gradients, np.maximum(seen[column][moved], 1e-16), **style)
    if curves.optimum is not None:
        left.axhline(curves.optimum, color="0.4", linestyle=":", linewidth=1.2, label="optimum")
    for axes in (middle, right):
        axes.axhline(curves.tolerance, color="0.4", linestyle=":", linewidth=1.2, label="tolerance")
        axes.set(yscale="log")
        low, high = axes.get_ylim()
        axes.set_ylim(max(low, 1e-9), max(high, 10 * curves.tolerance))
    for axes, title in (
        (left, "objective value"),
        (middle, "lower optimality gap"),
        (right, "infeasibility"),
    ):
        axes.set(xscale="log", xlabel="gradient evaluations", title=title)
        axes.grid(alpha=0.3, linewidth=0.4)
    left.legend(frameon=False, fontsize="small")
    figure.suptitle(f"One bilevel linear problem, n = {curves.n} (instance {curves.instance})")
    figure.savefig(path, dpi=150)
    plt.close(figure)
