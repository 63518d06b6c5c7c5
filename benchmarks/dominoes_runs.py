"""Training runs on dominoes, kept in a file that a stopped measurement goes on from."""

from __future__ import annotations

import argparse
import copy
import dataclasses
import functools
import json
import math
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from bilevax.deep import Images, Settings, dominoes
from bilevax.deep.devices import Devices
from bilevax.deep.feed import Feed, Rows, View
from bilevax.deep.methods import ERM
from bilevax.deep.settings import METHODS, method_of, model_of, precision_of
from bilevax.files import write_bytes

BEGAN = time.perf_counter()
JUDGED = 1024  # images at a time
#: The settings that a run is known by, beside `all_rows`.
KEPT = (
    "network", "correlation", "seed", "method", "optimizer", "learning_rate", "l2", "eta",
    "adjustment", "rho", "smoothness", "tau", "iterations",
)  # fmt: skip

images_of = functools.cache(dominoes)


class OutOfTime(Exception):
    """No further run is begun."""


def with_validation(images: Images) -> Images:
    """The validation rows as training rows too."""
    held = images.rows("validation")
    split = images.split.copy()
    split[held] = 0
    return dataclasses.replace(images, split=split)


@eqx.filter_jit
def copied(tree: Any) -> Any:
    """A copy that stays when the state it is of is given away."""
    return jax.tree.map(lambda leaf: jnp.copy(leaf) if eqx.is_array(leaf) else leaf, tree)


def trained(settings: Settings, args: argparse.Namespace, all_rows: bool) -> dict[str, Any]:
    """One run: the model with the best worst group on validation rows, judged on every split.

    With `all_rows` it trains on the validation rows too; it is judged on the same rows as without.
    A run whose loss is no longer finite ends there, and says so.
    """
    images = images_of(args.data, settings.correlation, seed=settings.seed)
    began = time.perf_counter()
    kind = METHODS[settings.method]
    batch = args.images // 2 if kind.takes_validation else args.images
    seen_rows = with_validation(images) if all_rows else images
    rows, devices = Rows(seen_rows, kind, batch, settings.seed), Devices()
    view = View(images.size, precision_of(settings), False, batch)
    chunk = args.steps // args.judgements
    feed = Feed(images, rows, view, devices, settings.seed, steps=args.steps, chunk=chunk)
    judging = copy.copy(feed)  # the same pixels in larger batches
    judging.rows = Rows(images, ERM, JUDGED, settings.seed)
    method = devices.everywhere(method_of(settings, seen_rows.counts[0], args.steps))
    state = devices.everywhere(method.init(model_of(settings, len(images.classes))))
    best: dict[str, Any] = {"validation": {"worst": -1.0}}
    model, curve, diverged = None, [], None
    for number in range(1, args.judgements + 1):
        state = feed.advance(method, state, (number - 1) * chunk, chunk)
        found = judging.judge(method.model(state), "validation")
        seen = {k: np.asarray(v).tolist() for k, v in method.seen(state).items()}
        curve.append(round(found["worst"], 4))
        if found["worst"] > best["validation"]["worst"]:
            best = {"step": number * chunk, "validation": found, "seen": seen}
            model = copied(method.model(state))
        if not math.isfinite(found["loss"] + seen["loss"]):
            diverged = number * chunk
            break
    feed.close()
    assert model is not None
    best |= {split: judging.judge(model, split) for split in ("test", "train")}
    judging.close()
    seconds = time.perf_counter() - began
    return {**best, "diverged": diverged, "validation_worst_curve": curve, "seconds": seconds}


def plain(value: Any) -> Any:
    """For JSON: numbers to seven digits, null for those that are not finite."""
    if isinstance(value, dict):
        return {name: plain(part) for name, part in value.items()}
    if isinstance(value, list):
        return [plain(part) for part in value]
    if isinstance(value, float):
        return float(f"{value:.7g}") if math.isfinite(value) else None
    return value


