"""`eq:DRO_tuning` as it is stated: closed forms, cvxpy and SciPy; and an η that runs away.

With a = 1 for all rows, ℓ = ½(w − b)² and the targets 0, 0, 1, every weight is positive and the
lower level's w is (1 + η)/(2 + 3η): from ½ at η = 0, the middle, down to the mean ⅓ for η → ∞. So
validation targets t − δ, t, t + δ, of which the worst two count, want w = t, at
η = (1 − 2t)/(3t − 1) for ⅓ < t < ½. For t < ⅓ they want η = ∞.
"""

import cvxpy as cp
import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest

import bilevax as bx
from bilevax.certificates.afar import look_afar
from bilevax.certificates.definition import definition_of
from bilevax.problems import tail_tuning
from bilevax.terms import Box, Free
from tail_reference import logistic, lower_solution, squared, tail_mean

A = jnp.asarray
ONES, DELTA = np.ones((3, 1)), 0.1


def small(t, **options):
    train, validation = (ONES, [0.0, 0.0, 1.0]), (ONES, [t - DELTA, t, t + DELTA])
    given = {"share": 2 / 3, "loss": "squared", "intercept": False}
    return tail_tuning(train, validation, **(given | options))


def test_the_answer_in_closed_form():
    t = 0.42
    solution = bx.solve(*small(t))
    assert solution.certified
    assert not solution.certificate.ran_away
    assert float(solution.point.x1) == pytest.approx((1 - 2 * t) / (3 * t - 1), rel=1e-4)
    np.testing.assert_allclose(solution.point.y1, t, atol=1e-5)
    np.testing.assert_allclose(solution.point.x2, [0.5, 0, 0.5], atol=1e-5)
    assert solution.certificate.objective == pytest.approx(DELTA**2 / 2, abs=1e-7)


def test_an_eta_that_runs_away_is_certified_and_named():
    solution = bx.solve(*small(0.2))
    assert solution.certified
    eta = float(solution.point.x1)
    assert eta > 100
    for said in (str(solution.status), str(solution.certificate)):
        assert f"x1 has run to {eta:.3g}, {eta / 2:.3g} times as far as the start" in said
        assert "F may have no minimum" in said


def some_rows(kind, n=20, d=3):
    draw = np.random.default_rng(0)
    x = draw.standard_normal((2 * n, d))
    b = x @ draw.standard_normal(d) + draw.standard_normal(2 * n)
    b = np.where(b > 0, 1.0, -1.0) if kind == "logistic" else b
    return (x[:n], b[:n]), (x[n:], b[n:])


@pytest.mark.parametrize("kind", ["squared", "logistic"])
@pytest.mark.parametrize("eta", [0.5, 20.0])
def test_both_levels_are_those_of_cvxpy(kind, eta):
    """SciPy has the adversary's q, cvxpy its dual: max over q in the simplex of
    ⟨q, ℓ⟩ − (η/2)‖q − 1/n‖² is the least ν + Σ max(ℓᵢ − ν + η/n, 0)²/(2η) − η/(2n) over ν."""
    (x, b), validation = some_rows(kind)
    n, cap = len(b), 0.2
    problem, start = tail_tuning((x, b), validation, loss=kind, cap=cap, intercept=False)
    w, level = cp.Variable(x.shape[1]), cp.Variable()
    losses = cp.square(x @ w - b) / 2 if kind == "squared" else cp.logistic(-cp.multiply(b, x @ w))
    above = cp.pos(losses - level + eta / n)
    known = cp.Problem(cp.Minimize(level + cp.sum_squares(above) / (2 * eta) - eta / (2 * n)))
    value = known.solve(solver="CLARABEL")
    loss = {"squared": squared, "logistic": logistic}[kind]
    found, q = lower_solution(eta, x, b, loss)
    np.testing.assert_allclose(found, w.value, atol=1e-4)
    stated = problem.lower_value(A(eta), A(found), A(q))
    assert float(stated) == pytest.approx(value, abs=1e-6)
    # The same (w, q) is a saddle point of what the problem states, and x2 takes its caps.
    of_y1, of_y2 = jax.grad(problem.smooth_lower, argnums=(1, 2))(A(eta), A(found), A(q))
    np.testing.assert_allclose(of_y1, 0, atol=1e-6)
    assert np.linalg.norm(problem.y2.residual(A(q), -of_y2)) < 1e-6
    own = loss(found, *validation)[0]
    x2 = problem.x2.linear_oracle(A(own))
    assert np.max(x2) == pytest.approx(cap)
    upper = float(problem.upper_value(A(eta), x2, A(found), A(q)))
    assert upper == pytest.approx(tail_mean(own, cap), abs=1e-9)
    assert start.x1 == 1
    assert problem.x1.project(A(1e30)) == 1e30


