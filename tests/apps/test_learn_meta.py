"""The meta-learner: tasks against cvxpy and closed forms, both levels against `bx.certify`."""

import json

import cvxpy as cp
import numpy as np
import pandas as pd
import pytest
import sklearn
from sklearn.base import clone, is_classifier, is_regressor
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import Ridge
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

from bilevax.certificates import judge
from bilevax.cli import main
from bilevax.learn import RobustMetaLearner, TaskModel, load_model, save_model, stack_tasks
from bilevax.learn._meta import MetaTuner
from bilevax.learn._tasks import Part, split_tasks


def some_tasks(kind="squared", count=5, d=3, n=16, seed=0):
    """Tasks of unequal size whose parameters are around those of all."""
    draw = np.random.default_rng(seed)
    centre, tasks = draw.standard_normal(d), {}
    for k in range(count):
        own = centre + 0.5 * draw.standard_normal(d)
        x = draw.standard_normal((n + 2 * k, d))
        y = x @ own + 1.0 + 0.3 * draw.standard_normal(len(x))
        tasks[f"t{k}"] = x, np.where(y > 1, "yes", "no") if kind == "logistic" else y
    return tasks


@pytest.fixture(scope="module", params=["squared", "logistic"])
def fitted(request):
    tasks = some_tasks(request.param)
    learner = RobustMetaLearner(loss=request.param, random_state=0)
    return tasks, clone(learner).fit(*stack_tasks(tasks)), learner


def losses_of(model, x, y):
    """The loss of each row at a cvxpy variable, with the intercept last."""
    score = np.column_stack([x, np.ones(len(x))]) @ model
    if y.dtype.kind in "US":
        return cp.logistic(cp.multiply(np.where(y == "yes", -1.0, 1.0), score))
    return cp.square(score - y) / 2


def robust(losses, eta, cap):
    """max over q of ⟨q, ℓ⟩ − (η/2)‖q − 1/n‖² by its dual, and what must hold.

    With multipliers ν of Σq = 1, α of q ≤ cap and β of q ≥ 0 it is ν + cap·Σα + Σ(u/n + u²/(2η)),
    u = ℓ − ν − α + β. It rises with ℓ, so t ≥ ℓ may stand for ℓ.
    """
    n = losses.shape[0]
    t, nu = cp.Variable(n), cp.Variable()
    alpha, beta = cp.Variable(n, nonneg=True), cp.Variable(n, nonneg=True)
    u = t - nu - alpha + beta
    value = nu + cap * cp.sum(alpha) + cp.sum(u) / n + cp.sum_squares(u) / (2 * eta)
    return value, [t >= losses]


@pytest.mark.parametrize("share", [None, 0.4])
def test_adapting_solves_what_cvxpy_solves(fitted, share):
    learner = fitted[1]
    x, y = (part[:9] for part in some_tasks(learner.loss, seed=7)["t0"])
    model = learner.adapt(x, y).set_params(eta=0.7, lam=0.3, train_share=share).fit(x, y)
    w = np.append(learner.coef_, learner.intercept_)
    known = cp.Variable(4)
    value, rules = robust(losses_of(known, x, y), 0.7, 1.0 if share is None else 1 / (9 * share))
    value += 0.15 * cp.sum_squares(known - w)
    cp.Problem(cp.Minimize(value), rules).solve(solver=cp.CLARABEL)
    np.testing.assert_allclose(np.append(model.coef_, model.intercept_), known.value, atol=1e-4)
    assert model.row_weights_.sum() == pytest.approx(1)
    assert model.row_weights_.max() <= (1.0 if share is None else 1 / (9 * share)) + 1e-12
    assert model.gap_ <= 1e-8 * max(1.0, value.value)


