"""The page about robust classifiers: its numbers, its safety, and how a browser shows it."""

import copy
import html
import json
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest

from bilevax.learn.report import report

BROWSERS = ("chromium", "google-chrome", "chromium-browser")
BROWSER = next((path for path in map(shutil.which, BROWSERS) if path), None)
PHONE, DESKTOP = 360, 1280
ATTACK = "<script>alert(1)</script>"
METHODS = {"erm": "ERM", "dro": "DRO, default η", "grid": "DRO, grid", "tuned": "DRO, tuned"}


def accuracy(value, half=0.02):
    return {"value": value, "low": value - half, "high": min(1.0, value + half)}


def method(key, names, values):
    worst = int(np.argmin(values))
    return {
        "key": key,
        "name": METHODS[key],
        "seconds": 0.25,
        "eta": None if key == "erm" else 0.8125,
        "l2": 2.5e-5,
        "fits": 49 if key == "grid" else 1,
        "average": accuracy(float(np.mean(values)), 0.01),
        "worst": accuracy(values[worst]) | {"group": names[worst]},
        "groups": [accuracy(value) for value in values],
        "worst_validation_loss": 0.4375,
    }


def make(names):
    """Results of an experiment with these groups: the robuster the method, the more alike."""
    even, uneven = np.full(len(names), 0.8125), np.linspace(0.95, 0.5, len(names))
    shares = np.linspace(0, 0.9, len(METHODS))
    values = [((1 - share) * uneven + share * even).tolist() for share in shares]
    counts = {"train": 7104, "validation": 3552, "test": 3551}
    epsilon = [0.3, 0.02, 0.005, 0.4, 0.01, 3e-4]
    return {
        "command": "bilevax robust people.csv --label income --group sex",
        "version": "0.1.0",
        "data": {
            "name": "people.csv",
            "rows": 48842,
            "features": 90,
            "label": "income",
            "group_columns": ["sex"],
            "with_label": True,
            "parts": {"train": 24421, "validation": 12210, "test": 12211},
        },
        "classes": ["<=50K", ">50K"],
        "groups": [{"name": name} | counts for name in names],
        "methods": [method(key, names, own) for key, own in zip(METHODS, values)],
        "loss_against_eta": {
            "l2": 2.5e-5,
            "eta": np.geomspace(1e-3, 1e2, 11).tolist(),
            "worst_validation_loss": (0.4375 + 0.01 * np.linspace(-3, 2, 11) ** 2).tolist(),
            "tuned_eta": 0.8125,
            "tuned_loss": 0.4375,
        },
        "history": [
            {"eta": 1.0, "l2": 0.01, "worst_loss": 0.5, "epsilon": e, "seconds": 0.1, "start": s}
            for e, s in zip(epsilon, [0, 0, 0, 1, 1, 0])
        ],
        "certificate": {
            "epsilon": 2.5e-4,
            "stationarity": 2.5e-4,
            "response_x2": 3.5e-6,
            "response_z1": 4.5e-7,
            "response_z2": 0.0,
            "gap": 5.5e-9,
            "gap_below": -6.5e-10,
            "rho": 1e5,
            "objective": 0.4375,
        },
        "tolerance": 1e-3,
        "certified": True,
        "bootstrap": 1000,
        "seed": 7,
        "notes": ["3 rows without a label are left out"],
    }


FOUR = tuple(f"income {c}, sex {s}" for c in ("<=50K", ">50K") for s in ("Female", "Male"))
FORTY = (
    ATTACK,
    '"quoted" & <b>bold</b>, $x_1$ and a tab\tand a line\nbreak',
    "住宅地域の住民で所得が高く教育水準も高い人々" * 3,
    "x" * 200,
    *(f"income >50K, education Some-college & similar, country no {i}" for i in range(36)),
)


@pytest.fixture
def results():
    return make(FOUR)


@pytest.fixture(scope="module")
def page():
    return report(make(FOUR))


def text_of(page):
    return html.unescape(re.sub(r"<[^>]*>", " ", page)).replace("\u00a0", " ")


def test_the_numbers_and_names_are_in_the_page(results, page):
    text = text_of(page)
    for one in results["methods"]:
        for seen in (one["average"], one["worst"], *one["groups"]):
            assert f"{100 * seen['value']:.1f} %" in text
            assert f"{100 * seen['low']:.1f} to {100 * seen['high']:.1f}" in text
    expected = [*METHODS.values(), *FOUR, results["command"], "48,842", "90", "7,104", "3,551"]
    expected += [
        "24,421 train",
        "12,210 validation",
        "12,211 test",
        "1,000 bootstrap",
        results["notes"][0],
    ]
    expected += ["2.5 × 10⁻⁵", "0.812", "49", "0.25", "2.5 × 10⁻⁴", "5.5 × 10⁻⁹", "-6.5 × 10⁻¹⁰"]
    for words in expected:
        assert words in text


