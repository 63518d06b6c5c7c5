"""Certificates against `def:epsilon_KKT` and `eq:pd_stationary_H`, computed again without bilevax.

The reference is in `independent.py`: hand-written gradients, subdifferentials and exact gaps in
NumPy and CVXPY. Here each reference problem is paired with the bilevax problem it describes.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import math
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bilevax as bx
import independent as ind
from bilevax import terms
from bilevax.certificates import judge
from bilevax.problems import library

TIGHT = 1e-6
TOLERANCES = (1e-1, 1e-2, 1e-3)
PERTURBATIONS = 77  # for each of the thirteen cases: 1,001 in all
PENALTY = 200.0

# ---------------------------------------------------------------------------------------------
# The same problem twice
# ---------------------------------------------------------------------------------------------


def bx_term(term: ind.Term | None) -> Any:
    """The bilevax term that a reference term describes."""
    match term:
        case None:
            return None
        case ind.Product():
            return {f"part{i}": bx_term(part) for i, (_, part) in enumerate(term.parts)}
        case ind.Interval():
            base = terms.Box(term.lower, term.upper)
            base = terms.L1(term.l1) + base if term.l1 else base
        case ind.Simplex():
            base = terms.CappedSimplex(term.cap) if term.cap < ind.INF else terms.Simplex()
        case ind.Ball():
            base = terms.L2Ball(term.radius, term.center)
        case _:
            raise TypeError(f"no bilevax term for {term}")
    return terms.Ridge(term.ridge) + base if term.ridge else base


def like(term: ind.Term | None, size: int) -> Any:
    """A block of the shape that goes with `bx_term`."""
    if isinstance(term, ind.Product):
        return {f"part{i}": np.zeros((k, 1)) for i, (k, _) in enumerate(term.parts)}
    return np.zeros(size)


def flat(*blocks: Any) -> jax.Array:
    return jnp.concatenate([jnp.ravel(leaf) for leaf in jax.tree.leaves(blocks)])


def smooth(data: dict[str, jax.Array], *blocks: Any) -> jax.Array:
    u = flat(*blocks)
    waves = data["amplitude"] * jnp.sum(jnp.sin(ind.WAVE * flat(blocks[0])))
    return 0.5 * u @ data["Q"] @ u + data["q"] @ u + waves


def upper(x1: Any, x2: Any, y1: Any, y2: Any, data: Any) -> jax.Array:
    return smooth(data["upper"], x1, x2, y1, y2)


def lower(x1: Any, y1: Any, y2: Any, data: Any) -> jax.Array:
    value = smooth(data["lower"], x1, y1, y2)
    if y2 is None:
        return value
    return value + jnp.einsum("kij,k,i,j->", data["coupling"], flat(x1), flat(y1), flat(y2))


def smooth_data(function: ind.Smooth, dtype: Any) -> dict[str, np.ndarray]:
    numbers = {"Q": function.Q, "q": function.q, "amplitude": function.amplitude}
    return {name: np.asarray(value, dtype) for name, value in numbers.items()}


@dataclasses.dataclass(frozen=True)
class Case:
    """A reference problem, the bilevax problem it describes, and an (almost) exact KKT point."""

    reference: ind.Reference
    problem: bx.BilevelProblem
    shapes: dict[str, Any]
    certified: ind.Point
    dtype: Any = np.float64

    def point(self, p: ind.Point, *, witnesses: bool = True) -> bx.Point:
        """Flat blocks as a bilevax point."""
        names = [n for n in self.reference.blocks if witnesses or n in ind.BLOCKS]
        blocks = {n: self.block(self.shapes[ind.OWNERS[n]], p[n]) for n in names}
        return bx.Point(**blocks, rho=jnp.asarray(p["rho"], self.dtype) if witnesses else None)

    def block(self, shape: Any, vector: np.ndarray) -> Any:
        leaves, structure = jax.tree.flatten(shape)
        parts = np.split(vector, np.cumsum([np.size(leaf) for leaf in leaves])[:-1])
        arrays = [jnp.asarray(v.reshape(np.shape(s)), self.dtype) for v, s in zip(parts, leaves)]
        return jax.tree.unflatten(structure, arrays)

    def certify(self, p: ind.Point, **options: Any) -> bx.KKTCertificate:
        certificate = bx.certify(self.problem, self.point(p, **options))
        assert isinstance(certificate, bx.KKTCertificate)
        return certificate

    def judge(self, p: ind.Point) -> bx.KKTCertificate:
        """The lines alone, which are one program: `certify` looks at the functions, too."""
        certificate = judge(self.problem, self.point(p))
        assert isinstance(certificate, bx.KKTCertificate)
        return certificate


@functools.cache
def family_case(name: str, seed: int, dtype: Any = np.float64) -> Case:
    drawn = ind.random_problem(ind.FAMILIES[name], seed)
    data: dict[str, Any] = {
        "upper": smooth_data(drawn.upper, dtype),
        "lower": smooth_data(drawn.lower, dtype),
        "coupling": None if drawn.coupling is None else np.asarray(drawn.coupling, dtype),
    }
    reference = drawn.reference
    blocks = {block: bx_term(term) for block, term in reference.terms.items()}
    problem = bx.BilevelProblem(upper, lower, data=data, **blocks)
    shapes = {n: like(reference.terms[n], size) for n, size in reference.sizes.items()}
    return Case(reference, problem, shapes, drawn.planted, dtype)


@functools.cache
def library_case(name: str) -> Case:
    instance, reference = library.get(name), ind.LIBRARY[name]()
    shapes = {n: jax.tree.map(np.asarray, getattr(instance.point, n)) for n in reference.sizes}
    solution = {n: np.concatenate([v.ravel() for v in jax.tree.leaves(shapes[n])]) for n in shapes}
    solution = dict.fromkeys(ind.OWNERS) | solution
    certified = ind.certified_point(reference, solution, PENALTY)
    return Case(reference, instance.problem, shapes, certified)


def case_of(name: str, seed: int = 0) -> Case:
    return family_case(name, seed) if name in ind.FAMILIES else library_case(name)


def seed_of(name: str) -> int:
    """A seed of its own for each case, the same in every run."""
    return sum(map(ord, name))


# Long: where others have the same blocks, or the same terms. The library has simplices and no x2.
LONG = ("simplex game", "without x2", "balls and norms")
LONG += ("many_saddles", "unique_saddle", "boundary")
FAMILY_NAMES, LIBRARY_NAMES = (
    [pytest.param(n, marks=pytest.mark.long) if n in LONG else n for n in names]
    for names in (ind.FAMILIES, ind.LIBRARY)
)
families = pytest.mark.parametrize("name", FAMILY_NAMES)
every_case = pytest.mark.parametrize("name", [*FAMILY_NAMES, *LIBRARY_NAMES])


def assert_lines(certificate: bx.Certificate, wanted: dict[str, float], within: float) -> None:
    got = certificate.lines()
    for line, value in wanted.items():
        assert got[line] == pytest.approx(value, abs=within), line


def test_the_reference_is_independent():
    """It imports neither bilevax nor JAX, so that nothing here compares the library with itself."""
    tree = ast.parse(pathlib.Path(ind.__file__).read_text())
    roots = {name.split(".")[0] for name in imported(tree, "")}
    assert not roots & {"bilevax", "jax", "jaxlib", "equinox", "optax"}
    assert {"numpy", "cvxpy"} <= roots


# ---------------------------------------------------------------------------------------------
# Points with witnesses
# ---------------------------------------------------------------------------------------------


@every_case
def test_closed_forms_agree_with_cvxpy(name):
    """The reference with itself: two ways to the same numbers, here and in all that follows."""
    rng = np.random.default_rng(1)
    for seed in range(2):
        problem = case_of(name, seed).reference
        p = problem.sample(rng)
        by_cvxpy, closed = ind.residuals_by_cvxpy(problem, p), ind.residuals(problem, p)
        assert closed == pytest.approx(by_cvxpy, abs=TIGHT / 2)
        assert ind.gap(problem, p) == pytest.approx(ind.gap_by_cvxpy(problem, p), abs=TIGHT / 2)


@families
def test_lines_agree_with_cvxpy(name):
    rng = np.random.default_rng(2)
    for seed in range(2):
        case = case_of(name, seed)
        p = case.reference.sample(rng)
        certificate = case.certify(p) if name == "box saddle" else case.judge(p)
        assert_lines(certificate, ind.residuals_by_cvxpy(case.reference, p), TIGHT)
        assert certificate.gap >= ind.gap_by_cvxpy(case.reference, p) - 1e-9


@every_case
def test_lines_agree_with_the_definition(name):
    """Also on faces, at corners and at kinks, for data and witnesses of all sorts."""
    rng = np.random.default_rng(seed_of(name))
    for trial in range(24):
        case = case_of(name, seed=trial % 3)
        p = case.reference.sample(rng)
        certificate = case.judge(p)
        assert_lines(certificate, ind.residuals(case.reference, p), TIGHT)
        assert certificate.rho == p["rho"]
        truth = ind.gap(case.reference, p)
        assert certificate.gap >= truth - 1e-9
        assert certificate.gap_below <= truth + 1e-9
        assert certificate.epsilon >= ind.epsilon(case.reference, p) - 1e-9


@every_case
def test_gap_is_exact_at_best_responses(name):
    rng = np.random.default_rng(seed_of(name))
    for trial in range(15):
        case = case_of(name, seed=trial % 3)
        p = case.reference.sample(rng)
        p |= ind.responses(case.reference, p)
        certificate = case.judge(p)
        truth = ind.gap(case.reference, p)
        assert certificate.gap == pytest.approx(truth, abs=TIGHT)
        assert certificate.gap_below == pytest.approx(truth, abs=TIGHT)
        assert certificate.epsilon == pytest.approx(ind.epsilon(case.reference, p), abs=TIGHT)


@every_case
def test_planted_points_are_certified(name):
    """What is KKT by construction is not refused."""
    for seed in range(4):
        case = case_of(name, seed)
        allowed = 1e-10 if name in ind.FAMILIES else 1e-4  # a penalty's point has a gap O(1/ρ²)
        assert case.judge(case.certified).epsilon <= allowed


def test_rho_given_beside_the_point_wins():
    case = case_of("box saddle")
    p = case.reference.sample(np.random.default_rng(3))
    certificate = bx.certify(case.problem, case.point(p | {"rho": 99.0}), rho=np.float64(0.7))
    assert certificate.rho == 0.7
    assert_lines(certificate, ind.residuals(case.reference, p | {"rho": 0.7}), TIGHT)


# ---------------------------------------------------------------------------------------------
# Points without witnesses
# ---------------------------------------------------------------------------------------------


def least_over_rho(problem: ind.Reference, p: ind.Point, around: float) -> float:
    """The least maximum of the lines that depend on ρ, over a fine grid."""
    grid = [*np.geomspace(1e-7, 1e7, 211), *np.geomspace(around / 1.01, around * 1.01, 41)]
    return min(max(ind.residuals(problem, p | {"rho": rho}).values()) for rho in grid)


def near(case: Case, name: str, size: float, rng: np.random.Generator) -> np.ndarray:
    """A block of the certified point, moved a little within the domain."""
    block = case.certified[name]
    return case.reference.term(name).project(block + size * rng.normal(size=block.size))


@pytest.mark.parametrize(
    "name", ["without y2", "trees", pytest.param("box saddle", marks=pytest.mark.long)]
)
def test_witnesses_are_found(name):
    """Best responses are unique at a generic point, so the reference knows which they must be."""
    rng = np.random.default_rng(seed_of(name) + 1)
    for trial in range(5):
        case = case_of(name, seed=trial)
        p = case.reference.sample(rng)
        if trial >= 2:  # near a KKT point, where the best ρ is not next to zero
            p = case.certified | {
                n: near(case, n, 0.02, rng) for n in ind.BLOCKS if p[n] is not None
            }
        certificate = case.certify(p, witnesses=False)
        by_cvxpy = ind.gap_by_cvxpy(case.reference, p)
        assert certificate.gap == pytest.approx(by_cvxpy, abs=TIGHT)
        best = p | ind.responses(case.reference, p)
        best["x2"] = ind.best_x2(case.reference, best)
        there = ind.residuals(case.reference, best | {"rho": certificate.rho})
        assert_lines(certificate, there, TIGHT * max(1, certificate.rho))
        claimed = max(value for line, value in certificate.lines().items() if line != "gap")
        assert claimed <= least_over_rho(case.reference, best, certificate.rho) + TIGHT


def test_witnesses_that_are_given_are_kept():
    """Without ρ alone, (x2, z1, z2) stay as they are and the best ρ for them is found."""
    case = case_of("without y2")
    p = case.reference.sample(np.random.default_rng(5))
    point = case.point(p).replace(rho=None)
    certificate = bx.certify(case.problem, point)
    p |= {"rho": certificate.rho}
    assert_lines(certificate, ind.residuals(case.reference, p), TIGHT)
    claimed = max(value for line, value in certificate.lines().items() if line != "gap")
    assert claimed <= least_over_rho(case.reference, p, certificate.rho) + TIGHT


# ---------------------------------------------------------------------------------------------
# No false certificate
# ---------------------------------------------------------------------------------------------


def perturbed(case: Case, p: ind.Point, rng: np.random.Generator) -> ind.Point:
    """Some blocks moved: freely, along the domain, or off a face by next to nothing."""
    size = 10 ** rng.uniform(-4, 0)
    kind = rng.choice(["free", "inside", "nudge"], p=[0.1, 0.6, 0.3])
    blocks = case.reference.blocks
    moved = dict(p)
    for name in rng.choice(blocks, rng.integers(1, len(blocks) + 1), replace=False):
        term, block = case.reference.term(name), p[name]
        step = size * rng.normal(size=block.size) / np.sqrt(block.size)
        if kind == "free":
            moved[name] = block + step
        elif kind == "inside":
            moved[name] = term.project(block + step)
        else:
            share = 10 ** rng.uniform(-10, -4)
            moved[name] = (1 - share) * block + share * term.middle(block.size)
    if kind != "nudge":
        moved["rho"] = p["rho"] * np.exp(size * rng.normal())
    return moved


@every_case
def test_no_false_certificate(name):
    """bilevax's ε is never below the true one for the same witnesses, wherever the point goes."""
    rng = np.random.default_rng(seed_of(name) + 2)
    claims, truths = [], []
    for trial in range(PERTURBATIONS):
        case = case_of(name, seed=trial % 8)
        p = perturbed(case, case.certified, rng)
        certificate, truth = case.judge(p), ind.epsilon(case.reference, p)
        for tolerance in TOLERANCES:
            assert not certificate.certified(tolerance) or truth <= tolerance + TIGHT
        assert certificate.epsilon >= truth - TIGHT
        assert math.isfinite(certificate.epsilon) or case.reference.outside(p)
        claims.append(certificate.epsilon)
        truths.append(truth)
    # The test has power: some of the claims are made, and most are not there to be made.
    assert np.mean(np.array(claims) <= 1e-1) >= 0.05
    assert np.mean(np.array(truths) > 1e-3) >= 0.5
    assert np.mean(np.array(claims) > 1e-3) >= 0.5


