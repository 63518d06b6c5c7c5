"""A call in a process of its own: its peak of memory is its own, and it can be ended."""

from __future__ import annotations

import multiprocessing
import signal
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import jax


def apart(call: Callable[..., Any], *arguments: Any, limit: float | None = None) -> Any:
    """`call(*arguments)` in a fresh process, with the precision of this one.

    Raises RuntimeError where the call raised anything, where its process died, as it does of too
    little memory, and where it gave no answer within `limit` seconds. Ctrl-C ends it at once.
    """
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    given = (sender, jax.config.read("jax_enable_x64"), call, arguments)
    process = context.Process(target=_answer, args=given, daemon=True)
    process.start()
    sender.close()  # the process has the only other end now, and its death is an end of file
    try:
        if not receiver.poll(limit):
            raise RuntimeError(f"no answer after {limit:g} seconds")
        answer = receiver.recv()
    except EOFError:
        process.join()
        raise RuntimeError(f"its process died with code {process.exitcode}") from None
    finally:
        process.kill()
        process.join()
        receiver.close()
    if isinstance(answer, RuntimeError):
        raise answer
    return answer


def _answer(sender: Connection, x64: bool, call: Callable[..., Any], arguments: tuple) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that waits
    jax.config.update("jax_enable_x64", x64)
    try:
        answer = call(*arguments)
    except Exception as error:  # of any type, which need not be one that can be sent
        answer = RuntimeError(f"{type(error).__name__}: {error}")
    sender.send(answer)


def peak_memory() -> int | None:
    """The most bytes of memory that this process has held at once; None where none can say.

    Linux lets a process inherit `ru_maxrss` from the one that started it, so that is not asked.
    """
    if sys.platform == "darwin":
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    peaks = [int(line.split()[1]) for line in lines if line.startswith("VmHWM:")]
    return 1024 * peaks[0] if peaks else None
