"""The page about a comparison of robust classifiers: one HTML file that needs nothing else.

Tables and sentences are HTML, the pictures are inline SVG whose text stays text. All of it is read
from the dictionary that `results.json` holds. A policy in the page forbids it to load anything, and
it has no scripts. The same results make the same page, byte for byte.
"""

from __future__ import annotations

import io
import math
import textwrap
import unicodedata
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from html import escape
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: What stands where there is no number.
NONE = "–"
#: Okabe and Ito's colours, which the colour-blind tell apart; without yellow, pale on white.
TUNED, METHODS = "#D55E00", ("#000000", "#E69F00", "#56B4E9", "#CC79A7", "#009E73", "#0072B2")
DESCENTS = ("#0072B2", "#009E73", "#CC79A7", "#56B4E9")
MARKERS = "osD^vPX"
#: Inches. A phone shows the width in 330 pixels, where 9 points are 9 to 10 pixels.
WIDTH, HEIGHT, ROW = 4.2, 2.9, 0.115
STYLE = {
    "font.size": 9,
    "legend.fontsize": 9,
    "axes.labelsize": 9,
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.3,
    "grid.linewidth": 0.5,
    "legend.frameon": False,
    "text.parse_math": False,  # a dollar in a name is a dollar
    "svg.fonttype": "none",
    "svg.hashsalt": "bilevax",
}
#: The least ε that is drawn, relative to the tolerance: far below it lies only rounding.
LEAST_EPSILON = 1e-6

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
    title = f"Robust classifiers on {_clean(results['data']['name'])}"
    body = [
        _element("h1", title),
        _element("p", _finding(results), "finding"),
        _section("Methods", _methods(results)),
        _section("Groups", _groups(results)),
        _section("Pictures", _pictures(results)),
        _section("Certificate", _certificate(results)),
        _section("How the numbers were made", _making(results)),
    ]
    head = [
        '<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; style-src 'unsafe-inline'\">",
        _element("title", title),
        f"<style>{CSS}</style>",
    ]
    page = ["<!DOCTYPE html>", '<html lang="en-GB">', "<head>", *head, "</head>"]
    return "\n".join([*page, "<body>", "<main>", *body, "</main>", "</body>", "</html>", ""])


def _float(value: Any) -> float:
    """A number, or NaN where there is none."""
    return math.nan if value is None else float(value)


def _percent(value: Any, unit: str = "\u00a0%") -> str:
    number = _float(value)
    return f"{100 * number:.1f}{unit}" if math.isfinite(number) else NONE


def _short(value: Any) -> str:
    """Three digits, with a power of ten where there would be many zeros."""
    number = _float(value)
    if not math.isfinite(number):
        return "∞" if number == math.inf else NONE
    if number == 0 or 1e-3 <= abs(number) < 999.5:
        return f"{number:.3g}"
    if 999.5 <= abs(number) < 1e5:
        return f"{number:,.0f}"
    digits, power = f"{number:.1e}".split("e")
    return f"{digits} × {_power(int(power))}"


def _power(exponent: int) -> str:
    return "10" + str(exponent).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


def _loss(value: Any) -> str:
    number = _float(value)
    return f"{number:.3f}" if math.isfinite(number) else NONE


def _seconds(value: Any) -> str:
    number = _float(value)
    if not math.isfinite(number):
        return NONE
    return f"{number:,.0f}" if number >= 100 else f"{number:.{2 if number >= 0.1 else 3}f}"


def _clean(text: Any) -> str:
    """Without control characters and the like, which neither HTML nor XML may hold."""
    bad = ("Cc", "Cs", "Cn")
    return "".join(" " if unicodedata.category(c) in bad else c for c in str(text))


def _fitted(text: Any, width: int, lines: int = 1) -> str:
    """In lines of so many letters, cut in the middle if need be; a wide letter counts twice."""
    text = " ".join(_clean(text).split())
    wide = sum(unicodedata.east_asian_width(letter) in "WF" for letter in text)
    width = width * len(text) // (len(text) + wide) if wide else width
    # A line of several may end early, at a space: room for that.
    room = lines * width - (lines - 1) * width // 4
    if len(text) > room:
        text = f"{text[: room // 2].rstrip()}…{text[-(room // 2 - 1) :].lstrip()}"
    return "\n".join(textwrap.wrap(text, width, max_lines=lines, placeholder="…"))


