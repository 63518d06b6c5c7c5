"""NumPy transcription of the paper's deterministic algorithms, the reference of the tests.

Written from the paper alone (`penalty_bilevel_minimax.tex.txt`, names in backticks are its
labels), without looking at the library: plain Python loops, float64, flat vectors x and y,
one statement per line of the pseudocode. It is meant to be read beside the paper, not to be fast.

    optfom           Algorithm `mmax-alg1` (OptFOM)
    proximal_point   Algorithm `alg:first-order`
    penalty_method   Algorithm `alg:first-order-new`, deterministic branch
    theory_bounds    the constants of Theorem `thm:lu_thm`

Conventions: `grad(x, y)` returns the pair (∇_x, ∇_y), both with the sign of the function itself
(no minus for the maximised block), and `prox_p(v, t)` is the prox of t·p at v.
"""

import math
from typing import NamedTuple

import numpy as np


class Landing(NamedTuple):
    """One landing point: where a proximal step ended, with the test made there.

    kind is "first" for (x^{k,0}, y^{k,0}), "loop" for (x^{k,t}, y^{k,t}) with t >= 1, "closing"
    for (x~^{k+1}, y~^{k+1}). lhs and rhs are the sides of the inequality tested at the point: that
    of the while loop for "first" and "loop", residual norm and tolerance for "closing"; the
    algorithm goes on while lhs > rhs.
    """

    x: np.ndarray
    y: np.ndarray
    kind: str
    k: int
    t: int
    lhs: float
    rhs: float


class OptFOMResult(NamedTuple):
    """Output point (x, y), all landing points, number of gradient evaluations."""

    point: tuple[np.ndarray, np.ndarray]
    trace: list[Landing]
    evaluations: int

    @property
    def converged(self):
        """Whether the closing test was met (otherwise the step budget ran out)."""
        last = self.trace[-1] if self.trace else None
        return last is not None and last.kind == "closing" and last.lhs <= last.rhs


class ProximalPointResult(NamedTuple):
    """Result of the outer loop.

    outer[k] is (x^k, y^k), the start included, so outer[-1] is the output; trace concatenates the
    traces of the inner solves, trace_lengths says where each ends, inner_converged whether each
    met its own test; converged says whether the outer stopping test was met.
    """

    point: tuple[np.ndarray, np.ndarray]
    outer: list[tuple[np.ndarray, np.ndarray]]
    trace: list[Landing]
    trace_lengths: list[int]
    inner_converged: list[bool]
    evaluations: int
    converged: bool


class PenaltyResult(NamedTuple):
    """The six blocks of the output and the run of the proximal-point loop behind them."""

    x1: np.ndarray
    x2: np.ndarray
    y1: np.ndarray
    y2: np.ndarray
    z1: np.ndarray
    z2: np.ndarray
    run: ProximalPointResult


def _square(v):
    return float(np.dot(v, v))


