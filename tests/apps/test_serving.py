"""A table as it comes, with every oddity: the same predictions in training, loaded, by predict."""

import datetime
import io
import json
import warnings
import zipfile
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import sklearn
import threadpoolctl
from scipy import stats
from sklearn.compose import make_column_selector, make_column_transformer
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer, OneHotEncoder, StandardScaler

from bilevax.cli import main
from bilevax.cli.robust import FILES, check_folder, new_folder
from bilevax.learn import (
    GroupDROClassifier,
    TunedGroupDROClassifier,
    _base,
    _threads,
    load_model,
    save_model,
)
from bilevax.learn.columns import kind_of, read_as
from bilevax.learn.compare import Encoded
from bilevax.learn.delimited import read
from bilevax.learn.reader import TableReader
from bilevax.learn.serving import drift, examine, homogeneity, serve
from bilevax.learn.table import encoder, prepare
from learn_problems import blobs


def run(*given):
    with pytest.raises(SystemExit) as ended:
        main([*map(str, given)])
    return ended.value.code


def odd_table(n=420, seed=0):
    """What people export: the cells are text, in the file's own ways."""
    draw = np.random.default_rng(seed)
    good = draw.random(n) < 0.5
    age = draw.normal(40, 8, n) + 6 * good
    pay = draw.normal(3000, 500, n) + 300 * good
    day = pd.Timestamp("2019-01-01") + pd.to_timedelta(draw.integers(0, 900, n), "D")
    table = pd.DataFrame(
        {
            "": np.arange(n).astype(str),
            "customer_id": draw.permutation(9 * np.arange(n)).astype(str),
            "age": [f"{a:.1f}".replace(".", ",") for a in age],
            "pay": [f"€ {p:,.0f}".replace(",", ".") for p in pay],
            "rate": [f"{r:.1f} %".replace(".", ",") for r in draw.normal(5, 1, n)],
            "since": day.strftime("%d.%m.%Y"),
            "town": draw.choice(["Köln ", " Ely", "Rye"], n),
            "owner": draw.choice(["TRUE", "False"], n),
            "sex": draw.choice(["f", "m"], n),
            "good": np.where(good, "yes", "no"),
        }
    )
    for column, mark, every in (("age", "?", 9), ("pay", "n/a", 11), ("town", "", 7)):
        table.loc[::every, column] = mark
    table.loc[5::50, "good"] = ""
    return table


