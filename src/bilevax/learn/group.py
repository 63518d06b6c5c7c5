"""Group DRO: the classifier whose worst group does well."""

from __future__ import annotations

from typing import Any

import numpy as np

from bilevax.arguments import positive, whole
from bilevax.learn._base import RobustClassifier
from bilevax.learn._fit import fit_lower
from bilevax.learn._groups import check_enough, coded
from bilevax.learn._risk import Risk, group_risk
from bilevax.learn._tuned import TunedClassifier


class GroupDROClassifier(RobustClassifier):
    """A linear classifier trained for its worst group, at a price η (`eq:dro_lower`).

    min over w, max over q in the simplex of  Σ_g q_g·L_g(w) − (η/2)‖q − 1/G‖² + (l2/2)‖w‖²

    L_g is the mean logistic loss of group g and q weighs the groups: as η → ∞ all alike, as η → 0
    only the worst one. The intercept is not penalised.

    Args:
        eta: the price of uneven weights, > 0.
        l2: the weight of the ridge penalty, > 0.
        tol: the saddle gap to certify: max over q at `coef_` less min over w at `group_weights_`.
        fit_intercept: whether there is an intercept.
        max_iter: the largest number of Newton steps; a dozen is usual.
        solver: "newton" uses all rows from the start, "sampled" begins with a sample of them, and
            "auto" chooses by their number.

    Fitted: `coef_`, `intercept_`, `classes_` and `n_iter_` as in scikit-learn; `groups_`, the
    distinct groups, and in their order `group_weights_` (q) and `group_losses_`; `gap_`, an upper
    bound on the saddle gap; `solver_`, the one that was used.
    """

    groups_: np.ndarray
    group_weights_: np.ndarray
    group_losses_: np.ndarray
    gap_: float
    solver_: str

    def __init__(
        self,
        eta: float = 1.0,
        l2: float = 1e-3,
        *,
        tol: float = 1e-8,
        fit_intercept: bool = True,
        max_iter: int = 200,
        solver: str = "auto",
    ):
        self.eta = eta
        self.l2 = l2
        self.tol = tol
        self.fit_intercept = fit_intercept
        self.max_iter = max_iter
        self.solver = solver

    def fit(
        self, X: Any, y: Any, groups: Any = None, sample_weight: Any = None
    ) -> GroupDROClassifier:
        """Fit to rows X with labels y.

        `groups` has one entry per row, a string or a number; in the literature a group is a label
        together with an attribute. Without groups every class is one.
        """
        for name in ("eta", "l2", "tol"):
            positive(getattr(self, name), name)
        whole(self.max_iter, "max_iter", 1)
        rows, weight = self._read(X, y, sample_weight)
        if groups is None:
            self.groups_, code = self.classes_, rows.label
        else:
            self.groups_, code = coded(groups, len(rows), "groups")
        check_enough(self.groups_, code, weight, "training")
        risk = group_risk(code, len(self.groups_), weight)
        fitted = fit_lower(rows, risk, self.eta, self.l2, self.tol, self.max_iter, self.solver)
        self._keep(rows, fitted.at.w)
        self.gap_, self.n_iter_, self.solver_ = fitted.gap, fitted.steps, fitted.solver
        self.group_weights_ = fitted.at.weighing.weights
        self.group_losses_ = fitted.at.item_losses
        return self


class TunedGroupDROClassifier(TunedClassifier):
    """Group DRO with η and l2 set by the worst group's validation loss, in one bilevel solve.

    min over (η, l2), max over x2 in the simplex of  Σ_g x2_g·V_g(w)     (`eq:dro_nested`)
    such that (w, q) is the saddle point of `GroupDROClassifier`'s problem at (η, l2)

    V_g is the mean validation loss of group g.

    Args:
        validation_fraction: the share of each group to validate on, unless such rows are given.
        tol: the ε to certify: each line of the ε-KKT conditions, with x1 = (log η, log l2).
        eta_bounds: where to look for η.
        l2_bounds: where to look for l2.
        fit_intercept: whether there is an intercept.
        solver: "newton" uses all rows from the start, "sampled" begins with a sample of them, and
            "auto" chooses by their number.
        random_state: the seed of the split. Copies of a row are never in both parts.
        verbose: show progress.

    Fitted: `eta_`, `l2_`; `coef_`, `intercept_`, `classes_` as in scikit-learn; `groups_`, the
    distinct groups, and in their order `group_weights_` (q), `group_losses_`,
    `validation_weights_` (x2) and `validation_losses_` (V); `certificate_`, a
    `bilevax.KKTCertificate`, and `converged_`, whether it holds at `tol`; `history_`, what each
    step of the tuning saw; `solver_`, the one that was used.
    """

    groups_: np.ndarray
    group_weights_: np.ndarray
    group_losses_: np.ndarray
    validation_weights_: np.ndarray
    validation_losses_: np.ndarray

    def _risk(self, code: np.ndarray, weight: np.ndarray) -> Risk:
        return group_risk(code, int(code.max()) + 1, weight)

    def fit(
        self,
        X: Any,
        y: Any,
        groups: Any = None,
        sample_weight: Any = None,
        X_val: Any = None,
        y_val: Any = None,
        groups_val: Any = None,
        sample_weight_val: Any = None,
    ) -> TunedGroupDROClassifier:
        """Fit to rows X with labels y and groups, tuned on X_val, y_val and groups_val.

        Without validation rows a share of each group is split off. Without groups each class is
        one.
        """
        validation = X_val, y_val, groups_val, sample_weight_val
        levels, self.groups_ = self._levels(X, y, groups, sample_weight, *validation)
        fit = self._tune(levels)
        self.group_weights_ = fit.judged.y2
        self.group_losses_ = fit.tuned.lower.item_losses
        self.validation_weights_ = fit.judged.x2
        self.validation_losses_ = fit.tuned.upper
        return self
