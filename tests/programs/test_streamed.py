"""Certificates from many minibatches that are read once: their lines, radii, and what runs do."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bilevax as bx
from bilevax.certificates import judge
from bilevax.certificates.sampled import averaged, drawn_batches
from bilevax.certificates.streamed import held_out_means, normal_error, streamed_certificate
from bilevax.problems.tangents import tabulated
from bilevax.terms import Box, Free, Simplex

WEIGHTS = np.array([1.0, -2.0, 0.5])
NOISE = np.array([0.5, 1.0])


def make(epoch):
    """Rows of two groups, equally likely, whose targets have different noise."""
    rng = np.random.default_rng([epoch, 5])
    for _ in range(4096):
        X, group = rng.normal(size=(16, 3)), rng.integers(0, 2, 16)
        yield {"X": X, "t": X @ WEIGHTS + NOISE[group] * rng.normal(size=16), "g": group}


def group_losses(y, d):
    members = 2.0 * jax.nn.one_hot(d["g"], 2)
    return jnp.mean(members * 0.5 * ((d["X"] @ y - d["t"]) ** 2)[:, None], axis=0)


def robust(data):
    return bx.BilevelProblem(
        upper=lambda x1, x2, y1, y2, d: x2 @ group_losses(y1, d) + 0.05 * jnp.exp(-x1),
        lower=lambda x1, y1, y2, d: y2 @ group_losses(y1, d) + 0.5 * jnp.exp(x1) * jnp.sum(y1**2),
        x1=Box(-3.0, 1.0),
        x2=Simplex(),
        y1=Free(),
        y2=Simplex(),
        lower_modulus=jnp.exp,
        data=data,
    )


HALF = jnp.full(2, 0.5)
START = bx.Point(x1=jnp.asarray(-1.0), x2=HALF, y1=jnp.zeros(3), y2=HALF)
POINT = bx.Point(
    x1=jnp.asarray(-1.0),
    x2=jnp.asarray([0.3, 0.7]),
    y1=jnp.asarray(0.8 * WEIGHTS),
    y2=HALF,
    z1=jnp.asarray(0.7 * WEIGHTS),
    z2=jnp.asarray([0.4, 0.6]),
    rho=jnp.asarray(2.0),
)


def true_lines(p):
    """At a point, for the law of the rows: E X Xᵀ = I, so all is in closed form."""
    x1, y1, y2, x2, z1, z2 = (np.asarray(v, float) for v in (p.x1, p.y1, p.y2, p.x2, p.z1, p.z2))
    rho, ridge = float(p.rho), np.exp(x1)
    losses = lambda y: 0.5 * (np.sum((y - WEIGHTS) ** 2) + NOISE**2)
    of_y1 = y1 - WEIGHTS + rho * (y1 - WEIGHTS + ridge * y1)
    of_x1 = -0.05 * np.exp(-x1) + rho * ridge / 2 * (y1 @ y1 - z1 @ z1)
    of_z1 = z1 - WEIGHTS + ridge * z1

    def on_simplex(v, g):
        """The distance of −g from the normal cone at v: the least over what the sum's holds."""
        shifts = np.linspace(g.min(), g.max(), 20_001)[:, None]
        off = np.where(v > 0, g - shifts, np.minimum(g - shifts, 0))
        return np.sqrt(np.min(np.sum(off**2, axis=1)))

    gap = losses(y1).max() + ridge / 2 * y1 @ y1 + of_z1 @ of_z1 / (2 * ridge)
    gap -= y2 @ losses(z1) + ridge / 2 * z1 @ z1
    return {
        "stationarity": np.sqrt(of_y1 @ of_y1 + of_x1**2 + on_simplex(y2, -rho * losses(z1)) ** 2),
        "response_x2": on_simplex(x2, -losses(y1)),
        "response_z1": rho * np.linalg.norm(of_z1),
        "response_z2": on_simplex(z2, -rho * losses(y1)),
        "gap": gap,
    }


def test_means_of_tangents_have_the_lines_of_the_minibatches_themselves():
    problem = robust(bx.data.Host(make, batch=16))
    seen = held_out_means(problem, POINT, 64, 3)
    by_table = judge(tabulated(problem, seen.total), POINT)
    by_rows = judge(averaged(problem, drawn_batches(problem, 64, 3)), POINT)
    for name, line in by_rows.lines().items():
        assert by_table.lines()[name] == pytest.approx(line, rel=1e-9, abs=1e-9)


