"""Constrained lower levels by minibatches: the algorithm, certificates from samples, the host."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bilevax as bx
from bilevax import terms
from bilevax.certificates.sampled import estimation_cost
from bilevax.problems.deviation import biased

BOX, COUNT, BATCH = terms.Box(-3.0, 3.0), 640, 8
ROWS = 0.3 * np.random.default_rng(0).normal(size=(COUNT, 4))
ROWS -= ROWS.mean(axis=0)


def upper(x, y, d):
    return jnp.sum((x - 1) ** 2 / 2 + y**2 / 2) + jnp.mean(d[:, 0]) * jnp.sum(x)


def lower(x, y, d):
    return jnp.sum((y - 2) ** 2 / 2) + jnp.mean(d[:, 1]) * jnp.sum(y)


def constraints(x, y, d):
    """y ≤ x, and y ≥ −2 which never binds: means over rows, both."""
    return jnp.stack([y - x - jnp.mean(d[:, 2]), -y - 2 + jnp.mean(d[:, 3])])


def problem(data, **options):
    """With all rows: y = x, λ̄ = 2 − x, and x = ½."""
    return bx.ConstrainedBilevelProblem(
        upper, lower, constraints=constraints, x=BOX, y=BOX, data=data, **options
    )


START = bx.Point(x=jnp.asarray(0.3), y=jnp.asarray(-0.4))
MULTIPLIERS = bx.Multipliers(lam=jnp.asarray([7.4, 0.0]), lam_bar=jnp.asarray([1.5, 0.0]))
ANSWER = bx.Point(
    x=jnp.asarray(0.5),
    y=jnp.asarray(0.5),
    z=jnp.asarray(0.5),
    rho=jnp.asarray(5.0),
    multipliers=MULTIPLIERS,
)
IN_MEMORY = problem(bx.data.Arrays(ROWS, batch=BATCH), multiplier_bound=4.0)


def epoch(number):
    order = np.random.default_rng(number).permutation(COUNT)
    yield from ROWS[order].reshape(-1, BATCH, 4)


def test_the_named_method_is_the_algorithm_on_the_lagrangian():
    """30 subproblems of 3 steps in NumPy; every step has the constraint rows of its minibatch."""
    K, T, tau, sigma, theta, rho, L, eps, D = 30, 3, 0.02, 0.03, 0.6, 5.0, 8.0, 0.2, 3.0
    inner = bx.SAPD(iterations=T, tau=tau, sigma=sigma, theta=theta)
    outer = bx.StochasticProximalPoint(iterations=K, key=3, returns="last", inner=inner)
    solver = bx.PenaltyMethod(
        epsilon=eps, rho=rho, smoothness=L, diameter=D, starter=None, outer=outer
    )
    found = bx.solve(IN_MEMORY, START, solver=solver, tolerance=1e-6, progress=False)
    assert found.gradients == 2 * K * T
    assert isinstance(found.certificate, bx.ConstrainedKKTCertificate)  # exact, on all rows

    stream, draw = IN_MEMORY.data.init(jax.random.key(3)), eqx.filter_jit(IN_MEMORY.data.draw)
    c = lambda x, y, d: np.array([y - x - d[2], -y - 2 + d[3]])
    u, v = np.array([0.3, -0.4, 0, 0]), np.array([-0.4, 0, 0])  # x, y, λ̄ and z, λ/ρ
    v_center = v
    down, up = np.array([-3, -3, 0, 0]), np.array([3, 3, 4, 4])
    for _ in range(K):
        u_center, before = u, None
        for _ in range(T):
            stream, batch = draw(stream)
            d = np.mean(np.asarray(batch), axis=0)
            (x, y, *lam_bar), (z, *lam) = u, v
            of_z = -rho * (z - 2 + d[1] + lam_bar[0] - lam_bar[1])
            slope = np.array([of_z, *(rho * c(x, y, d))]) - eps / (2 * D) * (v - v_center)
            q = 0.0 if before is None else slope - before
            before = slope
            v = np.clip(v + sigma * (slope + theta * q), [-3, 0, 0], [3, 4, 4])
            stream, batch = draw(stream)
            d = np.mean(np.asarray(batch), axis=0)
            z, *lam = v
            of_x = x - 1 + d[0] - rho * lam[0] + rho * lam_bar[0]
            of_y = y + rho * (y - 2 + d[1] + lam[0] - lam[1])
            slope = np.array([of_x, of_y, *(-rho * c(x, z, d))])
            u = np.clip(u - tau * (slope + 2 * L * (u - u_center)), down, up)
    p = found.output
    got = [p.x, p.y, *p.multipliers.lam_bar, p.z, *(p.multipliers.lam / rho)]
    np.testing.assert_allclose(np.asarray(got), [*u, *v], atol=1e-9)


def test_radii_of_constraints_and_gap_are_what_the_deviations_make_of_them():
    """Against NumPy: the deviations of slopes and of weighed values, by Chebyshev and Student."""
    found = bx.certify(IN_MEMORY, ANSWER, batches=16, key=5)
    drawn = IN_MEMORY.data.init(5 + (1 << 30))
    means = []
    for _ in range(32):
        drawn, batch = IN_MEMORY.data.draw(drawn)
        means.append(np.mean(np.asarray(batch), axis=0))
    d, rho = np.stack(means[16:]), 5.0
    # Slopes in x, y and z; the gap's value, g(x, y) − g(x, z) − λ̄ᵀc(x, z); constraints.
    slopes = np.stack([d[:, 0], rho * d[:, 1], rho * d[:, 1]], axis=1)
    gap = 1.5 * d[:, 2]
    rows = np.stack([-d[:, 2], d[:, 3]], axis=1)
    values = np.column_stack([gap, rows * [7.4, 1.0], rows * [1.5, 1.0]])
    alpha = 0.05 / 2
    error = lambda a: estimation_cost(16, alpha) * (a.var(axis=0, ddof=1).sum() / 16 / alpha) ** 0.5
    slope, value = error(slopes), error(values)
    wanted = {"stationarity": slope, "response_z": slope, "lower_gap": value + 6 * slope / rho}
    wanted |= {"upper_feasibility": 0.0, "upper_complementarity": 0.0}
    for name, radius in found.radii.items():
        assert radius == pytest.approx(wanted.get(name, value), rel=1e-9), name


@pytest.mark.parametrize("at", [0.5, 0.8])
def test_certificates_from_samples_are_above_the_truth(at):
    """y = 0.8 > x violates a constraint; over 20 draws no line is below that of all samples."""
    point = ANSWER.replace(y=jnp.asarray(at))
    exact = bx.certify(IN_MEMORY, point).lines()
    for key in range(20):
        seen = bx.certify(IN_MEMORY, point, batches=16, key=key).lines()
        assert all(seen[name] >= exact[name] - 1e-12 for name in exact), key


def test_the_host_is_certified_by_samples_and_taken_by_the_named_method():
    host = problem(bx.data.Host(epoch, batch=BATCH), multiplier_bound=4.0)
    found = bx.certify(host, bx.Point(x=jnp.asarray(0.5), y=jnp.asarray(0.5)), batches=32)
    assert isinstance(found, bx.SampledCertificate)
    assert isinstance(found.estimate, bx.ConstrainedKKTCertificate)
    assert found.estimate.epsilon < 0.2
    assert 0.2 < found.epsilon < 10
    inner = bx.SAPD(iterations=5, tau=0.01, sigma=0.01, theta=1.0)
    outer = bx.StochasticProximalPoint(iterations=20, inner=inner)
    solver = bx.PenaltyMethod(epsilon=0.5, starter=None, outer=outer)
    run = bx.solve(host, START, solver=solver, tolerance=1e-3, progress=False)
    assert run.gradients == 200
    assert isinstance(run.certificate, bx.SampledCertificate)


def test_constraints_that_are_no_means_are_told():
    stated = bx.ConstrainedBilevelProblem(
        upper,
        lower,
        constraints=lambda x, y, d: jnp.stack([y - x, y - jnp.sum(d[:, 2] ** 2)]),
        x=BOX,
        y=BOX,
        data=bx.data.Arrays(ROWS, batch=BATCH),
    )
    assert "constraints: its mean over minibatches" in biased(stated, START)
    assert biased(IN_MEMORY, START) is None


def test_polish_finds_the_stationary_point_of_a_minimax_problem():
    """½(x − 1)² + xy − ½y² has its saddle at (½, ½), √0.02 from (0.6, 0.4), where ε is 0.2."""
    minimax = bx.MinimaxProblem(lambda x, y: (x - 1) ** 2 / 2 + x * y - y**2 / 2, BOX, BOX)
    begin = bx.Point(x=jnp.asarray(0.6), y=jnp.asarray(0.4))
    nearly = bx.polish(minimax, begin, 1e-4, max_gradients=2000)
    assert nearly.epsilon == pytest.approx(0.02**0.5, abs=1e-3)
    np.testing.assert_allclose([nearly.nearby.x, nearly.nearby.y], 0.5, atol=1e-3)


def test_polish_of_a_constrained_problem_knows_that_a_point_is_good_itself():
    """At x = 0.01 ‖∇f‖ is 0.01, though f = −½x² falls from there: nearly KKT asks no more."""
    falling = bx.ConstrainedBilevelProblem(
        lambda x, y: -(x**2) / 2,
        lambda x, y: (y - 2) ** 2 / 2,
        constraints=lambda x, y: jnp.stack([y - x]),
        x=BOX,
        y=BOX,
    )
    nearly = bx.polish(falling, bx.Point(x=jnp.asarray(0.01), y=jnp.asarray(0.01)), 0.02)
    assert nearly.epsilon <= 0.0101
