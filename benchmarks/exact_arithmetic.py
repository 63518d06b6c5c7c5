"""Whether any line of a certificate is smaller than it truly is, and how much larger: by 80 bits.

    python benchmarks/exact_arithmetic.py --json benchmarks/results/exact_arithmetic.json

Random problems of six laws (`exact_laws.py`): boxes, simplices, balls, constrained lower levels,
those badly scaled by powers of ten up to 10^±8, and all in float32. Half of the points are random,
half are planted: all distances are zero there but for rounding, as where a solver ends. Every line
that a certificate claims is compared with the same line in 80-bit arithmetic of the numbers as
given (`exact_reference.py`), and in 60 digits where 80 bits leave open which is larger.

A line is understated if it is below the exact one by more than 1e-15 of that. `allowance` is what
of a line is there for rounding. The true error is how far the rest of the line is off; the error of
its vector is the norm of what is wrong in the vector whose norm the line is, by JAX's gradients in
the working precision: an allowance has to cover it in whatever direction it points.
"""

from __future__ import annotations

import argparse
import collections
import json
import math
import shlex
import sys
import time
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import jax
import numpy as np

import exact_reference as ref
from bilevax.certificates.definition import judge
from bilevax.programs import quick
from exact_laws import KINDS, SHAPES, Draw, Drawn
from exact_reference import LONG

LAWS = ("box", "simplex", "ball", "constrained", "badly scaled", "float32")
LOSSES = tuple(ref.LOSSES)
QUANTILES = (0.05, 0.5, 0.95)
# Below the exact line by more than this share of it is understated.
SHARE = 1e-15
# What is above the exact number by less than this share of the vector's error is settled in 60
# digits: of that error 80 bits leave 1/2048, or 2^−40 for float32.
CLOSE = 1 / 8


def draw(law: str, number: int, seed: int) -> Drawn:
    """The problem of that number: the same whatever else is drawn."""
    rng = np.random.default_rng([seed, LAWS.index(law), number])
    kinds = {"badly scaled": tuple(KINDS)[:3], "float32": tuple(KINDS)}.get(law, (law,))
    # Half of the problems of every combination have planted points.
    combined = number // 2
    kind = kinds[combined % len(kinds)]
    which = combined // len(kinds) % len(LOSSES)
    shapes = SHAPES[kind]
    other = 0 if law == "float32" else combined // (len(kinds) * len(LOSSES)) % 2
    shape = shapes[(which + other) % len(shapes)]
    dtype = np.float32 if law == "float32" else np.float64
    return Draw(kind, LOSSES[which], shape, dtype, rng, law == "badly scaled").problem(number)


# ---------------------------------------------------------------------------------------------
# The error of the vectors, by JAX's gradients
# ---------------------------------------------------------------------------------------------


@quick
def _bilevel_gradients(problem: Any, p: Any) -> Any:
    of_lower = jax.value_and_grad(problem.smooth_lower, argnums=(0, 1, 2))
    upper = problem.upper_gradient(p.x1, p.x2, p.y1, p.y2)
    return upper, of_lower(p.x1, p.y1, p.z2), of_lower(p.x1, p.z1, p.y2)


def _dot(multipliers: Any, values: Any) -> Any:
    leaves = zip(jax.tree.leaves(multipliers), jax.tree.leaves(values))
    return sum((m * v).sum() for m, v in leaves)


@quick
def _constrained_gradients(problem: Any, p: Any) -> Any:
    m, called = p.multipliers, problem.called

    def above(x: Any, y: Any) -> tuple:
        c, e = called("constraints", x, y), called("equalities", x, y)
        G, g = called("upper_constraints", x, y), problem.smooth_lower(x, y)
        weighed = _dot((m.lam, m.nu, m.upper_lam), (c, e, G))
        return problem.smooth_upper(x, y) + p.rho * g + weighed, (g, c, e, G)

    def below(x: Any, z: Any) -> tuple:
        c, e = called("constraints", x, z), called("equalities", x, z)
        return problem.smooth_lower(x, z) + _dot((m.lam_bar, m.nu_bar), (c, e)), (c, e)

    slopes = lambda function: jax.value_and_grad(function, argnums=(0, 1), has_aux=True)
    return slopes(above)(p.x, p.y), slopes(below)(p.x, p.z)


