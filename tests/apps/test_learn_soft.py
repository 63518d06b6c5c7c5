"""Soft group DRO, against scikit-learn, cvxpy, finite differences and `bilevax.certify`."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
import sklearn
from sklearn.linear_model import LogisticRegression

import bilevax as bx
from bilevax.learn import (
    SoftGroupDROClassifier,
    TunedGroupDROClassifier,
    load_model,
    save_model,
)
from bilevax.learn._certificate import judge
from bilevax.learn._fit import fit_levels
from bilevax.learn._known import code_known
from bilevax.learn._problem import as_block, soft_bilevel_problem
from bilevax.learn._tuning import Tuner
from learn_problems import blobs, group_program, solve_program

CALM = {"eta_bounds": (0.3, 1e2)}


@pytest.fixture(scope="module")
def data():
    """Training rows, and validation rows with groups."""
    x, y, groups = blobs(n=900, d=3)
    held = np.arange(900) % 3 == 0
    named = {"X_val": x[held], "y_val": y[held], "groups_val": groups[held]}
    return x[~held], y[~held], groups[~held], named


@pytest.fixture(scope="module")
def tuned(data):
    """Levels of rows of which a third has a known group, and the tuning of them."""
    x, y, groups, named = data
    some = np.where(np.arange(len(y)) % 3 == 0, groups, -1)
    levels, _ = SoftGroupDROClassifier()._levels(x, y, some, **named)
    return levels, fit_levels(levels, 1e-3, "newton", lambda count, step: None)


@pytest.fixture(scope="module")
def model(data):
    """Fitted without any known group of a training row."""
    x, y, _, named = data
    return SoftGroupDROClassifier().fit(x, y, **named)


def test_derivatives_are_those_of_finite_differences(tuned):
    levels, _ = tuned
    draw = np.random.default_rng(0)
    x = levels.starts[1] + 0.1 * draw.standard_normal(len(levels.low))
    w, u = 0.3 * draw.standard_normal((2, *levels.train.shape))
    d = draw.standard_normal(len(x))
    central = lambda f, step=1e-6: (f(step) - f(-step)) / (2 * step)
    at = levels.lower(x, w)
    known = central(lambda t: levels.lower(x + t * d, w).gradient)
    np.testing.assert_allclose(at.with_step(d), known, atol=1e-8)
    assert at.along_prices(u) @ d == pytest.approx(np.sum(known * u), abs=1e-8)
    slope, size = at.of_prices(at.weighing.weights)
    assert slope @ d == pytest.approx(central(lambda t: levels.lower(x + t * d, w).value), abs=1e-8)
    assert np.all(size >= np.abs(slope))
    curve = central(lambda t: at.__class__(at.rows, at.risk, at.eta, at.l2, w + t * u).gradient)
    np.testing.assert_allclose(at.curve(u), curve, atol=1e-8)
    np.testing.assert_allclose(at.hessian() @ u.ravel(), at.curve(u).ravel(), atol=1e-12)
    own = levels.own(x)
    assert own.slope @ d == pytest.approx(central(lambda t: levels.own(x + t * d).value), abs=1e-8)
    loss, v = levels.loss(x[2:]), d[2:].reshape(levels.train.predictor_shape)
    curve = central(lambda t: levels.loss(x[2:] + t * d[2:]).gradient)
    np.testing.assert_allclose(loss.curve(v), curve, atol=1e-8)
    np.testing.assert_allclose(loss.hessian() @ v.ravel(), loss.curve(v).ravel(), atol=1e-12)


def test_the_adjoint_gives_the_change_of_the_validation_losses(tuned):
    levels, _ = tuned
    draw = np.random.default_rng(0)
    x = np.append(np.log([0.5, 0.02]), levels.first + 0.1 * draw.standard_normal(len(levels.first)))
    tuner, zero = Tuner(levels, 1e-6, 1e-5), np.zeros(levels.train.shape)
    at = tuner.at(x, zero, 1e-16)
    for d in 1e-5 * draw.standard_normal((3, len(x))):
        there, back = (tuner.at(x + step, zero, 1e-16).upper for step in (d, -d))
        np.testing.assert_allclose((there - back) / 2, at.jacobian @ d, atol=1e-10)


def test_the_certificate_is_that_of_the_library(tuned):
    levels, fit = tuned
    judged = fit.judged
    block = lambda w: as_block(levels.train, w)
    point = bx.Point(
        x1=jnp.asarray(fit.tuned.x), x2=jnp.asarray(judged.x2),
        y1=block(judged.y1), y2=jnp.asarray(judged.y2),
        z1=block(judged.z1), z2=jnp.asarray(judged.z2), rho=judged.certificate.rho,
    )  # fmt: skip
    known = bx.certify(soft_bilevel_problem(levels), point).as_dict()
    own = judged.certificate.as_dict()
    assert own["epsilon"] <= 1e-3
    for line in ("stationarity", "response_x2", "response_z1", "response_z2", "objective", "rho"):
        assert own[line] == pytest.approx(known[line], rel=1e-3, abs=1e-6), line
    assert known["gap_below"] <= own["gap"] + 1e-12
    assert own["gap"] <= 1e-6


def test_a_predictor_that_is_not_stationary_is_not_certified(tuned):
    levels, fit = tuned
    tuner = Tuner(levels, 1e-5, 1e-5)
    moved = np.append(fit.tuned.x[:2], fit.tuned.x[2:] + 0.2)
    moved[2::3] -= 0.4
    off = tuner.at(moved, fit.tuned.lower.w, 1e-12)
    slope = np.linalg.norm(off.jacobian.T @ off.x2 + off.slope)
    assert slope > 3e-3
    assert judge(levels, off, tuner.kept, 1e-3).certificate.epsilon >= 0.9 * slope


def test_tuning_the_predictor_does_no_worse_than_leaving_it(tuned):
    """With v held at the likeliest it is PG-DRO."""
    levels, fit = tuned
    ends = (np.append(end[:2], levels.first) for end in (levels.low, levels.high))
    held = dataclasses.replace(levels, **dict(zip(("low", "high"), ends, strict=True)))
    left = fit_levels(held, 1e-3, "newton", lambda count, step: None)
    np.testing.assert_array_equal(left.tuned.x[2:], levels.first)
    assert left.judged.certificate.epsilon <= 1e-3
    assert fit.tuned.worst < left.tuned.worst - 1e-3


def test_the_predictor_starts_as_multinomial_logistic_regression(data):
    """Of attributes alone, which every label may have, scikit-learn fits the same model."""
    x, y, _, named = data
    attribute = {**named, "groups_val": named["groups_val"] % 2}
    levels, names = SoftGroupDROClassifier(predictor_l2=0.05)._levels(x, y, **attribute)
    features = lambda x, y: np.column_stack([x, np.eye(2)[y]])
    known = LogisticRegression(C=2 / (0.05 * 300), fit_intercept=False, tol=1e-10, max_iter=5000)
    known.fit(features(named["X_val"], named["y_val"]), attribute["groups_val"])
    # Two scores with a ridge each are one with half of it.
    np.testing.assert_allclose(
        levels.risk.probability, known.predict_proba(features(x, y)), atol=1e-5
    )
    assert names.tolist() == [0, 1]


def test_the_model_is_the_one_that_cvxpy_finds_at_its_probabilities(data, model):
    x, y, _, _ = data
    p = model.group_probabilities_
    assert model.converged_
    np.testing.assert_allclose(p.sum(axis=1), 1)
    assert not p[y == 0][:, 2:].any()  # groups 2 and 3 are those of label 1
    assert not p[y == 1][:, :2].any()
    mean = (p / p.sum(axis=0)).T

    def weigh(losses):
        """The dual of the adversary's problem, as `group_program` has it for mean losses."""
        return group_program(np.arange(4), model.eta_)(mean @ losses)

    _, scores = solve_program(x, y, weigh, model.l2_)
    np.testing.assert_allclose(model.decision_function(x), scores, atol=5e-3)


