"""A file that keeps decoded pixels for the next run."""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from bilevax.arguments import warn
from bilevax.files import replaced
from bilevax.progress import Progress


def cache_file(folder: Path, name: str, files: Sequence[str], crop: int | None, side: int) -> Path:
    """The name of the cache, which changes as soon as any image file does."""
    digest = hashlib.sha256(repr((crop, side)).encode())
    for file in files:
        found = os.stat(file)
        digest.update(repr((file, found.st_size, found.st_mtime_ns)).encode())
    return folder / f"{name}-{side}-{digest.hexdigest()[:16]}.npy"


def opened(path: Path, shape: tuple[int, ...]) -> np.ndarray | None:
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


def written(
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
