"""The experiment on growth: its fit, records, tables and files, and how it refuses."""

import dataclasses
import json
import os
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bilevax.bench import growth, runs, sparse
from bilevax.bench.isolation import isolated, peak_memory
from bilevax.cli import main
from bilevax.problems import linear
from bilevax.problems.library import linear_problem


@pytest.fixture
def here(monkeypatch):
    """Calls in this process, whose compiled programs are there already."""
    monkeypatch.setattr(growth, "isolated", lambda call, *arguments, limit=None: call(*arguments))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("growth")


@pytest.fixture(scope="module")
def shown(folder):
    """One run of all parts for many tests, with few compilations.

    HiGHS has its own process; Adaptive has not, on dense data, and fails on sparse ones.
    """
    true_isolated = growth.isolated

    def own(call, *arguments, limit=None):
        if call is growth.milp:
            return true_isolated(call, *arguments, limit=limit)
        if "sparse" in arguments:
            raise RuntimeError("its process died with code -9")
        return call(*arguments)

    settings = growth.Settings(
        methods=("adaptive",),
        tolerances=(1e-1, 1e-2),
        n=40,
        instances=2,
        max_seconds=1000.0,
        sizes=(40,),
        density=0.2,
        size_seconds=1000.0,
        exact_sizes=(40,),
        exact_seconds=1000.0,
        json=folder / "out.json",
        plot=folder / "out.png",
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(growth, "isolated", own)
        return growth.experiment(settings, progress=False)


def run(capsys, *args):
    with pytest.raises(SystemExit) as stopped:
        main(["bench", "growth", *args])
    shown = capsys.readouterr()
    return stopped.value.code or 0, shown.out, shown.err


def test_every_run_is_recorded(shown):
    runs = shown.runs["epsilon"]
    assert [(one.tolerance, one.seed) for one in runs] == [(0.1, 0), (0.1, 1), (0.01, 0), (0.01, 1)]
    for one in runs:
        assert one.certified
        assert one.epsilon <= one.tolerance
        assert one.gradients > 0
        assert one.call_seconds > one.seconds > 0
    (fit,) = shown.fits
    assert fit.runs == fit.all_runs == 4
    assert fit.exponent is not None
    dense, thin = shown.runs["size"]
    assert (dense.n, dense.data, dense.status) == (40, "dense", "certified")
    assert dense.data_bytes == 8 * (3 * 40 + 2) + 8 * 2 * 2 * 40
    assert dense.peak_bytes > 50e6
    assert (thin.n, thin.data, thin.status) == (40, "sparse", "refused")
    assert thin.sentence == "its process died with code -9"


@pytest.mark.long  # a program of its own
def test_sparse_data_are_solved_and_measured():
    thin = growth.measured(40, "sparse", 0.2, 0, 1000.0)
    assert (thin.n, thin.data, thin.status) == (40, "sparse", "certified")
    assert thin.data_bytes == 8 * (3 * 40 + 2) + (8 + 2 * 4) * 2 * 2 * 8
    assert thin.peak_bytes > 50e6


def test_dense_data_are_those_of_the_linear_experiment():
    data = growth._problem(40, "dense", 0.01, 3).data
    for name, array in sparse.arrays(linear.generate(40, 40, 2, 3)).items():
        np.testing.assert_array_equal(data[name], array)


def test_the_exact_answers_agree(shown):
    (one,) = shown.runs["exact"]
    best = linear.optimum(linear.generate(40, 40, 2, 0))
    assert best.proven
    assert one.certified
    assert one.milp_proven
    assert one.milp_objective == pytest.approx(best.value)
    assert one.lp_objective == pytest.approx(best.value)
    assert one.relative_difference == pytest.approx(
        (one.repaired_objective - one.milp_objective) / abs(one.milp_objective)
    )
    assert abs(one.relative_difference) < 1e-4


def test_json_holds_all_runs_and_the_command(shown, folder):
    content = json.loads((folder / "out.json").read_text())
    command = content["command"]
    assert command.startswith("bilevax bench growth --parts epsilon size exact --methods adaptive")
    assert "--tolerances 0.1 0.01 --n 40 --instances 2" in command
    assert "--exact-seconds 1000.0" in command
    assert content["interrupted"] is False
    for part, own in shown.runs.items():
        assert content[part]["runs"] == [dataclasses.asdict(one) for one in own]
    assert content["epsilon"]["fits"] == [dataclasses.asdict(one) for one in shown.fits]
    assert content["exact"]["faster_from"] == shown.faster_from()


def test_the_plot_is_a_picture(shown, folder):
    assert (folder / "out.png").read_bytes()[:4] == b"\x89PNG"
    assert (folder / "out.png").stat().st_size > 20_000


def test_the_tables_say_what_was_and_was_not_reached(shown):
    text = growth.table(shown)
    assert "2 of 2" in text
    assert "Refused: n = 40, sparse: its process died with code -9" in text
    assert "gradients ≈" in text
    assert "4 of 4 runs certified" in text
    assert "sparse" in text
    assert "rel. difference" in text
    assert "Adaptive is faster than HiGHS on the MILP" in text


def test_sparse_problems_follow_the_law_of_dense_ones():
    data = sparse.generate(300, 200, 4, 0.1, seed=1)
    A, B = (np.asarray(data[name].todense()) for name in ("A", "B"))
    assert (A != 0).sum(1).tolist() == [30] * 4
    assert (B != 0).sum(1).tolist() == [20] * 4
    assert np.std(B[B != 0]) == pytest.approx(0.01, rel=0.3)
    # b = Bŷ and d̃ = −Bᵀλ with λ > 0: the exact LP takes these data.
    arrays = {name: np.asarray(data[name]) for name in ("c", "d", "b", "d_tilde")}
    assert np.isfinite(linear.optimum(linear.LinearData(**arrays, A=A, B=B), prove=False).value)
    x, y = jnp.linspace(-1, 1, 300), jnp.linspace(0, 1, 200)
    values = linear_problem(data).called("constraints", x, y)
    np.testing.assert_allclose(values, A @ x + B @ y - data["b"], atol=1e-12)
    few = sparse.generate(300, 3, 2, 1e-6, seed=0)
    assert (few["A"].nse, few["B"].nse) == (2 * sparse.LEAST, 2 * 3)


def test_sparse_and_dense_data_state_the_same_problem():
    data = sparse.generate(30, 30, 2, 0.5, seed=0)
    dense = data | {name: data[name].todense() for name in ("A", "B")}
    at = (jnp.full(30, 0.3), jnp.full(30, -0.2))
    total = lambda one: lambda x, y: jnp.sum(linear_problem(one).called("constraints", x, y))
    for left, right in zip(jax.grad(total(data), (0, 1))(*at), jax.grad(total(dense), (0, 1))(*at)):
        np.testing.assert_allclose(left, right, atol=1e-15)


def test_a_call_in_another_process_says_how_it_failed():
    """That it answers, the fixture `shown` tests; `os._exit` would end this process."""
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        isolated(divmod, 1, 0)
    with pytest.raises(RuntimeError, match="died with code 3"):
        isolated(os._exit, 3)
    begun = time.perf_counter()
    with pytest.raises(RuntimeError, match=r"no answer after 0\.1 seconds"):
        isolated(time.sleep, 60, limit=0.1)
    assert time.perf_counter() - begun < 30
    assert peak_memory() > 0


def test_what_fails_is_a_record(monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("its process died with code -9")

    monkeypatch.setattr(growth, "isolated", fail)
    monkeypatch.setattr(runs, "solve", fail)
    settings = growth.Settings(parts=("size", "exact"), sizes=(40,), exact_sizes=(40,))
    results = growth.experiment(settings, progress=False)
    assert [one.status for one in results.runs["size"]] == ["refused", "refused"]
    assert results.runs["size"][0].sentence == "its process died with code -9"
    (one,) = results.runs["exact"]
    assert one.milp_objective is None
    assert one.milp_sentence == "its process died with code -9"
    assert results.faster_from() is None


def test_an_interruption_keeps_what_was_done(capsys, tmp_path, monkeypatch, here):
    true_solve, calls = runs.solve, []

    def interrupted(*args, **options):
        calls.append(args)
        if len(calls) > 1:
            raise KeyboardInterrupt
        return true_solve(*args, **options)

    monkeypatch.setattr(runs, "solve", interrupted)
    out, figure = tmp_path / "out.json", tmp_path / "out.png"
    options = ("--parts", "epsilon", "size", "--methods", "adaptive", "--n", "40")
    code, text, _ = run(capsys, *options, "--json", str(out), "--plot", str(figure))
    assert code == 1
    assert "Interrupted" in text
    content = json.loads(out.read_text())
    assert content["interrupted"] is True
    assert [one["tolerance"] for one in content["epsilon"]["runs"]] == [0.1]
    assert content["size"]["runs"] == []
    assert figure.exists()


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (("--parts", "best"), "best"),
        (("--parts", "size", "size"), "each once"),
        (("--methods", "best"), "best"),
        (("--tolerances", "-1"), "tolerances"),
        (("--tolerances", "1e-30"), "tolerances"),
        (("--tolerances", "0.1", "0.1"), "each once"),
        (("--n", "0"), "n must be"),
        (("--instances", "0"), "instances"),
        (("--max-seconds", "-1"), "max_seconds"),
        (("--sizes", "0"), "sizes"),
        (("--density", "0"), "density"),
        (("--density", "2"), "density"),
        (("--size-seconds", "nan"), "size_seconds"),
        (("--exact-sizes", "0"), "exact_sizes"),
        (("--big-m", "0"), "big_m"),
        (("--exact-seconds", "0"), "exact_seconds"),
        (("--seed", "-1"), "seed"),
        (("--json", "no/such/folder/x.json"), "no/such/folder"),
        (("--plot", "figure.xyz"), ".png"),
    ],
)
def test_bad_input_is_refused_before_the_run(capsys, monkeypatch, args, named):
    for module, name in ((runs, "solve"), (growth, "isolated")):
        monkeypatch.setattr(module, name, lambda *_, **__: pytest.fail("the run began"))
    code, _, err = run(capsys, *args)
    assert code == 2
    assert named in err
    assert "Traceback" not in err
