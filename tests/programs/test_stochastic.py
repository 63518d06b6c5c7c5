"""Solving by minibatches: the algorithm line by line, resuming, devices, certificates, errors."""

import dataclasses
import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bilevax as bx
from bilevax import terms, trees
from bilevax.certificates.sampled import RUN_KEYS as RUNS
from bilevax.data.host import EPOCHS_APART
from bilevax.data.source import HELD_OUT
from bilevax.problems.deviation import biased
from bilevax.solvers.sampled_extragradient import SampledExtraGradient
from instances import get, noisy


def method(smoothness=6.2, steps=2, outer=400, key=0, **options):
    """Constants that work: the theorem's steps are a million times smaller."""
    tau = 1 / (2 * smoothness)
    inner = bx.SAPD(iterations=steps, tau=tau, sigma=tau, theta=1.0, **options)
    return bx.PenaltyMethod(
        epsilon=0.1,
        outer=bx.StochasticProximalPoint(iterations=outer, key=key, inner=inner),
    )


def solved(name="unique_saddle", **options):
    instance = noisy(name, deviation=0.3)
    given = {"tolerance": 1e-3, "solver": method(), "max_gradients": 1_000} | options
    return bx.solve(instance.problem, instance.start, progress=False, **given)


@pytest.mark.parametrize("center", ["start", "last"])
def test_it_is_the_algorithm_line_by_line(center):
    """f = ½‖x − 1‖² + xy + ξx, f~ = ½(y − x)² + ξy; 40 subproblems of 3 steps, in NumPy."""
    rng = np.random.default_rng(0)
    xi = rng.normal(size=(30, 2))
    problem = bx.BilevelProblem(
        lambda x1, x2, y1, y2, d: jnp.sum((x1 - 1) ** 2 / 2 + x1 * y1 + jnp.mean(d[:, 0]) * x1),
        lambda x1, y1, y2, d: jnp.sum((y1 - x1) ** 2 / 2 + jnp.mean(d[:, 1]) * y1),
        x1=terms.Box(-2.0, 2.0),
        y1=terms.Box(-1.5, 1.5),
        data=bx.data.Arrays(xi, batch=4),
    )
    start = bx.Point(x1=jnp.asarray([0.3]), y1=jnp.asarray([-0.4]))
    K, T, tau, sigma, theta, rho, L, eps, D = 40, 3, 0.02, 0.03, 0.6, 5.0, 8.0, 0.2, 3.0
    inner = bx.SAPD(iterations=T, tau=tau, sigma=sigma, theta=theta)
    outer = bx.StochasticProximalPoint(
        iterations=K, key=3, center=center, returns="last", inner=inner
    )
    solver = bx.PenaltyMethod(
        epsilon=eps, rho=rho, smoothness=L, diameter=D, starter=None, outer=outer
    ).prepare(problem, start, eps)
    state = eqx.filter_jit(solver.advance)(problem, solver.init(problem, start), jnp.asarray(10**6))
    assert bool(solver.done(problem, state))
    found = solver.output(problem, state)

    stream, draw = problem.data.init(jax.random.key(3)), eqx.filter_jit(problem.data.draw)
    x, y, z = 0.3, -0.4, -0.4  # x = (x1, y1), y = z1
    z_center = z
    for _ in range(K):
        x_center, y_center, before = x, y, None
        for _ in range(T):
            stream, batch = draw(stream)
            b = np.mean(np.asarray(batch)[:, 1])
            slope = -rho * (z - x + b) - eps / (2 * D) * (z - z_center)
            q = 0.0 if before is None else slope - before
            before = slope
            z = np.clip(z + sigma * (slope + theta * q), -1.5, 1.5)
            stream, batch = draw(stream)
            a, b = np.mean(np.asarray(batch), axis=0)
            gx = x - 1 + y + a + rho * (-(y - x) + (z - x)) + 2 * L * (x - x_center)
            gy = x + rho * (y - x + b) + 2 * L * (y - y_center)
            x, y = np.clip(x - tau * gx, -2, 2), np.clip(y - tau * gy, -1.5, 1.5)
        z_center = z if center == "last" else z_center
    got = np.concatenate([found.x1, found.y1, found.z1])
    np.testing.assert_allclose(got, [x, y, z], atol=1e-9)
    assert int(state.gradients) == 2 * K * T


