"""Hierarchical group DRO, against cvxpy, brute force, finite differences and `bilevax.certify`."""

import itertools

import cvxpy as cp
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
from sklearn.exceptions import ConvergenceWarning

import bilevax as bx
from bilevax.learn import (
    GroupDROClassifier,
    HierarchicalDROClassifier,
    TunedGroupDROClassifier,
    TunedHierarchicalDROClassifier,
    load_model,
    save_model,
)
from bilevax.learn._certificate import judge, saddle_gap
from bilevax.learn._fit import fit_levels
from bilevax.learn._moved import MovedLevels, moved_lower
from bilevax.learn._problem import as_block, bilevel_problem, moved_item_losses
from bilevax.learn._risk import group_risk
from bilevax.learn._rows import Rows
from bilevax.learn._tuning import Tuner
from learn_problems import blobs, group_program

RADII = np.array([0.05, 0.3, 0.0, 0.15, 0.2, 0.1])
PRICES = np.log([[1e-3, 1e2], [1e-6, 1e2]])


def moved_program(x, y, radius, weigh, l2, classes=2):
    """min over w of weigh(moved losses) + (l2/2)‖w‖², by Clarabel: its value and its scores."""
    w, c = cp.Variable((x.shape[1], classes)), cp.Variable((1, classes))
    if classes == 2:
        held = [w[:, 0] == 0, c[0, 0] == 0]
        inner = cp.multiply(1 - 2 * y, x @ w[:, 1] + c[0, 1]) + radius * cp.norm(w[:, 1])
        losses = cp.logistic(inner)
    else:
        held, rows = [], []
        for i, label in enumerate(y):
            apart = [cp.norm(w[:, k] - w[:, label]) for k in range(classes)]
            score = x[i : i + 1] @ w + c - (x[i] @ w[:, label] + c[0, label])
            rows.append(cp.log_sum_exp(score[0] + radius[i] * cp.hstack(apart)))
        losses = cp.hstack(rows)
    cost, limits = weigh(losses)
    problem = cp.Problem(cp.Minimize(cost + l2 / 2 * cp.sum_squares(w)), limits + held)
    problem.solve(solver="CLARABEL")
    return problem.value, x @ w.value + c.value


@pytest.mark.parametrize(("classes", "eta"), [(2, 0.05), (2, 1.0), (3, 0.2)])
def test_the_solution_is_the_one_that_cvxpy_finds(classes, eta):
    x, y, groups = blobs(n=200 if classes == 2 else 60, classes=classes)
    radii = RADII[: groups.max() + 1]
    model = HierarchicalDROClassifier(radii, eta, 1e-2).fit(x, y, groups)
    program = group_program(groups, eta)
    known, scores = moved_program(x, y, radii[groups], program, 1e-2, classes)
    q, losses = model.group_weights_, model.group_losses_
    price = eta / 2 * np.sum((q - 1 / len(q)) ** 2)
    value = q @ losses - price + 0.5e-2 * np.sum(model.coef_**2)
    assert value == pytest.approx(known, abs=1e-6)
    assert model.gap_ <= 1e-8
    found = model.decision_function(x)
    if classes == 2:
        np.testing.assert_allclose(found, scores[:, 1], atol=1e-3)
    else:
        centred = scores - scores.mean(axis=1, keepdims=True)
        np.testing.assert_allclose(found - found.mean(axis=1, keepdims=True), centred, atol=1e-3)


@pytest.mark.parametrize("classes", [2, 3])
def test_no_move_within_the_radius_costs_more_than_the_closed_form(classes):
    """Attained by two classes; an upper bound for three."""
    draw = np.random.default_rng(0)
    x, y, groups = blobs(n=30, d=3, classes=classes)
    rows, risk = Rows(x, y, classes), group_risk(groups, groups.max() + 1, np.ones(30))
    radii = RADII[: groups.max() + 1]
    w = draw.standard_normal(rows.shape)
    closed = moved_lower(rows, risk, 1.0, 0.1, w, radii).losses.value
    moves = draw.standard_normal((20_000, 3))
    moves /= np.linalg.norm(moves, axis=1, keepdims=True)
    worst = np.array(
        [
            Rows(x[i] + radii[g] * moves, np.full(len(moves), y[i]), classes).losses(w).value.max()
            for i, g in enumerate(groups)
        ]
    )
    assert np.all(worst <= closed + 1e-9)
    if classes == 2:
        np.testing.assert_allclose(worst, closed, atol=1e-3)


