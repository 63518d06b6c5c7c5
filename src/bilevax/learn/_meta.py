"""`eq:DRO_meta_tuning` for linear models: the paper's penalty problem, the tasks solved exactly.

For x = (w, η, λ) the penalty function with all but x put in is, task by task,

    P(x) = (l2/2)‖w‖² + Σ_τ (min over y of (φ_μ(V_τ(y)) + ρ·F_τ(x, y)) − ρ·min over z of F_τ(x, z))
    F_τ(x, y) = max over q of (⟨q, ℓ_τ(y)⟩ − (η/2)‖q − 1/n‖²) + (λ/2)‖y − w‖²
    φ_μ(v)    = max over x2 of (⟨x2, v⟩ − (μ/2)‖x2 − 1/m‖²)

with ℓ_τ and V_τ the losses of the training and validation rows. Both minimisers are unique, since
λ > 0, and Newton's method finds them. So P has a gradient, by Danskin's theorem:

    ∂P/∂w = l2·w + ρλ·Σ(z − y),  ∂P/∂η = (ρ/2)·Σ(‖y2 − 1/n‖² − ‖z2 − 1/n‖²),
    ∂P/∂λ = (ρ/2)·Σ(‖y − w‖² − ‖z − w‖²)

with y2 and z2 the adversary's answers to z and to y. That is the line of ε-KKT (`def:epsilon_KKT`)
for x1; Newton's method makes the others as small as one likes, but for the gap F(y) − F(z), which
falls like 1/ρ², and for x2, whose line is at most μ‖x2 − 1/m‖. L-BFGS minimises P over w, log η and
log λ for growing ρ, with μ = 1/ρ² while that is large, until the certificate holds. P is not convex
in x, so it is begun at a small and at a large η. NumPy does it without compiling anything.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from scipy import optimize

from bilevax.certificates import KKTCertificate
from bilevax.learn._certificate import noise, saddle_gap
from bilevax.learn._newton import Joint, Lower, Preconditioner, minimise
from bilevax.learn._risk import ROUNDING, Risk, row_risk
from bilevax.learn._rows import Rows

#: The penalties ρ, one after the other, until one certifies the tolerance.
RHOS = (10.0, 100.0, 1e3, 1e4, 1e5)
#: The η of the two descents, and the λ to begin with, as shares of the way between the logarithms
#: of the bounds.
ETAS, FIRST_LAM = (0.1, 10.0), (0.9, 0.6, 0.3)
#: Evaluations of P for one ρ, and the steps that L-BFGS remembers.
MOST_EVALUATIONS, MEMORY = 150, 60
#: Newton steps for one minimiser; a handful is usual.
MOST_STEPS = 60
#: Slopes of plain averaging end here.
LEAST_SLOPE = 1e-8
#: The lines other than x1's are solved to this share of the tolerance.
AIM = 1e-2
#: L-BFGS ends where x1's line is this share of the tolerance.
STATIONARY = 0.5


@dataclass(frozen=True)
class Task:
    """One task: rows to adapt to, and rows to be judged by."""

    train: Rows
    risk: Risk
    held: Rows
    held_risk: Risk


@dataclass(frozen=True)
class Prices:
    """x1: the meta-parameter w, η and λ."""

    w: np.ndarray
    eta: float
    lam: float

    def lower(self, task: Task, y: np.ndarray) -> Lower:
        """F of a task at y."""
        return Lower(task.train, task.risk, self.eta, self.lam, y, self.w)


@dataclass(frozen=True)
class Penalty:
    """P and its gradient at x, with both minimisers of each task."""

    x: Prices
    rho: float
    y: list[Joint]
    z: list[Lower]
    l2: float  # of the meta-parameter

    @property
    def value(self) -> float:
        tasks = self.rho * sum(y.value - z.value for y, z in zip(self.y, self.z))
        return tasks + self.l2 / 2 * float(np.sum(self.x.w**2))

    @property
    def pairs(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """(y, z) of each task."""
        return [(y.w, z.w) for y, z in zip(self.y, self.z)]

    def slopes(self) -> tuple[np.ndarray, float, float]:
        """The derivatives of P in w, η and λ."""
        far = lambda at: float(np.sum((at.weighing.weights - at.risk.adversary.even) ** 2))
        away = lambda at: float(np.sum(at.off_centre**2))
        pairs = [(y.lower, z) for y, z in zip(self.y, self.z)]
        of_w = self.l2 * self.x.w + self.rho * self.x.lam * sum(z.w - y.w for y, z in pairs)
        of_eta = self.rho / 2 * sum(far(z) - far(y) for y, z in pairs)
        of_lam = self.rho / 2 * sum(away(y) - away(z) for y, z in pairs)
        return of_w, of_eta, of_lam


@dataclass(frozen=True)
class MetaFit:
    """A certified point, as its certificate has it: x1, and y1, y2, x2, z1 and z2 of each task."""

    x: Prices
    certificate: KKTCertificate
    y1: list[np.ndarray]
    y2: list[np.ndarray]
    x2: list[np.ndarray]
    z1: list[np.ndarray]
    z2: list[np.ndarray]
    losses: list[float]  # ⟨x2, V⟩ of each task
    evaluations: int


@dataclass
class MetaTuner:
    """The minimisation of P for one list of tasks."""

    tasks: Sequence[Task]
    eta_bounds: tuple[float, float]
    lam_bounds: tuple[float, float]
    tolerance: float
    l2: float = 0.0
    report: Callable[[int, Penalty], None] = lambda count, at: None
    evaluations: int = 0
    kept: list[tuple[Preconditioner, Preconditioner]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.kept = [(Preconditioner(), Preconditioner()) for _ in self.tasks]

    def run(self) -> MetaFit:
        """Minimise P for one ρ after the other, each from the last one's answer."""
        first = self._rough(self.first())
        # From there with another η, whose lower levels are then not far.
        x = replace(first.x, eta=min(ETAS, key=lambda eta: -abs(np.log(eta / first.x.eta))))
        x = replace(x, eta=self._within(x.eta, self.eta_bounds))
        second = self._rough(self._at(x, RHOS[0], first.pairs))
        at = min(first, second, key=lambda at: at.value)
        found = [self.judged_at(at)]
        for rho in RHOS[2:]:
            if found[-1].certificate.certified(self.tolerance):
                break
            at = self._minimised(at, rho)
            found.append(self.judged_at(at))
        best = min(found, key=lambda fit: fit.certificate.epsilon)
        return replace(best, evaluations=self.evaluations)

    def first(self) -> Penalty:
        """The best of a few λ at the large η, with the w that averages the tasks."""
        w, found = np.zeros(self.tasks[0].train.shape), []
        eta = self._within(max(ETAS), self.eta_bounds)
        low, high = self.lam_bounds
        for share in FIRST_LAM:
            lam = float(low ** (1 - share) * high**share)
            w, near = averaged(self.tasks, lam, self.l2, w)
            found.append(self._at(Prices(w, eta, lam), RHOS[0], near))
        return min(found, key=lambda at: at.value)

    def _rough(self, at: Penalty) -> Penalty:
        """A descent with the first two ρ."""
        return self._minimised(self._minimised(at, RHOS[0]), RHOS[1])

    def _mu(self, rho: float) -> float:
        """The price μ: at the end x2's line is at most a quarter of the tolerance."""
        far = sum(float(task.held_risk.adversary.cap.max()) for task in self.tasks)
        return max(self.tolerance / 4 / float(np.sqrt(far)), 1 / rho**2)

    def _at(self, x: Prices, rho: float, near: Sequence[tuple[np.ndarray, np.ndarray]]) -> Penalty:
        """Both minimisers of each task, (y, z), from those nearby."""
        enough, mu = AIM * self.tolerance / rho / len(self.tasks), self._mu(rho)
        done = lambda at: bool(np.linalg.norm(at.gradient) <= enough)
        joints, lowers = [], []
        for k, task in enumerate(self.tasks):
            above = lambda y, task=task: Lower(task.held, task.held_risk, mu, 0.0, y)
            below = lambda y, task=task: x.lower(task, y)
            both = lambda y: Joint(below(y), above(y), rho)  # noqa: B023
            z = minimise(below, near[k][1], self.kept[k][0], done, MOST_STEPS)
            y = minimise(both, near[k][0], self.kept[k][1], done, MOST_STEPS)
            lowers.append(z)
            joints.append(y)
        self.evaluations += 1
        return Penalty(x, rho, joints, lowers, self.l2)

    def _minimised(self, at: Penalty, rho: float) -> Penalty:
        """L-BFGS on P over w, log η and log λ; the point with the least line of x1."""
        shape, count = at.x.w.shape, 0
        best = at = self._at(at.x, rho, at.pairs)

        def value_and_slope(v: np.ndarray) -> tuple[float, np.ndarray]:
            nonlocal at, best, count
            eta, lam = (float(price) for price in np.exp(v[-2:]))
            x = Prices(v[:-2].reshape(shape), self._within(eta, self.eta_bounds), lam)
            x = replace(x, lam=self._within(lam, self.lam_bounds))
            at, count = self._at(x, rho, at.pairs), count + 1
            self.report(self.evaluations, at)
            if self.slope(at) < self.slope(best):
                best = at
            of_w, of_eta, of_lam = at.slopes()
            return at.value, np.concatenate([of_w.ravel(), [x.eta * of_eta, x.lam * of_lam]])

        def stop(intermediate_result: object) -> None:
            if self.slope(best) <= STATIONARY * self.tolerance:
                raise StopIteration

        prices = np.log([at.x.eta, at.x.lam])
        optimize.minimize(
            value_and_slope,
            np.concatenate([at.x.w.ravel(), prices]),
            jac=True,
            method="L-BFGS-B",
            bounds=[(None, None)] * at.x.w.size + self._log_bounds(),
            callback=stop,
            options={"maxfun": MOST_EVALUATIONS, "maxcor": MEMORY, "gtol": 0, "ftol": 0},
        )
        return best

    def _log_bounds(self) -> list[tuple[float, float]]:
        return [(np.log(low), np.log(high)) for low, high in (self.eta_bounds, self.lam_bounds)]

    @staticmethod
    def _within(price: float, bounds: tuple[float, float]) -> float:
        """Against the rounding of exp(log …)."""
        low, high = bounds
        near = 1e-12
        price = min(max(price, low), high)
        return low if price <= low * (1 + near) else high if price >= high * (1 - near) else price

    def slope(self, at: Penalty) -> float:
        """The line of x1: how far ∇P is from the normal cone of the bounds."""
        of_w, of_eta, of_lam = at.slopes()
        of_eta = _pushed(of_eta, at.x.eta, self.eta_bounds)
        of_lam = _pushed(of_lam, at.x.lam, self.lam_bounds)
        return float(np.sqrt(np.sum(of_w**2) + of_eta**2 + of_lam**2))

    def judged_at(self, at: Penalty) -> MetaFit:
        """The lines of ε-KKT at (x, y, y2), with the witnesses x2, z and z2."""
        rho, pairs = at.rho, list(zip(at.y, at.z))
        x2 = [y.upper.weighing.weights for y in at.y]
        y2 = [z.weighing.weights for z in at.z]
        z2 = [y.lower.weighing.weights for y in at.y]
        above = [weights @ y.upper.item_losses for weights, y in zip(x2, at.y)]
        norm = lambda lines: float(np.sqrt(sum(line**2 for line in lines)))
        off = lambda at, weights: _distance(at, weights)
        # ⟨x2, V⟩ + ρ·F in y, with x2 held, has the slope of φ_μ(V) + ρ·F, whose maximiser x2 is.
        of_y = [rho * (np.linalg.norm(y.gradient) + noise(y.lower)) + noise(y.upper) for y in at.y]
        of_y2 = [rho * off(z, weights) for z, weights in zip(at.z, y2)]
        of_x2 = [
            y.upper.risk.adversary.distance(weights, y.upper.item_losses)
            for y, weights in zip(at.y, x2)
        ]
        below = sum(y.lower.value - z.value for y, z in pairs)
        sizes = sum(abs(y.lower.value) + abs(z.value) for y, z in pairs)
        gap = max(below, 0.0) + sum(saddle_gap(z) for z in at.z) + ROUNDING * sizes
        rounding = rho * ROUNDING * self._size(at)
        certificate = KKTCertificate(
            objective=float(sum(above) + self.l2 / 2 * np.sum(at.x.w**2)),
            stationarity=norm([self.slope(at), *of_y, *of_y2]) + rounding,
            response_x2=norm(of_x2),
            response_z1=norm([rho * (np.linalg.norm(z.gradient) + noise(z)) for z in at.z]),
            response_z2=norm([rho * off(y.lower, q) for y, q in zip(at.y, z2)]),
            gap=float(gap),
            gap_below=float(below),
            rho=rho,
        )
        y1, z1 = [y.w for y in at.y], [z.w for z in at.z]
        losses = [float(v) for v in above]
        return MetaFit(at.x, certificate, y1, y2, x2, z1, z2, losses, self.evaluations)

    @staticmethod
    def _size(at: Penalty) -> float:
        """How large the terms are whose differences ∇P is."""
        x, pulls = at.x, [np.linalg.norm(y.w) + np.linalg.norm(z.w) for y, z in zip(at.y, at.z)]
        squares = [np.sum(y.lower.off_centre**2 + z.off_centre**2) for y, z in zip(at.y, at.z)]
        return float(x.lam * sum(pulls) + sum(squares) + 2 * len(at.y))


