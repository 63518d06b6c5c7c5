"""The page about a comparison of robust classifiers: one HTML file that needs nothing else.

Tables and sentences are HTML, the pictures are inline SVG whose text stays text. All of it is read
from the dictionary that `results.json` holds. A policy in the page forbids it to load anything, and
it has no scripts. The same results make the same page, byte for byte.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from typing import Any

from bilevax.learn.report.pictures import pictures
from bilevax.learn.report.words import (
    NONE,
    as_float,
    as_loss,
    as_percent,
    as_seconds,
    cleaned,
    element,
    method_of,
    short_number,
)

__all__ = ["report"]

#: The certificate's lines: what each of them measures.
LINES = {
    "stationarity": "Stationarity: the slope that is left in log η, log l2, the classifier and "
    "the training weights of the groups.",
    "response_x2": "Validation weights: how far they are from the worst case, all weight on the "
    "groups with the largest validation loss.",
    "response_z1": "Training alone, the classifier: the slope that is left, times ρ.",
    "response_z2": "Training alone, the weights of the groups: how far they are from the worst "
    "case, times ρ.",
    "gap": "Saddle gap: how much either side of the training could still gain, at most.",
}
NOTES = {
    "gap_below": "The saddle gap, at least.",
    "rho": "The penalty ρ that the lines are weighed with.",
    "objective": "The worst group’s validation loss at this point.",
}

CSS = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #59626d; --line: #d5dae0;
  --paper: #ffffff; --shade: #f3f5f7; --mark: #fbe6d8; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ec; --soft: #a3adb8; --line: #3a424b;
  --paper: #14181c; --shade: #1f252b; --mark: #5a3012; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem 1rem 3rem; max-width: 64rem; background: var(--paper);
  color: var(--ink); font: 1rem/1.55 system-ui, "Segoe UI", Roboto, sans-serif;
  overflow-wrap: anywhere; }
h1 { margin: 0 0 1rem; font-size: 1.6rem; line-height: 1.25; }
h2 { margin: 2.5rem 0 .75rem; font-size: 1.2rem; }
p { max-width: 44rem; }
.finding { margin: 0; padding: .75rem 1rem; border-left: 4px solid #d55e00;
  background: var(--shade); font-size: 1.1rem; }
.soft, figcaption, small { color: var(--soft); }
.wide { overflow-x: auto; border: 1px solid var(--line); border-radius: 6px; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; line-height: 1.35; }
th, td { padding: .45rem .7rem; text-align: left; vertical-align: top; font-weight: normal;
  border-bottom: 1px solid var(--line); overflow-wrap: normal; }
tbody tr:last-child > * { border-bottom: 0; }
thead th { background: var(--shade); font-weight: 600; vertical-align: bottom; }
tbody th { min-width: 8rem; max-width: 16rem; overflow-wrap: anywhere; background: var(--paper); }
.wide th:first-child { position: sticky; left: 0; border-right: 1px solid var(--line); }
.number { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
thead .number { white-space: normal; }
.name { min-width: 12rem; overflow-wrap: anywhere; }
.worst { background: var(--mark); font-weight: 600; }
small { display: block; font-size: .8rem; font-weight: normal; }
.worst small { color: inherit; }
.pictures { display: grid; gap: 1.5rem; align-items: start; grid-template-rows: auto 1fr;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); }
.pictures figure:first-child { grid-row: span 2; }
figure { margin: 0; max-width: 35rem; }
figure svg { display: block; width: 100%; height: auto; padding: 2px; background: #ffffff;
  border: 1px solid var(--line); border-radius: 6px; }
figure svg * { stroke-linejoin: round; stroke-linecap: butt; }
figcaption { margin-top: .5rem; font-size: .9rem; line-height: 1.4; }
dl { display: grid; grid-template-columns: minmax(0, 7rem) minmax(0, 1fr); gap: .4rem 1rem; }
dt { color: var(--soft); }
dd { margin: 0; }
code { font-size: .9em; }
@media (max-width: 30rem) { th, td { padding: .4rem .5rem; }
  .wide th:first-child { min-width: 7.5rem; max-width: 9rem; }
  .wide tbody th { font-size: .8rem; line-height: 1.3; } }
"""