@pytest.mark.parametrize(("classes", "intercept"), [(2, True), (3, False)])
def test_derivatives_are_those_of_finite_differences(classes, intercept):
    draw = np.random.default_rng(0)
    x, y, groups = blobs(classes=classes)
    rows = Rows(x, y, classes, intercept)
    risk = group_risk(groups, groups.max() + 1, np.linspace(0.5, 2, len(y)))
    radii = RADII[: groups.max() + 1]
    w, v = 0.3 * draw.standard_normal((2, *rows.shape))
    start = np.append(np.log([0.5, 0.01]), radii)
    at = lambda w, x1=start: moved_lower(rows, risk, *np.exp(x1[:2]), w, x1[2:])
    central = lambda f, step=1e-6: (f(step) - f(-step)) / (2 * step)
    here = at(w)
    slope = central(lambda t: at(w + t * v).value)
    assert slope == pytest.approx(np.sum(here.gradient * v), abs=1e-8)
    curve = central(lambda t: at(w + t * v).gradient)
    np.testing.assert_allclose(here.curve(v), curve, atol=1e-8)
    np.testing.assert_allclose(here.hessian() @ v.ravel(), here.curve(v).ravel(), atol=1e-12)
    of_prices = here.of_prices(here.weighing.weights)[0]
    for i, (row, one) in enumerate(zip(here.with_prices(), np.eye(len(start)), strict=True)):
        known = central(lambda t, one=one: at(w, start + t * one).gradient)
        np.testing.assert_allclose(row, known, atol=1e-8)
        known = central(lambda t, one=one: at(w, start + t * one).value)
        assert of_prices[i] == pytest.approx(known, abs=1e-8)


def levels_of(classes=2, bound=1.0, n=600):
    x, y, groups = blobs(n=n, classes=classes)
    held = np.arange(n) % 3 == 0
    rows = lambda kept: Rows(x[kept], y[kept], classes)
    risk = lambda kept: group_risk(groups[kept], groups.max() + 1, np.ones(kept.sum()))
    radii = np.full(groups.max() + 1, bound)
    low, high = np.append(PRICES[:, 0], 0 * radii), np.append(PRICES[:, 1], radii)
    return MovedLevels(rows(~held), risk(~held), rows(held), risk(held), low, high)


@pytest.fixture(scope="module")
def tuned():
    """Levels, the tuning of them, and its certificate."""
    levels = levels_of()
    return levels, fit_levels(levels, 1e-3, "newton", lambda count, step: None)


def certified(levels, fit):
    """The certificate of the library for the same point."""
    judged = fit.judged
    block = lambda w: as_block(levels.train, w)
    point = bx.Point(
        x1=jnp.asarray(fit.tuned.x), x2=jnp.asarray(judged.x2),
        y1=block(judged.y1), y2=jnp.asarray(judged.y2),
        z1=block(judged.z1), z2=jnp.asarray(judged.z2), rho=judged.certificate.rho,
    )  # fmt: skip
    return bx.certify(bilevel_problem(levels, moved_item_losses), point)


def same(own, known):
    own, known = own.as_dict(), known.as_dict()
    for line in ("stationarity", "response_x2", "response_z1", "response_z2", "objective", "rho"):
        assert own[line] == pytest.approx(known[line], rel=1e-3, abs=1e-6), line
    assert known["gap_below"] <= own["gap"] + 1e-12
    assert own["gap"] <= 1e-6


def test_the_certificate_is_that_of_the_library(tuned):
    levels, fit = tuned
    assert fit.judged.certificate.epsilon <= 1e-3
    assert np.any(fit.tuned.x[2:] > 0.01)  # rows do move
    same(fit.judged.certificate, certified(levels, fit))


@pytest.mark.long
def test_the_certificate_for_three_classes_is_that_of_the_library():
    levels = levels_of(3)
    fit = fit_levels(levels, 1e-3, "newton", lambda count, step: None)
    assert fit.judged.certificate.epsilon <= 1e-3
    same(fit.judged.certificate, certified(levels, fit))


def test_radii_that_are_not_stationary_are_not_certified(tuned):
    levels, fit = tuned
    tuner = Tuner(levels, 1e-5, 1e-5)
    moved = np.append(fit.tuned.x[:2], np.clip(fit.tuned.x[2:] + 0.1, 0, 1))
    off = tuner.at(moved, fit.tuned.lower.w, 1e-12)
    slope = np.linalg.norm(levels.normal(off.x, off.jacobian.T @ off.x2))
    assert slope > 3e-3
    certificate = judge(levels, off, tuner.kept, 1e-3).certificate
    assert certificate.epsilon >= 0.9 * slope


