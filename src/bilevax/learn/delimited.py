"""A CSV, TSV or Parquet file as a table: its separator and its encoding are found or said.

All cells of a CSV file are text: what they mean is for `reader.py`, the same way in every file.
"""

from __future__ import annotations

import bz2
import codecs
import csv
import gzip
import io
import lzma
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO, Any

import pandas as pd

#: Separators that are looked for; of two that fit as well the first one counts.
SEPARATORS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "bars"}
#: How a file may begin that names its encoding.
MARKS_OF_ORDER = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
#: What a file is taken for that is not UTF-8.
OTHER = "cp1252"
#: The lines that are looked at for the separator, and the bytes that are read at once.
LINES, BLOCK = 50, 1 << 20
OPENERS: dict[str, Callable[[Path], Any]] = {
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".xz": lzma.open,
    ".zip": lambda path: _only_member(path),
}


def read(
    path: Path, sep: str | None = None, encoding: str | None = None
) -> tuple[pd.DataFrame, list[str]]:
    """The table of a file, by its name, and notes on how it was read."""
    if not path.is_file():
        raise ValueError(f"there is no file {path}")
    kinds = {suffix.lower() for suffix in path.suffixes}
    if not kinds & {".csv", ".tsv", ".txt", ".parquet", ".pq"}:
        raise ValueError(f"{path}: the name must end in .csv, .tsv or .parquet (or .txt)")
    notes: list[str] = []
    try:
        if kinds & {".parquet", ".pq"}:
            table = pd.read_parquet(path)
        else:
            sep = "\t" if ".tsv" in kinds and sep is None else sep
            table = _read_text(path, sep, encoding, notes)
    except ImportError as error:
        raise ValueError(f"{path}: Parquet files need pip install pyarrow ({error})") from None
    except (
        ValueError, OSError, EOFError, csv.Error, lzma.LZMAError, zipfile.BadZipFile
    ) as error:  # fmt: skip
        raise ValueError(f"{path} cannot be read: {error}") from None
    if table.empty:
        raise ValueError(f"{path} has a header but no rows")
    table.columns = [str(name).strip() for name in table.columns]
    if twice := _twice(table.columns):
        raise ValueError(f"{path} has {twice}")
    return table, notes


def _read_text(path: Path, sep: str | None, encoding: str | None, notes: list[str]) -> pd.DataFrame:
    if sep is not None and len(sep := sep.replace("\\t", "\t")) != 1:
        raise ValueError(f"--sep must be one character, not {sep!r}")
    encoding = _encoding(path, notes) if encoding is None else _known(encoding)
    head = _head(path, encoding)
    if not head:
        raise ValueError("it is empty")
    if sep is None:
        sep = _separator(head)
        if sep != ",":
            notes.append(f"the columns are separated by {SEPARATORS[sep]}")
    header = _header(path, sep, encoding)
    if twice := _twice(header):
        raise ValueError(f"it has {twice}")
    if len(header) == 1 and any(sign in head[0] for sign in SEPARATORS):
        raise ValueError(f"it has one column only, {header[0]!r}; say what separates with --sep")
    with _opened(path) as file, warnings.catch_warnings():
        warnings.simplefilter("ignore", pd.errors.ParserWarning)  # of the empty cells at the ends
        return pd.read_csv(
            file, sep=sep, encoding=encoding, dtype=str, na_filter=False, skipinitialspace=True,
            index_col=False,
        )  # fmt: skip


def _header(path: Path, sep: str, encoding: str) -> list[str]:
    """The cells of the header; a row with more of them is refused.

    But a separator may end every row, which makes one more cell that is empty.
    """
    with _opened(path) as file, io.TextIOWrapper(file, encoding=encoding, newline="") as text:
        rows = csv.reader(text, delimiter=sep, skipinitialspace=True)
        full = (row for row in rows if len(row) > 1 or "".join(row).strip())
        header, ended = next(full), None
        for row in full:
            ends = len(row) == len(header) + 1 and row[-1] == ""
            ended = ends if ended is None else ended
            if ended and not ends:
                raise ValueError(f"line {rows.line_num} has no separator at its end, as others do")
            if ends != ended or (len(row) > len(header) and not ends):
                hint = "; say what separates with --sep" if len(header) == 1 else ""
                raise ValueError(
                    f"line {rows.line_num} has {len(row)} cells, and the header has "
                    f"{len(header)}{hint}"
                )
    return header


def _twice(names: Iterable[str]) -> str:
    """Which names occur more than once, if some do; nameless columns may."""
    counts = Counter(name.strip() for name in names)
    twice = sorted(name for name, count in counts.items() if name and count > 1)
    return f"the column {', '.join(twice)} more than once" if twice else ""


def _opened(path: Path) -> IO[bytes]:
    return OPENERS.get(path.suffix.lower(), lambda path: path.open("rb"))(path)


def _only_member(path: Path) -> Any:
    archive = zipfile.ZipFile(path)
    names = [name for name in archive.namelist() if not name.endswith("/")]
    if len(names) != 1:
        raise ValueError(f"it holds {len(names)} files; there must be one")
    return archive.open(names[0])


def _known(encoding: str) -> str:
    try:
        return codecs.lookup(encoding).name
    except LookupError:
        raise ValueError(f"there is no encoding {encoding!r}; try utf-8 or cp1252") from None


def _encoding(path: Path, notes: list[str]) -> str:
    """The encoding that the first bytes name, else UTF-8 where all bytes are that."""
    with _opened(path) as file:
        block = file.read(BLOCK)
        for mark, name in MARKS_OF_ORDER:
            if block.startswith(mark):
                return name
        decoder = codecs.getincrementaldecoder("utf-8")()
        try:
            while block:
                decoder.decode(block)
                block = file.read(BLOCK)
            decoder.decode(b"", final=True)
        except UnicodeDecodeError:
            notes.append(
                f"the file is not UTF-8 and was read as {OTHER}; where letters look wrong, say "
                "--encoding"
            )
            return OTHER
    return "utf-8"


def _head(path: Path, encoding: str) -> list[str]:
    """The first lines that are not empty."""
    lines = []
    with _opened(path) as file, io.TextIOWrapper(file, encoding=encoding, newline="") as text:
        for line in text:
            if line.strip():
                lines.append(line)
            if len(lines) == LINES:
                break
    return lines


def _separator(lines: list[str]) -> str:
    """The separator by which most lines have as many cells as the header, and the header most."""

    def fits(sep: str) -> tuple[float, int]:
        counts = [len(row) for row in csv.reader(lines, delimiter=sep, skipinitialspace=True)]
        return sum(count == counts[0] for count in counts) / len(counts), counts[0]

    found = {sep: fits(sep) for sep in SEPARATORS}
    several = [sep for sep in found if found[sep][1] > 1]
    return max(several, key=lambda sep: found[sep]) if several else ","
