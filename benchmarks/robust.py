"""Tuned group DRO against a grid of 8 η × 5 l2, on tables and on pictures.

python benchmarks/robust.py --json benchmarks/results/robust.json

The grid is what a careful person would do: 40 fits by SciPy's L-BFGS on the smooth dual form, each
begun at its neighbour's solution, and the least worst-group validation loss wins. It shares no code
with the library. BLAS has one thread throughout, with which the grid is fastest. Tuned is
`TunedGroupDROClassifier().fit` with all that it does, its certificate among it.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import jax
import numpy as np
from scipy.optimize import minimize
from scipy.special import expit
from sklearn.linear_model import LogisticRegression
from threadpoolctl import threadpool_limits

import bilevax as bx
from bilevax.learn import GroupDROClassifier, TunedGroupDROClassifier
from robust_data import Case, cases

ETAS, L2S = np.geomspace(10**1.5, 1e-2, 8), np.geomspace(1, 1e-4, 5)
Part = tuple[np.ndarray, np.ndarray, np.ndarray]


def projected(v: np.ndarray) -> np.ndarray:
    """The nearest point of the simplex."""
    falling = np.sort(v)[::-1]
    over = (np.cumsum(falling) - 1) / np.arange(1, len(v) + 1)
    return np.maximum(v - over[np.flatnonzero(falling > over)[-1]], 0)


def dual_form(part: Part, eta: float, l2: float) -> Any:
    """φ_η(L(w)) + (l2/2)‖w‖² and its gradient; the last entry of w is the intercept."""
    x, y, groups = part
    sign, count = 2.0 * y - 1, np.bincount(groups)

    def value_and_gradient(w: np.ndarray) -> tuple[float, np.ndarray]:
        margin = sign * (x @ w[:-1] + w[-1])
        losses = np.log1p(np.exp(-np.abs(margin))) + np.maximum(-margin, 0)
        means = np.bincount(groups, losses) / count
        q = projected(1 / len(count) + means / eta)
        slope = -sign * expit(-margin) * (q / count)[groups]
        value = q @ means - eta / 2 * np.sum((q - 1 / len(count)) ** 2)
        gradient = np.append(x.T @ slope + l2 * w[:-1], slope.sum())
        return float(value + l2 / 2 * w[:-1] @ w[:-1]), gradient

    return value_and_gradient


def worst_loss(w: np.ndarray, part: Part) -> float:
    x, y, groups = part
    losses = np.logaddexp(0, -(2.0 * y - 1) * (x @ w[:-1] + w[-1]))
    return float((np.bincount(groups, losses) / np.bincount(groups)).max())


def search(train: Part, held: Part) -> dict[str, Any]:
    """40 fits, each from its neighbour's solution."""
    began = time.perf_counter()
    evaluations, best = 0, {"worst_validation_loss": np.inf}
    first = np.zeros(train[0].shape[1] + 1)
    for l2 in L2S:
        w = first
        for i, eta in enumerate(ETAS):
            found = minimize(
                dual_form(train, eta, l2), w, jac=True, method="L-BFGS-B",
                options={"maxiter": 5000, "maxfun": 10000},
            )  # fmt: skip
            w, evaluations = found.x, evaluations + found.nfev
            first = w if i == 0 else first
            loss = worst_loss(w, held)
            if loss < best["worst_validation_loss"]:
                best = {"worst_validation_loss": loss, "eta": eta, "l2": l2, "w": w}
    seconds = time.perf_counter() - began
    return {**best, "seconds": seconds, "evaluations": evaluations}


def weights_of(model: Any) -> np.ndarray:
    return np.append(model.coef_[0], model.intercept_)


def tuned(train: Part, held: Part) -> dict[str, Any]:
    x, y, groups = held
    began = time.perf_counter()
    model = TunedGroupDROClassifier().fit(*train, X_val=x, y_val=y, groups_val=groups)
    seconds = time.perf_counter() - began
    return {
        "seconds": seconds,
        "eta": model.eta_,
        "l2": model.l2_,
        "epsilon": model.certificate_.epsilon,
        "certified": model.converged_,
        "steps": model.n_iter_,
        "w": weights_of(model),
    }