def written(table, path):
    path.write_bytes(table.to_csv(index=False, sep=";").encode("cp1252"))
    return path


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The folder that `bilevax robust` wrote, the table as it was read, and the pipeline made."""
    folder = tmp_path_factory.mktemp("odd")
    path = written(odd_table(), folder / "odd.csv")
    kept = {}

    def watched(table, **given):
        results, pipeline = compare(table, **given)
        kept.update(table=table, pipeline=pipeline)
        return results, pipeline

    import bilevax.learn.compare

    compare = bilevax.learn.compare.compare
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bilevax.learn.compare, "compare", watched)
        call = ("--label", "good", "--group", "sex", "--fast", "--onnx", "--drop-unlabelled")
        assert run("robust", path, *call, "--bootstrap", 50, "--out", folder / "out") == 0
    return folder, kept["table"], kept["pipeline"]


def test_every_column_is_read_for_what_it_is(made):
    _, table, _ = made
    kinds = {name: column["kind"] for name, column in table.reader.columns_.items()}
    assert kinds == {
        "age": "number", "pay": "number", "rate": "number", "since": "date",
        "town": "category", "owner": "truth", "sex": "category",
    }  # fmt: skip
    said = "; ".join(table.notes)
    for words in (
        "separated by semicolons",
        "read as cp1252",
        "9 of 420 rows without a label are left out",
        "Unnamed: 0 is left out, because it numbers the rows",
        "customer_id is left out, because it is an id",
        "since has dates, read as day.month.year",
        "age has numbers that are written as 1.234,5",
    ):
        assert words in said
    X = pd.concat([part.X for part in table.parts.values()]).sort_index()
    raw = odd_table().loc[X.index]
    own = raw["pay"] != "n/a"
    pay = raw["pay"][own].str.removeprefix("€ ").str.replace(".", "").astype(float)
    np.testing.assert_array_equal(X["pay"][own], pay)
    assert X["pay"][~own].isna().all()
    days = (pd.to_datetime(raw["since"], dayfirst=True) - pd.Timestamp("1970-01-01")).dt.days
    np.testing.assert_array_equal(X["since"], days)
    np.testing.assert_array_equal(X["owner"], raw["owner"] == "TRUE")
    assert set(X["town"]) == {"Köln", "Ely", "Rye", "(missing)"}


def test_training_the_loaded_model_and_predict_say_the_same(made, capsys):
    folder, table, pipeline = made
    X = table.parts["test"].X
    expected = pipeline["classifier"].predict_proba(pipeline["encoder"].transform(X))
    loaded = load_model(folder / "out" / "model.skops")
    raw, _ = read(folder / "odd.csv")
    np.testing.assert_array_equal(loaded.predict_proba(raw.loc[X.index]), expected)
    assert run("predict", folder / "out" / "model.skops", folder / "odd.csv") == 0
    shown = pd.read_csv(io.StringIO(capsys.readouterr().out), keep_default_na=False)
    assert len(shown) == 420
    columns = [f"probability {name}" for name in loaded.classes_]
    np.testing.assert_allclose(shown.loc[X.index, columns], expected, atol=1e-14)
    assert (shown["prediction"][X.index] == loaded.classes_[expected.argmax(axis=1)]).all()
    assert (shown["warnings"][table.parts["train"].X.index] == "").all()
    others = shown["warnings"][shown["warnings"] != ""].str.split("; ").explode()
    assert others.str.contains(" is outside of ").all()  # of what the training part held


def test_the_graph_agrees_with_the_model(made):
    onnxruntime = pytest.importorskip("onnxruntime", reason="needs onnxruntime")
    pytest.importorskip("skl2onnx", reason="needs skl2onnx")
    from bilevax.learn.export import graph_inputs

    folder, _, pipeline = made
    rows = odd_table(seed=1).assign(town="Oz")
    session = onnxruntime.InferenceSession(folder / "out" / "model.onnx")
    with pytest.warns(UserWarning, match="unknown categories"):
        expected = pipeline.predict_proba(rows)
    label, probability = session.run(None, graph_inputs(pipeline, rows))
    np.testing.assert_allclose(probability, expected, atol=1e-6)
    assert (label == pipeline.classes_[expected.argmax(axis=1)]).all()


def test_the_graph_of_categories_alone():
    onnxruntime = pytest.importorskip("onnxruntime", reason="needs onnxruntime")
    pytest.importorskip("skl2onnx", reason="needs skl2onnx")
    from bilevax.learn.export import graph_inputs, to_onnx

    rows = odd_table()[["town", "sex", "good"]]
    rows = rows[rows["good"] != ""].assign(good=rows["good"] == "yes")
    rows["many"] = [f"k{i % 70}" for i in range(len(rows))]  # the rare ones are one column
    data = Encoded(prepare(rows, "odd", "good", ["sex"]))
    pipeline = data.served(data.fit(GroupDROClassifier()))
    session = onnxruntime.InferenceSession(to_onnx(pipeline).SerializeToString())
    rows.loc[rows.index[::3], "many"] = "k999"
    label, probability = session.run(None, graph_inputs(pipeline, rows))
    with pytest.warns(UserWarning, match="unknown categories"):
        expected = pipeline.predict_proba(rows)
    np.testing.assert_allclose(probability, expected, atol=1e-6)
    np.testing.assert_array_equal(label, expected.argmax(axis=1))


@pytest.mark.parametrize("classes", [2, 3])
def test_the_graph_of_a_classifier_alone(classes):
    onnxruntime = pytest.importorskip("onnxruntime", reason="needs onnxruntime")
    pytest.importorskip("skl2onnx", reason="needs skl2onnx")
    from bilevax.learn.export import graph_inputs, to_onnx

    x, y, _ = blobs(classes=classes)
    model = GroupDROClassifier().fit(x, y)
    session = onnxruntime.InferenceSession(to_onnx(model).SerializeToString())
    label, probability = session.run(None, graph_inputs(model, x))
    np.testing.assert_allclose(probability, model.predict_proba(x), atol=1e-6)
    np.testing.assert_array_equal(label, model.predict(x))
    with pytest.raises(TypeError, match=r"a classifier of bilevax\.learn"):
        to_onnx(TableReader())


def test_missing_cells_are_served_as_they_were_trained(made):
    """A category without a value was an unknown one, and "?" for a number was an error."""
    _, _, pipeline = made
    marked = odd_table().head(20).assign(town="(missing)", age="?")
    typed = marked.assign(town=None, age=np.nan)
    spaced = marked.assign(town="  ? ", age=" NA ")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        expected = pipeline.predict_proba(marked)
        for rows in (typed, spaced):
            np.testing.assert_array_equal(pipeline.predict_proba(rows), expected)
    onehot = pipeline["encoder"].get_feature_names_out().tolist()
    encoded = pipeline[:2].transform(typed)
    assert (encoded[:, onehot.index("categories__town_(missing)")] == 1).all()


def test_what_is_odd_about_rows_is_told(made, tmp_path, capsys):
    folder, _, _ = made
    rows = odd_table(120, seed=2).assign(sex="f")
    rows.loc[3, ["age", "town", "owner"]] = ["forty", "Oz", ""]
    rows.loc[8, "pay"] = "€ 99.000"
    rows.loc[9, "since"] = "01.01.2031"
    path = written(rows.drop(columns="good"), tmp_path / "new.csv")
    out = tmp_path / "predictions.csv"
    model = folder / "out" / "model.skops"
    assert run("predict", model, path, "--out", out, "--keep", "customer_id") == 0
    said = capsys.readouterr().err
    for words in (
        "Warning: age is no number in 1 of 120 rows",
        "town has a category that training had not in 1 of 120 rows",
        "owner is missing, which it never was in training in 1 of 120 rows",
        "the shares of groups differ from training's by more than chance",
        "sex f 100.0% (training",
    ):
        assert words in said
    found = pd.read_csv(out, keep_default_na=False, dtype=str)
    assert found["customer_id"].tolist() == rows["customer_id"].tolist()
    assert found["warnings"][3].startswith("age is no number; town has a category")
    assert "pay is outside of" in found["warnings"][8]
    assert "since is outside of 2019-01-" in found["warnings"][9]


def test_predict_refuses_what_it_cannot_serve(made, tmp_path, capsys):
    folder, _, _ = made
    model, odd = folder / "out" / "model.skops", folder / "odd.csv"
    lacking = written(odd_table(30).drop(columns=["age", "town"]), tmp_path / "lacking.csv")
    for given, says in (
        ((model, lacking), "no column 'age', 'town', which the model needs; there are"),
        ((odd, odd), "is no model that save_model wrote"),
        ((model, odd, "--keep", "nme"), "--keep: there is no column 'nme'"),
        ((model, odd, "--out", tmp_path / "no" / "x.csv"), "there is no folder"),
    ):
        assert run("predict", *given) == 2
        assert says in capsys.readouterr().err
    for schema in ("{", "{}", "[]"):
        with zipfile.ZipFile(tmp_path / "z.skops", "w") as archive:
            archive.writestr("schema.json", schema)
        with pytest.raises(ValueError, match=r"z\.skops is no model that save_model wrote, or it"):
            load_model(tmp_path / "z.skops")
    with pytest.raises(ValueError, match="none that `bilevax robust` wrote"):
        serve(GroupDROClassifier(), odd_table(30))


def test_a_graph_that_cannot_be_made_is_refused_before_the_fits(made, monkeypatch, capsys):
    folder, _, _ = made
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    call = ("--label", "good", "--group", "sex", "--onnx", "--out", folder / "none")
    assert run("robust", folder / "odd.csv", *call) == 2
    assert "--onnx needs pip install 'bilevax[onnx]'" in capsys.readouterr().err
    assert not (folder / "none").exists()


def test_the_card_says_data_groups_verdict_and_limits(made):
    folder, _, _ = made
    card = (folder / "out" / "card.md").read_text()
    results = json.loads((folder / "out" / "results.json").read_text())
    assert [m["key"] for m in results["methods"]] == ["erm", "reweighted", "dro", "tuned"]
    assert results["loss_against_eta"]["eta"] == []
    for heading in ("## Data", "## Groups", "## Verdict", "## Limits"):
        assert heading in card
    assert "411 rows" in card
    assert "| since | date | 2019-01-" in card
    assert "| town | category | Ely, Köln, Rye | yes |" in card
    for group, right in zip(results["groups"], results["methods"][-1]["groups"]):
        assert f"| {group['name']} | {group['train']} | {group['test']} |" in card
        assert f"{100 * right['value']:.1f}" in card


def test_shares_of_groups_drift_by_more_than_chance_or_not():
    """Pearson's statistic by hand: 60 and 40 against 40 and 60 of 100 is χ² = 8, p = 0.0047."""
    table = lambda f, m: pd.DataFrame({"x": np.arange(f + m) % 7, "sex": ["f"] * f + ["m"] * m})
    reader = TableReader(groups=["sex"]).fit(table(60, 40))
    assert drift(reader, table(40, 60)) == []  # of 1 in 1000 that is too likely
    (said,) = drift(reader, table(36, 64))  # χ² = 200·(60·64 − 40·36)²/(96·104·100²) = 11.54
    assert "p = 0.0007" in said
    assert "sex f 36.0% (training 60.0%)" in said
    large = TableReader(groups=["sex"]).fit(table(60_000, 40_000))
    assert drift(large, table(59_000, 41_000)) == []  # p = 5e-6, but 1 % of the rows only
    assert "p = " in drift(large, table(57_000, 43_000))[0]
    assert "'sex x', 100 of 100 rows, was not in" in drift(reader, table(60, 40).assign(sex="x"))[0]
    assert "no column sex" in drift(reader, table(60, 40)[["x"]])[0]