def test_validation_losses_follow_the_radii_as_finite_differences_do(tuned):
    levels, _ = tuned
    tuner, zero = Tuner(levels, 1e-6, 1e-5), np.zeros(levels.train.shape)
    x = np.append(np.log([0.3, 0.02]), RADII[:4] + 0.05)
    at = tuner.at(x, zero, 1e-16)
    for i, step in enumerate(1e-5 * np.eye(6)):
        there, back = (tuner.at(x + s, zero, 1e-16).upper for s in (step, -step))
        np.testing.assert_allclose((there - back) / 2e-5, at.jacobian[:, i], atol=1e-6)


def test_no_radii_of_a_grid_do_better_than_the_tuned_ones(tuned):
    levels, fit = tuned
    tuner = Tuner(levels, 1e-6, 1e-9)
    w = fit.tuned.lower.w
    best = tuner.worst(fit.tuned.x, levels.held.losses(w))
    for radii in itertools.product([0.0, 0.1, 0.4], repeat=4):
        for prices in (fit.tuned.x[:2], np.log([0.1, 1e-3])):
            x = np.append(prices, radii)
            assert best <= tuner.worst(x, tuner.solved(x, w, 1e-9)[1]) + 1e-4


def zero_radius(x, y, groups):
    """The radius from which on no coefficients are the solution, at even weights of the groups.

    With none, the intercept b makes Σ s·σ(−s·b) zero, and zero is a minimum if and only if the
    gradient of the losses there is no longer than radius·Σ σ(−s·b).
    """
    weight = 1 / np.bincount(groups)[groups] / (groups.max() + 1)
    share = weight @ y
    wrong = np.where(y == 1, 1 - share, share)
    return np.linalg.norm((weight * wrong * (2 * y - 1)) @ x) / (weight @ wrong)


@pytest.mark.parametrize("factor", [0.9, 1.1])
def test_where_no_coefficients_are_best_this_is_found_and_named(factor):
    x, y, groups = blobs(n=400)
    radius = factor * zero_radius(x, y, groups)
    model = HierarchicalDROClassifier(radius, 1e9, 1e-2)
    if factor < 1:
        assert np.linalg.norm(model.fit(x, y, groups).coef_) > 0.02
        return
    with pytest.warns(ConvergenceWarning, match="the coefficients are zero"):
        model.fit(x, y, groups)
    assert np.linalg.norm(model.coef_) < 1e-6
    assert model.gap_ <= 1e-8


def test_what_is_not_smooth_is_not_certified():
    """All moves are so large that no coefficients are best, and no loss depends on the radii."""
    levels = levels_of(bound=5.0)
    tuner = Tuner(levels, 1e-5, 1e-5)
    x = np.append(np.log([1e9, 1e-2]), np.full(4, 3.0))
    at = tuner.at(np.clip(x, levels.low, levels.high), np.zeros(levels.train.shape), 1e-12)
    assert at.lower.collapsed
    certificate = judge(levels, at, tuner.kept, 1e-3).certificate
    assert certificate.epsilon == np.inf
    assert not certificate.certified(1e9)


@pytest.mark.parametrize("size", [1.0, 1e-3, 0.0])
def test_the_saddle_gap_is_never_below_the_true_one(size):
    """F(w) − min over w of f~(w, q), by cvxpy, near a solution of zero."""
    x, y, groups = blobs()
    rows, risk, l2 = Rows(x, y, 2), group_risk(groups, 4, np.ones(len(y))), 1e-2
    radii = RADII[:4] + 0.4
    w = size * np.random.default_rng(0).standard_normal(rows.shape)
    at = moved_lower(rows, risk, 0.1, l2, w, radii)
    q = at.weighing.weights
    price = 0.05 * np.sum((q - 0.25) ** 2)
    weigh = lambda losses: (at.row_weights @ losses - price, [])
    least, _ = moved_program(x, y, radii[groups], weigh, l2)
    assert saddle_gap(at) >= at.value - least - 1e-8


def test_without_moves_it_is_group_dro():
    x, y, groups = blobs(n=400)
    still = GroupDROClassifier(0.1, 1e-2).fit(x, y, groups)
    names = dict.fromkeys(range(4), 0.0)
    moved = HierarchicalDROClassifier(names, 0.1, 1e-2).fit(x, y, groups)
    np.testing.assert_allclose(moved.coef_, still.coef_, atol=1e-6)
    fixed = {"eta_bounds": (0.1, 0.1), "l2_bounds": (1e-2, 1e-2), "random_state": 0}
    tuned = TunedHierarchicalDROClassifier(**fixed).fit(x, y, groups)
    plain = TunedGroupDROClassifier(**fixed).fit(x, y, groups)
    assert tuned.converged_
    assert tuned.certificate_.objective <= plain.certificate_.objective + 1e-5


