"""Tables and data sets: what is read, and what is said about what cannot be."""

import gzip
import types

import numpy as np
import pandas as pd
import pytest
import skops.io

from bilevax.learn import datasets
from bilevax.learn.delimited import read
from bilevax.learn.models import load_model, save_model
from bilevax.learn.reader import TableReader
from bilevax.learn.table import PARTS, encoder, prepare
from learn_problems import SHARED


def people(n=300, seed=0):
    draw = np.random.default_rng(seed)
    hired = draw.random(n) < 0.5
    return pd.DataFrame(
        {
            "age": draw.normal(40, 10, n) + 5 * hired,
            "town": draw.choice(["Ely", "Rye", "Bath"], n),
            "sex": draw.choice(["f", "m"], n),
            "hired": np.where(hired, "yes", "no"),
        }
    )


def prepared(table, **given):
    return prepare(table, "people", "hired", ["sex"], **given)


def test_parts_have_their_share_of_every_group():
    table = prepared(people())
    assert table.groups.tolist() == [
        "hired no, sex f", "hired no, sex m", "hired yes, sex f", "hired yes, sex m",
    ]  # fmt: skip
    sizes = {p: len(table.parts[p].y) for p in PARTS}
    assert sum(sizes.values()) == 300
    assert sizes["train"] == pytest.approx(180, abs=3)
    for part in table.parts.values():
        assert set(part.groups) == set(table.groups)
        words = [f"hired {y}, sex {s}" for y, s in zip(part.y, part.X["sex"])]
        assert words == part.groups.tolist()
    again = prepared(people())
    assert again.parts["test"].X.equals(table.parts["test"].X)
    assert not prepared(people(), seed=1).parts["test"].X.equals(table.parts["test"].X)


def test_groups_of_columns_alone():
    table = prepared(people(), with_label=False)
    assert table.groups.tolist() == ["sex f", "sex m"]


@pytest.mark.parametrize("words", [("train", "val", "test"), (0, 1, 2), (0.0, 1.0, 2.0)])
def test_a_column_says_the_parts(words):
    table = people()
    third = np.arange(300) % 3
    table["part"] = [words[i] for i in third]
    found = prepared(table, split="part")
    assert [len(found.parts[p].y) for p in PARTS] == [100, 100, 100]
    assert "part" not in found.parts["train"].X


def test_validation_rows_are_taken_from_the_training_rows_where_the_column_has_none():
    table = people()
    table["part"] = np.where(np.arange(300) < 200, "train", "test")
    found = prepared(table, split="part")
    assert [len(found.parts[p].y) for p in PARTS] == [150, 50, 100]


def test_missing_values_and_categories_become_features():
    table = people()
    table.loc[::7, "age"] = np.nan
    table.loc[::5, "town"] = None
    train = prepared(table).parts["train"].X
    coder = encoder(train).fit(train)
    names = coder.get_feature_names_out().tolist()
    assert any("missingindicator" in name for name in names)
    assert "categories__town_(missing)" in names
    assert np.isfinite(coder.transform(train)).all()
    new = train.head(2).assign(town="Oz")
    with pytest.warns(UserWarning, match="unknown categories"):
        assert np.isfinite(coder.transform(new)).all()


def with_column(name, values):
    table = people()
    table[name] = values
    return table