CELLS = [
    (["1", " 2 ", "?", ""], "number", [1, 2, np.nan, np.nan]),
    (["$1,234.50", "(3)", "-$2", "12 000"], "number", [1234.5, -3, -2, 12000]),
    (["45%", "7.5 %", "N/A"], "number", [0.45, 0.075, np.nan]),
    (["1.234,5", "2,25"], "number", [1234.5, 2.25]),
    (["1.000", "2,5", "-"], "number", [1000, 2.5, np.nan]),
    (["€ 1.234", "€ 999", "-"], "number", [1234, 999, np.nan]),
    (["$1.50", "$999"], "number", [1.5, 999]),
    (["3.142", "2.718"], "number", [3.142, 2.718]),
    (["true", "FALSE", "null"], "truth", [1, 0, np.nan]),
    (["1970-01-03", "1970-01-01T12:00"], "date", [2, 0.5]),
    (["02/01/1970", "31/01/1970"], "date", [1, 30]),
    (["01/02/1970", "01/31/1970"], "date", [1, 30]),
    ([" a", "b ", "None"], "category", ["a", "b", "(missing)"]),
    (["1.0", "2", "A"], "category", ["1", "2", "A"]),
    (["1,5", "1.5"], "category", ["1,5", "1.5"]),
    (["12:30", "13:40"], "category", ["12:30", "13:40"]),
    (["4.533"] * 99 + ["12.500,50"], "number", [4533] * 99 + [12500.5]),
    (["0,125", "1"], "number", [0.125, 1]),
    (["0,125", "1,250"], "number", [0.125, 1.25]),
    (["0.125", "0.875"], "number", [0.125, 0.875]),
    (["1,250", "3"], "number", [1250, 3]),
    (["$3.512", "$3.498"], "number", [3.512, 3.498]),
    (["$20", "30 €"], "category", ["$20", "30 €"]),
    (["45%", "0.45"], "category", ["45%", "0.45"]),
    (["today", "2024-05-31"], "category", ["today", "2024-05-31"]),
    (["31.01.1970", "1970-01-02"], "date", [30, 1]),
]


