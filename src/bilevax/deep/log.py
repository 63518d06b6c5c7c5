"""What a person sees while a network is trained: a progress bar, and TensorBoard's curves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from bilevax.deep.devices import first
from bilevax.progress import Progress


class Log:
    """The bar and the curves of a run; only the first process shows and writes them."""

    def __init__(self, folder: Path, groups: tuple[str, ...], total: int, begun: int, show: bool):
        self.groups, self._writer = groups, None
        wanted = None if show and first() else False
        self._bar = Progress(wanted, total=total, unit="steps", label="training", done=begun)
        self._notes: dict[str, str] = {}
        if first():
            from tensorboardX import SummaryWriter

            # What a killed run wrote after its last checkpoint is not part of this run.
            self._writer = SummaryWriter(str(folder), purge_step=begun + 1)

    def steps(self, at: int, seen: dict[str, Any], rate: float) -> None:
        """After some steps: what the method shows, and images per second."""
        self._notes["images/s"] = f"{rate:,.0f}"
        if "eta" in seen:
            self._notes["η"] = f"{float(seen['eta']):.3g}"
        self._bar.show(at, **self._notes)
        self._write("images per second", rate, at)
        for name, value in seen.items():
            if np.ndim(value) == 0:
                self._write(name, float(value), at)
                continue
            for group, part in zip(self.groups, value):
                self._write(f"{name}/{group}", float(part), at)

    def judged(self, at: int, split: str, found: dict[str, Any]) -> None:
        """After an epoch: accuracies and losses on a split."""
        self._notes[f"{split} worst"] = f"{100 * found['worst']:.1f} %"
        self._bar.show(None, **self._notes)
        for name in ("average", "worst", "loss", "worst_loss"):
            self._write(f"{split} {name.replace('_', ' ')}", found[name], at)
        for group, accuracy in zip(self.groups, found["groups"]):
            self._write(f"{split} accuracy/{group}", accuracy, at)

    def close(self) -> None:
        self._bar.close()
        if self._writer is not None:
            self._writer.close()

    def _write(self, name: str, value: float, at: int) -> None:
        if self._writer is not None:
            self._writer.add_scalar(name, value, at)
