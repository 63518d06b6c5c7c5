"""The experiment on bilevel linear problems: its records, table, files, and how it refuses."""

import dataclasses
import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bilevax import solve
from bilevax.bench import linear as bench
from bilevax.bench import runs
from bilevax.cli import main
from bilevax.problems import library, linear
from bilevax.solvers import Adaptive


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("linear")


@pytest.fixture(scope="module")
def shown(folder):
    """One run for many tests; `tuned` runs its two problems together, `adaptive` alone.

    What `adaptive` reaches must not depend on the clock, so only `tuned` has one.
    """
    outcomes = bench._outcomes

    def patient(own, name, settings):
        seconds = settings.max_seconds if name == "tuned" else 1000.0
        return outcomes(own, name, dataclasses.replace(settings, max_seconds=seconds))

    settings = bench.Settings(
        sizes=(40,),
        instances=2,
        methods=("tuned", "adaptive"),
        max_seconds=1.0,
        json=folder / "out.json",
        plot=folder / "out.png",
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench, "_outcomes", patient)
        return bench.experiment(settings, progress=False)


def run(capsys, *args):
    with pytest.raises(SystemExit) as stopped:
        main(["bench", "linear", *args])
    shown = capsys.readouterr()
    return stopped.value.code or 0, shown.out, shown.err


def test_the_instance_is_the_problem_of_the_paper():
    instance = library.bilevel_linear(6, 5, 3, seed=1)
    data, problem = instance.data, instance.problem
    rng = np.random.default_rng(0)
    x, y = rng.uniform(-1, 1, 6), rng.uniform(-1, 1, 5)
    at = (jnp.asarray(x), jnp.asarray(y))
    assert float(problem.upper_value(*at)) == pytest.approx(data.c @ x + data.d @ y)
    assert float(problem.lower_value(*at)) == pytest.approx(data.d_tilde @ y)
    np.testing.assert_allclose(
        problem.called("constraints", *at), data.A @ x + data.B @ y - data.b, rtol=1e-12
    )
    assert not np.any(instance.start.x)
    assert not np.any(instance.start.y)
    assert instance.start.x.shape == (6,)
    assert instance.start.y.shape == (5,)
    slope = np.linalg.svd(np.hstack([data.A, data.B]))[1][0]
    assert float(np.asarray(problem.constraint_lipschitz)) == pytest.approx(slope)
    corners = itertools.product([-1, 1], repeat=6)
    least = min(data.c @ np.asarray(corner) for corner in corners) - np.abs(data.d).sum()
    assert float(np.asarray(problem.f_low)) <= least + 1e-12


def test_one_compilation_serves_all_instances_of_a_size():
    first, second = (library.bilevel_linear(4, 3, 2, seed).problem for seed in (0, 1))
    assert jax.tree.structure(first) == jax.tree.structure(second)
    assert first.upper == second.upper


def test_the_papers_smoothness_is_four_rho_times_the_norm():
    instance = library.bilevel_linear(20, 20, 1, seed=0)
    norm = np.linalg.svd(np.hstack([instance.data.A, instance.data.B]))[1][0]
    assert bench.paper_smoothness(instance, 0.01) == pytest.approx(400 * norm)


def test_methods_are_what_the_paper_says():
    instance = library.bilevel_linear(20, 20, 1, seed=0)
    problem, solver = bench.method("paper", instance, 0.01)
    assert float(np.asarray(problem.multiplier_bound)) == 200
    assert solver.epsilon == 0.01
    assert solver.smoothness == bench.paper_smoothness(instance, 0.01)
    assert bench.method("tuned", instance, 0.01)[1].smoothness == 6
    problem, solver = bench.method("adaptive", instance, 0.01)
    assert problem.multiplier_bound is None
    assert isinstance(solver, Adaptive)


