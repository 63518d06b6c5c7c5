"""Robust classifiers, to scikit-learn's conventions. Needs `pip install 'bilevax[learn]'`."""

from bilevax.learn import datasets
from bilevax.learn.group import GroupDROClassifier, TunedGroupDROClassifier
from bilevax.learn.hierarchical import (
    HierarchicalDROClassifier,
    TunedHierarchicalDROClassifier,
)
from bilevax.learn.models import load_model, save_model
from bilevax.learn.soft import SoftGroupDROClassifier
from bilevax.learn.tail import TailRiskClassifier, TunedTailRiskClassifier

__all__ = [
    "GroupDROClassifier",
    "HierarchicalDROClassifier",
    "SoftGroupDROClassifier",
    "TailRiskClassifier",
    "TunedGroupDROClassifier",
    "TunedHierarchicalDROClassifier",
    "TunedTailRiskClassifier",
    "datasets",
    "load_model",
    "save_model",
]
