"""The paper's experiment on bilevel linear problems (`tab:clo`, `fig:clbo`), judged exactly.

Every method gets the same problems, the same start and the same time. An answer is judged by the
library's certificate, by what its x is worth once the lower level is solved exactly (`repair`), and
against the exact optimum. Problems of one size run together under `vmap` where that was measured
to be faster (`benchmarks/vmap_linear.py`), else one after the other.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from bilevax.arguments import non_negative, positive, whole
from bilevax.bench import output
from bilevax.bench.batch import solve_batch
from bilevax.bench.output import aligned, check_choices, mean, median, number
from bilevax.bench.runs import Run, attempt, certified_of, fields, refusals
from bilevax.driver.solution import Solution
from bilevax.problems import ConstrainedBilevelProblem, linear
from bilevax.problems.library import LinearInstance, bilevel_linear_from
from bilevax.problems.validation import require_precision, validate
from bilevax.solvers import FOP, SMO, Adaptive, PenaltyMethod, Solver, Task

METHODS = ("paper", "tuned", "fop", "smo", "adaptive")
SIZES = (100, 200, 300, 400, 500)
# The paper's bound on the multipliers, its smaller L, and the size of its figure.
MULTIPLIER_BOUND, TUNED, SHOWN = 200.0, 6.0, 400
# Up to this n a method is faster under `vmap` over problems, on a CPU. There all problems take the
# same branch at the same time, and one problem is too small to keep the machine busy.
TOGETHER = {"paper": 500, "tuned": 300}
HEADER = ("n", "m", "l", "method", "certified", "objective", "repaired", "optimum", "rel. error")
HEADER += ("gradients", "seconds")
CURVES = ("gradients", "objective", "lower_gap", "feasibility")


@dataclasses.dataclass(frozen=True)
class Settings:
    """What to run.

    Args:
        sizes: the numbers n = m of variables of each level; there are n/20 constraints.
        instances: how many problems of each size.
        methods: which methods, of paper, tuned, fop, smo and adaptive.
        tolerance: the ε to certify.
        seed: the seed of the first problem of each size.
        max_seconds: stop a solve soon after this much time, compilation not counted.
        load: take the problems from the .npz files of this folder instead of drawing them; sizes,
            instances and seed do not count then.
        json: write all results there, also when interrupted.
        plot: save the paper's figure of one problem there.
    """

    sizes: tuple[int, ...] = SIZES
    instances: int = 5
    methods: tuple[str, ...] = METHODS
    tolerance: float = 0.01
    seed: int = 0
    max_seconds: float = 60.0
    load: Path | None = None
    json: Path | None = None
    plot: Path | None = None

    def check(self) -> None:
        """Refuse settings that a run could not keep to."""
        for size in self.sizes:
            whole(size, "sizes", 1)
        whole(self.instances, "instances", 1)
        whole(self.seed, "seed", 0)
        positive(self.tolerance, "tolerance")
        require_precision(self.tolerance, jnp.zeros(()).dtype)
        non_negative(self.max_seconds, "max_seconds")
        check_choices(self, "sizes")
        check_choices(self, "methods", METHODS)
        output.check_outputs(self.json, self.plot)

    @property
    def command(self) -> str:
        """The command that runs just this."""
        own = ("load",) if self.load is not None else ("sizes", "instances", "seed")
        options = (*own, "methods", "tolerance", "max_seconds", "json", "plot")
        return output.command_line("linear", self, options)


@dataclasses.dataclass(frozen=True)
class LinearRun(Run):
    """One method on one problem.

    `rho` and `objective` are the certificate's. `violation`, `lower_gap`, `repaired_objective` and
    `optimum` come from HiGHS; `relative_error` is that of the repaired objective. `optimum` is None
    where the exact answer is not known. Where several problems ran `together`, so many of them,
    `seconds` is the share of each.
    """

    n: int
    m: int
    l: int  # noqa: E741
    instance: str
    method: str
    rho: float | None = None
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

    @property
    def where(self) -> str:
        return f"n = {self.n}, {self.instance}, {self.method}"


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
    """All runs, and the curves of the problem in the figure."""

    records: tuple[LinearRun, ...]
    curves: Curves | None
    interrupted: bool


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """One problem of the experiment."""

    name: str
    data: linear.LinearData

    @property
    def size(self) -> tuple[int, int, int]:
        return self.data.c.size, self.data.d.size, self.data.b.size

    @functools.cached_property
    def instance(self) -> LinearInstance:
        return bilevel_linear_from(self.data)

    @functools.cached_property
    def best(self) -> linear.Optimum | None:
        """The exact optimum; None where the data are such that the LP does not find it."""
        try:
            return linear.optimum(self.data)
        except (ValueError, RuntimeError):
            return None


def method(
    name: str, instance: LinearInstance, tolerance: float
) -> tuple[ConstrainedBilevelProblem, Solver]:
    """A method of the experiment by its name, and the problem as that method is told it.

    `paper` is Algorithm `alg:first-order-new` with ε = tolerance, ρ = 1/ε, multipliers in [0, B]
    with B = 200 and L = L_f + 2ρ(L_f̄ + B√l·L_∇ḡ + 2L_ḡ); `tuned` has L = 6 instead. `adaptive` is
    told nothing.
    """
    told_nothing = {"adaptive": Adaptive, "fop": FOP, "smo": SMO}
    if name in told_nothing:
        return instance.problem, told_nothing[name]()
    bounded = dataclasses.replace(instance.problem, multiplier_bound=MULTIPLIER_BOUND)
    smoothness = TUNED if name == "tuned" else paper_smoothness(instance, tolerance)
    return bounded, PenaltyMethod(epsilon=tolerance, smoothness=smoothness)


def paper_smoothness(instance: LinearInstance, epsilon: float) -> float:
    """L_f + 2ρ(L_f̄ + B√l·L_∇ḡ + 2L_ḡ) with ρ = 1/ε: the paper's bound on L_∇P₁."""
    levels = ("upper", "lower", "constraint")
    constants = (*(f"{level}_smoothness" for level in levels), "constraint_lipschitz")
    upper, lower, bend, slope = (float(getattr(instance.problem, name)) for name in constants)
    many = MULTIPLIER_BOUND * math.sqrt(instance.data.b.size)
    return upper + 2 / epsilon * (lower + many * bend + 2 * slope)


