"""The tables of deep bilevel DRO."""

from __future__ import annotations

import math
import statistics
from typing import Any

from table_text import read, table

NAMES = ("ERM", "group DRO", "group DRO, η of a grid", "bilevel", "group DRO, all rows")


def mean(values: list[float]) -> str:
    """In percent, with the standard error."""
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return f"{100 * statistics.fmean(values):.1f} ± {100 * error:.1f}"


def chosen(record: dict[str, Any]) -> dict[tuple[str, float], dict[str, list[dict[str, Any]]]]:
    """Runs by network and correlation, then by name; of a grid over η, the best on validation."""
    found: dict[tuple[str, float], dict[str, list[dict[str, Any]]]] = {}
    grids: dict[tuple[str, float, int], list[dict[str, Any]]] = {}
    for run in record["runs"]:
        at = (run["network"], run["correlation"])
        if run["name"].startswith("group DRO, one"):
            grids.setdefault((*at, run["seed"]), []).append(run)
        elif "picking" not in run["name"]:
            found.setdefault(at, {}).setdefault(run["name"], []).append(run)
    for (network, correlation, _), runs in grids.items():
        best = max(runs, key=lambda run: run["validation"]["worst"])
        found[network, correlation].setdefault("group DRO, η of a grid", []).append(best)
    return found


def deep_dominoes() -> str:
    record = read("deep_dominoes")
    rows = []
    for (network, correlation), of in chosen(record).items():
        for name in NAMES:
            runs = of[name]
            rates = sorted({run["learning_rate"] for run in runs})
            rows.append(
                [
                    network, f"{correlation}", name,
                    mean([run["test"]["average"] for run in runs]),
                    mean([run["test"]["worst"] for run in runs]),
                    " ".join(f"{100 * run['test']['worst']:.1f}" for run in runs),
                    ", ".join(f"{rate:g}" for rate in rates),
                ]
            )  # fmt: skip
    header = ["network", "correlation", "method", "average, %", "worst group, %", "of each seed"]
    header += ["learning rate"]
    return f"""## Deep group DRO: dominoes

Test accuracy over five seeds (of data and network) on {record["device"]}; ± is the standard error.
{record["steps"]} steps of {record["images_per_step"]} images each, bfloat16, networks from scratch,
a cosine schedule. Of each run the model with the best worst group on the validation rows counts;
learning rates (of four), group DRO's C (of three) and η (of four) are picked by the same. The
validation rows have each group equally often; the bilevel method trains on them too, so the last
row gives group DRO all of them as training rows. `{record["command"]}`

{table(header, rows)}
"""


def deep_variants() -> str:
    record = read("deep_variants")
    found = chosen(record)
    names = list(dict.fromkeys(run["name"] for run in record["runs"]))
    rows = [
        [name, *(mean([run["test"]["worst"] for run in of[name]]) for of in found.values())]
        for name in names
    ]
    header = ["the bilevel method", *(f"{network}, {c}" for network, c in found)]
    return f"""### With other constants

Worst-group test accuracy in percent, learning rate 0.01. "As by default": ρ = 1, L = 10, x1 and y1
stepped by SGD with momentum. The paper's: ρ = 100, L = 1000 and plain steps τ = 0.01, with λ of the
runs above or its own; with momentum such a ρ diverges on a ResNet-18. `{record["command"]}`

{table(header, rows)}
"""


def deep_cost() -> str:
    record = read("deep_cost")
    rows = [
        [
            name,
            f"{1e3 * found['step_seconds']:.1f}",
            f"{found['ratio_to_erm']:.3f}",
            f"{found['images_per_second']:,.0f}",
            f"{found['flops'] / found['step_seconds'] / 1e12:.0f}",
            f"{100 * found['share_of_matrix_rate']:.0f} %",
        ]
        for name, found in record["methods"].items()
    ]
    header = ["method", "ms a step", "ERM = 1 (target ≤ 1.3)", "images/s", "TFLOP/s"]
    header += ["of the matrix rate"]
    profile = {name: record["methods"][name]["profile"]["kinds"] for name in ("erm", "bilevel")}
    kinds = [
        [kind, *(f"{1e3 * profile[name].get(kind, 0.0):.2f}" for name in profile)]
        for kind in profile["bilevel"]
    ]
    return f"""## What a bilevel step costs

ResNet-50, {record["size"]} × {record["size"]}, bfloat16, {record["batch"]} images a step on
{record["device"]}: the bilevel method takes half of them as training and half as validation rows. A
product of two 8192 × 8192 matrices ran at {record["matrix_tflops"]:.0f} TFLOP/s in the same run.
`{record["command"]}`

{table(header, rows)}

Where a step's time goes, in ms, from the device's own trace: convolutions take under half of it.
The rest reads and writes feature maps for batch norm and ReLU, which memory limits, not arithmetic.

{table(["kernels", *profile], kinds)}
"""
