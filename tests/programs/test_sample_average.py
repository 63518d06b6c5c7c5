"""SampleAverage: growing subsets of a problem's samples."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bilevax as bx
from bilevax.problems.means import Chunks, Correction, on_chunks
from bilevax.solvers import sample_average
from bilevax.solvers.sample_average import first_minibatches
from bilevax.terms import Box, Simplex

ROWS, BATCH = 4096, 16


@functools.cache
def rows():
    rng = np.random.default_rng(3)
    X, group = rng.normal(size=(ROWS, 3)), rng.integers(0, 2, ROWS)
    slopes = np.array([[1.0, 0.5, -1.0], [0.0, 1.5, 1.0]])
    target = np.sum(X * slopes[group], axis=1) + 0.3 * rng.normal(size=ROWS)
    return {"X": X, "target": target, "of": np.eye(2)[group]}


def losses(w, d):
    """Of both groups, each a mean over all rows."""
    return d["of"].T @ ((d["X"] @ w - d["target"]) ** 2) / d["X"].shape[0]


def upper(x1, x2, y1, y2, d):
    """For targets nearer to zero, so that a ridge is wanted."""
    return x2 @ losses(y1, d | {"target": 0.6 * d["target"]})


def lower(x1, y1, y2, d):
    return y2 @ losses(y1, d) + 0.5 * jnp.exp(x1) * jnp.sum(y1**2)


def problem(data):
    blocks = {"x1": Box(-5.0, 2.0), "x2": Simplex(), "y1": Box(-5.0, 5.0), "y2": Simplex()}
    return bx.BilevelProblem(upper, lower, data=data, **blocks)


def start():
    half = jnp.full(2, 0.5)
    return bx.Point(x1=jnp.asarray(0.0), x2=half, y1=jnp.zeros(3), y2=half)


@pytest.fixture
def grows(monkeypatch):
    """Subsets of 64 and 512 samples, then corrections from all of them."""
    monkeypatch.setattr(sample_average, "FEW_NUMBERS", 0)
    monkeypatch.setattr(sample_average, "LEAST_SAMPLES", 64)


def solved(**options):
    source = bx.data.Arrays(rows(), batch=BATCH)
    return bx.solve(problem(source), start(), progress=False, **options)


def test_a_subset_is_the_first_minibatches_of_the_source():
    source, found = bx.data.Arrays(rows(), batch=BATCH), []
    stream = source.init(7)
    for _ in range(3):
        stream, batch = source.draw(stream)
        found.append(batch)
    together = jax.tree.map(lambda *leaves: np.concatenate(leaves), *found)
    few, more = (first_minibatches(source, count, 7)[1] for count in (3, 5))
    for name, leaf in together.items():
        np.testing.assert_array_equal(few[name], leaf)
        np.testing.assert_array_equal(more[name][: 3 * BATCH], leaf)


def test_few_samples_are_taken_at_once_and_as_they_are():
    """Gradients are those of plain data, in minibatches."""
    plain = bx.solve(problem(rows()), start(), tolerance=1e-4, progress=False)
    found = solved(tolerance=1e-4)
    assert found.certified
    assert found.gradients % (ROWS // BATCH) == 0
    assert found.gradients <= 1.5 * plain.gradients * (ROWS // BATCH)
    np.testing.assert_allclose(found.point.x1, plain.point.x1, atol=1e-6)


def test_means_over_chunks_have_the_derivatives_of_means():
    """In value, gradient and Hessian, for any number of chunks in use, without a new program."""
    all_rows, y1 = rows(), jnp.asarray([0.3, -0.2, 0.5])
    parts = jax.tree.map(lambda a: jnp.asarray(a).reshape(8, -1, *a.shape[1:]), all_rows)
    stated, half, x1 = problem(all_rows), jnp.full(2, 0.5), jnp.asarray(0.1)
    derivatives = eqx.filter_jit(
        lambda p, y: (
            p.smooth_lower(x1, y, half),
            jax.grad(p.smooth_lower, 1)(x1, y, half),
            jax.jacfwd(jax.grad(p.smooth_lower, 1), 1)(x1, y, half),
        )
    )
    for count in (1, 5, 8):
        of_some = on_chunks(stated, Chunks(parts, jnp.asarray(count), {}))
        some = stated.on(jax.tree.map(lambda a, n=count: a[: n * ROWS // 8], all_rows))
        for found, wanted in zip(derivatives(of_some, y1), derivatives(some, y1)):
            np.testing.assert_allclose(found, wanted, rtol=1e-12)


def test_a_correction_has_the_slopes_that_it_is_given():
    rng = np.random.default_rng(0)
    here, there, slope, other = (
        {"a": rng.normal(size=3), "b": rng.normal(size=1)} for _ in range(4)
    )
    correction = Correction.of([here, there], [slope, other])
    for place, wanted in ((here, slope), (there, other)):
        found = jax.grad(correction)(place)
        np.testing.assert_allclose(found["a"], wanted["a"], atol=1e-12)
        np.testing.assert_allclose(found["b"], wanted["b"], atol=1e-12)
    once = Correction.of([here], [slope])  # linear
    np.testing.assert_allclose(jax.grad(once)(there)["a"], slope["a"], atol=1e-12)


def test_subsets_grow_and_corrections_bring_the_answer_of_all_samples(grows):
    plain = bx.solve(problem(rows()), start(), tolerance=1e-4, progress=False)
    found = solved(tolerance=1e-4)
    subset = found.state.solver.subset
    assert (int(subset.chunks.count), subset.most, subset.batches) == (8, 8, 4)
    assert int(subset.times) > 0
    assert found.certified
    assert found.gradients < 0.7 * plain.gradients * 256
    assert "on some of the samples" in str(found.status)
    assert bx.certify(problem(rows()), found.point).epsilon <= 1e-4
    np.testing.assert_allclose(found.point.x1, plain.point.x1, atol=1e-4)


def test_where_corrections_do_not_help_all_samples_have_the_last_word(grows, monkeypatch):
    monkeypatch.setattr(sample_average, "SHRINKS", 0.0)
    found = solved(tolerance=1e-4)
    assert found.state.solver.subset is None
    assert found.certified
    assert bx.certify(problem(rows()), found.point).epsilon <= 1e-4


def test_a_loose_tolerance_needs_few_gradients_of_all_samples(grows):
    found = solved(tolerance=0.1)
    assert found.certified
    assert found.gradients <= 4 * 256
    assert bx.certify(problem(rows()), found.point).epsilon <= 0.1


def test_stopped_anywhere_and_resumed_it_is_the_same_run(grows, tmp_path):
    whole, path = solved(tolerance=1e-4), tmp_path / "run.state"
    for cut in (8, 60, 500, 1100):
        part = solved(tolerance=1e-4, max_gradients=cut)
        assert part.gradients <= cut  # a correction takes 256 at once
        part.save(path)
        again = solved(tolerance=1e-4, resume=path)
        assert again.gradients == whole.gradients
        same = jax.tree.map(np.array_equal, again.state.solver_state, whole.state.solver_state)
        assert all(jax.tree.leaves(same))


def test_a_constrained_lower_level_takes_minibatches_of_both_levels(grows):
    """min mean (y − a)²/2 over the rows below, y ≤ x: y = min(x, ā); above y shall be b̄ < ā."""
    rng = np.random.default_rng(0)
    above, below = rng.normal(0.5, 0.3, size=512), rng.normal(1.0, 0.3, size=2048)
    source = bx.data.Levels(
        bx.data.Arrays({"b": above}, batch=8), bx.data.Arrays({"a": below}, batch=32)
    )
    constrained = bx.ConstrainedBilevelProblem(
        upper=lambda x, y, d: 0.5 * jnp.mean((y[0] - d["b"]) ** 2),
        lower=lambda x, y, d: 0.5 * jnp.mean((y[0] - d["a"]) ** 2),
        constraints=lambda x, y, d: y - x,
        x=Box(0.0, 2.0),
        y=Box(-2.0, 2.0),
        data=source,
    )
    begin = bx.Point(x=jnp.zeros(1), y=jnp.zeros(1))
    found = bx.solve(constrained, begin, tolerance=1e-4, progress=False)
    assert found.certified
    assert int(found.state.solver.subset.times) > 0  # the constraint needs no correction
    np.testing.assert_allclose(found.point.x, above.mean(), atol=1e-3)
    np.testing.assert_allclose(found.point.y, above.mean(), atol=1e-3)
    nearly = bx.polish(constrained, found.point, 1e-3)
    assert nearly.distance == pytest.approx(
        float(np.hypot(*(nearly.nearby.x - found.point.x), *(nearly.nearby.y - found.point.y)))
    )
    assert nearly.epsilon <= 1e-2


def test_what_the_first_subset_chooses_holds_for_all(grows, tmp_path):
    """At x1 = 0 the lower level is straight, and later it is not: a saved run must not care."""
    rng = np.random.default_rng(1)
    data = bx.data.Arrays({"a": rng.normal(1.0, 0.5, size=4096)}, batch=16)
    bent = bx.BilevelProblem(
        upper=lambda x1, x2, y1, y2, d: (y1 - 0.5) ** 2 + 0.01 * x1**2,
        lower=lambda x1, y1, y2, d: 0.5 * x1 * y1**2 - jnp.mean(d["a"]) * y1,
        x1=Box(0.0, 4.0),
        y1=Box(-3.0, 3.0),
        data=data,
    )
    begin, path = bx.Point(x1=jnp.asarray(0.0), y1=jnp.asarray(0.0)), tmp_path / "run.state"
    run = functools.partial(bx.solve, bent, begin, tolerance=1e-4, progress=False)
    whole = run(max_gradients=60_000)
    part = run(max_gradients=whole.gradients - 100)
    assert part.state.stage == (True, 1)  # on a subset, by another method than the first
    assert int(part.state.solver.subset.chunks.count) > 1
    part.save(path)
    again = run(max_gradients=60_000, resume=path)
    assert again.gradients == whole.gradients
    np.testing.assert_array_equal(again.point.x1, whole.point.x1)


def test_it_refuses_plain_data_and_what_is_no_solver():
    with pytest.raises(ValueError, match="source of minibatches"):
        bx.solve(problem(rows()), start(), solver=bx.SampleAverage(), progress=False)
    with pytest.raises(TypeError, match="SampleAverage: solver"):
        bx.SampleAverage(solver="newton")