def test_known_groups_of_all_rows_are_group_dro(data):
    x, y, groups, named = data
    soft = SoftGroupDROClassifier(**CALM).fit(x, y, groups, **named)
    hard = TunedGroupDROClassifier(**CALM).fit(x, y, groups, **named)
    np.testing.assert_array_equal(soft.group_probabilities_, np.eye(4)[groups])
    assert soft.validation_losses_.max() == pytest.approx(hard.validation_losses_.max(), abs=1e-4)
    assert soft.converged_


def test_rows_split_off_are_known_ones(data):
    x, y, groups, _ = data
    some = np.where(np.arange(len(y)) % 2 == 0, groups, -1)
    levels, _ = SoftGroupDROClassifier(random_state=0)._levels(x, y, some)
    assert len(levels.held) == pytest.approx(0.25 * 300, abs=3)
    assert len(levels.train) + len(levels.held) == len(y)
    assert np.sum(levels.train.allowed.sum(axis=1) == 2) == 300


@pytest.mark.parametrize("missing", [-1, None, np.nan, pd.NA])
def test_every_sign_of_a_missing_group_is_understood(missing):
    groups = np.array(["b", missing, "a", missing], dtype=object)
    names, train, held = code_known(groups, 4, pd.Series(["b", "a"]), 2)
    assert names.tolist() == ["a", "b"]
    assert train.tolist() == [1, -1, 0, -1]
    assert held.tolist() == [1, 0]


