"""Robust classifiers and a meta-learner, to scikit-learn's conventions.

Needs `pip install 'bilevax[learn]'`.
"""

from bilevax.learn import datasets
from bilevax.learn._tasks import stack_tasks
from bilevax.learn.group import GroupDROClassifier, TunedGroupDROClassifier
from bilevax.learn.hierarchical import (
    HierarchicalDROClassifier,
    TunedHierarchicalDROClassifier,
)
from bilevax.learn.meta import RobustMetaLearner
from bilevax.learn.models import load_model, save_model
from bilevax.learn.soft import SoftGroupDROClassifier
from bilevax.learn.tail import TailRiskClassifier, TunedTailRiskClassifier
from bilevax.learn.task import TaskModel

__all__ = [
    "GroupDROClassifier",
    "HierarchicalDROClassifier",
    "RobustMetaLearner",
    "SoftGroupDROClassifier",
    "TailRiskClassifier",
    "TaskModel",
    "TunedGroupDROClassifier",
    "TunedHierarchicalDROClassifier",
    "TunedTailRiskClassifier",
    "datasets",
    "load_model",
    "save_model",
    "stack_tasks",
]
