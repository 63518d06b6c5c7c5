"""Rows that belong to tasks: stacked from a list, named, and split to adapt and to validate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np
import pandas as pd

from bilevax.arguments import warn
from bilevax.learn._base import coded
from bilevax.learn._split import held_out


@dataclass(frozen=True)
class Part:
    """Rows to train on, or to validate on, with the number of its task for each."""

    x: np.ndarray
    target: np.ndarray
    task: np.ndarray

    def taken(self, chosen: np.ndarray) -> Part:
        return Part(self.x[chosen], self.target[chosen], self.task[chosen])


def stack_tasks(tasks: Sequence[Any] | Mapping[Any, Any]) -> tuple[Any, Any, np.ndarray]:
    """The rows of all tasks, their targets, and the task of each row: what `fit` takes.

    `tasks` is a list of pairs (X, y), which get the names 0, 1, 2, …, or a dictionary of them by
    name: `model.fit(*stack_tasks({"north": (X1, y1), "south": (X2, y2)}))`.
    """
    if isinstance(tasks, Mapping):
        named = dict(tasks)
    elif isinstance(tasks, Sequence) and not isinstance(tasks, str):
        named = dict(enumerate(tasks))
    else:
        raise TypeError("tasks must be a list of pairs (X, y), or a dictionary of them by name")
    if not named:
        raise ValueError("tasks: there are none")
    features, targets = [], []
    for name, task in named.items():
        try:
            x, y = task
        except (TypeError, ValueError):
            raise TypeError(f"task {name!r} must be a pair (X, y)") from None
        x, y = x if isinstance(x, pd.DataFrame) else np.asarray(x), np.asarray(y)
        if x.ndim != 2 or not len(x):
            raise ValueError(f"task {name!r}: X must be a matrix with rows, not of shape {x.shape}")
        if y.shape != x.shape[:1]:
            raise ValueError(
                f"task {name!r}: y must have one entry for each of the {len(x)} rows, not shape "
                f"{y.shape}"
            )
        if features and x.shape[1] != features[0].shape[1]:
            raise ValueError(
                f"task {name!r} has {x.shape[1]} columns, and task {next(iter(named))!r} has "
                f"{features[0].shape[1]}"
            )
        if features and _columns(x) != _columns(features[0]):
            raise ValueError(
                f"task {name!r} has the columns {_columns(x)}, and task {next(iter(named))!r} has "
                f"{_columns(features[0])}; they must be the same, in the same order"
            )
        if targets and (y.dtype.kind in "OUS") != (targets[0].dtype.kind in "OUS"):
            raise TypeError(f"task {name!r}: y must be of the kind of task {next(iter(named))!r}'s")
        features.append(x)
        targets.append(y)
    if not (all(isinstance(n, str) for n in named) or all(isinstance(n, Real) for n in named)):
        raise TypeError("the names of tasks must all be strings, or all numbers")
    names = np.repeat(np.asarray(list(named)), [len(y) for y in targets])
    table = isinstance(features[0], pd.DataFrame)
    rows = pd.concat(features, ignore_index=True) if table else np.concatenate(features)
    return rows, np.concatenate(targets), names


def _columns(x: Any) -> list[Any] | None:
    """The names of a table's columns; None for a matrix."""
    return list(x.columns) if isinstance(x, pd.DataFrame) else None


def coded_tasks(tasks: Any, count: int) -> tuple[np.ndarray, np.ndarray]:
    """The distinct tasks, sorted, and the number of its task for each row."""
    if tasks is None:
        warn("no tasks are given: all rows are one task, and nothing is shared", UserWarning)
        return np.zeros(1, int), np.zeros(count, int)
    return coded(tasks, count, "tasks")


def split_tasks(
    rows: Part, names: np.ndarray, of_classes: bool, fraction: float, seed: int
) -> tuple[Part, Part]:
    """Rows of each task to train on and to validate on; by content, so that copies stay together.

    Each class of a task is cut by the same share. The only row of a class trains, unless no row of
    the task would be left to validate on: then the task is cut without a look at its classes.
    """
    x, target, task = rows.x, rows.target, rows.task
    label = target if of_classes else np.unique(target, return_inverse=True)[1]
    one = np.ones(len(x))
    cut = lambda group: held_out(x, label, group, one, fraction, seed)
    classes = label if of_classes else np.zeros(len(x), int)
    trains, validates = cut(task * (int(classes.max()) + 1) + classes)
    validates &= ~trains
    without = np.bincount(task[validates], minlength=len(names)) == 0
    if without.any():
        again, held = cut(task)
        chosen = without[task]
        trains[chosen], validates[chosen] = again[chosen], held[chosen]
    if len(both := np.unique(task[trains & validates])):
        raise ValueError(
            f"{_said(names[both])} one row only (n_samples=1), or copies of one, and none is left "
            "to validate on; leave such tasks out, or give validation rows"
        )
    return rows.taken(trains), rows.taken(validates)


def check_classes(train: Part, names: np.ndarray, classes: np.ndarray) -> None:
    """Warn of tasks with training rows of one class only, which the mathematics allows."""
    counts = np.zeros((len(names), len(classes)), int)
    np.add.at(counts, (train.task, train.target), 1)
    if len(single := np.flatnonzero((counts > 0).sum(axis=1) == 1)):
        warn(
            f"{_said(names[single])} training rows of one class only: how their classes differ is "
            "learnt from the other tasks alone",
            UserWarning,
        )


def numbers_of(tasks: Any, names: np.ndarray, count: int, name: str) -> np.ndarray:
    """The number of its task for each row, of tasks that are known."""
    own, code = coded(tasks, count, name)
    if len(unknown := np.setdiff1d(own, names)):
        raise ValueError(f"{name} has tasks that were not fitted: {unknown.tolist()}")
    return np.searchsorted(names, own)[code]


def _said(names: np.ndarray, most: int = 5) -> str:
    shown = ", ".join(repr(str(name)) for name in names[:most])
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"task {shown} has" if len(names) == 1 else f"the tasks {shown}{more} have"
