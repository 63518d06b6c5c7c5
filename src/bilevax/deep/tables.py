"""The files, labels, groups and splits of a data set, checked before a pixel is read."""

from __future__ import annotations

import contextlib
import csv
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

Names: TypeAlias = tuple[str, ...]
SPLITS = ("train", "validation", "test")
#: The group of a training row whose group nobody knows.
UNKNOWN = -1
#: The names that a table may give the splits.
_CALLED = {"train": 0, "validation": 1, "val": 1, "test": 2, "0": 0, "1": 1, "2": 2}
#: Codes of columns that must have one of these values.
_BINARY, _SIGN, _PART = {"0": 0, "1": 1}, {"-1": 0, "1": 1}, {"0": 0, "1": 1, "2": 2}


class Grouped:
    """Rows that each have a split and, but for some training rows, a group."""

    group: np.ndarray  # int32, a number in `groups`, or UNKNOWN
    split: np.ndarray  # int8, a number in SPLITS
    groups: Names

    @property
    def counts(self) -> np.ndarray:
        """How many images each split (row) has of each group (column)."""
        shape, known = (len(SPLITS), len(self.groups)), self.group != UNKNOWN
        cells = np.ravel_multi_index((self.split[known], self.group[known]), shape)
        return np.bincount(cells, minlength=shape[0] * shape[1]).reshape(shape)

    @property
    def unknown(self) -> int:
        """How many rows have no group."""
        return int(np.sum(self.group == UNKNOWN))


@dataclass(frozen=True)
class ImageTable(Grouped):
    """A data set without its pixels."""

    name: str
    files: tuple[Path, ...]
    label: np.ndarray  # int32, a number in `classes`
    group: np.ndarray
    split: np.ndarray
    classes: Names
    groups: Names
    crop: int | None = None  # the side of the centred square that is cut out first
    margin: float = 1.0  # the side that is stored, over the side that the network sees

    def __len__(self) -> int:
        return len(self.files)


def open_table(path: str | os.PathLike[str]) -> ImageTable:
    """The data set at a path, whose layout says which it is."""
    path = Path(path)
    if path.is_file() and path.suffix.lower() == ".csv":
        return manifest(path)
    for name, reader in (("metadata.csv", waterbirds), ("list_attr_celeba.csv", celeba)):
        if (path / name).is_file():
            return reader(path)
    known = (
        "a CSV file with the columns filename, label, group and split; Waterbirds, a folder with "
        "metadata.csv; CelebA, a folder with list_attr_celeba.csv; dominoes, a folder with mnist/ "
        "and fashion-mnist/; coloured digits, a folder with the files of MNIST"
    )
    if not path.exists():
        raise FileNotFoundError(f"there is no file or folder {path}; it may be {known}")
    raise ValueError(f"{path} has no known layout: it may be {known}")


def waterbirds(folder: str | os.PathLike[str]) -> ImageTable:
    """Waterbirds (Sagawa et al. 2020): birds of land and water before land and water."""
    path = Path(folder) / "metadata.csv"
    rows = _Rows(path)
    for row, (name, y, place, split) in _read(path, ("img_filename", "y", "place", "split")):
        label = rows.known(row, "y", y, _BINARY)
        where = rows.known(row, "place", place, _BINARY)
        part = rows.known(row, "split", split, _PART)
        rows.add(row, name, label, 2 * label + where, part)
    classes = ("landbird", "waterbird")
    groups = tuple(f"{bird} on {where}" for bird in classes for where in ("land", "water"))
    # Resized to 256 pixels where the network sees the middle 224.
    return rows.table("waterbirds", Path(folder), classes, groups, margin=256 / 224)


def celeba(
    folder: str | os.PathLike[str], target: str = "Blond_Hair", confounder: str = "Male"
) -> ImageTable:
    """CelebA (Liu et al. 2015): faces, with one attribute to predict and one that misleads."""
    if target == confounder:
        raise ValueError(f"target and confounder are both {target!r}; they must differ")
    path, parts = Path(folder) / "list_attr_celeba.csv", Path(folder) / "list_eval_partition.csv"
    attributes, partition = _Rows(path), _Rows(parts)
    part_of: dict[str, int] = {}
    for row, (name, part) in _read(parts, ("image_id", "partition")):
        if name in part_of:
            raise ValueError(f"{parts}, row {row}: {name} was in an earlier row too; drop one")
        part_of[name] = partition.known(row, "partition", part, _PART)
    for row, (name, y, other) in _read(path, ("image_id", target, confounder)):
        if name not in part_of:
            raise ValueError(f"{path}, row {row}: {name} is not in {parts.name}")
        label = attributes.known(row, target, y, _SIGN)
        with_it = attributes.known(row, confounder, other, _SIGN)
        attributes.add(row, name, label, 2 * label + with_it, part_of[name])
    if alone := sorted(part_of.keys() - attributes.codes.keys()):
        raise ValueError(f"{parts}: {few(alone)} not in {path.name}")
    classes = (f"not {target}", target)
    groups = tuple(f"{c}, {m}" for c in classes for m in (f"not {confounder}", confounder))
    images = Path(folder) / "img_align_celeba"
    doubled = images / images.name  # as Kaggle packs it
    images = doubled if doubled.is_dir() else images
    # The middle square of 178 × 218 pixels.
    return attributes.table("celeba", images, classes, groups, crop=178)


