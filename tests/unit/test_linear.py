"""Linear bilevel problems: files, exact answers against closed forms, each other and a MILP."""

import itertools
import subprocess
import sys

import numpy as np
import pytest

from bilevax.problems import linear


def tiny(c=1.0, d=2.0, A=1.0, B=1.0, b=0.0, d_tilde=-1.0):
    """One variable, one answer, one row: y = min(1, (b − Ax)/B) for B > 0 and d_tilde < 0."""
    vector = lambda number: np.array([number])
    return linear.LinearData(
        vector(c), vector(d), vector([A]), vector([B]), vector(b), vector(d_tilde)
    )


def largest_vertex(data):
    """The largest multiplier at a vertex {μ ≥ 0, p, q}: solves B_KJᵀ μ_K = −d̃_J, B_KJ regular."""
    l, m = data.B.shape  # noqa: E741
    largest = 0.0
    for k in range(1, l + 1):
        for K in itertools.combinations(range(l), k):
            J = np.array(list(itertools.combinations(range(m), k)))
            squares = data.B[np.array(K)][:, J].transpose(1, 2, 0)
            solutions = np.linalg.solve(squares, -data.d_tilde[J][..., None])[..., 0]
            feasible = solutions[(solutions >= 0).all(1)]
            largest = max(largest, feasible.max(initial=0.0))
    return largest


def test_generated_data_are_as_the_appendix_says():
    data = linear.generate(300, 400, 6, 0)
    assert data.A.shape == (6, 300)
    assert data.B.shape == (6, 400)
    assert abs(data.A.std() / 0.01 - 1) < 0.1
    assert abs(data.B.std() / 0.01 - 1) < 0.1
    assert abs(data.c.std() - 1) < 0.2
    multipliers = np.linalg.lstsq(data.B.T, -data.d_tilde)[0]
    assert np.all(multipliers > 0)
    np.testing.assert_allclose(data.B.T @ multipliers, -data.d_tilde, atol=1e-14)
    y_hat = np.linalg.lstsq(data.B, data.b)[0]  # the shortest; ŷ itself has norm near 2
    assert np.linalg.norm(y_hat) < 2.5
    answer = linear.repair(data, np.zeros(300))
    np.testing.assert_allclose(data.B @ answer.y, data.b, atol=1e-12)
    assert answer.lower_value == pytest.approx(-multipliers @ data.b, abs=1e-12)


def test_generation_is_deterministic():
    first, again, other = (linear.generate(4, 5, 2, seed) for seed in (3, 3, 4))
    for name in linear.NAMES:
        assert np.array_equal(getattr(first, name), getattr(again, name))
        assert not np.array_equal(getattr(first, name), getattr(other, name))


@pytest.mark.parametrize(("sizes", "name"), [((0, 1, 1), "n"), ((1, -2, 1), "m"), ((1, 1, 0), "l")])
def test_sizes_below_one_are_refused(sizes, name):
    with pytest.raises(ValueError, match=rf"{name} must be a whole number ≥ 1"):
        linear.generate(*sizes, seed=0)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"A": np.zeros((2, 1))}, ValueError, r"A must have shape \(1, 1\)"),
        ({"B": np.zeros(1)}, ValueError, r"B must have shape \(1, 1\)"),
        ({"d_tilde": np.zeros(3)}, ValueError, r"d_tilde must have shape \(1,\)"),
        ({"c": np.zeros((1, 1))}, ValueError, "c must be a vector"),
        ({"d": np.zeros(0)}, ValueError, "d must be a vector"),
        ({"b": np.array([np.nan])}, ValueError, "b must be finite"),
        ({"c": np.array([1j])}, TypeError, "c must hold real numbers"),
    ],
)
def test_bad_arrays_are_named(given, error, message):
    arrays = {name: getattr(tiny(), name) for name in linear.NAMES} | given
    with pytest.raises(error, match=message):
        linear.LinearData(**arrays)


def test_saved_data_come_back(tmp_path):
    problems = [linear.generate(3, 4, 2, seed) for seed in range(3)]
    for seed in (2, 0, 1):
        linear.save(tmp_path / f"{seed}.npz", problems[seed])
    for data, back in zip(problems, linear.load_directory(tmp_path)):
        for name in linear.NAMES:
            assert np.array_equal(getattr(data, name), getattr(back, name))
            assert getattr(back, name).dtype == np.float64


