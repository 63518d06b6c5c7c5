"""Worst-group accuracy on coloured digits, a rare group of which is turned where they are judged.

    python benchmarks/colour_mnist.py DATA/mnist --json benchmarks/results/colour_mnist.json

Known groups: plain training, group DRO, with the validation rows as training rows too, with fixed
radii, and the bilevel method without and with radii. Unknown groups of the training rows: plain
training, group DRO on the validation rows alone, and the bilevel method with soft groups.

Every run has a small CNN from scratch, as many steps of as many images, and a rate that falls as a
cosine; its last model counts. A third of the drawn validation rows is not trained on by any method:
on these, of data drawn with a seed that is not used again, rates and radii are picked by the worst
group. The file is written after every run, and a run that it has is not made again.

The last rows are linear classifiers of `bilevax.learn` on the features of the plainly trained CNN.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import math
import shlex
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bilevax.deep import Images, Model, Settings, colour_mnist
from bilevax.deep.ambiguity import distances, group_scores
from bilevax.deep.colour_mnist import Shift
from bilevax.deep.devices import Devices
from bilevax.deep.feed import Feed, Rows, View
from bilevax.deep.methods import ERM
from bilevax.deep.networks import CNN
from bilevax.deep.settings import METHODS, method_of
from bilevax.deep.tables import SPLITS, UNKNOWN
from bilevax.files import write_bytes
from colour_heads import Parts, heads
from dominoes_runs import plain, with_validation

BEGAN = time.perf_counter()
PICKING = 100  # a seed for the choices
VALIDATION_ROWS = "group DRO on validation rows"
SIZES = (6_000, 3_000, 20_000)
CHANNELS = (3, 16, 32, 64)
JUDGED = 1000  # images at a time
SHIFTS: tuple[Shift, ...] = ("held-out", "test")
RATES, RADII, BOUND = (0.01, 0.03, 0.1), (0.01, 0.03, 0.1), 1.0
#: The methods: what is picked from a grid is a tuple. One that is like another one begins with what
#: was picked for that, and only the rest is picked. `rows` says which training rows it has.
METHOD: dict[str, dict[str, Any]] = {
    "ERM": {"method": "erm", "learning_rate": RATES},
    "group DRO": {"method": "group-dro", "learning_rate": RATES},
    "group DRO, all rows": {"method": "group-dro", "rows": "all", "learning_rate": RATES},
    "hierarchical": {"method": "group-dro", "learning_rate": RATES, "radius": RADII},
    "hierarchical, all rows": {"like": "group DRO, all rows", "radius": RADII},
    "group DRO tuned": {"method": "bilevel", "learning_rate": RATES},
    "group DRO tuned, fixed radii": {"like": "group DRO tuned", "radius": RADII},
    "hierarchical tuned": {
        "method": "bilevel", "learning_rate": RATES, "radius": RADII[1], "radius_bound": BOUND,
    },
    VALIDATION_ROWS: {"method": "group-dro", "rows": "validation", "learning_rate": RATES},
    "soft groups, predicted": {
        "method": "bilevel", "soft_groups": "predicted", "rows": "unknown", "learning_rate": RATES,
    },
    "soft groups, tuned": {
        "method": "bilevel", "soft_groups": "tuned", "rows": "unknown", "learning_rate": RATES,
    },
}  # fmt: skip


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--images", type=int, default=128, help="a step")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no run after these")
    return parser.parse_args()


def subset(images: Images, rows: np.ndarray, **changes: Any) -> Images:
    """Some rows of a data set."""
    columns = {name: getattr(images, name)[rows] for name in ("label", "group", "split", "pixels")}
    return dataclasses.replace(images, **{**columns, **changes})


@functools.lru_cache(maxsize=2)
def drawn(folder: Path, seed: int, shift: Shift) -> tuple[Images, Images]:
    """The data of a seed, and the validation rows that no method trains on."""
    images = colour_mnist(folder, sizes=SIZES, seed=seed, shift=shift)
    aside = images.rows("validation")[: SIZES[1] // 3]
    kept = np.setdiff1d(np.arange(len(images)), aside)
    return subset(images, kept), subset(images, aside, split=np.zeros(len(aside), np.int8))


def training(images: Images, rows: str) -> Images:
    """The data set as a method trains on it."""
    if rows == "all":
        return with_validation(images)
    if rows == "validation":
        return with_validation(subset(images, images.rows("validation")))
    if rows == "unknown":
        return dataclasses.replace(images, group=np.where(images.split == 0, UNKNOWN, images.group))
    return images


def judge(model: Model, images: Images, split: str) -> tuple[dict[str, Any], np.ndarray]:
    """Accuracies on a split, and its features."""
    view = View(images.size, "float32", False, JUDGED)
    feed = Feed(images, Rows(images, ERM, JUDGED, 0), view, Devices(), 0, steps=0, chunk=1)
    return feed.judge_and_encode(model, split)


@dataclasses.dataclass(frozen=True)
class Budget:
    """The folder of the pictures, and what every run may spend."""

    data: Path
    steps: int
    images: int


@functools.lru_cache(maxsize=1)
def trained(args: Budget, settings: Settings, rows: str) -> tuple[Any, Any, float]:
    """The method, its last state, and the seconds of its steps."""
    images, devices = training(drawn(args.data, settings.seed, settings.shift)[0], rows), Devices()
    kind = METHODS[settings.method]
    batch = args.images // 2 if kind.takes_validation else args.images
    view = View(images.size, "float32", False, batch)
    feed = Feed(
        images, Rows(images, kind, batch, settings.seed), view, devices, settings.seed,
        steps=args.steps, chunk=args.steps,
    )  # fmt: skip
    below, above = jax.random.split(jax.random.key(settings.seed))
    network = CNN.new(key=below, channels=CHANNELS)
    edge = network.features**-0.5
    head = jax.random.uniform(above, (2, network.features), jnp.float32, -edge, edge)
    method = devices.everywhere(method_of(settings, images.counts[0], args.steps))
    state = devices.everywhere(method.init(Model(network, head)))
    began = time.perf_counter()
    state = jax.block_until_ready(feed.advance(method, state, 0, args.steps))
    feed.close()
    return method, state, time.perf_counter() - began


def run(args: Budget, settings: Settings, rows: str, picking: bool) -> dict[str, Any]:
    """One run, judged; what it did with η, radii and unknown groups."""
    method, state, seconds = trained(args, settings, rows)
    images, aside = drawn(args.data, settings.seed, settings.shift)
    model = method.model(state)
    found: dict[str, Any] = {"aside": judge(model, aside, "train")[0], "seconds": seconds}
    if not picking:
        found |= {split: judge(model, images, split)[0] for split in ("validation", "test")}
        found["train"], features = judge(model, images, "train")
        if getattr(state, "radii", None) is not None:
            own = {"y1": state.y1, "z1": state.y.z1}
            found["apart"] = {name: float(distances(head)[0, 1]) for name, head in own.items()}
        if getattr(state, "predictor", None) is not None:
            at = images.rows("train")
            seen = jnp.asarray(features), jnp.asarray(images.label[at])
            guess = group_scores(*seen, state.predictor)
            right = np.argmax(np.asarray(guess), axis=1) == images.group[at]
            shares = [float(right[images.group[at] == g].mean()) for g in range(4)]
            found["groups_right"] = {"average": float(right.mean()), "groups": shares}
    seen = {k: np.asarray(v).tolist() for k, v in method.seen(state).items()}
    return plain(
        {**found, "seen": seen, "diverged": None if math.isfinite(seen["loss"]) else args.steps}
    )


class Runs:
    """The runs of a file, written anew after each."""

    def __init__(self, args: argparse.Namespace):
        self.args, self.path = args, args.json
        self.budget = Budget(args.data, args.steps, args.images)
        self.head: dict[str, Any] = {
            "command": shlex.join(["python", *sys.argv]),
            "device": jax.devices()[0].device_kind,
            "jax": jax.__version__,
            "sizes": SIZES, "channels": CHANNELS, "rates": RATES, "radii": RADII, "bound": BOUND,
            "steps": args.steps,
            "images_per_step": args.images,
            "complete": False,
        }  # fmt: skip
        self.runs: list[dict[str, Any]] = []
        if self.path.exists():
            before = json.loads(self.path.read_text())
            for name in ("sizes", "channels", "steps", "images_per_step", "bound"):
                if before[name] != plain(json.loads(json.dumps(self.head[name]))):
                    raise SystemExit(f"{self.path} was made with other {name}: remove it")
            self.runs = before["runs"]

    def save(self, complete: bool = False) -> None:
        self.head["complete"] = complete
        head = json.dumps(self.head, indent=1)[:-2]
        lines = ",\n".join(f"  {json.dumps(run, allow_nan=False)}" for run in self.runs)
        write_bytes(self.path, f'{head},\n "runs": [\n{lines}\n ]\n}}\n'.encode())

    def kept(self, about: dict[str, Any], make: Any) -> dict[str, Any]:
        """The run of the file that is about this, or a new one."""
        for run in self.runs:
            if all(run.get(key) == value for key, value in about.items()):
                return run
        if time.perf_counter() - BEGAN > self.args.seconds:
            raise TimeoutError
        made = {**about, **make()}
        self.runs.append(made)
        self.save()
        show(made)
        return made

    def deep(self, name: str, seed: int, given: dict[str, Any]) -> dict[str, Any]:
        about = {"name": name, "seed": seed, **given}
        own = {key: value for key, value in given.items() if key != "rows"}
        settings = Settings(network="cnn", seed=seed, schedule="cosine", **own)
        rows, picking = given.get("rows", "training"), seed == PICKING
        return self.kept(about, lambda: run(self.budget, settings, rows, picking))


def show(made: dict[str, Any]) -> None:
    about = {key: made[key] for key in ("learning_rate", "radius", "shift") if key in made}
    judged = made.get("test") or made.get("aside")
    said = f"{100 * judged['worst']:.1f}" if judged else made["failed"]
    print(
        f"{time.perf_counter() - BEGAN:5.0f} s  {made['seed']:3} {made['name']:36} {about} {said}"
    )


def picked(runs: Runs, name: str, of: dict[str, dict[str, Any]], shift: Shift) -> dict[str, Any]:
    """A method's settings with what did best aside."""
    given = {"shift": shift, **METHOD[name]}
    given = {**of.get(given.pop("like", ""), {}), **given}
    grids = {key: given.pop(key) for key in list(given) if isinstance(given[key], tuple)}
    tried = []
    for values in itertools.product(*grids.values()):
        own = {**given, **dict(zip(grids, values))}
        found = runs.deep(name, PICKING, own)
        aside = found["aside"]
        tried.append(((bool(found["diverged"]), -aside["worst"], -aside["average"]), own))
    return min(tried, key=lambda pair: pair[0])[1]


