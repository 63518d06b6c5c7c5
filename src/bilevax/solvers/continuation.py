"""The penalty ρ by continuation: it grows until the gap is small, and shrinks if too large."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array

# ρ grows only once the residual is at most this share of ‖∇f‖, and by a factor between these two.
LOOSE, RHO_LEAST, RHO_MOST = 0.01, 2.0, 10.0
# The gap is blamed on ρ when it is this many times larger than the residual explains.
UNEXPLAINED = 50.0
# While the residual falls by the first factor, a gap that falls by the second follows it: then ρ is
# large enough, and the gap will vanish with the residual.
FELL, FOLLOWED = 0.2, 0.5
# A gap is blamed on ρ, too, when it has fallen by less than the second factor while the gradients
# grew by PATIENCE, and the residual is at its target.
# ρ shrinks when the gap is below this share of its target while the residual hardly falls: less
# than by the second factor while the gradients grew by the third. It never shrinks once it grew.
OVERSHOT, SLOW, PATIENCE = 0.1, 0.3, 1.5
# Between two such comparisons lie at least so many gradients.
LEAST_WAIT = 400
# Where a target is reached and the run has not ended, the target becomes this much smaller.
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
    stands: Array  # and so has a gap above this,
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
            stands=_nothing(rho.dtype)[0],
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
        # A residual at its target that explains the gap by its bound alone, and the gap stands.
        waited = seen.gradients > self.awaited
        raising |= (
            waited & (residual <= target) & (seen.below > jnp.maximum(self.stands, gap_target))
        )
        # A gap far below its target while the residual hardly falls: ρ is larger than it need be.
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
            stands=jnp.where(
                changing, nothing[0], jnp.where(waited, FOLLOWED * seen.below, self.stands)
            ),
            awaited=jnp.where(changing | waited, until, self.awaited),
        )
        return following, times


def _nothing(dtype: Any) -> Array:
    """Residual and gap of a ρ at which nothing was seen yet."""
    return jnp.asarray([jnp.finfo(dtype).max, 0], dtype)