def test_records_say_all_that_the_experiment_asks(shown):
    assert [(r.method, r.instance) for r in shown.records] == [
        *(("tuned", "0"), ("tuned", "1"), ("adaptive", "0"), ("adaptive", "1"))
    ]
    for record in shown.records:
        data = linear.generate(40, 40, 2, int(record.instance))
        assert record.size == (40, 40, 2)
        assert record.status in ("certified", "budget spent", "stalled")
        assert (record.status == "certified") == (record.epsilon <= 0.01)
        assert record.gradients > 0
        assert record.optimum == pytest.approx(linear.optimum(data).value)
        assert record.optimum_proven
        error = (record.repaired_objective - record.optimum) / abs(record.optimum)
        assert record.relative_error == pytest.approx(error)
        assert record.relative_error >= -1e-9
        assert record.violation >= 0
        assert record.seconds > 0
        assert record.rho > 0
    assert [r.together for r in shown.records] == [2, 2, 1, 1]


@pytest.mark.parametrize("seed", [2, 3, 4])
def test_adaptive_finds_the_optimum(seed):
    instance = library.bilevel_linear(40, 40, 2, seed)
    found = solve(
        instance.problem, instance.start, tolerance=1e-4, solver=Adaptive(), max_gradients=50_000
    )
    optimum = linear.optimum(instance.data)
    worth = linear.repair(instance.data, found.point.x).objective
    assert found.certified
    assert abs(worth - optimum.value) <= 1e-4 * abs(optimum.value)


def test_together_does_what_alone_does(shown, monkeypatch):
    monkeypatch.setattr(bench, "TOGETHER", {})
    settings = bench.Settings(sizes=(40,), instances=2, methods=("tuned",), max_seconds=1.0)
    results = bench.experiment(settings, progress=False)
    assert [r.together for r in results.records] == [1, 1]
    # The first checks come at the same counts of gradients, and see the same.
    together, alone = (r.curves.by_method["tuned"] for r in (shown, results))
    common = min(len(together["gradients"]), len(alone["gradients"]), 40) - 1
    assert common > 4  # a busy machine comes no farther in its second
    for name in bench.CURVES:
        np.testing.assert_allclose(together[name][:common], alone[name][:common], atol=1e-6)


def test_the_table_is_aligned_and_explains_itself(shown):
    text = bench.table(shown.records)
    header, rule, first, second = text.splitlines()[:4]
    assert header.split()[:5] == ["n", "m", "l", "method", "certified"]
    assert len(rule) == len(header) == len(first) == len(second)
    assert first.split()[3] == "tuned"
    assert second.split()[0] == "adaptive"
    own = [r for r in shown.records if r.method == "adaptive"]
    assert "2 of 2" in second
    assert f"{np.mean([r.objective for r in own]):.4f}" in second
    assert f"{np.mean([r.optimum for r in own]):.4f} " in second
    assert f"{np.median([r.gradients for r in own]):,.0f}" in second
    assert "a violation exploited" in text
    assert "*" not in text


def test_the_table_marks_what_is_not_proven_unknown_or_refused(shown):
    known, other = shown.records[0], shown.records[2]
    unproven = dataclasses.replace(known, optimum_proven=False)
    refused = bench.LinearRun(30, 30, 1, "x", "fop", sentence="no Slater point")
    text = bench.table([unproven, other, refused])
    assert f"{known.optimum:.4f}*" in text
    assert "not proven" in text
    assert "0 of 1" in text
    assert "unknown" in text
    assert "no Slater point" in text


def test_json_holds_records_curves_command_and_versions(shown, folder):
    content = json.loads((folder / "out.json").read_text())
    assert content["records"] == [dataclasses.asdict(r) for r in shown.records]
    assert content["command"].startswith("bilevax bench linear --sizes 40 --instances 2 --seed 0")
    assert "--methods tuned adaptive" in content["command"]
    assert content["versions"]["jax"] == jax.__version__
    assert content["date"].startswith("20")
    assert content["interrupted"] is False
    curves = content["curves"]["by_method"]
    assert set(curves) == {"tuned", "adaptive"}
    for columns in curves.values():
        assert set(columns) == set(bench.CURVES)
        assert len({len(column) for column in columns.values()}) == 1
    assert not list(folder.glob(".*"))


def test_json_has_null_for_what_is_not_finite(folder):
    record = bench.LinearRun(2, 2, 1, "0", "smo", lower_gap=np.inf, repaired_objective=np.inf)
    path = folder / "inf.json"
    bench.write(path, bench.Results((record,), None, True), bench.Settings())
    content = json.loads(path.read_text())
    assert content["records"][0]["lower_gap"] is None
    assert content["interrupted"] is True


