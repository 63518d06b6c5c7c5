"""Work in order, done ahead by processes or threads."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

_MOST_THREADS = 16


def in_order(
    work: Callable[[int], Any], numbers: range, workers: int
) -> Generator[Any, None, None]:
    """work(i) for each number: in grain's processes, or in threads if `workers` is 0.

    Without grain there are as many threads as there would be processes; Pillow decodes without
    holding Python's lock.
    """
    workers = min(workers, len(numbers))
    if workers:
        try:
            import grain.python as grain
        except ImportError:
            return _threads(work, numbers, workers)
        return _processes(grain, work, numbers, workers)
    return _threads(work, numbers, min(os.cpu_count() or 1, _MOST_THREADS))


def _processes(
    grain: Any, work: Callable[[int], Any], numbers: range, workers: int
) -> Generator[Any, None, None]:
    from absl import flags

    # grain reads its flags, which only programs made with absl parse.
    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()
    dataset = (
        grain.MapDataset.range(numbers.start, numbers.stop)
        .map(work)
        .to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=1))
        .mp_prefetch(grain.MultiprocessingOptions(num_workers=workers, per_worker_buffer_size=2))
    )
    results = iter(dataset)
    try:
        for _ in numbers:
            try:
                result = next(results)
            except RuntimeError as error:
                raise ChildProcessError(
                    f"a process that decodes images ended ({error}). In a script, the call must be "
                    "under if __name__ == '__main__'. If memory is short, use fewer workers, or 0 "
                    "for threads"
                ) from None
            yield result
    finally:
        results.close()


def _threads(
    work: Callable[[int], Any], numbers: range, threads: int
) -> Generator[Any, None, None]:
    pool = ThreadPoolExecutor(threads, thread_name_prefix="bilevax-decode")
    ahead: deque[Future[Any]] = deque()
    try:
        for i in numbers:
            ahead.append(pool.submit(work, i))
            if len(ahead) > threads + 1:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
