"""The driver: statuses, budgets, resuming, interrupts, compilations, and what it records."""

import _thread
import dataclasses
import functools
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bilevax as bx
from bilevax import terms
from bilevax.driver import checkpoint as checkpoints
from bilevax.driver import schedule
from bilevax.driver.solution import Status
from bilevax.problems import library

get = functools.cache(library.get)  # the same functions each time, so one compilation serves all


def same(a, b):
    return all(jax.tree.leaves(jax.tree.map(lambda u, v: bool(jnp.all(u == v)), a, b)))


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
    assert solution.check_gradients == 2 * (len(history) - 1)
    assert "epsilon" in str(solution)


def test_a_budget_of_gradients_is_kept_and_named():
    instance = get("unique_saddle")
    solution = bx.solve(instance.problem, instance.start, tolerance=0.01, max_gradients=300)
    assert solution.status == "budget spent"
    assert "max_gradients=300" in str(solution.status)
    assert 297 < solution.gradients <= 300
    assert not solution.certified
    none = bx.solve(instance.problem, instance.start, tolerance=0.01, max_gradients=0)
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
        bx.solve(instance.problem, instance.start, max_gradients=100, throw=True)
    assert caught.value.solution.gradients <= 100
    fine = bx.solve(instance.problem, instance.start, tolerance=0.2, throw=True)
    assert fine.certified


def test_a_method_that_stops_uncertified_says_so():
    """Its own test at a loose ε holds long before a tight tolerance is certified."""
    instance = get("many_saddles")
    solver = bx.PenaltyMethod(epsilon=0.3)
    solution = bx.solve(instance.problem, instance.start, tolerance=1e-3, solver=solver)
    assert solution.status == "stalled"
    assert "The stopping test of PenaltyMethod holds" in str(solution.status)
    assert not solution.certified


def stalled(epsilons, objectives=None, **options):
    """The stall rule on checks at counts that grow as those of a run do."""
    counts = [0, *np.cumsum(np.maximum(64, 1.05 ** np.arange(len(epsilons) - 1) * 64)).astype(int)]
    objectives = [0.0] * len(epsilons) if objectives is None else objectives
    return schedule.stalled(counts, epsilons, objectives, **options)


def test_only_a_run_that_moves_and_does_not_improve_is_stalled():
    rng = np.random.default_rng(0)
    assert stalled(list(1 + rng.uniform(size=200)))  # wanders
    assert not stalled(list(1 + rng.uniform(size=40)))  # too early to say
    assert not stalled([1.0] * 200)  # a long subproblem: the point has not moved yet
    assert not stalled([1.1**-k for k in range(200)])  # falls


def test_a_method_with_a_theorem_is_spared_while_its_objective_falls():
    rng = np.random.default_rng(0)
    wandering, falling = list(1 + rng.uniform(size=200)), [-0.01 * k for k in range(200)]
    assert stalled(wandering, falling)
    assert not stalled(wandering, falling, has_theorem=True)
    assert stalled(wandering, [-v for v in falling], has_theorem=True)  # it rises
    assert stalled(wandering, [5.0] * 200, has_theorem=True)  # it stands
    assert stalled(wandering, [float("nan")] * 200, has_theorem=True)


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


