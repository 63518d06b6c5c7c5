"""A call in a process of its own, whose peak of memory is its own and which can be ended."""

from __future__ import annotations

import multiprocessing
import signal
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import jax


def isolated(call: Callable[..., Any], *arguments: Any, limit: float | None = None) -> Any:
    """`call(*arguments)` in a new process, with the float precision of this one.

    Raises RuntimeError if the call raises an error, if its process dies, as it does when memory
    runs out, or if there is no answer within `limit` seconds. Ctrl-C ends the process at once.
    """
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    given = (sender, jax.config.read("jax_enable_x64"), call, arguments)
    process = context.Process(target=_answer, args=given, daemon=True)
    process.start()
    sender.close()  # now only the process has this end, so its death is an end of file
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
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that waits handles Ctrl-C
    jax.config.update("jax_enable_x64", x64)
    try:
        answer = call(*arguments)
    except Exception as error:  # its type may be one that cannot be sent
        answer = RuntimeError(f"{type(error).__name__}: {error}")
    sender.send(answer)


def peak_memory() -> int | None:
    """The most bytes of memory that this process has held at once; None where it is not known.

    On Linux this is not `ru_maxrss`, which a process inherits from the one that started it.
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
