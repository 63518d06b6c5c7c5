"""Tuning (η, λ) by the worst validation loss: the bilevel problem `eq:dro_nested`.

min over x in a box of  Φ(x) = max over x2 of ⟨x2, V(w(x))⟩ + R(x),   x = (log η, log λ, …)

where w(x) is the lower level's solution, V the validation losses, of groups or of rows, and R what
the upper level asks of x alone, often nothing. Some lower levels have entries of x beyond the two
prices. For λ > 0 and η > 0 the lower level has one solution, with dw/dx = −(∇²F)⁻¹·∂ₓ∇F by the
implicit function theorem. So every validation loss has a gradient in x, and Φ, a maximum of smooth
functions, is minimised through its model (where λ is fixed, at 0 too, it does not move):

min over d of  max over x2 of ⟨x2, V + J·d⟩ − (μ/2)·price(x2) + ⟨∇R, d⟩ + ½dᵀBd

with x + d in the box and |d| ≤ Δ, J = dV/dx, B a BFGS matrix of the Lagrangian, Δ a trust region,
and μ so small that the certificate hardly sees it. J takes one linear solve for each entry of x
or, where these are many, one for each entry of V (the adjoint). The next lower level is begun at
w + (dw/dx)·d, one or two Newton steps from its solution. Φ may have several minima, so there are a
few descents; which `STARTS` find the best was tried on the data of benchmarks/robust.py.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
from sklearn.exceptions import ConvergenceWarning

from bilevax.arguments import warn
from bilevax.learn._model import bfgs, box_newton
from bilevax.learn._newton import Lower, Preconditioner, minimise, solve
from bilevax.learn._risk import Risk
from bilevax.learn._rows import Losses, Rows

#: (η, λ) at which descents begin.
STARTS = ((1.0, 1e-2), (0.1, 1e-1), (0.03, 1e-3))
#: The trust region's radius, in units of x: at first, at most, and where a descent ends.
FIRST_RADIUS, MOST_RADIUS, LEAST_RADIUS = 2.0, 4.0, 1e-5
#: Descents first go to ROUGH_FACTOR times the tolerance. Those whose loss is then within
#: LOSS_MARGIN of the best one go on.
LOSS_MARGIN, ROUGH_FACTOR = 3e-4, 100
#: A descent ends where its model promises a gain below LEAST_GAIN and ε is within GAIN_FACTOR
#: times the tolerance, and where PATIENCE steps in a row gained no more than LEAST_GAIN.
LEAST_GAIN, GAIN_FACTOR, PATIENCE = 3e-7, 100, 8
#: A descent ends where it comes this near, in log η and log λ, to the end of a better one.
MERGE_DISTANCE = 1.0
#: The relative residual of dw/dx.
PATH_RESIDUAL = 1e-4
#: The gap to which the lower level is solved: at a start, and in a descent.
START_GAP, LOWER_GAP = 1e-4, 1e-9
#: Where there are more entries of x than the prices, a step that gains less than this share of what
#: the model promised is corrected.
PRICES, POOR = 2, 0.75
#: A start is skipped if its loss is this much above the best of the earlier descents.
START_MARGIN = 0.2
#: An η above this may have run away, where it has no upper bound.
RUNAWAY_ETA = 10.0
#: The largest number of steps of one descent; ten are usual.
MOST_STEPS = 60


@dataclass(frozen=True)
class Step:
    """One step of the tuning."""

    eta: float
    l2: float
    worst_loss: float
    epsilon: float  # how far from stationary, as the certificate has it for a large ρ
    seconds: float
    start: int


@dataclass(frozen=True)
class Own:
    """R, what the upper level asks of x alone: its value and slope, and the size of its terms."""

    value: float
    slope: np.ndarray
    size: np.ndarray


@dataclass(frozen=True)
class Levels:
    """The two levels: rows and risk to train on, rows and risk to validate on."""

    #: Whether J is had from one linear solve for each entry of V instead of each entry of x.
    adjoint: ClassVar[bool] = False

    train: Rows
    risk: Risk
    held: Rows
    held_risk: Risk
    low: np.ndarray  # of (log η, log λ, …)
    high: np.ndarray

    @property
    def free(self) -> np.ndarray:
        """Which entries of x are not fixed. Where λ = 0, log λ is −inf, and fixed."""
        return self.low < self.high

    @property
    def without_ridge(self) -> bool:
        return bool(self.high[1] == -np.inf)

    @property
    def starts(self) -> list[np.ndarray]:
        """The x at which descents begin."""
        return [np.clip(np.log(start), self.low, self.high) for start in STARTS]

    @property
    def unit(self) -> np.ndarray:
        """What counts as a step of length one, of each entry of x."""
        return np.ones(len(self.low))

    @property
    def curvature(self) -> np.ndarray:
        """B at the start of a descent."""
        return np.diag(1e-2 / self.unit**2)

    def lower(self, x: np.ndarray, w: np.ndarray) -> Lower:
        eta, l2 = np.exp(x)
        return Lower(self.train, self.risk, float(eta), float(l2), w)

    def own(self, x: np.ndarray) -> Own:
        """R at x."""
        return Own(0.0, np.zeros(len(x)), np.zeros(len(x)))

    def fewer(self, sampled: Callable[[Rows, Risk], tuple[Rows, Risk]]) -> Levels:
        """The levels of a sample of the rows."""
        (train, risk), (held, held_risk) = (
            sampled(self.train, self.risk),
            sampled(self.held, self.held_risk),
        )
        return dataclasses.replace(self, train=train, risk=risk, held=held, held_risk=held_risk)

    def normal(self, x: np.ndarray, slope: np.ndarray) -> np.ndarray:
        """The shortest vector of slope + the normal cone of the box at x."""
        outward = ((x <= self.low) & (slope > 0)) | ((x >= self.high) & (slope < 0))
        return np.where(outward | ~self.free, 0.0, slope)


@dataclass(frozen=True)
class Tuned:
    """The lower level solved at x, and how the validation losses change from there."""

    x: np.ndarray
    lower: Lower
    upper: np.ndarray  # V
    worst: float  # Φ, smoothed by μ
    x2: np.ndarray
    path: np.ndarray | None  # dw/dx, where it was needed for the jacobian
    jacobian: np.ndarray  # dV/dx
    slope: np.ndarray  # ∇R

    def slopes(self, x2: np.ndarray) -> np.ndarray:
        """The gradient of ⟨x2, V⟩ + R in x."""
        return self.jacobian.T @ x2 + self.slope


@dataclass
class Descent:
    """The state of one descent."""

    at: Tuned
    start: int
    curvature: np.ndarray  # B
    radius: float = FIRST_RADIUS  # Δ


def _merged(at: Tuned, other: Tuned, distance: float) -> bool:
    """Whether a descent has come near the end of another one, with no better loss."""
    same = at.x == other.x  # such as log λ = −inf
    off = np.abs(np.subtract(at.x, other.x, where=~same, out=np.zeros(len(at.x))))
    return bool(off.max() < distance) and at.worst > other.worst - 1e-5


@dataclass
class Tuner:
    """The minimisation of Φ: its descents, its history, and the preconditioner they share."""

    levels: Levels
    tolerance: float
    mu: float
    report: Callable[[int, Step], None] = lambda count, step: None
    history: list[Step] = field(default_factory=list)
    kept: Preconditioner = field(default_factory=Preconditioner)
    began: float = field(default_factory=time.perf_counter)

    def run(self) -> Tuned:
        """Descend from several starts; the best point."""
        found: list[Descent] = []
        for number, x in enumerate(self.levels.starts):
            # The solution at another x is a better start than zero.
            w = found[0].at.lower.w if found else np.zeros(self.levels.train.shape)
            lower, losses = self.solved(x, w, START_GAP)
            if found and self.worst(x, losses) > min(d.at.worst for d in found) + START_MARGIN:
                continue
            descent = Descent(self.at(x, lower.w, LOWER_GAP), number, self.levels.curvature)
            self.descend(descent, ROUGH_FACTOR * self.tolerance, found)
            found.append(descent)
        found.sort(key=lambda descent: descent.at.worst)
        close = [d for d in found if d.at.worst <= found[0].at.worst + LOSS_MARGIN]
        for i, descent in enumerate(close):
            self.descend(descent, self.tolerance, close[:i], MERGE_DISTANCE / 10)
        return min((descent.at for descent in close), key=lambda at: at.worst)

    def go_on(self, x: np.ndarray, w: np.ndarray) -> Tuned:
        """One descent, from the answer of a run on a sample."""
        descent = Descent(self.at(x, w, LOWER_GAP), 0, self.levels.curvature)
        self.descend(descent, self.tolerance)
        return descent.at

    def solved(self, x: np.ndarray, start: np.ndarray, gap: float) -> tuple[Lower, Losses]:
        """The lower level at x, and the losses of the validation rows."""
        # Half the squared gradient over λ bounds the lower level's gap; without λ, the gradient
        # times the way does.
        l2 = np.exp(x[1])

        def done(at: Lower) -> bool:
            enough = np.sqrt(2 * gap * l2) if l2 else gap / (1 + np.linalg.norm(at.w))
            return bool(np.linalg.norm(at.gradient) <= enough)

        lower = minimise(lambda w: self.levels.lower(x, w), start, self.kept, done)
        return lower, self.levels.held.losses(lower.w)

    def worst(self, x: np.ndarray, losses: Losses) -> float:
        """Φ, smoothed by μ."""
        risk = self.levels.held_risk
        weighing = risk.adversary.weigh(risk.of_items(losses.value), self.mu)
        return weighing.value + self.levels.own(x).value

    def derived(self, x: np.ndarray, lower: Lower, losses: Losses) -> Tuned:
        """The derivatives of the validation losses at a solution of the lower level."""
        held, risk, own = self.levels.held, self.levels.held_risk, self.levels.own(x)
        upper = risk.of_items(losses.value)
        weighing = risk.adversary.weigh(upper, self.mu)
        worst = weighing.value + own.value
        if self.levels.adjoint:
            each = (risk.of_rows(one)[:, None] * losses.slope for one in np.eye(len(upper)))
            adjoints = [solve(lower, held.gather(v), self.kept, PATH_RESIDUAL) for v in each]
            path, jacobian = None, np.stack([-lower.along_prices(u) for u in adjoints])
        else:
            path = np.stack(
                [-solve(lower, right, self.kept, PATH_RESIDUAL) for right in lower.with_prices()]
            )
            along = [losses.along(held.score(v)) for v in path]
            jacobian = np.stack([risk.of_items(v) for v in along], axis=1)
        return Tuned(x, lower, upper, worst, weighing.weights, path, jacobian, own.slope)

    def ahead(self, at: Tuned, d: np.ndarray) -> np.ndarray:
        """w + (dw/dx)·d."""
        if at.path is not None:
            return at.lower.w + np.tensordot(d, at.path, 1)
        return at.lower.w - solve(at.lower, at.lower.with_step(d), self.kept, PATH_RESIDUAL)

    def at(self, x: np.ndarray, start: np.ndarray, gap: float) -> Tuned:
        """The lower level's solution at x, and the derivatives there."""
        return self.derived(x, *self.solved(x, start, gap))

    def descend(
        self,
        run: Descent,
        tolerance: float,
        others: Sequence[Descent] = (),
        distance: float = MERGE_DISTANCE,
    ) -> None:
        """Take steps until ε is small, no step gains, or another descent ended nearby."""
        losses: list[float] = []
        for _ in range(MOST_STEPS):
            at = run.at
            losses.append(at.worst)
            d, model, x2 = self._model(at, run.curvature, run.radius)
            # At a kink the weights of the model are better than those of V.
            epsilon, own = min(
                (self.epsilon(at, weights), i) for i, weights in enumerate((at.x2, x2))
            )
            if own == 1:
                at = run.at = dataclasses.replace(at, x2=x2)
            self._record(at, epsilon, run.start)
            gain = at.worst - model
            if epsilon <= tolerance or (
                gain <= LEAST_GAIN and epsilon <= GAIN_FACTOR * self.tolerance
            ):
                return
            if not gain > 0:  # the model has no step that gains more than rounding
                return
            if any(_merged(at, other.at, distance) for other in others):
                return
            # No model fits at a kink of w(x), where a weight of the adversary leaves a bound.
            if len(losses) > PATIENCE and losses[-1 - PATIENCE] - at.worst <= LEAST_GAIN:
                return
            # The validation losses are as exact as the root of the lower level's gap.
            gap = min(max((0.02 * gain) ** 2, 1e-13), LOWER_GAP)
            x = np.clip(at.x + d, self.levels.low, self.levels.high)  # against rounding
            solved = self.solved(x, self.ahead(at, d), gap)
            worst = self.worst(x, solved[1])
            if len(x) > PRICES and at.worst - worst < POOR * gain:
                # V bends along the step, most at a kink of the maximum: once more from what it is.
                bent = self.levels.held_risk.of_items(solved[1].value) - at.jacobian @ d
                again = self._model(dataclasses.replace(at, upper=bent), run.curvature, run.radius)
                x_again = np.clip(at.x + again[0], self.levels.low, self.levels.high)
                other = self.solved(x_again, self.ahead(at, again[0]), gap)
                if (better := self.worst(x_again, other[1])) < worst:
                    d, x, solved, worst = again[0], x_again, other, better
            length = float(np.abs(d / self.levels.unit).max())
            if worst < at.worst:
                run.at = self.derived(x, *solved)
                run.curvature = bfgs(run.curvature, d, run.at.slopes(x2) - at.slopes(x2))
            elif run.radius < LEAST_RADIUS:
                return
            ratio = (at.worst - worst) / gain
            if ratio < 0.25:
                run.radius = length / 4
            elif ratio > 0.75 and length >= 0.99 * run.radius:
                run.radius = min(2 * run.radius, MOST_RADIUS)

    def epsilon(self, at: Tuned, x2: np.ndarray) -> float:
        """How far from stationary: the certificate's lines for x1 and x2, in the limit of ρ."""
        slope = float(np.linalg.norm(self.levels.normal(at.x, at.slopes(x2))))
        return max(slope, self.levels.held_risk.adversary.distance(x2, at.upper))

    def warn_of_runaway(self, at: Tuned) -> None:
        """Warn of an η without an upper bound for which ten times as much would do as well."""
        x = at.x.copy()
        x[0] += np.log(10.0)
        if np.isfinite(self.levels.high[0]) or at.x[0] < np.log(RUNAWAY_ETA):
            return
        if self.worst(x, self.solved(x, at.lower.w, LOWER_GAP)[1]) <= at.worst + self.tolerance:
            warn(
                f"η has run to {np.exp(at.x[0]):.3g}, and the validation loss is no higher at ten "
                "times as much: even weights are best, and η has no best value; give eta_bounds "
                "with an upper end",
                ConvergenceWarning,
            )

    def _record(self, at: Tuned, epsilon: float, start: int) -> None:
        eta, l2 = np.exp(at.x[:2])
        seconds = time.perf_counter() - self.began
        worst = float(at.upper @ at.x2)
        step = Step(float(eta), float(l2), worst, epsilon, seconds, start)
        self.history.append(step)
        self.report(len(self.history), step)

    def _model(
        self, at: Tuned, curvature: np.ndarray, radius: float
    ) -> tuple[np.ndarray, float, np.ndarray]:
        """The best step of the model, its value there, and the weights x2 that go with it."""
        free, ends = self.levels.free, (self.levels.low, self.levels.high)
        way = [np.subtract(end, at.x, where=free, out=np.zeros(len(free))) for end in ends]
        reach = radius * self.levels.unit
        low, high = np.maximum(way[0], -reach), np.minimum(way[1], reach)
        adversary = self.levels.held_risk.adversary
        d, value, x2 = np.zeros(len(free)), at.worst, at.x2
        rest = at.worst - adversary.weigh(at.upper, self.mu).value  # R
        # Each problem begins at the solution of a smoother one, with rounder kinks.
        for mu in (max(1e-3, self.mu), self.mu):
            weigh = lambda d, mu=mu: adversary.weigh(at.upper + at.jacobian @ d, mu)
            d, value, x2 = box_newton(weigh, at.jacobian, at.slope, curvature, low, high, d)
        return d, value + rest, x2
