"""What the theorems predict for a solver on a problem, before it runs."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

import bilevax as bx
from bilevax import terms
from instances import get, noisy


def test_a_solver_takes_exactly_these_constants_or_those_given():
    instance = get("unique_saddle")
    prepared = bx.PenaltyMethod().prepare(instance.problem, instance.start, 0.05)
    c = bx.theory.penalty_constants(
        epsilon=0.05,
        upper_smoothness=float(instance.problem.upper_smoothness),
        lower_smoothness=float(instance.problem.lower_smoothness),
        diameter=2 * math.sqrt(6),  # x2, z1 and z2 are each in [−1, 1]²
    )
    for name in ("epsilon", "rho", "smoothness", "inner_tolerance", "diameter"):
        assert float(getattr(prepared, name)) == pytest.approx(getattr(c, name), rel=1e-12)
    assert float(prepared.outer.x_weight) == pytest.approx(c.x_weight)
    assert float(prepared.outer.y_weight) == pytest.approx(c.y_weight)
    tuned = bx.PenaltyMethod(rho=7.0, smoothness=6.0, inner_tolerance=0.5, diameter=2.0)
    tuned = tuned.prepare(instance.problem, instance.start, 0.05)
    assert float(tuned.outer.smoothness) == 6.0
    assert float(tuned.outer.x_weight) == 12.0
    assert float(tuned.outer.y_weight) == pytest.approx(0.05 / 4)
    assert float(tuned.outer.inner_tolerance) == 0.5
    assert float(tuned.rho) == 7.0


def test_prediction_bounds_the_quantities_that_it_stands_for():
    """K rests on max f(x⁰, ·) − f_low; here both are known: f = ½x² on [−1, 2] ranges over 2."""
    box = terms.Box(-1.0, 2.0)
    problem = bx.BilevelProblem(
        lambda x1, x2, y1, y2: 0.5 * jnp.sum(x1**2),
        lambda x1, y1, y2: 0.5 * jnp.sum((y1 - x1) ** 2),
        x1=box,
        y1=box,
        upper_smoothness=1.0,
        lower_smoothness=2.0,
    )
    start = bx.Point(x1=jnp.zeros(1), y1=jnp.zeros(1))
    prediction = bx.theory.predict(problem, start, 0.1)
    known = bx.theory.minimax_bounds(
        epsilon=0.1, inner_tolerance=0.1**1.5, smoothness=41.0, x_diameter=math.sqrt(18.0),
        y_diameter=3.0, descent=2.0 + 1, range_below=2.0 + 1,
    )  # fmt: skip
    assert prediction.constants["smoothness"] == 41.0
    assert prediction.constants["D1"] == pytest.approx(math.sqrt(18.0))
    assert prediction.constants["D2"] == pytest.approx(3.0)
    assert prediction.constants["f_low"] <= 0.0
    assert prediction.bounds.K >= known.K
    # H* is 0, and P over all z is least at x = y = −1, z = 2: ½ − ρ·9/2, not f_low.
    below = bx.theory.minimax_bounds(
        epsilon=0.1, inner_tolerance=0.1**1.5, smoothness=41.0, x_diameter=math.sqrt(18.0),
        y_diameter=3.0, descent=2.0 + 1, range_below=44.5,
    )  # fmt: skip
    assert prediction.bounds.C >= below.C > known.C
    assert "rho" in str(prediction)
    minimax = bx.MinimaxProblem(lambda x, y: jnp.sum(x * y), box, box)
    of_minimax = bx.theory.predict(minimax, bx.Point(x=jnp.zeros(2), y=jnp.zeros(2)), 0.1)
    assert of_minimax.constants["smoothness"] == pytest.approx(1.0, rel=0.06)


def test_prediction_follows_the_solver():
    instance = get("many_saddles")
    usual = bx.theory.predict(instance.problem, instance.start, 0.1)
    tuned = bx.theory.predict(
        instance.problem, instance.start, 0.1, solver=bx.PenaltyMethod(rho=1.0, smoothness=2.0)
    )
    assert (usual.constants["rho"], tuned.constants["rho"]) == (10.0, 1.0)
    assert tuned.constants["smoothness"] == 2.0
    assert tuned.bounds.N < usual.bounds.N


def product(**terms_and_constants):
    """f = x1·y1 and f~ = ½(y1 − x1)² on [−1, 1] × [−1, 2]: f is at least −2."""
    known = {"x1": terms.Box(-1.0, 1.0), "y1": terms.Box(-1.0, 2.0)}
    known |= {"upper_smoothness": 1.0, "lower_smoothness": 2.0, "f_low": -2.0}
    return bx.BilevelProblem(
        lambda x1, x2, y1, y2: jnp.sum(x1 * y1),
        lambda x1, y1, y2: 0.5 * jnp.sum((y1 - x1) ** 2),
        **(known | terms_and_constants),
    )


def at(x1, y1):
    return bx.Point(x1=jnp.full(1, x1), y1=jnp.full(1, y1))


def holding(prediction_or_list):
    found = getattr(prediction_or_list, "preconditions", prediction_or_list)
    return {precondition.name: precondition.holds for precondition in found}


def test_level_and_gap_by_hand():
    """L = 1 + 2·10·2 = 41, D₂ = 3, ε̂ = ε^1.5: 2ε̂²(1/L + 4·9·L/ε²) = 2ε³/41 + 72·41·ε."""
    added = 0.1 * 3 / 4 + 2 * 0.1**3 / 41 + 72 * 41 * 0.1
    as_it_is = bx.PenaltyMethod(starter=None)
    exact = bx.theory.predict(product(), at(0.5, 0.5), 0.1, solver=as_it_is)
    assert exact.level == pytest.approx(0.25 + added, rel=1e-9)
    assert exact.gap == pytest.approx((0.25 + added + 2) / 10, rel=1e-9)
    assert (exact.stationarity, exact.distance, exact.holds) == (0.1, 0.0, True)
    # A start that is off has f = 1 and the gap ½·1.5².
    off = bx.theory.predict(product(), at(0.5, 2.0), 0.1, solver=as_it_is)
    assert off.level == pytest.approx(1 + 10 * 1.125 + added, rel=1e-6)
    assert holding(off)["gap of the start"] is False
    assert off.holds is False
    # A start phase may end anywhere: max over y1 by the tangent is 1, with L/2·3² on top.
    moved = bx.theory.predict(product(), at(0.5, 0.5), 0.1)
    assert moved.level == pytest.approx(1 + 4.5 + 10 * 0.1 + added, rel=1e-9)
    assert moved.holds is True
    for part in ("level", "gap", "does not hold  gap of the start"):
        assert part in str(off)


def test_a_minimax_level_by_hand():
    """H = xy − ½y² on [−1, 1]²: its tangent at (1, 0) rises to 1."""
    box = terms.Box(-1.0, 1.0)
    problem = bx.MinimaxProblem(lambda x, y: jnp.sum(x * y - y**2 / 2), box, box, smoothness=2.0)
    found = bx.theory.predict(problem, bx.Point(x=jnp.ones(1), y=jnp.zeros(1)), 0.1)
    added = 0.1 * 2 / 4 + 2 * 0.05**2 * (1 / 2 + 4 * 4 * 2 / 0.01)
    assert found.level == pytest.approx(1 + added, rel=1e-9)
    assert found.gap is None
    assert found.holds is True


@pytest.mark.parametrize("name", ["double_well", "many_saddles"])
def test_the_gap_is_at_most_the_predicted_one(name):
    instance = get(name)
    predicted = bx.theory.predict(instance.problem, instance.start, 0.1)
    solution = bx.solve(instance.problem, instance.start, tolerance=0.1, solver=bx.PenaltyMethod())
    measured = solution.certificate
    assert 0 <= measured.gap <= predicted.gap < math.inf
    # What the answer is measured by is P, too.
    assert measured.objective + 10 * measured.gap <= predicted.level


def test_stochastic_predictions_follow_the_formulas():
    instance = noisy("unique_saddle", deviation=0.3)
    found = bx.theory.predict(instance.problem, instance.start, 0.1)
    c, K = found.constants, found.bounds.K
    L, hat, D = c["smoothness"], 0.1**1.5, 2 * math.sqrt(6)
    assert found.distance == pytest.approx(hat / math.sqrt(0.1 / (2 * D)), rel=1e-6)
    top = found.level - (K - 1) * hat**2 - 0.1 * D / 4
    spent = (top - c["f_low"] + 0.1 * D / 4) / K + hat**2
    assert found.stationarity == pytest.approx(2 * math.sqrt(L * spent), rel=1e-6)
    assert found.stationarity <= math.sqrt(8 * L) * hat * (1 + 1e-9)
    assert found.gap == pytest.approx((found.level - c["f_low"]) / 10)
    assert found.level <= 2 * top - c["f_low"] + 0.1 * D / 2 + K * hat**2
    assert holding(found)["steps of SAPD"] is True
    assert "near the answer" in str(found)
    inner = bx.SAPD(iterations=1, tau=0.01, sigma=0.01, theta=0.1)
    own = bx.PenaltyMethod(outer=bx.StochasticProximalPoint(iterations=5, inner=inner))
    assert (
        holding(bx.theory.preconditions(instance.problem, instance.start, 0.1, own))[
            "steps of SAPD"
        ]
        is False
    )


def test_preconditions_of_bilevel_problems():
    unbounded = product(y1=terms.Ridge(1.0))
    with pytest.raises(ValueError, match="bounded domains") as refused:
        bx.theory.predict(unbounded, at(0.5, 0.5), 0.1)
    assert "preconditions" in refused.value.__notes__[0]
    found = holding(bx.theory.preconditions(unbounded, at(0.5, 0.5), 0.1))
    assert found == {"bounded x1": True, "bounded y1": False, "gap of the start": True}
    solvers = {
        "smoothness": bx.PenaltyMethod(smoothness=6.0),
        "constants of the theorem": bx.PenaltyMethod(inner_tolerance=0.06),
        "gap of the start": bx.PenaltyMethod(start_gap=0.2),
    }
    for name, solver in solvers.items():
        found = holding(bx.theory.preconditions(product(), at(0.5, 0.5), 0.1, solver))
        assert [known for known, holds in found.items() if not holds] == [name]
    for other in (
        bx.PenaltyMethod(outer=bx.ProximalPoint(center="last")),
        bx.PenaltyMethod(outer=bx.ProximalPoint(max_iterations=1)),
        bx.PenaltyMethod(outer=bx.ProximalPoint(inner=bx.OptFOM(max_iterations=1))),
        bx.PenaltyMethod(outer=bx.ProximalPoint(inner=bx.ExtraGradient())),
        bx.PenaltyMethod(rho=1e-3),
    ):
        found = holding(bx.theory.preconditions(product(), at(0.5, 0.5), 0.1, other))
        assert found["constants of the theorem"] is False
    estimated = product(lower_smoothness=None)
    assert holding(bx.theory.preconditions(estimated, at(0.5, 0.5), 0.1))["smoothness"] is None


def line(**constants):
    """y minimises −y under y ≤ x on [−1, 1]: |−1| is L, D = 2."""
    return bx.ConstrainedBilevelProblem(
        lambda x, y: jnp.sum((y - 0.5) ** 2),
        lambda x, y: -jnp.sum(y),
        constraints=lambda x, y: y - x,
        x=terms.Box(0.0, 1.0),
        y=terms.Box(-1.0, constants.pop("most", 1.0)),
        **(FLAT | constants),
    )


FLAT = {
    "upper_smoothness": 2.0,
    "lower_smoothness": 1e-12,
    "constraint_smoothness": 0.0,
    "constraint_lipschitz": math.sqrt(2.0),
}
HALF = bx.Point(x=jnp.full(1, 0.5), y=jnp.zeros(1))


def test_preconditions_of_constrained_problems():
    """thm:constrained asks for ε ≤ ρL/4 and ε ≤ ρG/4; at ρ = 1 and ε = 0.2 for G ≥ 0.8."""
    found = {p.name: p for p in bx.theory.preconditions(line(slater_margin=1.0,
             lower_lipschitz=1.0), HALF, 0.2)}  # fmt: skip
    assert found["ε ≤ ρG/4"].holds is True
    assert found["ε ≤ ρG/4"].limit == pytest.approx(5 / 4)
    assert found["multiplier bound"].value == pytest.approx(2 * 1 * 2 / 1)
    weak = bx.PenaltyMethod(rho=1.0)
    narrow = line(slater_margin=0.5, lower_lipschitz=1.0)
    prediction = bx.theory.predict(narrow, HALF, 0.2, solver=weak)
    assert (holding(prediction)["ε ≤ ρG/4"], holding(prediction)["ε ≤ ρL/4"]) == (False, True)
    flat = line(slater_margin=1.0, lower_lipschitz=0.5)
    found = holding(bx.theory.preconditions(flat, HALF, 0.2, weak))
    assert (found["ε ≤ ρG/4"], found["ε ≤ ρL/4"]) == (True, False)
    # With a bound that is given, what G would have to be: 2·1·2/8.
    found = {p.name: p for p in bx.theory.preconditions(line(multiplier_bound=8.0), HALF, 0.2)}
    assert found["ε ≤ ρG/4"].holds is found["multiplier bound"].holds is None
    assert "G ≥ 0.5," in found["multiplier bound"].note
    endless = line(slater_margin=1.0, lower_lipschitz=1.0, most=math.inf)
    found = holding(bx.theory.preconditions(endless, HALF, 0.2))
    assert (found["bounded y"], found["multiplier bound"]) == (False, False)


def test_the_public_penalty_is_the_formula_and_can_be_solved():
    """f = ½(x − 1)² + y·x2 − ½x2² and f~ = ½(y1 − x)² + y1·y2 − ½y2², in NumPy and by solve."""
    box = terms.Box(-2.0, 2.0)
    problem = bx.BilevelProblem(
        lambda x1, x2, y1, y2: jnp.sum((x1 - 1) ** 2 / 2 + y1 * x2 - x2**2 / 2),
        lambda x1, y1, y2: 0.1 * jnp.sum((y1 - x1) ** 2 / 2 + y1 * y2 - y2**2 / 2),
        x1=box, x2=box, y1=box, y2=box, upper_smoothness=2.0, lower_smoothness=0.3,
    )  # fmt: skip
    made = bx.penalty(problem, 4.0)
    assert float(made.smoothness) == pytest.approx(2.0 + 2 * 4 * 0.3)
    x1, x2, y1, y2, z1, z2 = np.random.default_rng(0).uniform(-1, 1, 6)
    below = lambda y, z: 0.1 * ((y - x1) ** 2 / 2 + y * z - z**2 / 2)
    value = (x1 - 1) ** 2 / 2 + y1 * x2 - x2**2 / 2 + 4 * (below(y1, z2) - below(z1, y2))
    blocks = {"x1": x1, "x2": x2, "y1": y1, "y2": y2, "z1": z1, "z2": z2}
    point = bx.Point(**{name: jnp.full(1, number) for name, number in blocks.items()})
    there = made.point(point)
    assert [float(part[0]) for part in (*there.x, *there.y)] == [x1, y1, y2, x2, z1, z2]
    assert float(made.value(there.x, there.y)) == pytest.approx(value, rel=1e-12)
    assert made.stated_point(there) == point.replace(rho=made.rho)
    start = point.replace(z1=None, z2=None)
    solution = bx.solve(made, made.point(start), tolerance=0.1)
    assert solution.status == "certified", solution.status
    p = made.stated_point(solution.point)
    # In the inside of the boxes ∇P vanishes: in x2 it is y1 − x2, in z1 −0.4·(z1 − x1 + y2).
    assert abs(float(p.y1[0] - p.x2[0])) <= 0.1
    assert 0.4 * abs(float(p.z1[0] - p.x1[0] + p.y2[0])) <= 0.1


def test_the_public_lagrangian_is_the_formula():
    """f~ = −y + λ(y − x) for λ in [0, B], and points there and back."""
    problem = line(slater_margin=1.0, lower_lipschitz=1.0)
    made = bx.lagrangian(problem, HALF)
    lam = (jnp.full(1, 1.5), None)
    x, y = jnp.full(1, 0.25), jnp.full(1, -0.5)
    assert float(made.lower_value(x, y, lam)) == pytest.approx(0.5 + 1.5 * (-0.75))
    assert float(made.y2.diameter(lam)) == pytest.approx(4.0)
    assert math.isinf(float(made.y2.value((jnp.full(1, 4.5), None))))
    assert float(made.upper_value(x, None, y, lam)) == pytest.approx(1.0)
    there = made.point(HALF)
    assert (there.x1, there.y1, there.y2) == (HALF.x, HALF.y, (jnp.zeros(1), None))
    back = made.stated_point(there.replace(y2=lam, z2=(jnp.full(1, 2.0), None), rho=3.0))
    assert (float(back.multipliers.lam[0]), float(back.multipliers.lam_bar[0])) == (6.0, 1.5)
    assert made.stated_point(there).multipliers is None
    # Penalised by hand it is P: (y − ½)² + ρ(−y + z2(y − x) + z − y2(z − x)).
    penalised = bx.penalty(made, 3.0)
    at_point = penalised.point(there.replace(y2=lam, z1=jnp.full(1, 0.75)))
    value = 0.25 + 3 * (0.0 + 0.0 * (0 - 0.5) + 0.75 - 1.5 * (0.75 - 0.5))
    z2 = at_point.y[2]
    value += 3 * float(z2[0][0]) * (0 - 0.5)
    assert float(penalised.value(at_point.x, at_point.y)) == pytest.approx(value)
