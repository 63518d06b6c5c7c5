"""The end game of first-order steps: where it leads, when it fails, what it costs."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest

import bilevax as bx
from bilevax.problems.library import bilevel_linear
from bilevax.problems.linear import LinearData, optimum
from bilevax.solvers.curvature import Blocks
from bilevax.solvers.endgame import ended, free_entries, size_for
from bilevax.solvers.penalised import Penalised

STEPS = jnp.full(6, 0.1)


def planted():
    """f = (x − 1)²/2 + y₀ + y₁ and f~ = ‖y − (x, −3)‖²/2 on boxes: y₁ is held at −1, x at ½.

    Where y₁ is held, P = (x − 1)²/2 + y₀ − 1 + ρ/2·((y₀ − x)² − (z₀ − x)²): z₀ = x, y₀ = x − 1/ρ,
    and x + 1 − 1 > 0, so x is at its lower bound.
    """
    problem = bx.BilevelProblem(
        lambda x, _, y, __: jnp.sum((x - 1) ** 2) / 2 + jnp.sum(y),
        lambda x, y, _: jnp.sum((y - jnp.stack([x[0], -3.0])) ** 2) / 2,
        x1=bx.terms.Box(0.5, 2.0),
        y1=bx.terms.Box(-1.0, 1.0),
    )
    blocks = Blocks.of((np.zeros(1), np.zeros(2), None), (None, np.zeros(2), None))
    return Penalised(problem, jnp.asarray(4.0), blocks)


def test_from_nearby_it_ends_at_the_saddle_point():
    penalised = planted()
    exact = np.array([0.5, 0.25, -1.0, 0.5, -1.0])
    near = jnp.asarray(exact + np.array([0.0, 0.05, 0.0, -0.03, 0.0]))
    assert int(free_entries(penalised, STEPS, near)) == 2
    for most in (2, 5):  # in the free entries alone, and in all
        ending = ended(penalised, STEPS, near, most)
        np.testing.assert_allclose(ending.point, exact, atol=1e-9)
        np.testing.assert_allclose(ending.slope, penalised.operator(ending.point), atol=1e-15)
        assert int(ending.gradients) == int(ending.solves) + 1


def test_where_a_step_does_not_help_nothing_has_moved():
    """Here f~ bends so much that Newton's step goes astray."""
    penalised = planted()
    wild = bx.BilevelProblem(
        lambda x, _, y, __: jnp.sum((x - 1) ** 2) / 2 + jnp.sum(y),
        lambda x, y, _: jnp.sum(jnp.sqrt(1 + (100 * (y - x)) ** 2)),
        x1=bx.terms.Box(0.5, 2.0),
        y1=bx.terms.Box(-1.0, 1.0),
    )
    penalised = dataclasses.replace(penalised, problem=wild)
    start = jnp.asarray([0.6, -0.5, 0.9, -0.9, 0.1])
    ending = ended(penalised, STEPS, start, 5)
    np.testing.assert_array_equal(ending.point, start)
    assert int(ending.solves) == 1


def test_sizes_are_few():
    sizes = {size_for(free) for free in range(1, 3000)}
    assert all(size_for(free) >= free for free in range(1, 3000))
    assert len(sizes) < 12


def test_a_linear_problem_ends_at_rounding():
    """The optimum is an LP's, by HiGHS; and resumed, the run takes the same path."""
    instance = bilevel_linear(30, 30, 3, 1)
    solve = functools.partial(
        bx.solve, instance.problem, instance.start, tolerance=1e-7, progress=False
    )
    found = solve()
    assert found.certified
    assert found.linear_solves > 0
    exact = optimum(LinearData(**instance.problem.data)).value
    assert float(found.certificate.objective) == pytest.approx(exact, rel=1e-8)
    part = solve(max_gradients=found.gradients - 40)
    assert part.gradients <= found.gradients - 40
    again = solve(resume=part.state)
    assert (again.gradients, again.linear_solves) == (found.gradients, found.linear_solves)
    np.testing.assert_array_equal(again.point.x, found.point.x)
