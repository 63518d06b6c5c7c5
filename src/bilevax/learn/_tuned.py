"""What the tuned classifiers share: their two parts of the rows, and what they keep of a fit."""

from __future__ import annotations

from dataclasses import KW_ONLY
from typing import Any

import numpy as np
from sklearn.base import clone
from sklearn.utils import check_random_state

from bilevax.arguments import positive
from bilevax.learn._base import RobustClassifier, Sample, check_groups, estimator, parameter
from bilevax.learn._fit import TunedFit, fit_levels
from bilevax.learn._problem import bilevel_problem, start_point
from bilevax.learn._risk import Risk
from bilevax.learn._split import held_out
from bilevax.learn._threads import threads_for
from bilevax.learn._tuning import Levels, Step
from bilevax.problems import BilevelProblem, Point
from bilevax.progress import Progress


@estimator
class TunedClassifier(RobustClassifier):
    """A classifier with η and l2 tuned on validation rows."""

    _: KW_ONLY
    validation_fraction: float = parameter(
        "the share of each group, or of each class where there are no groups, to validate on, "
        "unless such rows are given.",
        default=0.25,
    )
    tol: float = parameter(
        "the ε to certify: each line of the ε-KKT conditions, with all that is tuned as x1.",
        default=1e-3,
    )
    eta_bounds: tuple[float, float] = parameter(
        "where to look for η; (0, inf) is everywhere.", default=(1e-3, 1e2)
    )
    l2_bounds: tuple[float, float] = parameter(
        "where to look for l2; (0, 0) is no penalty, and two equal numbers fix it.",
        default=(1e-6, 1e2),
    )
    random_state: Any = parameter(
        "the seed of the split. Copies of a row are never in both parts.", default=None
    )
    verbose: bool = parameter("show progress.", default=False)

    def _risk(self, sample: Sample, part: str) -> Risk:
        """The adversary of these rows, of the part "training" or "validation"."""
        raise NotImplementedError

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
        """Both levels, and the names of the groups."""
        train, names = self._read(X, y, groups, sample_weight)
        if X_val is None:
            if not (y_val is None and groups_val is None and sample_weight_val is None):
                raise ValueError("y_val, groups_val and sample_weight_val need X_val")
            train, held = self._split(train.weighing())
        else:
            if y_val is None or (groups is None) != (groups_val is None):
                raise ValueError("X_val needs y_val, and groups_val if and only if groups is given")
            held = self._read_validation(X_val, y_val, groups_val, sample_weight_val, names)
        check_groups(names, train, "training")
        check_groups(names, held, "validation")
        low, high = np.transpose([self._log_bounds(name) for name in ("eta_bounds", "l2_bounds")])
        risk, held_risk = self._risk(train, "training"), self._risk(held, "validation")
        return Levels(train.rows, risk, held.rows, held_risk, low, high), names

    def _split(self, sample: Sample) -> tuple[Sample, Sample]:
        """Rows to train on, and rows to validate on."""
        trains, validates = self._parts(sample)
        return sample.taken(trains), sample.taken(validates)

    def _parts(self, sample: Sample) -> tuple[np.ndarray, np.ndarray]:
        """Which rows train, and which validate."""
        fraction = self.validation_fraction
        if not 0 < fraction < 1:
            raise ValueError(f"validation_fraction must be between 0 and 1, not {fraction!r}")
        seed = int(check_random_state(self.random_state).randint(2**31))
        rows = sample.rows
        return held_out(rows.x, rows.label, sample.group, sample.weight, fraction, seed)

    def _log_bounds(self, name: str) -> np.ndarray:
        bounds = getattr(self, name)
        try:
            low, high = (float(b) for b in bounds)
        except (TypeError, ValueError):
            raise ValueError(f"{name} must be two numbers, not {bounds!r}") from None
        if name == "eta_bounds":
            fine, wanted = 0 <= low <= high > 0 and low < np.inf, "0 ≤ low ≤ high, high > 0"
        else:
            fine, wanted = 0 < low <= high < np.inf, "0 < low ≤ high, or (0, 0)"
            fine = fine or low == high == 0
        if not fine:
            raise ValueError(f"{name} must be {wanted}, not {bounds!r}")
        with np.errstate(divide="ignore"):
            return np.log([low, high])

    def problem(
        self, X: Any, y: Any, groups: Any = None, **named: Any
    ) -> tuple[BilevelProblem, Point]:
        """What `fit` solves with the same arguments, and a start, for `bilevax.solve`.

        x1 is (log η, log l2), or (log η) alone where l2_bounds are (0, 0). y1 are the coefficients
        and intercepts, y2 and x2 the adversaries' weights of the training and of the validation
        part.
        """
        unfitted: Any = clone(self)  # so that self stays as it is
        levels, _ = unfitted._levels(X, y, groups, **named)
        return self._problem(levels), start_point(levels)

    def _problem(self, levels: Levels) -> BilevelProblem:
        return bilevel_problem(levels)

    def _tune(self, levels: Levels) -> TunedFit:
        """Solve the bilevel problem and keep its answer."""
        positive(self.tol, "tol")
        with Progress(self.verbose, unit="steps", label="tuning") as bar:

            def report(count: int, step: Step) -> None:
                shown = {"η": f"{step.eta:.3g}", "l2": f"{step.l2:.3g}"}
                bar.show(count, **shown, loss=f"{step.worst_loss:.4f}")

            with threads_for(*levels.train.x.shape):
                fit = fit_levels(levels, float(self.tol), self.solver, report)
        self._keep(levels.train, fit.judged.y1)
        self.eta_, self.l2_ = (float(v) for v in np.exp(fit.tuned.x[:2]))
        self.certificate_ = fit.judged.certificate
        self.converged_ = bool(self.certificate_.certified(float(self.tol)))
        self.history_, self.n_iter_ = fit.history, len(fit.history)
        self.solver_ = fit.solver
        return fit
