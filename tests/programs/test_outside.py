"""A problem form, a solver and a term from outside: bilevax takes them as its own.

The form is min over w of f(w) + φ(w) with f smooth and convex; its certificate is a duality gap and
the distance of zero to the subdifferential; its solver proximal gradient with backtracking; the
term an elastic net. Nothing here is known to the package.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jaxtyping import Array

import bilevax as bx
from bilevax import terms, trees
from bilevax.certificates import Certificate, Definition, line
from bilevax.functions import as_function
from bilevax.problems import Call, Form, Reformulation, register
from bilevax.problems.point import as_arrays
from bilevax.problems.validation import StartWarning
from bilevax.solvers import Solver
from bilevax.terms import LeafTerm, Term, as_term


class ElasticNet(LeafTerm):
    """φ(w) = one·‖w‖₁ + ½·two·‖w‖²."""

    one: Any
    two: Any

    def leaf_value(self, x):
        return self.one * jnp.sum(jnp.abs(x)) + 0.5 * self.two * jnp.sum(x**2)

    def leaf_prox(self, v, step):
        return jnp.sign(v) * jnp.maximum(jnp.abs(v) - step * self.one, 0) / (1 + step * self.two)

    def leaf_project(self, v):
        return v

    def leaf_diameter(self, like):
        return jnp.asarray(jnp.inf, like.dtype)

    def leaf_linear_oracle(self, g):
        return jnp.where(g == 0, 0, jnp.sign(g) * jnp.inf)

    def leaf_conjugate(self, g):
        return jnp.sum(jnp.maximum(jnp.abs(g) - self.one, 0) ** 2) / (2 * self.two)

    def leaf_residual(self, x, g):
        away = g + self.two * x + self.one * jnp.sign(x)
        return jnp.where(x == 0, jnp.sign(g) * jnp.maximum(jnp.abs(g) - self.one, 0), away)

    def leaf_supremum(self, like):
        return jnp.asarray(jnp.inf, like.dtype)

    def leaf_check(self, x):
        return "needs at least one entry" if x.size == 0 else None


class ConvexProblem(Form):
    """min over w of loss(w) + φ(w)."""

    blocks: ClassVar[tuple[str, ...]] = ("w",)
    function_names: ClassVar[tuple[str, ...]] = ("loss",)

    loss: Callable[..., Array]
    w: Term
    data: Any = None

    def __init__(self, loss, w, *, data=None):
        self.loss, self.w = as_function(loss, "loss"), as_term(w, "w")
        self.data = as_arrays(data) if not isinstance(data, bx.data.Source) else data

    def calls(self, point):
        return [Call("loss", self.loss, {"w": point.w})]

    def check(self, start, *, samples=32, seed=0):
        raise NotImplementedError

    def smooth(self, w):
        return self.loss(w, *self.extra)


@dataclasses.dataclass(frozen=True)
class ConvexCertificate(Certificate):
    gap: float = line("loss + φ there, less a bound below which no w can bring it")
    slope: float = line("dist(0, ∂(loss + φ))")

    def lines(self):
        return {"gap": self.gap, "slope": self.slope}

    def notes(self):
        return {"objective": self.objective}


class DualityGap(Definition):
    """f(s) ≥ f(w) + ⟨g, s − w⟩, so f + φ ≥ f(w) − ⟨g, w⟩ − φ*(−g) everywhere."""

    @property
    def certificate(self):
        return ConvexCertificate

    def residuals(self, problem, point):
        value, g = jax.value_and_grad(problem.smooth)(point.w)
        here, minus = problem.w.value(point.w), trees.scale(-1, g)
        gap = here + problem.w.conjugate(minus) + trees.dot(g, point.w)
        slope = trees.norm(problem.w.residual(point.w, g))
        finite = lambda v: jnp.where(jnp.isfinite(v) & jnp.isfinite(here + value), v, jnp.inf)
        return {"gap": finite(gap), "slope": finite(slope), "objective": value + here}

    def sizes(self, problem, point):
        value, g = jax.value_and_grad(problem.smooth)(point.w)
        return {"gap": jnp.abs(value + problem.w.value(point.w)), "slope": trees.norm(g)}


class Descent(eqx.Module):
    w: Any
    step_size: Array
    moved: Array
    gradients: Array


class ProximalGradient(Solver[Descent]):
    """w ← prox(w − t∇f(w)), t halved until f lies below its upper model; one gradient a step."""

    form: ClassVar[type[Form]] = ConvexProblem
    has_theorem: ClassVar[bool] = True

    first_step: Any = 64.0
    tolerance: Any = 0.0

    @property
    def gradients_per_step(self):
        return 1

    def prepare(self, problem, start, tolerance):
        dtype = trees.dtype_of(start)
        return ProximalGradient(np.asarray(self.first_step, dtype), np.asarray(tolerance, dtype))

    def init(self, problem, start):
        far = jnp.full((), jnp.finfo(trees.dtype_of(start)).max)
        return Descent(start.w, jnp.asarray(self.first_step), far, jnp.zeros((), int))

    def step(self, problem, state, limit):
        value, g = jax.value_and_grad(problem.smooth)(state.w)
        to = lambda t: problem.w.prox(trees.axpy(-t, g, state.w), t)

        def too_long(t):
            way = trees.subtract(to(t), state.w)
            model = value + trees.dot(g, way) + trees.dot(way, way) / (2 * t)
            rounding = 1e-12 * (1 + jnp.abs(value))
            return problem.smooth(to(t)) > model + rounding

        t = lax.while_loop(too_long, lambda t: t / 2, state.step_size)
        w = to(t)
        moved = trees.norm(trees.subtract(w, state.w)) / t
        return Descent(w, t, moved, state.gradients + 1)

    def done(self, problem, state):
        return state.moved <= 1e-3 * self.tolerance

    def output(self, problem, state):
        return bx.Point(w=state.w)


class AsMinimax(Reformulation):
    """With an idle maximiser it is a minimax problem, for solvers of those."""

    form: ClassVar[type[bx.MinimaxProblem]] = bx.MinimaxProblem

    @classmethod
    def of(cls, stated, start):
        return cls()

    def problem(self, stated):
        return bx.MinimaxProblem(Idle(stated), stated.w, terms.Box(-1.0, 1.0))

    def point(self, point):
        return bx.Point(x=point.w, y=jnp.zeros(1))

    def stated_point(self, point):
        return bx.Point(w=point.x)


class Idle(eqx.Module):
    stated: ConvexProblem

    def __call__(self, w, y):
        return self.stated.smooth(w) - 0.5 * jnp.sum(y**2)


register(
    ConvexProblem,
    definition=DualityGap(),
    solver=lambda problem: ProximalGradient(),
    reformulation=AsMinimax,
)


def loss(w, data):
    return 0.5 * jnp.sum(data["d"] * (w - data["a"]) ** 2)


D, A = np.asarray([1.0, 30.0, 4.0, 2.0, 9.0]), np.asarray([2.0, -1.0, 0.1, -3.0, 0.5])
ONE, TWO = 0.5, 0.3
START = bx.Point(w=jnp.zeros(5))


def problem(d=D, a=A, one=ONE, two=TWO, **changes):
    term = changes.pop("term", ElasticNet(np.asarray(one), np.asarray(two)))
    return ConvexProblem(changes.pop("loss", loss), term, data={"d": d, "a": a})


def answer(d=D, a=A, one=ONE, two=TWO):
    return np.sign(d * a) * np.maximum(np.abs(d * a) - one, 0) / (d + two)


def objective(w, d=D, a=A, one=ONE, two=TWO):
    smooth = 0.5 * np.sum(d * (w - a) ** 2)
    return smooth + one * np.sum(np.abs(w)) + 0.5 * two * np.sum(w**2)


def run(tolerance=1e-7, **options):
    return bx.solve(problem(), START, tolerance=tolerance, **({"progress": False} | options))


def test_the_default_solver_finds_the_closed_form():
    solution = run()
    assert solution.status == "certified", solution.status
    assert isinstance(solution.solver, ProximalGradient)
    np.testing.assert_allclose(solution.point.w, answer(), atol=1e-6)
    assert solution.certificate.objective == pytest.approx(objective(answer()), abs=1e-6)
    assert solution.history["gradients"][-1] == solution.gradients
    assert {"gap", "slope", "objective", "epsilon"} <= set(solution.history.names)
    assert "dist(0, ∂(loss + φ))" in str(solution)
    other = bx.solve(problem(d=D[::-1], one=0.1), START, tolerance=1e-7)
    np.testing.assert_allclose(other.point.w, answer(d=D[::-1], one=0.1), atol=1e-6)


def test_certificates_are_bounds_at_any_point():
    best = objective(answer())
    for seed in range(20):
        rng = np.random.default_rng(seed)
        w = answer() + rng.normal(size=5) * 10.0 ** rng.uniform(-6, 0.5)
        certificate = bx.certify(problem(), bx.Point(w=jnp.asarray(w)))
        assert certificate.gap >= objective(w) - best - 1e-12
        assert certificate.objective == pytest.approx(objective(w))
        assert certificate.epsilon == max(certificate.gap, certificate.slope)
        assert certificate.sizes["gap"] == pytest.approx(objective(w))
        assert not certificate.certified(0.999 * certificate.epsilon)
    at_best = bx.certify(problem(), bx.Point(w=jnp.asarray(answer())))
    assert at_best.epsilon < 1e-12


@pytest.mark.parametrize("cuts", [(1,), (70,), (3, 64, 65, 200)])
def test_cut_saved_and_resumed_it_is_the_same_run(cuts, tmp_path):
    slow = ProximalGradient(first_step=0.01)
    whole, path = run(solver=slow), tmp_path / "run.state"
    for cut in cuts:
        part = run(
            solver=slow, max_gradients=cut, checkpoint=path, resume=path if path.exists() else None
        )
        assert part.status == "budget spent"
        assert part.gradients == cut
    rest = run(solver=slow, resume=path)
    assert rest.gradients == whole.gradients > 300
    assert rest.point.w.tobytes() == whole.point.w.tobytes()
    assert rest.certificate == whole.certificate
    added = set(rest.history["gradients"]) - set(whole.history["gradients"])
    assert set(whole.history["gradients"]) <= set(rest.history["gradients"])
    assert added <= set(cuts)
    with pytest.raises(ValueError, match="another run"):
        bx.solve(problem(one=0.4), START, tolerance=1e-7, solver=slow, resume=path)


def test_callback_progress_and_budget(capfd):
    seen = []

    def look(solution):
        seen.append(solution.certificate.gap)
        return len(seen) == 3

    slow = ProximalGradient(first_step=0.01)
    stopped = run(solver=slow, callback=look, progress=True)
    assert stopped.status == "interrupted"
    assert len(seen) == 3
    assert sorted(seen, reverse=True) == seen
    shown = capfd.readouterr().err
    assert "gradients" in shown
    assert "ε = " in shown
    spent = run(solver=slow, max_gradients=100)
    assert spent.status == "budget spent"
    assert "max_gradients=100" in str(spent.status)
    with pytest.raises(bx.SolveError, match="max_gradients=7"):
        run(solver=slow, max_gradients=7, throw=True)


def test_a_relative_tolerance_is_a_share_of_the_sizes():
    loose = run(tolerance=0.0, relative_tolerance=1e-3)
    assert loose.status == "certified", loose.status
    assert "0.001·size on every line" in str(loose.status)
    lines, sizes = loose.certificate.lines(), loose.certificate.sizes
    assert all(lines[name] <= 1e-3 * sizes[name] for name in lines)
    assert loose.gradients <= run().gradients


def test_a_method_that_stops_by_itself_says_so():
    """At a kink of |w| its own steps are zero, while the gap's line is asked to be smaller."""
    lazy = eqx.tree_at(lambda s: s.first_step, ProximalGradient(), np.asarray(1e-12))
    solution = run(solver=lazy, max_gradients=200)
    assert solution.status == "budget spent"
    frozen = bx.solve(problem(), START, tolerance=1e-7, solver=Stopped())
    assert frozen.status == "stalled"
    assert "The stopping test of Stopped holds" in str(frozen.status)
    assert "The largest line is gap; try" in str(frozen.status)
    assert "lower-level" not in str(frozen.status)  # which this form does not have


