"""`bilevax bench NAME`: experiments with known answers."""

from __future__ import annotations

from typing import Annotated, Any

import tyro

from bilevax.bench import growth as growth_experiment
from bilevax.bench import linear as linear_experiment
from bilevax.bench import suite as suite_experiment

# The settings of an experiment are the options of its command.
OPTIONS = (tyro.conf.OmitArgPrefixes, tyro.conf.PositionalRequiredArgs)


def linear(settings: Annotated[linear_experiment.Settings, *OPTIONS]) -> int:
    """The paper's bilevel linear problems, every method against the exact optimum."""
    results = linear_experiment.experiment(settings)
    if results.records:
        print(linear_experiment.table(results.records))
    return _end(results, settings)


def suite(settings: Annotated[suite_experiment.Settings, *OPTIONS]) -> int:
    """Published bilevel problems with best-known values, each from several starts."""
    results = suite_experiment.experiment(settings)
    print(suite_experiment.table(results.outcomes))
    return _end(results, settings)


def growth(settings: Annotated[growth_experiment.Settings, *OPTIONS]) -> int:
    """How the work to a certificate grows on bilevel linear problems."""
    results = growth_experiment.experiment(settings)
    print(growth_experiment.table(results))
    return _end(results, settings)


def _end(results: Any, settings: Any) -> int:
    """Say where the files are, and whether all was run; the exit code."""
    for what, path in (("Results", settings.json), ("Plot", getattr(settings, "plot", None))):
        if path is not None and path.exists():
            print(f"{what}: {path}")
    if results.interrupted:
        print("Interrupted: the above is what was done until then.")
    return 1 if results.interrupted else 0
