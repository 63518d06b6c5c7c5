"""Smooth convex minimisation over the parameters of a linear model, by Newton's method.

F(w) = φ(ℓ(w)) + (λ/2)‖w − c‖², intercepts apart, is the lower level with its adversary's answer put
in. The centre c is 0, but for tasks that are to be near others.
Its Hessian is Xᵀ(diag(q)·∂²ℓ)X + Jᵀ(∂q/∂ℓ)J + λ with J = ∂ℓ/∂w. Where it is not too large it is
formed and factored. It changes slowly along a run, so an old factor serves as a preconditioner for
conjugate gradients until these take more than a few steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
from scipy import linalg, sparse
from scipy.sparse.linalg import LinearOperator, cg

from bilevax.learn._risk import Risk, Weighing
from bilevax.learn._rows import Losses, Rows

#: With more parameters than this, no Hessian is formed.
LARGEST = 4000
#: Up to this many parameters it is formed and factored at every point, which costs little.
DIRECT_SIZE = 120
#: With more, an old factor is replaced when conjugate gradients need more steps than this.
STALE_STEPS = 9
#: The largest number of Newton steps; a handful is usual.
MOST_STEPS = 200


@dataclass(frozen=True)
class Weighted:
    """Σᵢ qᵢ·ℓᵢ(w), for weights q that do not depend on w. There is no penalty."""

    rows: Rows
    row_weights: np.ndarray
    w: np.ndarray
    l2: float = 0.0

    @cached_property
    def losses(self) -> Losses:
        return self.rows.losses(self.w)

    @cached_property
    def value(self) -> float:
        return float(self.row_weights @ self.losses.value)

    @cached_property
    def gradient(self) -> np.ndarray:
        return self.rows.gather(self.row_weights[:, None] * self.losses.slope)

    def curve(self, v: np.ndarray) -> np.ndarray:
        """The Hessian times v."""
        return self.rows.gather(self.row_weights[:, None] * self.losses.curve(self.rows.score(v)))


@dataclass(frozen=True)
class Lower:
    """F at w, for one (η, λ)."""

    rows: Rows
    risk: Risk
    eta: float
    l2: float
    w: np.ndarray
    centre: np.ndarray | float = 0.0

    @cached_property
    def off_centre(self) -> np.ndarray:
        """w − c, and 0 for intercepts."""
        return self.rows.penalised * (self.w - self.centre)

    @cached_property
    def losses(self) -> Losses:
        return self.rows.losses(self.w)

    @cached_property
    def item_losses(self) -> np.ndarray:
        """What the adversary weighs: mean losses of groups, or the losses of rows."""
        return self.risk.of_items(self.losses.value)

    @cached_property
    def weighing(self) -> Weighing:
        return self.risk.adversary.weigh(self.item_losses, self.eta)

    @cached_property
    def row_weights(self) -> np.ndarray:
        return self.risk.of_rows(self.weighing.weights)

    @cached_property
    def value(self) -> float:
        return self.weighing.value + float(self.l2 / 2 * np.sum(self.off_centre**2))

    @cached_property
    def gradient(self) -> np.ndarray:
        inner = self.rows.gather(self.row_weights[:, None] * self.losses.slope)
        return inner + self.l2 * self.off_centre

    def curve(self, v: np.ndarray) -> np.ndarray:
        """∇²F·v."""
        scores = self.rows.score(v)
        changed = self.weighing.change(self.risk.of_items(self.losses.along(scores)))
        inner = self.row_weights[:, None] * self.losses.curve(scores)
        inner += self.risk.of_rows(changed)[:, None] * self.losses.slope
        return self.rows.gather(inner) + self.l2 * (self.rows.penalised * v)

    def with_prices(self) -> np.ndarray:
        """The derivatives of ∇F with respect to log η and to log λ, one after the other."""
        changed = self.risk.of_rows(-self.weighing.change(self.item_losses))
        of_eta = self.rows.gather(changed[:, None] * self.losses.slope)
        return np.stack([of_eta, self.l2 * self.off_centre])

    def of_prices(self, q: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """∂f~/∂x1 at (w, q), x1 = (log η, log λ, …), and the sizes of the terms that it adds up."""
        far = ((q - self.risk.adversary.even) ** 2 / self.risk.adversary.price).sum()
        size = np.sum((self.rows.penalised * self.w) ** 2)
        slope = np.array([-self.eta * far, self.l2 * size]) / 2
        return slope, np.abs(slope)

    def with_step(self, d: np.ndarray) -> np.ndarray:
        """How ∇F changes with a step d of x1."""
        return np.tensordot(d, self.with_prices(), 1)

    def along_prices(self, u: np.ndarray) -> np.ndarray:
        """The derivative of ⟨u, ∇F⟩ with respect to x1."""
        return np.tensordot(self.with_prices(), u, u.ndim)

    def minorant(self) -> tuple[float, np.ndarray]:
        """A smooth function below f~(·, q), q the adversary's answer to w: how far below at w, and
        its gradient. Here that is f~(·, q) itself.
        """
        return 0.0, self.gradient

    @property
    def exact(self) -> Lower:
        """The same without what is smoothed for Newton's method: what a certificate is of."""
        return self

    @property
    def collapsed(self) -> str:
        """Where F is not smooth at w: what makes it so, in words. Empty where it is smooth."""
        return ""

    def diagonal(self) -> np.ndarray:
        """The diagonal of ∇²F, as if the adversary's weights did not move."""
        x = self.rows.x
        squares = x.multiply(x).tocsr() if sparse.issparse(x) else x**2
        curvatures = [self.losses.curvature(k, k) for k in range(self.rows.scores)]
        weight = self.row_weights[:, None] * np.stack(curvatures, axis=1)
        return replace(self.rows, x=squares).gather(weight) + self.l2 * self.rows.penalised

    def hessian(self, dtype: Any = np.float64) -> np.ndarray:
        """∇²F as a matrix, with the parameters of one score after those of another."""
        scores, width = self.rows.shape
        slope, movable, rowwise = self.losses.slope, self.weighing.movable, self.risk.rowwise
        blocks = np.zeros((scores, scores, width, width), dtype)
        # ∂q/∂ℓ = (diag(m) − m·mᵀ/Σm)/η: of groups between their mean slopes, few; of rows the
        # diagonal joins the curvature of each, and m·mᵀ is between their one weighted sum.
        mean = np.zeros((1 if rowwise else self.risk.items, scores, width))
        for part, x in self.rows.chunks():
            spread = movable[None, part] if rowwise else self.risk.spread(part)
            for k in range(scores):
                mean[:, k] += (spread * slope[part, k]) @ x
                for j in range(k + 1):
                    weight = self.row_weights[part] * self.losses.curvature(k, j)[part]
                    if rowwise:
                        weight = weight + movable[part] * slope[part, k] * slope[part, j] / self.eta
                    if k == j:  # a product of one matrix with itself takes half the time
                        half = (np.sqrt(weight)[:, None] * x).astype(dtype, copy=False)
                        blocks[k, k] += half.T @ half
                    else:
                        blocks[k, j] += (x.T @ (weight[:, None] * x)).astype(dtype, copy=False)
        for k in range(scores):
            for j in range(k):
                blocks[j, k] = blocks[k, j].T
        size = scores * width
        whole = blocks.transpose(0, 2, 1, 3).reshape(size, size)
        return self._completed(whole, mean.reshape(len(mean), size))

    def _completed(self, whole: np.ndarray, mean: np.ndarray) -> np.ndarray:
        """With the ridge and Jᵀ(∂q/∂ℓ)J added, from the mean slopes of the items weighed."""
        movable, rowwise = self.weighing.movable, self.risk.rowwise
        if total := movable.sum():
            ones = np.ones(1) if rowwise else movable
            own = 0.0 if rowwise else np.diag(movable)
            pull = mean.T @ ((own - np.outer(ones, ones) / total) / self.eta) @ mean
            whole += pull.astype(whole.dtype, copy=False)
        whole.flat[:: len(whole) + 1] += self.l2 * self.rows.penalised.ravel()
        return whole


