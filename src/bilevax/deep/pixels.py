"""Decoded images: all of them at once where they fit, else batch by batch, decoded ahead."""

from __future__ import annotations

import contextlib
import hashlib
import os
import zlib
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from bilevax.arguments import positive, warn, whole
from bilevax.deep.tables import SPLITS, Grouped, ImageTable
from bilevax.files import replaced
from bilevax.progress import Progress

Pixels: TypeAlias = Generator[np.ndarray, None, None]
#: Images that are decoded as one piece of work when all are.
_CHUNK = 64
_WHOLE = slice(None)


class ImageError(ValueError):
    """An image that cannot be decoded: its file and, if known, its row in the data set."""

    def __init__(self, message: str, file: str | None = None, row: int | None = None):
        super().__init__(message)
        self.file, self.row = file, row


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
class Images(Grouped):
    """A data set with its pixels, or with the files to decode them from."""

    name: str
    label: np.ndarray  # int32, a number in `classes`
    group: np.ndarray
    split: np.ndarray
    classes: tuple[str, ...]
    groups: tuple[str, ...]
    size: tuple[int, int]  # height and width that the network sees
    pixels: np.ndarray | None  # uint8 [n, height, width, 3], perhaps on disk; None: see `source`
    source: Source | None = None

    def __len__(self) -> int:
        return len(self.label)

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

    A rotation that the camera noted is ignored, as in the published pipelines.
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
    """The images of a table, decoded at once if they fit into `limit_gb`, else when needed.

    `workers` processes decode, or threads of this one if it is 0. `cache` is a folder that keeps
    the pixels for the next run; they are read from there as they are needed.
    """
    whole(size, "size", 1)
    whole(workers, "workers", 0)
    positive(limit_gb, "limit_gb")
    side = round(size * table.margin)
    source = Source(table.name, tuple(map(str, table.files)), table.crop, side)
    shape = (len(table), side, side, 3)
    fits = np.prod(shape, dtype=float) <= limit_gb * 1e9
    pixels = _all(source, shape, workers, cache) if fits else None
    names = ("name", "label", "group", "split", "classes", "groups")
    shared = {name: getattr(table, name) for name in names}
    return Images(**shared, size=(int(size), int(size)), pixels=pixels, source=source)


def stream(
    images: Images, batches: Any, first: int, count: int, workers: int = 0, part: slice = _WHOLE
) -> Pixels:
    """The pixels of the batches first, …, first + count − 1, in order.

    `batches[i]` are the rows of batch i, of which `part` is wanted. Images that are not decoded yet
    are decoded ahead, in `workers` processes or in threads of this one.
    """
    whole(first, "first", 0)
    whole(count, "count", 0)
    whole(workers, "workers", 0)
    numbers = range(first, first + count)
    if images.pixels is not None:
        return (images.decoded(batches[i][part]) for i in numbers)
    assert images.source is not None
    return _ahead(_Work(images.source, batches, part), numbers, workers)


def _all(source: Source, shape: tuple[int, ...], workers: int, cache: Any) -> np.ndarray:
    """All pixels: from the cache if it has them, and kept there if there is one."""
    kept = None
    if cache is not None:
        kept = _cache_file(Path(cache), source)
        if (pixels := _opened(kept, shape)) is not None:
            return pixels
    chunks = np.split(np.arange(shape[0]), range(_CHUNK, shape[0], _CHUNK))
    decoded = _ahead(_Work(source, chunks, _WHOLE), range(len(chunks)), workers)
    progress = Progress(None, total=shape[0], unit="images", label=f"decoding {source.name}")
    with contextlib.closing(decoded), progress:
        if kept is not None:
            return _written(kept, shape, decoded, progress)
        pixels = np.empty(shape, np.uint8)
        for rows, chunk in zip(chunks, decoded):
            pixels[rows] = chunk
            progress.show(int(rows[-1]) + 1)
    return pixels


def _cache_file(folder: Path, source: Source) -> Path:
    """The name of the cache, which changes as soon as any image file does."""
    digest = hashlib.sha256(repr((source.crop, source.side)).encode())
    for file in source.files:
        found = os.stat(file)
        digest.update(repr((file, found.st_size, found.st_mtime_ns)).encode())
    return folder / f"{source.name}-{source.side}-{digest.hexdigest()[:16]}.npy"


