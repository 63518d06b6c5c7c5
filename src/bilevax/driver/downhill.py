"""From a point around which F falls, the way down to where it falls no more."""

from __future__ import annotations

from typing import Any

from bilevax.certificates import Certificate, judge
from bilevax.certificates.around import look_around
from bilevax.certificates.definition import definition_of
from bilevax.certificates.effort import is_small
from bilevax.problems import Form, Point

# How often it is looked around anew: a few times where that takes long.
ROUNDS, FEW_ROUNDS = 40, 4
# Where F falls no more, it is looked nearer by this factor, down to this share of the first radii.
NEARER, LEAST_SHARE = 10.0, 1e-4
# How exactly, as a share of the ε that is claimed.
EXACTER = 0.01


def downhill(
    problem: Form, certificate: Certificate, epsilon: float, rho: Any, steps: int
) -> Point:
    """The point to which F falls, with all its witnesses for this ρ.

    `certificate` is that of the point to begin at, around which it was looked.
    """
    definition, around, share = definition_of(problem), certificate.looked_around, 1.0
    assert around is not None
    assert around.point is not None
    point = definition.with_witnesses(problem, around.point, rho)
    for _ in range(ROUNDS if is_small(problem, point) else FEW_ROUNDS):
        objective = judge(problem, point).objective
        where = (definition, problem, point, objective, EXACTER * epsilon)
        around = look_around(*where, steps, share)
        if around is not None and around.point is not None:
            point = definition.with_witnesses(problem, around.point, rho)
        elif share <= LEAST_SHARE:
            break
        else:
            share /= NEARER
    return point
