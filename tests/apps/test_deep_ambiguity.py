"""Radii of features and soft groups: against brute force, and step by step against differences."""

import dataclasses

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jaxtyping import Array

import deep_transcription as reference
from bilevax.deep.ambiguity import distances, shares, worst_losses
from bilevax.deep.bilevel import BilevelDRO
from bilevax.deep.losses import means
from bilevax.deep.methods import Batch, GroupDRO
from bilevax.deep.networks import Encoder, Model

GROUPS, CLASSES, FEATURES, PIXELS = 3, 3, 4, 12
RADII = np.array([0.0, 0.3, 0.7])
RHO, TAU, SIGMA, ETA, L2, BOUND = 3.0, 0.02, 0.05, 0.8, 0.2, 0.9


def number(value):
    return jnp.asarray(value, jnp.float32)


def close(found, wanted, tolerance=2e-5):
    np.testing.assert_allclose(np.asarray(found), wanted, rtol=tolerance, atol=tolerance)


def problem(classes=CLASSES, rows=6, seed=0):
    """Features, a head and labels."""
    rng = np.random.default_rng(seed)
    features, head = rng.normal(size=(rows, FEATURES)), rng.normal(size=(classes, FEATURES))
    return features, head, rng.integers(0, classes, rows).astype(np.int32)


def worst(features, head, label, radii):
    """The bound of the module's docstring, row by row and group by group."""
    found = np.zeros((len(label), len(radii)))
    for i, (z, y) in enumerate(zip(features, label)):
        for g, r in enumerate(radii):
            terms = [(w - head[y]) @ z + r * np.linalg.norm(w - head[y]) for w in head]
            found[i, g] = np.log(np.exp(terms).sum())
    return found


def test_two_classes_have_the_worst_point_of_the_ball():
    """Nothing in the ball is worse, and the point that the closed form names is as bad."""
    features, head, label = problem(classes=2)
    found = worst_losses(number(features), number(head), jnp.asarray(label), number(RADII))
    assert found.dtype == jnp.float32
    rng = np.random.default_rng(1)
    directions = rng.normal(size=(3000, FEATURES))
    directions /= np.linalg.norm(directions, axis=1, keepdims=True)
    for i, y in enumerate(label):
        away = head[1 - y] - head[y]
        for g, r in enumerate(RADII):
            inside = features[i] + r * directions * rng.random((3000, 1)) ** (1 / FEATURES)
            at = np.concatenate([inside, [features[i] + r * away / np.linalg.norm(away)]])
            losses = reference.losses(at, head, np.full(len(at), y))[0]
            assert losses[:-1].max() <= losses[-1] + 1e-12
            assert found[i, g] == pytest.approx(losses[-1], rel=1e-5)


def test_more_classes_have_an_upper_bound_that_is_convex_in_the_head():
    features, head, label = problem()
    of = lambda h: worst(features, h, label, RADII)
    close(worst_losses(number(features), number(head), jnp.asarray(label), number(RADII)), of(head))
    rng, other = np.random.default_rng(2), problem(seed=3)[1]
    moved = rng.normal(size=(500, FEATURES))
    moved *= RADII[2] / np.linalg.norm(moved, axis=1, keepdims=True)
    for i, y in enumerate(label):
        losses = reference.losses(features[i] + moved, head, np.full(500, y))[0]
        assert losses.max() <= of(head)[i, 2]
    assert (of((head + other) / 2) <= (of(head) + of(other)) / 2 + 1e-12).all()


def test_equal_rows_of_a_head_have_a_finite_derivative():
    head = number(np.ones((CLASSES, FEATURES)))
    slope = eqx.filter_grad(lambda h: jnp.sum(distances(h)))(head)
    np.testing.assert_array_equal(slope, np.zeros((CLASSES, FEATURES)))


def test_shares_are_known_or_guessed_and_weigh_the_means():
    features, _, label = problem()
    group = np.array([0, -1, 2, -1, 1, -1], np.int32)
    v = np.random.default_rng(4).normal(size=(GROUPS, FEATURES + CLASSES))
    found = shares(number(features), jnp.asarray(label), jnp.asarray(group), number(v))
    wanted = member(features, label, group, v)
    close(found, wanted)
    values = np.random.default_rng(5).normal(size=(6, GROUPS))
    weighted = (values * wanted).sum(0) / np.maximum(wanted.sum(0), 1)
    close(means(number(values), found), weighted)
    rare = number([[0.2, 0.8, 0.0]])  # shares that sum to less than 1 count as they are
    close(means(number([5.0]), rare), [1.0, 4.0, 0.0])


