"""Group DRO where the groups of some or of all training rows are not known.

The bilevel form of Ghosal and Li, "Distributionally Robust Optimization with Probabilistic Group"
(AAAI 2023). The equations are in `_soft`.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, replace
from typing import Any

import numpy as np

from bilevax.arguments import non_negative, positive
from bilevax.learn._base import Sample, check_groups, estimator, parameter
from bilevax.learn._known import (
    UNKNOWN,
    check_identified,
    code_known,
    joined,
    seen_groups,
    soft_rows,
)
from bilevax.learn._problem import soft_bilevel_problem
from bilevax.learn._risk import Risk, group_risk
from bilevax.learn._soft import SoftLevels, fit_predictor, soft_risk
from bilevax.learn._tuned import TunedClassifier
from bilevax.learn._tuning import Levels
from bilevax.problems import BilevelProblem


@estimator
class SoftGroupDROClassifier(TunedClassifier):
    """Group DRO with probabilities of groups, whose predictor is tuned together with η and l2.

    min over (η, l2, v), max over x2 in the simplex of  Σ_g x2_g·V_g(w) + γ·R(v)
    such that (w, q) is the saddle point of group DRO with L_g = Σᵢ p_ig(v)·ℓᵢ / Σᵢ p_ig(v)

    p(v) is a multinomial logistic model of a row's group given its features and label, over the
    groups that known rows of its label have; a row whose group is known is in it. V_g is the mean
    loss of group g's validation rows. R(v) is the mean cross-entropy of the predictor on all rows
    with a known group, with a ridge penalty of weight `predictor_l2`. The search begins at the v
    that minimises R alone.

    Args:
        {parameters}

    Fitted: `eta_`, `l2_`; `coef_`, `intercept_`, `classes_` as in scikit-learn; `groups_`, the
    distinct groups, and in their order `group_weights_` (q), `group_losses_` (L),
    `validation_weights_` (x2), `validation_losses_` (V) and the columns of `group_probabilities_`,
    the probabilities of the rows of X; `predictor_coef_` (v), of the features and then of the
    classes; `certificate_`, a `bilevax.KKTCertificate` with x1 = (log η, log l2, v), and
    `converged_`, whether it holds at `tol`; `history_`, what each step of the tuning saw;
    `solver_`, the one that was used.
    """

    gamma: float = parameter("γ, the weight of R: how much v stays a predictor.", default=1.0)
    predictor_l2: float = parameter("the ridge penalty of the predictor, > 0.", default=1e-2)
    _: KW_ONLY
    eta_bounds: tuple[float, float] = parameter(
        "where to look for η. With a small η groups have a weight of 0, and the many entries of v "
        "lead to where one is about to leave it: a kink, at which nothing is certified.",
        default=(0.3, 1e2),
    )

    def _levels(
        self,
        X: Any,
        y: Any,
        groups: Any = None,
        sample_weight: Any = None,
        X_val: Any = None,
        y_val: Any = None,
        groups_val: Any = None,
        sample_weight_val: Any = None,
    ) -> tuple[Levels, np.ndarray]:
        self._check_predictor()
        data = X, y, groups, sample_weight, X_val, y_val, groups_val, sample_weight_val
        train, held, names = self._samples(*data)
        return self._soft_levels(train, held, names), names

    def _check_predictor(self) -> None:
        non_negative(self.gamma, "gamma")
        for check in (non_negative, positive):  # the second takes None, too
            check(self.predictor_l2, "predictor_l2")

    def _samples(
        self,
        X: Any,
        y: Any,
        groups: Any,
        sample_weight: Any,
        X_val: Any,
        y_val: Any,
        groups_val: Any,
        sample_weight_val: Any,
    ) -> tuple[Sample, Sample | None, np.ndarray]:
        """The rows of both parts, and the names of the known groups."""
        train, _ = self._read(X, y, None, sample_weight)
        of_validation = (y_val, groups_val, sample_weight_val)
        if X_val is None and any(given is not None for given in of_validation):
            raise ValueError("y_val, groups_val and sample_weight_val need X_val")
        held = None
        if X_val is not None:
            if y_val is None:
                raise ValueError("X_val needs y_val")
            held = self._read_validation(X_val, y_val, None, sample_weight_val, self.classes_)
        by_class = groups is None and groups_val is None
        if by_class:
            groups, groups_val = train.rows.label, held and held.rows.label
        names, *codes = code_known(
            groups, len(train.rows), groups_val, len(held.rows) if held else 0
        )
        train = replace(train, group=codes[0])
        held = held and replace(held, group=codes[1])
        return train, held, self.classes_[names] if by_class else names

    def _soft_levels(self, train: Sample, held: Sample | None, names: np.ndarray) -> SoftLevels:
        if held is None:
            train, held = self._split_known(train.weighing())
        train = train.weighing()
        held = held.taken(np.flatnonzero((held.group != UNKNOWN) & (held.weight > 0)))
        check_groups(names, held, "validation")
        known = joined(train.taken(np.flatnonzero(train.group != UNKNOWN)), held)
        seen = seen_groups(known.rows.label, known.group, len(self.classes_), len(names))
        check_identified(train, seen, names, self.classes_)
        rows = soft_rows(train, seen)
        guessed = soft_rows(replace(known, group=np.full(len(known.group), UNKNOWN)), seen)
        ridge = float(self.predictor_l2)
        first = fit_predictor(guessed, known.group, ridge)
        low, high = np.transpose([self._log_bounds(name) for name in ("eta_bounds", "l2_bounds")])
        endless = np.full(first.size, np.inf)
        return SoftLevels(
            rows, soft_risk(rows, first), held.rows, self._risk(held, "validation"),
            np.append(low, -endless), np.append(high, endless),
            known=guessed, group=known.group, gamma=float(self.gamma), ridge=ridge,
            first=first.ravel(),
        )  # fmt: skip

    def _split_known(self, sample: Sample) -> tuple[Sample, Sample]:
        """Some of the known rows to validate on, and all others to train on."""
        known = np.flatnonzero(sample.group != UNKNOWN)
        trains, validates = self._parts(sample.taken(known))
        kept = np.union1d(np.flatnonzero(sample.group == UNKNOWN), known[trains])
        return sample.taken(kept), sample.taken(known[validates])

    def _risk(self, sample: Sample, part: str) -> Risk:
        return group_risk(sample.group, int(sample.group.max()) + 1, sample.weight)

    def _problem(self, levels: Levels) -> BilevelProblem:
        assert isinstance(levels, SoftLevels)
        return soft_bilevel_problem(levels)

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
    ) -> SoftGroupDROClassifier:
        """Fit to rows X with labels y, tuned on X_val, y_val and groups_val.

        A group that is not known is -1, None, NaN or pd.NA. With groups_val the groups of all
        training rows may be unknown, and `groups` left out; validation rows of unknown group are
        left out. Without validation rows a share of each group's known rows is split off. Without
        any groups each class is one.
        """
        self._check_predictor()
        validation = X_val, y_val, groups_val, sample_weight_val
        train, held, self.groups_ = self._samples(X, y, groups, sample_weight, *validation)
        levels = self._soft_levels(train, held, self.groups_)
        fit = self._tune(levels)
        known, groups_known = levels.known.label, levels.group
        seen = seen_groups(known, groups_known, len(self.classes_), len(self.groups_))
        self.predictor_coef_ = fit.tuned.x[2:].reshape(levels.train.predictor_shape)
        log_p = soft_rows(train, seen).log_probabilities(self.predictor_coef_)
        self.group_probabilities_ = np.exp(log_p)
        self.group_weights_ = fit.judged.y2
        self.group_losses_ = fit.tuned.lower.item_losses
        self.validation_weights_ = fit.judged.x2
        self.validation_losses_ = fit.tuned.upper
        return self
