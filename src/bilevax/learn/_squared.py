"""Rows with numbers to predict, under the squared loss."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from bilevax.learn._rows import Losses, Rows


@dataclass(frozen=True)
class SquaredLosses(Losses):
    """ℓ = ½(s − b)², whose second derivative is 1."""

    def curve(self, scores: np.ndarray) -> np.ndarray:
        return scores

    def curvature(self, k: int, j: int) -> np.ndarray:
        return np.ones(len(self.value))


@dataclass(frozen=True)
class SquaredRows(Rows):
    """Features and numbers b, in `label`, under a linear model with the loss ½(s − b)²."""

    def losses(self, w: np.ndarray) -> Losses:
        off = self.score(w) - self.label[:, None]
        return SquaredLosses(off[:, 0] ** 2 / 2, off, np.ones_like(off))
