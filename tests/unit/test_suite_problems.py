"""The suite of small bilevel problems: its parser, records, re-solves of the lower level, starts.

Expressions are compared with Python's own evaluation, re-solves with the published answers and
with a grid.
"""

import json
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest

from bilevax.bench.expressions import parse
from bilevax.bench.lower_level import lower_gap, lower_solution, lower_violation, upper_violation
from bilevax.bench.records import load
from bilevax.bench.starts import starting_points

SUITE = Path(__file__).resolve().parents[3] / "shared" / "data" / "basblib.json"
needs_suite = pytest.mark.skipif(not SUITE.exists(), reason=f"needs {SUITE}")
RECORDS = load(SUITE).records if SUITE.exists() else ()
CONVEX = [record for record in RECORDS if record.convex]


def named(records):
    """One test a record; one that is skipped with the reason where the suite is absent."""
    absent = pytest.param(None, marks=needs_suite, id="absent")
    given = [pytest.param(record, id=record.name) for record in records]
    return pytest.mark.parametrize("record", given or [absent])


def expressions(record):
    constraints = record.upper_constraints + record.upper_equalities
    return (
        record.upper,
        *constraints,
        record.lower,
        *record.lower_constraints,
        *(record.lower_equalities),
    )


def random_point(record, seed):
    rng = np.random.default_rng(seed)
    return rng.uniform(*record.x_bounds.T), rng.uniform(*record.y_bounds.T)


def entry(**changes):
    """A sound record, of which a test may spoil one part: min (x−1)² + y², y in argmin (y−x)²."""
    return {
        "name": "sound",
        "category": "test",
        "n_x": 1,
        "n_y": 1,
        "x_bounds": [[-2, 2]],
        "y_bounds": [[-1, 1]],
        "y_bounds_in_lower_level": True,
        "upper": "(x[0] - 1)**2 + y[0]**2",
        "upper_constraints": [],
        "upper_equalities": [],
        "lower": "(y[0] - x[0])**2",
        "lower_constraints": [],
        "lower_equalities": [],
        "best_known": {"F": 0.5, "f": 0.0, "x": [0.5], "y": [0.5]},
        "best_found": None,
        "lower_level_convex": True,
        "upper_constraints_involve_y": False,
        "check": "confirmed",
        "check_strength": None,
        "notes": [],
    } | changes


@pytest.fixture
def record_of(tmp_path):
    def record(**changes):
        path = tmp_path / "suite.json"
        path.write_text(json.dumps([entry(**changes)]))
        return load(path).records[0]

    return record


# Expressions


def by_python(text, x, y):
    functions = {name: getattr(np, name) for name in ("exp", "log", "sqrt", "sin", "cos", "abs")}
    with np.errstate(all="ignore"):
        return eval(text, {"__builtins__": {}} | functions, {"x": x, "y": y})


@needs_suite
def test_every_expression_agrees_with_python():
    seen = 0
    for record in RECORDS:
        for seed in range(5):
            x, y = random_point(record, seed)
            for expression in expressions(record):
                expected = by_python(expression.text, x, y)
                np.testing.assert_allclose(expression(x, y), expected, rtol=1e-12, atol=1e-300)
                np.testing.assert_allclose(expression.linearised(x, y)[0], expected, rtol=1e-12)
                seen += 1
    assert seen > 5 * 2 * 88


def test_pi_is_known():
    function = parse("2*pi*x[0] + cos(pi)*y[0]", 1, 1)
    assert function(np.ones(1), np.ones(1)) == 2 * np.pi - 1
    np.testing.assert_allclose(function.linearised(np.ones(1), np.ones(1))[1], [2 * np.pi, -1])


def test_long_sums_are_not_deep():
    function = parse(" + ".join(["x[0]"] * 500), 1, 1)
    assert function(np.ones(1), np.ones(1)) == 500


