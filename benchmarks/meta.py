"""Learning new tasks from old ones: the robust meta-learner against four simpler ways.

python benchmarks/meta.py --seeds 10 --json benchmarks/results/meta.json

Each data set draws old tasks, with rows to fit by and as many to choose by, and new tasks, with as
many rows to adapt to as an old task has to fit by, and many to test on. Every method has the same
rows: no sharing (ridge or logistic regression alone), one pooled model, averaging (min over w of
(l2/2)‖w‖² + Σ_τ min over y of mean loss + (λ/2)‖y − w‖², with the meta-learner's l2), all with λ by
grid, and fine-tuning: gradient steps
from the pooled model, with their number and length by grid. A grid chooses by the mean validation
loss over the old tasks.

sinusoid: y = a·sin(x + b), a in [0.1, 5], b in [0, π], x in [−5, 5] (Finn, Abbeel and Levine 2017),
with 20 random Fourier features; errors are mean squares over the variance of the old targets.
images: five classes of MNIST and Fashion-MNIST, one or five images of each, softmax regression on
12 whitened principal components of images of the old classes; new tasks have new classes only.
adult: income above 50,000 by occupation, 20 rows of each; new tasks are other occupations.
"""

from __future__ import annotations

import argparse
import gzip
import json
import shlex
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from threadpoolctl import threadpool_limits

import bilevax as bx
from bilevax.learn import RobustMetaLearner, TaskModel
from bilevax.learn._tasks import Part
from bilevax.learn.meta_compare import Comparison, Learnt, Tasks, compare_tasks, summary
from bilevax.learn.table import encoder

