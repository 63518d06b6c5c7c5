"""One task: a linear model that is held near a meta-parameter."""

from __future__ import annotations

from dataclasses import KW_ONLY
from typing import Any

import numpy as np
from sklearn.exceptions import ConvergenceWarning

from bilevax.arguments import positive, warn, whole
from bilevax.learn._base import ETA, estimator, parameter
from bilevax.learn._certificate import saddle_gap
from bilevax.learn._linear import LinearModel
from bilevax.learn._newton import Lower, Preconditioner, minimise
from bilevax.learn._risk import row_risk

TRAIN_SHARE = (
    "the share of a task's rows that count while it is fitted, the worst ones, in (0, 1]; None "
    "lets the adversary take any weights, and 1 weighs all rows alike."
)


@estimator
class TaskModel(LinearModel):
    """A linear model of one task near those of others: a lower level of `eq:DRO_meta_tuning`.

    min over y, max over q of  Σᵢ qᵢ·ℓᵢ(y) − (η/2)‖q − 1/n‖² + (λ/2)‖y − w‖²

    with weights q of the n rows, Σq = 1, 0 ≤ qᵢ ≤ 1/(train_share·n). y holds the intercept, too. As
    λ → ∞ the model is the meta-parameter w, as λ → 0 the task stands alone. There is one solution,
    also for rows of one class or a single row. `RobustMetaLearner.adapt` makes these models.

    Args:
        {parameters}

    Fitted: `coef_` and `intercept_` as scikit-learn's have them, `classes_` for the logistic loss;
    `row_weights_` (q), `gap_`, an upper bound on the saddle gap, and `n_iter_`, Newton steps.
    """

    eta: float = parameter(ETA, default=1.0)
    lam: float = parameter("the weight λ > 0 of the distance to the meta-parameter.", default=1.0)
    _: KW_ONLY
    coef: Any = parameter(
        "the coefficients in w, in the shape of `coef_`; None for zero.", default=None
    )
    intercept: Any = parameter(
        "the intercept in w, in the shape of `intercept_`; None for zero.", default=None
    )
    classes: Any = parameter(
        "all classes that there may be, where the rows do not have each of them.", default=None
    )
    train_share: float | None = parameter(TRAIN_SHARE, default=None)
    tol: float = parameter(
        "the saddle gap to certify, relative to the value where that is above 1.", default=1e-8
    )
    max_iter: int = parameter("the largest number of Newton steps.", default=200)

    def fit(self, X: Any, y: Any) -> TaskModel:
        """Fit to the rows X of a task, with targets y."""
        for name in ("eta", "lam", "tol"):
            positive(getattr(self, name), name)
        whole(self.max_iter, "max_iter", 1)
        share_of_rows(self.train_share, "train_share")
        X, target = self._read(X, y, self.classes)
        rows = self._rows(X, target)
        risk, w = row_risk(len(rows), self.train_share), self._centre(rows.shape)
        kept = Preconditioner()
        aim = lambda at: self.tol * max(1.0, abs(at.value))
        lower = minimise(
            lambda v: Lower(rows, risk, self.eta, self.lam, v, w),
            w,
            kept,
            lambda at: saddle_gap(at) <= aim(at),
            self.max_iter,
        )
        self.gap_, self.n_iter_ = saddle_gap(lower), max(kept.steps, 1)
        if not self.gap_ <= aim(lower):
            warn(
                f"the saddle gap is certified at {self.gap_:.2g} only, after {kept.steps} Newton "
                "steps; scale the features, or give a larger eta, tol or max_iter",
                ConvergenceWarning,
            )
        self.coef_, self.intercept_ = self._split_off(lower.w)
        self.row_weights_ = lower.weighing.weights
        return self

    def _centre(self, shape: tuple[int, int]) -> np.ndarray:
        """w, as a matrix of scores and parameters."""
        scores, width = shape
        w = np.zeros(shape)
        parts = {"coef": w[:, : width - self.fit_intercept], "intercept": w[:, -1]}
        if self.intercept is not None and not self.fit_intercept:
            raise ValueError("intercept: there is none where fit_intercept=False")
        for name, place in parts.items():
            if (given := getattr(self, name)) is None:
                continue
            found = np.asarray(given, float)
            if found.size != place.size or not np.isfinite(found).all():
                raise ValueError(
                    f"{name} must be {place.size} finite numbers, {scores} × "
                    f"{place.size // scores}, not an array of shape {found.shape}"
                )
            place[...] = found.reshape(place.shape)
        return w


def share_of_rows(share: Any, name: str) -> None:
    """Refuse what is neither None nor a share."""
    positive(share, name)
    if share is not None and share > 1:
        raise ValueError(f"{name} must be a share of the rows, at most 1, not {share}")
