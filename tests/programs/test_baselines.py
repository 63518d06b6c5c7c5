"""FOP and SMO against their transcription, known answers, real call counts and bad input."""

import dataclasses
import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bilevax as bx
import transcription_constrained as paper
from bilevax import terms
from bilevax.problems import linear
from bilevax.solvers.fop import FOP
from bilevax.solvers.smo import SMO

FAR = jnp.asarray(10**9, int)  # of the type of a state's own count, so one compilation serves
NAMES = (
    "upper_smoothness",
    "lower_smoothness",
    "constraint_lipschitz",
    "constraint_smoothness",
    "constraint_bound",
)


@eqx.filter_jit
def begin(solver, problem, start):
    return solver.init(problem, start)


@eqx.filter_jit
def one_step(solver, problem, state, limit):
    return solver.step(problem, state, limit)


@eqx.filter_jit
def advance(solver, problem, state, limit):
    return solver.advance(problem, state, limit)


def linear_problem():
    """An instance of `eq:clo`, for the transcription and for the library, with a start."""
    data = linear.generate(8, 8, 2, 0)
    c, d, A, B, b, d_tilde = (getattr(data, name) for name in linear.NAMES)
    box = (-np.ones(8), np.ones(8))
    # Linear objectives have smoothness 0; any number above it is right, too.
    constants = (1.0, 0.02, float(np.linalg.norm(np.hstack([A, B]), 2)), 0.0, 1.0)
    transcribed = paper.ConstrainedProblem(
        lambda x, y: (c, d),
        lambda x, z: (np.zeros(8), d_tilde),
        lambda x, z: A @ x + B @ z - b,
        lambda x, z: (A, B),
        box,
        box,
        *constants,
    )
    problem = bx.ConstrainedBilevelProblem(
        lambda x, y, data: data["c"] @ x + data["d"] @ y,
        lambda x, z, data: data["d_tilde"] @ z,
        x=terms.Box(-1.0, 1.0),
        y=terms.Box(-1.0, 1.0),
        constraints=lambda x, z, data: data["A"] @ x + data["B"] @ z - data["b"],
        data={name: getattr(data, name) for name in linear.NAMES},
    )
    return transcribed, problem, dict(zip(NAMES, constants)), (np.zeros(8), np.zeros(8))


def ball_problem():
    """A quadratic lower level in a ball whose radius depends on x."""
    a, b, v = np.array([0.5, -0.8]), np.array([1.0, -0.5, 0.3]), np.array([0.6, -0.3, 0.2])
    M = np.array([[1.0, 0.5], [-0.5, 1.0], [0.3, -0.4]])
    reach = 0.8
    constants = (
        0.5,
        float(np.linalg.norm(np.hstack([M, -np.eye(3)]), 2) ** 2),
        float(np.sqrt(0.01 + 12 * reach**2)),  # ‖(0.1, 2z)‖
        2.0,
        3 * reach**2,
    )
    transcribed = paper.ConstrainedProblem(
        lambda x, y: (0.5 * (x - a), 0.5 * b),
        lambda x, z: (M.T @ (M @ x + v - z), z - M @ x - v),
        lambda x, z: np.array([z @ z - 0.25 - 0.1 * x[0]]),
        lambda x, z: (np.array([[-0.1, 0.0]]), 2 * z[None, :]),
        (-np.ones(2), np.ones(2)),
        (-reach * np.ones(3), reach * np.ones(3)),
        *constants,
    )
    problem = bx.ConstrainedBilevelProblem(
        lambda x, y: 0.25 * jnp.sum((x - a) ** 2) + 0.5 * b @ y,
        lambda x, z: 0.5 * jnp.sum((z - M @ x - v) ** 2),
        x=terms.Box(-1.0, 1.0),
        y=terms.Box(-reach, reach),
        constraints=lambda x, z: jnp.sum(z**2) - 0.25 - 0.1 * x[:1],
    )
    start = (np.zeros(2), np.array([0.7, 0.7, -0.7]))
    return transcribed, problem, dict(zip(NAMES, constants)), start


