"""From a table with a task column to old and new tasks, and what `bilevax meta` finds on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
from sklearn.pipeline import Pipeline

from bilevax import __version__
from bilevax.learn._tasks import Part, split_tasks
from bilevax.learn.columns import kind_of, read_as, words
from bilevax.learn.compare import aligned
from bilevax.learn.meta import RobustMetaLearner
from bilevax.learn.meta_compare import Comparison, Tasks, compare_tasks
from bilevax.learn.reader import TableReader
from bilevax.learn.table import MOST_CLASSES, check_column, encoder, refuse_copies
from bilevax.progress import Progress

#: A label of numbers with more values than this is a number to predict.
MOST_VALUES = 10
#: Fewer tasks than this say nothing about new ones.
FEWEST_OLD, FEWEST_NEW = 2, 1


@dataclass(frozen=True)
class TaskTable:
    """A table that was checked: its features, its targets and the task of each row."""

    name: str
    label: str
    task_column: str
    loss: str
    X: pd.DataFrame
    y: np.ndarray
    tasks: np.ndarray
    is_new: np.ndarray  # of each row: whether its task is held out
    reader: TableReader
    notes: list[str] = field(default_factory=list)


def prepare_tasks(
    table: Any,
    name: str,
    label: str,
    task: str,
    *,
    drop: Sequence[str] = (),
    new: float = 0.25,
    least: int = 10,
    seed: int = 0,
    notes: Sequence[str] = (),
) -> TaskTable:
    """Check a table, leave out small tasks, and hold out a share of the others as new ones.

    `notes` go before its own.
    """
    for column in (label, task, *drop):
        check_column(table, column)
    if label == task:
        raise ValueError(f"{label} is the label; the tasks need a column of their own")
    for column, what in ((label, "label"), (task, "task column")):
        texts, code = words(table[column])
        if missing := int(np.sum(code < 0)):
            raise ValueError(f"the {what} {column} is missing in {missing} of {len(table)} rows")
    tasks, notes = texts[code].astype(str), list(notes)
    names, counts = np.unique(tasks, return_counts=True)
    if (counts < least).any():
        notes.append(f"left out, with fewer than {least} rows: {', '.join(names[counts < least])}")
    kept, names = np.isin(tasks, names[counts >= least]), names[counts >= least]
    table, tasks = table[kept], tasks[kept]
    held = round(new * len(names))
    if held < FEWEST_NEW or len(names) - held < FEWEST_OLD:
        raise ValueError(
            f"{task} has {len(names)} tasks with at least {least} rows; with --new {new:g} there "
            f"are {held} new and {len(names) - held} old ones, and {FEWEST_NEW} and {FEWEST_OLD} "
            "are needed"
        )
    chosen = np.random.default_rng(seed).permutation(names)[:held]
    y, loss = _targets(table[label], label)
    reader = TableReader(drop=[label, task, *drop])
    X = reader.fit_transform(table)
    if loss == "squared":
        _check_copies(X, pd.Series(y, X.index, name=label))
    else:
        refuse_copies(X, y, label)
    is_new = np.isin(tasks, chosen)
    return TaskTable(name, label, task, loss, X, y, tasks, is_new, reader, notes + reader.notes_)


def _targets(column: Any, label: str) -> tuple[np.ndarray, str]:
    """What is to be learnt, and by which loss: numbers, or classes as strings."""
    texts, code = words(column)
    kind = kind_of(column)
    if kind["kind"] == "number" and len(texts) > MOST_VALUES:
        numbers, odd = read_as(column, kind)
        if odd.any():
            raise ValueError(f"the label {label} has {odd.sum()} values that are no numbers")
        return numbers, "squared"
    if not 2 <= len(texts) <= MOST_CLASSES:
        raise ValueError(
            f"the label {label} has {len(texts)} different values; numbers, or 2 to "
            f"{MOST_CLASSES} classes, can be learnt"
        )
    return texts[code].astype(str), "logistic"


def _check_copies(columns: Any, label: Any) -> None:
    """Refuse a column that is the label of numbers, or a multiple of it."""
    for name in columns.select_dtypes("number"):
        if columns[name].nunique() > 1 and abs(columns[name].corr(label)) > 1 - 1e-12:
            raise ValueError(
                f"the column {name} is a copy of the label {label.name}; leave it out with "
                f"--drop {name}"
            )


def learn_tasks(
    table: TaskTable,
    *,
    share: float = 0.5,
    tolerance: float = 1e-3,
    seed: int = 0,
    command: str = "",
    progress: bool | None = None,
) -> tuple[dict[str, Any], Pipeline]:
    """All results, as results.json has them, and the meta-learner with what reads its rows.

    Half of each task's rows are to fit or adapt by, half to choose or to test by. Numbers to
    predict are scaled by the mean and the deviation of the old tasks.
    """
    old = ~table.is_new
    known = encoder(table.X).fit(table.X[old])
    classes = np.unique(table.y) if table.loss == "logistic" else np.zeros(0)
    if table.loss == "logistic" and len(np.unique(table.y[old])) < len(classes):
        raise ValueError("the old tasks do not have every class of the label; give another --seed")
    mean, deviation = 0.0, 1.0
    if table.loss == "squared":
        mean, deviation = float(table.y[old].mean()), float(table.y[old].std())
        if not deviation > 0:
            raise ValueError(f"the label {table.label} is {mean:g} in every row of the old tasks")
        target = (table.y - mean) / deviation
    else:
        target = np.searchsorted(classes, table.y)

    def parts(chosen: np.ndarray) -> Tasks:
        names, code = np.unique(table.tasks[chosen], return_inverse=True)
        rows = Part(np.asarray(known.transform(table.X[chosen])), target[chosen], code)
        return Tasks(names, *split_tasks(rows, names, table.loss == "logistic", 0.5, seed))

    comparison = Comparison(parts(old), table.loss, len(classes))
    learner = RobustMetaLearner(share, loss=table.loss, tol=tolerance, verbose=progress is True)
    new = parts(table.is_new)
    with Progress(progress, unit="methods", label=table.name) as bar:
        methods = compare_tasks(comparison, new, learner, lambda name: bar.show(now=name))
    if table.loss == "logistic":
        learner.classes_ = classes
    else:
        table.notes.append(
            f"the saved model predicts ({table.label} − {mean:.6g}) / {deviation:.6g}"
        )
    results = {
        "command": command,
        "version": __version__,
        "data": {
            "name": table.name,
            "rows": len(table.y),
            "features": len(known.get_feature_names_out()),
            "label": table.label,
            "task_column": table.task_column,
            "loss": table.loss,
            "classes": [str(c) for c in classes],
            "target_mean": mean,
            "target_deviation": deviation,
            "old_tasks": comparison.old.names.tolist(),
            "new_tasks": new.names.tolist(),
        },
        "methods": methods,
        "certificate": {k: float(v) for k, v in learner.certificate_.as_dict().items()},
        "tolerance": tolerance,
        "certified": learner.converged_,
        "share": share,
        "seed": seed,
        "notes": table.notes,
    }
    steps = [("reader", table.reader), ("encoder", known), ("learner", learner)]
    return results, Pipeline(steps)


def table_of(results: dict[str, Any]) -> str:
    """The results as text, one row a method."""
    of = (
        "error rate" if results["data"]["loss"] == "logistic" else "mean square of the scaled label"
    )
    head = ("method", f"{of}, mean", "worst new task", "which", "mean loss", "η", "λ", "seconds")
    number = lambda v: "" if v is None else f"{v:.3g}"
    rows = [
        (
            m["name"], f"{m['mean_error']:.4f}", f"{m['worst_error']:.4f}", m["worst_task"],
            f"{m['mean_loss']:.4f}", number(m.get("eta")), number(m.get("lam")),
            f"{m['seconds']:.2f}",
        )
        for m in results["methods"]
    ]  # fmt: skip
    return aligned([head, *rows])