@pytest.mark.parametrize("extra", [0, 1, 2, 1000])
def test_not_finite_is_said_and_located_even_on_the_last_step(extra):
    """A NaN on the last allowed step is not a spent budget."""

    def objective(x, y):
        return jnp.sum((x - 3) ** 2) + jnp.sum(x * y) + jnp.sum(jnp.sqrt(1.5 - x))

    problem = bx.MinimaxProblem(
        objective, terms.Box(-3.0, 3.0), terms.Box(-1.0, 1.0), smoothness=4.0
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

    solution = bx.solve(instance.problem, instance.start, callback=look)
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


@pytest.mark.parametrize("cuts", [(1,), (130,), (50, 70, 71, 180)])
def test_resuming_gives_the_same_run(cuts, tmp_path):
    """Cut anywhere, through a file, and taken up again: bit for bit the uninterrupted run."""
    instance = get("unique_saddle")
    problem, start = instance.problem, instance.start
    whole = bx.solve(problem, start, tolerance=0.1)
    path = tmp_path / "run.state"
    resume = None
    for cut in cuts:
        part = bx.solve(problem, start, tolerance=0.1, resume=resume, max_gradients=cut)
        assert part.gradients < whole.gradients
        part.save(path)
        resume = path
    rest = bx.solve(problem, start, tolerance=0.1, resume=path)
    assert rest.gradients == whole.gradients
    assert same(rest.point, whole.point)
    assert same(rest.state.solver_state, whole.state.solver_state)
    assert rest.certificate == whole.certificate
    assert set(whole.history["gradients"]) <= set(rest.history["gradients"])
    assert list(tmp_path.iterdir()) == [path]


SCRIPT = """
    import sys
    import jax
    jax.config.update("jax_enable_x64", True)
    jax.config.update("jax_compilation_cache_dir", sys.argv[3])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    import bilevax as bx
    from bilevax.problems import library
    instance = library.get("unique_saddle")
    path, resume = sys.argv[1], sys.argv[2] == "resume"
    solution = bx.solve(
        instance.problem, instance.start, tolerance=0.03, checkpoint=path,
        resume=path if resume else None,
    )
    print(solution.gradients, solution.point.x1.tobytes().hex())
"""


@pytest.mark.skipif(sys.platform == "win32", reason="kills processes by POSIX signals")
@pytest.mark.long  # test_stochastic.py kills processes too
def test_a_killed_process_is_taken_up_from_its_checkpoint(tmp_path):
    """Killed outright, twice, at moments nobody chose: the checkpoint is whole and leads on."""
    script = tmp_path / "run.py"
    script.write_text(textwrap.dedent(SCRIPT))
    path = tmp_path / "run.state"

    def begin(mode):
        command = [sys.executable, str(script), str(path), mode, str(tmp_path / "cache")]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    rng = np.random.default_rng()
    mode = "fresh"
    for _ in range(2):
        process = begin(mode)
        deadline = time.monotonic() + 60
        while not path.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(float(rng.uniform(0, 0.3)))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        mode = "resume"
    out, _ = begin("resume").communicate(timeout=120)
    gradients, x1 = out.split()
    instance = get("unique_saddle")
    whole = bx.solve(instance.problem, instance.start, tolerance=0.03)
    assert int(gradients) == whole.gradients
    assert x1 == whole.point.x1.tobytes().hex()


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


@pytest.mark.long  # test_adaptive.py has the same, with more numbers that differ
def test_one_compilation_serves_every_problem_of_a_shape():
    traced = []
    upper, lower, _ = linear_regression(20, 0, traced)
    box = terms.Box(-1.0, 1.0)
    start = bx.Point(x1=jnp.zeros(1), y1=jnp.zeros(3))

    def run(seed, tolerance, bound=1.0):
        _, _, data = linear_regression(20, seed, traced)
        y1 = terms.Box(-bound, bound)
        problem = bx.BilevelProblem(upper, lower, x1=box, y1=y1, data=data)
        return bx.solve(problem, start, tolerance=tolerance, max_gradients=3000)

    first = run(0, 0.1)
    advance_traces = len(traced)
    second = run(1, 0.05, bound=2.0)  # other data, another ρ, other bounds: the same program
    assert len(traced) - advance_traces <= 2  # validation's abstract evaluation, nothing more
    assert second.compile_seconds < first.compile_seconds
    assert not same(first.point, second.point)


def test_data_is_an_argument_and_not_a_constant_of_the_program():
    """Eight megabytes of data would be eight megabytes of program text if they were built in."""
    from bilevax.driver.loop import piece_of_steps
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


def test_the_progress_bar_is_off_where_nobody_looks(capfd, monkeypatch):
    instance = get("boundary")
    bx.solve(instance.problem, instance.start, tolerance=0.1)
    assert capfd.readouterr().err == ""
    bx.solve(instance.problem, instance.start, tolerance=0.1, progress=True)
    shown = capfd.readouterr().err
    assert "gradients" in shown
    assert "ε" in shown
    monkeypatch.setenv("CI", "true")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    bx.solve(instance.problem, instance.start, tolerance=0.1)
    assert capfd.readouterr().err == ""


def test_the_history_is_plotted(tmp_path):
    import matplotlib

    matplotlib.use("Agg")
    instance = get("boundary")
    solution = bx.solve(instance.problem, instance.start, tolerance=0.1)
    path = tmp_path / "history.png"
    ax = solution.history.plot(path)
    assert path.stat().st_size > 5000
    assert "ε, the largest" in [text.get_text() for text in ax.get_legend().get_texts()]
    with pytest.raises(KeyError, match="epsilon"):
        solution.history["no such column"]


def test_statuses_are_of_a_known_kind():
    with pytest.raises(ValueError, match="solved"):
        Status("solved", "…")
    assert Status("stalled", "a") == "stalled"
    assert Status("stalled", "a") != Status("stalled", "b")


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


def test_looks_do_not_depend_on_the_clock(monkeypatch):
    """Short pieces or long ones: the same checks at the same counts, and the same answer."""
    instance = get("unique_saddle")
    runs = []
    for seconds in (1e-9, 10.0):
        monkeypatch.setattr(schedule, "PIECE_SECONDS", seconds)
        runs.append(bx.solve(instance.problem, instance.start, tolerance=0.1))
    assert list(runs[0].history["gradients"]) == list(runs[1].history["gradients"])
    assert same(runs[0].point, runs[1].point)


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


def test_a_solve_error_survives_pickling():
    instance = get("boundary")
    with pytest.raises(bx.SolveError) as caught:
        bx.solve(instance.problem, instance.start, max_gradients=10, throw=True)
    error = caught.value
    assert error.__reduce__() == (bx.SolveError, (error.solution,))


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
