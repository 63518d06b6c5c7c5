"""How many programs a first answer compiles, and that a run is the same whichever program steps."""

import functools
import json
import re
import subprocess
import sys
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import bilevax as bx
from bilevax.driver import pieces, schedule
from bilevax.solvers import default_solver
from bilevax.solvers.base import initial
from instances import get, noisy, same

README = (Path(__file__).parents[2] / "README.md").read_text()

COUNTED = """
import json
import jax
import numpy as np
import bilevax as bx

compiled, traced = [], {}
jax.monitoring.register_event_duration_secs_listener(
    lambda event, *_, **__: event.endswith("backend_compile_duration") and compiled.append(event)
)

def counted(name, function):
    def wrapped(*arguments):
        traced[name] = traced.get(name, 0) + 1
        return function(*arguments)
    return wrapped

def watched(form):
    def made(*functions, **arguments):
        names = ("upper", "lower", "constraints")
        given = dict(zip(names, functions)) | arguments
        for name in names:
            if name in given:
                given[name] = counted(name, given[name])
        return form(**given)
    return made

def noted(solve):
    def noting(*arguments, **options):
        compiled.clear(), traced.clear()
        solution = solve(*arguments, progress=False, **options)
        notes.append({"compiled": len(compiled), "traced": dict(traced),
                      "certified": solution.certified})
        return solution
    return noting

notes = []
bx.solve = noted(bx.solve)
kept = bx.BilevelProblem
bx.BilevelProblem = watched(kept)
exec(README)
bx.BilevelProblem = kept

import jax.numpy as jnp
upper = counted("upper", lambda x, y, d: jnp.sum((x - 0.5) ** 2) + jnp.sum((y - d) ** 2))
lower = counted("lower", lambda x, y, d: jnp.sum((y - x) ** 2))
constraints = counted("constraints", lambda x, y, d: y - d)
for data, bound, tolerance, options in ((0.1, 1.0, 1e-3, {}), (0.2, 2.0, 1e-4, {"rho": 3.0})):
    problem = bx.ConstrainedBilevelProblem(
        upper, lower, constraints=constraints, x=bx.terms.Box(-1.0, bound),
        y=bx.terms.Box(-bound, 1.0), data=np.asarray(data),
    )
    bx.solve(problem, bx.Point(x=np.zeros(2), y=np.zeros(2)), tolerance=tolerance,
             solver=bx.Adaptive(**options))
print(json.dumps(notes))
"""


@functools.cache
def counts():
    """What README's ten lines, a constrained problem and that one with other data take."""
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    code = f"README = {example!r}\n{COUNTED}"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    *shown, last = found.stdout.splitlines()
    return shown, json.loads(last)


@pytest.mark.parametrize(("which", "most"), [(0, 10), (1, 16)], ids=["README", "constrained"])
def test_a_first_answer_compiles_few_programs_and_traces_each_function_seldom(which, most):
    note = counts()[1][which]
    assert note["certified"]
    assert 0 < note["compiled"] <= most
    assert len(note["traced"]) == 2 + which
    assert all(1 <= times <= 6 for times in note["traced"].values()), note["traced"]


def test_the_readmes_example_prints_a_certificate():
    shown, _ = counts()
    assert shown[0].startswith("Certified")
    assert any("epsilon" in line for line in shown)


def test_other_numbers_compile_nothing():
    """Other data, bounds and tolerance, and options of the method."""
    note = counts()[1][2]
    assert note == {"compiled": 0, "traced": {}, "certified": True}


STEP = jnp.asarray(10**6)
SAPD = bx.SAPD(iterations=2, tau=0.1, sigma=0.1, theta=1.0)


def bilevel(solver):
    return solver, get("unique_saddle").problem, get("unique_saddle").start


def saddle(solver):
    box = bx.terms.Box(-1.0, 1.0)
    problem = bx.MinimaxProblem(lambda x, y: jnp.sum(x * y) + jnp.sum(x**2), box, box,
                                smoothness=3.0)  # fmt: skip
    return solver, problem, bx.Point(x=jnp.ones(2), y=jnp.zeros(2))


def sampled(solver):
    instance = noisy("unique_saddle", deviation=0.3)
    return solver or default_solver(instance.problem), instance.problem, instance.start


