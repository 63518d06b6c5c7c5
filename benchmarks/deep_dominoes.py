"""Worst-group accuracy on dominoes: methods compared, constants of the bilevel method varied.

    python benchmarks/deep_dominoes.py DATA --json benchmarks/results/deep_dominoes.json \\
        --ablation benchmarks/results/deep_ablation.json

DATA has the idx files of MNIST and Fashion-MNIST in mnist/ and fashion-mnist/. Meant for an
accelerator. Every method sees 256 images a step, takes as many steps, with a learning rate that
falls as a cosine, and is judged on the same rows; of each run the model with the best worst group
on validation rows counts. Learning rates, and group DRO's C, are picked for each network,
correlation and method by that same accuracy on data drawn with a seed that is not used again. While
the best rate is at the end of its grid, the next one is tried: at most three in either direction.
"group DRO, all rows" trains on the validation rows too, which the bilevel method uses and the
others only choose by: with group DRO's rate and C, and with its own. By rows that it trains on it
picks its own badly.

With `--ablation`, λ, ρ, L, the first η and T of the bilevel method are then varied one at a time,
around the library's constants with the rate picked before and around the paper's constants with
plain steps, whose τ is picked alike; and λ of group DRO, with and without the validation rows.

Files are written after every run. After `--seconds` no run is begun, and the files are marked as
not complete; the same command goes on from them.
"""

from __future__ import annotations

import argparse
import itertools
import math
from pathlib import Path
from typing import Any

from bilevax.deep import Settings
from bilevax.deep.ablation import GRID
from deep_tables import OWN_RATE, PAPER, accuracy, chosen
from dominoes_runs import OutOfTime, Runs, widened