def test_the_plot_is_a_picture(shown, folder):
    assert (folder / "out.png").read_bytes()[:4] == b"\x89PNG"
    assert (folder / "out.png").stat().st_size > 20_000
    assert shown.curves.optimum == shown.records[0].optimum


def test_the_figure_shows_the_papers_size_or_the_largest():
    case = lambda n, name: bench.Case(name, linear.generate(n, n, 1, 0))
    cases = [case(400, "a"), case(400, "b"), case(420, "c")]
    assert bench._shown(cases) is cases[0]
    assert bench._shown([case(3, "a"), case(5, "b"), case(4, "c")]).name == "b"


def test_loaded_problems_replace_drawn_ones(capsys, tmp_path):
    data = linear.generate(40, 40, 2, 7)
    linear.save(tmp_path / "seven.npz", data)
    # d̃ is no −Bᵀλ here: HiGHS knows no optimum by the LP.
    odd = dataclasses.replace(data, d_tilde=np.roll(data.d_tilde, 1))
    linear.save(tmp_path / "odd.npz", odd)
    out = tmp_path / "out.json"
    options = ("--methods", "adaptive", "--max-seconds", "0.5", "--json", str(out))
    code, text, _ = run(capsys, "--load", str(tmp_path), *options)
    assert code == 0
    assert "adaptive" in text
    content = json.loads(out.read_text())
    assert [r["instance"] for r in content["records"]] == ["odd", "seven"]
    assert content["records"][0]["optimum"] is None
    assert content["records"][1]["optimum"] == pytest.approx(linear.optimum(data).value)
    assert "--load" in content["command"]
    assert "--sizes" not in content["command"]


def test_an_interruption_keeps_what_was_done(capsys, tmp_path, monkeypatch):
    true_solve, calls = runs.solve, []

    def interrupted(*args, **options):
        calls.append(args)
        if len(calls) > 1:
            raise KeyboardInterrupt
        return true_solve(*args, **options)

    monkeypatch.setattr(runs, "solve", interrupted)
    out = tmp_path / "out.json"
    options = ("--instances", "2", "--methods", "adaptive", "--max-seconds", "0.3")
    code, text, _ = run(capsys, "--sizes", "40", *options, "--json", str(out))
    assert code == 1
    assert "Interrupted" in text
    content = json.loads(out.read_text())
    assert content["interrupted"] is True
    assert [r["instance"] for r in content["records"]] == ["0"]


def test_a_method_that_refuses_is_a_result(monkeypatch):
    def refuse(*args, **options):
        raise ValueError("no Slater point")

    monkeypatch.setattr(runs, "solve", refuse)
    settings = bench.Settings(sizes=(40,), instances=1, methods=("adaptive",))
    (record,) = bench.experiment(settings, progress=False).records
    assert record.status == "refused"
    assert record.sentence == "no Slater point"
    assert record.epsilon is None
    assert record.optimum is not None


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (("--methods", "best"), "best"),
        (("--methods", "tuned", "tuned"), "each once"),
        (("--sizes", "0"), "sizes"),
        (("--instances", "0"), "instances"),
        (("--seed", "-1"), "seed"),
        (("--tolerance", "-1"), "tolerance"),
        (("--tolerance", "1e-30"), "tolerance"),
        (("--max-seconds", "-1"), "max_seconds"),
        (("--json", "no/such/folder/x.json"), "no/such/folder"),
        (("--json", "."), "folder"),
        (("--plot", "no/such/folder/x.png"), "no/such/folder"),
        (("--plot", "figure.xyz"), ".png"),
        (("--load", "no/such/folder"), "no/such/folder"),
    ],
)
def test_bad_input_is_refused_before_the_run(capsys, monkeypatch, args, named):
    monkeypatch.setattr(runs, "solve", lambda *_, **__: pytest.fail("the run began"))
    code, _, err = run(capsys, *args)
    assert code == 2
    assert named in err
    assert "Traceback" not in err