class Stopped(ProximalGradient):
    def prepare(self, problem, start, tolerance):
        return self

    def done(self, problem, state):
        return state.gradients >= 3


def test_a_solver_of_another_form_takes_it_through_its_reformulation():
    solution = run(tolerance=1e-5, solver=bx.ExtraGradient())
    assert solution.status == "certified", solution.status
    assert isinstance(solution.certificate, ConvexCertificate)
    np.testing.assert_allclose(solution.point.w, answer(), atol=1e-4)


def test_terms_of_both_sides_meet():
    boxed = problem(term=terms.Box(-0.25, 0.25))
    solution = bx.solve(boxed, START, tolerance=1e-7)
    np.testing.assert_allclose(solution.point.w, np.clip(A, -0.25, 0.25), atol=1e-6)
    with pytest.warns(StartWarning, match=r"start.w lies outside the domain of Box"):
        bx.solve(boxed, bx.Point(w=jnp.ones(5)), max_gradients=0)
    # The term from outside in a form of the package: the lower level pulls y1 to `answer`.
    net = ElasticNet(np.asarray(ONE), np.asarray(TWO))
    bilevel = bx.BilevelProblem(
        lambda x1, x2, y1, y2, data: jnp.sum((x1 - y1) ** 2),
        lambda x1, y1, y2, data: loss(y1, data),
        x1=terms.Box(-5.0, 5.0),
        y1=net,
        data={"d": D, "a": A},
    )
    point = bx.Point(x1=jnp.asarray(answer()), y1=jnp.asarray(answer()))
    assert bx.certify(bilevel, point).epsilon < 1e-6
    assert bx.certify(bilevel, point.replace(y1=jnp.zeros(5))).gap > 1


