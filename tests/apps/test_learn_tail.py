"""Tail risk with the options that give `eq:DRO_tuning`, against SciPy and the stated problem."""

import warnings

import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.datasets import load_breast_cancer
from sklearn.exceptions import ConvergenceWarning

import bilevax as bx
from bilevax.learn import TailRiskClassifier, TunedTailRiskClassifier
from tail_reference import logistic, lower_solution, tuned_objective

A = jnp.asarray
AS_STATED = {"train_share": 0, "eta_bounds": (0, np.inf), "l2_bounds": (0, 0)}


def halves(n, seed):
    """n rows to train on and n to validate on, of two features."""
    data = load_breast_cancer()
    chosen = np.random.default_rng(seed).permutation(len(data.data))[: 2 * n]
    x = data.data[chosen][:, :2]
    x, y = (x - x.mean(0)) / x.std(0), data.target[chosen]
    return (x[:n], y[:n]), (x[n:], y[n:])


def signed(rows):
    """The same for SciPy: a column of ones, and labels −1 and 1."""
    return np.column_stack([rows[0], np.ones(len(rows[1]))]), 2.0 * rows[1] - 1


def fitted(train, validation, **options):
    model = TunedTailRiskClassifier(0.5, **(AS_STATED | options))
    return model.fit(*train, X_val=validation[0], y_val=validation[1])


@pytest.mark.parametrize("eta", [0.3, 30.0])
def test_without_a_cap_and_a_penalty_it_is_the_lower_level_of_the_equation(eta):
    train, _ = halves(30, 1)
    model = TailRiskClassifier(0, eta / 30, 0).fit(*train)
    known, q = lower_solution(eta, *signed(train), logistic)
    found = np.append(model.coef_[0], model.intercept_)
    np.testing.assert_allclose(found, known, atol=1e-4)
    assert model.gap_ <= 1e-8
    assert model.risk_ == pytest.approx(q @ logistic(known, *signed(train))[0], abs=1e-5)


@pytest.mark.parametrize("seed", [1, 3])
def test_the_tuned_one_is_the_equation(seed):
    """No η on a grid does better, and the certificate is the library's for the stated problem."""
    n = 60 if seed == 3 else 30
    train, validation = halves(n, seed)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = fitted(train, validation)
    assert model.converged_
    assert model.l2_ == 0
    known = lambda eta: tuned_objective(eta, signed(train), signed(validation), 2 / n, logistic)
    found = known(n * model.eta_)
    assert found == pytest.approx(model.validation_risk_, abs=1e-5)
    assert found <= min(known(eta) for eta in np.geomspace(0.1, 1e4, 16)) + 1e-5


def test_the_problem_is_the_stated_one_in_log_eta():
    train, validation = halves(30, 1)
    model = TunedTailRiskClassifier(0.5, **AS_STATED)
    problem, at = model.problem(*train, X_val=validation[0], y_val=validation[1])
    stated, start = bx.problems.tail_tuning(train, validation)
    draw = np.random.default_rng(0)
    w, q, x2 = draw.standard_normal(3), *draw.dirichlet(np.ones(30), 2)
    block = {"coef": A(w[None, :2]), "intercept": A(w[2:])}
    eta = 0.7
    below = problem.lower_value(A([np.log(eta)]), block, A(q))
    assert float(below) == pytest.approx(float(stated.lower_value(A(30 * eta), A(w), A(q))))
    above = problem.smooth_upper(A([0.0]), A(x2), block, A(q))
    assert float(above) == pytest.approx(float(stated.smooth_upper(A(1.0), A(x2), A(w), A(q))))
    np.testing.assert_allclose(at.x2, start.x2)
    # Each level has its own cap.
    steep = A(np.arange(30.0))
    for of in (problem, stated):
        assert np.max(of.x2.linear_oracle(steep)) == pytest.approx(2 / 30)
        assert np.max(of.y2.linear_oracle(steep)) == pytest.approx(1)
    assert at.x1.shape == (1,)
    # The estimator's saddle point is one of the stated problem, at n times its η.
    fit = fitted(train, validation)
    stated_w = A(np.append(fit.coef_[0], fit.intercept_))
    _, q = lower_solution(30 * fit.eta_, *signed(train), logistic)
    value = stated.lower_value(A(30 * fit.eta_), stated_w, A(q))
    least = stated.lower_value(
        A(30 * fit.eta_), A(lower_solution(30 * fit.eta_, *signed(train), logistic)[0]), A(q)
    )
    assert float(value) == pytest.approx(float(least), abs=1e-6)


def test_an_eta_that_runs_away_is_named():
    train, validation = halves(30, 2)
    with pytest.warns(ConvergenceWarning, match="η has run to .* even weights are best"):
        model = fitted(train, validation)
    assert model.eta_ > 1e3
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert fitted(train, validation, eta_bounds=(1e-3, 1e2)).eta_ == pytest.approx(1e2)


def test_rows_that_separate_without_a_penalty_are_named():
    train, _ = halves(30, 0)
    with pytest.warns(ConvergenceWarning, match="right on all 30 training rows: with l2=0"):
        TailRiskClassifier(0, 0.1, 0).fit(*train)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        TailRiskClassifier(0, 0.1, 1e-3).fit(*train)


@pytest.mark.parametrize("l2", [0.0, 1e-2])
def test_an_l2_that_is_fixed_is_not_tuned(l2):
    train, validation = halves(30, 1)
    model = fitted(train, validation, l2_bounds=(l2, l2), eta_bounds=(1e-3, 1e2))
    assert model.converged_
    assert model.l2_ == pytest.approx(l2)
    assert np.isfinite(model.certificate_.radius) == (l2 == 0)
