"""Group DRO: the classifier whose worst group does well."""

from __future__ import annotations

from typing import Any

from bilevax.learn._base import (
    ETA,
    L2,
    PricedClassifier,
    Sample,
    check_groups,
    estimator,
    parameter,
)
from bilevax.learn._risk import Risk, group_risk
from bilevax.learn._tuned import TunedClassifier


@estimator
class GroupDROClassifier(PricedClassifier):
    """A linear classifier trained for its worst group, at a price η (`eq:dro_lower`).

    min over w, max over q in the simplex of  Σ_g q_g·L_g(w) − (η/2)‖q − 1/G‖² + (l2/2)‖w‖²

    L_g is the mean logistic loss of group g and q weighs the groups: as η → ∞ all alike, as η → 0
    only the worst one. The intercept is not penalised.

    Args:
        {parameters}

    Fitted: `coef_`, `intercept_`, `classes_` and `n_iter_` as in scikit-learn; `groups_`, the
    distinct groups, and in their order `group_weights_` (q) and `group_losses_`; `gap_`, an upper
    bound on the saddle gap; `solver_`, the one that was used.
    """

    eta: float = parameter(ETA, default=1.0)
    l2: float = parameter(L2, default=1e-3)

    def fit(
        self, X: Any, y: Any, groups: Any = None, sample_weight: Any = None
    ) -> GroupDROClassifier:
        """Fit to rows X with labels y.

        `groups` has one entry per row, a string or a number; in the literature a group is a label
        together with an attribute. Without groups every class is one.
        """
        self._check_parameters()
        sample, self.groups_ = self._read(X, y, groups, sample_weight)
        check_groups(self.groups_, sample, "training")
        risk = group_risk(sample.group, len(self.groups_), sample.weight)
        lower = self._solve(sample.rows, risk)
        self.group_weights_ = lower.weighing.weights
        self.group_losses_ = lower.item_losses
        return self


@estimator
class TunedGroupDROClassifier(TunedClassifier):
    """Group DRO with η and l2 set by the worst group's validation loss, in one bilevel solve.

    min over (η, l2), max over x2 in the simplex of  Σ_g x2_g·V_g(w)     (`eq:dro_nested`)
    such that (w, q) is the saddle point of `GroupDROClassifier`'s problem at (η, l2)

    V_g is the mean validation loss of group g.

    Args:
        {parameters}

    Fitted: `eta_`, `l2_`; `coef_`, `intercept_`, `classes_` as in scikit-learn; `groups_`, the
    distinct groups, and in their order `group_weights_` (q), `group_losses_`,
    `validation_weights_` (x2) and `validation_losses_` (V); `certificate_`, a
    `bilevax.KKTCertificate`, and `converged_`, whether it holds at `tol`; `history_`, what each
    step of the tuning saw; `solver_`, the one that was used.
    """

    def _risk(self, sample: Sample, part: str) -> Risk:
        return group_risk(sample.group, int(sample.group.max()) + 1, sample.weight)

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
