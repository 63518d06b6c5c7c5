"""The training run: epochs of compiled chunks of steps, with checkpoints between them."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from bilevax.deep.checkpoints import Checkpoints
from bilevax.deep.devices import Devices, first
from bilevax.deep.evaluation import judged_on_all
from bilevax.deep.feed import Feed, Rows, View
from bilevax.deep.networks import Model, save_model
from bilevax.deep.pixels import Images
from bilevax.deep.settings import (
    METHODS,
    SETTINGS,
    Settings,
    check_groups,
    check_same_run,
    images_of,
    method_of,
    model_of,
    precision_of,
)
from bilevax.files import write_json
from bilevax.progress import Progress

#: Passes of the encoder over the rows of a batch, in one step of any method.
PASSES = {"forward": 1, "backward": 1}
#: How rows are drawn. Runs of bilevax 0.1.0 drew others, and their checkpoints do not say.
SAMPLER = "swap-or-not"


class Interrupted(Exception):
    """The run was asked to stop. Its checkpoint is written, and `resume` continues from it."""


class Diverged(ValueError):
    """The loss is no longer finite. The checkpoints were saved while it was."""


@dataclasses.dataclass(frozen=True)
class Trained:
    """The model with the best worst group on the validation rows, and what results.json has."""

    model: Model
    results: dict[str, Any]


def train(
    settings: Settings,
    *,
    resume: bool = False,
    images: Images | None = None,
    optimizer: Any = None,
    show: bool = True,
) -> Trained:
    """Train into the folder `settings.out`; with `resume`, continue from its last checkpoint.

    The folder gets settings.json, checkpoints/, logs/ (TensorBoard), results.json and
    model.safetensors. Batches, augmentation and first parameters follow from the seed and the
    number of the step, so a run that is killed and resumed takes the steps that it would have
    taken. `images` saves reading the data again; `optimizer`, any optax transformation, takes the
    network's steps instead of the one that the settings name.
    """
    for package in ("orbax.checkpoint", "safetensors.numpy", "tensorboardX"):
        importlib.import_module(package)  # a missing package must show before the first step
    settings = dataclasses.replace(settings, precision=precision_of(settings))
    images = images_of(settings) if images is None else images
    run = Run(settings, images, optimizer)
    run.open_folder(resume)
    log = Log(run, show)
    if run.history:
        log.judged(run.step, "validation", run.history[-1]["validation"])
    try:
        with stopping() as asked:
            run.epochs(log, asked)
            return run.concluded()
    finally:
        log.close()
        run.feed.close()


class Run:
    """A training run: its method, its state, and how far it is."""

    def __init__(self, settings: Settings, images: Images, optimizer: Any = None):
        check_groups(settings, images)
        self.settings, self.images, self.devices = settings, images, Devices()
        rows = Rows(images, METHODS[settings.method], settings.batch, settings.seed)
        view = View(images.size, precision_of(settings), settings.augment, settings.batch)
        self.per_epoch = rows.epoch_batches
        self.total = settings.epochs * self.per_epoch
        self.feed = Feed(
            images, rows, view, self.devices, settings.seed,
            steps=self.total, chunk=settings.chunk, workers=settings.workers,
        )  # fmt: skip
        method = method_of(settings, images.counts[0], self.total, optimizer)
        self.method = self.devices.everywhere(method)
        begin = self.method.init(model_of(settings, len(images.classes)))
        self.state = self.devices.everywhere(begin)
        self.checkpoints = Checkpoints(settings.out / "checkpoints")
        self.step, self.seconds = 0, 0.0
        self.rate: float | None = None  # images a second, in the last chunk
        self.history: list[dict[str, Any]] = []

    def open_folder(self, resume: bool) -> None:
        """Resume the run in the folder, or begin one where there is none."""
        out, known = self.settings.out, self.settings.out / SETTINGS
        if out.exists() and not out.is_dir():
            raise ValueError(f"{out} is a file, not a folder")
        if not resume:
            if holds_anything(out):
                raise ValueError(
                    f"the folder {out} is not empty; train into another one, or resume the run in "
                    "it with --resume"
                )
        elif self.checkpoints.steps():
            check_same_run(self.settings)
            self._resume()
        elif holds_anything(out) and not known.is_file():
            raise ValueError(f"the folder {out} holds no run: there is no {known.name}")
        # All processes look before the first one writes.
        multihost_utils.sync_global_devices("the folder is as it was")
        if first():
            out.mkdir(parents=True, exist_ok=True)
            write_json(known, self.settings.as_dict())

    def _resume(self) -> None:
        about, out = self.checkpoints.about("last") or {}, self.settings.out
        if about.get("sampler") != SAMPLER:
            raise ValueError(
                f"{out} was trained by an earlier version of bilevax, which drew other batches; it "
                "can be evaluated, but not resumed: train into another folder"
            )
        if about.get("data") != self._data():
            raise ValueError(
                f"{out} was trained with other images than {self.settings.data} now has: other "
                "rows, labels, groups or splits; train into another folder"
            )
        saved = self.checkpoints.last(self.state)
        assert saved is not None
        self.step, self.state, about = saved.step, saved.state, saved.about
        self.history, self.seconds, self.rate = about["history"], about["seconds"], about["rate"]

    def _data(self) -> str:
        """A digest of the labels, groups and splits of all rows in order, which set the batches."""
        images = self.images
        digest = hashlib.sha256(repr((images.classes, images.groups, images.size)).encode())
        for column in (images.label, images.group, images.split):
            digest.update(np.ascontiguousarray(column).tobytes())
        return digest.hexdigest()

    def epochs(self, log: Log, asked: threading.Event) -> None:
        """Take all steps that are left, or stop early when patience runs out."""
        stops = (self.per_epoch, self.settings.save_every or self.per_epoch)
        patience = self.settings.patience or self.total
        while self.step < self.total and self._since_best() < patience:
            saved = self.step
            end = min((saved // every + 1) * every for every in stops)
            while self.step < end and not any_of(asked):
                self._advance(min(self.settings.chunk, end - self.step), log)
            if self.step > saved:
                self._check_finite(float(self.method.seen(self.state)["loss"]))
                ended = self.step % self.per_epoch == 0
                if ended:
                    self._judge(log)
                self._save(best=ended and self._since_best() == 0)
            if any_of(asked):
                raise Interrupted(
                    f"stopped after step {self.step}; continue with the same command and --resume"
                )

    def _advance(self, count: int, log: Log) -> None:
        began = time.perf_counter()
        self.state = self.feed.advance(self.method, self.state, self.step, count)
        seen = jax.tree.map(np.asarray, self.method.seen(self.state))
        self.step += count
        took = time.perf_counter() - began
        self.seconds += took
        self.rate = count * self.feed.rows.batch / took
        log.steps(self.step, seen, self.rate)

    def _check_finite(self, loss: float) -> None:
        if not np.isfinite(loss):
            kept = self.checkpoints.steps()
            where = f"the last checkpoint is step {kept[-1]}" if kept else "there is no checkpoint"
            raise Diverged(
                f"the loss is {loss} by step {self.step}: the run diverged ({where}); lower the "
                "learning rate, tau or rho"
            )

    def _judge(self, log: Log) -> None:
        found = self.feed.judge(self.method.model(self.state), "validation")
        self._check_finite(found["loss"])
        log.judged(self.step, "validation", found)
        seen = {k: np.asarray(v).tolist() for k, v in self.method.seen(self.state).items()}
        self.history.append({"step": self.step, "validation": found, **seen})

    def _since_best(self) -> int:
        """Epochs since the best worst group; among equals the first is the best."""
        worst = [epoch["validation"]["worst"] for epoch in self.history]
        return len(worst) - 1 - int(np.argmax(worst)) if worst else 0

    def _save(self, best: bool) -> None:
        about = {
            "settings": self.settings.as_dict(),
            "classes": list(self.images.classes),
            "groups": list(self.images.groups),
            "data": self._data(),
            "sampler": SAMPLER,
            "history": self.history,
            "seconds": self.seconds,
            "rate": self.rate,
        }
        self.checkpoints.save(self.step, self.state, about, best=best)

    def concluded(self) -> Trained:
        """Judge the best model on every split, and write the results."""
        saved = self.checkpoints.best(self.state)
        assert saved is not None
        model = self.method.model(saved.state)
        if first():
            save_model(model, self.settings.out / "model.safetensors")
        results = {
            "settings": self.settings.as_dict(),
            **judged_on_all(self.feed, self.method, saved.state),
            "best_step": saved.step,
            "steps": self.step,
            "early_stop": self.step < self.total,
            "seconds": self.seconds,
            "passes_per_step": PASSES,
            "images_per_step": self.feed.rows.batch,
            "images_per_second": self.rate,
            "precision": self.feed.view.dtype,
            "devices": self.devices.count,
            "history": self.history,
        }
        if first():
            write_json(self.settings.out / "results.json", results)
        return Trained(model, results)


class Log:
    """A progress bar, and TensorBoard's curves; only the first process shows and writes them."""

    def __init__(self, run: Run, show: bool):
        from tensorboardX import SummaryWriter

        self._groups, begun = run.images.groups, run.step
        wanted = None if show and first() else False
        self._bar = Progress(wanted, total=run.total, unit="steps", label="training", done=begun)
        self._notes: dict[str, str] = {}
        # What a killed run wrote after its last checkpoint is not part of this run.
        folder = str(run.settings.out / "logs")
        self._writer = SummaryWriter(folder, purge_step=begun + 1, write_to_disk=first())

    def steps(self, at: int, seen: dict[str, Any], rate: float) -> None:
        """After some steps: what the method shows, and images per second."""
        self._notes["images/s"] = f"{rate:,.0f}"
        if "eta" in seen:
            self._notes["η"] = f"{float(seen['eta']):.3g}"
        self._bar.show(at, **self._notes)
        self._writer.add_scalar("images per second", rate, at)
        for name, value in seen.items():
            if np.ndim(value) == 0:
                self._writer.add_scalar(name, float(value), at)
            else:
                self._of_groups(name, value, at)

    def judged(self, at: int, split: str, found: dict[str, Any]) -> None:
        """After an epoch: accuracies and losses on a split."""
        self._notes[f"{split} worst"] = f"{100 * found['worst']:.1f} %"
        self._bar.show(None, **self._notes)
        for name in ("average", "worst", "loss", "worst_loss"):
            self._writer.add_scalar(f"{split} {name.replace('_', ' ')}", found[name], at)
        self._of_groups(f"{split} accuracy", found["groups"], at)

    def _of_groups(self, name: str, values: Any, at: int) -> None:
        for group, value in zip(self._groups, values):
            self._writer.add_scalar(f"{name}/{group}", float(value), at)

    def close(self) -> None:
        self._bar.close()
        self._writer.close()


def holds_anything(folder: Path) -> bool:
    """Whether a folder holds more than the leftovers of a failed write."""
    return folder.exists() and any(not path.name.endswith("~") for path in folder.iterdir())


@contextlib.contextmanager
def stopping() -> Iterator[threading.Event]:
    """An event that is set when the process is asked to end, by Ctrl-C or SIGTERM.

    The run then finishes and saves its chunk of steps. Asked twice, it ends at once.
    """
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return

    def ask(number: int, frame: Any) -> None:
        if asked.is_set():
            raise KeyboardInterrupt
        asked.set()

    before = {n: signal.signal(n, ask) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def any_of(asked: threading.Event) -> bool:
    """Whether any process was asked to stop; then all stop, at the same step."""
    if jax.process_count() == 1:
        return asked.is_set()
    return bool(np.any(multihost_utils.process_allgather(np.asarray(asked.is_set()))))