BAD = [
    (lambda: with_column("copy", people()["hired"].map({"yes": 1, "no": 0})), {},
     "copy is a copy of the label hired; leave it out with --drop copy"),
    (lambda: with_column("age", np.where(np.arange(300) < 5, np.inf, 1)), {},
     "age is infinite in 5 rows"),
    (lambda: with_column("hired", "yes"), {}, "label hired is 'yes' in every row"),
    (lambda: with_column("hired", np.where(np.arange(300) < 4, None, people()["hired"])), {},
     "label hired is missing in 4 of 300 rows; --drop-unlabelled leaves them out"),
    (lambda: with_column("hired", np.arange(300.0)), {}, "has 300 different values"),
    (lambda: with_column("sex", np.where(np.arange(300) < 8, "x", people()["sex"])), {},
     "'hired no, sex x' has . rows in the train part.*no rows in the test part"),
    (lambda: with_column("sex", np.repeat([f"s{i}" for i in range(30)], 10)), {},
     r"'hired \w+, sex s\d+' has . rows.*; and \d+ more\. Merge groups"),
    (people, {"split": "town"}, "split column town has values other than.*Bath, Ely, Rye"),
    (people, {"split": "Sex"}, "no column 'Sex'; did you mean 'sex'"),
    (people, {"drop": ["tow"]}, "no column 'tow'; did you mean 'town'"),
    (people, {"drop": ["zzzz"]}, "no column 'zzzz'; there are age, town, sex, hired"),
    (people, {"drop": ["age", "town", "sex"]}, "no column to learn from"),
]  # fmt: skip


@pytest.mark.parametrize(("table", "given", "says"), BAD)
def test_what_is_wrong_with_a_table_is_said(table, given, says):
    with pytest.raises(ValueError, match=says):
        prepared(table(), **given)


def test_the_label_makes_no_groups_of_its_own():
    with pytest.raises(ValueError, match="hired is the label"):
        prepare(people(), "people", "hired", ["hired"])


def test_what_was_left_out_is_told():
    many = [f"r{i % 150}" for i in range(300)]
    table = with_column("same", 1).assign(empty=np.nan, town=[f"r{i}" for i in range(300)])
    table = table.assign(street=many, number=7 * np.arange(300), when=np.arange(1, 301))
    table["days"] = np.arange(5, 305)
    table["Unnamed: 0"] = np.random.default_rng(0).permutation(300)
    found = prepared(table)
    assert "left out, because they are constant: same, empty" in found.notes
    assert any(note.startswith("street has 150 categories") for note in found.notes)
    for name, why in {
        "town": "it is an id: nearly every row has a value of its own",
        "number": "it is an id: nearly every row has a number of its own",
        "when": "it numbers the rows",
        "Unnamed: 0": "it numbers the rows",
    }.items():
        assert f"{name} is left out, because {why}" in found.notes
    assert set(found.parts["train"].X) == {"age", "sex", "street", "days"}


def test_a_dropped_column_still_makes_groups():
    found = prepared(people(), drop=["sex"])
    assert "sex" not in found.parts["train"].X
    assert len(found.groups) == 4


def test_files_of_all_kinds_hold_the_same(tmp_path):
    table = people()
    table.to_csv(tmp_path / "a.csv", index=False)
    table.to_csv(tmp_path / "a.tsv", index=False, sep="\t")
    table.to_parquet(tmp_path / "a.parquet")
    with gzip.open(tmp_path / "a.csv.gz", "wt") as file:
        table.to_csv(file, index=False)
    for name in ("a.csv", "a.tsv", "a.parquet", "a.csv.gz"):
        found = TableReader().fit_transform(read(tmp_path / name)[0])
        np.testing.assert_allclose(found["age"], table["age"])
        assert found["town"].tolist() == table["town"].tolist()


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("empty.csv", "", "is empty"),
        ("header.csv", "a,b\n", "has a header but no rows"),
        ("rows.xlsx", "x", "must end in .csv, .tsv or .parquet"),
        ("ragged.csv", "a,b\n1,2\n1,2,3\n", "cannot be read"),
        ("bad.parquet", "no parquet", "cannot be read"),
    ],
)
def test_files_that_cannot_be_read_are_named(tmp_path, name, text, says):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ValueError, match=f"{name}.*{says}"):
        read(path)
    with pytest.raises(ValueError, match="there is no file"):
        read(tmp_path / "absent.csv")


def needs(name):
    path = SHARED / name
    return pytest.param(path, marks=pytest.mark.skipif(not path.exists(), reason=f"needs {name}"))


@pytest.mark.parametrize("path", [needs("adult.csv.gz")])
def test_adult(path):
    by_sex, by_race = (datasets.load_adult(path, a) for a in ("sex", "race"))
    assert by_sex.X.shape == (48842, 13)
    assert np.unique(by_sex.groups, return_counts=True)[1].tolist() == [14423, 22732, 1769, 9918]
    assert len(np.unique(by_race.groups)) == 6
    assert by_sex.X["workclass"].isna().sum() == 2799


