"""Published bilevel problems with best-known values, solved from several starts and judged."""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bilevax.arguments import positive, whole
from bilevax.bench import output
from bilevax.bench.falls import fall_nearby
from bilevax.bench.lower_level import lower_gap, lower_solution, lower_violation
from bilevax.bench.records import Record, Refusal, load
from bilevax.bench.runs import Run, attempt
from bilevax.bench.starts import starting_points
from bilevax.driver.solution import Solution
from bilevax.problems import ConstrainedBilevelProblem, Point
from bilevax.solvers import Engines
from bilevax.terms import Box

# Where the point found violates its lower level by a little, the lower level is solved again with
# constraints relaxed by that and this much: y is then compared with points that violate no more.
RELAX = 1e-6
# F counts as reached within this relative distance, with a lower-level gap and violations of at
# most these.
WITHIN, GAP, VIOLATION = 1e-2, 1e-4, 1e-3
# Every other start begins with this large penalty and so stays near its start; the default penalty
# searches farther.
STEEP = 1e3


class Stacked:
    """Several expressions as one function that returns their values as an array."""

    def __init__(self, expressions: Iterable[Callable[[Any, Any], Any]]):
        self.expressions = tuple(expressions)

    def __call__(self, x: Any, y: Any) -> Any:
        one = jnp.ones((), jnp.result_type(x, y))  # an expression may be constant
        return jnp.stack([one * e(x, y) for e in self.expressions])


def problem_of(record: Record) -> ConstrainedBilevelProblem:
    """A record of the suite, stated through the public interface."""
    stacked = lambda expressions: Stacked(expressions) if expressions else None
    inside = record.y_bounds_in_lower_level
    bounds = () if inside else _bounds_as_constraints(record)
    return ConstrainedBilevelProblem(
        record.upper,
        record.lower,
        x=Box(record.x_bounds[:, 0], record.x_bounds[:, 1]),
        y=Box(record.y_bounds[:, 0], record.y_bounds[:, 1]) if inside else Box(-np.inf, np.inf),
        constraints=stacked(record.lower_constraints),
        equalities=stacked(record.lower_equalities),
        upper_constraints=stacked((*record.upper_constraints, *bounds)),
        upper_equalities=stacked(record.upper_equalities),
    )


def _bounds_as_constraints(record: Record) -> tuple[Callable[[Any, Any], Any], ...]:
    """Bounds on y that belong to the upper level, as constraints of that."""
    sides = []
    for i, (low, high) in enumerate(record.y_bounds):
        if np.isfinite(low):
            sides.append(lambda x, y, i=i, low=low: low - y[i])
        if np.isfinite(high):
            sides.append(lambda x, y, i=i, high=high: y[i] - high)
    return tuple(sides)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Attempt(Run):
    """One solve of one problem from one start, with an independent judgement of its point."""

    rho: float
    F: float
    gap: float
    lower_violation: float
    upper_violation: float
    # How much lower F is nearby than ε explains, where the point is certified.
    fall: float
    x: list[float]
    y: list[float]

    @property
    def feasible(self) -> bool:
        """Whether the point solves its lower level and obeys all constraints, by the re-solve."""
        return self.gap <= GAP and max(self.lower_violation, self.upper_violation) <= VIOLATION


