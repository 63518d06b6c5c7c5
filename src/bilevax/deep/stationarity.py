"""How stationary a trained head is, with the encoder frozen.

A frozen encoder makes features of the images, and the features are data. What is left of a method's
problem is one that bilevax certifies. L_g(h) is the mean cross entropy of the head h over the
training rows of group g, V_g(h) that over the validation rows; there are G groups, K classes, and Δ
is the simplex. Features are those of evaluation: no augmentation, running statistics.

BilevelDRO, `eq:dro_nested` with x1 = η: ε-KKT of

    min over η ≥ 1e-6 and (y1, y2), max over x2 in Δ of  Σ_g x2_g·V_g(y1),  where (y1, y2) is a
    saddle point of  Σ_g y2_g·L_g(y1) − η/2·‖y2 − 1/G‖² + l2/2·‖y1‖²,  ‖y1‖ ≤ R, y2 in Δ,

with the witnesses z1, z2 and ρ of the method's state. The ball makes the gap of a sampled
certificate finite, and changes nothing: whatever y2 is, the best head h has l2/2·‖h‖² ≤ log K, the
value at h = 0, so ‖h‖ ≤ √(2·log(K)/l2). R is at least that, and twice the norms of y1 and z1, so
that these are inside. Where l2 = 0 there is no ball, and the gap and ε are infinite.

GroupDRO: ε-stationarity of (h, q) in

    min over h, max over q in Δ of  Σ_g q_g·(L_g(h) + C/√n_g) − η/2·‖q − 1/G‖² + l2/2·‖h‖².

ERM: the same with C = η = 0 and q fixed at n_g/n, which is the mean loss of all n rows.

With radii L_g is the bound of `ambiguity`, which is log K at h = 0, too; radii that are tuned are
in x1, between 0 and their bound. V_g has none. Where training rows lack groups there is no
certificate: with soft groups L_g is a quotient, which minibatches do not give without bias.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import Partial
from jaxtyping import Array

from bilevax.certificates import SampledCertificate, certify
from bilevax.certificates.sampled import largest_normal_share
from bilevax.data import Levels, Stratified
from bilevax.deep.ambiguity import worst_losses
from bilevax.deep.bilevel import LEAST_ETA, BilevelDRO, BilevelState
from bilevax.deep.losses import cross_entropy, group_means
from bilevax.deep.methods import ERM, GroupDRO, Method, WeightedState
from bilevax.deep.networks import scores
from bilevax.deep.pixels import Images
from bilevax.problems import BilevelProblem, MinimaxProblem, Point
from bilevax.terms import Box, Free, L2Ball, Ridge, Simplex, Term
from bilevax.trees import Tree

#: Minibatches that a certificate draws, and the most rows and entries that one has.
BATCHES, ROWS, ENTRIES = 128, 256, 1 << 18
CONFIDENCE = 0.95


def head_certificate(
    method: Method, state: Any, images: Images, features: dict[str, np.ndarray]
) -> dict[str, Any] | None:
    """The lines of a `SampledCertificate` as plain numbers; None where there is no such problem.

    `features` has those of the training and of the validation rows. What is infinite is None.
    """

    def source(split: str) -> Stratified:
        rows, own = images.rows(split), features[split]
        arrays = {"features": own, "label": images.label[rows], "group": images.group[rows]}
        batch = max(min(ROWS, ENTRIES // own.shape[1], len(rows)), len(images.groups))
        return Stratified(arrays, groups=arrays["group"], batch=batch)

    if images.unknown:
        return None
    # Copies on one device: the arrays of a run may lie on many.
    copy = lambda a: jnp.asarray(np.asarray(a)) if eqx.is_array(a) else a
    found = head_problem(*jax.tree.map(copy, (method, state)), source, images.counts[0])
    if found is None:
        return None
    with jax.numpy_dtype_promotion("standard"):  # float32 data where float64 is the default
        certificate = certify(*found, batches=BATCHES, confidence=CONFIDENCE)
    assert isinstance(certificate, SampledCertificate)
    numbers = {"kind": type(certificate.estimate).__name__, **certificate.as_dict()}
    finite = lambda v: v if isinstance(v, str) or math.isfinite(v) else None
    return {name: finite(value) for name, value in numbers.items()}


def sentence(numbers: dict[str, Any]) -> str:
    """One line for a person."""
    kind = "ε-KKT" if numbers["kind"] == "KKTCertificate" else "ε-stationary"
    shown = lambda name: "∞" if numbers[name] is None else f"{numbers[name]:.3g}"
    probability = f"with probability {100 * numbers['confidence']:.0f} %"
    estimate = f"estimate {shown('estimated_epsilon')}; encoder frozen"
    said = f"The head is {kind} with ε ≤ {shown('epsilon')}, {probability} ({estimate})."
    share = numbers.get("largest_share")  # which results of earlier versions do not have
    heavy = share is not None and share > largest_normal_share(int(numbers["batches"]))
    return said + (" Tails are heavy: the probability is not to be trusted." if heavy else "")


def weighted_loss(
    groups: int, eta: Any, bonus: Any, radii: Any, head: Array, weights: Array, batch: Tree
) -> Array:
    """Σ_g w_g·(L_g(head) + bonus_g) − η/2·‖w − 1/G‖², with L_g the mean over the batch's rows."""
    features, label = batch["features"], batch["label"]
    if radii is None:
        losses = cross_entropy(scores(features, head), label)
    else:
        losses = worst_losses(features, head, label, radii)
    means = group_means(losses, batch["group"], groups)
    far = jnp.sum((weights - 1 / groups) ** 2)
    return jnp.sum(weights * (means + bonus)) - eta / 2 * far


