"""Attacks on certificates that got through once: each must be refused, or named for what it is."""

from __future__ import annotations

from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bilevax as bx
from bilevax.certificates import judge
from bilevax.certificates.rerounding import Rerounding
from bilevax.terms import Box, CappedSimplex, L1Ball, L2Ball, NonNegative, Ridge, Simplex

A = jnp.asarray
WIDE = Box(-2.0, 2.0)


def lower_only(lower, point, y1=WIDE, data=None, certify=False):
    """The certificate of a problem that is all in its lower level, with ρ = 1.

    Where the point has its witness, its lines alone, unless asked: they are one program.
    """
    upper = lambda x1, x2, y1, y2, *data: (x1 - 1.0) ** 2
    problem = bx.BilevelProblem(upper, lower, x1=WIDE, y1=y1, data=data)
    if certify or point.z1 is None:
        return bx.certify(problem, point, rho=1.0, look_around=False)
    return judge(problem, point.replace(rho=A(1.0, point.y1.dtype)))


def at(y, z=None, dtype=float):
    z = {} if z is None else {"z1": A(z, dtype)}
    return bx.Point(x1=A(1.0, dtype), y1=A(y, dtype), **z)


# ---------------------------------------------------------------------------------------------
# Rounding
# ---------------------------------------------------------------------------------------------


def test_a_value_that_cancels():
    """y² − 2dy + d² at d = 1e8: the gap is 1, and the values are multiples of 2."""
    lower = lambda x, y, _, d: y**2 - 2 * d * y + d**2
    d = 1e8
    c = lower_only(lower, at(d + 1, d), Box(d - 4, d + 4), A(d))
    assert c.epsilon >= 1
    assert c.allowances["gap"] >= 1
    stable = lambda x, y, _, d: (y - d) ** 2
    assert lower_only(stable, at(d + 1, d), Box(d - 4, d + 4), A(d)).gap == pytest.approx(1)


@pytest.mark.parametrize("where", ["data", "code"])
def test_a_term_that_vanishes(where):
    """(c + y²) − c is zero in floating point where y² is less than a rounding of c."""
    c = 1e13
    if where == "data":
        found = lower_only(lambda x, y, _, d: (d + y**2) - d, at(0.02, 0.0), data=A(c))
    else:
        found = lower_only(lambda x, y, _: (c + y**2) - c, at(0.02, 0.0))
    assert found.epsilon >= 4e-4


def test_integers_that_do_not_fit():
    """(2²⁴ + 1) − 2²⁴ is 0 in float32: y = 0 is certified at ε, and the answer is 1."""
    float32 = lambda d: d.astype(jnp.float32)
    lower = lambda x, y, _, d: (y - (float32(d[0]) - float32(d[1]))) ** 2
    for data in (np.array([2**24 + 1, 2**24], np.int32), np.array([2**24, 2**24], np.float32)):
        assert lower_only(lower, at(0.0, dtype=np.float32), Box(-5.0, 5.0), data).epsilon >= 1


def test_data_that_cancel():
    """S·a − S·b with a and b one unit apart; over a weak ridge noise n of a slope hides n²/(2w)."""
    a, b, S = 1.2389437116912805, 1.2389437116912803, 1e9
    slope = float(Fraction(S) * Fraction(a) - Fraction(S) * Fraction(b))
    lower = lambda x, y, _, d: (S * d[0]) * y - (S * d[1]) * y
    far = lower_only(lower, at(0.0, 0.0), Box(-1e6, 1e6), A([a, b]))
    assert far.epsilon >= slope * 1e6
    weak = lower_only(lower, at(0.0, 0.0), Ridge(1e-12), A([a, b]))
    assert weak.epsilon >= slope**2 / 2e-12