@every_case
def test_perturbed_solutions_are_refused(name):
    """Well away from a KKT point, in all blocks at once, nothing is KKT to 1e-3."""
    rng = np.random.default_rng(seed_of(name) + 3)
    for trial in range(4):
        case = case_of(name, seed=trial)
        p = dict(case.certified)
        for block in case.reference.blocks:
            term, there = case.reference.term(block), p[block]
            towards = 0.7 * there + 0.3 * term.middle(there.size)
            p[block] = term.project(towards + 0.1 * rng.choice([-1.0, 1.0], there.size))
        assert ind.epsilon(case.reference, p) > 1e-3
        assert not case.judge(p).certified(1e-3)


def stiff_upper(x1, x2, y1, y2, data):
    return jnp.sum(0.5 * (x1 - data["a"]) ** 2)


def stiff_lower(x1, y1, y2, data):
    coupling = jnp.sum(data["c"] * y1 + data["d"])
    return data["h"] * (0.5 * jnp.sum(y1**2) - jnp.sum(x1) * coupling)


Stiff = tuple[dict[str, Any], float, np.ndarray]


def stiff(rng: np.random.Generator, h: float, c: np.ndarray, far: Any, offset: float) -> Stiff:
    """Data, x1, and a y1 that is the lower level's answer c·x1 but for a few small shares."""
    a, x1 = rng.uniform(-1, 1), rng.choice([0.5, 1.0])
    data = {"h": h, "c": c, "a": a, "d": offset * np.array([1.0, -1.0, 0.0])}
    return data, x1, c * x1 * (1 + far * rng.normal(size=3))


