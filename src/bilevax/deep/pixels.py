"""Decoded images: all of them at once where they fit, else batch by batch, decoded ahead."""

from __future__ import annotations

import contextlib
import hashlib
import os
import uuid
import zlib
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from bilevax.arguments import positive, warn, whole
from bilevax.deep.tables import SPLITS, ImageTable, group_counts

#: Images that are decoded as one piece of work when all are.
_CHUNK = 64
#: Bytes of a cache that are checked at a time.
_PIECE = 1 << 24
_MOST_THREADS = 32


class ImageError(ValueError):
    """An image that cannot be decoded: which file, and which row of the data set, if known."""

    def __init__(self, message: str, file: str | None = None, row: int | None = None):
        super().__init__(message)
        self.file, self.row = file, row


class RowsOfBatches(Protocol):
    """What says the rows of batch i: a list of arrays, or `Uniform` and `Balanced`."""

    def __getitem__(self, i: int, /) -> np.ndarray: ...


@dataclass(frozen=True)
class Source:
    """Where images are decoded from, and how."""

    name: str
    files: tuple[str, ...]
    crop: int | None
    side: int

    def decoded(self, rows: np.ndarray) -> np.ndarray:
        pixels = np.empty((len(rows), self.side, self.side, 3), np.uint8)
        for i, row in enumerate(rows):
            try:
                pixels[i] = decode(self.files[row], self.crop, self.side)
            except ImageError as error:
                message = f"{error} (image {row} of {self.name}, counted from 0)"
                raise ImageError(message, error.file, int(row)) from None
        return pixels


@dataclass(frozen=True)
class Images:
    """A data set with its pixels, or with where to get them."""

    name: str
    label: np.ndarray  # int32, a number in `classes`
    group: np.ndarray  # int32, a number in `groups`
    split: np.ndarray  # int8, a number in SPLITS
    classes: tuple[str, ...]
    groups: tuple[str, ...]
    size: tuple[int, int]  # height and width that the network sees
    pixels: np.ndarray | None  # uint8 [n, height, width, 3], perhaps on disk; None: see `source`
    source: Source | None = None

    def __len__(self) -> int:
        return len(self.label)

    @property
    def counts(self) -> np.ndarray:
        """How many images each split (row) has of each group (column)."""
        return group_counts(self.split, self.group, len(self.groups))

    @property
    def stored(self) -> tuple[int, int]:
        """Height and width of the pixels, of which the network sees the middle, or a part."""
        if self.pixels is not None:
            return self.pixels.shape[1], self.pixels.shape[2]
        assert self.source is not None
        return self.source.side, self.source.side

    def rows(self, split: str) -> np.ndarray:
        """The row numbers of a split."""
        if split not in SPLITS:
            raise ValueError(f"split must be one of {', '.join(SPLITS)}, not {split!r}")
        return np.flatnonzero(self.split == SPLITS.index(split)).astype(np.int32)

    def decoded(self, rows: np.ndarray) -> np.ndarray:
        """The pixels of some rows, uint8 [rows, height, width, 3]."""
        if self.pixels is not None:
            return np.asarray(self.pixels[rows])
        assert self.source is not None
        return self.source.decoded(rows)


def decode(file: str | os.PathLike[str], crop: int | None, side: int) -> np.ndarray:
    """One image as uint8 [side, side, 3]: its middle square, if `crop` says so, resized.

    What the camera noted about turning it is ignored, as in the published pipelines.
    """
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError(f"this needs pip install 'bilevax[deep]' ({error})") from None
    file = os.fspath(file)
    try:
        with Image.open(file) as file_image:
            image = file_image.convert("RGB")
    except MemoryError:
        raise
    except Exception as error:  # Pillow raises whatever its decoders do
        raise ImageError(f"{file} cannot be decoded: {error}", file) from None
    if crop is not None:
        left, top = (image.width - crop) // 2, (image.height - crop) // 2
        if left < 0 or top < 0:
            size = f"{image.width}×{image.height}"
            raise ImageError(f"{file} is {size} pixels, too small to cut {crop} out of it", file)
        image = image.crop((left, top, left + crop, top + crop))
    return np.asarray(image.resize((side, side), Image.Resampling.BILINEAR))


def load(
    table: ImageTable,
    size: int = 224,
    *,
    workers: int = 0,
    cache: str | os.PathLike[str] | None = None,
    limit_gb: float = 16.0,
) -> Images:
    """The images of a table, decoded once if they fit into `limit_gb`, else when they are needed.

    `workers` processes decode, or the threads of this one if it is 0. `cache` is a folder where
    the pixels are kept for the next time, and read from there as they are needed.
    """
    whole(size, "size", 1)
    whole(workers, "workers", 0)
    positive(limit_gb, "limit_gb")
    side = round(size * table.margin)
    source = Source(table.name, tuple(map(str, table.files)), table.crop, side)
    shape = (len(table), side, side, 3)
    pixels = None
    if np.prod(shape, dtype=float) <= limit_gb * 1e9:
        pixels = _all(source, shape, workers, None if cache is None else Path(cache))
    return Images(
        name=table.name,
        label=table.label,
        group=table.group,
        split=table.split,
        classes=table.classes,
        groups=table.groups,
        size=(int(size), int(size)),
        pixels=pixels,
        source=source,
    )