def test_what_a_huge_penalty_divides_does_not_vanish():
    """In float32 the square of ∇f/ρ is zero for ρ = 1e21; its length is not."""
    upper = lambda x1, x2, y1, y2: y1
    problem = bx.BilevelProblem(upper, lambda x1, y1, y2: 0.0 * y1, x1=WIDE, y1=WIDE)
    point = bx.Point(x1=A(1.0, jnp.float32), y1=A(0.5, jnp.float32), z1=A(0.5, jnp.float32))
    c = bx.certify(problem, point.replace(rho=A(1e21, jnp.float32)), look_around=False)
    assert c.stationarity == pytest.approx(1, rel=1e-3)


def loops(x):
    """1e8 + x − 1e8, ten times, in every kind of loop and call that JAX has."""
    lost = jax.jit(lambda v: (v + 1e8) - 1e8)
    scanned = jax.lax.scan(lambda c, _: (lost(c), c), x, None, length=3)[0]
    counted = jax.lax.fori_loop(0, 3, lambda _, c: lost(c), scanned)
    chosen = jax.lax.cond(x > 0, lost, lambda v: v, counted)
    return jax.checkpoint(lost)(jax.nn.relu(chosen))


def test_every_operation_is_rounded_anew():
    def rerounded(function, x, begin):
        run = Rerounding(function, x)
        return float(run(run.numbers(jax.random.key(0)), A(begin, jnp.uint32), x))

    results = [rerounded(loops, A(0.3), k) for k in range(6)]
    assert 1e-9 < np.std(results) < 1e-6
    exact = lambda x: -jnp.max(jnp.reshape(jnp.stack([2.0 * x, x]), (1, 2)))
    assert rerounded(exact, A(0.3), 0) == -0.6
    # Terms that cancel within one operation, and are all that there is of them.
    large = A([1e17, 1.0, -1e17])
    for whole in (jnp.sum, lambda v: v @ jnp.ones(3), lambda v: jnp.cumsum(v)[-1]):
        assert np.std([rerounded(whole, large, k) for k in range(6)]) > 1


# ---------------------------------------------------------------------------------------------
# Domains
# ---------------------------------------------------------------------------------------------