def test_a_loss_of_ones_own_and_a_ridge():
    (x, b), validation = some_rows("squared")
    own = lambda y1, rows: 0.5 * (rows[0] @ y1["w"] - rows[1]) ** 2
    usual, at = tail_tuning((x, b), validation, loss="squared", intercept=False)
    same, start = tail_tuning((x, b), validation, loss=own, parameters={"w": np.zeros(3)})
    w = A([0.3, -1.0, 2.0])
    for given, block in ((usual, w), (same, {"w": w})):
        value = given.lower_value(A(2.0), block, at.y2)
        assert float(value) == pytest.approx(np.mean(squared(np.asarray(w), x, b)[0]))
    assert start.y1["w"].shape == (3,)
    ridge, _ = tail_tuning((x, b), validation, loss="squared", l2=0.5)
    plain, _ = tail_tuning((x, b), validation, loss="squared")
    longer = A([0.3, -1.0, 2.0, 7.0])  # the last one is the intercept
    more = [p.lower_value(A(2.0), longer, at.y2) for p in (ridge, plain)]
    assert float(more[0] - more[1]) == pytest.approx(0.25 * float(jnp.sum(w**2)))


ROWS = (np.ones((2, 1)), [0.0, 1.0])
BAD = {
    "pair": ({"train": 3.0}, TypeError, "train must be a pair"),
    "empty": ({"train": (np.ones((0, 1)), [])}, ValueError, "a matrix with rows"),
    "targets": ({"validation": (np.ones((2, 1)), [1.0])}, ValueError, "validation: targets must"),
    "columns": ({"validation": (np.ones((2, 2)), [1.0, 0.0])}, ValueError, "as many columns"),
    "nan": ({"train": ([[np.nan]], [1.0])}, ValueError, "train: features must be finite"),
    "text": ({"train": ([["a"]], [1.0])}, TypeError, "train: features must be numbers"),
    "labels": ({"train": (np.ones((2, 1)), [0.0, 2.0])}, ValueError, "0 and 1 or −1 and 1"),
    "mixed": ({"train": (np.ones((3, 1)), [0.0, 1.0, -1.0])}, ValueError, "0 and 1 or −1 and 1"),
    "cap": ({"cap": 0.4}, ValueError, "cap=0.4 is less than 1/2"),
    "no-cap": ({"cap": np.nan}, ValueError, "cap must be finite"),
    "share": ({"share": 1.5}, ValueError, "share must be a share of the rows"),
    "loss": ({"loss": "hinge"}, ValueError, "loss must be"),
    "eta": ({"eta": -1.0}, ValueError, "eta must be finite and ≥ 0"),
    "most": ({"most_eta": 0.5}, ValueError, "eta=1.0 is above most_eta=0.5"),
    "no-most": ({"most_eta": np.nan}, ValueError, "most_eta must be > 0"),
    "l2": ({"l2": -1.0}, ValueError, "l2 must be finite and ≥ 0"),
    "start": ({"parameters": [1.0]}, ValueError, "parameters must have shape"),
    "own": ({"loss": lambda y1, rows: rows}, ValueError, "needs y1 to begin with"),
    "separable": (
        {"train": ([[1.0], [2.0]], [0.0, 1.0])},
        ValueError,
        "separates these labels … l2 > 0",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_meant_is_refused(name):
    changes, error, said = BAD[name]
    given = {"train": ROWS, "validation": ROWS} | changes
    with pytest.raises(error, match=said.replace(" … ", ".*")):
        tail_tuning(given.pop("train"), given.pop("validation"), **given)


def test_labels_that_separate_are_fine_where_the_lower_level_has_an_answer():
    apart = ([[1.0], [2.0]], [0.0, 1.0])
    for options in ({"l2": 0.1}, {"y1": Box(-9.0, 9.0)}, {"loss": "squared"}):
        tail_tuning(apart, apart, **options)
    # Nor are they asked about where a row lies on either side.
    tail_tuning(([[1.0], [2.0], [3.0]], [0, 1, 0]), apart)


def test_a_loss_must_have_one_number_for_each_row():
    problem, start = tail_tuning(
        (ONES,), (ONES,), loss=lambda y1, rows: jnp.sum(rows[0] @ y1), parameters=np.zeros(1)
    )
    with pytest.raises(TypeError, match="one number for each of the 3 rows"):
        bx.solve(problem, start)


# ---------------------------------------------------------------------------------------------
# Running away
# ---------------------------------------------------------------------------------------------


def upper(x1, x2, y1, y2, data):
    """fall/(1 + y) + slope·y + bend/2·(y/unit − 1)²"""
    bent = data["bend"] / 2 * (y1 / data["unit"] - 1) ** 2
    return data["fall"] / (1 + y1) + data["slope"] * y1 + bent


def lower(x1, y1, y2, data):
    return 0.5 * (y1 - x1) ** 2


USUAL = {"fall": 0.0, "slope": 0.0, "bend": 0.0, "unit": 1.0}


@pytest.mark.parametrize(
    ("numbers", "x", "start", "most", "away"),
    [
        ({"fall": 1.0}, 1e4, 1.0, np.inf, True),  # 1/x has no minimum
        ({"fall": 1.0}, 6.9e6, 0.0, np.inf, True),
        ({"fall": 1e6}, 1e7, 0.0, np.inf, True),
        ({"fall": 1.0}, 50.0, 0.0, np.inf, False),  # not far
        ({"fall": 1.0}, 1e4, 1e4, np.inf, False),  # begun there
        ({"fall": 1.0}, 1e4, 1.0, 2e4, False),  # bounded
        ({"bend": 1.0, "unit": 3e6}, 3e6, 0.0, np.inf, False),  # in units of 1e-6
        ({"bend": 1e12, "unit": 3e6}, 3e6, 0.0, np.inf, False),
        ({"bend": 1e-3, "unit": 3e6}, 3e6, 0.0, np.inf, False),
        ({"fall": 1.0, "slope": 1e-8}, 1e4 - 1, 1.0, np.inf, False),  # a flat minimum
    ],
)
def test_running_away_is_told_from_answers_that_are_large(numbers, x, start, most, away):
    data = {name: A(value) for name, value in (USUAL | numbers).items()}
    problem = bx.BilevelProblem(upper, lower, x1=Box(0.0, most), y1=Free(), data=data)
    point = bx.Point(x1=A(x), y1=A(x), z1=A(x), rho=A(1e4))
    begun = bx.Point(x1=A(start), y1=A(start))
    said = look_afar(definition_of(problem), problem, begun, point, 1e-6)
    assert said.startswith(f"x1 has run to {x:.3g}") if away else said == ""


def test_the_entry_that_has_run_away_is_found_beside_one_that_is_rightly_large():
    def upper(x1, x2, y1, y2):
        return 1e-4 * (x1[0] - 1000) ** 2 + 10 / (1 + x1[1]) + y1

    problem = bx.BilevelProblem(
        upper, lambda x1, y1, y2: 0.5 * y1**2, x1=Box(0.0, np.inf), y1=Free()
    )
    point = bx.Point(x1=A([1000.0, 2057.0]), y1=A(0.0), z1=A(0.0), rho=A(1e4))
    for first in (1.0, 1000.0):
        begun = bx.Point(x1=A([first, 1.0]), y1=A(0.0))
        said = look_afar(definition_of(problem), problem, begun, point, 1e-6)
        assert said.startswith("x1[1] has run to 2.06e+03, 1.03e+03 times as far")


def test_labels_that_a_column_separates_in_part_and_other_columns_are_refused():
    rng = np.random.default_rng(0)
    x = np.column_stack([rng.normal(size=40), np.arange(40) < 5])
    labels = np.where((rng.random(40) < 0.5) | (x[:, 1] > 0), 1.0, -1.0)
    with pytest.raises(ValueError, match="or some of them from the rest"):
        bx.problems.tail_tuning((x, labels), (x, labels))
    table = pd.DataFrame(rng.normal(size=(6, 2)), columns=["a", "b"])
    with pytest.raises(ValueError, match="the columns of train in their order"):
        bx.problems.tail_tuning(
            (table, np.ones(6)), (table[["b", "a"]], np.ones(6)), loss="squared"
        )
