"""Where one method of a sequence gives up, the other goes on from the best point, and says so."""

import functools

import jax
import numpy as np
import pytest

import bilevax as bx
from instances import get, same

TOLERANCE = 0.1


@pytest.fixture(scope="module", autouse=True)
def mistrustful():
    """Adaptive that gives up soon. (In test_solve.py it does not.)"""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bx.Adaptive, "done", lambda self, problem, state: state.gradients >= 50)
        jax.clear_caches()
        yield
    jax.clear_caches()


def run(*between, **options):
    instance = get("unique_saddle")
    solver = bx.Sequence(bx.Adaptive(), *between, bx.PenaltyMethod())
    options |= {"tolerance": TOLERANCE, "solver": solver}
    return bx.solve(instance.problem, instance.start, **options)


whole_run = functools.cache(run)


def test_the_papers_method_takes_over_and_certifies():
    instance, solution = get("unique_saddle"), whole_run()
    assert solution.status == "certified"
    assert isinstance(solution.solver, bx.PenaltyMethod)
    assert "since then PenaltyMethod" in str(solution.status)
    assert 50 <= solution.state.fell_back_at < solution.gradients
    assert solution.state.earlier == solution.state.fell_back_at
    assert np.all(np.diff(solution.history["gradients"]) > 0)
    assert bx.certify(instance.problem, solution.point).certified(TOLERANCE)


def test_a_run_that_fell_back_is_resumed_bit_for_bit(tmp_path):
    whole = whole_run()
    path = tmp_path / "run.state"
    fell = whole.state.fell_back_at
    assert run(max_gradients=fell + 1000, checkpoint=path).status == "budget spent"
    rest = run(resume=path)
    assert rest.gradients == whole.gradients
    assert same(rest.point, whole.point)
    in_memory = run(resume=run(max_gradients=fell + 1000).state)
    assert in_memory.gradients == whole.gradients
    assert same(in_memory.point, whole.point)
    for run_on in (rest, in_memory):
        assert run_on.state.earlier == whole.state.earlier
        assert same(run_on.state.solver_state, whole.state.solver_state)


def test_where_the_paper_cannot_take_over_the_status_says_why(monkeypatch):
    def refuse(*_):
        raise ValueError("x1 is unbounded")

    monkeypatch.setattr(bx.PenaltyMethod, "prepare", refuse)
    solution = run()
    assert solution.status == "stalled"
    assert "No other method can take over: x1 is unbounded" in str(solution.status)
    assert isinstance(solution.solver, bx.Adaptive)


def test_one_that_refuses_is_passed_over_and_a_run_with_two_changes_is_resumed(
    monkeypatch, tmp_path
):
    def refuse(*_):
        raise ValueError("it is too large")

    monkeypatch.setattr(bx.Newton, "prepare", refuse)
    between = (bx.Newton(), bx.Adaptive())
    path = tmp_path / "run.state"
    whole = run(*between)
    assert whole.status == "certified"
    assert isinstance(whole.solver, bx.PenaltyMethod)
    assert whole.state.stage == (3,)
    limit = whole.state.fell_back_at + 1000
    assert run(*between, max_gradients=limit, checkpoint=path).status == "budget spent"
    rest = run(*between, resume=path)
    assert str(rest.status) == str(whole.status)
    assert rest.gradients == whole.gradients
    assert same(rest.point, whole.point)
