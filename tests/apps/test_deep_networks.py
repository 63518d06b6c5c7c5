"""Encoders against a NumPy forward that knows torchvision's names, and their weight files."""

import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import deep_transcription as reference
from bilevax.deep import networks
from bilevax.deep.methods import encoded
from bilevax.deep.networks import (
    BASIC,
    BOTTLENECK,
    CNN,
    BatchNorm,
    Conv,
    Model,
    ResNet,
    encoder,
    load_encoder,
    max_pool,
    model,
    named_arrays,
    save_model,
    split,
)

RUNNING = ("running_mean", "running_var")
#: torchvision's totals, and those of its last layer: (features + 1)·1000.
PARAMETERS = {
    "resnet18": 11_689_512 - 513_000,
    "resnet34": 21_797_672 - 513_000,
    "resnet50": 25_557_032 - 2_049_000,
}


def shaped(make):
    """The network's structure, without the time that random numbers take."""
    return eqx.filter_eval_shape(make, jax.random.key(0))


def empty(name):
    return shaped(lambda key: encoder(name, key))


def cnn(*channels):
    return filled(shaped(lambda key: CNN.new(key=key, channels=channels)))


def filled(network, seed=0):
    """The network with every array random, those of batch norm too: none passes for another."""
    rng = np.random.default_rng(seed)

    def array(name, shape):
        if len(shape) == 4:
            return rng.normal(0, math.sqrt(2 / math.prod(shape[1:])), shape)
        if name.endswith(".running_mean"):
            return rng.normal(0, 0.3, shape)
        return rng.normal(0, 0.2, shape) if name.endswith(".bias") else rng.uniform(0.5, 1.5, shape)

    leaves = [
        jnp.asarray(array(name, a.shape), jnp.float32) for name, a in named_arrays(network).items()
    ]
    return jax.tree.unflatten(jax.tree.structure(network), leaves)


def pictures(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def close(found, wanted, tolerance=1e-4):
    np.testing.assert_allclose(
        np.asarray(found, np.float64), wanted, rtol=tolerance, atol=tolerance * np.abs(wanted).max()
    )


# --- layers ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("side", "stride", "height", "width"),
    [(1, 1, 4, 5), (1, 2, 5, 4), (3, 1, 4, 5), (3, 2, 4, 5), (3, 2, 5, 4), (7, 2, 8, 9)],
)
def test_conv(side, stride, height, width):
    x, w = pictures(0, 2, height, width, 3), pictures(1, 4, 3, side, side)
    found = Conv(jnp.asarray(w), stride)(jnp.asarray(x))
    wanted = reference.conv_by_loops(x.astype(np.float64), w.astype(np.float64), stride)
    assert found.dtype == jnp.float32
    close(found, wanted, 1e-5)
    np.testing.assert_allclose(reference.conv(x, w, stride), wanted, atol=1e-12)


def test_conv_begins_as_he_et_al_for_the_outputs():
    weight = np.asarray(Conv.new(64, 32, 3, 2, key=jax.random.key(0)).weight, np.float64)
    assert weight.shape == (32, 64, 3, 3)
    assert abs(weight.mean()) < 5 * weight.std() / math.sqrt(weight.size)
    assert weight.std() == pytest.approx(math.sqrt(2 / (32 * 9)), rel=0.03)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float64])