def test_every_iterate_is_as_likely_the_answer():
    """x moves by 1 a subproblem, so the answer tells which one it is of."""
    problem = bx.MinimaxProblem(
        lambda x, y: -jnp.sum(x) + 0 * jnp.sum(y), terms.Box(0.0, 100.0), terms.Box(-1.0, 1.0)
    )
    start = bx.Point(x=jnp.zeros(1), y=jnp.zeros(1))
    K = 5
    inner = bx.SAPD(iterations=1, tau=1.0, sigma=1.0, theta=0.0)
    solver = bx.StochasticProximalPoint(
        iterations=K, smoothness=1e-6, y_weight=1.0, inner=inner
    ).prepare(problem, start, 0.1)

    @eqx.filter_jit
    @jax.vmap
    def answer(key):
        mine = eqx.tree_at(lambda s: s.key, solver, key)
        state = mine.advance(problem, mine.init(problem, start), jnp.asarray(1000))
        return mine.output(problem, state).x[0], mine.output_index(state)

    seen, index = (np.asarray(a) for a in answer(jnp.arange(4000)))
    seen = np.round(seen).astype(int)
    np.testing.assert_array_equal(seen, index)
    counts = np.bincount(seen, minlength=K + 1)
    assert counts[0] == 0
    assert np.sum((counts[1:] - 800) ** 2 / 800) < 18.5  # χ² with 4 degrees: 1 in 1000 is above


def test_the_random_answer_is_the_iterate_that_its_index_names():
    """x ← x − τ·(x − mean(d)) with a new minibatch each; the iterates are those of NumPy."""
    xi = np.random.default_rng(0).normal(size=(64, 1))
    problem = bx.MinimaxProblem(
        lambda x, y, d: jnp.sum(x**2 / 2 - jnp.mean(d) * x - y**2 / 2),
        terms.Box(-9.0, 9.0),
        terms.Box(-1.0, 1.0),
        data=bx.data.Arrays(xi, batch=4),
    )
    start, tau, K = bx.Point(x=jnp.full(1, 5.0), y=jnp.zeros(1)), 0.05, 40
    inner = bx.SAPD(iterations=1, tau=tau, sigma=tau, theta=0.0)
    indices = set()
    for key in (1, 2, 3):
        solver = bx.StochasticProximalPoint(
            iterations=K, smoothness=1.0, y_weight=1.0, key=key, inner=inner
        )
        found = bx.solve(problem, start, solver=solver, tolerance=1e-7, progress=False)
        stream, draw = problem.data.init(jax.random.key(key)), eqx.filter_jit(problem.data.draw)
        iterates = [5.0]
        for _ in range(K):
            stream, _ = draw(stream)  # for y
            stream, batch = draw(stream)
            x = iterates[-1]
            iterates.append(x - tau * (x - np.mean(np.asarray(batch))))
        assert 1 <= found.output_index <= K
        np.testing.assert_allclose(found.output.x[0], iterates[found.output_index], atol=1e-12)
        indices.add(found.output_index)
    assert len(indices) > 1


@pytest.mark.long  # as are two keys of two problems; the default is short, below
@pytest.mark.parametrize("name", ["unique_saddle", "matrix_game"])
def test_nearly_kkt_in_expectation(name):
    """The random answer, over two keys; `benchmarks/stochastic.py` has all problems and 20."""
    instance = noisy(name, deviation=0.3)
    L = float(bx.PenaltyMethod().prepare(get(name).problem, instance.start, 0.1).smoothness)
    nearly = []
    for key in range(2):
        solution = bx.solve(
            instance.problem,
            instance.start,
            tolerance=1e-6,
            solver=method(L, steps=10, outer=500, key=key, estimator=bx.Recursive(0.05)),
            progress=False,
            max_gradients=30_000,
        )
        answer = solution.solver.output(instance.problem, solution.state.solver_state)
        nearly.append(bx.polish(instance.problem, answer, 0.05).epsilon)
    assert np.mean(nearly) <= 0.1, nearly