def steep() -> Iterator[Stiff]:
    """Large gradients, and one entry of y1 whose change is seen only through rounding."""
    c = np.array([1.5424731241171843, 1.7859715923656316, 0.001435266231902968])
    y1 = np.array([0.7712365620585921, 0.8929857961828158, 0.000717633115951486])
    yield {"h": 100.0, "c": c, "a": 0.6048280781573736, "d": np.zeros(3)}, 0.5, y1
    rng = np.random.default_rng(0)
    for _ in range(60):
        c = rng.uniform(1, 2, 3) * [1, 1, 1e-3]
        yield stiff(rng, 1e4, c, np.array([0, 0, 1e-14]), 0.0)


def offset() -> Iterator[Stiff]:
    """Gradients of size 1, with large constants inside that cancel."""
    rng = np.random.default_rng(0)
    for _ in range(60):
        yield stiff(rng, 1.0, rng.uniform(1, 2, 3), 1e-9, 1e8)


@pytest.mark.parametrize("instances", [steep, offset])
def test_rounding_is_not_magnified_into_a_certificate(instances):
    """The search for ρ must not find the one with which rounding errors cancel a gradient.

    f = ½(x1 − a)² and f~ = h(½‖y1‖² − x1·Σ(c·y1 + d)) with Σ d = 0, at a point inside the boxes.
    Whatever the witness, x1 − a is
    [x1 − a + ρh·cᵀ(z1 − y1)] − cᵀ[ρh(z1 − c·x1)] + cᵀ[ρh(y1 − c·x1)],
    where each bracket is a line of the definition, so ε ≥ |x1 − a|/(1 + 2‖c‖).
    """
    box, false = terms.Box(-4.0, 4.0), []
    for data, x1, y1 in instances():
        problem = bx.BilevelProblem(stiff_upper, stiff_lower, x1=box, y1=box, data=data)
        certificate = bx.certify(problem, bx.Point(x1=jnp.full(1, x1), y1=jnp.asarray(y1)))
        bound = abs(x1 - data["a"]) / (1 + 2 * float(np.linalg.norm(data["c"])))
        if certificate.epsilon < bound - TIGHT:
            false.append(
                f"claimed {certificate.epsilon:.3g} with rho = {certificate.rho:.3g}, where no "
                f"witness has less than {bound:.3g}"
            )
    assert not false, "\n".join(false)


