"""A function is judged by what it reads now; one that reads the same is not compiled again."""

import copy
import functools
import gc
import pickle
import time
import types
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bilevax as bx
from bilevax.functions import recorded, up_to_date
from bilevax.readings import reading

BOX = bx.terms.Box(-2.0, 2.0)
ONE = bx.Point(x1=np.asarray(1.0), y1=np.asarray(1.0))
SLOPE = 1.0
SETTINGS = types.SimpleNamespace(slope=1.0)
THERE = types.ModuleType("there")
THERE.slope = 1.0


def upper(x1, x2, y1, y2):
    return (x1 - 1) ** 2


def stated(lower):
    return bx.BilevelProblem(upper, lower, x1=BOX, y1=BOX)


def gap(problem):
    """(y1 − slope·x1)² at (1, 1): 0 for the slope 1 and 4 for −1, and its bound no less."""
    return bx.certify(problem, ONE).gap


class Model:
    slope = 1.0

    def __call__(self, x1, y1, y2):
        return (y1 - self.slope * x1) ** 2

    def method(self, x1, y1, y2):
        return self(x1, y1, y2)


def by_global():
    def change():
        global SLOPE
        SLOPE = -SLOPE

    return lambda x1, y1, y2: (y1 - SLOPE * x1) ** 2, change


def by_inner_function():
    _, change = by_global()
    slope_there = lambda: SLOPE
    return lambda x1, y1, y2: (y1 - (lambda: slope_there())() * x1) ** 2, change


def by_array():
    slopes = np.ones(3)

    def change():
        slopes[1] = -slopes[1]

    return lambda x1, y1, y2: (y1 - slopes[1] * x1) ** 2, change


def by_instance():
    model = Model()
    model.slope = 1.0
    return model, lambda: setattr(model, "slope", -model.slope)


def by_slot():
    class Slotted:
        __slots__ = ("slope",)

        def __call__(self, x1, y1, y2):
            return (y1 - self.slope * x1) ** 2

    model = Slotted()
    model.slope = 1.0
    return model, lambda: setattr(model, "slope", -model.slope)


def by_method():
    model, change = by_instance()
    return model.method, change


def by_class():
    kind = type("Own", (Model,), {"slope": 1.0})
    return kind(), lambda: setattr(kind, "slope", -kind.slope)


def by_partial():
    settings = {"slopes": [1.0]}

    def change():
        settings["slopes"][0] *= -1

    lower = lambda settings, x1, y1, y2: (y1 - settings["slopes"][0] * x1) ** 2
    return functools.partial(lower, settings), change


def by_namespace():
    return (
        lambda x1, y1, y2: (y1 - SETTINGS.slope * x1) ** 2,
        lambda: setattr(SETTINGS, "slope", -SETTINGS.slope),
    )


def by_module():
    return (
        lambda x1, y1, y2: (y1 - THERE.slope * x1) ** 2,
        lambda: setattr(THERE, "slope", -THERE.slope),
    )


def by_default():
    def lower(x1, y1, y2, slope=1.0):
        return (y1 - slope * x1) ** 2

    def change():
        lower.__defaults__ = (-lower.__defaults__[0],)

    return lower, change


CHANGES = [by_global, by_inner_function, by_array, by_instance, by_method, by_class, by_partial]
CHANGES += [by_namespace, by_module, by_default, by_slot]


@pytest.mark.parametrize("made", CHANGES)
def test_a_change_is_seen_and_its_taking_back_too(made):
    """Found out without compiling: another record for another state, and the same for the same."""
    lower, change = made()
    problem = stated(lower)
    same = up_to_date(problem)
    assert same is problem
    assert stated(lower).lower is problem.lower
    change()
    other = up_to_date(problem)
    assert other.lower is not problem.lower
    assert stated(lower).lower is other.lower
    assert other.upper is problem.upper
    change()
    assert up_to_date(other).lower is problem.lower