def _distance(at: Lower, weights: np.ndarray) -> float:
    """How far the adversary's slope at these weights is from their normal cone."""
    adversary = at.risk.adversary
    gain = at.item_losses - at.eta * (weights - adversary.even) / adversary.price
    return adversary.distance(weights, gain)


def _pushed(slope: float, price: float, bounds: tuple[float, float]) -> float:
    """A slope, and 0 where a bound holds the price against it."""
    low, high = bounds
    held = (price <= low and slope > 0) or (price >= high and slope < 0) or low == high
    return 0.0 if held else slope


def averaged(
    tasks: Sequence[Task], lam: float, l2: float, w: np.ndarray, most: int = 100
) -> tuple[np.ndarray, list[tuple[np.ndarray, np.ndarray]]]:
    """The w of the least (l2/2)‖w‖² + Σ_τ min over y of (mean training loss + (λ/2)‖y − w‖²).

    Its gradient is l2·w + λ·Σ(w − y): without l2, w is the average of the tasks' parameters. With w
    comes each task's y, twice.
    """
    alike = [row_risk(len(task.train), 1.0) for task in tasks]
    kept, near = [Preconditioner() for _ in tasks], [w for _ in tasks]

    def value_and_slope(v: np.ndarray) -> tuple[float, np.ndarray]:
        centre = v.reshape(w.shape)
        total, slope = l2 / 2 * float(np.sum(centre**2)), l2 * centre
        for k, (task, risk) in enumerate(zip(tasks, alike)):
            lower = lambda y, task=task, risk=risk: Lower(task.train, risk, 1.0, lam, y, centre)
            done = lambda at: bool(np.linalg.norm(at.gradient) <= LEAST_SLOPE)
            found = minimise(lower, near[k], kept[k], done)
            near[k], total = found.w, total + found.value
            slope = slope + lam * (centre - found.w)
        return total, slope.ravel()

    options = {"maxfun": most, "maxcor": MEMORY, "gtol": LEAST_SLOPE, "ftol": 1e-15}
    found = optimize.minimize(
        value_and_slope, w.ravel(), jac=True, method="L-BFGS-B", options=options
    )
    return found.x.reshape(w.shape), [(y, y) for y in near]