DATA = Path(__file__).parents[2] / "shared" / "data"
STEPS, RATES = (1, 3, 10, 30, 100, 300), (0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
Rows = tuple[np.ndarray, np.ndarray]


def stacked(tasks: list[tuple[Rows, Rows]]) -> Tasks:
    """Pairs of (features, targets) of each task, one to fit or adapt by and one to judge by."""

    def part(level: int) -> Part:
        rows = [task[level] for task in tasks]
        code = np.repeat(np.arange(len(rows)), [len(y) for _, y in rows])
        return Part(
            np.concatenate([x for x, _ in rows]), np.concatenate([y for _, y in rows]), code
        )

    return Tasks(np.arange(len(tasks)), part(0), part(1))


def sinusoid(shots: int, seed: int) -> tuple[Tasks, Tasks, str, int]:
    draw = np.random.default_rng([seed, shots])
    frequency, phase = draw.normal(0, 1, 20), draw.uniform(0, 2 * np.pi, 20)

    def rows(a: float, b: float, count: int) -> Rows:
        x = draw.uniform(-5, 5, count)
        return np.sqrt(2) * np.cos(np.outer(x, frequency) + phase), a * np.sin(x + b)

    def task(tested: int) -> tuple[Rows, Rows]:
        own = draw.uniform(0.1, 5), draw.uniform(0, np.pi)
        return rows(*own, shots), rows(*own, tested)

    old, new = [task(shots) for _ in range(20)], [task(100) for _ in range(50)]
    scale = np.std([y for train, held in old for y in (*train[1], *held[1])])
    by_scale = lambda rows: (rows[0], rows[1] / scale)
    scaled = lambda tasks: [(by_scale(first), by_scale(second)) for first, second in tasks]
    return stacked(scaled(old)), stacked(scaled(new)), "squared", 0


def pictures(folder: str) -> Rows:
    """The test images of a folder in idx format, as vectors in [0, 1], and their classes."""
    read = lambda name: gzip.decompress((DATA / folder / name).read_bytes())
    images = np.frombuffer(read("t10k-images-idx3-ubyte.gz"), np.uint8, offset=16)
    labels = np.frombuffer(read("t10k-labels-idx1-ubyte.gz"), np.uint8, offset=8)
    return images.reshape(len(labels), -1) / 255.0, labels.astype(int)


def images(shots: int, seed: int) -> tuple[Tasks, Tasks, str, int]:
    draw = np.random.default_rng([seed, shots, 1])
    (digits, of_digits), (clothes, of_clothes) = pictures("mnist"), pictures("fashion-mnist")
    x, y = np.concatenate([digits, clothes]), np.concatenate([of_digits, of_clothes + 10])
    known, unknown = np.split(draw.permutation(20), 2)
    seen = draw.choice(np.flatnonzero(np.isin(y, known)), 2000, replace=False)
    mean = x[seen].mean(axis=0)
    _, sizes, axes = np.linalg.svd(x[seen] - mean, full_matrices=False)
    x = (x - mean) @ axes[:12].T / (sizes[:12] / np.sqrt(len(seen)))

    def task(classes: np.ndarray, tested: int) -> tuple[Rows, Rows]:
        chosen = draw.choice(classes, 5, replace=False)
        taken = [draw.choice(np.flatnonzero(y == c), shots + tested, replace=False) for c in chosen]
        pick = lambda rows: (x[np.concatenate(rows)], np.repeat(np.arange(5), len(rows[0])))
        return pick([t[:shots] for t in taken]), pick([t[shots:] for t in taken])

    old = [task(known, shots) for _ in range(12)]
    return stacked(old), stacked([task(unknown, 20) for _ in range(30)]), "logistic", 5


def adult(shots: int, seed: int) -> tuple[Tasks, Tasks, str, int]:
    draw = np.random.default_rng([seed, shots, 2])
    table: Any = pd.read_csv(DATA / "adult.csv.gz", skipinitialspace=True, na_values=["?"])
    table = table.dropna(subset=["occupation"])
    numbers = ["age", "education-num", "capital-gain", "capital-loss", "hours-per-week"]
    label = table["income"].str.contains(">50K").to_numpy().astype(int)
    columns = table[[*numbers, "sex", "marital-status"]]
    counts = table["occupation"].value_counts()
    names = draw.permutation(counts.index[counts >= 400].to_numpy())
    rows = {
        name: draw.permutation(np.flatnonzero(table["occupation"] == name))[: 2 * shots + 1000]
        for name in names
    }
    old, new = names[:8], names[8:]
    known = encoder(columns).fit(columns.iloc[np.concatenate([rows[n][: 2 * shots] for n in old])])
    x = known.transform(columns)

    def task(name: str, tested: int) -> tuple[Rows, Rows]:
        adapt, held = rows[name][:shots], rows[name][shots : shots + tested]
        return (x[adapt], label[adapt]), (x[held], label[held])

    return (
        stacked([task(n, shots) for n in old]),
        stacked([task(n, 1000) for n in new]),
        "logistic",
        2,
    )


CASES: dict[str, tuple[Callable[[int, int], tuple[Tasks, Tasks, str, int]], int]] = {
    "sinusoid, 5 shots": (sinusoid, 5),
    "sinusoid, 10 shots": (sinusoid, 10),
    "images, 5-way 1-shot": (images, 1),
    "images, 5-way 5-shot": (images, 5),
    "adult by occupation, 20 rows": (adult, 20),
}


def fine_tuning(comparison: Comparison) -> Learnt:
    """Gradient steps on a task's mean loss, from the pooled model."""
    pooled = comparison.pooled()
    start: Any = pooled.model(comparison.old.train)
    shape = (max(comparison.classes, 1) if comparison.classes != 2 else 1, start.coef_.shape[-1])
    first = np.column_stack([start.coef_.reshape(shape), np.reshape(start.intercept_, -1)])

    def tuned(steps: int, rate: float) -> Callable[[Part], TaskModel]:
        def model(part: Part) -> TaskModel:
            rows, w = comparison.template()._rows(part.x, part.target), first
            with np.errstate(all="ignore"):  # too long steps diverge, and are not chosen
                for _ in range(steps):
                    w = w - rate * rows.gather(rows.losses(w).slope / len(rows))
            w = np.clip(np.nan_to_num(w), -1e100, 1e100)
            found: Any = comparison.template()
            found.coef_, found.intercept_ = found._split_off(w)
            found.n_features_in_ = part.x.shape[1]
            return found

        return model

    grid = [(steps, rate) for steps in STEPS for rate in RATES]
    return comparison.best([Learnt(tuned(*p), {"steps": p[0], "rate": p[1]}) for p in grid])


def compared(case: str, seed: int) -> dict[str, Any]:
    """All methods on one draw of one case; a failure is a result, too."""
    make, shots = CASES[case]
    old, new, loss, classes = make(shots, seed)
    comparison = Comparison(old, loss, classes)
    began = time.perf_counter()
    results = compare_tasks(comparison, new, RobustMetaLearner(loss=loss))
    others = {
        "even": RobustMetaLearner(1.0, loss=loss, train_share=1.0),
    }
    for key, learner in others.items():
        learnt = comparison.robust(learner)
        results.append(
            {"key": key, **learnt.chosen, **summary(comparison.on(learnt, new), new.names)}
        )
    learnt = fine_tuning(comparison)
    on_new = summary(comparison.on(learnt, new), new.names)
    results.append({"key": "fine-tuning", **learnt.chosen, **on_new})
    methods = {r.pop("key"): {k: v for k, v in r.items() if k != "errors"} for r in results}
    return {"case": case, "seed": seed, "seconds": time.perf_counter() - began, "methods": methods}


def runs(seeds: int, cases: list[str]) -> Iterator[dict[str, Any]]:
    for seed in range(seeds):
        for case in cases:
            try:
                yield compared(case, seed)
            except Exception as error:  # kept: a run that fails is part of the record
                yield {"case": case, "seed": seed, "failed": f"{type(error).__name__}: {error}"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    record = {
        "command": shlex.join(["python", "benchmarks/meta.py", *sys.argv[1:]]),
        "version": bx.__version__,
        "results": [],
    }
    warnings.simplefilter("ignore", UserWarning)  # of certificates: whether they hold is kept
    with threadpool_limits(1):
        for result in runs(asked.seeds, asked.cases):
            record["results"].append(result)
            shown = {
                k: (round(m["mean_error"], 4), round(m["worst_error"], 3))
                for k, m in result.get("methods", {}).items()
            }
            print(
                result["case"],
                result["seed"],
                f"{result.get('seconds', 0):.1f} s",
                result.get("failed", ""),
                shown,
                flush=True,
            )
            if asked.json:
                asked.json.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
