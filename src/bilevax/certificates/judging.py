"""How a run judges its points: on all samples, or on minibatches that were held out."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax

from bilevax.certificates.certificate import Certificate
from bilevax.certificates.judge import judge
from bilevax.certificates.sampled import averaged, drawn_batches, sampled_certificate
from bilevax.problems import Point
from bilevax.problems.stochastic import is_stochastic, whole

# Minibatches for certificates where not all samples are in memory, and how sure these are.
BATCHES, CONFIDENCE = 64, 0.95
# Keys of the minibatches that runs are judged on; those of `certify` are below.
RUNS = 1 << 16
# Gradients that one look costs: one for the residuals, one for what rounding may add to them.
GRADIENTS = 2


@dataclasses.dataclass(frozen=True)
class Judging:
    """`problem` with all samples, or with the mean over `batches`; `stated` with its source.

    `cost` is what a look takes, in gradients of one minibatch.
    """

    stated: Any
    problem: Any
    batches: Any
    cost: int
    sizes: bool

    @classmethod
    def of(cls, stated: Any, *, sizes: bool = False) -> Judging:
        if not is_stochastic(stated):
            return cls(stated, stated, None, GRADIENTS, sizes)
        known = whole(stated)
        if known is None:
            batches = drawn_batches(stated, BATCHES, RUNS)
            return cls(stated, averaged(stated, batches), batches, GRADIENTS * BATCHES, sizes)
        source = stated.data
        _, batch = jax.eval_shape(lambda: source.draw(source.init(0)))
        entries = lambda tree: sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))
        share = entries(source.everything()) / max(entries(batch), 1)
        return cls(stated, known, None, math.ceil(GRADIENTS * share), sizes)

    @property
    def exact(self) -> bool:
        return self.batches is None

    def __call__(self, point: Point, time: int) -> Certificate:
        """What a look says; from samples, with the radii of the next, `time`-th confirmation."""
        certificate = judge(self.problem, point, sizes=self.sizes)
        if self.exact:
            return certificate
        share = 1 / (time * (time + 1))
        return sampled_certificate(self.stated, point, self.batches, certificate, CONFIDENCE, share)

    def confirmed(self, point: Point, time: int) -> Certificate:
        """On minibatches that had no part in choosing the point.

        The best of many looks is too good on those it was chosen by. The t-th time may err with
        probability α/(t(t + 1)), so that all times together err with α = 1 − CONFIDENCE at most.
        """
        batches = drawn_batches(self.stated, BATCHES, RUNS + time)
        estimate = judge(averaged(self.stated, batches), point, sizes=self.sizes)
        share = 1 / (time * (time + 1))
        return sampled_certificate(self.stated, point, batches, estimate, CONFIDENCE, share)