def test_bad_files_are_named(tmp_path):
    arrays = {name: getattr(tiny(), name) for name in linear.NAMES}
    path = tmp_path / "bad.npz"

    def refused(message, error=ValueError):
        with pytest.raises(error, match=rf"bad\.npz: .*{message}"):
            linear.load(path)

    refused("no such file", FileNotFoundError)
    path.write_bytes(b"not an archive")
    refused("not an .npz archive")
    path.write_bytes(b"PK\x03\x04 cut short")
    refused("not an .npz archive")
    with path.open("wb") as file:
        np.save(file, np.zeros(3))
    refused("not an .npz archive")
    np.savez(path, **{name: array for name, array in arrays.items() if name != "B"})
    refused("B is missing")
    np.savez(path, **arrays, z=np.zeros(2))
    refused("z is unknown")
    np.savez(path, **(arrays | {"A": np.zeros((2, 2))}))
    refused(r"A must have shape \(1, 1\)")
    np.savez(path, **(arrays | {"b": np.array([np.inf])}))
    refused("b must be finite")
    np.savez(path, **(arrays | {"c": np.array([None])}))
    refused("c cannot be read")
    np.savez(path, **arrays)
    content = path.read_bytes()
    path.write_bytes(content.replace(arrays["d"].tobytes(), b"\x01" * 8))
    refused("d cannot be read")


def test_bad_folders_and_names_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no \.npz file in this folder"):
        linear.load_directory(tmp_path)
    with pytest.raises(NotADirectoryError, match="no such folder"):
        linear.load_directory(tmp_path / "none")
    with pytest.raises(ValueError, match=r"must end in \.npz"):
        linear.save(tmp_path / "data.npy", tiny())


@pytest.mark.parametrize(("c", "d"), [(1.0, 2.0), (2.0, 1.0), (-1.0, 3.0), (1.0, -4.0)])
def test_optimum_in_closed_form(c, d):
    """y = −x for every x, so the objective is (c − d)x, and −|c − d| its least."""
    data = tiny(c, d)
    found = linear.optimum(data)
    assert found.value == pytest.approx(-abs(c - d), abs=1e-12)
    assert found.proven
    assert linear.optimum_milp(data, 2.0).value == pytest.approx(-abs(c - d), abs=1e-12)


def test_optimum_does_not_claim_what_a_slack_row_beats():
    """y = min(1, −2x): with c = 1, d = 0 the best is x = −1, where 2x + y = −1 is slack."""
    data = tiny(c=1.0, d=0.0, A=2.0)
    found, exact = linear.optimum(data), linear.optimum_milp(data, 2.0)
    assert found.value == pytest.approx(-0.5, abs=1e-12)
    assert not found.proven
    assert found.bound == pytest.approx(-1, abs=1e-12)
    assert exact.value == pytest.approx(-1, abs=1e-12)
    assert exact.proven
    assert linear.repair(data, [-1.0]).objective == pytest.approx(-1, abs=1e-12)


def test_optimum_refuses_other_data():
    with pytest.raises(ValueError, match="not −Bᵀλ for any λ > 0"):
        linear.optimum(tiny(d_tilde=1.0))
    with pytest.raises(ValueError, match="not −Bᵀλ for any λ > 0"):
        linear.optimum(tiny(d_tilde=0.0))
    with pytest.raises(ValueError, match="no solution in the boxes"):
        linear.optimum(tiny(b=3.0))


@pytest.mark.parametrize(("n", "l"), [(8, 2), (12, 3), (16, 3), (20, 3)])
def test_optimum_agrees_with_the_milp(n, l):  # noqa: E741
    """Over multipliers as large as any vertex of the dual, so that the MILP leaves nothing out."""
    for seed in range(4):
        data = linear.generate(n, n, l, seed)
        found = linear.optimum(data)
        exact = linear.optimum_milp(data, 1.01 * largest_vertex(data))
        assert exact.proven
        assert exact.value == pytest.approx(found.value, rel=1e-9)
        assert found.bound <= exact.value


@pytest.mark.parametrize("sizes", [(3, 3, 2), (8, 4, 2), (8, 8, 4)])
def test_proofs_of_the_optimum_are_right_where_it_often_is_not(sizes):
    better = proven = 0
    for seed in range(15):
        data = linear.generate(*sizes, seed)
        found, exact = linear.optimum(data), linear.optimum_milp(data, 1e3)
        assert exact.value <= found.value + 1e-9
        beaten = exact.value < found.value - 1e-9
        assert not (beaten and found.proven)
        assert found.bound <= exact.value + 1e-9
        better, proven = better + beaten, proven + found.proven
    assert better > 0
    assert proven > 0