def _pick(methods: Sequence[dict[str, Any]], key: str, otherwise: int) -> dict[str, Any]:
    """The method with this key; if none has it, the one at a place."""
    found = [method for method in methods if str(method.get("key", "")).lower() == key]
    return found[0] if found else methods[otherwise]


def _plain(results: dict[str, Any]) -> dict[str, Any]:
    return _pick(results["methods"], "erm", 0)


def _tuned(results: dict[str, Any]) -> dict[str, Any]:
    return _pick(results["methods"], "tuned", -1)


def _finding(results: dict[str, Any]) -> str:
    """What came out: the tuned classifier against plain training."""
    plain, tuned = _plain(results), _tuned(results)
    worst, average = (
        _percent(tuned[key]["value"]) + _against(tuned[key], plain[key], plain["name"])
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
    shown = _percent(other["value"])
    points = round(100 * _float(own["value"]), 1) - round(100 * _float(other["value"]), 1)
    if not math.isfinite(points):
        return f" (that of “{name}” is {shown})"
    if abs(points) < 0.05:
        return f", the same as that of “{name}”"
    side = "above" if points > 0 else "below"
    return f", {abs(points):.1f} points {side} the {shown} of “{name}”"


def _overlap(own: dict[str, Any], other: dict[str, Any]) -> str:
    """Whether the intervals of the two overlap; nothing where there is only one, or none."""
    ends = [_float(of.get(end)) for of in (own, other) for end in ("low", "high")]
    if own is other or not np.isfinite(ends).all():
        return ""
    apart = max(ends[0], ends[2]) > min(ends[1], ends[3])
    how = "do not overlap" if apart else "overlap"
    return f" The 95 % intervals of the two worst-group accuracies {how}."


def _element(tag: str, text: Any, kind: str = "", scope: str = "") -> str:
    """An element that holds text: whatever it is, it is escaped."""
    attributes = {"class": kind, "scope": scope}
    shown = "".join(f' {name}="{value}"' for name, value in attributes.items() if value)
    return f"<{tag}{shown}>{escape(_clean(text))}</{tag}>"


def _section(title: str, content: Iterable[str]) -> str:
    return "\n".join(["<section>", _element("h2", title), *content, "</section>"])


def _number(text: str) -> str:
    return _element("td", text, "number")


def _accuracy(accuracy: dict[str, Any], worst: bool = False) -> str:
    """A cell: the accuracy, its interval below."""
    interval = ""
    if math.isfinite(_float(accuracy.get("low"))) and math.isfinite(_float(accuracy.get("high"))):
        low, high = (_percent(accuracy[end], "") for end in ("low", "high"))
        interval = _element("small", f"{low} to {high}")
    kind = "number worst" if worst else "number"
    return f'<td class="{kind}">{_percent(accuracy.get("value"))}{interval}</td>'


def _table(label: str, heads: Iterable[tuple[str, str]], rows: Iterable[Sequence[str]]) -> str:
    """A table that scrolls in a box of its own; `heads` are the columns' titles and classes."""
    cells = [_element("th", text, kind, "col") for text, kind in heads]
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
        _element("th", method["name"], scope="row"),
        _accuracy(method["worst"]),
        _accuracy(method["average"]),
        _element("td", method["worst"].get("group", NONE), "name"),
        _number(_loss(method.get("worst_validation_loss"))),
        _number(_short(method.get("eta"))),
        _number(_short(method.get("l2"))),
        _number(NONE if fits is None else f"{fits:,}"),
        _number(_seconds(method.get("seconds"))),
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
            _element("th", group["name"], scope="row"),
            *(
                _accuracy(method["groups"][place], method["worst"].get("group") == group["name"])
                for method in methods
            ),
            *(_number(f"{group[part]:,}") for part in parts),
        ]
        for place, group in enumerate(results["groups"])
    ]
    yield _table("Accuracy in each group", heads, rows)


def _pictures(results: dict[str, Any]) -> Iterator[str]:
    yield '<div class="pictures">'
    with _drawing():
        yield _accuracies(results)
        yield _loss_against_eta(results)
        yield _convergence(results)
    yield "</div>"


