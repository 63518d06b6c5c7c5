"""The data of `robust.py`: tables with groups, and dominoes of digits and clothes."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bilevax.learn import datasets
from bilevax.learn.table import encoder

#: Fashion-MNIST's pullover and coat, the label; MNIST's 0 and 1, what gives it away too often.
CLOTHES, DIGITS, CORRELATION = (2, 4), (0, 1), 0.95


@dataclass(frozen=True)
class Case:
    """A data set at a size: `draw(seed)` gives features, labels and groups of each part."""

    name: str
    train: int
    validation: int
    draw: Callable[[int], dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]]]


def cases(folder: Path) -> list[Case]:
    adult, law, compas = (folder / f for f in ("adult.csv.gz", "law_school.csv", "compas.csv"))
    tables = {
        "Adult, income × sex": datasets.load_adult(adult, "sex"),
        "Adult, income × race": datasets.load_adult(adult, "race"),
        "Law School, race": datasets.load_law_school(law, "race"),
        "Law School, sex": datasets.load_law_school(law, "sex"),
        "COMPAS, race": datasets.load_compas(compas, "race"),
        "COMPAS, sex": datasets.load_compas(compas, "sex"),
    }
    found = []
    for name, data in tables.items():
        # COMPAS has 7,214 rows in all.
        for train in (1500, 10_000 if len(data.table) > 15_000 else 4000):
            held = train // 2 if len(data.table) > 15_000 or train == 1500 else 1600
            found.append(Case(name, train, held, of_table(data, train, held)))
    digits, clothes = _images(folder / "mnist"), _images(folder / "fashion-mnist")
    draw = _dominoes(digits, clothes, 2000, 1000, 3000)
    found.append(Case("dominoes, 1,568 pixels", 2000, 1000, draw))
    return found


def of_table(data: datasets.Dataset, train: int, held: int) -> Callable[[int], dict]:
    table = data.X
    for column in table.select_dtypes(exclude="number"):
        filled = table[column].astype(object).where(table[column].notna(), "(missing)")
        table = table.assign(**{column: filled.astype(str).astype(object)})
    y = np.unique(data.y, return_inverse=True)[1]
    groups = np.unique(data.groups, return_inverse=True)[1]

    def draw(seed: int) -> dict:
        order = np.random.default_rng(seed).permutation(len(y))
        rows = {"train": order[:train], "validation": order[train : train + held]}
        rows["test"] = order[train + held :]
        coder = encoder(table).set_params(categories__handle_unknown="ignore")
        coder.fit(table.iloc[rows["train"]])
        return {p: (coder.transform(table.iloc[i]), y[i], groups[i]) for p, i in rows.items()}

    return draw


def _images(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    read = lambda name: gzip.decompress((folder / f"train-{name}-ubyte.gz").read_bytes())
    pixels = np.frombuffer(read("images-idx3"), np.uint8, offset=16).reshape(-1, 784)
    return pixels, np.frombuffer(read("labels-idx1"), np.uint8, offset=8)


def _dominoes(
    digits: tuple[np.ndarray, np.ndarray], clothes: tuple[np.ndarray, np.ndarray], *sizes: int
) -> Callable[[int], dict]:
    """A digit above a piece of clothing; no picture is used twice."""

    def draw(seed: int) -> dict:
        rng = np.random.default_rng(seed)
        total = sum(sizes)
        y = rng.integers(0, 2, total)
        mark = np.where(rng.random(total) < CORRELATION, y, 1 - y)

        def chosen(
            images: tuple[np.ndarray, np.ndarray], kinds: tuple[int, int], which: np.ndarray
        ) -> np.ndarray:
            pixels, labels = images
            picked = np.empty(total, int)
            for k in (0, 1):
                pool = rng.permutation(np.flatnonzero(labels == kinds[k]))
                picked[which == k] = pool[: int(np.sum(which == k))]
            return pixels[picked]

        x = np.concatenate([chosen(digits, DIGITS, mark), chosen(clothes, CLOTHES, y)], axis=1)
        x = x / 255.0
        ends = np.cumsum((0, *sizes))
        parts = zip(("train", "validation", "test"), ends[:-1], ends[1:])
        return {p: (x[a:b], y[a:b], (2 * y + mark)[a:b]) for p, a, b in parts}

    return draw
