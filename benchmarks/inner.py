"""Which first-order method should solve Adaptive's subproblems, by measurement.

    python benchmarks/inner.py --json benchmarks/results/inner.json

Adaptive is run to 1e-2, and the ρ, proximal weights W and metric it ends with make subproblems
P_ρ + ½‖x − center‖²_W: with the center where the run began or where it ended, and solved from
either. From its end, around it, is what Adaptive would solve next. Every method works on the same
subproblem in the same metric, one step length per block, with the same first step. Counted are the
gradients until the distance of 0 from the subproblem's operator, in Adaptive's `metric`, is a share
of what it was at the start:

- extragradient: with backtracking, its last point;
- optimistic: forward-reflected-backward with line search (Malitsky and Tam 2020), which without
  constraints is Popov's method; restarted at the better of its last point and its average;
- anchored: the code of Adaptive itself, with its restarts, but weights and metric held fixed;
- primal-dual: APDB (Hamedani and Aybat 2021) with its backtracking, without the acceleration that
  needs a known strong convexity; restarted as the optimistic one;
- OptFOM: the library's, with the exact constants of strong convexity and concavity. Where these
  are too small, as for nearly all subproblems, a/2·‖x − x⁰‖² or −a/2·‖y − y⁰‖² is added, with the a
  at which a solution has half of the share as its residual: so one run for each share.

A gradient is ∇ₓ and ∇ᵧ at one point. Counts favour APDB and OptFOM: of APDB each partial gradient
that its iterates need counts half, what its backtracking needs besides nothing; OptFOM is told
constants, and the distance to the solution. What measuring takes counts for no method.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import shlex
import sys
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

import bilevax as bx
from bilevax.problems import library
from bilevax.solvers import adaptive
from bilevax.solvers.composite import ReformulatedState
from bilevax.solvers.reach import lengths
from inner_methods import METHODS, Optimal, Subproblem

LINEAR = ((100, 0), (100, 1), (500, 0))
NAMES = ("unique_saddle", "least_squares", "matrix_game", "worst_group", "trees_of_blocks")
SHARES = (1e-1, 1e-2, 1e-4, 1e-6)
# Where the center is, and where methods start.
VARIANTS = (("start", "start"), ("end", "start"), ("end", "end"))
MOST = 20_000
# How Adaptive is run before.
TOLERANCE, MOST_BEFORE = 1e-2, 30_000


@eqx.filter_jit
def race(method: Any, sub: Subproblem, start: Array, shares: Array) -> tuple[Array, Array]:
    """The gradients after which each share was reached, infinite if never; and the last point."""
    goals = shares * sub.residual(start)

    def going(carry: tuple[Any, Array]) -> Array:
        s, reached = carry
        return (s.gradients < MOST) & jnp.any(jnp.isinf(reached))

    def onwards(carry: tuple[Any, Array]) -> tuple[Any, Array]:
        s, reached = carry
        s = method.step(sub, s)
        there = sub.residual(method.point(sub, s)) <= goals
        spent = s.gradients.astype(reached.dtype)
        return s, jnp.where(there & jnp.isinf(reached) & (spent <= MOST), spent, reached)

    never = jnp.full(shares.shape, jnp.inf)
    s, reached = lax.while_loop(going, onwards, (method.init(sub, start), never))
    return reached, method.point(sub, s)


@eqx.filter_jit
def jacobian(sub: Subproblem, u: Array) -> Array:
    return jax.jacfwd(sub.operator)(u)


def learnt(problem: Any, start: bx.Point) -> tuple[Any, adaptive.AdaptiveState]:
    """The bilevel problem that Adaptive works on, and what it ends with."""
    options: dict[str, Any] = {"tolerance": TOLERANCE, "max_gradients": MOST_BEFORE}
    found = bx.solve(problem, start, solver=bx.Adaptive(), progress=False, **options).state
    s = found.solver_state
    if isinstance(s, ReformulatedState):
        problem, s = s.reformulation.problem(problem), s.inner
    if s.probing > 0:  # the next subproblem is not posed yet
        last = lambda s: s.probing > 0
        s = lax.while_loop(last, lambda s: adaptive._probe(problem, s), s)
    return problem, adaptive._begin(s) if s.event == adaptive.BEGIN else s


def posed(problem: Any, s: adaptive.AdaptiveState, w: Array) -> tuple[Subproblem, Array]:
    """The subproblem around the state's center, and the start w in its coordinates."""
    sub = Subproblem(problem, s, lengths(s.reach, s.curved), jnp.asarray(False))
    start = w / sub.root
    flat = not np.any(np.asarray(jacobian(sub, start))[~sub.in_x][:, ~sub.in_x])
    return eqx.tree_at(lambda sub: sub.flat, sub, jnp.asarray(flat)), start


