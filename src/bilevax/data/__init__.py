"""Where a stochastic problem's minibatches come from.

A source is a frozen module; its state holds arrays only, so a run continues from a saved state at
exactly the sample where it stopped. `Arrays` and `Stratified` hold all samples in memory, `Levels`
gives each of two levels a stream of its own, `Host` reads any Python iterator.
"""

from bilevax.data.checks import DataError
from bilevax.data.host import Host
from bilevax.data.memory import Arrays, Stratified, replicated
from bilevax.data.source import LevelBatch, Levels, Source

__all__ = [
    "Arrays",
    "DataError",
    "Host",
    "LevelBatch",
    "Levels",
    "Source",
    "Stratified",
    "replicated",
]
