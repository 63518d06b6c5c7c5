"""The training run: epochs of compiled chunks, checkpoints between them, and a table at the end."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from bilevax.deep.build import METHODS, images_of, method_of, model_of, precision_of
from bilevax.deep.checkpoints import Checkpoints
from bilevax.deep.devices import Devices, first
from bilevax.deep.feed import Feed, Rows, View
from bilevax.deep.files import holds_anything, read_run, write_json
from bilevax.deep.log import Log
from bilevax.deep.networks import Model
from bilevax.deep.pixels import Images
from bilevax.deep.settings import Settings, check_same_run
from bilevax.deep.tables import SPLITS
from bilevax.deep.weights import save_model

#: Passes of the encoder over the rows of a batch, in one step of any of the methods.
PASSES = {"forward": 1, "backward": 1}


class Interrupted(Exception):
    """Asked to stop: the checkpoint is written, and `resume` goes on from it."""


class Diverged(ValueError):
    """The loss is no longer finite; what was saved before is."""


@dataclasses.dataclass(frozen=True)
class Trained:
    """The best model by its worst group on the validation rows, and all that is known of it."""

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
    """Train into the folder `settings.out`; with `resume`, go on from its last checkpoint.

    The folder gets settings.json, checkpoints/, logs/ (TensorBoard), results.json and
    model.safetensors. Batches, augmentation and first parameters follow from the seed and the
    number of the step, so that a run that is killed and resumed takes the steps that it would have
    taken. `images` spares reading the data again; `optimizer`, any optax transformation, takes the
    network's steps instead of the one that the settings name.
    """
    for package in ("orbax.checkpoint", "safetensors.numpy", "tensorboardX"):
        importlib.import_module(package)  # what is missing shall show before the first step
    settings = dataclasses.replace(settings, precision=precision_of(settings))
    images = images_of(settings) if images is None else images
    run = Run(settings, images, optimizer)
    run.open_folder(resume)
    log = Log(settings.out / "logs", images.groups, run.total, run.step, show)
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
    """Where a training run stands."""

    def __init__(self, settings: Settings, images: Images, optimizer: Any = None):
        self.settings, self.images = settings, images
        kind = METHODS[settings.method]
        rows = Rows(images, kind, settings.batch, settings.seed)
        self.devices = Devices()
        view = View(images.size, precision_of(settings), settings.augment, settings.batch)
        self.per_epoch = rows.epoch_batches
        self.total = settings.epochs * self.per_epoch
        self.feed = Feed(
            images, rows, view, self.devices, settings.seed,
            steps=self.total, chunk=settings.chunk, workers=settings.workers,
        )  # fmt: skip
        self.method = self.devices.everywhere(
            method_of(settings, images.counts[0], self.total, optimizer)
        )
        begin = self.method.init(model_of(settings, len(images.classes)))
        self.state = self.devices.everywhere(begin)
        self.checkpoints = Checkpoints(settings.out / "checkpoints")
        self.step, self.seconds = 0, 0.0
        self.rate: float | None = None  # images a second, in the last chunk
        self.history: list[dict[str, Any]] = []

    def open_folder(self, resume: bool) -> None:
        """Take up the run in the folder, or begin one where there is none."""
        out, known = self.settings.out, self.settings.out / "settings.json"
        if out.exists() and not out.is_dir():
            raise ValueError(f"{out} is a file, not a folder")
        if not resume:
            if holds_anything(out):
                raise ValueError(
                    f"the folder {out} is not empty; train into another one, or resume the run in "
                    "it with --resume"
                )
        elif self.checkpoints.steps():
            check_same_run(self.settings, read_run(out), str(out))
            self._take_up()
        elif holds_anything(out) and not known.is_file():
            raise ValueError(f"the folder {out} holds no run: there is no {known.name}")
        if jax.process_count() > 1:  # all look before the first one writes
            multihost_utils.sync_global_devices("the folder is as it was")
        if first():
            out.mkdir(parents=True, exist_ok=True)
            write_json(known, self.settings.as_dict())

    def _take_up(self) -> None:
        about = self.checkpoints.about("last") or {}
        if about.get("data") != self._data():
            raise ValueError(
                f"{self.settings.out} was trained with other images than {self.settings.data} now "
                "has: other rows, labels, groups or splits; train into another folder"
            )
        saved = self.checkpoints.last(self.state)
        assert saved is not None
        self.step, self.state, about = saved.step, saved.state, saved.about
        self.history, self.seconds, self.rate = about["history"], about["seconds"], about["rate"]

    def _data(self) -> str:
        """A digest of what the data says of each row, and of its order: it sets the batches."""
        images = self.images
        digest = hashlib.sha256(repr((images.classes, images.groups, images.size)).encode())
        for column in (images.label, images.group, images.split):
            digest.update(np.ascontiguousarray(column).tobytes())
        return digest.hexdigest()

    def epochs(self, log: Log, asked: threading.Event) -> None:
        """All steps that are left, or until patience is at its end."""
        every = self.settings.save_every or self.per_epoch
        while self.step < self.total and not self._out_of_patience():
            saved = self.step
            end = min(
                (self.step // self.per_epoch + 1) * self.per_epoch,
                (self.step // every + 1) * every,
            )
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
                    f"stopped after step {self.step}; go on with the same command and --resume"
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
            where = f"the last checkpoint is of step {kept[-1]}" if kept else "none is saved yet"
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
        """Epochs since the best worst group; of equals the first counts."""
        worst = [epoch["validation"]["worst"] for epoch in self.history]
        return len(worst) - 1 - int(np.argmax(worst)) if worst else 0

    def _out_of_patience(self) -> bool:
        patience = self.settings.patience
        return patience is not None and self._since_best() >= patience

    def _save(self, best: bool) -> None:
        about = {
            "settings": self.settings.as_dict(),
            "classes": list(self.images.classes),
            "groups": list(self.images.groups),
            "data": self._data(),
            "history": self.history,
            "seconds": self.seconds,
            "rate": self.rate,
        }
        self.checkpoints.save(self.step, self.state, about, best=best)

    def concluded(self) -> Trained:
        """Judge the best model on every split, and write what was found."""
        saved = self.checkpoints.best(self.state)
        assert saved is not None
        model = self.method.model(saved.state)
        results = {
            "settings": self.settings.as_dict(),
            **judged_on_all(self.feed, model),
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
            save_model(model, self.settings.out / "model.safetensors")
        return Trained(model, results)


def judged_on_all(feed: Feed, model: Model) -> dict[str, Any]:
    images = feed.images
    return {
        "data": images.name,
        "groups": list(images.groups),
        "counts": {split: row.tolist() for split, row in zip(SPLITS, images.counts)},
        "accuracy": {split: feed.judge(model, split) for split in SPLITS},
    }


@contextlib.contextmanager
def stopping() -> Iterator[threading.Event]:
    """Set when the process is asked to end: the chunk under way is finished and saved first."""
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return

    def ask(number: int, frame: Any) -> None:
        if asked.is_set():  # twice: at once
            raise KeyboardInterrupt
        asked.set()

    before = {n: signal.signal(n, ask) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def any_of(asked: threading.Event) -> bool:
    """Whether any process was asked to stop: then all do, at the same step."""
    if jax.process_count() == 1:
        return asked.is_set()
    return bool(np.any(multihost_utils.process_allgather(np.asarray(asked.is_set()))))
