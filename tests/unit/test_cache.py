"""Compiled programs on disk: one folder for each machine, of the user alone, if asked for."""

import os
import stat
import sys

import jax
import pytest

from bilevax import cache

POSIX = pytest.mark.skipif(os.name == "nt", reason="POSIX permissions")
SETTINGS = (
    "jax_compilation_cache_dir",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_persistent_cache_min_entry_size_bytes",
    "jax_compilation_cache_max_size",
)


@pytest.fixture(autouse=True)
def settings_of_before(monkeypatch, tmp_path):
    before = {name: getattr(jax.config, name) for name in SETTINGS}
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    monkeypatch.delenv(cache.VARIABLE, raising=False)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


def test_a_folder_of_the_users_own(tmp_path):
    folder = cache.enable_cache()
    assert folder.parent == tmp_path / "caches" / "bilevax"
    assert folder.is_dir()
    assert jax.config.jax_compilation_cache_dir == str(folder)
    assert jax.config.jax_persistent_cache_min_compile_time_secs == 0
    assert jax.config.jax_compilation_cache_max_size == cache.MOST_BYTES
    assert cache.enable_cache() == folder  # again


@POSIX
def test_nobody_else_may_write_there():
    assert stat.S_IMODE(cache.enable_cache().stat().st_mode) & 0o077 == 0


@POSIX
@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777, 0o720, 0o702])
def test_a_folder_that_others_can_write_to_is_refused(tmp_path, mode):
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(mode)
    before = jax.config.jax_compilation_cache_dir
    with pytest.raises(PermissionError, match="code that will be run"):
        cache.enable_cache(folder)
    assert jax.config.jax_compilation_cache_dir == before


@POSIX
def test_a_folder_of_somebody_else_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(cache.os, "getuid", lambda: os.stat(tmp_path).st_uid + 1)
    with pytest.raises(PermissionError, match="must belong to you"):
        cache.enable_cache(tmp_path / "theirs")


@POSIX
def test_a_folder_that_others_can_read_is_taken(tmp_path):
    (tmp_path / "mine").mkdir(mode=0o755)
    assert cache.enable_cache(str(tmp_path / "mine")) == tmp_path / "mine"


@pytest.mark.parametrize(
    ("name", "value"),
    [("machine", "riscv64"), ("system", "Plan 9"), ("python_version", "4.0.0")],
)
def test_another_machine_or_python_has_another_folder(monkeypatch, name, value):
    here = cache._usual_folder()
    monkeypatch.setattr(cache.platform, name, lambda: value)
    assert cache._usual_folder() != here


def test_another_jax_or_processor_has_another_folder(monkeypatch):
    seen = {cache._machine()}
    with monkeypatch.context() as patch:
        patch.setattr(cache.importlib.metadata, "version", lambda name: "99")
        seen.add(cache._machine())
    texts = ["flags : a b\nmodel name : x\n", "flags : a b c\nmodel name : x\n"]
    monkeypatch.setattr(cache.importlib.metadata, "version", lambda name: "1")
    for text in texts:
        with monkeypatch.context() as patch:
            patch.setattr(cache.Path, "read_text", lambda self, text=text: text)
            seen.add(cache._machine())
    assert len(seen) == 4
    # What changes from one moment to the next is no part of it.
    with monkeypatch.context() as patch:
        patch.setattr(cache.Path, "read_text", lambda self: texts[0] + "cpu MHz : 1234\n")
        assert cache._machine() in seen


@pytest.mark.parametrize("asked", ["", "0", "off", "no", "False"])
@pytest.mark.parametrize("default", [True, False])
def test_the_variable_turns_it_off(monkeypatch, asked, default):
    monkeypatch.setenv(cache.VARIABLE, asked)
    before = jax.config.jax_compilation_cache_dir
    assert cache.enable_cache_as_asked(default) is None
    assert jax.config.jax_compilation_cache_dir == before


@pytest.mark.parametrize("asked", ["1", "on", "Yes", "true"])
def test_the_variable_turns_it_on(monkeypatch, asked):
    monkeypatch.setenv(cache.VARIABLE, asked)
    assert cache.enable_cache_as_asked() == cache._usual_folder()


def test_the_variable_names_a_folder(monkeypatch, tmp_path):
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "here"))
    assert cache.enable_cache_as_asked() == tmp_path / "here"


def test_without_the_variable_only_commands_have_one():
    assert cache.enable_cache_as_asked() is None
    assert cache.enable_cache_as_asked(default=True) == cache._usual_folder()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/cpuinfo")
def test_the_folder_is_named_by_what_programs_depend_on():
    assert len(cache._machine()) == 16
    assert cache._machine() == cache._machine()


def test_a_folder_that_cannot_be_had_only_warns_at_import(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("BILEVAX_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.warns(RuntimeWarning, match="not kept on disk"):
        cache.enable_cache_at_import()
