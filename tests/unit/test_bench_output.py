"""What all experiments share, without a solve: their loop, command, refusals and files."""

import dataclasses
import json
import types

import numpy as np
import pytest

from bilevax.bench import output, runs
from bilevax.bench.linear import LinearRun
from bilevax.driver.solution import Status


@dataclasses.dataclass(frozen=True)
class Settings:
    sizes: tuple[int, ...] = (1, 2)
    names: tuple[str, ...] = ()
    all: bool = False
    max_seconds: float | None = None


def jobs_that(*calls):
    return [(str(number), call) for number, call in enumerate(calls)]


def raising(error):
    def call():
        raise error

    return call


def test_jobs_run_in_order_and_are_saved_once():
    done, saved = [], []
    jobs = jobs_that(lambda: done.append(1), lambda: done.append(2))
    assert output.run_jobs(jobs, "made-up", False, saved.append) is False
    assert done == [1, 2]
    assert saved == [False]


def test_an_interrupted_experiment_is_saved():
    done, saved = [], []
    jobs = jobs_that(lambda: done.append(1), raising(KeyboardInterrupt), lambda: done.append(3))
    assert output.run_jobs(jobs, "made-up", False, saved.append) is True
    assert done == [1]
    assert saved == [True]


def test_an_experiment_that_fails_is_saved_and_still_fails():
    saved = []
    with pytest.raises(ZeroDivisionError):
        output.run_jobs(jobs_that(raising(ZeroDivisionError)), "made-up", False, saved.append)
    assert saved == [True]


def test_the_bar_names_the_job(capsys):
    output.run_jobs([("n = 7", lambda: None)], "made-up", True, lambda _: None)
    shown = capsys.readouterr().err
    assert "bilevax bench made-up" in shown
    assert "n = 7" in shown
    assert "1/1" in shown


def test_a_command_has_the_options_that_say_something():
    names = [field.name for field in dataclasses.fields(Settings)]
    assert output.command_line("x", Settings(), names) == "bilevax bench x --sizes 1 2"
    settings = Settings((3,), ("a b",), True, 0.5)
    assert output.command_line("x f.json", settings, names) == (
        "bilevax bench x f.json --sizes 3 --names 'a b' --all --max-seconds 0.5"
    )


def test_choices_are_known_and_each_named_once():
    output.check_choices(Settings(), "sizes")
    for settings, named in ((Settings(()), "sizes"), (Settings((1, 1)), "each once")):
        with pytest.raises(ValueError, match=named):
            output.check_choices(settings, "sizes")
    with pytest.raises(ValueError, match="no 'c'; there are a, b"):
        output.check_choices(Settings(names=("a", "c")), "names", ("a", "b"))


def test_means_and_medians_leave_out_what_is_unknown():
    assert output.mean([1.0, None, 3.0]) == 2
    assert output.median([1.0, None, 3.0, 9.0]) == 3
    assert output.mean([None]) is output.median([]) is None
    assert output.number(None, ".1f") == "-"
    assert output.number(1.25, ".1f") == "1.2"


def test_results_have_null_for_what_is_not_finite_and_replace_the_file(tmp_path):
    path = tmp_path / "out.json"
    path.write_text("old")
    output.write_results(path, "a command", {"rows": [np.inf, {"x": float("nan")}, 1.5]})
    content = json.loads(path.read_text())
    assert content["rows"] == [None, {"x": None}, 1.5]
    assert content["command"] == "a command"
    assert list(tmp_path.iterdir()) == [path]


def solution(code):
    return types.SimpleNamespace(
        status=Status(code, f"{code}."),
        certificate=types.SimpleNamespace(epsilon=0.5),
        gradients=7,
        seconds=0.0,
        compile_seconds=0.0,
    )


def test_an_attempt_is_what_a_solve_says(monkeypatch):
    monkeypatch.setattr(runs, "solve", lambda *_, **__: solution("stalled"))
    fields, found = runs.attempt(None, None, tolerance=0.1)
    run = runs.Run(**fields)
    assert found is not None
    assert (run.status, run.sentence, run.epsilon, run.gradients) == ("stalled", "stalled.", 0.5, 7)
    assert not run.certified
    assert run.call_seconds >= 0


@pytest.mark.parametrize("error", [ValueError, RuntimeError, MemoryError])
def test_a_refusal_is_a_result(monkeypatch, error):
    def refuse(*_, **__):
        raise error("no Slater point")

    monkeypatch.setattr(runs, "solve", refuse)
    fields, found = runs.attempt(None, None)
    assert found is None
    own = (20, 20, 1, "seven", "fop")
    refused, certified = LinearRun(*own, **fields), LinearRun(*own, status="certified")
    assert refused.refused
    assert refused.call_seconds is None
    line = "Refused: n = 20, seven, fop: no Slater point"
    assert runs.refusals([refused, certified]) == [line]
    assert runs.certified_of([refused, certified]) == "1 of 2"


def test_an_interrupted_solve_is_an_interruption(monkeypatch):
    monkeypatch.setattr(runs, "solve", lambda *_, **__: solution("interrupted"))
    with pytest.raises(KeyboardInterrupt):
        runs.attempt(None, None)