@pytest.mark.parametrize("path", [needs("law_school.csv")])
def test_law_school(path):
    data = datasets.load_law_school(path)
    assert len(data.table) == 21791
    assert "ZFYA" not in data.X
    counts = dict(zip(*np.unique(data.groups, return_counts=True)))
    assert counts == {
        "passed no, race Black": 490,
        "passed no, race other": 1941,
        "passed yes, race Black": 792,
        "passed yes, race other": 18568,
    }
    assert len(np.unique(datasets.load_law_school(path, "sex").groups)) == 4


@pytest.mark.parametrize("path", [needs("compas.csv")])
def test_compas(path):
    data = datasets.load_compas(path)
    assert len(data.table) == 7214
    assert "decile_score" not in data.X
    assert np.unique(data.groups, return_counts=True)[1].tolist() == [1795, 2168, 1901, 1350]


def test_digits_have_a_mark_that_is_right_as_often_as_asked():
    data = datasets.load_digits(0.9)
    right = (data.table["mark"] == "yes") == (data.table["digit"] == "odd")
    assert np.mean(right) == pytest.approx(0.9, abs=0.02)
    assert data.X.shape == (1797, 65)
    with pytest.raises(ValueError, match="correlation must be a probability"):
        datasets.load_digits(1.5)


OPENML = {
    "load_adult": pd.DataFrame(
        {"age": [1, 2], "education-num": [3, 4], "sex": ["Male", "Female"], "fnlwgt": [1, 2],
         "race": ["White", "Amer-Indian-Eskimo"], "workclass": ["?", "Private"],
         "class": ["<=50K", ">50K"]}
    ),
    "load_compas": pd.DataFrame(
        {"sex": [0, 1], "age": [20, 30], "priors_count": [0, 1], "race_African-American": [1, 0],
         "race_Caucasian": [0, 1], "twoyearrecid": [1, 0]}
    ),
    "load_law_school": pd.DataFrame(
        {"lsat": [30, 40], "ugpa": [3.0, 3.5], "race1": ["black", "white"],
         "gender": ["male", "female"], "bar": ["TRUE", "FALSE"], "ugpagt3": ["TRUE", "FALSE"]}
    ),
}  # fmt: skip


@pytest.mark.parametrize("loader", OPENML)
def test_copies_of_openml_are_read_alike(monkeypatch, loader):
    """With frames of the columns that OpenML documents; the net itself is not asked."""
    asked = []

    def fetch(**given):
        asked.append(given)
        return types.SimpleNamespace(frame=OPENML[loader].copy())

    monkeypatch.setattr("sklearn.datasets.fetch_openml", fetch)
    data = getattr(datasets, loader)()
    assert asked
    assert len(np.unique(data.groups)) == 2
    assert not {"class", "twoyearrecid", "bar", "ugpagt3", "fnlwgt"} & set(data.table)
    monkeypatch.setitem(OPENML, loader, pd.DataFrame({"other": [1]}))
    with pytest.raises(ValueError, match="the table has no column"):
        getattr(datasets, loader)()


@pytest.mark.parametrize("loader", OPENML)
def test_attributes_are_known_ones(loader):
    with pytest.raises(ValueError, match="attribute must be one of"):
        getattr(datasets, loader)(attribute="height")


def test_a_model_of_strange_types_is_not_loaded(tmp_path):
    odd = {"a": types.SimpleNamespace(b=1)}
    with pytest.raises(ValueError, match=r"cannot be saved.*types\.SimpleNamespace\. Leave out"):
        save_model(odd, tmp_path / "odd.skops")
    assert list(tmp_path.iterdir()) == []
    skops.io.dump(odd, tmp_path / "odd.skops")
    with pytest.raises(ValueError, match=r"types that are not ours: types\.SimpleNamespace"):
        load_model(tmp_path / "odd.skops")