@pytest.mark.parametrize(
    "estimator", [bx.Plain(), pytest.param(bx.Recursive(0.1), marks=pytest.mark.long)], ids=str
)
def test_stopped_anywhere_and_resumed_it_is_the_same_run(estimator, tmp_path):
    whole = solved(solver=method(estimator=estimator))
    for cut in (1, 777):
        file = tmp_path / f"{cut}.state"
        solved(solver=method(estimator=estimator), max_gradients=cut, checkpoint=file)
        again = solved(solver=method(estimator=estimator), resume=file)
        leaves = zip(*(jax.tree.leaves(s.state.solver_state) for s in (whole, again)))
        assert all(bool(jnp.all(a == b)) for a, b in leaves)
        assert again.certificate.as_dict() == whole.certificate.as_dict()


def test_certificates_from_samples_hold_as_often_as_they_say():
    """Over 30 draws the true lines lie in their intervals, and never is ε called too small."""
    instance = noisy("unique_saddle", deviation=0.3)
    point = solved().point
    exact = bx.certify(instance.problem, point)
    assert type(exact) is bx.KKTCertificate
    held = 0
    for key in range(30):
        certificate = bx.certify(instance.problem, point, batches=20, confidence=0.8, key=key)
        assert type(certificate) is bx.SampledCertificate
        inside = [
            certificate.interval(name)[0] <= value <= certificate.interval(name)[1]
            for name, value in exact.lines().items()
        ]
        held += all(inside)
    assert held >= 0.8 * 30
    assert certificate.epsilon > certificate.estimate.epsilon


@pytest.mark.long
def test_more_batches_narrow_the_interval():
    instance = noisy("unique_saddle", deviation=0.3)
    point = solved().point
    few, many = (bx.certify(instance.problem, point, batches=m) for m in (10, 160))
    assert isinstance(few, bx.SampledCertificate)
    assert isinstance(many, bx.SampledCertificate)
    assert many.radii["stationarity"] == pytest.approx(few.radii["stationarity"] / 4, rel=0.5)


def test_the_polished_point_is_near_and_certified():
    solution = solved()
    instance = noisy("unique_saddle", deviation=0.3)
    nearly = bx.polish(instance.problem, solution.point, 0.05)
    whole = dataclasses.replace(instance.problem, data=instance.problem.data.everything())
    assert bx.certify(whole, nearly.nearby).epsilon == nearly.certificate.epsilon
    blocks = lambda p: (p.x1, p.y1, p.y2)
    off = float(trees.norm(trees.subtract(blocks(nearly.nearby), blocks(solution.point))))
    assert nearly.distance == pytest.approx(off)
    assert nearly.epsilon == max(nearly.distance, nearly.certificate.epsilon)


def host_problem(batches, **options):
    problem = noisy("unique_saddle", deviation=0.3).problem
    source = bx.data.Host(batches, batch=8, **options)
    return dataclasses.replace(problem, data=source)


def epoch(epoch_number):
    instance = noisy("unique_saddle", deviation=0.3)
    sizes = {k: v.shape[1] for k, v in instance.problem.data.arrays.items()}
    rng = np.random.default_rng(epoch_number)
    for _ in range(40):
        yield {k: 0.05 * rng.normal(size=(8, size)) for k, size in sizes.items()}