# One step against the differences of P


class Linear(Encoder):
    """W·a of the flattened images."""

    weight: Array
    features: int = eqx.field(static=True)

    def __call__(self, images, statistics):
        return images.reshape(images.shape[0], -1) @ self.weight.T, self


def member(features, label, group, v):
    """m by loops."""
    found = np.zeros((len(label), GROUPS))
    for i, g in enumerate(group):
        if g >= 0:
            found[i, g] = 1
        else:
            odds = np.exp(v @ np.concatenate([features[i], np.eye(CLASSES)[label[i]]]))
            found[i] = odds / odds.sum()
    return found


def penalty(x, y, batch, soft, fixed):
    """P with l2/2·‖x1‖²; the shares see the encoder and, if it is not tuned, v of `fixed`."""
    images, label, group, train = batch
    a = images.reshape(len(images), -1)
    z, seen = a @ x["x1"].T, a @ fixed["x1"].T
    t, h = slice(0, train), slice(train, None)
    radii = x.get("radii", np.zeros(GROUPS))
    v = x["predictor"] if soft == "tuned" else fixed.get("predictor")
    share = member(seen[t], label[t], group[t], v)

    def lower(head, weights):
        losses = (worst(z[t], head, label[t], radii) * share).sum(0) / np.maximum(share.sum(0), 1)
        far = ((weights - 1 / GROUPS) ** 2).sum()
        return weights @ losses - x["eta"] / 2 * far + L2 / 2 * (head**2).sum()

    held = reference.means(reference.losses(z[h], x["y1"], label[h])[0], group[h], GROUPS)
    total = y["x2"] @ held + L2 / 2 * (x["x1"] ** 2).sum()
    if soft != "none":
        given = np.concatenate([seen[h], np.eye(CLASSES)[label[h]]], axis=1)
        of_groups = reference.losses(given, x["predictor"], group[h])[0].mean()
        total += of_groups + L2 / 2 * (x["predictor"] ** 2).sum()
    return total + RHO * (lower(x["y1"], y["z2"]) - lower(y["z1"], x["y2"]))


def slopes(value, at):
    """Central differences of value in every array of `at`."""
    found = {}
    for key, base in at.items():
        found[key] = np.zeros(np.shape(base))
        for place in np.ndindex(np.shape(base)):
            sides = []
            for step in (1e-6, -1e-6):
                moved = np.array(base, np.float64)
                moved[place] += step
                sides.append(value({**at, key: moved}))
            found[key][place] = (sides[0] - sides[1]) / 2e-6
    return found


def drawn(seed, unknown):
    """A batch of 6 training and 6 validation rows, every second training row without a group."""
    rng = np.random.default_rng(seed)
    images = rng.normal(size=(12, 2, 2, 3)).astype(np.float32)
    label = rng.integers(0, CLASSES, 12).astype(np.int32)
    group = np.resize(np.arange(GROUPS), 12).astype(np.int32)
    group[:6:2] = -1 if unknown else group[:6:2]
    given = [jnp.asarray(part) for part in (images, label, group)]
    return Batch(*given, 6), (images.astype(np.float64), label, group, 6)


@eqx.filter_jit
def step(method, state, batch):
    return method.step(state, batch)


