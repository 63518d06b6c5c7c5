"""Where Adaptive gives up, the paper's method with its safe constants goes on, and says so."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bilevax as bx
from bilevax.problems import library
from bilevax.solvers import adaptive

TOLERANCE = 0.1


@pytest.fixture
def mistrustful(monkeypatch):
    """Adaptive that gives up at its first look."""
    monkeypatch.setattr(adaptive, "MISTRUST", 0.5)
    jax.clear_caches()
    yield
    jax.clear_caches()


def run_of(instance, **options):
    return functools.partial(
        bx.solve, instance.problem, instance.start, tolerance=TOLERANCE, **options
    )


def same(a, b):
    return jax.tree.all(jax.tree.map(lambda u, v: bool(jnp.array_equal(u, v)), a, b))


def test_the_papers_method_takes_over_and_certifies(mistrustful):
    instance = library.get("unique_saddle")
    solution = run_of(instance)()
    assert solution.status == "certified"
    assert isinstance(solution.solver, bx.PenaltyMethod)
    assert "since then PenaltyMethod" in str(solution.status)
    assert solution.state.fell_back_at < solution.gradients
    assert np.all(np.diff(solution.history["gradients"]) > 0)
    assert bx.certify(instance.problem, solution.point).certified(TOLERANCE)


def test_a_run_that_fell_back_is_resumed_bit_for_bit(mistrustful, tmp_path):
    run = run_of(library.get("unique_saddle"))
    whole = run()
    path = tmp_path / "run.state"
    fell = whole.state.fell_back_at
    assert run(max_gradients=fell + 1000, checkpoint=path).status == "budget spent"
    rest = run(resume=path)
    assert rest.gradients == whole.gradients
    assert same(rest.point, whole.point)
    in_memory = run(resume=run(max_gradients=fell + 1000).state)
    assert same(in_memory.point, whole.point)


def test_where_the_paper_cannot_take_over_the_status_says_why(mistrustful, monkeypatch):
    def refuse(*_):
        raise ValueError("x1 is unbounded")

    monkeypatch.setattr(bx.PenaltyMethod, "prepare", refuse)
    solution = run_of(library.get("unique_saddle"))()
    assert solution.status == "stalled"
    assert "cannot take over: x1 is unbounded" in str(solution.status)
    assert isinstance(solution.solver, bx.Adaptive)


def test_without_mistrust_nothing_falls_back():
    solution = run_of(library.get("unique_saddle"))()
    assert solution.state.fell_back_at is None
    assert "PenaltyMethod" not in str(solution.status)
