"""What all linear classifiers here share: parameters, checks of their input, and prediction."""

from __future__ import annotations

import inspect
import textwrap
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, TypeVar, dataclass_transform

import numpy as np
import pandas as pd
from scipy import special
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data

from bilevax.arguments import non_negative, positive, warn, whole
from bilevax.learn._fit import fit_lower
from bilevax.learn._newton import Lower
from bilevax.learn._risk import Risk
from bilevax.learn._rows import Rows
from bilevax.learn._threads import threads_for

#: Fewer validation rows than this say little about a group.
FEW = 5
#: What the parameters mean that both classifiers at a given price have.
ETA = "the price of uneven weights, > 0."
L2 = (
    "the weight of the ridge penalty. With 0 the saddle gap is certified against all models within "
    "10·(1 + ‖w‖), and rows that can be separated have no solution, which is warned of."
)

T = TypeVar("T")


def parameter(meaning: str, *, default: Any) -> Any:
    """A parameter of an estimator, with what it means and its default value."""
    return field(default=default, metadata={"meaning": meaning})


@dataclass_transform(field_specifiers=(parameter,))
def estimator(cls: type[T]) -> type[T]:
    """A dataclass of parameters, which take the place of {parameters} in its docstring."""
    made: Any = dataclass(eq=False, repr=False)(cls)
    known = made.__dataclass_fields__
    wrap = textwrap.TextWrapper(100, initial_indent=" " * 8, subsequent_indent=" " * 12)
    lines = [
        wrap.fill(f"{name}: {known[name].metadata['meaning']}")
        for name in inspect.signature(made).parameters
    ]
    made.__doc__ = (made.__doc__ or "").replace("{parameters}", "\n".join(lines).lstrip())
    return made


@dataclass(frozen=True)
class Sample:
    """Rows, with the number of its group and the weight of each."""

    rows: Rows
    group: np.ndarray
    weight: np.ndarray

    def taken(self, chosen: np.ndarray) -> Sample:
        """Some of the rows."""
        return Sample(self.rows.taken(chosen), self.group[chosen], self.weight[chosen])

    def weighing(self) -> Sample:
        """The rows whose weight is not 0."""
        return self.taken(np.flatnonzero(self.weight > 0))


@estimator
class RobustClassifier(ClassifierMixin, BaseEstimator):
    """A linear classifier: `coef_` and `intercept_` as in scikit-learn's logistic regression."""

    _: KW_ONLY
    fit_intercept: bool = parameter("whether there is an intercept.", default=True)
    solver: str = parameter(
        '"newton" uses all rows from the start, "sampled" begins with a sample of them, and "auto" '
        "chooses by their number.",
        default="auto",
    )

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags

    def _read(self, X: Any, y: Any, groups: Any, weight: Any) -> tuple[Sample, np.ndarray]:
        """The training rows, and the names of their groups; without groups each class is one."""
        X, y = validate_data(self, X, y, accept_sparse="csr", dtype=np.float64)
        check_classification_targets(y)
        weight = _check_sample_weight(weight, X, dtype=np.float64, ensure_non_negative=True)
        self.classes_, label = np.unique(y, return_inverse=True)
        present = self.classes_[np.unique(label[weight > 0])]
        if len(present) < 2:
            raise ValueError(
                f"{type(self).__name__} needs rows of more than one class, not of the class "
                f"{present.tolist()} only"
            )
        names, group = (self.classes_, label) if groups is None else coded(groups, len(y), "groups")
        return Sample(self._rows(X, label), group, weight), names

    def _read_validation(
        self, X: Any, y: Any, groups: Any, weight: Any, names: np.ndarray
    ) -> Sample:
        """Validation rows, which must have the features, classes and groups of the training."""
        X, y = validate_data(self, X, y, accept_sparse="csr", dtype=np.float64, reset=False)
        weight = _check_sample_weight(weight, X, dtype=np.float64, ensure_non_negative=True)
        if len(unknown := np.setdiff1d(y, self.classes_)):
            raise ValueError(f"y_val has classes that y has not: {unknown.tolist()}")
        label = np.searchsorted(self.classes_, y)
        if groups is None:
            return Sample(self._rows(X, label), label, weight)
        own, group = coded(groups, len(y), "groups_val")
        if len(unknown := np.setdiff1d(own, names)):
            raise ValueError(f"groups_val has groups without any training row: {unknown.tolist()}")
        if len(absent := np.setdiff1d(names, own)):
            raise ValueError(
                f"groups_val has no row of the groups {absent.tolist()}, whose loss can then not "
                "be judged"
            )
        return Sample(self._rows(X, label), np.searchsorted(names, own)[group], weight)

    def _rows(self, x: Any, label: np.ndarray) -> Rows:
        return Rows(x, label, len(self.classes_), self.fit_intercept)

    def _keep(self, rows: Rows, w: np.ndarray) -> None:
        """Keep fitted parameters under scikit-learn's names."""
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
        """The logarithms of the probabilities of the classes."""
        scores = self.decision_function(X)
        if scores.ndim == 1:
            return np.column_stack([special.log_expit(-scores), special.log_expit(scores)])
        return special.log_softmax(scores, axis=1)


