"""The driver: statuses, budgets, resuming, interrupts, compilations, and what it records."""

import _thread
import dataclasses
import functools
import os
import signal
import threading
import time

import jax.numpy as jnp
import numpy as np
import pytest

import bilevax as bx
from bilevax import terms
from bilevax.driver import checkpoint as checkpoints
from instances import get


def test_a_certified_solution_has_what_it_promises():
    instance = get("unique_saddle")
    solution = bx.solve(instance.problem, instance.start, tolerance=0.1)
    assert solution.status == "certified"
    assert solution.certified
    assert "Certified" in str(solution.status)
    assert solution.certificate.epsilon <= 0.1
    history = solution.history
    assert history["gradients"][-1] == solution.gradients
    assert history["epsilon"].min() == solution.certificate.epsilon
    assert len({len(history[name]) for name in history.names}) == 1
    assert np.all(np.diff(history["gradients"]) >= 0)
    assert {"objective", "stationarity", "gap", "rho", "seconds"} <= set(history.names)
    # One gradient, and twelve to see what rounding does.
    assert solution.check_gradients == 13 * (len(history) - 1)
    assert solution.state.fell_back_at is None
    assert "PenaltyMethod" not in str(solution.status)
    assert "epsilon" in str(solution)


def test_a_budget_of_gradients_is_kept_and_named():
    instance = get("unique_saddle")
    run = functools.partial(
        bx.solve, instance.problem, instance.start, tolerance=0.01, solver=bx.Adaptive()
    )
    solution = run(max_gradients=300)
    assert solution.status == "budget spent"
    assert "max_gradients=300" in str(solution.status)
    assert 297 < solution.gradients <= 300
    assert not solution.certified
    none = run(max_gradients=0)
    assert none.gradients == 0
    assert none.status == "budget spent"


def test_a_budget_of_seconds_is_kept_and_named():
    instance = get("double_well")
    begun = time.perf_counter()
    solution = bx.solve(
        instance.problem,
        instance.start,
        tolerance=1e-3,
        solver=bx.PenaltyMethod(),
        max_seconds=1.0,
    )
    assert solution.status == "budget spent"
    assert "max_seconds=1" in str(solution.status)
    assert time.perf_counter() - begun < 60


def test_throw_raises_with_the_solution_inside():
    instance = get("unique_saddle")
    with pytest.raises(bx.SolveError, match="budget") as caught:
        bx.solve(instance.problem, instance.start, max_gradients=10, throw=True)
    assert caught.value.solution.gradients <= 10
    fine = bx.solve(instance.problem, instance.start, tolerance=0.2, throw=True)
    assert fine.certified


def test_a_penalty_too_small_ends_with_the_advice_to_raise_it():
    """With ρ far too small the method's own test holds, and the gap stays."""
    problem = bx.BilevelProblem(
        lambda x1, x2, y1, y2: jnp.sum((y1 - 1) ** 2),
        lambda x1, y1, y2: jnp.sum(y1**2),
        x1=terms.Box(-1.0, 1.0),
        y1=terms.Box(-1.0, 1.0),
    )
    start = bx.Point(x1=jnp.zeros(1), y1=jnp.zeros(1))
    solution = bx.solve(
        problem, start, tolerance=1e-3, solver=bx.PenaltyMethod(rho=0.1), max_seconds=100
    )
    assert solution.status == "stalled"
    assert "rho" in str(solution.status)
    assert not solution.certified


def breaking(x, y):
    return jnp.sum((x - 3) ** 2) + jnp.sum(x * y) + jnp.sum(jnp.sqrt(1.5 - x))


