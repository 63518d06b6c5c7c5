"""How the work to a certificate grows: with 1/ε, with the size, and against an exact solver's.

`epsilon`: gradients to the certificate against ε, each ε a run of its own. `size`: seconds and
memory against n, for dense and for sparse data. `exact`: seconds of Adaptive against those of HiGHS
on the MILP of the lower level's KKT conditions, which does not use how the problems were drawn. All
on random bilevel linear problems with m = n and l = n/20.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bilevax.arguments import non_negative, positive, whole
from bilevax.bench import linear as experiments
from bilevax.bench import output, sparse
from bilevax.bench.isolation import isolated, peak_memory
from bilevax.bench.output import aligned, check_choices, median, number, numbers
from bilevax.bench.runs import Run, attempt, certified_of, refusals
from bilevax.problems import ConstrainedBilevelProblem, Point, linear
from bilevax.problems.library import bilevel_linear, bilevel_linear_from, linear_problem
from bilevax.problems.validation import require_precision
from bilevax.solvers import Adaptive

METHODS = ("adaptive", "paper", "fop", "smo")
TOLERANCES = (1e-1, 1e-2, 1e-3, 1e-4, 1e-5)
SIZES = (100, 200, 500, 1000, 2000, 5000, 10000, 20000)
EXACT_SIZES = (100, 200, 300, 500, 1000, 2000)
# The ε of the parts `size` and `exact`.
SIZE_TOLERANCE, EXACT_TOLERANCE = 1e-2, 1e-4
# The settings of each part, besides the seed.
OPTIONS = {
    "epsilon": ("methods", "tolerances", "n", "instances", "max_seconds"),
    "size": ("sizes", "density", "size_seconds"),
    "exact": ("exact_sizes", "big_m", "exact_seconds"),
}
PARTS = tuple(OPTIONS)
# What the open markers of the figure mean.
OPEN = "stopped: not certified, not proven"


@dataclasses.dataclass(frozen=True)
class Settings:
    """What to run.

    Args:
        parts: which parts, of epsilon (gradients against ε), size (seconds and memory against n,
            dense and sparse) and exact (seconds of Adaptive against those of HiGHS on a MILP).
        methods: of epsilon: which methods, of paper, tuned, fop, smo and adaptive.
        tolerances: of epsilon: the ε to certify.
        n: of epsilon: the number n = m of variables of each level; there are n/20 constraints.
        instances: of epsilon: how many problems.
        max_seconds: of epsilon: stop a solve soon after this much time, compilation not counted.
        sizes: of size: the numbers n = m of variables.
        density: of size: the share of the entries that are not zero in the sparse problems.
        size_seconds: of size: stop a solve soon after this much time, compilation not counted.
        exact_sizes: of exact: the numbers n = m of variables.
        big_m: of exact: the bound on the lower level's multipliers in the MILP.
        exact_seconds: of exact: stop Adaptive and HiGHS each soon after this much time.
        seed: the seed of the first problem of each size.
        json: write all results there, also when interrupted.
        plot: save a figure there, with a panel for each part.
    """

    parts: tuple[str, ...] = PARTS
    methods: tuple[str, ...] = METHODS
    tolerances: tuple[float, ...] = TOLERANCES
    n: int = 100
    instances: int = 3
    max_seconds: float = 10.0
    sizes: tuple[int, ...] = SIZES
    density: float = 0.01
    size_seconds: float = 120.0
    exact_sizes: tuple[int, ...] = EXACT_SIZES
    big_m: float = experiments.MULTIPLIER_BOUND
    exact_seconds: float = 120.0
    seed: int = 0
    json: Path | None = None
    plot: Path | None = None

    def check(self) -> None:
        """Refuse settings that a run could not keep to."""
        known = {"parts": PARTS, "methods": experiments.METHODS}
        for name in ("parts", "methods", "tolerances", "sizes", "exact_sizes"):
            check_choices(self, name, known.get(name))
        for name in ("n", "instances"):
            whole(getattr(self, name), name, 1)
        for name in ("sizes", "exact_sizes"):
            for size in getattr(self, name):
                whole(size, name, 1)
        whole(self.seed, "seed", 0)
        for tolerance in self.tolerances if "epsilon" in self.parts else ():
            require_precision(tolerance, jnp.zeros(()).dtype, "tolerances")
        for name in ("max_seconds", "size_seconds"):
            non_negative(getattr(self, name), name)
        for name in ("big_m", "exact_seconds", "density"):
            positive(getattr(self, name), name)
        if self.density > 1:
            raise ValueError(f"density must be a share of the entries, ≤ 1, not {self.density}")
        output.check_outputs(self.json, self.plot)

    @property
    def command(self) -> str:
        """The command that runs just this."""
        own = [name for part in self.parts for name in OPTIONS[part]]
        return output.command_line("growth", self, ("parts", *own, "seed", "json", "plot"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class EpsilonRun(Run):
    """One method on one problem, asked for `tolerance`."""

    method: str
    seed: int
    tolerance: float

    @property
    def where(self) -> str:
        return f"{self.method}, ε = {self.tolerance:g}, {self.seed}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class SizeRun(Run):
    """Adaptive on one problem, in a process of its own; `peak_bytes` is the most memory it held."""

    n: int
    data: str
    data_bytes: int | None = None
    peak_bytes: int | None = None

    @property
    def where(self) -> str:
        return f"n = {self.n}, {self.data}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExactRun(Run):
    """Adaptive and HiGHS on one problem.

    `objective` is that of Adaptive's answer, `repaired_objective` that of its x with an exact
    answer of the lower level, and `relative_difference` that of the latter to HiGHS's best. The LP
    of `linear.optimum` uses how the problem was drawn; its value is there to judge both.
    """

    n: int
    objective: float | None = None
    repaired_objective: float | None = None
    relative_difference: float | None = None
    milp_objective: float | None = None
    milp_bound: float | None = None
    milp_proven: bool = False
    milp_seconds: float
    milp_sentence: str = ""
    lp_objective: float | None = None
    lp_seconds: float | None = None

    @property
    def where(self) -> str:
        return f"n = {self.n}"

    def faster(self, whole_call: bool = False) -> bool:
        """Whether Adaptive, certified, took less time than HiGHS took, proven or not."""
        seconds = self.call_seconds if whole_call else self.seconds
        return self.certified and seconds is not None and seconds < self.milp_seconds


@dataclasses.dataclass(frozen=True)
class Fit:
    """gradients ≈ factor·(1/ε)^exponent over the certified `runs` of `all_runs`."""

    method: str
    exponent: float | None
    factor: float | None
    runs: int
    all_runs: int


@dataclasses.dataclass(frozen=True)
class Results:
    """The runs of each part, of those parts that were asked for."""

    runs: dict[str, list[Any]]
    interrupted: bool = False

    @property
    def fits(self) -> list[Fit]:
        runs: list[EpsilonRun] = self.runs.get("epsilon", [])
        names = dict.fromkeys(run.method for run in runs)
        return [fit(name, [run for run in runs if run.method == name]) for name in names]

    def faster_from(self, whole_call: bool = False) -> int | None:
        """The n of `exact` from which on Adaptive was faster every time; None if there is none.

        Where neither came to its end in the time it had, neither was faster.
        """
        first, runs = None, self.runs.get("exact", [])
        ended = [run for run in runs if run.certified or run.milp_proven]
        for run in sorted(ended, key=lambda run: run.n, reverse=True):
            if not run.faster(whole_call):
                break
            first = run.n
        return first


def fit(name: str, runs: Sequence[EpsilonRun]) -> Fit:
    """Least squares of log gradients against log 1/ε; none with fewer than two distinct ε."""
    found = [(r.tolerance, r.gradients) for r in runs if r.certified and r.gradients]
    if len({tolerance for tolerance, _ in found}) < 2:
        return Fit(name, None, None, len(found), len(runs))
    tolerances, gradients = np.log(np.asarray(found, float)).T
    exponent, factor = np.polyfit(-tolerances, gradients, 1)
    return Fit(name, float(exponent), float(np.exp(factor)), len(found), len(runs))


def experiment(settings: Settings, progress: bool | None = None) -> Results:
    """Run all parts; write the JSON file and the plot. Ctrl-C keeps the results so far."""
    settings.check()
    runs: dict[str, list[Run]] = {part: [] for part in settings.parts}

    def save(interrupted: bool) -> None:
        if settings.json is not None and any(runs.values()):
            write(settings.json, Results(runs, interrupted), settings)

    def job(part: str, call: Any, *given: Any) -> None:
        runs[part].append(call(*given, settings))

    jobs = [
        (f"{part}: {', '.join(map(str, given))}", partial(job, part, call, *given))
        for part in settings.parts
        for call, *given in _calls(part, settings)
    ]
    results = Results(runs, output.run_jobs(jobs, "growth", progress, save))
    if settings.plot is not None and any(runs.values()):
        plot(results, settings.plot)
    return results


def _calls(part: str, settings: Settings) -> list[tuple[Any, ...]]:
    """The functions to call for a part, each with its arguments."""
    seeds = range(settings.seed, settings.seed + settings.instances)
    call, *choices = {
        "epsilon": (epsilon_run, settings.methods, settings.tolerances, seeds),
        "size": (size_run, settings.sizes, ("dense", "sparse")),
        "exact": (exact_run, settings.exact_sizes),
    }[part]
    return [(call, *given) for given in itertools.product(*choices)]


def _rows(n: int) -> int:
    """The number of constraints of a problem of size n."""
    return max(1, n // 20)


def epsilon_run(name: str, tolerance: float, seed: int, settings: Settings) -> EpsilonRun:
    """One method of the linear experiment at one ε."""
    instance = bilevel_linear(settings.n, settings.n, _rows(settings.n), seed)
    problem, solver = experiments.method(name, instance, tolerance)
    options = {"tolerance": tolerance, "solver": solver, "max_seconds": settings.max_seconds}
    fields, _ = attempt(problem, instance.start, **options)
    return EpsilonRun(method=name, seed=seed, tolerance=tolerance, **fields)


def size_run(n: int, data: str, settings: Settings) -> SizeRun:
    """Adaptive on one size, in a process of its own."""
    try:
        return isolated(measured, n, data, settings.density, settings.seed, settings.size_seconds)
    except RuntimeError as error:
        return SizeRun(n=n, data=data, sentence=str(error))


def measured(n: int, data: str, density: float, seed: int, max_seconds: float) -> SizeRun:
    """Adaptive on one size, and the peak memory of the whole process that runs it."""
    problem = _problem(n, data, density, seed)
    data_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(problem.data))
    start = Point(x=jnp.zeros(n), y=jnp.zeros(n))
    options = {"tolerance": SIZE_TOLERANCE, "solver": Adaptive(), "max_seconds": max_seconds}
    fields, _ = attempt(problem, start, **options)
    memory = {"data_bytes": data_bytes, "peak_bytes": peak_memory()}
    return SizeRun(n=n, data=data, **fields, **memory)


def _problem(n: int, data: str, density: float, seed: int) -> ConstrainedBilevelProblem:
    if data == "sparse":
        return linear_problem(sparse.generate(n, n, _rows(n), density, seed))
    return linear_problem(sparse.arrays(linear.generate(n, n, _rows(n), seed)))


def exact_run(n: int, settings: Settings) -> ExactRun:
    """Adaptive here, and HiGHS in a process of its own, where it can be ended."""
    data = linear.generate(n, n, _rows(n), settings.seed)
    limit = settings.exact_seconds
    instance = bilevel_linear_from(data)
    options = {"tolerance": EXACT_TOLERANCE, "solver": Adaptive(), "max_seconds": limit}
    fields, found = attempt(instance.problem, instance.start, **options)
    if found is not None:
        fields["objective"] = float(found.certificate.objective)
        fields["repaired_objective"] = linear.repair(data, np.asarray(found.point.x)).objective
    begun = time.perf_counter()
    try:
        # HiGHS may exceed its limit, and building its matrices takes time too.
        exact, seconds = isolated(milp, data, settings.big_m, limit, limit=3 * limit + 60)
    except RuntimeError as error:
        exact, seconds = str(error), time.perf_counter() - begun
    if isinstance(exact, str):
        fields["milp_sentence"] = exact
    else:
        fields |= {"milp_objective": exact.value, "milp_bound": exact.bound}
        fields["milp_proven"] = exact.proven
        if found is not None:
            difference = fields["repaired_objective"] - exact.value
            fields["relative_difference"] = difference / (abs(exact.value) or 1.0)
    return ExactRun(n=n, milp_seconds=seconds, **fields, **_lp(data))


def milp(data: linear.LinearData, big_m: float, limit: float) -> tuple[linear.Optimum | str, float]:
    """HiGHS's answer to the MILP, or why there is none; and the seconds, with those of repair."""
    begun = time.perf_counter()
    try:
        found = linear.optimum_milp(data, big_m, limit)
    except RuntimeError as error:
        found = str(error)
    return found, time.perf_counter() - begun