def test_the_finding_compares_the_tuned_method_with_plain_training(page):
    # ERM: 50.0 % worst, 72.5 % on average. Tuned: 0.1·50 + 0.9·81.25 = 78.125, 0.1·72.5 + …
    finding = text_of(page)
    assert (
        "“DRO, tuned” has a worst-group accuracy of 78.1 %, 28.1 points above the 50.0 % "
        in finding
    )
    assert "its average accuracy is 80.4 %, 7.9 points above the 72.5 % of “ERM”" in finding
    assert "accuracies do not overlap" in finding


def test_the_finding_does_not_flatter(results):
    plain, *_, tuned = results["methods"]
    tuned["worst"] = accuracy(0.49) | {"group": FOUR[3]}
    tuned["average"] = copy.deepcopy(plain["average"])
    finding = text_of(report(results))
    assert "accuracy of 49.0 %, 1.0 points below the 50.0 % of “ERM”" in finding
    assert "its average accuracy is 72.5 %, the same as that of “ERM”" in finding
    assert "accuracies overlap" in finding


def test_what_is_not_certified_is_called_so(results, page):
    assert "Certified: ε = 2.5 × 10⁻⁴" in text_of(page)
    results |= {"certified": False}
    results["certificate"] |= {"epsilon": float("inf"), "stationarity": float("inf")}
    text = text_of(report(results))
    assert "Not certified: ε = ∞" in text
    assert " Certified" not in text


def test_names_are_escaped():
    results = make(FORTY)
    results["data"] |= {"name": ATTACK, "label": ATTACK, "group_columns": [ATTACK]}
    results |= {"command": ATTACK, "classes": [ATTACK, ATTACK], "version": ATTACK}
    for one in results["methods"]:
        one["name"] = ATTACK + one["name"]
    page = report(results)
    assert "<script" not in page
    assert "<b>" not in page
    assert html.escape(ATTACK) in page


def test_the_page_loads_nothing(page):
    assert "http" not in page.replace("http-equiv", "")
    assert not re.search(r"\bsrc\s*=|@import|<link|<script|<iframe|<img", page)
    assert set(re.findall(r'href="(.)', page)) <= {"#"}
    assert set(re.findall(r"url\((.)", page)) <= {"#"}


def test_ids_are_unique_and_all_references_meet_one():
    page = report(make(FORTY))
    ids = re.findall(r'\bid="([^"]*)"', page)
    assert len(ids) == len(set(ids))
    asked = re.findall(r'href="#([^"]*)"', page) + re.findall(r"url\(#([^)]*)\)", page)
    assert asked
    assert set(asked) <= set(ids)


def test_the_same_results_make_the_same_page(results, page):
    import matplotlib

    with matplotlib.rc_context({"font.size": 20, "text.color": "white", "axes.facecolor": "red"}):
        assert report(results) == page
        assert matplotlib.rcParams["font.size"] == 20


def test_drawing_leaves_pyplot_alone():
    code = (
        "import json, sys; from bilevax.learn.report import report; "
        "report(json.load(sys.stdin)); assert 'matplotlib.pyplot' not in sys.modules"
    )
    given = json.dumps(make(FOUR))
    subprocess.run([sys.executable, "-W", "error", "-c", code], input=given, text=True, check=True)


@pytest.mark.parametrize("nothing", [None, float("nan")])
def test_missing_numbers_are_dashes(results, nothing):
    for one in results["methods"]:
        one["groups"][0] = {"value": nothing, "low": nothing, "high": nothing}
        one["groups"][1] = {"value": 0.75}
        one["worst"] = {"value": 0.5, "group": FOUR[3]}
        one["average"] = {"value": 0.7, "low": nothing, "high": nothing}
        one |= {"eta": nothing, "seconds": nothing, "worst_validation_loss": nothing}
    page = report(results)
    assert page.count("<svg") == 3
    assert '<td class="number">–</td>' in page
    assert "overlap" not in text_of(page)
    assert not re.search(r"\b(nan|None)\b", text_of(page))


@pytest.mark.parametrize("epsilon", [1e-300, None, float("inf")])
def test_odd_epsilons_are_drawn_or_left_out(results, epsilon):
    results["certificate"]["epsilon"] = epsilon
    for step in results["history"][1:]:
        step["epsilon"] = epsilon
    page = report(results)
    drawn_at_the_floor = epsilon is not None and epsilon < 1e-9
    assert ("is drawn there" in page) == drawn_at_the_floor


def test_nothing_to_draw_is_no_error(results):
    results |= {"history": [], "tolerance": 1e-3}
    results["loss_against_eta"] = {"l2": None, "eta": [], "worst_validation_loss": []}
    for one in results["methods"]:
        one["groups"] = [{"value": None} for _ in FOUR]
    assert report(results).count("<svg") == 3


