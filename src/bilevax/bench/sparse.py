"""Data of bilevel linear problems (`eq:clo`) by name, whose matrices may be sparse."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.experimental.sparse import BCOO

from bilevax.problems.linear import LinearData

# No row has fewer entries, unless it is shorter: a row of none or one is hardly a constraint.
LEAST = 5


def arrays(data: LinearData) -> dict[str, Any]:
    """The arrays of a dense problem by their names."""
    return dict(vars(data))


def generate(n: int, m: int, l: int, density: float, seed: int) -> dict[str, Any]:  # noqa: E741
    """A random instance by the law of `linear.generate`, with a share of the entries of A and B.

    Every row has as many, in places drawn without replacement. Entries keep their size, so that
    rows are shorter than dense ones by √density.
    """
    rng = np.random.default_rng(seed)
    c, d = rng.normal(size=n), rng.normal(size=m)
    (A, _, _), (B, values, columns) = (_sparse(rng, l, width, density) for width in (n, m))
    y_hat = np.clip(rng.normal(scale=0.1, size=m), -1, 1)
    multipliers = np.abs(rng.normal(size=l))
    weights = (values * multipliers[:, None]).ravel()
    return {
        "c": c,
        "d": d,
        "A": A,
        "B": B,
        "b": np.sum(values * y_hat[columns], axis=1),
        "d_tilde": -np.bincount(columns.ravel(), weights, minlength=m),
    }


def _sparse(
    rng: np.random.Generator, height: int, width: int, density: float
) -> tuple[BCOO, np.ndarray, np.ndarray]:
    """A random matrix; and by rows, its entries and the columns they are in."""
    many = min(width, max(LEAST, round(density * width)))
    rows = [np.sort(rng.choice(width, many, replace=False)) for _ in range(height)]
    columns = np.stack(rows).astype(np.int32)
    values = rng.normal(scale=0.01, size=columns.shape)
    places = np.stack([np.repeat(np.arange(height, dtype=np.int32), many), columns.ravel()], 1)
    matrix = BCOO(
        (jnp.asarray(values.ravel()), jnp.asarray(places)),
        shape=(height, width),
        indices_sorted=True,
        unique_indices=True,
    )
    return matrix, values, columns