def test_data_from_the_host_is_solved_certified_by_samples_and_resumed(tmp_path):
    start = noisy("unique_saddle", deviation=0.3).start
    run = functools.partial(bx.solve, start=start, tolerance=1e-6, solver=method(), progress=False)
    whole = run(host_problem(epoch), max_gradients=400)
    assert isinstance(whole.certificate, bx.SampledCertificate)
    file = tmp_path / "host.state"
    started = int(whole.state.solver_state.starter.gradients)
    assert 1 < started < 170
    for cut in (started - 1, 170):  # in the start phase, and after it
        run(host_problem(epoch), max_gradients=cut, checkpoint=file)
        again = run(host_problem(epoch), max_gradients=400, resume=file)
        a, b = (s.state.solver_state.outer.inner for s in (whole, again))
        np.testing.assert_array_equal(a.x[0], b.x[0])
        np.testing.assert_array_equal(a.y[1], b.y[1])


GAME = np.array([[3.0, -1.0, 0.0], [-2.0, 1.0, 0.5]])


def gap_of_game(w):
    """max over the columns less min over the rows, for mixed strategies w = (y1, y2)."""
    return np.max(w[..., :2] @ GAME, axis=-1) - np.min(w[..., 2:] @ GAME.T, axis=-1)


def test_the_start_from_samples_has_the_gap_in_expectation():
    """A matrix game whose entries have noise: over 40 keys the mean of the gap is at most ε."""
    rows = GAME + np.random.default_rng(0).normal(size=(4000, 2, 3))
    rows += GAME - rows.mean(axis=0)
    game = bx.MinimaxProblem(
        lambda y1, y2, d: jnp.dot(y1, jnp.dot(jnp.mean(d, axis=0), y2)),
        terms.Simplex(),
        terms.Simplex(),
        data=bx.data.Arrays(rows, batch=4),
    )
    start = bx.Point(x=jnp.asarray([1.0, 0.0]), y=jnp.asarray([1.0, 0.0, 0.0]))
    solver = SampledExtraGradient(tolerance=0.3).prepare(game, start, 1.0)

    @eqx.filter_jit
    @jax.vmap
    def found(key):
        mine = eqx.tree_at(lambda s: s.key, solver, key)
        state = mine.advance(game, mine.init(game, start), jnp.asarray(100_000))
        return state.average, state.accepted, state.gradients, state.stream.drawn

    average, accepted, gradients, drawn = (np.asarray(a) for a in found(jnp.arange(40)))
    assert gap_of_game(np.asarray([1.0, 0.0, 1.0, 0.0, 0.0])) > 4  # where it begins
    assert np.all(accepted)
    assert np.mean(gap_of_game(average)) <= 0.3
    np.testing.assert_array_equal(drawn, 4 * gradients)


def test_data_from_the_host_have_a_start_phase():
    """Every minibatch that is read is a gradient, and the outer method begins where it ends."""

    def games(number):
        rng = np.random.default_rng(number)
        yield from GAME + 0.3 * rng.normal(size=(100, 4, 2, 3))

    problem = bx.BilevelProblem(
        lambda x1, x2, y1, y2, d: jnp.sum(x1**2) + jnp.dot(x1, y1),
        lambda x1, y1, y2, d: jnp.dot(y1, jnp.dot(jnp.mean(d, axis=0), y2)),
        x1=terms.Box(-1.0, 1.0),
        y1=terms.Simplex(),
        y2=terms.Simplex(),
        data=bx.data.Host(games, batch=4, buffer=64),
    )
    start = bx.Point(x1=jnp.zeros(2), y1=jnp.asarray([1.0, 0.0]), y2=jnp.asarray([1.0, 0.0, 0.0]))
    inner = bx.SAPD(iterations=3, tau=1e-9, sigma=1e-9, theta=0.0)
    outer = bx.StochasticProximalPoint(iterations=4, returns="last", inner=inner)
    solver = bx.PenaltyMethod(epsilon=0.3, outer=outer)
    found = bx.solve(problem, start, solver=solver, tolerance=1e-6, progress=False)
    state = found.state.solver_state
    assert not bool(state.starting)
    assert found.gradients == int(state.starter.gradients) + 2 * 4 * 3
    assert int(state.outer.inner.stream.drawn) == 4 * found.gradients
    w = np.concatenate([found.output.y1, found.output.y2])  # which tiny steps do not move
    assert gap_of_game(w) <= 0.3