def _lp(data: linear.LinearData) -> dict[str, Any]:
    begun = time.perf_counter()
    try:
        value = linear.optimum(data, prove=False).value
    except (ValueError, RuntimeError):
        return {}
    return {"lp_objective": value, "lp_seconds": time.perf_counter() - begun}


def write(path: Path, results: Results, settings: Settings) -> None:
    """Write the results with the command that made them."""
    content: dict[str, Any] = {
        part: {"runs": [dataclasses.asdict(run) for run in runs]}
        for part, runs in results.runs.items()
    }
    if "epsilon" in content:
        content["epsilon"]["fits"] = [dataclasses.asdict(one) for one in results.fits]
    if "exact" in content:
        content["exact"]["faster_from"] = results.faster_from()
        content["exact"]["faster_from_whole_call"] = results.faster_from(whole_call=True)
    output.write_results(path, settings.command, {"interrupted": results.interrupted} | content)


def table(results: Results) -> str:
    """A table for each part, as aligned text."""
    tables = {"epsilon": _epsilon_table, "size": _size_table, "exact": _exact_table}
    return "\n\n".join(tables[part](results) for part, runs in results.runs.items() if runs)


def _epsilon_table(results: Results) -> str:
    runs: list[EpsilonRun] = results.runs["epsilon"]
    rows = [["method", "ε", "certified", "gradients", "seconds", "largest ε reached"]]
    for name, tolerance in dict.fromkeys((run.method, run.tolerance) for run in runs):
        own = [run for run in runs if (run.method, run.tolerance) == (name, tolerance)]
        known = [run for run in own if run.epsilon is not None]
        medians = [median([run.gradients for run in known]), median([run.seconds for run in known])]
        largest = max((run.epsilon or 0.0 for run in known), default=None)
        cells = map(number, [*medians, largest], (",.0f", ".2f", ".1e"))
        rows.append([name, f"{tolerance:g}", certified_of(own), *cells])
    lines = [aligned(rows, left=(0,)), "Medians, also over runs that did not certify."]
    return "\n".join([*lines, *(_sentence(one) for one in results.fits), *refusals(runs)])