@pytest.mark.parametrize("shape", [(2, 6, 6, 3), (2, 7, 6, 3), (1, 1, 2, 3)])
def test_max_pool(shape, dtype):
    x = jnp.asarray(pictures(0, *shape), dtype) - 5  # an edge of zeros would be seen
    found = max_pool(x)
    assert found.dtype == dtype
    assert found.shape == (shape[0], (shape[1] + 1) // 2, (shape[2] + 1) // 2, shape[3])
    np.testing.assert_array_equal(
        np.asarray(found, np.float64), reference.max_pool(np.asarray(x, np.float64))
    )


def norm_with(seed, channels):
    rng = np.random.default_rng(seed)
    arrays = {
        "weight": rng.normal(size=channels),
        "bias": rng.normal(size=channels),
        "running_mean": rng.normal(size=channels),
        "running_var": rng.uniform(0.1, 3, channels),
    }
    return BatchNorm(**{k: jnp.asarray(v, jnp.float32) for k, v in arrays.items()})


def test_batch_norm():
    norm = norm_with(0, 3)
    arrays = {f"bn.{part}": getattr(norm, part) for part in ("weight", "bias", *RUNNING)}
    for seed in range(3):  # the running ones go on from where they are
        x = 2 + 3 * pictures(seed, 2, 3, 4, 3)
        for statistics in ("running", "batch"):
            found, moved = norm(jnp.asarray(x), statistics)
            new = {}
            wanted = reference.batch_norm(x.astype(np.float64), arrays, "bn", statistics, new)
            close(found, wanted, 1e-5)
            arrays = {**arrays, **new}
            for part in ("weight", "bias", *RUNNING):
                close(getattr(moved, part), np.asarray(arrays[f"bn.{part}"], np.float64), 1e-5)
                assert getattr(moved, part).dtype == jnp.float32
        norm = moved
    assert not np.allclose(norm.running_mean, 0.1)


def test_batch_norm_of_a_constant_channel():
    x = jnp.broadcast_to(jnp.asarray([3.0, -7.0], jnp.float32), (4, 2, 2, 2))
    norm = BatchNorm.new(2)
    found, moved = norm(x, "batch")
    np.testing.assert_allclose(found, 0, atol=1e-3)
    np.testing.assert_allclose(moved.running_mean, [0.3, -0.7], rtol=1e-6)
    np.testing.assert_allclose(moved.running_var, [0.9, 0.9], rtol=1e-6)


def test_batch_norm_far_from_zero():
    """A channel whose mean is 100 times its deviation still comes out normal."""
    x = 100 + pictures(0, 8, 8, 8, 1)
    found, _ = BatchNorm.new(1)(jnp.asarray(x), "batch")
    rows = x.astype(np.float64)
    close(found, (rows - rows.mean()) / np.sqrt(rows.var() + 1e-5), 5e-3)


def test_batch_norm_of_one_value_is_finite():
    found, moved = BatchNorm.new(2)(jnp.ones((1, 1, 1, 2), jnp.float32), "batch")
    assert np.isfinite(np.asarray(found)).all()
    assert np.isfinite(np.asarray(moved.running_var)).all()


# --- whole networks ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(PARAMETERS))
def test_names_and_sizes_are_torchvisions(name):
    found = {key: array.shape for key, array in named_arrays(empty(name)).items()}
    assert found == reference.resnet_shapes(name)
    trained = [shape for key, shape in found.items() if not key.endswith(RUNNING)]
    assert sum(math.prod(shape) for shape in trained) == PARAMETERS[name]
    assert empty(name).features == (2048 if name == "resnet50" else 512)


def test_some_names_of_resnet50_as_written_in_its_file():
    names = list(named_arrays(empty("resnet50")))
    assert len(names) == 53 * 5
    for name in (
        "conv1.weight",
        "bn1.running_var",
        "layer1.0.downsample.0.weight",
        "layer1.0.downsample.1.running_mean",
        "layer3.5.conv3.weight",
        "layer4.2.bn3.bias",
    ):
        assert name in names
    assert "layer1.1.downsample.0.weight" not in names


@pytest.mark.parametrize(
    ("kind", "depths", "statistics", "batch"),
    [
        (BASIC, (1, 2), "running", 2),
        (BOTTLENECK, (2, 1), "batch", 8),
        pytest.param(BASIC, (2, 2, 2, 2), "running", 2, marks=pytest.mark.long),
        pytest.param(BOTTLENECK, (3, 4, 6, 3), "batch", 8, marks=pytest.mark.long),
    ],
)
def test_resnet_forward(kind, depths, statistics, batch):
    """Of two stages; the names and sizes of all stages are compared above."""
    depths = (*depths, *[0] * (4 - len(depths)))
    network = filled(shaped(lambda key: ResNet.new(kind, depths, key=key)))
    arrays = {key: np.asarray(a) for key, a in named_arrays(network).items()}
    images = pictures(1, batch, 32, 32, 3)
    features, moved = eqx.filter_jit(lambda n, x: n(x, statistics))(network, jnp.asarray(images))
    wanted, running = reference.resnet(arrays, images, statistics)
    assert features.dtype == jnp.float32
    assert features.shape == (batch, network.features)
    assert wanted.std() > 0.1
    close(features, wanted, 1e-3)
    after = named_arrays(moved)
    assert list(after) == list(arrays)
    assert set(running) == ({k for k in arrays if k.endswith(RUNNING)} if running else set())
    for key, array in after.items():
        if key in running:
            close(array, running[key], 1e-4)
        else:
            np.testing.assert_array_equal(array, arrays[key])


def test_cnn_forward():
    network = cnn(3, 4, 5, 6)
    arrays = {key: np.asarray(a) for key, a in named_arrays(network).items()}
    images = pictures(2, 4, 9, 11, 3)
    for statistics in ("batch", "running"):
        x, running = images, {}
        for layer in range(3):
            x = reference.conv(x, arrays[f"layers.{layer}.0.weight"], 2)
            x = reference.batch_norm(x, arrays, f"layers.{layer}.1", statistics, running)
            x = np.maximum(x, 0)
        run = eqx.filter_jit(lambda n, x, s=statistics: n(x, s))
        features, moved = run(network, jnp.asarray(images))
        close(features, x.mean(axis=(1, 2)))
        for key, array in named_arrays(moved).items():
            close(array, running.get(key, np.asarray(arrays[key], np.float64)))


def test_cnn_has_the_documented_channels():
    shapes = [a.shape for k, a in named_arrays(empty("cnn")).items() if len(a.shape) == 4]
    assert shapes == [(32, 3, 3, 3), (64, 32, 3, 3), (128, 64, 3, 3)]
    assert empty("cnn").features == 128


def test_model(monkeypatch):
    monkeypatch.setitem(networks.ENCODERS, "small", lambda _: cnn(3, 128))
    made = model("small", 5, jax.random.key(3))
    edge = 128**-0.5
    head = np.asarray(made.head)
    assert head.shape == (5, 128)
    assert head.dtype == np.float32
    assert -edge <= head.min() < -0.95 * edge
    assert 0.95 * edge < head.max() <= edge
    images = jnp.asarray(pictures(0, 2, 8, 8, 3))
    features, _ = eqx.filter_jit(lambda m, x: m.encoder(x, "running"))(made, images)
    close(eqx.filter_jit(Model.logits)(made, images), np.asarray(features, np.float64) @ head.T)


def test_unknown_network_is_named():
    with pytest.raises(ValueError, match=r"'resnet19'.*resnet18"):
        encoder("resnet19", jax.random.key(0))


# --- precision and gradients -------------------------------------------------------------------


def test_bfloat16_images_and_where_gradients_go():
    network = cnn(3, 8, 8)
    images = jnp.asarray(pictures(4, 4, 8, 8, 3))
    cotangent = jnp.asarray(pictures(6, 4, network.features))

    @eqx.filter_jit
    def both(network, images):
        features, pull, moved = encoded(network, images, "batch")
        return features, pull(cotangent), moved

    exact, slopes, _ = both(network, images)
    rough, rough_slopes, moved = both(network, images.astype(jnp.bfloat16))
    assert rough.dtype == jnp.float32
    assert {a.dtype for a in jax.tree.leaves(moved)} == {jnp.dtype(jnp.float32)}
    assert 1e-6 < apart(rough, exact) < 0.05  # it did compute in bfloat16, and well
    trained = {k for k in named_arrays(network) if not k.endswith(RUNNING)}
    for found in (named_arrays(slopes), named_arrays(rough_slopes)):
        assert set(found) == trained
        for key, array in found.items():
            assert array.dtype == jnp.float32
            channels = np.abs(np.asarray(array)).reshape(len(array), -1).max(axis=1)
            assert np.isfinite(channels).all(), key
            assert (channels > 0).mean() > 0.5, key
    for key, array in named_arrays(rough_slopes).items():
        assert cosine(array, named_arrays(slopes)[key]) > 0.8, key


def apart(found, wanted):
    found, wanted = np.asarray(found), np.asarray(wanted)
    return np.linalg.norm(found - wanted) / np.linalg.norm(wanted)


def cosine(found, wanted):
    found, wanted = np.asarray(found), np.asarray(wanted)
    return (found * wanted).sum() / (np.linalg.norm(found) * np.linalg.norm(wanted))


def test_gradient_by_differences():
    """⟨∇, direction⟩ against central differences: batch statistics are differentiated too."""
    network = cnn(3, 4, 5, 6)
    images, cotangent = jnp.asarray(pictures(7, 4, 8, 8, 3)), pictures(8, 4, 6)
    trained, fixed = split(network)
    directions = filled(trained, 9)

    @jax.jit
    def value(t):
        at = jax.tree.map(lambda a, d: a + t * d, trained, directions)
        return eqx.combine(at, fixed)(images, "batch")[0]

    step = 1e-3
    sides = [np.asarray(value(jnp.float32(t)), np.float64) for t in (step, -step)]
    wanted = ((sides[0] - sides[1]) * cotangent).sum() / (2 * step)
    pull = eqx.filter_jit(lambda n, c: encoded(n, images, "batch")[1](c))
    pulled = pull(network, jnp.asarray(cotangent))
    pairs = zip(jax.tree.leaves(pulled), jax.tree.leaves(directions))
    found = sum((np.asarray(g, np.float64) * np.asarray(d)).sum() for g, d in pairs)
    assert abs(wanted) > 0.1
    assert found == pytest.approx(wanted, rel=1e-2)


def test_split_and_combine():
    network = cnn(3, 4, 5)
    trained, fixed = split(network)
    assert all(not k.endswith(RUNNING) for k in named_arrays(trained))
    assert all(k.endswith(RUNNING) for k in named_arrays(fixed))
    assert len(jax.tree.leaves(fixed)) == 4
    assert eqx.tree_equal(eqx.combine(trained, fixed), network)


# --- weight files ------------------------------------------------------------------------------


@pytest.fixture
def small():
    network = cnn(3, 4, 5)
    return Model(network, jnp.asarray(pictures(0, 2, 5)))


def arrays_of(made):
    return {key: np.asarray(a) for key, a in named_arrays(made.encoder).items()}


def written(path, arrays):
    numpy = pytest.importorskip("safetensors.numpy")
    numpy.save_file(arrays, path)
    return path


def other(made):
    return filled(made.encoder, 1)


def test_weights_round_trip(tmp_path, small):
    numpy = pytest.importorskip("safetensors.numpy")
    made = small
    save_model(made, tmp_path / "w.safetensors")
    assert [p.name for p in tmp_path.iterdir()] == ["w.safetensors"]
    stored = numpy.load_file(tmp_path / "w.safetensors")
    assert set(stored) == {*arrays_of(made), "fc.weight"}
    np.testing.assert_array_equal(stored["fc.weight"], made.head)
    found = load_encoder(other(made), tmp_path / "w.safetensors")
    assert jax.tree.structure(found) == jax.tree.structure(made.encoder)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(made.encoder)):
        assert a.dtype == b.dtype == jnp.float32
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def test_weights_with_torchvisions_other_keys(tmp_path, small):
    arrays = arrays_of(small)
    extra = {
        "fc.weight": np.zeros((1000, 5), np.float32),
        "fc.bias": np.full(1000, np.nan, np.float32),
        "layers.0.1.num_batches_tracked": np.asarray(7, np.int64),
    }
    path = written(tmp_path / "w.safetensors", {**extra, **arrays})
    assert eqx.tree_equal(load_encoder(other(small), path), small.encoder)
    assert eqx.tree_equal(load_encoder(other(small), str(path)), small.encoder)


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_weights_of_another_precision(tmp_path, small, dtype):
    path = written(
        tmp_path / "w.safetensors", {k: a.astype(dtype) for k, a in arrays_of(small).items()}
    )
    for key, array in named_arrays(load_encoder(other(small), path)).items():
        assert array.dtype == jnp.float32
        np.testing.assert_array_equal(array, arrays_of(small)[key].astype(dtype).astype(np.float32))


