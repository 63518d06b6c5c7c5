"""Bilevel linear problems in boxes (`eq:clo`): instances, files, and exact answers by HiGHS.

    min cᵀx + dᵀy over x in [−1, 1]ⁿ and y that minimises d̃ᵀz over z in [−1, 1]ᵐ, Ax + Bz ≤ b

Everything here is NumPy in float64 and imports no solver of this library, to judge them all alike.
SciPy's optimisers, which take half a second to import, are imported where they are first used.
"""

from __future__ import annotations

import dataclasses
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from bilevax import arguments

# What HiGHS may err by after every cost and row is scaled to size one; it accepts nothing less.
TOLERANCE = 1e-10
TOLERANCES = ("primal_feasibility_tolerance", "dual_feasibility_tolerance")
# Multipliers of the scaled problems count as zero below this: well above rounding, well below one.
ZERO = 1e-9
UNREADABLE = (ValueError, OSError, EOFError, zipfile.BadZipFile, zlib.error)


@dataclasses.dataclass(frozen=True, eq=False)
class LinearData:
    """The arrays of one problem, float64: c (n), d (m), A (l, n), B (l, m), b (l), d_tilde (m)."""

    c: np.ndarray
    d: np.ndarray
    A: np.ndarray
    B: np.ndarray
    b: np.ndarray
    d_tilde: np.ndarray

    def __post_init__(self) -> None:
        for name in NAMES:
            array = np.asarray(getattr(self, name))
            if array.dtype.kind not in "fiu":
                raise TypeError(f"{name} must hold real numbers, not {array.dtype}")
            object.__setattr__(self, name, array.astype(np.float64, copy=False))
        arrays = vars(self)
        for name in ("c", "d", "b"):
            shape = arrays[name].shape
            if len(shape) != 1 or shape == (0,):
                raise ValueError(f"{name} must be a vector, not an array of shape {shape}")
        rows, n, m = self.b.size, self.c.size, self.d.size
        for name, shape in (("A", (rows, n)), ("B", (rows, m)), ("d_tilde", (m,))):
            if (found := arrays[name].shape) != shape:
                raise ValueError(f"{name} must have shape {shape} to fit c, d and b, not {found}")
        for name, array in arrays.items():
            if not np.all(np.isfinite(array)):
                raise ValueError(f"{name} must be finite, but holds NaN or infinity")


NAMES = tuple(field.name for field in dataclasses.fields(LinearData))


def generate(n: int, m: int, l: int, seed: int) -> LinearData:  # noqa: E741
    """A random instance as in Appendix `sec:clo_instances`.

    Entries of A, B have standard deviation 0.01 and those of ŷ, clipped to its box, 0.1. With
    λ = |N(0, 1)|, b = Bŷ and d̃ = −Bᵀλ, ŷ is optimal for the lower level at x = 0.
    """
    for name, size in (("n", n), ("m", m), ("l", l)):
        arguments.whole(size, name, 1)
    n, m, rows = int(n), int(m), int(l)
    arguments.whole(seed, "seed", 0)
    rng = np.random.default_rng(int(seed))
    c, d = rng.normal(size=n), rng.normal(size=m)
    A, B = rng.normal(scale=0.01, size=(rows, n)), rng.normal(scale=0.01, size=(rows, m))
    y_hat = np.clip(rng.normal(scale=0.1, size=m), -1, 1)
    multipliers = np.abs(rng.normal(size=rows))
    return LinearData(c, d, A, B, b=B @ y_hat, d_tilde=-B.T @ multipliers)


def save(path: str | Path, data: LinearData) -> None:
    """Write the six arrays to an .npz file, which `load` reads."""
    if Path(path).suffix != ".npz":
        raise ValueError(f"{path}: the name of a problem file must end in .npz")
    with open(path, "wb") as file:
        np.savez(file, **vars(data))


