"""What docs/paper.md says of the paper and no other test shows."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

import bilevax as bx
from bilevax import terms
from bilevax.certificates import judge
from bilevax.problems.validation import validate


def four_rows(**constants):
    """y minimises −Σy under y ≤ x on [−1, 1]⁴: its slope has length 2, and G = 1 as x ≥ 0."""
    flat = {"upper_smoothness": 2.0, "lower_smoothness": 1e-12, "constraint_smoothness": 0.0}
    return bx.ConstrainedBilevelProblem(
        lambda x, y: jnp.sum((y - 0.5) ** 2),
        lambda x, y: -jnp.sum(y),
        constraints=lambda x, y: y - x,
        x=terms.Box(0.0, 1.0),
        y=terms.Box(-1.0, 1.0),
        **(flat | {"constraint_lipschitz": math.sqrt(2.0)} | constants),
    )


HALF = bx.Point(x=jnp.full(4, 0.5), y=jnp.zeros(4))


def test_four_rows_do_not_double_what_epsilon_may_be():
    """ε ≤ ρG/4 as in thm:constrained and in the proof of thm:e-kkt, which states ρG√l/4."""
    problem = four_rows(slater_margin=1.0, lower_lipschitz=2.0)
    weak = bx.PenaltyMethod(rho=1.0)
    for epsilon, holds in ((0.2, True), (0.3, False)):  # √l would allow 0.5
        found = {p.name: p for p in bx.theory.preconditions(problem, HALF, epsilon, weak)}
        assert found["ε ≤ ρG/4"].limit == pytest.approx(0.25)
        assert found["ε ≤ ρG/4"].holds is holds


def test_points_of_the_lagrangian_are_points_of_the_constrained_problem():
    """thm:e-kkt with the constants of its proof, line by line, at points off the solution."""
    problem = four_rows(slater_margin=1.0, lower_lipschitz=2.0)
    made, rho, rng = bx.lagrangian(problem, HALF), 50.0, np.random.default_rng(0)
    most = 2 * 2 * 4 / 1
    assert float(made.y2.diameter((jnp.zeros(4), None))) == pytest.approx(2 * most)  # √l·B
    for size in (0.0, 1e-4, 1e-2):
        x, y, z, lam_bar, lam = (
            jnp.asarray(at + size * rng.uniform(-1, 1, 4)) for at in (0.5, 0.5, 0.5, 1.0, 1.0)
        )
        point = bx.Point(x1=x, y1=y, y2=(lam_bar, None), z1=z, z2=(lam, None), rho=rho)
        theirs = judge(made, validate(made, point))
        epsilon = theirs.epsilon
        assert epsilon < rho / 4
        found = judge(problem, validate(problem, made.stated_point(point)))
        limits = {
            "stationarity": epsilon,
            "response_z": epsilon,
            "feasibility_z": epsilon / rho,
            "complementarity_z": 2 * most * epsilon / rho,
            "lower_gap": epsilon,
            "feasibility": epsilon / rho,
            "complementarity": 2 * most * epsilon,
        }
        for name, limit in limits.items():
            assert getattr(found, name) <= limit * (1 + 1e-9) + 1e-9, name