@pytest.mark.parametrize(
    ("soft", "bound"),
    [
        pytest.param("none", BOUND, id="radii"),
        pytest.param("tuned", BOUND, id="radii and tuned soft groups"),
        pytest.param("predicted", None, id="fixed radii and predicted soft groups"),
    ],
)
def test_a_bilevel_step_is_that_of_the_differences_of_the_penalty(soft, bound):
    rng = np.random.default_rng(6)
    W = rng.normal(0, 0.4, (FEATURES, PIXELS))
    head = rng.normal(0, 0.4, (CLASSES, FEATURES))
    method = BilevelDRO(
        GROUPS, rho=number(RHO), tau=number(TAU), sigma=number(SIGMA), eta=number(ETA),
        l2=number(L2), epsilon=number(0.0), theta=number(0.0), radii=number(RADII),
        bound=bound and number(bound), soft_groups=soft,
    )  # fmt: skip
    state = method.init(Model(Linear(weight=number(W), features=FEATURES), number(head)))
    for seed in (1, 2):  # away from the start, where many terms are 0
        state = step(method, state, drawn(seed, soft != "none")[0])
    wide = lambda value: np.asarray(value, np.float64)
    x = {"x1": wide(state.encoder.weight)}
    names = ("eta", "y1", "y2", "radii", *(["predictor"] if soft != "none" else []))
    x |= {name: wide(getattr(state, name)) for name in names}
    y = {name: wide(getattr(state.y, name)) for name in ("x2", "z1", "z2")}
    batch, data = drawn(3, soft != "none")
    after = step(method, state, batch)
    up = slopes(lambda moved: penalty(x, moved, data, soft, x), y)
    up = {name: y[name] + SIGMA * up[name] for name in y}
    up |= {name: reference.to_simplex(up[name]) for name in ("x2", "z2")}
    for name, wanted in up.items():
        close(getattr(after.y, name), wanted)
    down = slopes(lambda moved: penalty(moved, up, data, soft, x), x)
    assert np.abs(down["radii"]).max() > 1e-2
    down = {name: x[name] - TAU * down[name] for name in x}
    down["y2"] = reference.to_simplex(down["y2"])
    down["radii"] = RADII if bound is None else np.clip(down["radii"], 0, bound)
    close(after.encoder.weight, down.pop("x1"))
    for name, wanted in down.items():
        close(getattr(after, name), wanted)
    assert (float(after.group_loss) > 0) if soft != "none" else (after.group_loss is None)


def test_radii_stay_within_their_bound():
    """With a step far too long. Their slope is ρ·(∂f~(x1, y1, z2) − ∂f~(x1, z1, y2)), and ∂f~ grows
    with the head: the shorter one of y1 and z1 says where radii go."""
    method = BilevelDRO(
        GROUPS, rho=1e3, tau=1e2, sigma=0.0, l2=0.0, optimizer=optax.sgd(0.0), radii=number(RADII),
        bound=number(BOUND),
    )  # fmt: skip
    head, short = number(problem()[1]), number(0.1 * problem()[1])
    encoder = Linear(weight=number(np.eye(FEATURES, PIXELS)), features=FEATURES)
    begun = method.init(Model(encoder, head))
    for y1, z1, wanted in ((head, short, 0), (short, head, BOUND)):
        state = dataclasses.replace(begun, y1=y1, y=dataclasses.replace(begun.y, z1=z1))
        close(step(method, state, drawn(0, False)[0]).radii, np.full(GROUPS, wanted), 1e-7)


def test_radii_that_do_not_fit_the_groups_are_refused():
    for given, says in (
        ({"radii": [0.1]}, r"one number for each of the 3 groups, not an array of shape \(1,\)"),
        ({"radii": [0.1, -0.1, 0]}, "radii must be finite and ≥ 0"),
        ({"bound": 1.0}, "a bound is of radii"),
        ({"radii": [0, 0, 0.1], "bound": -1.0}, "bound must be finite and > 0"),
        ({"radii": [0, 0, 0.1], "bound": 0.05}, "radii must be at most bound=0.05"),
        ({"soft_groups": "hard"}, "soft_groups must be 'none' or 'predicted' or 'tuned'"),
    ):
        with pytest.raises(ValueError, match=says):
            BilevelDRO(GROUPS, **given)
    with pytest.raises(ValueError, match="radii must be finite"):
        GroupDRO(optax.sgd(0.1), np.ones(GROUPS), radii=[0, 0, np.nan])


def test_group_dro_with_radii_steps_down_its_worst_losses():
    """One step with q fixed: the differences of Σ_g q_g·L_g in the encoder and the head."""
    rng = np.random.default_rng(7)
    x = {"W": rng.normal(0, 0.4, (FEATURES, PIXELS)), "head": rng.normal(size=(CLASSES, FEATURES))}
    method = GroupDRO(optax.sgd(0.1), np.ones(GROUPS), step_q=number(0.0), radii=RADII)
    state = method.init(Model(Linear(weight=number(x["W"]), features=FEATURES), number(x["head"])))
    batch, (images, label, group, _) = drawn(0, False)
    after = step(method, state, batch)

    def value(at):
        z = images.reshape(len(images), -1) @ at["W"].T
        own = worst(z, at["head"], label, RADII)[np.arange(len(label)), group]
        return reference.means(own, group, GROUPS).mean()

    down = slopes(value, x)
    close(after.loss, value(x))
    close(after.encoder.weight, x["W"] - 0.1 * down["W"])
    close(after.head, x["head"] - 0.1 * down["head"])
