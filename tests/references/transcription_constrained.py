"""NumPy transcription of the two baselines for constrained bilevel problems, FOP and SMO.

Written without looking at the library, beside `transcription.py`, whose proximal point method
(Algorithm `alg:first-order`, OptFOM inside) both call. The problem is

    min f(x, y)  over x in X and y in argmin { f̄(x, z) : z in Y, ḡ(x, z) <= 0 },  X, Y boxes.

    fop   Lu and Mei 2024: quadratic penalty of ḡ, stages (ρ_k, µ_k, ε_k)
    smo   Lu and Mei 2025: augmented Lagrangian of ḡ, stages ε_k

Stage k replaces the lower problem by min_z A_k(x, z) and does the same in both:

    1. accelerated gradient on A_k(x, ·) from y until the optimality gap is at most ε_k, giving ỹ;
    2. `alg:first-order` on min_{x,y} max_z f(x, y) + ρ_k (A_k(x, y) − A_k(x, z)) from
       ((x, ỹ), ỹ); its answer ((x, y), z) ends the stage, the next one starts from (x, y).
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from transcription import ProximalPointResult, proximal_point


class ConstrainedProblem(NamedTuple):
    """Gradients as callables on float64 vectors x (n,) and y or z (m,), boxes and constants.

    grad_f(x, y) and grad_fbar(x, z) return pairs of gradients, gbar(x, z) a vector (l,) and
    jac_gbar(x, z) its pair of Jacobians, (l, n) and (l, m). x_box and y_box are (low, high).
    L_f, L_fbar and L_dg are Lipschitz constants of ∇f, ∇f̄ and ∇ḡ, L_g of ḡ itself, and
    g_hi >= ‖ḡ‖.
    """

    grad_f: Callable
    grad_fbar: Callable
    gbar: Callable
    jac_gbar: Callable
    x_box: tuple[np.ndarray, np.ndarray]
    y_box: tuple[np.ndarray, np.ndarray]
    L_f: float
    L_fbar: float
    L_g: float
    L_dg: float
    g_hi: float


class Record(NamedTuple):
    """One iterate, with the test made there: the phase goes on while lhs > rhs.

    phase "warm", index j: z^{j+1} of the accelerated gradient method (as both y and z, x being
    fixed), lhs the bound on the optimality gap. phase "solve", index k: (x^{k+1}, y^{k+1}),
    z^{k+1} of the proximal point method, lhs the length of the step in (x, y). gradients counts
    those of this iterate alone: of A_k(x, ·) in "warm", of the minimax objective in "solve".
    """

    stage: int
    phase: str
    index: int
    x: np.ndarray
    y: np.ndarray
    z: np.ndarray
    lhs: float
    rhs: float
    gradients: int


class Stage(NamedTuple):
    """The parameters of a stage, what it did, and the multipliers its answer implies.

    L_tilde is the smoothness of A_k(x, ·), L that of the minimax problem; run is None when
    max_records cut the warm start. lam_start is SMO's λ^k (FOP does not use it).
    """

    rho: float
    mu: float
    epsilon: float
    epsilon_hat: float
    lam_start: np.ndarray
    L_tilde: float
    L: float
    warm_steps: int
    run: ProximalPointResult | None
    lam: np.ndarray
    lam_bar: np.ndarray


class ConstrainedResult(NamedTuple):
    """The last iterate with the multipliers λ and λ̄ of its stage, all records, all stages.

    finished says that all stages were run and each met the outer stopping test.
    """

    x: np.ndarray
    y: np.ndarray
    z: np.ndarray
    lam: np.ndarray
    lam_bar: np.ndarray
    records: list[Record]
    stages: list[Stage]
    finished: bool

    @property
    def gradients(self):
        """Gradients of the two phases together."""
        return sum(record.gradients for record in self.records)


def fop_practical_schedule(tolerance):
    """ρ_k = 5^{k−1}, µ_k = ρ_k², ε_k = 1/ρ_k, the last k being the first with ε_k <= tolerance."""
    schedule = []
    while not schedule or schedule[-1][2] > tolerance:
        rho = 5.0 ** (len(schedule) - 1)
        schedule.append((rho, rho**2, 1.0 / rho))
    return schedule


def fop_theory_schedule(tolerance):
    """One stage: ρ = 1/ε, µ = 1/ε², ε = tolerance."""
    return [(1.0 / tolerance, 1.0 / tolerance**2, tolerance)]


def smo_schedule(tolerance):
    """ε_k = max(0.8^k, tolerance), the last k being the first with ε_k = tolerance."""
    epsilons = []
    while not epsilons or epsilons[-1] > tolerance:
        epsilons.append(max(0.8 ** len(epsilons), tolerance))
    return epsilons


def _positive(v):
    return np.maximum(v, 0.0)


def _project(v, box):
    return np.minimum(np.maximum(v, box[0]), box[1])


def penalty_gradient(problem, weight):
    """∇A_k = ∇f̄ + (∇ḡ)ᵀ·weight(ḡ), as a function of (x, z), returning the pair.

    weight(ḡ) is 2µ[ḡ]_+ for A_k = f̄ + µ‖[ḡ]_+‖² (FOP) and [λ^k + µḡ]_+ for
    A_k = f̄ + (‖[λ^k + µḡ]_+‖² − ‖λ^k‖²)/(2µ) (SMO).
    """

    def grad(x, z):
        fbar_x, fbar_z = problem.grad_fbar(x, z)
        jac_x, jac_z = problem.jac_gbar(x, z)
        w = weight(problem.gbar(x, z))
        return fbar_x + jac_x.T @ w, fbar_z + jac_z.T @ w

    return grad


def accelerated_gradient(grad_z, y_box, z0, L_tilde, epsilon, max_steps):
    """FISTA on A_k(x, ·) over Y. Returns its steps, a list of (z^{j+1}, bound on the gap).

    By convexity at v and L̃-smoothness, A_k(x, z^{j+1}) − min A_k(x, ·) is at most
    ⟨g, z^{j+1}⟩ + max_{s in Y} ⟨−g, s⟩ + (L̃/2)‖z^{j+1} − v‖², the bound tested against epsilon.
    """
    z = z0
    z_last = z0
    t = 1.0
    beta = 0.0
    steps = []
    while len(steps) < max_steps:
        v = z + beta * (z - z_last)
        g = grad_z(v)
        z_last = z
        z = _project(v - g / L_tilde, y_box)
        farthest = np.sum(np.maximum(-g * y_box[0], -g * y_box[1]))
        gap = float(g @ z + farthest + L_tilde / 2.0 * np.sum((z - v) ** 2))
        steps.append((z, gap))
        if gap <= epsilon:
            break
        t_next = (1.0 + math.sqrt(1.0 + 4.0 * t**2)) / 2.0
        beta = (t - 1.0) / t_next
        t = t_next
    return steps


def _solve_stage(problem, grad_A, x, y_tilde, rho, L, epsilon, epsilon_hat, max_outer, max_steps):
    """Step 2 of a stage: `alg:first-order` with (x, y) as the min block and z as the max block."""
    n = x.size

    def grad(xy, z):  # of f(x, y) + ρ(A_k(x, y) − A_k(x, z))
        x, y = np.split(xy, [n])
        f_x, f_y = problem.grad_f(x, y)
        up_x, up_y = grad_A(x, y)
        low_x, low_z = grad_A(x, z)
        return np.concatenate([f_x + rho * (up_x - low_x), f_y + rho * up_y]), -rho * low_z

    low = np.concatenate([problem.x_box[0], problem.y_box[0]])
    high = np.concatenate([problem.x_box[1], problem.y_box[1]])
    return proximal_point(
        grad,
        lambda v, t: _project(v, (low, high)),
        lambda v, t: _project(v, problem.y_box),
        np.concatenate([x, y_tilde]),
        y_tilde,
        L,
        float(np.linalg.norm(problem.y_box[1] - problem.y_box[0])),
        epsilon,
        epsilon_hat,
        max_outer,
        max_steps,
    )


def _stages(problem, x, y, plan, max_records, max_outer, max_steps):
    """The stages of plan, a list of functions that make a stage's parameters when it begins.

    Each takes λ^k and returns (ρ, µ, ε, ε̂, L̃, weight, multipliers); multipliers(ḡ(x, y), ḡ(x, z))
    is the pair (λ, λ̄), and λ̄ at the stage's answer is λ^{k+1}.
    """
    x = np.asarray(x, dtype=np.float64)
    y = np.asarray(y, dtype=np.float64)
    boxes = (problem.x_box, problem.y_box)
    x_box, y_box = (
        tuple(np.broadcast_to(np.asarray(end, dtype=np.float64), v.shape) for end in box)
        for box, v in zip(boxes, (x, y))
    )
    problem = problem._replace(x_box=x_box, y_box=y_box)
    z = y
    lam_k = np.zeros_like(problem.gbar(x, y))
    lam, lam_bar = lam_k, lam_k
    records = []
    stages = []

    for k, begin in enumerate(plan):
        if len(records) >= max_records:
            break
        rho, mu, epsilon, epsilon_hat, L_tilde, weight, multipliers = begin(lam_k)
        L = problem.L_f + 2.0 * rho * L_tilde
        grad_A = penalty_gradient(problem, weight)

        # Step 1.
        room = max_records - len(records)
        grad_z = lambda z, x=x, grad_A=grad_A: grad_A(x, z)[1]
        warm = accelerated_gradient(grad_z, problem.y_box, y, L_tilde, epsilon, room)
        records += [
            Record(k, "warm", j, x, z_j, z_j, gap, epsilon, 1) for j, (z_j, gap) in enumerate(warm)
        ]
        y = z = warm[-1][0]

        # Step 2.
        run = None
        room = max_records - len(records)
        if room > 0:
            run = _solve_stage(
                problem,
                grad_A,
                x,
                y,
                rho,
                L,
                epsilon,
                epsilon_hat,
                min(max_outer, room),
                max_steps,
            )
            for i, landings in enumerate(run.trace_lengths):
                moved = float(np.linalg.norm(run.outer[i + 1][0] - run.outer[i][0]))
                xy, z = run.outer[i + 1]
                x, y = np.split(xy, [x.size])
                records.append(
                    Record(k, "solve", i, x, y, z, moved, epsilon / (4.0 * L), 2 * landings)
                )

        lam, lam_bar = multipliers(problem.gbar(x, y), problem.gbar(x, z))
        stages.append(
            Stage(rho, mu, epsilon, epsilon_hat, lam_k, L_tilde, L, len(warm), run, lam, lam_bar)
        )
        # Step 3 (SMO; nothing in FOP uses λ^k).
        lam_k = lam_bar

    finished = len(stages) == len(plan) and all(s.run and s.run.converged for s in stages)
    return ConstrainedResult(x, y, z, lam, lam_bar, records, stages, finished)


def fop(problem, x, y, schedule, max_records=math.inf, max_outer=10**6, max_steps=10**6):
    """FOP on the stages (ρ_k, µ_k, ε_k) of schedule, with A_k = f̄ + µ_k‖[ḡ]_+‖².

    ε̂_k = min(ε_k^{5/2}, ε_k/2); λ = 2ρµ[ḡ(x, y)]_+ and λ̄ = 2µ[ḡ(x, z)]_+. It stops after
    max_records records; max_outer bounds the proximal iterations of a stage and max_steps the
    landing points of every OptFOM, and a solve cut short by them is used like any other.
    """

    def stage(rho, mu, epsilon):
        def begin(_):
            L_tilde = problem.L_fbar + 2.0 * mu * (problem.g_hi * problem.L_dg + problem.L_g**2)
            epsilon_hat = min(epsilon**2.5, epsilon / 2.0)
            weight = lambda g: 2.0 * mu * _positive(g)
            multipliers = lambda g_y, g_z: (rho * weight(g_y), weight(g_z))
            return rho, mu, epsilon, epsilon_hat, L_tilde, weight, multipliers

        return begin

    plan = [stage(*parameters) for parameters in schedule]
    return _stages(problem, x, y, plan, max_records, max_outer, max_steps)


def smo(problem, x, y, epsilons, max_records=math.inf, max_outer=10**6, max_steps=10**6):
    """SMO on the stages ε_k: A_k = f̄ + (‖[λ^k + µ_kḡ]_+‖² − ‖λ^k‖²)/(2µ_k), λ^0 = 0.

    ρ_k = 1/ε_k, µ_k = ε_k^{−3}, ε̂_k = ε_k/(2√µ_k); λ = ρ[λ^k + µḡ(x, y)]_+ and
    λ̄ = [λ^k + µḡ(x, z)]_+, which is λ^{k+1}. The limits are those of `fop`.
    """

    def stage(epsilon):
        def begin(lam_k):
            rho = 1.0 / epsilon
            mu = epsilon**-3
            L_tilde = (
                problem.L_fbar
                + (float(np.linalg.norm(lam_k)) + mu * problem.g_hi) * problem.L_dg
                + mu * problem.L_g**2
            )
            epsilon_hat = epsilon / (2.0 * math.sqrt(mu))
            weight = lambda g: _positive(lam_k + mu * g)
            multipliers = lambda g_y, g_z: (rho * weight(g_y), weight(g_z))
            return rho, mu, epsilon, epsilon_hat, L_tilde, weight, multipliers

        return begin

    plan = [stage(epsilon) for epsilon in epsilons]
    return _stages(problem, x, y, plan, max_records, max_outer, max_steps)
