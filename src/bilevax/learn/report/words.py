"""Numbers and names as a reader wants them, and safe to stand in a page."""

from __future__ import annotations

import math
import textwrap
import unicodedata
from html import escape
from typing import Any

#: What stands where there is no number.
NONE = "–"


def as_float(value: Any) -> float:
    """A number, or NaN where there is none."""
    return math.nan if value is None else float(value)


def as_percent(value: Any, unit: str = "\u00a0%") -> str:
    number = as_float(value)
    return f"{100 * number:.1f}{unit}" if math.isfinite(number) else NONE


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


def as_loss(value: Any) -> str:
    number = as_float(value)
    return f"{number:.3f}" if math.isfinite(number) else NONE


def as_seconds(value: Any) -> str:
    number = as_float(value)
    if not math.isfinite(number):
        return NONE
    return f"{number:,.0f}" if number >= 100 else f"{number:.{2 if number >= 0.1 else 3}f}"


def cleaned(text: Any) -> str:
    """Without control characters and the like, which neither HTML nor XML may hold."""
    bad = ("Cc", "Cs", "Cn")
    return "".join(" " if unicodedata.category(c) in bad else c for c in str(text))


def fitted_text(text: Any, width: int, lines: int = 1) -> str:
    """In lines of so many letters, cut in the middle if need be; a wide letter counts twice."""
    text = " ".join(cleaned(text).split())
    wide = sum(unicodedata.east_asian_width(letter) in "WF" for letter in text)
    width = width * len(text) // (len(text) + wide) if wide else width
    # A line of several may end early, at a space: room for that.
    room = lines * width - (lines - 1) * width // 4
    if len(text) > room:
        text = f"{text[: room // 2].rstrip()}…{text[-(room // 2 - 1) :].lstrip()}"
    return "\n".join(textwrap.wrap(text, width, max_lines=lines, placeholder="…"))


def method_of(results: dict[str, Any], key: str) -> dict[str, Any]:
    """The results of one method."""
    return next(method for method in results["methods"] if method["key"] == key)


def element(tag: str, text: Any, kind: str = "", scope: str = "") -> str:
    """An element that holds text: whatever it is, it is escaped."""
    attributes = {"class": kind, "scope": scope}
    shown = "".join(f' {name}="{value}"' for name, value in attributes.items() if value)
    return f"<{tag}{shown}>{escape(cleaned(text))}</{tag}>"
