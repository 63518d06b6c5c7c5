"""Tail risk: the classifier whose worst rows do well, where no groups are known."""

from __future__ import annotations

from typing import Any

import numpy as np

from bilevax.arguments import positive, whole
from bilevax.learn._base import RobustClassifier
from bilevax.learn._fit import fit_lower
from bilevax.learn._risk import Risk, tail_risk
from bilevax.learn._tuned import TunedClassifier


class TailRiskClassifier(RobustClassifier):
    """A linear classifier trained for its worst rows, at a price η (`eq:DRO_tuning`).

    min over w, max over q of  Σᵢ qᵢ·ℓᵢ(w) − (η/2)·n‖q − 1/n‖² + (l2/2)‖w‖²

    with weights q of the rows, Σq = 1, 0 ≤ qᵢ ≤ 1/(share·n). As η → 0 that is the mean logistic
    loss over the worst `share` of the rows, as η → ∞ over all of them. The factor n makes η mean
    the same for any number of rows. The intercept is not penalised.

    Where labels are noisy the worst rows are the mislabelled ones, and a small share asks for a
    model that commits itself to nothing.

    Args:
        share: the share of rows that count, in (0, 1].
        eta: the price of uneven weights, > 0.
        l2: the weight of the ridge penalty, > 0.
        tol: the saddle gap to certify.
        fit_intercept: whether there is an intercept.
        max_iter: the largest number of Newton steps; a dozen is usual.
        solver: "newton" uses all rows from the start, "sampled" begins with a sample of them, and
            "auto" chooses by their number.

    Fitted: `coef_`, `intercept_`, `classes_` and `n_iter_` as in scikit-learn; `risk_`, the
    weighted loss Σ qᵢ·ℓᵢ of the training rows; `gap_`, an upper bound on the saddle gap; `solver_`,
    the one that was used.
    """

    risk_: float
    gap_: float
    solver_: str

    def __init__(
        self,
        share: float = 0.5,
        eta: float = 0.1,
        l2: float = 1e-3,
        *,
        tol: float = 1e-8,
        fit_intercept: bool = True,
        max_iter: int = 200,
        solver: str = "auto",
    ):
        self.share = share
        self.eta = eta
        self.l2 = l2
        self.tol = tol
        self.fit_intercept = fit_intercept
        self.max_iter = max_iter
        self.solver = solver

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> TailRiskClassifier:
        """Fit to rows X with labels y."""
        for name in ("eta", "l2", "tol"):
            positive(getattr(self, name), name)
        whole(self.max_iter, "max_iter", 1)
        _check_share(self.share)
        rows, weight = self._read(X, y, sample_weight)
        weighs = np.flatnonzero(weight > 0)
        rows = rows.taken(weighs)
        risk = tail_risk(self.share, weight[weighs])
        fitted = fit_lower(rows, risk, self.eta, self.l2, self.tol, self.max_iter, self.solver)
        self._keep(rows, fitted.at.w)
        self.gap_, self.n_iter_, self.solver_ = fitted.gap, fitted.steps, fitted.solver
        self.risk_ = float(fitted.at.row_weights @ fitted.at.losses.value)
        return self


class TunedTailRiskClassifier(TunedClassifier):
    """Tail risk with η and l2 set by the mean loss over the worst `share` of the validation rows.

    min over (η, l2), max over x2 of  Σᵢ x2ᵢ·vᵢ(w),  Σx2 = 1, 0 ≤ x2ᵢ ≤ 1/(share·n)
    such that (w, q) is the saddle point of `TailRiskClassifier`'s problem at (η, l2)

    vᵢ is the loss of validation row i.

    Args:
        share: the share of rows that count, in (0, 1].
        validation_fraction: the share of each class to validate on, unless such rows are given.
        tol: the ε to certify: each line of the ε-KKT conditions, with x1 = (log η, log l2).
        eta_bounds: where to look for η.
        l2_bounds: where to look for l2.
        fit_intercept: whether there is an intercept.
        solver: "newton" uses all rows from the start, "sampled" begins with a sample of them, and
            "auto" chooses by their number.
        random_state: the seed of the split. Copies of a row are never in both parts.
        verbose: show progress.

    Fitted: `eta_`, `l2_`; `coef_`, `intercept_`, `classes_` as in scikit-learn; `risk_` and
    `validation_risk_`, the weighted losses of both parts; `certificate_`, a
    `bilevax.KKTCertificate`, and `converged_`, whether it holds at `tol`; `history_`, what each
    step of the tuning saw; `solver_`, the one that was used.
    """

    risk_: float
    validation_risk_: float

    def __init__(
        self,
        share: float = 0.5,
        *,
        validation_fraction: float = 0.25,
        tol: float = 1e-3,
        eta_bounds: tuple[float, float] = (1e-3, 1e2),
        l2_bounds: tuple[float, float] = (1e-6, 1e2),
        fit_intercept: bool = True,
        solver: str = "auto",
        random_state: Any = None,
        verbose: bool = False,
    ):
        super().__init__(
            validation_fraction=validation_fraction,
            tol=tol,
            eta_bounds=eta_bounds,
            l2_bounds=l2_bounds,
            fit_intercept=fit_intercept,
            solver=solver,
            random_state=random_state,
            verbose=verbose,
        )
        self.share = share

    def _risk(self, code: np.ndarray, weight: np.ndarray) -> Risk:
        _check_share(self.share)
        return tail_risk(self.share, weight)

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