@pytest.mark.parametrize(
    ("dtype", "constant"),
    [(np.float64, 1e13), pytest.param(np.float32, 1e4, marks=pytest.mark.long)],
)
def test_cancellation_does_not_hide_the_gap(dtype, constant):
    """A constant added to f~ changes no gap; where it drowns the gap, the bound must not be small.

    f~ = constant + ½y1², so at y1 = 0.028 the gap is 3.92e-4.
    """
    zero, offset = jnp.zeros(1, dtype), jnp.asarray(constant, dtype)
    box = terms.Box(-1.0, 1.0)
    problem = bx.BilevelProblem(
        lambda x1, x2, y1, y2, data: jnp.sum(x1**2),
        lambda x1, y1, y2, data: data + 0.5 * jnp.sum(y1**2),
        x1=box,
        y1=box,
        data=offset,
    )
    point = bx.Point(x1=zero, y1=jnp.full(1, 0.028, dtype), z1=zero, rho=jnp.asarray(1e-6, dtype))
    assert bx.certify(problem, point).epsilon >= 3.9e-4


# ---------------------------------------------------------------------------------------------
# What must be refused
# ---------------------------------------------------------------------------------------------


def game(x1: float) -> dict[str, list[float]]:
    saddle = [1 / (1 + x1), x1 / (1 + x1)]
    return {"x1": [x1], "y1": saddle, "y2": saddle}


SADDLES_AT_THE_WRONG_X1 = {
    "unique_saddle": dict(zip(ind.BLOCKS, ([0.7, 0.5], [0.35, 0.25], [0.35, 0.25], [0.35, 0.25]))),
    "double_well": {"x1": [0.5], "y1": [0.5]},
    "matrix_game": game(0.4),
    "worst_group": {"x1": [0.1], "x2": [1.0, 0.0], "y1": [0.0], "y2": [0.45, 0.55]},
}