WRONG_STARTS = [
    (bx.Point(x=jnp.zeros(5)), ValueError, r"start lacks w: the problem has a term for it"),
    (bx.Point(w=jnp.zeros(5), y=jnp.zeros(1)), ValueError,
     r"start has y, but a ConvexProblem has only \('w',\)"),
    (jnp.zeros(5), TypeError, r"start must be a bilevax.Point\(w=…\), not a"),
    (bx.Point(w=jnp.zeros(3)), (TypeError, ValueError), r"incompatible shapes|rank|shape"),
    (bx.Point(w=jnp.zeros(0)), ValueError, r"start.w: ElasticNet\(.*needs at least one entry"),
    (bx.Point(w=jnp.full(5, jnp.nan)), ValueError, r"start.w holds NaN or infinity"),
    (bx.Point(w=jnp.zeros(5, int)), TypeError, r"start.w must be floating"),
    (bx.Point(w=[1.0, 2.0]), TypeError, r"start.w is a list of numbers"),
]  # fmt: skip


@pytest.mark.parametrize(("start", "error", "words"), WRONG_STARTS)
def test_wrong_starts_are_named(start, error, words):
    with pytest.raises(error, match=words):
        bx.solve(problem(), start)
    with pytest.raises(error, match=words.replace("start", "point")):
        bx.certify(problem(), start)


