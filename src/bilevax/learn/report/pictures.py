"""The pictures of a report, as inline SVG whose text stays text."""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

import numpy as np

from bilevax.learn.report.words import as_float, fitted_text, power_of_ten, short_number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Okabe and Ito's colours, which the colour-blind tell apart; without yellow, pale on white.
TUNED, METHODS = "#D55E00", ("#000000", "#E69F00", "#56B4E9", "#CC79A7", "#009E73", "#0072B2")
DESCENTS = ("#0072B2", "#009E73", "#CC79A7", "#56B4E9")
MARKERS = "osD^vPX"
#: Inches. A phone shows the width in 330 pixels, where 9 points are 9 to 10 pixels.
WIDTH, HEIGHT, ROW = 4.2, 2.9, 0.115
STYLE = {
    "font.size": 9,
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


def pictures(results: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """The pictures and their captions, in our style whatever the user's is."""
    from matplotlib import style

    with style.context(["default", STYLE]), warnings.catch_warnings():
        # Letters that matplotlib's font lacks come from the reader's fonts: the text stays text.
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        yield _accuracies(results)
        yield _loss_against_eta(results)
        yield _convergence(results)


def _canvas(height: float) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    return figure, figure.add_subplot()


def _svg(figure: Figure, name: str, label: str, columns: int) -> str:
    """The picture, its legend above the axes. It scales, and its ids begin with its name."""
    spacing = {"columnspacing": 1.2, "handletextpad": 0.5}
    figure.legend(loc="outside upper left", ncols=columns, **spacing)
    file = io.StringIO()
    figure.savefig(file, format="svg", metadata={"Date": None})
    svg = ElementTree.fromstring(file.getvalue())
    local = lambda key: key.rpartition("}")[2]  # HTML has no namespaces
    for node in svg.iter():
        node.tag = local(node.tag)
        node[:] = [child for child in node if local(child.tag) not in ("metadata", "style")]
        node.attrib = {local(key): value for key, value in node.attrib.items()}
        for key, value in node.attrib.items():
            begin = {"id": "^", "href": "^#"}.get(key, r"url\(#")
            node.attrib[key] = re.sub(f"({begin})", rf"\1{name}-", value)
    svg.attrib = {"viewBox": svg.attrib["viewBox"], "role": "img", "aria-label": label}
    return ElementTree.tostring(svg, encoding="unicode")


def _accuracies(results: dict[str, Any]) -> tuple[str, str]:
    """A block of rows for each group, its name above them: no name takes room from the axis."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    groups, methods = results["groups"], results["methods"]
    names = [fitted_text(group["name"], 46, lines=2) for group in groups]
    head = 2.2 + 1.35 * max(name.count("\n") for name in names)
    block = head + len(methods) + 0.2
    figure, axes = _canvas(0.9 + 0.2 * math.ceil(len(methods) / 2) + ROW * block * len(groups))
    tops = block * np.arange(len(groups))
    for number, method in enumerate(methods):
        _intervals(axes, method, number, tops + head + number)
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
    label = (
        f"Accuracy of {len(methods)} methods in {len(groups)} groups with 95 % intervals. "
        "The table of groups has the numbers."
    )
    caption = "Accuracy of each method in each group; the lines are 95 % intervals."
    return _svg(figure, "groups", label, columns=2), caption


def _intervals(axes: Axes, method: dict[str, Any], number: int, rows: np.ndarray) -> None:
    """One method's accuracies, in percent: a mark on each row, and its interval as a line."""
    colour = TUNED if method["key"] == "tuned" else METHODS[number % len(METHODS)]
    value, low, high = (
        np.array([100 * as_float(group.get(key)) for group in method["groups"]])
        for key in ("value", "low", "high")
    )
    axes.hlines(rows, low, high, color=colour, linewidth=1.3)
    marker, name = MARKERS[number % len(MARKERS)], fitted_text(method["name"], 20)
    axes.plot(value, rows, marker, color=colour, markersize=4.2, label=name)


def _loss_against_eta(results: dict[str, Any]) -> tuple[str, str]:
    from matplotlib.ticker import FuncFormatter, NullFormatter

    curve = results["loss_against_eta"]
    eta, loss = _drawable(curve["eta"], above=0), _drawable(curve["worst_validation_loss"])
    figure, axes = _canvas(HEIGHT)
    axes.set(xscale="log", xlabel="η", ylabel="worst group’s validation loss")
    at_l2 = f"l2 = {short_number(curve.get('l2'))}"
    axes.plot(eta, loss, "o-", color=DESCENTS[0], markersize=3, linewidth=1.3, label=at_l2)
    found = (
        f"η = {short_number(curve.get('tuned_eta'))}, loss {short_number(curve.get('tuned_loss'))}"
    )
    tuned = _drawable([curve.get("tuned_eta")], above=0), _drawable([curve.get("tuned_loss")])
    axes.axvline(tuned[0][0], color=TUNED, linewidth=0.8, linestyle=":")
    axes.plot(*tuned, "*", color=TUNED, markersize=11, zorder=3, label=f"tuned: {found}")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: short_number(value)))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    caption = (
        "The worst group’s validation loss against η, at the tuned l2. The star is what the "
        f"tuning found: {found}."
    )
    return _svg(figure, "loss", caption, columns=1), caption


def _convergence(results: dict[str, Any]) -> tuple[str, str]:
    """ε of every step. A line ends where another descent goes on."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter

    history, tolerance = results["history"], float(results["tolerance"])
    least = LEAST_EPSILON * tolerance
    figure, axes = _canvas(HEIGHT)
    axes.set(yscale="log", xlabel="step", ylabel="ε")
    steps = np.arange(1, len(history) + 1)
    epsilon = _drawable([step.get("epsilon") for step in history])
    start = np.array([step.get("start", 0) for step in history])
    shown = np.maximum(epsilon, least)
    several = len(np.unique(start)) > 1
    for number, own in enumerate(np.unique(start)):
        colour, marker = DESCENTS[number % len(DESCENTS)], MARKERS[number % len(MARKERS)]
        here = np.where(start == own, shown, math.nan)
        name = f"descent {number + 1}" if several else "the tuning"
        axes.plot(steps, here, f"{marker}-", color=colour, markersize=3.5, label=name)
    final = _drawable([results["certificate"].get("epsilon")])
    at = {"color": TUNED, "markersize": 10, "zorder": 3}
    axes.plot([len(history) + 1], np.maximum(final, least), "*", label="certificate", **at)
    aim = f"tolerance {short_number(tolerance)}"
    axes.axhline(tolerance, color="#000000", linewidth=1, linestyle="--", label=aim)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda e, _: power_of_ten(round(math.log10(e)))))
    axes.yaxis.set_minor_formatter(NullFormatter())
    caption = (
        "How far each step of the tuning was from stationary, ε. The star is the ε of the "
        "certificate, which checks all conditions at the point that was kept."
    )
    if several:
        caption += " A descent waits while another one, begun elsewhere, looks for a better point."
    if np.any(np.append(epsilon, final) < least):
        caption += f" What is below {short_number(least)}, or 0, is drawn there."
    return _svg(figure, "convergence", caption, columns=2), caption


def _drawable(values: Iterable[Any], above: float = -math.inf) -> np.ndarray:
    """An array with NaN, which is not drawn, for what is not finite or not above a bound."""
    array = np.array([as_float(value) for value in values], dtype=float)
    return np.where(np.isfinite(array) & (array > above), array, math.nan)