@estimator
class PricedClassifier(RobustClassifier):
    """A classifier at a given price η of uneven weights, and with a given ridge penalty l2."""

    _: KW_ONLY
    tol: float = parameter(
        "the saddle gap to certify: max over q at `coef_` less min over w at these weights q.",
        default=1e-8,
    )
    max_iter: int = parameter("the largest number of Newton steps; a dozen is usual.", default=200)

    def _check_parameters(self) -> None:
        for name in ("eta", "tol"):
            positive(getattr(self, name), name)
        non_negative(self.l2, "l2")  # pyright: ignore[reportAttributeAccessIssue]
        whole(self.max_iter, "max_iter", 1)

    def _lower(self, rows: Rows, risk: Risk, w: np.ndarray) -> Lower:
        """The lower level at w."""
        return Lower(rows, risk, self.eta, self.l2, w)  # pyright: ignore[reportAttributeAccessIssue]

    def _solve(self, rows: Rows, risk: Risk) -> Lower:
        """Find the saddle point and keep it."""
        with threads_for(*rows.x.shape):
            found = fit_lower(self._lower, rows, risk, self.tol, self.max_iter, self.solver)
        lower, self.gap_, self.n_iter_, self.solver_ = found
        self._keep(rows, lower.w)
        return lower


def coded(groups: Any, count: int, name: str) -> tuple[np.ndarray, np.ndarray]:
    """The distinct groups, sorted, and the number of its group for each row."""
    groups = np.asarray(groups)
    if groups.shape != (count,):
        raise ValueError(
            f"{name} must have one entry for each of the {count} rows, not shape {groups.shape}"
        )
    if missing := int(pd.isna(groups).sum()):
        raise ValueError(
            f"{name}: {missing} rows have no group (NaN, None or NA); name one for them"
        )
    if _are_weights(groups):
        raise ValueError(
            f"{name} are numbers such as {groups[np.argmax(groups % 1 != 0)]:g}, which are weights "
            "rather than groups; these go by name: fit(X, y, sample_weight=…)"
        )
    try:
        return np.unique(groups, return_inverse=True)
    except TypeError:
        raise TypeError(f"{name} must all be of one kind, such as strings or numbers") from None


def _are_weights(groups: np.ndarray) -> bool:
    """Whether these are floats that are not whole, or all the same, which name no groups."""
    odd = groups.dtype.kind == "f" and ((groups % 1 != 0).any() or np.ptp(groups) == 0)
    return bool(odd)


def check_groups(names: np.ndarray, sample: Sample, part: str) -> None:
    """Refuse a group without rows that weigh anything; warn of a very small one."""
    counts = np.bincount(sample.group[sample.weight > 0], minlength=len(names))
    if not counts.all():
        empty = [str(name) for name in names[counts == 0]]
        raise ValueError(f"the {part} part has no row, or only rows of weight 0, of {empty}")
    if part == "validation" and counts.min() < FEW:
        few = [f"{str(names[g])!r} ({counts[g]})" for g in np.flatnonzero(counts < FEW)]
        warn(
            f"these groups have fewer than {FEW} validation rows, so that their loss is hardly "
            f"known: {', '.join(few)}",
            UserWarning,
        )
