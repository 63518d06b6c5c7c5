"""The methods that benchmarks/inner.py compares all find the same, right point."""

import dataclasses
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import bilevax as bx
from bilevax.solvers.curvature import X2

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
inner = pytest.importorskip("inner")


@pytest.mark.long
def test_every_method_solves_a_strongly_monotone_subproblem():
    """The saddle point of a quadratic, inside of all bounds: there the operator is zero."""
    box, zero = bx.terms.Box(-1.0, 1.0), jnp.zeros(1)
    problem = bx.BilevelProblem(
        lambda x1, x2, y1, y2: jnp.sum(0.5 * (x1 - 0.5) ** 2 + x2 * y2 - 0.5 * x2**2 + 0.2 * y1),
        lambda x1, y1, y2: jnp.sum(0.05 * (y1 - x1) ** 2 + 0.1 * y1 * y2 - 0.05 * y2**2),
        **dict.fromkeys(("x1", "x2", "y1", "y2"), box),
    )
    start = bx.Point(x1=zero, x2=zero, y1=zero, y2=zero)
    state = bx.Adaptive(rho=10.0).prepare(problem, start, 1e-2).init(problem, start)
    weights = jnp.where(jnp.arange(6) < X2, 3.0, 0.0)
    reach = jnp.asarray([1.0, 2.0, 0.5, 1.0, 2.0, 0.5])
    state = dataclasses.replace(state, weights=weights, reach=reach)
    sub, start = inner.posed(problem, state, state.origin)
    slope, J = np.asarray(sub.operator(start)), np.asarray(inner.jacobian(sub, start))
    known = np.asarray(start) - np.linalg.solve(J, slope)
    assert np.all(np.linalg.eigvalsh(J + J.T) > 0)
    assert np.all(np.abs(sub.root * known) < 0.99)
    assert float(sub.residual(known)) < 1e-12
    row, points = inner.measure(sub, start)
    assert row["monotone"]
    for name, point in points.items():
        assert None not in row["gradients"][name]
        np.testing.assert_allclose(point, known, atol=1e-5, err_msg=name)
