"""Published bilevel problems with best-known values, solved from several starts and judged."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bilevax.arguments import positive, whole
from bilevax.bench.output import Bar, check_output, write_json
from bilevax.bench.records import Record, load
from bilevax.bench.resolve import lower_gap, lower_violation, resolve
from bilevax.bench.starts import starts
from bilevax.problems import ConstrainedBilevelProblem, Point
from bilevax.driver.solution import Solution
from bilevax.driver.entry import solve
from bilevax.solvers import Adaptive
from bilevax.terms import Box

# A lower level that is infeasible at x by as little as the point violates it is solved with its
# constraints relaxed by that much, and this: y is then compared with what violates no more.
RELAX = 1e-6
# F is reached within this relative distance, with a lower-level gap and violations up to these.
WITHIN, GAP, VIOLATION = 1e-2, 1e-4, 1e-3
# Every other start begins with this penalty: it stays near its start, where the default looks far.
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

    def stacked(expressions: tuple[Any, ...]) -> Any:
        return Stacked(expressions) if expressions else None

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


@dataclasses.dataclass(frozen=True)
class Attempt:
    """One solve of one problem from one start, with an independent judgement of its point."""

    status: str
    sentence: str
    epsilon: float
    rho: float
    F: float
    gap: float
    lower_violation: float
    upper_violation: float
    gradients: int
    seconds: float
    x: list[float]
    y: list[float]

    @property
    def feasible(self) -> bool:
        """Whether the point solves its lower level and obeys all constraints, by the re-solve."""
        return self.gap <= GAP and max(self.lower_violation, self.upper_violation) <= VIOLATION


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of one problem: all attempts, the best of them, and how it compares."""

    name: str
    category: str
    best_known: float | None
    attempts: tuple[Attempt, ...]
    refused: str
    seconds: float

    @property
    def best(self) -> Attempt | None:
        """The feasible attempt of least F; if none is feasible, the one with the least ε."""
        feasible = [a for a in self.attempts if a.feasible]
        if feasible:
            return min(feasible, key=lambda a: a.F)
        return min(self.attempts, key=lambda a: a.epsilon, default=None)

    @property
    def reached(self) -> bool:
        """Whether the best known F was reached, by a point that solves its lower level."""
        if self.best is None or self.best_known is None or not self.best.feasible:
            return False
        # Below the best known is as far off as above: a tolerance exploited.
        return abs(self.best.F - self.best_known) <= WITHIN * max(1.0, abs(self.best_known))

    @property
    def verdict(self) -> str:
        """One word for the table."""
        if self.best is None:
            return "refused"
        if not self.best.feasible:
            return "FAILED"
        if self.best_known is None:
            return "unknown"
        if self.reached:
            return "reached"
        return "above" if self.best_known < self.best.F else "below"

    @property
    def false_certificates(self) -> int:
        """Certified points whose lower level, solved again exactly, says otherwise."""
        certified = [a for a in self.attempts if a.status == "certified"]
        return sum(1 for a in certified if not a.feasible)

    def as_dict(self) -> dict[str, Any]:
        best = self.best
        derived = {
            "best": None if best is None else dataclasses.asdict(best),
            "verdict": self.verdict,
            "reached": self.reached,
            "false_certificates": self.false_certificates,
        }
        return dataclasses.asdict(self) | derived


@dataclasses.dataclass(frozen=True)
class Settings:
    """What to run."""

    file: Path
    tolerance: float = 1e-4
    starts: int = 8
    max_gradients: int = 100_000
    seed: int = 0
    names: tuple[str, ...] = ()
    all: bool = False
    json: Path | None = None

    def __post_init__(self):
        positive(self.tolerance, "tolerance")
        whole(self.starts, "starts", 1)
        whole(self.max_gradients, "max_gradients", 1)
        whole(self.seed, "seed", 0)
        if self.json is not None:
            check_output(self.json, "json")

    @property
    def command(self) -> str:
        parts = [f"bilevax bench suite {self.file.name} --tolerance {self.tolerance:g}"]
        parts.append(f"--starts {self.starts} --max-gradients {self.max_gradients}")
        parts.append(f"--seed {self.seed}")
        parts += [f"--names {' '.join(self.names)}"] if self.names else []
        return " ".join(parts + (["--all"] if self.all else []))


def chosen(settings: Settings) -> list[Record]:
    """The records to run: by name, or those with a convex lower level, or all."""
    records = load(settings.file)
    unknown = set(settings.names) - {r.name for r in records}
    if unknown:
        raise ValueError(f"names: {settings.file} has no problem {', '.join(sorted(unknown))}")
    if settings.names:
        return [r for r in records if r.name in settings.names]
    return [r for r in records if settings.all or (r.convex and not r.infeasible)]


