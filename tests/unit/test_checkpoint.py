"""A run's state on disk: the header, the arrays, and what is refused. No run is made for it."""

import dataclasses
import json

import jax
import numpy as np
import pytest

import bilevax as bx
from bilevax.driver import checkpoint
from bilevax.driver.checkpoint import RunState, fingerprint, load, save


def state(**changes):
    usual = {
        "solver": (np.asarray(0.5),),
        "solver_state": {"w": np.arange(3.0), "n": np.asarray(7)},
        "best": bx.Point(x=np.ones(2)),
        "next_check": 128,
        "check_gradients": 4,
        "seconds": 1.5,
        "history": {"gradients": [0, 64], "epsilon": [2.0, 0.1 + 0.2]},
        "fingerprint": "a run",
    }
    return RunState(**(usual | changes))


def fresh(fell_back):
    """What a run that begins has in the same places."""
    zeros = jax.tree.map(np.zeros_like, (state().solver, state().solver_state, state().best))
    return state(**dict(zip(checkpoint.ARRAYS, zeros)), next_check=64, history={})


@pytest.fixture
def path(tmp_path):
    save(tmp_path / "run.state", state(earlier=3, confirmations=2, confirmed=True))
    return tmp_path / "run.state"


def test_what_is_saved_is_read(path):
    found = load(path, fresh)
    for field in dataclasses.fields(RunState):
        if field.name not in checkpoint.ARRAYS:
            expected = getattr(state(earlier=3, confirmations=2, confirmed=True), field.name)
            assert getattr(found, field.name) == expected
    np.testing.assert_array_equal(found.solver_state["w"], np.arange(3.0))
    assert found.solver_state["n"].dtype == state().solver_state["n"].dtype
    np.testing.assert_array_equal(found.best.x, 1.0)


def test_the_header_is_one_line_of_json(path):
    header = json.loads(path.read_bytes().partition(b"\n")[0])
    assert header["format"] == checkpoint.MAGIC
    assert header["fingerprint"] == "a run"


def test_a_run_that_fell_back_is_read_as_one(tmp_path):
    asked = []

    def like(stage):
        asked.append(stage)
        return fresh(stage)

    save(tmp_path / "a", state(stage=(2, True), fell_back_at=5))
    assert load(tmp_path / "a", like).fell_back_at == 5
    assert asked[-1] == (2, True)
    save(tmp_path / "a", state())
    load(tmp_path / "a", like)
    assert asked[-1] == ()


@pytest.mark.parametrize("place", [-1, -20, -200])
def test_one_changed_byte_is_noticed(path, place):
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"run.state is damaged or cut short"):
        load(path, fresh)


@pytest.mark.parametrize("share", [0.3, 0.9, 0.999])
def test_a_file_that_is_cut_short_is_noticed(path, share):
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    with pytest.raises(ValueError, match=r"resume: .*run.state (is|was not)"):
        load(path, fresh)


@pytest.mark.parametrize(
    "content", [b"", b"nothing of the kind", b'{"format": "other"}\n', b"[]\n"]
)
def test_other_files_are_refused(path, content):
    path.write_bytes(content)
    with pytest.raises(ValueError, match="not written by this version of bilevax, or is damaged"):
        load(path, fresh)


@pytest.mark.parametrize("name", ["fingerprint", "next_check", "sha256"])
def test_a_header_without_a_field_is_refused(path, name):
    first, _, rest = path.read_bytes().partition(b"\n")
    header = {key: value for key, value in json.loads(first).items() if key != name}
    path.write_bytes(json.dumps(header).encode() + b"\n" + rest)
    with pytest.raises(ValueError, match="damaged"):
        load(path, fresh)


def test_no_file_and_a_folder_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="resume: there is no file"):
        load(tmp_path / "none", fresh)
    with pytest.raises(IsADirectoryError, match="is a folder, not a saved state"):
        load(tmp_path, fresh)


def test_the_state_of_another_run_is_refused_with_both(path):
    other = lambda fell_back: state(fingerprint="another")
    with pytest.raises(
        ValueError, match=r"of another run(.|\n)*it holds  a run\n.*this is   another"
    ):
        load(path, other)


def test_a_full_disk_is_a_warning(tmp_path, monkeypatch):
    def full(*_):
        raise OSError("No space left on device")

    monkeypatch.setattr(checkpoint, "write_bytes", full)
    with pytest.warns(RuntimeWarning, match=r"could not be written: No space left"):
        checkpoint.save_or_warn(tmp_path / "a", state())


def test_only_the_first_process_writes(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint.jax, "process_index", lambda: 1)
    checkpoint.save_or_warn(tmp_path / "a", state())
    assert list(tmp_path.iterdir()) == []


def print_of(problem=None, solver=None, start=None):
    problem = (np.ones(3), lambda x: 2.0 * x) if problem is None else problem
    solver = bx.ExtraGradient(tolerance=0.1) if solver is None else solver
    return fingerprint(problem, solver, bx.Point(x=np.zeros(2)) if start is None else start)


@pytest.mark.parametrize(
    "other",
    [
        {"problem": (np.asarray([1.0, 1.0, 1.0 + 1e-15]), lambda x: 2.0 * x)},
        {"problem": (np.ones(3, np.float32), lambda x: 2.0 * x)},
        {"problem": (np.ones((3, 1)), lambda x: 2.0 * x)},
        {"problem": (np.ones(3), lambda x: 3.0 * x)},
        {"problem": (np.ones(3), lambda x: x + 2.0)},
        {"solver": bx.ExtraGradient(tolerance=0.2)},
        {"solver": bx.ExtraGradient(tolerance=0.1, stop="gap")},
        {"start": bx.Point(x=np.zeros(3))},
        {"start": bx.Point(y=np.zeros(2))},
    ],
)
def test_fingerprints_tell_runs_apart(other):
    assert print_of(**other) != print_of()
    assert print_of() == print_of()
