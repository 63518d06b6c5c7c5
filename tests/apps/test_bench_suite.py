"""The published suite behind `bilevax bench suite`: stated, solved, judged, printed, saved."""

import json
import types
from pathlib import Path

import numpy as np
import pytest

from bilevax.bench import runs, suite
from bilevax.bench.records import load
from bilevax.cli import main
from bilevax.driver.solution import Status

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data" / "basblib.json"

# y = min(x, ½) below; above (x − 1)² + (y − 1)² is least at x = 1, y = ½: F = ¼.
CLIPPED = {
    "name": "clipped",
    "category": "made up",
    "n_x": 1,
    "n_y": 1,
    "x_bounds": [[-1.0, 1.0]],
    "y_bounds": [[-2.0, 2.0]],
    "y_bounds_in_lower_level": True,
    "upper": "(x[0] - 1)**2 + (y[0] - 1)**2",
    "upper_constraints": [],
    "upper_equalities": [],
    "lower": "0.5*(y[0] - x[0])**2",
    "lower_constraints": ["y[0] - 0.5"],
    "lower_equalities": [],
    "best_known": {"F": 0.25, "F_text": "0.25", "f": 0.125, "x": [1.0], "y": [0.5]},
    "best_found": None,
    "lower_level_convex": True,
    "upper_constraints_involve_y": False,
    "lower_constraints_involve_x": False,
    "check": "confirmed",
    "check_strength": "exact",
    "notes": [],
}
# A lower level that no y satisfies, for any x.
HOPELESS = CLIPPED | {"name": "hopeless", "lower_constraints": ["y[0] - 0.5", "1 - y[0]"]}


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("suite") / "made_up.json"
    path.write_text(json.dumps([CLIPPED, HOPELESS]))
    return path


@pytest.fixture(scope="module")
def outcomes(file):
    settings = suite.Settings(file, starts=2, max_gradients=20_000)
    return {r.name: suite.run(r, settings) for r in load(file).records}


def test_a_known_answer_is_reached_and_certified(outcomes):
    found = outcomes["clipped"]
    assert found.reached
    assert found.false_certificates == 0
    assert found.best.status == "certified"
    assert found.best.epsilon <= 1e-4
    np.testing.assert_allclose(found.best.x + found.best.y, [1.0, 0.5], atol=1e-2)


def test_an_infeasible_problem_is_refused_and_says_so(outcomes):
    found = outcomes["hopeless"]
    assert not found.attempts
    assert not found.reached
    assert found.refused


def test_a_wrong_point_is_a_failure_whatever_its_F(outcomes):
    best = outcomes["clipped"].best
    fields = vars(best) | {"F": -1.0, "gap": 0.3}
    wrong = suite.Attempt(**fields)
    outcome = suite.Outcome("clipped", "", 0.25, (wrong,), "", 0.0)
    assert not outcome.reached
    assert outcome.false_certificates == 1
    assert "FAILED" in suite.table([outcome])


def test_the_table_names_every_problem(outcomes):
    text = suite.table(list(outcomes.values()))
    assert "clipped" in text
    assert "hopeless" in text
    assert "1 of 2 reach the best known F" in text
    assert "0 false certificates" in text


def test_the_command_prints_and_saves(file, tmp_path, capsys):
    path = tmp_path / "out.json"
    arguments = ["bench", "suite", str(file), "--names", "hopeless", "--json", str(path)]
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 0
    assert "Refused: hopeless" in capsys.readouterr().out
    saved = json.loads(path.read_text())
    assert saved["outcomes"][0]["name"] == "hopeless"
    assert "bench suite" in saved["command"]


def test_bad_records_are_in_the_table_and_the_file(tmp_path, capsys, monkeypatch):
    given, path = tmp_path / "some.json", tmp_path / "out.json"
    unsaid = CLIPPED | {"name": "unsaid", "y_bounds_in_lower_level": None}
    given.write_text(json.dumps([CLIPPED | {"name": "bad", "upper": "foo"}, unsaid]))
    monkeypatch.setattr(suite, "starting_points", lambda *_: [])
    with pytest.raises(SystemExit) as end:
        main(["bench", "suite", str(given), "--json", str(path)])
    assert end.value.code == 0
    shown = capsys.readouterr().out
    assert "Refused: bad: cannot be read: upper: 'foo': not allowed" in shown
    assert "Bounds on y taken for the lower level's, as the file says nothing: unsaid" in shown
    saved = {outcome["name"]: outcome for outcome in json.loads(path.read_text())["outcomes"]}
    assert saved["bad"]["verdict"] == "refused"
    assert "not allowed" in saved["bad"]["refused"]
    assert saved["unsaid"]["y_bounds_assumed"]
    assert not saved["bad"]["y_bounds_assumed"]


@pytest.mark.long  # test_unbounded.py solves one; the suite only states it
def test_a_problem_without_bounds_on_y_is_solved(tmp_path):
    given = tmp_path / "free.json"
    given.write_text(json.dumps([CLIPPED | {"y_bounds": [[None, None]]}]))
    settings = suite.Settings(given, starts=2, tolerance=1e-3)
    found = suite.run(load(given).records[0], settings)
    assert not found.refused
    assert any(attempt.certified for attempt in found.attempts)
    assert not found.false_certificates


def test_ctrl_c_ends_the_run_and_keeps_what_there_is(file, tmp_path, capsys, monkeypatch, outcomes):
    """`solve` answers Ctrl-C with a solution; the suite must not take it for one more attempt."""
    path = tmp_path / "out.json"
    stopped = types.SimpleNamespace(status=Status("interrupted", "Interrupted."))
    monkeypatch.setattr(suite, "chosen", lambda settings: load(file).records[:1] * 2)
    first = iter([outcomes["clipped"]])
    run = suite.run
    monkeypatch.setattr(runs, "solve", lambda *_, **__: stopped)
    monkeypatch.setattr(suite, "run", lambda r, s: next(first, None) or run(r, s))
    with pytest.raises(SystemExit) as end:
        main(["bench", "suite", str(file), "--json", str(path)])
    assert end.value.code == 1
    assert "Interrupted" in capsys.readouterr().out
    assert len(json.loads(path.read_text())["outcomes"]) == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--names", "nothing"], "no problem nothing"),
        (["--starts", "0"], "starts must be"),
        (["--tolerance", "-1"], "tolerance must be"),
        (["--json", "/nowhere/at/all.json"], "no folder"),
    ],
)
def test_bad_arguments_are_refused_before_anything_runs(file, capsys, arguments, words):
    with pytest.raises(SystemExit) as end:
        main(["bench", "suite", str(file), *arguments])
    assert end.value.code == 2
    assert words in capsys.readouterr().err


def test_a_missing_file_is_named(capsys):
    with pytest.raises(SystemExit) as end:
        main(["bench", "suite", "there_is_none.json"])
    assert end.value.code == 2
    assert "there_is_none.json" in capsys.readouterr().err


PUBLISHED = ["d_1992_01", "as_2013_01", "c_2002_03"]


@pytest.mark.long
@pytest.mark.skipif(not SHARED.exists(), reason="the published suite is not beside the checkout")
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_problems_are_reached(name):
    (record,) = [r for r in load(SHARED).records if r.name == name]
    found = suite.run(record, suite.Settings(SHARED, starts=3, max_gradients=50_000))
    assert found.reached
    assert found.false_certificates == 0