def experiment(settings: Settings, progress: bool | None = None) -> Results:
    """Run all methods; write the JSON file and the plot. Ctrl-C keeps the results so far."""
    settings.check()
    cases = _cases(settings)
    shown = _shown(cases)
    runs: list[LinearRun] = []
    by_method: dict[str, Solution] = {}

    def results(interrupted: bool) -> Results:
        return Results(tuple(runs), _curves(shown, by_method), interrupted)

    def save(interrupted: bool) -> None:
        if settings.json is not None and runs:
            write(settings.json, results(interrupted), settings)

    def job(own: list[Case], name: str) -> None:
        for case, (outcome, found) in zip(own, _outcomes(own, name, settings)):
            runs.append(_run(case, name, outcome, found, len(own)))
            if case is shown and found is not None:
                by_method[name] = found

    label = lambda own: f"n = {own[0].size[0]}, {', '.join(case.name for case in own)}"
    jobs = [
        (f"{label(own)}: {name}", functools.partial(job, own, name))
        for own, name in _jobs(cases, settings.methods)
    ]
    found = results(output.run_jobs(jobs, "linear", progress, save))
    if settings.plot is not None and found.curves is not None:
        plot(found.curves, settings.plot)
    return found


def _jobs(cases: list[Case], methods: tuple[str, ...]) -> Iterator[tuple[list[Case], str]]:
    """The cases that a method solves together, or each alone."""
    for size, group in itertools.groupby(cases, key=lambda case: case.size):
        of_size = list(group)
        for name in methods:
            together = len(of_size) > 1 and size[0] <= TOGETHER.get(name, 0)
            together &= jax.default_backend() == "cpu"
            yield from [(of_size, name)] if together else [([case], name) for case in of_size]