@contextmanager
def _drawing() -> Iterator[None]:
    """Our style, whatever the user's is, for as long as it takes."""
    from matplotlib import style

    with style.context(["default", STYLE]), warnings.catch_warnings():
        # Letters that matplotlib's font lacks come from the reader's fonts: the text stays text.
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        yield


def _legend(figure: Figure, columns: int) -> None:
    """Above the axes, where it hides nothing."""
    figure.legend(loc="outside upper left", ncols=columns, columnspacing=1.2, handletextpad=0.5)


def _canvas(height: float) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    return figure, figure.add_subplot()


def _figure(figure: Figure, name: str, label: str, caption: str) -> str:
    """The picture as an element of the page. It scales, and its ids begin with its name."""
    file = io.StringIO()
    figure.savefig(file, format="svg", metadata={"Date": None})
    svg = ElementTree.fromstring(file.getvalue())
    for parent in list(svg.iter()):
        for child in list(parent):
            if _local(child.tag) in ("metadata", "style"):
                parent.remove(child)
    for element in svg.iter():
        _rename(element, name)
    svg.attrib = {"viewBox": svg.attrib["viewBox"], "role": "img", "aria-label": label}
    drawn = ElementTree.tostring(svg, encoding="unicode")
    return f"<figure>\n{drawn}\n{_element('figcaption', caption)}\n</figure>"


def _rename(element: ElementTree.Element, name: str) -> None:
    """Names without XML's namespaces, as HTML has them; ids that no other picture has."""
    element.tag = _local(element.tag)
    for key, value in list(element.attrib.items()):
        del element.attrib[key]
        if key == "id":
            value = f"{name}-{value}"
        elif _local(key) == "href":
            value = value.replace("#", f"#{name}-", 1)
        element.attrib[_local(key)] = value.replace("url(#", f"url(#{name}-")


def _local(name: str) -> str:
    return name.rpartition("}")[2]


def _accuracies(results: dict[str, Any]) -> str:
    """A block of rows for each group, its name above them: no name takes room from the axis."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    groups, methods = results["groups"], results["methods"]
    names = [_fitted(group["name"], 46, lines=2) for group in groups]
    head = 2.2 + 1.35 * max(name.count("\n") for name in names)
    block = head + len(methods) + 0.2
    figure, axes = _canvas(0.9 + 0.2 * math.ceil(len(methods) / 2) + ROW * block * len(groups))
    tops = block * np.arange(len(groups))
    for number, method in enumerate(methods):
        _intervals(axes, method, tops + head + number, number, method is _tuned(results))
    for number, (top, name) in enumerate(zip(tops, names)):
        if number % 2 == 0:
            axes.axhspan(top, top + block, color="#F3F5F7", zorder=0)
        axes.text(0.01, top + 0.4, name, transform=axes.get_yaxis_transform(), va="top")
    axes.set(ylim=(block * len(groups), 0), yticks=[], xlabel="accuracy on the test rows")
    axes.spines["left"].set_visible(False)
    axes.margins(x=0.04)
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g} %"))
    if len(groups) > 8:
        axes.tick_params(top=True, labeltop=True)
    _legend(figure, 2)
    label = (
        f"Accuracy of {len(methods)} methods in {len(groups)} groups with 95 % intervals. "
        "The table of groups has the numbers."
    )
    caption = "Accuracy of each method in each group; the lines are 95 % intervals."
    return _figure(figure, "groups", label, caption)


def _intervals(
    axes: Axes, method: dict[str, Any], rows: np.ndarray, number: int, tuned: bool
) -> None:
    """One method's accuracies, in percent: a mark on each row, and its interval as a line."""
    colour = TUNED if tuned else METHODS[number % len(METHODS)]
    value, low, high = (
        np.array([100 * _float(group.get(key)) for group in method["groups"]])
        for key in ("value", "low", "high")
    )
    axes.hlines(rows, low, high, color=colour, linewidth=1.3)
    marker, name = MARKERS[number % len(MARKERS)], _fitted(method["name"], 20)
    axes.plot(value, rows, marker, color=colour, markersize=4.2, label=name)


