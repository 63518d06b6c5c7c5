"""The classifiers, as scikit-learn asks estimators to be."""

import pickle
import warnings

import jax.numpy as jnp
import numpy as np
import pytest
import sklearn
from scipy import sparse
from sklearn.base import clone
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

from bilevax.learn import (
    GroupDROClassifier,
    HierarchicalDROClassifier,
    SoftGroupDROClassifier,
    TailRiskClassifier,
    TunedGroupDROClassifier,
    TunedHierarchicalDROClassifier,
    TunedTailRiskClassifier,
)
from bilevax.learn._split import held_out, row_hashes
from learn_problems import blobs

ALL = [
    GroupDROClassifier(),
    TailRiskClassifier(),
    TunedGroupDROClassifier(random_state=0),
    TunedTailRiskClassifier(random_state=0),
    HierarchicalDROClassifier(),
    TunedHierarchicalDROClassifier(random_state=0),
    SoftGroupDROClassifier(random_state=0),
]
names = lambda e: type(e).__name__


@parametrize_with_checks(ALL)
# Some checks fit on a dozen rows, of which few are left to validate on, or that separate.
@pytest.mark.filterwarnings("ignore:these groups have fewer than")
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.SkipTestWarning")
def test_scikit_learn_conventions(estimator, check):
    check(estimator)


@pytest.mark.parametrize("estimator", ALL, ids=names)
def test_sparse_and_dense_features_give_the_same_model(estimator):
    x, y, _ = blobs(n=400)
    x[np.abs(x) < 0.5] = 0
    dense, thin = (clone(estimator).fit(m, y) for m in (x, sparse.csr_matrix(x)))
    np.testing.assert_allclose(thin.coef_, dense.coef_, atol=1e-9)
    np.testing.assert_allclose(thin.predict_proba(sparse.csc_matrix(x)), dense.predict_proba(x))


@pytest.mark.parametrize("estimator", ALL, ids=names)
def test_copies_through_pickle_and_clone_predict_the_same(estimator):
    x, y, _ = blobs(n=400)
    fitted = clone(estimator).fit(x, y)
    again = pickle.loads(pickle.dumps(fitted))
    np.testing.assert_array_equal(again.predict_proba(x), fitted.predict_proba(x))
    assert not hasattr(clone(fitted), "coef_")


@pytest.mark.parametrize("estimator", ALL, ids=names)
def test_three_classes_with_names(estimator):
    x, y, _ = blobs(n=600, classes=3)
    labels = np.array(["ash", "birch", "cedar"])[y]
    fitted = clone(estimator).fit(x, labels)
    assert fitted.classes_.tolist() == ["ash", "birch", "cedar"]
    assert fitted.coef_.shape == (3, x.shape[1])
    assert fitted.intercept_.sum() == pytest.approx(0, abs=1e-12)
    probability = fitted.predict_proba(x)
    np.testing.assert_allclose(probability.sum(axis=1), 1)
    assert (fitted.classes_[probability.argmax(axis=1)] == fitted.predict(x)).all()
    assert fitted.score(x, labels) > 0.4


def test_at_a_high_price_group_dro_is_reweighted_logistic_regression():
    x, y, groups = blobs(n=400)
    l2, n = 1e-2, len(y)
    weight = 1 / np.bincount(groups)[groups] / 4
    known = LogisticRegression(C=1 / l2, tol=1e-10, max_iter=5000)
    known.fit(x, y, sample_weight=weight)
    found = GroupDROClassifier(1e9, l2).fit(x, y, groups)
    np.testing.assert_allclose(found.coef_, known.coef_, atol=1e-5)
    np.testing.assert_allclose(found.group_weights_, 0.25, atol=1e-8)
    even = TailRiskClassifier(1.0, 1.0, l2).fit(x, y)
    plain = LogisticRegression(C=1 / (l2 * n), tol=1e-10, max_iter=5000).fit(x, y)
    np.testing.assert_allclose(even.coef_, plain.coef_, atol=1e-5)


