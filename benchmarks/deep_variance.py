"""The bilevel deep method with less noise, against itself, on dominoes at equal images.

    python benchmarks/deep_variance.py DATA --json benchmarks/results/deep_variance.json

DATA is that of deep_dominoes.py, whose rules hold here: a cosine schedule, the model with the best
worst group on validation rows counts, learning rates are picked by the same on data drawn with a
seed that is not used again. Every variant may spend the image gradients (a forward and a backward
pass of one image) of 600 steps of 256 images, whatever it makes of them; those named "equal draws"
draw as many images instead, and spend up to twice the gradients. Meant for an accelerator, where
each network has a process of its own. After `--seconds` no run is begun.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from bilevax.deep import Images, Settings, dominoes
from bilevax.deep.devices import Devices
from bilevax.deep.feed import Feed, Rows, View
from bilevax.deep.settings import method_of, model_of, precision_of
from deep_variance_method import Quiet
from deep_variance_tables import TODAY, differences

PICKING = 100  # a seed for the choices
RATES = (0.003, 0.01, 0.03, 0.1)
SEEDS = {"cnn": 8, "resnet18": 5}
JUDGED = 1024  # images at a time
#: Images of a minibatch, and what is not as today. STORM with a = 0.1 is a heavy ball with a
#: correction. A ball's rate acts ten times; without one, rates beyond 2/L diverge, so three times.
ALONE = {"momentum": 0.0, "longer": 3.0}
GROWING = {"images": 64, "first": 2, "most": 16, "bound": 2.0}
VARIANTS: dict[str, dict[str, Any]] = {
    TODAY: {"images": 256},
    "today, 128 images a step": {"images": 128},
    "today, 64 images a step": {"images": 64},
    "today, 4 × 64 images a step": {"images": 64, "first": 4, "most": 4},
    "STORM, a = 0.1": {"images": 256, "mixing": 0.1, **ALONE},
    "STORM, a = 0.1, 128 images a step": {"images": 128, "mixing": 0.1, **ALONE},
    "STORM, a = 0.1, equal draws": {"images": 256, "mixing": 0.1, "spends": 2.0, **ALONE},
    "STORM, a = 0.5, and a heavy ball": {"images": 256, "mixing": 0.5},
    "anchors": {"images": 256, "mixing": 0.0, "period": 8, "anchor": 4, "first": 4},
    "growing, θ = 1": {**GROWING, "bound": 1.0},
    "growing, θ = 2": GROWING,
    "growing, θ = 2, constant rate": {**GROWING, "falls": 0.0},
    "growing, θ = 2, σ and τ in proportion": {**GROWING, "paced": 256.0},
}  # fmt: skip
#: Of these for the larger network.
FEWER = (
    TODAY, "today, 64 images a step", "STORM, a = 0.1", "STORM, a = 0.1, equal draws", "anchors",
    "growing, θ = 2", "growing, θ = 2, constant rate",
)  # fmt: skip


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--networks", nargs="+", default=list(SEEDS))
    parser.add_argument("--correlations", nargs="+", type=float, default=[0.95, 0.99])
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS))
    parser.add_argument("--rates", nargs="+", type=float)
    parser.add_argument("--seeds", type=int)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--images", type=int, default=256, help="a step of today's method")
    parser.add_argument("--judgements", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=460.0)
    return parser.parse_args()


class Data:
    """Images of one seed and correlation on the device, and the rows of minibatches by size."""

    def __init__(self, args: argparse.Namespace, settings: Settings):
        assert settings.correlation is not None
        self.images: Images = dominoes(args.data, settings.correlation, seed=settings.seed)
        self.budget, self.seed = args.steps * args.images, settings.seed
        self.precision: Any = precision_of(settings)
        self.numbers: dict[int, Array] = {}
        rows = Rows(self.images, Quiet, JUDGED // 2, settings.seed)
        view = View(self.images.size, self.precision, False, JUDGED)
        self.feed = Feed(
            self.images, rows, view, Devices(), self.seed, steps=1, chunk=1, resident=True
        )

    def given(self, images: int) -> tuple[Any, ...]:
        """Arrays, the rows of all minibatches of so many images, and how the network sees them."""
        if images not in self.numbers:
            rows = Rows(self.images, Quiet, images // 2, self.seed)
            self.numbers[images] = jnp.asarray(rows.several(0, self.budget // images))
        view = View(self.images.size, self.precision, False, images // 2)
        return self.feed.resident, self.numbers[images], self.feed.seed, view


@eqx.filter_jit(donate="all-except-first")
def advanced(given: tuple, state: Any) -> Any:
    """Minibatches until so many image gradients are spent, as one loop."""
    method, until, (arrays, numbers, seed, view) = given

    def step(state: Any) -> Any:
        number = state.counts.drawn
        taken = [a.at[numbers[number]].get(mode="promise_in_bounds") for a in arrays]
        return method.step(state, view.batch(taken, seed, number))

    def unspent(state: Any) -> Array:
        return (state.counts.gradients < until) & (state.counts.drawn < len(numbers))

    return lax.while_loop(unspent, step, state)


def quiet(settings: Settings, data: Data, of: dict[str, Any]) -> tuple[Quiet, int, int]:
    """The method of a variant with constants as arrays, its minibatch, its image gradients."""
    of = dict(of)
    images, budget = of.pop("images"), int(of.pop("spends", 1.0) * data.budget)
    rate = settings.learning_rate * of.pop("longer", 1.0)
    given = {"momentum": settings.momentum, "falls": 1.0, "paced": 0.0, "bound": 1.0, **of}
    given |= {"rate": rate, "budget": budget}
    recursive = "mixing" in of
    whole = {k: jnp.asarray(given.pop(k, 1), jnp.int32) for k in ("period", "anchor", "first")}
    whole["most"] = jnp.asarray(given.pop("most", 1), jnp.int32)
    numbers = {k: jnp.asarray(v, jnp.float32) for k, v in given.items()}
    base: Any = method_of(settings, data.images.counts[0], 1)
    return Quiet(base, **numbers, **whole, recursive=recursive), images, budget


def trained(settings: Settings, data: Data, of: dict[str, Any], judgements: int) -> dict[str, Any]:
    """One run: the best worst group on validation rows, and that model on test rows."""
    began = time.perf_counter()
    method, images, budget = quiet(settings, data, of)
    given = data.given(images)
    state = method.init(model_of(settings, len(data.images.classes)))
    best: dict[str, Any] = {"validation": {"worst": -1.0}}
    curve, course, seen = [], [], {}
    for number in range(1, judgements + 1):
        until = jnp.asarray(budget * number // judgements, jnp.int32)
        state = advanced((method, until, given), state)
        model = method.model(state)
        found = data.feed.judge(model, "validation")
        seen = {k: np.asarray(v).tolist() for k, v in method.seen(state).items()}
        curve.append(round(found["worst"], 4))
        course.append([seen[k] for k in ("steps", "wanted", "noise", "signal")])
        if found["worst"] > best["validation"]["worst"]:
            test = data.feed.judge(model, "test")
            best = {"judgement": number, "validation": found, "test": test, "seen": seen}
    last = data.feed.judge(method.model(state), "test")
    return {
        **best,
        "last_test_worst": last["worst"],
        "steps": seen["steps"],
        "images_drawn": seen["minibatches"] * images,
        "image_gradients": seen["image_gradients"],
        "validation_worst_curve": curve,
        "steps_minibatches_noise_signal": course,
        "seconds": time.perf_counter() - began,
    }


def of_network(args: argparse.Namespace, network: str, results: dict[str, Any]) -> None:
    """All runs of a network: the choices, then seed after seed, so that a cut costs seeds only."""
    began = time.perf_counter()
    names = args.variants or (list(VARIANTS) if network == "cnn" else list(FEWER))
    rates = args.rates or RATES
    seeds = SEEDS[network] if args.seeds is None else args.seeds

    def record(name: str, of: str, settings: Settings, data: Data) -> dict[str, Any]:
        found = trained(settings, data, VARIANTS[of], args.judgements)
        kept = ("network", "correlation", "seed", "learning_rate")
        run = {"name": name, **{k: getattr(settings, k) for k in kept}, **found}
        results["runs"].append(run)
        args.json.write_text(json.dumps(results, indent=1) + "\n")
        print(
            f"{time.perf_counter() - began:5.0f} s {network:9} {settings.correlation:.2f} seed "
            f"{settings.seed:3} {name:44} rate {settings.learning_rate:<6g} worst "
            f"{100 * found['validation']['worst']:5.1f} {100 * found['test']['worst']:5.1f} "
            f"steps {found['steps']:4} {found['seconds']:.1f} s",
            flush=True,
        )
        return run

    def settings_of(correlation: float, seed: int, rate: float) -> Settings:
        at: dict[str, Any] = {"network": network, "correlation": correlation, "seed": seed}
        return Settings(**at, learning_rate=rate, optimizer="none")

    picked: dict[tuple[float, str], float] = {}
    for correlation in args.correlations:
        data = Data(args, settings_of(correlation, PICKING, rates[0]))
        for name in names:
            tried = [
                record(f"{name}, picking", name, settings_of(correlation, PICKING, rate), data)
                for rate in rates
            ]
            best = max(tried, key=lambda run: run["validation"]["worst"])
            picked[correlation, name] = best["learning_rate"]
    for seed in range(seeds):
        for correlation in args.correlations:
            data = Data(args, settings_of(correlation, seed, rates[0]))
            for name in names:
                if time.perf_counter() - began > args.seconds:
                    results["cut"] = True
                    return
                record(name, name, settings_of(correlation, seed, picked[correlation, name]), data)


def together(args: argparse.Namespace) -> list[dict[str, Any]]:
    """A process for each network, all at once; the runs of all of them."""
    parts = {network: args.json.with_suffix(f".{network}.json") for network in args.networks}
    own = sys.argv[1:]
    share = {"XLA_PYTHON_CLIENT_MEM_FRACTION": f"{0.9 / len(parts):.2f}"}
    running = [
        subprocess.Popen(
            [sys.executable, __file__, *own, "--json", str(part), "--networks", network],
            env={**os.environ, **share},
        )
        for network, part in parts.items()
    ]
    for process in running:
        process.wait()
    found = [json.loads(part.read_text()) for part in parts.values() if part.exists()]
    for part in parts.values():
        part.unlink(missing_ok=True)
    return found


def main(args: argparse.Namespace) -> None:
    results: dict[str, Any] = {
        "command": shlex.join(["python", *sys.argv]),
        "device": "",
        "jax": jax.__version__,
        "steps": args.steps,
        "images_per_step": args.images,
        "variants": VARIANTS,
        "runs": [],
    }
    if len(args.networks) > 1:  # this process then leaves the device alone
        for part in together(args):
            results["device"] = part["device"]
            results["runs"] += part["runs"]
            results["cut"] = results.get("cut", False) or part.get("cut", False)
    else:
        results["device"] = jax.devices()[0].device_kind
        of_network(args, args.networks[0], results)
    args.json.write_text(json.dumps(results, indent=1) + "\n")
    for beside in (TODAY, "today, 64 images a step"):
        print(differences(results, beside), "\n", flush=True)


if __name__ == "__main__":
    main(arguments())
