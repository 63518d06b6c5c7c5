"""The epigraph form: kinks become variables, with the answers of closed forms."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bilevax as bx
from bilevax.functions import up_to_date
from bilevax.problems import epigraph_form
from bilevax.terms import Box

WANTED, NOISY = np.array([0.9, -0.3, 0.1]), np.array([1.5, -1.0, 0.2])


def least_squares(x, y, d):
    return jnp.sum((y - d) ** 2) / 2


def problem_with(lower=least_squares, constraints=None):
    return bx.ConstrainedBilevelProblem(
        upper=lambda x, y, d: jnp.sum((y - WANTED) ** 2) / 2,
        lower=lower,
        constraints=constraints,
        x=Box(0.0, 2.0),
        y=Box(-3.0, 3.0),
        data=jnp.asarray(NOISY),
    )


START = bx.Point(x=jnp.asarray(1.0), y=jnp.zeros(3))


def test_soft_thresholds_and_a_bound_on_positive_parts():
    """y(x) shrinks the data by x; its positive parts are bounded by a constraint that is slack."""
    stated = problem_with(
        lambda x, y, d: least_squares(x, y, d) + x * jnp.sum(jnp.abs(y)),
        lambda x, y, d: jnp.sum(jax.nn.relu(y)) + jnp.max(y) - 10,
    )
    problem, start = epigraph_form(stated, START)
    assert jax.tree.map(jnp.shape, start.y["t"]) == {"constraints": [(3,), ()], "lower": [(3,)]}
    solution = bx.solve(problem, start, tolerance=1e-6, progress=False)
    assert solution.certified, solution.status
    # With the third entry at zero, ½Σ(|dᵢ| − x − |wᵢ|)² over the first two is least at their mean.
    x = np.mean(np.abs(NOISY[:2]) - np.abs(WANTED[:2]))
    shrunk = np.sign(NOISY) * np.maximum(np.abs(NOISY) - x, 0)
    assert float(solution.point.x) == pytest.approx(x, abs=1e-5)
    np.testing.assert_allclose(solution.point.y["y"], shrunk, atol=1e-4)  # 1/ρ off


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (least_squares, "no absolute value"),
        (lambda x, y, d: least_squares(x, y, d) - jnp.sum(jnp.abs(y)), "falls where"),
        (lambda x, y, d: jnp.sum((jnp.abs(y) - 0.01) ** 2), "falls where"),
        # This one is convex, but the inner |y| may not grow in it.
        (lambda x, y, d: jnp.sum(jax.nn.relu(3 - jnp.abs(y)) + 2 * jnp.abs(y)), "in another one"),
        (lambda x, y, d: jnp.sum(jnp.abs(y**2 - 1)), "not affine"),
        (lambda x, y, d: jnp.sum(jax.nn.softplus(y) - jax.nn.log_sigmoid(y)), "no absolute value"),
        (lambda x, y, d: jax.nn.logsumexp(y), "no absolute value"),
    ],
)
def test_what_has_no_epigraph_form_is_refused(function, said):
    with pytest.raises(ValueError, match=said):
        epigraph_form(problem_with(function), START)


def test_smooth_formulas_are_left_alone_and_masks_are_understood():
    mask = np.array([True, False, True])
    stated = problem_with(
        lambda x, y, d: (
            jnp.sum(jax.nn.softplus(-y)) + jax.nn.logsumexp(y) + x * jnp.sum(jnp.abs(y))
        ),
        lambda x, y, d: jnp.max(y, where=mask, initial=-jnp.inf) - 1,
    )
    problem, start = epigraph_form(stated, START.replace(z=START.y, rho=1.0))
    assert jax.tree.map(jnp.shape, start.y["t"]) == {"constraints": [()], "lower": [(3,)]}
    assert start.z is None
    y = {"y": jnp.asarray([0.5, 9.0, -1.0]), "t": start.y["t"]}
    found = problem.called("constraints", START.x, y)
    assert np.all(np.isfinite(found["above"]))
    wanted = stated.smooth_lower(START.x, y["y"]) - 10.5  # Σ|y|, where t is zero
    assert float(problem.smooth_lower(START.x, y)) == pytest.approx(float(wanted))


def test_what_a_function_reads_may_change():
    weight = [1.0]
    stated = problem_with(lambda x, y, d: least_squares(x, y, d) + weight[0] * jnp.sum(jnp.abs(y)))
    problem, _ = epigraph_form(stated, START)
    y = {"y": START.y, "t": {"lower": [jnp.ones(3)]}}
    value = lambda p: float(up_to_date(p).smooth_lower(START.x, y))
    before = value(problem)
    weight[0] = 2.0
    assert value(problem) == pytest.approx(before + 3)


def test_sources_of_minibatches():
    rows = {"a": np.linspace(0.5, 1.5, 64)}
    source = bx.data.Levels(bx.data.Arrays(rows, batch=8), bx.data.Arrays(rows, batch=16))
    kinked = lambda of: bx.ConstrainedBilevelProblem(
        upper=lambda x, y, d: jnp.mean((y[0] - d["a"]) ** 2),
        lower=lambda x, y, d: of(y, d) + x[0] * jnp.abs(y[0]),
        x=Box(0.0, 2.0),
        y=Box(-3.0, 3.0),
        data=source,
    )
    begin = bx.Point(x=jnp.ones(1), y=jnp.zeros(1))
    stated = kinked(lambda y, d: jnp.mean((y[0] - d["a"]) ** 2))
    problem, start = epigraph_form(stated, begin)
    known, y = problem.complete(), {"y": jnp.full(1, 0.5), "t": {"lower": [jnp.asarray(0.5)]}}
    wanted = stated.complete().smooth_lower(start.x, y["y"])
    assert float(known.smooth_lower(start.x, y)) == pytest.approx(float(wanted))
    with pytest.raises(ValueError, match="for each sample"):
        epigraph_form(kinked(lambda y, d: jnp.mean(jax.nn.relu(1 - d["a"] * y[0]))), begin)


def test_the_other_functions_are_as_they_were():
    """But the lower level is not strongly convex in t."""
    stated = problem_with(constraints=lambda x, y, d: jnp.max(jnp.abs(y)) - x)
    stated = dataclasses.replace(stated, lower_modulus=1.0, multiplier_bound=3.0)
    problem, start = epigraph_form(stated, START)
    assert problem.lower_modulus is None
    assert problem.multiplier_bound is None
    y = jnp.asarray([1.0, -2.0, 0.5])
    point = start.replace(
        y={"y": y, "t": {"constraints": [jnp.abs(y), jnp.asarray(2.0)], "lower": []}}
    )
    assert float(problem.smooth_upper(START.x, point.y)) == float(stated.smooth_upper(START.x, y))
    found = problem.called("constraints", START.x, point.y)
    assert float(found["stated"]) == 1.0  # max|y| − x
    assert float(found["above"].max()) == 0  # t is the value itself
    t = {"constraints": [jnp.abs(y), jnp.asarray(1.5)], "lower": []}
    found = problem.called("constraints", START.x, {"y": y, "t": t})
    assert float(found["above"].max()) == 0.5
