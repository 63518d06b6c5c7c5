"""Numbers and names as a reader wants them."""

from __future__ import annotations

import math
import textwrap
import unicodedata
from typing import Any

#: What stands where there is no number.
NONE = "–"


def as_float(value: Any) -> float:
    """A number, or NaN where there is none."""
    return math.nan if value is None else float(value)


def is_finite(value: Any) -> bool:
    return math.isfinite(as_float(value))


def as_percent(value: Any, unit: str = "\u00a0%") -> str:
    return f"{100 * value:.1f}{unit}" if is_finite(value) else NONE


def as_loss(value: Any) -> str:
    return f"{value:.3f}" if is_finite(value) else NONE


def as_whole(value: Any) -> str:
    return NONE if value is None else f"{value:,}"


def as_seconds(value: Any) -> str:
    if not is_finite(value):
        return NONE
    return f"{value:,.0f}" if value >= 100 else f"{value:.{2 if value >= 0.1 else 3}f}"


def short_number(value: Any) -> str:
    """Three digits, with a power of ten where there would be many zeros."""
    number = as_float(value)
    if not math.isfinite(number):
        return "∞" if number == math.inf else NONE
    if number == 0 or 1e-3 <= abs(number) < 999.5:
        return f"{number:.3g}"
    if 999.5 <= abs(number) < 1e5:
        return f"{number:,.0f}"
    digits, power = f"{number:.1e}".split("e")
    return f"{digits} × {power_of_ten(int(power))}"


def power_of_ten(exponent: int) -> str:
    return "10" + str(exponent).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


def cleaned(text: Any) -> str:
    """Without control characters and the like, which neither HTML nor XML may hold."""
    bad = ("Cc", "Cs", "Cn")
    return "".join(" " if unicodedata.category(c) in bad else c for c in str(text))


def fitted_text(text: Any, width: int, lines: int = 1) -> str:
    """In lines of so many letters, cut in the middle if need be; a wide letter counts twice."""
    text = " ".join(cleaned(text).split())
    wide = sum(unicodedata.east_asian_width(letter) in "WF" for letter in text)
    width = width * len(text) // (len(text) + wide) if wide else width
    # Of several lines one may end early, at a space: this leaves room for that.
    room = lines * width - (lines - 1) * width // 4
    if len(text) > room:
        text = f"{text[: room // 2].rstrip()}…{text[-(room // 2 - 1) :].lstrip()}"
    return "\n".join(textwrap.wrap(text, width, max_lines=lines, placeholder="…"))