def attempt(record: Record, solution: Solution) -> Attempt:
    """Judge a solution by solving the lower level again at its x, without bilevax."""
    x, y = np.asarray(solution.point.x), np.asarray(solution.point.y)
    relax = RELAX + 1.001 * min(lower_violation(record, x, y), VIOLATION)
    judged = lower_gap(record, x, y, relax=relax)
    return Attempt(
        status=solution.status.code,
        sentence=str(solution.status),
        epsilon=solution.certificate.epsilon,
        rho=float(solution.point.rho),
        F=solution.certificate.objective,
        gap=judged.gap,
        lower_violation=judged.lower_violation,
        upper_violation=judged.upper_violation,
        gradients=solution.gradients,
        seconds=solution.seconds,
        x=x.tolist(),
        y=y.tolist(),
    )


def run(record: Record, settings: Settings) -> Outcome:
    """One problem from several starts. A refusal of bilevax is an outcome, not an error."""
    begun = time.perf_counter()
    attempts, refused = [], ""
    problem = problem_of(record)
    for number, (x, y) in enumerate(starts(record, settings.starts, settings.seed)):
        steep = number % 2 == 1
        if steep:  # from the lower level's own answer, which a large penalty stays near
            y = resolve(record, x, y).y
        solver = Adaptive(rho=STEEP) if steep else Adaptive()
        try:
            solution = solve(
                problem,
                Point(x=jnp.asarray(x, float), y=jnp.asarray(y, float)),
                tolerance=settings.tolerance,
                solver=solver,
                max_gradients=settings.max_gradients,
                progress=False,
            )
        except ValueError as error:
            refused = str(error)
            continue
        if solution.status == "interrupted":  # `solve` keeps Ctrl-C to itself
            raise KeyboardInterrupt
        attempts.append(attempt(record, solution))
    refused = "" if attempts else refused or "no start with a feasible lower level was found"
    seconds = time.perf_counter() - begun
    known = record.best_known
    return Outcome(record.name, record.category, known, tuple(attempts), refused, seconds)


def experiment(settings: Settings, progress: bool | None = None) -> tuple[list[Outcome], bool]:
    """All outcomes, and whether Ctrl-C cut them short; writes the JSON file in either case."""
    records = chosen(settings)
    outcomes: list[Outcome] = []
    interrupted = True
    try:
        with Bar(progress, len(records), "suite") as bar:
            for record in records:
                bar.at(record.name)
                outcomes.append(run(record, settings))
                bar.step()
                # No program serves another problem. Each maps memory, and Linux allows a process
                # 65,530 maps: some forty problems.
                jax.clear_caches()
        interrupted = False
    except KeyboardInterrupt:
        pass
    finally:
        if settings.json is not None and outcomes:
            write(settings.json, outcomes, settings)
    return outcomes, interrupted


def table(outcomes: list[Outcome]) -> str:
    """One line a problem, and a count below."""
    head = f"{'problem':<16} {'':<8} {'status':<13} {'ε':>8} {'F':>12} {'best known':>12} "
    lines = [head + f"{'gap':>9} {'gradients':>10}", "─" * (len(head) + 20)]
    for o in outcomes:
        known = "unknown" if o.best_known is None else f"{o.best_known:.6g}"
        best = o.best
        if best is None:
            lines.append(f"{o.name:<16} refused: {o.refused}")
            continue
        mark = o.verdict
        gap = "infeasible" if math.isinf(best.gap) else f"{best.gap:.1e}"
        lines.append(
            f"{o.name:<16} {mark:<8} {best.status:<13} {best.epsilon:>8.1e} {best.F:>12.6g} "
            f"{known:>12} {gap:>9} {best.gradients:>10,}"
        )
    reached = sum(o.reached for o in outcomes)
    false = sum(o.false_certificates for o in outcomes)
    lines.append(
        f"{reached} of {len(outcomes)} reach the best known F within {WITHIN:g} relative, with a "
        f"lower-level gap of at most {GAP:g}; {false} false certificates."
    )
    lines.append(
        "«above»: the lower level is solved, F is above the best known: an honest KKT point where "
        "certified. «below»: F exploits the tolerance. «FAILED»: no point whose lower-level gap, "
        "after an exact re-solve, and violations are small."
    )
    return "\n".join(lines)


def write(path: Path, outcomes: list[Outcome], settings: Settings) -> None:
    """The outcomes with the command that made them."""
    write_json(path, settings.command, {"outcomes": [o.as_dict() for o in outcomes]})