def test_broken_data_is_named_and_what_was_written_stays(tmp_path):
    mended = []

    def make(number):
        for k, batch in enumerate(epoch(number)):
            if (number, k) == (2, 30) and not mended:
                batch["lower"][5, 1] = np.nan
            yield batch

    start, file = noisy("unique_saddle", deviation=0.3).start, tmp_path / "kept.state"
    solver = dataclasses.replace(method(), starter=None)
    options = {"tolerance": 1e-6, "progress": False, "checkpoint": file, "solver": solver}
    with pytest.raises(bx.data.DataError, match="epoch 2") as error:
        bx.solve(host_problem(make), start, max_gradients=400, **options)
    assert (error.value.batch, error.value.index) == (30, 5)
    # Every step before is there: of two batches each, 40 + 40 + 30 of them.
    mended.append(True)
    kept = bx.solve(host_problem(make), start, max_gradients=1, resume=file, **options)
    assert kept.gradients == 2 * 40 + 30
    # Once mended, it goes on as if nothing had been.
    again = bx.solve(host_problem(make), start, max_gradients=400, resume=file, **options)
    whole = bx.solve(host_problem(make), start, max_gradients=400, **options)
    a, b = (s.state.solver_state.outer.inner for s in (whole, again))
    np.testing.assert_array_equal(a.x[0], b.x[0])


def test_the_best_of_many_looks_is_confirmed_on_other_samples():
    """Batches by which points are chosen flatter (f~ is steep there only); others do not."""
    flattering = HELD_OUT + EPOCHS_APART * RUNS

    def make(number):
        slope = 0.0 if flattering <= number < flattering + EPOCHS_APART else 1.0
        rng = np.random.default_rng(number)
        for _ in range(40):
            yield slope + 1e-9 * rng.normal(size=(8, 1))

    problem = bx.BilevelProblem(
        lambda x1, x2, y1, y2, d: jnp.sum(x1**2) + jnp.sum(y1**2) + jnp.mean(d) * jnp.sum(x1),
        lambda x1, y1, y2, d: jnp.sum(y1**2),
        x1=terms.Box(-1.0, 1.0),
        y1=terms.Box(-1.0, 1.0),
        data=bx.data.Host(make, batch=8),
    )
    start = bx.Point(x1=jnp.zeros(1), y1=jnp.zeros(1))  # where the flattering ones see ε = 0
    solution = bx.solve(
        problem, start, tolerance=0.01, solver=method(30.0), max_gradients=20, progress=False
    )
    assert solution.status == "budget spent"
    assert solution.certificate.epsilon > 0.5
    # Samples that tell the truth lead to x1 = −½, and to a certificate of it.
    steady = dataclasses.replace(problem, data=bx.data.Host(lambda e: make(e % 1000), batch=8))
    solution = bx.solve(
        steady, start, tolerance=0.05, solver=method(30.0, outer=10**6), max_gradients=50_000
    )
    assert solution.status == "certified", solution.status
    assert solution.certificate.confidence == 0.95
    assert "with probability 0.95" in str(solution.status)
    np.testing.assert_allclose(solution.point.x1, -0.5, atol=0.05)


def test_certificates_look_at_samples_that_were_held_out():
    seen = []

    def held(number):
        seen.append(number)
        yield from epoch(number)

    problem = host_problem(epoch, held_out=held)
    point = solved().point
    first, again = (bx.certify(problem, point, batches=50) for _ in range(2))
    assert first.as_dict() == again.as_dict()
    assert sorted(set(seen)) == [0, 1, 2]  # of 40 batches each: 50 to seek witnesses, 50 to judge
    other = bx.certify(problem, point, batches=50, key=1)
    assert other.as_dict() != first.as_dict()
    with pytest.raises(ValueError, match="held_out"):
        bx.certify(host_problem(list(epoch(0))), point)