@pytest.mark.parametrize(("cells", "kind", "says"), CELLS)
def test_cells_say_what_they_say(cells, kind, says):
    for column in (pd.Series(cells, dtype=object), pd.Series(cells, dtype="category")):
        found = kind_of(column)
        assert found["kind"] == kind
        values, odd = read_as(column, found)
        assert not odd.any()
        if kind == "category":
            assert values.tolist() == says
        else:
            np.testing.assert_array_equal(values, says)


@pytest.mark.parametrize(
    ("cells", "odd", "kind"),
    [
        ([f"{i / 8:.3f}".replace(".", ",") for i in range(99)], "k.A.", "number"),
        (pd.date_range("2020-01-01", periods=99).strftime("%Y-%m-%d").tolist(), "n/k", "date"),
        (pd.date_range("2020-01-01", periods=99).strftime("%d/%m/%Y").tolist(), "9999", "date"),
    ],
)
def test_one_word_among_many_numbers_or_dates_is_missing(cells, odd, kind):
    reader = TableReader()
    found = reader.fit_transform(pd.DataFrame({"x": [*cells, odd]}))["x"]
    assert found.isna().tolist() == [False] * 99 + [True]
    assert f"x has 1 values that are no {kind}s, such as {odd!r}" in reader.notes_[-1]