class _OfBothLevels:
    """F + (1/ρ)·a function of the other rows, both at one point: the penalty function over ρ."""

    lower: Lower
    upper: Any
    rho: float

    @property
    def w(self) -> np.ndarray:
        return self.lower.w

    @cached_property
    def value(self) -> float:
        return self.lower.value + self.upper.value / self.rho

    @cached_property
    def gradient(self) -> np.ndarray:
        return self.lower.gradient + self.upper.gradient / self.rho

    def curve(self, v: np.ndarray) -> np.ndarray:
        return self.lower.curve(v) + self.upper.curve(v) / self.rho


@dataclass(frozen=True)
class Penalised(_OfBothLevels):
    """F + (1/ρ)·Σ x2ᵢ·ℓᵢ(w), with weights x2 that stay."""

    lower: Lower
    upper: Weighted
    rho: float

    def hessian(self, dtype: Any = np.float64) -> np.ndarray:
        """The Hessian of F, which preconditions well: the other part is small, 1/ρ."""
        return self.lower.hessian(dtype)

    def diagonal(self) -> np.ndarray:
        return self.lower.diagonal()


@dataclass(frozen=True)
class Joint(_OfBothLevels):
    """F + (1/ρ)·φ_μ(V), with the upper level's adversary put in, at a price μ."""

    lower: Lower
    upper: Lower  # whose η is μ, without a ridge
    rho: float

    def hessian(self, dtype: Any = np.float64) -> np.ndarray:
        return self.lower.hessian(dtype) + self.upper.hessian(dtype) / dtype(self.rho)

    def diagonal(self) -> np.ndarray:
        return self.lower.diagonal() + self.upper.diagonal() / self.rho


