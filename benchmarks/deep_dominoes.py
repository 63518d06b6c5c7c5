"""Worst-group accuracy on dominoes: ERM, group DRO, group DRO with η from a grid, bilevel.

    python benchmarks/deep_dominoes.py DATA --json benchmarks/results/deep_dominoes.json

DATA has the idx files of MNIST and Fashion-MNIST in mnist/ and fashion-mnist/. Meant for an
accelerator. Every method sees 256 images a step, takes as many steps, with a learning rate that
falls as a cosine, and is judged on the same test images; of each run the model with the best worst
group on validation rows counts. Learning rates, and group DRO's C, are picked for each network,
correlation and method by that same accuracy on data drawn with a seed that is not used again.
"group DRO, all rows" trains on the validation rows too, which the bilevel method uses and the
others only choose by.

With `--variants` it measures forms of the bilevel method instead: the paper's constants and plain
steps, and T > 1.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from bilevax.deep import Images, Settings, dominoes
from bilevax.deep.devices import Devices
from bilevax.deep.feed import Feed, Rows, View
from bilevax.deep.settings import METHODS, method_of, model_of, precision_of
from deep_tables import chosen, mean

RATES = (0.003, 0.01, 0.03, 0.1)
ADJUSTMENTS = (1.0, 3.0)
ETAS = (0.01, 0.1, 1.0, 10.0)
PICKING = 100  # a seed for the choices
PAPER = {"optimizer": "none", "rho": 100.0, "smoothness": 1000.0, "tau": 0.01}
VARIANTS: dict[str, dict[str, Any]] = {
    "as by default": {},
    "paper's constants, λ = 0.0001": PAPER,
    "paper's constants, λ = 0.1": {**PAPER, "l2": 0.1},
    "paper's constants, optax": {**PAPER, "optimizer": "sgd"},
    "ρ = 10, L = 100": {"rho": 10.0, "smoothness": 100.0, "tau": 0.01},
    "T = 3": {"iterations": 3, "tau": 0.03},
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--networks", nargs="+", default=["cnn", "resnet18"])
    parser.add_argument("--correlations", nargs="+", type=float, default=[0.95, 0.99])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--images", type=int, default=256, help="a step")
    parser.add_argument("--judgements", type=int, default=10)
    parser.add_argument("--variants", action="store_true", help="of the bilevel method, only")
    return parser.parse_args()


def with_validation(images: Images) -> Images:
    """The validation rows as training rows too; they stay what models are chosen by."""
    held = images.rows("validation")
    again = lambda a: np.concatenate([a, a[held]])
    assert images.pixels is not None
    split = np.concatenate([images.split, np.zeros(len(held), images.split.dtype)])
    return dataclasses.replace(
        images, label=again(images.label), group=again(images.group), split=split,
        pixels=again(images.pixels),
    )  # fmt: skip


def trained(settings: Settings, images: Images, args: argparse.Namespace) -> dict[str, Any]:
    """One run: the best worst group on validation rows, and that model on test rows."""
    began = time.perf_counter()
    kind = METHODS[settings.method]
    batch = args.images // 2 if kind.takes_validation else args.images
    rows = Rows(images, kind, batch, settings.seed)
    devices = Devices()
    view = View(images.size, precision_of(settings), False, batch)
    chunk = args.steps // args.judgements
    feed = Feed(images, rows, view, devices, settings.seed, steps=args.steps, chunk=chunk)
    method = devices.everywhere(method_of(settings, images.counts[0], args.steps))
    state = devices.everywhere(method.init(model_of(settings, len(images.classes))))
    best: dict[str, Any] = {"validation": {"worst": -1.0}}
    curve = []
    for number in range(args.judgements):
        state = feed.advance(method, state, number * chunk, chunk)
        model = method.model(state)
        found = feed.judge(model, "validation")
        curve.append(round(found["worst"], 4))
        if found["worst"] > best["validation"]["worst"]:
            best = {
                "step": (number + 1) * chunk,
                "validation": found,
                "test": feed.judge(model, "test"),
                "seen": {k: np.asarray(v).tolist() for k, v in method.seen(state).items()},
            }
    return {**best, "validation_worst_curve": curve, "seconds": time.perf_counter() - began}


def settings_of(network: str, correlation: float, seed: int, **chosen: Any) -> Settings:
    at: dict[str, Any] = {"network": network, "correlation": correlation, "seed": seed}
    return Settings(**at, schedule="cosine", **chosen)


def main(args: argparse.Namespace) -> None:
    results: dict[str, Any] = {
        "command": shlex.join(["python", *sys.argv]),
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "steps": args.steps,
        "images_per_step": args.images,
        "runs": [],
    }

    def record(name: str, images: Images, **chosen: Any) -> dict[str, Any]:
        settings = settings_of(**chosen)
        found = trained(settings, images, args)
        kept = ("network", "correlation", "seed", "method", "learning_rate", "eta", "adjustment")
        run = {"name": name, **{k: getattr(settings, k) for k in kept}, **found}
        results["runs"].append(run)
        if args.json is not None:
            args.json.write_text(json.dumps(results, indent=1) + "\n")
        worst = [100 * found[split]["worst"] for split in ("validation", "test")]
        print(
            f"{settings.network:9} {settings.correlation:.2f} seed {settings.seed:3} {name:28} "
            f"rate {settings.learning_rate:<6g} worst {worst[0]:5.1f} {worst[1]:5.1f} "
            f"average {100 * found['test']['average']:5.1f}  step {found['step']} "
            f"{found['seconds']:.1f} s", flush=True,
        )  # fmt: skip
        return run

    worst = lambda run: run["validation"]["worst"]
    for network in args.networks:
        for correlation in args.correlations:
            at = {"network": network, "correlation": correlation}
            if args.variants:
                for seed in range(args.seeds):
                    images = dominoes(args.data, correlation, seed=seed)
                    for name, chosen in VARIANTS.items():
                        record(name, images, **at, seed=seed, method="bilevel", **chosen)
                continue
            images = dominoes(args.data, correlation, seed=PICKING)
            rates, held = {}, {}
            for method in ("erm", "group-dro", "bilevel"):
                tried = [
                    record(f"{method}, picking", images, **at, seed=PICKING, method=method,
                           learning_rate=rate)
                    for rate in RATES
                ]  # fmt: skip
                rates[method] = max(tried, key=worst)["learning_rate"]
                held[method] = max(map(worst, tried))
            rate = rates["group-dro"]
            tried = [
                record("group-dro, picking", images, **at, seed=PICKING, method="group-dro",
                       learning_rate=rate, adjustment=adjustment)
                for adjustment in ADJUSTMENTS
            ]  # fmt: skip
            better = max(tried, key=worst)
            adjustment = better["adjustment"] if worst(better) > held["group-dro"] else 0.0
            for seed in range(args.seeds):
                images = dominoes(args.data, correlation, seed=seed)
                own = {**at, "seed": seed}
                dro = {"method": "group-dro", "learning_rate": rate, "adjustment": adjustment}
                record("ERM", images, **own, method="erm", learning_rate=rates["erm"])
                record("group DRO", images, **own, **dro)
                for eta in ETAS:
                    record("group DRO, one η of the grid", images, **own, **dro, eta=eta)
                record("bilevel", images, **own, method="bilevel", learning_rate=rates["bilevel"])
                record("group DRO, all rows", with_validation(images), **own, **dro)
    print(summary(results))


def summary(results: dict[str, Any]) -> str:
    """Means and standard errors over seeds; of η's grid, the run best on validation rows."""
    lines = []
    for (network, correlation), of in chosen(results).items():
        for name, runs in of.items():
            average, worst = ([run["test"][key] for run in runs] for key in ("average", "worst"))
            lines.append(
                f"{network:9} {correlation:.2f} {name:32} average {mean(average)}  "
                f"worst {mean(worst)}  ({len(runs)} seeds)"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    main(arguments())
