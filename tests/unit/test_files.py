"""Files that are complete or not there."""

import json
import math
import os
import stat

import pytest

from bilevax import files


def test_bytes_are_written_one_behind_the_other(tmp_path):
    path = tmp_path / "a"
    files.write_bytes(path, b"one", memoryview(b" two"))
    assert path.read_bytes() == b"one two"
    files.write_bytes(str(path), b"three")
    assert path.read_bytes() == b"three"
    assert list(tmp_path.iterdir()) == [path]


def test_a_writing_that_fails_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"old")

    def fail():
        with files.replaced(path) as temporary:
            temporary.write_bytes(b"ne")
            assert path.read_bytes() == b"old"
            assert temporary.parent == path.parent
            raise RuntimeError("halfway")

    with pytest.raises(RuntimeError, match="halfway"):
        fail()
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_was_never_written_is_not_there(tmp_path):
    with pytest.raises(KeyboardInterrupt), files.replaced(tmp_path / "a"):
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def test_the_content_is_on_the_disk_before_the_name_is(tmp_path, monkeypatch):
    done = []
    monkeypatch.setattr(files.os, "fsync", lambda descriptor: done.append("synced"))
    replace = files.Path.replace
    monkeypatch.setattr(
        files.Path, "replace", lambda self, to: (done.append("named"), replace(self, to))
    )
    files.write_bytes(tmp_path / "a", b"x")
    assert done == ["synced", "named"]


@pytest.mark.skipif(os.name == "nt", reason="POSIX permissions")
@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_permissions_are_those_of_any_other_file(tmp_path, mask):
    before = os.umask(mask)
    try:
        files.write_bytes(tmp_path / "a", b"x")
        (tmp_path / "b").write_bytes(b"x")
    finally:
        assert os.umask(before) == mask  # reading it has not changed it
    mode = lambda name: stat.S_IMODE((tmp_path / name).stat().st_mode)
    assert mode("a") == mode("b") == 0o666 & ~mask


def test_json_can_be_read_by_people_and_refuses_what_is_no_json(tmp_path):
    path = tmp_path / "a.json"
    files.write_json(path, {"ε": [1, 2.5]})
    assert json.loads(path.read_text()) == {"ε": [1, 2.5]}
    assert "ε" in path.read_text()
    assert path.read_text().endswith("}\n")
    for bad in (math.nan, math.inf):
        with pytest.raises(ValueError, match="JSON"):
            files.write_json(path, [bad])
    assert json.loads(path.read_text()) == {"ε": [1, 2.5]}
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_could_not_be_written_is_refused_before_the_run(tmp_path):
    assert files.check_writable(str(tmp_path / "a"), "json") == tmp_path / "a"
    with pytest.raises(TypeError, match="json must be the path of a file, not 5"):
        files.check_writable(5, "json")
    with pytest.raises(IsADirectoryError, match="json must be the path of a file"):
        files.check_writable(tmp_path, "json")
    with pytest.raises(FileNotFoundError, match="json: there is no folder"):
        files.check_writable(tmp_path / "no" / "a", "json")


def test_a_file_without_permission_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(files.os, "access", lambda path, how: False)
    with pytest.raises(PermissionError, match=r"json: .* cannot be written"):
        files.check_writable(tmp_path / "a", "json")


def test_a_file_that_is_replaced_keeps_its_permissions_and_its_links(tmp_path):
    path, link = tmp_path / "private", tmp_path / "link"
    path.write_bytes(b"old")
    path.chmod(0o600)
    link.symlink_to(path)
    files.write_bytes(link, b"new")
    assert path.read_bytes() == b"new"
    assert path.stat().st_mode & 0o777 == 0o600
    assert link.is_symlink()