@pytest.mark.parametrize(
    ("make", "solver", "epsilon", "records", "stages"),
    [
        (linear_problem, FOP, 0.2, 10, 3),
        pytest.param(linear_problem, SMO, 0.4, 40, 6, marks=pytest.mark.long),
        pytest.param(ball_problem, FOP, 0.2, 60, 3, marks=pytest.mark.long),
        (ball_problem, SMO, 0.6, 23, 2),
        (ball_problem, "theory", 0.9, 8, 1),
    ],
)
def test_baselines_follow_their_transcription(make, solver, epsilon, records, stages):
    transcribed, problem, constants, (x0, y0) = make()
    if solver is SMO:
        run = paper.smo(transcribed, x0, y0, paper.smo_schedule(epsilon), records)
        solver = SMO(**constants)
    elif solver is FOP:
        run = paper.fop(transcribed, x0, y0, paper.fop_practical_schedule(epsilon), records)
        solver = FOP(extra_stages=0, **constants)
    else:
        run = paper.fop(transcribed, x0, y0, paper.fop_theory_schedule(epsilon), records)
        solver = FOP(schedule="theory", **constants)
    start = bx.Point(x=jnp.asarray(x0), y=jnp.asarray(y0))
    solver = solver.prepare(problem, start, epsilon)
    state = begin(solver, problem, start)
    assert len(run.records) == records or run.finished
    assert len(run.stages) == stages
    close = lambda found, known: np.testing.assert_allclose(found, known, rtol=0, atol=1e-9)
    spent = 0
    for record in run.records:
        assert int(state.stage) == record.stage
        assert bool(state.warming) == (record.phase == "warm")
        begun = run.stages[record.stage]
        close(state.shift[0], begun.lam_start if isinstance(solver, SMO) else 0 * begun.lam_start)
        warm = record.phase == "warm"
        state = one_step(solver, problem, state, state.gradients + 1 if warm else FAR)
        spent += record.gradients
        assert int(state.gradients) == spent
        if warm:
            close(state.warm.z, record.z)
            continue
        point = solver.output(problem, state)
        close(point.x, record.x)
        close(point.y, record.y)
        close(point.z, record.z)
        assert float(point.rho) == pytest.approx(begun.rho, rel=1e-12)
        if record.index + 1 == len(begun.run.trace_lengths):
            close(point.multipliers.lam, begun.lam)
            close(point.multipliers.lam_bar, begun.lam_bar)
    assert bool(solver.done(problem, state)) == run.finished


def response_problem(**changes):
    """min ½‖x − 1‖² + ½‖y‖² with y = min(x, 1) by `constraints`: the answer is x = y = ½."""
    box = terms.Box(-1.0, 1.0)
    given = {"constraints": lambda x, z: z - x} | changes
    return bx.ConstrainedBilevelProblem(
        lambda x, y: 0.5 * jnp.sum((x - 1) ** 2) + 0.5 * jnp.sum(y**2),
        given.pop("lower", lambda x, z: 0.5 * jnp.sum((z - 1) ** 2)),
        **({"x": box, "y": box} | given),
    )


START = bx.Point(x=jnp.zeros(1), y=jnp.zeros(1))
EXACT = dict(zip(NAMES, (1.0, 1.0, np.sqrt(2.0), 0.0, 2.0)))


plain_problem = functools.cache(response_problem)  # the same functions, so one compilation serves