@pytest.mark.parametrize(
    ("function", "error", "words"),
    [
        (lambda w, data: w, TypeError, r"loss must return one number, not shape \(5,\)"),
        (lambda w: jnp.sum(w), TypeError, r"loss is called as loss\(w, data\)"),
        (lambda w, data: jnp.log(jnp.sum(w) - 1), ValueError, r"loss is nan at the start"),
        (lambda w, data: jnp.sum(jnp.sqrt(w)), ValueError,
         r"the gradient of loss with respect to w is not finite at the start"),
        (5.0, TypeError, r"loss must be a function of the variables"),
    ],
)  # fmt: skip
def test_wrong_functions_are_named(function, error, words):
    with pytest.raises(error, match=words):
        bx.solve(problem(loss=function), START)


def test_numbers_that_stop_being_finite_are_located():
    broken = problem(loss=lambda w, data: loss(w, data) * jnp.where(w[0] > 0.5, jnp.nan, 1.0))
    solution = bx.solve(broken, START, tolerance=1e-7, solver=ProximalGradient(first_step=0.01))
    assert solution.status == "not finite"
    assert "loss is nan after" in str(solution.status)
    assert float(solution.point.w[0]) <= 0.5


def test_what_is_not_registered_is_asked_for():
    class Bare(Form):
        blocks: ClassVar[tuple[str, ...]] = ("w",)
        w: Term = terms.Free()
        data: Any = None

        def calls(self, point):
            return []

        def check(self, start, *, samples=32, seed=0):
            return None

    bare = Bare()
    with pytest.raises(TypeError, match=r"no default solver for a Bare; name one with solver="):
        bx.solve(bare, START)
    with pytest.raises(TypeError, match=r"no certificate is known for a Bare; bilevax.problems"):
        bx.certify(bare, START)
    with pytest.raises(TypeError, match="Adaptive solves a BilevelProblem, not a ConvexProblem"):
        bx.solve(problem(), START, solver=bx.Adaptive())
    saddle = bx.MinimaxProblem(lambda x, y: jnp.sum(x * y), terms.Box(-1.0, 1.0), terms.Free())
    with pytest.raises(TypeError, match="ProximalGradient solves a ConvexProblem, not a Minimax"):
        bx.solve(saddle, bx.Point(x=jnp.zeros(1), y=jnp.zeros(1)), solver=ProximalGradient())
    with pytest.raises(TypeError, match="register: colour must be one of definition"):
        register(Bare, colour="red")