@pytest.mark.parametrize(("n", "l"), [(100, 5), (200, 10)])
def test_optimum_of_the_sizes_of_the_paper_is_proven(n, l):  # noqa: E741
    data = linear.generate(n, n, l, 0)
    found = linear.optimum(data)
    assert found.proven
    assert linear.violation(data, found.x, found.y) < 1e-12
    assert abs(linear.lower_gap(data, found.x, found.y)) < 1e-12
    assert linear.repair(data, found.x).objective == pytest.approx(found.value, rel=1e-12)


def test_repair_takes_the_best_answer():
    """d̃ = −(1, 1), Σz ≤ −x: answers have Σz = −x, or z = (1, 1) at x = −2, which is clipped."""
    data = linear.LinearData(
        np.ones(1), np.array([1.0, 3.0]), np.ones((1, 1)), np.ones((1, 2)), np.zeros(1), -np.ones(2)
    )
    found = linear.repair(data, [0.5])
    np.testing.assert_allclose(found.y, [0.5, -1.0], atol=1e-12)
    assert found.objective == pytest.approx(-2.0, abs=1e-12)
    assert found.lower_value == pytest.approx(0.5, abs=1e-12)
    np.testing.assert_allclose(linear.repair(data, [-2.0]).y, [1.0, 0.0], atol=1e-12)


def test_repair_with_a_flat_lower_level_is_free():
    """d̃ = 0: every feasible z is an answer, so repair solves the upper level's own LP."""
    found = linear.repair(tiny(d=2.0, d_tilde=0.0), [0.5])
    assert found.y[0] == pytest.approx(-1.0, abs=1e-12)


def test_repair_is_exact_at_any_scale():
    """min{dᵀz : Bz = b − Ax} has, where it is attained, a dual value computed apart from it."""
    for seed, scale in itertools.product(range(3), (1e-6, 1.0, 1e5)):
        data = linear.generate(60, 60, 4, seed)
        scaled = linear.LinearData(
            data.c, data.d, scale * data.A, scale * data.B, scale * data.b, scale * data.d_tilde
        )
        x = 0.3 * np.random.default_rng(seed).normal(size=60).clip(-1, 1)
        found, same = linear.repair(data, x), linear.repair(scaled, x)
        assert same.objective == pytest.approx(found.objective, rel=1e-10)
        # The 4 entries strictly inside the box fix the multipliers, and these the dual value.
        inside = np.abs(found.y) < 1 - 1e-9
        assert inside.sum() == 4
        mu = np.linalg.solve(data.B[:, inside].T, -data.d[inside])
        dual = -mu @ (data.b - data.A @ x) - np.abs(data.d + data.B.T @ mu).sum()
        assert found.objective == pytest.approx(data.c @ x + dual, rel=1e-11)


def test_an_x_without_answers_is_worth_nothing():
    data = tiny(b=-1.5)  # x + z ≤ −3/2 has no z in the box at x = 1
    found = linear.repair(data, [1.0])
    assert found.objective == found.lower_value == np.inf
    assert np.isnan(found.y).all()
    assert linear.lower_gap(data, [1.0], [-1.0]) == np.inf


def test_violation_and_lower_gap_in_closed_form():
    data = tiny()  # the answer is −x
    assert linear.violation(data, [0.5], [0.25]) == pytest.approx(0.75)
    assert linear.violation(data, [0.5], [-0.75]) == 0
    assert linear.lower_gap(data, [0.5], [-0.75]) == pytest.approx(0.25)
    assert linear.lower_gap(data, [0.5], [0.25]) == pytest.approx(-0.75)


def test_bad_points_are_refused():
    with pytest.raises(ValueError, match=r"x must have shape \(1,\)"):
        linear.repair(tiny(), np.zeros(2))
    with pytest.raises(ValueError, match="y must be finite"):
        linear.violation(tiny(), [0.0], [np.nan])


def test_importing_bilevax_does_not_load_what_only_exact_answers_and_figures_need():
    code = "import sys, bilevax; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"scipy.optimize", "matplotlib", "tqdm", "bilevax.bench"} & {*done.stdout.split()}