@pytest.mark.parametrize("solver", [FOP(**EXACT), SMO(**EXACT)])
def test_a_known_answer_is_certified_through_solve(solver):
    problem = plain_problem()
    solution = bx.solve(problem, START, tolerance=0.3, solver=solver)
    assert solution.status == "certified", solution.status
    again = bx.certify(problem, solution.point)
    assert again.as_dict() == solution.certificate.as_dict()
    assert float(solution.point.x[0]) == pytest.approx(0.5, abs=0.3)
    assert float(solution.point.y[0]) == pytest.approx(float(solution.point.x[0]), abs=0.05)
    # The lower level pulls y with 1 − y, and λ̄ holds it.
    held = 1 - float(solution.point.z[0])
    assert float(solution.point.multipliers.lam_bar[0]) == pytest.approx(held, abs=0.2)
    # Cut at any place and resumed, the run is the same.
    half = bx.solve(problem, START, tolerance=0.3, solver=solver, max_gradients=5001)
    assert half.gradients <= 5001
    resumed = bx.solve(problem, START, tolerance=0.3, solver=solver, resume=half.state)
    assert resumed.gradients == solution.gradients
    assert eqx.tree_equal(resumed.point, solution.point)


VARIANTS = {
    "pytrees": {
        "constraints": lambda x, z: {"scalar": z[0] - x[0], "idle": [z - 2.0]},
        "equalities": lambda x, z: (0.5 * (z - x),),
    },
    "none": {"constraints": None, "lower": lambda x, z: 0.5 * jnp.sum((z - x) ** 2)},
}


@pytest.mark.parametrize(
    ("kind", "variant"),
    [
        (FOP, "none"),
        (SMO, "pytrees"),
        pytest.param(FOP, "pytrees", marks=pytest.mark.long),
        pytest.param(SMO, "none", marks=pytest.mark.long),
    ],
)
def test_equalities_pytrees_and_no_constraints(kind, variant):
    problem = response_problem(**VARIANTS[variant])
    known = {"upper_smoothness": 1.0, "lower_smoothness": 2.0}
    if kind is SMO and variant != "none":  # elsewhere the estimates must serve
        known |= {"constraint_lipschitz": 1.9, "constraint_smoothness": 0.0, "constraint_bound": 4}
    solver = kind(**known)
    solution = bx.solve(problem, START, tolerance=0.4, solver=solver, max_gradients=3_000_000)
    assert solution.status == "certified", solution.status
    assert float(solution.point.x[0]) == pytest.approx(0.5, abs=0.4)
    assert float(solution.point.y[0]) == pytest.approx(float(solution.point.x[0]), abs=0.2)


@pytest.mark.parametrize("kind", [FOP, SMO])
def test_the_penalties_and_multipliers_are_those_of_the_papers(kind):
    """A(x, y) − A(x, z) and the multipliers, by the formulas of each paper, with equalities."""
    problem = response_problem(**VARIANTS["pytrees"])
    start = bx.Point(x=jnp.asarray([0.3]), y=jnp.asarray([0.6]))
    solver = kind(**EXACT).prepare(problem, start, 0.1)
    k = jnp.asarray(3)
    rho, mu = (25.0, 625.0) if kind is FOP else (0.8**-3, 0.8**-9)
    lam = {"scalar": jnp.asarray(0.7), "idle": [jnp.asarray([0.4])]}
    nu = (jnp.asarray([-0.2]),)
    if kind is FOP:
        lam, nu = jax.tree.map(jnp.zeros_like, (lam, nu))
    stage = solver.constants(k)
    lower, _ = solver._lower(problem, stage, (lam, nu))
    x, y, z = 0.3, 0.6, 0.1
    answer = solver._answer(problem, stage.rho, lower, tuple(jnp.asarray([v]) for v in (x, y, z)))

    def by_hand(w):
        """A(x, w), and its multipliers, as (of the scalar, of the idle one, of the equality)."""
        c, e = np.array([w - x, w - 2.0]), 0.5 * (w - x)
        shift, free = np.array([lam["scalar"], lam["idle"][0][0]]), float(nu[0][0])
        value = 0.5 * (w - 1) ** 2
        if kind is FOP:
            value += mu * (np.sum(np.maximum(c, 0) ** 2) + e**2)
            return value, [*(2 * mu * np.maximum(c, 0)), 2 * mu * e]
        up = np.maximum(shift + mu * c, 0)
        value += (np.sum(up**2) - np.sum(shift**2)) / (2 * mu)
        value += ((free + mu * e) ** 2 - free**2) / (2 * mu)
        return value, [*up, free + mu * e]

    (at_y, known), (at_z, known_bar) = by_hand(y), by_hand(z)
    assert float(answer.rho) == pytest.approx(rho)
    gap = lower(answer.x, answer.y) - lower(answer.x, answer.z)
    assert float(gap) == pytest.approx(at_y - at_z)
    m = answer.multipliers
    found = [m.lam["scalar"], m.lam["idle"][0][0], m.nu[0][0]]
    bars = [m.lam_bar["scalar"], m.lam_bar["idle"][0][0], m.nu_bar[0][0]]
    np.testing.assert_allclose(found, rho * np.array(known), rtol=1e-12)
    np.testing.assert_allclose(bars, known_bar, rtol=1e-12)
    # What is between stages: SMO goes on with λ̄, FOP begins without.
    state = dataclasses.replace(begin(solver, problem, start), answer=answer, stage=k)
    following = solver._next(problem, state).shift
    bars_tree = (m.lam_bar, m.nu_bar)
    kept = jax.tree.map(jnp.zeros_like, bars_tree) if kind is FOP else bars_tree
    assert eqx.tree_equal(following, kept)


