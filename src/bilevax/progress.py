"""The progress bar of every command and every run."""

from __future__ import annotations

import os
import sys
from typing import Any


class Progress:
    """A line on the terminal that shows how far a run is; nothing elsewhere.

    With `wanted` None it is shown on a terminal and not in CI.
    """

    def __init__(
        self,
        wanted: bool | None,
        *,
        total: float | None = None,
        unit: str,
        label: str = "bilevax",
        done: int = 0,
    ):
        if wanted is None:
            wanted = sys.stderr.isatty() and not os.environ.get("CI")
        self._bar: Any = None
        if wanted:
            from tqdm import tqdm

            large = total is None or total >= 10_000
            self._bar = tqdm(
                total=total, initial=done, unit=f" {unit}", unit_scale=large, desc=label
            )

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
