"""How much is allowed for rounding, and how far off a total may be."""

import jax.numpy as jnp
import pytest
from scipy.stats import t

from bilevax.certificates.rounding import LARGER, MISSES, _allowed
from bilevax.terms import Simplex


@pytest.mark.parametrize("samples", [1, 3, 12, 3000])
def test_what_is_allowed_for_is_a_quantile_of_students_t(samples):
    assert _allowed(samples) == pytest.approx(t.isf(MISSES / 2, samples) / LARGER, rel=1e-6)


def test_a_total_that_many_entries_share_is_kept_to_as_one_of_few():
    even = jnp.full(10_000, 1e-4, jnp.float32)
    assert Simplex().value(even) == 0
    assert Simplex().value(even * 1.0003) == jnp.inf
