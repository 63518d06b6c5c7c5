"""The trainer and `bilevax deep`, on images of a few pixels."""

import csv
import dataclasses
import errno
import json
import os
import random
import re
import shutil
from contextlib import nullcontext
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from bilevax.cli import main
from bilevax.deep import (
    Interrupted,
    Optimizer,
    Settings,
    ablate,
    encoder,
    evaluate,
    load_encoder,
    networks,
    stationarity,
    train,
    training,
)
from bilevax.deep import checkpoints as checkpoints_module
from bilevax.deep import settings as settings_module
from bilevax.deep.checkpoints import Checkpoints
from bilevax.deep.devices import Devices
from bilevax.deep.evaluation import results_table
from bilevax.deep.feed import Feed, Rows, View, accuracies
from bilevax.deep.methods import direction
from bilevax.deep.settings import METHODS, from_dict, images_of, method_of, model_of, read_settings
from bilevax.deep.tables import SPLITS
from bilevax.deep.training import Run
from deep_runs import COUNTS, arrays, same, settings, small_cnn, write_images


@pytest.fixture(scope="module", autouse=True)
def small():
    """A small network and few minibatches for certificates: most of the time is compilation."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(networks.ENCODERS, "cnn", small_cnn)
        patch.setattr(stationarity, "BATCHES", 8)
        yield


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return write_images(tmp_path_factory.mktemp("images"))


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory):
    """One uninterrupted run."""
    out = tmp_path_factory.mktemp("run") / "whole"
    return train(settings(data, out), show=False)


def folder_of(trained) -> Path:
    return Path(trained.results["settings"]["out"])


# What a run leaves


def test_a_run_leaves_results_a_model_checkpoints_and_logs(trained):
    folder, results = folder_of(trained), trained.results
    assert results["counts"]["train"] == list(COUNTS["train"])
    assert results["steps"] == 3 * -(-sum(COUNTS["train"]) // 8)
    assert results["passes_per_step"] == {"forward": 1, "backward": 1}
    assert results["images_per_step"] == 16
    assert len(results["history"]) == 3
    assert json.loads((folder / "results.json").read_text()) == json.loads(json.dumps(results))
    assert list((folder / "logs").glob("events*"))
    worst = [epoch["validation"]["worst"] for epoch in results["history"]]
    assert results["accuracy"]["validation"]["worst"] == max(worst)
    assert results["best_step"] == results["history"][int(np.argmax(worst))]["step"]
    found = results["stationarity"]
    lines = ("stationarity", "response_x2", "response_z1", "response_z2", "gap")
    assert found["epsilon"] == max(found[name] for name in lines) >= found["estimated_epsilon"]
    assert (found["confidence"], found["batches"], found["rho"]) == (0.95, 8, 1)


def test_the_saved_model_is_the_one_that_was_judged(trained, data):
    """Against NumPy on the model's own file, row by row."""
    folder, images = folder_of(trained), images_of(trained_settings(trained))
    stored = load_encoder(encoder("cnn", jax.random.key(5)), folder / "model.safetensors")
    head = arrays(folder)["fc.weight"]
    mean, deviation = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])
    for split in COUNTS:
        rows = images.rows(split)
        pixels = (images.decoded(rows) / 255 - mean) / deviation
        features, _ = stored(jnp.asarray(pixels, jnp.float32), "running")
        logits = np.asarray(features) @ head.T
        right = np.argmax(logits, axis=1) == images.label[rows]
        groups = [right[images.group[rows] == g].mean() for g in range(4)]
        found = trained.results["accuracy"][split]
        np.testing.assert_allclose(found["groups"], groups)
        np.testing.assert_allclose([found["average"], found["worst"]], [right.mean(), min(groups)])
        shifted = logits - logits.max(axis=1, keepdims=True)
        own = shifted[np.arange(len(rows)), images.label[rows]]
        losses = np.log(np.exp(shifted).sum(axis=1)) - own
        np.testing.assert_allclose(found["loss"], losses.mean(), rtol=1e-4)


