"""Every instance of the library by the paper's method and by Adaptive, against the closed forms.

python benchmarks/library.py --json benchmarks/results/library.json
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path

import jax

import bilevax as bx
from bilevax import trees
from bilevax.problems import library

METHODS = {"paper": bx.PenaltyMethod, "adaptive": bx.Adaptive}


def measure(name: str, method: str, epsilon: float, max_gradients: int) -> dict[str, float | str]:
    instance = library.get(name)
    bounds = bx.theory.predict(instance.problem, instance.start, epsilon).bounds
    solution = bx.solve(
        instance.problem,
        instance.start,
        tolerance=epsilon,
        solver=METHODS[method](),
        max_gradients=max_gradients,
    )
    found, known = solution.point, instance.point
    miss = trees.norm(trees.subtract((found.x1, found.y1), (known.x1, known.y1)))
    return {
        "instance": name,
        "method": method,
        "tolerance": epsilon,
        "status": solution.status.code,
        "epsilon": solution.certificate.epsilon,
        "gap": solution.certificate.as_dict()["gap"],
        "gradients": solution.gradients,
        "theorem_N": bounds.N,
        "seconds": solution.seconds,
        "compile_seconds": solution.compile_seconds,
        "distance_to_answer": float(miss),
        "objective": solution.certificate.objective,
        "known_objective": instance.value,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    # The paper's method takes minutes for one problem at 0.01.
    parser.add_argument("--paper", type=float, nargs="*", default=[0.1, 0.01], metavar="ε")
    parser.add_argument(
        "--adaptive", type=float, nargs="*", default=[0.01, 1e-4, 1e-6], metavar="ε"
    )
    parser.add_argument("--max-gradients", type=int, default=100_000_000)
    parser.add_argument("--json", type=Path, help="write the results there")
    args = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    rows = []
    print(
        f"{'instance':<16} {'method':<9} {'ε':>6} {'status':<13} {'certified':>10} "
        f"{'gradients':>11} {'miss':>8}"
    )
    todo = [(method, epsilon) for method in METHODS for epsilon in getattr(args, method)]
    for name in library.INSTANCES:
        for method, epsilon in todo:
            row = measure(name, method, epsilon, args.max_gradients)
            rows.append(row)
            print(
                f"{name:<16} {method:<9} {epsilon:>6g} {row['status']:<13} {row['epsilon']:>10.2e} "
                f"{row['gradients']:>11,} {row['distance_to_answer']:>8.4f}",
                flush=True,
            )
    if args.json:
        command = shlex.join(["python", *sys.argv])
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps({"command": command, "results": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
