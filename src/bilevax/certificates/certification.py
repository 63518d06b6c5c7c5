"""`certify`: how good any point is, wherever it came from."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from bilevax import arguments
from bilevax.arguments import positive
from bilevax.certificates.certificate import Certificate
from bilevax.certificates.definition import definition_of, judge
from bilevax.certificates.examination import compile_examination, examined
from bilevax.certificates.sampled import (
    BATCHES,
    FEWEST,
    RUN_KEYS,
    SampledCertificate,
    averaged,
    batches_in_memory,
    drawn_batches,
    sampled_certificate,
)
from bilevax.certificates.streamed import (
    GROUPS,
    LEAST_IN_GROUP,
    held_out_means,
    streamed_certificate,
)
from bilevax.functions import up_to_date
from bilevax.problems import Form, Point
from bilevax.problems.validation import check_functions, check_point, require_form
from bilevax.programs import release_programs


def certify(
    problem: Form,
    point: Point,
    *,
    rho: Any = None,
    batches: int | None = None,
    confidence: float = 0.95,
    key: int = 0,
    look_around: bool = True,
    radius: float | None = None,
) -> Certificate:
    """Judge a point: every residual line of the definition, and their maximum ε.

    For a minimax problem: ε-stationarity of `Point(x=…, y=…)`. For a bilevel problem: ε-KKT of
    (x1, y1, y2), which asks for *some* ρ > 0 and (x2, z1, z2). A point that carries them all, as a
    solution's point does, is judged with them. Otherwise those missing are sought: z1 and z2 as
    best responses, x2 likewise from the x2 given, ρ as the best one for them. For a constrained
    bilevel problem: ε-KKT of (x, y), which asks for some ρ > 0, z, λ and λ̄; a point without all of
    them gets z and λ̄ from its lower level, solved at x, and the best ρ and λ for these. Where
    witnesses are not unique another choice may certify a smaller ε; so what is returned is always a
    true bound, but for a point without witnesses perhaps not the least.

    The lower level is also compared with what its class implies at a few dozen points of the
    domain: a breach withdraws the certificate and names the function. And it is solved again at a
    few x nearby, unless `look_around` is False or only minibatches are looked at: if F falls there
    by more than ε explains, the point is ε-KKT and yet no candidate, `looked_around` says so, and
    `certified` is False.

    Where the lower level has no bounds, and the problem no `lower_modulus`, its gap is bounded for
    all y within `radius` of this one, by default 10·(1 + ‖y‖); the certificate says so.

    The point is judged where it is; it is not projected. Outside the domain ε is infinite.

    A problem whose data is a source of minibatches is judged on all its samples, exactly, if these
    are in memory. If not, or with `batches`, so many minibatches are drawn (64 unless said, at
    least 8, from a stream of their own for `key`), and a `SampledCertificate` says what holds with
    probability `confidence`; missing witnesses are sought on as many others. From 1,024 on they are
    read one after another, and none is kept.
    """
    release_programs()
    require_form(problem)
    problem = up_to_date(problem).within(radius)
    positive(rho, "rho")
    known = problem.complete()
    if batches is not None and not problem.sampled:
        raise ValueError("batches: the problem's data is no source of minibatches")
    if known is None or batches is not None:
        return _sampled(problem, point, rho, batches, confidence, key)
    point = _with_witnesses(known, point, rho)
    certificate = judge(known, point, sizes=True)
    compile_examination(known, point, certificate, look=look_around)
    return examined(known, point, certificate, look=look_around)


def _with_witnesses(problem: Form, point: Point, rho: Any) -> Point:
    point = check_point(problem, point)
    check_functions(problem, point)
    return definition_of(problem).with_witnesses(problem, point, rho)


def _sampled(
    problem: Form, point: Point, rho: Any, batches: int | None, confidence: float, key: int
) -> SampledCertificate:
    count = BATCHES if batches is None else batches
    arguments.whole(count, "batches", FEWEST)
    arguments.whole(key, "key", 0)
    if key >= RUN_KEYS:
        raise ValueError(f"key must be below {RUN_KEYS}, not {key}")
    arguments.probability(confidence, "confidence")
    many = count >= GROUPS * LEAST_IN_GROUP
    kept = batches_in_memory(problem) if many else count
    # Witnesses that fit the samples they are judged on would look better than they are.
    drawn = drawn_batches(problem, 2 * kept, key)
    half = lambda begin: jax.tree.map(lambda b: b[begin : begin + kept], drawn)
    point = _with_witnesses(averaged(problem, half(0)), point, rho)
    seen = averaged(problem, half(kept))
    estimate = examined(seen, point, judge(seen, point, sizes=True), look=False)
    if not many:
        return sampled_certificate(problem, point, half(kept), estimate, confidence)
    means = held_out_means(problem, point, count, key, skip=2 * kept)
    assert means is not None  # it is never too late
    found = streamed_certificate(problem, point, means, estimate.allowances, confidence, sizes=True)
    return dataclasses.replace(found, breach=estimate.breach)