def report(results: dict[str, Any]) -> str:
    """The whole page; `results` is what `results.json` holds."""
    title = f"Robust classifiers on {cleaned(results['data']['name'])}"
    body = [
        element("h1", title),
        element("p", _finding(results), "finding"),
        _section("Methods", _methods(results)),
        _section("Groups", _groups(results)),
        _section("Pictures", pictures(results)),
        _section("Certificate", _certificate(results)),
        _section("How the numbers were made", _making(results)),
    ]
    head = [
        '<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; style-src 'unsafe-inline'\">",
        element("title", title),
        f"<style>{CSS}</style>",
    ]
    page = ["<!DOCTYPE html>", '<html lang="en-GB">', "<head>", *head, "</head>"]
    return "\n".join([*page, "<body>", "<main>", *body, "</main>", "</body>", "</html>", ""])


def _finding(results: dict[str, Any]) -> str:
    """What came out: the tuned classifier against plain training."""
    plain, tuned = method_of(results, "erm"), method_of(results, "tuned")
    worst, average = (
        as_percent(tuned[key]["value"]) + _against(tuned[key], plain[key], plain["name"])
        for key in ("worst", "average")
    )
    sentence = (
        f"On the test rows, “{tuned['name']}” has a worst-group accuracy of {worst}; "
        f"its average accuracy is {average}."
    )
    return sentence + _overlap(tuned["worst"], plain["worst"])


def _against(own: dict[str, Any], other: dict[str, Any], name: str) -> str:
    """The difference in points, of the numbers as they are shown; nothing from itself."""
    if own is other:
        return ""
    shown = as_percent(other["value"])
    points = round(100 * as_float(own["value"]), 1) - round(100 * as_float(other["value"]), 1)
    if not math.isfinite(points):
        return f" (that of “{name}” is {shown})"
    if abs(points) < 0.05:
        return f", the same as that of “{name}”"
    side = "above" if points > 0 else "below"
    return f", {abs(points):.1f} points {side} the {shown} of “{name}”"


def _overlap(own: dict[str, Any], other: dict[str, Any]) -> str:
    """Whether the intervals of the two overlap; nothing where there is only one, or none."""
    ends = [as_float(of.get(end)) for of in (own, other) for end in ("low", "high")]
    if own is other or not all(map(math.isfinite, ends)):
        return ""
    apart = max(ends[0], ends[2]) > min(ends[1], ends[3])
    how = "do not overlap" if apart else "overlap"
    return f" The 95 % intervals of the two worst-group accuracies {how}."


def _section(title: str, content: Iterable[str]) -> str:
    return "\n".join(["<section>", element("h2", title), *content, "</section>"])


def _number(text: str) -> str:
    return element("td", text, "number")


def _accuracy(accuracy: dict[str, Any], worst: bool = False) -> str:
    """A cell: the accuracy, its interval below."""
    interval = ""
    if math.isfinite(as_float(accuracy.get("low"))) and math.isfinite(
        as_float(accuracy.get("high"))
    ):
        low, high = (as_percent(accuracy[end], "") for end in ("low", "high"))
        interval = element("small", f"{low} to {high}")
    kind = "number worst" if worst else "number"
    return f'<td class="{kind}">{as_percent(accuracy.get("value"))}{interval}</td>'


def _table(label: str, heads: Iterable[tuple[str, str]], rows: Iterable[Sequence[str]]) -> str:
    """A table that scrolls in a box of its own; `heads` are the columns' titles and classes."""
    cells = [element("th", text, kind, "col") for text, kind in heads]
    body = ["<tr>" + "".join(row) + "</tr>" for row in rows]
    return "\n".join(
        [
            f'<div class="wide" role="region" tabindex="0" aria-label="{escape(label)}">',
            "<table>",
            f"<thead><tr>{''.join(cells)}</tr></thead>",
            "<tbody>",
            *body,
            "</tbody>",
            "</table>",
            "</div>",
        ]
    )