def _cases(settings: Settings) -> list[Case]:
    if settings.load is not None:
        data = linear.load_directory(settings.load)
        names = (file.stem for file in sorted(Path(settings.load).glob("*.npz")))
        return sorted(map(Case, names, data), key=lambda case: case.size)
    seeds = range(settings.seed, settings.seed + settings.instances)
    drawn = lambda n, seed: Case(str(seed), linear.generate(n, n, max(1, n // 20), seed))
    return [drawn(n, seed) for n in settings.sizes for seed in seeds]


def _shown(cases: list[Case]) -> Case:
    """The problem of the figure: the first of the paper's size, else of the largest."""
    of_size = [case for case in cases if case.size[0] == SHOWN]
    return (of_size or [max(cases, key=lambda case: case.size)])[0]


def _outcomes(
    cases: list[Case], name: str, settings: Settings
) -> list[tuple[dict, Solution | None]]:
    """The fields of `Run` and the solution, of one problem or of several solved together."""
    posed = [method(name, case.instance, settings.tolerance) for case in cases]
    if len(cases) == 1:
        ((problem, solver),) = posed
        options = {"tolerance": settings.tolerance, "max_seconds": settings.max_seconds}
        return [attempt(problem, cases[0].instance.start, solver=solver, **options)]
    begun = time.perf_counter()
    try:
        tasks = [
            Task(problem, validate(problem, case.instance.start), settings.tolerance)
            for case, (problem, _) in zip(cases, posed)
        ]
        found = solve_batch(tasks, [solver for _, solver in posed], settings.max_seconds)
    except (ValueError, RuntimeError) as error:
        return [({"sentence": str(error)}, None)] * len(cases)
    taken = (time.perf_counter() - begun) / len(cases)
    return [(fields(one, taken), one) for one in found]


def _run(case: Case, name: str, outcome: dict, found: Solution | None, together: int) -> LinearRun:
    """A solve with what HiGHS says of its answer."""
    best, data = case.best, case.data
    judged: dict = {}
    if found is not None:
        x, y = np.asarray(found.point.x), np.asarray(found.point.y)
        worth = linear.repair(data, x).objective
        judged = {
            "rho": float(found.certificate.as_dict()["rho"]),
            "objective": float(found.certificate.objective),
            "violation": linear.violation(data, x, y),
            "lower_gap": linear.lower_gap(data, x, y),
            "repaired_objective": worth,
        }
        if best is not None:
            judged["relative_error"] = (worth - best.value) / (abs(best.value) or 1.0)
    if best is not None:
        judged |= {"optimum": best.value, "optimum_proven": best.proven}
    return LinearRun(*case.size, case.name, name, **outcome, **judged, together=together)


def _curves(case: Case, found: dict[str, Solution]) -> Curves | None:
    """The histories of one problem's solutions by method."""
    if not found:
        return None
    best = None if case.best is None else case.best.value
    tolerance = next(iter(found.values())).tolerance
    by_method = {
        name: {column: one.history[column].tolist() for column in CURVES}
        for name, one in found.items()
    }
    return Curves(case.size[0], case.name, best, tolerance, by_method)


def table(records: Iterable[LinearRun]) -> str:
    """The paper's table, with what its objectives hide, as aligned text."""
    records = list(records)
    rows = [list[str](HEADER)]
    before = None
    groups: dict[tuple, list[LinearRun]] = {}
    for record in records:
        groups.setdefault((record.size, record.method), []).append(record)
    sizes = [record.size for record in records]
    for (size, name), group in sorted(groups.items(), key=lambda item: sizes.index(item[0][0])):
        solved = [record for record in group if not record.refused]
        first = [str(part) for part in size] if size != before else ["", "", ""]
        star = "" if all(record.optimum_proven for record in group) else "*"
        optima = mean(record.optimum for record in group)
        rows.append(
            [
                *first,
                name,
                certified_of(group),
                number(mean(record.objective for record in solved), ".4f"),
                number(mean(record.repaired_objective for record in solved), ".4f"),
                "unknown" if optima is None else f"{optima:.4f}{star}",
                number(mean(record.relative_error for record in solved), ".1e"),
                number(median(record.gradients for record in solved), ",.0f"),
                number(median(record.seconds for record in solved), ".2f"),
            ]
        )
        before = size
    lines = [
        aligned(rows, left=(rows[0].index("method"),)),
        "",
        "Means of objectives and errors, medians of gradients and seconds (without compilation).",
        "An objective below the optimum is no better answer but a violation exploited, of the",
        "constraints or of the lower level's optimality; `repaired` is what the x found is worth",
        "once the lower level answers it exactly.",
    ]
    if any(record.optimum is not None and not record.optimum_proven for record in records):
        lines.append("* the best value known; not proven to be the optimum for every instance.")
    return "\n".join([*lines, *refusals(records)])


def write(path: Path, results: Results, settings: Settings) -> None:
    """Write the results with the command that made them."""
    content = {
        "interrupted": results.interrupted,
        "records": [dataclasses.asdict(record) for record in results.records],
        "curves": None if results.curves is None else dataclasses.asdict(results.curves),
    }
    output.write_results(path, settings.command, content)


def plot(curves: Curves, path: Path) -> None:
    """Three panels as in `fig:clbo`: objective, lower-level gap, infeasibility, over gradients."""
    with output.figure(path, 3, (13, 4)) as (figure, (left, middle, right)):
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
        dotted = {"color": "0.4", "linestyle": ":", "linewidth": 1.2}
        if curves.optimum is not None:
            left.axhline(curves.optimum, **dotted, label="optimum")
        for axes in (middle, right):
            axes.axhline(curves.tolerance, **dotted, label="tolerance")
            axes.set(yscale="log")
            low, high = axes.get_ylim()
            axes.set_ylim(max(low, 1e-9), max(high, 10 * curves.tolerance))
        titles = ("objective value", "lower optimality gap", "infeasibility")
        for axes, title in zip((left, middle, right), titles):
            axes.set(xscale="log", xlabel="gradient evaluations", title=title)
        left.legend(frameon=False, fontsize="small")
        figure.suptitle(f"One bilevel linear problem, n = {curves.n} (instance {curves.instance})")