@pytest.mark.parametrize(
    "text",
    [
        "",
        "   ",
        "__import__('os').system('true')",
        "().__class__.__bases__",
        "x.shape",
        "x[0].real",
        "(lambda: 1)()",
        "[x[0] for _ in y]",
        "sum(i for i in y)",
        "x",
        "y + 1",
        "z[0]",
        "pi[0]",
        "pi(x[0])",
        "e",
        "x['a']",
        "x[-1]",
        "x[2]",
        "x[99]",
        "x[0:2]",
        "x[0, 1]",
        "x[True]",
        "x[1.0]",
        "x[y[0]]",
        "x[0][0]",
        "'text'",
        "b'1'",
        "f'{x}'",
        "True",
        "None",
        "...",
        "1j",
        "x[0] < 1",
        "x[0] and y[0]",
        "not x[0]",
        "x[0] if y[0] else 1",
        "~x[0]",
        "x[0] // 2",
        "x[0] % 2",
        "x[0] @ y[0]",
        "x[0] & 1",
        "(x[0], y[0])",
        "{1: 2}",
        "(z := 3)",
        "x[0] = 1",
        "x[0]; y[0]",
        "x[0]) + (y[0]",
        "exec('1')",
        "tan(x[0])",
        "exp()",
        "exp(x[0], 2)",
        "exp(x=1)",
        "exp(*x)",
        "exp(1)(2)",
        "x[0] +",
        "2 x[0]",
        "9**9**9**9",
        "9" * 400,
        "9" * 5000,
        "1e999",
        "1e308 * 10",
        "1 / 0",
        "log(0)",
        "exp(1000)",
        "(-8)**(1/3)",
        "x[0]\0",
        "ｘ[0]",
        "x[0]" + " + x[0]" * 4000,
        "-" * 300 + "x[0]",
        "-" * 19_000 + "x[0]",
        "(" * 300 + "x[0]" + ")" * 300,
        "2**" * 300 + "x[0]",
        "exp(" * 3000 + "x[0]" + ")" * 3000,
        "x[" * 5000,
    ],
    ids=lambda text: repr(text[:30]),
)
def test_everything_else_is_refused(text):
    with pytest.raises(ValueError, match=r"expression|position|nested|null"):
        parse(text, 2, 1)


def test_refusals_show_the_piece_and_its_place():
    with pytest.raises(ValueError, match=r"'foo\(y\[0\]\)', at position 9"):
        parse("  x[0] + foo(y[0])", 1, 1)
    with pytest.raises(ValueError, match=r"x has 2 entries: 'x\[2\]', at position 4"):
        parse("1 + x[2]", 2, 1)
    with pytest.raises(TypeError, match="must be text"):
        parse(3, 1, 1)  # type: ignore[arg-type]


# Records


@needs_suite
def test_the_suite_is_what_its_description_says():
    assert len(RECORDS) == 88
    assert len(CONVEX) == 52
    assert sum(record.upper_constraints_involve_y for record in CONVEX) == 16
    assert sum(record.check == "confirmed" for record in CONVEX) == 46
    by_name = {record.name: record for record in RECORDS}
    assert by_name["as_1981_01"].best_known == -6600
    assert by_name["as_1981_01"].published.x is None
    assert by_name["mb_2007_02"].infeasible
    assert by_name["mb_2007_02"].best_known is None
    assert by_name["mb_2007_01"].x_bounds.shape == (0, 2)


def test_bounds_may_be_infinite(record_of):
    record = record_of(y_bounds=[[None, float("inf")]], x_bounds=[[0, None]])
    np.testing.assert_array_equal(record.y_bounds, [[-np.inf, np.inf]])
    np.testing.assert_array_equal(record.x_bounds, [[0, np.inf]])


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"n_x": 2}, "x_bounds has 1 rows for 2 variables"),
        ({"n_x": -1}, "n_x must be a whole number ≥ 0"),
        ({"n_y": True}, "n_y must be of type int"),
        ({"x_bounds": [[1, 0]]}, "must be in order"),
        ({"x_bounds": [[float("nan"), 0]]}, "must be a number or null"),
        ({"x_bounds": [["0", 1]]}, "must be a number or null"),
        ({"x_bounds": [[0, 1, 2]]}, "must be a pair"),
        ({"upper": "x[1]"}, "upper: .*x has 1 entries"),
        ({"lower_constraints": ["foo(x)"]}, "lower_constraints: .*not allowed"),
        ({"lower_constraints": [3]}, "must be text"),
        ({"upper_equalities": "x[0]"}, "must be of type list"),
        ({"best_found": {"F": 0, "x": [1, 2], "y": [0]}}, "best_found.x must be a list of 1"),
        ({"lower_level_convex": None}, "lower_level_convex must be of type bool"),
    ],
)
def test_bad_records_are_refused_by_name(record_of, changes, complaint):
    with pytest.raises(ValueError, match=rf"sound: .*{complaint}"):
        record_of(**changes)


