"""Checkpoints of training runs: bit for bit, and whole or refused, whatever happens to the disk."""

import errno
import json
import os
import shutil
import sys
from pathlib import Path
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

pytest.importorskip("orbax.checkpoint")

from bilevax.deep import checkpoints
from bilevax.deep.checkpoints import Checkpoints

POSIX = pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals and limits")


class Pair(NamedTuple):
    left: object
    right: object


def small(value):
    return {"w": jnp.full((3,), value, jnp.float32), "n": jnp.int32(value)}


def varied():
    bits = np.random.default_rng(0).integers(0, 2**32, 257, np.uint32)
    w = jnp.asarray([[1.5, -0.0, jnp.inf], [jnp.nan, 1e-42, 3.0]], jnp.float32)
    return {
        "model": eqx.nn.Linear(3, 2, dtype=jnp.float32, key=jax.random.key(0)),
        "adam": optax.adam(0.1).init({"w": w}),
        "pair": Pair(None, (jnp.float32(0.1), [jnp.asarray(-0.0, jnp.bfloat16)])),
        "every bit": jax.lax.bitcast_convert_type(jnp.asarray(bits), jnp.float32),
        "half": jax.lax.bitcast_convert_type(jnp.asarray(bits >> 16, jnp.uint16), jnp.bfloat16),
        "odd/key.": {"0": w, "1": jnp.uint32(2**32 - 1), "2": jnp.full((4,), -0.0, jnp.float32)},
        "host": np.arange(3, dtype=np.int32),
        "empty": jnp.zeros((0, 5), jnp.float32),
        "none": None,
    }


def assert_same(found, wanted):
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted)):
        assert a.shape == b.shape
        assert a.dtype == b.dtype
        assert isinstance(a, jax.Array) == isinstance(b, jax.Array)
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def files(folder):
    return sorted(path for path in folder.rglob("*") if path.is_file())


@pytest.fixture(scope="module")
def saved_once(tmp_path_factory):
    folder = tmp_path_factory.mktemp("three")
    saver = Checkpoints(folder)
    for step in (1, 2, 3):
        saver.save(step, small(step), {"step": step}, best=step == 1)
    return folder


@pytest.fixture
def three(saved_once, tmp_path):
    """A folder of its own with steps 1 (the best), 2 and 3."""
    return shutil.copytree(saved_once, tmp_path / "three")


# What is kept


def test_every_kind_of_tree_comes_back_bit_for_bit(tmp_path):
    state = varied()
    about = {"history": [0.1, 1 / 3], "best": None, "settings": {"width": 64}}
    saver = Checkpoints(tmp_path / "new" / "run")
    assert saver.steps() == []
    assert saver.last(state) is saver.best(state) is saver.about() is None
    saver.save(120, state, about, best=True)
    zeros = jax.tree.map(lambda a: a * 0, state)
    abstract = jax.tree.map(
        lambda a: a if isinstance(a, np.ndarray) else jax.ShapeDtypeStruct(a.shape, a.dtype), state
    )
    for like in (zeros, abstract):
        for saved in (Checkpoints(saver.folder).last(like), Checkpoints(saver.folder).best(like)):
            assert (saved.step, saved.about) == (120, about)
            assert_same(saved.state, state)
    assert names(saver.folder) == ["best.json", "step-00000120"]
    assert saver.about("best") == about


def test_arrays_come_back_to_their_places(tmp_path):
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()), ("batch",))
    sharded = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("batch"))
    state = {"free": jnp.ones(4), "bound": jax.device_put(jnp.ones(4), sharded)}
    saver = Checkpoints(tmp_path)
    saver.save(1, state, {}, best=False)
    like = state | {"bound": jax.ShapeDtypeStruct((4,), state["bound"].dtype, sharding=sharded)}
    for one in (state, like):
        found = saver.last(one).state
        assert found["bound"].sharding == sharded
        assert not found["free"].committed


def test_the_last_two_and_the_best_are_kept(tmp_path):
    saver = Checkpoints(tmp_path)
    for step in range(1, 8):
        saver.save(step, small(step), {"at": step}, best=step in (1, 3))
        assert names(tmp_path)[0] == "best.json"
        kept = {step, step - 1, 3 if step >= 3 else 1} - {0}
        assert saver.steps() == sorted(kept) == Checkpoints(tmp_path).steps()
        assert len(names(tmp_path)) == 1 + len(kept)
    assert saver.best(small(0)).about == {"at": 3}
    assert saver.about("best") == {"at": 3}
    assert saver.about() == {"at": 7}


def test_without_a_best_the_last_is_used(tmp_path):
    Checkpoints(tmp_path).save(4, small(4), {}, best=False)
    with pytest.warns(RuntimeWarning, match=r"best\.json names no step"):
        assert Checkpoints(tmp_path).best(small(0)).step == 4