def test_at_a_low_price_the_worst_groups_losses_are_level():
    x, y, groups = blobs(n=400)
    fitted = GroupDROClassifier(1e-4, 1e-2).fit(x, y, groups)
    weighed = fitted.group_weights_ > 1e-3
    assert np.ptp(fitted.group_losses_[weighed]) < 1e-3
    assert fitted.group_losses_[~weighed].max(initial=0) <= fitted.group_losses_[weighed].max()
    even = GroupDROClassifier(1e4, 1e-2).fit(x, y, groups)
    assert fitted.group_losses_.max() < even.group_losses_.max()


def test_groups_reach_fit_through_pipelines_and_searches():
    x, y, groups = blobs(n=400)
    with sklearn.config_context(enable_metadata_routing=True):
        model = GroupDROClassifier().set_fit_request(groups=True)
        pipeline = make_pipeline(StandardScaler(), model).fit(x, y, groups=groups)
        assert pipeline[-1].groups_.tolist() == [0, 1, 2, 3]
        search = GridSearchCV(model, {"eta": [0.1, 10.0]}, cv=3)
        search.fit(x, y, groups=groups)
        assert search.best_estimator_.group_weights_.shape == (4,)
        tuned = TunedGroupDROClassifier(random_state=0).set_fit_request(groups=True)
        scores = cross_val_score(tuned, x, y, params={"groups": groups}, cv=3)
        assert scores.min() > 0.5


def test_tuned_on_given_rows_with_all_that_it_tells():
    x, y, groups = blobs(n=600)
    names = np.array(["a", "b", "c", "d"])[groups]
    held = np.arange(len(y)) % 3 == 0
    tuned = TunedGroupDROClassifier(l2_bounds=(1e-4, 1.0)).fit(
        x[~held], y[~held], names[~held], X_val=x[held], y_val=y[held], groups_val=names[held]
    )
    assert tuned.converged_
    assert tuned.certificate_.epsilon <= 1e-3
    assert 1e-4 <= tuned.l2_ <= 1.0
    assert tuned.groups_.tolist() == ["a", "b", "c", "d"]
    # The model is the lower level's solution at the prices found.
    same = GroupDROClassifier(tuned.eta_, tuned.l2_).fit(x[~held], y[~held], names[~held])
    np.testing.assert_allclose(tuned.coef_, same.coef_, atol=1e-3)
    np.testing.assert_allclose(tuned.group_weights_, same.group_weights_, atol=1e-4)
    losses = -tuned.predict_log_proba(x[held])[np.arange(held.sum()), y[held]]
    means = [losses[names[held] == g].mean() for g in tuned.groups_]
    np.testing.assert_allclose(tuned.validation_losses_, means, atol=1e-3)
    weighed = tuned.validation_weights_ > 1e-3
    assert np.ptp(tuned.validation_losses_[weighed]) < 1e-3
    assert tuned.validation_losses_[weighed].max() == tuned.validation_losses_.max()
    best = min(tuned.history_, key=lambda step: step.worst_loss)
    assert best.worst_loss <= tuned.history_[0].worst_loss
    assert best.epsilon <= 1e-3


def test_the_problem_is_there_for_the_librarys_own_methods():
    x, y, groups = blobs(n=400)
    tuned = TunedGroupDROClassifier(random_state=0)
    problem, start = tuned.problem(x, y, groups)
    fitted = clone(tuned).fit(x, y, groups)
    block = {"coef": jnp.asarray(fitted.coef_), "intercept": jnp.asarray(fitted.intercept_)}
    x1 = jnp.log(jnp.asarray([fitted.eta_, fitted.l2_]))
    x2, q = jnp.asarray(fitted.validation_weights_), jnp.asarray(fitted.group_weights_)
    value = float(problem.upper_value(x1, x2, block, q))
    assert value == pytest.approx(fitted.certificate_.objective, abs=1e-6)
    assert float(problem.upper_value(start.x1, start.x2, start.y1, start.y2)) > value
    assert not hasattr(tuned, "classes_")


