"""Tail risk: the classifier whose worst rows do well, where no groups are known."""

from __future__ import annotations

from typing import Any

from bilevax.arguments import positive
from bilevax.learn._base import ETA, L2, PricedClassifier, Sample, estimator, parameter
from bilevax.learn._risk import Risk, tail_risk
from bilevax.learn._tuned import TunedClassifier

SHARE = "the share of rows that count, in (0, 1]."


@estimator
class TailRiskClassifier(PricedClassifier):
    """A linear classifier trained for its worst rows, at a price η (`eq:DRO_tuning`).

    min over w, max over q of  Σᵢ qᵢ·ℓᵢ(w) − (η/2)·n‖q − 1/n‖² + (l2/2)‖w‖²

    with weights q of the rows, Σq = 1, 0 ≤ qᵢ ≤ 1/(share·n). As η → 0 that is the mean logistic
    loss over the worst `share` of the rows, as η → ∞ over all of them. The factor n makes η mean
    the same for any number of rows. The intercept is not penalised.

    Where labels are noisy the worst rows are the mislabelled ones, and a small share asks for a
    model that commits itself to nothing.

    Args:
        {parameters}

    Fitted: `coef_`, `intercept_`, `classes_` and `n_iter_` as in scikit-learn; `risk_`, the
    weighted loss Σ qᵢ·ℓᵢ of the training rows; `gap_`, an upper bound on the saddle gap; `solver_`,
    the one that was used.
    """

    share: float = parameter(SHARE, default=0.5)
    eta: float = parameter(ETA, default=0.1)
    l2: float = parameter(L2, default=1e-3)

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> TailRiskClassifier:
        """Fit to rows X with labels y."""
        self._check_parameters()
        _check_share(self.share)
        sample = self._read(X, y, None, sample_weight)[0].weighing()
        risk = tail_risk(self.share, sample.weight)
        lower = self._solve(sample.rows, risk, self.eta, self.l2)
        self.risk_ = float(lower.row_weights @ lower.losses.value)
        return self


@estimator
class TunedTailRiskClassifier(TunedClassifier):
    """Tail risk with η and l2 set by the mean loss over the worst `share` of the validation rows.

    min over (η, l2), max over x2 of  Σᵢ x2ᵢ·vᵢ(w),  Σx2 = 1, 0 ≤ x2ᵢ ≤ 1/(share·n)
    such that (w, q) is the saddle point of `TailRiskClassifier`'s problem at (η, l2)

    vᵢ is the loss of validation row i.

    Args:
        {parameters}

    Fitted: `eta_`, `l2_`; `coef_`, `intercept_`, `classes_` as in scikit-learn; `risk_` and
    `validation_risk_`, the weighted losses of both parts; `certificate_`, a
    `bilevax.KKTCertificate`, and `converged_`, whether it holds at `tol`; `history_`, what each
    step of the tuning saw; `solver_`, the one that was used.
    """

    share: float = parameter(SHARE, default=0.5)

    def _risk(self, sample: Sample) -> Risk:
        _check_share(self.share)
        return tail_risk(self.share, sample.weight)

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


def _check_share(share: Any) -> None:
    positive(share, "share")
    if share > 1:
        raise ValueError(f"share must be a share of the rows, at most 1, not {share}")