def _sentence(one: Fit) -> str:
    share = f"{one.runs} of {one.all_runs} runs certified"
    if one.exponent is None:
        return f"{one.method}: no exponent, as fewer than two ε were certified ({share})."
    return f"{one.method}: gradients ≈ {one.factor:.3g}·(1/ε)^{one.exponent:.2f}, {share}."


def _size_table(results: Results) -> str:
    runs: list[SizeRun] = results.runs["size"]
    rows = [["data", "n", "l", "status", "ε", "gradients", "seconds", "compilation", "setting up"]]
    rows[0] += ["data, MB", "peak, MB"]
    forms = {"epsilon": ".1e", "gradients": ",d", "seconds": ".2f"}
    forms |= {"compile_seconds": ".1f", "setup_seconds": ".1f"}
    rows += [
        [
            *(run.data, str(run.n), str(_rows(run.n)), run.status),
            *numbers(run, **forms),
            number(run.data_bytes and run.data_bytes / 1e6, ".2f"),
            number(run.peak_bytes and run.peak_bytes / 1e6, ",.0f"),
        ]
        for run in runs
    ]
    said = "Setting up, whose time is not limited, is compilation, and work that grows with n.\n"
    said += "The peak is that of the whole process, JAX and compilation included."
    return "\n".join([aligned(rows, left=(0,)), said, *refusals(runs)])