def plain(train: Part, weight: np.ndarray | None) -> dict[str, Any]:
    began = time.perf_counter()
    model = LogisticRegression(max_iter=5000).fit(*train[:2], sample_weight=weight)
    return {"seconds": time.perf_counter() - began, "w": weights_of(model)}


def default_dro(train: Part) -> dict[str, Any]:
    began = time.perf_counter()
    model = GroupDROClassifier().fit(*train)
    return {"seconds": time.perf_counter() - began, "gap": model.gap_, "w": weights_of(model)}


def judged(found: dict[str, Any], held: Part, test: Part) -> dict[str, Any]:
    w = found.pop("w")
    x, y, groups = test
    right = (x @ w[:-1] + w[-1] > 0) == (y == 1)
    accuracy = np.bincount(groups, right) / np.bincount(groups)
    plain = {k: v if isinstance(v, bool) else float(v) for k, v in found.items()}
    return {
        **plain,
        "worst_validation_loss": worst_loss(w, held),
        "worst_test_accuracy": float(accuracy.min()),
        "test_accuracy": float(right.mean()),
    }


def measure(case: Case, seed: int) -> dict[str, Any]:
    parts = case.draw(seed)
    train, held, test = parts["train"], parts["validation"], parts["test"]
    even = len(train[1]) / (len(np.bincount(train[2])) * np.bincount(train[2]))
    methods = {
        "erm": plain(train, None),
        "reweighted": plain(train, even[train[2]]),
        "dro": default_dro(train),
        "grid": search(train, held),
        "tuned": tuned(train, held),
    }
    return {
        "case": case.name,
        "train": case.train,
        "validation": case.validation,
        "features": train[0].shape[1],
        "seed": seed,
        "smallest_group": int(np.bincount(held[2]).min()),
        "methods": {name: judged(found, held, test) for name, found in methods.items()},
    }


def first_order(case: Case, seconds: float) -> dict[str, Any]:
    """The same bilevel problem by `bilevax.solve`'s own methods, for comparison."""
    parts = case.draw(0)
    x, y, groups = parts["validation"]
    problem, start = TunedGroupDROClassifier().problem(
        *parts["train"], X_val=x, y_val=y, groups_val=groups
    )
    solution = bx.solve(problem, start, tolerance=1e-3, max_seconds=seconds, progress=False)
    w = np.append(np.asarray(solution.point.y1["coef"])[0], solution.point.y1["intercept"])
    return {
        "case": case.name,
        "train": case.train,
        "status": solution.status.code,
        "epsilon": solution.certificate.epsilon,
        "gradients": solution.gradients,
        "seconds": solution.seconds,
        "compile_seconds": solution.compile_seconds,
        "worst_validation_loss": worst_loss(w, parts["validation"]),
    }


def line(row: dict[str, Any]) -> str:
    erm, grid, best = (row["methods"][name] for name in ("erm", "grid", "tuned"))
    loss, right = "worst_validation_loss", "worst_test_accuracy"
    return (
        f"{row['case']:<24} {row['train']:>6} seed {row['seed']}  loss {grid[loss]:.5f} → "
        f"{best[loss]:.5f}  worst accuracy {erm[right]:.3f}, {grid[right]:.3f} → {best[right]:.3f}"
        f"  seconds {grid['seconds']:.2f} → {best['seconds']:.2f}  ε {best['epsilon']:.1e}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--only", default="", help="cases whose name has this in it")
    parser.add_argument("--first-order-seconds", type=float, default=30.0)
    parser.add_argument("--json", type=Path, help="write the results there")
    args = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    chosen = [c for c in cases(args.data) if args.only in c.name]
    rows, others = [], []
    with threadpool_limits(1), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        measure(chosen[0], 0)  # nothing is loaded for the first time below
        for case in chosen:
            for seed in range(args.seeds):
                row = measure(case, seed)
                rows.append(row)
                print(line(row), flush=True)
    if args.first_order_seconds:
        for case in [c for c in chosen if c.train == 1500 and "sex" in c.name]:
            others.append(first_order(case, args.first_order_seconds))
            print(others[-1], flush=True)
    if args.json:
        record = {
            "command": shlex.join(["python", *sys.argv]),
            "results": rows,
            "first_order": others,
            "warnings": sorted({str(w.message) for w in said}),
        }
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
