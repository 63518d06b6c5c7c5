"""What a certificate costs, beside another version's; and what it costs to look around a point.

    python benchmarks/certifying.py --other /path/to/checkout \
        --json benchmarks/results/certifying.json

Each case is a problem with a point that has all its witnesses, in a process of its own:

- `first`: the CPU seconds of the first `bx.certify`, which are those of compilation, and `again`:
  the median of the next ones. Without looking around, which the other version may not know.
- `look`: the CPU seconds that looking around adds to the first and to the next certificates.

For problems that are solved, `solve` is the CPU seconds of `bx.solve` without looking around, and
`looking` those that looking around adds, both from a fresh process.
"""

from __future__ import annotations

import argparse
import inspect
import json
import statistics
import time
from pathlib import Path
from typing import Any

import versions

JUDGED = ("saddle", "logistic", "least squares", "constrained")
SOLVED = ("saddle", "constrained", "ridge")
REPEATS = 9


def case(name: str) -> tuple[Any, Any]:
    """A problem and a point."""
    import jax.numpy as jnp
    import numpy as np

    import bilevax as bx
    from bilevax.terms import Box, Simplex

    rng = np.random.default_rng(0)
    if name == "saddle":
        n = 20
        data = {"A": rng.normal(size=(n, n)) / n**0.5, "b": rng.normal(size=n)}
        upper = lambda x1, x2, y1, y2, d: (
            jnp.sum((y1 - d["b"]) ** 2) + x2 @ (d["A"] @ x1) + jnp.sum(x1**2)
        )
        lower = lambda x1, y1, y2, d: jnp.sum((y1 - x1) ** 2) + y2 @ (d["A"] @ y1)
        blocks = {"x1": Box(-1.0, 1.0), "x2": Simplex(), "y1": Box(-1.0, 1.0), "y2": Simplex()}
        w = jnp.full(n, 1 / n)
        point = bx.Point(x1=w, x2=w, y1=w, y2=w, z1=w, z2=w, rho=jnp.asarray(10.0))
        return bx.BilevelProblem(upper, lower, data=data, **blocks), point
    if name in ("logistic", "ridge"):
        rows, columns = (20_000, 200) if name == "logistic" else (300, 5)
        X = rng.normal(size=(rows, columns))
        t = np.sign(X @ rng.normal(size=columns) + rng.normal(size=rows))
        loss = lambda y, d: jnp.mean(jnp.log1p(jnp.exp(-d["t"] * (d["X"] @ y))))
        lower = lambda x1, y1, y2, d: loss(y1, d) + jnp.exp(x1) * jnp.sum(y1**2)
        upper = lambda x1, x2, y1, y2, d: loss(y1, d) + 0.01 * x1**2
        problem = bx.BilevelProblem(
            upper, lower, x1=Box(-3.0, 1.0), y1=Box(-1.0, 1.0), data={"X": X, "t": t}
        )
        w = jnp.full(columns, 0.01)
        return problem, bx.Point(x1=jnp.asarray(0.0), y1=w, z1=w, rho=jnp.asarray(10.0))
    if name == "least squares":
        n = 1000
        lower = lambda x1, y1, y2, d: jnp.sum((d @ y1 - x1) ** 2) / 2
        upper = lambda x1, x2, y1, y2, d: jnp.sum((x1 - 1) ** 2) + jnp.sum(y1**2)
        box, w = Box(-1.0, 1.0), jnp.full(n, 0.01)
        problem = bx.BilevelProblem(upper, lower, x1=box, y1=box, data=rng.normal(size=(n, n)))
        return problem, bx.Point(x1=w, y1=w, z1=w, rho=jnp.asarray(10.0))
    wanted = jnp.asarray([2.0, 1.5])
    problem = bx.ConstrainedBilevelProblem(
        upper=lambda x, y: 0.1 * jnp.sum(y**2) - jnp.sum(x * y),
        lower=lambda x, y: 0.5 * jnp.sum(y**2) - jnp.sum((wanted - x) * y),
        constraints=lambda x, y: jnp.stack([y[0] - 0.8, y[1] - 0.8, y[0] + y[1] - 1.0]),
        x=Box(0.0, 2.0),
        y=Box(0.0, 2.0),
    )
    lam = jnp.full(3, 0.1)
    y = jnp.full(2, 0.25)
    multipliers = bx.Multipliers(lam=lam, lam_bar=lam)
    point = bx.Point(x=jnp.ones(2), y=y, z=y, rho=jnp.asarray(10.0), multipliers=multipliers)
    return problem, point