def load(path: str | Path) -> LinearData:
    """Read a problem from an .npz file of the arrays c, d, A, B, b, d_tilde and no other."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    with path.open("rb") as file:
        try:
            archive = np.load(file, allow_pickle=False)
        except UNREADABLE as error:
            raise ValueError(f"{path}: not an .npz archive of arrays ({error})") from error
        if not isinstance(archive, np.lib.npyio.NpzFile):
            raise ValueError(f"{path}: not an .npz archive, but one array")
        wrong = [f"{name} is missing" for name in NAMES if name not in archive.files]
        wrong += [f"{name} is unknown" for name in archive.files if name not in NAMES]
        if wrong:
            raise ValueError(f"{path}: {', '.join(wrong)}; a problem has {', '.join(NAMES)}")
        arrays = {}
        for name in NAMES:
            try:
                arrays[name] = archive[name]
            except UNREADABLE as error:
                raise ValueError(f"{path}: {name} cannot be read ({error})") from error
    try:
        return LinearData(**arrays)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error


def load_directory(path: str | Path) -> list[LinearData]:
    """All problems of a folder, in the order of their file names."""
    if not Path(path).is_dir():
        raise NotADirectoryError(f"{path}: no such folder")
    files = sorted(Path(path).glob("*.npz"))
    if not files:
        raise FileNotFoundError(f"{path}: no .npz file in this folder")
    return [load(file) for file in files]


def violation(data: LinearData, x: Any, y: Any) -> float:
    """‖[Ax + By − b]₊‖₂."""
    x, y = _vector(x, "x", data.c.size), _vector(y, "y", data.d.size)
    return float(np.linalg.norm(np.maximum(data.A @ x + data.B @ y - data.b, 0)))


def lower_gap(data: LinearData, x: Any, y: Any) -> float:
    """d̃ᵀy less the least d̃ᵀz at x; negative where y pays with `violation`.

    inf where no z is feasible at x: no y answers such an x, so no tolerance may accept it.
    """
    x, y = _vector(x, "x", data.c.size), _vector(y, "y", data.d.size)
    lower = _lower(data, x)
    return np.inf if lower is None else float(data.d_tilde @ (y - lower.point))


@dataclasses.dataclass(frozen=True, eq=False)
class Repaired:
    """What x is worth: the best upper objective over the lower level's answers y to it."""

    objective: float
    y: np.ndarray
    lower_value: float


def repair(data: LinearData, x: Any) -> Repaired:
    """Clip x to its box, solve the lower level exactly, and take its best answer for the upper one.

    The answers are the feasible z that complement one optimal set of multipliers: rows with a
    positive multiplier hold with equality, and entries with a reduced cost stay at their bound. To
    ask for d̃ᵀz ≤ value + ε instead would magnify ε where d is steeper than d̃.

    Where the lower level has no feasible point, the objective and the lower value are inf and y is
    NaN. Feasibility is decided to 1e-10 of the largest entry of a row.
    """
    x = np.clip(_vector(x, "x", data.c.size), -1, 1)
    lower = _lower(data, x)
    if lower is None:
        return Repaired(np.inf, np.full(data.d.size, np.nan), np.inf)
    bounds = _box(data.d.size)
    bounds[lower.costs > ZERO] = -1
    bounds[lower.costs < -ZERO] = 1
    best = _minimise(data.d, data.B, data.b - data.A @ x, lower.multipliers > ZERO, bounds)
    if best is None:
        raise RuntimeError("HiGHS found no point on the face on which it found the lower optimum")
    y = best.point
    return Repaired(float(data.c @ x + data.d @ y), y, float(data.d_tilde @ y))


@dataclasses.dataclass(frozen=True, eq=False)
class Optimum:
    """A bilevel-feasible (x, y) of upper objective `value`; no such point is below `bound`.

    `proven` says that none is below `value` itself, up to 1e-9·(‖c‖₁ + ‖d‖₁).
    """

    value: float
    x: np.ndarray
    y: np.ndarray
    bound: float
    proven: bool


