"""Tail risk: the classifier whose worst rows do well, where no groups are known."""

from __future__ import annotations

from dataclasses import KW_ONLY
from typing import Any

from bilevax.arguments import non_negative, positive
from bilevax.learn._base import ETA, L2, PricedClassifier, Sample, estimator, parameter
from bilevax.learn._risk import Risk, tail_risk
from bilevax.learn._tuned import TunedClassifier

SHARE = "the share of rows that count, in (0, 1]."
TRAINING_SHARE = "the share of rows that count; 0 is the worst row alone, without a cap of weights."


@estimator
class TailRiskClassifier(PricedClassifier):
    """A linear classifier trained for its worst rows, at a price η.

    min over w, max over q of  Σᵢ qᵢ·ℓᵢ(w) − (η/2)·n‖q − 1/n‖² + (l2/2)‖w‖²

    with weights q of the rows, Σq = 1, 0 ≤ qᵢ ≤ 1/(share·n). As η → 0 that is the mean logistic
    loss over the worst `share` of the rows, as η → ∞ over all of them. The factor n makes η mean
    the same for any number of rows. The intercept is not penalised.

    The lower level of `eq:DRO_tuning` is that of share=0, where q is any point of the simplex, and
    l2=0; its η is n times the one here.

    Where labels are noisy the worst rows are the mislabelled ones, and a small share asks for a
    model that commits itself to nothing.

    Args:
        {parameters}

    Fitted: `coef_`, `intercept_`, `classes_` and `n_iter_` as in scikit-learn; `risk_`, the
    weighted loss Σ qᵢ·ℓᵢ of the training rows; `gap_`, an upper bound on the saddle gap; `solver_`,
    the one that was used.
    """

    share: float = parameter(TRAINING_SHARE, default=0.5)
    eta: float = parameter(ETA, default=0.1)
    l2: float = parameter(L2, default=1e-3)

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> TailRiskClassifier:
        """Fit to rows X with labels y."""
        self._check_parameters()
        _check_share(self.share, "share", zero=True)
        sample = self._read(X, y, None, sample_weight)[0].weighing()
        risk = tail_risk(self.share, sample.weight)
        lower = self._solve(sample.rows, risk)
        self.risk_ = float(lower.row_weights @ lower.losses.value)
        return self


@estimator
class TunedTailRiskClassifier(TunedClassifier):
    """Tail risk with η and l2 set by the mean loss over the worst `share` of the validation rows.

    min over (η, l2), max over x2 of  Σᵢ x2ᵢ·vᵢ(w),  Σx2 = 1, 0 ≤ x2ᵢ ≤ 1/(share·n)
    such that (w, q) is the saddle point of `TailRiskClassifier`'s problem at (η, l2)

    vᵢ is the loss of validation row i.

    That is `eq:DRO_tuning` up to four things, of which options undo the first three:

    - the training weights q are capped by the same share, where the equation has the whole simplex:
      train_share=0;
    - there is a penalty l2, tuned as well: l2_bounds=(0, 0);
    - η is bounded: eta_bounds=(0, inf). It stays above 0, since log η is what is tuned;
    - η is n times smaller than in the equation, n the number of training rows: n·eta_ is its η.

    Args:
        {parameters}

    Fitted: `eta_`, `l2_`; `coef_`, `intercept_`, `classes_` as in scikit-learn; `risk_` and
    `validation_risk_`, the weighted losses of both parts; `certificate_`, a
    `bilevax.KKTCertificate`, and `converged_`, whether it holds at `tol`; `history_`, what each
    step of the tuning saw; `solver_`, the one that was used.
    """

    share: float = parameter(SHARE, default=0.5)
    _: KW_ONLY
    train_share: float | None = parameter(
        "the share of training rows that count; None is `share`, and 0 the worst row alone, "
        "without a cap of weights.",
        default=None,
    )

    def _risk(self, sample: Sample, part: str) -> Risk:
        _check_share(self.share, "share")
        if part == "validation" or self.train_share is None:
            return tail_risk(self.share, sample.weight)
        _check_share(self.train_share, "train_share", zero=True)
        return tail_risk(float(self.train_share), sample.weight)

    def fit(
        self,
        X: Any,
        y: Any,
        sample_weight: Any = None,
        X_val: Any = None,
        y_val: Any = None,
        sample_weight_val: Any = None,
    ) -> TunedTailRiskClassifier:
        """Fit to rows X with labels y, tuned on X_val and y_val.

        Without validation rows a share of each class is split off.
        """
        validation = X_val, y_val, None, sample_weight_val
        levels, _ = self._levels(X, y, None, sample_weight, *validation)
        fit = self._tune(levels)
        self.risk_ = float(fit.tuned.lower.row_weights @ fit.tuned.lower.losses.value)
        self.validation_risk_ = float(fit.judged.x2 @ fit.tuned.upper)
        return self


def _check_share(share: Any, name: str, zero: bool = False) -> None:
    (non_negative if zero else positive)(share, name)
    if share > 1:
        raise ValueError(f"{name} must be a share of the rows, at most 1, not {share}")