def cpu(function: Any) -> float:
    begun = time.process_time()
    function()
    return time.process_time() - begun


def judged(name: str) -> dict[str, Any]:
    import bilevax as bx

    problem, point = case(name)
    looks = "look_around" in inspect.signature(bx.certify).parameters
    certify = lambda **options: lambda: bx.certify(problem, point, **options)
    quiet = {"look_around": False} if looks else {}
    repeated = lambda **options: statistics.median(cpu(certify(**options)) for _ in range(REPEATS))
    found = {"first": cpu(certify(**quiet)), "again": repeated(**quiet)}
    if looks:
        found["first_look"] = cpu(certify())
        found["look"] = repeated() - found["again"]
    return found


def solved(name: str, look: bool) -> dict[str, Any]:
    import bilevax as bx

    problem, point = case(name)
    blocks = {block: getattr(point, block) for block in problem.blocks if block in point.blocks}
    options = {"look_around": look, "progress": False, "max_gradients": 100_000}
    begun = time.process_time()
    solution = bx.solve(problem, bx.Point(**blocks), **options)
    seconds = time.process_time() - begun
    return {"seconds": seconds, "status": solution.status.code, "gradients": solution.gradients}


def child(arguments: list[str]) -> None:
    import jax

    jax.config.update("jax_enable_x64", True)
    kind, name, *rest = arguments
    found = judged(name) if kind == "judge" else solved(name, rest == ["look"])
    print(json.dumps(found))


def measure(place: str | None) -> dict[str, list[dict[str, Any]]]:
    certificates = []
    for name in JUDGED:
        for version in versions.versions(place):
            (found,) = version.run(__file__, "--child", "judge", name)
            certificates.append({"case": name, "version": version.name} | found)
    solves = []
    for name in SOLVED:
        (without,) = versions.this().run(__file__, "--child", "solve", name)
        (with_look,) = versions.this().run(__file__, "--child", "solve", name, "look")
        looking = max(with_look["seconds"] - without["seconds"], 0.0)
        row = {"case": name, "solve": without["seconds"], "looking": looking}
        solves.append(row | {key: with_look[key] for key in ("status", "gradients")})
    return {"certificates": certificates, "solves": solves}


def table(results: dict[str, list[dict[str, Any]]]) -> str:
    from bilevax.bench.output import aligned

    lines = [["case", "", "this", "other", "this/other"]]
    by_key = {(row["case"], row["version"]): row for row in results["certificates"]}
    for name in JUDGED:
        this, other = by_key[name, "this"], by_key.get((name, "other"), {})
        for measure in ("first", "again"):
            ratio = f"{this[measure] / other[measure]:.2f}" if measure in other else "-"
            beside = f"{other[measure]:.4f}" if measure in other else "-"
            lines.append([name, measure, f"{this[measure]:.4f}", beside, ratio])
        lines.append([name, "look, first", f"{this['first_look']:.4f}", "-", "-"])
        lines.append([name, "look, again", f"{this['look']:.4f}", "-", "-"])
    solves = [["case", "solve", "looking", "looking/solve", "status"]]
    for row in results["solves"]:
        share = f"{row['looking'] / row['solve']:.2f}"
        cells = [f"{row['solve']:.2f}", f"{row['looking']:.2f}", share, row["status"]]
        solves.append([row["case"], *cells])
    return "\n".join([aligned(lines, left=(0, 1)), "", aligned(solves, left=(0,))])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    versions.add_other(parser)
    parser.add_argument("--json", type=Path, help="write the results there")
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args.child)
        return
    results: dict[str, Any] = measure(args.other)
    print(table(results))
    if args.json:
        versions.write(args.json, results)


if __name__ == "__main__":
    main()
