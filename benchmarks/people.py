"""The problems that people bring: bilevax as it comes, beside what they would use instead.

    python benchmarks/people.py --tolerance 1e-6 --max-seconds 60 --other ../bilevax-0.1.0 \
        --json benchmarks/results/people.json --plot benchmarks/results/people.png

Each problem is solved from each of its starts, by the other version from the first one only, with
default settings but for the tolerance, in a process of its own for each version. Then the lower
level is solved again at the x found, without bilevax, which gives the `repaired` upper objective;
only this is compared with the `reference`, the least that was found without bilevax. IPOPT on the
lower level's conditions and L-BFGS on the value (`nested`) run where they apply and are repaired
likewise. What fails stays in the table.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import signal
import time
from pathlib import Path
from typing import Any

import people_table
import versions

# Seconds of the local search that follows a certified answer.
POLISHING = 5.0
# A run of fewer seconds is repeated.
AGAIN = 5.0


def finite(value: Any) -> float | None:
    """A number for JSON, which knows no infinity."""
    return float(value) if value is not None and math.isfinite(value) else None


def said(error: BaseException) -> str:
    """The first line of what an error says, without the folders of this machine."""
    line = f"{type(error).__name__}: {error}".splitlines()[0]
    return re.sub(r"(/[\w.+-]+)+/", "", line)[:200]


def solved(person: Any, start: Any, tolerance: float, seconds: float) -> dict[str, Any]:
    """One run of bilevax."""
    import numpy as np

    import bilevax as bx
    import people_search

    begun = time.perf_counter()
    solve = lambda: bx.solve(
        person.problem, start, tolerance=tolerance, max_seconds=seconds, progress=False
    )
    solution = solve()
    wall = time.perf_counter() - begun
    # Once more where that is soon done: now everything is compiled.
    again = solve() if solution.seconds < AGAIN else solution
    point = solution.point
    block, term = (point.x, "x") if point.x is not None else (point.x1, "x1")
    x, shape = np.ravel(block), np.shape(block)
    project = getattr(person.problem, term).project
    inside = lambda place: np.ravel(project(np.reshape(place, shape)))
    local = None
    if solution.status == "certified" and hasattr(solution, "linear_solves"):
        local = finite(people_search.polished(person.repaired, x, inside, POLISHING))
    return {
        "status": solution.status.code,
        "epsilon": finite(solution.certificate.epsilon),
        "rho": finite(point.rho),
        "linear_solves": getattr(solution, "linear_solves", None),
        "gradients": solution.gradients,
        "seconds": again.seconds,
        "first_seconds": solution.seconds,
        "compile_seconds": solution.compile_seconds,
        "wall_seconds": wall,
        "objective": finite(solution.certificate.objective),
        "repaired": finite(person.repaired(x)),
        "polished": local,
        "x": [float(entry) for entry in x] if len(x) <= 10 else None,
    }


def answered(person: Any, method: str) -> dict[str, Any]:
    """One run of another method."""
    found = getattr(person, method)()
    return {
        "status": "solved" if found.success else "failed",
        "iterations": found.iterations,
        "seconds": found.seconds,
        "objective": finite(found.F),
        "repaired": finite(person.repaired(found.x)),
    }


def child(kind: str, name: str, tolerance: float, seconds: float) -> None:
    """Print a line of JSON for each run: those of bilevax, or the reference and other methods."""
    import jax

    jax.config.update("jax_enable_x64", True)
    import people_problems

    try:
        person = people_problems.PEOPLE[name]()
    except Exception as error:  # its data may be missing
        print(json.dumps({"status": "raised", "message": said(error)}), flush=True)
        return

    def attempt(row: dict[str, Any], run: Any) -> None:
        try:
            row |= run()
        except Exception as error:  # a failure is a result
            row |= {"status": "raised", "message": said(error)}
        print(json.dumps(row), flush=True)

    # A run that hangs, in compilation say, ends with its process.
    limit = lambda: signal.alarm(int(3 * seconds + 300))
    limit()
    if kind in ("solve", "solve once"):
        for number, start in enumerate(person.starts[: 1 if kind == "solve once" else None]):
            limit()
            attempt(
                {"start": number}, lambda start=start: solved(person, start, tolerance, seconds)
            )
        return
    about = {"number": person.number, "published": person.published}
    attempt(about, lambda: {"reference": finite(person.reference())})
    for method in ("nested", "ipopt"):
        if getattr(person, method) is not None:
            limit()
            attempt({"method": method}, lambda method=method: answered(person, method))


def measured(version: versions.Version, kind: str, name: str, *limits: str) -> list[dict[str, Any]]:
    """What a child prints; what it has printed is lost if it ends early."""
    try:
        return version.run(__file__, "--child", kind, name, *limits)
    except RuntimeError as error:
        code = str(error).rsplit(" ", 1)[-1]
        return [{"status": "ended early", "message": f"the process ended with {code}"}]


def measure(
    names: list[str], place: str | None, tolerance: float, seconds: float, other_seconds: float
) -> list[dict[str, Any]]:
    rows = []
    for name in names:
        about, *others = measured(versions.this(), "others", name, str(tolerance), str(seconds))
        shared = {key: about.get(key) for key in ("number", "reference", "published")}
        if "message" in about:
            shared["reference_message"] = about["message"]
        found = []
        for version in versions.versions(place):
            mine = version.name == "this"
            method, kind = ("bilevax", "solve") if mine else ("bilevax, other", "solve once")
            limit = seconds if mine else other_seconds
            runs = measured(version, kind, name, str(tolerance), str(limit))
            found += [{"method": method} | row for row in runs]
        for row in found + others:
            off = people_table.off(row.get("repaired"), shared["reference"])
            above = people_table.off(row.get("repaired"), row.get("polished"))
            rows.append({"name": name} | shared | row | {"off": off, "above_local": above})
    return rows


def kept(rows: list[dict[str, Any]], names: list[str]) -> set[str]:
    """The problems whose rows are of an earlier run."""
    return {row["name"] for row in rows} - set(names)


def main() -> None:
    import people_problems

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tolerance", type=float, default=1e-6)
    parser.add_argument("--max-seconds", type=float, default=60.0, help="of each run of bilevax")
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=list(people_problems.PEOPLE))
    versions.add_other(parser)
    parser.add_argument("--other-seconds", type=float, default=20.0, help="of the other version's")
    parser.add_argument("--json", type=Path, help="write the results there")
    parser.add_argument(
        "--keep", action="store_true", help="what the file has of what is not measured"
    )
    parser.add_argument("--plot", type=Path, help="draw the performance profile there")
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        kind, name, tolerance, seconds = args.child
        child(kind, name, float(tolerance), float(seconds))
        return
    names = args.only or list(people_problems.PEOPLE)
    rows = measure(names, args.other, args.tolerance, args.max_seconds, args.other_seconds)
    print(people_table.text(rows))
    if args.keep:
        measured = {(row["name"], row["method"]) for row in rows}
        before = json.loads(args.json.read_text())["results"]
        before = [row for row in before if (row["name"], row["method"]) not in measured]
        order = list(people_problems.PEOPLE)
        rows = sorted([*rows, *before], key=lambda row: order.index(row["name"]))
    if args.json:
        versions.write(args.json, {"results": rows, "earlier": sorted(kept(rows, names))})
    if args.plot:
        people_table.profile(rows, args.plot)


if __name__ == "__main__":
    main()
