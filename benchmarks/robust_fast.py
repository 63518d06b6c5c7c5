"""`bilevax robust --fast` on a raw CSV file of many rows: seconds, memory, lines of progress.

python benchmarks/robust_fast.py --json benchmarks/results/robust_fast.json

Of the columns 14 are numbers, 4 categories, one is a date and one money; groups are label × region.
The command runs in a process of its own, reading of the file included.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

#: What is asked for: seconds and gigabytes.
MOST_SECONDS, MOST_GIGABYTES = 60, 2.0


def write(path: Path, n: int, columns: int) -> None:
    """Rows whose label an attribute bends, as text."""
    draw = np.random.default_rng(0)
    numbers = draw.standard_normal((n, columns - 6))
    region = draw.choice(["north", "south"], n)
    score = numbers[:, :5].sum(axis=1) + np.where(region == "north", 1, -1) * numbers[:, 5]
    label = np.where(score + draw.standard_normal(n) > 0.5, "yes", "no")
    table = pd.DataFrame(numbers.round(4), columns=[f"x{j}" for j in range(columns - 6)])
    for j, many in enumerate((3, 5, 12)):
        table[f"kind{j}"] = draw.choice([f"k{i}" for i in range(many)] + ["?"], n)
    day: Any = pd.Timestamp("2015-01-01") + pd.to_timedelta(draw.integers(0, 3000, n), "D")
    table["since"] = day.strftime("%d.%m.%Y")
    table["pay"] = pd.Series(draw.integers(1000, 9000, n)).map("${:,}".format)
    table["region"], table["label"] = region, label
    table.to_csv(path, index=False)


def measured(n: int, columns: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "raw.csv"
        write(path, n, columns)
        given = ["robust", "raw.csv", "--label", "label", "--group", "region", "--fast"]
        load, began = os.getloadavg()[0], time.perf_counter()
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(
            [sys.executable, "-m", "bilevax", *given], cwd=folder, capture_output=True, text=True
        )
        seconds, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
        out = Path(folder) / "robust" / "results.json"
        results = json.loads(out.read_text()) if out.exists() else None
        return {
            "rows": n,
            "columns": columns,
            "file_megabytes": path.stat().st_size / 1e6,
            "call": shlex.join(["bilevax", *given]),
            "exit": done.returncode,
            "seconds": seconds,
            "cpu_seconds": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
            "peak_gigabytes": after.ru_maxrss * 1024 / 1e9,
            "load": [load, os.getloadavg()[0]],
            "fit_seconds": results and {m["name"]: m["seconds"] for m in results["methods"]},
            "worst_accuracy": results
            and {m["name"]: m["worst"]["value"] for m in results["methods"]},
            "epsilon": results and results["certificate"]["epsilon"],
            "certified": results and results["certified"],
            "stderr": done.stderr.splitlines(),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=500_000)
    parser.add_argument("--columns", type=int, default=20)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the results there")
    args = parser.parse_args()
    results = []
    for _ in range(args.repetitions):
        results.append(measured(args.rows, args.columns))
        print(json.dumps(results[-1], indent=1), flush=True)
    if args.json:
        record = {
            "command": shlex.join(["python", *sys.argv]),
            "cores": os.cpu_count(),
            "targets": {"seconds": MOST_SECONDS, "gigabytes": MOST_GIGABYTES},
            "results": results,
        }
        args.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
