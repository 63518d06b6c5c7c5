"""OptFOM: an optimal first-order method for strongly-convex-strongly-concave minimax problems."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array

from bilevax import trees
from bilevax.problems import Form, MinimaxProblem, Point
from bilevax.problems.constants import smoothness_of
from bilevax.problems.validation import require
from bilevax.solvers.base import InnerSolver, check_most, check_positive, reached
from bilevax.trees import Layout

OPEN, EXTRAPOLATE, CLOSE = 0, 1, 2


def operator(problem: MinimaxProblem, layout: Layout, w: Array) -> Array:
    """(∇ₓh, −∇ᵧh) at a flat vector w = (x, y)."""
    gx, gy = problem.gradient(*layout.unravel(w))
    return layout.ravel((gx, trees.scale(-1, gy)))


def flat_prox(problem: MinimaxProblem, layout: Layout, w: Array, step: Array) -> Array:
    """The prox step of both terms at a flat vector w = (x, y)."""
    x, y = layout.unravel(w)
    return layout.ravel((problem.x.prox(x, step), problem.y.prox(y, step)))


class OptFOMState(eqx.Module):
    """Where the algorithm stands between two proximal steps, as flat vectors w = (x, y).

    The paper's z is kept as x = −z/σₓ. Every proximal step takes the gradient at a probe, a prox
    step from a base, and the gradient where it lands. `mode` says which kind comes next: the one
    that opens an iteration (lines 5–9), an extrapolation of the inner loop (lines 12–18), or the
    one that closes it (lines 25–27).
    """

    momentum: Array  # (−z^k/σₓ, y^k)
    settled: Array  # (−z_f^k/σₓ, y_f^k)
    anchor: Array  # (x^{k,0}, y^{k,0})
    half: Array  # (x^{k,t+1/2}, y^{k,t+1/2})
    landed: Array  # where the last prox step ended
    beta: Array  # β_t
    mode: Array
    inner: Array  # t
    iteration: Array  # k
    finished: Array
    cut: Array  # whether a limit has ended it, or any of its inner loops
    gradients: Array
    layout: Layout = eqx.field(static=True)


class OptFOM(InnerSolver[OptFOMState]):
    """Algorithm `mmax-alg1` of the paper (Kovalev and Gasnikov 2022, Lu and Mei 2023).

    As the inner solver of another method it gets all its constants from there.

    Finds a point where dist(0, ∂H) ≤ tolerance for H = h + p − q with h σₓ-strongly convex in x,
    σᵧ-strongly concave in y and ∇h L-Lipschitz, in O(√(L²/(σₓσᵧ))·log(1/tolerance)) gradients.
    `smoothness` L is estimated if not given; σₓ and σᵧ must be known. With `max_iterations` it ends
    after so many of the algorithm's iterations k at the latest, wherever it is then, and the inner
    loop of each has at most as many. Without, an inner loop has at most 48√2·(1 + 8L/σₓ), which is
    what the theory allows it: with an L that is too small, or at rounding, it would never end.
    """

    form: ClassVar[type[Form]] = MinimaxProblem
    has_theorem: ClassVar[bool] = True

    strong_convexity: Any = None
    strong_concavity: Any = None
    smoothness: Any = None
    tolerance: Any = None
    max_iterations: int | None = eqx.field(static=True, default=None)

    def __check_init__(self):
        check_positive(self, "strong_convexity", "strong_concavity", "smoothness", "tolerance")
        check_most(self)

    @property
    def gradients_per_step(self) -> int:
        return 2

    def prepare(self, problem: MinimaxProblem, start: Point, tolerance: float) -> OptFOM:
        require(problem, MinimaxProblem, "OptFOM")
        for name in ("strong_convexity", "strong_concavity"):
            if getattr(self, name) is None:
                raise ValueError(
                    f"OptFOM needs {name}: it solves strongly-convex-strongly-concave problems "
                    "only. Give it, or use bilevax.ProximalPoint(), which makes such problems"
                )
        dtype = trees.dtype_of((start.x, start.y))
        smoothness = smoothness_of(problem, start) if self.smoothness is None else self.smoothness
        largest = max(float(self.strong_convexity), float(self.strong_concavity))
        if largest > float(smoothness) * (1 + 1e-6):
            raise ValueError(
                f"OptFOM: strong_convexity and strong_concavity cannot exceed smoothness, but "
                f"{largest:g} > {float(smoothness):g}"
            )
        return self.tuned(
            jnp.asarray(smoothness, dtype),
            jnp.asarray(self.strong_convexity, dtype),
            jnp.asarray(self.strong_concavity, dtype),
            jnp.asarray(tolerance if self.tolerance is None else self.tolerance, dtype),
        )

    def tuned(self, smoothness: Any, sigma_x: Any, sigma_y: Any, tolerance: Any) -> OptFOM:
        """The same method with these constants, which may be traced."""
        return dataclasses.replace(
            self,
            smoothness=smoothness,
            strong_convexity=sigma_x,
            strong_concavity=sigma_y,
            tolerance=tolerance,
        )

    def init(self, problem: MinimaxProblem, start: Point) -> OptFOMState:
        layout = Layout.of((start.x, start.y))
        w = layout.ravel((start.x, start.y))
        zero = jnp.zeros((), int)
        return OptFOMState(
            momentum=w,
            settled=w,
            anchor=w,
            half=w,
            landed=w,
            beta=jnp.zeros((), w.dtype),
            mode=zero + OPEN,
            inner=zero,
            iteration=zero,
            finished=jnp.asarray(False),
            cut=jnp.asarray(False),
            gradients=zero,
            layout=layout,
        )

    def step(self, problem: MinimaxProblem, state: OptFOMState, limit: Array) -> OptFOMState:
        s, layout = state, state.layout
        sigma_x, sigma_y, smoothness = self.strong_convexity, self.strong_concavity, self.smoothness
        x_size = sum(leaf.size for leaf in jax.tree.leaves(layout.unravel(s.landed)[0]))
        in_x = jnp.arange(s.landed.size) < x_size

        def each(for_x: Array, for_y: Array) -> Array:
            """A coefficient of its own for the entries of x and of y."""
            return jnp.where(in_x, for_x, for_y)

        # Line 2.
        alpha = jnp.minimum(1, jnp.sqrt(8 * sigma_y / sigma_x))
        eta_y = jnp.minimum(1 / (2 * sigma_y), 4 / (alpha * sigma_x))
        gamma = 8 / sigma_x
        short = gamma / (2 * math.sqrt(5) * (1 + 8 * smoothness / sigma_x))
        closing_step = jnp.minimum(sigma_x, sigma_y) / smoothness**2
        zero = jnp.zeros_like(sigma_x)

        def shortest(w: Array, direction: Array) -> Array:
            """The shortest vector of ∂H. In float32 a step ζ̂ ~ σ/L² drowns `slope` in rounding."""
            (x, y), (gx, minus_gy) = layout.unravel(w), layout.unravel(direction)
            return layout.ravel((problem.x.residual(x, gx), problem.y.residual(y, minus_gy)))

        opened = alpha * s.momentum + (1 - alpha) * s.settled  # (x^{k,−1}, y^{k,−1}), lines 4–5
        # a^k = operator + pull∘(w − opened): with z_g = −σₓ·opened, aₓ = ∇ₓĥ + σₓ/2·(x − z_g/σₓ)
        # and ∇ₓĥ = ∇ₓh̄ − σₓx leave −σₓ/2·(x − opened); aᵧ has σₓ/8·(y − y_g).
        pull = each(-sigma_x / 2, sigma_x / 8)

        # The prox step from `base` along the operator at `probe`.
        is_open, is_close = s.mode == OPEN, s.mode == CLOSE
        pulled = s.landed + s.beta * (s.anchor - s.landed)
        probe = jnp.where(is_open, opened, jnp.where(is_close, s.momentum, s.half))
        base = jnp.where(is_open, opened, jnp.where(is_close, s.momentum, pulled))
        step = jnp.where(is_close, closing_step, short)
        back = jnp.where(is_close, 0, pull * (probe - opened))
        target = base - step * (operator(problem, layout, probe) + back)
        landed = flat_prox(problem, layout, target, step)
        there = operator(problem, layout, landed)
        slope = there + (target - landed) / step  # operator + b, in ∂H at `landed`

        # One sum serves both tests: line 11, γ‖a + b‖² ≤ ‖w − opened‖²/γ, inside an iteration, and
        # after the closing step line 28, the length of `slope`.
        far = landed - opened
        rest = slope + pull * far
        ending = slope if landed.dtype == jnp.float64 else shortest(landed, there)
        measured = jnp.sum(jnp.where(is_close, ending**2, gamma * rest**2 - far**2 / gamma))
        inner = jnp.where(is_open, 0, s.inner + 1)
        most = jnp.ceil(48 * math.sqrt(2) * (1 + 8 * smoothness / sigma_x))
        most = most.astype(inner.dtype) if self.max_iterations is None else self.max_iterations
        endless = ~is_close & (measured > 0) & (inner >= most)
        ends = (~is_close & (measured <= 0)) | endless
        met = is_close & (measured <= self.tolerance**2)
        iteration = s.iteration + is_close.astype(int)
        last = is_close & ~met & reached(iteration, self.max_iterations)

        # Inside an iteration: the next extrapolation, lines 12–14.
        anchor = jnp.where(is_open, landed, s.anchor)
        beta = 2 / (inner + 3).astype(landed.dtype)
        half = landed + beta * (anchor - landed) - short * rest

        # Where it ends: lines 20–24. With η_z = σₓ/2 the update of z is x ← x + ½(x_f − x).
        settled = landed - each(1 / sigma_x, zero) * slope
        toward = each(zero + 0.5, eta_y * sigma_y) * (landed - s.momentum)
        momentum = s.momentum + toward - each(zero, eta_y) * slope

        following = jnp.where(is_close, OPEN, jnp.where(ends, CLOSE, EXTRAPOLATE))
        return OptFOMState(
            momentum=jnp.where(ends, momentum, s.momentum),
            settled=jnp.where(ends, settled, s.settled),
            anchor=anchor,
            half=half,
            landed=landed,
            beta=beta,
            mode=jnp.asarray(following, s.mode.dtype),
            inner=inner,
            iteration=iteration,
            finished=met | last,
            cut=s.cut | endless | last,
            gradients=s.gradients + 2,
            layout=layout,
        )

    def done(self, problem: MinimaxProblem, state: OptFOMState) -> Array:
        return state.finished

    def cut_short(self, state: OptFOMState) -> Array:
        return state.cut

    def output(self, problem: MinimaxProblem, state: OptFOMState) -> Point:
        x, y = state.layout.unravel(state.landed)
        return Point(x=x, y=y)
