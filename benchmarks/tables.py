"""Write benchmarks/README.md from the result files, so that no number in it is typed by hand.

python benchmarks/tables.py
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def read(name: str) -> dict[str, Any]:
    return json.loads((HERE / "results" / f"{name}.json").read_text())


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def optfom_overhead() -> str:
    record = read("optfom_overhead")
    rows = [
        [
            f"{r['n']:,}",
            f"{r['m']:,}",
            f"{r['loop_microseconds']:.2f}",
            f"{r['bare_microseconds']:.2f}",
            f"{r['loop_over_bare']:.2f}",
        ]
        for r in record["results"]
    ]
    header = ["n", "m", "in OptFOM's loop, µs", "bare, µs", "ratio (target ≤ 2)"]
    return f"""## What OptFOM's loop costs beyond its gradients

One gradient of ½‖x‖² + cᵀx + yᵀAx − 0.05‖y‖² (x of n entries, y of m), inside OptFOM's compiled
loop with all that it does, and inside a compiled loop that does nothing else; the best of seven
rounds each, taken in turns. `{record["command"]}`

{table(header, rows)}
"""


def library() -> str:
    record = read("library")
    rows = [
        [
            r["instance"],
            f"{r['tolerance']:g}",
            r["status"],
            f"{r['epsilon']:.1e}",
            f"{r['gradients']:,}",
            f"{r['theorem_N']:.0e}",
            f"{r['seconds']:.1f}",
            f"{r['distance_to_answer']:.4f}",
        ]
        for r in record["results"]
    ]
    header = ["instance", "ε", "status", "certified ε", "gradients", "theorem's N", "s", "miss"]
    return f"""## The paper's method on the library

`PenaltyMethod()` with the paper's constants, until the certificate holds. `miss` is the distance of
(x1, y1) to the closed form; it is of the order of ε because the penalty is 1/ε.
`{record["command"]}`

{table(header, rows)}
"""


def linear() -> str:
    record = read("linear")
    groups: dict[tuple, list[dict[str, Any]]] = {}
    for r in record["records"]:
        groups.setdefault((r["n"], r["m"], r["l"], r["method"]), []).append(r)

    def mean(rows: list[dict[str, Any]], field: str, form: str) -> str:
        known = [r[field] for r in rows if r[field] is not None]
        return format(statistics.mean(known), form) if len(known) == len(rows) else "–"

    rows = []
    for (n, m, rows_below, method), several in groups.items():
        certified = sum(r["status"] == "certified" for r in several)
        unproven = "" if all(r["optimum_proven"] for r in several) else "*"
        rows.append(
            [
                f"{n}",
                f"{m}",
                f"{rows_below}",
                method,
                f"{certified} of {len(several)}",
                mean(several, "objective", ".2f"),
                mean(several, "repaired_objective", ".2f"),
                mean(several, "optimum", ".2f") + unproven,
                mean(several, "relative_error", ".1e"),
                f"{statistics.median(r['gradients'] for r in several):,.0f}",
                f"{statistics.median(r['seconds'] for r in several):.1f}",
            ]
        )
    header = ["n", "m", "l", "method", "certified", "objective", "repaired", "exact optimum"]
    header += ["relative error", "gradients", "s"]
    return f"""## The paper's linear experiment

Means over the instances; gradients and seconds are medians. An objective below the optimum is a
violation exploited, not a better answer: `repaired` keeps x and solves the lower level exactly, and
the error compares that with the optimum. A dash: for some instance no answer of the lower level
exists at the x found. `{record["command"]}`

{table(header, rows)}

![Objective, lower-level gap and infeasibility against gradients](results/linear.png)
"""


def together() -> str:
    record = read("vmap_linear")
    rows = [
        [
            f"{r['n']}",
            r["method"],
            f"{r['alone_microseconds']:.1f}",
            f"{r['together_microseconds']:.1f}",
            f"{r['alone_over_together']:.2f}",
        ]
        for r in record["results"]
    ]
    header = ["n", "method", "alone, µs a gradient", "together, µs", "alone / together"]
    return f"""## Five linear problems together under vmap

`bilevax bench linear` runs together what is faster so. `{record["command"]}`

{table(header, rows)}
"""


def suite() -> str:
    record = read("suite")
    rows = []
    for o in record["outcomes"]:
        known = "unknown" if o["best_known"] is None else f"{o['best_known']:.6g}"
        best = o["best"]
        if best is None:
            rows.append([o["name"], "refused", "–", "–", "–", known, "–", "–"])
            continue
        verdict = o["verdict"]
        gap = "infeasible" if best["gap"] is None else f"{best['gap']:.1e}"
        shown = [f"{best['epsilon']:.1e}", f"{best['F']:.6g}", known, gap]
        rows.append([o["name"], verdict, best["status"], *shown, f"{best['gradients']:,}"])
    reached = sum(o["reached"] for o in record["outcomes"])
    false = sum(o["false_certificates"] for o in record["outcomes"])
    header = ["problem", "", "status", "ε", "F", "best known", "gap", "gradients"]
    refusals = [f"- {o['name']}: {o['refused']}" for o in record["outcomes"] if o["refused"]]
    return f"""## Published problems

The problems of a public suite (BASBLib, CC0) whose lower level is convex, each from several starts;
the best attempt of each. `gap` comes from an independent, exact solve of the lower level at x.
{reached} of {len(rows)} reach the best known F within 1e-2 relative with a gap of at most 1e-4;
{false} false certificates. `{record["command"]}`

{table(header, rows)}

{chr(10).join(["Refused:", *refusals]) if refusals else ""}
"""


def main() -> None:
    intro = """# Measurements

Made by `make bench` on a shared machine with two cores, float64: times do not repeat, ratios
within one run do. Every number below is read from `results/` by `tables.py`.
"""
    (HERE / "README.md").write_text(
        "\n".join([intro, linear(), suite(), together(), optfom_overhead(), library()])
    )


if __name__ == "__main__":
    main()
