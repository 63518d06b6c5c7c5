"""How well a trained network does, on the data it was trained with or on other data."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Literal

from bilevax.deep.build import images_of
from bilevax.deep.pixels import Images
from bilevax.deep.settings import from_dict
from bilevax.deep.train import Run, judged_on_all, read_run


def evaluate(
    folder: str | Path,
    *,
    data: str | Path | None = None,
    checkpoint: Literal["best", "last"] = "best",
    workers: int | None = None,
    images: Images | None = None,
) -> dict[str, Any]:
    """Average, worst and per-group accuracy on each split of a run's data, or of `data`."""
    folder = Path(folder)
    settings = from_dict(read_run(folder), str(folder / "settings.json"))
    changes: dict[str, Any] = {"out": folder}
    if data is not None:
        changes["data"] = Path(data)
    if workers is not None:
        changes["workers"] = workers
    settings = dataclasses.replace(settings, **changes)
    images = images_of(settings) if images is None else images
    run = Run(settings, images)
    saved = getattr(run.checkpoints, checkpoint)(run.state)
    if saved is None:
        raise ValueError(f"{folder} has no checkpoint yet")
    found = judged_on_all(run.feed, run.method.model(saved.state))
    return {**found, "run": str(folder), "checkpoint": checkpoint, "step": saved.step}