def test_a_changed_attribute_is_judged_anew():
    """In a new problem, in the same problem, by `check` and by `solve`."""
    model = Model()
    problem = stated(model)
    assert gap(problem) < 1e-6
    model.slope = -1.0
    assert gap(stated(model)) >= 4
    assert gap(problem) >= 4
    solution = bx.solve(problem, ONE, max_gradients=0, progress=False)
    assert solution.certificate.gap >= 1  # after its start phase or without
    model.slope = jnp.asarray(np.nan)
    with pytest.raises(ValueError, match="lower is nan"):
        problem.check(ONE, samples=2)
    model.slope = 1.0
    assert gap(problem) < 1e-6


def test_nothing_is_compiled_for_a_function_that_reads_the_same():
    compiled = []
    count = lambda event, *_, **__: compiled.append(event) if "backend_compile" in event else None
    traced = []

    def lower(x1, y1, y2):
        traced.append(SLOPE)  # a change that tracing makes is none
        return (y1 - SLOPE * x1) ** 2

    def above(x1, x2, y1, y2):
        return (x1 - 1) ** 2 + 0 * len(traced)

    problem = bx.BilevelProblem(above, lower, x1=BOX, y1=BOX)
    first = bx.certify(problem, ONE)
    times = len(traced)
    assert 1 <= times <= 6
    jax.monitoring.register_event_duration_secs_listener(count)
    try:
        assert bx.certify(problem, ONE) == first
        again = bx.BilevelProblem(above, lower, x1=BOX, y1=BOX)
        assert bx.certify(again, ONE) == first
    finally:
        jax.monitoring.unregister_event_duration_listener(count)
    assert not compiled
    assert len(traced) == times


def test_a_function_that_changes_itself_while_it_is_traced_is_taken():
    class Moving:
        average = 0.0

        def __call__(self, x1, y1, y2):
            self.average = 0.9 * self.average + 0.1 * x1
            return (y1 - x1) ** 2

    problem = stated(Moving())
    assert gap(problem) < 1e-6
    assert gap(problem) < 1e-6


def test_what_is_read_is_found_fast_and_libraries_are_left_alone():
    weights = np.ones((100, 20))
    lower = lambda x1, y1, y2: jnp.sum(jax.nn.relu(weights @ y1)) + jnp.sum(x1)
    met = reading(lower).met
    assert len(met) <= 6
    begun = time.perf_counter()
    for _ in range(20):
        reading(lower)
    assert (time.perf_counter() - begun) / 20 < 1e-3


def test_what_refers_to_itself_and_what_is_large_is_read():
    around = {"slope": 1.0}
    around["again"] = around
    long, big = list(range(50_000)), np.zeros(3_000_000)
    lower = lambda x1, y1, y2: (around, long[0], big)
    before = reading(lower)
    assert reading(lower) == before
    big[1_234_567] = 1.0  # seen in the sum, if not among the entries
    after = reading(lower)
    assert after != before
    around["slope"] = 2.0
    assert reading(lower) != after
    after = reading(lower)
    long[-1] = 0
    assert reading(lower) != after


def test_jax_arrays_are_told_apart_by_identity():
    held = {"slope": jnp.ones(3)}
    lower = lambda x1, y1, y2: held["slope"]
    before = reading(lower)
    assert reading(lower) == before
    held["slope"] = jnp.ones(3)
    assert reading(lower) != before


def test_a_function_that_nobody_uses_is_released():
    def made():
        slope = 1.0
        return lambda x1, y1, y2: slope

    kept = recorded(made())
    gone = weakref.ref(kept), weakref.ref(kept.function)
    del kept
    gc.collect()
    assert [ref() for ref in gone] == [None, None]


def test_a_problem_can_be_copied():
    problem = stated(Model().method)
    assert copy.copy(problem).upper is problem.upper
    assert pickle.loads(pickle.dumps(problem)).upper is problem.upper
