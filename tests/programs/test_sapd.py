"""SAPD: constants in 60 digits, a NumPy transcription, its rate, its accuracy under noise."""

import decimal
from decimal import Decimal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bilevax as bx
from bilevax import terms
from bilevax.solvers.sapd import sapd_constants


def paper_constants(L, sx, sy, delta, hat, Dp, Dq):
    """`eq:sapd_T` to `eq:theta_bound_2-R1` as they stand, in 60 digits."""
    with decimal.localcontext(decimal.Context(prec=60)):
        L, sx, sy, delta, hat, Dp, Dq = (Decimal(v) for v in (L, sx, sy, delta, hat, Dp, Dq))
        beta = min(Decimal("0.5"), sy / sx, sx / sy)
        one = 1 - beta * (L + sx) * sy / (4 * L**2) * (
            (1 + 8 * sx * L**2 / (beta * sy * (L + sx) ** 2)).sqrt() - 1
        )
        two = 1 - (1 - beta) ** 2 / 32 * sy**2 / L**2 * (
            (1 + 64 * L**2 / ((1 - beta) ** 2 * sy**2)).sqrt() - 1
        )
        thetas = [one, two]
        if delta:
            psi = min((beta / 2 * sx / sy).sqrt(), (1 - beta) / 4)
            xi_x, xi_y = 1 + psi, (27 + 3 * beta) / 2 + sy / sx * psi
            thetas += [max(Decimal(0), 1 - sx * hat**2 / (12 * xi_x * delta**2))]
            thetas += [max(Decimal(0), 1 - sy * hat**2 / (12 * xi_y * delta**2))]
        theta = max(thetas)
        T = 1 + ((6 * sx * Dp**2 + 6 * sy * Dq**2) / hat**2).ln() / (1 - theta)
        T = T.to_integral_value(rounding=decimal.ROUND_CEILING)
        return T, (1 - theta) / (sx * theta), (1 - theta) / (sy * theta), 1 - theta


@pytest.mark.parametrize("delta", ["0", "1e-6", "1", "1e4"])
@pytest.mark.parametrize(
    ("L", "sx", "sy"),
    [
        ("10", "1", "1"),
        ("3", "1", "1e-6"),
        ("3e6", "1e6", "1e-6"),
        ("1e9", "1e-3", "1e-9"),
        ("2", "1e-8", "1"),
        ("1e12", "1", "1e-12"),
    ],
)
def test_constants_at_extreme_condition_numbers(L, sx, sy, delta):
    T, tau, sigma, rate = paper_constants(L, sx, sy, delta, "0.01", "2", "3")
    found = sapd_constants(
        smoothness=float(L),
        sigma_x=float(sx),
        sigma_y=float(sy),
        deviation=float(delta),
        tolerance=0.01,
        x_diameter=2.0,
        y_diameter=3.0,
    )
    assert found.rate == pytest.approx(float(rate), rel=1e-12)
    assert found.tau == pytest.approx(float(tau), rel=1e-12)
    assert found.sigma == pytest.approx(float(sigma), rel=1e-12)
    assert found.theta == 1 - found.rate
    assert found.iterations == pytest.approx(float(T), rel=1e-12, abs=1)


rng = np.random.default_rng(0)
A, B = rng.normal(size=(37, 3)), rng.normal(size=(37, 2))


def objective(x, y, d):
    """A mean over samples: ½‖x − a‖² + xᵀ(a bᵀ)y − ½‖y − b‖², nonlinear on top."""
    one = lambda a, b: (
        0.5 * jnp.sum((x - a) ** 2)
        + jnp.sum(a * x) * jnp.sum(b * y)
        - 0.5 * jnp.sum((y - b) ** 2)
        + 0.1 * jnp.sum(jnp.cos(x))
    )
    return jnp.mean(jax.vmap(one)(d["a"], d["b"]))


def slopes(x, y, d):
    """∇ₓ and ∇ᵧ of it, by hand."""
    a, b = d["a"], d["b"]
    gx = np.mean((x - a) + a * (b @ y)[:, None], axis=0) - 0.1 * np.sin(x)
    gy = np.mean(b * (a @ x)[:, None] - (y - b), axis=0)
    return gx, gy


