"""`eq:DRO_meta_tuning` with tasks of unequal size: loops in NumPy, SciPy, and a closed form.

One task with a = 1 for all rows, ℓ = ½(y − b)² and the training targets 0 and 2 has a lower level
in y and in δ, for the weights ½ − δ and ½ + δ. Its slopes are (y − 1) − 2δ + λ(y − w) in y and
2 − 2y − 2ηδ in δ, so that δ = (1 − y)/η and y = (1 + 2/η + λw)/(1 + 2/η + λ) while |δ| ≤ ½.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
from scipy import optimize

import bilevax as bx
from bilevax.certificates import judge
from bilevax.problems import meta_learning
from bilevax.terms import Box
from tail_reference import logistic, on_capped, squared, tail_mean

A = jnp.asarray
LOSSES = {"squared": squared, "logistic": logistic}
SIZES = {"a": (8, 6), "b": (5, 7), "c": (10, 4)}


def some_tasks(kind="squared", d=2):
    """Three tasks with parameters around those of all, each with rows of its own number."""
    # A seed for which plain Newton steps were enough for the squared loss: 85 systems.
    draw = np.random.default_rng(1)
    center, tasks = draw.standard_normal(d), {}
    for name, (n, m) in SIZES.items():
        own = center + 0.5 * draw.standard_normal(d)
        x = draw.standard_normal((n + m, d))
        b = x @ own + 0.5 * draw.standard_normal(n + m)
        b = np.where(b > 0, 1.0, -1.0) if kind == "logistic" else b
        tasks[name] = (x[:n], b[:n]), (x[n:], b[n:])
    return tasks


def some_weights(start, draw):
    """Uneven weights of the rows that are there."""
    raw = np.where(np.asarray(start) > 0, draw.uniform(0.1, 1, start.shape), 0)
    return A(raw / raw.sum(axis=1, keepdims=True))


X1 = {"w": A([0.5, -1.0]), "eta": A(0.7), "lam": A(0.3)}


@pytest.mark.parametrize("kind", ["squared", "logistic"])
def test_both_functions_are_those_of_a_loop_over_tasks(kind):
    tasks, draw = some_tasks(kind), np.random.default_rng(1)
    problem, start = meta_learning(tasks, loss=kind, intercept=False)
    x2, y2 = some_weights(start.x2, draw), some_weights(start.y2, draw)
    y1 = A(draw.standard_normal((3, 2)))
    upper = lower = 0.0
    for k, ((x, b), validation) in enumerate(tasks.values()):
        n, m, y = len(b), len(validation[1]), np.asarray(y1[k])
        upper += x2[k, :m] @ LOSSES[kind](y, *validation)[0]
        lower += y2[k, :n] @ LOSSES[kind](y, x, b)[0]
        lower += -0.7 / 2 * np.sum((y2[k, :n] - 1 / n) ** 2)
        lower += 0.3 / 2 * np.sum((y - np.asarray(X1["w"])) ** 2)
    assert float(problem.smooth_upper(X1, x2, y1, y2)) == pytest.approx(float(upper), rel=1e-12)
    assert float(problem.smooth_lower(X1, y1, y2)) == pytest.approx(float(lower), rel=1e-12)


def test_copies_of_rows_count_nowhere():
    """Their weights cannot leave 0, and do nothing where a method tries that."""
    problem, start = meta_learning(some_tasks(), share=0.75)
    there = np.arange(10)[None] < np.array([n for n, _ in SIZES.values()])[:, None]
    np.testing.assert_array_equal(start.y2 > 0, there)
    for term, weights in ((problem.x2, start.x2), (problem.y2, start.y2)):
        projected = term.project(weights + 1.0)
        np.testing.assert_allclose(projected[~(weights > 0)], 0)
        np.testing.assert_allclose(jnp.sum(projected, axis=1), 1)
    moved = start.y2.at[1, 7].set(0.5)
    x1, y1 = start.x1, start.y1 + 1.0
    slopes = [jax.grad(problem.smooth_lower, argnums=1)(x1, y1, y2) for y2 in (start.y2, moved)]
    np.testing.assert_array_equal(*slopes)
    caps = np.asarray(problem.x2.cap)
    np.testing.assert_allclose(caps[:, 0], [1 / (0.75 * m) for _, m in SIZES.values()])


def task_solution(x1, x, b, loss, cap):
    """y and q of one task, for η > 0: BFGS over y of the maximum over q."""
    n, (w, eta, lam) = len(b), (np.asarray(x1[name]) for name in ("w", "eta", "lam"))
    worst = lambda losses: on_capped(1 / n + losses / eta, cap)

    def value_and_slope(y):
        losses, slopes = loss(y, x, b)
        q = worst(losses)
        value = q @ losses - eta / 2 * np.sum((q - 1 / n) ** 2) + lam / 2 * np.sum((y - w) ** 2)
        return value, x.T @ (q * slopes) + lam * (y - w)

    found = optimize.minimize(value_and_slope, w, jac=True, method="BFGS", options={"gtol": 1e-10})
    return found.x, worst(loss(found.x, x, b)[0]), found.fun


@pytest.mark.parametrize("kind", ["squared", "logistic"])
@pytest.mark.parametrize("train_share", [None, 0.5])
def test_the_saddle_points_of_single_tasks_are_that_of_all(kind, train_share):
    tasks = some_tasks(kind)
    problem, start = meta_learning(
        tasks, loss=kind, intercept=False, train_share=train_share, share=0.5
    )
    y1, y2, total, worst = np.zeros((3, 2)), np.zeros(start.y2.shape), 0.0, 0.0
    for k, ((x, b), validation) in enumerate(tasks.values()):
        n, m = len(b), len(validation[1])
        cap = 1.0 if train_share is None else 1 / (train_share * n)
        y1[k], y2[k, :n], value = task_solution(X1, x, b, LOSSES[kind], cap)
        total += value
        worst += tail_mean(LOSSES[kind](y1[k], *validation)[0], 1 / (0.5 * m))
    y1, y2 = A(y1), A(y2)
    assert float(problem.lower_value(X1, y1, y2)) == pytest.approx(total, abs=1e-8)
    of_y1, of_y2 = jax.grad(problem.smooth_lower, argnums=(1, 2))(X1, y1, y2)
    np.testing.assert_allclose(of_y1, 0, atol=1e-6)
    assert np.linalg.norm(problem.y2.residual(y2, -of_y2)) < 1e-6
    x2 = problem.x2.linear_oracle(jax.grad(problem.smooth_upper, argnums=1)(X1, start.x2, y1, y2))
    assert float(problem.upper_value(X1, x2, y1, y2)) == pytest.approx(worst, abs=1e-8)
    assert float(problem.lower_modulus(X1)) == 0.3


def test_the_closed_form_of_one_task_with_one_parameter():
    ones, worst = np.ones((3, 1)), [0.7, 0.8, 0.9]
    problem, _ = meta_learning([((ones[:2], [0.0, 2.0]), (ones, worst))], intercept=False)
    eta, lam, w = 2.0, 0.5, -0.4
    y = (1 + 2 / eta + lam * w) / (1 + 2 / eta + lam)
    delta = (1 - y) / eta
    x1 = {"w": A([w]), "eta": A(eta), "lam": A(lam)}
    at = A([[y]]), A([[0.5 - delta, 0.5 + delta]])
    of_y1, of_y2 = jax.grad(problem.smooth_lower, argnums=(1, 2))(x1, *at)
    np.testing.assert_allclose(of_y1, 0, atol=1e-12)
    np.testing.assert_allclose(problem.y2.residual(at[1], -of_y2), 0, atol=1e-12)


def test_three_tasks_are_certified():
    tasks = some_tasks()
    problem, start = meta_learning(tasks, intercept=False)
    solution = bx.solve(problem, start, tolerance=1e-4)
    assert solution.certified
    assert solution.certificate.radius == np.inf  # since the modulus is known
    # The objective is that of the tasks' own saddle points at the x1 found.
    x1, found = solution.point.x1, 0.0
    for (x, b), validation in tasks.values():
        y, _, _ = task_solution(x1, x, b, squared, 1.0)
        found += tail_mean(squared(y, *validation)[0], 2 / len(validation[1]))
    assert solution.certificate.objective == pytest.approx(found, abs=1e-3)


def test_a_loss_of_ones_own_and_terms():
    tasks = some_tasks()
    own = lambda y1, rows: 0.5 * (rows[0] @ y1["a"] - rows[1]) ** 2
    first = {"a": np.array([1.0, 2.0])}
    problem, start = meta_learning(tasks, loss=own, parameters=first, y1=Box(-3.0, 3.0))
    usual, at = meta_learning(tasks, intercept=False, parameters=first["a"])
    np.testing.assert_array_equal(start.y1["a"], [[1.0, 2.0]] * 3)
    np.testing.assert_array_equal(at.x1["w"], first["a"])
    x1 = X1 | {"w": {"a": X1["w"]}}
    value = problem.smooth_lower(x1, start.y1, start.y2)
    same = usual.smooth_lower(X1, start.y1["a"], at.y2)
    assert float(value) == pytest.approx(float(same))
    assert np.max(problem.y1.project({"a": A([[9.0, 0.0]] * 3)})["a"]) == 3
    assert float(start.x1["lam"]) == pytest.approx(np.sqrt(0.01 * 10))
    wrong = lambda y1, rows: jnp.sum(rows[0] @ y1["a"])
    problem, start = meta_learning(tasks, loss=wrong, parameters=first)
    with pytest.raises(TypeError, match="one number for each of the 10 rows"):
        problem.smooth_lower(start.x1, start.y1, start.y2)


def test_sampled_tasks_have_the_whole_as_their_mean():
    """Over all pairs of tasks the values and slopes of minibatches average to those of all."""
    tasks = some_tasks()
    whole, start = meta_learning(tasks, intercept=False)
    sampled, same = meta_learning(tasks, intercept=False, batch=2)
    assert jax.tree.all(jax.tree.map(lambda a, b: bool(jnp.all(a == b)), start.x1, same.x1))
    draw, everything = np.random.default_rng(0), sampled.data.everything()
    x2, y2 = some_weights(start.x2, draw), some_weights(start.y2, draw)
    y1 = A(draw.standard_normal((3, 2)))
    at = {"upper": (X1, x2, y1, y2), "lower": (X1, y1, y2)}
    for name, blocks in at.items():
        found, function = [], getattr(sampled, name)
        for pair in ([0, 1], [0, 2], [1, 2]):
            batch = jax.tree.map(lambda a, pair=pair: a[A(pair)], everything)
            arguments = tuple(range(len(blocks)))
            found.append(jax.value_and_grad(function, arguments)(*blocks, batch))
        mean = jax.tree.map(lambda *parts: sum(parts) / 3, *found)
        known = jax.value_and_grad(getattr(whole, name), arguments)(*blocks, whole.data)
        for a, b in zip(jax.tree.leaves(mean), jax.tree.leaves(known), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-12)
    # A task that is not drawn moves towards w alone.
    np.testing.assert_allclose(found[-1][1][1][0], 0.3 * (y1[0] - X1["w"]), atol=1e-12)


def test_sampled_tasks_are_certified():
    tasks = some_tasks()
    problem, start = meta_learning(tasks, intercept=False, batch=2, most_eta=10.0)
    solution = bx.solve(problem, start, tolerance=1e-2)
    assert solution.certified
    whole, _ = meta_learning(tasks, intercept=False, most_eta=10.0)
    assert judge(whole, solution.point).epsilon <= 1e-2


def test_what_tasks_share_is_a_parameter_of_the_upper_level():
    """Features tanh(x·θ) with a linear head for each task: as if they were given."""
    tasks, theta = some_tasks(), A([[0.5, -1.0], [1.0, 0.3]])
    own = lambda y1, rows, shared: squared_rows(jnp.tanh(rows[0] @ shared), y1, rows[1])
    squared_rows = lambda x, y, b: 0.5 * (x @ y - b) ** 2
    problem, start = meta_learning(tasks, loss=own, parameters=X1["w"], shared=theta)
    made = lambda rows: (np.tanh(rows[0] @ np.asarray(theta)), rows[1])
    given = {name: tuple(map(made, task)) for name, task in tasks.items()}
    known, at = meta_learning(given, intercept=False, parameters=X1["w"])
    y1, x1 = at.y1, X1 | {"shared": theta}
    value = problem.smooth_lower(x1, y1, at.y2)
    assert float(value) == pytest.approx(float(known.smooth_lower(X1, y1, at.y2)), rel=1e-12)
    np.testing.assert_array_equal(start.x1["shared"], theta)
    slope = jax.grad(problem.smooth_upper)(x1, at.x2, y1, at.y2)["shared"]
    assert np.linalg.norm(slope) > 0.01
    with pytest.raises(ValueError, match="only a loss of your own has shared"):
        meta_learning(tasks, shared=theta)


@pytest.mark.parametrize("kind", ["squared", "logistic"])
def test_tasks_begin_at_their_solutions_for_even_weights(kind):
    problem, start = meta_learning(some_tasks(kind), loss=kind, y1=Box(-5.0, 5.0))
    slope = jax.grad(problem.smooth_lower, argnums=1)(start.x1, start.y1, start.y2)
    assert np.max(np.abs(slope)) < 1e-4
    assert np.linalg.norm(start.x1["w"]) > 0.1
    problem, start = meta_learning(some_tasks(kind), loss=kind, y1=Box(-0.1, 0.1))
    assert np.max(np.abs(start.y1)) == pytest.approx(0.1)


def test_labels_of_one_class_are_fine():
    """λ > 0 keeps the parameters near w, where the logistic loss alone would have no minimiser."""
    rows = np.ones((2, 1)), [1, 1]
    problem, start = meta_learning([(rows, rows)], loss="logistic")
    np.testing.assert_array_equal(problem.data["train"]["rows"]["target"], [[1.0, 1.0]])
    assert start.y1.shape == (1, 2)


ROWS = (np.ones((2, 1)), np.array([0.0, 1.0]))
WIDE = (np.ones((2, 2)), np.array([0.0, 1.0]))
NAN = ([[np.nan]], [1.0])
BAD = {
    "none": ({"tasks": []}, ValueError, "tasks: there are none"),
    "no-list": ({"tasks": 3.0}, TypeError, "tasks must be a list"),
    "pair": ({"tasks": [(ROWS, ROWS), (ROWS,)]}, TypeError, "task 1 must be a pair"),
    "empty": (
        {"tasks": {"a": (ROWS, ROWS), "b": (ROWS, (np.ones((0, 1)), []))}},
        ValueError,
        "task 'b': validation: features must be a matrix with rows",
    ),
    "columns": (
        {"tasks": [(ROWS, ROWS), (ROWS, WIDE)]},
        ValueError,
        "task 1: validation: features must have as many columns as task 0's",
    ),
    "shapes": (
        {"tasks": [(ROWS, ROWS), (WIDE, ROWS)], "loss": lambda y1, rows: rows, "parameters": 0.0},
        ValueError,
        "task 1: train must be arrays of the shapes and kinds of task 0's",
    ),
    "nan": ({"tasks": {"a": (NAN, ROWS)}}, ValueError, "task 'a': train: features must be finite"),
    "labels": (
        {"tasks": [((np.ones((2, 1)), [0.0, 2.0]), ROWS)], "loss": "logistic"},
        ValueError,
        "task 0: train: targets must be 0 and 1",
    ),
    "cap": ({"cap": 0.4}, ValueError, "task 0: cap=0.4 is less than 1/2"),
    "share": ({"share": 1.5}, ValueError, "share must be a share of the rows"),
    "train-share": ({"train_share": 0.0}, ValueError, "train_share must be finite and > 0"),
    "loss": ({"loss": "hinge"}, ValueError, "loss must be"),
    "own": ({"loss": lambda y1, rows: rows}, ValueError, "needs w to begin with"),
    "start": ({"parameters": [1.0]}, ValueError, "parameters must have shape"),
    "lam": ({"lam": (0.0, 1.0)}, ValueError, "0 < low ≤ high"),
    "lam-order": ({"lam": (2.0, 1.0)}, ValueError, "0 < low ≤ high"),
    "lam-pair": ({"lam": 1.0}, TypeError, "lam must be a pair of numbers"),
    "eta": ({"eta": -1.0}, ValueError, "eta must be finite and ≥ 0"),
    "least": ({"least_eta": 2.0}, ValueError, "least_eta must be ≥ 0 and at most eta=1.0"),
    "batch": ({"batch": 3}, ValueError, "batch must be at most the 1 samples"),
    "most": ({"most_eta": 0.5}, ValueError, "eta=1.0 is above most_eta=0.5"),
}


def test_columns_in_another_order_are_refused():
    x, b = pd.DataFrame(np.eye(2), columns=list("ab")), [0.0, 1.0]
    usual, other = (x, b), (x[["b", "a"]], b)
    for tasks, where in (
        ([(usual, other)], "task 0: validation"),
        ([(usual, usual), (other, usual)], "task 1: train"),
    ):
        with pytest.raises(ValueError, match=rf"{where}: features must have the columns of task 0"):
            meta_learning(tasks)


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_meant_is_refused(name):
    changes, error, said = BAD[name]
    given = {"tasks": [(ROWS, ROWS)]} | changes
    with pytest.raises(error, match=said):
        meta_learning(given.pop("tasks"), **given)
