"""Files of pictures as MNIST and Fashion-MNIST have them, and what data sets made of them share."""

from __future__ import annotations

import gzip
import math
import zlib
from pathlib import Path

import numpy as np

from bilevax.arguments import one_number
from bilevax.deep.pixels import Images
from bilevax.deep.tables import SPLITS

SIDE = 28


def pictures_of(folder: Path, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """The pictures and labels of a folder; `kind` is train or t10k."""
    pictures = read_idx(folder / f"{kind}-images-idx3-ubyte", 3)
    labels = read_idx(folder / f"{kind}-labels-idx1-ubyte", 1)
    if len(pictures) != len(labels) or pictures.shape[1:] != (SIDE, SIDE):
        raise ValueError(
            f"{folder}: {kind} has {len(labels)} labels and pictures of shape {pictures.shape}; "
            f"there must be one label for each picture of {SIDE}×{SIDE}"
        )
    return pictures, labels


def shuffled(count: int, *seeds: int) -> np.ndarray:
    """A random order of 0, …, count − 1.

    NumPy keeps the bits of its generators from version to version, but not what it makes of them:
    sorted bits are a permutation that every version draws alike.
    """
    bits = np.random.PCG64(np.random.SeedSequence(seeds)).random_raw(count)
    return np.argsort(bits, kind="stable")


def check_shares(**shares: float) -> None:
    """Refuse what is not a share."""
    for name, share in shares.items():
        number = one_number(share, name)
        if number is None or not 0 <= number <= 1:
            raise ValueError(f"{name} must be a share between 0 and 1, not {share}")


def check_every_group(images: Images, advice: str) -> None:
    """Refuse data in which a split lacks a group."""
    for s, g in zip(*np.nonzero(images.counts == 0)):
        raise ValueError(
            f"no image of the group {images.groups[g]!r} is in {SPLITS[s]}: every group must be in "
            f"every split; {advice}"
        )


def read_idx(path: Path, dimensions: int) -> np.ndarray:
    """An idx file, as it is or with .gz: 0, 0, 8, the number of sizes, the sizes, the bytes."""
    packed = path.with_name(path.name + ".gz")
    path = path if path.is_file() else packed
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {packed}, and none without .gz")
    data = path.read_bytes()
    if path == packed:
        try:
            data = gzip.decompress(data)
        except (OSError, EOFError, zlib.error) as error:
            raise ValueError(f"{path} cannot be unpacked: {error}; fetch it again") from None
    start = 4 + 4 * dimensions
    if data[:4] != bytes((0, 0, 8, dimensions)) or len(data) < start:
        raise ValueError(
            f"{path} starts with {data[:4].hex(' ') or 'nothing'}, not 00 00 08 {dimensions:02x}: "
            f"it is no idx file of bytes with {dimensions} dimensions"
        )
    shape = tuple(np.frombuffer(data[4:start], ">u4").tolist())
    if len(data) - start != math.prod(shape):
        raise ValueError(
            f"{path} says {' × '.join(map(str, shape))} and has {len(data) - start} bytes for "
            "them; fetch it again"
        )
    return np.frombuffer(data, np.uint8, offset=start).reshape(shape)
