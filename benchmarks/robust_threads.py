"""One thread of the BLAS against as many as there are cores, for products of several sizes.

python benchmarks/robust_threads.py --json benchmarks/results/robust_threads.json

Both ways take turns on the same rows, in one process. `learn/_threads.py` chooses by the size of
the products; its choice is beside. The load of the machine, which decides, is that of each moment.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import threadpoolctl

from bilevax.learn import GroupDROClassifier, TunedGroupDROClassifier, _threads
from robust_large import rows

#: Rows, columns, and what is fitted.
SIZES = [
    (12_000, 97, "tuned"),
    (12_000, 30, "tuned"),
    (2000, 10, "tuned"),
    (100_000, 20, "at a price"),
    (100_000, 200, "at a price"),
    (100_000, 400, "at a price"),
    (2000, 1000, "at a price"),
    (20_000, 800, "at a price"),
]


def fitted(x: Any, y: Any, groups: Any, what: str) -> dict[str, float]:
    model = TunedGroupDROClassifier(random_state=0) if what == "tuned" else GroupDROClassifier(0.1)
    wall, processor = time.perf_counter(), time.process_time()
    model.fit(x, y, groups)
    return {
        "seconds": time.perf_counter() - wall,
        "cpu_seconds": time.process_time() - processor,
        "load": os.getloadavg()[0],
    }


def measured(n: int, d: int, what: str, repetitions: int) -> dict[str, Any]:
    data = rows(n, d)
    chosen = _threads.SMALL
    one = min(n, _threads.CHUNK) * d**2 <= chosen
    found: dict[str, list[dict[str, float]]] = {"one": [], "all": []}
    _threads.SMALL = -1  # no limit by the library
    for _ in range(repetitions):
        with threadpoolctl.threadpool_limits(1, user_api="blas"):
            found["one"].append(fitted(*data, what))
        found["all"].append(fitted(*data, what))
    _threads.SMALL = chosen
    middle = lambda way, key: statistics.median(run[key] for run in found[way])
    return {
        "rows": n,
        "columns": d,
        "fit": what,
        "chosen": "one" if one else "all",
        **{f"{way}_{key}": middle(way, key) for way in found for key in ("seconds", "cpu_seconds")},
        "runs": found,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the results there")
    args = parser.parse_args()
    results = []
    for n, d, what in SIZES:
        results.append(measured(n, d, what, args.repetitions))
        print({key: value for key, value in results[-1].items() if key != "runs"}, flush=True)
    if args.json:
        record = {
            "command": shlex.join(["python", *sys.argv]),
            "cores": os.cpu_count(),
            "blas": [
                {key: pool.get(key) for key in ("internal_api", "version", "num_threads")}
                for pool in threadpoolctl.threadpool_info()
            ],
            "results": results,
        }
        args.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
