"""Images of a few pixels, and short runs on them, for the tests of `bilevax.deep`."""

import csv
import json
from pathlib import Path

import jax
import numpy as np
from PIL import Image
from safetensors.numpy import load_file

from bilevax.deep import Settings
from bilevax.deep.checkpoints import Checkpoints
from bilevax.deep.networks import CNN
from bilevax.deep.settings import images_of, run_settings
from bilevax.deep.training import Run

SIDE = 8
#: Images of each group in train, validation and test.
COUNTS = {"train": (12, 3, 3, 10), "validation": (4, 4, 4, 4), "test": (5, 3, 4, 3)}


def write_images(folder: Path) -> Path:
    """Pictures whose upper half tells the label and whose lower half tells the group."""
    rng = np.random.default_rng(0)
    rows = []
    for split, counts in COUNTS.items():
        for group, count in enumerate(counts):
            label, place = divmod(group, 2)
            for i in range(count):
                pixels = rng.integers(0, 80, (SIDE, SIDE, 3))
                pixels[: SIDE // 2, :, 0] += 100 * label
                pixels[SIDE // 2 :, :, 2] += 100 * place
                name = f"{split}-{group}-{i}.png"
                Image.fromarray(pixels.astype(np.uint8)).save(folder / name)
                rows.append([name, f"class {label}", f"{label} at {place}", split])
    with (folder / "images.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["filename", "label", "group", "split"], *rows])
    return folder / "images.csv"


def small_cnn(key):
    """In place of the network `cnn`: two layers take less time to compile than three."""
    return CNN.new(key=key, channels=(3, 8, 8))


def settings(data: Path, out: Path, **changes) -> Settings:
    known = {"network": "cnn", "size": SIDE, "batch": 8, "epochs": 3, "chunk": 2, "augment": True}
    return Settings(data=data, out=out, **{**known, **changes})


def arrays(folder: Path) -> dict[str, np.ndarray]:
    return load_file(folder / "model.safetensors")


def same(a: Path, b: Path) -> None:
    """Both runs ended at the same bits: best model, last state, and what was measured."""
    one, other = arrays(a), arrays(b)
    assert one.keys() == other.keys()
    for name in one:
        np.testing.assert_array_equal(one[name], other[name], err_msg=name)
    last = [sorted((f / "checkpoints").glob("step-*"))[-1] for f in (a, b)]
    assert last[0].name == last[1].name
    states = [Checkpoints(f / "checkpoints").last(state_like(f)) for f in (a, b)]
    for one, other in zip(*(jax.tree.leaves(saved.state) for saved in states), strict=True):
        np.testing.assert_array_equal(one, other)
    found = [json.loads((f / "results.json").read_text()) for f in (a, b)]
    assert found[0]["history"] == found[1]["history"]
    assert found[0]["accuracy"] == found[1]["accuracy"]
    assert found[0]["best_step"] == found[1]["best_step"]


def state_like(folder: Path):
    own = run_settings(folder)
    return Run(own, images_of(own)).state


def mean_features(method, state, images, features):
    """In place of a head's certificate, whose programs take long to compile."""
    mean = float(np.mean([rows.mean() for rows in features.values() if rows.size]))
    known = {"kind": "KKTCertificate", "confidence": 0.95}
    return {**known, "epsilon": mean, "estimated_epsilon": mean}
