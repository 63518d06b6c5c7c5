"""The epigraph form: kinks become variables, with the answers of closed forms."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bilevax as bx
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
        (lambda x, y, d: least_squares(x, y, d), "no absolute value"),
        (lambda x, y, d: least_squares(x, y, d) - jnp.sum(jnp.abs(y)), "falls where"),
        (lambda x, y, d: jnp.sum(jnp.abs(y**2 - 1)), "not affine"),
    ],
)
def test_what_has_no_epigraph_form_is_refused(function, said):
    with pytest.raises(ValueError, match=said):
        epigraph_form(problem_with(function), START)


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
