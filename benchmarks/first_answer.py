"""How long a new process takes from its imports to its first answer.

    python benchmarks/first_answer.py --other /path/to/python \
        --json benchmarks/results/first_answer.json

Cases: README's ten lines, and a small problem with constraints at tolerance 0.01, each in a new
process without a cache (cold) and, for this version, in a second process with the cache of compiled
programs that a first one has written (cached). For each case:

- `cpu_seconds` of all threads and `wall_seconds`, after the imports, until the answer is printed;
- `programs` that XLA compiled or took from the cache;
- `traces` of the user's functions: the most that any one of them was traced;
- the status and ε.

`import` is the CPU time of `import bilevax` after `import jax, equinox`. The versions take turns.
`--check` ends with 1 if a goal is missed.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import json
import statistics
import tempfile
import time
from collections import Counter
from pathlib import Path
from types import FunctionType
from typing import Any

import versions

CASES = ("readme", "constrained")
MEASURES = ("cpu_seconds", "wall_seconds", "programs", "traces")
# The most that this version may take, by case, whether it is cached, and measure.
GOALS = {
    ("readme", "cold", "cpu_seconds"): 3.0,
    ("readme", "cold", "programs"): 10,
    ("readme", "cold", "traces"): 6,
    ("readme", "cached", "cpu_seconds"): 1.5,
    ("constrained", "cold", "cpu_seconds"): 5.0,
    ("constrained", "cold", "programs"): 16,
    ("constrained", "cold", "traces"): 6,
    ("constrained", "cached", "cpu_seconds"): 1.5,
    ("import", "cold", "cpu_seconds"): 0.5,
}


def readme() -> str:
    """The first block of Python in README.md."""
    text = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    return text.split("```python\n", 1)[1].split("```", 1)[0]


# A seller sets two prices; a buyer answers with the quantities that are best for him, under a limit
# for each good and one for both together.
CONSTRAINED = """
import jax
import jax.numpy as jnp
import bilevax as bx

jax.config.update("jax_enable_x64", True)
wanted = jnp.asarray([2.0, 1.5])
problem = bx.ConstrainedBilevelProblem(
    upper=lambda x, y: 0.1 * jnp.sum(y**2) - jnp.sum(x * y),
    lower=lambda x, y: 0.5 * jnp.sum(y**2) - jnp.sum((wanted - x) * y),
    constraints=lambda x, y: jnp.stack([y[0] - 0.8, y[1] - 0.8, y[0] + y[1] - 1.0]),
    x=bx.terms.Box(0.0, 2.0),
    y=bx.terms.Box(0.0, 2.0),
)
start = bx.Point(x=jnp.ones(2), y=jnp.full(2, 0.25))
solution = bx.solve(problem, start, tolerance=1e-2)
print(solution.status, solution.certificate, solution.point, sep="\\n")
"""


def answer(case: str) -> dict[str, Any]:
    """Run the code of a case in this process."""
    importlib.import_module("equinox")
    import jax
    from jax.core import Tracer

    import bilevax as bx

    traces: Counter[str] = Counter()

    def counted(function: FunctionType, name: str) -> Any:
        def called(*arguments: Any) -> Any:
            leaves = jax.tree.leaves(arguments)
            traces[name] += any(isinstance(leaf, Tracer) for leaf in leaves)
            return function(*arguments)

        return called

    def counting(form: Any) -> Any:
        """The form of problem, whose functions count how often they are traced."""

        def stated(**parts: Any) -> Any:
            functions = {n: counted(f, n) for n, f in parts.items() if type(f) is FunctionType}
            return form(**parts | functions)

        return stated

    bx.BilevelProblem = counting(bx.BilevelProblem)
    bx.ConstrainedBilevelProblem = counting(bx.ConstrainedBilevelProblem)
    programs: list[float] = []

    def listen(event: str, duration_secs: float, **_: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            programs.append(duration_secs)

    jax.monitoring.register_event_duration_secs_listener(listen)
    code = compile(readme() if case == "readme" else CONSTRAINED, case, "exec")
    names: dict[str, Any] = {}
    cpu, wall = time.process_time(), time.perf_counter()
    with contextlib.redirect_stdout(io.StringIO()):
        exec(code, names)
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    solution = names["solution"]
    return {
        "cpu_seconds": cpu,
        "wall_seconds": wall,
        "programs": len(programs),
        "compile_seconds": sum(programs),
        "traces": max(traces.values()),
        "traces_by_function": dict(traces),
        "status": solution.status.code,
        "epsilon": float(solution.certificate.epsilon),
        "gradients": int(solution.gradients),
        "bilevax": bx.__file__,
    }


def imported() -> dict[str, Any]:
    """What `import bilevax` takes in this process."""
    for name in ("jax", "equinox"):
        importlib.import_module(name)
    cpu, wall = time.process_time(), time.perf_counter()
    bilevax = importlib.import_module("bilevax")
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    return {"cpu_seconds": cpu, "wall_seconds": wall, "bilevax": bilevax.__file__}


def cache_variables(folder: str, by: str) -> dict[str, str]:
    if by == "bilevax":
        return {"BILEVAX_CACHE": folder}
    return {
        "JAX_COMPILATION_CACHE_DIR": folder,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }


def measure(place: str | None, repeats: int, cache_by: str) -> list[dict[str, Any]]:
    """One row for each version, case and cache, with all its runs."""
    runs: dict[tuple[str, str, str], list[dict[str, Any]]] = {}

    def run(version: versions.Version, case: str, cache: str, **variables: str) -> None:
        found = version.run(__file__, "--child", case, **variables)
        runs.setdefault((version.name, case, cache), []).extend(found)

    with tempfile.TemporaryDirectory() as folder:
        for turn in range(repeats):
            for case in (*CASES, "import"):
                for version in versions.versions(place):
                    run(version, case, "cold")
            for case in CASES:
                variables = cache_variables(folder, cache_by)
                if turn == 0:  # the process that writes the cache
                    versions.this().run(__file__, "--child", case, **variables)
                run(versions.this(), case, "cached", **variables)
    return [
        {"version": version, "case": case, "cache": cache, **summary(own), "runs": own}
        for (version, case, cache), own in runs.items()
    ]


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The median and the least of each measure."""
    found = {}
    for name in MEASURES:
        if values := [run[name] for run in runs if name in run]:
            found[name] = statistics.median(values)
            found[f"least_{name}"] = min(values)
    return found


