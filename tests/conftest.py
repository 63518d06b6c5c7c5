"""Every test runs in float64 and under JAX's strictest promotion rules: no accidental casts."""

import tempfile
from pathlib import Path

import jax
import pytest

jax.config.update("jax_enable_x64", True)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# Most of the tests' time is compilation, and many programs are the same.
KEPT = tempfile.TemporaryDirectory(prefix="bilevax-tests-")
jax.config.update("jax_compilation_cache_dir", KEPT.name)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)

# Every compiled program maps memory, and Linux allows a process 65,530 maps: the compiler crashes
# at the next one. Long before that all programs are dropped; those needed again come from KEPT.
MAPS, MOST_MAPS = Path("/proc/self/maps"), 25_000


@pytest.fixture(autouse=True, scope="module")
def few_maps():
    yield
    if MAPS.exists() and MAPS.read_bytes().count(b"\n") > MOST_MAPS:
        jax.clear_caches()
