"""Compiled programs: how hard the compiler tries, ahead of time, and when they are released."""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import equinox as eqx
import jax

from bilevax.arguments import tracing
from bilevax.functions import forget

# On a CPU these two options make the compiler three times as fast, and what it compiles up to
# three times as slow: right for a program that runs seldom.
QUICK = {"xla_cpu_use_fusion_emitters": False, "xla_backend_optimization_level": 0}
# Each compiled program maps memory, and Linux allows a process so many maps unless told otherwise.
MAPS, MOST_MAPS = Path("/proc/self/maps"), Path("/proc/sys/vm/max_map_count")
USUAL_MOST_MAPS = 65_530
# After so many new programs the maps are counted.
COUNT_AFTER = 64

_compiled = 0
_counted = 0


def _note(event: str, *_: Any, **__: Any) -> None:
    global _compiled
    _compiled += event.endswith("backend_compile_duration")


jax.monitoring.register_event_duration_secs_listener(_note)


class Program:
    """A function that is compiled as a whole, once for each structure and shape of its arguments.

    Arrays are arguments of the program; everything else is a constant of it. Inside another program
    the function is a part of that one.
    """

    def __init__(self, function: Callable[..., Any], *, quick: bool):
        functools.update_wrapper(self, function)
        self._function, self._quick = function, quick
        self._by_backend: dict[str, Any] = {}

    def _jitted(self) -> Any:
        backend = jax.default_backend()
        if backend not in self._by_backend:
            options = QUICK if self._quick and backend == "cpu" else None
            jit: Any = eqx.filter_jit
            self._by_backend[backend] = jit(self._function, compiler_options=options)
        return self._by_backend[backend]

    def __call__(self, *arguments: Any) -> Any:
        if any(tracing(leaf) for leaf in jax.tree.leaves(arguments)):
            return self._function(*arguments)
        return self._jitted()(*arguments)

    def lower(self, *arguments: Any) -> Any:
        return self._jitted().lower(*arguments)

    def ahead(self, *arguments: Any) -> Future:
        """Compile for these arguments in a thread; a call finds the program there."""
        lowered = self.lower(*arguments)
        executor = ThreadPoolExecutor(1)
        compiled = executor.submit(lowered.compile)
        executor.shutdown(wait=False)
        return compiled


def quick(function: Callable[..., Any]) -> Program:
    """A program that runs seldom: what counts is the time of its compilation."""
    return Program(function, quick=True)


def optimised(function: Callable[..., Any]) -> Program:
    """A program in which most of the time is spent."""
    return Program(function, quick=False)


def release_programs() -> None:
    """Drop all compiled programs if their memory maps come near Linux's limit.

    They are compiled again where they are needed. Without this the process would crash after some
    hundred problems with functions of their own.
    """
    global _counted
    if _compiled - _counted < COUNT_AFTER or not MAPS.exists():
        return
    _counted = _compiled
    try:
        most = int(MOST_MAPS.read_text())
    except (OSError, ValueError):
        most = USUAL_MOST_MAPS
    if MAPS.read_bytes().count(b"\n") > most // 2:
        jax.clear_caches()
        forget()
