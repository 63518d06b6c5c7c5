"""The experiment on growth, of runs that are made up: fits, comparisons, table and figure."""

import pytest

from bilevax.bench import growth


def epsilon_run(tolerance, gradients, certified=True):
    status = "certified" if certified else "budget spent"
    return growth.EpsilonRun(
        method="adaptive", seed=0, tolerance=tolerance, gradients=gradients, status=status
    )


def exact_run(n, seconds, milp_seconds, compile_seconds=0.0, status="certified", proven=True):
    fields = {"compile_seconds": compile_seconds, "setup_seconds": 0.0, "status": status}
    fields |= {"milp_seconds": milp_seconds, "milp_proven": proven}
    return growth.ExactRun(n=n, seconds=seconds, **fields)


def test_the_fit_finds_a_known_power_law():
    tolerances = [0.1, 0.01, 0.001, 0.0001]
    runs = [epsilon_run(t, round(1000 * t**-1.5)) for t in tolerances]
    # What did not certify says nothing about the gradients that it would take.
    found = growth.fit("adaptive", [*runs, epsilon_run(1e-5, 7, certified=False)])
    assert found.exponent == pytest.approx(1.5, abs=1e-4)
    assert found.factor == pytest.approx(1000, rel=1e-3)
    assert (found.runs, found.all_runs) == (4, 5)


def test_no_fit_through_fewer_than_two_tolerances():
    runs = [epsilon_run(0.1, 100), epsilon_run(0.1, 200), epsilon_run(0.01, 1, certified=False)]
    found = growth.fit("adaptive", runs)
    assert found.exponent is None
    assert (found.runs, found.all_runs) == (2, 3)
    assert growth.fit("smo", []).exponent is None


def test_faster_from_means_from_there_on():
    runs = [exact_run(100, 1, 2), exact_run(200, 3, 2), exact_run(300, 3, 9), exact_run(500, 3, 30)]
    results = growth.Results({"exact": runs})
    assert results.faster_from() == 300
    slow = [exact_run(100, 1, 9, compile_seconds=10), exact_run(200, 1, 20, compile_seconds=10)]
    assert growth.Results({"exact": slow}).faster_from() == 100
    assert growth.Results({"exact": slow}).faster_from(whole_call=True) == 200
    spent = [exact_run(100, 1, 2), exact_run(200, 1, 9, status="budget spent")]
    assert growth.Results({"exact": spent}).faster_from() is None
    neither = [exact_run(100, 1, 2), exact_run(200, 9, 9, status="budget spent", proven=False)]
    assert growth.Results({"exact": neither}).faster_from() == 100
    assert growth.Results({}).faster_from() is None


def test_the_command_names_the_options_of_its_parts_alone():
    command = growth.Settings(parts=("size",), sizes=(40,)).command
    assert command == (
        "bilevax bench growth --parts size --sizes 40 --density 0.01 --size-seconds 120.0 --seed 0"
    )


def test_a_run_that_is_not_certified_is_shown_as_such(tmp_path):
    missed = growth.Results({"epsilon": [epsilon_run(0.1, 5, certified=False)]})
    growth.plot(missed, tmp_path / "missed.svg")
    assert "not certified" in (tmp_path / "missed.svg").read_text()
    assert "no exponent" in growth.table(missed)
