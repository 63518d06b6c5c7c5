"""ERM, group DRO and the bilevel method, step by step against a NumPy transcription."""

import collections

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jaxtyping import Array

import deep_transcription as reference
from bilevax.deep.bilevel import BilevelDRO
from bilevax.deep.losses import cross_entropy, group_means
from bilevax.deep.methods import ERM, Batch, GroupDRO, encoded
from bilevax.deep.networks import CNN, Encoder, Model, Statistics

GROUPS, CLASSES, SIDE, FEATURES = 3, 4, 2, 5
CALLS = []  # of Linear, by Python
SGD = optax.sgd(0.1, momentum=0.9)
SLOW = optax.sgd(0.03, momentum=0.9)
PLAIN = optax.sgd(0.2)
STILL = optax.sgd(0.0)
RADII = jnp.full(GROUPS, 0.1, jnp.float32)


@eqx.filter_jit
def step(method, state, batch):
    return method.step(state, batch)


def number(value):
    """An array, for which nothing is compiled anew."""
    return jnp.asarray(value, jnp.float32)


class Linear(Encoder):
    """W·a of the flattened images; `running_rows` counts the batches it has seen."""

    weight: Array
    running_rows: Array
    features: int = eqx.field(static=True)

    def __call__(self, images: Array, statistics: Statistics) -> tuple[Array, "Linear"]:
        CALLS.append((images.shape, statistics))
        flat = images.reshape(images.shape[0], -1)
        one = 1 if statistics == "batch" else 0
        moved = linear(self.weight, self.running_rows + one)
        return flat @ self.weight.T, moved


def linear(weight, rows=None):
    rows = jnp.zeros((), jnp.float32) if rows is None else rows
    return Linear(weight=weight, running_rows=rows, features=weight.shape[0])


def start(seed=0):
    """The model, and its W and head in float64."""
    rng = np.random.default_rng(seed)
    W = rng.normal(0, 0.4, (FEATURES, SIDE * SIDE * 3)).astype(np.float32)
    head = rng.normal(0, 0.4, (CLASSES, FEATURES)).astype(np.float32)
    return (
        Model(linear(jnp.asarray(W)), jnp.asarray(head)),
        W.astype(np.float64),
        head.astype(np.float64),
    )


def draw(seed, train=7, held=0, absent=None):
    """A batch, and the same for the transcription. Group `absent` has no rows."""
    rng = np.random.default_rng(100 + seed)
    rows = train + held
    images = rng.normal(size=(rows, SIDE, SIDE, 3)).astype(np.float32)
    label = rng.integers(0, CLASSES, rows).astype(np.int32)
    there = [g for g in range(GROUPS) if g != absent]
    group = np.concatenate([np.resize(there, train), np.resize(there[::-1], held)]).astype(np.int32)
    batch = Batch(jnp.asarray(images), jnp.asarray(label), jnp.asarray(group), train)
    return batch, (images.astype(np.float64), label, group, train)


def close(found, wanted, tolerance=1e-5):
    found = np.asarray(found)
    assert found.dtype == np.float32
    assert found.shape == np.shape(wanted)
    np.testing.assert_allclose(found, wanted, rtol=tolerance, atol=tolerance)


# --- parts -------------------------------------------------------------------------------------


def test_cross_entropy_and_group_means():
    rng = np.random.default_rng(0)
    logits, label = rng.normal(0, 3, (6, CLASSES)), rng.integers(0, CLASSES, 6).astype(np.int32)
    logits[0] += 1e4  # a shift changes nothing, and overflows nothing
    found = cross_entropy(jnp.asarray(logits), jnp.asarray(label))
    shifted = np.where(np.arange(6)[:, None] == 0, logits - 1e4, logits)
    wanted = [np.log(np.exp(row).sum()) - row[b] for row, b in zip(shifted, label)]
    np.testing.assert_allclose(found, wanted, atol=1e-9)
    values, group = np.array([1.0, 3, 10, 5], np.float32), np.array([0, 0, 3, 3], np.int32)
    close(group_means(jnp.asarray(values), jnp.asarray(group), 4), [2, 0, 0, 7.5])