#: The grid that is tried first is from 0.003 to 0.1.
RATES = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
FIRST = (3, 6)
ADJUSTMENTS = (0.0, 1.0, 3.0, 10.0, 30.0)
ETAS = (0.01, 0.1, 1.0, 10.0)
PICKING = 100  # a seed for the choices
METHODS: dict[str, dict[str, Any]] = {
    "ERM": {"method": "erm"},
    "group DRO": {"method": "group-dro"},
    "bilevel": {"method": "bilevel", "eta": 1.0},
    OWN_RATE: {"method": "group-dro", "all_rows": True},
}
#: The paper's constants: those of examples/deep/celeba.toml.
PLAIN = {
    "method": "bilevel", "optimizer": "none", "rho": 100.0, "smoothness": 1000.0, "eta": 1.0,
    "l2": 0.1,
}  # fmt: skip
L2 = (0.0, 0.0001, 0.01)
#: What is varied around the library's and around the paper's constants, and where.
DEFAULTS: dict[str, tuple[float, ...]] = {
    "l2": L2, "rho": (0.1, 1.0, 10.0, 100.0), "smoothness": (1.0, 10.0, 100.0, 1000.0),
    "eta": (0.1, 1.0, 5.0), "iterations": (1, 3, 5),
}  # fmt: skip
PUBLISHED = {"l2": (0.0, 0.1, 1.0), **GRID, "iterations": (1, 3, 5)}
#: For the larger network fewer: its runs take three times as long.
FEWER = {**DEFAULTS, "rho": (0.1, 1.0, 10.0), "smoothness": (1.0, 10.0, 100.0)}
VARIED = {"cnn": (DEFAULTS, PUBLISHED), "resnet18": ({**FEWER, "iterations": (1, 3)}, GRID)}
ABLATED = {"cnn": (0.95, 0.99), "resnet18": (0.99,)}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--ablation", type=Path, help="a file for the ablation, which is run too")
    parser.add_argument("--networks", nargs="+", default=["cnn", "resnet18"])
    parser.add_argument("--correlations", nargs="+", type=float, default=[0.95, 0.99])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--images", type=int, default=256, help="a step")
    parser.add_argument("--judgements", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no run after these")
    return parser.parse_args()


def made(
    runs: Runs, name: str, at: tuple[str, float], seed: int, given: dict[str, Any], **more: Any
) -> dict[str, Any]:
    """The run of a name with these settings."""
    own = {**given, **more}
    all_rows, factor = own.pop("all_rows", False), own.pop("factor", None)
    own["schedule"] = "constant" if own.get("optimizer") == "none" else "cosine"
    settings = Settings(network=at[0], correlation=at[1], seed=seed, **own)  # pyright: ignore[reportArgumentType]
    return runs.record(name, settings, all_rows=all_rows, factor=factor)


def tuned(runs: Runs, name: str, at: tuple[str, float], given: dict[str, Any]) -> dict[str, Any]:
    """The settings of a method with its rate, and group DRO's C, as picked."""
    tried = lambda **more: made(runs, f"{name}, picking", at, PICKING, given, **more)
    rate = "tau" if given.get("optimizer") == "none" else "learning_rate"
    given = {**given, rate: widened(RATES, *FIRST, lambda value: tried(**{rate: value}))}
    if given["method"] == "group-dro":
        best = widened(ADJUSTMENTS, 0, 2, lambda value: tried(adjustment=value))
        given = {**given, "adjustment": best}
    return given


def compare(
    runs: Runs, settings: list[tuple[str, float]], seeds: int
) -> dict[tuple[str, float], dict[str, dict[str, Any]]]:
    """All methods in all settings, seed after seed, so that a cut costs seeds; what was picked."""
    picked = {
        at: {name: tuned(runs, name, at, given) for name, given in METHODS.items()}
        for at in settings
    }
    for seed, at in itertools.product(range(seeds), settings):
        for name, given in picked[at].items():
            made(runs, name, at, seed, given)
        given = picked[at]["group DRO"]
        made(runs, "group DRO, all rows", at, seed, given, all_rows=True)
        for eta in ETAS:
            made(runs, "group DRO, one η of the grid", at, seed, given, eta=eta)
    return picked


def calm(given: dict[str, Any]) -> dict[str, Any]:
    """Steps with which T > 1 is possible: `Settings` refuses τ·L ≥ 1, and rates as large."""
    smoothness = given.get("smoothness", Settings.smoothness)
    calmer = {"tau": min(given.get("tau", Settings.tau), 0.5 / smoothness)}
    if "learning_rate" in given:
        calmer["learning_rate"] = min(given["learning_rate"], 1 / smoothness)
    return {**given, **calmer}


def ablate(
    runs: Runs, picked: dict[tuple[str, float], dict[str, dict[str, Any]]], seeds: int
) -> None:
    """One constant at a time around both sets of them, and λ of group DRO."""
    settings = [at for at in picked if at[1] in ABLATED.get(at[0], ())]
    paper = {at: tuned(runs, PAPER, at, PLAIN) for at in settings}
    for seed, at in itertools.product(range(seeds), settings):
        around = {"bilevel": picked[at]["bilevel"], PAPER: paper[at]}
        for (name, given), varied in zip(around.items(), VARIED[at[0]]):
            for factor, values in varied.items():
                own = calm(given) if factor == "iterations" else given
                for value in values:
                    made(runs, name, at, seed, own, factor=factor, **{factor: value})
        for name, value in itertools.product(("group DRO", OWN_RATE), L2):
            made(runs, name, at, seed, picked[at][name], factor="l2", l2=value)


def main(args: argparse.Namespace) -> None:
    runs = Runs(args, args.json)
    try:
        settings = list(itertools.product(args.networks, args.correlations))
        picked = compare(runs, settings, args.seeds)
        runs.save(complete=True)
        print(summary(runs.runs))
        if args.ablation is not None:
            ablation = Runs(args, args.ablation, runs)
            ablate(ablation, picked, args.seeds)
            ablation.save(complete=True)
    except OutOfTime:
        print(f"Stopped after {args.seconds:g} s; the same command goes on from here.")


def summary(runs: list[dict[str, Any]]) -> str:
    """Means and standard errors over seeds; of η's grid, the run best on validation rows."""
    lines = []
    for (network, correlation), of in chosen({"runs": runs}).items():
        for name, several in of.items():
            average, worst = (accuracy(several, "test", kind) for kind in ("average", "worst"))
            lines.append(
                f"{network:9} {correlation:.2f} {name:32} average {average}  worst {worst}  "
                f"({len(several)} seeds)"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    main(arguments())
