"""Hierarchical group DRO: the worst group does well, also where the groups themselves move.

After Kim, Jo, Ha and Chae, "Mitigating Spurious Correlation via Distributionally Robust Learning
with Hierarchical Ambiguity Sets" (arXiv 2510.02818), and "Learning the Robustness Mechanism with
Bilevel Optimization", which tunes the radii. The equations are in `_moved`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from bilevax.arguments import non_negative, positive
from bilevax.learn._base import (
    ETA,
    L2,
    PricedClassifier,
    Sample,
    check_groups,
    estimator,
    parameter,
)
from bilevax.learn._moved import MovedLevels, MovedLower, moved_lower
from bilevax.learn._problem import bilevel_problem, moved_item_losses
from bilevax.learn._risk import Risk, group_risk
from bilevax.learn._rows import Rows
from bilevax.learn._tuned import TunedClassifier
from bilevax.learn._tuning import Levels
from bilevax.problems import BilevelProblem


@estimator
class HierarchicalDROClassifier(PricedClassifier):
    """Group DRO with rows that may move: every row of group g by radius_g, in the Euclidean norm.

    min over w, max over q in the simplex of  Σ_g q_g·L_g(w) − (η/2)‖q − 1/G‖² + (l2/2)‖w‖²

    L_g is the mean over group g of log(1 + exp(−margin + radius_g·‖w‖)), the largest logistic loss
    that a row can be moved to; of three classes or more, a convex upper bound of it. With radii of
    0 that is `GroupDROClassifier`. Radii are lengths in X: scale the features first.

    Args:
        {parameters}

    Fitted: `coef_`, `intercept_`, `classes_` and `n_iter_` as in scikit-learn; `groups_`, the
    distinct groups, and in their order `radii_`, `group_weights_` (q) and `group_losses_` (L);
    `gap_`, an upper bound on the saddle gap; `solver_`, the one that was used.
    """

    radii: Any = parameter(
        "how far rows may move, ≥ 0: a number, a dictionary with one for each group, or one for "
        "each in the order of `groups_`.",
        default=0.1,
    )
    eta: float = parameter(ETA, default=1.0)
    l2: float = parameter(L2, default=1e-3)

    def fit(
        self, X: Any, y: Any, groups: Any = None, sample_weight: Any = None
    ) -> HierarchicalDROClassifier:
        """Fit to rows X with labels y; `groups` has one entry per row, by default its class."""
        self._check_parameters()
        sample, self.groups_ = self._read(X, y, groups, sample_weight)
        check_groups(self.groups_, sample, "training")
        self.radii_ = read_radii(self.radii, self.groups_)
        risk = group_risk(sample.group, len(self.groups_), sample.weight)
        lower = self._solve(sample.rows, risk)
        self.group_weights_ = lower.weighing.weights
        self.group_losses_ = lower.item_losses
        return self

    def _lower(self, rows: Rows, risk: Risk, w: np.ndarray) -> MovedLower:
        return moved_lower(rows, risk, self.eta, self.l2, w, self.radii_)


@estimator
class TunedHierarchicalDROClassifier(TunedClassifier):
    """Hierarchical group DRO with η, l2 and every group's radius set in one bilevel solve.

    min over (η, l2, radii), max over x2 in the simplex of  Σ_g x2_g·V_g(w)
    such that (w, q) is the saddle point of `HierarchicalDROClassifier`'s problem at these

    V_g is the mean loss of group g's validation rows, which are not moved. The search begins at
    radii of 0, as group DRO, and at small ones.

    Args:
        {parameters}

    Fitted: `eta_`, `l2_`; `coef_`, `intercept_`, `classes_` as in scikit-learn; `groups_`, the
    distinct groups, and in their order `radii_`, `group_weights_` (q), `group_losses_` (L),
    `validation_weights_` (x2) and `validation_losses_` (V); `certificate_`, a
    `bilevax.KKTCertificate` with x1 = (log η, log l2, radii), and `converged_`, whether it holds at
    `tol`; `history_`, what each step of the tuning saw; `solver_`, the one that was used.
    """

    radius_bound: float = parameter(
        "the largest radius to look for, in the unit of X.", default=1.0
    )

    def _risk(self, sample: Sample, part: str) -> Risk:
        return group_risk(sample.group, int(sample.group.max()) + 1, sample.weight)

    def _levels(self, *data: Any, **named: Any) -> tuple[Levels, np.ndarray]:
        for check in (non_negative, positive):  # the second takes None, too
            check(self.radius_bound, "radius_bound")
        levels, names = super()._levels(*data, **named)
        radii = np.full(len(names), float(self.radius_bound))
        low, high = np.append(levels.low, 0 * radii), np.append(levels.high, radii)
        parts = levels.train, levels.risk, levels.held, levels.held_risk
        return MovedLevels(*parts, low, high), names

    def _problem(self, levels: Levels) -> BilevelProblem:
        return bilevel_problem(levels, moved_item_losses)

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
    ) -> TunedHierarchicalDROClassifier:
        """Fit to rows X with labels y and groups, tuned on X_val, y_val and groups_val.

        Without validation rows a share of each group is split off. Without groups each class is
        one.
        """
        validation = X_val, y_val, groups_val, sample_weight_val
        levels, self.groups_ = self._levels(X, y, groups, sample_weight, *validation)
        fit = self._tune(levels)
        self.radii_ = fit.tuned.x[2:]
        self.group_weights_ = fit.judged.y2
        self.group_losses_ = fit.tuned.lower.item_losses
        self.validation_weights_ = fit.judged.x2
        self.validation_losses_ = fit.tuned.upper
        return self


def read_radii(radii: Any, names: np.ndarray) -> np.ndarray:
    """The radius of each group, in the order of their names."""
    groups = names.tolist()
    if isinstance(radii, pd.Series):  # its index names the groups
        radii = radii.to_dict()
    if isinstance(radii, Mapping):
        if absent := [g for g in groups if g not in radii]:
            raise ValueError(f"radii has no radius of the groups {absent}")
        if unknown := [g for g in radii if g not in groups]:
            raise ValueError(f"radii names groups that no row is in: {unknown}")
        radii = [radii[g] for g in groups]
    elif np.ndim(radii) == 0:
        radii = [radii] * len(groups)
    if np.shape(radii) != (len(groups),):
        raise ValueError(
            f"radii must be a number or one for each of the {len(groups)} groups, not of shape "
            f"{np.shape(radii)}"
        )
    for group, radius in zip(groups, radii):
        non_negative(radius, f"the radius of group {group!r}")
    return np.array(radii, float)
