"""The command line: what it prints, what it writes, and how it exits."""

import os
import subprocess
import sys

import jax
import pytest

import bilevax
from bilevax.cli import main
from bilevax.problems import library


def run(capsys, *args):
    with pytest.raises(SystemExit) as stopped:
        main(list(args))
    shown = capsys.readouterr()
    return stopped.value.code or 0, shown.out, shown.err


def test_demo_certifies_and_plots(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, _ = run(capsys, "demo", "--tolerance", "0.2")
    assert code == 0
    assert "Certified" in out
    assert "stationarity" in out
    assert (tmp_path / "demo.png").stat().st_size > 5000


def test_solve_lists_the_library(capsys):
    code, out, _ = run(capsys, "solve", "list")
    assert code == 0
    assert all(name in out for name in library.INSTANCES)


def test_solve_goes_on_from_a_checkpoint(capsys, tmp_path):
    path = tmp_path / "run.state"
    arguments = ("solve", "boundary", "--tolerance", "1e-3", "--checkpoint", str(path))
    code, out, _ = run(capsys, *arguments, "--max-gradients", "5")
    assert code == 1
    assert "budget" in out
    code, out, _ = run(capsys, *arguments, "--resume", str(path))
    assert code == 0
    assert "in closed form" in out


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (("solve", "nothing"), "nothing"),
        (("solve", "boundary", "--tolerance", "-1"), "tolerance"),
        (("solve", "boundary", "--resume", "missing.state"), "missing.state"),
        (("solve", "boundary", "--checkpoint", "no/such/folder/x"), "no/such/folder"),
    ],
)
def test_bad_input_exits_with_two_and_a_sentence(capsys, args, named):
    code, _, err = run(capsys, *args)
    assert code == 2
    assert named in err
    assert "Traceback" not in err


def test_the_help_says_what_for_and_what_is_required(capsys):
    code, out, _ = run(capsys, "--version")
    assert (code, out) == (0, f"bilevax {bilevax.__version__}\n")
    code, out, _ = run(capsys, "--help")
    assert code == 0
    assert out.split("\n\n")[1].startswith("Train classifiers whose worst group does well")
    code, out, _ = run(capsys, "robust", "--help")
    words = " ".join(out.replace("│", " ").split())
    assert words.count("(required, but for --demo)") == 3
    flags = ("--label", "--group", "--out", "--fast", "--split", "--tolerance", "--seed")
    places = [words.index(f"{flag} ") for flag in flags]
    assert places == sorted(places)


@pytest.fixture
def own_cache(monkeypatch, tmp_path):
    """A cache folder of its own, with JAX's settings restored afterwards."""
    names = [name for name in jax.config.values if "_cache_" in name]
    before = {name: jax.config.values[name] for name in names}
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    monkeypatch.delenv("BILEVAX_CACHE", raising=False)
    jax.config.update("jax_compilation_cache_dir", None)
    yield tmp_path / "caches" / "bilevax"
    for name, value in before.items():
        jax.config.update(name, value)


def test_commands_keep_compiled_programs_in_the_users_cache_folder(capsys, own_cache):
    assert run(capsys, "solve", "list")[0] == 0
    (folder,) = own_cache.iterdir()
    assert jax.config.jax_compilation_cache_dir == str(folder)


def test_the_cache_can_be_turned_off(capsys, own_cache, monkeypatch):
    monkeypatch.setenv("BILEVAX_CACHE", "0")
    assert run(capsys, "solve", "list")[0] == 0
    assert jax.config.jax_compilation_cache_dir is None
    assert not own_cache.exists()


def test_a_cache_folder_that_jax_has_already_stays(capsys, own_cache, tmp_path):
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    assert run(capsys, "solve", "list")[0] == 0
    assert jax.config.jax_compilation_cache_dir == str(tmp_path)
    assert not own_cache.exists()


def test_a_cache_that_cannot_be_written_stops_no_command(capsys, own_cache):
    own_cache.parent.write_text("a file where the folder should be")
    code, out, err = run(capsys, "solve", "list")
    assert code == 0
    assert "boundary" in out
    assert len(err.splitlines()) == 1
    assert "not kept on disk" in err


@pytest.mark.parametrize("args", [["--help"], ["solve", "list"]])
def test_commands_import_only_what_they_need(args):
    code = (
        f"import sys; from bilevax.cli import main\ntry:\n    main({args})\n"
        "except SystemExit as stop:\n    assert not stop.code\n"
        "heavy = ('bilevax.deep', 'bilevax.bench', 'bilevax.learn', 'sklearn', 'pandas')\n"
        "assert not [name for name in heavy if name in sys.modules]"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | {"BILEVAX_CACHE": ""})
