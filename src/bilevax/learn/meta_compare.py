"""Ways to learn a new task from old ones, compared: what `bilevax meta` does.

The methods see the same rows. Each old task has training rows, to fit by, and validation rows, to
choose by; each new one has rows to adapt to, and rows to be tested on. What a grid chooses has the
least mean validation loss, over the old tasks, of the models adapted to their training rows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import special

from bilevax.learn._meta import Task, averaged
from bilevax.learn._risk import row_risk
from bilevax.learn._tasks import Part
from bilevax.learn.meta import RobustMetaLearner
from bilevax.learn.task import TaskModel

#: The λ of a grid search, and of pooled ridge.
LAMS = np.geomspace(1e-3, 1e2, 11)
#: Names and what they do.
METHODS = {
    "alone": "no sharing: each task alone, λ by grid",
    "pooled": "one model for all tasks, λ by grid",
    "averaging": "averaging, λ by grid",
    "robust": "robust meta-learner",
}


@dataclass(frozen=True)
class Errors:
    """Of one model on one task: the mean loss, and the error rate or the mean squared error."""

    loss: float
    error: float


@dataclass(frozen=True)
class Tasks:
    """Rows of tasks in two parts: to fit or to adapt by, and to choose or to test by."""

    names: np.ndarray
    train: Part
    held: Part

    def each(self) -> Iterator[tuple[Part, Part]]:
        for k in range(len(self.names)):
            yield self.train.taken(self.train.task == k), self.held.taken(self.held.task == k)


@dataclass(frozen=True)
class Learnt:
    """What a method has learnt: how it makes a model of a task's rows, and what it chose."""

    model: Callable[[Part], TaskModel]
    chosen: dict[str, Any]


@dataclass(frozen=True)
class Comparison:
    """Models of one loss, on the tasks of one data set; targets are numbers, or class codes."""

    old: Tasks
    loss: str
    classes: int = 0
    fit_intercept: bool = True
    l2: float = 0.1  # of averaging, as the meta-learner has it

    def near(self, lam: float, w: np.ndarray | None = None) -> Callable[[Part], TaskModel]:
        """Models with even weights and a ridge around w, or around zero."""
        template = self.template()
        parts = (None, None) if w is None else template._split_off(w)
        given = {"coef": parts[0], "intercept": parts[1] if self.fit_intercept else None}

        def model(rows: Part) -> TaskModel:
            return self.template(lam=lam, **given).fit(rows.x, rows.target)

        return model

    def template(self, **given: Any) -> TaskModel:
        classes = np.arange(self.classes) if self.classes else None
        model = TaskModel(
            loss=self.loss,
            classes=classes,
            train_share=1.0,
            fit_intercept=self.fit_intercept,
            **given,
        )
        if classes is not None:
            model.classes_ = classes
        return model

    def errors(self, model: TaskModel, rows: Part) -> Errors:
        """The loss and the error of a model on rows."""
        scores = model._scores(rows.x)
        if self.loss == "squared":
            square = float(np.mean((scores - rows.target) ** 2))
            return Errors(square / 2, square)
        wrong = float(np.mean(model.predict(rows.x) != rows.target))
        if scores.ndim == 1:
            losses = -special.log_expit(np.where(rows.target == 1, scores, -scores))
        else:
            losses = -special.log_softmax(scores, axis=1)[np.arange(len(scores)), rows.target]
        return Errors(float(losses.mean()), wrong)

    def on(self, learnt: Learnt, tasks: Tasks) -> list[Errors]:
        """The errors on each task, adapted to its first part."""
        return [self.errors(learnt.model(train), held) for train, held in tasks.each()]

    def best(self, candidates: Sequence[Learnt]) -> Learnt:
        """The candidate of the least mean validation loss over the old tasks."""
        mean = lambda c: float(np.mean([e.loss for e in self.on(c, self.old)]))
        return min(candidates, key=mean)

    def alone(self) -> Learnt:
        return self.best([Learnt(self.near(lam), {"lam": lam}) for lam in LAMS])

    def pooled(self) -> Learnt:
        """The same model for every task, old or new."""
        found = []
        for lam in LAMS:
            model = self.near(lam)(self.old.train)
            found.append(Learnt(lambda rows, model=model: model, {"lam": lam}))
        return self.best(found)

    def averaging(self) -> Learnt:
        """The w of the least (l2/2)‖w‖² + Σ_τ min over y of (mean loss + (λ/2)‖y − w‖²)."""
        tasks = list(self.tasks())
        w, found = np.zeros(tasks[0].train.shape), []
        for lam in LAMS[::-1]:
            w, _ = averaged(tasks, lam, self.l2, w)
            found.append(Learnt(self.near(lam, w), {"lam": lam}))
        return self.best(found)

    def tasks(self) -> Iterator[Task]:
        """The old tasks for `averaged`, which looks at their training rows only."""
        template = self.template()
        for train, held in self.old.each():
            rows, held_rows = (template._rows(part.x, part.target) for part in (train, held))

            yield Task(rows, row_risk(len(rows), 1.0), held_rows, row_risk(len(held_rows), 1.0))

    def robust(self, learner: RobustMetaLearner) -> Learnt:
        """The meta-learner on the same parts of the rows."""
        train, held, names = self.old.train, self.old.held, self.old.names
        learner.fit(
            train.x, train.target, names[train.task], held.x, held.target, names[held.task]
        )  # fmt: skip
        chosen = {
            "lam": learner.lam_,
            "eta": learner.eta_,
            "epsilon": float(learner.certificate_.epsilon),
            "certified": learner.converged_,
        }
        return Learnt(lambda rows: learner.adapt(rows.x, rows.target), chosen)


def compare_tasks(
    comparison: Comparison,
    new: Tasks,
    learner: RobustMetaLearner,
    report: Callable[[str], None] = lambda name: None,
) -> list[dict[str, Any]]:
    """The errors of all methods on new tasks, on average and on the worst one."""
    makers = {
        "alone": comparison.alone,
        "pooled": comparison.pooled,
        "averaging": comparison.averaging,
        "robust": lambda: comparison.robust(learner),
    }
    results = []
    for key, name in METHODS.items():
        report(name)
        began = time.perf_counter()
        learnt = makers[key]()
        seconds = time.perf_counter() - began
        results.append(
            {"key": key, "name": name, "seconds": seconds, **learnt.chosen}
            | summary(comparison.on(learnt, new), new.names)
        )
    return results


def summary(errors: Sequence[Errors], names: np.ndarray) -> dict[str, Any]:
    """The mean over tasks and the worst task, and each task's own."""
    of_error, of_loss = [e.error for e in errors], [e.loss for e in errors]
    worst = int(np.argmax(of_error))
    return {
        "mean_error": float(np.mean(of_error)),
        "worst_error": of_error[worst],
        "worst_task": str(names[worst]),
        "mean_loss": float(np.mean(of_loss)),
        "worst_loss": float(np.max(of_loss)),
        "errors": {str(name): error for name, error in zip(names, of_error)},
    }