@pytest.mark.parametrize(
    "extra", [0, 1000, *(pytest.param(n, marks=pytest.mark.long) for n in (1, 2))]
)
def test_not_finite_is_said_and_located_even_on_the_last_step(extra):
    """A NaN on the last allowed step is not a spent budget."""
    problem = bx.MinimaxProblem(
        breaking, terms.Box(-3.0, 3.0), terms.Box(-1.0, 1.0), smoothness=4.0
    )
    start = bx.Point(x=jnp.zeros(2), y=jnp.zeros(2))
    broken = bx.solve(problem, start, tolerance=1e-4)
    assert broken.status == "not finite"
    assert "objective" in str(broken.status)
    assert np.isfinite(broken.certificate.epsilon)
    exact = bx.solve(problem, start, tolerance=1e-4, max_gradients=broken.gradients + 2 + extra)
    assert exact.status == "not finite"
    before = bx.solve(problem, start, tolerance=1e-4, max_gradients=broken.gradients)
    assert before.status == "budget spent"


def test_the_callback_sees_every_check_and_can_stop():
    instance = get("unique_saddle")
    seen = []

    def look(solution):
        seen.append(solution.gradients)
        return len(seen) == 5

    solution = bx.solve(instance.problem, instance.start, callback=look, solver=bx.Adaptive())
    assert solution.status == "interrupted"
    assert "callback" in str(solution.status)
    assert len(seen) == 5
    assert list(solution.history["gradients"][1:]) == seen


def test_ctrl_c_returns_the_best_point_so_far():
    instance = get("double_well")
    solve = functools.partial(
        bx.solve, instance.problem, instance.start, tolerance=1e-3, solver=bx.PenaltyMethod()
    )
    solve(max_gradients=100)  # compile
    # A process begun in the background may have been told to ignore the signal of Ctrl-C.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    timer = threading.Timer(1.5, _thread.interrupt_main)
    timer.start()
    solution = solve(max_seconds=120)
    timer.cancel()
    signal.signal(signal.SIGINT, before)
    assert solution.status == "interrupted"
    assert solution.certificate.epsilon == solution.history["epsilon"].min()
    assert solution.gradients > 0
    going_on = solve(resume=solution.state, max_gradients=solution.gradients + 100)
    assert going_on.gradients > solution.gradients


def linear_regression(n, seed, traced):
    """A bilevel problem whose numbers are all in `data`; `traced` counts how often it is traced."""
    rng = np.random.default_rng(seed)

    def upper(x1, x2, y1, y2, data):
        traced.append("upper")
        return 0.5 * jnp.mean((data["val"] @ y1) ** 2) + 0.5 * jnp.sum((x1 - 0.3) ** 2)

    def lower(x1, y1, y2, data):
        traced.append("lower")
        return 0.1 * jnp.mean((data["train"] @ y1 - x1[0]) ** 2) + 0.05 * jnp.sum(y1**2)

    data = {"train": rng.normal(size=(n, 3)), "val": rng.normal(size=(n, 3))}
    return upper, lower, data


def test_data_is_an_argument_and_not_a_constant_of_the_program():
    """Eight megabytes of data would be eight megabytes of program text if they were built in."""
    from bilevax.driver.pieces import piece_of_steps
    from bilevax.programs import quick
    from bilevax.solvers.base import initial

    upper, lower, data = linear_regression(166_667, 0, [])
    box = terms.Box(-1.0, 1.0)
    problem = bx.BilevelProblem(
        upper, lower, x1=box, y1=box, data=data, upper_smoothness=2.0, lower_smoothness=2.0
    )
    start = bx.Point(x1=jnp.zeros(1), y1=jnp.zeros(3))
    solver = bx.PenaltyMethod().prepare(problem, start, 0.1)
    state = initial(solver, problem, start)
    text = quick(piece_of_steps).lower(solver, problem, state, jnp.asarray(4)).as_text()
    assert len(text) < 1_000_000


