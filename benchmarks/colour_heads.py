"""Linear classifiers on the features of a network: the last rows of `colour_mnist.py`."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from bilevax.learn import GroupDROClassifier, TunedGroupDROClassifier
from dominoes_runs import plain

ETAS, L2S = (0.01, 0.1, 1.0), (1e-4, 1e-3, 1e-2)
Parts = dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]]  # features, labels, groups


def by_groups(model: Any, part: tuple[np.ndarray, np.ndarray, np.ndarray]) -> dict[str, Any]:
    """The accuracy on all rows, on the worst group and on each."""
    features, label, group = part
    right = model.predict(features) == label
    groups = [float(right[group == g].mean()) for g in range(group.max() + 1)]
    return {"average": float(right.mean()), "worst": min(groups), "groups": groups}


def on_grid(parts: Parts) -> Any:
    """Group DRO with the η and l2 of a grid that do best on the validation rows."""
    fits = [
        GroupDROClassifier(eta=eta, l2=l2).fit(*parts["train"])
        for eta, l2 in itertools.product(ETAS, L2S)
    ]
    return max(fits, key=lambda fit: by_groups(fit, parts["validation"])["worst"])


def all_rows(parts: Parts) -> Any:
    """Group DRO on training and validation rows, with the η and l2 of that grid."""
    best = on_grid(parts)
    both = [np.concatenate(pair) for pair in zip(parts["train"], parts["validation"])]
    return GroupDROClassifier(eta=best.eta, l2=best.l2).fit(*both)


def tuned(parts: Parts) -> Any:
    X, y, groups = parts["validation"]
    return TunedGroupDROClassifier().fit(*parts["train"], X_val=X, y_val=y, groups_val=groups)


HEADS: dict[str, Callable[[Parts], Any]] = {
    "head: group DRO, η and l2 of a grid": on_grid,
    "head: group DRO, all rows": all_rows,
    "head: group DRO tuned": tuned,
}


def heads(runs: Any, seed: int, shift: str, encoded: Callable[[], Parts]) -> None:
    """Each classifier on the features of a seed; a failure is a row, too."""
    encoded = functools.cache(encoded)

    def judged(fit: Callable[[Parts], Any]) -> dict[str, Any]:
        parts, began = encoded(), time.perf_counter()
        try:
            model = fit(parts)
        except Exception as error:  # a failure is a result
            return {"failed": f"{type(error).__name__}: {error}"}
        seconds = time.perf_counter() - began
        found = {name: by_groups(model, part) for name, part in parts.items()}
        about = {name: getattr(model, name, None) for name in ("eta", "eta_", "l2", "l2_")}
        about = {name: float(value) for name, value in about.items() if value is not None}
        return plain({**found, **about, "seconds": seconds})

    for name, fit in HEADS.items():
        runs.kept({"name": name, "seed": seed, "shift": shift}, lambda fit=fit: judged(fit))
