"""Absolute and relative tolerance: what a line is compared with; units then do not matter."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

import bilevax as bx
from bilevax import terms
from bilevax.certificates import judge
from bilevax.problems import library
from bilevax.problems.linear import LinearData, generate
from instances import get

SCALES = (1e-3, 1.0, 1e3)


SADDLE = get("unique_saddle")


def saddle(f=1.0, lower=1.0, x=1.0, y=1.0):
    """The same problem in other units: f times `f`, f~ times `lower`, x1 = u/x, (y1, y2) = v/y.

    Units are data, so that one compilation serves all of them.
    """
    p, s = SADDLE.problem, SADDLE.start
    box = lambda term, by: terms.Box(term.lower * by, term.upper * by)
    problem = bx.BilevelProblem(
        saddle_upper,
        saddle_lower,
        x1=box(p.x1, x),
        x2=p.x2,
        y1=box(p.y1, y),
        y2=box(p.y2, y),
        data={"f": f, "lower": lower, "x": x, "y": y},
    )
    return problem, s.replace(x1=s.x1 * x, y1=s.y1 * y, y2=s.y2 * y)


def saddle_upper(x1, x2, y1, y2, unit):
    return unit["f"] * SADDLE.problem.upper(x1 / unit["x"], x2, y1 / unit["y"], y2 / unit["y"])


def saddle_lower(x1, y1, y2, unit):
    return unit["lower"] * SADDLE.problem.lower(x1 / unit["x"], y1 / unit["y"], y2 / unit["y"])


def test_sizes_are_those_of_what_the_lines_compare():
    """f = 3x − 4y over boxes, f~ = (y − 5)²/2 + 7: ‖∇f‖ = 5, and the gap compares values of f~."""
    problem = bx.BilevelProblem(
        lambda x1, x2, y1, y2: jnp.sum(3 * x1 - 4 * y1),
        lambda x1, y1, y2: 0.5 * jnp.sum((y1 - 5) ** 2) + 7,
        x1=terms.Box(-1.0, 1.0),
        y1=terms.Box(-1.0, 1.0),
    )
    point = bx.Point(
        x1=jnp.asarray([0.5]), y1=jnp.asarray([0.0]), z1=jnp.asarray([1.0]), rho=jnp.asarray(2.0)
    )
    sizes = judge(problem, point, sizes=True).sizes
    assert sizes["stationarity"] == pytest.approx(5)
    assert sizes["response_z1"] == pytest.approx(5)
    assert sizes["gap"] == pytest.approx(0.5 * 25 + 7)


def test_sizes_of_constraints_are_what_x_and_y_contribute():
    problem = bx.ConstrainedBilevelProblem(
        lambda x, y: jnp.sum(x + y),
        lambda x, y: jnp.sum(y**2),
        constraints=lambda x, y: 2 * x - 3 * y - 100,
        x=terms.Box(-5.0, 5.0),
        y=terms.Box(-5.0, 5.0),
    )
    point = bx.Point(
        x=jnp.asarray([2.0]),
        y=jnp.asarray([1.0]),
        z=jnp.asarray([0.0]),
        rho=jnp.asarray(1.0),
        multipliers=bx.Multipliers(lam=jnp.asarray([10.0]), lam_bar=jnp.asarray([0.0])),
    )
    sizes = judge(problem, point, sizes=True).sizes
    assert sizes["feasibility"] == pytest.approx(4 + 3)
    assert sizes["feasibility_z"] == pytest.approx(4)
    assert sizes["complementarity"] == pytest.approx(10 * 7)
    assert sizes["lower_gap"] == pytest.approx(1)


def test_a_line_may_have_its_share_on_top():
    lines = {"stationarity": 0.3, "gap": 0.002}
    lines |= dict.fromkeys(("response_x2", "response_z1", "response_z2"), 0.0)
    sizes = dict.fromkeys(lines, 0.0) | {"stationarity": 10.0, "gap": 0.1}
    certificate = bx.KKTCertificate(**lines, gap_below=0, rho=1, objective=0, sizes=sizes)
    assert not certificate.certified(0.1)
    assert certificate.certified(0.1, 0.02)
    assert certificate.certified(0.0015, 0.03)
    assert not certificate.certified(0.0015, 0.02)  # stationarity: 0.3 > 0.0015 + 0.02·10
    assert not certificate.certified(0.0, 0.01)  # both
    for no_number in (np.inf, np.nan):  # where a slope overflows, line and size are infinite
        wild = dataclasses.replace(
            certificate, stationarity=np.inf, sizes=sizes | {"stationarity": no_number}
        )
        assert not wild.certified(0.1, 1e6)
    nothing = dataclasses.replace(certificate, sizes={})
    assert not nothing.certified(0.1, 1e6)  # what has no size gets nothing on top


def linear(f=1.0, lower=1.0, constraint=1.0, x=1.0, y=1.0):
    """A bilevel linear problem of the paper's law, in other units."""
    data = generate(40, 40, 4, 0)
    arrays = LinearData(
        A=constraint * data.A / x,
        B=constraint * data.B / y,
        b=constraint * data.b,
        c=f * data.c / x,
        d=f * data.d / y,
        d_tilde=lower * data.d_tilde / y,
    )
    given = library.bilevel_linear_from(arrays).problem
    problem = bx.ConstrainedBilevelProblem(
        given.upper,
        given.lower,
        constraints=given.constraints,
        x=terms.Box(-x, x),
        y=terms.Box(-y, y),
        data=given.data,
    )
    return problem, bx.Point(x=jnp.zeros(40), y=jnp.zeros(40))


@pytest.mark.parametrize(
    ("make", "unit"),
    [pytest.param(saddle, u, marks=pytest.mark.long) for u in ("f", "lower", "x", "y")]
    + [pytest.param(linear, u, marks=pytest.mark.long) for u in ("lower", "x", "y")]
    + [(linear, u) for u in ("f", "constraint")],
)
def test_units_change_the_gradients_by_less_than_twice(make, unit):
    counts = []
    for scale in SCALES:
        problem, start = make(**{unit: scale})
        solution = bx.solve(
            problem, start, tolerance=0.0, relative_tolerance=1e-4, max_gradients=100_000
        )
        assert solution.status == "certified", solution.status
        assert "size on every line" in str(solution.status)
        counts.append(solution.gradients)
    assert max(counts) < 2 * min(counts), counts


@pytest.mark.parametrize("bad", [-1.0, np.nan, np.inf, "tight", [1e-3]])
def test_a_wrong_share_is_refused_by_name(bad):
    instance = get("unique_saddle")
    with pytest.raises((TypeError, ValueError), match="relative_tolerance"):
        bx.solve(instance.problem, instance.start, relative_tolerance=bad)


def test_no_tolerance_at_all_is_refused():
    instance = get("unique_saddle")
    with pytest.raises(ValueError, match="tolerance"):
        bx.solve(instance.problem, instance.start, tolerance=0.0)
