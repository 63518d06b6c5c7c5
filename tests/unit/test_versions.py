"""The benchmarks that compare two versions: what they make of results that are made up."""

import json
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def module(monkeypatch):
    """A benchmark by its name."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    return lambda name: pytest.importorskip(name)


def solve(key, gradients, status="certified", answer=(0.0,)):
    return {"key": key, "gradients": gradients, "status": status, "answer": [*answer]}


def test_the_same_path_passes(module):
    same_path = module("same_path")
    rows = [solve("linear a", 100), solve("suite b", 7, "budget spent"), solve("library c", 300)]
    found = same_path.compared(rows, rows)
    assert same_path.passes(found)
    assert found["certified_by_both"] == 2
    assert found["ratios"]["all"]["median"] == found["ratios"]["all"]["worst"] == 1
    assert found["ratios"]["suite"] is None
    assert found["answers"]["worst"] == 0
    assert not found["lost"]
    assert not found["statuses"]


def test_a_lost_certificate_fails(module):
    same_path = module("same_path")
    before = [solve("linear a", 100), solve("linear b", 100), solve("linear c", 9, "stalled")]
    after = [solve("linear a", 100), solve("linear b", 100, "stalled"), solve("linear c", 9)]
    found = same_path.compared(after, before)
    assert found["lost"] == ["linear b"]
    assert found["gained"] == ["linear c"]
    assert found["statuses"]["linear b"] == ["stalled", "certified"]
    assert not same_path.passes(found)


@pytest.mark.parametrize(("gradients", "passes"), [(104, True), (106, False), (94, False)])
def test_the_median_ratio_of_gradients_decides(module, gradients, passes):
    same_path = module("same_path")
    before = [solve(f"linear {i}", 100) for i in range(3)]
    after = [solve("linear 0", 500), solve("linear 1", gradients), solve("linear 2", gradients)]
    found = same_path.compared(after, before)
    assert found["ratios"]["all"]["median"] == gradients / 100
    assert bool(same_path.passes(found)) is passes


def test_answers_are_compared_by_their_size(module):
    same_path = module("same_path")
    before = [solve("suite a", 1, answer=[100.0, 0.0]), solve("suite b", 1, answer=[0.1])]
    after = [solve("suite a", 1, answer=[101.0, 0.0]), solve("suite b", 1, answer=[0.3])]
    found = same_path.compared(after, before)["answers"]
    assert found["worst"] == pytest.approx(0.2)
    assert found["at"] == "suite b"


def test_nothing_in_common_does_not_pass(module):
    same_path = module("same_path")
    found = same_path.compared([solve("linear a", 1)], [solve("linear b", 1)])
    assert found["of_one_version_only"] == 2
    assert not same_path.passes(found)


def test_every_start_of_a_published_problem_has_a_row(module, tmp_path, monkeypatch):
    same_path = module("same_path")
    attempt = {"status": "certified", "epsilon": 1e-5, "gradients": 9, "F": 2.0, "x": [1], "y": [3]}

    def command(words):
        outcome = {"attempts": [attempt], "refused": ""}
        Path(words[words.index("--json") + 1]).write_text(json.dumps({"outcomes": [outcome]}))

    monkeypatch.setattr("bilevax.cli.main", command)
    record = {"lower_level_convex": True, "best_known": {}}
    curved = {"name": "curved", "lower_level_convex": False, "best_known": {}}
    file = tmp_path / "suite.json"
    file.write_text(json.dumps([record | {"name": "sound"}, curved, record | {"name": "other"}]))
    selection = same_path.Selection([], [], 1, 2, ["sound", "curved"], str(file))
    rows = dict(same_path.suite(selection))
    assert rows["sound start=0"]["answer"] == [1, 3]
    assert rows["sound start=0"]["objective"] == 2
    assert rows["sound start=1"]["status"] == "refused"
    assert len(rows) == 2


def test_a_missed_goal_of_the_first_answer_is_named(module, capsys):
    first_answer = module("first_answer")
    good = {"cpu_seconds": 1.0, "wall_seconds": 9.0, "programs": 10, "traces": 6}
    bad = good | {"programs": 11}
    runs = [{**good, "status": "certified", "epsilon": 0.1}]
    row = {"version": "this", "case": "readme", "cache": "cold", "runs": runs}
    other = row | {"version": "other"} | first_answer.summary([bad])
    assert first_answer.missed([row | first_answer.summary(runs), other]) == []
    assert len(first_answer.missed([row | first_answer.summary([bad])])) == 1
    assert "MISSED   readme, cold: programs 11, goal at most 10" in capsys.readouterr().out
    failed = row | {"runs": [runs[0] | {"status": "stalled"}]} | first_answer.summary(runs)
    assert first_answer.missed([failed]) == ["readme, cold: not certified"]


def test_the_table_of_the_first_answer_shows_both_versions(module):
    first_answer = module("first_answer")
    runs = [
        {"cpu_seconds": s, "programs": 8, "traces": 2, "status": "certified", "epsilon": 0.1}
        for s in (1.0, 2.0, 4.0)
    ]
    row = {"case": "readme", "cache": "cold", "runs": runs} | first_answer.summary(runs)
    slow = row | {"cpu_seconds": 8.0}
    text = first_answer.table([row | {"version": "this"}, slow | {"version": "other"}])
    line = next(line for line in text.splitlines() if "cpu_seconds" in line)
    assert line.split()[3:] == ["2.00", "1.00", "8.00", "1.00", "0.25"]
    assert "certified, 1.0e-01" in text


def test_the_readme_case_is_its_block_of_code(module):
    code = module("first_answer").readme()
    assert "bx.solve(" in code
    assert "```" not in code


def test_another_version_is_an_interpreter_or_a_checkout(module, tmp_path, monkeypatch):
    versions = module("versions")
    monkeypatch.setenv("PYTHONPATH", "here")
    monkeypatch.setenv("BILEVAX_CACHE", "there")
    assert versions.this().environment["PYTHONPATH"] == "here"
    assert "BILEVAX_CACHE" not in versions.this().environment
    by_interpreter = versions.other(sys.executable)
    assert "PYTHONPATH" not in by_interpreter.environment
    (tmp_path / "src").mkdir()
    by_checkout = versions.other(str(tmp_path))
    assert by_checkout.environment["PYTHONPATH"] == str(tmp_path / "src")
    for nothing in (tmp_path / "src", tmp_path / "python"):
        with pytest.raises(FileNotFoundError):
            versions.other(str(nothing))


def test_a_version_answers_in_lines_of_json(module, tmp_path):
    versions = module("versions")
    script = tmp_path / "script.py"
    script.write_text("import os, sys, json\nprint(json.dumps([sys.argv[1], os.environ['OWN']]))")
    assert versions.this().run(str(script), "word", OWN="value") == [["word", "value"]]
    script.write_text("import sys\nsys.exit(3)")
    with pytest.raises(RuntimeError, match="ended with 3"):
        versions.this().run(str(script))
