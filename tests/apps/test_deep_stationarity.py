"""The certificate of a trained head, against NumPy on the rows of a tiny network."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import deep_transcription as reference
from bilevax.data import Stratified
from bilevax.deep import ERM, BilevelDRO, GroupDRO, Images, Method, Model, stationarity
from bilevax.deep.bilevel import Maximised
from bilevax.deep.stationarity import head_certificate, head_problem, sentence

GROUPS, CLASSES, FEATURES = 4, 2, 8  # as in test_deep_training, to share its programs
NAMES = tuple("abcd")
RNG = np.random.default_rng(0)
L2, RHO = 0.3, 2.0


def data_of(*counts):
    """Rows with so many of each group in each split; features that say something of labels."""
    rng = np.random.default_rng(1)
    group = np.concatenate([np.repeat(np.arange(GROUPS), sizes) for sizes in counts])
    split = np.repeat([0, 1, 2], [sum(sizes) for sizes in counts]).astype(np.int8)
    label = (rng.random(len(group)) < np.array([0.9, 0.4, 0.7, 0.2])[group]).astype(np.int32)
    rows = (rng.normal(size=(len(group), FEATURES)) + label[:, None]).astype(np.float32)
    images = Images("none", label, group.astype(np.int32), split, ("x", "y"), NAMES, (1, 1), None)
    return images, {name: rows[images.rows(name)] for name in ("train", "validation")}


# With groups of one size every minibatch has every row as often as any other: all are alike, so
# that the radii of the certificate are 0 and its lines those of all rows.
IMAGES, ROWS = data_of([7] * GROUPS, [4] * GROUPS, [1] * GROUPS)
EVEN = np.full(GROUPS, 1 / GROUPS)


@pytest.fixture(autouse=True)
def few_batches(monkeypatch):
    monkeypatch.setattr(stationarity, "BATCHES", 8)


def of(split, head):
    """The mean losses of the split's groups, and what gives their weighted gradient in the head."""
    rows = IMAGES.rows(split)
    return reference.Rows(
        ROWS[split].astype(np.float64), head, IMAGES.label[rows], IMAGES.group[rows], GROUPS
    )


def to_simplex_normal(weights, slope):
    """dist(slope, normal cone of the simplex at weights): the part that could still be gained.

    The cone is {t·1 − s : s ≥ 0, s·weights = 0}; the best t is found on a fine grid.
    """
    free = weights > 1e-9
    grid = np.linspace(slope.min(), slope.max(), 200_001)
    within = ((slope[free, None] - grid) ** 2).sum(axis=0)
    above = (np.maximum(slope[~free, None] - grid, 0) ** 2).sum(axis=0)
    return np.sqrt((within + above).min())


def lower_head(weights, head=None, steps=400):
    """The best head for these weights, by gradient descent in NumPy."""
    head = np.zeros((CLASSES, FEATURES)) if head is None else head
    for _ in range(steps):
        head = head - 0.3 * (of("train", head).pulled(weights)[1] + L2 * head)
    return head


def state_of(method, head, eta=0.7, y2=EVEN, x2=EVEN, z1=None, z2=EVEN):
    single = lambda a: jnp.asarray(a, jnp.float32)
    begun = method.init(Model(None, single(head)))
    if not isinstance(method, BilevelDRO):
        return dataclasses.replace(begun, weights=single(y2))
    y = Maximised(single(x2), single(head if z1 is None else z1), single(z2))
    return dataclasses.replace(begun, eta=single(eta), y2=single(y2), y=y)


class Still:
    """An optimizer that does nothing."""

    def init(self, at):
        return ()


def bilevel(l2=L2):
    return BilevelDRO(GROUPS, l2=l2, rho=RHO)


def equal(found, wanted):
    for name, value in wanted.items():
        assert found[name] == pytest.approx(value, rel=1e-3, abs=1e-4), name