def test_the_split_keeps_groups_together_with_their_share_and_copies_on_one_side():
    x, y, groups = blobs(n=2000)
    x[1000:] = x[:1000]
    y[1000:], groups[1000:] = y[:1000], groups[:1000]
    trains, validates = held_out(x, y, groups, np.ones(len(y)), 0.25, seed=3)
    np.testing.assert_array_equal(trains, ~validates)
    np.testing.assert_array_equal(validates[:1000], validates[1000:])
    for g in range(4):
        assert np.mean(validates[groups == g]) == pytest.approx(0.25, abs=0.01)
    other = held_out(x, y, groups, np.ones(len(y)), 0.25, seed=4)[1]
    assert 0.2 < np.mean(validates & other) / 0.25 < 0.35  # independent: about a quarter of it
    order = np.random.default_rng(0).permutation(len(y))
    moved = held_out(x[order], y[order], groups[order], np.ones(len(y)), 0.25, seed=3)[1]
    np.testing.assert_array_equal(moved, validates[order])


def test_hashes_of_rows_are_those_of_their_content():
    x = blobs(n=300)[0]
    x[np.abs(x) < 0.5] = 0
    hashes = row_hashes(x, 1)
    np.testing.assert_array_equal(hashes, row_hashes(sparse.csr_matrix(x), 1))
    assert len(np.unique(hashes)) == len(x)
    assert 0.4 < np.mean(hashes >> np.uint64(63)) < 0.6


BAD = [
    ({"eta": 0.0}, "eta must be finite and > 0"),
    ({"l2": -1.0}, "l2 must be finite and ≥ 0"),
    ({"tol": np.nan}, "tol must be finite and > 0"),
    ({"max_iter": 0}, "max_iter must be a whole number ≥ 1"),
    ({"solver": "sgd"}, "solver must be 'auto', 'newton' or 'sampled', not 'sgd'"),
    ({"solver": "minibatch"}, "'minibatch' was removed.*use 'auto', or 'sampled'"),
]


@pytest.mark.parametrize(("given", "says"), BAD)
def test_bad_settings_are_named(given, says):
    x, y, groups = blobs()
    with pytest.raises(ValueError, match=says):
        GroupDROClassifier(**given).fit(x, y, groups)


TUNED_BAD = [
    ({"validation_fraction": 1.0}, "validation_fraction must be between 0 and 1"),
    ({"eta_bounds": (1.0, 0.1)}, "eta_bounds must be 0 ≤ low ≤ high"),
    ({"l2_bounds": 3.0}, "l2_bounds must be two numbers"),
    ({"l2_bounds": (0.0, 1.0)}, "l2_bounds must be 0 < low ≤ high, or"),
    ({"tol": 0.0}, "tol must be finite and > 0"),
]


@pytest.mark.parametrize(("given", "says"), TUNED_BAD)
def test_bad_settings_of_the_tuned_are_named(given, says):
    x, y, groups = blobs(n=400)
    with pytest.raises(ValueError, match=says):
        TunedGroupDROClassifier(**given).fit(x, y, groups)


@pytest.mark.parametrize("share", [0.0, -0.1, 1.5, np.nan])
def test_a_share_is_a_share(share):
    x, y, _ = blobs()
    with pytest.raises(ValueError, match="share must be"):
        TunedTailRiskClassifier(share).fit(x, y)
    if share == 0:  # no cap of the training weights
        return
    with pytest.raises(ValueError, match="share must be"):
        TailRiskClassifier(share).fit(x, y)
    with pytest.raises(ValueError, match="train_share must be"):
        TunedTailRiskClassifier(train_share=share).fit(x, y)