def test_the_tuned_model_is_saved_and_its_problem_is_the_one_solved(tmp_path):
    x, y, groups = blobs(n=400)
    model = TunedHierarchicalDROClassifier(random_state=0, radius_bound=0.5)
    problem, start = model.problem(x, y, groups)
    model.fit(x, y, groups)
    save_model(model, tmp_path / "m.skops")
    np.testing.assert_array_equal(load_model(tmp_path / "m.skops").radii_, model.radii_)
    block = {"coef": jnp.asarray(model.coef_), "intercept": jnp.asarray(model.intercept_)}
    x1 = jnp.asarray([np.log(model.eta_), np.log(model.l2_), *model.radii_])
    assert start.x1.shape == x1.shape
    x2, q = jnp.asarray(model.validation_weights_), jnp.asarray(model.group_weights_)
    value = float(problem.upper_value(x1, x2, block, q))
    assert value == pytest.approx(model.certificate_.objective, abs=1e-6)


BAD = [
    (-0.1, "radius of group 'a' must be finite and ≥ 0"),
    ({"a": 0.1}, r"no radius of the groups \['b', 'c', 'd'\]"),
    ({**dict.fromkeys("abcd", 0.1), "e": 1.0}, r"groups that no row is in: \['e'\]"),
    ([0.1, 0.2], "one for each of the 4 groups, not of shape"),
]


@pytest.mark.parametrize(("radii", "says"), BAD)
def test_bad_radii_are_named(radii, says):
    x, y, groups = blobs()
    with pytest.raises(ValueError, match=says):
        HierarchicalDROClassifier(radii).fit(x, y, np.array(list("abcd"))[groups])


def test_radii_of_a_series_belong_to_its_index():
    x, y, groups = blobs()
    given = pd.Series({"d": 0.3, "c": 0.0, "b": 0.2, "a": 0.1})
    model = HierarchicalDROClassifier(given).fit(x, y, np.array(list("abcd"))[groups])
    assert model.radii_.tolist() == [0.1, 0.2, 0.0, 0.3]


def test_a_bad_bound_of_the_radii_is_named():
    x, y, groups = blobs(n=400)
    for bound, error in ((0.0, ValueError), (None, TypeError)):
        with pytest.raises(error, match="radius_bound must be"):
            TunedHierarchicalDROClassifier(radius_bound=bound).fit(x, y, groups)


def turned(seed, n=240, shift=0.5):
    """A mark that misleads, and validation rows of one group whose first feature is turned."""
    draw, parts = np.random.default_rng(seed), []
    for share in (0.8, 0.5):
        y = np.arange(n) % 2
        mark = np.where(draw.random(n) < share, y, 1 - y)
        signal = 0.6 * (2 * y - 1) + draw.standard_normal(n)
        x = np.column_stack([signal, 1.5 * (2 * mark - 1) + 0.5 * draw.standard_normal(n)])
        parts.append((x, y, 2 * y + mark))
    x, _, group = parts[1]
    x[group == 2, 0] *= -shift
    x[group == 2, 0] -= 2 * shift
    return parts


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
@pytest.mark.parametrize("seed", [3, 4, 11])
def test_certificates_next_to_zero_coefficients_are_of_the_norm_itself(seed):
    """There the smoothed norm, by which Newton's method goes, has other slopes."""
    (x, y, g), (xv, yv, gv) = turned(seed)
    model = TunedHierarchicalDROClassifier(random_state=0)
    levels = model._levels(x, y, g, X_val=xv, y_val=yv, groups_val=gv)[0]
    fit = fit_levels(levels, 1e-3, "newton", lambda count, step: None)
    judged, x1 = fit.judged, fit.tuned.x
    w, b = judged.z1[0, :-1], judged.z1[0, -1]
    assert 0 < np.linalg.norm(w) < 1e-5
    sign, radius = 2 * y - 1, x1[2:][g]
    weights = judged.y2[g] / np.bincount(g)[g]
    pull = weights / (1 + np.exp(sign * (x @ w + b) - radius * np.linalg.norm(w)))
    of_w = pull @ (radius[:, None] * w / np.linalg.norm(w) - sign[:, None] * x)
    line = np.hypot(np.linalg.norm(of_w + np.exp(x1[1]) * w), pull @ sign)
    assert judged.certificate.response_z1 >= judged.certificate.rho * line * (1 - 1e-6)
