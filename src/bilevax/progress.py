"""The progress of every command and every run: a bar on a terminal, or lines."""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import Any

#: Seconds between lines that are read in a log.
EVERY = 5.0


class Progress:
    """A line on the terminal that shows how far a run is.

    With `wanted` None it is shown on a terminal and not in CI. Elsewhere there is nothing, or, with
    `every`, a line on stderr each so many seconds, also while nothing is reported.
    """

    def __init__(
        self,
        wanted: bool | None,
        *,
        total: float | None = None,
        unit: str,
        label: str = "bilevax",
        done: int = 0,
        every: float | None = None,
    ):
        on_terminal = sys.stderr.isatty() and not os.environ.get("CI")
        self._bar: Any = None
        if wanted or (wanted is None and on_terminal):
            from tqdm import tqdm

            large = total is None or total >= 10_000
            self._bar = tqdm(
                total=total, initial=done, unit=f" {unit}", unit_scale=large, desc=label
            )
        elif wanted is None and every is not None:
            self._bar = _Lines(label, done, total, unit, every)

    def show(self, done: float | None = None, **notes: str) -> None:
        """Move the bar to `done`, and write notes behind it, such as ε="0.01"."""
        if self._bar is None:
            return
        if notes:
            text = ", ".join(f"{name.replace('_', ' ')} = {note}" for name, note in notes.items())
            self._bar.set_postfix_str(text, refresh=False)
        if done is not None:
            self._bar.update(done - self._bar.n)
        else:
            self._bar.refresh()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Lines:
    """Lines instead of a bar, written by a thread of their own."""

    def __init__(self, label: str, done: float, total: float | None, unit: str, every: float):
        self.n, self._notes = done, ""
        self._label, self._unit, self._every = label, unit, every
        self._of = "" if total is None else f" of {total:,.0f}"
        self._began, self._ended = time.monotonic(), threading.Event()
        self._writer = threading.Thread(target=self._write, daemon=True)
        self._writer.start()

    def set_postfix_str(self, text: str, refresh: bool) -> None:
        self._notes = f", {text}"

    def update(self, more: float) -> None:
        self.n += more

    def refresh(self) -> None:
        pass  # the next line shows it

    def close(self) -> None:
        self._ended.set()
        self._writer.join()

    def _write(self) -> None:
        while not self._ended.wait(self._every):
            seconds = time.monotonic() - self._began
            said = f"{self._label}: {self.n:,.0f}{self._of} {self._unit}{self._notes}"
            print(f"{said}, {seconds:.0f} s", file=sys.stderr, flush=True)
