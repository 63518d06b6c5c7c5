"""Whether a problem takes the same path in two versions: the same gradients to the same answer.

    python benchmarks/same_path.py --other /path/to/python --json benchmarks/results/same_path.json

or, where one version shall run only once:

    /path/to/python benchmarks/same_path.py --save before.json
    python benchmarks/same_path.py --load before.json --json benchmarks/results/same_path.json

All is solved with default settings through the public interface, each version in processes of its
own. Every limit is one of gradients, so that the speed of the machine makes no difference. Parts:

- `linear`: the 25 problems of `bilevax bench linear`, by Adaptive;
- `library`: the nine problems of the library, by Adaptive;
- `penalty`: the same by the paper's method, at a larger tolerance;
- `suite`: published problems, by `bilevax bench suite`, where their file is there.

PASS means that the median ratio of the counts of gradients, over the solves that both versions
certify, is within 5 % of one, and that this version certifies all that the other one does.

First-order steps may end by linear systems. Their price in gradients is measured for each size of
`linear`: the seconds of a system over those of a gradient in a compiled loop.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import versions

PARTS = ("linear", "library", "penalty", "suite")
SUITE = Path(__file__).parents[2] / "shared" / "data" / "basblib.json"
LINEAR_TOLERANCES = (1e-2, 1e-4, 1e-6)
LIBRARY_TOLERANCES = (1e-2, 1e-4)
PENALTY_TOLERANCE = 0.1
SUITE_TOLERANCE = 1e-4
# The most gradients of a solve of each part.
LIMITS = {"linear": 300_000, "library": 300_000, "penalty": 300_000, "suite": 30_000}
# How many entries of an answer are kept, and how far the median ratio may be from one.
ENTRIES, WITHIN = 8, 0.05
# So many gradients are timed together.
LOOP = 500


@dataclasses.dataclass(frozen=True)
class Selection:
    """What to solve; `names` are of problems of library and suite, and empty means all."""

    parts: list[str]
    sizes: list[int]
    seeds: int
    starts: int
    names: list[str]
    suite: str


def solves(selection: Selection) -> Iterator[dict[str, Any]]:
    """Solve everything in this process, with the version that it imports."""
    import jax

    jax.config.update("jax_enable_x64", True)
    parts = {"linear": linear, "library": library, "penalty": penalty, "suite": suite}
    for part in selection.parts:
        for key, fields in parts[part](selection):
            yield {"key": f"{part} {key}"} | fields


def linear(selection: Selection) -> Iterator[tuple[str, dict[str, Any]]]:
    import jax

    from bilevax.problems.library import bilevel_linear

    for n in selection.sizes:
        for seed in range(selection.seeds):
            instance = bilevel_linear(n, n, max(1, n // 20), seed)
            for tolerance in LINEAR_TOLERANCES:
                yield f"n={n} seed={seed} ε={tolerance:g}", solved(instance, tolerance, "linear")
        yield f"n={n} price", {"status": "price", "system_gradients": price(n)}
        jax.clear_caches()


def price(n: int) -> float | None:
    """What a linear system costs in gradients; None in a version without such."""
    import jax
    from jax import lax

    import bilevax as bx
    from bilevax.problems.library import bilevel_linear

    try:
        from bilevax.solvers import adaptive, endgame
    except ImportError:
        return None
    instance = bilevel_linear(n, n, max(1, n // 20), 0)
    found = bx.solve(instance.problem, instance.start, tolerance=1e-6, progress=False)
    state, problem = found.state.solver_state, instance.problem
    problem, state = state.reformulation.problem(problem), state.inner
    size = endgame.size_for(int(adaptive._with_free_entries(problem, state).free))

    @jax.jit
    def gradients(w: Any) -> Any:
        operator = adaptive._penalised(problem, state).operator
        return lax.fori_loop(0, LOOP, lambda _, w: w - 1e-9 * operator(w), w)

    end = lambda: adaptive._end(problem, state, size, np.asarray(1))
    systems = int(end().linear_solves) - int(state.linear_solves)
    of_systems = least_seconds(end) / systems
    return of_systems / (least_seconds(lambda: gradients(state.center)) / LOOP)


def least_seconds(call: Any) -> float:
    """Of five calls, after one that compiles."""
    import jax

    jax.block_until_ready(call())
    found = []
    for _ in range(5):
        begun = time.perf_counter()
        jax.block_until_ready(call())
        found.append(time.perf_counter() - begun)
    return min(found)


def library(selection: Selection) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, instance in instances(selection):
        for tolerance in LIBRARY_TOLERANCES:
            yield f"{name} ε={tolerance:g}", solved(instance, tolerance, "library")


def penalty(selection: Selection) -> Iterator[tuple[str, dict[str, Any]]]:
    import bilevax as bx

    for name, instance in instances(selection):
        fields = solved(instance, PENALTY_TOLERANCE, "penalty", solver=bx.PenaltyMethod())
        yield f"{name} ε={PENALTY_TOLERANCE:g}", fields


def instances(selection: Selection) -> Iterator[tuple[str, Any]]:
    """The problems of the library, after each of which its programs are dropped."""
    import jax

    from bilevax.problems.library import INSTANCES

    for name, make in INSTANCES.items():
        if not selection.names or name in selection.names:
            yield name, make()
            jax.clear_caches()


def solved(instance: Any, tolerance: float, part: str, **options: Any) -> dict[str, Any]:
    """One solve of an instance, and what is compared of it."""
    import jax

    import bilevax as bx

    limit = LIMITS[part]
    try:
        found = bx.solve(
            instance.problem,
            instance.start,
            tolerance=tolerance,
            max_gradients=limit,
            progress=False,
            **options,
        )
    except ValueError as error:
        return {"status": "refused", "sentence": str(error)}
    blocks = [getattr(found.point, name, None) for name in ("x", "x1", "y", "y1")]
    answer = np.concatenate([np.ravel(np.asarray(leaf)) for leaf in jax.tree.leaves(blocks)])
    return {
        "status": found.status.code,
        "epsilon": float(found.certificate.epsilon),
        "gradients": int(found.gradients),
        "linear_solves": int(getattr(found, "linear_solves", 0)),
        "objective": float(found.certificate.objective),
        "answer": answer[:ENTRIES].tolist(),
    }


def suite(selection: Selection) -> Iterator[tuple[str, dict[str, Any]]]:
    """The published problems by the command, one call for each."""
    from bilevax.cli import main as command

    records = json.loads(Path(selection.suite).read_text())
    convex = [
        record["name"]
        for record in records
        if record["lower_level_convex"] and not record["best_known"].get("infeasible", False)
    ]
    for name in convex:
        if selection.names and name not in selection.names:
            continue
        with tempfile.TemporaryDirectory() as folder:
            words = f"--tolerance {SUITE_TOLERANCE} --starts {selection.starts} --names {name}"
            words += f" --max-gradients {LIMITS['suite']} --json {folder}/out.json"
            with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
                command(["bench", "suite", selection.suite, *words.split()])
            (outcome,) = json.loads(Path(folder, "out.json").read_text())["outcomes"]
        # Each start has its row, so that a certificate that became a refusal is not overlooked.
        for number in range(len(outcome["attempts"]), selection.starts):
            refused = {"status": "refused", "sentence": outcome["refused"]}
            yield f"{name} start={number}", refused
        for number, attempt in enumerate(outcome["attempts"]):
            fields = {name: attempt[name] for name in ("status", "epsilon", "gradients")}
            answer = [*attempt["x"], *attempt["y"]][:ENTRIES]
            yield f"{name} start={number}", fields | {"objective": attempt["F"], "answer": answer}


def compared(these: list[dict], others: list[dict]) -> dict[str, Any]:
    """What differs between two versions, over the solves that both have."""
    pairs = paired(these, others)
    certified = [[side["status"] == "certified" for side in pair] for pair in pairs.values()]
    keys = list(pairs)
    return {
        "solves": len(pairs),
        "of_one_version_only": len(these) + len(others) - 2 * len(pairs),
        "certified_by_both": sum(all(pair) for pair in certified),
        "ratios": {
            part: quartiles([pair for key, pair in pairs.items() if key.startswith(start)])
            for part, start in (("all", ""), *((part, part) for part in PARTS))
        },
        "answers": distances(pairs),
        "lost": [key for key, (own, other) in zip(keys, certified) if other and not own],
        "gained": [key for key, (own, other) in zip(keys, certified) if own and not other],
        "statuses": {
            key: [side["status"] for side in pair]
            for key, pair in pairs.items()
            if pair[0]["status"] != pair[1]["status"]
        },
    }


def paired(these: list[dict], others: list[dict]) -> dict[str, tuple[dict, dict]]:
    by_key = {row["key"]: row for row in others if row["status"] != "price"}
    return {row["key"]: (row, by_key[row["key"]]) for row in these if row["key"] in by_key}


def quartiles(pairs: list[tuple[dict, dict]]) -> dict[str, Any] | None:
    """Of the ratios of gradients, where both versions certified; None where there are none."""
    found = [
        max(own["gradients"], 1) / max(other["gradients"], 1)
        for own, other in pairs
        if own["status"] == other["status"] == "certified"
    ]
    if not found:
        return None
    names = ("least", "quarter", "median", "three_quarters", "worst")
    values = np.quantile(found, [0, 0.25, 0.5, 0.75, 1]).tolist()
    return {"solves": len(found), "same": sum(ratio == 1 for ratio in found)} | dict(
        zip(names, values)
    )


def distances(pairs: dict[str, tuple[dict, dict]]) -> dict[str, Any]:
    """The distance of the certified answers, relative to their size where that is above 1."""
    found = {}
    for key, (own, other) in pairs.items():
        if own["status"] == other["status"] == "certified":
            a, b = np.asarray(own["answer"]), np.asarray(other["answer"])
            found[key] = float(np.max(np.abs(a - b)) / max(1.0, np.max(np.abs(b))))
    if not found:
        return {}
    largest = max(found, key=lambda key: found[key])
    return {"median": float(np.median([*found.values()])), "worst": found[largest], "at": largest}


def passes(comparison: dict[str, Any]) -> bool:
    ratios = comparison["ratios"]["all"]
    return not comparison["lost"] and ratios and abs(ratios["median"] - 1) <= WITHIN


def show(comparison: dict[str, Any]) -> None:
    print(f"{comparison['solves']} solves, {comparison['certified_by_both']} certified by both")
    if comparison["of_one_version_only"]:
        print(f"{comparison['of_one_version_only']} solves of one version only are left out")
    for part, ratios in comparison["ratios"].items():
        if ratios:
            spread = ", ".join(f"{k.replace('_', ' ')} {v:.4g}" for k, v in ratios.items())
            print(f"  gradients, this/other, {part}: {spread}")
    print("  distance of answers:", comparison["answers"])
    for key, (own, other) in comparison["statuses"].items():
        print(f"  {key}: {own}, in the other version {other}")
    for what in ("lost", "gained"):
        print(f"  certificates {what}: {len(comparison[what])} {comparison[what] or ''}")
    print("PASS" if passes(comparison) else "FAIL")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    versions.add_other(parser)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=[*PARTS])
    parser.add_argument("--sizes", type=int, nargs="+", default=[100, 200, 300, 400, 500])
    parser.add_argument("--seeds", type=int, default=5, help="problems of each size")
    parser.add_argument(
        "--starts", type=int, default=2, help="starts for each problem of the suite"
    )
    parser.add_argument("--names", nargs="+", default=[], help="only these of library and suite")
    parser.add_argument("--suite", default=str(SUITE), help="the file of published problems")
    parser.add_argument("--save", type=Path, help="write what this version did there")
    parser.add_argument("--load", type=Path, help="take the other version's from such a file")
    parser.add_argument("--json", type=Path, help="write both and the comparison there")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        for row in solves(Selection(**json.loads(args.child))):
            print(json.dumps(row), flush=True)
        return 0
    if not Path(args.suite).exists():
        print(f"There is no {args.suite}: the published problems are left out.")
        args.parts = [part for part in args.parts if part != "suite"]
    names = [field.name for field in dataclasses.fields(Selection)]
    selection = {name: getattr(args, name) for name in names}
    run = lambda version: version.run(__file__, "--child", json.dumps(selection))
    others = json.loads(args.load.read_text())["results"] if args.load else []
    these = run(versions.this())
    if args.save:
        versions.write(args.save, {"results": these})
    if args.other:
        others = run(versions.other(args.other))
    if not others:
        return 0
    comparison = compared(these, others)
    show(comparison)
    if args.json:
        versions.write(args.json, {"comparison": comparison, "these": these, "others": others})
    return 0 if passes(comparison) else 1


if __name__ == "__main__":
    raise SystemExit(main())
