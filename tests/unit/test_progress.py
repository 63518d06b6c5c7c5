"""The progress of a run: a bar on a terminal, lines elsewhere where they are asked for."""

import sys
import time

import pytest

from bilevax.progress import Progress


def lines(capfd):
    return capfd.readouterr().err


def test_it_shows_counts_and_notes(capfd):
    with Progress(True, total=100, unit="gradients", label="run") as bar:
        bar.show(30, ε="0.01", worst_group="0.5")
        bar.show(100)
    shown = lines(capfd)
    assert "run" in shown
    assert "100/100" in shown
    assert "gradients" in shown
    assert "ε = 0.01, worst group = 0.5" in shown


def test_large_counts_are_shortened_and_a_run_goes_on_where_it_was(capfd):
    with Progress(True, total=1_000_000, unit="gradients", done=250_000) as bar:
        bar.show(500_000)
    shown = lines(capfd)
    assert "250k/1.00M" in shown
    assert "500k/1.00M" in shown


def test_a_note_without_a_count_is_shown_at_once(capfd):
    with Progress(True, total=10, unit="models") as bar:
        bar.show(model="erm")
        assert "model = erm" in lines(capfd)


@pytest.mark.parametrize(
    ("wanted", "terminal", "ci", "shown"),
    [
        (None, True, "", True),
        (None, True, "true", False),
        (None, False, "", False),
        (True, False, "true", True),
        (False, True, "", False),
    ],
)
def test_by_default_it_is_for_terminals_where_somebody_looks(
    capfd, monkeypatch, wanted, terminal, ci, shown
):
    monkeypatch.setenv("CI", ci)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal, raising=False)
    with Progress(wanted, total=10, unit="gradients") as bar:
        bar.show(5, ε="1")
    assert bool(lines(capfd)) == shown


def test_what_is_not_shown_does_not_import_tqdm(monkeypatch):
    monkeypatch.setitem(sys.modules, "tqdm", None)  # its import would fail
    with Progress(False, total=10, unit="gradients") as bar:
        bar.show(5)


def test_elsewhere_lines_are_written_also_while_nothing_is_reported(capfd, monkeypatch):
    monkeypatch.setitem(sys.modules, "tqdm", None)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False, raising=False)
    with Progress(None, total=10, unit="fits", label="t.csv", every=0.01) as bar:
        bar.show(4, now="tuned")
        time.sleep(0.1)
    shown = lines(capfd).splitlines()
    assert len(shown) > 1
    assert shown[-1].startswith("t.csv: 4 of 10 fits, now = tuned, ")
    time.sleep(0.03)
    assert lines(capfd) == ""
    with Progress(False, unit="fits", every=0.01):
        time.sleep(0.05)
    assert lines(capfd) == ""
