"""`bilevax deep`: train networks whose worst group does well, on images."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import tyro

from bilevax.arguments import whole
from bilevax.deep import ablate as run_ablation
from bilevax.deep import evaluate as judge
from bilevax.deep import train as run_training
from bilevax.deep.ablate import ablation_table
from bilevax.deep.settings import Settings, read_settings
from bilevax.deep.table import table_of
from bilevax.deep.train import Interrupted

Flag = Annotated[bool, tyro.conf.FlagCreatePairsOff]


@dataclasses.dataclass(frozen=True)
class Hosts:
    """Several processes, on one or several hosts, that train together."""

    coordinator: str | None = None
    """HOST:PORT of the first process; give it to all of them, with --processes and --process."""
    processes: int | None = None
    """How many there are."""
    process: int | None = None
    """The number of this one, from 0."""
    cluster: Flag = False
    """Let JAX find all of this out from the cluster (Slurm, Open MPI, Kubernetes, TPU)."""

    def join(self) -> None:
        if self.cluster:
            jax.distributed.initialize()
            return
        given = (self.coordinator, self.processes, self.process)
        if given == (None, None, None):
            return
        if self.coordinator is None or self.processes is None or self.process is None:
            raise ValueError("--coordinator, --processes and --process go together")
        whole(self.processes, "--processes", 1)
        if not 0 <= self.process < self.processes:
            raise ValueError(f"--process must be from 0 to {self.processes - 1}")
        jax.distributed.initialize(self.coordinator, self.processes, self.process)


Given = Annotated[Settings, tyro.conf.OmitArgPrefixes]
Joined = Annotated[Hosts, tyro.conf.OmitArgPrefixes]


def commands(args: Sequence[str]) -> tyro.extras.SubcommandApp:
    """train, evaluate and ablate; the settings of a file are the defaults of the flags."""
    path = _config(args)
    known = Settings() if path is None else read_settings(path)
    app = tyro.extras.SubcommandApp()

    @app.command
    def train(
        settings: Given = known,
        hosts: Joined = Hosts(),  # noqa: B008
        config: Path | None = None,
        resume: Flag = False,
    ) -> int:
        """Train a network, and judge the best one on every split.

        Args:
            config: a .toml or .json file of settings; flags go before it.
            resume: go on from the last checkpoint in --out.
        """
        hosts.join()
        _check_data(settings)
        try:
            results = run_training(settings, resume=resume).results
        except Interrupted as stop:
            _say(str(stop))
            return 130
        _say(table_of(results))
        _say(f"\nThe best of {results['steps']} steps is {results['best_step']}.")
        for name in ("results.json", "model.safetensors", "checkpoints", "logs"):
            _say(f"{name}: {settings.out / name}")
        return 0

    @app.command
    def evaluate(
        run: Annotated[Path, tyro.conf.Positional],
        data: Path | None = None,
        checkpoint: Literal["best", "last"] = "best",
        workers: int | None = None,
        json: Path | None = None,
    ) -> int:
        """Judge a trained network on every split.

        Args:
            run: the folder of the run.
            data: other data than the run's own, with the same classes.
            checkpoint: the best by its worst group on the validation rows, or the last.
            workers: processes that decode.
            json: a file for the result.
        """
        found = judge(run, data=data, checkpoint=checkpoint, workers=workers)
        if json is not None:
            json.write_text(_text(found), encoding="utf-8")
        _say(table_of(found))
        return 0

    @app.command
    def ablate(
        settings: Given = known,
        config: Path | None = None,
        rhos: tuple[float, ...] = (10.0, 100.0, 500.0),
        smoothnesses: tuple[float, ...] = (500.0, 1000.0, 2000.0),
        etas: tuple[float, ...] = (0.1, 1.0, 5.0),
    ) -> int:
        """Train with other values of ρ, L and the first η, one at a time, as in the paper.

        A grid's middle value is used while another's are tried. Run again, it goes on.

        Args:
            config: a .toml or .json file of settings; flags go before it.
            rhos: values of ρ.
            smoothnesses: values of L.
            etas: first values of η.
        """
        _check_data(settings)
        grid = {"rho": rhos, "smoothness": smoothnesses, "eta": etas}
        try:
            found = run_ablation(settings, grid)
        except Interrupted as stop:
            _say(str(stop))
            return 130
        _say(ablation_table(found))
        _say(f"ablation.json: {settings.out / 'ablation.json'}")
        return 0

    return app


def _config(args: Sequence[str]) -> Path | None:
    """The file of settings, which must be known before the flags are parsed."""
    for arg, after in zip(args, [*args[1:], ""]):
        if arg == "--config":
            return Path(after)
        if arg.startswith("--config="):
            return Path(arg.removeprefix("--config="))
    return None


def _check_data(settings: Any) -> None:
    if settings.data == Path():
        raise ValueError("which data? Give a folder of images, or a CSV that lists them")


def _say(text: str) -> None:
    if jax.process_index() == 0:
        print(text)


def _text(found: dict[str, Any]) -> str:
    return json.dumps(found, indent=1, ensure_ascii=False) + "\n"
