"""Items of an iterator, read by a thread before they are asked for."""

from __future__ import annotations

import contextlib
import queue
import threading
import weakref
from collections.abc import Iterator
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Prefetch(Generic[Item]):
    """The items of an endless iterator, with up to `depth` of them read in advance.

    An exception of the iterator is raised where its item is asked for; no item follows it.
    """

    def __init__(self, items: Iterator[Item], depth: int):
        self._queue: queue.Queue[Item | BaseException] = queue.Queue(depth)
        self._next: list[Item] = []
        stop = threading.Event()
        # The thread holds no reference to this object, so that it ends when this is dropped.
        self.close = weakref.finalize(self, _close, self._queue, stop)
        threading.Thread(target=_fill, args=(items, self._queue, stop), daemon=True).start()

    def peek(self) -> Item:
        """The next item, which stays the next."""
        if not self._next:
            item = self._queue.get()
            if isinstance(item, BaseException):
                raise item
            self._next.append(item)
        return self._next[0]

    def get(self) -> Item:
        self.peek()
        return self._next.pop()


def _fill(items: Iterator, into: queue.Queue, stop: threading.Event) -> None:
    try:
        for item in items:
            into.put(item)
            if stop.is_set():
                return
    except BaseException as error:  # not only Exception, or `get` would wait for ever
        into.put(error)


def _close(filled: queue.Queue, stop: threading.Event) -> None:
    stop.set()
    with contextlib.suppress(queue.Empty):
        while True:  # make room for the item with which the thread may be waiting
            filled.get_nowait()
