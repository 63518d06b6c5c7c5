"""`bilevax bench NAME`: experiments with known answers."""

from __future__ import annotations

from typing import Annotated, Any

import tyro

from bilevax.bench import growth, linear, suite

# The settings of an experiment are the options of its command.
OPTIONS = (tyro.conf.OmitArgPrefixes, tyro.conf.PositionalRequiredArgs)

commands = tyro.extras.SubcommandApp()


@commands.command(name="linear")
def _linear(settings: Annotated[linear.Settings, *OPTIONS]) -> int:
    """The paper's bilevel linear problems, every method against the exact optimum."""
    results = linear.experiment(settings)
    return _end(linear.table(results.records) if results.records else "", results, settings)


@commands.command(name="suite")
def _suite(settings: Annotated[suite.Settings, *OPTIONS]) -> int:
    """Published bilevel problems with best-known values, each from several starts."""
    results = suite.experiment(settings)
    return _end(suite.table(results.outcomes), results, settings)


@commands.command(name="growth")
def _growth(settings: Annotated[growth.Settings, *OPTIONS]) -> int:
    """How the work to a certificate grows on bilevel linear problems."""
    results = growth.experiment(settings)
    return _end(growth.table(results), results, settings)


def _end(table: str, results: Any, settings: Any) -> int:
    """Print the table, where the files are, and whether all was run; the exit code."""
    if table:
        print(table)
    for what, path in (("Results", settings.json), ("Plot", getattr(settings, "plot", None))):
        if path is not None and path.exists():
            print(f"{what}: {path}")
    if results.interrupted:
        print("Interrupted: the above is what was done until then.")
    return 1 if results.interrupted else 0
