"""`bilevax robust`: robust classifiers for a table with groups, compared."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import tyro

from bilevax.arguments import positive
from bilevax.progress import EVERY, Progress

#: The files that are written, the last one if asked for.
FILES = ("report.html", "card.md", "results.json", "model.skops", "model.onnx")

Flag = Annotated[bool, tyro.conf.FlagCreatePairsOff]
_required = lambda metavar: tyro.conf.arg(
    metavar=metavar, help_behavior_hint="(required, but for --demo)"
)


def robust(
    data: Annotated[Path | None, tyro.conf.Positional, _required("FILE")] = None,
    label: Annotated[str, _required("COLUMN")] = "",
    group: Annotated[tuple[str, ...], _required("COLUMN [COLUMN ...]")] = (),
    out: Path = Path("robust"),
    overwrite: Flag = False,
    fast: Flag = False,
    demo: Flag = False,
    split: str | None = None,
    drop: tuple[str, ...] = (),
    drop_unlabelled: Flag = False,
    sep: str | None = None,
    encoding: str | None = None,
    onnx: Flag = False,
    groups_alone: Flag = False,
    least: int = 10,
    tolerance: float = 1e-3,
    bootstrap: int = 1000,
    seed: int = 0,
) -> int:
    """Train a classifier whose worst group does well, and say how much better that is.

    Compares, on test rows: plain and reweighted logistic regression, group DRO with its default η,
    with η and l2 by grid search, with both tuned in one bilevel solve, and with how far the rows of
    each group may move tuned, too. Writes the tuned model, which `bilevax predict` takes, a model
    card, results.json and report.html.

    Args:
        data: a CSV or Parquet file with one row per case.
        label: the column to predict.
        group: the columns that, together with the label, make the groups.
        out: the folder to write, which must not exist yet.
        overwrite: replace the folder if it holds only the files of an earlier run.
        fast: leave out the grid search, the curve of the loss against η, and rows that move.
        demo: use scikit-learn's digits, with a mark that gives the answer away too often.
        split: a column that says train, validation or test (or 0, 1, 2); else 60, 20 and 20 % of
            every group. Without validation rows a quarter of the training rows becomes that.
        drop: columns to leave out.
        drop_unlabelled: leave out rows without a label.
        sep: what separates the columns of a CSV file; else it is found.
        encoding: the encoding of a CSV file, such as cp1252; else it is found.
        onnx: write the model as an ONNX graph, too.
        groups_alone: make groups of the columns alone, without the label.
        least: the smallest number of rows that a group may have in each part.
        tolerance: the ε to certify.
        bootstrap: resamples of the test part for the intervals.
        seed: the seed of the split and of the resamples.
    """
    try:
        from bilevax.learn import datasets
        from bilevax.learn.card import card
        from bilevax.learn.compare import compare, table_of
        from bilevax.learn.delimited import read
        from bilevax.learn.models import save_model
        from bilevax.learn.report import report
        from bilevax.learn.table import prepare
    except ImportError as error:
        raise ValueError(f"this needs pip install 'bilevax[learn]' ({error})") from None
    _check(data, label, group, demo, least=least, bootstrap=bootstrap)
    positive(tolerance, "--tolerance")
    check_folder(out, overwrite, FILES)
    if onnx:
        _check_onnx()
    with Progress(None, unit="steps", label=str(data or "digits"), total=2, every=EVERY) as bar:
        bar.show(now="reading")
        if demo:
            known, notes = datasets.load_digits(), []
            table, name = known.table, known.name
            label, group = known.label, known.group_columns
        else:
            assert data is not None
            (table, notes), name = read(data, sep, encoding), data.name
        bar.show(1, now="columns")
        prepared = prepare(
            table, name, label, group, with_label=not groups_alone, split=split, drop=drop,
            least=least, seed=seed, drop_unlabelled=drop_unlabelled, notes=notes,
        )  # fmt: skip
        del table
    for note in prepared.notes:
        print(f"Note: {note}.")
    command = shlex.join(["bilevax", *sys.argv[1:]])
    with new_folder(
        out, overwrite, FILES
    ) as folder:  # made first: a place that cannot be written shows at once
        results, pipeline = compare(
            prepared, tolerance=tolerance, bootstrap=bootstrap, seed=seed, command=command,
            fast=fast,
        )  # fmt: skip
        save_model(pipeline, folder / "model.skops")
        if onnx:
            from bilevax.learn.export import save_onnx

            save_onnx(pipeline, folder / "model.onnx")
        text = json.dumps(results, indent=1, ensure_ascii=False)
        (folder / "results.json").write_text(text, encoding="utf-8")
        (folder / "report.html").write_text(report(results), encoding="utf-8")
        (folder / "card.md").write_text(card(results, prepared.reader), encoding="utf-8")
    print(table_of(results))
    epsilon = results["certificate"]["epsilon"]
    said = "certified" if results["certified"] else "NOT certified at the tolerance: only"
    print(f"\nThe tuned model is {said} ε-KKT at ε = {epsilon:.2g}.")
    for file in FILES[: len(FILES) if onnx else -1]:
        print(f"{file}: {out / file}")
    return 0 if results["certified"] else 1


def _check_onnx() -> None:
    """Refuse --onnx before the fits where its libraries are not there."""
    for name in ("skl2onnx", "onnx"):
        if importlib.util.find_spec(name) is None:
            raise ValueError(f"--onnx needs pip install 'bilevax[onnx]' (there is no {name})")


def _check(
    data: Path | None, label: str, group: tuple[str, ...], demo: bool, **counts: int
) -> None:
    """Refuse what cannot work before anything is read."""
    if demo and (data is not None or label or group):
        raise ValueError("--demo brings its own data: leave out the file, --label and --group")
    if not demo and (data is None or not label):
        raise ValueError("give a file and --label COLUMN, or --demo")
    if not demo and not group:
        raise ValueError("give --group COLUMN, the column whose groups must all do well")
    for name, count in counts.items():
        if count < 1:
            raise ValueError(f"--{name} must be at least 1, not {count}")


def check_folder(out: Path, overwrite: bool, files: tuple[str, ...]) -> None:
    """Refuse to put results where anything else would be lost."""
    if not out.exists():
        return
    if not out.is_dir():
        raise ValueError(f"{out} is a file, not a folder")
    if Path.cwd().is_relative_to(out.resolve()):
        raise ValueError(f"{out} is the folder you are in, or holds it; give another --out")
    there = sorted(path.name for path in out.iterdir())
    if others := [name for name in there if name not in files]:
        raise ValueError(f"the folder {out} holds other files ({', '.join(others[:3])}, …)")
    if there and not overwrite:
        raise ValueError(f"the folder {out} is not empty; give another --out, or --overwrite")


@contextlib.contextmanager
def new_folder(out: Path, overwrite: bool, files: tuple[str, ...]) -> Iterator[Path]:
    """A folder that appears under its name only once everything is in it.

    What a link points to is replaced, not the link. Where the name is no longer free at the end,
    the results get another one.
    """
    target = out.resolve()
    target.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        yield made
        made.chmod(0o755)
        try:
            check_folder(target, overwrite, files)
        except ValueError as error:
            kept = made.rename(made.with_name(made.name.removeprefix(".")))
            raise ValueError(f"{error}; the results are in {kept}") from None
        old = made.with_name(made.name + "-old")
        if target.exists():
            target.rename(old)
        made.rename(target)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(made, ignore_errors=True)
