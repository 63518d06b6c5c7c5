"""Meta-learning: a start for the models of new tasks, learnt from tasks whose worst rows count."""

from __future__ import annotations

from dataclasses import KW_ONLY
from typing import Any

import numpy as np
from sklearn.base import clone
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils import check_random_state
from sklearn.utils.metaestimators import available_if
from sklearn.utils.validation import check_is_fitted, validate_data

from bilevax.arguments import non_negative, positive, probability, warn
from bilevax.learn._base import estimator, parameter
from bilevax.learn._linear import LinearModel, of_classes
from bilevax.learn._meta import MetaFit, MetaTuner, Penalty, Task
from bilevax.learn._meta_problem import meta_point, meta_problem
from bilevax.learn._risk import row_risk
from bilevax.learn._tasks import Part, check_classes, coded_tasks, numbers_of, split_tasks
from bilevax.learn.task import TRAIN_SHARE, TaskModel, share_of_rows
from bilevax.problems import BilevelProblem, Point
from bilevax.progress import Progress


@estimator
class RobustMetaLearner(LinearModel):
    """A meta-parameter w near which tasks do well, with η and λ: `eq:DRO_meta_tuning`.

    min over w, η, λ, max over x2^τ of  Σ_τ Σᵢ x2ᵢ^τ·ℓ(y^τ; validation row i of τ) + (l2/2)‖w‖²
    such that (y^τ, q^τ) is the saddle point of `TaskModel`'s problem for task τ at (w, η, λ)

    with 0 ≤ x2ᵢ^τ ≤ 1/(share·m) and Σ x2^τ = 1: the mean loss over the worst `share` of the m
    validation rows of each task. λ says how near tasks are to each other, and how much a new task
    keeps of w; η, how even the weights q of its own rows are. As in the equation, η is a price for
    (1/2)‖q − 1/n‖², which is smaller for more rows; keep tasks, old and new, of similar sizes, or
    give train_share=1, with which η plays no part. Scale the features, and targets of the squared
    loss.

    Args:
        {parameters}

    Fitted: `coef_` and `intercept_`, the meta-parameter; `eta_`, `lam_`; `classes_` for the
    logistic loss; `tasks_`, the distinct tasks, and in their order `task_coef_`,
    `task_intercept_`, `task_weights_` (q, of the training rows of each), `validation_weights_` (x2)
    and `task_losses_` (Σᵢ x2ᵢ·ℓᵢ); `certificate_`, a `bilevax.KKTCertificate`, and `converged_`,
    whether it holds at `tol`; `witnesses_`, its z1, z2 and ρ; `n_iter_`, how often all tasks were
    solved.
    """

    share: float = parameter(
        "the share of a task's validation rows that count, the worst ones, in (0, 1].", default=0.5
    )
    l2: float = parameter(
        "the weight of the meta-parameter's own ridge penalty. Few tasks leave w to run far, where "
        "their validation rows can be separated or interpolated; 0 is the equation.",
        default=0.1,
    )
    _: KW_ONLY
    train_share: float | None = parameter(TRAIN_SHARE, default=None)
    validation_fraction: float = parameter(
        "the share of each task's rows to validate on, unless such rows are given.", default=0.5
    )
    tol: float = parameter(
        "the ε to certify: each line of the ε-KKT conditions, with x1 = (w, η, λ).", default=1e-3
    )
    eta_bounds: tuple[float, float] = parameter("where to look for η.", default=(1e-3, 1e2))
    lam_bounds: tuple[float, float] = parameter("where to look for λ.", default=(1e-3, 1e2))
    random_state: Any = parameter(
        "the seed of the split. Copies of a row are never in both parts.", default=None
    )
    verbose: bool = parameter("show progress.", default=False)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        # The meta-parameter is where tasks begin, and need not be a good model itself.
        for kind in (tags.classifier_tags, tags.regressor_tags):
            if kind is not None:
                kind.poor_score = True
        return tags

    def fit(
        self,
        X: Any,
        y: Any,
        tasks: Any = None,
        X_val: Any = None,
        y_val: Any = None,
        tasks_val: Any = None,
    ) -> RobustMetaLearner:
        """Fit to rows X with targets y. `tasks` has one entry per row, a string or a number.

        Tasks in a list or a dictionary become rows by `stack_tasks`. Without X_val, y_val and
        tasks_val a share of each task's rows is split off to validate on. A task whose training
        rows are of one class is warned of by name. Without `tasks` all rows are one task.
        """
        levels = self._levels(X, y, tasks, X_val, y_val, tasks_val)
        listed = [self._task(k, *levels) for k in range(len(self.tasks_))]
        with Progress(self.verbose, unit="evaluations", label="tasks") as bar:

            def report(count: int, at: Penalty) -> None:
                shown = {"η": f"{at.x.eta:.3g}", "λ": f"{at.x.lam:.3g}", "ρ": f"{at.rho:g}"}
                bar.show(count, **shown, loss=f"{at.value:.4f}")

            bounds = self._bounds("eta_bounds"), self._bounds("lam_bounds")
            fit = MetaTuner(listed, *bounds, float(self.tol), float(self.l2), report).run()
        self._keep(fit)
        return self

    def _levels(
        self,
        X: Any,
        y: Any,
        tasks: Any = None,
        X_val: Any = None,
        y_val: Any = None,
        tasks_val: Any = None,
    ) -> tuple[Part, Part]:
        """The rows of all tasks to train on and to validate on; sets `tasks_` and `classes_`."""
        positive(self.tol, "tol")
        non_negative(self.l2, "l2")
        share_of_rows(self.train_share, "train_share")
        share_of_rows(float(self.share), "share")
        probability(self.validation_fraction, "validation_fraction")
        x, target = self._read(X, y)
        self.tasks_, code = coded_tasks(tasks, len(x))
        train = Part(x, target, code)
        if X_val is not None:
            held = self._read_validation(X_val, y_val, tasks is None, tasks_val)
        elif y_val is not None or tasks_val is not None:
            raise ValueError("y_val and tasks_val need X_val")
        else:
            seed = int(check_random_state(self.random_state).randint(2**31))
            by_class = self.loss == "logistic"
            train, held = split_tasks(
                train, self.tasks_, by_class, float(self.validation_fraction), seed
            )
        if self.loss == "logistic":
            check_classes(train, self.tasks_, self.classes_)
        return train, held

    def _read_validation(self, X: Any, y: Any, alone: bool, tasks: Any) -> Part:
        """Validation rows, some of each task."""
        if y is None or alone != (tasks is None):
            raise ValueError("X_val needs y_val, and tasks_val if and only if tasks is given")
        number = self.loss == "squared"
        x, y = validate_data(self, X, y, dtype=np.float64, reset=False, y_numeric=number)
        target = np.asarray(y, float) if number else self._labels(y, "y_val")
        x = np.asarray(x)
        if alone:
            return Part(x, target, np.zeros(len(x), int))
        code = numbers_of(tasks, self.tasks_, len(x), "tasks_val")
        if len(absent := np.setdiff1d(np.arange(len(self.tasks_)), code)):
            raise ValueError(f"tasks_val has no row of the tasks {self.tasks_[absent].tolist()}")
        return Part(x, target, code)

    def _task(self, k: int, train: Part, held: Part) -> Task:
        """Both parts of a task, each with the risk of its rows."""
        parts = (part.taken(part.task == k) for part in (train, held))
        rows, held_rows = (self._rows(part.x, part.target) for part in parts)
        risk = row_risk(len(rows), self.train_share)
        return Task(rows, risk, held_rows, row_risk(len(held_rows), float(self.share)))

    def _bounds(self, name: str) -> tuple[float, float]:
        bounds = getattr(self, name)
        try:
            low, high = (float(b) for b in bounds)
        except (TypeError, ValueError):
            raise ValueError(f"{name} must be two numbers, not {bounds!r}") from None
        if not 0 < low <= high < np.inf:
            raise ValueError(f"{name} must be 0 < low ≤ high, both finite, not {bounds!r}")
        return low, high

    def _keep(self, fit: MetaFit) -> None:
        self.coef_, self.intercept_ = self._split_off(fit.x.w)
        self.eta_, self.lam_ = fit.x.eta, fit.x.lam
        self.task_coef_, self.task_intercept_ = self._split_off(np.stack(fit.y1))
        self.task_weights_, self.validation_weights_ = fit.y2, fit.x2
        self.witnesses_ = {"z1": np.stack(fit.z1), "z2": fit.z2, "rho": fit.certificate.rho}
        self.task_losses_ = np.asarray(fit.losses)
        self.certificate_, self.n_iter_ = fit.certificate, fit.evaluations
        self.converged_ = bool(fit.certificate.certified(float(self.tol)))
        if not self.converged_:
            warn(
                f"ε-KKT is certified at ε = {fit.certificate.epsilon:.2g} only, not at "
                f"tol={self.tol:g}; scale the features and targets, or give a larger tol",
                ConvergenceWarning,
            )

    def adapt(self, X: Any, y: Any) -> TaskModel:
        """The model of a new task with rows X and targets y, near the meta-parameter.

        It solves the new task's lower level at the fitted w, η and λ, and certifies it (`gap_`).
        """
        self._checked(X)
        model = TaskModel(
            self.eta_,
            self.lam_,
            coef=self.coef_,
            intercept=self.intercept_ if self.fit_intercept else None,
            classes=self.classes_ if self.loss == "logistic" else None,
            train_share=self.train_share,
            loss=self.loss,
            fit_intercept=self.fit_intercept,
        )
        return model.fit(X, y)

    def problem(
        self, X: Any, y: Any, tasks: Any = None, **named: Any
    ) -> tuple[BilevelProblem, Point]:
        """What `fit` solves with the same arguments, and a start, for `bilevax.solve`.

        The blocks are those of `bilevax.problems.meta_learning`.
        """
        unfitted: Any = clone(self)  # so that self stays as it is
        parts = unfitted._levels(X, y, tasks, **named)
        each = range(len(unfitted.tasks_))
        return meta_problem([[p.taken(p.task == k) for p in parts] for k in each], unfitted)

    def point(self) -> Point:
        """What `fit` found, with the witnesses of its certificate: a point of `problem`."""
        check_is_fitted(self)
        return meta_point(self)

    def _row_scores(self, X: Any, tasks: Any) -> np.ndarray:
        """The scores of rows by the models of their tasks, or by the meta-parameter."""
        if tasks is None:
            return self._scores(X)
        x = self._checked(X)
        code = numbers_of(tasks, self.tasks_, len(x), "tasks")
        scores = np.einsum("i...j,ij->i...", self.task_coef_[code], x) + self.task_intercept_[code]
        return scores[:, 0] if scores.shape[1:] == (1,) else scores

    @available_if(of_classes)
    def decision_function(self, X: Any, tasks: Any = None) -> np.ndarray:
        """The scores: one column per class, or one number per row for two classes."""
        return self._row_scores(X, tasks)

    def predict(self, X: Any, tasks: Any = None) -> np.ndarray:
        """Predictions by the models of the rows' tasks; without `tasks` by the meta-parameter."""
        return self._decision(self._row_scores(X, tasks))

    @available_if(of_classes)
    def predict_proba(self, X: Any, tasks: Any = None) -> np.ndarray:
        """The probabilities of the classes."""
        return self._probabilities(self._row_scores(X, tasks))

    def score(self, X: Any, y: Any, sample_weight: Any = None, tasks: Any = None) -> float:
        """The share of right classes, or R²."""
        return self._score_of(y, self.predict(X, tasks), sample_weight)