def trained_settings(trained) -> Settings:
    return from_dict(trained.results["settings"], "results")


def test_evaluate_repeats_what_training_found(trained):
    found = evaluate(folder_of(trained))
    assert found["accuracy"] == trained.results["accuracy"]
    assert found["stationarity"] == trained.results["stationarity"]
    last = evaluate(folder_of(trained), checkpoint="last")
    assert last["step"] == trained.results["steps"]


def test_evaluate_on_other_groups_and_on_other_classes(trained, data, tmp_path):
    shutil.copytree(data.parent, tmp_path / "data")
    table = tmp_path / "data" / "images.csv"
    rows = list(csv.reader(data.read_text().splitlines()))

    def write(change):
        with table.open("w", newline="") as file:
            csv.writer(file).writerows([rows[0], *map(change, rows[1:])])

    write(lambda row: [*row[:2], row[1], row[3]])  # groups are the classes
    found = evaluate(folder_of(trained), data=table)
    assert found["groups"] == ["class 0", "class 1"]
    assert found["stationarity"] is None  # the weights are of other groups
    for split, counts in COUNTS.items():
        were = trained.results["accuracy"][split]
        assert found["accuracy"][split]["average"] == were["average"]
        weighted = np.multiply(were["groups"], counts).reshape(2, 2).sum(axis=1)
        both = weighted / np.reshape(counts, (2, 2)).sum(axis=1)
        np.testing.assert_allclose(found["accuracy"][split]["groups"], both)
    write(lambda row: [row[0], row[2], *row[2:]])  # classes are the groups
    with pytest.raises(ValueError, match=r"classes class 0, class 1, but .* 0 at 0, 0 at 1"):
        evaluate(folder_of(trained), data=table)


# Stopping and going on


class Killed(BaseException):
    """What no code catches by name."""


def test_stopped_ten_times_at_random_and_resumed_is_the_same_run(trained, tmp_path, monkeypatch):
    """At any chunk, before, within or after the writing of a checkpoint."""
    rng = random.Random(0)
    own = dataclasses.replace(trained_settings(trained), out=tmp_path / "run")
    left = [0]

    def dying(function):
        def called(*args, **kwargs):
            left[0] -= 1
            if left[0] == 0:
                raise Killed
            found = function(*args, **kwargs)
            left[0] -= 1
            if left[0] == 0:
                raise Killed
            return found

        return called

    monkeypatch.setattr(Feed, "advance", dying(Feed.advance))
    for name in ("_write_arrays", "_digests", "write_json"):
        monkeypatch.setattr(checkpoints_module, name, dying(getattr(checkpoints_module, name)))
    stops = 0
    for stop in range(200):
        # The later stops leave more room, or some would never get past the first checkpoint.
        left[0] = rng.randint(1, 12 + stop) if stops < 10 else 10**9
        try:
            train(own, resume=True, show=False)
            if stops >= 10:
                break
            shutil.rmtree(own.out)
        except Killed:
            stops += 1
    assert stops >= 10
    same(own.out, folder_of(trained))


