"""The page about a comparison of robust classifiers: one HTML file that needs nothing else.

`page.html` is its template, with inline SVG pictures whose text stays text. All of it comes from
the dictionary that `results.json` holds: the same results make the same page, byte for byte.
"""

from __future__ import annotations

import math
from typing import Any

import jinja2
from markupsafe import Markup

from bilevax.learn.report.pictures import pictures
from bilevax.learn.report.words import (
    as_float,
    as_loss,
    as_percent,
    as_seconds,
    as_whole,
    cleaned,
    is_finite,
    short_number,
)

__all__ = ["finding", "report"]

FILTERS = (as_percent, as_loss, as_whole, as_seconds, short_number)


def report(results: dict[str, Any]) -> str:
    """The whole page; `results` is what `results.json` holds."""
    templates = jinja2.Environment(
        loader=jinja2.PackageLoader(__name__, "."),
        autoescape=True,
        finalize=lambda value: value if isinstance(value, Markup) else cleaned(value),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    templates.filters |= {of.__name__: of for of in FILTERS}
    templates.tests["finite"] = is_finite
    data = results["data"]
    return templates.get_template("page.html").render(
        results=results,
        finding=finding(results),
        grouping=[data["label"]] * bool(data.get("with_label")) + list(data["group_columns"]),
        pictures=[(Markup(svg), caption) for svg, caption in pictures(results)],
    )


def finding(results: dict[str, Any]) -> str:
    """What came out: the tuned classifier against plain training."""
    methods = {method["key"]: method for method in results["methods"]}
    plain, tuned = methods["erm"], methods["tuned"]
    worst, average = (
        as_percent(tuned[key]["value"]) + _difference(tuned[key], plain[key], plain["name"])
        for key in ("worst", "average")
    )
    return (
        f"On the test rows, “{tuned['name']}” has a worst-group accuracy of {worst}; "
        f"its average accuracy is {average}.{_overlap(tuned['worst'], plain['worst'])}"
    )


def _difference(own: dict[str, Any], other: dict[str, Any], name: str) -> str:
    """The difference in points between two accuracies, rounded as they are shown."""
    shown = as_percent(other["value"])
    points = round(100 * as_float(own["value"]), 1) - round(100 * as_float(other["value"]), 1)
    if not math.isfinite(points):
        return f" (that of “{name}” is {shown})"
    if abs(points) < 0.05:
        return f", the same as that of “{name}”"
    side = "above" if points > 0 else "below"
    return f", {abs(points):.1f} points {side} the {shown} of “{name}”"


def _overlap(own: dict[str, Any], other: dict[str, Any]) -> str:
    """Whether two intervals overlap; nothing where one of them is not known."""
    lows, highs = ([as_float(of.get(end)) for of in (own, other)] for end in ("low", "high"))
    if not all(map(math.isfinite, lows + highs)):
        return ""
    how = "do not overlap" if max(lows) > min(highs) else "overlap"
    return f" The 95 % intervals of the two worst-group accuracies {how}."
