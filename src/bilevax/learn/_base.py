"""What all linear classifiers here share: checks of their input, and prediction."""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy import special
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data

from bilevax.learn._rows import Rows


class RobustClassifier(ClassifierMixin, BaseEstimator):
    """A linear classifier: `coef_` and `intercept_` as in scikit-learn's logistic regression."""

    classes_: np.ndarray
    coef_: np.ndarray
    intercept_: np.ndarray
    n_iter_: int
    fit_intercept: bool

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags

    def _read(self, X: Any, y: Any, sample_weight: Any) -> tuple[Rows, np.ndarray]:
        """The training rows and their weights."""
        X, y = validate_data(self, X, y, accept_sparse="csr", dtype=np.float64)
        check_classification_targets(y)
        weight = _check_sample_weight(sample_weight, X, dtype=np.float64, ensure_non_negative=True)
        self.classes_, label = np.unique(y, return_inverse=True)
        present = self.classes_[np.unique(label[weight > 0])]
        if len(present) < 2:
            raise ValueError(
                f"{type(self).__name__} needs rows of more than one class, not of the class "
                f"{present.tolist()} only"
            )
        return self._rows(X, label), weight

    def _read_validation(self, X: Any, y: Any, sample_weight: Any) -> tuple[Rows, np.ndarray]:
        """Validation rows, which must look like the training rows."""
        X, y = validate_data(self, X, y, accept_sparse="csr", dtype=np.float64, reset=False)
        weight = _check_sample_weight(sample_weight, X, dtype=np.float64, ensure_non_negative=True)
        if len(unknown := np.setdiff1d(y, self.classes_)):
            raise ValueError(f"y_val has classes that y has not: {unknown.tolist()}")
        return self._rows(X, np.searchsorted(self.classes_, y)), weight

    def _rows(self, x: Any, label: np.ndarray) -> Rows:
        return Rows(x, label, len(self.classes_), self.fit_intercept)

    def _keep(self, rows: Rows, w: np.ndarray) -> None:
        self.coef_ = np.ascontiguousarray(w[:, :-1] if rows.intercept else w)
        self.intercept_ = w[:, -1].copy() if rows.intercept else np.zeros(rows.scores)
        if rows.scores > 1:  # adding a number to all scores changes no probability
            self.intercept_ -= self.intercept_.mean()

    def decision_function(self, X: Any) -> np.ndarray:
        """The scores: one column per class, or one number per row for two classes."""
        check_is_fitted(self)
        X = validate_data(self, X, accept_sparse="csr", dtype=np.float64, reset=False)
        scores = np.asarray(X @ self.coef_.T) + self.intercept_
        return scores[:, 0] if scores.shape[1] == 1 else scores

    def predict(self, X: Any) -> np.ndarray:
        """The class of the highest score."""
        scores = self.decision_function(X)
        best = (scores > 0).astype(int) if scores.ndim == 1 else scores.argmax(axis=1)
        return self.classes_[best]

    def predict_proba(self, X: Any) -> np.ndarray:
        """The probabilities of the classes, as they are under the weights of the training."""
        return np.exp(self.predict_log_proba(X))

    def predict_log_proba(self, X: Any) -> np.ndarray:
        """Their logarithms."""
        scores = self.decision_function(X)
        if scores.ndim == 1:
            return np.column_stack([special.log_expit(-scores), special.log_expit(scores)])
        return special.log_softmax(scores, axis=1)