def test_bilevel_lines_are_those_of_numpy():
    head = RNG.normal(0, 0.3, (CLASSES, FEATURES))
    z1 = head + RNG.normal(0, 0.2, head.shape)
    y2, x2, z2 = np.array([0.4, 0.3, 0.3, 0.0]), np.array([0.1, 0.2, 0.3, 0.4]), EVEN
    eta = 0.7
    found = head_certificate(
        bilevel(), state_of(bilevel(), head, eta, y2, x2, z1, z2), IMAGES, ROWS
    )
    train, other, held = of("train", head), of("train", z1), of("validation", head)
    far = lambda w: ((w - EVEN) ** 2).sum()
    lower = lambda L, h, w: w @ L - eta / 2 * far(w) + L2 / 2 * (h**2).sum()
    # P = Σ x2·V(y1) + ρ·(f~(y1, z2) − f~(z1, y2)) in (η, y1, y2), and its responses.
    of_eta = RHO / 2 * (far(y2) - far(z2))
    of_y1 = held.pulled(x2)[1] + RHO * (train.pulled(z2)[1] + L2 * head)
    of_y2 = to_simplex_normal(y2, RHO * (other.L - eta * (y2 - EVEN)))
    wanted = {
        "stationarity": np.sqrt(of_eta**2 + (of_y1**2).sum() + of_y2**2),
        "response_x2": to_simplex_normal(x2, held.L),
        "response_z1": RHO * np.linalg.norm(other.pulled(y2)[1] + L2 * z1),
        "response_z2": RHO * to_simplex_normal(z2, train.L - eta * (z2 - EVEN)),
    }
    equal(found, wanted)
    # The true gap: the best weights by projection, the best head by descent.
    weights = EVEN
    for _ in range(300):
        weights = reference.to_simplex(weights + 0.1 * (train.L - eta * (weights - EVEN)))
    least = lower_head(y2)
    gap = lower(train.L, head, weights) - lower(of("train", least).L, least, y2)
    assert 0.1 < gap <= found["gap"]
    # The bound of the certificate: tangents at z1 and z2, and the best the terms allow on them.
    up, down = train.L - eta * (z2 - EVEN), other.pulled(y2)[1]
    radius = max(np.sqrt(2 * np.log(CLASSES) / L2), *(2 * np.linalg.norm(h) for h in (head, z1)))
    best = -down / L2 * min(1, radius / np.linalg.norm(down / L2))
    rise, fall = up.max() - up @ z2, -(down * (best - z1)).sum() - L2 / 2 * (best**2).sum()
    above, below = (lower(of("train", h).L, h, w) for h, w in ((head, z2), (z1, y2)))
    bound = above + rise - (below - L2 / 2 * (z1**2).sum() - fall)
    equal(found, {"gap": bound})
    equal(found, {"objective": x2 @ held.L, "rho": RHO, "estimated_epsilon": found["epsilon"]})


def test_a_worse_head_has_a_larger_epsilon(monkeypatch):
    """From the saddle point of the lower level, where only the upper level is not stationary."""
    # The saddle of group DRO by extragradient in NumPy.
    head, q, eta = lower_head(EVEN), EVEN, 0.7
    for _ in range(800):
        rows = of("train", head)
        half = head - 0.2 * (rows.pulled(q)[1] + L2 * head)
        half_q = reference.to_simplex(q + 0.2 * (rows.L - eta * (q - EVEN)))
        rows = of("train", half)
        head = head - 0.2 * (rows.pulled(half_q)[1] + L2 * half)
        q = reference.to_simplex(q + 0.2 * (rows.L - eta * (half_q - EVEN)))
    direction = RNG.normal(size=head.shape)
    dro = {name: jnp.asarray(v, jnp.float32) for name, v in {"eta": eta, "l2": L2}.items()}
    dro["adjustment"] = jnp.zeros((), jnp.float32)
    epsilons = {"KKTCertificate": [], "StationarityCertificate": []}
    for off in (0.0, 1.0, 4.0):
        worse = head + off * direction
        for method in (bilevel(), GroupDRO(Still(), np.ones(GROUPS), **dro)):
            found = head_certificate(method, state_of(method, worse, eta, q, z2=q), IMAGES, ROWS)
            epsilons[found["kind"]].append(found["epsilon"])
    for values in epsilons.values():
        assert values == sorted(values)
        assert values[2] > 1.5 * values[0]
    assert epsilons["StationarityCertificate"][0] < 1e-4  # it is the saddle point