def test_bad_groups_are_named():
    x, y, groups = blobs(n=400)
    model, tuned = GroupDROClassifier(), TunedGroupDROClassifier(random_state=0)
    with pytest.raises(ValueError, match="one entry for each of the 400 rows, not shape"):
        model.fit(x, y, groups[:-1])
    with pytest.raises(ValueError, match="3 rows have no group"):
        model.fit(x, y, np.where(np.arange(400) < 3, np.nan, groups))
    with pytest.raises(ValueError, match=r"the training part has no row.*\['0'\]"):
        model.fit(x, y, groups, sample_weight=(groups > 0).astype(float))
    held = {"X_val": x, "y_val": y}
    with pytest.raises(ValueError, match=r"groups_val has no row of the groups \[2\]"):
        tuned.fit(x, y, groups, **held, groups_val=np.where(groups == 2, 1, groups))
    with pytest.raises(ValueError, match=r"groups without any training row: \[9\]"):
        tuned.fit(x, y, groups, **held, groups_val=np.where(groups == 2, 9, groups))
    with pytest.raises(ValueError, match="groups_val if and only if"):
        tuned.fit(x, y, groups, **held)
    with pytest.raises(ValueError, match="need X_val"):
        tuned.fit(x, y, groups, y_val=y)
    with pytest.raises(ValueError, match=r"y_val has classes that y has not: \[7\]"):
        tuned.fit(x, y, groups, X_val=x, y_val=np.where(y == 1, 7, y), groups_val=groups)
    rare = np.where(np.arange(400) < 8, 9, groups)
    with pytest.warns(UserWarning, match=r"fewer than 5 validation rows.*'9' \(2\)"):
        tuned.fit(x, y, rare)


def test_one_class_is_not_enough():
    x, y, _ = blobs()
    with pytest.raises(ValueError, match="more than one class"):
        GroupDROClassifier().fit(x, np.zeros(len(y)))


def test_features_of_any_scale_are_certified():
    """Columns a million times larger than others, and far from zero."""
    x, y, groups = blobs(n=600)
    x = x * np.array([1e-3, 1, 1e3, 1, 1]) + np.array([0, 0, 1e4, 50, 0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tuned = TunedGroupDROClassifier(random_state=0).fit(x, y, groups)
    assert tuned.converged_


def test_features_beyond_all_scales_are_refused():
    x, y, groups = blobs()
    with np.errstate(all="ignore"), pytest.raises(ValueError, match="scale the features"):
        GroupDROClassifier().fit(x * 1e200, y, groups)


def test_words_by_the_thousand(monkeypatch):
    """More columns than a Hessian is made for, most entries zero."""
    from bilevax.learn import _newton

    monkeypatch.setattr(_newton, "LARGEST", 400)
    draw = np.random.default_rng(0)
    x = sparse.random(600, 600, density=0.1, random_state=0, format="csr")
    score = np.asarray(x[:, :50].sum(axis=1))[:, 0] + 0.1 * draw.standard_normal(600)
    y = (score > 2.5).astype(int)
    groups = 2 * y + draw.integers(0, 2, 600)
    model = GroupDROClassifier(0.1, 1e-2).fit(x, y, groups)
    assert model.gap_ <= 1e-8
    few = x[:, :300]  # for which one is made
    by_factor = GroupDROClassifier(0.1, 1e-2).fit(few, y, groups)
    padded = sparse.hstack([few, sparse.csr_matrix((600, 300))], format="csr")
    without = GroupDROClassifier(0.1, 1e-2).fit(padded, y, groups)
    np.testing.assert_allclose(without.coef_[:, :300], by_factor.coef_, atol=1e-5)
    assert not without.coef_[:, 300:].any()
    tuned = TunedGroupDROClassifier(random_state=0).fit(x, y, groups)
    assert tuned.certificate_.epsilon <= 1e-2
