"""Groups whose rows may move: the lower level of hierarchical group DRO.

Each group's features move within a W_∞ ball of radius ε_g, every row by at most ε_g in the
Euclidean norm. With class parameters w_k without intercepts (of two classes 0 and w) row i, of
label y in group g, then has the loss

ℓᵢ(w) = log Σₖ exp(sₖ − s_y + ε_g·‖wₖ − w_y‖)

That is the exact maximum over the moves for two classes, log(1 + exp(−margin + ε_g·‖w‖)), and for
more a convex upper bound of it, as each class takes the move that serves it best.

A norm is ⟨u, d⟩ with u = d/‖d‖. So at w the moved rows have linear scores, in which u stands, and
gradients are those of plain rows with these scores. For other w, and any ‖u‖ ≤ 1, such scores give
a lower bound, which is smooth: the gap of the saddle point is judged by it. Second derivatives have
the curvature (I − u·uᵀ)/‖d‖ of the norms on top.

Norms are not smooth at zero. A large radius makes w = 0, or wₖ = w_y, the solution. Newton's method
works with √(‖d‖² + δ²). Certificates do not: they are of the norms themselves (`exact`). A
solution at a zero of a norm is `collapsed`: its gap is bounded all the same, but f~ has no gradient
there, so that ε-KKT is not defined.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from bilevax.learn._newton import Lower
from bilevax.learn._risk import Risk
from bilevax.learn._rows import CHUNK, Losses, Rows
from bilevax.learn._tuning import STARTS, Levels

#: δ, and the norm below which coefficients count as zero.
SMOOTHING, ZERO = 1e-9, 1e-6
#: A step of length one is this share of the largest radius.
RADIUS_UNIT = 1 / 8
#: A block of tangents has no more entries than this.
LARGEST_BLOCK = 4_000_000


@dataclass(frozen=True)
class MovedRows(Rows):
    """Rows moved as far as they may, against the parameters `at`."""

    still: Rows = field(kw_only=True)
    radius: np.ndarray = field(kw_only=True)  # of each row
    at: np.ndarray = field(kw_only=True)
    smoothing: float = field(kw_only=True, default=SMOOTHING)

    @classmethod
    def of(cls, still: Rows, radius: np.ndarray, at: np.ndarray) -> MovedRows:
        x, label, classes, intercept = still.x, still.label, still.classes, still.intercept
        return cls(x, label, classes, intercept, still=still, radius=radius, at=at)

    def apart(self, v: np.ndarray) -> np.ndarray:
        """v_k − v_y, at [y, k]."""
        inner = v[:, : self.x.shape[1]]
        if self.scores == 1:
            inner = np.concatenate([np.zeros_like(inner), inner])
        return inner[None, :] - inner[:, None]

    def norms_of(self, w: np.ndarray) -> np.ndarray:
        """‖w_k − w_y‖, smoothed, at [y, k]; zero for a class and itself."""
        norms = np.sqrt((self.apart(w) ** 2).sum(axis=2) + self.smoothing**2)
        np.fill_diagonal(norms, 0)
        return norms

    @cached_property
    def norms(self) -> np.ndarray:
        return self.norms_of(self.at)

    @cached_property
    def divisors(self) -> np.ndarray:
        """The norms, and 1 where one is zero."""
        return np.where(self.norms > 0, self.norms, 1)

    @cached_property
    def towards(self) -> np.ndarray:
        """u, of every pair of classes; 0 where there is no direction."""
        return self.apart(self.at) / self.divisors[:, :, None]

    @cached_property
    def widest(self) -> float:
        return self.still.widest + float(np.sqrt(2) * self.radius.max(initial=0))

    def of_rows(self, pairs: np.ndarray) -> np.ndarray:
        """From numbers for each pair (y, k) to rows × scores."""
        scores = pairs[:, 1:] - pairs[:, :1] if self.scores == 1 else pairs
        return scores[self.label]

    def of_pairs(self, rows: np.ndarray) -> np.ndarray:
        """The adjoint of `of_rows`."""
        columns = [np.bincount(self.label, column, self.classes) for column in rows.T]
        pairs = np.stack([-columns[0], *columns] if self.scores == 1 else columns, axis=1)
        np.fill_diagonal(pairs, 0)  # a class and itself are never apart
        return pairs

    def gathered(self, pairs: np.ndarray) -> np.ndarray:
        """The adjoint of `apart`: from a vector for each pair to the shape of the parameters."""
        inner = pairs.sum(axis=0) - pairs.sum(axis=1)
        inner = inner[1:] if self.scores == 1 else inner
        return np.pad(inner, ((0, 0), (0, int(self.intercept))))

    def pull(self, rows: np.ndarray) -> np.ndarray:
        """The gradient of Σ rᵢₖ·‖wₖ − w_y‖ in w."""
        return self.gathered(self.of_pairs(rows)[:, :, None] * self.towards)

    def score(self, w: np.ndarray) -> np.ndarray:
        moved = (self.towards * self.apart(w)).sum(axis=2)
        return self.still.score(w) + self.radius[:, None] * self.of_rows(moved)

    def gather(self, rows: np.ndarray) -> np.ndarray:
        return self.still.gather(rows) + self.pull(self.radius[:, None] * rows)

    def losses(self, w: np.ndarray) -> Losses:
        moved = self.radius[:, None] * self.of_rows(self.norms_of(w))
        return self.losses_of(self.still.score(w) + moved)

    def tangents(self) -> Any:
        """Blocks of ∂s/∂w, rows × scores × parameters."""
        scores, width = self.shape
        unit = self.still.intercept
        for chunk, x in self.chunks():
            size = max(1, min(CHUNK, LARGEST_BLOCK // (scores**2 * width)))
            for begin in range(0, len(x), size):
                inner = x[begin : begin + size]
                part = slice(chunk.start + begin, chunk.start + begin + len(inner))
                label, radius = self.label[part], self.radius[part]
                block = np.zeros((len(inner), scores, scores, width))
                block[:, range(scores), range(scores)] = inner[:, None]
                moves = np.pad(self.towards, ((0, 0), (0, 0), (0, int(unit))))
                moves = radius[:, None, None] * moves[label]
                if scores == 1:
                    block[:, 0, 0] += moves.sum(axis=1)
                else:
                    rows = np.arange(len(inner))
                    block[:, range(scores), range(scores)] += moves
                    block[rows, :, label] -= moves
                yield part, block.reshape(len(inner), scores, scores * width)


@dataclass(frozen=True)
class MovedLower(Lower):
    """F at w, with every group moved by its radius."""

    rows: MovedRows

    @cached_property
    def bends(self) -> np.ndarray:
        """The weight of each norm's curvature, over the norm, at [y, k]."""
        weight = (self.row_weights * self.rows.radius)[:, None] * self.losses.slope
        return self.rows.of_pairs(weight) / self.rows.divisors

    def curve(self, v: np.ndarray) -> np.ndarray:
        apart, towards = self.rows.apart(v), self.rows.towards
        apart -= towards * (towards * apart).sum(axis=2, keepdims=True)
        return super().curve(v) + self.rows.gathered(self.bends[:, :, None] * apart)

    def with_prices(self) -> np.ndarray:
        """The derivatives of ∇F with respect to log η, log λ and the radii."""
        slope, weights = self.losses.slope, self.row_weights
        norms, moved = self.rows.of_rows(self.rows.norms), []
        for g in range(self.risk.items):
            inside = (self.risk.group == g)[:, None]
            scores = inside * norms
            changed = self.weighing.change(self.risk.of_items(self.losses.along(scores)))
            inner = weights[:, None] * self.losses.curve(scores)
            inner += self.risk.of_rows(changed)[:, None] * slope
            pull = self.rows.pull(inside * weights[:, None] * slope)
            moved.append(self.rows.gather(inner) + pull)
        return np.concatenate([super().with_prices(), moved])

    def of_prices(self, q: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        of_radii = q * self.risk.of_items(self.losses.along(self.rows.of_rows(self.rows.norms)))
        slope, size = super().of_prices(q)
        return np.concatenate([slope, of_radii]), np.concatenate([size, np.abs(of_radii)])

    @property
    def exact(self) -> MovedLower:
        return replace(self, rows=replace(self.rows, smoothing=0.0))

    def minorant(self) -> tuple[float, np.ndarray]:
        """f~(·, q) for moves in fixed directions."""
        losses = self.rows.losses_of(self.rows.score(self.w))
        inner = self.rows.gather(self.row_weights[:, None] * losses.slope)
        gradient = inner + self.l2 * (self.rows.penalised * self.w)
        return float(self.row_weights @ (self.losses.value - losses.value)), gradient

    @property
    def collapsed(self) -> str:
        touched = np.bincount(self.rows.label, self.rows.radius, self.rows.classes) > 0
        pairs = np.argwhere((self.rows.norms < ZERO) & (touched[:, None] | touched))
        pairs = [(int(y), int(k)) for y, k in pairs if y < k]
        if not pairs:
            return ""
        which = (
            "the coefficients are zero"
            if len(pairs) == self.rows.classes * (self.rows.classes - 1) // 2
            else f"the classes number {pairs[0][0]} and {pairs[0][1]} have the same coefficients"
        )
        return (
            f"{which}: rows may move so far that no direction of X is worth a weight, and the loss "
            "is not smooth there; give smaller radii"
        )

    def diagonal(self) -> np.ndarray:
        """As if the rows did not move; it only has to precondition."""
        return Lower(self.rows.still, self.risk, self.eta, self.l2, self.w).diagonal()

    def hessian(self, dtype: Any = np.float64) -> np.ndarray:
        scores, size = self.rows.scores, self.w.size
        slope = self.losses.slope
        whole, mean = np.zeros((size, size), dtype), np.zeros((self.risk.items, size))
        for part, tangents in self.rows.tangents():
            spread, weights = self.risk.spread(part), self.row_weights[part]
            mean += spread @ np.einsum("ik,ikp->ip", slope[part], tangents)
            for k in range(scores):
                for j in range(scores):
                    weight = weights * self.losses.curvature(k, j)[part]
                    right = weight[:, None] * tangents[:, j]
                    whole += (tangents[:, k].T @ right).astype(dtype, copy=False)
        whole += self._bent().astype(dtype, copy=False)
        return self._completed(whole, mean)

    def _bent(self) -> np.ndarray:
        """The curvature of the norms as a matrix."""
        (scores, width), d = self.w.shape, self.rows.x.shape[1]
        blocks = np.zeros((self.rows.classes, width, self.rows.classes, width))
        for y, k in np.argwhere(self.bends != 0):
            u = self.rows.towards[y, k]
            bend = self.bends[y, k] * (np.eye(d) - np.outer(u, u))
            for a, b, sign in ((k, k, 1), (y, y, 1), (k, y, -1), (y, k, -1)):
                blocks[a, :d, b, :d] += sign * bend
        first = self.rows.classes - scores  # of two classes, only the parameters of the second
        return blocks[first:, :, first:].reshape(scores * width, scores * width)


def moved_lower(
    rows: Rows, risk: Risk, eta: float, l2: float, w: np.ndarray, radii: np.ndarray
) -> MovedLower:
    """The lower level at w, for a radius of each group."""
    assert risk.group is not None
    return MovedLower(MovedRows.of(rows, radii[risk.group], w), risk, eta, l2, w)


@dataclass(frozen=True)
class MovedLevels(Levels):
    """The two levels with x = (log η, log λ, ε_1 … ε_G). Validation rows are not moved."""

    @property
    def starts(self) -> list[np.ndarray]:
        """Those of group DRO, without moves, and one with moves."""
        groups = len(self.low) - 2
        radii = [np.zeros(groups)] * len(STARTS) + [np.full(groups, np.inf)]
        starts = (np.append(np.log(p), r) for p, r in zip([*STARTS, STARTS[0]], radii))
        high = np.append(self.high[:2], self.unit[2:])
        return [np.clip(start, self.low, high) for start in starts]

    @property
    def unit(self) -> np.ndarray:
        return np.append(np.ones(2), RADIUS_UNIT * self.high[2:])

    def lower(self, x: np.ndarray, w: np.ndarray) -> Lower:
        eta, l2 = (float(v) for v in np.exp(x[:2]))
        return moved_lower(self.train, self.risk, eta, l2, w, x[2:])
