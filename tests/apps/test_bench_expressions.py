"""Expressions of a suite as JAX functions: values and gradients against Python and by hand."""

import pickle
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bilevax.bench.expressions import parse
from bilevax.bench.records import load

SUITE = Path(__file__).resolve().parents[3] / "shared" / "data" / "basblib.json"


def by_python(text, x, y):
    functions = {name: getattr(np, name) for name in ("exp", "log", "sqrt", "sin", "cos", "abs")}
    with np.errstate(all="ignore"):
        return eval(text, {"__builtins__": {}} | functions, {"x": x, "y": y})


def random_point(record, seed):
    rng = np.random.default_rng(seed)
    return rng.uniform(*record.x_bounds.T), rng.uniform(*record.y_bounds.T)


@pytest.mark.skipif(not SUITE.exists(), reason=f"needs {SUITE}")
def test_jax_gradients_of_the_suite_agree_with_forward_differentiation():
    for record in load(SUITE).records:
        x, y = random_point(record, 0)
        for expression in (record.upper, record.lower):
            by_x, by_y = jax.grad(expression, argnums=(0, 1))(jnp.asarray(x), jnp.asarray(y))
            value, gradient = expression.linearised(x, y)
            np.testing.assert_allclose(expression(jnp.asarray(x), jnp.asarray(y)), value, 1e-10)
            np.testing.assert_allclose(np.concatenate([by_x, by_y]), gradient, 1e-9, atol=1e-12)


TEXTS = [
    "-x[0]**2 + +3",
    "x[0]**y[0] / 2**x[1]",
    "2 / x[0] - x[1] / y[0]",
    "exp(x[0]) - log(y[0]) * sqrt(x[1])",
    "sin(x[0]) * cos(y[0]) - abs(-x[1])",
    "1 - (x[0] - y[0] - 2)**3 / 7",
    "x[0]**-2 + x[1]**0.5 + x[1]**0 + x[0]**1",
    "7",
    "  exp(0)*x[0]\n + 1e3",
    "2**-1 * x[0]**1e9 * 0",
]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_values_and_gradients_of_all_operations(text, dtype):
    x, y = np.array([0.7, 1.3], dtype), np.array([0.9], dtype)
    function = parse(text, 2, 1)
    expected = by_python(" ".join(text.split()), x, y)
    both = jax.jit(jax.value_and_grad(function, argnums=(0, 1)))
    value, (by_x, by_y) = both(jnp.asarray(x), jnp.asarray(y))
    assert value.dtype == dtype
    assert value.shape == ()
    assert function(x, y).dtype == dtype
    tolerance = 1e-5 if dtype == "float32" else 1e-13
    np.testing.assert_allclose(value, expected, tolerance)
    np.testing.assert_allclose(function(x, y), expected, tolerance)
    np.testing.assert_allclose(
        np.concatenate([by_x, by_y]), function.linearised(x, y)[1], 10 * tolerance, atol=tolerance
    )


def test_whole_powers_have_finite_derivatives_at_zero():
    zero = jnp.zeros(1)
    assert jax.grad(parse("y[0]**2 + y[0]**1 + y[0]**0", 1, 1), argnums=1)(zero, zero) == 1
    assert jax.hessian(parse("y[0]**2.0", 1, 1), argnums=1)(zero, zero) == 2
    assert (
        parse("y[0]**2 + y[0]**1 + y[0]**0", 1, 1).linearised(np.zeros(1), np.zeros(1))[1][1] == 1
    )


def test_expressions_work_without_x_and_survive_pickling():
    function = parse("3*y[0]", 0, 1)
    assert function(jnp.zeros(0), jnp.ones(1)) == 3
    again = pickle.loads(pickle.dumps(function))
    assert again == function
    assert again(np.zeros(0), np.ones(1)) == 3
