"""What the tuned classifiers share: their two parts of the rows, and what they keep of a fit."""

from __future__ import annotations

from typing import Any

import numpy as np
from sklearn.base import clone
from sklearn.utils import check_random_state

from bilevax.arguments import positive
from bilevax.certificates import KKTCertificate
from bilevax.learn._base import RobustClassifier
from bilevax.learn._fit import TunedFit, fit_levels
from bilevax.learn._groups import check_enough, coded, coded_like
from bilevax.learn._problem import bilevel_problem, start_point
from bilevax.learn._risk import Risk
from bilevax.learn._split import held_out
from bilevax.learn._tuning import Levels, Step
from bilevax.problems import BilevelProblem, Point
from bilevax.progress import Progress


class TunedClassifier(RobustClassifier):
    """A classifier with η and l2 tuned on validation rows."""

    eta_: float
    l2_: float
    certificate_: KKTCertificate
    history_: list[Step]
    converged_: bool
    solver_: str

    def __init__(
        self,
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
        self.validation_fraction = validation_fraction
        self.tol = tol
        self.eta_bounds = eta_bounds
        self.l2_bounds = l2_bounds
        self.fit_intercept = fit_intercept
        self.solver = solver
        self.random_state = random_state
        self.verbose = verbose

    def _risk(self, code: np.ndarray, weight: np.ndarray) -> Risk:
        """The adversary of rows with these groups and weights."""
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
        rows, weight = self._read(X, y, sample_weight)
        if groups is None:
            names, code = self.classes_, rows.label
        else:
            names, code = coded(groups, len(rows), "groups")
        if X_val is None:
            if not (y_val is None and groups_val is None and sample_weight_val is None):
                raise ValueError("y_val, groups_val and sample_weight_val need X_val")
            if not 0 < self.validation_fraction < 1:
                raise ValueError(
                    f"validation_fraction must be between 0 and 1, not {self.validation_fraction!r}"
                )
            weighs = np.flatnonzero(weight > 0)
            rows, code, weight = rows.taken(weighs), code[weighs], weight[weighs]
            seed = int(check_random_state(self.random_state).randint(2**31))
            below, above = held_out(
                rows.x, rows.label, code, weight, self.validation_fraction, seed
            )
            held, held_code, held_weight = rows.taken(above), code[above], weight[above]
            rows, code, weight = rows.taken(below), code[below], weight[below]
        else:
            if y_val is None or (groups is None) != (groups_val is None):
                raise ValueError("X_val needs y_val, and groups_val if and only if groups is given")
            held, held_weight = self._read_validation(X_val, y_val, sample_weight_val)
            if groups is None:
                held_code = held.label
            else:
                held_code = coded_like(groups_val, names, len(held), "groups_val")
        check_enough(names, code, weight, "training")
        check_enough(names, held_code, held_weight, "validation")
        bounds = np.log(
            [_bounds(self.eta_bounds, "eta_bounds"), _bounds(self.l2_bounds, "l2_bounds")]
        )
        risks = self._risk(code, weight), self._risk(held_code, held_weight)
        return Levels(rows, risks[0], held, risks[1], bounds[:, 0], bounds[:, 1]), names

    def problem(
        self, X: Any, y: Any, groups: Any = None, **named: Any
    ) -> tuple[BilevelProblem, Point]:
        """What `fit` solves with the same arguments, and a start, for `bilevax.solve`.

        x1 is (log η, log l2), y1 the coefficients and intercepts, y2 and x2 the adversaries'
        weights of the training and of the validation part.
        """
        unfitted: Any = clone(self)  # so that self stays as it is
        levels, _ = unfitted._levels(X, y, groups, **named)
        return bilevel_problem(levels), start_point(levels)

    def _tune(self, levels: Levels) -> TunedFit:
        """Solve the bilevel problem and keep its answer."""
        positive(self.tol, "tol")
        with Progress(self.verbose, unit="steps", label="tuning") as bar:

            def report(count: int, step: Step) -> None:
                shown = {"η": f"{step.eta:.3g}", "l2": f"{step.l2:.3g}"}
                bar.show(count, **shown, loss=f"{step.worst_loss:.4f}")

            fit = fit_levels(levels, float(self.tol), self.solver, report)
        self._keep(levels.train, fit.judged.y1)
        self.eta_, self.l2_ = (float(v) for v in np.exp(fit.tuned.x))
        self.certificate_ = fit.judged.certificate
        self.converged_ = bool(self.certificate_.certified(float(self.tol)))
        self.history_ = fit.history
        self.n_iter_ = len(fit.history)
        self.solver_ = fit.solver
        return fit


def _bounds(bounds: Any, name: str) -> tuple[float, float]:
    try:
        low, high = (float(b) for b in bounds)
    except (TypeError, ValueError):
        raise ValueError(f"{name} must be two numbers, not {bounds!r}") from None
    if not 0 < low < high < np.inf:
        raise ValueError(f"{name} must be 0 < low < high, not {bounds!r}")
    return low, high