def test_a_step_saved_twice_is_replaced(tmp_path):
    saver = Checkpoints(tmp_path)
    saver.save(1, small(1), {}, best=False)
    for value in (2, 3):
        saver.save(5, small(value), {"value": value}, best=value == 2)
        found = Checkpoints(tmp_path).last(small(0))
        assert_same(found.state, small(value))
        assert found.about == {"value": value}
    assert saver.steps() == [1, 5]
    assert json.loads((tmp_path / "best.json").read_text()) == []  # it was of the other state


def test_a_step_is_not_lost_when_killed_while_replaced(tmp_path):
    Checkpoints(tmp_path).save(5, small(5), {}, best=True)
    (tmp_path / "step-00000005").rename(tmp_path / "step-00000005.old~")
    assert Checkpoints(tmp_path).best(small(0)).step == 5
    Checkpoints(tmp_path).save(6, small(6), {}, best=False)
    assert names(tmp_path) == ["best.json", "step-00000005", "step-00000006"]


def test_leftovers_of_killed_runs_are_removed(tmp_path):
    saver = Checkpoints(tmp_path)
    saver.save(1, small(1), {}, best=True)
    for name in ("step-00000002.new~", "step-00000000.gone~", "step-00000001.old~"):
        (tmp_path / name / "state").mkdir(parents=True)
    (tmp_path / "best.json~").write_text("[")
    (tmp_path / "notes~").write_text("not ours")
    assert Checkpoints(tmp_path).last(small(0)).step == 1
    Checkpoints(tmp_path).save(2, small(2), {}, best=True)
    assert names(tmp_path) == ["best.json", "notes~", "step-00000001", "step-00000002"]


def test_one_half_removed_is_not_taken_for_a_damaged_one(three, monkeypatch):
    remove = shutil.rmtree

    def fails(path, **options):
        if str(path).endswith(".gone~"):
            raise OSError(errno.EIO, "Input/output error")
        remove(path, **options)

    with monkeypatch.context() as patched:
        patched.setattr(checkpoints.shutil, "rmtree", fails)
        Checkpoints(three).save(4, small(4), {}, best=True)
    assert Checkpoints(three).steps() == [3, 4]
    Checkpoints(three).save(5, small(5), {}, best=True)
    assert names(three) == ["best.json", "step-00000004", "step-00000005"]


def test_a_best_named_but_not_there_yet_leaves_the_one_before(three):
    """Killed between the naming of the best and its coming into place."""
    (three / "best.json").write_text("[4, 1]")
    assert Checkpoints(three).best(small(0)).step == 1


def test_a_run_does_not_go_back_unless_taken_up_there(three):
    with pytest.raises(ValueError, match="holds step 3, later than 2: resume"):
        Checkpoints(three).save(2, small(2), {}, best=False)
    saver = Checkpoints(three)
    assert saver.best(small(0)).step == 1
    saver.save(2, small(20), {}, best=False)
    assert saver.steps() == [1, 2]
    with pytest.raises(ValueError, match="later than 1"):
        saver.save(1, small(1), {}, best=False)


# What is refused


def test_what_cannot_be_saved_is_named(tmp_path):
    saver = Checkpoints(tmp_path / "run")
    state, key = small(1), jax.random.key(0)
    with pytest.raises(TypeError, match=r"\['key'\] is a typed random key: store .*key_data"):
        saver.save(1, state | {"key": key}, {}, best=False)
    with pytest.raises(TypeError, match=r"\['p'\] must be an array, not float"):
        saver.save(1, state | {"p": 0.5}, {}, best=False)
    with pytest.raises(TypeError, match=r"\['a'\] must be an array, not ShapeDtypeStruct"):
        saver.save(1, {"a": jax.ShapeDtypeStruct((), jnp.float32)}, {}, best=False)
    with pytest.raises(TypeError, match="about must be JSON"):
        saver.save(1, state, {"accuracy": np.float32(1)}, best=False)
    with pytest.raises(ValueError, match="no numbers"):
        saver.save(1, {"none": None}, {}, best=False)
    with pytest.raises(TypeError, match="step"):
        saver.save("1", state, {}, best=False)
    assert saver.steps() == []
    assert names(saver.folder) == []


@pytest.mark.parametrize(
    ("like", "sentence"),
    [
        (
            lambda s: s | {"w": jnp.zeros((4,), jnp.float32)},
            r"\['w'\] has shape \(3,\), not \(4,\)",
        ),
        (lambda s: s | {"n": jnp.uint32(0)}, r"\['n'\] is of int32, not uint32"),
        (lambda s: s | {"v": jnp.int32(0), "x": jnp.int32(0)}, r"it has no \['v'\]$"),
        (lambda s: {"w": s["w"], "n": None}, r"it has \['n'\], which this state has not"),
    ],
)
def test_a_state_of_another_run_is_refused_at_its_first_difference(tmp_path, like, sentence):
    Checkpoints(tmp_path).save(7, small(7), {}, best=True)
    for read in (Checkpoints(tmp_path).last, Checkpoints(tmp_path).best):
        with pytest.raises(ValueError, match=sentence) as caught:
            read(like(small(0)))
        assert str(caught.value).startswith(f"{tmp_path / 'step-00000007'} is of another run: ")
        assert "\n" not in str(caught.value)


