"""Groups that are known of some rows only: the lower level of soft group DRO, and its predictor.

A row i of label y whose group is not known is in group g with probability

p_ig(v) = exp(z_ig)/Σ_h exp(z_ih),  z_ig = ⟨v_g, (xᵢ, one-hot yᵢ)⟩,  over the groups seen with y

and one whose group is known is in it. Training weighs the mean losses (Ghosal and Li, AAAI 2023)

L_g(w, v) = Σᵢ sᵢ·p_ig·ℓᵢ(w) / P_g,  P_g = Σᵢ sᵢ·p_ig,  s the weights of the rows

so that F = φ(L) + (λ/2)‖w‖² as for known groups. The upper level has v as a variable, x = (log η,
log λ, v), and besides the validation losses V it asks of v alone

R(v) = γ·(mean of −log p over the rows with a known group + (κ/2)‖v‖²)

With ∂L_g/∂v from ∂p_ig/∂z_ih = p_ig·(1[g=h] − p_ih), and u_k the solution of ∇²F·u = ∇V_k,

∂V_k/∂v = −∂/∂v ⟨u_k, ∇_w F⟩ = −Σ_g [q_g·∂(A_g·ℓ'u_k)/∂v + (∂q/∂L·A·ℓ'u_k)_g·∂(A_g·ℓ)/∂v]

where A_gi = sᵢ·p_ig/P_g: one linear solve for each validation group, however long v is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, cast

import numpy as np

from bilevax.learn._newton import Lower, Preconditioner, minimise
from bilevax.learn._risk import Adversary, Risk, group_risk
from bilevax.learn._rows import Rows
from bilevax.learn._tuning import STARTS, Levels, Own

#: A step of length one in v.
UNIT = 0.25
#: The norm of the gradient to which the predictor alone is fitted.
PREDICTOR_GRADIENT = 1e-9


@dataclass(frozen=True)
class SoftRows(Rows):
    """Rows with their weights, and the groups that each may be in: one where it is known."""

    allowed: np.ndarray = field(kw_only=True)  # rows × groups, of booleans
    weight: np.ndarray = field(kw_only=True)

    def taken(self, chosen: np.ndarray) -> SoftRows:
        rows = super().taken(chosen)
        parts = rows.x, rows.label, rows.classes, rows.intercept
        return SoftRows(*parts, allowed=self.allowed[chosen], weight=self.weight[chosen])

    @property
    def predictor_shape(self) -> tuple[int, int]:
        return self.allowed.shape[1], self.x.shape[1] + self.classes

    def z(self, v: np.ndarray) -> np.ndarray:
        """rows × groups."""
        d = self.x.shape[1]
        return np.asarray(self.x @ v[:, :d].T) + v[:, d:].T[self.label]

    def z_gather(self, rows: np.ndarray, magnitudes: bool = False) -> np.ndarray:
        """The adjoint of `z`; of magnitudes, that of the features' magnitudes."""
        x = abs(self.x) if magnitudes else self.x
        own = [np.bincount(self.label, column, self.classes) for column in rows.T]
        return np.concatenate([np.asarray(x.T @ rows).T, own], axis=1)

    def log_probabilities(self, v: np.ndarray) -> np.ndarray:
        z = np.where(self.allowed, self.z(v), -np.inf)
        z -= z.max(axis=1, keepdims=True)
        return z - np.log(np.exp(z).sum(axis=1, keepdims=True))