def optfom(sub: Subproblem, start: Array, end: Array) -> tuple[list[Optimal], bool]:
    """For every share, with the subproblem's own constants, or where these are too small with terms
    added that cost half of what is allowed, at the solution; and whether it is monotone.
    """
    ends = [np.asarray(jacobian(sub, u)) for u in (start, end)]
    smoothness = max(np.linalg.eigvalsh(J.T @ J)[-1] ** 0.5 for J in ends)
    least = lambda J: np.linalg.eigvalsh((J + J.T) / 2)[0]
    own = np.asarray([min(least(J[p][:, p]) for J in ends) for p in (sub.in_x, ~sub.in_x)])
    methods = []
    for share in SHARES:
        needed = share * float(sub.residual(start) / sub.size(end - start)) / 2
        added = np.where(own >= needed, 0, min(needed, smoothness))
        sigmas, whole = np.maximum(own, 0) + added, smoothness + max(added)
        methods.append(Optimal(jnp.asarray(added), jnp.asarray(sigmas), jnp.asarray(whole), start))
    return methods, bool(min(own) >= -1e-9 * smoothness)


def measure(sub: Subproblem, start: Array) -> tuple[dict[str, Any], dict[str, Array]]:
    """All methods on one subproblem; and the points where they ended."""
    reached, points = {}, {}
    for name, method in METHODS.items():
        gradients, points[name] = race(method, sub, start, jnp.asarray(SHARES))
        reached[name] = gradients.tolist()
    end = min(points.values(), key=lambda u: float(sub.residual(u)))
    methods, monotone = optfom(sub, start, end)
    runs = [race(m, sub, start, jnp.asarray([share])) for m, share in zip(methods, SHARES)]
    reached["OptFOM"], points["OptFOM"] = [float(r[0]) for r, _ in runs], runs[-1][1]
    known = lambda values: [g if math.isfinite(g) else None for g in values]
    row = {
        "entries": start.size,
        "monotone": monotone,  # at both ends
        "optfom_sigmas": [m.sigmas.tolist() for m in methods],
        "optfom_smoothness": [float(m.smoothness) for m in methods],
        "gradients": {name: known(values) for name, values in reached.items()},
    }
    return row, points


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the results there")
    args = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    instances: list[tuple[str, Any]] = [
        (f"linear n = {n}, seed {k}", library.bilevel_linear(n, n, n // 20, k)) for n, k in LINEAR
    ]
    instances += [(name, library.get(name)) for name in NAMES]
    names = [*METHODS, "OptFOM"]
    print(f"{'instance':<22} {'center':<6} {'from':<6} {'share':>6}", *(f"{n:>13}" for n in names))
    rows = []
    for instance, given in instances:
        problem, state = learnt(given.problem, given.start)
        places = {"start": state.origin, "end": state.center}
        for center, start in VARIANTS:
            if (center, start) == ("end", "start") and not jnp.any(state.weights > 0):
                continue  # without weights it does not matter where the center is
            around = dataclasses.replace(state, center=places[center])
            row, _ = measure(*posed(problem, around, places[start]))
            rows.append({"instance": instance, "center": center, "start": start} | row)
            for k, share in enumerate(SHARES):
                counts = [row["gradients"][name][k] for name in names]
                cells = [f"{'never' if c is None else format(c, ',.0f'):>13}" for c in counts]
                print(f"{instance:<22} {center:<6} {start:<6} {share:>6.0e}", *cells, flush=True)
    if args.json:
        command = shlex.join(["python", *sys.argv])
        where = {"jax": jax.__version__, "device": jax.devices()[0].device_kind}
        record = {"command": command, "where": where, "shares": SHARES, "most": MOST}
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps({**record, "results": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