def test_the_closed_form_of_one_feature():
    """Features 1, targets 0 and 2: y = (1 + 2/η + λw)/(1 + 2/η + λ), weights ½ ∓ (1 − y)/η."""
    eta, lam, w = 2.0, 0.5, -0.4
    y = (1 + 2 / eta + lam * w) / (1 + 2 / eta + lam)
    model = TaskModel(eta, lam, coef=[w], fit_intercept=False)
    model.fit(np.ones((2, 1)), [0.0, 2.0])
    np.testing.assert_allclose(model.coef_, [y], rtol=1e-7)
    np.testing.assert_allclose(model.row_weights_, [0.5 - (1 - y) / eta, 0.5 + (1 - y) / eta])


def test_far_and_near_a_task_is_the_meta_parameter_or_alone():
    x, y = some_tasks()["t4"]
    w = {"coef": [1.0, 2.0, 3.0], "intercept": -1.0}
    near = TaskModel(1.0, 1e9, **w).fit(x, y)
    np.testing.assert_allclose(near.coef_, w["coef"], atol=1e-6)
    # Alone, with even weights and no pull, it is least squares.
    alone = TaskModel(1.0, 1e-9, train_share=1.0, **w).fit(x, y)
    known = np.linalg.lstsq(np.column_stack([x, np.ones(len(x))]), y, rcond=None)[0]
    np.testing.assert_allclose(np.append(alone.coef_, alone.intercept_), known, atol=1e-6)
    ridge = Ridge(alpha=0.2 * len(y), fit_intercept=False).fit(x, y)
    model = TaskModel(1.0, 0.2, train_share=1.0, fit_intercept=False).fit(x, y)
    np.testing.assert_allclose(model.coef_, ridge.coef_, atol=1e-8)


def lines_of(unfitted, learner, tasks):
    """The lines that the core finds, which knows the problem and not the method; and our own."""
    problem, start = unfitted.problem(*stack_tasks(tasks))
    own, found = learner.certificate_, judge(problem, learner.point())
    assert found.objective == pytest.approx(own.objective, abs=1e-9)
    assert found.rho == own.rho
    assert float(problem.upper_value(start.x1, start.x2, start.y1, start.y2)) > 0
    return own.lines(), found.lines()


def test_the_certificate_is_that_of_the_problem(fitted):
    tasks, learner, unfitted = fitted
    assert learner.converged_
    assert not hasattr(unfitted, "tasks_")
    own, found = lines_of(unfitted, learner, tasks)
    for name, line in found.items():
        assert line == pytest.approx(own[name], rel=1e-3, abs=1e-9), name
        assert line <= own[name] * (1 + 1e-6) + 1e-12, name
    ridge = 0.05 * float(np.sum(learner.coef_**2) + np.sum(learner.intercept_**2))
    assert learner.certificate_.objective == pytest.approx(learner.task_losses_.sum() + ridge)
    assert learner.certificate_.epsilon <= learner.tol


def test_a_point_beside_the_solution_is_not_certified(fitted, monkeypatch):
    """The tuner's own lines say so, and are still those of the core."""
    tasks, _, unfitted = fitted
    rough = clone(unfitted)
    monkeypatch.setattr(MetaTuner, "run", lambda self: self.judged_at(self.first()))
    with pytest.warns(ConvergenceWarning, match="ε-KKT is certified at ε"):
        rough.fit(*stack_tasks(tasks))
    assert not rough.converged_
    own, found = lines_of(unfitted, rough, tasks)
    assert found["stationarity"] > 0.1
    for name, line in found.items():
        assert line == pytest.approx(own[name], rel=1e-3, abs=1e-9), name


def test_known_tasks_have_models_of_their_own(fitted):
    tasks, learner, _ = fitted
    x, y, names = stack_tasks(tasks)
    near = learner.score(x, y, tasks=names)
    assert near > learner.score(x, y)
    scores = x[names == "t2"] @ learner.task_coef_[2].T + learner.task_intercept_[2]
    own = learner.predict(x[names == "t2"], ["t2"] * int(np.sum(names == "t2")))
    if learner.loss == "squared":
        np.testing.assert_allclose(own, scores)
        assert is_regressor(learner)
        assert not hasattr(learner, "predict_proba")
    else:
        np.testing.assert_array_equal(own, np.where(scores[:, 0] > 0, "yes", "no"))
        shares = learner.predict_proba(x, tasks=names)
        np.testing.assert_allclose(shares.sum(axis=1), 1)
        assert (learner.classes_[shares.argmax(axis=1)] == learner.predict(x, names)).all()
        assert is_classifier(learner)
    with pytest.raises(ValueError, match=r"tasks has tasks that were not fitted: \['t9'\]"):
        learner.predict(x[:1], ["t9"])
    with pytest.raises(ValueError, match="is expecting 3 features"):
        learner.adapt(x[:, :2], y)


