"""Every test runs in float64 and under JAX's strictest promotion rules: no accidental casts."""

import tempfile

import jax

jax.config.update("jax_enable_x64", True)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# Most of the tests' time is compilation, and many programs are the same. Each process keeps its
# own: one that read what another had written has crashed.
KEPT = tempfile.TemporaryDirectory(prefix="bilevax-tests-")
jax.config.update("jax_compilation_cache_dir", KEPT.name)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
