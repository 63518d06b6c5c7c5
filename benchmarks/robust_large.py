"""Seconds and memory of the robust classifiers on many rows.

python benchmarks/robust_large.py --json benchmarks/results/robust_large.json

Rows are normal, labels come from a linear model that an attribute bends; groups are label ×
attribute. Every fit is a process of its own, so that its peak of memory can be read; the memory of
the rows themselves is part of it.
"""

from __future__ import annotations

import argparse
import json
import resource
import shlex
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from bilevax.learn import (
    GroupDROClassifier,
    TailRiskClassifier,
    TunedGroupDROClassifier,
    TunedTailRiskClassifier,
)

MODELS: dict[str, Any] = {
    "GroupDRO": lambda: GroupDROClassifier(0.1),
    "GroupDRO, all rows from the start": lambda: GroupDROClassifier(0.1, solver="newton"),
    "GroupDRO, tol 0.01": lambda: GroupDROClassifier(0.1, tol=1e-2),
    "TailRisk": lambda: TailRiskClassifier(),
    "TunedGroupDRO": lambda: TunedGroupDROClassifier(random_state=0),
    "TunedGroupDRO, all rows from the start": lambda: TunedGroupDROClassifier(
        random_state=0, solver="newton"
    ),
    "TunedTailRisk": lambda: TunedTailRiskClassifier(random_state=0),
}
#: What is measured where: of the largest table only one fit.
SIZES = {(1_000_000, 100): list(MODELS), (5_000_000, 200): ["GroupDRO, tol 0.01"]}


def rows(n: int, d: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    draw = np.random.default_rng(0)
    x = draw.standard_normal((n, d))
    attribute = draw.integers(0, 2, n)
    w = draw.standard_normal(d) / np.sqrt(d)
    score = x @ w + (2 * attribute - 1) * 0.8 * x[:, 0] + 0.7 * draw.standard_normal(n)
    y = (score > 0.4).astype(int)
    return x, y, 2 * y + attribute


def one(n: int, d: int, name: str) -> dict[str, Any]:
    x, y, groups = rows(n, d)
    model = MODELS[name]()
    began = time.perf_counter()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model.fit(x, y, groups) if "Group" in name else model.fit(x, y)
    seconds = time.perf_counter() - began
    tuned = hasattr(model, "certificate_")
    return {
        "rows": n,
        "columns": d,
        "model": name,
        "solver": model.solver_,
        "seconds": seconds,
        "peak_gigabytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6,
        "rows_gigabytes": x.nbytes / 1e9,
        "certified": model.certificate_.epsilon if tuned else model.gap_,
        "warnings": [str(w.message) for w in said],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--one", nargs=3, metavar=("ROWS", "COLUMNS", "MODEL"))
    parser.add_argument("--json", type=Path, help="write the results there")
    args = parser.parse_args()
    if args.one:
        print(json.dumps(one(int(args.one[0]), int(args.one[1]), args.one[2])))
        return
    results = []
    for (n, d), names in SIZES.items():
        for name in names:
            call = [sys.executable, __file__, "--one", str(n), str(d), name]
            done = subprocess.run(call, capture_output=True, text=True)
            if done.returncode:
                failed = {"rows": n, "columns": d, "model": name, "failed": done.stderr[-500:]}
                results.append(failed)
            else:
                results.append(json.loads(done.stdout.splitlines()[-1]))
            print(results[-1], flush=True)
    if args.json:
        record = {"command": shlex.join(["python", *sys.argv]), "results": results}
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
