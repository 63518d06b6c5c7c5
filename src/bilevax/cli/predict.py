"""`bilevax predict`: a saved model's labels and probabilities for the rows of a file."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import tyro

from bilevax.files import check_writable, replaced


def predict(
    model: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")],
    data: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FILE")],
    out: Path | None = None,
    keep: tuple[str, ...] = (),
    sep: str | None = None,
    encoding: str | None = None,
) -> int:
    """Predict the rows of a table with a model that `bilevax robust` wrote.

    The rows are read as in training. Writes one row for each: the label, the probability of each
    class, and warnings where a value is missing, unknown or outside of what training had. What is
    odd about the file, and groups whose shares have changed, is told on stderr.

    Args:
        model: the file model.skops.
        data: a CSV or Parquet file with the columns that the model was trained on.
        out: the CSV file to write; else the predictions are printed.
        keep: columns of the file to write before the predictions, such as an id.
        sep: what separates the columns of a CSV file; else it is found.
        encoding: the encoding of a CSV file, such as cp1252; else it is found.
    """
    try:
        from bilevax.learn.delimited import read
        from bilevax.learn.models import load_model
        from bilevax.learn.serving import serve
    except ImportError as error:
        raise ValueError(f"this needs pip install 'bilevax[learn]' ({error})") from None
    if out is not None:
        check_writable(out, "--out")
    loaded = load_model(model)
    rows, notes = read(data, sep, encoding)
    if absent := [name for name in keep if name not in rows]:
        raise ValueError(f"--keep: there is no column {', '.join(map(repr, absent))} in {data}")
    served = serve(loaded, rows)
    for note in notes:
        print(f"Note: {note}.", file=sys.stderr)
    for said in (*served.findings, *served.drift):
        print(f"Warning: {said}.", file=sys.stderr)
    table = served.table
    for place, name in enumerate(keep):
        table.insert(place, name, rows[name], allow_duplicates=True)
    if out is None:
        table.to_csv(sys.stdout, index=False)
        return 0
    with replaced(out) as temporary:
        table.to_csv(temporary, index=False, encoding="utf-8")
    print(f"{len(table)} predictions: {out}", file=sys.stderr)
    return 0