def optfom(grad, prox_p, prox_q, x0, y0, L, sigma_x, sigma_y, tolerance, max_steps, limit=math.inf):
    """Algorithm `mmax-alg1`: min_x max_y of h̄ + p − q, strongly convex-strongly concave.

    grad is the gradient of h̄, L its Lipschitz constant. The trace has one entry per landing
    point, in the order of the algorithm; each costs two gradients, one where the step's direction
    is taken ((x^{k,-1}, y^{k,-1}), (x^{k,t+1/2}, y^{k,t+1/2}) or (x^{k+1}, y^{k+1})) and one at the
    landing point itself, kept for every later use; so evaluations == 2 * len(trace). (One saving
    is left out to keep that: when ᾱ = 1, (x^{k,-1}, y^{k,-1}) is the (x^k, y^k) of the closing step
    before.) At most max_steps landing points are made: when they are spent the last one is the
    output. Neither k nor t goes beyond limit.
    """
    x0 = np.asarray(x0, dtype=np.float64)
    y0 = np.asarray(y0, dtype=np.float64)
    trace = []
    evaluations = 0

    def gradient(x, y):  # of h̄, counted
        nonlocal evaluations
        evaluations += 1
        return grad(x, y)

    def hat(x, y, g):  # ∇ĥ from g = ∇h̄(x, y), with ĥ = h̄ − σ_x‖x‖²/2 + σ_y‖y‖²/2
        return g[0] - sigma_x * x, g[1] + sigma_y * y

    # Line 2.
    z = -sigma_x * x0
    z_f = z
    y = y0
    y_f = y0
    alpha = min(1.0, math.sqrt(8.0 * sigma_y / sigma_x))
    eta_z = sigma_x / 2.0
    eta_y = min(1.0 / (2.0 * sigma_y), 4.0 / (alpha * sigma_x))
    zeta = 1.0 / (2.0 * math.sqrt(5.0) * (1.0 + 8.0 * L / sigma_x))
    gamma_x = 8.0 / sigma_x
    gamma_y = 8.0 / sigma_x
    zeta_hat = min(sigma_x, sigma_y) / L**2

    k = 0
    while True:
        if len(trace) >= max_steps:
            break
        # Lines 4 and 5.
        z_g = alpha * z + (1.0 - alpha) * z_f
        y_g = alpha * y + (1.0 - alpha) * y_f
        x_start = -z_g / sigma_x
        y_start = y_g

        def a(x, y, g, z_g=z_g, y_g=y_g):  # (a^k_x, a^k_y) at (x, y), where ∇h̄ is g
            hat_x, hat_y = hat(x, y, g)
            a_x = hat_x + sigma_x * (x - z_g / sigma_x) / 2.0
            a_y = -hat_y + sigma_y * y + sigma_x * (y - y_g) / 8.0
            return a_x, a_y

        def loop_test(x_t, y_t, a_t, b_x, b_y, x_start=x_start, y_start=y_start):  # line 11
            lhs = gamma_x * _square(a_t[0] + b_x) + gamma_y * _square(a_t[1] + b_y)
            rhs = _square(x_t - x_start) / gamma_x + _square(y_t - y_start) / gamma_y
            return lhs, rhs

        # Lines 6 to 9.
        a_x, a_y = a(x_start, y_start, gradient(x_start, y_start))
        x_first = prox_p(x_start - zeta * gamma_x * a_x, zeta * gamma_x)
        y_first = prox_q(y_start - zeta * gamma_y * a_y, zeta * gamma_y)
        b_x = (x_start - zeta * gamma_x * a_x - x_first) / (zeta * gamma_x)
        b_y = (y_start - zeta * gamma_y * a_y - y_first) / (zeta * gamma_y)
        # Line 10.
        t = 0
        x_t, y_t = x_first, y_first
        g_t = gradient(x_t, y_t)
        a_t = a(x_t, y_t, g_t)
        lhs, rhs = loop_test(x_t, y_t, a_t, b_x, b_y)
        trace.append(Landing(x_t, y_t, "first", k, t, lhs, rhs))

        # Lines 11 to 20.
        while lhs > rhs and len(trace) < max_steps and t < limit:
            beta = 2.0 / (t + 3.0)
            x_pull = x_t + beta * (x_first - x_t)
            y_pull = y_t + beta * (y_first - y_t)
            x_half = x_pull - zeta * gamma_x * (a_t[0] + b_x)
            y_half = y_pull - zeta * gamma_y * (a_t[1] + b_y)
            a_x, a_y = a(x_half, y_half, gradient(x_half, y_half))
            x_t = prox_p(x_pull - zeta * gamma_x * a_x, zeta * gamma_x)
            y_t = prox_q(y_pull - zeta * gamma_y * a_y, zeta * gamma_y)
            b_x = (x_pull - zeta * gamma_x * a_x - x_t) / (zeta * gamma_x)
            b_y = (y_pull - zeta * gamma_y * a_y - y_t) / (zeta * gamma_y)
            t = t + 1
            g_t = gradient(x_t, y_t)
            a_t = a(x_t, y_t, g_t)
            lhs, rhs = loop_test(x_t, y_t, a_t, b_x, b_y)
            trace.append(Landing(x_t, y_t, "loop", k, t, lhs, rhs))
        if len(trace) >= max_steps:
            break

        # Lines 21 to 25.
        x_f, y_f = x_t, y_t
        hat_x, hat_y = hat(x_f, y_f, g_t)
        z_f = hat_x + b_x
        w_f = -hat_y + b_y
        z = z + eta_z / sigma_x * (z_f - z) - eta_z * (x_f + z_f / sigma_x)
        y = y + eta_y * sigma_y * (y_f - y) - eta_y * (w_f + sigma_y * y_f)
        x = -z / sigma_x

        # Lines 26 to 28.
        g = gradient(x, y)
        x_tilde = prox_p(x - zeta_hat * g[0], zeta_hat)
        y_tilde = prox_q(y + zeta_hat * g[1], zeta_hat)
        g_tilde = gradient(x_tilde, y_tilde)
        r_x = (x - x_tilde) / zeta_hat - (g[0] - g_tilde[0])
        r_y = (y_tilde - y) / zeta_hat - (g[1] - g_tilde[1])
        residual = math.sqrt(_square(r_x) + _square(r_y))
        trace.append(Landing(x_tilde, y_tilde, "closing", k, t, residual, tolerance))
        k = k + 1
        if residual <= tolerance or k >= limit:
            break

    point = (trace[-1].x, trace[-1].y) if trace else (x0, y0)
    return OptFOMResult(point, trace, evaluations)


