"""Dominoes: a piece of clothing below to tell apart, a digit above that misleads.

The benchmark of Shah et al. (2020) and Kirichenko et al. (2023) with Fashion-MNIST and MNIST, by
default coats against dresses, with zeros and ones.
"""

from __future__ import annotations

import gzip
import itertools
import math
import os
import zlib
from pathlib import Path

import numpy as np

from bilevax.arguments import one_number, whole
from bilevax.deep.pixels import Images
from bilevax.deep.tables import SPLITS

#: Fashion-MNIST's labels.
CLOTHES = (
    "t-shirt", "trouser", "pullover", "dress", "coat",
    "sandal", "shirt", "sneaker", "bag", "ankle boot",
)  # fmt: skip
COAT, DRESS = 4, 3
_SIDE, _EDGE = 28, 2
_AROUND = ((0, 0), (_EDGE, _EDGE), (_EDGE, _EDGE))


def dominoes(
    folder: str | os.PathLike[str],
    correlation: float = 0.95,
    *,
    classes: tuple[int, int] = (COAT, DRESS),
    digits: tuple[int, int] = (0, 1),
    validation: float = 0.2,
    validation_correlation: float = 0.5,
    seed: int = 0,
) -> Images:
    """Images of 64 × 32 pixels from the idx files in `folder`/mnist and `folder`/fashion-mnist.

    `correlation` is the share of each class whose digit is the one that goes with the class, to
    the nearest image: in training. In the validation images, a share `validation` of the published
    training images, it is `validation_correlation`; in the test images one half.

    Both classes have the same number of images, as many as the scarcest of the four kinds of
    pictures allows, so that no picture is used twice, be it clothing or a digit.
    """
    shares = {"correlation": correlation, "validation": validation}
    shares["validation_correlation"] = validation_correlation
    for name, share in shares.items():
        number = one_number(share, name)
        if number is None or not 0 <= number <= 1:
            raise ValueError(f"{name} must be a share between 0 and 1, not {share}")
    whole(seed, "seed", 0)
    for name, pair in (("classes", classes), ("digits", digits)):
        if len(pair) != 2 or len({n for n in pair if n in range(10)}) != 2:
            raise ValueError(f"{name} must be two different numbers from 0 to 9, not {pair}")
    published = [_pools(Path(folder), kind, classes, digits, seed) for kind in ("train", "t10k")]
    most = [min(len(pool) for pair in pools for pool in pair) for pools in published]
    held = round(validation * most[0])
    parts = (
        # pools, from which picture of each to which, correlation
        (published[0], 0, most[0] - held, correlation),
        (published[0], most[0] - held, most[0], validation_correlation),
        (published[1], 0, most[1], 0.5),
    )
    pixels, codes = [], []
    for s, ((clothes, figures), first, last, share) in enumerate(parts):
        # Digit d goes to `agree` images of class d, and to the rest of the other class.
        agree = round(share * (last - first))
        for y, d in itertools.product((0, 1), (0, 1)):
            part = slice(first, first + agree) if y == d else slice(first + agree, last)
            pixels.append(np.concatenate([figures[d][part], clothes[y][part]], axis=1))
            codes += [(y, 2 * y + d, s)] * len(pixels[-1])
    label, group, split = np.array(codes, np.int32).reshape(-1, 3).T.copy()
    images = Images(
        name="dominoes",
        label=label,
        group=group,
        split=split.astype(np.int8),
        classes=tuple(CLOTHES[c] for c in classes),
        groups=tuple(f"{CLOTHES[c]} with {d}" for c in classes for d in digits),
        size=(2 * (_SIDE + 2 * _EDGE), _SIDE + 2 * _EDGE),
        pixels=np.repeat(np.concatenate(pixels)[..., None], 3, axis=-1),
    )
    for s, g in zip(*np.nonzero(images.counts == 0)):
        raise ValueError(
            f"no image of the group {images.groups[g]!r} is in {SPLITS[s]}: every group must be in "
            "every split; choose correlations and a validation share farther from 0 and 1"
        )
    return images


def _pools(
    folder: Path, kind: str, classes: tuple[int, int], digits: tuple[int, int], seed: int
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """The pictures of each class and of each digit, shuffled, with an edge of zeros."""
    both: tuple[list[np.ndarray], list[np.ndarray]] = [], []
    for number, (name, wanted) in enumerate((("fashion-mnist", classes), ("mnist", digits))):
        pictures = read_idx(folder / name / f"{kind}-images-idx3-ubyte", 3)
        labels = read_idx(folder / name / f"{kind}-labels-idx1-ubyte", 1)
        if len(pictures) != len(labels) or pictures.shape[1:] != (_SIDE, _SIDE):
            raise ValueError(
                f"{folder / name}: {kind} has {len(labels)} labels and pictures of shape "
                f"{pictures.shape}; there must be one label for each picture of {_SIDE}×{_SIDE}"
            )
        for label in wanted:
            rows = np.flatnonzero(labels == label)
            if not len(rows):
                raise ValueError(f"{folder / name}: no picture of {kind} has the label {label}")
            # NumPy keeps the bits of its generators from version to version, but not what it makes
            # of them: sorted bits are a permutation that every version draws alike.
            seeds = np.random.SeedSequence((seed, number, int(label), kind == "train"))
            order = np.argsort(np.random.PCG64(seeds).random_raw(len(rows)), kind="stable")
            both[number].append(np.pad(pictures[rows[order]], _AROUND))
    return both


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