OPTIMAL_ABOVE_BUT_NO_SADDLE = {
    "many_saddles": {"x1": [0.2], "y1": [0.5, 0.3], "y2": [0.0]},
    "boundary": {"x1": [1.0], "y1": [0.0]},
    "matrix_game": {"x1": [0.2], "y1": [0.6, 0.4], "y2": [0.0, 1.0]},
}


def unless(names: Any, long: str) -> list[Any]:
    """Names, of which one is long: others here are like it, in programs that are needed anyway."""
    return [pytest.param(n, marks=pytest.mark.long) if n == long else n for n in names]


def blocks_of(given: dict[str, list[float]]) -> ind.Point:
    return dict.fromkeys(ind.OWNERS) | {name: np.array(v) for name, v in given.items()}


def judged(case: Case, p: ind.Point, search: bool) -> Iterator[bx.KKTCertificate]:
    """The certificates for exact best responses and many ρ, and for the witnesses found."""
    best = p | ind.responses(case.reference, p)
    best["x2"] = ind.best_x2(case.reference, best)
    yield from (case.judge(best | {"rho": rho}) for rho in (1e-6, 1e-2, 1.0, 10.0, 1e3, 1e6))
    if search:
        yield case.certify(p, witnesses=False)


@pytest.mark.parametrize("name", unless(SADDLES_AT_THE_WRONG_X1, "unique_saddle"))
def test_a_saddle_point_at_the_wrong_x1_is_refused(name):
    case, p = library_case(name), blocks_of(SADDLES_AT_THE_WRONG_X1[name])
    assert ind.gap(case.reference, p) == pytest.approx(0, abs=1e-12)
    for certificate in judged(case, p, search=name == "double_well"):
        assert certificate.gap <= 1e-9
        assert not certificate.certified(0.1)


@pytest.mark.parametrize("name", unless(OPTIMAL_ABOVE_BUT_NO_SADDLE, "many_saddles"))
def test_an_upper_optimum_that_is_no_saddle_point_is_refused(name):
    case, p = library_case(name), blocks_of(OPTIMAL_ABOVE_BUT_NO_SADDLE[name])
    above = case.reference.upper_gradient(p)
    for block, slope in above.items():  # nothing pulls above: ρ = 0 would leave no residual
        sign = -1 if block == "x2" else 1
        assert case.reference.term(block).distance(p[block], sign * slope) <= 1e-12
    truth = ind.gap_by_cvxpy(case.reference, p)
    assert truth > 2e-3
    for certificate in judged(case, p, search=name in ("many_saddles", "boundary")):
        assert certificate.gap == pytest.approx(truth, abs=TIGHT)
        assert certificate.epsilon >= truth - TIGHT


@pytest.mark.parametrize("far", [1e-9, 1e-3, 10.0])
@families
def test_outside_the_domain_epsilon_is_infinite(name, far):
    case = case_of(name)
    for block in case.reference.blocks:
        p = dict(case.certified)
        inner = case.reference.term(block).middle(p[block].size)
        edge = case.reference.term(block).project(inner + 100 * np.eye(inner.size)[0])
        p[block] = edge + far * np.eye(inner.size)[0]
        certificate = case.certify(p) if name == "box saddle" else case.judge(p)
        assert set(certificate.lines().values()) == {math.inf}
        assert certificate.epsilon == math.inf
        assert not certificate.certified(1e300)


def test_outside_the_domain_nothing_is_found_either():
    case = case_of("trees")
    for block in ind.BLOCKS[:1] + ind.BLOCKS[2:]:  # x2 is sought anew
        p = case.certified | {block: case.certified[block] + 5.0}
        assert case.certify(p, witnesses=False).epsilon == math.inf


@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("block", [*ind.OWNERS, "rho"])
def test_a_point_that_is_not_finite_is_refused_by_name(block, poison):
    case = case_of("box saddle")
    p = dict(case.certified)
    p[block] = np.where(np.arange(np.size(p[block])) == 0, poison, p[block])
    p["rho"] = np.squeeze(p["rho"])
    with pytest.raises(ValueError, match=block):
        case.certify(p)


@pytest.mark.parametrize("rho", [0.0, -1.0, math.nan, math.inf])
def test_a_penalty_that_is_not_positive_is_refused(rho):
    case = case_of("box saddle")
    with pytest.raises(ValueError, match="rho"):
        bx.certify(case.problem, case.point(case.certified), rho=rho)


def cusps(centers: dict[str, jax.Array], **blocks: jax.Array) -> jax.Array:
    """Σ ±|u − center|, convex but for y2: at a center its gradient is NaN and its value is not."""
    signs = {"y2": -1.0}
    return sum(
        signs.get(name, 1.0) * jnp.sum(jnp.sqrt((u - centers[name]) ** 2))
        for name, u in blocks.items()
    )


@functools.cache
def cusped() -> tuple[Callable[..., jax.Array], Callable[..., jax.Array]]:
    def upper(x1, x2, y1, y2, data):
        return cusps(data["upper"], x1=x1, y1=y1, y2=y2)

    def lower(x1, y1, y2, data):
        return cusps(data["lower"], x1=x1, y1=y1, y2=y2)

    return upper, lower