def _opened(path: Path, shape: tuple[int, ...]) -> np.ndarray | None:
    """The pixels of a cache that is whole; None if they must be decoded."""
    if not path.exists():
        return None
    try:
        pixels = np.load(path, mmap_mode="r", allow_pickle=False)
        if pixels.shape != shape or pixels.dtype != np.uint8:
            raise ValueError(f"it holds {pixels.dtype} of shape {pixels.shape}, not {shape}")
        with open(path, "rb") as file:
            file.seek(-4, os.SEEK_END)
            kept, size = file.read(4), file.tell()
        found = zlib.crc32(pixels).to_bytes(4, "big")
        if size != pixels.offset + pixels.nbytes + 4 or kept != found:
            raise ValueError("its bytes are not those that were written")
    except (ValueError, OSError, EOFError, SyntaxError) as error:
        warn(f"{path} is damaged ({error}); the images are decoded again", RuntimeWarning)
        return None
    return pixels


def _written(
    path: Path, shape: tuple[int, ...], chunks: Iterator[np.ndarray], progress: Progress
) -> np.ndarray:
    """Keep the pixels as an .npy file with a checksum behind them, and open it.

    They are written to a file and not to mapped memory, where a full disk kills the process.
    """
    done = total = 0
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replaced(path) as temporary, temporary.open("wb") as file:
            header = {"descr": "|u1", "fortran_order": False, "shape": shape}
            np.lib.format.write_array_header_1_0(file, header)
            for chunk in chunks:
                data = np.ascontiguousarray(chunk).data
                file.write(data)
                total = zlib.crc32(data, total)
                done += len(chunk)
                progress.show(done)
            file.write(total.to_bytes(4, "big"))
    except OSError as error:
        size = np.prod(shape, dtype=float) / 1e9
        raise OSError(
            f"the cache {path} cannot be written: {error.strerror or error}. It needs {size:.1f} "
            "GB; choose another folder, or none"
        ) from error
    return np.load(path, mmap_mode="r", allow_pickle=False)


@dataclass(frozen=True)
class _Decoded:
    """A batch, or the error that stopped its decoding, as a process hands it over.

    grain would put a bare array into shared memory, of which containers have little and which it
    leaves behind when it is stopped.
    """

    found: np.ndarray | ImageError


@dataclass(frozen=True)
class _Work:
    """The decoding of batches, or of a part of each; a call is what a process does."""

    source: Source
    batches: Any
    part: slice

    def pixels(self, i: int) -> np.ndarray:
        return self.source.decoded(self.batches[i][self.part])

    def __call__(self, i: int) -> _Decoded:
        try:
            return _Decoded(self.pixels(i))
        except ImageError as error:
            return _Decoded(error)


def _ahead(work: _Work, numbers: range, workers: int) -> Pixels:
    """The pixels of these batches, decoded ahead by grain's processes, or by threads.

    Without grain there are as many threads as there would be processes; Pillow decodes without
    holding Python's lock.
    """
    workers, threads = min(workers, len(numbers)), min(os.cpu_count() or 1, 16)
    if workers:
        with contextlib.suppress(ImportError):
            import grain.python as grain

            return _by_processes(grain, work, numbers, workers)
    return _by_threads(work, numbers, workers or threads)


def _by_threads(work: _Work, numbers: range, threads: int) -> Pixels:
    pool = ThreadPoolExecutor(threads, thread_name_prefix="bilevax-decode")
    ahead: deque[Future[np.ndarray]] = deque()
    try:
        for i in numbers:
            ahead.append(pool.submit(work.pixels, i))
            if len(ahead) > threads + 1:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def _by_processes(grain: Any, work: _Work, numbers: range, workers: int) -> Pixels:
    from absl import flags

    # grain reads its flags, which only programs made with absl parse.
    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()
    results = iter(
        grain.MapDataset.range(numbers.start, numbers.stop)
        .map(work)
        .to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=1))
        .mp_prefetch(grain.MultiprocessingOptions(num_workers=workers, per_worker_buffer_size=2))
    )
    try:
        for _ in numbers:
            try:
                found = next(results).found
            except RuntimeError as error:
                raise ChildProcessError(
                    f"a process that decodes images ended ({error}). In a script, the call must be "
                    "under if __name__ == '__main__'. If memory is short, use fewer workers, or 0 "
                    "for threads"
                ) from None
            if isinstance(found, ImageError):
                raise found
            yield found
    finally:
        results.close()