def table(rows: list[dict[str, Any]]) -> str:
    """This version beside the other, with the ratio of the two."""
    from bilevax.bench.output import aligned

    by_key = {(row["version"], row["case"], row["cache"]): row for row in rows}
    lines = [["case", "cache", "measure", "this", "least", "other", "least", "this/other"]]
    for (version, case, cache), row in by_key.items():
        if version != "this":
            continue
        beside = by_key.get(("other", case, cache), {})
        for name in MEASURES:
            form = ".2f" if name.endswith("seconds") else ".0f"
            cells = [
                format(of[key], form) if key in of else "-"
                for of in (row, beside)
                for key in (name, f"least_{name}")
            ]
            ratio = f"{row[name] / beside[name]:.2f}" if beside.get(name) else "-"
            if name in row:
                lines.append([case, cache, name, *cells, ratio])
        if case != "import":
            of_each = [_answer(row), "", _answer(beside), "", ""]
            lines.append([case, cache, "answer", *of_each])
    return aligned(lines, left=(0, 1, 2))


def _answer(row: dict[str, Any]) -> str:
    """The status and ε of the last run of a row."""
    return f"{row['runs'][-1]['status']}, {row['runs'][-1]['epsilon']:.1e}" if row else "-"


def missed(rows: list[dict[str, Any]]) -> list[str]:
    """Print each goal and whether this version reaches it; those that it does not reach."""
    failures = []
    for row in rows:
        case = f"{row['case']}, {row['cache']}"
        if row["version"] != "this":
            continue
        if any(run.get("status", "certified") != "certified" for run in row["runs"]):
            failures.append(f"{case}: not certified")
        for name in MEASURES:
            goal = GOALS.get((row["case"], row["cache"], name))
            if goal is None:
                continue
            reached = row[name] <= goal
            said = f"{case}: {name} {row[name]:.3g}, goal at most {goal:g}"
            print(("reached  " if reached else "MISSED   ") + said)
            failures += [] if reached else [said]
    return failures


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    versions.add_other(parser)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--cache-by",
        choices=("bilevax", "jax"),
        default="bilevax",
        help="turn the cache on by bilevax's own variable, or by those of JAX",
    )
    parser.add_argument("--check", action="store_true", help="end with 1 if a goal is missed")
    parser.add_argument("--json", type=Path, help="write the results there")
    parser.add_argument("--child", choices=(*CASES, "import"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(imported() if args.child == "import" else answer(args.child)))
        return 0
    rows = measure(args.other, args.repeats, args.cache_by)
    print(table(rows))
    failures = missed(rows)
    if args.json:
        versions.write(args.json, {"results": rows, "missed": failures})
    return 1 if args.check and failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
