"""The table of the bilevel deep method with less noise, and what decides whether that wins.

A variant wins if, over all settings, the interval of its difference to today's method lies above 0,
at 95 % for all variants together (Bonferroni), and no single setting's interval lies below 0; one
that draws other minibatches must also not lose to today's method with its minibatches.
"""

from __future__ import annotations

import statistics
from typing import Any

from scipy import stats

from deep_tables import chosen, mean
from table_text import read, table

TODAY = "today"


def interval(values: list[float], comparisons: int = 1) -> tuple[float, float, float]:
    """The mean, and Student's interval that holds for all of so many comparisons at 95 %."""
    middle = statistics.fmean(values)
    if len(values) < 2:
        return middle, float("-inf"), float("inf")
    error = statistics.stdev(values) / len(values) ** 0.5
    half = float(stats.t.ppf(1 - 0.025 / comparisons, len(values) - 1)) * error
    return middle, middle - half, middle + half


def paired(runs: list[dict[str, Any]], beside: list[dict[str, Any]]) -> dict[int, float]:
    """By seed, the worst group's test accuracy less that of the other variant."""
    other = {run["seed"]: run["test"]["worst"] for run in beside}
    return {
        run["seed"]: run["test"]["worst"] - other[run["seed"]]
        for run in runs
        if run["seed"] in other
    }


def shown(values: list[float], comparisons: int = 1) -> str:
    """In percent."""
    return "{:+.1f} ({:+.1f} to {:+.1f})".format(*(100 * v for v in interval(values, comparisons)))


def compared(record: dict[str, Any], beside: str = TODAY) -> list[list[str]]:
    """Rows: a variant, its accuracy and difference to `beside` in each setting, and over all.

    Over all settings a seed counts once, by its mean over the settings that have it: its runs share
    pictures and first parameters.
    """
    found = chosen(record)
    names = list(dict.fromkeys(name for of in found.values() for name in of))
    rows = []
    for name in names:
        cells: list[str] = []
        by_seed: dict[int, list[float]] = {}
        for of in found.values():
            runs, others = of.get(name, []), of.get(beside, [])
            apart = {} if name == beside else paired(runs, others)
            for seed, value in apart.items():
                by_seed.setdefault(seed, []).append(value)
            cells.append(mean([run["test"]["worst"] for run in runs]) if runs else "")
            cells.append(shown(list(apart.values())) if apart else "")
        means = [statistics.fmean(values) for values in by_seed.values()]
        rows.append([name, *cells, shown(means, len(names) - 1) if means else ""])
    return rows


def differences(record: dict[str, Any], beside: str = TODAY) -> str:
    """The table of `compared`."""
    settings = [f"{network}, {correlation}" for network, correlation in chosen(record)]
    less = f"less {beside}"
    pairs = [text for setting in settings for text in (setting, less)]
    return table(["the bilevel method", *pairs, f"{less}, over all"], compared(record, beside))


def deep_variance() -> str:
    record = read("deep_variance")
    scored = [run for run in record["runs"] if not run["name"].endswith("picking")]
    seeds = {n: len({r["seed"] for r in scored if r["network"] == n}) for n in ("cnn", "resnet18")}
    cut = " It was cut at its time limit, so not every variant has all of them." * record["cut"]
    return f"""### With less noise

Worst-group test accuracy in percent at equal image gradients (a forward and a backward pass of one
image): those of {record["steps"]} steps of {record["images_per_step"]} images, on
{record["device"]}. "Equal draws" has as many images instead, each with two gradients. STORM:
d = g(w; ξ) + (1 − a)·(d⁻ − g(w⁻; ξ)). Anchors: every eighth step from 1024 images, between them the
same with a = 0. Growing: steps from 128 to 1024 images, gathered in minibatches of 64, twice as
many when noise² > θ²·‖gradient‖². Learning rates (of four) are picked for each variant by the worst
group on validation rows, on data that is not used again. Differences are paired by seeds,
with 95 % intervals; the last column's hold for all variants together. There are
{seeds["cnn"]} seeds of the CNN and {seeds["resnet18"]} of ResNet-18.{cut} θ was chosen on seed 0.
`{record["command"]}`

{differences(record)}
"""
