"""Coloured digits: tell small digits from large ones, while the colour misleads.

The data of Arjovsky et al. (2019) with the splits of Jo et al. (arXiv 2510.02818), who also turn
the test images of one rare group: a shift within a group, which weights of groups cannot see.
"""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np

from bilevax.arguments import one_of, whole
from bilevax.deep.idx import SIDE, check_every_group, check_shares, pictures_of, shuffled
from bilevax.deep.pixels import Images
from bilevax.deep.tables import SPLITS

Shift: TypeAlias = Literal["held-out", "test", "none"]
#: The splits in which images are turned.
TURNED: dict[str, tuple[str, ...]] = {
    "held-out": ("validation", "test"), "test": ("test",), "none": (),
}  # fmt: skip
CLASSES, COLOURS = ("digit 0 to 4", "digit 5 to 9"), ("red", "green")
#: Of the groups 2·label + colour: large digits in red, which are rare in training.
SHIFTED = 2
CORRELATION = 0.8


def colour_mnist(
    folder: str | os.PathLike[str],
    correlation: float = CORRELATION,
    *,
    label_noise: float = 0.25,
    validation_correlation: float = 0.5,
    test_correlation: float = 0.1,
    shift: Shift = "held-out",
    sizes: tuple[int, int, int] = (30_000, 10_000, 20_000),
    seed: int = 0,
) -> Images:
    """Images of 28 × 28 pixels, so many in each split, from MNIST's training files in `folder`.

    The label says whether the digit is 5 or more, and is wrong for a share `label_noise`. Red goes
    with label 0 and green with label 1 in a share `correlation` of each label's training images,
    and in the other splits likewise, to the nearest image. In the splits that `shift` names, the
    large digits in red are turned by 90° counterclockwise. No picture is used twice.

    The defaults are the published ones, but for `shift`, which is published as "test".
    """
    check_shares(
        correlation=correlation,
        label_noise=label_noise,
        validation_correlation=validation_correlation,
        test_correlation=test_correlation,
    )
    one_of(shift, "shift", *TURNED)
    if len(sizes) != len(SPLITS):
        raise ValueError(f"sizes must be three numbers of images, not {sizes}")
    for name, size in zip(SPLITS, sizes):
        whole(size, f"the size of {name}", 1)
    whole(seed, "seed", 0)
    pictures, digits = pictures_of(Path(folder), "train")
    if sum(sizes) > len(pictures):
        raise ValueError(f"sizes ask for {sum(sizes)} images, but {folder} has {len(pictures)}")
    order = shuffled(len(pictures), seed)[: sum(sizes)]
    split = np.repeat(np.arange(len(SPLITS), dtype=np.int8), sizes)
    label, colour = (digits[order] >= 5).astype(np.int32), np.zeros(len(order), np.int32)
    shares = (correlation, validation_correlation, test_correlation)
    for s, y in itertools.product(range(len(SPLITS)), (0, 1)):
        rows = np.flatnonzero((split == s) & (digits[order] // 5 == y))
        rows = rows[shuffled(len(rows), seed, 0, s, y)]
        label[rows[: round(label_noise * len(rows))]] = 1 - y
    for (s, share), y in itertools.product(enumerate(shares), (0, 1)):
        rows = np.flatnonzero((split == s) & (label == y))
        rows = rows[shuffled(len(rows), seed, 1, s, y)]
        agree = round(share * len(rows))
        colour[rows[:agree]], colour[rows[agree:]] = y, 1 - y
    group = 2 * label + colour
    shown = pictures[order]
    turned = np.isin(split, [SPLITS.index(name) for name in TURNED[shift]]) & (group == SHIFTED)
    shown[turned] = np.rot90(shown[turned], axes=(1, 2))
    pixels = np.zeros((len(order), SIDE, SIDE, 3), np.uint8)
    pixels[np.arange(len(order)), :, :, colour] = shown
    images = Images(
        name="colour-mnist",
        label=label,
        group=group,
        split=split,
        classes=CLASSES,
        groups=tuple(f"{digit} in {colour}" for digit in CLASSES for colour in COLOURS),
        size=(SIDE, SIDE),
        pixels=pixels,
    )
    check_every_group(images, "choose more images, or correlations farther from 0 and 1")
    return images