def computed_parts(drawn: Drawn) -> dict[str, Any]:
    """As `Drawn.parts`, but values and gradients are JAX's in the working precision."""
    rho = ref.exact(drawn.numbers["rho"])
    long = lambda tree: jax.tree.map(ref.exact, jax.device_get(tree))
    if drawn.constrained:
        ((_, (g, c, e, G)), (ax, ay)), ((dual, (c_z, e_z)), (bx, bz)) = long(
            _constrained_gradients(drawn.problem, drawn.point)
        )
        parts = {"x": ax - rho * bx, "y": ay, "z": bz, "value": g, "dual": dual, "G": G}
        return parts | {"c_y": np.append(*c), "e_y": e, "c_z": np.append(*c_z), "e_z": e_z}
    upper, (above, a), (below, b) = long(_bilevel_gradients(drawn.problem, drawn.point))
    named = lambda names, parts: {n: v for n, v in zip(names, parts) if v is not None}
    lower = ("x1", "y1", "y2")
    f = named(("x1", "x2", "y1", "y2"), upper)
    return ref.bilevel_vectors(rho, f, named(lower, a), named(lower, b), above, below)


def vector_errors(drawn: Drawn) -> dict[str, float]:
    """For each line the norm of the error of its vector.

    For gaps it is the sum over their parts, which may cancel where y is z.
    """
    truth, found = drawn.parts(), computed_parts(drawn)
    p = ref.exact(drawn.numbers)
    with np.errstate(invalid="ignore"):
        off = {name: np.abs(found[name] - truth[name]) for name in truth}
    size = lambda *names: ref.norm(np.concatenate([off[n].ravel() for n in names if n in off]))

    def reach(name: str) -> Any:
        """The error of a slope over the way to where its tangent is best."""
        if name not in off:
            return 0 * p["rho"]
        domain = drawn.domains[ref.DOMAIN_OF[name]].to(LONG)
        return size(name) * ref.norm(domain.best(-truth[name]) - p[name])

    if not drawn.constrained:
        responses = {"x2": 1.0, "z1": p["rho"], "z2": p["rho"]}
        errors = {f"response_{n}": by * size(n) for n, by in responses.items() if n in off}
        errors["stationarity"] = size("x1", "y1", "y2")
        errors["gap"] = off["above"] + off["below"] + reach("z1") + reach("z2")
    else:
        weigh = lambda m, name: np.sum(np.abs(p[m]) * off[name])
        errors = {
            "stationarity": size("x", "y"),
            "response_z": p["rho"] * size("z"),
            "feasibility_z": size("c_z", "e_z"),
            "complementarity_z": weigh("lam_bar", "c_z") + weigh("nu_bar", "e_z"),
            "lower_gap": off["value"] + off["dual"] + reach("z"),
            "feasibility": size("c_y", "e_y"),
            "complementarity": weigh("lam", "c_y") + weigh("nu", "e_y"),
            "upper_feasibility": size("G"),
            "upper_complementarity": weigh("upper_lam", "G"),
        }
    return {name: float(error) for name, error in errors.items()}


# ---------------------------------------------------------------------------------------------
# Claims against the truth
# ---------------------------------------------------------------------------------------------


def compared(drawn: Drawn, *, by_vectors: bool = True) -> list[dict[str, Any]]:
    """Of every line what is claimed, what is true, and the errors; and of the gap its lower bound.

    Without `by_vectors` all is settled in 60 digits, and the errors of the vectors are not known.
    """
    certificate = judge(drawn.problem, drawn.point)
    allowances = getattr(certificate, "allowances", None)
    sums = allowances is not None  # since then complementarity is the sum of |λᵢcᵢ|
    claims = certificate.lines()
    with np.errstate(over="ignore"):
        exact: dict[str, Any] = drawn.lines(LONG, sums=sums)
        errors = vector_errors(drawn) if by_vectors else dict.fromkeys(claims, math.inf)
        below = drawn.gap_below(LONG)

    def close(name: str, value: Any) -> bool:
        return claims[name] < value * (1 + 4 * SHARE) + CLOSE * errors.get(name, 0.0)

    if any(close(name, value) for name, value in exact.items()):
        exact = drawn.lines(Decimal, sums=sums)
    gap = "lower_gap" if drawn.constrained else "gap"
    if close(gap, below):
        below = drawn.gap_below(Decimal)
    rows = []
    for name, claim in claims.items():
        # A line of something absent is zero, and so is one of nothing but zeros.
        if claim == 0 and exact[name] == 0:
            continue
        row = {"line": name, "loss": drawn.loss, "points": drawn.how, "claimed": claim}
        row |= difference(claim, exact[name]) | {"vector_error": errors.get(name, 0.0)}
        if name == gap:
            row["beneath"] = difference(claim, below)["understated"]
        if allowances is not None and math.isfinite(claim):
            row["allowance"] = float(allowances[name])
            rest = claim - row["allowance"]
            row["error"] = abs(difference(rest, exact[name])["excess"])
        rows.append(row)
    return rows


