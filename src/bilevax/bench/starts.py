"""Starting points for a suite's problems, strictly feasible for the lower level."""

from __future__ import annotations

import numpy as np

from bilevax.arguments import whole
from bilevax.bench.expressions import Expression, Linear
from bilevax.bench.lower_level import clipped, linearised, lower_violation, slsqp, upper_violation
from bilevax.bench.records import Record

# Where a variable has no bound, starts are drawn this far from zero.
REACH = 100.0
# The share of the greatest slack that a start must have. With less, starts are more spread.
SHARE = 0.25
_FEASIBLE = 1e-7


def starting_points(record: Record, count: int, seed: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Up to `count` points (x, y) that meet the lower constraints and, if possible, the upper.

    The first is sought near the middle of the boxes, the others near random points of them: the
    nearest one whose slack in the lower constraints is a share of the greatest slack t. So y is a
    Slater point of the lower level at x, wherever t > 0. Fewer come where no more are found.
    """
    whole(count, "count", 0)
    rng = np.random.default_rng(seed)
    box = clipped(np.concatenate([record.x_bounds, record.y_bounds]), REACH)
    samples = [box.mean(axis=1), *(rng.uniform(*box.T) for _ in range(2 * count + 8))]
    region = _start_region(record, box, samples[:5])
    if region is None:
        return []
    found: list[np.ndarray] = []
    for sample in samples:
        if len(found) >= count:
            break
        z = region.nearest(sample)
        if z is None:
            continue
        if region.near_one_of(z, found):
            # Many samples have the same nearest point. Take one on the way to the centre.
            z = z + rng.uniform() * (region.centre - z)
        if region.contains(z) and not region.near_one_of(z, found):
            found.append(z)
    return [(z[: record.n_x], z[record.n_x :]) for z in found]


def _start_region(record: Record, box: np.ndarray, samples: list[np.ndarray]) -> _Region | None:
    """The region of starts: with the upper constraints and y off its bounds, if that can be."""
    for upper in (True, False):
        for off_bounds in (True, False):
            region = _Region(record, box, upper=upper, off_bounds=off_bounds)
            feasible = region.find_centre(samples)
            if feasible and (region.slack > 1e-6 or not off_bounds):
                return region
    return None


class _Region:
    """The points z = (x, y) that satisfy the lower constraints and, with `upper`, the upper ones.

    `centre` is the point of the greatest slack found, which is `slack`.

    Off its bounds, y keeps the same slack to them as to the lower constraints.
    """

    def __init__(self, record: Record, box: np.ndarray, *, upper: bool, off_bounds: bool):
        self.record, self.box, self.upper = record, box, upper
        self.off_bounds = off_bounds
        self.width = np.maximum(box[:, 1] - box[:, 0], 1e-12)
        self.middle = box.mean(axis=1)
        self.without_slack = record.upper_constraints if upper else ()
        self.exact = record.lower_equalities + (record.upper_equalities if upper else ())
        # Slack is measured in shares of what a constraint changes over the box: by the median of
        # three slopes, since that in the middle may vanish (y²) and others be huge (exp y).
        places = [self.point(np.full(len(box), share)) for share in (0.25, 0.5, 0.75)]
        changes = [np.abs(self.functions(record.lower_constraints, z)[1]) for z in places]
        slopes = np.median(np.nan_to_num(changes, nan=0.0, posinf=0.0), axis=0)
        self.scales = np.maximum(slopes @ self.width, 1e-3)
        self.centre, self.slack = self.middle, -np.inf

    def functions(self, functions: tuple[Expression, ...], z: np.ndarray) -> Linear:
        return linearised(functions, z[: self.record.n_x], z[self.record.n_x :])

    def violation(self, z: np.ndarray) -> float:
        x, y = z[: self.record.n_x], z[self.record.n_x :]
        lower = lower_violation(self.record, x, y)
        return max(lower, upper_violation(self.record, x, y)) if self.upper else lower

    def with_slack(self, z: np.ndarray) -> Linear:
        """The functions that shall be ≤ −slack, and their slopes in units of the box."""
        g, Dg = self.functions(self.record.lower_constraints, z)
        values, slopes = g / self.scales, Dg * self.width / self.scales[:, None]
        if self.off_bounds:
            y, unit = self.unit(z)[self.record.n_x :], np.eye(len(z))[self.record.n_x :]
            values, slopes = np.concatenate([values, -y, y - 1]), np.vstack([slopes, -unit, unit])
        return values, slopes

    def slack_of(self, z: np.ndarray) -> float:
        """The slack of the tightest; 1 where there is none."""
        return float(np.min(-self.with_slack(z)[0], initial=1.0))

    @property
    def required_slack(self) -> float:
        """The slack that a start must have."""
        return SHARE * max(self.slack, 0.0)

    def contains(self, z: np.ndarray) -> bool:
        """Whether z is feasible, with at least half of the slack that was aimed at."""
        enough = self.slack_of(z) >= self.required_slack / 2 - _FEASIBLE
        return self.violation(z) <= _FEASIBLE and enough

    def inequalities(self, z: np.ndarray, slack: float) -> Linear:
        """All that shall be ≤ 0, those with slack first."""
        g, Dg = self.with_slack(z)
        G, DG = self.functions(self.without_slack, z)
        return np.concatenate([g + slack, G]), np.concatenate([Dg, DG * self.width])

    def near_one_of(self, z: np.ndarray, others: list[np.ndarray]) -> bool:
        """Whether x, or y where there is no x, is within 0.1 % of the box of another point's."""
        which = slice(self.record.n_x or None)
        apart = (np.abs(self.unit(z) - self.unit(other))[which] for other in others)
        return any(np.all(gaps <= 1e-3) for gaps in apart)

    def point(self, u: np.ndarray) -> np.ndarray:
        """z for u in the unit box, in which SLSQP works."""
        return self.box[:, 0] + u * self.width

    def unit(self, z: np.ndarray) -> np.ndarray:
        return (z - self.box[:, 0]) / self.width

    def equalities(self, u: np.ndarray) -> Linear:
        h, Dh = self.functions(self.exact, self.point(u))
        return h, Dh * self.width

    def find_centre(self, samples: list[np.ndarray]) -> bool:
        """Maximise the slack t ≤ 1 over (z, t); whether a feasible point came out."""
        n = len(self.width)
        down = np.concatenate([np.zeros(n), [-1.0]])
        column = lambda D, last: np.concatenate([D, np.reshape(last, (len(D), 1))], axis=1)

        def inequalities(v: np.ndarray) -> Linear:
            values, slopes = self.inequalities(self.point(v[:n]), v[n])
            has_slack = np.arange(len(values)) < len(values) - len(self.without_slack)
            return values, column(slopes, has_slack)

        def equalities(v: np.ndarray) -> Linear:
            h, Dh = self.equalities(v[:n])
            return h, column(Dh, np.zeros(len(h)))

        unit_box = np.array([[0.0, 1.0]] * n + [[-10.0, 1.0]])
        for sample in samples:
            begin = np.concatenate([self.unit(sample), [max(-10.0, self.slack_of(sample))]])
            end = slsqp(lambda v: (-v[n:], down[None]), inequalities, equalities, begin, unit_box)
            z = self.point(end[:n])
            if self.violation(z) <= _FEASIBLE and self.slack_of(z) > self.slack:
                self.centre, self.slack = z, self.slack_of(z)
            if self.slack > 1 - 1e-6:
                break
        return bool(self.slack > -np.inf)

    def nearest(self, sample: np.ndarray) -> np.ndarray | None:
        """The point nearest to the sample, above all in x, with its share of the slack."""
        target = self.unit(sample)
        # y counts only as much as makes the nearest point unique.
        weight = np.where(np.arange(len(target)) < self.record.n_x, 1.0, 1e-2)
        distance = lambda u: (
            np.sum(weight * (u - target) ** 2, keepdims=True),
            2 * (weight * (u - target))[None],
        )
        unit_box = np.tile([0.0, 1.0], (len(target), 1))
        inequalities = lambda u: self.inequalities(self.point(u), self.required_slack)
        for begin in (target, self.unit(self.centre)):
            u = slsqp(distance, inequalities, self.equalities, begin, unit_box)
            if self.contains(self.point(u)):
                return self.point(u)
        return None