def test_a_saved_learner_adapts_as_before(fitted, tmp_path):
    tasks, learner, _ = fitted
    save_model(learner, tmp_path / "m.skops")
    again, (x, y) = load_model(tmp_path / "m.skops"), tasks["t1"]
    np.testing.assert_array_equal(again.adapt(x, y).coef_, learner.adapt(x, y).coef_)
    assert again.certificate_.epsilon == learner.certificate_.epsilon


def test_three_classes_are_those_of_softmax_losses():
    draw, tasks = np.random.default_rng(2), []
    for _ in range(3):
        x = draw.standard_normal((18, 2))
        tasks.append((x, np.array(["ash", "elm", "fir"])[np.digitize(x[:, 0], [-0.5, 0.5])]))
    unfitted = RobustMetaLearner(loss="logistic", random_state=0)
    learner = clone(unfitted).fit(*stack_tasks(tasks))
    assert learner.coef_.shape == (3, 2)
    assert learner.task_coef_.shape == (3, 3, 2)
    own, found = lines_of(unfitted, learner, tasks)
    assert found["stationarity"] == pytest.approx(own["stationarity"], rel=1e-3)
    assert found["gap"] == pytest.approx(own["gap"], rel=1e-3)
    x, y = tasks[0]
    assert learner.adapt(x[:3], y[:3]).predict(x).shape == (18,)  # of one class or two
    with pytest.raises(ValueError, match=r"classes that are not known: \['oak'\]"):
        learner.adapt(x, np.full(18, "oak"))


def test_rows_are_split_by_task_and_class():
    draw = np.random.default_rng(0)
    x, task = draw.standard_normal((43, 2)), np.repeat([0, 1, 2], [20, 21, 2])
    label = np.where(np.arange(43) % 4 == 0, 1, 0)
    label[20:41] = 0
    label[20], label[41:] = 1, [0, 1]
    names = np.array(["a", "b", "c"])
    train, held = split_tasks(Part(x, label, task), names, True, 0.5, 3)
    assert len(train.x) + len(held.x) == 43
    for k, c, count in [(0, 1, 5), (0, 0, 15), (1, 0, 20)]:
        found = np.sum((held.task == k) & (held.target == c))
        assert abs(found - count / 2) <= 0.5
    assert np.sum((train.task == 1) & (train.target == 1)) == 1  # the only one trains
    assert np.bincount(held.task).tolist()[2] == 1  # without a look at its classes


ROWS = np.arange(8.0)[:, None] % 5, np.arange(8.0)
BAD_LISTS = {
    "none": ([], ValueError, "there are none"),
    "kind": (3, TypeError, "must be a list of pairs"),
    "pair": ({"a": 3}, TypeError, "task 'a' must be a pair"),
    "empty": ({"a": ROWS, "b": (np.ones((0, 1)), [])}, ValueError, "task 'b': X must be a matrix"),
    "columns": ([ROWS, (np.ones((2, 3)), [1, 2])], ValueError, "task 1 has 3 columns, and task 0"),
    "lengths": ([(ROWS[0], [1.0])], ValueError, "task 0: y must have one entry for each of the 8"),
}


@pytest.mark.parametrize("name", BAD_LISTS)
def test_tasks_that_cannot_be_stacked_are_named(name):
    tasks, error, said = BAD_LISTS[name]
    with pytest.raises(error, match=said):
        stack_tasks(tasks)