@pytest.mark.parametrize("witnesses", [True, False])
@pytest.mark.parametrize("bad", [0.0, math.nan])
@pytest.mark.parametrize("where", ["upper", "lower"])
@pytest.mark.parametrize("block", ["x1", "y1", "y2", None])
def test_a_function_that_is_not_a_number_certifies_nothing(block, where, bad, witnesses):
    """Its gradient alone, or its value too; with no bad block the certificate is finite."""
    far = {"x1": 2.0, "y1": 2.0, "y2": 2.0}
    data = {"upper": dict(far), "lower": dict(far)}
    if block is not None:
        data[where][block] = bad
    box, zero = terms.Box(-1.0, 1.0), jnp.zeros(2)
    problem = bx.BilevelProblem(*cusped(), x1=box, y1=box, y2=box, data=data)
    point = bx.Point(x1=zero, y1=zero, y2=zero)
    if witnesses:
        point = point.replace(z1=zero, z2=zero, rho=1.0)
    certificate = bx.certify(problem, point)
    assert not any(math.isnan(value) for value in certificate.lines().values())
    assert math.isfinite(certificate.epsilon) == (block is None)
    assert certificate.certified(1e300) == (block is None)


def refused(certify: Callable[[], bx.Certificate]) -> bool:
    """By an error, or by a certificate that certifies nothing."""
    try:
        return certify().epsilon == math.inf
    except ValueError:
        return True


@pytest.mark.parametrize("block", ["x1", "y1"])
@pytest.mark.parametrize("kind", [terms.L2Ball, terms.Ridge])
def test_nan_in_a_term_certifies_nothing(kind, block):
    case = case_of("box saddle")

    def certify() -> bx.Certificate:
        kept = {name: getattr(case.problem, name) for name in ind.BLOCKS}
        kept[block] = kind(10.0, center=math.nan)
        problem = bx.BilevelProblem(upper, lower, data=case.problem.data, **kept)
        return bx.certify(problem, case.point(case.certified))

    assert refused(certify)


def test_a_witness_of_another_shape_is_refused():
    """It would be broadcast: a minimum over fewer variables, hence a gap too small.

    f~ = ½‖y1 − t‖² − ½‖y2 − t‖² with t = (1, 0, −1) has gap 2 at y1 = y2 = 0, the best constant.
    """
    t, box, zero = jnp.asarray([1.0, 0.0, -1.0]), terms.Box(-1.0, 1.0), jnp.zeros(3)
    problem = bx.BilevelProblem(
        lambda x1, x2, y1, y2: jnp.sum(x1**2),
        lambda x1, y1, y2: 0.5 * jnp.sum((y1 - t) ** 2) - 0.5 * jnp.sum((y2 - t) ** 2),
        x1=box,
        y1=box,
        y2=box,
    )
    point = bx.Point(x1=jnp.zeros(1), y1=zero, y2=zero, z1=t, z2=t, rho=1e-9)
    assert bx.certify(problem, point).gap == pytest.approx(2.0)
    for witness in ("z1", "z2"):
        with pytest.raises(ValueError, match=witness):
            bx.certify(problem, point.replace(**{witness: jnp.zeros(1)}))


# ---------------------------------------------------------------------------------------------
# Minimax problems
# ---------------------------------------------------------------------------------------------

MINIMAX = {
    "boxes": ((2, ind.Interval(-1.0, 1.0)), (3, ind.Interval(-0.5, 1.0, l1=0.3))),
    "simplices": ((3, ind.Simplex(ridge=0.2)), (3, ind.Simplex(cap=0.5))),
    "ball and trees": ((2, ind.Ball(1.0, ridge=0.4)), (3, ind.FAMILIES["trees"].x1[1])),
}


@dataclasses.dataclass(frozen=True)
class MinimaxCase:
    """H = h + p − q for a quadratic h with waves in x, twice."""

    sides: dict[str, tuple[int, ind.Term]]
    function: ind.Smooth
    problem: bx.MinimaxProblem

    def distances(self, p: ind.Point) -> dict[str, float]:
        return {n: term.distance(p[n], g) for n, (term, g) in self._pulls(p).items()}

    def distances_by_cvxpy(self, p: ind.Point) -> dict[str, float]:
        least = {}
        for name, (term, g) in self._pulls(p).items():
            element, held = term.subdifferential(p[name])
            least[name] = ind.solve(ind.cp.norm(g + element), held)
        return least

    def _pulls(self, p: ind.Point) -> dict[str, tuple[ind.Term, np.ndarray]]:
        slope = self.function.gradient(p)
        return {"x": (self.sides["x"][1], slope["x"]), "y": (self.sides["y"][1], -slope["y"])}

    def certify(self, p: ind.Point) -> bx.Certificate:
        def block(name: str) -> Any:
            size, term = self.sides[name]
            return Case.block(self, like(term, size), p[name])  # type: ignore[arg-type]

        return bx.certify(self.problem, bx.Point(x=block("x"), y=block("y")))

    @property
    def dtype(self) -> Any:
        return np.float64

    def sample(self, rng: np.random.Generator) -> ind.Point:
        return {name: term.sample(size, rng) for name, (size, term) in self.sides.items()}