def test_a_kind_of_the_form_inherits_what_is_registered():
    class Special(ConvexProblem):
        pass

    special = Special(loss, ElasticNet(np.asarray(ONE), np.asarray(TWO)), data={"d": D, "a": A})
    np.testing.assert_allclose(
        bx.solve(special, START, tolerance=1e-7).point.w, answer(), atol=1e-6
    )


def test_minibatches_are_refused_by_a_solver_that_does_not_take_them():
    source = bx.data.Arrays({"d": np.tile(D, (8, 1)), "a": np.tile(A, (8, 1))}, batch=2)
    mean = lambda w, data: 0.5 * jnp.mean(jnp.sum(data["d"] * (w[None] - data["a"]) ** 2, -1))
    sampled = ConvexProblem(mean, ElasticNet(np.asarray(ONE), np.asarray(TWO)), data=source)
    with pytest.raises(TypeError, match="ProximalGradient takes all data at once"):
        bx.solve(sampled, START)
    assert bx.certify(sampled, bx.Point(w=jnp.asarray(answer()))).epsilon < 1e-12


def test_float32():
    solution = bx.solve(
        ConvexProblem(
            lambda w: 0.5 * jnp.sum((w - 2) ** 2), ElasticNet(np.float32(ONE), np.float32(TWO))
        ),
        bx.Point(w=jnp.zeros(2, jnp.float32)),
        tolerance=1e-3,
    )
    assert solution.status == "certified", solution.status
    assert solution.point.w.dtype == jnp.float32
    np.testing.assert_allclose(solution.point.w, 1.5 / 1.3, atol=1e-3)