def measure(runs: Runs, seeds: int, shift: Shift) -> None:
    """All methods, seed after seed, so that a cut costs seeds."""
    chosen: dict[str, dict[str, Any]] = {}
    for name in METHOD:
        chosen[name] = picked(runs, name, chosen, shift)
    for seed in range(seeds):
        for name, given in chosen.items():
            runs.deep(name, seed, given)
            if name == "ERM":
                heads(runs, seed, shift, functools.partial(encoded, runs.budget, seed, given))


def main(args: argparse.Namespace) -> None:
    runs = Runs(args)
    try:
        for shift in SHIFTS:
            measure(runs, args.seeds, shift)
        runs.save(complete=True)
    except TimeoutError:
        print(f"Stopped after {args.seconds:g} s; the same command goes on from here.")


def encoded(args: Budget, seed: int, given: dict[str, Any]) -> Parts:
    """Features, labels and groups of every split, by the plainly trained CNN."""
    settings = Settings(network="cnn", seed=seed, schedule="cosine", **given)
    method, state, _ = trained(args, settings, "training")
    images, _ = drawn(args.data, seed, settings.shift)
    found = {}
    for split in SPLITS:
        rows, (_, features) = images.rows(split), judge(method.model(state), images, split)
        found[split] = features, images.label[rows], images.group[rows]
    return found


if __name__ == "__main__":
    main(arguments())
