"""The tables of the meta-learner."""

from __future__ import annotations

import math
import statistics
from typing import Any

from scipy import stats

from table_text import read, table

NAMES = {
    "alone": "no sharing",
    "pooled": "pooled",
    "averaging": "averaging, λ by grid",
    "fine-tuning": "fine-tuning",
    "even": "bilevel, even weights",
    "robust": "robust",
}


def _interval(values: list[float]) -> str:
    """The mean of paired differences with the 95 % interval of Student's t."""
    wide = stats.t.ppf(0.975, len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return f"{statistics.fmean(values):+.4f} ± {wide:.4f}"


def meta() -> str:
    records = [read(name) for name in ("meta", "meta_images")]
    cases: dict[str, list[dict[str, Any]]] = {}
    for record in records:
        for run in record["results"]:
            cases.setdefault(run["case"], []).append(run)
    rows, failed, certified, total = [], 0, 0, 0
    for case, runs in cases.items():
        done = [run["methods"] for run in runs if "methods" in run]
        failed, total = failed + len(runs) - len(done), total + len(done)
        certified += sum(methods["robust"]["certified"] for methods in done)
        of = lambda key, what, done=done: [methods[key][what] for methods in done]
        for key, name in NAMES.items():
            cells = []
            for what in ("mean_error", "worst_error"):
                off = [a - b for a, b in zip(of("robust", what), of(key, what))]
                cells += [f"{statistics.fmean(of(key, what)):.4f}"]
                cells += ["" if key == "robust" else _interval(off)]
            rows.append([case if key == "alone" else "", name, *cells])
    seeds = max(len(runs) for runs in cases.values())
    header = ["tasks", "method", "mean error", "robust − it", "worst new task", "robust − it"]
    commands = " and ".join(f"`{record['command']}`" for record in records)
    return f"""## New tasks from old ones

`RobustMetaLearner` against simpler ways, on the same rows: {seeds} draws of each case, the error on
new tasks (mean squares over the variance of the old targets for sinusoids, else the share of wrong
classes), and paired differences with 95 % intervals: below zero the robust learner is better. What
the others choose by grid has the least validation loss over the old tasks. "Bilevel, even weights"
is the same learner with share=1 and train_share=1: without any adversary. {certified} of {total}
fits are certified at 10⁻³, {failed} runs failed. {commands}

{table(header, rows)}

The fair rival, averaging, is not beaten anywhere, and beats the learner on images. The learner
beats pooled models on sinusoids and images, where tasks differ, and no sharing on Adult, where they
are alike. Without an adversary it loses to averaging on images as well, so robustness is not all of
that loss: w is fitted to the validation rows of a dozen old tasks, where averaging fits it to
training rows and uses the validation rows for one number. In 5-way tasks the numbers of the classes
mean nothing from one task to the next, so that a w other than 0 is noise.
"""


def meta_problem() -> str:
    record = read("meta_problem")
    results = record["results"]
    loads = [r["load"] for r in results]
    body = []
    for loss, law in dict.fromkeys((r["loss"], r["law"]) for r in results):
        own = [r for r in results if (r["loss"], r["law"]) == (loss, law)]
        of = lambda name, own=own: [r[name] for r in own]
        beside = [r["estimator"] for r in own if "estimator" in r]
        body.append(
            [
                loss,
                law,
                f"{sum(r['status'] == 'certified' for r in own)} of {len(own)}",
                f"{max(of('epsilon')):.0e}",
                f"{statistics.median(of('linear_solves')):.0f} ({max(of('linear_solves'))})",
                f"{statistics.median(of('seconds')):.1f} ({max(of('seconds')):.1f})",
                f"{statistics.median(of('cpu_seconds')):.1f}",
                f"{max(of('compile_seconds')):.0f}",
                ", ".join(f"{r['objective']:.4f}" for r in own if "estimator" in r),
                ", ".join(f"{e['objective']:.4f}" for e in beside),
                ", ".join(f"{e['seconds']:.0f} s, ε {e['epsilon']:.0e}" for e in beside),
            ]
        )
    header = [
        "loss", "law", "certified", "largest ε", "systems, median (most)", "seconds, median (most)",
        "CPU seconds, median", "compiling", "F", "estimator's F", "estimator",
    ]  # fmt: skip
    return f"""## Twenty tasks at once, through `bilevax.solve`

`eq:DRO_meta_tuning` with 20 tasks of 30 to 60 rows in each part and 50 features, tolerance
{record["tolerance"]:g}, nothing else set. Seconds do not have compilation in them, which all seeds
of a loss share; CPU seconds do. The two cores were shared with other work, at a load of
{min(loads):.1f} to {max(loads):.1f}. Only laws and seeds below 100 were looked at while the method
was made. The estimator is `RobustMetaLearner`'s own way to solve the same equation, in NumPy, on
the first seed of each law; it begins at other places, and F may be that of another local minimum.
`{record["command"]}`

{table(header, body)}
"""
