"""Linear classifiers on the features of a network: the last rows of `colour_mnist.py`."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from bilevax.learn import (
    GroupDROClassifier,
    HierarchicalDROClassifier,
    SoftGroupDROClassifier,
    TunedGroupDROClassifier,
    TunedHierarchicalDROClassifier,
)
from dominoes_runs import plain

ETAS, L2S, RADII = (0.01, 0.1, 1.0), (1e-4, 1e-3, 1e-2), (0.01, 0.03, 0.1, 0.3)
Parts = dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]]  # features, labels, groups


def by_groups(model: Any, part: tuple[np.ndarray, np.ndarray, np.ndarray]) -> dict[str, Any]:
    """The accuracy on all rows, on the worst group and on each."""
    features, label, group = part
    right = model.predict(features) == label
    groups = [float(right[group == g].mean()) for g in range(group.max() + 1)]
    return {"average": float(right.mean()), "worst": min(groups), "groups": groups}


def best(fits: list[Any], parts: Parts) -> Any:
    """The one that does best on the worst group of the validation rows."""
    return max(fits, key=lambda fit: by_groups(fit, parts["validation"])["worst"])


def on_grid(parts: Parts) -> Any:
    """Group DRO with the best η and l2 of a grid."""
    pairs = itertools.product(ETAS, L2S)
    fits = [GroupDROClassifier(eta=eta, l2=l2).fit(*parts["train"]) for eta, l2 in pairs]
    return best(fits, parts)


def all_rows(parts: Parts) -> Any:
    """Group DRO on training and validation rows, with the η and l2 of that grid."""
    found = on_grid(parts)
    both = [np.concatenate(pair) for pair in zip(parts["train"], parts["validation"])]
    return GroupDROClassifier(eta=found.eta, l2=found.l2).fit(*both)


def hierarchical(parts: Parts) -> Any:
    """The same η and l2, and the best radius of a grid for all groups."""
    found = on_grid(parts)
    fits = [
        HierarchicalDROClassifier(radii=radius, eta=found.eta, l2=found.l2).fit(*parts["train"])
        for radius in RADII
    ]
    return best(fits, parts)


def tuned(estimator: Any, parts: Parts, known: bool = True) -> Any:
    """An estimator that is tuned on the validation rows; perhaps without the training groups."""
    features, label, groups = parts["train"]
    X, y, of_held = parts["validation"]
    given = groups if known else None
    return estimator.fit(features, label, given, X_val=X, y_val=y, groups_val=of_held)


HEADS: dict[str, Callable[[Parts], Any]] = {
    "head: group DRO, η and l2 of a grid": on_grid,
    "head: group DRO, all rows": all_rows,
    "head: hierarchical, radius of a grid, too": hierarchical,
    "head: group DRO tuned": lambda parts: tuned(TunedGroupDROClassifier(), parts),
    "head: hierarchical tuned": lambda parts: tuned(TunedHierarchicalDROClassifier(), parts),
    "head: soft groups, tuned": lambda parts: tuned(SoftGroupDROClassifier(), parts, known=False),
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
        about: dict[str, Any] = {
            name: getattr(model, name, None) for name in ("eta", "eta_", "l2", "l2_")
        }
        about = {name: float(value) for name, value in about.items() if value is not None}
        if (radii := getattr(model, "radii_", None)) is not None:
            about["radii"] = radii.tolist()
        if (certificate := getattr(model, "certificate_", None)) is not None:
            about |= {"epsilon": certificate.epsilon, "converged": bool(model.converged_)}
        return plain({**found, **about, "seconds": seconds})

    for name, fit in HEADS.items():
        runs.kept({"name": name, "seed": seed, "shift": shift}, lambda fit=fit: judged(fit))
