"""What `people.py` measured, as a table and as a performance profile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

Rows = list[dict[str, Any]]

#: A run has solved a problem if its repaired objective is off by at most this share.
SOLVED = 1e-3
HEADER = (
    *("problem", "method", "status", "ε", "ρ", "newton steps", "gradients", "seconds"),
    *("compiling", "objective", "repaired", "reference", "off"),
)


def off(repaired: float | None, reference: float | None) -> float | None:
    """How much greater the objective is than the least known, as a share of it unless that is 0."""
    if repaired is None or reference is None:
        return None
    return (repaired - reference) / (abs(reference) if abs(reference) > 1e-6 else 1.0)


def text(rows: Rows) -> str:
    """The table, and below it what runs said that raised."""
    from bilevax.bench.output import aligned

    lines = aligned([list(HEADER), *map(_cells, rows)], left=(0, 1, 2))
    said = [f"{_title(row)}, {row['method']}: {row['message']}" for row in rows if "message" in row]
    return "\n".join([lines, *([""] if said else []), *said])


def _title(row: dict[str, Any]) -> str:
    return f"{row['name']}, start {row['start'] + 1}" if row.get("start") else row["name"]


def _cells(row: dict[str, Any]) -> list[str]:
    shown = lambda key, form: "-" if row.get(key) is None else format(row[key], form)
    # Steps of IPOPT and of L-BFGS stand where bilevax has its Newton steps.
    steps = "iterations" if "iterations" in row else "linear_solves"
    return [
        _title(row),
        row.get("method", "-"),
        row["status"],
        shown("epsilon", ".1e"),
        shown("rho", ".1e"),
        shown(steps, ",d"),
        shown("gradients", ",d"),
        shown("seconds", ".2f"),
        shown("compile_seconds", ".1f"),
        shown("objective", ".7g"),
        shown("repaired", ".7g"),
        shown("reference", ".7g"),
        shown("off", "+.1e"),
    ]


def solved(row: dict[str, Any]) -> bool:
    return row.get("off") is not None and row["off"] <= SOLVED and row.get("seconds") is not None


def ratios(rows: Rows) -> dict[str, list[float]]:
    """For each method how many times the fastest method's seconds it needed, where it solved."""
    problems: dict[str, Rows] = {}
    first = [row for row in rows if not row.get("start")]  # the others run from one start only
    for row in first:
        problems.setdefault(row["name"], []).append(row)
    found: dict[str, list[float]] = {row["method"]: [] for row in first}
    for own in problems.values():
        times = {row["method"]: max(row["seconds"], 1e-3) for row in own if solved(row)}
        for method, seconds in times.items():
            found[method].append(seconds / min(times.values()))
    return found


def profile(rows: Rows, path: Path) -> None:
    """The share of problems that each method solves within a multiple of the fastest's time."""
    from bilevax.bench.output import figure

    count = len({row["name"] for row in rows})
    path.parent.mkdir(parents=True, exist_ok=True)
    with figure(path, 1, (7, 4.5)) as (_, (ax,)):
        by_method = ratios(rows)
        far = 2 * max((ratio for own in by_method.values() for ratio in own), default=10.0)
        for method, own in by_method.items():
            applies = len({row["name"] for row in rows if row.get("method") == method})
            at = [1.0, *sorted(own), far]
            share = [sum(ratio <= place for ratio in own) / count for place in at]
            label = f"{method} (ran on {applies} of {count})"
            ax.step(at, share, where="post", label=label)
        ax.set(
            xscale="log",
            ylim=(0, 1.02),
            xlabel="seconds, as a multiple of the fastest method's (compilation not counted)",
            ylabel=f"share solved, off by at most {SOLVED:g}",
        )
        ax.legend(frameon=False, fontsize="small", loc="lower right")
