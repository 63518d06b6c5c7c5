"""`bilevax robust`, from the file to what it writes."""

import json

import numpy as np
import pandas as pd
import pytest
from test_learn_data import people

from bilevax.cli import main
from bilevax.learn.models import load_model

WRITTEN = ["card.md", "model.skops", "report.html", "results.json"]


def run(*given):
    with pytest.raises(SystemExit) as ended:
        main(["robust", *map(str, given)])
    return ended.value.code


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    out = tmp_path_factory.mktemp("demo") / "out"
    assert run("--demo", "--out", out, "--bootstrap", 200) == 0
    return out


def test_the_demo_writes_a_model_results_and_a_report(demo):
    assert sorted(p.name for p in demo.iterdir()) == WRITTEN
    results = json.loads((demo / "results.json").read_text())
    methods = {m["key"]: m for m in results["methods"]}
    assert list(methods) == ["erm", "reweighted", "dro", "grid", "tuned", "hierarchical"]
    assert results["certified"]
    assert results["certificate"]["epsilon"] <= results["tolerance"] == 1e-3
    tuned, grid = methods["tuned"], methods["grid"]
    assert tuned["worst_validation_loss"] <= grid["worst_validation_loss"] + 1e-5
    assert tuned["worst"]["value"] > methods["erm"]["worst"]["value"]
    moved = methods["hierarchical"]
    assert list(moved["radii"]) == [group["name"] for group in results["groups"]]
    assert moved["worst_validation_loss"] <= tuned["worst_validation_loss"] + 1e-3
    for method in results["methods"]:
        for part in (method["average"], method["worst"], *method["groups"]):
            assert 0 <= part["low"] <= part["value"] <= part["high"] <= 1
        assert method["worst"]["value"] == min(g["value"] for g in method["groups"])
    curve = results["loss_against_eta"]
    assert min(curve["worst_validation_loss"]) >= curve["tuned_loss"] - 1e-5
    page = (demo / "report.html").read_text()
    assert f"{100 * tuned['worst']['value']:.1f}" in page


def test_the_saved_model_takes_raw_rows(demo):
    from bilevax.learn import datasets

    model = load_model(demo / "model.skops")
    rows = datasets.load_digits()
    kept = rows.X[list(model.feature_names_in_)]
    assert np.mean(model.predict(kept) == rows.y) > 0.9
    assert model[-1].converged_


def test_a_table_with_holes_and_odd_names(tmp_path, capsys):
    table = people(400).rename(columns={"town": "home town"})
    table.loc[::9, "age"] = np.nan
    table.loc[::6, "home town"] = None
    table["constant"] = 3
    table.to_csv(tmp_path / "p.csv", index=False)
    out = tmp_path / "a" / "b"
    assert run(tmp_path / "p.csv", "--label", "hired", "--group", "sex", "--out", out) == 0
    shown = capsys.readouterr().out
    assert "left out, because they are constant: constant" in shown
    assert "hired yes, sex f" in shown
    assert "DRO, tuned" in shown
    model = load_model(out / "model.skops")
    new = table.drop(columns=["hired"]).head(3).assign(**{"home town": "Oz"})
    with pytest.warns(UserWarning, match="unknown categories"):
        assert set(model.predict(new)) <= {"yes", "no"}


def bad_calls():
    of = lambda *more: ("p.csv", "--label", "hired", "--group", "sex", *more)
    return [
        ((), "give a file and --label"),
        (("p.csv", "--label", "hired"), "give --group"),
        (("--demo", "--label", "x"), "--demo brings its own data"),
        (("no.csv", "--label", "hired", "--group", "sex"), "there is no file"),
        (("p.csv", "--label", "hird", "--group", "sex"), "did you mean 'hired'?"),
        (("p.csv", "--label", "hired", "--group", "sx"), "did you mean 'sex'?"),
        (("none.csv", "--label", "hired", "--group", "sex"), "has a header but no rows"),
        (of("--least", "1000"), "groups too small to estimate"),
        (of("--least", "0"), "--least must be at least 1"),
        (of("--tolerance", "-1"), "--tolerance must be finite and > 0"),
        (of("--out", "full"), "holds other files (mine.txt"),
        (of("--out", "full", "--overwrite"), "holds other files (mine.txt"),
        (of("--out", "earlier"), "is not empty"),
        (of("--out", "p.csv"), "is a file"),
    ]


@pytest.mark.parametrize(("given", "says"), bad_calls())
def test_bad_calls_say_what_is_wrong_and_write_nothing(tmp_path, monkeypatch, capsys, given, says):
    monkeypatch.chdir(tmp_path)
    people().to_csv("p.csv", index=False)
    pd.DataFrame(columns=["hired", "sex"]).to_csv("none.csv", index=False)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    (tmp_path / "earlier").mkdir()
    (tmp_path / "earlier" / "results.json").write_text("{}")
    before = sorted(p.name for p in tmp_path.rglob("*"))
    assert run(*given) == 2
    assert says in capsys.readouterr().err
    assert sorted(p.name for p in tmp_path.rglob("*")) == before


def test_a_failure_while_writing_leaves_nothing_behind(tmp_path, monkeypatch, capsys):
    def broken(results):
        raise OSError("the disk is full")

    people().to_csv(tmp_path / "p.csv", index=False)
    monkeypatch.setattr("bilevax.learn.report.report", broken)
    old = tmp_path / "out"
    old.mkdir()
    (old / "results.json").write_text("{}")
    call = (tmp_path / "p.csv", "--label", "hired", "--group", "sex", "--out", old, "--overwrite")
    assert run(*call) == 2
    assert "the disk is full" in capsys.readouterr().err
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["out", "p.csv", "results.json"]
    assert (old / "results.json").read_text() == "{}"


def test_an_earlier_folder_is_replaced_when_asked(tmp_path):
    people().to_csv(tmp_path / "p.csv", index=False)
    out = tmp_path / "out"
    out.mkdir()
    (out / "results.json").write_text("{}")
    call = (tmp_path / "p.csv", "--label", "hired", "--group", "sex", "--out", out, "--overwrite")
    assert run(*call, "--bootstrap", 100) == 0
    assert sorted(p.name for p in out.iterdir()) == WRITTEN
    assert json.loads((out / "results.json").read_text())["bootstrap"] == 100
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "p.csv"]
