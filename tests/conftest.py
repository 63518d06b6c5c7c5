"""Every test runs in float64 and under JAX's strictest promotion rules: no accidental casts."""

import os
import tempfile
from pathlib import Path

import jax
import pytest

import bilevax as bx

jax.config.update("jax_enable_x64", True)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# Most of the tests' time is compilation, and many programs are the same. TESTS_CACHE names a folder
# to keep them in from one run to the next, for somebody who works on the tests.
KEPT = tempfile.TemporaryDirectory(prefix="bilevax-tests-")
jax.config.update("jax_compilation_cache_dir", os.environ.get("TESTS_CACHE") or KEPT.name)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)

# Compiled programs take memory, and maps of it, of which Linux allows a process 65,530. Between
# modules all programs are dropped where they are many; those needed again come from the folder.
MAPS, MOST_MAPS = Path("/proc/self/maps"), 25_000
MEMORY, MOST_BYTES = Path("/proc/self/statm"), 1_200_000_000


def crowded() -> bool:
    if not MAPS.exists():
        return False
    resident = int(MEMORY.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return resident > MOST_BYTES or MAPS.read_bytes().count(b"\n") > MOST_MAPS


@pytest.fixture(autouse=True, scope="module")
def few_programs():
    yield
    if crowded():
        jax.clear_caches()


# To look around a point takes two programs more, which most tests are not about.
LOOKING = ("test_attacks", "test_readme", "test_bench_suite", "test_compilation", "test_cli")


@pytest.fixture(autouse=True, scope="module")
def look_around_where_that_is_tested(request):
    by_default = request.module.__name__.rpartition(".")[2] in LOOKING
    for function in (bx.solve, bx.certify):
        function.__kwdefaults__["look_around"] = by_default