def _exact_table(results: Results) -> str:
    runs: list[ExactRun] = results.runs["exact"]
    rows = [["n", "l", "Adaptive", "seconds", "compilation", "objective", "repaired"]]
    rows[0] += ["HiGHS", "seconds", "objective", "rel. difference", "LP"]
    rows += [
        [
            *(str(run.n), str(_rows(run.n)), run.status),
            *numbers(run, seconds=".2f", compile_seconds=".1f"),
            *numbers(run, objective=".4f", repaired_objective=".4f"),
            "proven" if run.milp_proven else "not proven",
            *numbers(run, milp_seconds=".2f", milp_objective=".4f"),
            *numbers(run, relative_difference=".1e", lp_objective=".4f"),
        ]
        for run in runs
    ]
    lines = [aligned(rows), "LP: the value of the LP that the law of these problems allows."]
    for what, whole_call in (("", False), (", compilation and all counted,", True)):
        first = results.faster_from(whole_call)
        where = "not at the largest n" if first is None else f"from n = {first} on"
        said = f"Adaptive{what} is faster than HiGHS on the MILP, where either ended: {where}."
        lines.append(said)
    lines += [f"HiGHS, n = {run.n}: {run.milp_sentence}" for run in runs if run.milp_sentence]
    return "\n".join([*lines, *refusals(runs)])