def _loss_against_eta(results: dict[str, Any]) -> str:
    from matplotlib.ticker import FuncFormatter, NullFormatter

    curve = results["loss_against_eta"]
    eta, loss = _positive(curve["eta"]), _finite(curve["worst_validation_loss"])
    figure, axes = _canvas(HEIGHT)
    axes.set(xscale="log", xlabel="η", ylabel="worst group’s validation loss")
    at_l2 = f"l2 = {_short(curve.get('l2'))}"
    axes.plot(eta, loss, "o-", color=DESCENTS[0], markersize=3, linewidth=1.3, label=at_l2)
    found = f"η = {_short(curve.get('tuned_eta'))}, loss {_short(curve.get('tuned_loss'))}"
    tuned = _positive([curve.get("tuned_eta")]), _finite([curve.get("tuned_loss")])
    axes.axvline(tuned[0][0], color=TUNED, linewidth=0.8, linestyle=":")
    axes.plot(*tuned, "*", color=TUNED, markersize=11, zorder=3, label=f"tuned: {found}")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _short(value)))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    _legend(figure, 1)
    caption = (
        "The worst group’s validation loss against η, at the tuned l2. The star is what the "
        f"tuning found: {found}."
    )
    return _figure(figure, "loss", caption, caption)


def _convergence(results: dict[str, Any]) -> str:
    """ε of every step. A line ends where another descent goes on."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter

    history, tolerance = results["history"], float(results["tolerance"])
    least = LEAST_EPSILON * tolerance
    figure, axes = _canvas(HEIGHT)
    axes.set(yscale="log", xlabel="step", ylabel="ε")
    steps = np.arange(1, len(history) + 1)
    epsilon = _finite([step.get("epsilon") for step in history])
    start = np.array([step.get("start", 0) for step in history])
    shown = np.maximum(epsilon, least)
    several = len(np.unique(start)) > 1
    for number, own in enumerate(np.unique(start)):
        colour, marker = DESCENTS[number % len(DESCENTS)], MARKERS[number % len(MARKERS)]
        here = np.where(start == own, shown, math.nan)
        name = f"descent {number + 1}" if several else "the tuning"
        axes.plot(steps, here, f"{marker}-", color=colour, markersize=3.5, label=name)
    final = _finite([results["certificate"].get("epsilon")])
    at = {"color": TUNED, "markersize": 10, "zorder": 3}
    axes.plot([len(history) + 1], np.maximum(final, least), "*", label="certificate", **at)
    aim = f"tolerance {_short(tolerance)}"
    axes.axhline(tolerance, color="#000000", linewidth=1, linestyle="--", label=aim)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda e, _: _power(round(math.log10(e)))))
    axes.yaxis.set_minor_formatter(NullFormatter())
    _legend(figure, 2)
    caption = (
        "How far each step of the tuning was from stationary, ε. The star is the ε of the "
        "certificate, which checks all conditions at the point that was kept."
    )
    if several:
        caption += " A descent waits while another one, begun elsewhere, looks for a better point."
    if np.any(np.append(epsilon, final) < least):
        caption += f" What is below {_short(least)}, or 0, is drawn there."
    return _figure(figure, "convergence", caption, caption)


def _finite(values: Iterable[Any]) -> np.ndarray:
    """An array with NaN, which is not drawn, for what is not finite."""
    array = np.array([_float(value) for value in values], dtype=float)
    return np.where(np.isfinite(array), array, math.nan)


def _positive(values: Iterable[Any]) -> np.ndarray:
    array = _finite(values)
    return np.where(array > 0, array, math.nan)


def _certificate(results: dict[str, Any]) -> Iterator[str]:
    certificate, tolerance = results["certificate"], _short(results["tolerance"])
    verdict, how = (
        ("Certified", "within") if results["certified"] else ("Not certified", "not within")
    )
    epsilon = _short(certificate.get("epsilon"))
    yield _element(
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
        [_element("td", words), _number(_short(certificate.get(key)))]
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
    yield f"<dt>Command</dt><dd><code>{escape(_clean(results['command']))}</code></dd>"
    if results.get("notes"):
        facts["Notes"] = "; ".join(str(note) for note in results["notes"])
    for name, fact in facts.items():
        yield _element("dt", name) + _element("dd", fact)
    yield "</dl>"


def _grouping(data: dict[str, Any], count: int) -> str:
    """What makes a group."""
    columns = [str(column) for column in data["group_columns"]]
    if data.get("with_label"):
        columns = [str(data["label"]), *columns]
    return f"{count}, by {' and '.join(columns)}" if columns else str(count)