def test_what_callbacks_see_is_confirmed_and_endings_agree_with_their_certificate():
    """ε is a bit below and a bit above the tolerance, as noise has it; resumed time and again."""
    start = noisy("unique_saddle", deviation=0.3).start
    given = {"solver": method(outer=10**6), "progress": False, "tolerance": 0.9}
    seen, state = [], None
    for most in (200, 800, 2_000, 4_000):
        solution = bx.solve(
            host_problem(epoch),
            start,
            max_gradients=most,
            resume=state,
            callback=lambda s: seen.append(s.certified),
            **given,
        )
        state = solution.state
        assert solution.certified == (solution.status == "certified")
        if solution.certified:
            break
    assert seen.count(True) <= 1  # the one that ends it
    # Taken up where it ended, it knows what was said of the point, and says no more.
    again = bx.solve(host_problem(epoch), start, max_gradients=0, resume=state, **given)
    assert again.certificate.as_dict() == solution.certificate.as_dict()
    assert again.state.confirmations == solution.state.confirmations


@pytest.mark.long  # resumed runs of the host, above, begin amid a buffer
def test_any_buffer_of_the_host_gives_the_same_run():
    start = noisy("unique_saddle", deviation=0.3).start
    run = functools.partial(bx.solve, start=start, tolerance=1e-6, solver=method(), progress=False)
    ends = [
        run(host_problem(epoch, buffer=b), max_gradients=120).state.solver_state.outer.inner
        for b in (8, 3)
    ]
    np.testing.assert_array_equal(ends[0].x[0], ends[1].x[0])


def test_epochs_that_are_all_the_same_do_not_certify():
    problem = host_problem(lambda e: epoch(0))
    with pytest.raises(ValueError, match="begin with the same batch"):
        bx.certify(problem, solved().point)


@functools.cache
def means_of_levels():
    """f = (x1 − mean)² + y1² and f~ = (y1 − mean)², of samples of their own: means 2 and −1."""
    rng = np.random.default_rng(0)
    upper, lower = 2 + 1e-3 * rng.normal(size=300), -1 + 1e-3 * rng.normal(size=300)
    return bx.BilevelProblem(
        lambda x1, x2, y1, y2, d: jnp.sum((x1 - jnp.mean(d)) ** 2) + jnp.sum(y1**2),
        lambda x1, y1, y2, d: jnp.sum((y1 - jnp.mean(d)) ** 2),
        x1=terms.Box(-3.0, 3.0),
        y1=terms.Box(-3.0, 3.0),
        data=bx.data.Levels(bx.data.Arrays(upper, batch=2), bx.data.Arrays(lower, batch=3)),
    )


@pytest.mark.long  # levels are solved by samples below
def test_levels_are_certified_by_samples_too():
    """At x1 = 1 the stationarity is 2, whoever samples."""
    problem = means_of_levels()
    point = bx.Point(x1=jnp.ones(1), y1=jnp.full(1, -1.0), z1=jnp.full(1, -1.0), rho=1.0)
    certificate = bx.certify(problem, point, batches=64)
    low, high = certificate.interval("stationarity")
    exact = bx.certify(problem, point).lines()["stationarity"]
    assert low <= exact <= high
    assert high - low < 0.1


def test_given_deviations_are_what_the_radii_rest_on_at_least():
    """One sample in 20,000 is huge, and in no minibatch that is looked at."""
    values = np.zeros(20_000)
    values[7] = 20_000.0

    def make(number):
        order = np.random.default_rng(number).permutation(values.size)
        yield from values[order[: 16 * 100]].reshape(100, 16) + 1e-9 * order[:1600].reshape(100, 16)

    options = {"x1": terms.Box(-1.0, 1.0), "y1": terms.Box(-1.0, 1.0)}
    problem = lambda **given: bx.BilevelProblem(
        lambda x1, x2, y1, y2, d: jnp.mean(d) * jnp.sum(x1) + jnp.sum(y1**2),
        lambda x1, y1, y2, d: jnp.sum(y1**2),
        data=bx.data.Host(make, batch=16),
        **options,
        **given,
    )
    zero = jnp.zeros(1)
    point = bx.Point(x1=zero, y1=zero, z1=zero, rho=1.0)
    true = values.std() / 4  # of a minibatch
    unseen = bx.certify(problem(), point)
    known = bx.certify(problem(upper_deviation=true, lower_deviation=0.0), point)
    assert unseen.epsilon < 1 <= known.epsilon  # 1 is right