def test_many_minibatches_certify_more_and_keep_their_word():
    problem = robust(bx.data.Host(make, batch=16))
    few = bx.certify(problem, POINT, confidence=0.99)
    many = bx.certify(problem, POINT, batches=2048, confidence=0.99)
    assert (few.batches, many.batches, many.groups) == (64, 2048, 64)
    wanted = true_lines(POINT)
    for name, line in many.lines().items():
        assert wanted[name] <= line
        assert many.radii[name] < 0.1 * few.radii[name]
        assert many.interval(name)[0] <= wanted[name]


def test_the_radius_is_that_of_gaussian_concentration():
    """Of the deviations ±2 along one axis, 32 each, the variance is 256/63."""
    deviations = np.zeros((64, 3))
    deviations[:32, 1], deviations[32:, 1] = 2.0, -2.0
    wanted = (63 * (100 ** (2 / 63) - 1) * 256 / 63 / 64) ** 0.5
    assert normal_error(deviations, 0.01) == pytest.approx(wanted)
    assert wanted > (2 * np.log(100) * 256 / 63 / 64) ** 0.5  # what a known variance would give
    deviations[0, 0] = np.nan
    assert normal_error(deviations, 0.01) == np.inf
    assert normal_error(np.zeros((64, 0)), 0.01) == 0


@pytest.mark.parametrize("scales", [[1.0], [3.0, 1.0, 0.1], [1.0] * 40])
def test_distances_on_normal_means_are_covered(scales):
    """The distance from a cone, of means whose true value has a distance of 0 or of 1."""
    rng, alpha, missed = np.random.default_rng(0), 0.05, 0
    distance = lambda g: np.linalg.norm([g[0], *np.maximum(g[1:], 0)])
    for true in (0.0, 1.0):
        middle = np.zeros(len(scales))
        middle[0] = true
        for _ in range(500):
            drawn = middle + np.asarray(scales) * rng.normal(size=(64, len(scales)))
            mean = drawn.mean(axis=0)
            missed += distance(mean) + normal_error(drawn - mean, alpha) < true
    assert missed <= 1000 * alpha


def test_a_run_looks_as_long_as_its_tolerance_asks_for():
    source = bx.data.Host(make, batch=16)
    found = bx.solve(robust(source), START, tolerance=0.15, confidence=0.99, progress=False)
    assert found.certified
    assert found.certificate.confidence == 0.99
    assert found.certificate.groups == 64
    for name, line in true_lines(found.point).items():
        assert line <= min(0.15, found.certificate.lines()[name])
    again = bx.solve(
        robust(source), START, tolerance=0.15, confidence=0.99, progress=False, resume=found.state
    )
    assert again.certificate.lines() == found.certificate.lines()


def test_heavy_tails_of_groups_are_named():
    def heavy(epoch):
        rng = np.random.default_rng([epoch, 6])
        for _ in range(2048):
            yield {"d": rng.lognormal(0, 3, size=(1,))}

    box = Box(-1.0, 1.0)
    problem = bx.MinimaxProblem(
        lambda x, y, d: jnp.mean(d["d"]) * x + 0 * y, box, box, data=bx.data.Host(heavy, batch=1)
    )
    point = bx.Point(x=jnp.zeros(()), y=jnp.zeros(()))
    found = streamed_certificate(problem, point, held_out_means(problem, point, 1024, 1), {}, 0.95)
    assert found.heavy_tailed
    assert "one of 64 groups of 1024 minibatches" in str(found)


@pytest.mark.parametrize("confidence", [0.0, 1.0, 1.5, -0.1])
def test_confidence_is_a_probability(confidence):
    with pytest.raises(ValueError, match="confidence must be a probability between 0 and 1"):
        bx.solve(robust(bx.data.Host(make, batch=16)), START, confidence=confidence)


def test_minibatches_on_the_host_are_those_that_are_drawn():
    """From the middle of a buffer, past its end, and for both of two levels."""
    source = bx.data.Levels(
        bx.data.Host(make, batch=16, buffer=3), bx.data.Host(lambda e: make(e + 9), batch=16)
    )
    state = source.refilled(source.init(0))
    state, _ = source.draw(state)
    drawn, expected = source.batches(state), []
    for _ in range(6):
        state = state if bool(source.ready(state)) else source.refilled(state)
        state, batch = source.draw(state)
        expected.append(batch)
    after = None
    for batch in expected:
        after, found = next(drawn)
        jax.tree.map(np.testing.assert_array_equal, batch, found)
    _, following = source.draw(source.refilled(state))
    _, other = source.draw(source.refilled(after))
    jax.tree.map(np.testing.assert_array_equal, following, other)
    assert int(after.drawn) == int(state.drawn)