CASES = {
    "Adaptive": lambda: bilevel(bx.Adaptive()),
    "Newton": lambda: bilevel(bx.Newton()),
    "PenaltyMethod": lambda: bilevel(bx.PenaltyMethod()),
    "ProximalPoint": lambda: saddle(bx.ProximalPoint()),
    "OptFOM": lambda: saddle(bx.OptFOM(strong_convexity=1.0, strong_concavity=0.1)),
    "ExtraGradient": lambda: saddle(bx.ExtraGradient()),
    "ExtraGradient by the gap": lambda: saddle(bx.ExtraGradient(stop="gap")),
    "minibatches": lambda: sampled(
        bx.PenaltyMethod(outer=bx.StochasticProximalPoint(iterations=9, inner=SAPD), epsilon=0.1)
    ),
    "minibatches by default": lambda: sampled(None),
}


@pytest.mark.parametrize("case", CASES)
def test_a_step_leaves_the_types_of_a_state_as_they_were(case):
    """Or a loop could not be compiled once for all of its steps. Found out without compiling."""
    solver, problem, start = CASES[case]()
    solver = solver.prepare(problem, start, 0.1)
    state = eqx.filter_eval_shape(solver.init, problem, start)
    after = eqx.filter_eval_shape(solver.step, problem, state, STEP)
    kinds = lambda tree: [
        (jax.tree_util.keystr(path), leaf.shape, leaf.dtype, getattr(leaf, "weak_type", False))
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    ]
    assert kinds(state) == kinds(after)
    assert jax.tree.structure(state) == jax.tree.structure(after)
    assert not any(weak for *_, weak in kinds(state))


MARK = 260


@pytest.fixture
def tiers(monkeypatch):
    """The better compiled program takes over early; says which one took each piece."""
    taken = []

    def noting(name, program):
        def steps(*arguments):
            taken.append(name)
            assert name == "optimised" or int(arguments[-1]) <= MARK
            return program(*arguments)

        for method in ("ahead", "lower"):
            setattr(steps, method, getattr(program, method))
        return steps

    monkeypatch.setattr(schedule, "QUICK_GRADIENTS", MARK)
    monkeypatch.setattr(pieces, "_quick_steps", noting("quick", pieces._quick_steps))
    monkeypatch.setattr(pieces, "_optimised_steps", noting("optimised", pieces._optimised_steps))
    return taken


def two_tier_run(**options):
    instance = get("unique_saddle")
    problem, start = instance.problem, instance.start
    options |= {"solver": bx.Adaptive(), "tolerance": 1e-3, "progress": False}
    return bx.solve(problem, start, **options)


@functools.cache
def whole_run():
    return two_tier_run()


@pytest.mark.parametrize("cuts", [(100,), (MARK - 1,), (MARK,), (MARK + 1,), (400,), (259, 261)])
def test_a_run_is_the_same_wherever_it_is_cut_around_the_change_of_programs(cuts, tiers, tmp_path):
    whole = whole_run()
    assert whole.gradients > 450
    path, resume = tmp_path / "run.state", None
    for cut in cuts:
        tiers.clear()
        part = two_tier_run(max_gradients=cut, resume=resume)
        assert cut - 2 < part.gradients <= cut
        assert ("optimised" in tiers) == (part.gradients > MARK)
        part.save(path)
        resume = path
    rest = two_tier_run(resume=path)
    assert tiers[-1] == "optimised"
    assert rest.gradients == whole.gradients
    assert same(rest.state.solver_state, whole.state.solver_state)
    assert same(rest.point, whole.point)
    assert list(tmp_path.iterdir()) == [path]
    assert rest.certificate == whole.certificate
    assert set(whole.history["gradients"]) <= set(rest.history["gradients"])


def test_the_change_of_programs_does_not_depend_on_the_clock(tiers, monkeypatch):
    """Short pieces or long ones: the same checks at the same counts, and the same answer."""
    whole, runs = whole_run(), []
    for seconds in (1e-9, 10.0):
        monkeypatch.setattr(schedule, "PIECE_SECONDS", seconds)
        tiers.clear()
        runs.append(two_tier_run())
        assert tiers == sorted(tiers, reverse=True)  # quick, then optimised
        assert set(tiers) == {"quick", "optimised"}
    for run in runs:
        assert list(run.history["gradients"]) == list(whole.history["gradients"])
        assert run.point.x1.tobytes() == whole.point.x1.tobytes()


def test_a_state_begins_with_its_own_types():
    """`initial` is a program: what it returns is an argument of the next one, without a cast."""
    solver, problem, start = CASES["ExtraGradient"]()
    solver = solver.prepare(problem, start, 0.1)
    state = initial(solver, problem, start)
    assert all(
        isinstance(leaf, jax.Array) and not leaf.weak_type for leaf in jax.tree.leaves(state)
    )
