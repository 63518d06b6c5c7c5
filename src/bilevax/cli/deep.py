"""`bilevax deep`: train networks whose worst group does well, on images."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Literal

import jax
import tyro

from bilevax.arguments import whole
from bilevax.deep import ablate as run_ablation
from bilevax.deep import evaluate as judge
from bilevax.deep import train as run_training
from bilevax.deep.ablation import GRID, ablation_table
from bilevax.deep.evaluation import results_table
from bilevax.deep.settings import Settings, read_settings
from bilevax.deep.training import Interrupted
from bilevax.files import check_writable, write_json

Flag = Annotated[bool, tyro.conf.FlagCreatePairsOff]


@dataclasses.dataclass(frozen=True)
class Hosts:
    """The processes, on one or several hosts, that train together."""

    coordinator: str | None = None
    """HOST:PORT of the first process; give it to all of them, with --processes and --process."""
    processes: int | None = None
    """The number of processes."""
    process: int | None = None
    """The number of this process, from 0."""
    cluster: Flag = False
    """Let JAX find these out from the cluster (Slurm, Open MPI, Kubernetes, TPU)."""

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
ONE_HOST = Hosts()


def commands(args: Sequence[str]) -> tyro.extras.SubcommandApp:
    """train, evaluate and ablate; the settings of a file are the defaults of the flags."""
    path = _config(args)
    known = Settings() if path is None else read_settings(path)
    as_paper = Settings(optimizer="none", tau=0.01) if path is None else known
    app = tyro.extras.SubcommandApp()

    @app.command
    def train(
        settings: Given = known,
        hosts: Joined = ONE_HOST,
        config: Path | None = None,
        resume: Flag = False,
    ) -> int:
        """Train a network, and judge the best one on every split.

        Args:
            config: a .toml or .json file of settings; a flag beside it wins.
            resume: continue from the last checkpoint in --out.
        """
        with _ready(settings, hosts):
            results = run_training(settings, resume=resume).results
        _say(results_table(results))
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
            checkpoint: the one with the best worst group on the validation rows, or the last.
            workers: processes that decode images.
            json: a file for the results.
        """
        if json is not None:
            check_writable(json, "--json")
        found = judge(run, data=data, checkpoint=checkpoint, workers=workers)
        _say(results_table(found))
        if json is not None:
            write_json(json, found)
        return 0

    @app.command
    def ablate(
        settings: Given = as_paper,
        hosts: Joined = ONE_HOST,
        config: Path | None = None,
        rhos: tuple[float, ...] = GRID["rho"],
        smoothnesses: tuple[float, ...] = GRID["smoothness"],
        etas: tuple[float, ...] = GRID["eta"],
    ) -> int:
        """Train with other values of ρ, L and the first η, one at a time, as in the paper.

        A grid's middle value is used while another's are tried, whatever --rho, --smoothness and
        --eta say. Without a file of settings the other constants are the paper's. An ablation that
        was stopped continues when it is run again.

        Args:
            config: a .toml or .json file of settings; a flag beside it wins.
            rhos: values of ρ.
            smoothnesses: values of L.
            etas: first values of η.
        """
        with _ready(settings, hosts):
            grid = {"rho": rhos, "smoothness": smoothnesses, "eta": etas}
            found = run_ablation(settings, grid)
        _say(ablation_table(found))
        _say(f"ablation.json: {settings.out / 'ablation.json'}")
        return 0

    return app


def _config(args: Sequence[str]) -> Path | None:
    """The file of settings, which must be known before the flags are parsed."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config", type=Path, nargs="?")
    return parser.parse_known_args(args)[0].config


@contextlib.contextmanager
def _ready(settings: Settings, hosts: Hosts) -> Iterator[None]:
    """Join the other processes and check that there is data; an interrupted run exits with 130."""
    hosts.join()
    if settings.data == Path():
        raise ValueError("no data given: name a folder of images, or a CSV file that lists them")
    try:
        yield
    except Interrupted as stop:
        _say(str(stop))
        sys.exit(130)


def _say(text: str) -> None:
    if jax.process_index() == 0:
        print(text)
