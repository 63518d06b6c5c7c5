"""One thread for small products: where cores are busy, threads wait for each other instead.

A BLAS splits each product among its threads, and all wait for the last one. The products of a fit
are many and mostly small, so that a thread without a core holds up everything. Measured:
benchmarks/robust_threads.py.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

from threadpoolctl import ThreadpoolController

from bilevax.learn._rows import CHUNK

#: Multiplications of a product Xᵀ·D·X below which one thread makes it.
SMALL = 4 * 10**9


@contextlib.contextmanager
def threads_for(rows: int, columns: int) -> Iterator[None]:
    """Limit the BLAS to one thread if the products of so many rows and columns are small."""
    if min(rows, CHUNK) * columns**2 > SMALL:
        yield
        return
    with _controller().limit(limits=1, user_api="blas"):
        yield


@functools.cache
def _controller() -> ThreadpoolController:
    return ThreadpoolController()
