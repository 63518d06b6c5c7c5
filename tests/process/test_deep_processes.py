"""`bilevax.deep` in processes that are killed, run out of disk, or train together."""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("orbax.checkpoint")

from PIL import Image

from bilevax.deep import evaluation, networks, train
from bilevax.deep.checkpoints import Checkpoints
from bilevax.deep.pixels import ImageError, load, stream
from bilevax.deep.tables import ImageTable
from deep_runs import SIDE, mean_features, same, settings, small_cnn, write_images

POSIX = pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals and limits")
RUN = [
    "deep", "train", "--network", "cnn", "--size", str(SIDE), "--batch", "8", "--chunk", "2",
    "--augment",
]  # fmt: skip


def environment(devices=None):
    """With the settings of these tests, so that processes find their compiled programs."""
    flags = os.environ.get("XLA_FLAGS", "")
    if devices is not None:
        flags += f" --xla_force_host_platform_device_count={devices}"
    return os.environ | {
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "XLA_FLAGS": flags,
        "JAX_COMPILATION_CACHE_DIR": str(jax.config.jax_compilation_cache_dir),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "JAX_ENABLE_X64": "1",
        "JAX_NUMPY_DTYPE_PROMOTION": "strict",
        "JAX_NUMPY_RANK_PROMOTION": "raise",
    }


@pytest.fixture(scope="module", autouse=True)
def quick():
    """Here what `QUICK` says in the processes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluation, "head_certificate", mean_features)
        patch.setitem(networks.ENCODERS, "cnn", small_cnn)
        yield


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_images(tmp_path_factory.mktemp("images"))


# Training


KILLS = [1, pytest.param(10, marks=pytest.mark.long)]
QUICK = """
from bilevax.cli import main
from bilevax.deep import evaluation, networks
from deep_runs import mean_features, small_cnn

evaluation.head_certificate = mean_features
networks.ENCODERS["cnn"] = small_cnn
"""
TRAIN = f"{QUICK}\nmain()"


@pytest.mark.parametrize("kills", KILLS)
def test_killed_processes_resume_where_they_were(kills, data, tmp_path):
    """Real processes: SIGKILL, and SIGTERM once, which saves first and says how to resume."""
    rng, out, epochs = random.Random(kills), tmp_path / "run", 4 + 6 * kills
    whole = settings(data, tmp_path / "whole", epochs=epochs)
    train(whole, show=False)
    command = [sys.executable, "-c", TRAIN, *RUN, str(data), "--out", str(out)]
    command += ["--epochs", str(epochs), "--resume"]
    for kill in range(kills + 1):
        before = Checkpoints(out / "checkpoints").steps()
        process = subprocess.Popen(
            command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        if kill < kills:
            # Once it has gone a step farther, at a random moment; the end is far away.
            wait_for(lambda b=before: Checkpoints(out / "checkpoints").steps()[-1:] > b[-1:])
            time.sleep(rng.uniform(0, 0.3))
            process.send_signal(signal.SIGKILL if kill else signal.SIGTERM)
        said, _ = process.communicate(timeout=120)
        if kill == 0:
            assert process.returncode == 130, said
            assert "--resume" in said
        elif kill < kills:
            assert process.returncode == -signal.SIGKILL, said
    assert process.returncode == 0, said
    same(out, whole.out)


def wait_for(condition, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


SEVERAL = """
import sys
folder, *command = sys.argv[1:]
try:
    main(command)
except SystemExit as end:
    assert not end.code, end.code

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from bilevax.deep.checkpoints import Checkpoints

mesh = Mesh(np.asarray(jax.devices()), ("batch",))
split, same = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (["batch"], []))
whole = np.arange(8, dtype=np.float32)
put = lambda a, where: jax.make_array_from_callback(a.shape, where, lambda i: a[i])
state = {
    "split": put(whole, split), "same": put(whole, same),
    "own": jnp.int32(3), "host": np.arange(2), "scalar": put(np.asarray(7, np.uint32), same),
}
saver = Checkpoints(folder)
assert saver.last(state) is None
for step in (1, 2, 3, 4):
    saver.save(step, state, {"step": step}, best=step == 1)
blank = jax.tree.map(lambda a: a if isinstance(a, np.ndarray) else a * 0, state)
for saved in (saver.best(blank), saver.last(blank)):
    for key, wanted in state.items():
        found = saved.state[key]
        assert found.dtype == wanted.dtype and found.shape == wanted.shape, key
        if isinstance(wanted, jax.Array):
            assert found.sharding == wanted.sharding, key
            for a, b in zip(found.addressable_shards, wanted.addressable_shards):
                assert np.array_equal(a.data, b.data), key
        else:
            assert np.array_equal(found, wanted)