def counted(function, counter):
    """The same function, counting its evaluations at run time."""

    def wrapped(*args):
        jax.debug.callback(lambda: counter.append(1))
        return function(*args)

    return wrapped


@pytest.mark.parametrize("kind", [FOP, SMO])
def test_gradient_counts_are_those_of_real_calls(kind):
    uppers, lowers = [], []
    plain = response_problem()
    problem = dataclasses.replace(
        plain, upper=counted(plain.upper, uppers), lower=counted(plain.lower, lowers)
    )
    solver = kind(**EXACT).prepare(plain, START, 0.01)
    state = begin(solver, problem, START)
    jax.effects_barrier()
    assert not uppers
    assert not lowers
    for limit in (1, 2, 3, 500, 3001):
        state = jax.block_until_ready(advance(solver, problem, state, jnp.asarray(limit, int)))
        jax.effects_barrier()
        spent = int(state.gradients)
        assert limit - solver.gradients_per_step < spent <= limit
        # A solve has f once and A twice, a step of a warm start has A alone.
        assert len(lowers) - len(uppers) == spent
    assert 0 < len(uppers) < spent  # both phases were seen


def test_fop_goes_on_while_its_point_is_not_good_enough():
    problem = plain_problem()
    for stages, epsilon, last in ((1, 1e-3, 1), (2, 4.9, 1), (1, 25.0, 0)):
        solver = FOP(stages=stages, epsilon=epsilon, extra_stages=1, **EXACT)
        solver = solver.prepare(problem, START, 0.1)
        state = advance(solver, problem, begin(solver, problem, START), FAR)
        assert bool(solver.done(problem, state))
        assert int(state.stage) == last
    # What it stops on is not below the true gap or the violation.
    x, y = state.answer.x, state.answer.y
    gap = float(problem.lower_value(x, y)) - 0.5 * (1 - float(x[0])) ** 2  # the best z is x
    least = max(gap, float(jnp.maximum(y - x, 0)[0]))
    for epsilon, enough in ((0.99 * least, False), (least + 2.1, True)):
        there = dataclasses.replace(
            solver, epsilon=jnp.asarray(epsilon), stages=jnp.asarray(9, int)
        )
        assert bool(there.enough(problem, state)) == enough


def test_limits_end_every_stage_and_are_said():
    problem = plain_problem()
    for kind in (FOP, SMO):
        solver = kind(max_iterations=1, stages=2, extra_stages=0, **EXACT)
        solver = solver.prepare(problem, START, 0.01)
        state = advance(solver, problem, begin(solver, problem, START), FAR)
        assert bool(solver.done(problem, state))
        assert bool(solver.cut_short(state))
        assert int(state.outer.iteration) == 1


