"""Rows of data under a linear model: scores, losses and their derivatives."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from scipy import sparse, special

#: The number of rows in a block, where a product needs a copy of them.
CHUNK = 8192


@dataclass(frozen=True)
class Losses:
    """The loss ℓᵢ of each row, and its derivatives with respect to the row's scores."""

    value: np.ndarray  # ℓ, one per row
    slope: np.ndarray  # ∂ℓ/∂s, rows × scores
    share: np.ndarray  # the predicted probabilities, which give the second derivatives

    def along(self, scores: np.ndarray) -> np.ndarray:
        """Σₖ ∂ℓ/∂sₖ·δsₖ: how the losses change when the scores change by δs."""
        return np.einsum("ik,ik->i", self.slope, scores)

    def curve(self, scores: np.ndarray) -> np.ndarray:
        """∂²ℓ/∂s²·δs."""
        if scores.shape[1] == 1:
            return self.share * (1 - self.share) * scores
        inner = np.einsum("ik,ik->i", self.share, scores)
        return self.share * (scores - inner[:, None])

    def curvature(self, k: int, j: int) -> np.ndarray:
        """∂²ℓ/∂sₖ∂sⱼ, of every row."""
        own = self.share[:, k] if k == j else 0.0
        return own - self.share[:, k] * self.share[:, j]


@dataclass(frozen=True)
class Rows:
    """Features and labels 0 … K−1 under a linear model with logistic loss.

    Two classes have one score s, with ℓ = log(1 + exp(∓s)); more have one score each, with
    ℓ = log Σ exp(s) − s of the label. Parameters w are scores × features, and with an intercept
    the last column holds it.
    """

    x: Any  # dense, or sparse by rows
    label: np.ndarray
    classes: int
    intercept: bool = True

    @property
    def scores(self) -> int:
        return 1 if self.classes <= 2 else self.classes

    def __len__(self) -> int:
        return self.x.shape[0]

    def taken(self, chosen: np.ndarray) -> Rows:
        """Some of the rows."""
        return Rows(self.x[chosen], self.label[chosen], self.classes, self.intercept)

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of the parameters."""
        return self.scores, self.x.shape[1] + self.intercept

    @cached_property
    def widest(self) -> float:
        """The norm of the largest entries of the columns: no row is longer."""
        if self.x.shape[0] == 0:
            return 0.0
        if sparse.issparse(self.x):
            largest = abs(self.x).max(axis=0).toarray().ravel()
        else:  # this makes no copy of all rows
            largest = np.maximum(self.x.max(axis=0), -self.x.min(axis=0))
        return float(np.sqrt(np.sum(largest**2) + self.intercept))

    @cached_property
    def penalised(self) -> np.ndarray:
        """One for each parameter that the ridge penalty counts, zero for the intercepts."""
        ones = np.ones(self.shape)
        ones[:, self.x.shape[1] :] = 0
        return ones

    def score(self, w: np.ndarray) -> np.ndarray:
        """s = X·w, rows × scores."""
        if not self.intercept:
            return np.asarray(self.x @ w.T)
        return np.asarray(self.x @ w[:, :-1].T) + w[:, -1]

    def gather(self, rows: np.ndarray) -> np.ndarray:
        """Xᵀ·r: from numbers per row and score to the shape of the parameters."""
        inner = np.asarray(self.x.T @ rows).T
        if not self.intercept:
            return inner
        return np.concatenate([inner, rows.sum(axis=0)[:, None]], axis=1)

    def losses(self, w: np.ndarray) -> Losses:
        return self.losses_of(self.score(w))

    def losses_of(self, s: np.ndarray) -> Losses:
        """The losses at scores s, which are overwritten."""
        if self.scores == 1:
            sign = (2 * self.label - 1)[:, None]
            margin = sign * s
            wrong = special.expit(-margin)
            value = np.log1p(np.exp(-np.abs(margin))) + np.maximum(-margin, 0)
            return Losses(value[:, 0], -sign * wrong, wrong)
        s -= s.max(axis=1, keepdims=True)
        powers = np.exp(s)
        total = powers.sum(axis=1)
        share = powers / total[:, None]
        own = np.arange(len(s)), self.label
        slope = share.copy()
        slope[own] -= 1
        return Losses(np.log(total) - s[own], slope, share)

    def separated(self, w: np.ndarray) -> bool:
        """Whether w gives every row's own class the highest score, and none a tie."""
        s = self.score(w)
        if self.scores == 1:
            return bool(((2 * self.label - 1) * s[:, 0] > 0).all())
        own = np.arange(len(s)), self.label
        mine = s[own]
        s[own] = -np.inf
        return bool((mine > s.max(axis=1)).all())

    def chunks(self) -> Iterator[tuple[slice, np.ndarray]]:
        """Dense blocks of rows, with a column of ones for the intercept."""
        for begin in range(0, len(self), CHUNK):
            part = slice(begin, min(begin + CHUNK, len(self)))
            x = self.x[part]
            x = x.toarray() if sparse.issparse(x) else x
            yield part, np.column_stack([x, np.ones(len(x))]) if self.intercept else x