def stream(
    images: Images, batches: RowsOfBatches, first: int, count: int, workers: int = 0
) -> Generator[np.ndarray, None, None]:
    """The pixels of the batches number first … first + count − 1, in order.

    What is not decoded yet is decoded ahead, in `workers` processes or the threads of this one.
    """
    whole(first, "first", 0)
    whole(count, "count", 0)
    whole(workers, "workers", 0)
    numbers = range(first, first + count)
    if images.pixels is not None:
        return (images.decoded(batches[i]) for i in numbers)
    assert images.source is not None
    return _decoded(images.source, batches, numbers, workers)


def _all(source: Source, shape: tuple[int, ...], workers: int, cache: Path | None) -> np.ndarray:
    from tqdm import tqdm

    kept = None if cache is None else _cache_file(cache, source)
    pixels = None if kept is None else _opened(kept, shape)
    if pixels is not None:
        return pixels
    starts = range(0, shape[0], _CHUNK)
    chunks = [np.arange(s, min(s + _CHUNK, shape[0])) for s in starts]
    # tqdm's None: only on a terminal.
    bar = tqdm(total=shape[0], unit=" images", desc=f"decoding {source.name}", disable=None)
    decoded = _decoded(source, chunks, range(len(chunks)), workers)
    with contextlib.closing(decoded), bar:
        if kept is not None:
            return _written(kept, shape, decoded, bar.update)
        pixels = np.empty(shape, np.uint8)
        for start, chunk in zip(starts, decoded):
            pixels[start : start + len(chunk)] = chunk
            bar.update(len(chunk))
    return pixels


@dataclass(frozen=True)
class _Work:
    """Batch i, or why there is none: an error that is handed over arrives whole from a process."""

    source: Source
    batches: RowsOfBatches

    def __call__(self, i: int) -> np.ndarray | ImageError:
        try:
            return self.source.decoded(self.batches[i])
        except ImageError as error:
            return error


def _decoded(
    source: Source, batches: RowsOfBatches, numbers: range, workers: int
) -> Generator[np.ndarray, None, None]:
    results = _in_order(_Work(source, batches), numbers, workers)
    try:
        for result in results:
            if isinstance(result, ImageError):
                raise result
            yield result
    finally:
        results.close()


def _cache_file(folder: Path, source: Source) -> Path:
    """The name of the cache, another one as soon as any image file has changed."""
    digest = hashlib.sha256(repr((source.crop, source.side)).encode())
    for file in source.files:
        found = os.stat(file)
        digest.update(repr((file, found.st_size, found.st_mtime_ns)).encode())
    return folder / f"{source.name}-{source.side}-{digest.hexdigest()[:16]}.npy"


def _opened(path: Path, shape: tuple[int, ...]) -> np.ndarray | None:
    """The pixels in a file that was checked; None if they must be decoded (again)."""
    if not path.exists():
        return None
    try:
        pixels = np.load(path, mmap_mode="r", allow_pickle=False)
        if pixels.shape != shape or pixels.dtype != np.uint8:
            raise ValueError(f"it holds {pixels.dtype} of shape {pixels.shape}, not {shape}")
        with open(path, "rb") as file:
            file.seek(-4, os.SEEK_END)
            kept, size = file.read(4), file.tell()
        if size != pixels.offset + pixels.nbytes + 4 or kept != _sum_of(pixels):
            raise ValueError("its bytes are not those that were written")
    except (ValueError, OSError, EOFError, SyntaxError) as error:
        warn(f"{path} is damaged ({error}); the images are decoded again", RuntimeWarning)
        return None
    return pixels


def _written(
    path: Path,
    shape: tuple[int, ...],
    chunks: Iterator[np.ndarray],
    tell: Callable[[int], Any],
) -> np.ndarray:
    """Keep the pixels as an .npy file, complete or not there, with a checksum behind them.

    Written as a file and not as mapped memory: there a full disk kills the process.
    """
    temporary = path.with_name(f"{path.stem}-{uuid.uuid4().hex}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "xb") as file:
            header = {"descr": "|u1", "fortran_order": False, "shape": shape}
            np.lib.format.write_array_header_1_0(file, header)
            total = 0
            for chunk in chunks:
                data = np.ascontiguousarray(chunk).data
                file.write(data)
                total = zlib.crc32(data, total)
                tell(len(chunk))
            file.write(total.to_bytes(4, "big"))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        size = np.prod(shape, dtype=float) / 1e9
        raise OSError(
            f"the cache {path} cannot be written: {error.strerror or error}. It needs {size:.1f} "
            "GB; choose another folder, or none"
        ) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()
    return np.load(path, mmap_mode="r", allow_pickle=False)


def _sum_of(pixels: np.ndarray) -> bytes:
    flat, total = pixels.reshape(-1), 0
    for start in range(0, flat.size, _PIECE):
        total = zlib.crc32(np.ascontiguousarray(flat[start : start + _PIECE]).data, total)
    return total.to_bytes(4, "big")


def _in_order(
    work: Callable[[int], Any], numbers: range, workers: int
) -> Generator[Any, None, None]:
    """work(i) for each number: by grain's processes, or by threads if `workers` is 0.

    Where grain cannot be installed there are as many threads as there would be processes; Pillow
    decodes without holding Python's lock.
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
                raise RuntimeError(
                    f"a process that decodes images ended ({error}). In a script, the call must be "
                    "under if __name__ == '__main__'. If memory, or the shared memory of a "
                    "container, is short, use fewer workers, or 0 for threads"
                ) from None
            # grain takes the memory that it shares back when it drops its array.
            yield np.array(result) if isinstance(result, np.ndarray) else result
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
            if len(ahead) > 2 * threads:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