N = 200_000
TRESPASSES = {
    "no weight": (Simplex(), np.zeros(N)),
    "no weight, capped": (CappedSimplex(2 / N), np.zeros(N)),
    "a little below each": (Simplex(), np.maximum(np.full(N, 1 / N) - 7e-6, 0)),
    "a little above each cap": (
        CappedSimplex(2 / N),
        np.full(N, 1 / N) + 7e-6 * np.tile([1, -1], N // 2),
    ),
    "a little too much of each": (L1Ball(1.0), np.full(N, 7e-6)),
    "beyond a tiny ball": (L2Ball(1e-30), np.full(3, 1e-22)),
    "beyond a tiny box": (Box(0.0, 1e-8), np.full(1, 7e-6)),
    "below zero": (NonNegative(), np.full(1, -1e-7)),
}


@pytest.mark.parametrize("case", TRESPASSES)
def test_many_small_trespasses_are_none_that_rounding_excuses(case):
    term, x = TRESPASSES[case]
    assert term.value(A(x, jnp.float32)) == np.inf
    inside = term.project(A(x, jnp.float32))
    assert term.value(inside) == 0


def test_equal_entries_far_from_zero_are_projected_on_a_simplex():
    """Their mean rounds to more than they are: the projection was zero."""
    for n in (1000, 10_000):
        x = Simplex().project(jnp.full(n, 1e4, jnp.float32))
        np.testing.assert_allclose(x, 1 / n, rtol=1e-5)


def test_the_conjugate_of_a_simplex_is_an_upper_bound():
    """Where the compiler computes slopes twice, and rounds them otherwise, none may be lost."""
    caps, total = A([3.0, 4.0, 1.0, 5.0]), 9.59184
    term = CappedSimplex(caps, total)
    rng = np.random.default_rng(0)
    M, v = A(rng.normal(size=(4, 4))), A(rng.normal(size=4))
    from bilevax.programs import quick

    conjugate = quick(lambda v: (term.conjugate(M @ v + 0.1 * v), M @ v + 0.1 * v))
    for k in range(20):
        found, g = conjugate(v * (1 + k * 1e-15))
        best = float(g @ term.linear_oracle(g))
        assert float(found) >= best - 1e-12


# ---------------------------------------------------------------------------------------------
# The definition
# ---------------------------------------------------------------------------------------------


def test_complementarity_does_not_cancel():
    """min −x0 − 1e4·x1 with x0 ≤ 1, x1 ≤ 0: with λ = (1, 1e4) a violation makes up for slack."""
    problem = bx.ConstrainedBilevelProblem(
        lambda x, y: -x[0] - 1e4 * x[1] + 0 * y,
        lambda x, y: y**2,
        x=WIDE,
        y=Box(-1.0, 1.0),
        upper_constraints=lambda x, y: jnp.stack([x[0] - 1, x[1]]),
    )
    c = bx.certify(problem, bx.Point(x=A([0.0, 1e-4]), y=A(0.0)), look_around=False)
    assert c.upper_complementarity > 0.5
    lam = bx.Multipliers(upper_lam=A([1.0, 1e4]))
    point = bx.Point(x=A([0.0, 1e-4]), y=A(0.0), z=A(0.0), rho=1.0, multipliers=lam)
    c = bx.certify(problem, point, look_around=False)
    assert c.upper_complementarity == pytest.approx(2)
    assert c.upper_product == pytest.approx(0, abs=1e-12)


def test_a_kink_with_a_zero_multiplier_is_no_candidate():
    """y(x) = max(½, x + 0.8), F = (x − 1)²: at x = −0.3 ε-KKT holds for any ε, and F falls."""
    problem = bx.ConstrainedBilevelProblem(
        lambda x, y: (x[0] - 1) ** 2 + 0 * y[0],
        lambda x, y: (y[0] - 0.5) ** 2,
        x=Box(-1.0, 1.0),
        y=Box(-3.0, 3.0),
        constraints=lambda x, y: jnp.stack([y[0] - 1, x[0] + 0.8 - y[0]]),
    )
    for e in (1e-3, 1e-6):
        rho, a = 2.6 / e, e / 2.6
        lam = 2 * (1.3 - a)
        point = bx.Point(
            x=A([-0.3 + a]),
            y=A([0.5 + lam / (2 * rho)]),
            z=A([0.5]),
            rho=rho,
            multipliers=bx.Multipliers(lam=A([0.0, lam]), lam_bar=A([0.0, 0.0])),
        )
        c = bx.certify(problem, point)
        assert c.epsilon <= e
        assert c.looked_around.falls
        assert not c.certified(e)
        assert "F falls nearby" in str(c)
        assert bx.certify(problem, point, look_around=False).certified(e)


def peak():
    """BOLIB's TuyEtal2007: y(x) has a kink at x = 4, where F = x² + y² has a local maximum."""
    rows = lambda x, y: [3 * x[0] + y[0] - 15, x[0] + y[0] - 7, x[0] + 3 * y[0] - 15]
    return bx.ConstrainedBilevelProblem(
        lambda x, y: x[0] ** 2 + y[0] ** 2,
        lambda x, y: -y[0],
        x=Box(0.0, np.inf),
        y=Box(-1000.0, 1000.0),
        constraints=lambda x, y: jnp.stack(rows(x, y)),
        upper_constraints=lambda x, y: -y,
    )


def test_a_run_goes_on_from_a_local_maximum():
    problem, start = peak(), bx.Point(x=A([1.0]), y=A([2.0]))
    solution = bx.solve(problem, start, tolerance=1e-4, max_gradients=20_000, progress=False)
    assert solution.status == "certified"
    assert float(solution.point.x[0]) == pytest.approx(4.5, abs=1e-3)  # or 1.5, of the same F
    assert solution.certificate.objective == pytest.approx(22.5, abs=1e-3)
    assert solution.certificate.looked_around.answered > 0
    stays = bx.solve(
        problem, start, tolerance=1e-4, max_gradients=20_000, look_around=False, progress=False
    )
    assert stays.status == "certified"
    assert stays.certificate.objective == pytest.approx(25, abs=1e-2)
    assert stays.certificate.looked_around is None


# ---------------------------------------------------------------------------------------------
# Functions outside of the class
# ---------------------------------------------------------------------------------------------


def entropy(x1, q, _):
    """Σ q·log q − q·k, with the usual care at zero, which hides the slope there."""
    safe = jnp.where(q > 0, q, 1.0)
    return jnp.sum(jnp.where(q > 0, q * jnp.log(safe), 0.0)) - q @ A([3.0, 1.0, 0.0])


def test_what_is_not_convex_is_named():
    cases = [
        (lambda x, y, _: -(y**2) + 0.1 * y, at(0.05, 0.05), WIDE),
        (lambda x, y, _: jnp.where(y == 0, 0.0, y), at(0.0), WIDE),
        (entropy, bx.Point(x1=A(1.0), y1=A([0.855, 0.145, 0.0])), Simplex()),
    ]
    for lower, point, term in cases:
        c = lower_only(lower, point, term, certify=True)
        assert c.epsilon == np.inf
        assert not c.certified(1e9)
        assert "lower is not convex in y1" in c.breach
        assert "withdrawn" in str(c)


def test_what_is_not_concave_and_what_is_not_affine_is_named():
    problem = bx.BilevelProblem(
        lambda x1, x2, y1, y2: x1**2 + x2**2, lambda x1, y1, y2: y1**2, x1=WIDE, x2=WIDE, y1=WIDE
    )
    zero = A(0.0)
    assert (
        "upper is not concave in x2"
        in bx.certify(problem, bx.Point(x1=zero, x2=zero, y1=zero, z1=zero), rho=1.0).breach
    )
    circle = bx.ConstrainedBilevelProblem(
        lambda x, y: (x[0] - 1) ** 2 + (y[0] - 1) ** 2,
        lambda x, y: y[0] * 1.0,
        x=WIDE,
        y=WIDE,
        equalities=lambda x, y: y**2 - 1,
    )
    start = bx.Point(x=A([0.0]), y=A([1.0]))
    solution = bx.solve(circle, start, tolerance=1e-3, max_gradients=5000, progress=False)
    assert solution.status == "withdrawn"
    assert not solution.certified
    assert "not convex" in str(solution.status) or "not affine" in str(solution.status)


# ---------------------------------------------------------------------------------------------
# Over-caution
# ---------------------------------------------------------------------------------------------


def test_large_features_are_not_taken_for_noise():
    rng = np.random.default_rng(0)
    X = 1e5 + rng.normal(size=(50, 3))
    t = X @ np.array([1e-5, 2e-5, -1e-5]) + 0.1 * rng.normal(size=50)
    lower = lambda x, y, _, d: jnp.mean((d[0] @ y - d[1]) ** 2) + jnp.sum(y**2)
    y = np.linalg.solve(2 * X.T @ X / 50 + 2 * np.eye(3), 2 * X.T @ t / 50)
    c = lower_only(lower, at(y, y), Box(-1.0, 1.0), (A(X), A(t)))
    assert max(c.allowances.values()) < 1e-5


def test_a_variable_that_runs_away_is_named():
    problem = bx.BilevelProblem(
        lambda x1, x2, y1, y2: -(x1[1] ** 2) + x1[0] ** 2,
        lambda x1, y1, y2: (y1 - jnp.tanh(x1[1])) ** 2,
        x1=Box(-np.inf, np.inf),
        y1=WIDE,
    )
    start = bx.Point(x1=A([0.1, 0.1]), y1=A(0.0))
    solution = bx.solve(problem, start, max_gradients=20_000, progress=False)
    assert solution.status == "unbounded"
    assert "x1[1] has run to" in str(solution.status)
