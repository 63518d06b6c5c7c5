"""What the cells of one column say: words, numbers, truth values or dates.

A cell is first a word, its text without spaces around it, or missing. A column has one kind, the
first that all its words have: numbers, truth values (0 and 1), dates (days since 1970). Else it is
the one that nearly all words have, where many of these differ; else categories.
Cells that are typed already, as a data frame's may be, are turned to the words that a file would
have: the float 3.0 and the text "3.0" are both the word "3".
"""

from __future__ import annotations

import re
from collections.abc import Iterator
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
#: A column with more distinct numbers, or dates, than this has that kind if nearly all cells do.
MANY_WORDS, NEARLY_ALL = 50, 0.95
#: The words that are looked at first for a date; so large a share of them must be one.
FIRST_WORDS, MOST = 50, 0.8
#: The years that days in nanoseconds can say.
YEARS = range(1678, 2262)
_DAY = np.timedelta64(1, "D")
_WHOLE = re.compile(r"([+-]?\d+)\.0")  # "1.000" may be a thousand
_CURRENCIES = {"$": "usd", "€": "eur", "£": "gbp", "¥": "jpy", "₹": "inr"}
_CURRENCY = re.compile(r"[$€£¥₹]|\b(?:usd|eur|gbp|chf|jpy)\b", re.IGNORECASE)
#: What may be choices out of a list rather than a number: "3" or "2,4", in order.
_CHOICES = re.compile(r"(\d+)|([1-9]\d*),([1-9]\d*)")
_YEAR = re.compile(r"(?<!\d)\d{4}(?!\d)")
_ISO = re.compile(r"\d{4}-\d\d|\d{4}-\d\d-\d\d(?:[T ].*)?")
#: Digits in groups of three between the signs {0}, then a fraction after the sign {1}. No group
#: begins with a zero: "0,125" is no thousands.
_GROUPED = r"[+-]?(?:[1-9]\d{{0,2}}(?:{0}\d{{3}})+|\d+)?(?:{1}\d*)?(?:[eE][+-]?\d+)?"
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
    """The kind of a column, and how its words are written.

    Where units are mixed, as in dollars and euros, the words are categories and `mixed` names them.
    """
    kinds = _candidates(column)
    best, most = {"kind": "category"}, 0.0
    for kind in kinds:
        share, distinct = _fit(column, kind)
        if share > most and (share == 1 or (share >= NEARLY_ALL and distinct > MANY_WORDS)):
            best, most = kind, share
        if share == 1:
            break
    return _with_units(column, best) if best["kind"] == "number" else best


def _candidates(column: Any) -> Iterator[dict[str, Any]]:
    """The kinds that a column may have, the first ones first."""
    truths = pd.api.types.infer_dtype(column, skipna=True) == "boolean"
    numbers = not truths and not pd.api.types.is_datetime64_any_dtype(column)
    if numbers:
        yield {"kind": "number", "decimal": "."}
    texts, _ = words(column)
    if len(texts) and all(text.lower() in TRUTHS for text in texts):
        yield {"kind": "truth"}
    if numbers:
        yield {"kind": "number", "decimal": ","}
    for written in DATES:
        kind = {"kind": "date", "written": written}
        if len(texts) and np.mean(~np.isnan(_values(texts[:FIRST_WORDS], kind))) >= MOST:
            yield kind


def _fit(column: Any, kind: dict[str, Any]) -> tuple[float, int]:
    """The share of the cells, without missing ones, that say something so; how many things."""
    values, odd = read_as(column, kind)
    known = values[~np.isnan(values)]
    cells = len(known) + int(odd.sum())
    return (len(known) / cells if cells else 0.0), len(np.unique(known))


def _with_units(column: Any, kind: dict[str, Any]) -> dict[str, Any]:
    """A kind of numbers with the unit they have, if they have one; categories where several."""
    left = _plain(column)[1]
    texts, _ = words(column[left])
    texts = texts[~np.isnan(as_numbers(texts, kind["decimal"]))]
    units = {_unit(text) for text in texts} | ({""} if (~left).any() else set())
    if len(units - {""}) > 1 or {"", "%"} <= units:
        return {"kind": "category", "mixed": sorted(unit or "no unit" for unit in units)}
    unit = "".join(units)
    if unit == "eur" and groups_by_points(column):
        kind = kind | {"decimal": ","}
    return kind | ({"unit": unit} if unit else {})


def _unit(text: str) -> str:
    """The unit of a number: "%", a currency or ""."""
    if found := _CURRENCY.search(text):
        return _CURRENCIES.get(found[0], found[0].lower())
    return "%" if "%" in text else ""