assert saver.steps() == [1, 3, 4]
print("well", saved.step, saved.about)
"""


@pytest.mark.long  # test_runs.py has processes
def test_four_devices_of_two_processes_train_and_save_together(data, tmp_path):
    """As one would on two hosts: the answer is that of one device, up to rounding.

    Then they save arrays of every kind of sharding, and one process reads what two wrote.
    """
    one = train(settings(data, tmp_path / "one", epochs=1), show=False).results
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    out, saved = tmp_path / "run", tmp_path / "saved"
    command = [
        sys.executable,
        "-c",
        QUICK + SEVERAL,
        str(saved),
        *RUN,
        str(data),
        "--out",
        str(out),
    ]
    command += [
        "--out",
        str(out),
        "--epochs",
        "1",
        "--coordinator",
        f"localhost:{port}",
        "--processes",
        "2",
    ]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    processes = [
        subprocess.Popen([*command, "--process", str(i)], env=environment(2), **pipes)
        for i in range(2)
    ]
    said = [process.communicate(timeout=180)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], said
    assert all("well 4 {'step': 4}" in text for text in said)
    assert "worst group" in said[0]
    assert "worst group" not in said[1]
    results = json.loads((out / "results.json").read_text())
    assert results["devices"] == 4
    first, alone = results["history"][0], one["history"][0]
    np.testing.assert_allclose(first["loss"], alone["loss"], rtol=1e-3)
    np.testing.assert_allclose(first["weights"], alone["weights"], atol=1e-3)
    # Each process has all features, of which it computed a part.
    means = [found["stationarity"]["epsilon"] for found in (results, one)]
    np.testing.assert_allclose(*means, rtol=1e-2)
    like = {"split": jnp.zeros(8, jnp.float32), "same": np.zeros(8, np.float32)}
    like |= {"own": jnp.int32(0), "host": np.zeros(2, np.int64), "scalar": jnp.uint32(0)}
    found = Checkpoints(saved).last(like).state
    assert found["split"].tolist() == found["same"].tolist() == list(range(8))
    assert [int(found["own"]), int(found["scalar"])] == [3, 7]


# Checkpoints


MANY = """
import sys
import numpy as np
from bilevax.deep.checkpoints import Checkpoints

state = lambda step: {"w": np.full(2000, step, np.float32), "n": np.asarray(step, np.int32)}
sys.stdin.readline()
saver = Checkpoints(sys.argv[1])
saved = saver.last(state(0))
step = saved.step if saved else 0
while True:
    step += 1
    saver.save(step, state(step), {"step": step}, best=step % 3 == 0)
    print(step, flush=True)
"""


@POSIX
@pytest.mark.parametrize("times", [2, pytest.param(12, marks=pytest.mark.long)])
def test_killed_at_any_moment_it_leaves_a_readable_last(tmp_path, times):
    like = {"w": np.zeros(2000, np.float32), "n": np.asarray(0, np.int32)}
    rng = np.random.default_rng(0)
    command = [sys.executable, "-W", "error", "-c", MANY, str(tmp_path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    # All begin at once, as most of their time is imports; each waits for its turn.
    waiting = [subprocess.Popen(command, env=environment(), **pipes) for _ in range(times)]
    for process in waiting:
        process.stdin.write("go\n")
        process.stdin.flush()
        assert process.stdout.readline()
        time.sleep(rng.uniform(0.1, 0.5))
        process.kill()
        out, _ = process.communicate()
        saved = Checkpoints(tmp_path).last(like)
        assert saved.step >= max(map(int, out.split()), default=1)
        assert saved.about == {"step": saved.step}
        assert saved.state["n"] == saved.step
        assert (saved.state["w"] == saved.step).all()
        if saved.step >= 3:
            assert Checkpoints(tmp_path).best(like).step == saved.step // 3 * 3


# Decoding


def test_processes_decode_in_order_and_hand_over_their_errors(tmp_path):
    pytest.importorskip("grain", reason="needs grain")
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (10, 6, 6, 3), dtype=np.uint8)
    files = tuple(tmp_path / f"{i}.png" for i in range(10))
    for file, picture in zip(files, pixels):
        Image.fromarray(picture).save(file)
    zeros = np.zeros(10, np.int32)
    table = ImageTable("noise", files, zeros, zeros, zeros.astype(np.int8), ("a",), ("b",))
    images = load(table, 6, limit_gb=1e-9)
    files[7].write_bytes(files[7].read_bytes()[:60])
    batches = [np.array(rows) for rows in ([0, 1], [2], [3, 4, 5], [6], [8, 9, 7], [0])]
    decoded = stream(images, batches, 1, 5, workers=2)
    for rows in ([2], [3, 4, 5], [6]):
        np.testing.assert_array_equal(next(decoded), pixels[rows])
    with pytest.raises(ImageError, match=r"7\.png cannot be decoded.*\(image 7 of noise") as raised:
        next(decoded)
    assert raised.value.row == 7
    assert raised.value.file == str(files[7])
