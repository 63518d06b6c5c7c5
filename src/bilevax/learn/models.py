"""Saving and loading fitted models in a format that is safe to open: skops, not pickle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bilevax.files import replaced

#: What a model of ours holds beyond the types that skops trusts. Nothing else is ever loaded.
TRUSTED = (
    "bilevax.certificates.kkt.KKTCertificate",
    "bilevax.learn._tuning.Step",
    "bilevax.learn.group.GroupDROClassifier",
    "bilevax.learn.group.TunedGroupDROClassifier",
    "bilevax.learn.hierarchical.HierarchicalDROClassifier",
    "bilevax.learn.hierarchical.TunedHierarchicalDROClassifier",
    "bilevax.learn.soft.SoftGroupDROClassifier",
    "bilevax.learn.tail.TailRiskClassifier",
    "bilevax.learn.tail.TunedTailRiskClassifier",
    "numpy.dtype",  # of what scikit-learn's imputer fills in
)


def save_model(model: Any, path: str | Path) -> None:
    """Write a fitted classifier, or a pipeline with one."""
    from skops import io

    with replaced(path) as temporary:
        io.dump(model, temporary)


def load_model(path: str | Path) -> Any:
    """Read what `save_model` wrote; a file with any other type in it is refused."""
    from skops import io

    if unknown := set(io.get_untrusted_types(file=path)) - set(TRUSTED):
        raise ValueError(f"{path} holds types that are not ours: {', '.join(sorted(unknown))}")
    return io.load(path, trusted=list(TRUSTED))
