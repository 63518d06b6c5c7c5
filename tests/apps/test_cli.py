"""The command line: what it prints, what it writes, and how it exits."""

import pytest

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
    code, out, _ = run(capsys, *arguments, "--max-gradients", "20")
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
