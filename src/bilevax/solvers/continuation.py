"""ρ by continuation: from a low guess up to what the gap needs, and down where it overshot."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array

# ρ grows when the residual is at most this share of ‖∇f‖ and the gap too large,
LOOSE, RHO_LEAST, RHO_MOST = 0.01, 2.0, 10.0
# that is, larger by this than what the residual explains of it,
UNEXPLAINED = 50.0
# and when it does not fall by the second factor while the residual falls by the first.
FELL, FOLLOWED = 0.2, 0.5
# ρ shrinks, until it first grows, when the gap is below this share of its target and the residual
# above its own still, and above this share of what it was that many times fewer gradients ago, of
# which there are so many more at least.
OVERSHOT, SLOW, PATIENCE, LEAST_WAIT = 0.1, 0.3, 1.5, 400
# A target that is reached and did not end the run becomes this much smaller.
TIGHTEN = 0.25


class Seen(eqx.Module):
    """What the end of a subproblem shows."""

    worst: Array  # the largest residual of all,
    residual: Array  # and of those that say something about ρ
    blamed: Array  # what these could change the penalty function by
    gap: Array  # an upper bound,
    below: Array  # and a lower bound, which is true whatever the residuals are
    values: Array  # the size of what the gap is the difference of
    settled: Array  # whether the subproblem was solved well enough
    gradients: Array


class Continuation(eqx.Module):
    """ρ, what is aimed at, and what has been seen at this ρ."""

    rho: Array
    target: Array  # what every line of the certificate may be,
    relative: Array  # and which share of its size on top
    force: Array  # ‖∇f‖, about: the size of a residual
    before: Array  # residual and gap when they were last compared, at this ρ
    raised: Array  # whether ρ has grown
    slow: Array  # a residual above this has fallen slowly,
    awaited: Array  # once this many gradients are done

    @classmethod
    def begin(cls, rho: Array, target: Array, relative: Array, force: Array) -> Continuation:
        return cls(
            rho=rho,
            target=target,
            relative=relative,
            force=force,
            before=_nothing(rho.dtype),
            raised=jnp.zeros((), bool),
            slow=_nothing(rho.dtype)[0],
            awaited=jnp.asarray(LEAST_WAIT, int),
        )

    def followed(self, seen: Seen) -> tuple[Continuation, Array]:
        """The next state, and the factor by which ρ changes: 1 where it stays."""
        target = self.target + self.relative * self.force
        gap_target = self.target + self.relative * seen.values
        residual, gap = seen.residual, seen.gap
        reached = (seen.worst <= target) & (gap <= gap_target)
        loose = (residual <= target) | (seen.settled & (residual <= LOOSE * self.force))
        unexplained = seen.below > gap_target
        unexplained &= self.rho * seen.below > UNEXPLAINED * seen.blamed
        # A gap that falls with the residual will vanish with it: then ρ is large enough.
        fell = (residual <= target) | (residual <= FELL * self.before[0])
        raising = loose & fell & unexplained & (gap > FOLLOWED * self.before[1])
        # A gap far below its target while the residual hardly falls: ρ is larger than it need be.
        waited = seen.gradients > self.awaited
        lowering = waited & ~self.raised & (residual > jnp.maximum(self.slow, target))
        lowering &= gap < OVERSHOT * gap_target
        changing = raising | lowering

        # Rounding can leave a gap a little below zero.
        change = jnp.sqrt(jnp.maximum(gap, 0) / gap_target)
        more = jnp.clip(change, RHO_LEAST, RHO_MOST)
        less = jnp.clip(change, 1 / RHO_MOST, 1 / RHO_LEAST)
        times = jnp.where(raising, more, jnp.where(lowering, less, 1))
        nothing, noted = _nothing(gap.dtype), jnp.stack([residual, gap])
        spent = seen.gradients.astype(gap.dtype)
        until = (LEAST_WAIT + PATIENCE * spent).astype(self.awaited.dtype)
        following = Continuation(
            rho=self.rho * times,
            target=jnp.where(reached, TIGHTEN * self.target, self.target),
            relative=jnp.where(reached, TIGHTEN * self.relative, self.relative),
            force=self.force,
            before=jnp.where(changing, nothing, jnp.where(loose & fell, noted, self.before)),
            raised=self.raised | raising,
            slow=jnp.where(changing, nothing[0], jnp.where(waited, SLOW * residual, self.slow)),
            awaited=jnp.where(changing | waited, until, self.awaited),
        )
        return following, times


def _nothing(dtype: Any) -> Array:
    """Residual and gap of a ρ at which nothing was seen yet."""
    return jnp.asarray([jnp.finfo(dtype).max, 0], dtype)
