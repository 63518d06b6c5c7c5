"""What the cells of one column say: words, numbers, truth values or dates.

A cell is first a word, its text without spaces around it, or missing. A column has one kind, the
first that all its words have: truth values (0 and 1), numbers, dates (days since 1970), categories.
Cells that are typed already, as a data frame's may be, are turned to the words that a file would
have: the float 3.0 and the text "3.0" are both the word "3".
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pandas as pd

#: Words that stand for a missing value, in any case of letters.
MARKS = {
    "", "?", "-", "--", "na", "n/a", "#n/a", "#na", "<na>", "nan", "-nan", "nat", "null", "none",
    "missing", "(missing)",
}  # fmt: skip
#: The word for a missing category.
MISSING = "(missing)"
TRUTHS = {"true": 1.0, "false": 0.0}
#: What a column of truth values may hold later on.
TRUTHS_SERVED = TRUTHS | {"1": 1.0, "0": 0.0}
#: How dates are written, and how that is told; of two that fit a column the first counts.
DATES = {
    "ISO8601": "year-month-day",
    "%d.%m.%Y": "day.month.year",
    "%d/%m/%Y": "day/month/year",
    "%m/%d/%Y": "month/day/year",
    "%Y/%m/%d": "year/month/day",
    "%d-%m-%Y": "day-month-year",
    "%d %b %Y": "day month year",
}
#: A column of more distinct words than this is one of numbers if nearly all words are numbers.
MANY_WORDS, NEARLY_ALL = 50, 0.95
_DAY = np.timedelta64(1, "D")
_WHOLE = re.compile(r"([+-]?\d+)\.0")  # "1.000" may be a thousand
_CURRENCY = re.compile(r"[$€£¥₹]|\b(?:usd|eur|gbp|chf|jpy)\b", re.IGNORECASE)
#: Digits in groups of three between the signs {0}, then a fraction after the sign {1}.
_GROUPED = r"[+-]?(?:\d{{1,3}}(?:{0}\d{{3}})+|\d+)?(?:{1}\d*)?(?:[eE][+-]?\d+)?"
_NUMBER = {
    ".": re.compile(_GROUPED.format("[,’' ]", r"\.")),
    ",": re.compile(_GROUPED.format(r"[.’' ]", ",")),
}


def words(column: Any) -> tuple[np.ndarray, np.ndarray]:
    """The distinct words of a column, and for each row the place of its word, −1 where missing."""
    code, distinct = pd.factorize(column)
    if pd.api.types.is_datetime64_any_dtype(column.dtype):
        texts = [value.isoformat() for value in pd.DatetimeIndex(distinct)]
    else:
        texts = [_word(value) for value in np.asarray(distinct, dtype=object)]
    texts = np.array([*texts, ""], dtype=object)
    place, found = pd.factorize(texts)  # the last place, that of −1, is a missing value's
    known = np.array([text.lower() not in MARKS for text in found], dtype=bool)
    kept = np.where(known, np.cumsum(known) - 1, -1)
    return found[known], kept[place][code]


def _word(value: Any) -> str:
    """The text of one cell, the same whether it was a number or was written as one."""
    text = value if isinstance(value, str) else str(value)
    text = text.strip()
    whole = _WHOLE.fullmatch(text)
    return whole[1] if whole else text


def kind_of(column: Any) -> dict[str, Any]:
    """The kind of a column, and how its words are written."""
    truths = pd.api.types.infer_dtype(column, skipna=True) == "boolean"
    if not truths and not pd.api.types.is_datetime64_any_dtype(column):
        plain, left = _plain(column)
        others, code = words(column[left])
        right = np.append(~np.isnan(as_numbers(others)), False)[code] & (code >= 0)
        good, bad = int(np.sum(~left) + np.sum(right)), int(np.sum((code >= 0) & ~right))
        many = bad == 0 or len(np.unique(plain[~left])) > MANY_WORDS
        if good + bad and many and good >= (NEARLY_ALL * (good + bad) if bad else 1):
            money = any(_CURRENCY.search(text) for text in others)
            return {"kind": "number", "decimal": "," if money and groups_by_points(column) else "."}
    texts, _ = words(column)
    if len(texts) == 0:
        return {"kind": "category"}
    if all(text.lower() in TRUTHS for text in texts):
        return {"kind": "truth"}
    if not np.isnan(as_numbers(texts, ",")).any():
        return {"kind": "number", "decimal": ","}
    for written in DATES:  # the first words show most others to be none
        if all(not np.isnan(as_dates(some, written)).any() for some in (texts[:5], texts)):
            return {"kind": "date", "written": written}
    return {"kind": "category"}


def groups_by_points(column: Any) -> bool:
    """Whether points can be what groups the digits, as in "1.234": all words fit, some have one."""
    if pd.api.types.is_numeric_dtype(column):
        return False
    texts, _ = words(column)
    return any("." in text for text in texts) and not np.isnan(as_numbers(texts, ",")).any()


def read_as(column: Any, kind: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """What each cell says as that kind, and which cells have a word that says nothing so."""
    out, left = np.full(len(column), np.nan), np.ones(len(column), dtype=bool)
    if kind["kind"] == "category":
        texts, code = words(column)
        return np.append(texts, MISSING)[code], np.zeros(len(column), dtype=bool)
    typed = pd.api.types.is_numeric_dtype(column)
    if kind["kind"] == "number" and (typed or kind["decimal"] == "."):
        out, left = _plain(column)
    texts, code = words(column[left])
    if pd.api.types.is_datetime64_any_dtype(column):
        kind = kind | {"written": "ISO8601"}
    out[left] = np.append(_values(texts, kind), np.nan)[code]
    left[left] = code >= 0
    return out, left & np.isnan(out)


def _plain(column: Any) -> tuple[np.ndarray, np.ndarray]:
    """Numbers of the cells that are plain ones, which is quick, and which cells are left."""
    if pd.api.types.is_datetime64_any_dtype(column):
        return np.full(len(column), np.nan), np.ones(len(column), dtype=bool)
    if pd.api.types.is_numeric_dtype(column):
        found = np.array(column.to_numpy(float, na_value=np.nan))
    else:
        code, distinct = pd.factorize(column)
        plain: Any = pd.to_numeric(np.asarray(distinct, dtype=object), errors="coerce")
        found = np.append(np.asarray(plain, dtype=float), np.nan)[code]
    return found, np.isnan(found)


def _values(texts: np.ndarray, kind: dict[str, Any]) -> np.ndarray:
    """The number of each word; NaN for a word that has none."""
    if kind["kind"] == "truth":
        return np.array([TRUTHS_SERVED.get(text.lower(), np.nan) for text in texts], dtype=float)
    if kind["kind"] == "date":
        return as_dates(texts, kind["written"])
    return as_numbers(texts, kind["decimal"])


def as_numbers(texts: np.ndarray, decimal: str = ".") -> np.ndarray:
    """Numbers, also with a currency, a percent sign, grouped digits or brackets for a minus."""
    if len(texts) == 0:
        return np.zeros(0)
    # A comma before the fraction is no number for pandas, and a point there is not one for us.
    plain = np.array(pd.to_numeric(pd.Series(texts, dtype=object), errors="coerce"), dtype=float)
    left = np.isnan(plain)
    if decimal == ",":
        left |= np.array(["." in text for text in texts])
    for i in np.flatnonzero(left):
        plain[i] = _decorated(texts[i], decimal)
    return plain


def _decorated(text: str, decimal: str) -> float:
    text, currencies = _CURRENCY.subn("", text)
    percent = text.rstrip().endswith("%")
    text = text.rstrip().removesuffix("%").strip().replace("\u00a0", " ").replace("−", "-")
    minus = text.startswith("(") and text.endswith(")")
    text = text[1:-1].strip() if minus else text
    text = re.sub(r"^([+-]) +", r"\1", text)
    if currencies > 1 or not any(map(str.isdigit, text)) or not _NUMBER[decimal].fullmatch(text):
        return np.nan
    between = "[,’' ]" if decimal == "." else "[.’' ]"
    number = float(re.sub(between, "", text).replace(",", "."))
    return (-number if minus else number) / (100 if percent else 1)


def as_dates(texts: np.ndarray, written: str) -> np.ndarray:
    """Days since 1970, for dates written in that way."""
    found = pd.to_datetime(
        pd.Series(texts, dtype=object), format=written, errors="coerce", utc=True
    ).dt.tz_localize(None)
    return ((found - pd.Timestamp(0)) / _DAY).to_numpy(float)