def test_the_transcriptions_derivatives_by_differences():
    """Central differences of its P, in every variable; its projection is the nearest point."""
    method, batch = transcribed(), draw(0, 5, 8)[1]
    rng = np.random.default_rng(1)
    near = lambda v: v + rng.normal(0, 0.2, np.shape(v))
    x, y = ({k: near(v) for k, v in part.items()} for part in (method.x, method.y))
    for own, gradient in (
        (x, method.gradient_x(batch, x, y)),
        (y, method.gradient_y(batch, x, y)),
    ):
        for key, wanted in gradient.items():
            np.testing.assert_allclose(difference(method, batch, x, y, own, key), wanted, atol=1e-7)
    for _ in range(20):
        v = rng.normal(0, 1, 4)
        w = reference.to_simplex(v)
        assert w.min() >= 0
        assert w.sum() == pytest.approx(1)
        # ⟨v − w, e_i − w⟩ ≤ 0 at every corner e_i is what makes w the nearest.
        assert ((v - w) - (v - w) @ w).max() <= 1e-12


def difference(method, batch, x, y, own, key, step=1e-6):
    """∂P by central differences in own[key], which is x's or y's."""
    base = np.asarray(own[key], np.float64)
    slope = np.zeros(base.shape)
    for place in np.ndindex(base.shape):
        sides = []
        for sign in (1, -1):
            moved = base.copy()
            moved[place] += sign * step
            changed = {**own, key: moved}
            sides.append(method.P(batch, changed, y) if own is x else method.P(batch, x, changed))
        slope[place] = (sides[0] - sides[1]) / (2 * step)
    return slope


# --- ERM and group DRO -------------------------------------------------------------------------


@eqx.filter_jit
def steps(method, state, batch, count):
    return jax.lax.scan(lambda s, _: (method.step(s, batch), None), state, None, count)[0]


def trained_beside(method, ours, draws, check):
    state = method.init(start()[0])
    for batch, data in draws:
        state = step(method, state, batch)
        ours.step(*data[:3])
        check(state)
    return state


@pytest.mark.parametrize("l2", [0.0, 0.3])
def test_erm(l2):
    _, W, head = start()
    ours = reference.Weighted(W, head, GROUPS, reference.SGD(0.1, 0.9), l2=l2)
    method = ERM(SGD, GROUPS, l2=number(l2))

    def check(state):
        close(state.encoder.weight, ours.W)
        close(state.head, ours.head)
        close(state.loss, ours.loss)
        close(state.weights, np.full(GROUPS, 1 / GROUPS))

    draws = [draw(seed, train, held) for seed, (train, held) in enumerate([(7, 0), (4, 3)] * 3)]
    state = trained_beside(method, ours, draws, check)
    assert float(state.encoder.running_rows) == 6
    assert float(method.seen(state)["loss"]) == float(state.loss)
    close(method.model(state).head, ours.head)
    assert np.abs(ours.W - W).max() > 0.1  # it went somewhere


@pytest.mark.parametrize(
    ("eta", "C", "step_q", "absent"),
    [(0.0, 0.0, 0.5, None), (0.0, 2.0, 0.5, None), (1.5, 2.0, 1.0, None), (0.7, 1.0, 0.5, 1)],
)
def test_group_dro(eta, C, step_q, absent):
    _, W, head = start()
    counts = np.array([100.0, 25.0, 4.0])
    ours = reference.Weighted(
        W, head, GROUPS, reference.SGD(0.1, 0.9), counts=counts, eta=eta, C=C, step_q=step_q, l2=0.1
    )
    method = GroupDRO(
        SGD,
        counts=number(counts),
        eta=number(eta),
        adjustment=number(C),
        step_q=number(step_q),
        l2=number(0.1),
    )

    def check(state):
        close(state.encoder.weight, ours.W)
        close(state.head, ours.head)
        close(state.weights, ours.q)
        close(state.loss, ours.loss)

    draws = [draw(seed, 8, absent=absent if seed % 2 else None) for seed in range(5)]
    state = trained_beside(method, ours, draws, check)
    assert np.ptp(ours.q) > 0.05
    np.testing.assert_array_equal(method.seen(state)["weights"], state.weights)


