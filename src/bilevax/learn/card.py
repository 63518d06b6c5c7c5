"""The model card: what a model was made from, how its groups do, and what it is not for."""

from __future__ import annotations

from typing import Any

from bilevax.learn.reader import TableReader
from bilevax.learn.report import finding
from bilevax.learn.report.words import as_percent, as_whole, short_number
from bilevax.learn.serving import shown_range


def card(results: dict[str, Any], reader: TableReader) -> str:
    """The card in Markdown; `results` is what `results.json` holds."""
    data, methods = results["data"], {m["key"]: m for m in results["methods"]}
    tuned = methods["tuned"]
    grouping = [data["label"]] * bool(data["with_label"]) + list(data["group_columns"])
    parts = ", ".join(f"{as_whole(count)} {part}" for part, count in data["parts"].items())
    epsilon = short_number(results["certificate"]["epsilon"])
    certified = "certified" if results["certified"] else "not certified at its tolerance"
    return f"""# Model card: {_cell(data["label"])} from {_cell(data["name"])}

A linear classifier, trained by group DRO with η = {short_number(tuned["eta"])} and
l2 = {short_number(tuned["l2"])}, both tuned for the worst group.
Made by bilevax {results["version"]}: `{_cell(results["command"])}`

## Data

{as_whole(data["rows"])} rows ({parts}) of {_cell(data["name"])}.
The label is {_cell(data["label"])}, one of {", ".join(_cell(name) for name in results["classes"])}.

| column | kind | in training | may be missing |
|---|---|---|---|
{_columns(reader)}
{_notes(results["notes"])}
## Groups

By {" and ".join(map(_cell, grouping))}. Accuracies on test rows, with 95 % intervals.

| group | training rows | test rows | accuracy |
|---|---|---|---|
{_groups(results, tuned)}

## Verdict

{finding(results)}
The tuning is {certified}: ε-KKT at ε = {epsilon}. That says that η and l2 are stationary for the
worst group's validation loss, and nothing about new rows.

## Limits

- The accuracies hold for rows like those of the test part. `bilevax predict` warns of values
  outside of the ranges above, of unknown categories, and of groups whose shares have changed.
- Groups other than those above were not looked at; within a group, parts of it may do worse.
- The worst accuracy is {as_percent(tuned["worst"]["value"])}, that of the group
  {_cell(tuned["worst"]["group"])}.
- Probabilities are those under the training weights of the groups, not shares of the population.
- An association is no cause: a prediction does not say what a change of a column would do.
"""


def _columns(reader: TableReader) -> str:
    rows = [
        f"| {_cell(name)} | {kind['kind']} | {_cell(shown_range(kind))} "
        f"| {'yes' if kind['missing'] else 'no'} |"
        for name, kind in reader.columns_.items()
    ]
    return "\n".join(rows)


def _groups(results: dict[str, Any], tuned: dict[str, Any]) -> str:
    rows = []
    for group, right in zip(results["groups"], tuned["groups"]):
        low, high = as_percent(right["low"], ""), as_percent(right["high"], "")
        rows.append(
            f"| {_cell(group['name'])} | {as_whole(group['train'])} | {as_whole(group['test'])} "
            f"| {as_percent(right['value'])} ({low} to {high}) |"
        )
    return "\n".join(rows)


def _notes(notes: list[str]) -> str:
    return "".join(f"\n- {_cell(note)}" for note in notes) + "\n" * bool(notes)


def _cell(text: Any) -> str:
    """Text of the user's that cannot end a cell, a line or a code span."""
    return " ".join(str(text).split()).replace("|", "\\|").replace("`", "'").replace("<", "&lt;")