@functools.cache
def minimax_case(name: str) -> MinimaxCase:
    rng = np.random.default_rng(seed_of(name))
    sides = dict(zip("xy", MINIMAX[name]))
    sizes = {side: size for side, (size, _) in sides.items()}
    function = ind.random_smooth(sizes, rng, amplitude=0.3)
    function.curve("y", -ind.random_curvature("full", sizes["y"], rng))
    blocks = {side: bx_term(term) for side, (_, term) in sides.items()}
    objective = lambda x, y, data: smooth(data, x, y)
    data = smooth_data(function, np.float64)
    return MinimaxCase(sides, function, bx.MinimaxProblem(objective, **blocks, data=data))


minimax = pytest.mark.parametrize("name", list(MINIMAX))


@minimax
def test_stationarity_agrees_with_the_definition(name):
    case, rng = minimax_case(name), np.random.default_rng(11)
    for trial in range(40):
        p = case.sample(rng)
        certificate, wanted = case.certify(p), case.distances(p)
        assert isinstance(certificate, bx.StationarityCertificate)
        assert_lines(certificate, wanted, TIGHT)
        assert certificate.epsilon == pytest.approx(max(wanted.values()), abs=TIGHT)
        if trial < 2:
            assert_lines(certificate, case.distances_by_cvxpy(p), TIGHT)


@minimax
def test_stationarity_outside_the_domain_is_infinite(name):
    case, rng = minimax_case(name), np.random.default_rng(12)
    for side in "xy":
        p = case.sample(rng)
        p[side] = p[side] + 3.0
        assert case.certify(p).epsilon == math.inf


def cusped_minimax(x, y, data):
    return cusps(data, x=x) - cusps(data, y=y)


@pytest.mark.parametrize("bad", [0.0, math.nan])
@pytest.mark.parametrize("side", ["x", "y"])
def test_stationarity_that_is_not_a_number_certifies_nothing(side, bad):
    box, zero = terms.Box(-1.0, 1.0), jnp.zeros(2)
    data = {"x": 2.0, "y": 2.0} | {side: bad}
    problem = bx.MinimaxProblem(cusped_minimax, box, box, data=data)
    certificate = bx.certify(problem, bx.Point(x=zero, y=zero))
    assert certificate.lines()[side] == math.inf
    assert certificate.epsilon == math.inf
    assert not certificate.certified(1e300)


@pytest.mark.parametrize("side", ["x", "y"])
def test_a_minimax_point_that_is_not_finite_is_refused_by_name(side):
    case = minimax_case("boxes")
    p = case.sample(np.random.default_rng(13))
    p[side] = p[side] * math.nan
    with pytest.raises(ValueError, match=rf"\.{side}\b"):
        case.certify(p)


# ---------------------------------------------------------------------------------------------
# What a certificate says, and what it is made of
# ---------------------------------------------------------------------------------------------


def certificates() -> list[bx.Certificate]:
    rng = np.random.default_rng(21)
    first, second = case_of("box saddle"), minimax_case("boxes")
    outside = first.certified | {"x1": first.certified["x1"] + 9.0}
    return [
        first.certify(first.reference.sample(rng)),
        first.certify(outside),
        second.certify(second.sample(rng)),
    ]


def test_epsilon_is_the_largest_line():
    for certificate in certificates():
        lines, everything = certificate.lines(), certificate.as_dict()
        assert certificate.epsilon == max(lines.values())
        assert everything["epsilon"] == certificate.epsilon
        assert lines.items() <= everything.items()
        assert all(type(value) is float for value in everything.values())
        assert certificate.certified(certificate.epsilon)
        if math.isfinite(certificate.epsilon):
            below = math.nextafter(certificate.epsilon, 0)
            assert not certificate.certified(below)
    assert set(certificates()[0].lines()) == set(ind.LINES)


@pytest.mark.parametrize("line", ind.LINES)
@pytest.mark.parametrize("value", [3.0, math.inf, math.nan])
def test_every_line_counts(line, value):
    """No line can be large, infinite or NaN and ε small."""
    fields = {f.name: 0.0 for f in dataclasses.fields(bx.KKTCertificate) if not f.kw_only}
    certificate = bx.KKTCertificate(**fields | {line: value})
    assert certificate.epsilon == (math.inf if math.isnan(value) else value)
    assert not certificate.certified(1.0)
    assert bx.KKTCertificate(**fields).certified(0.0)


def test_the_table_has_every_line():
    for certificate in certificates():
        rows = {}
        for row in str(certificate).splitlines():
            words = row.split()
            if len(words) >= 2 and words[0] != "looked":
                rows[words[0]] = float(words[1])
        for name, value in certificate.as_dict().items():
            assert rows[name] == pytest.approx(value, rel=1e-3, abs=1e-300)
        assert rows["epsilon"] == max(rows[name] for name in certificate.lines())
        assert str(certificate).startswith(type(certificate).__name__)


PACKAGE = pathlib.Path(bx.__file__).parent


