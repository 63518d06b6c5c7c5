"""What can be said against a certificate: a breach of the class, or an F that falls nearby."""

from __future__ import annotations

import dataclasses
import math

from bilevax.certificates.around import compile_looks, look_around
from bilevax.certificates.breaches import breach_of, compile_breaches
from bilevax.certificates.certificate import Certificate
from bilevax.certificates.definition import definition_of
from bilevax.problems import Form, Point


def examined(
    problem: Form,
    point: Point,
    certificate: Certificate,
    *,
    epsilon: float = 0.0,
    look: bool = True,
    steps: int | None = None,
) -> Certificate:
    """The certificate of a point with all its witnesses, and what was found against it.

    `epsilon` is what is claimed, if that is more than the certificate's own. With `look`, at most
    so many steps are taken at each place around the point.
    """
    definition = definition_of(problem)
    if not math.isfinite(certificate.epsilon):
        return certificate
    breach = breach_of(definition, problem, point, certificate.allowances)
    if breach:
        return dataclasses.replace(certificate, breach=breach)
    if not look:
        return certificate
    claimed = max(certificate.epsilon, epsilon)
    around = look_around(definition, problem, point, certificate.objective, claimed, steps)
    return dataclasses.replace(certificate, looked_around=around)


def compile_examination(
    problem: Form, point: Point, certificate: Certificate, *, look: bool = True
) -> None:
    """Compile the programs of `examined`, side by side."""
    definition = definition_of(problem)
    compiled = [compile_breaches(definition, problem, point, certificate.allowances)]
    if look and definition.moving:
        compiled.append(compile_looks(definition, problem, point))
    for program in compiled:
        program.result()