def upper(groups: int, x1: Tree, x2: Array, y1: Array, y2: Array, batch: Tree) -> Array:
    return weighted_loss(groups, 0.0, 0.0, None, y1, x2, batch)


def lower(groups: int, radii: Any, x1: Tree, y1: Array, y2: Array, batch: Tree) -> Array:
    """x1 is η, or η and the radii."""
    eta, own = (x1["eta"], x1["radii"]) if isinstance(x1, dict) else (x1, radii)
    return weighted_loss(groups, eta, 0.0, own, y1, y2, batch)


@functools.singledispatch
def head_problem(method: Method, state: Any, source: Any, counts: np.ndarray) -> Any:
    """The problem of a method with its encoder frozen, and the point that a state is.

    `source` makes the source of a split's minibatches; `counts` are the training rows of groups.
    """
    return None


@head_problem.register
def _(method: BilevelDRO, state: BilevelState, source: Any, counts: np.ndarray) -> Any:
    l2 = float(method.l2)
    head: Term = Free()
    if l2 > 0:
        norms = [2 * float(jnp.linalg.norm(h)) for h in (state.y1, state.y.z1)]
        head = Ridge(l2) + L2Ball(max(math.sqrt(2 * math.log(state.y1.shape[0]) / l2), *norms))
    x1, domain = state.eta, Box(LEAST_ETA, np.inf)
    if method.bound is not None:
        x1 = {"eta": x1, "radii": state.radii}
        domain = {"eta": domain, "radii": Box(0.0, float(method.bound))}
    problem = BilevelProblem(
        Partial(upper, method.groups),
        Partial(lower, method.groups, method.radii),
        x1=domain,
        x2=Simplex(),
        y1=head,
        y2=Simplex(),
        data=Levels(upper=source("validation"), lower=source("train")),
    )
    y = state.y
    point = Point(x1=x1, x2=y.x2, y1=state.y1, y2=state.y2, z1=y.z1, z2=y.z2, rho=method.rho)
    return problem, point


@head_problem.register
def _(method: GroupDRO, state: WeightedState, source: Any, counts: np.ndarray) -> Any:
    bonus = method.adjustment * method.counts**-0.5
    loss = Partial(weighted_loss, method.groups, method.eta, bonus, method.radii)
    problem = MinimaxProblem(loss, _ridge(method.l2), Simplex(), data=source("train"))
    return problem, Point(x=state.head, y=state.weights)


@head_problem.register
def _(method: ERM, state: WeightedState, source: Any, counts: np.ndarray) -> Any:
    shares = jnp.asarray(counts / counts.sum(), jnp.float32)
    loss = Partial(weighted_loss, method.groups, 0.0, 0.0, None)
    problem = MinimaxProblem(loss, _ridge(method.l2), Box(shares, shares), data=source("train"))
    return problem, Point(x=state.head, y=shares)


def _ridge(l2: Any) -> Term:
    return Ridge(float(l2)) if float(l2) > 0 else Free()
