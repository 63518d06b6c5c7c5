"""`bilevax meta`: new tasks learnt from old ones, by several methods, compared."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Annotated

import tyro

from bilevax.arguments import positive, probability, whole
from bilevax.cli.robust import check_folder, new_folder

#: The files that are written.
FILES = ("results.json", "model.skops")


def meta(
    data: Annotated[Path, tyro.conf.Positional],
    label: str,
    task: str,
    drop: tuple[str, ...] = (),
    new: float = 0.25,
    least: int = 10,
    share: float = 0.5,
    out: Path = Path("meta"),
    overwrite: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
    tolerance: float = 1e-3,
    seed: int = 0,
) -> int:
    """Learn from tasks how to learn new ones, and compare ways to do it on tasks held out.

    Each task alone, one model for all, averaging with λ by grid, and the robust meta-learner, whose
    meta-parameter, η and λ come from one bilevel problem. Writes the meta-learner and results.json.

    Args:
        data: a CSV or Parquet file with one row per case.
        label: the column to predict: numbers, or classes.
        task: the column that says which task a row belongs to.
        drop: columns to leave out.
        new: the share of the tasks that is held out, as new ones.
        least: tasks with fewer rows are left out.
        share: the share of each task's validation rows that counts, the worst ones.
        out: the folder to write, which must not exist yet.
        overwrite: replace the folder if it holds only the files of an earlier run.
        tolerance: the ε to certify.
        seed: the seed of the new tasks and of the splits.
    """
    try:
        from bilevax.learn.delimited import read
        from bilevax.learn.meta_table import learn_tasks, prepare_tasks, table_of
        from bilevax.learn.models import save_model
    except ImportError as error:
        raise ValueError(f"this needs pip install 'bilevax[learn]' ({error})") from None
    positive(tolerance, "--tolerance")
    probability(new, "--new")
    whole(least, "--least", 2)
    check_folder(out, overwrite, FILES)
    table, notes = read(data)
    prepared = prepare_tasks(
        table, data.name, label, task, drop=drop, new=new, least=least, seed=seed, notes=notes
    )
    command = shlex.join(["bilevax", *sys.argv[1:]])
    with new_folder(out, overwrite, FILES) as folder:
        results, pipeline = learn_tasks(
            prepared, share=share, tolerance=tolerance, seed=seed, command=command
        )
        save_model(pipeline, folder / "model.skops")
        text = json.dumps(results, indent=1, ensure_ascii=False)
        (folder / "results.json").write_text(text, encoding="utf-8")
    for note in prepared.notes:
        print(f"Note: {note}.")
    print(table_of(results))
    said = "certified" if results["certified"] else "NOT certified at the tolerance: only"
    print(f"\nThe meta-learner is {said} ε-KKT at ε = {results['certificate']['epsilon']:.2g}.")
    for file in FILES:
        print(f"{file}: {out / file}")
    return 0 if results["certified"] else 1
