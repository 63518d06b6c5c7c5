"""Compiled programs are released before Linux's limit on mappings is near."""

import jax
import numpy as np
import pytest

from bilevax import programs


@pytest.fixture
def maps(monkeypatch, tmp_path):
    """Maps and their limit as a test likes; says what was dropped."""
    dropped = []
    monkeypatch.setattr(programs.jax, "clear_caches", lambda: dropped.append("programs"))
    monkeypatch.setattr(programs, "MAPS", tmp_path / "maps")
    monkeypatch.setattr(programs, "MOST_MAPS", tmp_path / "max_map_count")
    monkeypatch.setattr(programs, "_compiled", 1000)
    monkeypatch.setattr(programs, "_counted", 0)

    def count(now, most="100"):
        (tmp_path / "maps").write_bytes(b"00-01 r-xp\n" * now)
        if most is not None:
            (tmp_path / "max_map_count").write_text(most)
        return dropped

    return count


def test_beyond_half_of_the_limit_all_are_dropped(maps):
    dropped = maps(51)
    programs.release_programs()
    assert dropped == ["programs"]


def test_up_to_half_of_the_limit_none_is(maps):
    dropped = maps(50)
    programs.release_programs()
    assert dropped == []


@pytest.mark.parametrize("most", [None, "many"])
def test_a_limit_that_cannot_be_read_is_the_usual_one(maps, monkeypatch, most):
    monkeypatch.setattr(programs, "USUAL_MOST_MAPS", 20)
    dropped = maps(11, most)
    programs.release_programs()
    assert dropped == ["programs"]


def test_maps_are_counted_after_so_many_programs_only(maps, monkeypatch):
    dropped = maps(99)
    programs.release_programs()
    programs.release_programs()
    assert dropped == ["programs"]
    monkeypatch.setattr(programs, "_compiled", 1000 + programs.COUNT_AFTER - 1)
    programs.release_programs()
    assert len(dropped) == 1
    monkeypatch.setattr(programs, "_compiled", 1000 + programs.COUNT_AFTER)
    programs.release_programs()
    assert len(dropped) == 2


def test_where_there_are_no_maps_nothing_is_done(maps):
    dropped = maps(99)
    programs.MAPS.unlink()
    programs.release_programs()
    assert dropped == []


def test_compilations_are_noted():
    before = programs._compiled
    jax.jit(lambda a: a + 1.25)(2.0)
    assert programs._compiled > before


def test_a_program_inside_of_another_is_a_part_of_it():
    inner = programs.quick(lambda a: 2 * a)
    outer = programs.optimised(lambda a: inner(a) + 1)
    assert outer(np.asarray(3.0)) == 7
    fixed = programs.optimised(lambda a: a + inner(np.asarray(2.0)))  # not traced, but inside
    assert fixed(np.asarray(3.0)) == 7


def test_a_program_with_large_arguments_is_compiled_well():
    program = programs.quick(lambda a: a)
    assert programs.entries({"a": np.zeros((3, 4)), "b": [np.zeros(5), "text", 1.0]}) == 17
    program._jitted((np.zeros(programs.LARGE),))
    assert [bool(names) for names in program._jits] == [jax.default_backend() == "cpu"]
    program._jitted((np.zeros(programs.LARGE + 1),))
    assert () in program._jits


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="the options are for a CPU")
def test_a_steady_program_differs_from_a_quick_one_in_its_own_options_only():
    program = programs.steady(lambda a: a)
    program._jitted((np.zeros(3),))
    (kind,) = program._jits
    assert dict(kind) == programs.QUICK | programs.STEADY != programs.QUICK


def test_an_option_that_the_compiler_does_not_know_is_dropped(monkeypatch):
    known = {"xla_backend_optimization_level": 0}
    monkeypatch.setattr(programs, "QUICK", {"xla_no_such_option": True} | known)
    program = programs.quick(lambda a: 3 * a)
    program.ahead(np.asarray(2.0)).result()  # says nothing; the call does without it
    assert program(np.asarray(2.0)) == 6
    assert (known if jax.default_backend() == "cpu" else programs.QUICK) == programs.QUICK


def test_a_program_that_was_compiled_ahead_is_not_lowered_again(monkeypatch):
    program = programs.quick(lambda scale, x: scale * x)
    assert not program.is_known(2, np.ones(3))
    program.ahead(2, np.ones(3)).result()
    monkeypatch.setattr(program, "lower", None)
    program.ahead(2, np.zeros(3)).result()
    assert program.is_known(2, np.zeros(3))
    assert not program.is_known(3, np.zeros(3))
    assert not program.is_known(2, np.zeros(4))
    assert not program.is_known(2, np.zeros(3, np.float32))
    monkeypatch.setattr(programs, "_released", programs._released + 1)
    assert not program.is_known(2, np.zeros(3))
