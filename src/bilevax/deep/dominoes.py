"""Dominoes: a piece of clothing below to tell apart, a digit above that misleads.

The benchmark of Shah et al. (2020) and Kirichenko et al. (2023) with Fashion-MNIST and MNIST, by
default coats against dresses, with zeros and ones.
"""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import numpy as np

from bilevax.arguments import whole
from bilevax.deep.idx import SIDE, check_every_group, check_shares, pictures_of, shuffled
from bilevax.deep.pixels import Images

#: Fashion-MNIST's labels.
CLOTHES = (
    "t-shirt", "trouser", "pullover", "dress", "coat",
    "sandal", "shirt", "sneaker", "bag", "ankle boot",
)  # fmt: skip
COAT, DRESS = 4, 3
_EDGE = 2
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
    check_shares(
        correlation=correlation,
        validation=validation,
        validation_correlation=validation_correlation,
    )
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
        size=(2 * (SIDE + 2 * _EDGE), SIDE + 2 * _EDGE),
        pixels=np.repeat(np.concatenate(pixels)[..., None], 3, axis=-1),
    )
    check_every_group(images, "choose correlations and a validation share farther from 0 and 1")
    return images


def _pools(
    folder: Path, kind: str, classes: tuple[int, int], digits: tuple[int, int], seed: int
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """The pictures of each class and of each digit, shuffled, with an edge of zeros."""
    both: tuple[list[np.ndarray], list[np.ndarray]] = [], []
    for number, (name, wanted) in enumerate((("fashion-mnist", classes), ("mnist", digits))):
        pictures, labels = pictures_of(folder / name, kind)
        for label in wanted:
            rows = np.flatnonzero(labels == label)
            if not len(rows):
                raise ValueError(f"{folder / name}: no picture of {kind} has the label {label}")
            order = shuffled(len(rows), seed, number, int(label), kind == "train")
            both[number].append(np.pad(pictures[rows[order]], _AROUND))
    return both
