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

    def __call__(self, point: Point) -> Certificate:
        certificate = judge(self.problem, point, sizes=self.sizes)
        if self.exact:
            return certificate
        return sampled_certificate(self.stated, point, self.batches, certificate, CONFIDENCE)

    def confirmed(self, point: Point, time: int) -> Certificate:
        """On minibatches that had no part in choosing the point.

        The best of many looks is too good on those it was chosen by. The t-th time may err with
        probability ½α/(t(t + 1)), and the `last` look with ½α: with α = 1 − CONFIDENCE in all.
        """
        return self._anew(point, time, 1 / (2 * time * (time + 1)))

    def last(self, point: Point, gradients: int) -> Certificate:
        """On other minibatches, for a run that ends there without having been confirmed."""
        return self._anew(point, RUNS + gradients % RUNS, 1 / 2)

    def _anew(self, point: Point, key: int, share: float) -> Certificate:
        batches = drawn_batches(self.stated, BATCHES, RUNS + key)
        estimate = judge(averaged(self.stated, batches), point, sizes=self.sizes)
        sure = 1 - (1 - CONFIDENCE) * share
        return sampled_certificate(self.stated, point, batches, estimate, sure)