def test_bad_files_are_refused(tmp_path):
    path = tmp_path / "suite.json"
    with pytest.raises(FileNotFoundError, match="cannot read the suite"):
        load(path)
    for text, complaint in [
        ("{", "is not JSON"),
        ("{}", "must be a list"),
        ("[3]", "record 0"),
        ('[{"name": "a"}]', "the field n_x is missing"),
        ("[]", "has no record"),
    ]:
        path.write_text(text)
        with pytest.raises(ValueError, match=complaint):
            load(path)


def test_one_bad_record_does_not_block_the_others(tmp_path):
    path = tmp_path / "suite.json"
    bad = entry(name="bad", upper="foo(x[0])")
    path.write_text(
        json.dumps([bad, 3, entry(), entry(), entry(name="huge", x_bounds=[[0, 9**999]])])
    )
    suite = load(path)
    assert [record.name for record in suite.records] == ["sound"]
    assert [refusal.name for refusal in suite.refused] == ["bad", "record 1", "sound", "huge"]
    assert "not allowed" in suite.refused[0].reason
    assert "same name" in suite.refused[2].reason


def test_bounds_on_y_of_which_nothing_is_said_are_the_lower_levels(record_of):
    for given, inside, assumed in ((None, True, True), (True, True, False), (False, False, False)):
        record = record_of(y_bounds_in_lower_level=given)
        assert (record.y_bounds_in_lower_level, record.y_bounds_assumed) == (inside, assumed)
    with pytest.raises(ValueError, match=r"must be of type bool \| None, not 1"):
        record_of(y_bounds_in_lower_level=1)


# Re-solves of the lower level


@named([r for r in CONVEX if r.check == "confirmed" and r.reference.y is not None])
def test_confirmed_answers_solve_the_lower_level(record):
    x, y = record.reference.x, record.reference.y
    result = lower_gap(record, x, y, relax=1e-6)
    assert result.believed
    assert result.lower_violation <= 2e-6
    assert result.upper_violation <= 2e-6
    assert abs(result.gap) <= 1e-5 * (1 + abs(record.lower(x, y)))
    np.testing.assert_allclose(record.upper(x, y), record.best_known, rtol=1e-6, atol=1e-6)


@named([r for r in CONVEX if r.check == "confirmed" and r.published.y is not None])
def test_published_answers_solve_it_to_their_digits(record):
    x, y = record.published.x, record.published.y
    decimals = max(-Decimal(str(number)).normalize().as_tuple().exponent for number in [*x, *y])
    rounding = 0.5 * 10.0**-decimals if decimals > 0 else 0.0
    slopes = [np.abs(g.linearised(x, y)[1]).sum() for g in expressions(record)]
    relax = max(slopes) * rounding
    result = lower_gap(record, x, y, relax=relax)
    assert result.believed
    assert max(result.lower_violation, result.upper_violation) <= relax + 1e-9
    assert abs(result.gap) <= 10 * rounding * (1 + max(slopes)) + 1e-7


@named([record for record in CONVEX if record.n_y == 1])
def test_the_lower_solution_agrees_with_a_grid(record):
    """At x where nothing is published; a grid of y needs no theory.

    Between two points of the grid a convex function is not below what its steepest chord allows.
    """
    grid = np.linspace(*record.y_bounds[0], 4001)
    on_grid = lambda function, x: np.broadcast_to(function(x, grid[None]), grid.shape)
    for x, y in starting_points(record, 2, seed=1):
        solution = lower_solution(record, x, y)
        assert solution.believed
        assert solution.bound <= solution.value + 1e-8 * (1 + abs(solution.value))
        feasible = [on_grid(g, x) <= 1e-9 for g in record.lower_constraints]
        values = on_grid(record.lower, x)[np.all([grid < np.inf, *feasible], axis=0)]
        steepest = np.abs(np.diff(values)).max(initial=0.0)
        least = min(values)
        assert solution.value <= least + 1e-7 * (1 + abs(least))
        assert solution.value >= least - steepest - 1e-7 * (1 + abs(least))