NAMES = np.repeat(["a", "b"], 4)
BAD = {
    "nan-task": ({}, {"tasks": np.where(np.arange(8) < 3, np.nan, 1.0)}, "3 rows have no"),
    "one-row": ({}, {"tasks": ["a", *"bbbbbbb"]}, r"task 'a' has one row only"),
    "length": ({}, {"tasks": ["a"]}, "one entry for each of the 8 rows"),
    "loss": ({"loss": "hinge"}, {"tasks": NAMES}, "loss must be 'squared' or 'logistic'"),
    "share": ({"share": 2.0}, {"tasks": NAMES}, "share must be a share of the rows"),
    "train": ({"train_share": 0.0}, {"tasks": NAMES}, "train_share must be finite and > 0"),
    "eta": ({"eta_bounds": (0.0, 1.0)}, {"tasks": NAMES}, "eta_bounds must be 0 < low"),
    "lam": ({"lam_bounds": 1.0}, {"tasks": NAMES}, "lam_bounds must be two numbers"),
    "fraction": ({"validation_fraction": 1.0}, {"tasks": NAMES}, "validation_fraction must be"),
    "tol": ({"tol": 0.0}, {"tasks": NAMES}, "tol must be finite and > 0"),
    "l2": ({"l2": -1.0}, {"tasks": NAMES}, "l2 must be finite and ≥ 0"),
    "alone": ({}, {"tasks": NAMES, "y_val": [1.0]}, "y_val and tasks_val need X_val"),
    "pair": ({}, {"tasks": NAMES, "X_val": ROWS[0]}, "X_val needs y_val"),
    "unknown": (
        {},
        {"tasks": NAMES, "X_val": ROWS[0], "y_val": ROWS[1], "tasks_val": ["z", *"aaabbbb"]},
        r"tasks_val has tasks that were not fitted: \['z'\]",
    ),
    "absent": (
        {},
        {"tasks": NAMES, "X_val": ROWS[0], "y_val": ROWS[1], "tasks_val": ["a"] * 8},
        r"tasks_val has no row of the tasks \['b'\]",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named(name):
    settings, given, said = BAD[name]
    with pytest.raises(ValueError, match=said):
        RobustMetaLearner(**settings).fit(*ROWS, **given)


def test_a_task_of_one_class_is_warned_of_by_name():
    x = np.random.default_rng(0).standard_normal((16, 1))
    y, tasks = np.where(np.arange(16) < 8, 1, np.arange(16) % 2), np.repeat(["a", "b"], 8)
    with pytest.warns(UserWarning, match="task 'a' has training rows of one class only"):
        learner = RobustMetaLearner(loss="logistic", tol=0.1, random_state=0).fit(x, y, tasks)
    assert learner.adapt(x[:1], y[:1]).predict([[0.0]]) == [1]


BAD_TASKS = [
    ({"coef": [1.0, 2.0]}, "coef must be 1 finite numbers"),
    ({"fit_intercept": False, "intercept": 1.0}, "intercept: there is none"),
    ({"lam": 0.0}, "lam must be finite and > 0"),
]


@pytest.mark.parametrize(("given", "says"), BAD_TASKS)
def test_bad_settings_of_a_task_are_named(given, says):
    with pytest.raises(ValueError, match=says):
        TaskModel(**given).fit(*ROWS)


def test_tasks_reach_fit_through_a_pipeline(fitted):
    tasks, _, unfitted = fitted
    x, y, names = stack_tasks(tasks)
    with sklearn.config_context(enable_metadata_routing=True):
        asked = clone(unfitted).set_params(tol=0.1).set_fit_request(tasks=True)
        pipeline = make_pipeline(StandardScaler(), asked).fit(x, y, tasks=names)
    assert pipeline[-1].tasks_.tolist() == ["t0", "t1", "t2", "t3", "t4"]


def run(*given):
    with pytest.raises(SystemExit) as ended:
        main(["meta", *map(str, given)])
    return ended.value.code


def sold(kind="logistic"):
    """Rows of eight shops, one of them small, with a text column that is a feature."""
    draw, tables = np.random.default_rng(1), []
    for k in range(8):
        x = draw.standard_normal((3 if k == 7 else 24, 2))
        value = x @ [1.0 + 0.2 * k, -1.0] + 0.3 * draw.standard_normal(len(x))
        sold = np.where(value > 0, "yes", "no") if kind == "logistic" else 1e3 * value
        day = draw.choice(["mon", "sun"], len(x))
        tables.append(pd.DataFrame({"a": x[:, 0], "b": x[:, 1], "day": day, "y": sold}))
        tables[-1]["shop"] = f"shop {k}"
    return pd.concat(tables)


@pytest.mark.parametrize("kind", ["logistic", "squared"])
def test_the_command_compares_methods_on_new_tasks(kind, tmp_path, capsys):
    table = sold(kind)
    table.to_csv(tmp_path / "t.csv", index=False)
    given = tmp_path / "t.csv", "--label", "y", "--task", "shop", "--out", tmp_path / "out"
    assert run(*given, "--tolerance", 0.01) == 0
    shown = capsys.readouterr().out
    assert "left out, with fewer than 10 rows: shop 7" in shown
    assert "robust meta-learner" in shown
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    old, new = results["data"]["old_tasks"], results["data"]["new_tasks"]
    assert (len(old), len(new)) == (5, 2)
    assert not set(old) & set(new)
    methods = {m["key"]: m for m in results["methods"]}
    assert list(methods) == ["alone", "pooled", "averaging", "robust"]
    for m in methods.values():
        assert m["worst_error"] == max(m["errors"].values())
        assert m["mean_error"] == pytest.approx(np.mean(list(m["errors"].values())))
    model = load_model(tmp_path / "out" / "model.skops")
    assert model[-1].tasks_.tolist() == old
    rows = model[:-1].transform(table)  # as they come
    if kind == "logistic":
        assert set(model[-1].adapt(rows[:5], table["y"][:5]).predict(rows)) <= {"yes", "no"}
    else:
        assert f"({results['data']['label']} − " in shown  # what the saved model predicts
    assert run(*given) == 2
    assert "is not empty" in capsys.readouterr().err


def test_what_the_command_cannot_use_is_refused(tmp_path, capsys):
    table = sold()
    table.to_csv(tmp_path / "t.csv", index=False)
    for given, said in [
        (("--label", "y", "--task", "shops"), "did you mean 'shop'"),
        (("--label", "y", "--task", "y"), "the tasks need a column of their own"),
        (("--label", "y", "--task", "shop", "--least", 20, "--new", 0.9), "6 new and 1 old"),
        (("--label", "y", "--task", "shop", "--new", 1.5), "--new must be a probability"),
        (("--label", "day", "--task", "day"), "the tasks need"),
    ]:
        assert run(tmp_path / "t.csv", *given, "--out", tmp_path / "out") == 2
        assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


CHECKED = [RobustMetaLearner(tol=0.1, random_state=0)]
CHECKED += [TaskModel(), TaskModel(loss="logistic")]


@parametrize_with_checks(CHECKED)
@pytest.mark.filterwarnings("ignore:no tasks are given")
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.SkipTestWarning")
def test_scikit_learn_conventions(estimator, check):
    check(estimator)


def test_names_columns_and_kinds_of_stacked_tasks():
    x, y = pd.DataFrame(np.eye(2), columns=list("ab")), np.array([0.0, 1.0])
    rows, targets, names = stack_tasks({"north": (x, y), "south": (x, y)})
    assert list(rows.columns) == ["a", "b"]
    assert len(rows) == len(targets) == len(names) == 4
    with pytest.raises(ValueError, match=r"task 1 has the columns \['b', 'a'\], and task 0"):
        stack_tasks([(x, y), (x[["b", "a"]], y)])
    with pytest.raises(TypeError, match="must all be strings, or all numbers"):
        stack_tasks({"1": (x, y), 1: (x, y)})
    with pytest.raises(TypeError, match="task 1: y must be of the kind"):
        stack_tasks([(x, y), (x, np.array(["a", "b"]))])
