"""A user's function is traced once for each shape of its arguments, and gives what it gives."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bilevax.functions import as_function, plain


def counted():
    calls = []

    def function(x, data=None):
        calls.append(jax.tree.map(jnp.shape, (x, data)))
        return {"twice": 2 * x, "sum": jnp.sum(x)} if data is None else x + data["a"]

    return function, calls


def test_it_is_traced_once_for_each_shape_and_type():
    function, calls = counted()
    made = as_function(function, "upper")
    for value in (1.0, 2.0, 3.0):
        found = made(np.full(3, value))
        np.testing.assert_array_equal(found["twice"], np.full(3, 2 * value))
        assert found["sum"] == 3 * value
    assert len(calls) == 1
    np.testing.assert_array_equal(made(np.ones(2))["twice"], [2.0, 2.0])
    assert made(np.ones(3, np.float32))["sum"].dtype == np.float32
    np.testing.assert_array_equal(made(np.ones(3), {"a": np.ones(3)}), 2.0)
    assert len(calls) == 4


def test_records_serve_every_program_and_every_problem():
    function, calls = counted()
    first, second = as_function(function, "upper"), as_function(function, "lower")
    value = lambda f, x: f(x)["sum"]
    x = np.ones(3)
    assert jax.jit(value, static_argnums=0)(first, x) == 3
    np.testing.assert_array_equal(jax.grad(lambda x: value(second, x))(x), 1.0)
    np.testing.assert_array_equal(jax.vmap(lambda x: value(second, x))(np.ones((2, 3))), 3.0)
    assert len(calls) == 1
    jax.clear_caches()  # JAX's own remedy for a function whose globals have changed
    assert first(x)["sum"] == 3
    assert len(calls) == 2


def test_weak_types_and_names_of_arguments_stay():
    made = as_function(lambda x, factor: factor * x, "upper")
    with jax.numpy_dtype_promotion("standard"):
        assert made(np.ones(2, np.float32), np.asarray(0.5)).dtype == np.float64
        assert made(np.ones(2, np.float32), 0.5).dtype == np.float32  # a Python number is weak
    np.testing.assert_array_equal(made(x=np.ones(2), factor=np.asarray(3.0)), 3.0)


def test_other_settings_of_jax_are_another_record():
    function, calls = counted()
    made = as_function(function, "upper")
    made(np.ones(3))
    with jax.default_matmul_precision("highest"):
        made(np.ones(3))
    assert len(calls) == 2


def test_what_holds_numbers_of_another_program_is_not_recorded():
    """Else the numbers of one program would be those of the next."""

    @jax.jit
    def program(a, x):
        return as_function(lambda x: a * x, "upper")(x)

    assert program(2.0, 3.0) == 6
    assert program(5.0, 3.0) == 15


def test_a_module_keeps_its_arrays_as_arguments():
    class Scale(eqx.Module):
        by: jax.Array

        def __call__(self, x):
            return self.by * x

    scale = Scale(jnp.asarray(2.0))
    assert as_function(scale, "upper") is scale
    assert plain(scale) is scale


def test_what_cannot_be_remembered_is_called():
    class Fresh:
        __hash__ = None

        def __call__(self, x):
            return 2 * x

    fresh = Fresh()
    assert as_function(fresh, "upper") is fresh


def test_what_is_no_function_is_refused():
    with pytest.raises(TypeError, match="upper must be a function of the variables, not 5"):
        as_function(5, "upper")
    function, _ = counted()
    assert plain(as_function(function, "upper")) is function
