"""The paper's ablation, Table `tab:ablation`: ρ, L and the first η, one at a time."""

from __future__ import annotations

import dataclasses
from typing import Any

from bilevax.deep.devices import first
from bilevax.deep.pixels import Images
from bilevax.deep.settings import Settings, images_of
from bilevax.deep.training import Diverged, train
from bilevax.files import write_json

#: The grid of the paper, whose own choice is the middle of each.
GRID: dict[str, tuple[float, ...]] = {
    "rho": (10.0, 100.0, 500.0),
    "smoothness": (500.0, 1000.0, 2000.0),
    "eta": (0.1, 1.0, 5.0),
}


def ablate(
    settings: Settings,
    grid: dict[str, tuple[float, ...]] = GRID,
    *,
    images: Images | None = None,
    show: bool = True,
) -> dict[str, Any]:
    """Train once for every value of the grid, with the middle values of the others.

    Each run has a folder in `settings.out`. A run that was begun is resumed, and a finished one is
    only judged, so a stopped ablation can be continued. Writes ablation.json.
    """
    if settings.method != "bilevel":
        raise ValueError(f"the ablation needs the bilevel method, not {settings.method}")
    for name, values in grid.items():
        if not values:
            raise ValueError(f"{name} has no values to try")
    images = images_of(settings) if images is None else images
    middle = {name: values[len(values) // 2] for name, values in grid.items()}
    records, done = [], {}
    for name, values in grid.items():
        for value in values:
            chosen = {**middle, name: value}
            folder = "-".join(f"{key}-{number:g}" for key, number in chosen.items())
            if folder not in done:
                own = dataclasses.replace(settings, out=settings.out / folder, **chosen)
                done[folder] = one(own, images, show)
            records.append({"name": name, "value": value, "folder": folder, **done[folder]})
    found = {"settings": {**settings.as_dict(), **middle}, "runs": records}
    if first():
        write_json(settings.out / "ablation.json", found)
    return found


def one(settings: Settings, images: Images, show: bool) -> dict[str, Any]:
    """The accuracies of one run, or the message that it diverged."""
    try:
        accuracy = train(settings, resume=True, images=images, show=show).results["accuracy"]
    except Diverged as error:
        return {"failed": str(error)}
    return {split: {k: found[k] for k in ("average", "worst")} for split, found in accuracy.items()}


def ablation_table(found: dict[str, Any]) -> str:
    lines = [f"{'':12}{'value':>8}{'validation worst':>20}{'test worst':>14}"]
    for run in found["runs"]:
        row = f"{run['name']:12}{run['value']:8g}"
        if "failed" in run:
            lines.append(f"{row}  {run['failed']}")
            continue
        worst = [100 * run[split]["worst"] for split in ("validation", "test")]
        lines.append(f"{row}{worst[0]:18.1f} %{worst[1]:12.1f} %")
    return "\n".join(lines)
