"""How the work to a certificate grows: with 1/ε, with the size, and against an exact solver's.

- `epsilon`: gradients to the certificate against ε. Every method of the experiment sets itself up
  for the ε it is asked for, so each ε is a run of its own.
- `size`: seconds and memory to the certificate against n, for dense and for sparse data.
- `exact`: seconds of Adaptive against those of HiGHS on the MILP of the lower level's KKT
  conditions, which knows nothing of how the problems were drawn.

All on random bilevel linear problems with m = n and l = n/20. What did not certify is recorded too.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bilevax.arguments import non_negative, positive, whole
from bilevax.bench import linear as experiments
from bilevax.bench import sparse
from bilevax.bench.apart import apart, peak_memory
from bilevax.bench.growth_plot import plot
from bilevax.bench.output import (
    Bar,
    aligned,
    check_outputs,
    command_line,
    median,
    number,
    write_json,
)
from bilevax.problems import ConstrainedBilevelProblem, Point, linear
from bilevax.problems.library import bilevel_linear, bilevel_linear_from, linear_problem
from bilevax.problems.validate import require_precision
from bilevax.driver.solution import Solution
from bilevax.driver.entry import solve
from bilevax.solvers import Adaptive, Solver

METHODS = ("adaptive", "paper", "fop", "smo")
TOLERANCES = (1e-1, 1e-2, 1e-3, 1e-4, 1e-5)
SIZES = (100, 200, 500, 1000, 2000, 5000, 10000, 20000)
EXACT_SIZES = (100, 200, 300, 500, 1000, 2000)
# The ε of the parts `size` and `exact`.
SIZE_TOLERANCE, EXACT_TOLERANCE = 1e-2, 1e-4
# What each part goes by, besides the seed.
OPTIONS = {
    "epsilon": ("methods", "tolerances", "n", "instances", "max_seconds"),
    "size": ("sizes", "density", "size_seconds"),
    "exact": ("exact_sizes", "big_m", "exact_seconds"),
}
PARTS = tuple(OPTIONS)


@dataclasses.dataclass(frozen=True)
class Settings:
    """What to run; `OPTIONS` says which part goes by what."""

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

    def __post_init__(self) -> None:
        for name in ("parts", "methods", "tolerances", "sizes", "exact_sizes"):
            values = getattr(self, name)
            if not values or len(set(values)) < len(values):
                raise ValueError(f"{name} must be one or more, each once, not {values}")
        for name, known in (("part", PARTS), ("method", experiments.METHODS)):
            if unknown := [one for one in getattr(self, f"{name}s") if one not in known]:
                raise ValueError(f"no {name} {unknown[0]!r}; there are {', '.join(known)}")
        for name in ("n", "instances"):
            whole(getattr(self, name), name, 1)
        for name in ("sizes", "exact_sizes"):
            for size in getattr(self, name):
                whole(size, name, 1)
        whole(self.seed, "seed", 0)
        own = self.tolerances if "epsilon" in self.parts else ()
        for tolerance in own:
            require_precision(tolerance, jnp.zeros(()).dtype, "tolerances")
        for name in ("max_seconds", "size_seconds"):
            non_negative(getattr(self, name), name)
        for name in ("big_m", "exact_seconds", "density"):
            positive(getattr(self, name), name)
        if self.density > 1:
            raise ValueError(f"density must be a share of the entries, ≤ 1, not {self.density}")
        check_outputs(self.json, self.plot)

    @property
    def command(self) -> str:
        """The command that runs just this."""
        own = [name for part in self.parts for name in OPTIONS[part]]
        return command_line("growth", self, ("parts", *own, "seed", "json", "plot"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """How one solve went; what it did not find is None.

    `status` is the code of `Solution.status`, or "refused" where none came back; `sentence` says
    why. `epsilon` is the best that was certified. `seconds` are those of the solve's loop, to which
    its limit applies; apart are `compile_seconds` of that loop, and `setup_seconds` of what comes
    before: compilation, and work that grows with n, such as that on first multiplier bounds.
    """

    status: str = "refused"
    sentence: str = ""
    epsilon: float | None = None
    gradients: int | None = None
    seconds: float | None = None
    compile_seconds: float | None = None
    setup_seconds: float | None = None

    @property
    def where(self) -> str:
        """Which run this is, in words."""
        return ""

    @property
    def certified(self) -> bool:
        return self.status == "certified"

    @property
    def call_seconds(self) -> float | None:
        """All that the call took, compilation and setting up included."""
        parts = (self.seconds, self.compile_seconds, self.setup_seconds)
        return None if None in parts else sum(part for part in parts if part is not None)


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
    """Adaptive on one problem, in a process of its own whose peak of memory is `peak_bytes`."""

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

    `objective` is Adaptive's, and `repaired_objective` what its x is worth once the lower level
    answers exactly. `milp_objective` is the best that HiGHS found, `milp_bound` what it proved that
    none is below. `relative_difference` is that of the repaired objective to HiGHS's. The LP of
    `linear.optimum` knows how the problem was drawn; its answer is there to judge both.
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
    """Run it all; write the JSON file and the plot. Ctrl-C ends it with what there is so far."""
    todo = [(part, *job) for part in settings.parts for job in _JOBS[part](settings)]
    results = Results({part: [] for part in settings.parts}, interrupted=True)
    try:
        with Bar(progress, len(todo), "growth") as bar:
            for part, what, run in todo:
                bar.at(f"{part}: {what}")
                results.runs[part].append(run())
                bar.step()
        results = dataclasses.replace(results, interrupted=False)
    except KeyboardInterrupt:
        pass
    finally:
        if settings.json is not None and any(results.runs.values()):
            write(settings.json, results, settings)
    if settings.plot is not None and any(results.runs.values()):
        plot(results, settings.plot)
    return results


_Job = tuple[str, Callable[[], Run]]


def _epsilon_jobs(settings: Settings) -> Iterator[_Job]:
    for name in settings.methods:
        for tolerance in settings.tolerances:
            for seed in range(settings.seed, settings.seed + settings.instances):
                run = partial(epsilon_run, name, tolerance, seed, settings)
                yield f"{name}, ε = {tolerance:g}, {seed}", run


def _size_jobs(settings: Settings) -> Iterator[_Job]:
    for n in settings.sizes:
        for data in ("dense", "sparse"):
            yield f"n = {n}, {data}", partial(size_run, n, data, settings)


def _exact_jobs(settings: Settings) -> Iterator[_Job]:
    for n in settings.exact_sizes:
        yield f"n = {n}", partial(exact_run, n, settings)


_JOBS = {"epsilon": _epsilon_jobs, "size": _size_jobs, "exact": _exact_jobs}


def _rows(n: int) -> int:
    return max(1, n // 20)


def _outcome(
    problem: ConstrainedBilevelProblem,
    start: Point,
    tolerance: float,
    solver: Solver,
    max_seconds: float,
) -> tuple[dict[str, Any], Solution | None]:
    """The fields of `Run`, and the solution if there is one."""
    begun = time.perf_counter()
    options = {"tolerance": tolerance, "solver": solver, "max_seconds": max_seconds}
    try:
        found = solve(problem, start, **options, progress=False)
    except (ValueError, RuntimeError, MemoryError) as error:
        # That a method cannot do a problem is a result.
        return {"sentence": str(error)}, None
    if found.status == "interrupted":  # `solve` keeps Ctrl-C to itself
        raise KeyboardInterrupt
    apart_from = time.perf_counter() - begun - found.seconds - found.compile_seconds
    fields = {
        "status": found.status.code,
        "sentence": found.status.sentence,
        "epsilon": float(found.certificate.epsilon),
        "gradients": int(found.gradients),
        "seconds": found.seconds,
        "compile_seconds": found.compile_seconds,
        "setup_seconds": max(0.0, apart_from),
    }
    return fields, found


def epsilon_run(name: str, tolerance: float, seed: int, settings: Settings) -> EpsilonRun:
    """One method of the linear experiment at one ε."""
    instance = bilevel_linear(settings.n, settings.n, _rows(settings.n), seed)
    problem, solver = experiments.method(name, instance, tolerance)
    fields, _ = _outcome(problem, instance.start, tolerance, solver, settings.max_seconds)
    return EpsilonRun(method=name, seed=seed, tolerance=tolerance, **fields)


def size_run(n: int, data: str, settings: Settings) -> SizeRun:
    """Adaptive on one size, in a process of its own."""
    try:
        return apart(measured, n, data, settings.density, settings.seed, settings.size_seconds)
    except RuntimeError as error:
        return SizeRun(n=n, data=data, sentence=str(error))


def measured(n: int, data: str, density: float, seed: int, max_seconds: float) -> SizeRun:
    """Adaptive on one size, with the peak of memory of this whole process."""
    problem = _problem(n, data, density, seed)
    data_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(problem.data))
    start = Point(x=jnp.zeros(n), y=jnp.zeros(n))
    fields, _ = _outcome(problem, start, SIZE_TOLERANCE, Adaptive(), max_seconds)
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
    fields, found = _outcome(instance.problem, instance.start, EXACT_TOLERANCE, Adaptive(), limit)
    if found is not None:
        fields["objective"] = float(found.certificate.objective)
        fields["repaired_objective"] = linear.repair(data, np.asarray(found.point.x)).objective
    begun = time.perf_counter()
    try:
        # HiGHS keeps its limit only so far, and the matrices have to be built before.
        exact, seconds = apart(milp, data, settings.big_m, limit, limit=3 * limit + 60)
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
    """What HiGHS makes of the MILP, or why it made nothing; and the seconds, repair included."""
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
    write_json(path, settings.command, {"interrupted": results.interrupted} | content)


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
        certified = f"{sum(run.certified for run in own)} of {len(own)}"
        rows.append(
            [
                *(name, f"{tolerance:g}", certified),
                number(median([run.gradients for run in known]), ",.0f"),
                number(median([run.seconds for run in known]), ".2f"),
                number(max((run.epsilon or 0.0 for run in known), default=None), ".1e"),
            ]
        )
    lines = [aligned(rows, left=(0,)), "Medians, of what did not certify too."]
    return "\n".join([*lines, *(_sentence(one) for one in results.fits), *_refusals(runs)])


def _sentence(one: Fit) -> str:
    share = f"{one.runs} of {one.all_runs} runs certified"
    if one.exponent is None:
        return f"{one.method}: no exponent, as fewer than two ε were certified ({share})."
    return f"{one.method}: gradients ≈ {one.factor:.3g}·(1/ε)^{one.exponent:.2f}, {share}."


def _size_table(results: Results) -> str:
    runs: list[SizeRun] = results.runs["size"]
    rows = [["data", "n", "l", "status", "ε", "gradients", "seconds", "compilation", "setting up"]]
    rows[0] += ["data, MB", "peak, MB"]
    rows += [
        [
            *(run.data, str(run.n), str(_rows(run.n)), run.status),
            number(run.epsilon, ".1e"),
            number(run.gradients, ",d"),
            number(run.seconds, ".2f"),
            number(run.compile_seconds, ".1f"),
            number(run.setup_seconds, ".1f"),
            number(run.data_bytes and run.data_bytes / 1e6, ".2f"),
            number(run.peak_bytes and run.peak_bytes / 1e6, ",.0f"),
        ]
        for run in runs
    ]
    said = "Setting up, whose time is not limited, is compilation, and work that grows with n.\n"
    said += "The peak is that of the whole process, JAX and compilation included."
    return "\n".join([aligned(rows, left=(0,)), said, *_refusals(runs)])


def _exact_table(results: Results) -> str:
    runs: list[ExactRun] = results.runs["exact"]
    rows = [["n", "l", "Adaptive", "seconds", "compilation", "objective", "repaired"]]
    rows[0] += ["HiGHS", "seconds", "objective", "rel. difference", "LP"]
    rows += [
        [
            *(str(run.n), str(_rows(run.n)), run.status),
            number(run.seconds, ".2f"),
            number(run.compile_seconds, ".1f"),
            number(run.objective, ".4f"),
            number(run.repaired_objective, ".4f"),
            "proven" if run.milp_proven else "not proven",
            number(run.milp_seconds, ".2f"),
            number(run.milp_objective, ".4f"),
            number(run.relative_difference, ".1e"),
            number(run.lp_objective, ".4f"),
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
    return "\n".join([*lines, *_refusals(runs)])


def _refusals(runs: Sequence[Run]) -> list[str]:
    return [f"Refused: {run.where}: {run.sentence}" for run in runs if run.status == "refused"]