def test_smo_goes_on_below_epsilon_until_the_published_stop_holds():
    problem = plain_problem()
    solver = SMO(stages=2, epsilon=1e-3, extra_stages=2, **EXACT).prepare(problem, START, 0.1)
    state = advance(solver, problem, begin(solver, problem, START), FAR)
    assert bool(solver.done(problem, state))
    assert int(state.stage) == 3  # neither of the first two stages, nor an extra one, is enough
    sizes = [float(solver.constants(jnp.asarray(k)).epsilon) for k in range(4)]
    np.testing.assert_allclose(sizes, [1.0, 0.8, 0.64, 0.512])
    assert not bool(solver.enough(problem, state))


def test_a_state_keeps_its_types_so_that_one_compilation_serves():
    problem = response_problem(**VARIANTS["pytrees"])
    for kind in (FOP, SMO):
        for dtype in (jnp.float32, jnp.float64):
            start = jax.tree.map(lambda leaf: leaf.astype(dtype), START)  # noqa: B023
            solver = kind(**EXACT).prepare(problem, start, 0.1)
            state = begin(solver, problem, start)
            following = eqx.filter_eval_shape(solver.step, problem, state, FAR)
            kinds = lambda tree: [
                (leaf.shape, leaf.dtype, leaf.weak_type) for leaf in jax.tree.leaves(tree)
            ]
            assert kinds(state) == kinds(following)
            assert jax.tree.structure(state) == jax.tree.structure(following)
            assert not any(leaf.weak_type for leaf in jax.tree.leaves(state))


def test_float32_runs_through_its_stages():
    start = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), START)
    problem = plain_problem()
    solver = SMO(stages=3, **EXACT).prepare(problem, start, 0.1)
    state = advance(solver, problem, begin(solver, problem, start), jnp.asarray(2_000_000, int))
    assert bool(solver.done(problem, state))
    assert int(state.stage) == 2
    assert state.answer.y.dtype == jnp.float32
    assert float(state.answer.y[0]) == pytest.approx(0.4, abs=0.1)  # as in float64, see above


def test_a_term_of_the_lower_level_enters_the_warm_start():
    """argmin ½(z − x)² + ½|z| over [−1, 1] is max(x − ½, 0) for x in [0, 1]."""
    problem = response_problem(
        constraints=None,
        lower=lambda x, z: 0.5 * jnp.sum((z - x) ** 2),
        y=terms.L1(0.5) + terms.Box(-1.0, 1.0),
    )
    start = bx.Point(x=jnp.full(1, 0.8), y=jnp.full(1, -0.9))
    # The smoothness is far above the true one, lest the first step be exact.
    solver = SMO(**EXACT | {"lower_smoothness": 30.0}).prepare(problem, start, 0.1)
    solver = dataclasses.replace(solver, epsilon=jnp.asarray(1.0))
    state = begin(solver, problem, start)
    warm = eqx.filter_jit(SMO._warm)  # the first phase alone, which compiles sooner
    while bool(state.warming):
        before = state
        state = warm(solver, problem, state, state.gradients + 1)
    value = lambda z: float(problem.lower_value(start.x, z))
    best = value(jnp.full(1, 0.3))
    assert int(before.gradients) > 2
    assert value(state.warm.z) - best <= 1.0
    # The bound is not far above the gap, either: the run did not go on for long.
    assert int(state.gradients) < 50


