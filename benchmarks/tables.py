"""Write benchmarks/README.md from the result files, so that no number in it is typed by hand.

python benchmarks/tables.py
"""

from __future__ import annotations

import json
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


def main() -> None:
    intro = """# Measurements

Made by `make bench` on a shared machine with two cores, float64: times do not repeat, ratios
within one run do. Every number below is read from `results/` by `tables.py`.
"""
    (HERE / "README.md").write_text("\n".join([intro, optfom_overhead(), library()]))


if __name__ == "__main__":
    main()