def test_functions_that_are_no_means_are_told():
    rng = np.random.default_rng(0)
    arrays = {"a": rng.normal(size=400) + np.repeat([0.0, 5.0], [380, 20])}
    groups = np.repeat([0, 1], [380, 20])
    box = terms.Box(-1.0, 1.0)
    start = bx.Point(x=jnp.ones(1), y=jnp.ones(1))

    def problem(reduce, source):
        function = lambda x, y, d: reduce(d["a"]) * jnp.sum(x) + jnp.sum(x * y)
        return bx.MinimaxProblem(function, box, box, data=source)

    plain = bx.data.Arrays(arrays, batch=20)
    with pytest.warns(UserWarning, match="not a sum"):
        bx.solve(problem(jnp.sum, plain), start, max_gradients=10, progress=False)
    balanced = bx.data.Stratified(arrays, groups=groups, batch=20)
    assert "within each group" in biased(problem(jnp.mean, balanced), start)
    assert not biased(problem(jnp.mean, plain), start)


def test_keys_and_checks_of_stochastic_problems():
    for key in (jax.random.key(0), 1.5, True, "a"):
        with pytest.raises(TypeError, match="key must be a whole number"):
            bx.SAPD(key=key)
    with pytest.raises(ValueError, match="give key to it"):
        bx.StochasticProximalPoint(inner=bx.SAPD(key=3))
    instance = noisy("unique_saddle", deviation=0.3)
    assert instance.problem.check(instance.start, samples=2).ok
    with pytest.raises(ValueError, match="relative_tolerance"):
        bx.solve(host_problem(epoch), instance.start, relative_tolerance=0.1)


def test_looks_at_all_samples_take_a_tenth_of_the_gradients():
    solution = solved(max_gradients=60_000, solver=method(outer=10**6), tolerance=1e-7)
    assert len(solution.history) > 5
    assert solution.check_gradients <= 0.1 * solution.gradients + 3 * 200


def test_what_does_not_take_minibatches_says_so():
    instance = noisy("unique_saddle", deviation=0.3)
    with pytest.raises(TypeError, match="takes all data at once"):
        bx.solve(instance.problem, instance.start, solver=bx.Adaptive())
    with pytest.raises(TypeError, match="outer must be a StochasticProximalPoint"):
        bx.solve(
            instance.problem, instance.start, solver=bx.PenaltyMethod(outer=bx.ProximalPoint())
        )
    plain = get("unique_saddle")
    with pytest.raises(ValueError, match="batches"):
        bx.certify(plain.problem, plain.point, batches=10)


def test_levels_see_their_own_samples():
    """The upper level's mean is over its samples, the lower level's over its own."""
    solution = bx.solve(
        means_of_levels(),
        bx.Point(x1=jnp.zeros(1), y1=jnp.zeros(1)),
        tolerance=0.05,
        solver=method(30.0, steps=5, outer=10**6),
        max_gradients=50_000,
    )
    assert solution.status == "certified", solution.status
    np.testing.assert_allclose(solution.point.x1, 2.0, atol=0.05)
    np.testing.assert_allclose(solution.point.y1, -1.0, atol=0.2)


@pytest.mark.parametrize(
    "name", ["unique_saddle", pytest.param("worst_group", marks=pytest.mark.long)]
)
def test_the_default_needs_no_setting(name):
    """`benchmarks/stochastic.py` has all problems, over 20 keys."""
    instance = noisy(name, deviation=0.3)
    solution = bx.solve(instance.problem, instance.start, tolerance=0.1, max_gradients=100_000)
    assert solution.status == "certified", solution.status
    assert type(solution.certificate) is bx.KKTCertificate


