"""Suites of small bilevel problems with known answers, read from JSON.

A record is the problem: minimise F(x, y) over x and y subject to G(x, y) ≤ 0, H(x, y) = 0 and
bounds, where y minimises f(x, ·) subject to g(x, ·) ≤ 0, h(x, ·) = 0 and bounds.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np

from bilevax.arguments import whole
from bilevax.bench.expressions import Expression, parse


@dataclasses.dataclass(frozen=True, eq=False)
class Answer:
    """Values F and f and the point where they are taken, as far as they are given."""

    F: float | None
    f: float | None
    x: np.ndarray | None
    y: np.ndarray | None


@dataclasses.dataclass(frozen=True, eq=False)
class Record:
    """One problem of a suite. Bounds are arrays of rows (lower, upper), possibly infinite.

    `published` is the suite's label, which may be wrong; `found` is a later re-solve. `best_known`
    is F of the latter where there is one, else of the former, and None where nobody knows or where
    the problem has no feasible point, which `infeasible` says. Where the suite does not say whose
    the bounds on y are, they are taken for the lower level's, and `y_bounds_assumed` is True.
    """

    name: str
    category: str
    n_x: int
    n_y: int
    x_bounds: np.ndarray
    y_bounds: np.ndarray
    y_bounds_in_lower_level: bool
    y_bounds_assumed: bool
    upper: Expression
    upper_constraints: tuple[Expression, ...]
    upper_equalities: tuple[Expression, ...]
    lower: Expression
    lower_constraints: tuple[Expression, ...]
    lower_equalities: tuple[Expression, ...]
    published: Answer
    found: Answer | None
    best_known: float | None
    infeasible: bool
    convex: bool
    upper_constraints_involve_y: bool
    check: str

    @property
    def reference(self) -> Answer:
        """The answer to compare with: the one found, where there is one."""
        return self.published if self.found is None else self.found


@dataclasses.dataclass(frozen=True)
class Refusal:
    """A record that could not be read: its name, or else its number, and why."""

    name: str
    reason: str


@dataclasses.dataclass(frozen=True)
class Suite:
    """The problems of a file, and what else there was in it."""

    records: tuple[Record, ...]
    refused: tuple[Refusal, ...]


def load(path: str | Path) -> Suite:
    """The records of a suite file. A file without one that can be read is an error."""
    path = Path(path)
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise FileNotFoundError(f"cannot read the suite {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the suite {path} is not JSON: {error}") from None
    if not isinstance(data, list):
        raise ValueError(f"the suite {path} must be a list of records")
    records: dict[str, Record] = {}
    refused = []
    for number, entry in enumerate(data):
        name = entry.get("name") if isinstance(entry, dict) else None
        try:
            record = _record(entry)
            if record.name in records:
                raise ValueError("an earlier record has the same name")
            records[record.name] = record
        except (TypeError, ValueError, OverflowError) as error:
            known = name if isinstance(name, str) else f"record {number}"
            refused.append(Refusal(known, str(error)))
    if not records:
        reasons = "".join(f"\n{refusal.name}: {refusal.reason}" for refusal in refused)
        raise ValueError(f"the suite {path} has no record that can be read{reasons}")
    return Suite(tuple(records.values()), tuple(refused))


def _record(entry: Any) -> Record:
    if not isinstance(entry, dict):
        raise ValueError(f"must be an object, not {entry!r}")
    get = lambda field, kind: _field(entry, field, kind)
    n_x, n_y = get("n_x", int), get("n_y", int)
    whole(n_x, "n_x", 0)
    whole(n_y, "n_y", 1)

    def function(field: str, text: Any) -> Expression:
        try:
            return parse(text, n_x, n_y)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{field}: {error}") from None

    functions: dict[str, Any] = {}
    for level in ("upper", "lower"):
        functions[level] = function(level, get(level, str))
        for field in (f"{level}_constraints", f"{level}_equalities"):
            functions[field] = tuple(function(field, text) for text in get(field, list))
    label = get("best_known", dict)
    # A published point of the wrong size is left out; a found one is an error.
    published = _answer(label, n_x, n_y, "best_known", fitting=False)
    found = entry.get("best_found")
    if found is not None:
        found = _answer(get("best_found", dict), n_x, n_y, "best_found", fitting=True)
    inside = get("y_bounds_in_lower_level", bool | None)
    return Record(
        **{field: get(field, str) for field in ("name", "category", "check")},
        **functions,
        y_bounds_in_lower_level=inside is not False,
        y_bounds_assumed=inside is None,
        upper_constraints_involve_y=get("upper_constraints_involve_y", bool),
        n_x=n_x,
        n_y=n_y,
        x_bounds=_bounds(get("x_bounds", list), n_x, "x_bounds"),
        y_bounds=_bounds(get("y_bounds", list), n_y, "y_bounds"),
        published=published,
        found=found,
        best_known=published.F if found is None or found.F is None else found.F,
        infeasible=label.get("infeasible", False) is True,
        convex=get("lower_level_convex", bool),
    )


def _field(entry: dict[str, Any], field: str, kind: Any) -> Any:
    if field not in entry:
        raise ValueError(f"the field {field} is missing")
    value = entry[field]
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        name = kind.__name__ if isinstance(kind, type) else kind
        raise ValueError(f"{field} must be of type {name}, not {value!r}")
    return value


def _bounds(rows: list[Any], size: int, field: str) -> np.ndarray:
    """Rows (lower, upper); null is no bound."""
    if len(rows) != size:
        raise ValueError(f"{field} has {len(rows)} rows for {size} variables")
    bounds = np.empty((size, 2))
    for i, row in enumerate(rows):
        if not isinstance(row, list) or len(row) != 2:
            raise ValueError(f"{field}[{i}] must be a pair [lower, upper], not {row!r}")
        low, high = (_number(number, f"{field}[{i}]") for number in row)
        low, high = -np.inf if low is None else low, np.inf if high is None else high
        if not (low <= high and low < np.inf and high > -np.inf):
            raise ValueError(f"{field}[{i}] must be in order, not {row!r}")
        bounds[i] = low, high
    bounds.setflags(write=False)
    return bounds


def _answer(entry: dict[str, Any], n_x: int, n_y: int, field: str, *, fitting: bool) -> Answer:
    def point(key: str, size: int) -> np.ndarray | None:
        numbers = entry.get(key)
        if numbers is None:
            return None
        if not isinstance(numbers, list) or (fitting and len(numbers) != size):
            raise ValueError(f"{field}.{key} must be a list of {size} numbers, not {numbers!r}")
        if len(numbers) != size:
            return None
        array = np.array([_number(number, f"{field}.{key}") for number in numbers], float)
        array.setflags(write=False)
        return array

    value = lambda key: _number(entry.get(key), f"{field}.{key}")
    return Answer(value("F"), value("f"), point("x", n_x), point("y", n_y))


def _number(value: Any, field: str) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
        raise ValueError(f"{field} must be a number or null, not {value!r}")
    return float(value)
