"""One thread for small products: where cores are busy, threads wait for each other instead.

A BLAS splits each product among its threads, and all wait for the last one. The products of a fit
are many and mostly small, so that a thread without a core holds up everything. Measured:
benchmarks/robust_threads.py.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator
from typing import Any

from threadpoolctl import ThreadpoolController

from bilevax.learn._rows import CHUNK

#: Multiplications of a product Xᵀ·D·X up to which one thread makes it.
SMALL = 4 * 10**9


@contextlib.contextmanager
def threads_for(rows: int, columns: int) -> Iterator[None]:
    """Limit the BLAS to one thread if the products of so many rows and columns are small."""
    if min(rows, CHUNK) * columns**2 > SMALL:
        yield
        return
    limit = _limit()
    limit.take()
    try:
        yield
    finally:
        limit.leave()


class _Limit:
    """The limit of the whole process: fits side by side share it, and the last one lifts it."""

    def __init__(self) -> None:
        self._controller = ThreadpoolController()
        self._lock, self._holders = threading.Lock(), 0
        self._limiter: Any = None

    def take(self) -> None:
        with self._lock:
            if self._holders == 0:
                self._limiter = self._controller.limit(limits=1, user_api="blas")
            self._holders += 1

    def leave(self) -> None:
        with self._lock:
            self._holders -= 1
            if self._holders == 0:
                self._limiter.restore_original_limits()


@functools.cache
def _limit() -> _Limit:
    return _Limit()
