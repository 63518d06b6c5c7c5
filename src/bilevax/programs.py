"""Compiled programs: how hard the compiler tries, ahead of time, and when they are released."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import numpy as np

from bilevax.arguments import tracing

# On a CPU these options make the compiler three times as fast, and what it compiles up to three
# times as slow: right for a program that runs seldom. Versions that lack one do without it.
QUICK = {"xla_cpu_use_fusion_emitters": False, "xla_backend_optimization_level": 0}
# With this instead it takes up to twice as long, and loops over large arrays run almost as fast as
# they can: right for a program that runs some hundred times.
STEADY = {"xla_backend_optimization_level": 1}
# With arguments of more entries than this, time to run outweighs time to compile in any program.
LARGE = 1 << 20
# What JAX says where a program with options is called while another one is traced.
INSIDE = "can only be passed to top-level"
# Each compiled program maps memory, and Linux allows a process so many maps unless told otherwise.
MAPS, MOST_MAPS = Path("/proc/self/maps"), Path("/proc/sys/vm/max_map_count")
USUAL_MOST_MAPS = 65_530
# What the names of JAX's events for tracing, lowering and compiling begin with.
COMPILING = "/jax/core/compile/"
# After so many new programs the maps are counted.
COUNT_AFTER = 64

_compiled = 0
_seconds = 0.0  # of tracing, lowering and compiling
_counted = 0
_released = 0  # how often all programs were dropped


def _note(event: str, duration_secs: float, **__: Any) -> None:
    global _compiled, _seconds
    _compiled += event.endswith("backend_compile_duration")
    _seconds += duration_secs if event.startswith(COMPILING) else 0.0


def compile_seconds() -> float:
    """The seconds that this process has spent on tracing, lowering and compiling so far.

    A function that is traced inside another one counts in both.
    """
    return _seconds


jax.monitoring.register_event_duration_secs_listener(_note)


class Program:
    """A function that is compiled as a whole, once for each structure and shape of its arguments.

    Arrays are arguments of the program; everything else is a constant of it. Inside another program
    the function is a part of that one.
    """

    def __init__(self, function: Callable[..., Any], *, quick: bool, options: dict | None = None):
        functools.update_wrapper(self, function)
        self._function, self._quick, self._options = function, quick, options or {}
        self._jits: dict[tuple, Any] = {}
        self._known: set[int] = set()

    def _jitted(self, arguments: tuple) -> Any:
        on_cpu = jax.default_backend() == "cpu"
        quick = self._quick and on_cpu and entries(arguments) <= LARGE
        options = {name: self._options.get(name, QUICK[name]) for name in QUICK} if quick else {}
        kind = tuple(options.items())
        if kind not in self._jits:
            jit: Any = eqx.filter_jit
            self._jits[kind] = jit(self._function, compiler_options=options or None)
        return self._jits[kind]

    def __call__(self, *arguments: Any) -> Any:
        if any(tracing(leaf) for leaf in jax.tree.leaves(arguments)):
            return self._function(*arguments)
        while True:
            try:
                return self._jitted(arguments)(*arguments)
            except jax.errors.JaxRuntimeError as error:
                if not _without_unknown_option(error):
                    raise
            except ValueError as error:
                if INSIDE not in str(error):
                    raise
                return self._function(*arguments)

    def lower(self, *arguments: Any) -> Any:
        return self._jitted(arguments).lower(*arguments)

    def ahead(self, *arguments: Any) -> Future:
        """Compile for these arguments in a thread; a call finds the program there."""
        if self.is_known(*arguments):
            finished = Future()
            finished.set_result(None)
            return finished
        lowered = self.lower(*arguments)
        self._known.add(_kind(arguments))
        executor = ThreadPoolExecutor(1)
        compiled = executor.submit(_compiled_or_not, lowered)
        executor.shutdown(wait=False)
        return compiled

    def is_known(self, *arguments: Any) -> bool:
        """Whether it was compiled ahead for arguments of this kind."""
        return _kind(arguments) in self._known


def _kind(arguments: tuple) -> int:
    """A hash of all that decides on a program: it keeps no function of a user alive."""
    leaves, structure = jax.tree.flatten(arguments)
    kinds = [(v.shape, str(v.dtype)) if hasattr(v, "shape") else v for v in leaves]
    return hash((_released, tuple(kinds), structure))


def _compiled_or_not(lowered: Any) -> None:
    """Compile; what goes wrong goes wrong again in the call, where it can be told."""
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        lowered.compile()


def _without_unknown_option(error: Exception) -> bool:
    """Whether an option that this version of the compiler does not know was the error; drop it."""
    unknown = [name for name in QUICK if f"No such compile option: '{name}'" in str(error)]
    for name in unknown:
        del QUICK[name]
    return bool(unknown)


def entries(tree: Any) -> int:
    """The number of entries of all arrays of a tree."""
    return sum(
        math.prod(np.shape(leaf)) for leaf in jax.tree.leaves(tree) if hasattr(leaf, "shape")
    )


def quick(function: Callable[..., Any]) -> Program:
    """A program that runs seldom: what counts is the time of its compilation."""
    return Program(function, quick=True)


def steady(function: Callable[..., Any]) -> Program:
    """A program with large arrays that runs some hundred times."""
    return Program(function, quick=True, options=STEADY)


def optimised(function: Callable[..., Any]) -> Program:
    """A program in which most of the time is spent."""
    return Program(function, quick=False)


def release_programs() -> None:
    """Drop all compiled programs if their memory maps come near Linux's limit.

    They are compiled again where they are needed. Without this the process would crash after some
    hundred problems with functions of their own.
    """
    global _counted, _released
    if _compiled - _counted < COUNT_AFTER or not MAPS.exists():
        return
    _counted = _compiled
    try:
        most = int(MOST_MAPS.read_text())
    except (OSError, ValueError):
        most = USUAL_MOST_MAPS
    if MAPS.read_bytes().count(b"\n") > most // 2:
        jax.clear_caches()
        _released += 1
