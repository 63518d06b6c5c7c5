"""The tables of deep bilevel DRO."""

from __future__ import annotations

import math
import statistics
from typing import Any

from table_text import read, table

ALL_ROWS, OWN_RATE = "group DRO, all rows", "group DRO, all rows, own rate"
FIRST_GRID = ", first grid"
NAMES = ("ERM", "group DRO", "group DRO, η of a grid", "group DRO" + FIRST_GRID, "bilevel")
NAMES += (ALL_ROWS, OWN_RATE, ALL_ROWS + FIRST_GRID)
PAPER = "bilevel, paper's constants"
SYMBOLS = {"l2": "λ", "rho": "ρ", "smoothness": "L", "eta": "first η", "iterations": "T"}


def mean(values: list[float]) -> str:
    """In percent, with the standard error."""
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return f"{100 * statistics.fmean(values):.1f} ± {100 * error:.1f}"


def accuracy(runs: list[dict[str, Any]], split: str, kind: str) -> str:
    """The mean over runs of an accuracy, and how many of the runs diverged."""
    found = [run[split][kind] for run in runs if split in run]
    diverged = sum(run.get("diverged") is not None for run in runs)
    return (mean(found) if found else "") + f" ({diverged} diverged)" * (diverged > 0)


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


def seeds(record: dict[str, Any]) -> str:
    """How many seeds the runs that count have, and whether the measurement was cut."""
    counted = {run["seed"] for run in record["runs"] if "picking" not in run["name"]}
    cut = " The measurement was cut, so not every row has all of them."
    return f"{len(counted)} seeds (of data and network).{cut * (not record.get('complete', True))}"


def ends(record: dict[str, Any]) -> str:
    """The methods whose picked rate is at the end of all rates tried, in a sentence."""
    tried: dict[tuple[str, float, str], set[float]] = {}
    for run in record["runs"]:
        if run["name"].endswith(", picking"):
            key = run["network"], run["correlation"], run["name"].removesuffix(", picking")
            tried.setdefault(key, set()).add(run["learning_rate"])
    found = [
        f"{name} ({network}, {correlation})"
        for (network, correlation), of in chosen(record).items()
        for name, runs in of.items()
        if (rates := tried.get((network, correlation, name)))
        and runs[0]["learning_rate"] in (min(rates), max(rates))
    ]
    return f" At the end of its widest grid is the rate of {', '.join(found)}." if found else ""


def deep_dominoes() -> str:
    record = read("deep_dominoes")
    rows = []
    for (network, correlation), of in chosen(record).items():
        for name in filter(of.get, NAMES):
            runs = of[name]
            rates, adjustments = (
                ", ".join(f"{value:g}" for value in sorted({run[key] for run in runs}))
                for key in ("learning_rate", "adjustment")
            )
            rows.append(
                [
                    network, f"{correlation}", name,
                    accuracy(runs, "test", "average"),
                    accuracy(runs, "test", "worst"),
                    " ".join(f"{100 * run['test']['worst']:.1f}" for run in runs),
                    rates,
                    adjustments if name.startswith("group DRO") else "",
                ]
            )  # fmt: skip
    header = ["network", "correlation", "method", "average, %", "worst group, %", "of each seed"]
    header += ["learning rate", "C"]
    return f"""## Deep group DRO: dominoes

Test accuracy on {record["device"]}; ± is the standard error. There are {seeds(record)}
{record["steps"]} steps of {record["images_per_step"]} images each, bfloat16, networks from scratch,
a cosine schedule. Of each run the model with the best worst group on the validation rows counts;
learning rates, group DRO's C (from 0, 1, 3) and η (of four) are picked by the same. The rates tried
are 0.003, 0.01, 0.03 and 0.1 and, while the best is the first or the last of them, the next by a
factor of about 3, three more at most; C widens upwards alike, twice at most. A tie goes to the
better average on the validation rows, then to the smaller value.{ends(record)} The validation rows
have each group equally often; the bilevel method trains on them too, so "all rows" gives group
DRO all of them as training rows. By rows that it trains on it picks its rate and C badly ("own
rate"), and one seed picks a rate for group DRO on ResNet-18 that fails on another; so both are
there with what four rates and three C picked in an earlier run of the same steps and seeds, too:
"first grid", `{record["earlier"]["command"]}`. All other rows: `{record["command"]}`

Of the paper's tables on CelebA and Waterbirds (`tab:dro_results`, `tab:ablation`,
`tab:dro_train_results`) none was run: their images and the weights of a pretrained ResNet-50 would
have to be downloaded, and the machines that made these runs have no access to a network.

{table(header, rows)}
"""