@pytest.mark.parametrize(("eta", "C"), [(0.0, 0.0), (0.0, 1.0), (0.0, 3.0), (0.8, 1.0)])
def test_group_dro_finds_the_known_saddle(eta, C):
    """All images are the same and share a of group A, b of group B has label 1, so that only
    d = logit₁ − logit₀ matters: L_A − L_B = −(a − b)·d. At the saddle the optimum of d says
    σ(d) = q_A·a + q_B·b, and that of q that gains are equal: −(a − b)·d + C·(1/√n_A − 1/√n_B) =
    η·(q_A − q_B)."""
    a, b, counts = 3 / 4, 1 / 4, np.array([4.0, 100.0])
    bonus = C * (counts[0] ** -0.5 - counts[1] ** -0.5)
    low, high = 0.0, 1.0
    for _ in range(60):  # q_A by bisection; d in terms of it
        q = (low + high) / 2
        d = np.log((b + q * (a - b)) / (1 - b - q * (a - b)))
        more = -(a - b) * d + bonus - eta * (2 * q - 1) > 0
        low, high = (q, high) if more else (low, q)
    L = lambda share: share * np.log1p(np.exp(-d)) + (1 - share) * np.log1p(np.exp(d))
    wanted = q * L(a) + (1 - q) * L(b)
    if eta == 0:  # in closed form; with C = 3 group A is always the worst, and has all weight
        assert d == pytest.approx(min(bonus / (a - b), np.log(a / (1 - a))))
    label = np.array([1, 1, 1, 0, 1, 0, 0, 0], np.int32)
    group = np.array([0, 0, 0, 0, 1, 1, 1, 1], np.int32)
    batch = Batch(jnp.ones((8, 1, 1, 1), jnp.float32), jnp.asarray(label), jnp.asarray(group), 8)
    made = Model(linear(jnp.ones((1, 1), jnp.float32)), jnp.asarray([[-0.3], [0.6]], jnp.float32))
    method = GroupDRO(
        PLAIN,
        number(counts),
        eta=number(eta),
        adjustment=number(C),
        step_q=number(0.2),
    )
    state = steps(method, method.init(made), batch, 3000)
    logits = np.asarray(state.encoder.weight[0, 0] * state.head[:, 0], np.float64)
    assert logits[1] - logits[0] == pytest.approx(d, abs=2e-4)
    np.testing.assert_allclose(state.weights, [q, 1 - q], atol=2e-4)
    assert float(state.loss) == pytest.approx(wanted, abs=2e-4)


def test_group_weights_never_die():
    """A weight that would have underflowed comes back when its group is the worst."""
    batch, _ = draw(0, 6)
    method = lambda counts: GroupDRO(STILL, number(counts), adjustment=1.0, step_q=1.0)
    state = step(method([1e-6, 1, 1]), method(np.ones(3)).init(start()[0]), batch)
    assert np.isfinite(np.asarray(state.weights)).all()
    assert 0 < np.asarray(state.weights).min() < 1e-9
    assert float(state.weights[0]) == pytest.approx(1)
    state = step(method([1, 1e-6, 1]), state, batch)
    assert float(state.weights[1]) == pytest.approx(1)


# --- the bilevel method ------------------------------------------------------------------------

NUMBERS = {"rho": 3.0, "tau": 0.02, "theta": 0.5, "eta": 0.8, "l2": 0.2}


def transcribed(iterations=1, L=10.0, sgd=None, sigma=None, **numbers):
    _, W, head = start()
    given = {**NUMBERS, "D": 2.0, "eps": 3.0, **numbers}
    return reference.Bilevel(W, head, GROUPS, T=iterations, L=L, sgd=sgd, sigma=sigma, **given)


def bilevel(iterations=1, L=10.0, optimizer=None, D=2.0, eps=3.0, **numbers):
    given = {**NUMBERS, "smoothness": L, "diameter": D, "epsilon": eps, **numbers}
    given = {k: v if v is None else number(v) for k, v in given.items()}
    return BilevelDRO(GROUPS, iterations=iterations, optimizer=optimizer, **given)


def same_as(state, ours):
    close(state.encoder.weight, ours.x["x1"])
    close(state.eta, ours.x["eta"])
    close(state.y1, ours.x["y1"])
    close(state.y2, ours.x["y2"])
    for key in ("x2", "z1", "z2"):
        close(getattr(state.y, key), ours.y[key])
        close(getattr(state.slope, key), ours.last[key], 2e-5)
        close(getattr(state.anchor, key), ours.y0[key])
    close(state.loss, ours.loss)
    assert int(state.iteration) == ours.t
    if state.centre is not None:
        close(state.centre.x1.weight, ours.centre["x1"])
        for key in ("eta", "y1", "y2"):
            close(getattr(state.centre, key), ours.centre[key])