def proximal_point(
    grad,
    prox_p,
    prox_q,
    x0,
    y0,
    L,
    D_q,
    epsilon,
    epsilon_hat,
    max_outer,
    max_steps,
    center="start",
):
    """Algorithm `alg:first-order`: min_x max_y of h + p − q, concave in y only.

    grad is the gradient of h, L its Lipschitz constant, D_q the diameter of dom q. Step k solves
    the subproblem `hk` to accuracy epsilon_hat / (k + 1), the dual regulariser being centred at
    y^0 (center="start", as in `hk`) or at y^k (center="last", as in `eq:minmax_prox`). max_steps
    bounds the landing points of every inner solve separately; a solve cut short by it is used
    like any other.
    """
    if center not in ("start", "last"):
        raise ValueError(f"center must be 'start' or 'last', not {center!r}")
    x_k = np.asarray(x0, dtype=np.float64)
    y_k = np.asarray(y0, dtype=np.float64)
    y_first = y_k
    outer = [(x_k, y_k)]
    trace = []
    trace_lengths = []
    inner_converged = []
    evaluations = 0
    converged = False

    # `eq:mapbarL`
    L_bar = L + max(2.0 * L, epsilon / (2.0 * D_q))
    sigma_x = L
    sigma_y = epsilon / (2.0 * D_q)

    for k in range(max_outer):
        y_center = y_first if center == "start" else y_k

        def grad_k(x, y, x_center=x_k, y_center=y_center):  # gradient of h_k, `hk`
            g_x, g_y = grad(x, y)
            return (
                g_x + 2.0 * L * (x - x_center),
                g_y - epsilon / (2.0 * D_q) * (y - y_center),
            )

        inner = optfom(
            grad_k,
            prox_p,
            prox_q,
            x_k,
            y_k,
            L_bar,
            sigma_x,
            sigma_y,
            epsilon_hat / (k + 1),
            max_steps,
        )
        x_next, y_next = inner.point
        outer.append((x_next, y_next))
        trace.extend(inner.trace)
        trace_lengths.append(len(inner.trace))
        inner_converged.append(inner.converged)
        evaluations += inner.evaluations
        moved = math.sqrt(_square(x_next - x_k))
        x_k, y_k = x_next, y_next
        if moved <= epsilon / (4.0 * L):
            converged = True
            break

    return ProximalPointResult(
        (x_k, y_k), outer, trace, trace_lengths, inner_converged, evaluations, converged
    )


def penalty_problem(grad_f, grad_g, prox_f2, prox_f3, prox_g2, prox_g3, rho, sizes):
    """The penalty problem `eq:lagrange`–`eq:P3` on flat x = (x1, y1, y2), y = (x2, z1, z2).

    sizes are those of (x1, x2, y1, y2). Returns the gradient of P_1 and the proxes of P_2, P_3.
    """
    n_x1, n_x2, n_y1, _ = sizes
    cuts_x = [n_x1, n_x1 + n_y1]
    cuts_y = [n_x2, n_x2 + n_y1]

    def grad_p1(x, y):
        x1, y1, y2 = np.split(x, cuts_x)
        x2, z1, z2 = np.split(y, cuts_y)
        f_x1, f_x2, f_y1, f_y2 = grad_f(x1, x2, y1, y2)
        up_x1, up_y1, up_z2 = grad_g(x1, y1, z2)  # of f~_1(x1, y1, z2)
        low_x1, low_z1, low_y2 = grad_g(x1, z1, y2)  # of f~_1(x1, z1, y2)
        g_x = np.concatenate(
            [f_x1 + rho * (up_x1 - low_x1), f_y1 + rho * up_y1, f_y2 - rho * low_y2]
        )
        g_y = np.concatenate([f_x2, -rho * low_z1, rho * up_z2])
        return g_x, g_y

    def prox_p2(v, t):  # t·P_2 = t·f_2 + (tρ)·f~_2 + (tρ)·f~_3
        x1, y1, y2 = np.split(v, cuts_x)
        return np.concatenate([prox_f2(x1, t), prox_g2(y1, t * rho), prox_g3(y2, t * rho)])

    def prox_p3(v, t):  # t·P_3 = t·f_3 + (tρ)·f~_2 + (tρ)·f~_3
        x2, z1, z2 = np.split(v, cuts_y)
        return np.concatenate([prox_f3(x2, t), prox_g2(z1, t * rho), prox_g3(z2, t * rho)])

    return grad_p1, prox_p2, prox_p3