def problem(batch=5, **terms_):
    given = {"x": terms.Box(-0.5, 0.5), "y": terms.Simplex()} | terms_
    return bx.MinimaxProblem(objective, **given, data=bx.data.Arrays({"a": A, "b": B}, batch=batch))


START = bx.Point(x=jnp.zeros(3), y=jnp.asarray([0.9, 0.1]))


def simplex(v):
    u = np.sort(v)[::-1]
    shift = (1 - np.cumsum(u)) / np.arange(1, len(v) + 1)
    return np.maximum(v + shift[np.nonzero(u + shift > 0)[0][-1]], 0)


@pytest.mark.parametrize("theta", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("momentum", [None, 0.3])
def test_it_is_the_transcription_on_the_same_samples(theta, momentum):
    """100 iterations of Algorithm `alg:sapd`, the samples taken from the source one by one."""
    saddle, T, tau, sigma = problem(), 100, 0.05, 0.07
    estimator = bx.Plain() if momentum is None else bx.Recursive(momentum)
    solver = bx.SAPD(
        iterations=T, tau=tau, sigma=sigma, theta=theta, key=7, estimator=estimator
    ).prepare(saddle, START, 0.1)
    state = eqx.filter_jit(solver.advance)(saddle, solver.init(saddle, START), jnp.asarray(10**6))
    assert int(state.iteration) == T
    assert int(state.gradients) == T * (2 if momentum is None else 4)

    stream, draw = saddle.data.init(jax.random.key(7)), eqx.filter_jit(saddle.data.draw)
    x, y = np.zeros(3), np.asarray([0.9, 0.1])
    q, memory = np.zeros(2), {}

    def estimate(which, w, batch):
        g = slopes(*w, batch)[which]
        if momentum is not None and which in memory:
            before, old = memory[which]
            g = g + (1 - momentum) * (old - slopes(*before, batch)[which])
        memory[which] = (w, g)
        return g

    last = None
    for _ in range(T):
        stream, batch = draw(stream)
        here = estimate(1, (x, y), jax.tree.map(np.asarray, batch))
        q = np.zeros(2) if last is None else here - last
        last = here
        y = simplex(y + sigma * (here + theta * q))
        stream, batch = draw(stream)
        x = np.clip(x - tau * estimate(0, (x, y), jax.tree.map(np.asarray, batch)), -0.5, 0.5)
    np.testing.assert_allclose(state.x, x, atol=1e-9)
    np.testing.assert_allclose(state.y, y, atol=1e-9)
    assert int(state.stream.drawn) == int(stream.drawn) == 2 * 5 * T


@pytest.mark.parametrize(("L", "sx", "sy"), [(10.0, 1.0, 1.0), (10.0, 1.0, 0.1), (3.0, 0.5, 0.5)])
def test_its_rate_is_the_theorys(L, sx, sy):
    """Quadratics curved as much, and as little, as L and the σ's allow; the slowest one counts."""
    bend_x, bend_y = jnp.asarray([L, sx, sx]), jnp.asarray([sy, L, sy])
    couple = jnp.asarray([0.0, 0.0, 0.9 * ((L - sx) * (L - sy)) ** 0.5])
    quadratic = bx.MinimaxProblem(
        lambda x, y: jnp.sum(bend_x * x**2 / 2 + couple * x * y - bend_y * y**2 / 2),
        terms.Box(-10.0, 10.0),
        terms.Box(-10.0, 10.0),
        smoothness=L,
    )
    start = bx.Point(x=jnp.ones(3), y=jnp.ones(3))
    solver = bx.SAPD(sigma_x=sx, sigma_y=sy, tolerance=1e-3).prepare(quadratic, start, 1e-3)
    run = eqx.filter_jit(solver.advance)
    T = int(solver.iterations)
    sizes = []
    state = solver.init(quadratic, start)
    for t in (T // 2, T):
        state = run(quadratic, state, jnp.asarray(2 * t))
        sizes.append(float(jnp.linalg.norm(jnp.concatenate([state.x, state.y]))))
    measured = (sizes[1] / sizes[0]) ** (1 / (T - T // 2))
    assert 0.5 < np.log(measured) / np.log(float(solver.theta)) < 2
    reached = sx * np.sum(np.square(state.x)) + sy * np.sum(np.square(state.y))
    assert reached <= 1e-3**2  # what T is chosen for


def test_its_accuracy_under_noise_is_what_was_asked():
    """E[σ_x‖x − x*‖² + σ_y‖y − y*‖²] ≤ ε̂² after T iterations, over 20 keys."""
    rng = np.random.default_rng(1)
    samples = {"a": rng.normal(size=(400, 2)), "b": rng.normal(size=(400, 2))}
    samples = {k: v - v.mean(0) for k, v in samples.items()}  # so that the saddle point is 0

    def h(x, y, d):
        smooth = jnp.sum(x**2) / 2 + 0.5 * jnp.sum(x * y) - jnp.sum(y**2) / 2
        return smooth + jnp.mean(d["a"] @ x) + jnp.mean(d["b"] @ y)

    box = terms.Box(-1.0, 1.0)
    saddle = bx.MinimaxProblem(h, box, box, data=bx.data.Arrays(samples, batch=10), smoothness=1.2)
    start, hat = bx.Point(x=jnp.full(2, 0.7), y=jnp.full(2, -0.7)), 0.4
    method = bx.SAPD(sigma_x=1.0, sigma_y=1.0, tolerance=hat)
    prepared = method.prepare(saddle, start, hat)
    true = (np.sum(samples["a"].var(0)) + np.sum(samples["b"].var(0))) / 10
    assert float(prepared.deviation) ** 2 == pytest.approx(true, rel=0.25)  # of 64 batches

    @eqx.filter_jit
    @jax.vmap
    def distances(seed):
        solver = eqx.tree_at(lambda s: s.key, prepared, seed)
        s = solver.advance(saddle, solver.init(saddle, start), jnp.asarray(10**9))
        return jnp.sum(s.x**2) + jnp.sum(s.y**2)

    squares = np.asarray(distances(jnp.arange(20)))
    assert np.mean(squares) <= hat**2
    assert np.mean(squares) > 1e-4 * hat**2  # there is noise


@eqx.filter_jit
def one_step(solver, problem, state):
    return solver.step(problem, state, jnp.asarray(10**6))


def test_the_average_weighs_late_iterates_more():
    saddle = problem()
    for theta in (0.0, 0.8, 1.0):
        solver = bx.SAPD(
            iterations=6, tau=0.05, sigma=0.07, theta=theta, returns="average"
        ).prepare(saddle, START, 0.1)
        state = solver.init(saddle, START)
        seen = []
        for _ in range(6):
            state = one_step(solver, saddle, state)
            seen.append(np.asarray(state.x))
        weights = [0.0] * 5 + [1.0] if theta == 0 else [theta ** -(k + 1.0) for k in range(6)]
        np.testing.assert_allclose(state.average[0], np.average(seen, axis=0, weights=weights))


def test_recursive_estimates_are_less_noisy_where_steps_are_small():
    """At a fixed point the error of STORM falls to a/(2 − a) of the variance of one sample."""
    rng = np.random.default_rng(2)
    noise = rng.normal(size=20_000)
    estimator = bx.Recursive(0.1)
    memory = estimator.init(jnp.zeros(()), jnp.zeros(()))

    def advance(memory, xi):
        value, memory = estimator(lambda w: w + xi, jnp.zeros(()), memory, jnp.ones(()))
        return memory, value

    _, values = jax.lax.scan(advance, memory, jnp.asarray(noise))
    assert np.var(values[100:]) == pytest.approx(0.1 / 1.9, rel=0.1)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"tau": -1.0}, ValueError, "SAPD: tau"),
        ({"theta": -0.1}, ValueError, "SAPD: theta"),
        ({"iterations": 0}, ValueError, "SAPD: iterations"),
        ({"iterations": 1.5}, TypeError, "SAPD: iterations"),
        ({"deviation": np.nan}, ValueError, "SAPD: deviation"),
        ({"returns": "best"}, ValueError, "returns"),
        ({"estimator": "storm"}, TypeError, "estimator"),
    ],
)
def test_bad_options_are_named(options, error, words):
    with pytest.raises(error, match=words):
        bx.SAPD(**options)


def test_what_the_formulas_need_is_asked_for():
    with pytest.raises(ValueError, match="sigma_x"):
        bx.SAPD(sigma_y=1.0).prepare(problem(), START, 0.1)
    with pytest.raises(ValueError, match="momentum"):
        bx.Recursive(1.5)