def groups_by_points(column: Any) -> bool:
    """Whether points can be what groups the digits, as in "1.234": all words fit, some have one."""
    texts = _texts(column)
    return any("." in text for text in texts) and not np.isnan(as_numbers(texts, ",")).any()


def can_have_commas(column: Any) -> bool:
    """Whether all words are numbers with a decimal comma, too, and some would be other numbers."""
    texts = _texts(column)
    some = any("." in text or "," in text for text in texts)
    return some and not np.isnan(as_numbers(texts, ",")).any()


def shows_commas(column: Any) -> bool:
    """Whether a comma in a column of decimal commas cannot stand between two choices of a list."""
    found = [_CHOICES.fullmatch(text) for text in _texts(column)]
    return any(m is None or (m[2] and int(m[2]) >= int(m[3])) for m in found)


def example(column: Any, kind: dict[str, Any], signs: str) -> str:
    """A word with one of these signs and the number it is."""
    for text in _texts(column):
        number = as_numbers(np.array([text], dtype=object), kind["decimal"])[0]
        if any(sign in text for sign in signs) and not np.isnan(number):
            return f"{text!r} is {number:.15g}"
    return ""


def _texts(column: Any) -> np.ndarray:
    """The distinct words of the cells that are text, not numbers already."""
    if pd.api.types.is_numeric_dtype(column):
        return np.array([], dtype=object)
    distinct = pd.Series(pd.unique(column), dtype=object)
    return words(distinct[[isinstance(value, str) for value in distinct]])[0]


def read_as(column: Any, kind: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """What each cell says as that kind, and which cells have a word that says nothing so."""
    out, left = np.full(len(column), np.nan), np.ones(len(column), dtype=bool)
    if kind["kind"] == "category":
        texts, code = words(column)
        return np.append(texts, MISSING)[code], np.zeros(len(column), dtype=bool)
    if kind["kind"] == "number":
        out, left = _plain(column, texts=kind["decimal"] == ".")
    texts, code = words(column[left])
    if pd.api.types.is_datetime64_any_dtype(column):
        kind = kind | {"written": "ISO8601"}
    out[left] = np.append(_values(texts, kind), np.nan)[code]
    left[left] = code >= 0
    return out, left & np.isnan(out)


def _plain(column: Any, texts: bool = True) -> tuple[np.ndarray, np.ndarray]:
    """Numbers of the cells that are plain ones, which is quick, and which cells are left.

    Without `texts` only of the cells that are numbers already.
    """
    if pd.api.types.is_datetime64_any_dtype(column):
        return np.full(len(column), np.nan), np.ones(len(column), dtype=bool)
    if pd.api.types.is_numeric_dtype(column):
        found = np.array(column.to_numpy(float, na_value=np.nan))
    else:
        code, distinct = pd.factorize(column)
        distinct = np.asarray(distinct, dtype=object)
        plain: Any = np.array(pd.to_numeric(distinct, errors="coerce"), dtype=float)
        if not texts:
            plain[[isinstance(value, str) for value in distinct]] = np.nan
        found = np.append(plain, np.nan)[code]
    return found, np.isnan(found)


def _values(texts: np.ndarray, kind: dict[str, Any]) -> np.ndarray:
    """The number of each word; NaN for a word that has none."""
    if kind["kind"] == "truth":
        return np.array([TRUTHS_SERVED.get(text.lower(), np.nan) for text in texts], dtype=float)
    if kind["kind"] == "date":
        days = as_dates(texts, kind["written"])
        left = np.isnan(days)  # dates that are typed become ISO 8601, and that has one meaning
        days[left] = as_dates(texts[left], "ISO8601")
        return days
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
    """Days since 1970, for dates written in that way, in the years that can be said."""
    dated = np.array([_is_dated(text, written) for text in texts], dtype=bool)
    days = np.full(len(texts), np.nan)
    if dated.any():
        column = pd.Series(texts[dated], dtype=object)
        found = pd.to_datetime(column, format=written, errors="coerce", utc=True)
        found = found.dt.tz_localize(None)
        days[dated] = ((found - pd.Timestamp(0)) / _DAY).to_numpy(float)
    return days


def _is_dated(text: str, written: str) -> bool:
    """Whether a word has a year that can be said; not "today", and of ISO 8601 no bare year."""
    year = _YEAR.search(text)
    fits = written != "ISO8601" or bool(_ISO.fullmatch(text))
    return fits and year is not None and int(year[0]) in YEARS