@pytest.mark.parametrize(
    ("iterations", "sigma", "optimizer", "halves"),
    [
        pytest.param(1, 0.05, None, (6, 6), id="T=1"),
        pytest.param(3, None, SLOW, (9, 4), id="T=3 and sgd"),
        pytest.param(1, 0.05, SLOW, (9, 4), id="T=1 and sgd", marks=pytest.mark.long),
        pytest.param(3, None, None, (4, 9), id="T=3", marks=pytest.mark.long),
        pytest.param(3, 0.05, None, (9, 4), id="T=3 and sigma", marks=pytest.mark.long),
    ],
)
def test_bilevel_dro(iterations, sigma, optimizer, halves):
    sgd = None if optimizer is None else reference.SGD(0.03, 0.9)
    ours = transcribed(iterations, sgd=sgd, sigma=sigma)
    method = bilevel(iterations, optimizer=optimizer, sigma=sigma)
    state = method.init(start()[0])
    assert (state.centre is None) == (iterations == 1)
    for seed in range(8 if iterations > 1 else 5):
        batch, data = draw(seed, *halves, absent=2 if seed == 3 else None)
        state = step(method, state, batch)
        ours.step(*data)
        same_as(state, ours)
    assert float(state.encoder.running_rows) == (8 if iterations > 1 else 5)
    # Everything has moved, so that agreement says something.
    begun = transcribed()
    for key in begun.x:
        assert np.abs(ours.x[key] - begun.x[key]).max() > 1e-3, key
    for key in begun.y:
        assert np.abs(ours.y[key] - begun.y[key]).max() > 1e-3, key
    seen = method.seen(state)
    np.testing.assert_array_equal(seen["weights"], state.y2)
    np.testing.assert_array_equal(seen["validation weights"], state.y.x2)
    np.testing.assert_array_equal(seen["eta"], state.eta)
    close(method.model(state).head, ours.x["y1"])


def test_the_first_bilevel_step_by_differences_of_the_penalty():
    """No derivative by hand: both half-steps are the differences of P that they should be."""
    ours = transcribed(sigma=0.05)
    batch, data = draw(0, 6, 6)
    x, y, tau, sigma = ours.x, ours.y, NUMBERS["tau"], 0.05
    # Away from the start, where many terms are 0: weights and η that two steps have moved.
    method = bilevel(sigma=sigma)
    state = method.init(start()[0])
    for seed in (1, 2):
        state = step(method, state, draw(seed, 6, 6)[0])
    wide = lambda v: np.asarray(v, np.float64)
    x = {"x1": wide(state.encoder.weight), **{k: wide(getattr(state, k)) for k in x if k != "x1"}}
    y = {k: wide(getattr(state.y, k)) for k in y}
    after = step(method, state, batch)
    slope = {k: difference(ours, data, x, y, y, k) - 0.75 * (y[k] - ours.y0[k]) for k in y}
    up = {k: y[k] + sigma * slope[k] for k in y}
    up = {**up, "x2": reference.to_simplex(up["x2"]), "z2": reference.to_simplex(up["z2"])}
    for key in y:
        close(getattr(after.slope, key), slope[key], 2e-5)
        close(getattr(after.y, key), up[key])
    down = {k: x[k] - tau * difference(ours, data, x, up, x, k) for k in x}
    close(after.encoder.weight, down["x1"])
    close(after.eta, down["eta"])
    close(after.y1, down["y1"])
    close(after.y2, reference.to_simplex(down["y2"]))


def wild(iterations=1, **numbers):
    return bilevel(iterations, L=0.1, l2=0.0, optimizer=STILL, **numbers)


@pytest.mark.parametrize(("iterations", "sigma"), [(1, 1e-4), (1, 1.0)])
def test_weights_and_eta_stay_where_they_belong(iterations, sigma):
    """With steps far too long for anything else. While z2 lags behind y2, η falls."""
    method = wild(iterations, rho=50.0, tau=0.5, sigma=sigma)
    state = method.init(start()[0])
    etas = []
    for seed in range(10):
        state = step(method, state, draw(seed, 6, 6)[0])
        etas.append(float(state.eta))
        for weights in (state.y2, state.y.x2, state.y.z2):
            in_the_simplex(weights)
    assert min(etas) >= np.float32(1e-6)
    if sigma < 1:
        assert min(etas) == np.float32(1e-6)


def test_weights_stay_in_the_simplex_when_losses_are_huge():
    method = wild(rho=1e9, tau=1.0, sigma=1.0)
    state = step(method, method.init(start()[0]), draw(0, 6, 6)[0])
    for weights in (state.y2, state.y.x2, state.y.z2):
        in_the_simplex(weights)


