"""How well a trained network does, on the data it was trained with or on other data."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from bilevax.deep.build import images_of, method_of, model_of, precision_of
from bilevax.deep.checkpoints import Checkpoints
from bilevax.deep.devices import Devices
from bilevax.deep.feed import Feed, Rows, View
from bilevax.deep.files import read_run
from bilevax.deep.pixels import Images
from bilevax.deep.settings import from_dict
from bilevax.deep.train import judged_on_all
from bilevax.deep.weighted import ERM


def evaluate(
    folder: str | Path,
    *,
    data: str | Path | None = None,
    checkpoint: Literal["best", "last"] = "best",
    workers: int | None = None,
    images: Images | None = None,
) -> dict[str, Any]:
    """Average, worst and per-group accuracy on each split of a run's data, or of `data`.

    Other data may have other groups, but must have the same classes.
    """
    folder = Path(folder)
    settings = from_dict(read_run(folder), str(folder / "settings.json"))
    changes: dict[str, Any] = {"weights": None}  # the checkpoint has them
    if data is not None:
        changes["data"] = Path(data)
    if workers is not None:
        changes["workers"] = workers
    settings = dataclasses.replace(settings, **changes)
    checkpoints = Checkpoints(folder / "checkpoints")
    about = checkpoints.about(checkpoint)
    if about is None:
        raise ValueError(f"{folder} has no checkpoint yet")
    images = images_of(settings) if images is None else images
    if list(images.classes) != about["classes"]:
        raise ValueError(
            f"the network tells {', '.join(about['classes'])} apart, but the data has the classes "
            f"{', '.join(images.classes)}: give them the same names"
        )
    devices = Devices()
    method = method_of(settings, np.ones(len(about["groups"])), 1)
    begin = jax.eval_shape(lambda: method.init(model_of(settings, len(about["classes"]))))
    everywhere = devices.replicated
    like = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=everywhere), begin
    )
    saved = getattr(checkpoints, checkpoint)(like)
    size = settings.batch * (2 if method.takes_validation else 1)  # as in training
    view = View(images.size, precision_of(settings), False, size)
    rows = Rows(images, ERM, size, settings.seed)
    feed = Feed(
        images, rows, view, devices, settings.seed,
        steps=0, chunk=1, workers=settings.workers, resident=False,
    )  # fmt: skip
    found = judged_on_all(feed, method.model(saved.state))
    return {**found, "run": str(folder), "checkpoint": checkpoint, "step": saved.step}
