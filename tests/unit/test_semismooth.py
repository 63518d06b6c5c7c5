"""The linear systems of Newton's steps: their two halves."""

import jax.numpy as jnp
import numpy as np
import pytest

from bilevax.solvers.curvature import X1, X2, Y1, Y2, Z1, Z2, Blocks
from bilevax.solvers.semismooth import Columns, Equation, Halves

# Which blocks are variables of one function: f, f~ at (y1, z2) and f~ at (z1, y2).
TOGETHER = ((X1, X2, Y1, Y2), (X1, Y1, Z2), (X1, Z1, Y2))


@pytest.mark.parametrize("sizes", [(7, 60, 25, 9, 60, 25), (3, 90, 0, 0, 90, 0)])
@pytest.mark.parametrize("first", [False, True])
def test_halves_give_the_answer_of_the_whole_system(sizes, first):
    """Against NumPy, for a matrix with nonzeros only where blocks meet in a function."""
    rng = np.random.default_rng(0)
    part = lambda size: np.zeros(size) if size else None
    x1, y1, y2, x2, z1, z2 = map(part, sizes)
    blocks = Blocks.of((x1, y1, y2), (x2, z1, z2))
    meet = np.array([[any({a, b} <= {*t} for t in TOGETHER) for b in range(6)] for a in range(6)])
    matrix = rng.normal(size=(sum(sizes),) * 2) * meet[np.ix_(blocks.owner, blocks.owner)]
    matrix += 20 * np.eye(len(matrix))
    left_out = sizes[0] if first else 0
    sides = rng.normal(size=(len(matrix) - left_out, 3))
    full, zeros = jnp.asarray(matrix), jnp.zeros(len(matrix))
    equation = Equation(full, zeros, None, zeros, zeros, Columns(full, None), Halves(blocks))
    found = equation.solved(jnp.asarray(sides), left_out)
    exact = np.linalg.solve(matrix[left_out:, left_out:], sides)
    np.testing.assert_allclose(found, exact, atol=1e-12)