def imported(tree: ast.AST, package: str) -> Iterator[str]:
    """The dotted names that a module imports, at its top or inside its functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package.split(".")[: 1 - node.level or None]) if node.level else ""
            module = ".".join(filter(None, [base, node.module]))
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


def source(module: str) -> pathlib.Path | None:
    """The file of a module of bilevax, other than the package itself, which imports everything."""
    path = PACKAGE.joinpath(*module.split(".")[1:])
    if not module.startswith("bilevax.") or module == "bilevax":
        return None
    return next((p for p in (path.with_suffix(".py"), path / "__init__.py") if p.exists()), None)


def test_certificates_need_no_solver():
    """Nor does anything that they import: a point from anywhere can be judged."""
    own = [f"bilevax.certificates.{p.stem}" for p in (PACKAGE / "certificates").glob("*.py")]
    waiting, seen = ["bilevax.certificates", *own], set()
    while waiting:
        module = waiting.pop()
        path = source(module)
        if path is None or module in seen:
            continue
        seen.add(module)
        package = module if path.name == "__init__.py" else module.rpartition(".")[0]
        waiting += imported(ast.parse(path.read_text()), package)
    assert len(seen) > len(own)
    assert not [m for m in seen if m.split(".")[1] in ("solvers", "solve", "solution")]


# ---------------------------------------------------------------------------------------------
# Single precision
# ---------------------------------------------------------------------------------------------


def test_float32_agrees():
    rng = np.random.default_rng(4)
    case = family_case("without x2", 0, np.float32)
    for trial in range(8):
        p = case.reference.sample(rng) if trial else dict(case.certified)
        p["rho"] = min(p["rho"], 3.0)
        certificate, wanted = case.judge(p), ind.residuals(case.reference, p)
        for line, value in wanted.items():
            assert certificate.lines()[line] == pytest.approx(value, abs=1e-3, rel=1e-5), line
        p |= ind.responses(case.reference, p)
        assert case.judge(p).gap == pytest.approx(ind.gap(case.reference, p), abs=1e-3)


@pytest.mark.long  # test_constrained.py solves in float32
def test_float32_finds_witnesses():
    case = family_case("without x2", 0, np.float32)
    p = case.reference.sample(np.random.default_rng(31))
    certificate = case.certify(p, witnesses=False)
    assert certificate.gap == pytest.approx(ind.gap(case.reference, p), abs=1e-3)


# ---------------------------------------------------------------------------------------------
# Rounding in single precision must not certify
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "large", "outside"),
    [(np.float32, 1e6, 5.0), pytest.param(np.float64, 1e12, 1.01, marks=pytest.mark.long)],
)
def test_a_large_entry_does_not_excuse_a_small_one_outside(dtype, large, outside):
    x1 = terms.Box(np.zeros(2), np.array([large, 1.0]))
    problem = bx.BilevelProblem(
        lambda x1, x2, y1, y2: -100 * x1[1] + 0.5 * jnp.sum(y1**2),
        lambda x1, y1, y2: 0.5 * jnp.sum(y1**2),
        x1=x1,
        y1=terms.Box(-1.0, 1.0),
    )
    point = bx.Point(x1=jnp.asarray([large, outside], dtype), y1=jnp.zeros(1, dtype))
    assert bx.certify(problem, point).epsilon == np.inf


def test_the_gap_allows_for_the_rounding_of_its_gradient():
    """f~ = y1·(dᵀx1) with dᵀx1 ≈ 0 by cancellation, over a wide box: the gap is 1000·|dᵀx1|."""
    rng = np.random.default_rng(0)
    box = terms.Box(-1e3, 1e3)
    for _ in range(40):
        d, x1 = rng.normal(size=30) * 1e3, rng.normal(size=30)
        x1 -= d * (d @ x1) / (d @ d)
        d32, x32 = d.astype(np.float32), x1.astype(np.float32)
        true = 1e3 * abs(float(d32.astype(np.float64) @ x32.astype(np.float64)))
        problem = bx.BilevelProblem(
            rounding_upper, rounding_lower, x1=box, y1=box, data=jnp.asarray(d32)
        )
        zero = jnp.zeros(1, np.float32)
        point = bx.Point(x1=jnp.asarray(x32), y1=zero, z1=zero, rho=np.float32(1e-7))
        assert bx.certify(problem, point).gap >= true


def rounding_upper(x1, x2, y1, y2, d):
    return jnp.sum(y1**2)


def rounding_lower(x1, y1, y2, d):
    return jnp.sum(y1) * jnp.sum(d * x1)


def test_a_ball_too_far_off_for_its_radius_is_refused():
    ball = terms.L2Ball(1.0, 1e4)
    with pytest.raises(ValueError, match="center"):
        ball.check_block(jnp.full(2, 1e4, np.float32), "y1")
    ball.check_block(jnp.full(2, 1e4), "y1")  # double precision can tell


@pytest.mark.parametrize(
    "constants",
    [{"f_low": -5.0}, pytest.param({"upper_smoothness": 2.0}, marks=pytest.mark.long)],
)
def test_given_constants_beside_data_do_not_matter(constants):
    """The allowance for rounding states the problem anew, with data moved, inside a program."""
    box, data = terms.Box(-1.0, 1.0), jnp.ones(1)
    plain = bx.BilevelProblem(rounding_upper, rounding_lower, x1=box, y1=box, data=data)
    given = bx.BilevelProblem(
        rounding_upper, rounding_lower, x1=box, y1=box, data=data, **constants
    )
    point = bx.Point(x1=jnp.zeros(1), y1=jnp.full(1, 0.5), z1=jnp.zeros(1), rho=1.0)
    assert bx.certify(given, point).as_dict() == bx.certify(plain, point).as_dict()
