"""The adversary: the largest weighted sum of losses that it can reach, at a price.

φ(ℓ) = max over q of ⟨q, ℓ⟩ − (η/2)·Σⱼ (qⱼ − bⱼ)²/cⱼ,  with Σⱼ qⱼ = 1 and 0 ≤ qⱼ ≤ capⱼ

Its weights have a closed form, q = clip(b + c·(ℓ − ν)/η, 0, cap) with ν such that they sum to 1; so
φ is smooth for η > 0, and ∇φ = q. Group DRO (`eq:dro_lower`) weighs the mean losses of G groups,
with b = 1/G and c = 1. Tail risk (`eq:DRO_tuning`) weighs the rows, with b = c = the shares of the
rows, so that η means the same however many there are (of n rows that weigh the same it is n times
smaller than in the equation), and cap = b/p: at η → 0 that is the mean loss over the worst share p
of the rows. With p = 0 there is no cap, and it is the largest loss.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from bilevax.terms._waterfill import host_level

#: The relative rounding error of a sum of many products.
ROUNDING = 16 * float(np.finfo(float).eps)


@dataclass(frozen=True)
class Weighing:
    """φ, the weights q that attain it, and ∂q/∂ℓ = (diag(m) − m·mᵀ/Σm)/η."""

    value: float
    weights: np.ndarray
    movable: np.ndarray  # m: c where a weight is between its bounds, zero elsewhere
    eta: float

    def change(self, losses: np.ndarray) -> np.ndarray:
        """How q changes with a change of the losses, or with each of several in columns.

        It changes with log η by −change(losses).
        """
        total = self.movable.sum()
        mean = self.movable @ losses / total if total else 0.0
        return (self.movable * (losses - mean).T / self.eta).T


@dataclass(frozen=True)
class Adversary:
    """The weights an adversary may choose, and what they cost it."""

    even: np.ndarray  # b
    price: np.ndarray  # c
    cap: np.ndarray

    def weigh(self, losses: np.ndarray, eta: float) -> Weighing:
        # q = clip(c·(ℓ + η·b/c − ν)/η, 0, cap)
        rate = self.price / eta
        level = host_level(losses + self.even / rate, self.cap, rate)
        free = self.even + self.price * ((losses - level) / eta)
        q = np.clip(free, 0, self.cap)
        movable = np.where((free > 0) & (free < self.cap), self.price, 0.0)
        if total := movable.sum():  # rounding makes Σq differ from 1, most for a small η
            q = np.clip(q + movable * ((1 - q.sum()) / total), 0, self.cap)
        far = (q - self.even) ** 2 / self.price
        # ⟨q, ℓ⟩ = ν + ⟨q, ℓ − ν⟩, in which the rounding of Σq does not count.
        value = level + q @ (losses - level) - eta / 2 * far.sum()
        return Weighing(float(value), q, movable, eta)

    def distance(self, q: np.ndarray, gain: np.ndarray) -> float:
        """An upper bound on dist(gain, N(q)), N the normal cone of the allowed weights at q.

        A vector of N is some ν where a weight is free, at most ν at 0 and at least ν at the cap.
        """
        none, full = q <= 0, q >= self.cap
        free = ~none & ~full
        if free.any():
            level = gain[free].mean()
        else:
            most, least = np.max(gain[none], initial=-np.inf), np.min(gain[full], initial=np.inf)
            level = np.clip((gain @ q) / q.sum(), min(most, least), max(most, least))
        off = gain - level
        off[(none & (off < 0)) | (full & (off > 0))] = 0
        return float(np.linalg.norm(off) + ROUNDING * np.linalg.norm(gain))


@dataclass(frozen=True)
class Risk:
    """An adversary of the rows of a data set, or of the mean losses of their groups."""

    adversary: Adversary
    share: np.ndarray  # the weight of each row within its group, or within all rows
    group: np.ndarray | None = None
    worst: float = 0.0  # of a tail: the share of the rows that counts

    @property
    def rowwise(self) -> bool:
        """Whether the adversary weighs single rows, not groups."""
        return self.group is None

    @property
    def items(self) -> int:
        """How many weights the adversary has."""
        return len(self.adversary.even)

    def of_items(self, losses: np.ndarray) -> np.ndarray:
        """The losses that the adversary weighs."""
        if self.group is None:
            return losses
        return np.bincount(self.group, self.share * losses, self.items)

    def of_rows(self, weights: np.ndarray) -> np.ndarray:
        """The adversary's weights, spread over the rows."""
        return weights if self.group is None else weights[self.group] * self.share

    def spread(self, part: slice) -> np.ndarray:
        """The shares of some rows in the groups, groups × rows."""
        assert self.group is not None
        group, share = self.group[part], self.share[part]
        spread = np.zeros((self.items, len(group)))
        spread[group, np.arange(len(group))] = share
        return spread


def group_risk(group: np.ndarray, groups: int, sample_weight: np.ndarray) -> Risk:
    """The risk of groups with the codes 0 … G−1, none of them empty."""
    total = np.bincount(group, sample_weight, groups)
    adversary = Adversary(np.full(groups, 1 / groups), np.ones(groups), np.ones(groups))
    return Risk(adversary, sample_weight / total[group], group)


def tail_risk(worst: float, sample_weight: np.ndarray) -> Risk:
    """The risk of the worst share of the rows; of a share of 0 it is that of the worst row."""
    share = sample_weight / sample_weight.sum()
    cap = share / worst if worst else np.ones_like(share)
    return Risk(Adversary(share, share, cap), share, worst=worst)