def test_zero_accuracies_and_zero_eta(results):
    for one in results["methods"]:
        one["groups"] = [accuracy(0.0, 0.0) for _ in FOUR]
        one["worst"] = accuracy(0.0, 0.0) | {"group": FOUR[0]}
    results["loss_against_eta"] |= {"tuned_eta": 0.0, "tuned_loss": 0.0}
    assert "accuracy of 0.0 %, the same as that of “ERM”" in text_of(report(results))


# The page is measured from outside, in frames as wide as a phone's and a desktop's window: a window
# of a headless browser cannot be as narrow as a phone's. Nothing is put into the page.
MEASURE = """
const box = r => [r.left, r.top, r.right, r.bottom];
const size = t => { const m = t.getScreenCTM();
  return parseFloat(getComputedStyle(t).fontSize) * Math.hypot(m.a, m.b); };
const measure = frame => {
  const page = frame.contentDocument, all = (q, of = page) => [...of.querySelectorAll(q)];
  return { innerWidth: frame.contentWindow.innerWidth, text: page.body.innerText,
    scrollWidth: page.documentElement.scrollWidth,
    scripts: page.scripts.length, images: page.images.length,
    pictures: all("figure svg").map(svg => ({ box: box(svg.getBoundingClientRect()),
      label: svg.getAttribute("aria-label"), role: svg.getAttribute("role"),
      texts: all("text", svg).map(t => ({ text: t.textContent, size: size(t),
        box: box(t.getBoundingClientRect()) })) })) }; };
window.onload = () => {
  const found = [...document.querySelectorAll("iframe")].map(measure);
  document.getElementById("findings").textContent = JSON.stringify(found); };
"""


def browse(folder, page):
    """What a real browser makes of the page: measurements for each width, and its complaints."""
    (folder / "report.html").write_text(page, encoding="utf-8")
    frames = "".join(
        f'<iframe src="report.html" width="{width}" height="900" style="border:0"></iframe>'
        for width in (PHONE, DESKTOP)
    )
    wrapper = folder / "wrapper.html"
    script = f'<pre id="findings"></pre><script>{MEASURE}</script>'
    wrapper.write_text(f'<!DOCTYPE html><meta charset="utf-8">{frames}{script}', encoding="utf-8")
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    options += ["--allow-file-access-from-files", "--enable-logging=stderr", "--v=0"]
    options += [f"--user-data-dir={folder / 'profile'}", "--no-first-run", "--dump-dom"]
    command = [str(BROWSER), *options, wrapper.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    found = re.search(r'<pre id="findings">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found, done.stderr
    complaints = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return json.loads(html.unescape(found[1])), complaints


def overlap(one, other):
    """Whether two boxes share more than a pixel each way."""
    across = min(one[2], other[2]) - max(one[0], other[0])
    down = min(one[3], other[3]) - max(one[1], other[1])
    return across > 1 and down > 1


@pytest.mark.skipif(BROWSER is None, reason=f"none of {', '.join(BROWSERS)} is installed")
@pytest.mark.parametrize("names", [FOUR, FORTY], ids=["4 groups", "40 groups"])
def test_a_browser_shows_it_on_a_phone_and_a_desktop(names, tmp_path):
    found, complaints = browse(tmp_path, report(make(names)))
    assert complaints == []
    assert [seen["innerWidth"] for seen in found] == [PHONE, DESKTOP]
    for seen in found:
        assert seen["scrollWidth"] <= seen["innerWidth"]
        assert seen["scripts"] == seen["images"] == 0
        text = seen["text"].replace("\u00a0", " ")
        for words in ("78.1 %", "50.0 %", "48.0 to 52.0", "12,211 test", "2.5 × 10⁻⁴", names[0]):
            assert words in text
        assert len(seen["pictures"]) == 3
        for picture in seen["pictures"]:
            check_picture(picture, seen["innerWidth"])


def check_picture(picture, width):
    """It has a size and a description; its texts are large enough, whole, and side by side."""
    left, top, right, bottom = picture["box"]
    assert 0 <= left < right <= width
    assert bottom - top > 100
    assert picture["role"] == "img"
    assert picture["label"]
    texts = [text for text in picture["texts"] if text["text"].strip()]
    assert len(texts) > 5
    assert min(text["size"] for text in texts) >= 8.5
    for place, text in enumerate(texts):
        box = text["box"]
        inside = left <= box[0] and box[2] <= right and top <= box[1] and box[3] <= bottom
        assert inside, f"cut off: {text['text']!r}"
        for other in texts[:place]:
            assert not overlap(box, other["box"]), (text["text"], other["text"])