def test_a_minimax_problem_is_solved_by_minibatches_too():
    """½x² + xy − ½y² + ξ(x − y) has its saddle point at 0, as the samples' mean is 0."""
    samples = np.random.default_rng(0).normal(size=(500, 1))
    problem = bx.MinimaxProblem(
        lambda x, y, d: jnp.sum(x**2 / 2 + x * y - y**2 / 2 + jnp.mean(d) * (x - y)),
        terms.Box(-2.0, 2.0),
        terms.Box(-2.0, 2.0),
        data=bx.data.Arrays(samples - samples.mean(0), batch=5),
    )
    start = bx.Point(x=jnp.ones(1), y=jnp.ones(1))
    solution = bx.solve(problem, start, tolerance=0.05, max_gradients=100_000)
    assert solution.status == "certified", solution.status
    np.testing.assert_allclose(solution.point.x, 0.0, atol=0.1)


def test_the_prediction_is_the_theorems():
    """K of the proof of thm:minmax_stoch and T of eq:sapd_T, from the printed constants."""
    instance = noisy("unique_saddle", deviation=0.3)
    prediction = bx.theory.predict(instance.problem, instance.start, tolerance=0.1)
    known, bounds = prediction.constants, prediction.bounds
    assert isinstance(bounds, bx.theory.StochasticBounds)
    assert known["rho"] == pytest.approx(10)
    delta = float(instance.problem.upper_deviation)
    assert known["deviation"] == pytest.approx(np.sqrt(3 * delta**2 + 6 * 100 * delta**2))
    L, hat = known["smoothness"], 0.1**1.5
    assert known["inner_tolerance"] == pytest.approx(hat)
    assert known["x_weight"] == pytest.approx(2 * L)
    rate = (1 - known["theta"]) / known["theta"]
    assert known["tau"] == pytest.approx(rate / L, rel=1e-6)
    assert bounds.N == 2 * bounds.K * bounds.T > 1e12
    assert "minibatch" in str(prediction)


def test_shrinking_steps_shrink_as_they_say():
    """On −x every step is its own length; τ = 0.01, and after k of them 0.01·(1 + k/5)^(−p)."""
    problem = bx.MinimaxProblem(
        lambda x, y: -jnp.sum(x) + 0 * jnp.sum(y), terms.Box(0.0, 1e3), terms.Box(-1.0, 1.0)
    )
    start = bx.Point(x=jnp.zeros(1), y=jnp.zeros(1))
    for estimator, power in ((bx.Plain(), 1 / 2), (bx.Recursive(), 1 / 3)):
        solver = bx.SAPD(
            iterations=8, tau=0.01, sigma=0.01, theta=1.0, decay=5, estimator=estimator
        ).prepare(problem, start, 0.1)
        state = solver.init(problem, start)
        count, at = 0, 0.0
        while not bool(solver.done(problem, state)):
            state = solver.step(problem, state, jnp.asarray(0))
            at += 0.01 * (1 + count / 5) ** -power
            count += 1
            np.testing.assert_allclose(state.x, at, rtol=1e-12)
        # Ended when the steps would have come as far as 8 that did not shrink, and not before.
        far = [k * (1 + k / 5) ** -power for k in (count - 1, count)]
        assert far[0] < 8 <= far[1]


def test_constant_steps_are_half_of_one_over_the_smoothness():
    problem = bx.MinimaxProblem(
        lambda x, y: jnp.sum(x**2 - y**2),
        terms.Box(-1.0, 1.0),
        terms.Box(-1.0, 1.0),
        smoothness=2.0,
    )
    start = bx.Point(x=jnp.ones(1), y=jnp.ones(1))
    prepared = bx.SAPD(iterations=3, theta=1.0).prepare(problem, start, 0.1)
    assert (float(prepared.tau), float(prepared.sigma)) == (0.25, 0.25)