def test_a_finished_run_that_is_resumed_is_only_judged_again(trained, tmp_path):
    shutil.copytree(folder_of(trained), tmp_path / "run")
    again = train(
        dataclasses.replace(trained_settings(trained), out=tmp_path / "run"),
        resume=True, show=False,
    )  # fmt: skip
    assert again.results["accuracy"] == trained.results["accuracy"]
    assert again.results["seconds"] == trained.results["seconds"]


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(trained, tmp_path):
    out = tmp_path / "run"
    shutil.copytree(folder_of(trained), out)
    last = sorted((out / "checkpoints").glob("step-*"))[-1]
    largest = max((p for p in last.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    os.truncate(largest, largest.stat().st_size // 2)
    own = dataclasses.replace(trained_settings(trained), out=out)
    with pytest.warns(RuntimeWarning, match=last.name):
        train(own, resume=True, show=False)
    same(out, folder_of(trained))


def test_being_stopped_between_epochs_keeps_the_best(trained, tmp_path, monkeypatch):
    """Asked to stop once a step is saved, before the next one is taken."""
    own = dataclasses.replace(trained_settings(trained), out=tmp_path / "run")
    best = trained.results["best_step"]
    asked = []

    def any_of(_):
        steps = Checkpoints(own.out / "checkpoints").steps()
        asked.append(steps[-1:] == [best])
        return asked[-2:] == [True, True]  # not by the look after the save, but by the next

    monkeypatch.setattr(training, "any_of", any_of)
    with pytest.raises(Interrupted) if best < trained.results["steps"] else nullcontext():
        train(own, show=False)
    monkeypatch.undo()
    train(own, resume=True, show=False)
    same(own.out, folder_of(trained))


def test_a_run_of_an_earlier_version_is_evaluated_but_not_resumed(trained, tmp_path, monkeypatch):
    """Its batches were others. It is told by what its checkpoints lack."""
    shutil.copytree(folder_of(trained), tmp_path / "run")
    own = dataclasses.replace(trained_settings(trained), out=tmp_path / "run")
    about = Checkpoints.about
    older = lambda self, which="last": {**about(self, which), "sampler": None}
    monkeypatch.setattr(Checkpoints, "about", older)
    with pytest.raises(ValueError, match=r"an earlier version .* train into another folder"):
        train(own, resume=True, show=False)
    assert evaluate(own.out)["accuracy"] == trained.results["accuracy"]


def test_other_rows_are_no_continuation(trained, data, tmp_path):
    shutil.copytree(data.parent, tmp_path / "data")
    shutil.copytree(folder_of(trained), tmp_path / "run")
    table = tmp_path / "data" / "images.csv"
    own = dataclasses.replace(trained_settings(trained), data=table, out=tmp_path / "run")
    train(own, resume=True, show=False)  # the same rows in another folder
    lines = table.read_text().splitlines()
    table.write_text("\n".join(lines[:1] + lines[2:]))
    with pytest.raises(ValueError, match="other images"):
        train(own, resume=True, show=False)


def test_a_run_that_saved_nothing_claims_no_folder(data, tmp_path):
    out = tmp_path / "run"
    with pytest.raises(ValueError, match="diverged"):
        train(settings(data, out, learning_rate=1e30, chunk=1), show=False)
    train(settings(data, out, epochs=1), resume=True, show=False)
    other = tmp_path / "other"
    other.mkdir()
    (other / "settings.json~").touch()  # a disk that was full
    train(settings(data, other, epochs=1), show=False)


def test_any_optax_transformation_takes_the_steps(data, tmp_path):
    """SGD of ours against optax's own."""
    own = settings(data, tmp_path, epochs=1, learning_rate=0.02)
    optimizers, ends = (None, optax.sgd(0.02, momentum=0.9)), []
    for optimizer in optimizers:
        run = Run(own, images_of(own), optimizer)
        ends.append(run.method.model(run.feed.advance(run.method, run.state, 0, 3)))
    for one, other in zip(*map(jax.tree.leaves, ends), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


def test_a_full_disk_loses_nothing_that_was_saved(trained, tmp_path, monkeypatch, capsys):
    own = dataclasses.replace(trained_settings(trained), out=tmp_path / "run")
    write = checkpoints_module._write_arrays
    count = [0]

    def full(*args):
        count[0] += 1
        if count[0] == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(*args)

    monkeypatch.setattr(checkpoints_module, "_write_arrays", full)
    with pytest.raises(OSError, match=r"no room in .*step-0000000. are untouched"):
        train(own, show=False)
    train(own, resume=True, show=False)
    same(own.out, folder_of(trained))


def test_more_epochs_may_be_asked_of_a_run(trained, data, tmp_path):
    out = tmp_path / "run"
    train(settings(data, out, epochs=2), show=False)
    train(settings(data, out, epochs=3), resume=True, show=False)
    same(out, folder_of(trained))


def test_a_run_is_not_taken_up_with_other_settings(trained, tmp_path):
    own = trained_settings(trained)
    with pytest.raises(ValueError, match=r"rho = 1\.0, not 3"):
        train(dataclasses.replace(own, rho=3.0), resume=True, show=False)
    with pytest.raises(ValueError, match="not empty"):
        train(own, show=False)
    other = tmp_path / "other"
    other.mkdir()
    (other / "mine.txt").touch()
    with pytest.raises(ValueError, match="holds no run"):
        train(dataclasses.replace(own, out=other), resume=True, show=False)


def test_patience_ends_a_run_that_gets_no_better(data, tmp_path):
    run = settings(data, tmp_path / "run", learning_rate=1e-12, epochs=9, patience=2)
    results = train(run, show=False).results
    assert results["early_stop"]
    assert len(results["history"]) == 3


def test_a_run_that_diverges_says_so(data, tmp_path):
    with pytest.raises(ValueError, match="diverged"):
        train(settings(data, tmp_path / "run", learning_rate=1e30), show=False)


# Radii and soft groups


@pytest.fixture(scope="module")
def unknown(data, tmp_path_factory):
    """The same images, every second training row without a group."""
    folder = tmp_path_factory.mktemp("unknown") / "data"
    shutil.copytree(data.parent, folder)
    header, *rows = csv.reader(data.read_text().splitlines())
    for row in rows[::2]:
        row[2] = "-1" if row[3] == "train" else row[2]
    with (folder / "images.csv").open("w", newline="") as file:
        csv.writer(file).writerows([header, *rows])
    return folder / "images.csv"


SOFT = {"radius": 0.1, "radius_bound": 0.5, "soft_groups": "tuned", "epochs": 2}


def test_a_run_with_radii_and_soft_groups_is_stopped_and_resumed(unknown, tmp_path, monkeypatch):
    first = train(settings(unknown, tmp_path / "whole", **SOFT), show=False)
    for epoch in first.results["history"]:
        assert all(0 <= r <= 0.5 for r in epoch["radii"])
    assert first.results["history"][-1]["radii"] != first.results["history"][0]["radii"]
    assert first.results["history"][-1]["group loss"] < np.log(4)  # as from the start, v = 0
    assert first.results["stationarity"] is None
    assert first.results["counts"]["train"] == [6, 1, 2, 5]
    found = first.results["accuracy"]["train"]
    assert found["worst"] == min(found["groups"])
    own, steps, advance = settings(unknown, tmp_path / "part", **SOFT), [], Feed.advance

    def dying(self, method, state, number, count):
        steps.append(number)
        if len(steps) == 4:
            raise Killed
        return advance(self, method, state, number, count)

    monkeypatch.setattr(Feed, "advance", dying)
    with pytest.raises(Killed):
        train(own, show=False)
    train(own, resume=True, show=False)
    same(own.out, folder_of(first))
    again = evaluate(own.out)
    assert again["accuracy"] == first.results["accuracy"]
    with pytest.raises(ValueError, match=r"radius_bound = 0\.5, not 0\.4"):
        train(dataclasses.replace(own, radius_bound=0.4), resume=True, show=False)


def test_training_rows_without_a_group_are_drawn_as_they_come(unknown):
    images = images_of(settings(unknown, Path()))
    rows = Rows(images, METHODS["bilevel"], 7, 0)
    drawn = rows.several(0, rows.epoch_batches)
    assert sorted(drawn[:, :7].ravel()) == images.rows("train").tolist()
    for batch in drawn[:, 7:]:
        assert set(images.group[batch]) == {0, 1, 2, 3}
        assert (images.split[batch] == 1).all()


def test_what_needs_groups_says_so(data, unknown, tmp_path):
    count = sum(COUNTS["train"])
    for method in ("bilevel", "group-dro"):
        with pytest.raises(
            ValueError, match=f"{count // 2} training rows have no group, which {method}"
        ):
            Run(settings(unknown, tmp_path, method=method), images_of(settings(unknown, tmp_path)))
    soft = settings(data, tmp_path, soft_groups="tuned")
    with pytest.raises(ValueError, match="soft_groups cannot be tuned: every training row has a"):
        Run(soft, images_of(soft))


def test_a_split_without_any_group_has_no_worst_one():
    found = accuracies(np.array([0.0, 0, 3]), np.array([0.0, 0, 2]), np.array([0, 0, 4]))
    assert found == {
        "average": 0.75, "worst": None, "groups": [None, None], "loss": 0.5, "worst_loss": None,
    }  # fmt: skip
    some = accuracies(np.array([1.0, 0, 3]), np.array([1.0, 0, 2]), np.array([2, 0, 4]))
    assert (some["average"], some["worst"], some["groups"]) == (4 / 6, 0.5, [0.5, None])
    results = {"groups": ["a", "b"], "accuracy": dict.fromkeys(SPLITS, some), "stationarity": None}
    assert results_table(results).splitlines()[-1].split() == ["b", "–", "–", "–"]


def test_a_folder_of_mnist_is_coloured(tmp_path, monkeypatch):
    (tmp_path / "train-images-idx3-ubyte.gz").touch()
    given = []
    monkeypatch.setattr(settings_module, "colour_mnist", lambda *a, **k: given.append((a, k)))
    images_of(Settings(data=tmp_path, seed=4, shift="test", label_noise=0.1))
    images_of(Settings(data=tmp_path, correlation=0.9))
    assert given == [
        ((tmp_path, 0.8), {"label_noise": 0.1, "shift": "test", "seed": 4}),
        ((tmp_path, 0.9), {"label_noise": 0.25, "shift": "held-out", "seed": 0}),
    ]


# Ways for the batches


def test_streamed_batches_make_the_same_run(trained, data, tmp_path):
    """Pixels decoded batch by batch, not all at once."""
    run = settings(data, tmp_path / "run", memory_gb=1e-6)
    assert images_of(run).pixels is None
    train(run, show=False)
    same(run.out, folder_of(trained))


def test_a_compiled_loop_takes_the_same_steps(data, tmp_path):
    """As on an accelerator, where the pixels are on the device."""
    run = Run(settings(data, tmp_path), images_of(settings(data, tmp_path)))
    feed = run.feed
    assert feed.resident is None
    looped = Feed(
        feed.images,
        feed.rows,
        feed.view,
        feed.devices,
        run.settings.seed,
        steps=run.total,
        chunk=3,
        resident=True,
    )
    copies = [jax.tree.map(jnp.copy, run.state) for _ in range(2)]
    one, other = (f.advance(run.method, s, 2, 5) for f, s in zip((feed, looped), copies))
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other)):
        np.testing.assert_allclose(a, b, rtol=2e-3, atol=2e-5)
    found = [f.judge(run.method.model(one), "test") for f in (feed, looped)]
    assert found[0]["groups"] == found[1]["groups"]


def test_batches_hold_every_group_and_validation_rows_only_where_they_belong(data):
    images = images_of(settings(data, Path()))
    for name, kinds in (("bilevel", ["train"] * 8 + ["validation"] * 8), ("group-dro", None)):
        rows = Rows(images, METHODS[name], 8, 0)
        for i in range(20):
            batch = rows[i]
            if kinds is not None:
                assert [SPLITS[s] for s in images.split[batch]] == kinds
            assert set(images.group[batch[:8]]) == {0, 1, 2, 3}


def test_a_batch_that_devices_cannot_share_is_refused(data, monkeypatch):
    images = images_of(settings(data, Path()))
    monkeypatch.setattr(Devices, "count", 3)
    rows = Rows(images, METHODS["erm"], 8, 0)
    with pytest.raises(ValueError, match="multiple of the 3 devices"):
        Feed(images, rows, View((8, 8), "float32", False, 8), Devices(), 0, steps=1, chunk=1)


# Settings


def test_settings_from_a_file_with_flags_before_it(data, tmp_path, capsys):
    file = tmp_path / "run.toml"
    file.write_text('network = "cnn"\nsize = 8\nbatch = 8\nepochs = 9\nlearning-rate = 1\n')
    known = read_settings(file)
    assert (known.network, known.epochs, known.learning_rate) == ("cnn", 9, 1.0)
    out = tmp_path / "out"
    said = run_main(
        capsys, "train", str(data), "--config", str(file), "--epochs", "1", "--augment",
        "--method", "group-dro", "--learning-rate", "0.01", "--out", str(out),
    )  # fmt: skip
    assert "worst group" in said
    kept = read_settings(out / "settings.json")
    assert (kept.epochs, kept.batch, kept.method, kept.learning_rate) == (1, 8, "group-dro", 0.01)


BAD_FILES = {
    "unknown = 1": "there is no setting 'unknown'",
    "epochs = 1.5": "epochs cannot be 1.5",
    "epochs = true": "epochs cannot be True",
    "rho = 'large'": "rho cannot be 'large'",
    "network = 'vgg'": "network cannot be 'vgg'; it is one of cnn, resnet18",
    "rho = -1": "rho must be finite and > 0",
    "momentum = 1": "momentum must be < 1",
    "optimizer = 'none'\nmethod = 'erm'": "the bilevel method's own step",
    "iterations = 2": "tau·smoothness < 1",
    "iterations = 2\ntau = 0.01\nlearning_rate = 1": "learning_rate·smoothness < 1.9",
    "schedule = 'cosine'\noptimizer = 'none'": "there is none",
    "correlation = 3": "correlation must be from 0 to 1",
    "label_noise = -1": "label_noise must be from 0 to 1, not -1",
    "shift = 'train'": "shift cannot be 'train'; it is one of held-out, test, none",
    "method = 'erm'\nradius = 0.1": "radius is of the losses of groups; erm has none",
    "radius = -1": "radius must be finite and ≥ 0",
    "method = 'group-dro'\nradius_bound = 1": "radius_bound is of the bilevel method, not of gr",
    "method = 'erm'\nsoft_groups = 'tuned'": "soft_groups is of the bilevel method, not of erm",
    "radius = 2\nradius_bound = 1": "radius must be at most radius_bound, which is 1, not 2",
    "seed = 4294967296": "less than 2³²",
    "step_q = 1\nstep-q = 2": "step_q is given twice",
    "epochs = ": "cannot be read",
}


@pytest.mark.parametrize("text", BAD_FILES)
def test_bad_settings_are_named(text, tmp_path):
    file = tmp_path / "run.toml"
    file.write_text(text)
    with pytest.raises(ValueError, match=BAD_FILES[text]) as caught:
        read_settings(file)
    assert str(file) in str(caught.value)


def test_every_setting_goes_through_json_and_back():
    known = Settings(data=Path("a"), eta=0.5, patience=3, cache=Path("b"))
    assert from_dict(json.loads(json.dumps(known.as_dict())), "here") == known
    assert Settings(data="a", eta=0.5, patience=3, cache="b") == known
    with pytest.raises(ValueError, match="optimizer cannot be 'rmsprop'"):
        Settings(optimizer="rmsprop")


@pytest.mark.parametrize("name", ["waterbirds", "celeba", "dominoes"])
def test_the_files_of_settings_in_examples_are_whole(name):
    """The paper's constants as MATH and paper have them: ρ, L, D, ε, τ, θ, T, η, λ, batch."""
    s = read_settings(Path(__file__).parents[2] / "examples" / "deep" / f"{name}.toml")
    if name == "dominoes":
        assert (s.method, s.correlation) == ("bilevel", 0.99)
        return
    found = (s.rho, s.smoothness, s.diameter, s.epsilon, s.tau, s.theta, s.iterations, s.eta)
    assert found == (100, 1000, 100, 1, 0.01, 0.1, 1, 1)
    assert (s.l2, s.batch) == {"waterbirds": (1.0, 128), "celeba": (0.1, 256)}[name]
    assert s.optimizer == "none"


def test_the_rate_falls_as_a_cosine():
    at, slope = {"w": jnp.ones(3, jnp.float32)}, {"w": jnp.full(3, 2.0, jnp.float32)}
    for steps in (None, jnp.asarray(4.0, jnp.float32)):
        rate = jnp.asarray(0.1, jnp.float32)
        ours = Optimizer(direction("sgd", 0.9), rate, steps)
        memory, trace, w = ours.init(at), np.zeros(3), np.ones(3)
        here = at
        for k in range(6):
            change, memory = ours.update(slope, memory, here)
            here = optax.apply_updates(here, change)
            trace = 0.9 * trace + 2.0
            share = 1.0 if steps is None else (1 + np.cos(np.pi * min(1, k / 4))) / 2
            w = w - 0.1 * share * trace
            np.testing.assert_allclose(here["w"], w, rtol=1e-5)
    assert direction("sgd", 0.9) is direction("sgd", 0.9)


def test_pretrained_weights_are_where_training_begins(trained, data):
    file = folder_of(trained) / "model.safetensors"
    begun = model_of(settings(data, Path(), weights=file), 2)
    stored = arrays(folder_of(trained))
    conv, norm = begun.encoder.layers[0]
    np.testing.assert_array_equal(conv.weight, stored["layers.0.0.weight"])
    np.testing.assert_array_equal(norm.running_var, stored["layers.0.1.running_var"])


@pytest.mark.parametrize("name", METHODS)
def test_frozen_statistics_are_the_running_ones(name, tmp_path):
    """With which an encoder returns itself as it was (see test_deep_networks)."""
    for batch_norm, statistics in (("frozen", "running"), ("batch", "batch")):
        own = Settings(out=tmp_path, method=name, batch_norm=batch_norm)
        assert method_of(own, np.ones(4), 1).statistics == statistics


# The commands


def run_main(capsys, *args: str, code: int = 0) -> str:
    with pytest.raises(SystemExit) as end:
        main(["deep", *args])
    said = capsys.readouterr()
    assert (end.value.code or 0) == code, said.err
    return said.out if code == 0 else said.err


def test_train_evaluate_and_ablate_from_the_command_line(data, tmp_path, capsys):
    out = tmp_path / "run"
    short = ["--network", "cnn", "--size", "8", "--batch", "8", "--epochs", "1", "--augment"]
    said = run_main(capsys, "train", str(data), *short, "--out", str(out), "--method", "group-dro")
    assert "worst group" in said
    assert "0 at 1" in said
    assert re.search(r"\nThe head is ε-stationary with ε ≤ [\d.]+, with probability 95 %", said)
    said = run_main(capsys, "evaluate", str(out), "--json", str(tmp_path / "found.json"))
    assert "worst group" in said
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["accuracy"] == json.loads((out / "results.json").read_text())["accuracy"]
    grid = ["--rhos", "1", "2", "--smoothnesses", "10", "--etas", "1", "--optimizer", "sgd"]
    said = run_main(capsys, "ablate", str(data), *short, *grid, "--out", str(tmp_path / "grid"))
    assert said.count(" %") == 8
    runs = json.loads((tmp_path / "grid" / "ablation.json").read_text())["runs"]
    assert [(r["name"], r["value"]) for r in runs] == [
        ("rho", 1.0), ("rho", 2.0), ("smoothness", 10.0), ("eta", 1.0),
    ]  # fmt: skip
    # The middle of ρ is 2: it is one run with those of L and η.
    assert len({r["folder"] for r in runs}) == 2
    for run in runs:
        results = json.loads((tmp_path / "grid" / run["folder"] / "results.json").read_text())
        assert results["settings"][run["name"]] == run["value"]
        assert results["accuracy"]["validation"]["worst"] == run["validation"]["worst"]


def test_a_stopped_ablation_continues(data, tmp_path, monkeypatch):
    own = settings(data, tmp_path / "whole", epochs=1)
    grid = {"rho": (1.0, 2.0), "smoothness": (10.0,), "eta": (1.0,)}
    whole = ablate(own, grid, show=False)
    part = dataclasses.replace(own, out=tmp_path / "part")
    advance, steps = Feed.advance, []

    def dying(self, method, state, first, count):
        steps.append(first)
        if len(steps) == 3:  # in the second run
            raise Killed
        return advance(self, method, state, first, count)

    monkeypatch.setattr(Feed, "advance", dying)
    with pytest.raises(Killed):
        ablate(part, grid, show=False)
    assert ablate(part, grid, show=False)["runs"] == whole["runs"]
    assert len(steps) == 5  # two of the first run, and the second's two after the one that failed


def test_an_ablation_tells_what_diverged(data, tmp_path):
    own = settings(data, tmp_path / "grid", epochs=1, learning_rate=1e30)
    found = ablate(own, {"rho": (1.0,), "smoothness": (10.0,), "eta": (1.0,)}, show=False)
    assert "diverged" in found["runs"][0]["failed"]


def broken(data: Path, folder: Path, how: str) -> Path:
    shutil.copytree(data.parent, folder)
    table = folder / "images.csv"
    rows = list(csv.reader(table.read_text().splitlines()))
    if how == "missing":
        (folder / rows[3][0]).unlink()
    elif how == "unreadable":
        (folder / rows[3][0]).write_bytes(b"no picture")
    elif how == "cut short":
        file = folder / rows[3][0]
        file.write_bytes(file.read_bytes()[:60])
    elif how == "no name":
        rows[3][0] = ""
    elif how == "no group":
        rows = [r for r in rows if r[2:] != ["1 at 0", "validation"]]
    with table.open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    return table


BAD_DATA = {
    "missing": "train-0-2.png",
    "unreadable": "train-0-2.png cannot be decoded",
    "cut short": "train-0-2.png cannot be decoded",
    "no name": "row 4",
    "no group": "1 at 0.*validation",
}


@pytest.mark.parametrize("how", BAD_DATA)
def test_bad_data_is_told_before_anything_is_written(how, data, tmp_path, capsys):
    table, out = broken(data, tmp_path / "data", how), tmp_path / "out"
    said = run_main(capsys, "train", str(table), "--size", "8", "--out", str(out), code=2)
    assert re.search(BAD_DATA[how], said), said
    assert not out.exists()


def test_an_image_that_breaks_amid_a_streamed_run_costs_no_checkpoint(data, tmp_path, capsys):
    table, out = broken(data, tmp_path / "data", ""), tmp_path / "out"
    args = ["train", str(table), "--size", "8", "--network", "cnn", "--batch", "8", "--chunk", "2"]
    args += ["--memory-gb", "1e-6", "--out", str(out), "--augment"]
    run_main(capsys, *args, "--epochs", "1")
    kept = sorted((out / "checkpoints").iterdir())
    (table.parent / "train-1-0.png").write_bytes(b"no picture")
    said = run_main(capsys, *args, "--epochs", "3", "--resume", code=2)
    assert "train-1-0.png" in said
    assert sorted((out / "checkpoints").iterdir()) == kept


def test_bad_calls_are_answered_by_a_sentence(data, tmp_path, capsys):
    assert "no data given" in run_main(capsys, "train", code=2)
    assert "go together" in run_main(capsys, "train", str(data), "--processes", "2", code=2)
    assert "no run" in run_main(capsys, "evaluate", str(tmp_path), code=2)
    file = tmp_path / "file"
    file.touch()
    short = ["--size", "8", "--network", "cnn", "--out", str(file)]
    assert "is a file" in run_main(capsys, "train", str(data), *short, code=2)
    assert "Waterbirds" in run_main(capsys, "train", str(tmp_path), code=2)
    with pytest.raises(SystemExit):
        main(["deep", "train", str(data), "--no-such-flag", "1"])
