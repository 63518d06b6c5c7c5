"""Lower levels without bounds: what a certificate's gap then rests on, against closed forms."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bilevax as bx
from bilevax import terms
from bilevax.certificates import judge
from bilevax.certificates.definition import definition_of
from bilevax.certificates.gap import RADIUS
from bilevax.terms import Box, Free, NonNegative

A = jnp.asarray
INF = math.inf
NEAR = 1e-9


def upper(x1, x2, y1, y2, data=None):
    return jnp.sum((y1 - 1) ** 2) + 0.1 * jnp.sum(x1**2)


def quadratic(x1, y1, y2, data):
    """½(y − x)ᵀH(y − x), whose gap at y is its value there."""
    return 0.5 * (y1 - x1) @ data @ (y1 - x1)


def polynomial(x1, y1, y2, c):
    """(c₀ − c₁)y + c₂y² + c₃y⁴, in numbers: one program for many lower levels."""
    return c[0] * y1 - c[1] * y1 + c[2] * y1**2 + c[3] * y1**4


def saddle(x1, y1, y2, d):
    """a/2·y1² + y1·y2 − b/2·y2²."""
    return d[0] / 2 * y1**2 + y1 * y2 - d[1] / 2 * y2**2


def saddle_level(a, b, modulus):
    return bx.BilevelProblem(
        square_of_x,
        saddle,
        x1=Free(),
        y1=Free(),
        y2=Free(),
        data=A([a, b]),
        lower_modulus=modulus,
    )


def square_of_x(x1, x2, y1, y2, data):
    return x1**2


def level(lower, y1, **options):
    return bx.BilevelProblem(upper, lower, x1=Free(), y1=y1, **options)


def judged(problem, rho=1.0, radius=None, certify=False, **blocks):
    """The lines at a point with its witnesses; with `certify`, after all other looks, too."""
    point = bx.Point(**{name: A(block) for name, block in blocks.items()})
    if certify:
        return bx.certify(problem, point, rho=rho, radius=radius, look_around=False)
    return judge(problem.within(radius), point.replace(rho=A(rho, point.x1.dtype)))


def matrix(rng, eigenvalues):
    Q, _ = np.linalg.qr(rng.normal(size=(len(eigenvalues),) * 2))
    return Q @ np.diag(eigenvalues) @ Q.T


# ---------------------------------------------------------------------------------------------
# Terms: what is known of an excess, and the slope of the rest
# ---------------------------------------------------------------------------------------------

LOW, HIGH = np.array([-1.0, -INF, 0.0, -INF]), np.array([2.0, INF, INF, 1.0])
OPEN = {
    "free": Free(),
    "box": Box(LOW, HIGH),
    "half-line": NonNegative(),
    "l1": terms.L1(0.7, LOW, HIGH),
    "group": terms.GroupL2(0.7, axis=None),
    "scaled": 2.5 * Box(LOW, HIGH),
}


@pytest.mark.parametrize("name", OPEN)
def test_an_excess_is_bounded_within_every_radius(name):
    """⟨g, s − z⟩ − φ(s) ≤ what is known + ‖v‖·‖s − z‖ at thousands of s, and near to it at some."""
    term, rng, closest = OPEN[name], np.random.default_rng(0), INF
    project = jax.jit(jax.vmap(term.project))
    value = jax.jit(jax.vmap(term.value))
    for _ in range(20):
        z = np.asarray(project(A(rng.normal(size=(1, 4)))))[0]
        g = rng.normal(size=4) * rng.integers(0, 2, 4)
        known, slope = term.known_excess(A(z), A(g)), term.endless_slope(A(z), A(g))
        far = rng.normal(size=(4_000, 4)) * 10.0 ** rng.uniform(-2, 2, (4_000, 1))
        s = np.asarray(project(A(z + far)))
        way = np.linalg.norm(s - z, axis=1)
        excess = (s - z) @ g - np.asarray(value(A(s)))
        bound = float(known) + np.linalg.norm(slope) * way
        assert np.all(excess <= bound + NEAR * (1 + way))
        closest = min(closest, float(np.min((bound - excess) / (1 + way))))
        conjugate = float(term.conjugate(A(g)))
        if np.isfinite(conjugate):
            assert float(known) == pytest.approx(conjugate - g @ z, abs=1e-12)
            assert not np.any(slope)
    assert closest < 0.1


def test_an_entry_with_bounds_keeps_its_own():
    z, g = A([0.5, 0.5, 0.5, 0.5]), A([2.0, 3.0, -4.0, 0.0])
    term = Box(LOW, HIGH)
    # 2·(2 − ½) over the first entry, −4·(0 − ½) over the third; the second rises without end.
    assert float(term.known_excess(z, g)) == pytest.approx(3.0 + 2.0)
    np.testing.assert_array_equal(term.endless_slope(z, g), [0, -3, 0, 0])


@pytest.mark.parametrize(
    ("term", "endless"),
    [
        (Box(-1.0, 1.0), False),
        (terms.Simplex(), False),
        (terms.L2Ball(1.0), False),
        (terms.L1(1.0) + Box(-1.0, 1.0), False),
        (terms.Ridge(1.0), False),
        (terms.PerLeaf((Box(0.0, 1.0), terms.Ridge(1.0) + NonNegative())), False),
        (terms.PerLeaf((Box(0.0, 1.0), Free())), True),
        (terms.L1(1.0), True),
        (2.0 * NonNegative(), True),
    ],
    ids=str,
)
def test_which_terms_have_a_way_to_infinity(term, endless):
    assert term.endless is endless


# ---------------------------------------------------------------------------------------------
# Bounds against closed forms
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("radius", np.float32),
        ("radius", np.float64),
        pytest.param("modulus", np.float32, marks=pytest.mark.long),
        ("modulus", np.float64),
    ],
)
def test_a_quadratic_without_bounds(kind, dtype):
    """f(y) − f(z) + ‖∇f(z)‖·(R + ‖z − y‖), or + ‖∇f(z)‖²/(2m); the gap is f(y)."""
    rng = np.random.default_rng(3)
    rounded = lambda numbers: np.asarray(numbers, dtype).astype(float)
    H = rounded(matrix(rng, [1.0, 2.0, 5.0]))
    options = {} if kind == "radius" else {"lower_modulus": 0.99}
    problem = level(quadratic, Free(), data=A(H, dtype), **options)
    for off in (1.0, 1e-2, 1e-5):
        x, y = rounded(rng.normal(size=3)), rounded(rng.normal(size=3))
        z = rounded(x + off * rng.normal(size=3))
        at = {"x1": A(x, dtype), "y1": A(y, dtype), "z1": A(z, dtype)}
        c = judged(problem, certify=dtype == np.float64, **at)
        f = lambda u, x=x: 0.5 * (u - x) @ H @ (u - x)
        steep = np.linalg.norm(H @ (z - x))
        R = RADIUS * (1 + np.linalg.norm(y))
        fall = steep * (R + np.linalg.norm(z - y)) if kind == "radius" else steep**2 / 1.98
        assert c.gap >= f(y) * (1 - 1e-12)
        assert c.gap - c.allowances["gap"] == pytest.approx(
            f(y) - f(z) + fall, rel=64 * float(np.finfo(dtype).eps), abs=c.allowances["gap"]
        )
        assert c.allowances["gap"] <= (1e-2 if dtype == np.float32 else 1e-11) * (1 + c.gap)
        assert c.radius == (pytest.approx(R, rel=1e-5) if kind == "radius" else INF)
        assert c.modulus == (0 if kind == "radius" else pytest.approx(0.99))
        said = "assumes that the lower level is m-strongly convex, m = 0.99"
        assert (said in str(c)) == (kind == "modulus")
        assert not c.breach


def test_a_modulus_that_is_the_curvature_gives_the_gap_itself():
    """With H = h·1 and m = h the bound is f(y), wherever z is."""
    rng = np.random.default_rng(4)
    problem = level(quadratic, Free(), data=A(3.0 * np.eye(3)), lower_modulus=3.0)
    x, y, z = rng.normal(size=(3, 3))
    c = judged(problem, certify=True, x1=x, y1=y, z1=z)
    assert c.gap == pytest.approx(1.5 * np.sum((y - x) ** 2), rel=1e-12)
    assert not c.breach


def test_a_modulus_may_depend_on_x():
    """½eˣ(y − 1)²: the gap at y, from any z, and nothing where the modulus is not positive."""
    lower = lambda x1, y1, y2: 0.5 * jnp.exp(x1) * (y1 - 1) ** 2

    def modulus(x):
        """eˣ where 0 ≤ x < 1; elsewhere negative, infinite, and not a number."""
        bad = jnp.where(x < 0, x, jnp.where(x < 2, jnp.inf, jnp.nan))
        return jnp.where((x >= 0) & (x < 1), jnp.exp(x), bad)

    problem, at = level(lower, Free(), lower_modulus=modulus), {"y1": 2.0, "z1": 0.5}
    c = judged(problem, x1=0.3, **at)
    assert c.gap == pytest.approx(0.5 * math.exp(0.3), rel=1e-12)
    assert c.modulus == pytest.approx(math.exp(0.3))
    assert c.radius == INF
    for x in (-0.7, 1.5, 2.5):
        c = judged(problem, x1=x, **at)
        assert c.modulus == 0
        assert c.radius == pytest.approx(30.0)
    with pytest.raises(TypeError, match="lower_modulus must return one number"):
        judged(
            level(lower, Free(), lower_modulus=lambda x: A([1.0, 2.0])), certify=True, x1=0.3, **at
        )


@pytest.mark.parametrize("modulus", [None, 0.5])
def test_a_saddle_without_bounds(modulus):
    """a/2·y1² + y1·y2 − b/2·y2² has the gap (a/2 + 1/(2b))·y1² + (b/2 + 1/(2a))·y2²."""
    a, b = 2.0, 0.5
    problem = saddle_level(a, b, modulus)
    y1, y2 = 0.3, -0.4
    gap = (a / 2 + 1 / (2 * b)) * y1**2 + (b / 2 + 1 / (2 * a)) * y2**2
    exact = judged(problem, x1=0.0, y1=y1, y2=y2, z1=-y2 / a, z2=y1 / b)
    assert exact.gap == pytest.approx(gap, rel=1e-9)
    off = judged(problem, x1=0.0, y1=y1, y2=y2, z1=-y2 / a + 0.1, z2=y1 / b - 0.2)
    assert off.gap > gap
    if modulus:
        # ½a·0.1² and ½b·0.2² are lost at z, and (a·0.1)²/(2m) and (b·0.2)²/(2m) won.
        won = (a * 0.1) ** 2 / 1.0 + (b * 0.2) ** 2 / 1.0
        lost = a / 2 * 0.1**2 + b / 2 * 0.2**2
        assert off.gap == pytest.approx(gap - lost + won, rel=1e-12)
        assert off.radius == INF
    else:
        assert off.radius == pytest.approx(RADIUS * 1.3)  # the smaller of both


def test_entries_with_bounds_are_as_exact_as_before():
    """Σ cᵢyᵢ + ½y₁²: over [0, 1] × R × [0, ∞) only the second entry needs a radius."""
    lower = lambda x1, y1, y2: y1[0] + 0.5 * (y1[1] - x1) ** 2 + 2 * y1[2]
    term = Box(np.array([0.0, -INF, 0.0]), np.array([1.0, INF, INF]))
    at = {"x1": 0.0, "y1": [0.25, 0.0, 0.5]}
    exact = judged(level(lower, term), **at, z1=[0.5, 0.0, 0.3])
    assert exact.gap == pytest.approx(1.25, rel=1e-12)
    assert exact.radius == INF
    near = judged(level(lower, term), **at, z1=[0.5, 1e-3, 0.3])
    R = RADIUS * (1 + math.hypot(0.25, 0.5))
    way = R + math.hypot(0.25, 1e-3, 0.2)
    assert near.gap == pytest.approx(1.25 - 0.5e-6 + 1e-3 * way, rel=1e-12)
    assert near.radius == pytest.approx(R)


def test_the_radius_can_be_set():
    problem = level(quadratic, Free(), data=A(np.eye(3)))
    at = {"x1": np.zeros(3), "y1": np.zeros(3), "z1": [0.0, 1e-3, 0.0]}
    for given in (0.5, 100.0):
        c = judged(problem, **at, radius=given, certify=True)
        assert c.radius == given
        assert c.gap == pytest.approx(-0.5e-6 + 1e-3 * (given + 1e-3), rel=1e-9)
    assert "radius         1.000e+02  how far from (y1, y2)" in str(c)
    assert c.as_dict()["radius"] == 100.0


@pytest.mark.parametrize("bad", [0.0, -1.0, INF, math.nan])
def test_a_radius_is_finite_and_positive(bad):
    problem = level(quadratic, Free(), data=A(np.eye(2)))
    point = bx.Point(x1=jnp.zeros(2), y1=jnp.zeros(2))
    with pytest.raises(ValueError, match="radius must be finite and > 0"):
        bx.certify(problem, point, radius=bad)
    with pytest.raises(ValueError, match="radius must be finite and > 0"):
        bx.solve(problem, point, radius=bad)
    with pytest.raises(ValueError, match="lower_modulus must be finite and > 0"):
        level(quadratic, Free(), lower_modulus=bad)


def test_a_problem_without_a_lower_level_has_no_radius():
    problem = bx.MinimaxProblem(lambda x, y: x * y, Box(-1.0, 1.0), Box(-1.0, 1.0))
    with pytest.raises(ValueError, match="a MinimaxProblem has none"):
        bx.certify(problem, bx.Point(x=A(0.0), y=A(0.0)), radius=1.0)


@pytest.mark.parametrize(
    "term",
    [
        Box(-3.0, 3.0),
        pytest.param(terms.L2Ball(3.0), marks=pytest.mark.long),
        pytest.param(terms.Ridge(1.0), marks=pytest.mark.long),
        pytest.param(terms.L1(0.1) + Box(-3.0, 3.0), marks=pytest.mark.long),
    ],
)
def test_with_bounds_a_radius_and_a_modulus_change_nothing(term):
    """Bit for bit: where tangent and term are enough, the bound rests on nothing else."""
    rng = np.random.default_rng(5)
    data = A(matrix(rng, [1.0, 2.0, 5.0]))
    x, y, z = rng.normal(size=(3, 3)) / 2
    plain = judged(level(quadratic, term, data=data), x1=x, y1=y, z1=z)
    assert plain.radius == INF
    assert plain.modulus == 0
    for options in ({"lower_modulus": 1.0}, {"radius": 0.1}):
        other = judged(level(quadratic, term, data=data, **options), x1=x, y1=y, z1=z)
        assert other.as_dict() == plain.as_dict()
        assert other.allowances == plain.allowances


# ---------------------------------------------------------------------------------------------
# What must not be certified
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("term", [NonNegative(), Free(), Box(-INF, INF)], ids=str)
def test_a_lower_level_that_falls_without_end_is_not_certified(term):
    """min −y is −∞: the gap within R is R."""
    falling = level(polynomial, term, data=A([-1.0, 0.0, 0.0, 0.0]))
    c = judged(falling, rho=1e-3, x1=0.0, y1=2.0, z1=5.0)
    assert c.gap >= RADIUS * 3
    assert c.radius == pytest.approx(RADIUS * 3)
    assert not c.certified(1.0)
    # Somebody who asks for so little gets it, and it says so.
    c = judged(falling, x1=0.0, y1=2.0, z1=2.0, radius=1e-3)
    assert c.gap >= 1e-3
    assert c.radius == pytest.approx(1e-3)


def test_a_slope_towards_a_bound_needs_no_radius():
    rising = level(polynomial, NonNegative(), data=A([1.0, 0.0, 0.0, 0.0]))
    c = judged(rising, x1=0.0, y1=2.0, z1=5.0)
    assert c.gap == pytest.approx(2.0)
    assert c.radius == INF


def test_a_slope_that_vanishes_by_rounding_is_not_zero():
    """d₀y − d₁y: the data may be half a unit off, and then it falls without end."""
    straight = lambda d: level(polynomial, Free(), data=A([d, d, 0.0, 0.0]))
    c = judged(straight(1e9), x1=0.0, y1=0.0, z1=0.0)
    assert c.radius == pytest.approx(RADIUS)
    assert c.gap >= RADIUS * 0.5 * math.ulp(1e9)
    assert judged(straight(0.0), x1=0.0, y1=0.0, z1=0.0).radius == INF


def test_a_modulus_that_is_too_large_withdraws():
    """Also where one direction of thirty is flatter than the others, and lies askew."""
    rng = np.random.default_rng(6)
    H = matrix(rng, [1e-3, *np.linspace(0.6, 1.0, 29)])
    x, z = rng.normal(size=30), rng.normal(size=30)
    at = {"x1": x, "y1": x + 1e-3 * z, "z1": x + 1e-4 * z}
    wrong = judged(level(quadratic, Free(), data=A(H), lower_modulus=0.5), certify=True, **at)
    assert "lower is not m-strongly convex in y1 with the lower_modulus m = 0.5" in wrong.breach
    assert wrong.epsilon == INF
    fine = level(quadratic, Free(), data=A(H), lower_modulus=0.99e-3)
    assert not judged(fine, certify=True, **at).breach


def test_a_modulus_of_a_concave_block_is_asked_too():
    c = judged(saddle_level(2.0, 0.1, 1.0), certify=True, x1=0.0, y1=0.1, y2=0.1, z1=-0.05, z2=1.0)
    assert "m-strongly concave in y2" in c.breach


def test_a_nonconvex_lower_level_is_caught_within_the_radius():
    """y² − y⁴/50 has a minimum at 0, and is negative beyond 7."""
    wave = level(polynomial, Free(), data=A([0.0, 0.0, 1.0, -0.02]))
    c = judged(wave, certify=True, x1=0.0, y1=0.0, z1=0.0)
    assert "lower is not convex in y1" in c.breach


def test_check_reports_a_modulus_that_is_too_large():
    start = bx.Point(x1=jnp.zeros(3), y1=jnp.zeros(3))
    for modulus, holds in ((0.99, True), (2.0, False)):
        problem = level(quadratic, Free(), data=A(np.eye(3)), lower_modulus=modulus)
        found = {f.assumption: f.holds for f in problem.check(start).findings}
        assert found["lower is lower_modulus-strongly convex in y1"] is holds


# ---------------------------------------------------------------------------------------------
# Minibatches
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("modulus", "term"), [(None, Free()), (2.0, Free()), (None, Box(0.0, 3.0))]
)
def test_the_radii_of_a_certificate_from_samples(modulus, term):
    """Slopes that are off by δ change ‖v‖·(R + ‖z − y‖) by δ times the way, and ‖v‖²/(2m) by
    (‖v‖ + δ/2)·δ/m."""
    problem = level(polynomial, term, data=A([0.0, 0.0, 1.0, 0.0]), lower_modulus=modulus)
    point = bx.Point(x1=A(0.0), y1=A(1.0), z1=A(0.5), rho=A(4.0))
    lines = {"gap": 0.0, "response_z1": 2.0, "response_z2": 0.0}
    radii = definition_of(problem).radii(problem, point, lines, 0.4, 0.01)
    way = 3.0 if isinstance(term, Box) else RADIUS * 2 + 0.5
    change = way * 0.1 if modulus is None else (0.5 + 0.05) * 0.1 / 2
    assert radii["gap"] == pytest.approx(0.01 + change, rel=1e-6)
    assert radii["response_z1"] == 0.4
    estimate = judge(problem, point)
    rests = definition_of(problem).of_samples(problem, point, estimate)
    assert rests.radius == (pytest.approx(20.0) if way > 3 and modulus is None else INF)
    assert rests.modulus == (modulus or 0)


# ---------------------------------------------------------------------------------------------
# Solutions
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [pytest.param(np.float32, marks=pytest.mark.long), np.float64])
def test_ridge_regression_without_bounds_is_solved(dtype):
    """min (y − 1)² + x²/10 with y = x: x = 1/1.1, by steps that leave a slope along y."""
    start = bx.Point(x1=jnp.zeros(3, dtype), y1=jnp.zeros(3, dtype))
    problem = level(quadratic, Free(), data=A(2 * np.eye(3), dtype))
    solver = bx.Adaptive()
    solution = bx.solve(problem, start, solver=solver, progress=False, max_gradients=20_000)
    assert solution.certified
    assert solution.certificate.radius == pytest.approx(
        RADIUS * (1 + np.linalg.norm(solution.point.y1)), rel=1e-5
    )
    np.testing.assert_allclose(solution.point.x1, 1 / 1.1, atol=0.06)
    assert "The lower level has no bounds: y is compared with all within" in str(solution.status)
    again = bx.certify(problem, solution.point)
    assert again.epsilon == solution.certificate.epsilon


@pytest.mark.long  # test_attacks.py names an x that runs away
def test_a_lower_level_without_end_is_named():
    """y holds on to the upper level, and the lower level's own best answer runs away."""
    problem = bx.BilevelProblem(
        lambda x1, x2, y1, y2: (y1 - x1) ** 2 + x1**2,
        lambda x1, y1, y2: -y1,
        x1=Box(-1.0, 1.0),
        y1=NonNegative(),
    )
    start = bx.Point(x1=A(0.1), y1=A(0.1))
    solution = bx.solve(problem, start, progress=False, max_gradients=20_000)
    assert not solution.certified
    assert solution.status == "unbounded"
    assert "1 has run to" in str(solution.status)


