"""What the theorems predict for a solver on a problem, before it runs."""

import math

import jax.numpy as jnp
import pytest

import bilevax as bx
from bilevax import terms
from instances import get


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