@dataclasses.dataclass(frozen=True)
class Outcome:
    """All attempts at one problem, the best of them, and how it compares.

    `refused` says why there are none: the record could not be read, or bilevax refuses the problem.
    With `y_bounds_assumed` the file does not say whose the bounds on y are, and they were taken for
    the lower level's.
    """

    name: str
    category: str
    best_known: float | None
    attempts: tuple[Attempt, ...]
    refused: str
    seconds: float
    y_bounds_assumed: bool = False

    @property
    def best(self) -> Attempt | None:
        """The feasible attempt of least F; if none is feasible, the one with the least ε."""
        feasible = [a for a in self.attempts if a.feasible]
        if feasible:
            return min(feasible, key=lambda a: a.F)
        return min(self.attempts, key=lambda a: a.epsilon or 0.0, default=None)

    @property
    def reached(self) -> bool:
        """Whether the best known F was reached, by a point that solves its lower level."""
        return self.verdict == "reached"

    @property
    def verdict(self) -> str:
        """One word for the table."""
        best, known = self.best, self.best_known
        if best is None:
            return "refused"
        if not best.feasible:
            return "FAILED"
        if known is None:
            return "unknown"
        # An F below the best known exploits a tolerance, and is no better than one above.
        if abs(best.F - known) <= WITHIN * max(1.0, abs(known)):
            return "reached"
        return "above" if known < best.F else "below"

    @property
    def false_certificates(self) -> int:
        """Certified points whose lower level, solved again exactly, says otherwise."""
        return sum(1 for a in self.attempts if a.certified and not a.feasible)

    @property
    def falls(self) -> int:
        """Certified points near which F falls, by other solvers of the lower level."""
        return sum(1 for a in self.attempts if a.certified and a.fall > 0)

    def as_dict(self) -> dict[str, Any]:
        best = self.best
        derived = {
            "best": None if best is None else dataclasses.asdict(best),
            "verdict": self.verdict,
            "reached": self.reached,
            "false_certificates": self.false_certificates,
            "falls": self.falls,
        }
        return dataclasses.asdict(self) | derived


@dataclasses.dataclass(frozen=True)
class Results:
    """The outcomes of all problems, or of those before Ctrl-C."""

    outcomes: list[Outcome]
    interrupted: bool


@dataclasses.dataclass(frozen=True)
class Settings:
    """What to run.

    Args:
        file: a suite of problems, in the JSON format that docs/benchmarks.md describes.
        tolerance: the ε to certify.
        starts: how many starts for each problem.
        max_gradients: stop a solve before more gradient evaluations than this.
        seed: the seed of the random starts.
        names: only these problems.
        all: also problems whose lower level is not convex, for which there is no theory.
        json: write all results there, also when interrupted.
    """

    file: Path
    tolerance: float = 1e-4
    starts: int = 8
    max_gradients: int = 100_000
    seed: int = 0
    names: tuple[str, ...] = ()
    all: bool = False
    json: Path | None = None

    def check(self) -> None:
        """Refuse settings that a run could not keep to."""
        positive(self.tolerance, "tolerance")
        whole(self.starts, "starts", 1)
        whole(self.max_gradients, "max_gradients", 1)
        whole(self.seed, "seed", 0)
        output.check_outputs(self.json)

    @property
    def command(self) -> str:
        """The command that runs just this."""
        options = [field.name for field in dataclasses.fields(self) if field.name != "file"]
        return output.command_line(f"suite {self.file}", self, options)


def chosen(settings: Settings) -> list[Record | Refusal]:
    """The records to run: by name, or those with a convex lower level, or all; and bad ones."""
    suite = load(settings.file)
    entries: list[Record | Refusal] = [*suite.records, *suite.refused]
    unknown = set(settings.names) - {entry.name for entry in entries}
    if unknown:
        raise ValueError(f"names: {settings.file} has no problem {', '.join(sorted(unknown))}")
    if settings.names:
        return [entry for entry in entries if entry.name in settings.names]
    wanted = [r for r in suite.records if settings.all or (r.convex and not r.infeasible)]
    return [*wanted, *suite.refused]


def judged(record: Record, solution: Solution, fields: dict[str, Any]) -> Attempt:
    """A solution judged by solving the lower level again at its x, without bilevax."""
    x, y = np.asarray(solution.point.x), np.asarray(solution.point.y)
    relax = RELAX + 1.001 * min(lower_violation(record, x, y), VIOLATION)
    again = lower_gap(record, x, y, relax=relax)
    F, fall = float(solution.certificate.objective), 0.0
    if solution.certified:
        fall = fall_nearby(record, x, y, F, solution.tolerance)
    return Attempt(
        **fields,
        rho=float(solution.point.rho),
        F=F,
        fall=fall,
        gap=again.gap,
        lower_violation=again.lower_violation,
        upper_violation=again.upper_violation,
        x=x.tolist(),
        y=y.tolist(),
    )