def test_weights_with_a_key_missing(tmp_path, small):
    arrays = arrays_of(small)
    del arrays["layers.1.1.running_var"]
    path = written(tmp_path / "short.safetensors", arrays)
    with pytest.raises(ValueError, match=r"short\.safetensors.*lacks layers\.1\.1\.running_var$"):
        load_encoder(small.encoder, path)


def test_weights_with_an_unknown_key(tmp_path, small):
    path = written(
        tmp_path / "long.safetensors",
        {**arrays_of(small), "layers.7.0.weight": np.zeros(3, np.float32)},
    )
    with pytest.raises(ValueError, match=r"long\.safetensors.*no layers\.7\.0\.weight$"):
        load_encoder(small.encoder, path)


def test_weights_of_another_network_name_some_keys_of_both(tmp_path, small):
    path = written(tmp_path / "r.safetensors", {"conv1.weight": np.zeros((1, 1, 1, 1), np.float32)})
    with pytest.raises(ValueError, match=r"layers\.0\.0\.weight.* and 7 more.*conv1\.weight"):
        load_encoder(small.encoder, path)


def test_weights_of_a_wrong_shape(tmp_path, small):
    arrays = arrays_of(small)
    arrays["layers.0.0.weight"] = np.ascontiguousarray(
        arrays["layers.0.0.weight"].transpose(2, 3, 1, 0)  # another framework's layout
    )
    path = written(tmp_path / "w.safetensors", arrays)
    wanted = r"w\.safetensors.*layers\.0\.0\.weight.*\[3, 3, 3, 4\].*\[4, 3, 3, 3\]"
    with pytest.raises(ValueError, match=wanted):
        load_encoder(small.encoder, path)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_weights_with_nan(tmp_path, small, bad):
    arrays = {k: a.copy() for k, a in arrays_of(small).items()}
    arrays["layers.1.1.bias"][3] = bad
    path = written(tmp_path / "w.safetensors", arrays)
    with pytest.raises(ValueError, match=r"w\.safetensors.*layers\.1\.1\.bias"):
        load_encoder(small.encoder, path)


@pytest.mark.parametrize("how", ["text", "empty", "cut", "pickle"])
def test_weights_that_are_not_safetensors(tmp_path, small, how):
    path = written(tmp_path / "w.pth", arrays_of(small))
    whole = path.read_bytes()
    path.write_bytes(
        {"text": b"not weights", "empty": b"", "cut": whole[:-10], "pickle": b"\x80\x02}q" * 9}[how]
    )
    with pytest.raises(ValueError, match=r"w\.pth.*safetensors"):
        load_encoder(small.encoder, path)


def test_weights_that_are_not_there(tmp_path, small):
    pytest.importorskip("safetensors")
    with pytest.raises(FileNotFoundError, match=r"none\.safetensors"):
        load_encoder(small.encoder, tmp_path / "none.safetensors")
    with pytest.raises(FileNotFoundError, match=tmp_path.name):
        load_encoder(small.encoder, tmp_path)


def test_weights_are_written_whole_or_not(tmp_path, small):
    pytest.importorskip("safetensors")
    (tmp_path / "w.safetensors").mkdir()
    with pytest.raises(OSError, match="directory"):
        save_model(small, tmp_path / "w.safetensors")
    assert [p.name for p in tmp_path.iterdir()] == ["w.safetensors"]