class Runs:
    """The runs of a result file, written anew after each of them.

    A run that the file has is not made again, and one that `others` have with the same settings,
    perhaps by another name, is taken from there. `complete` says whether any run is missing.
    """

    def __init__(self, args: argparse.Namespace, path: Path | None, others: Runs | None = None):
        self.args, self.path = args, path
        self.head: dict[str, Any] = {
            "command": shlex.join(["python", *sys.argv]),
            "device": jax.devices()[0].device_kind,
            "jax": jax.__version__,
            "steps": args.steps,
            "images_per_step": args.images,
            "judgements": args.judgements,
            "complete": False,
        }
        self.runs: list[dict[str, Any]] = []
        if path is not None and path.exists():
            before = json.loads(path.read_text())
            for name in ("device", "steps", "images_per_step", "judgements"):
                if before.get(name) != self.head[name]:
                    raise SystemExit(
                        f"{path} was made with {name} = {before.get(name)}, not {self.head[name]}: "
                        "remove it, or write to another file"
                    )
            self.runs = before["runs"]
        known = [*(others.runs if others else []), *self.runs]
        self.known = {same(run): run for run in known}
        self.lines = [json.dumps(run) for run in self.runs]
        self.save()

    def save(self, complete: bool = False) -> None:
        if self.path is None:
            return
        self.head["complete"] = complete
        head = json.dumps(self.head, indent=1)[:-2]
        runs = ",\n".join(f"  {line}" for line in self.lines)
        write_bytes(self.path, f'{head},\n "runs": [\n{runs}\n ]\n}}\n'.encode())

    def record(
        self, name: str, settings: Settings, *, all_rows: bool = False, factor: str | None = None
    ) -> dict[str, Any]:
        """The run of this name and these settings: from the file, from another run, or made."""
        about = {"name": name, "factor": factor, "all_rows": all_rows}
        about = plain({**about, **{key: getattr(settings, key) for key in KEPT}})
        for run in self.runs:
            if all(run[key] == value for key, value in about.items()):
                return run
        found = self.known.get(same(about))
        if found is None:
            if time.perf_counter() - BEGAN > self.args.seconds:
                raise OutOfTime
            found = plain(trained(settings, self.args, all_rows))
            show(name if factor is None else f"{name}, {factor} {about[factor]:g}", settings, found)
        run = {**found, **about}
        run = {key: run[key] for key in (*about, *(key for key in found if key not in about))}
        self.known.setdefault(same(run), run)
        self.runs.append(run)
        self.lines.append(json.dumps(run, allow_nan=False))
        self.save()
        return run


def same(run: dict[str, Any]) -> tuple[Any, ...]:
    """What two names of one run have in common."""
    return run["all_rows"], *(run[key] for key in KEPT)


def show(name: str, settings: Settings, found: dict[str, Any]) -> None:
    worst = [100 * found[split]["worst"] for split in ("validation", "test", "train")]
    rate = settings.tau if settings.optimizer == "none" else settings.learning_rate
    print(
        f"{time.perf_counter() - BEGAN:5.0f} s {settings.network:9} {settings.correlation:.2f} "
        f"seed {settings.seed:3} {name:46} rate {rate:<6g} worst "
        f"{worst[0]:5.1f} {worst[1]:5.1f} {worst[2]:5.1f}  step {found['step']} "
        f"{found['seconds']:.1f} s{'  diverged' * (found['diverged'] is not None)}",
        flush=True,
    )


def widened(
    ladder: Sequence[float], first: int, last: int, train: Callable[[float], dict[str, Any]]
) -> float:
    """The best of ladder[first], …, ladder[last], and of its next steps while the best is an end.

    Best is the worst group on validation rows; a tie goes to the better average, then to the
    smaller value. A run that diverged is worse than any that did not.
    """
    tried: dict[int, tuple[Any, ...]] = {}
    while True:
        for i in range(first, last + 1):
            if i not in tried:
                run = train(ladder[i])
                held = run["validation"]
                tried[i] = run["diverged"] is not None, -held["worst"], -held["average"], i
        best = min(tried, key=lambda i: tried[i])
        if best == last < len(ladder) - 1:
            last += 1
        elif best == first > 0:
            first -= 1
        else:
            return ladder[best]