@pytest.mark.parametrize("C", [0.0, 2.0])
def test_group_dro_lines_are_those_of_numpy(C):
    head, counts = RNG.normal(0, 0.5, (CLASSES, FEATURES)), np.array([12.0, 3, 3, 10])
    q = np.array([0.5, 0.25, 0.25, 0.0])
    f = lambda value: jnp.asarray(value, jnp.float32)
    method = GroupDRO(Still(), counts, eta=f(0.4), adjustment=f(C), l2=f(L2))
    found = head_certificate(method, state_of(method, head, y2=q), IMAGES, ROWS)
    rows = of("train", head)
    gain = rows.L + C / np.sqrt(counts) - 0.4 * (q - EVEN)
    x = np.linalg.norm(rows.pulled(q)[1] + L2 * head)
    equal(found, {"x": x, "y": to_simplex_normal(q, gain)})
    assert "The head is ε-stationary with ε ≤" in sentence(found)


class Bounded:
    """`reference.Rows` of two classes with radii: ℓ at logits that are moved r·‖w₁ − w₀‖ apart."""

    def __init__(self, head, radii):
        rows = IMAGES.rows("train")
        label, group, z = IMAGES.label[rows], IMAGES.group[rows], ROWS["train"].astype(float)
        away = head[1] - head[0]
        sign, size = np.where(label == 1, -1.0, 1.0), np.linalg.norm(away)
        odds = sign * (z @ away) + radii[group] * size
        self.L = reference.means(np.logaddexp(0, odds), group, GROUPS)
        share = 1 / (1 + np.exp(-odds)) / 7  # of each group's seven rows
        own = share[:, None] * (sign[:, None] * z + np.outer(radii[group], away / size))
        self.of_away = np.stack([own[group == g].sum(axis=0) for g in range(GROUPS)])
        self.of_radii = np.array([share[group == g].sum() for g in range(GROUPS)]) * size

    def pulled(self, weights):
        return np.stack([-weights @ self.of_away, weights @ self.of_away])


def test_radii_are_in_the_lines():
    """Fixed ones of group DRO; those of the bilevel method in x1, one of them at its bound."""
    head = RNG.normal(0, 0.5, (CLASSES, FEATURES))
    z1 = head + RNG.normal(0, 0.2, head.shape)
    q, radii = np.array([0.5, 0.25, 0.25, 0.0]), np.array([0.1, 0.2, 0.3, 0.4])
    f = lambda value: jnp.asarray(value, jnp.float32)
    method = GroupDRO(Still(), np.ones(GROUPS), eta=f(0.4), l2=f(L2), radii=f(radii))
    found = head_certificate(method, state_of(method, head, y2=q), IMAGES, ROWS)
    rows = Bounded(head, radii)
    x = np.linalg.norm(rows.pulled(q) + L2 * head)
    equal(found, {"x": x, "y": to_simplex_normal(q, rows.L - 0.4 * (q - EVEN))})

    method = BilevelDRO(GROUPS, l2=L2, rho=RHO, radii=f(radii), bound=f(0.4))
    found = head_certificate(method, state_of(method, head, 0.7, q, z1=z1), IMAGES, ROWS)
    other, held = Bounded(z1, radii), of("validation", head)
    of_eta = RHO / 2 * ((q - EVEN) ** 2).sum()
    of_radii = RHO * (EVEN * rows.of_radii - q * other.of_radii)
    of_radii[3] = max(of_radii[3], 0)  # at the bound only a fall could be taken
    of_y1 = held.pulled(EVEN)[1] + RHO * (rows.pulled(EVEN) + L2 * head)
    of_y2 = to_simplex_normal(q, RHO * (other.L - 0.7 * (q - EVEN)))
    wanted = np.sqrt(of_eta**2 + (of_radii**2).sum() + (of_y1**2).sum() + of_y2**2)
    equal(found, {
        "stationarity": wanted,
        "response_z1": RHO * np.linalg.norm(other.pulled(q) + L2 * z1),
        "response_z2": RHO * to_simplex_normal(EVEN, rows.L),
    })  # fmt: skip