def optimum(data: LinearData, prove: bool = True) -> Optimum:
    """The least cᵀx + dᵀy over Ax + By = b and the boxes, and whether it is the bilevel optimum.

    Let d̃ = −Bᵀλ with λ > 0. Every z feasible at x has d̃ᵀz = −λᵀBz ≥ −λᵀ(b − Ax), with equality
    just where Bz = b − Ax. So the LP is the bilevel problem over the x for which some y in the box
    has Ax + By = b. At other x the lower level answers with a slack row, which may be better (with
    c = 1, d = 0, A = 2, B = 1, b = 0, d̃ = −1 it is): the value is an upper bound in general.

    It is the optimum if no answer with a slack row has cᵀx + dᵀy < value. For any μ ≥ 0 and
    r = d + Bᵀμ, feasible points have cᵀx + dᵀy ≥ `bound` = −μᵀb − ‖c + Aᵀμ‖₁ − ‖r‖₁, and 2|r_j|
    more for each j with y_j = sign(r_j); all other y_j can move a little that way. If row i is
    slack, any s made of such moves with d̃ᵀs < 0 and B_k s ≤ 0 for k ≠ i would improve an answer y,
    so one of its entries must be at that bound. Disjoint supports of such s thus cost an answer
    2 Σ min |r_j|. `proven` says that for every row some were found that cost value − bound, with
    the multipliers μ of the relaxed problem Ax + By ≤ b, up to the tolerance of HiGHS. The test is
    sufficient, not necessary, and takes most of the time; `prove=False` leaves it out.

    Raises ValueError where there is no λ > 0, or no point in the boxes with Ax + By = b: such data
    need `optimum_milp`.
    """
    if not _has_positive_multipliers(data):
        raise ValueError("d_tilde is not −Bᵀλ for any λ > 0: the LP does not apply to these data")
    n, l = data.c.size, data.b.size  # noqa: E741
    cost, rows = np.concatenate([data.c, data.d]), np.hstack([data.A, data.B])
    best = _minimise(cost, rows, data.b, np.full(l, True), _box(cost.size))
    relaxed = _minimise(cost, rows, data.b, np.full(l, False), _box(cost.size))
    if best is None or relaxed is None:
        raise ValueError("Ax + By = b has no solution in the boxes: the LP does not apply")
    value = float(cost @ best.point)
    mu = np.maximum(relaxed.multipliers, 0) * _unit(rows, 1) / _unit(cost)
    r = data.d + data.B.T @ mu
    bound = float(-mu @ data.b - np.abs(data.c + data.A.T @ mu).sum() - np.abs(r).sum())
    gap = value - bound - ZERO * np.abs(cost).sum()
    proven = prove and all(_slack_costs_more(data, i, r, gap) for i in range(l))
    return Optimum(value, best.point[:n], best.point[n:], min(bound, value), proven)