def in_the_simplex(weights):
    weights = np.asarray(weights)
    assert weights.min() >= 0
    assert weights.sum() == pytest.approx(1, abs=1e-5)


def test_nothing_of_the_other_half_is_used():
    """Validation rows do not touch z1, z2 (lower level), training rows do not touch x2."""
    method = bilevel(sigma=0.05)
    begun = method.init(start()[0])
    batch, _ = draw(0, 6, 6)
    other, _ = draw(1, 6, 6)
    rows = jnp.arange(12) < 6
    swap = lambda a, b: jnp.where(rows.reshape(-1, *[1] * (a.ndim - 1)), a, b)
    held = Batch(swap(batch.images, other.images), swap(batch.label, other.label), batch.group, 6)
    one, two, three = (step(method, begun, b) for b in (batch, held, other))
    np.testing.assert_array_equal(one.y.z1, two.y.z1)
    np.testing.assert_array_equal(one.y.z2, two.y.z2)
    np.testing.assert_array_equal(two.y.x2, three.y.x2)
    assert not np.array_equal(one.y.x2, two.y.x2)


# --- what a step costs -------------------------------------------------------------------------


def every_method(**more):
    return {
        "erm": ERM(SGD, GROUPS, **more),
        "group DRO": GroupDRO(SGD, jnp.ones(GROUPS, jnp.float32), **more),
        "group DRO, radii": GroupDRO(SGD, np.ones(GROUPS), radii=RADII, **more),
        "bilevel": BilevelDRO(GROUPS, **more),
        "bilevel, radii": BilevelDRO(GROUPS, radii=RADII, bound=1.0, **more),
        "bilevel, soft groups": BilevelDRO(GROUPS, radii=RADII, soft_groups="tuned", **more),
        "bilevel, T = 3": BilevelDRO(GROUPS, iterations=3, optimizer=SGD, **more),
    }


@pytest.mark.parametrize("statistics", ["batch", "running"])
@pytest.mark.parametrize("name", list(every_method()))
def test_the_encoder_is_called_once_with_all_rows(name, statistics):
    method, (batch, _) = every_method(statistics=statistics)[name], draw(0, 7, 5)
    state = method.init(start()[0])
    CALLS.clear()
    jax.make_jaxpr(lambda s, b: method.step(s, b))(state, batch)
    (call,) = CALLS
    assert call == ((12, SIDE, SIDE, 3), statistics)


def counted(jaxpr, counts):
    for equation in jaxpr.eqns:
        counts[equation.primitive.name] += 1
        for value in equation.params.values():
            for inner in value if isinstance(value, (tuple, list)) else [value]:
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    counted(inner, counts)
    return counts


def test_a_step_of_every_method_has_the_convolutions_of_one_forward_and_one_backward():
    network = eqx.filter_eval_shape(lambda k: CNN.new(key=k, channels=(3, 4, 5)), jax.random.key(0))
    network = jax.tree.map(lambda a: jnp.ones(a.shape, a.dtype), network)
    batch, _ = draw(0, 7, 5)
    forward = jax.make_jaxpr(lambda n: n(batch.images, "batch")[0])(network)
    once = counted(forward.jaxpr, collections.Counter())["conv_general_dilated"]
    assert once == 2
    convolutions, norms = {}, {}
    for name, method in every_method().items():
        state = method.init(Model(network, jnp.ones((CLASSES, 5), jnp.float32)))
        found = counted(jax.make_jaxpr(method.step)(state, batch).jaxpr, collections.Counter())
        convolutions[name] = found["conv_general_dilated"]
        norms[name] = found["rsqrt"]
    # Backward: both weights, and the input of the second; nobody asks for that of the images.
    assert set(convolutions.values()) == {2 + 3}
    assert len(set(norms.values())) == 1


def test_encoded_is_the_vector_jacobian_product():
    """⟨c, (W + t·V)·a⟩ is linear in t: its slope is ⟨c·aᵀ, V⟩."""
    made, W, _ = start()
    batch, (images, *_) = draw(0, 6)
    cotangent = np.random.default_rng(2).normal(size=(6, FEATURES)).astype(np.float32)
    features, pull, moved = encoded(made.encoder, batch.images, "batch")
    flat = images.reshape(6, -1)
    close(features, flat @ W.T)
    slope = pull(jnp.asarray(cotangent))
    close(slope.weight, cotangent.T.astype(np.float64) @ flat, 1e-5)
    assert slope.running_rows is None
    assert float(moved.running_rows) == 1