def test_rows_without_a_group_have_no_certificate():
    images = dataclasses.replace(IMAGES, group=np.where(IMAGES.split == 0, -1, IMAGES.group))
    method = ERM(Still(), GROUPS, l2=L2)
    assert (
        head_certificate(method, state_of(method, np.ones((CLASSES, FEATURES))), images, ROWS)
        is None
    )


def test_erm_is_the_mean_of_all_rows():
    """Groups of several sizes: each has its share of the loss, and its weight is fixed at that."""
    images, features = data_of([12, 3, 3, 10], [4] * GROUPS, [1] * GROUPS)
    rows, counts = images.rows("train"), images.counts[0]
    batch = {"features": features["train"], "label": images.label[rows]}
    source = lambda split: Stratified(
        {**batch, "group": images.group[rows]}, groups=images.group[rows]
    )
    head, method = RNG.normal(0, 0.5, (CLASSES, FEATURES)), ERM(Still(), GROUPS, l2=L2)
    problem, point = head_problem(method, state_of(method, head), source, counts)
    np.testing.assert_allclose(point.y, counts / 28, rtol=1e-6)
    on_all = lambda x, y: problem.objective(x, y, problem.data.everything())
    value, slope = jax.jit(jax.value_and_grad(on_all))(point.x, point.y)
    losses, wanted = reference.losses(features["train"].astype(float), head, images.label[rows])
    assert float(value) == pytest.approx(losses.mean(), rel=1e-5)
    np.testing.assert_allclose(slope, wanted.T @ features["train"] / 28, atol=1e-5)
    np.testing.assert_allclose(problem.x.value(point.x), L2 / 2 * (head**2).sum(), rtol=1e-5)
    # No other weights are in the domain, so nothing can be gained by any.
    gain = jnp.asarray(RNG.normal(size=GROUPS), jnp.float32)
    assert not np.any(problem.y.residual(point.y, gain))
    assert float(problem.y.diameter(point.y)) == 0


def test_without_a_ridge_the_gap_is_not_bounded():
    """No ball holds the best head of every weighting, so none is put around it."""
    head = np.ones((CLASSES, FEATURES), np.float32)
    terms = {}
    for l2 in (0.0, L2):
        source = lambda split: Stratified(ROWS["train"], groups=np.arange(28) % GROUPS)
        problem, _ = head_problem(bilevel(l2), state_of(bilevel(l2), head), source, None)
        terms[l2] = problem.y1
    assert not np.isfinite(terms[0.0].diameter(head))
    assert not np.isfinite(terms[0.0].conjugate(head))
    # At the best head for any weights, L2/2·‖h‖² ≤ log 2, the loss of h = 0.
    radius = max(np.sqrt(2 * np.log(CLASSES) / L2), 2 * np.linalg.norm(head))
    assert float(terms[L2].diameter(head)) == pytest.approx(2 * radius)
    numbers = {"epsilon": None, "estimated_epsilon": None, "confidence": 0.95}
    assert "ε-KKT with ε ≤ ∞" in sentence({"kind": "KKTCertificate", **numbers})
    heavy = {"kind": "KKTCertificate", **numbers, "largest_share": 0.9, "batches": 8.0}
    assert sentence(heavy).endswith("Tails are heavy: the probability is not to be trusted.")


def test_a_method_of_another_kind_has_no_certificate():
    class Own(Method):
        def init(self, model): ...
        def step(self, state, batch): ...
        def model(self, state): ...
        def seen(self, state): ...

    assert head_certificate(Own(), None, IMAGES, ROWS) is None


def test_nothing_is_compiled_again_for_the_next_run(monkeypatch):
    """Other numbers, the same programs: an ablation certifies many heads."""
    traces = []
    losses = stationarity.group_means
    monkeypatch.setattr(stationarity, "group_means", lambda *a: traces.append(1) or losses(*a))
    for number in range(2):
        head = RNG.normal(0, 0.3, (CLASSES, FEATURES))
        head_certificate(bilevel(), state_of(bilevel(), head, 0.5 + number), IMAGES, ROWS)
        before, traces = len(traces), []
    assert before <= 6