def plot(results: Results, path: Path) -> None:
    """Draw the parts that have runs. Open markers are runs not certified or not proven."""
    parts = [part for part, runs in results.runs.items() if runs]
    panels = {"epsilon": _epsilon_panel, "size": _size_panel, "exact": _exact_panel}
    with output.figure(path, len(parts), (5.5 * len(parts), 4.2)) as (_, axes):
        for own, part in zip(axes, parts):
            panels[part](own, results)
            own.set(xscale="log", yscale="log")
            own.legend(frameon=False, fontsize="small")


def _epsilon_panel(axes: Any, results: Results) -> None:
    for rank, one in enumerate(results.fits):
        runs = [run for run in results.runs["epsilon"] if run.method == one.method]
        slope = "no fit" if one.exponent is None else f"(1/ε)^{one.exponent:.2f}"
        label = f"{one.method}: {slope}, {one.runs} of {one.all_runs} certified"
        points = [(1 / r.tolerance, r.gradients, r.certified) for r in runs if r.gradients]
        _curve(axes, points, label, rank)
    axes.set(xlabel="1/ε", ylabel="gradient evaluations", title="Gradients to the certificate")


def _size_panel(axes: Any, results: Results) -> None:
    runs = results.runs["size"]
    for rank, data in enumerate(dict.fromkeys(run.data for run in runs)):
        own = [run for run in runs if run.data == data and run.seconds is not None]
        _curve(axes, [(run.n, run.seconds, run.certified) for run in own], data, rank)
        _whole_calls(axes, own, f"{data}, whole call", rank)
    axes.set(xlabel="n = m", ylabel="seconds", title="Time to the certificate")


def _exact_panel(axes: Any, results: Results) -> None:
    runs = results.runs["exact"]
    own = [(run.n, run.seconds, run.certified) for run in runs if run.seconds is not None]
    _curve(axes, own, "Adaptive", 0)
    _whole_calls(axes, runs, "Adaptive, whole call", 0)
    _curve(axes, [(run.n, run.milp_seconds, run.milp_proven) for run in runs], "HiGHS, MILP", 1)
    axes.set(xlabel="n = m", ylabel="seconds", title="Against an exact solver")


def _whole_calls(axes: Any, runs: Sequence[Any], label: str, rank: int) -> None:
    """The seconds of whole calls as a dotted line, also of runs that did not certify."""
    calls = [(run.n, run.call_seconds) for run in runs if run.call_seconds is not None]
    axes.plot(*_columns(calls), ":", color=f"C{rank}", linewidth=1.2, label=label)


def _curve(axes: Any, points: Sequence[tuple[Any, Any, bool]], label: str, rank: int) -> None:
    """Filled points where the goal was reached, with a line through their medians."""
    color = f"C{rank}"
    reached = [(x, y) for x, y, goal in points if goal]
    missed = [(x, y) for x, y, goal in points if not goal]
    places = sorted({x for x, _ in reached})
    medians = [np.median([y for x, y in reached if x == place]) for place in places]
    axes.plot(places, medians, color=color, linewidth=1.4, label=label)
    axes.plot(*_columns(reached), "o", color=color, markersize=4)
    # One entry of the legend explains the open markers of all curves.
    seen = axes.get_legend_handles_labels()[1]
    label = OPEN if missed and OPEN not in seen else "_nolegend_"
    axes.plot(*_columns(missed), "o", color=color, markersize=5, mfc="none", label=label)


def _columns(points: Sequence[tuple[Any, Any]]) -> tuple[list[Any], list[Any]]:
    return [x for x, _ in points], [y for _, y in points]
