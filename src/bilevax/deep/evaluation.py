"""How well a trained network does, on the data it was trained with or on other data."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Literal

import numpy as np

from bilevax.deep.checkpoints import Checkpoints
from bilevax.deep.devices import Devices, first
from bilevax.deep.feed import Feed, Rows, View
from bilevax.deep.methods import ERM, Method
from bilevax.deep.pixels import Images
from bilevax.deep.settings import images_of, method_of, model_of, precision_of, run_settings
from bilevax.deep.stationarity import head_certificate, sentence
from bilevax.deep.tables import SPLITS


def evaluate(
    folder: str | Path,
    *,
    data: str | Path | None = None,
    checkpoint: Literal["best", "last"] = "best",
    workers: int | None = None,
    images: Images | None = None,
) -> dict[str, Any]:
    """Average, worst and per-group accuracy on each split of a run's data, or of `data`.

    Other data may have other groups, but must have the same classes. With the run's groups, the
    result also says how stationary the head is.
    """
    folder = Path(folder)
    given = {name: v for name, v in (("data", data), ("workers", workers)) if v is not None}
    # The checkpoint has the weights.
    settings = dataclasses.replace(run_settings(folder), weights=None, **given)
    checkpoints = Checkpoints(folder / "checkpoints")
    about = checkpoints.about(checkpoint)
    if about is None:
        raise ValueError(f"{folder} has no checkpoint yet")
    images = images_of(settings) if images is None else images
    if list(images.classes) != about["classes"]:
        raise ValueError(
            f"the network distinguishes the classes {', '.join(about['classes'])}, but the data "
            f"has {', '.join(images.classes)}: give them the same names"
        )
    devices, same_groups = Devices(), list(images.groups) == about["groups"]
    counts = images.counts[0] if same_groups else np.ones(len(about["groups"]))
    method = method_of(settings, counts, 1)
    like = devices.everywhere(method.init(model_of(settings, len(about["classes"]))))
    saved = getattr(checkpoints, checkpoint)(like)
    size = settings.batch * (2 if method.takes_validation else 1)  # as in training
    view = View(images.size, precision_of(settings), False, size)
    rows = Rows(images, ERM, size, settings.seed)
    feed = Feed(
        images, rows, view, devices, settings.seed,
        steps=0, chunk=1, workers=settings.workers, resident=False,
    )  # fmt: skip
    found = judged_on_all(feed, method, saved.state, same_groups)
    return {**found, "run": str(folder), "checkpoint": checkpoint, "step": saved.step}


def judged_on_all(feed: Feed, method: Method, state: Any, certified: bool = True) -> dict[str, Any]:
    """Accuracies on every split, and the certificate of the head from the same features.

    Of several processes only the first one certifies.
    """
    images, model = feed.images, method.model(state)
    accuracy, features = {}, {}
    for split in SPLITS:
        keep = certified and split != "test"
        accuracy[split], features[split] = feed.judge_and_encode(model, split, keep=keep)
    found = head_certificate(method, state, images, features) if certified and first() else None
    return {
        "data": images.name,
        "groups": list(images.groups),
        "counts": {split: row.tolist() for split, row in zip(SPLITS, images.counts)},
        "accuracy": accuracy,
        "stationarity": found,
    }


def results_table(results: dict[str, Any]) -> str:
    """Average, worst and each group on every split, in percent; then the head's stationarity."""
    names = ["average", "worst group", *results["groups"]]
    width = max(len(name) for name in names)
    lines = [f"{'':{width}}  " + "".join(f"{split:>12}" for split in SPLITS)]
    found = [results["accuracy"][split] for split in SPLITS]
    columns = [[f["average"], f["worst"], *f["groups"]] for f in found]
    for name, *row in zip(names, *columns):
        cells = ("–" if value is None else f"{100 * value:.1f} %" for value in row)
        lines.append(f"{name:{width}}  " + "".join(f"{cell:>12}" for cell in cells))
    if results["stationarity"] is not None:
        lines.append(sentence(results["stationarity"]))
    return "\n".join(lines)