def test_a_resumed_state_of_another_run_is_refused(tmp_path):
    small, large = get("unique_saddle"), get("boundary")
    solution = bx.solve(small.problem, small.start, max_gradients=100)
    with pytest.raises(ValueError, match="another run"):
        bx.solve(large.problem, large.start, resume=solution.state)
    path = tmp_path / "x.state"
    solution.save(path)
    content = path.read_bytes()
    for damaged in (content[: len(content) // 2], b"nothing of the kind", b""):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match="resume"):
            bx.solve(small.problem, small.start, resume=path)


def test_minimax_problems_are_solved_too():
    """min over x in [−1, 1] of max over y in [−1, 1] of x·y − ½x²: |x| − ½x², least at 0."""
    problem = bx.MinimaxProblem(
        lambda x, y: jnp.sum(x * y) - 0.5 * jnp.sum(x**2),
        terms.Box(-1.0, 1.0),
        terms.Box(-1.0, 1.0),
    )
    start = bx.Point(x=jnp.full(1, 0.3), y=jnp.zeros(1))
    solution = bx.solve(problem, start, tolerance=1e-2)
    assert solution.status == "certified", solution.status
    assert abs(float(solution.point.x[0])) <= 0.02


def test_the_environment_is_not_touched(tmp_path, monkeypatch):
    """A solve writes nothing unless asked to."""
    monkeypatch.chdir(tmp_path)
    instance = get("boundary")
    bx.solve(instance.problem, instance.start, tolerance=0.1)
    assert os.listdir(tmp_path) == []


def test_other_functions_or_options_are_another_run():
    box = terms.Box(-1.0, 1.0)
    problem = bx.MinimaxProblem(lambda x, y: jnp.sum(x * y), box, box, smoothness=7.0)
    start = bx.Point(x=jnp.full(1, 0.3), y=jnp.zeros(1))
    state = bx.solve(problem, start, max_gradients=100).state
    objective = lambda x, y: 7.0 * problem.objective(x, y)
    with pytest.raises(ValueError, match="another run"):
        bx.solve(dataclasses.replace(problem, objective=objective), start, resume=state)
    last = bx.ProximalPoint(center="last")
    with pytest.raises(ValueError, match="another run"):
        bx.solve(problem, start, solver=last, resume=state)


def test_one_call_can_begin_and_go_on(tmp_path):
    instance = get("unique_saddle")
    path = tmp_path / "run.state"
    run = lambda most: bx.solve(
        instance.problem,
        instance.start,
        tolerance=1e-3,
        solver=bx.Adaptive(),
        resume=path,
        checkpoint=path,
        max_gradients=most,
    )
    assert run(300).status == "budget spent"
    again = run(300)
    assert again.gradients <= 300
    assert list(again.history["gradients"]) == sorted(set(again.history["gradients"]))
    assert run(None).status == "certified"


def test_a_checkpoint_that_cannot_be_written_does_not_cost_the_run(tmp_path, monkeypatch):
    def full(*_):
        raise OSError("No space left on device")

    monkeypatch.setattr(checkpoints, "save", full)
    instance = get("boundary")
    with pytest.warns(RuntimeWarning, match="No space left"):
        solution = bx.solve(
            instance.problem, instance.start, tolerance=0.1, checkpoint=tmp_path / "x"
        )
    assert solution.status == "certified"


def test_a_callback_that_returns_a_number_goes_on():
    instance = get("boundary")
    seen = []

    def look(solution):
        seen.append(solution.status.code)
        return np.asarray(solution.certificate.epsilon)

    solution = bx.solve(instance.problem, instance.start, tolerance=0.1, callback=look)
    assert solution.status == "certified"
    assert set(seen) == {"running"}
    assert len(seen) == len(solution.history) - 1


def test_seconds_are_kept_when_gradients_are_slow():
    def objective(x, y, data):
        for _ in range(3):  # a gradient of a few milliseconds
            x = jnp.tanh(data @ x)
        return jnp.sum(x * y)

    data = np.random.default_rng(0).normal(size=(1500, 1500)) / 8
    box = terms.Box(-1.0, 1.0)
    problem = bx.MinimaxProblem(objective, box, box, data=data, smoothness=10.0)
    start = bx.Point(x=jnp.ones(1500), y=jnp.ones(1500))
    solution = bx.solve(problem, start, tolerance=1e-6, max_seconds=0.5)
    assert solution.status == "budget spent"
    assert solution.seconds < 5
