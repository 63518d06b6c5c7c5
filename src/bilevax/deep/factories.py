"""From settings to data, network and method."""

from __future__ import annotations

from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from bilevax.deep.bilevel import BilevelDRO
from bilevax.deep.dominoes import dominoes
from bilevax.deep.methods import ERM, GroupDRO, Method, Optimizer, direction
from bilevax.deep.networks import Model, model
from bilevax.deep.pixels import Images, load
from bilevax.deep.settings import Settings
from bilevax.deep.tables import open_table
from bilevax.deep.weights import load_encoder

METHODS: dict[str, type[Method]] = {"bilevel": BilevelDRO, "group-dro": GroupDRO, "erm": ERM}


def images_of(settings: Settings) -> Images:
    """The data set, by the layout of its folder."""
    path = settings.data
    if (path / "mnist").is_dir() and (path / "fashion-mnist").is_dir():
        return dominoes(path, settings.correlation, seed=settings.seed)
    table = open_table(path)
    return load(
        table, settings.size,
        workers=settings.workers, cache=settings.cache, limit_gb=settings.memory_gb,
    )  # fmt: skip


def model_of(settings: Settings, classes: int) -> Model:
    """The network before the first step."""
    made = model(settings.network, classes, jax.random.key(settings.seed))
    if settings.weights is None:
        return made
    return Model(load_encoder(made.encoder, settings.weights), made.head)


def precision_of(settings: Settings) -> Literal["bfloat16", "float32"]:
    if settings.precision != "auto":
        return settings.precision
    return "float32" if jax.default_backend() == "cpu" else "bfloat16"


def method_of(settings: Settings, counts: np.ndarray, steps: int, optimizer: Any = None) -> Method:
    """The method with its constants as arrays, so that one program serves them all.

    `counts` are the training rows of each group, `steps` the steps of the whole run; `optimizer`
    replaces the one that the settings name.
    """
    s, number = settings, lambda value: jnp.asarray(value, jnp.float32)
    if optimizer is None and s.optimizer != "none":
        optimizer = Optimizer(
            direction(s.optimizer, s.momentum),
            number(s.learning_rate),
            number(steps) if s.schedule == "cosine" else None,
        )
    chosen = lambda *names: {name: number(getattr(s, name)) for name in names}
    given: dict[str, Any] = {"optimizer": optimizer, **chosen("l2")}
    given["statistics"] = "batch" if s.batch_norm == "batch" else "running"
    if s.method == "erm":
        return ERM(groups=len(counts), **given)
    first_eta = 1.0 if s.method == "bilevel" else 0.0
    given["eta"] = number(first_eta if s.eta is None else s.eta)
    if s.method == "group-dro":
        return GroupDRO(counts=number(counts), **given, **chosen("adjustment", "step_q"))
    given |= chosen("rho", "smoothness", "diameter", "epsilon", "tau", "theta")
    return BilevelDRO(len(counts), iterations=s.iterations, **given)