@dataclass(frozen=True)
class SoftRisk(Risk):
    """The risk of groups in which rows are with probabilities."""

    rows: SoftRows = field(kw_only=True)
    probability: np.ndarray = field(kw_only=True)  # p

    @property
    def rowwise(self) -> bool:
        return False

    @cached_property
    def mass(self) -> np.ndarray:
        """P."""
        return self.share @ self.probability

    @cached_property
    def matrix(self) -> np.ndarray:
        """A, groups × rows."""
        return (self.share[:, None] * self.probability / self.mass).T

    def of_items(self, losses: np.ndarray) -> np.ndarray:
        return self.matrix @ losses

    def of_rows(self, weights: np.ndarray) -> np.ndarray:
        return weights @ self.matrix

    def spread(self, part: slice) -> np.ndarray:
        return self.matrix[:, part]

    def slope(self, a: np.ndarray, losses: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """∂/∂v of Σ_g a_g·(A_g·ℓ), and the sizes of the terms that it adds up."""
        off = (losses[:, None] - self.matrix @ losses) * self.share[:, None] * (a / self.mass)
        p, total = self.probability, lambda c: (self.probability * c).sum(axis=1, keepdims=True)
        slope = self.rows.z_gather(p * (off - total(off)))
        size = p * (np.abs(off) + total(np.abs(off)))
        return slope.ravel(), self.rows.z_gather(size, magnitudes=True).ravel()

    def step(self, dv: np.ndarray) -> np.ndarray:
        """How A changes with a step of v."""
        dz = self.rows.z(dv.reshape(self.rows.predictor_shape))
        p = self.probability
        dp = self.share[:, None] * p * (dz - (p * dz).sum(axis=1, keepdims=True))
        return (dp / self.mass).T - self.matrix * (dp.sum(axis=0) / self.mass)[:, None]


@dataclass(frozen=True)
class SoftLower(Lower):
    """F at w, with probabilities of the groups."""

    risk: SoftRisk

    def with_step(self, d: np.ndarray) -> np.ndarray:
        change = self.risk.step(d[2:])
        moved = self.weighing.change(change @ self.losses.value)
        weights = self.weighing.weights @ change + self.risk.of_rows(moved)
        of_prices = np.tensordot(d[:2], self.with_prices(), 1)
        return of_prices + self.rows.gather(weights[:, None] * self.losses.slope)

    def along_prices(self, u: np.ndarray) -> np.ndarray:
        along = self.losses.along(self.rows.score(u))
        moved = self.weighing.change(self.risk.of_items(along))
        direct, _ = self.risk.slope(self.weighing.weights, along)
        indirect, _ = self.risk.slope(moved, self.losses.value)
        return np.append(super().along_prices(u), direct + indirect)

    def of_prices(self, q: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        slope, size = super().of_prices(q)
        of_v, size_v = self.risk.slope(q, self.losses.value)
        return np.append(slope, of_v), np.append(size, size_v)


@dataclass(frozen=True)
class PredictorLoss:
    """R/γ at v: the cross-entropy of the predictor on rows with known groups, and its ridge."""

    rows: SoftRows  # allowed: the groups seen with the label
    group: np.ndarray
    ridge: float
    w: np.ndarray  # v

    @cached_property
    def share(self) -> np.ndarray:
        return self.rows.weight / self.rows.weight.sum()

    @cached_property
    def log_p(self) -> np.ndarray:
        return self.rows.log_probabilities(self.w)

    @cached_property
    def value(self) -> float:
        own = self.log_p[np.arange(len(self.group)), self.group]
        return float(self.ridge / 2 * np.sum(self.w**2) - self.share @ own)

    @cached_property
    def gradient(self) -> np.ndarray:
        off = np.exp(self.log_p)
        off[np.arange(len(off)), self.group] -= 1
        return self.rows.z_gather(self.share[:, None] * off) + self.ridge * self.w

    @property
    def size(self) -> np.ndarray:
        """The sizes of the terms that the gradient adds up."""
        terms = self.share[:, None] * (np.exp(self.log_p) + 1)
        return self.rows.z_gather(terms, magnitudes=True) + self.ridge * np.abs(self.w)

    def curve(self, v: np.ndarray) -> np.ndarray:
        p, z = np.exp(self.log_p), self.rows.z(v)
        inner = p * (z - (p * z).sum(axis=1, keepdims=True))
        return self.rows.z_gather(self.share[:, None] * inner) + self.ridge * v

    def hessian(self, dtype: Any = np.float64) -> np.ndarray:
        (groups, width), p = self.w.shape, np.exp(self.log_p)
        blocks = np.zeros((groups, width, groups, width), dtype)
        for part, x in Rows(self.rows.x, self.rows.label, self.rows.classes, False).chunks():
            features = np.column_stack([x, np.eye(self.rows.classes)[self.rows.label[part]]])
            for g in range(groups):
                for h in range(groups):
                    weight = self.share[part] * p[part, g] * ((g == h) - p[part, h])
                    blocks[g, :, h] += (features.T * weight) @ features
        hessian = blocks.reshape(self.w.size, self.w.size)
        hessian.flat[:: self.w.size + 1] += self.ridge
        return hessian

    def diagonal(self) -> np.ndarray:
        """A bound on the diagonal of the Hessian, which is enough to precondition."""
        x = self.rows.x
        squares = x.multiply(x).tocsr() if hasattr(x, "multiply") else x**2
        p = np.exp(self.log_p)
        own = [np.bincount(self.rows.label, self.share * c, self.rows.classes) for c in p.T]
        inner = np.asarray(squares.T @ (self.share[:, None] * p)).T
        return np.concatenate([inner, own], axis=1) + self.ridge


def fit_predictor(rows: SoftRows, group: np.ndarray, ridge: float) -> np.ndarray:
    """The v of the greatest penalised likelihood on rows with known groups."""
    loss: Any = lambda v: PredictorLoss(rows, group, ridge, v)
    done = lambda at: bool(np.linalg.norm(at.gradient) <= PREDICTOR_GRADIENT)
    return cast(Any, minimise)(loss, np.zeros(rows.predictor_shape), Preconditioner(), done).w


def soft_risk(rows: SoftRows, v: np.ndarray) -> SoftRisk:
    """The risk of the groups at v."""
    groups = rows.allowed.shape[1]
    adversary = Adversary(np.full(groups, 1 / groups), np.ones(groups), np.ones(groups))
    return SoftRisk(
        adversary, rows.weight, rows=rows, probability=np.exp(rows.log_probabilities(v))
    )


@dataclass(frozen=True)
class SoftLevels(Levels):
    """The two levels with x = (log η, log λ, v); validation rows have known groups."""

    train: SoftRows
    known: SoftRows = field(kw_only=True)  # rows with known groups, and those their labels allow
    group: np.ndarray = field(kw_only=True)  # of the known rows
    gamma: float = field(kw_only=True)
    ridge: float = field(kw_only=True)
    first: np.ndarray = field(kw_only=True)  # v, of the predictor alone
    kept: dict[bytes, SoftRisk] = field(default_factory=dict, kw_only=True)  # the last one

    adjoint: ClassVar[bool] = True

    @property
    def starts(self) -> list[np.ndarray]:
        starts = (np.append(np.log(start), self.first) for start in STARTS)
        return [np.clip(start, self.low, self.high) for start in starts]

    @property
    def unit(self) -> np.ndarray:
        return np.append(np.ones(2), np.full(self.first.size, UNIT))

    @cached_property
    def curvature(self) -> np.ndarray:  # pyright: ignore[reportIncompatibleMethodOverride]
        """That of R in v, which is most of it."""
        whole = np.diag(1e-2 / self.unit**2)
        whole[2:, 2:] += self.gamma * self.loss(self.first).hessian()
        return whole

    def loss(self, v: np.ndarray) -> PredictorLoss:
        """R/γ at v."""
        shape = self.known.predictor_shape
        return PredictorLoss(self.known, self.group, self.ridge, v.reshape(shape))

    def own(self, x: np.ndarray) -> Own:
        loss, prices = self.loss(x[2:]), np.zeros(2)
        slope = np.append(prices, self.gamma * loss.gradient)
        return Own(self.gamma * loss.value, slope, np.append(prices, self.gamma * loss.size))

    def lower(self, x: np.ndarray, w: np.ndarray) -> Lower:
        key = x[2:].tobytes()
        if key not in self.kept:
            self.kept.clear()
            self.kept[key] = soft_risk(self.train, x[2:].reshape(self.train.predictor_shape))
        eta, l2 = (float(v) for v in np.exp(x[:2]))
        return SoftLower(self.train, self.kept[key], eta, l2, w)

    def fewer(self, sampled: Callable[[Rows, Risk], tuple[Rows, Risk]]) -> Levels:
        """The levels of a sample, in which likely groups stand for those that are not known."""
        assert isinstance(self.risk, SoftRisk)
        likely = self.risk.probability.argmax(axis=1)
        groups = self.train.allowed.shape[1]
        train, _ = sampled(self.train, group_risk(likely, groups, self.train.weight))
        held, held_risk = sampled(self.held, self.held_risk)
        assert isinstance(train, SoftRows)
        risk = soft_risk(train, self.first.reshape(train.predictor_shape))
        return SoftLevels(
            train, risk, held, held_risk, self.low, self.high,
            known=self.known, group=self.group, gamma=self.gamma, ridge=self.ridge,
            first=self.first,
        )  # fmt: skip