def penalty_method(
    grad_f,
    grad_g,
    prox_f2,
    prox_f3,
    prox_g2,
    prox_g3,
    L_f,
    L_g,
    D_2,
    epsilon,
    x1,
    x2,
    y1,
    y2,
    z1,
    z2,
    max_outer,
    max_steps,
    center="start",
):
    """Algorithm `alg:first-order-new`, deterministic: the bilevel problem by its penalty.

    grad_f(x1, x2, y1, y2) returns the four gradients of f_1 and grad_g(x1, y1, y2) the three of
    f~_1; prox_g2 and prox_g3 are those of f~_2 and f~_3; L_f and L_g are the Lipschitz constants
    of the two gradients, D_2 the diameter of X_2 × Y_1 × Y_2. x2 may have size 0.
    """
    x1, x2, y1, y2, z1, z2 = (np.asarray(v, dtype=np.float64) for v in (x1, x2, y1, y2, z1, z2))
    # Lines 2 and 3; ρ_1 = 2·L_P1 and ρ_2 = ε/(2·D_2) are what `proximal_point` uses.
    rho = 1.0 / epsilon
    epsilon_hat = epsilon**1.5
    L_P1 = L_f + 2.0 * rho * L_g
    sizes = (x1.size, x2.size, y1.size, y2.size)
    grad_p1, prox_p2, prox_p3 = penalty_problem(
        grad_f, grad_g, prox_f2, prox_f3, prox_g2, prox_g3, rho, sizes
    )
    run = proximal_point(
        grad_p1,
        prox_p2,
        prox_p3,
        np.concatenate([x1, y1, y2]),
        np.concatenate([x2, z1, z2]),
        L_P1,
        D_2,
        epsilon,
        epsilon_hat,
        max_outer,
        max_steps,
        center,
    )
    x, y = run.point
    x1, y1, y2 = np.split(x, [x1.size, x1.size + y1.size])
    x2, z1, z2 = np.split(y, [x2.size, x2.size + z1.size])
    return PenaltyResult(x1, x2, y1, y2, z1, z2, run)


def theory_bounds(L, D_p, D_q, epsilon, epsilon_hat, H0_minus_Hstar, Hstar_minus_Hlow):
    """Constants of Theorem `thm:lu_thm`: alpha, delta, K outer steps, C, N evaluations.

    H0_minus_Hstar is max_y H(x^0, y) − H^*; Hstar_minus_Hlow is H^* − H_low.
    """
    alpha = min(1.0, math.sqrt(4.0 * epsilon / (D_q * L)))
    delta = (2.0 + 1.0 / alpha) * L * D_p**2 + max(epsilon / D_q, alpha * L / 4.0) * D_q**2
    # The paper's formula has one closing parenthesis too many, after the −1.
    K = max(
        0,
        math.ceil(
            16.0 * (H0_minus_Hstar + epsilon * D_q / 4.0) * L / epsilon**2
            + 32.0 * epsilon_hat**2 * (1.0 + 4.0 * D_q**2 * L**2 / epsilon**2) / epsilon**2
            - 1.0
        ),
    )
    L_bar = 3.0 * L + epsilon / (2.0 * D_q)
    bracket = L_bar**2 / min(L, epsilon / (2.0 * D_q)) + L_bar
    C = (
        4.0
        * max(1.0 / (2.0 * L), min(D_q / epsilon, 4.0 / (alpha * L)))
        * (delta + 2.0 / alpha * (Hstar_minus_Hlow + epsilon * D_q / 4.0 + L * D_p**2))
        * bracket**2
        / epsilon_hat**2
    )
    N = (
        (math.ceil(96.0 * math.sqrt(2.0) * (1.0 + (24.0 * L + 4.0 * epsilon / D_q) / L)) + 2)
        * max(2.0, math.sqrt(D_q * L / epsilon))
        * ((K + 1) * max(0.0, math.log(C)) + K + 1 + 2.0 * K * math.log(K + 1))
    )
    return {"alpha": alpha, "delta": delta, "K": K, "C": C, "N": N}
