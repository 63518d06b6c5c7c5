"""Saving and loading fitted models in a format that is safe to open: skops, not pickle."""

from __future__ import annotations

import copy
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
    "bilevax.learn.meta.RobustMetaLearner",
    "bilevax.learn.reader.TableReader",
    "bilevax.learn.tail.TailRiskClassifier",
    "bilevax.learn.tail.TunedTailRiskClassifier",
    "bilevax.learn.task.TaskModel",
    "numpy.dtype",  # of what scikit-learn's imputer fills in
    # What pipelines and searches of scikit-learn hold; none of these runs code of a file.
    "sklearn.compose._column_transformer.make_column_selector",
    "sklearn.metrics._scorer._PassthroughScorer",
    "sklearn.model_selection._split.KFold",
    "sklearn.model_selection._split.StratifiedKFold",
)


def save_model(model: Any, path: str | Path) -> None:
    """Write a fitted model, a pipeline or a search with one.

    What `set_fit_request` and the like asked for is not kept: it says how to fit. A model with
    parts of types that `load_model` refuses is refused here already.
    """
    from skops import io

    with replaced(path) as temporary:
        try:
            io.dump(_without_requests(model), temporary)
        except RecursionError:
            raise ValueError(
                "the model cannot be saved: its parts hold one another without end, as scorers and "
                "estimators in the grid of a search do; save best_estimator_"
            ) from None
        if unknown := _unknown(temporary):
            raise ValueError(
                "the model cannot be saved: it holds types that are not safe to open: "
                f"{', '.join(unknown)}. "
                "Leave out functions of your own; of a search save best_estimator_"
            )


def load_model(path: str | Path) -> Any:
    """Read what `save_model` wrote; a file with any other type in it is refused."""
    from skops import io

    if unknown := _unknown(path):
        raise ValueError(f"{path} holds types that are not ours: {', '.join(unknown)}")
    try:
        return io.load(path, trusted=list(TRUSTED))
    except OSError:
        raise
    except Exception as error:  # skops follows what the file says, whatever that is
        raise _no_model(path) from error


def _no_model(path: str | Path) -> ValueError:
    return ValueError(f"{path} is no model that save_model wrote, or it is broken")


def _unknown(path: str | Path) -> list[str]:
    """The types in a file that are not trusted."""
    from skops import io

    try:
        return sorted(set(io.get_untrusted_types(file=path)) - set(TRUSTED))
    except OSError:
        raise
    except Exception as error:
        raise _no_model(path) from error


def _without_requests(model: Any) -> Any:
    """A copy without requests of metadata, which point back to their estimators for ever."""
    model = copy.deepcopy(model)
    seen, left = set(), [model]
    while left:
        part = left.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        if isinstance(part, dict):
            left += part.values()
        elif isinstance(part, list | tuple):
            left += part
        elif hasattr(part, "get_params"):
            vars(part).pop("_metadata_request", None)
            left += vars(part).values()
    return model