# ---------------------------------------------------------------------------------------------
# Constrained lower levels
# ---------------------------------------------------------------------------------------------


def target(x, y):
    return jnp.sum((x - 2) ** 2 + (y - 2) ** 2)


def distance(x, y):
    return 0.5 * jnp.sum((y - x) ** 2)


def at_least_one(x, y):
    return 1 - y


def constrained(y=None, **options):
    """y = max(x, 1), from min ½(y − x)² with 1 − y ≤ 0; min (x − 2)² + (y − 2)² is at 2."""
    return bx.ConstrainedBilevelProblem(
        target,
        distance,
        x=Free(),
        y=Free() if y is None else y,
        constraints=at_least_one,
        **options,
    )


@pytest.mark.parametrize("modulus", [None, 1.0])
def test_the_lower_gap_of_a_constrained_level_without_bounds(modulus):
    """At x = 0 the answer is 1 with λ̄ = 1; at (z, λ̄) the Lagrangian's slope is z − λ̄."""
    problem = constrained(lower_modulus=modulus)
    y, z, lam = 1.5, 1.1, 0.8
    m = bx.Multipliers(lam=A([0.0]), lam_bar=A([lam]))
    point = bx.Point(x=A([0.0]), y=A([y]), z=A([z]), rho=A(1.0), multipliers=m)
    c = bx.certify(problem, point, look_around=False)
    slope, dual = z - lam, 0.5 * z**2 + lam * (1 - z)
    fall = slope**2 / 2 if modulus else slope * (RADIUS * (1 + y) + y - z)
    assert c.lower_gap == pytest.approx(0.5 * y**2 - dual + fall, rel=1e-12)
    assert c.lower_gap >= 0.5 * y**2 - 0.5
    assert c.radius == (INF if modulus else pytest.approx(RADIUS * (1 + y)))
    assert c.modulus == (modulus or 0)
    assert not c.breach


def test_a_wrong_modulus_of_a_constrained_level_withdraws():
    m = bx.Multipliers(lam=A([0.0]), lam_bar=A([0.9]))
    point = bx.Point(x=A([0.0]), y=A([1.5]), z=A([1.1]), rho=A(1.0), multipliers=m)
    c = bx.certify(constrained(lower_modulus=3.0), point, look_around=False)
    assert "lower_modulus m = 3" in c.breach
    assert c.epsilon == INF


@pytest.mark.parametrize(
    "y", [Free(), pytest.param(NonNegative(), marks=pytest.mark.long)], ids=str
)
def test_a_constrained_level_without_bounds_is_solved(y):
    start = bx.Point(x=A([0.0]), y=A([3.0]))
    solution = bx.solve(constrained(y), start, progress=False, max_gradients=50_000)
    assert solution.certified
    np.testing.assert_allclose(solution.point.x, 2, atol=0.05)
    np.testing.assert_allclose(solution.point.y, 2, atol=0.05)
    assert bx.certify(constrained(y), bx.Point(x=A([2.0]), y=A([2.0]))).certified(1e-3)
