"""docs/paper.md: every item of the paper has a row, and every row names what there is."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
TEXT = (DOCS / "paper.md").read_text()

# The labels of the paper's source, which is not in the repository.
ALGORITHMS = """mmax-alg1 alg:first-order alg:sapd alg:first-order-stoch alg:first-order-new
    remark:initial_condition"""
DEFINITIONS = "def:epsilon_KKT def:epsilon_stationary def:cons_kkt def:epsilon_KKT_nearly"
THEOREMS = """thm:connection thm:minmax thm:con_lagrangian thm:e-kkt thm:constrained
    thm:minmax_stoch thm:lu_thm thm:sapd+_thm"""
ASSUMPTIONS = """assump:dom assume:constrained assump:stoc assump:h assump:barh assump:stoc_h
    assump:stoc_barh"""
EXPERIMENTS = """tab:clo fig:clbo tab:dro_results tab:dro_description tab:ablation
    tab:dro_train_results"""
PROBLEMS = """eq:bilevel eq:blo_cons eq:cons_minmax eq:minmax ea-prob eq:lagrange eq:P1 eq:P2 eq:P3
    eq:clo eq:DRO_tuning eq:DRO_meta_tuning eq:dro_lower eq:dro_nested"""
PARTS = (ALGORITHMS, DEFINITIONS, THEOREMS, ASSUMPTIONS, EXPERIMENTS, PROBLEMS)
LABELS = [label for part in PARTS for label in part.split()]
KINDS = ("alg:", "thm:", "def:", "assump:", "assume:", "tab:", "fig:", "remark:")


def tables():
    """Each table as its header and its rows, cell by cell."""
    found = []
    for block in re.findall(r"(?:^\|.*\n?)+", TEXT, re.MULTILINE):
        lines = [[cell.strip() for cell in row.split("|")[1:-1]] for row in block.splitlines()]
        found.append((lines[0], lines[2:]))
    return found


ROWS = [(header, row) for header, rows in tables() for row in rows]
LINK = re.compile(r"\[([^\]]+)\]\(([^)]+)\)")
MADE = re.compile(r"^(?:class|def) (\w+)", re.MULTILINE)


def missing(text, place):
    """What is wrong with a link: a file that is not there, or a test that is not in it."""
    if place.startswith("http"):
        return None
    name, _, anchor = place.partition("#")
    path = (DOCS / name).resolve() if name else DOCS / "paper.md"
    if not path.exists():
        return f"{place} does not exist"
    if "::" in text:
        file, _, test = text.strip("`").partition("::")
        if path.name != file or not re.search(rf"^def {test}\(", path.read_text(), re.MULTILINE):
            return f"{place} has no {test}"
    if anchor and path.suffix == ".md":
        headings = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
        made = {re.sub(r"[^\w\- ]", "", heading).lower().replace(" ", "-") for heading in headings}
        if anchor not in made:
            return f"{place} has no such section"
    return None


def test_tables_are_read():
    assert len(ROWS) > 60
    for header, row in ROWS:
        assert len(row) == len(header) == 4, row
        assert header[-1] == "shown by"


@pytest.mark.parametrize("label", LABELS)
def test_every_item_of_the_paper_has_a_row(label):
    items = [row[0] for header, row in ROWS if header[0] == "the paper's item"]
    assert any(f"`{label}`" in item for item in items)


def test_no_label_is_made_up():
    named = {name for name in re.findall(r"`([^`]+)`", TEXT) if name.startswith(KINDS)}
    assert named <= set(LABELS)


def test_every_row_is_shown_by_a_test_or_a_result():
    for header, row in ROWS:
        links = LINK.findall(row[-1])
        assert links, row
        for text, place in links:
            assert "::" in text or place.startswith("../benchmarks/results/"), (text, place)
        rest = LINK.sub("", row[-1]).strip(" ,")
        assert not rest, rest
        assert header[0] != "the paper's item" or row[1], row


def test_what_is_linked_is_there():
    wrong = [missing(*link) for link in LINK.findall(TEXT)]
    assert not [words for words in wrong if words]


def test_public_names_are_there():
    files = (ROOT / "src").rglob("*.py")
    known = {"data"} | {name for path in files for name in MADE.findall(path.read_text())}
    named = {name.rpartition(".")[2] for name in re.findall(r"`bx\.([\w.]+)", TEXT)}
    assert named <= known