# Damage


def truncated(path):
    path.write_bytes(path.read_bytes()[:-1])


def flipped(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("damage", [truncated, flipped, Path.unlink])
def test_damage_to_any_file_is_named_and_the_one_before_is_used(three, damage):
    last = three / "step-00000003"
    seen = set()
    for path in files(last):
        content = path.read_bytes()
        name = path.relative_to(last).as_posix()
        seen.add(name.split("/")[0])
        if name == "digests.json" and damage is truncated:
            path.write_bytes(content[:-3])  # what it ends with does not matter
        else:
            damage(path)
        with pytest.warns(RuntimeWarning) as warned:
            found = Checkpoints(three).last(small(0))
        (said,) = (str(one.message) for one in warned)
        assert said.startswith(f"{last} is damaged: {name} ")
        assert said.endswith("using the one before it")
        assert warned[0].filename == __file__
        assert found.step == 2
        assert_same(found.state, small(2))
        assert Checkpoints(three).best(small(0)).step == 1
        path.write_bytes(content)
    assert seen == {"about.json", "digests.json", "leaves.json", "state"}
    assert Checkpoints(three).last(small(0)).step == 3


def test_a_damaged_step_is_replaced_by_the_run_that_goes_on(three):
    truncated(three / "step-00000003" / "about.json")
    saver = Checkpoints(three)
    with pytest.warns(RuntimeWarning):
        assert saver.last(small(0)).step == 2
    saver.save(4, small(4), {}, best=False)
    assert saver.steps() == [1, 2, 4]  # not the damaged one as one of two
    assert Checkpoints(three).last(small(0)).step == 4


def test_a_damaged_best_gives_way_to_the_last(three):
    flipped(three / "step-00000001" / "leaves.json")
    with pytest.warns(RuntimeWarning, match=r"step-00000001 is damaged: leaves\.json"):
        assert Checkpoints(three).best(small(0)).step == 3
    (three / "best.json").write_text("[1")
    with pytest.warns(RuntimeWarning, match="names no step"):
        assert Checkpoints(three).best(small(0)).step == 3


def test_when_all_are_damaged_all_are_named(three):
    for step in (1, 2, 3):
        (three / f"step-0000000{step}" / "leaves.json").unlink()
    for read in (lambda c: c.last(small(0)), lambda c: c.best(small(0)), lambda c: c.about()):
        with (
            pytest.warns(RuntimeWarning),
            pytest.raises(ValueError, match="every checkpoint is damaged") as caught,
        ):
            read(Checkpoints(three))
        for step in (1, 2, 3):
            assert f"step-0000000{step}: leaves.json is missing" in str(caught.value)


# A full disk


@pytest.mark.parametrize("part", ["_write_arrays", "write_json", "_digests", "_sync"])
def test_a_full_disk_loses_nothing(three, monkeypatch, part):
    before = {path: path.read_bytes() for path in files(three)}

    def fails(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    saver = Checkpoints(three)
    with monkeypatch.context() as patched:
        patched.setattr(checkpoints, part, fails)
        with pytest.raises(OSError, match="free space there and resume") as caught:
            saver.save(4, small(4), {}, best=True)
    assert caught.value.errno == errno.ENOSPC
    assert "the earlier step-00000001, step-00000002, step-00000003 are untouched" in str(
        caught.value
    )
    assert {path: path.read_bytes() for path in files(three)} == before
    assert not list(three.glob("step-*~"))
    saver.save(4, small(4), {}, best=True)
    assert Checkpoints(three).best(small(0)).step == 4


def test_other_errors_are_not_called_a_full_disk(tmp_path, monkeypatch):
    def fails(*_):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(checkpoints, "_digests", fails)
    with pytest.raises(PermissionError):
        Checkpoints(tmp_path).save(4, small(4), {}, best=True)
    assert names(tmp_path) == []


@POSIX
def test_orbax_out_of_room(tmp_path, capfd):
    """A limit on the size of files; Python ignores the signal that comes with it."""
    import resource

    saver = Checkpoints(tmp_path)
    saver.save(1, {"w": np.zeros(3, np.float32)}, {}, best=True)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with pytest.raises(OSError, match="checkpoint of step 2; the earlier step-00000001 are"):
            saver.save(2, {"w": np.random.default_rng(0).random(100_000)}, {}, best=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert capfd.readouterr().err == ""  # orbax logs nothing of its own either
    saver.save(3, {"w": np.ones(3, np.float32)}, {}, best=False)
    assert names(tmp_path) == ["best.json", "step-00000001", "step-00000003"]
    assert Checkpoints(tmp_path).best({"w": np.ones(3, np.float32)}).step == 1