def optimum_milp(data: LinearData, big_m: float, time_limit: float | None = None) -> Optimum:
    """The bilevel optimum by a MILP over the KKT conditions of the lower level, any data.

    d̃ + Bᵀμ + p − q = 0 with 0 ≤ μ ≤ big_m and p, q ≥ 0, where binaries make each multiplier or the
    slack of its row or bound vanish. All other bounds of the MILP follow from big_m and the data.

    HiGHS keeps the MILP only to 1e-6. So x is computed again from the binaries, and `value` is what
    `repair` says of it: an upper bound of the optimum, whatever big_m. `bound` and `proven` hold to
    1e-6·(1 + ‖c‖₁ + ‖d‖₁), and only if the optimal x has lower-level multipliers ≤ big_m. It has
    if big_m is above all solutions μ of B_KJᵀ μ_K = −d̃_J with B_KJ square and regular, among which
    are the vertices of the dual.
    """
    from scipy import optimize

    arguments.positive(big_m, "big_m")
    n, m, l = data.c.size, data.d.size, data.b.size  # noqa: E741
    rows = np.hstack([data.A, data.B])
    # In the MILP, too, rows and lower cost have size one; their multipliers change accordingly.
    unit, tau = _unit(rows, 1), _unit(data.d_tilde)
    A, B = unit[:, None] * data.A, unit[:, None] * data.B
    b, d_tilde = unit * data.b, tau * data.d_tilde
    most_mu = big_m * tau / unit
    most_slack = b + np.abs(A).sum(1) + np.abs(B).sum(1)
    most_cost = np.abs(d_tilde) + np.abs(B).T @ most_mu
    # The variables are x, y, μ, p, q and then three binaries that allow μ, p and q to be positive.
    sizes = (n, m, l, m, m, l, m, m)

    def block(height: int, **parts: np.ndarray) -> np.ndarray:
        names = ("x", "y", "mu", "p", "q", "on_mu", "on_p", "on_q")
        zeros = (np.zeros((height, size)) for size in sizes)
        return np.hstack([parts.get(name, zero) for name, zero in zip(names, zeros)])

    Il, Im = np.eye(l), np.eye(m)
    at_most: list[tuple[np.ndarray, Any]] = [
        (block(l, x=A, y=B), b),
        (block(l, x=-A, y=-B, on_mu=np.diag(most_slack)), most_slack - b),
        (block(l, mu=Il, on_mu=-np.diag(most_mu)), np.zeros(l)),
        (block(m, p=Im, on_p=-np.diag(most_cost)), np.zeros(m)),
        (block(m, q=Im, on_q=-np.diag(most_cost)), np.zeros(m)),
        (block(m, y=-Im, on_p=2 * Im), np.ones(m)),
        (block(m, y=Im, on_q=2 * Im), np.ones(m)),
    ]
    constraints = [optimize.LinearConstraint(rows, -np.inf, limit) for rows, limit in at_most]
    stationary = block(m, mu=B.T, p=Im, q=-Im)
    cost = np.concatenate([data.c, data.d])
    # SciPy's annotations know these as numbers only.
    low: Any = np.repeat([-1.0, 0.0], [n + m, sum(sizes[2:])])
    high: Any = np.concatenate([np.ones(n + m), most_mu, most_cost, most_cost, np.ones(l + 2 * m)])
    result = optimize.milp(
        np.concatenate([cost, np.zeros(sum(sizes[2:]))]),
        integrality=np.repeat([0, 1], [sum(sizes[:5]), sum(sizes[5:])]),
        bounds=optimize.Bounds(low, high),
        constraints=[*constraints, optimize.LinearConstraint(stationary, -d_tilde, -d_tilde)],
        options={"mip_rel_gap": 0.0} | ({"time_limit": time_limit} if time_limit else {}),
    )
    if result.x is None:
        raise RuntimeError(f"no bilevel-feasible point with multipliers ≤ big_m: {result.message}")
    on_mu, on_p, on_q = np.split(result.x[sum(sizes[:5]) :] > 0.5, [l, l + m])
    bounds = _box(n + m)
    bounds[n:][on_p], bounds[n:][on_q] = 1, -1
    best = _minimise(cost, rows, data.b, on_mu, bounds)
    x = result.x[:n] if best is None else best.point[:n]
    repaired = repair(data, x)
    agree = abs(repaired.objective - result.fun) <= 1e-6 * (1 + np.abs(cost).sum())
    bound = min(float(result.mip_dual_bound), repaired.objective)
    return Optimum(repaired.objective, x, repaired.y, bound, bool(result.status == 0 and agree))


def _vector(value: Any, name: str, size: int) -> np.ndarray:
    """The argument as a finite float64 vector of that size."""
    vector = np.asarray(value, np.float64)
    if vector.shape != (size,):
        raise ValueError(f"{name} must have shape ({size},), not {vector.shape}")
    if not np.all(np.isfinite(vector)):
        raise ValueError(f"{name} must be finite, but holds NaN or infinity")
    return vector


def _box(size: int) -> np.ndarray:
    """The bounds −1 and 1, one row for each variable."""
    return np.tile([-1.0, 1.0], (size, 1))