def test_the_problem_is_the_one_solved_and_the_model_is_saved(data, model, tmp_path):
    x, y, _, named = data
    problem, start = SoftGroupDROClassifier().problem(x, y, **named)
    block = {"coef": jnp.asarray(model.coef_), "intercept": jnp.asarray(model.intercept_)}
    x1 = jnp.asarray([np.log(model.eta_), np.log(model.l2_), *model.predictor_coef_.ravel()])
    assert start.x1.shape == x1.shape
    x2, q = jnp.asarray(model.validation_weights_), jnp.asarray(model.group_weights_)
    value = float(problem.upper_value(x1, x2, block, q))
    assert value == pytest.approx(model.certificate_.objective, abs=1e-6)
    save_model(model, tmp_path / "m.skops")
    again = load_model(tmp_path / "m.skops")
    np.testing.assert_array_equal(again.group_probabilities_, model.group_probabilities_)


def test_groups_reach_fit_by_routing(data):
    x, y, groups, _ = data
    some = np.where(np.arange(len(y)) % 2 == 0, groups, -1)
    with sklearn.config_context(enable_metadata_routing=True):
        routed = SoftGroupDROClassifier(random_state=0).set_fit_request(groups=True)
        assert routed.get_metadata_routing().fit.requests["groups"]
        assert routed.fit(x, y, groups=some).groups_.tolist() == [0, 1, 2, 3]


def test_a_sample_first_comes_to_the_same_answer(data, model, monkeypatch):
    from bilevax.learn import _fit

    monkeypatch.setattr(_fit, "SAMPLE_ROWS", 150)
    monkeypatch.setattr(_fit, "ROWS_A_PARAMETER", 1)
    x, y, _, named = data
    sampled = SoftGroupDROClassifier(solver="sampled").fit(x, y, **named)
    assert sampled.converged_
    assert sampled.certificate_.objective <= model.certificate_.objective + 1e-3


def test_what_identifies_no_group_is_named(data):
    x, y, groups, named = data
    soft = SoftGroupDROClassifier(random_state=0)
    with pytest.raises(ValueError, match="no row has a known group"):
        soft.fit(x, y, np.full(len(y), -1))
    with pytest.raises(ValueError, match=r"rows of the classes \[1\] have no group"):
        soft.fit(x, y, np.where(y == 0, groups, -1))
    other = lambda code: {
        **named,
        "groups_val": np.where(named["groups_val"] == 3, code, groups_val),
    }
    groups_val = named["groups_val"]
    with pytest.raises(ValueError, match=r"no training row can be in the groups \[9\]"):
        soft.fit(x, y, np.where(groups == 3, 2, groups), **other(9))
    with pytest.raises(ValueError, match=r"the validation part has no row.*\['3'\]"):
        soft.fit(x, y, groups, **other(-1))
    with pytest.raises(ValueError, match="one entry for each of the 600 rows"):
        soft.fit(x, y, groups[:-1])
    with pytest.raises(ValueError, match="need X_val"):
        soft.fit(x, y, groups, groups_val=groups)
    with pytest.raises(ValueError, match="sample_weight_val need X_val"):
        soft.fit(x, y, groups, sample_weight_val=np.ones(len(y)))
    with pytest.raises(ValueError, match="X_val needs y_val"):
        soft.fit(x, y, groups, X_val=x)


def test_words_for_no_group_and_groups_of_two_kinds():
    given = np.array(["a", "-1", "", "NA", "nan", "b", None], dtype=object)
    names, codes, _ = code_known(given, 7, None, 0)
    assert names.tolist() == ["a", "b"]
    assert codes.tolist() == [0, -1, -1, -1, -1, 1, -1]
    with pytest.raises(TypeError, match="must all be of one kind"):
        code_known(np.array([1, "1"], dtype=object), 2, None, 0)


@pytest.mark.parametrize(
    ("given", "error", "says"),
    [
        ({"gamma": -1.0}, ValueError, "gamma must be finite and ≥ 0"),
        ({"predictor_l2": 0.0}, ValueError, "predictor_l2 must be finite and > 0"),
        ({"predictor_l2": None}, TypeError, "predictor_l2 must be one number"),
    ],
)
def test_bad_settings_are_named(data, given, error, says):
    x, y, groups, _ = data
    with pytest.raises(error, match=says):
        SoftGroupDROClassifier(**given).fit(x, y, groups)
