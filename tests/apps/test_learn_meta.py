"""The meta-learner: tasks against cvxpy and closed forms, both levels against `bx.certify`."""

import json

import cvxpy as cp
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
from sklearn.base import clone, is_classifier, is_regressor
from sklearn.linear_model import Ridge
from sklearn.utils.estimator_checks import parametrize_with_checks

import bilevax as bx
from bilevax.learn import RobustMetaLearner, TaskModel, load_model, save_model, stack_tasks


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


def test_the_certificate_is_that_of_the_problem(fitted):
    """`bx.certify` knows the problem, not the method, and finds the same lines."""
    tasks, learner, unfitted = fitted
    assert learner.converged_
    problem, start = unfitted.problem(*stack_tasks(tasks))
    found, own = bx.certify(problem, learner.point()), learner.certificate_
    assert not found.breach
    for name, line in found.lines().items():
        assert line <= own.lines()[name] + 1e-6, name
    assert found.stationarity == pytest.approx(own.stationarity, rel=0.02)
    assert found.gap == pytest.approx(own.gap, rel=0.02)
    assert found.objective == pytest.approx(own.objective, abs=1e-9)
    assert own.objective == pytest.approx(learner.task_losses_.sum())
    assert float(problem.upper_value(start.x1, start.x2, start.y1, start.y2)) > 0
    assert not hasattr(unfitted, "tasks_")


def test_a_point_beside_the_solution_is_not_certified(fitted):
    """The tuner's own lines must say so, too, not only `bx.certify`."""
CHECKED = [RobustMetaLearner(random_state=0), RobustMetaLearner(loss="logistic", random_state=0)]
CHECKED += [TaskModel(), TaskModel(loss="logistic")]


@parametrize_with_checks(CHECKED)
@pytest.mark.filterwarnings("ignore:no tasks are given")
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.SkipTestWarning")
def test_scikit_learn_conventions(estimator, check):
    check(estimator)