@pytest.mark.parametrize("odd", ["today", "now", "2024", "9999-12-31", "0024-05-01", "1600-01-01"])
def test_what_is_no_date_is_missing_when_it_is_served(odd):
    reader = TableReader().fit(pd.DataFrame({"d": ["31.01.2024", "05.06.2024", "06.06.2024"]}))
    rows = pd.DataFrame({"d": [odd, "2024-06-05", datetime.date(2024, 6, 5)]}, dtype=object)
    with pytest.warns(UserWarning, match=f"d: 1 of 3 values are no date .'{odd}'. and count as"):
        found = reader.transform(rows)["d"]
    np.testing.assert_array_equal(found, [np.nan, 19879, 19879])
    assert [str(f) for f in examine(reader, rows)] == ["d is no date in 1 of 3 rows"]


def test_choices_out_of_a_list_say_nothing_of_other_columns():
    table = pd.DataFrame({"a": ["1.000", "12.500", "3"], "likes": ["1,2", "3", "2,4"]})
    assert TableReader().fit_transform(table)["a"].tolist() == [1, 12.5, 3]
    typed = pd.DataFrame({"a": pd.Series([0.125, 1.375, 3], dtype=object), "b": ["7,5", "1", "2"]})
    assert TableReader().fit_transform(typed)["a"].tolist() == [0.125, 1.375, 3]


@pytest.mark.parametrize(
    ("cells", "note"),
    [
        (["12.500", "3", "4"], "x is read with a decimal comma, as b has one: '12.500' is 12500; "
         "by itself '12.500' is 12.5"),
        (["31,5", "3", "4"], "x has numbers that are written as 1.234,5: '31,5' is 31.5"),
        (["5 %", "3 %", "4 %"], "x has numbers with a unit (%): '5 %' is 0.05"),
        (["$5", "3", "4"], "x has numbers with a unit (usd): '$5' is 5"),
        (["$5", "3 EUR", "4"], "x mixes eur, no unit, usd: its words are categories, not numbers"),
    ],
)  # fmt: skip
def test_notes_show_how_numbers_were_read(cells, note):
    reader = TableReader().fit(pd.DataFrame({"x": cells, "b": ["7,5", "1", "2"]}))
    assert note in reader.notes_


def test_only_the_training_part_is_what_training_held():
    n = 60
    part = np.repeat(["train", "validation", "test"], 20)
    table = pd.DataFrame(
        {
            "x": np.where(part == "test", 1000.0, np.arange(n) % 7),
            "town": np.where(part == "test", "Oz", np.where(np.arange(n) % 3, "Ely", "Rye")),
            "late": np.where(part == "train", np.nan, np.arange(n) % 5),
            "gap": np.where(part == "test", np.nan, np.arange(n) % 4),
            "sex": ["f", "m"] * 30,
            "y": ["no", "no", "yes", "yes"] * 15,
            "part": part,
        }
    )
    made = prepare(table, "t", "y", ["sex"], split="part", least=1)
    known = made.reader.columns_
    assert (known["x"]["low"], known["x"]["high"]) == (0, 6)
    assert known["town"]["values"] == ["Ely", "Rye"]
    assert not known["gap"]["missing"]
    assert "left out, because they are constant in the training part: late" in made.notes
    assert "late" not in made.parts["test"].X
    assert made.reader.group_counts_ == {"sex f": 10, "sex m": 10}
    rows = table[part == "test"]
    assert sorted(str(found) for found in examine(made.reader, rows)) == [
        "gap is missing, which it never was in training in 20 of 20 rows",
        "town has a category that training had not in 20 of 20 rows",
        "x is outside of 0 to 6 in 20 of 20 rows",
    ]


def test_p_of_small_counts_is_fishers():
    """Of two groups the draws are hypergeometric, and SciPy sums those that are as unlikely."""
    counts = np.array([[990, 10], [0, 1]])
    exact = stats.hypergeom(1001, 11, 1).sf(0)  # only that one row of the rare group is as odd
    assert homogeneity(counts) == pytest.approx(exact, rel=0.3)  # 11/1001 of 9999 draws
    few = np.array([[60, 3], [5, 4]])
    law = stats.hypergeom(72, 7, 9)
    m = np.arange(8)
    odd = np.abs(m - law.mean()) >= np.abs(4 - law.mean()) - 1e-9
    assert homogeneity(few) == pytest.approx(law.pmf(m[odd]).sum(), rel=0.3)
    reader = TableReader(groups=["g"]).fit(pd.DataFrame({"x": range(9), "g": ["a", "b", "c"] * 3}))
    assert drift(reader, pd.DataFrame({"x": [], "g": []})) == []