#: A smooth convex function at one point.
Local = Lower | Penalised | Joint
T = TypeVar("T", Lower, Penalised, Joint)


@dataclass
class Preconditioner:
    """An approximate inverse of the Hessian, which serves for several points."""

    factor: tuple[np.ndarray, bool] | None = None  # of Cholesky
    diagonal: np.ndarray | None = None  # instead of a factor, where there are many parameters
    point: Local | None = None  # where the Hessian was formed
    steps: int = 0  # Newton steps so far

    def renew(self, at: Local) -> None:
        """Form the Hessian at this point and factor it."""
        self.point = at
        if at.w.size > LARGEST:
            self.diagonal = np.maximum(at.diagonal(), 1e-300)
            return
        # A preconditioner of conjugate gradients needs half the digits only, which is faster.
        dtype = np.float64 if at.w.size <= DIRECT_SIZE else np.float32
        hessian = at.hessian(dtype)
        if not np.isfinite(hessian).all():
            raise ValueError("X has entries that are too large to be squared; scale the features")
        # With three classes or more, equal changes of all intercepts have no curvature.
        slack = dtype(50 * np.finfo(dtype).eps * hessian.diagonal().max() + 1e-30)
        while True:
            hessian.flat[:: len(hessian) + 1] += slack
            try:
                self.factor = linalg.cho_factor(hessian, lower=True, check_finite=False)
                return
            except linalg.LinAlgError:
                slack *= 100

    def __call__(self, g: np.ndarray) -> np.ndarray:
        if self.diagonal is not None:
            return g / self.diagonal
        assert self.factor is not None
        right = g.ravel().astype(self.factor[0].dtype, copy=False)
        found = linalg.cho_solve(self.factor, right, check_finite=False)
        return found.reshape(g.shape).astype(np.float64, copy=False)


def solve(at: Local, right: np.ndarray, kept: Preconditioner, relative: float) -> np.ndarray:
    """The solution v of ∇²F·v = right, to a relative residual."""
    if kept.point is None or (at.w.size <= DIRECT_SIZE and kept.point is not at):
        kept.renew(at)
    if at.w.size <= DIRECT_SIZE:
        return kept(right)
    most = 500 if kept.diagonal is not None else STALE_STEPS
    v, reached = _conjugate_gradients(at, right, kept, relative, most)
    if not reached and kept.point is not at:
        kept.renew(at)
        v, _ = _conjugate_gradients(at, right, kept, relative, most)
    return v


def _conjugate_gradients(
    at: Local, right: np.ndarray, inverse: Preconditioner, relative: float, most: int
) -> tuple[np.ndarray, bool]:
    """An approximate solution, and whether its relative residual is small enough."""
    size, shape = right.size, right.shape
    flat = lambda of: lambda v: of(v.reshape(shape)).ravel()
    operator: Any = LinearOperator  # its type stubs lack these arguments
    product, solved = (operator((size, size), flat(of), dtype=float) for of in (at.curve, inverse))
    v, missed = cg(product, right.ravel(), rtol=relative, maxiter=most, M=solved)
    return v.reshape(shape), missed == 0


def minimise(
    function: Callable[[np.ndarray], T],
    start: np.ndarray,
    kept: Preconditioner,
    done: Callable[[T], bool],
    most: int = MOST_STEPS,
) -> T:
    """Newton's method with a line search, until `done` or until rounding ends the descent."""
    at = function(start)
    first = np.linalg.norm(at.gradient)
    for _ in range(most):
        if done(at):
            break
        # Tight enough for quadratic convergence, loose far from the end.
        relative = min(0.1, max(1e-10, float(np.linalg.norm(at.gradient) / first)))
        following = _line_search(function, at, solve(at, -at.gradient, kept, relative))
        if following is None:
            break
        kept.steps += 1
        at = following
    return at


def _line_search(function: Callable[[np.ndarray], T], at: T, step: np.ndarray) -> T | None:
    """The next point along a step; None where rounding leaves no descent."""
    slope = float(np.sum(at.gradient * step))
    if not slope < 0:
        return None
    noise = 1e-14 * max(1.0, abs(at.value))
    length = 1.0
    for _ in range(40):
        trial = function(at.w + length * step)
        if trial.value <= at.value + 1e-4 * length * slope:
            return trial
        if -slope * length <= 100 * noise:  # rounding hides the values, not yet the gradients
            smaller = np.linalg.norm(trial.gradient) <= np.linalg.norm(at.gradient) / 2
            return trial if smaller else None
        length /= 2
    return None