def _unit(array: np.ndarray, axis: int | None = None) -> Any:
    """What brings the largest entry to size one: a power of two, which multiplies without error."""
    largest = np.max(np.abs(array), axis=axis)
    return np.exp2(-np.round(np.log2(np.where(largest > 0, largest, 1.0))))


@dataclasses.dataclass(frozen=True, eq=False)
class _Minimum:
    """A solution of an LP, its row multipliers (≥ 0; 0 where tight) and reduced costs, scaled."""

    point: np.ndarray
    multipliers: np.ndarray
    costs: np.ndarray


def _minimise(
    cost: np.ndarray, rows: np.ndarray, rhs: np.ndarray, tight: np.ndarray, bounds: np.ndarray
) -> _Minimum | None:
    """Minimise costᵀv over rows·v ≤ rhs, with = where tight; None where nothing is feasible."""
    from scipy import optimize

    unit = _unit(rows, 1)
    rows, rhs = unit[:, None] * rows, unit * rhs
    for presolve in (True, False):
        result = optimize.linprog(
            _unit(cost) * cost,
            A_ub=rows[~tight],
            b_ub=rhs[~tight],
            A_eq=rows[tight],
            b_eq=rhs[tight],
            bounds=bounds,
            method="highs-ds",
            options={"presolve": presolve} | dict.fromkeys(TOLERANCES, TOLERANCE),
        )
        if result.status == 0:
            multipliers = np.zeros(rhs.size)
            multipliers[~tight] = -result.ineqlin.marginals
            costs = result.lower.marginals + result.upper.marginals
            return _Minimum(result.x, multipliers, costs)
        if result.status == 2:
            return None
    raise RuntimeError(f"HiGHS could not solve an LP: {result.message}")


def _lower(data: LinearData, x: np.ndarray) -> _Minimum | None:
    """The lower level at x."""
    free = np.full(data.b.size, False)
    return _minimise(data.d_tilde, data.B, data.b - data.A @ x, free, _box(data.d.size))


def _has_positive_multipliers(data: LinearData) -> bool:
    """Whether d̃ = −Bᵀλ for some λ > 0: the largest least entry of λ is positive."""
    m, l = data.d.size, data.b.size  # noqa: E741
    B, d_tilde = _unit(data.B, 1)[:, None] * data.B, _unit(data.d_tilde) * data.d_tilde
    # The variables are λ and its least entry, which is capped lest it be unbounded.
    rows = np.block([[B.T, np.zeros((m, 1))], [-np.eye(l), np.ones((l, 1))]])
    rhs, tight = np.concatenate([-d_tilde, np.zeros(l)]), np.repeat([True, False], [m, l])
    bounds = np.array([[0.0, np.inf]] * l + [[0.0, 1.0]])
    best = _minimise(-np.eye(l + 1)[l], rows, rhs, tight, bounds)
    return best is not None and bool(best.point[l] > ZERO)


def _slack_costs_more(data: LinearData, i: int, r: np.ndarray, gap: float) -> bool:
    """Whether disjoint sets of entries of y, as `optimum` wants them for row i, cost the gap."""
    l, m = data.B.shape  # noqa: E741
    rows = np.vstack([np.delete(data.B, i, 0), _unit(data.d_tilde) * data.d_tilde]) * np.sign(r)
    rhs = -np.eye(l)[-1]
    # A vertex has at most l entries: of m/l sets, those with a smaller |r_j| would hardly count.
    left = (r != 0) & (2 * np.abs(r) >= gap * min(1, l / m))
    spent = 0.0
    while spent < gap:
        if not left.any():
            return False
        entries = np.flatnonzero(left)
        # The power prefers large |r_j| strongly, since the smallest in a set is what it costs.
        cost = np.abs(r[entries]) ** -4
        bounds = np.tile([0.0, np.inf], (entries.size, 1))
        moves = _minimise(cost, rows[:, entries], rhs, rhs < 0, bounds)
        if moves is None:
            return False
        chosen = entries[moves.point > 0]
        spent += 2 * np.abs(r[chosen]).min()
        left[chosen] = False
    return True