def varied(record: dict[str, Any], name: str) -> tuple[list[str], list[list[str]]]:
    """A table of one constant after another: worst groups on validation and on test rows."""
    found: dict[tuple[str, float], dict[tuple[str, float], list[dict[str, Any]]]] = {}
    for run in record["runs"]:
        if run["name"] == name and run["factor"] is not None:
            own = found.setdefault((run["network"], run["correlation"]), {})
            own.setdefault((run["factor"], run[run["factor"]]), []).append(run)
    cells = {cell for own in found.values() for cell in own}
    order = sorted(cells, key=lambda cell: (list(SYMBOLS).index(cell[0]), cell[1]))
    rows = [
        [f"{SYMBOLS[factor]} = {value:g}"]
        + [
            accuracy(own.get((factor, value), []), split, "worst")
            for own in found.values()
            for split in ("validation", "test")
        ]
        for factor, value in order
    ]
    header = [f"{at[0]}, {at[1]}, {split}" for at in found for split in ("validation", "test")]
    return ["", *header], rows


def penalised(record: dict[str, Any], split: str) -> str:
    """The paper's table of λ: average and worst group of group DRO and of the bilevel method."""
    names = ("group DRO", "bilevel", OWN_RATE)
    found: dict[tuple[str, float, float], dict[str, list[dict[str, Any]]]] = {}
    for run in record["runs"]:
        if run["name"] in names and run["factor"] == "l2":
            own = found.setdefault((run["network"], run["correlation"], run["l2"]), {})
            own.setdefault(run["name"], []).append(run)
    rows = [
        [network, f"{correlation}", f"{l2:g}"]
        + [
            accuracy(of.get(name, []), split, kind)
            for kind in ("average", "worst")
            for name in names
        ]
        for (network, correlation, l2), of in sorted(found.items())
    ]
    heads = [f"{kind}, {name}" for kind in ("average", "worst group") for name in names]
    return table(["network", "correlation", "λ", *heads], rows)


def plain_steps(record: dict[str, Any]) -> str:
    """τ of the runs around the paper's constants, where T is not varied."""
    found = {
        (run["network"], run["correlation"]): run["tau"]
        for run in record["runs"]
        if run["name"] == PAPER and run["factor"] != "iterations"
    }
    return ", ".join(f"{tau:g} ({network}, {c})" for (network, c), tau in found.items())


def deep_ablation() -> str:
    record = read("deep_ablation")
    return f"""### With other constants

Worst-group accuracy in percent of the bilevel method, on the validation rows, which it trains on
and which the paper's `tab:ablation` shows, and on test rows; data, steps and choices are those
above, on {record["device"]}, with {seeds(record)} A run that diverged counts with the best model
before that. First around the library's constants, λ = 0.0001, ρ = 1, L = 10, η = 1 at first, T = 1
and SGD with momentum at the rate picked above. `Settings` refuses T > 1 with τ·L ≥ 1, so the rows
of T, T = 1 too, have a τ of at most 0.5/L, not 0.1, and a learning rate of at most 1/L.
`{record["command"]}`

{table(*varied(record, "bilevel"))}

Around the paper's constants, λ = 0.1, ρ = 100, L = 1000, η = 1 at first, T = 1 and plain steps τ,
which are constant and picked as learning rates are:
{plain_steps(record)}. The rows of T have a τ of at most
0.5/L.

{table(*varied(record, PAPER))}

### With and without a penalty

Accuracy in percent on test rows, as in the paper's `tab:dro_results`, with the rates picked above
for λ = 0.0001. (λ weighs half the squared norm here, and the whole of it in the paper.) The
measurement was cut, so some rows have four seeds: means differ a little from those of the same
settings above.

{penalised(record, "test")}

The same models on training rows, as in its `tab:dro_train_results`; the validation rows are not
among them for any method:

{penalised(record, "train")}
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