def test_constants_come_from_the_solver_then_the_problem_then_estimates():
    _, problem, known, (x0, y0) = ball_problem()
    start = bx.Point(x=jnp.asarray(x0), y=jnp.asarray(y0))
    found = FOP(lower_smoothness=known["lower_smoothness"]).prepare(problem, start, 0.1)
    for name in ("upper_smoothness", "constraint_smoothness"):
        assert known[name] <= float(getattr(found, name)) <= 1.06 * known[name]
    # Samples reach most of the largest slope, which is that of a corner.
    slope = float(found.constraint_lipschitz)
    assert 0.7 * known["constraint_lipschitz"] <= slope <= 1.06 * known["constraint_lipschitz"]
    assert float(found.constraint_bound) >= known["constraint_bound"]
    given = dataclasses.replace(
        problem, upper_smoothness=np.asarray(7.0), constraint_lipschitz=np.asarray(8.0)
    )
    own = FOP(
        **known | {"upper_smoothness": 9.0, "constraint_bound": 3.0, "constraint_lipschitz": None}
    )
    taken = own.prepare(given, start, 0.1)
    assert (float(taken.upper_smoothness), float(taken.constraint_lipschitz)) == (9.0, 8.0)
    assert float(taken.constraint_bound) == 3.0
    # Two products: ∇²c is [[0, 1], [1, 0]] for each, of norm 1, and together, too.
    products = response_problem(constraints=lambda x, z: x * z)
    pair = bx.Point(x=jnp.zeros(2), y=jnp.zeros(2))
    bend = float(SMO(**EXACT | {"constraint_smoothness": None}).prepare(products, pair, 0.1)
                 .constraint_smoothness)  # fmt: skip
    assert bend == pytest.approx(1.05, rel=1e-3)


def test_constants_given_to_the_outer_method_stay():
    problem = response_problem()
    outer = bx.ProximalPoint(smoothness=6.0, inner_tolerance=1e-3)
    solver = SMO(outer=outer, **EXACT).prepare(problem, START, 0.1)
    stage = solver.constants(jnp.asarray(2))
    lower, smoothness = solver._lower(problem, stage, (jnp.zeros(1), None))
    _, method = solver._minimax(problem, stage, lower, smoothness)
    assert (float(method.smoothness), float(method.x_weight)) == (6.0, 12.0)
    assert float(method.inner_tolerance) == 1e-3
    assert float(method.tolerance) == pytest.approx(0.64)


@pytest.mark.parametrize("kind", [FOP, SMO])
def test_bad_input_is_refused_with_the_reason(kind):
    name = kind.__name__
    prepare = lambda solver=None, start=START, **changes: (solver or kind()).prepare(
        response_problem(**changes), start, 0.1
    )
    for block in ("x", "y"):
        with pytest.raises(ValueError, match=rf"{name} needs bounded domains, and {block} = Free"):
            prepare(**{block: terms.Free()})
    for which in ("upper_constraints", "upper_equalities"):
        with pytest.raises(ValueError, match=rf"{which}; use bilevax.PenaltyMethod\(\) or "):
            prepare(**{which: lambda x, y: x + y})
    with pytest.raises(TypeError, match=f"{name} solves a ConstrainedBilevelProblem"):
        kind().prepare(bx.MinimaxProblem(lambda x, y: 0.0, terms.Free(), terms.Free()), START, 0.1)
    with pytest.raises(ValueError, match=f"{name}: schedule must be 'practical' or 'theory'"):
        kind(schedule="fast")
    for constant in (*NAMES, "epsilon", "diameter"):
        with pytest.raises(ValueError, match=f"{name}: {constant} must be finite and"):
            kind(**{constant: -1.0})
        with pytest.raises(TypeError, match=f"{name}: {constant} must be one number"):
            kind(**{constant: np.ones(2)})
    with pytest.raises(ValueError, match=f"{name}: stages must be a whole number ≥ 1"):
        kind(stages=0)
    with pytest.raises(TypeError, match=f"{name}: outer must be one such as"):
        kind(outer=bx.OptFOM())
    rough = lambda x, z: jnp.sqrt(jnp.abs(z)) - x
    with pytest.raises(ValueError, match="constraint_lipschitz could not be estimated"):
        prepare(constraints=rough)


def test_fop_refuses_less_than_no_extra_stages():
    with pytest.raises(ValueError, match="FOP: extra_stages must be a whole number ≥ 0"):
        FOP(extra_stages=-1)