def difference(claim: float, exact: Any) -> dict[str, Any]:
    """How far a claim is above the exact number, without a rounding of the difference."""
    if not math.isfinite(exact):
        raise ArithmeticError(f"the reference has found {exact}")
    if not math.isfinite(claim):
        return {"exact": float(exact), "excess": math.inf, "understated": False}
    kind = Decimal if isinstance(exact, Decimal) else LONG
    excess = ref.exact(claim, kind) - exact
    share = float(-excess / exact) if excess < 0 and exact > 0 else 0.0
    return {
        "exact": float(exact),
        "excess": float(excess),
        "understated": share > SHARE,
        "share": share,
    }


def measured(law: str, count: int, seed: int) -> Iterator[dict[str, Any]]:
    for number in range(count):
        for row in compared(draw(law, number, seed)):
            yield row | {"law": law, "number": number}


# ---------------------------------------------------------------------------------------------
# Summaries
# ---------------------------------------------------------------------------------------------


def quantiles(values: list[float]) -> list[float] | None:
    """The 5, 50 and 95 % quantiles; None where there is nothing."""
    return [rounded(v) for v in np.quantile(values, QUANTILES, method="lower")] if values else None


def rounded(value: float) -> float:
    return float(f"{value:.4g}")


def ratios(rows: list[dict[str, Any]], above: str, below: str) -> list[float] | None:
    known = [row for row in rows if above in row and math.isfinite(row[above])]
    return quantiles([r[above] / r[below] for r in known if 0 < r[below] < math.inf])


KEPT = ("law", "line", "loss", "points", "number", "claimed", "exact", "vector_error")


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    wrong = [row for row in rows if row["understated"]]
    worst = max(wrong, key=lambda row: row["share"], default=None)
    return {
        "lines": len(rows),
        "infinite": sum(math.isinf(row["claimed"]) for row in rows),
        "understated": len(wrong),
        "worst_share": rounded(worst["share"]) if worst else 0.0,
        "beneath_the_gap": sum(row.get("beneath", False) for row in rows),
        "allowance_over_error": ratios(rows, "allowance", "error"),
        "allowance_over_vector_error": ratios(rows, "allowance", "vector_error"),
        "excess_over_vector_error": ratios(rows, "excess", "vector_error"),
        "worst": {name: worst[name] for name in KEPT} if worst else None,
    }


def grouped(rows: list[dict[str, Any]], *names: str) -> list[dict[str, Any]]:
    groups = collections.defaultdict(list)
    for row in rows:
        groups[tuple(row[name] for name in names)].append(row)
    return [dict(zip(names, key)) | summary(part) for key, part in groups.items()]


def shown(values: list[float] | None) -> str:
    return "/".join("–" if v is None else f"{v:.1e}" for v in values or [None] * 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1000, help="problems of each law")
    parser.add_argument("--laws", nargs="+", choices=LAWS, default=LAWS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the results there")
    args = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    if np.finfo(LONG).nmant != 63:
        raise SystemExit("numpy.longdouble is not of 80 bits here")
    rows: list[dict[str, Any]] = []
    for law in args.laws:
        begin = time.perf_counter()
        rows += measured(law, args.count, args.seed)
        own = [row for row in rows if row["law"] == law]
        print(f"{law}: {args.count} problems, {time.perf_counter() - begin:.0f} s")
        for group in grouped(own, "line"):
            print(
                f"  {group['line']:<21} {group['lines']:>5} lines  understated "
                f"{group['understated']:>4}, worst {group['worst_share']:.1e}, beneath the gap "
                f"{group['beneath_the_gap']:>3}; allowance over error "
                f"{shown(group['allowance_over_error'])}, over the vector's "
                f"{shown(group['allowance_over_vector_error'])}, excess over it "
                f"{shown(group['excess_over_vector_error'])}",
                flush=True,
            )
    if args.json:
        where = {"jax": jax.__version__, "numpy": np.__version__}
        record = {
            "command": shlex.join(["python", *sys.argv]),
            "where": where | {"device": jax.devices()[0].device_kind},
            "count": args.count,
            "has_allowances": any("allowance" in row for row in rows),
            "results": grouped(rows, "law", "line"),
            "by_loss": grouped(rows, "law", "loss"),
            "by_points": grouped(rows, "law", "points"),
        }
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(record, indent=1, allow_nan=False) + "\n")


if __name__ == "__main__":
    main()