def manifest(path: str | os.PathLike[str]) -> ImageTable:
    """Any data set, from a CSV file with the columns filename, label, group and split.

    The files are in the folder of the CSV file or below; labels and groups may be any text, and
    are numbered in order. The group −1 of a training row says that it is not known.
    """
    path = Path(path)
    read = list(_read(path, ("filename", "label", "group", "split")))
    labels = _numbered({label for _, (_, label, _, _) in read})
    groups = _numbered({group for _, (_, _, group, _) in read} - {str(UNKNOWN)})
    rows = _Rows(path)
    for row, (name, label, group, split) in read:
        part = rows.known(row, "split", split.lower(), _CALLED)
        if group == str(UNKNOWN) and part:
            raise ValueError(
                f"{path}, row {row}: the group is {UNKNOWN}, which says that it is not known; only "
                f"training rows may be without one, and this row is in {SPLITS[part]}"
            )
        rows.add(row, name, labels[label], groups.get(group, UNKNOWN), part)
    return rows.table(path.stem, path.parent, tuple(labels), tuple(groups))


class _Rows:
    """The rows of one file as they are read, with checks."""

    def __init__(self, path: Path):
        self.path = path
        self.codes: dict[str, tuple[int, int, int, int]] = {}  # label, group, split, row

    def known(self, row: int, column: str, value: str, codes: dict[str, int]) -> int:
        if value not in codes:
            raise ValueError(
                f"{self.path}, row {row}: {column} must be one of {', '.join(codes)}, not {value!r}"
            )
        return codes[value]

    def add(self, row: int, name: str, label: int, group: int, split: int) -> None:
        if os.path.isabs(name) or ".." in name.replace("\\", "/").split("/"):
            raise ValueError(
                f"{self.path}, row {row}: {name} leaves the folder of the data set; name files "
                "relative to it"
            )
        name = os.path.normpath(name)
        if name in self.codes:
            _, _, part, before = self.codes[name]
            raise ValueError(
                f"{self.path}: rows {before} ({SPLITS[part]}) and {row} ({SPLITS[split]}) both "
                f"name {name}; an image may be in one row only"
            )
        self.codes[name] = label, group, split, row

    def table(
        self, name: str, folder: Path, classes: Names, groups: Names, **size: Any
    ) -> ImageTable:
        label, group, split, _ = np.array(list(self.codes.values()), np.int32).T.copy()
        files = tuple(folder / own for own in self.codes)
        split = split.astype(np.int8)
        table = ImageTable(name, files, label, group, split, classes, groups, **size)
        if len(seen := np.unique(label)) < 2:
            raise ValueError(
                f"{self.path}: the label is {classes[seen[0]]!r} in every row; there is nothing to "
                "tell apart"
            )
        absent = [
            f"{groups[g]!r} has no image in {SPLITS[s]}"
            for s, g in zip(*np.nonzero(table.counts == 0))
            if s or not table.unknown  # among training rows without a group any may be
        ]
        if absent:
            raise ValueError(
                f"{self.path}: every group must be in every split, but {'; '.join(absent[:6])}"
                f"{'; …' if len(absent) > 6 else ''}. Move images, or merge groups"
            )
        _check_files(self.path, files)
        return table


def _read(path: Path, columns: Sequence[str]) -> Iterator[tuple[int, list[str]]]:
    """The row number as an editor shows it, and the values of the columns, none of them empty."""
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file, restval="")
            reader.fieldnames = header = [name.strip() for name in reader.fieldnames or []]
            if not header:
                raise ValueError("it is empty")
            for column in columns:
                if header.count(column) != 1:
                    how = "more than one column" if column in header else "no column"
                    raise ValueError(f"it has {how} {column!r}; there are {', '.join(header)}")
            row = 0
            for values in reader:
                row, found = reader.line_num, [values[column].strip() for column in columns]
                if "" in found:
                    raise ValueError(f"row {row} has nothing in {columns[found.index('')]!r}")
                yield row, found
            if not row:
                raise ValueError("it has a header but no rows")
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not a text file in UTF-8") from None
    except (csv.Error, ValueError) as error:
        raise ValueError(f"{path}: {error}") from None


def _numbered(values: set[str]) -> dict[str, int]:
    """Numbers from 0: whole numbers by their size, other text by the alphabet."""
    try:
        ordered = sorted(values, key=lambda v: (int(v), v))
    except ValueError:
        ordered = sorted(values)
    return {value: number for number, value in enumerate(ordered)}


def _check_files(path: Path, files: Sequence[Path]) -> None:
    """Refuse missing files, with one look into each folder."""
    there: set[Path] = set()
    for folder in {file.parent for file in files}:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as seen:
            there.update(folder / entry.name for entry in seen if entry.is_file())
    if missing := [str(file) for file in files if file not in there]:
        raise FileNotFoundError(
            f"{path}: {len(missing)} of its {len(files)} files are not there: {few(missing)}"
        )


def few(names: Sequence[str]) -> str:
    """The first three names, and how many more there are."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