def _methods(results: dict[str, Any]) -> Iterator[str]:
    yield (
        "<p>Accuracies on the test rows, with 95 % intervals. η is the price of uneven weights of "
        "the groups, l2 the weight of the ridge penalty. Seconds are those of all fits of a "
        "method.</p>"
    )
    heads = [
        ("Method", ""),
        ("Worst-group accuracy", "number"),
        ("Average accuracy", "number"),
        ("Worst group", "name"),
        ("Worst validation loss", "number"),
        ("η", "number"),
        ("l2", "number"),
        ("Fits", "number"),
        ("Seconds", "number"),
    ]
    yield _table("The methods", heads, [_method(method) for method in results["methods"]])


def _method(method: dict[str, Any]) -> list[str]:
    fits = method.get("fits")
    return [
        element("th", method["name"], scope="row"),
        _accuracy(method["worst"]),
        _accuracy(method["average"]),
        element("td", method["worst"].get("group", NONE), "name"),
        _number(as_loss(method.get("worst_validation_loss"))),
        _number(short_number(method.get("eta"))),
        _number(short_number(method.get("l2"))),
        _number(NONE if fits is None else f"{fits:,}"),
        _number(as_seconds(method.get("seconds"))),
    ]


def _groups(results: dict[str, Any]) -> Iterator[str]:
    yield (
        "<p>Each method’s accuracy on the test rows of each group, with 95 % intervals. The worst "
        "group of each method is marked. The last columns count the group’s rows.</p>"
    )
    parts = ("train", "validation", "test")
    methods = results["methods"]
    columns = [*(method["name"] for method in methods), *(f"Rows, {part}" for part in parts)]
    heads = [("Group", ""), *((column, "number") for column in columns)]
    rows = [
        [
            element("th", group["name"], scope="row"),
            *(
                _accuracy(method["groups"][place], method["worst"].get("group") == group["name"])
                for method in methods
            ),
            *(_number(f"{group[part]:,}") for part in parts),
        ]
        for place, group in enumerate(results["groups"])
    ]
    yield _table("Accuracy in each group", heads, rows)


def _certificate(results: dict[str, Any]) -> Iterator[str]:
    certificate, tolerance = results["certificate"], short_number(results["tolerance"])
    verdict, how = (
        ("Certified", "within") if results["certified"] else ("Not certified", "not within")
    )
    epsilon = short_number(certificate.get("epsilon"))
    yield element(
        "p",
        f"{verdict}: ε = {epsilon}, the largest of the distances below, is {how} the tolerance "
        f"of {tolerance}.",
    )
    yield (
        "<p>The tuning sets η and l2 so that the worst group’s validation loss is least, with the "
        "classifier trained at that η and l2. Each distance says how far the point that was found "
        "is from a condition that every optimum meets (the ε-KKT conditions). They are local: "
        "they do not say that no other η, far away, is better, and nothing about new rows.</p>"
    )
    heads = [("What is measured", "name"), ("Value", "number")]
    rows = [
        [element("td", words), _number(short_number(certificate.get(key)))]
        for key, words in (LINES | NOTES).items()
    ]
    yield _table("The certificate", heads, rows)


def _making(results: dict[str, Any]) -> Iterator[str]:
    data = results["data"]
    parts = ", ".join(f"{count:,} {name}" for name, count in data["parts"].items())
    classes = ", ".join(str(name) for name in results["classes"])
    facts = {
        "Data": f"{data['name']}: {data['rows']:,} rows, {data['features']:,} features",
        "Label": f"{data['label']}, with the classes {classes}",
        "Groups": _grouping(data, len(results["groups"])),
        "Split": f"rows for each part: {parts}",
        "Intervals": f"95 %, from {results['bootstrap']:,} bootstrap samples of the test rows of "
        "each group",
        "Seed": results["seed"],
        "Version": f"bilevax {results['version']}",
    }
    yield "<dl>"
    yield f"<dt>Command</dt><dd><code>{escape(cleaned(results['command']))}</code></dd>"
    if results.get("notes"):
        facts["Notes"] = "; ".join(str(note) for note in results["notes"])
    for name, fact in facts.items():
        yield element("dt", name) + element("dd", fact)
    yield "</dl>"


def _grouping(data: dict[str, Any], count: int) -> str:
    """What makes a group."""
    columns = [str(column) for column in data["group_columns"]]
    if data.get("with_label"):
        columns = [str(data["label"]), *columns]
    return f"{count}, by {' and '.join(columns)}" if columns else str(count)