def test_columns_of_any_name_and_an_empty_one_have_a_graph(tmp_path, monkeypatch):
    onnxruntime = pytest.importorskip("onnxruntime", reason="needs onnxruntime")
    pytest.importorskip("skl2onnx", reason="needs skl2onnx")
    from bilevax.learn.export import graph_inputs, save_onnx

    x, y, groups = blobs()
    names = ["label", "probabilities", "a b", "a_b", ""]
    rows = pd.DataFrame(x, columns=names).assign(c=np.where(x[:, 0] > 0, "p", "q"))
    rows.loc[: len(y) // 2, "label"] = np.nan  # none of the rows that the encoder sees has one
    reader = TableReader()
    read_rows = reader.fit_transform(rows)
    half = slice(0, len(y) // 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of scikit-learn: the column is skipped
        encode = encoder(read_rows).fit(read_rows[half])
        model = GroupDROClassifier().fit(encode.transform(read_rows), y, groups)
        pipeline = make_pipeline(reader, encode, model)
        expected = pipeline.predict_proba(rows)
    save_onnx(pipeline, tmp_path / "m.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "m.onnx")
    assert [source.name for source in session.get_inputs()] == [f"column{i}" for i in range(6)]
    _, probability = session.run(None, graph_inputs(pipeline, rows))
    np.testing.assert_allclose(probability, expected, atol=1e-6)
    monkeypatch.setattr(onnxruntime, "InferenceSession", lambda *given, **named: 1 / 0)
    with pytest.raises(ValueError, match="graph of this model cannot be loaded: division"):
        save_onnx(pipeline, tmp_path / "n.onnx")
    assert not (tmp_path / "n.onnx").exists()


def test_results_never_replace_what_came_in_between(tmp_path, monkeypatch):
    out = tmp_path / "out"

    def written_meanwhile():
        with new_folder(out, True, FILES) as folder:
            (folder / "card.md").write_text("card")
            out.mkdir()
            (out / "thesis.txt").write_text("mine")

    with pytest.raises(ValueError, match=r"holds other files .thesis.*the results are in") as e:
        written_meanwhile()
    assert (out / "thesis.txt").read_text() == "mine"
    assert (Path(str(e.value).split("results are in ")[1]) / "card.md").read_text() == "card"
    real, link = tmp_path / "real", tmp_path / "link"
    real.mkdir()
    link.symlink_to(real)
    with new_folder(link, False, FILES) as folder:
        (folder / "card.md").write_text("card")
    assert link.is_symlink()
    assert [path.name for path in real.iterdir()] == ["card.md"]
    monkeypatch.chdir(real)
    for here in (Path(), Path(".."), real):
        with pytest.raises(ValueError, match="is the folder you are in, or holds it"):
            check_folder(here, True, FILES)


@pytest.mark.parametrize(
    ("words", "classes"),
    [
        (["0", "0.5", "1"], ["0", "0.5", "1"]),
        (["01", "1", "2"], ["01", "1", "2"]),
        (["9007199254740993", "9007199254740992"], ["9007199254740992", "9007199254740993"]),
        (["1e400", "1"], ["1", "1e400"]),
        (["1.0", "2"], [1, 2]),
    ],
)
def test_labels_are_numbers_only_where_each_word_is_one(words, classes):
    table = pd.DataFrame({"y": words * 30, "x": np.arange(30 * len(words)) % 11})
    table["g"] = np.where(np.arange(len(table)) // len(words) % 2, "a", "b")
    made = prepare(table, "t", "y", ["g"], least=1)
    assert np.unique(made.parts["train"].y).tolist() == classes
    with pytest.raises(ValueError, match=r"missing in 2 of .* \('-' counts as missing\); --drop"):
        prepare(table.assign(y=["-", "-", *table["y"][2:]]), "t", "y", ["g"])


@pytest.mark.parametrize(
    ("name", "numbers", "kept"),
    [
        ("age", range(18, 78), True),
        ("steps", range(60), False),
        ("row", range(7, 67), False),
        ("customer_id", [*range(500, 559), 500], False),
        ("house_number", [7, 1, 90, 33, 12], True),
        ("house_number", [i % 40 for i in range(60)], True),
    ],
)
def test_numbers_that_differ_are_no_ids_by_that_alone(name, numbers, kept):
    table = pd.DataFrame({name: numbers, "z": np.arange(len(numbers)) % 3})
    assert (name in TableReader().fit(table).columns_) == kept


def test_typed_cells_are_read_as_text_is():
    texts = {
        "f": ["1,5", "2.000,5", ""],
        "n": ["1", "2", ""],
        "c": ["1", "2", ""],
        "t": ["True", "False", ""],
    }
    texts |= {"d": ["05.01.2020", "06.01.2020", ""]}
    typed = pd.DataFrame(
        {
            "f": [1.5, 2000.5, np.nan],
            "n": pd.array([1, 2, pd.NA], dtype="Int64"),
            "c": [1.0, 2.0, np.nan],
            "t": pd.array([True, False, pd.NA], dtype="boolean"),
            "d": pd.to_datetime(["2020-01-05", "2020-01-06", None]),
        }
    )
    for name, kind in (
        ("f", {"kind": "number", "decimal": ","}),
        ("n", {"kind": "number", "decimal": "."}),
        ("c", {"kind": "category"}),
        ("t", {"kind": "truth"}),
        ("d", {"kind": "date", "written": "%d.%m.%Y"}),
    ):
        expected, _ = read_as(pd.Series(texts[name]), kind)
        found, odd = read_as(typed[name], kind)
        assert not odd.any()
        np.testing.assert_array_equal(found, expected)


def test_one_decimal_comma_says_what_points_mean_in_other_columns():
    table = pd.DataFrame({"a": ["1.000", "12.500", "3"], "b": ["7,5", "2,5", "1"]})
    found = TableReader().fit_transform(table)
    assert found["a"].tolist() == [1000, 12500, 3]
    assert TableReader().fit_transform(table[["a"]])["a"].tolist() == [1, 12.5, 3]


def test_a_few_words_among_many_numbers_are_told():
    cells = [str(i / 7) for i in range(200)] + ["unknown", "see note"]
    reader = TableReader()
    found = reader.fit_transform(pd.DataFrame({"x": cells}))
    assert found["x"].isna().sum() == 2
    assert reader.notes_ == [
        "x has 2 values that are no numbers, such as 'unknown', which count as missing"
    ]
    with pytest.warns(UserWarning, match="x: 1 of 2 values are no number .'abc'. and count as"):
        assert reader.transform(pd.DataFrame({"x": ["1", "abc"]}))["x"].tolist()[0] == 1
    with pytest.raises(TypeError, match="a table with named columns"):
        reader.transform(np.ones((2, 1)))
    with pytest.raises(ValueError, match="the column y holds neither text nor numbers"):
        TableReader().fit(pd.DataFrame({"y": [[1], [2]]}))


@pytest.mark.parametrize("between", [",", ";", "\t", "|"])
def test_separators_are_found(tmp_path, between):
    rows = [["a", "b", "c"], ["15", "x", ""], ['"2,5"', '"y; z"', "u"]]
    text = "".join(between.join(row) + "\n" for row in rows)
    (tmp_path / "t.csv").write_text(text)
    table, _ = read(tmp_path / "t.csv")
    assert table.to_dict("list") == {"a": ["15", "2,5"], "b": ["x", "y; z"], "c": ["", "u"]}


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "cp1252"])
def test_encodings_are_found(tmp_path, encoding):
    (tmp_path / "t.csv").write_bytes("größe,town\n1,Köln\n".encode(encoding))
    table, notes = read(tmp_path / "t.csv")
    assert table.columns.tolist() == ["größe", "town"]
    assert table["town"].tolist() == ["Köln"]
    assert bool(notes) == (encoding == "cp1252")


@pytest.mark.parametrize(
    ("text", "given", "says"),
    [
        ("a~b\n1~2\n", {}, None),
        ("a~b\n1~2\n", {"sep": "~"}, {"a": ["1"], "b": ["2"]}),
        ("a,b\n1,2\n", {"sep": ";"}, "one column only, 'a,b'; say what separates with --sep"),
        ("a,b\n1,2\n", {"sep": ";;"}, "--sep must be one character"),
        ("a,b\n1,2\n", {"encoding": "utf-99"}, "no encoding 'utf-99'"),
        ("a,b,a\n1,2,3\n", {}, "has the column a more than once"),
        ("\n\n", {}, "is empty"),
        ("a~b,c\n1,2,\n\n3,4,\n", {}, {"a~b": ["1", "3"], "c": ["2", "4"]}),
        ("x\n1,5\n", {"sep": ";"}, {"x": ["1,5"]}),
        ("x\n1,5\n", {}, "line 2 has 2 cells, and the header has 1; say what separates"),
        ("Report\n\na,b\n1,2\n", {}, "line 3 has 2 cells, and the header has 1"),
        ("a,b\n1,2,\n\n3,4\n", {}, "line 4 has no separator at its end"),
        ("a,b\n1,2\n3,4,\n", {}, "line 3 has 3 cells, and the header has 2"),
        ("a,b\n1,2,,\n", {}, "line 2 has 4 cells"),
        ("a,b\n1,2,3\n", {}, "line 2 has 3 cells"),
        ("a,b\n1," + "x" * 140_000, {}, "cannot be read: field larger than field limit"),
    ],
)
def test_what_separates_and_encodes_can_be_said(tmp_path, text, given, says):
    (tmp_path / "t.csv").write_text(text)
    if isinstance(says, str):
        with pytest.raises(ValueError, match=says):
            read(tmp_path / "t.csv", **given)
    else:
        table, _ = read(tmp_path / "t.csv", **given)
        assert table.to_dict("list") == (says or {"a~b": ["1~2"]})


def test_quantities_are_no_groups():
    table = odd_table()[["age", "good", "town"]]
    table = table[table["good"] != ""].assign(when=odd_table()["since"])
    for column in ("age", "when"):
        with pytest.raises(ValueError, match=rf"group column {column} has \d+ .*pandas\.qcut"):
            prepare(table, "odd", "good", [column])
    missing = table.assign(town=pd.array(table["town"], dtype="string").astype(object))
    missing["town"] = missing["town"].where(missing["town"] != "", pd.NA)
    found = prepare(missing, "odd", "good", ["town"], least=1)
    assert "good yes, town (missing)" in found.groups


def test_small_products_have_one_thread_and_large_ones_all(monkeypatch):
    """What the BLAS is told during a fit, by the pools that threadpoolctl sees."""
    pools = lambda: [p for p in threadpoolctl.threadpool_info() if p["user_api"] == "blas"]
    most = lambda: max(pool["num_threads"] for pool in pools())  # some have one thread only
    seen = []

    def watched(*given):
        seen.append(most())
        return fit_lower(*given)

    fit_lower = _base.fit_lower
    monkeypatch.setattr(_base, "fit_lower", watched)
    x, y, groups = blobs()
    with threadpoolctl.threadpool_limits(2, user_api="blas"):
        GroupDROClassifier().fit(x, y, groups)
        assert most() == 2
        with _threads.threads_for(*x.shape):  # the last one to leave lifts the limit
            GroupDROClassifier().fit(x, y, groups)
            assert most() == 1
        monkeypatch.setattr(_threads, "SMALL", len(y) * x.shape[1] ** 2 - 1)
        GroupDROClassifier().fit(x, y, groups)
        assert most() == 2
    assert seen == [1, 1, 2]


def test_pipelines_and_searches_are_saved_or_refused(tmp_path):
    x, y, groups = blobs()
    X = pd.DataFrame(x, columns=list("abcde")).assign(t=np.where(x[:, 0] > 0, "p", "q"))
    path = tmp_path / "m.skops"
    with sklearn.config_context(enable_metadata_routing=True):
        model = GroupDROClassifier().set_fit_request(groups=True)
        columns = make_column_transformer(
            (StandardScaler(), make_column_selector(dtype_include=float)), (OneHotEncoder(), ["t"])
        )
        pipeline = make_pipeline(columns, model)
        search = GridSearchCV(pipeline, {"groupdroclassifier__eta": [0.1, 10.0]}, cv=2)
        search.fit(X, y, groups=groups)
        several = GridSearchCV(make_pipeline(model), {"groupdroclassifier": [model]}, cv=2)
        with pytest.raises(ValueError, match="parts hold one another without end"):
            save_model(several.fit(x, y, groups=groups), tmp_path / "none.skops")
        save_model(search, path)
        again = load_model(path)
        np.testing.assert_array_equal(again.predict_proba(X), search.predict_proba(X))
        assert model.get_metadata_routing().fit.requests == {"groups": True, "sample_weight": None}
        odd = make_pipeline(FunctionTransformer(lambda v: v), GroupDROClassifier()).fit(x, y)
        before = path.read_bytes()
        with pytest.raises(ValueError, match=r"cannot be saved.*lambda.*of a search save best_"):
            save_model(odd, path)
        assert path.read_bytes() == before


def test_weights_in_the_place_of_groups_are_refused():
    x, y, groups = blobs()
    weights = np.random.default_rng(0).random(len(y))
    for given in (weights, np.ones(len(y))):
        for model in (GroupDROClassifier(), TunedGroupDROClassifier()):
            with pytest.raises(ValueError, match=r"weights rather than groups.*sample_weight="):
                model.fit(x, y, given)
    missing = pd.array(np.where(groups == 0, pd.NA, "a"), dtype="string")
    with pytest.raises(ValueError, match="rows have no group"):
        GroupDROClassifier().fit(x, y, missing)