def test_a_wrong_y_has_a_gap(record_of):
    record = record_of()
    result = lower_gap(record, np.array([0.5]), np.array([-0.5]))
    np.testing.assert_allclose(result.gap, 1.0, rtol=1e-9)
    assert result.error <= 1e-9
    assert result.believed
    assert not result.exact
    outside = lower_gap(record, np.array([3.0]), np.array([1.5]))
    np.testing.assert_allclose([outside.lower_violation, outside.upper_violation], [0.5, 1.0])


@pytest.mark.parametrize("lower", ["y[0]", "y[0]**2"])
def test_an_infeasible_lower_level_has_an_infinite_gap(record_of, lower):
    record = record_of(lower=lower, lower_constraints=["x[0] - y[0]", "y[0]"])
    result = lower_gap(record, np.array([1e-3]), np.array([0.0]))
    assert result.gap == np.inf
    assert result.believed
    assert "infeasible" in result.reason
    # Relaxed a little it has a solution, and the answer says that it was.
    relaxed = lower_gap(record, np.array([1e-7]), np.array([0.0]), relax=1e-6)
    assert abs(relaxed.gap) <= 2e-6
    assert "relaxed" in relaxed.reason


def test_an_unbounded_lower_level_is_told(record_of):
    record = record_of(lower="y[0]", y_bounds_in_lower_level=False)
    solution = lower_solution(record, np.zeros(1))
    assert solution.value == -np.inf
    assert "unbounded" in solution.reason
    # y's bounds are the upper level's here.
    assert upper_violation(record, np.zeros(1), np.full(1, 3.0)) == 2
    assert lower_violation(record, np.zeros(1), np.full(1, 3.0)) == 0
    curved = record_of(lower="exp(-y[0]) - y[0]", y_bounds_in_lower_level=False)
    assert not lower_solution(curved, np.zeros(1)).believed


def test_free_y_is_searched_beyond_the_upper_levels_bounds(record_of):
    record = record_of(lower="(y[0] - 7*x[0])**2", y_bounds_in_lower_level=False)
    solution = lower_solution(record, np.ones(1))
    assert solution.believed
    np.testing.assert_allclose(solution.y, 7, atol=1e-4)


def test_a_lower_level_that_is_not_convex_is_not_believed(record_of):
    record = record_of(lower="-y[0]**2", lower_level_convex=False)
    solution = lower_solution(record, np.zeros(1), np.zeros(1))
    assert solution.value == -1
    assert not solution.believed


def test_undefined_points_are_not_feasible(record_of):
    record = record_of(lower="y[0]", lower_constraints=["log(x[0]) - y[0]"])
    assert lower_violation(record, np.full(1, -1.0), np.zeros(1)) == np.inf
    for x in (-1.0, np.nan):
        result = lower_gap(record, np.full(1, x), np.zeros(1))
        assert result.gap == np.inf
        assert not result.believed
    assert not lower_gap(record, np.ones(1), np.full(1, np.nan)).gap <= 0
    with pytest.raises(ValueError, match="x must have shape"):
        lower_gap(record, np.ones(2), np.zeros(1))


# Starts


@named(CONVEX)
def test_starts_are_feasible_and_apart(record):
    points = starting_points(record, 4, seed=0)
    assert len(points) == 4
    for x, y in points:
        assert lower_violation(record, x, y) <= 1e-7
        assert upper_violation(record, x, y) <= 1e-7
        # y² ≤ 0 has no Slater point; all others get one.
        if record.name != "dd_2012_01":
            assert all(g(x, y) < 0 for g in record.lower_constraints)
            assert np.all((record.y_bounds[:, 0] < y) & (y < record.y_bounds[:, 1]))
    key = 0 if record.n_x else 1
    assert len({tuple(np.round(point[key], 6)) for point in points}) == 4
    for (x, y), (x_again, y_again) in zip(points, starting_points(record, 4, seed=0)):
        np.testing.assert_array_equal(x, x_again)
        np.testing.assert_array_equal(y, y_again)


def test_no_starts_where_the_lower_level_is_never_feasible(record_of):
    assert starting_points(record_of(lower_constraints=["y[0]**2 + 1"]), 3, seed=0) == []


def test_starts_do_without_the_upper_level_where_it_cannot_be_met(record_of):
    record = record_of(upper_constraints=["x[0]**2 + 1"], lower_constraints=["y[0] - x[0]"])
    points = starting_points(record, 3, seed=0)
    assert len(points) == 3
    assert all(y < x for x, y in points)