def run(record: Record | Refusal, settings: Settings) -> Outcome:
    """One problem from several starts. That bilevax refuses it is an outcome, not an error."""
    if isinstance(record, Refusal):
        return Outcome(record.name, "", None, (), f"cannot be read: {record.reason}", 0.0)
    begun = time.perf_counter()
    problem = problem_of(record)
    attempts, refused = [], ""
    starts = starting_points(record, settings.starts, settings.seed)
    for number, (x, y) in enumerate(starts):
        solver = Engines()
        if number % 2 == 1:  # from the lower level's own answer, which a large penalty stays near
            y, solver = lower_solution(record, x, y).y, Engines(rho=STEEP)
        fields, solution = attempt(
            problem,
            Point(x=jnp.asarray(x, float), y=jnp.asarray(y, float)),
            tolerance=settings.tolerance,
            solver=solver,
            max_gradients=settings.max_gradients,
        )
        if solution is None:
            refused = fields["sentence"]
        else:
            attempts.append(judged(record, solution, fields))
    refused = "" if attempts else refused or "no start with a feasible lower level was found"
    return Outcome(
        record.name,
        record.category,
        record.best_known,
        tuple(attempts),
        refused,
        time.perf_counter() - begun,
        record.y_bounds_assumed,
    )


def experiment(settings: Settings, progress: bool | None = None) -> Results:
    """Run all problems; write the JSON file. Ctrl-C keeps the results so far."""
    settings.check()
    outcomes: list[Outcome] = []

    def job(record: Record | Refusal) -> None:
        outcomes.append(run(record, settings))
        # No program serves another problem. Each maps memory, and the 65,530 maps that Linux allows
        # a process last for some forty problems.
        jax.clear_caches()

    def save(_: bool) -> None:
        if settings.json is not None and outcomes:
            write(settings.json, outcomes, settings)

    jobs = [(record.name, functools.partial(job, record)) for record in chosen(settings)]
    return Results(outcomes, output.run_jobs(jobs, "suite", progress, save))


def table(outcomes: list[Outcome]) -> str:
    """One line a problem, and a count below."""
    rows = [["problem", "", "status", "ε", "F", "best known", "gap", "gradients"]]
    refused = []
    for o in outcomes:
        best = o.best
        if best is None:
            refused.append(f"Refused: {o.name}: {o.refused}")
            continue
        rows.append(
            [
                *(o.name, o.verdict, best.status),
                output.number(best.epsilon, ".1e"),
                f"{best.F:.6g}",
                "unknown" if o.best_known is None else f"{o.best_known:.6g}",
                "infeasible" if math.isinf(best.gap) else f"{best.gap:.1e}",
                output.number(best.gradients, ",d"),
            ]
        )
    reached = sum(o.reached for o in outcomes)
    false, falls = (sum(getattr(o, n) for o in outcomes) for n in ("false_certificates", "falls"))
    assumed = [o.name for o in outcomes if o.y_bounds_assumed]
    unsaid = (
        f"Bounds on y taken for the lower level's, as the file says nothing: {', '.join(assumed)}"
    )
    lines = [
        output.aligned(rows, left=(0, 1, 2)),
        *refused,
        *([unsaid] if assumed else []),
        f"{reached} of {len(outcomes)} reach the best known F within {WITHIN:g} relative, with a "
        f"lower-level gap of at most {GAP:g}; {false} false certificates; {falls} certified points "
        "near which F falls.",
        "«above»: the lower level is solved, F is above the best known: an honest KKT point where "
        "certified. «below»: F exploits the tolerance. «FAILED»: no point whose lower-level gap, "
        "after an exact re-solve, and violations are small.",
    ]
    return "\n".join(lines)


def write(path: Path, outcomes: list[Outcome], settings: Settings) -> None:
    """Write the outcomes with the command that made them."""
    content = {"outcomes": [outcome.as_dict() for outcome in outcomes]}
    output.write_results(path, settings.command, content)
