"""Linear models of numbers or of classes: what single tasks and the meta-learner share."""

from __future__ import annotations

from dataclasses import KW_ONLY
from typing import Any

import numpy as np
from scipy import special
from sklearn.base import BaseEstimator
from sklearn.metrics import accuracy_score, r2_score
from sklearn.utils import ClassifierTags, RegressorTags
from sklearn.utils.metaestimators import available_if
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data

from bilevax.arguments import one_of
from bilevax.learn._base import estimator, parameter
from bilevax.learn._rows import Rows
from bilevax.learn._squared import SquaredRows

LOSSES = ("squared", "logistic")


def of_classes(model: Any) -> bool:
    if model.loss == "logistic":
        return True
    raise AttributeError("only loss='logistic' has classes")


@estimator
class LinearModel(BaseEstimator):
    """A linear model: `coef_` and `intercept_` as scikit-learn's have them."""

    _: KW_ONLY
    loss: str = parameter(
        '"squared" is ½(prediction − y)², for numbers; "logistic" is log loss, for classes.',
        default="squared",
    )
    fit_intercept: bool = parameter(
        "whether there is an intercept. It is a parameter like the others: λ pulls at it, too.",
        default=True,
    )

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        if self.loss == "logistic":
            tags.estimator_type, tags.classifier_tags = "classifier", ClassifierTags()
        else:
            tags.estimator_type, tags.regressor_tags = "regressor", RegressorTags()
        tags.target_tags.required = True
        return tags

    def _read(self, X: Any, y: Any, classes: Any = None) -> tuple[np.ndarray, np.ndarray]:
        """Features and numbers, or the number of its class for each row; sets `classes_`."""
        one_of(self.loss, "loss", *LOSSES)
        if self.loss == "squared":
            X, y = validate_data(self, X, y, dtype=np.float64, y_numeric=True)
            return X, np.asarray(y, float)
        X, y = validate_data(self, X, y, dtype=np.float64)
        check_classification_targets(y)
        self.classes_ = np.unique(y) if classes is None else np.unique(classes)
        if len(self.classes_) < 2:
            raise ValueError(
                f"{type(self).__name__} needs rows of more than one class, not of the class "
                f"{self.classes_.tolist()} only"
            )
        return X, self._labels(y, "y")

    def _labels(self, y: np.ndarray, name: str) -> np.ndarray:
        """The number of its class for each row."""
        if len(unknown := np.setdiff1d(y, self.classes_)):
            raise ValueError(f"{name} has classes that are not known: {unknown.tolist()}")
        return np.searchsorted(self.classes_, y)

    def _rows(self, x: np.ndarray, target: np.ndarray) -> Rows:
        """The rows under the loss; a column of ones makes the intercept a parameter like others."""
        x = np.column_stack([x, np.ones(len(x))]) if self.fit_intercept else x
        if self.loss == "squared":
            return SquaredRows(x, target, 1, False)
        return Rows(x, target, len(self.classes_), False)

    def _split_off(self, w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Coefficients and intercepts, under scikit-learn's shapes."""
        coef, intercept = (w[..., :-1], w[..., -1]) if self.fit_intercept else (w, 0.0 * w[..., -1])
        if self.loss == "squared":
            return coef[..., 0, :].copy(), intercept[..., 0].copy()
        return coef.copy(), intercept.copy()

    def _scores(self: Any, X: Any) -> np.ndarray:
        """The predicted numbers, or the scores of the classes."""
        scores = self._checked(X) @ self.coef_.T + self.intercept_
        return scores[:, 0] if scores.shape[1:] == (1,) else scores

    def _checked(self, X: Any) -> np.ndarray:
        check_is_fitted(self)
        return np.asarray(validate_data(self, X, dtype=np.float64, reset=False))

    @available_if(of_classes)
    def decision_function(self, X: Any) -> np.ndarray:
        """The scores: one column per class, or one number per row for two classes."""
        return self._scores(X)

    def predict(self, X: Any) -> np.ndarray:
        """The number, or the class of the highest score."""
        return self._decision(self._scores(X))

    def _decision(self, scores: np.ndarray) -> np.ndarray:
        if self.loss == "squared":
            return scores
        best = (scores > 0).astype(int) if scores.ndim == 1 else scores.argmax(axis=1)
        return self.classes_[best]

    @available_if(of_classes)
    def predict_proba(self, X: Any) -> np.ndarray:
        """The probabilities of the classes."""
        return self._probabilities(self._scores(X))

    def _probabilities(self, scores: np.ndarray) -> np.ndarray:
        if scores.ndim == 1:
            return np.column_stack([special.expit(-scores), special.expit(scores)])
        return special.softmax(scores, axis=1)

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """The share of right classes, or R²."""
        return self._score_of(y, self.predict(X), sample_weight)

    def _score_of(self, y: Any, predicted: np.ndarray, sample_weight: Any) -> float:
        measure = r2_score if self.loss == "squared" else accuracy_score
        return float(measure(y, predicted, sample_weight=sample_weight))
