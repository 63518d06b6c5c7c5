"""The tables of the robust classifiers."""

from __future__ import annotations

import math
import statistics
from typing import Any

from table_text import read, table

METHODS = ("erm", "reweighted", "dro", "grid", "tuned")


def _mean(values: list[float]) -> float:
    return statistics.fmean(values)


def _error(values: list[float]) -> float:
    """The standard error of their mean."""
    return statistics.stdev(values) / math.sqrt(len(values))


def robust() -> str:
    record = read("robust")
    cases: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for row in record["results"]:
        cases.setdefault((row["case"], row["train"]), []).append(row)
    rows, all_of = [], record["results"]
    of = lambda found, method, what: [r["methods"][method][what] for r in found]
    for (name, train), found in cases.items():
        loss = {m: of(found, m, "worst_validation_loss") for m in ("grid", "tuned")}
        right = {
            m: of(found, m, "worst_test_accuracy")
            for m in ("erm", "reweighted", "dro", "grid", "tuned")
        }
        ahead = [t - g for t, g in zip(right["tuned"], right["grid"])]
        no_worse = sum(t <= g for t, g in zip(loss["tuned"], loss["grid"]))
        seconds = {m: of(found, m, "seconds") for m in ("grid", "tuned")}
        ratio = _mean([t / g for t, g in zip(seconds["tuned"], seconds["grid"])])
        rows.append(
            [
                name, f"{train:,}",
                f"{_mean(loss['grid']):.4f}", f"{_mean(loss['tuned']):.4f}",
                f"{no_worse} of {len(found)}",
                f"{max(t - g for t, g in zip(loss['tuned'], loss['grid'])):+.5f}",
                *(f"{_mean(right[m]):.3f}" for m in right),
                f"{_mean(ahead):+.4f} ± {_error(ahead):.4f}",
                f"{_mean(seconds['grid']):.2f}", f"{_mean(seconds['tuned']):.2f}", f"{ratio:.2f}",
            ]
        )  # fmt: skip
    header = [
        "data",
        "training rows",
        "loss, grid",
        "loss, tuned",
        "tuned ≤ grid",
        "largest excess",
    ]
    header += ["ERM", "reweighted", "DRO, η = 1", "grid", "tuned", "tuned − grid"]
    header += ["s, grid", "s, tuned", "ratio"]
    certified = sum(bool(r["methods"]["tuned"]["certified"]) for r in all_of)
    epsilons = [r["methods"]["tuned"]["epsilon"] for r in all_of]
    others = [
        [
            r["case"], f"{r['train']:,}", r["status"], f"{r['epsilon']:.2g}",
            f"{r['gradients']:,}", f"{r['seconds']:.0f}", f"{r['compile_seconds']:.0f}",
            f"{r['worst_validation_loss']:.4f}",
        ]
        for r in record["first_order"]
    ]  # fmt: skip
    first = ["data", "training rows", "status", "ε", "gradients", "s", "s to compile", "worst loss"]
    return f"""## Tuned group DRO against a grid

`TunedGroupDROClassifier` against 40 fits (8 η × 5 l2) by warm-started L-BFGS on the smooth dual
form, the least worst-group validation loss of which wins; ERM, reweighting by group and group DRO
at its default prices beside them. Means over {len(next(iter(cases.values())))} seeds: worst-group
validation loss, worst-group test accuracy, and seconds of the whole of `fit`, its certificate
included. ± is a standard error. COMPAS has too few rows for 10,000. BLAS has one thread, with which
the grid is fastest. {certified} of {len(all_of)} runs are certified at ε = 0.001, the median at
{statistics.median(epsilons):.1e}. `{record["command"]}`

{table(header, rows)}

The same bilevel problem, stated as a `bx.BilevelProblem`, by `bx.solve` with nothing set, stopped
after so many seconds; a loss below the tuned one's is that of a lower level not yet solved.
`bilevax.learn` has methods of its own because of this.

{table(first, others)}
"""


def robust_large() -> str:
    record = read("robust_large")
    rows = [
        [
            f"{r['rows']:,} × {r['columns']}", r["model"], r["solver"], f"{r['seconds']:.1f}",
            f"{r['peak_gigabytes']:.1f}", f"{r['rows_gigabytes']:.1f}", f"{r['certified']:.1e}",
        ]
        for r in record["results"] if "failed" not in r
    ]  # fmt: skip
    header = ["X", "estimator", "solver", "s", "peak GB", "GB of X", "certified gap or ε"]
    failed = [
        f"{r['rows']:,} × {r['columns']} {r['model']}" for r in record["results"] if "failed" in r
    ]
    ended = f"\n\nFailed: {', '.join(failed)}." if failed else ""
    return f"""## Robust classifiers on many rows

Two cores, each fit a process of its own, measured with version 0.1.0. Its `solver="minibatch"` was
slower for every number of rows, and has been removed since. `{record["command"]}`

{table(header, rows)}{ended}
"""


def robust_fast() -> str:
    record = read("robust_fast")
    rows = [
        [
            f"{r['rows']:,} × {r['columns']}", f"{r['file_megabytes']:.0f}", f"{r['load'][0]:.1f}",
            f"{r['seconds']:.0f}", f"{r['cpu_seconds']:.1f}", f"{r['peak_gigabytes']:.2f}",
            str(len(r["stderr"])), "failed" if r["exit"] else f"{r['epsilon']:.1e}",
        ]
        for r in record["results"]
    ]  # fmt: skip
    header = ["rows × columns", "MB of CSV", "load", "s", "CPU s", "peak GB", "lines", "ε"]
    goal = record["targets"]
    return f"""## Many rows of raw text, quickly

`{record["results"][0]["call"]}`, reading included, on {record["cores"]} cores shared with other
work: the load is the number of processes that wanted one when it began. CPU seconds are what it
needs of cores that are idle. Asked for are {goal["seconds"]} s and {goal["gigabytes"]:g} GB; the
lines are those of progress, without a terminal. `{record["command"]}`

{table(header, rows)}
"""


def robust_threads() -> str:
    record = read("robust_threads")
    rows = [
        [
            f"{r['rows']:,} × {r['columns']}", r["fit"], f"{r['one_seconds']:.2f}",
            f"{r['all_seconds']:.2f}", f"{r['one_cpu_seconds']:.2f}",
            f"{r['all_cpu_seconds']:.2f}", f"{r['all_seconds'] / r['one_seconds']:.1f}",
            "one" if r["chosen"] == "one" else "as many as there are",
        ]
        for r in record["results"]
    ]  # fmt: skip
    header = ["X", "group DRO", "s, one", "s, all", "CPU s, one", "CPU s, all", "ratio", "chosen"]
    repetitions = len(record["results"][0]["runs"]["one"])
    loads = [run["load"] for r in record["results"] for way in r["runs"].values() for run in way]
    return f"""## Threads of the BLAS

One thread against as many as there are cores, {record["cores"]}: medians of {repetitions} runs that
take turns, under a load of {min(loads):.0f} to {max(loads):.0f}. Where others need the cores, a
product waits for its slowest thread. On idle cores threads save at most as many times as there are
cores, which is not measured here; the estimators leave them to large products for that.
`{record["command"]}`

{table(header, rows)}
"""
