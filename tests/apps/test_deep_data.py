"""Image data: tables, pixels, batches and augmentation, and what is said when they are bad."""

import csv
import errno
import gzip
import io
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

Image = pytest.importorskip("PIL.Image", reason="needs pillow")

from bilevax.deep import pixels as pixels_module  # noqa: E402
from bilevax.deep.augmentation import (  # noqa: E402
    IMAGENET_DEVIATION,
    IMAGENET_MEAN,
    augmented,
    prepare,
    resampled,
)
from bilevax.deep.colour_mnist import SHIFTED, colour_mnist  # noqa: E402
from bilevax.deep.dominoes import dominoes  # noqa: E402
from bilevax.deep.feed import Batches  # noqa: E402
from bilevax.deep.idx import read_idx  # noqa: E402
from bilevax.deep.pixels import ImageError, Images, decode, load, stream  # noqa: E402
from bilevax.deep.tables import celeba, manifest, open_table, waterbirds  # noqa: E402

SHARED = Path(__file__).parents[3] / "shared" / "data"


def write_csv(path, header, rows):
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows([header, *rows])
    return path


def picture(seed, size=(20, 14)):
    """Noise of (width, height) that is smooth enough for JPEG."""
    coarse = np.random.default_rng(seed).integers(0, 256, (4, 5, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC)


# Tables

CELLS = [(y, a, s) for s in range(3) for y in (0, 1) for a in (0, 1)]  # label, attribute, split


def waterbirds_folder(folder, cells=CELLS, change=None):
    """One image for each cell, in the published layout; `change` edits the rows."""
    folder.mkdir(exist_ok=True)
    header = ["img_id", "img_filename", "y", "split", "place", "place_filename"]
    rows = [[i, f"{i % 2:03}.Bird/b{i}.png", y, s, a, "p.jpg"] for i, (y, a, s) in enumerate(cells)]
    for i, row in enumerate(rows):
        path = folder / row[1]
        path.parent.mkdir(exist_ok=True)
        picture(i).save(path)
    if change:
        change(rows)
    write_csv(folder / "metadata.csv", header, rows)
    return folder


def test_waterbirds(tmp_path):
    table = waterbirds(waterbirds_folder(tmp_path))
    assert table.groups == (
        "landbird on land", "landbird on water", "waterbird on land", "waterbird on water",
    )  # fmt: skip
    assert table.label.tolist() == [y for y, _, _ in CELLS]
    assert table.group.tolist() == [2 * y + a for y, a, _ in CELLS]
    assert table.split.tolist() == [s for _, _, s in CELLS]
    assert (table.label.dtype, table.group.dtype, table.split.dtype) == (
        np.int32,
        np.int32,
        np.int8,
    )
    assert table.counts.tolist() == [[1] * 4] * 3
    assert table.files[5] == tmp_path / "001.Bird" / "b5.png"
    assert table.crop is None
    assert table.margin * 224 == pytest.approx(256)


published = SHARED / "waterbirds_metadata.csv"


@pytest.mark.skipif(not published.exists(), reason="needs waterbirds_metadata.csv")
def test_the_published_waterbirds_have_their_published_counts(tmp_path):
    with open(published, newline="") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        path = tmp_path / row["filename"]
        path.parent.mkdir(exist_ok=True)
        path.touch()
    write_csv(
        tmp_path / "metadata.csv",
        ["img_id", "img_filename", "y", "split", "place", "place_filename"],
        [[r["id"], r["filename"], r["y"], r["split"], r["a"], "x"] for r in rows],
    )
    table = open_table(tmp_path)
    assert len(table) == 11788
    assert table.counts[:2].tolist() == [[3498, 184, 56, 1057], [467, 466, 133, 133]]


def celeba_folder(folder, doubled=False, attributes=None, partition=None, size=(178, 218)):
    images = folder / "img_align_celeba"
    images = images / "img_align_celeba" if doubled else images
    images.mkdir(parents=True)
    for i in range(len(CELLS)):
        picture(i, size).save(images / f"{i:06}.jpg")
    rows = [[f"{i:06}.jpg", 1, 2 * a - 1, 2 * y - 1] for i, (y, a, _) in enumerate(CELLS)]
    header = ["image_id", "Young", "Male", "Blond_Hair"]
    write_csv(folder / "list_attr_celeba.csv", header, rows if attributes is None else attributes)
    # Backwards: the rows go by name.
    parts = [[f"{i:06}.jpg", s] for i, (_, _, s) in enumerate(CELLS)][::-1]
    parts = parts if partition is None else partition(parts)
    write_csv(folder / "list_eval_partition.csv", ["image_id", "partition"], parts)
    return folder


@pytest.mark.parametrize("doubled", [False, True])
def test_celeba(tmp_path, doubled):
    table = open_table(celeba_folder(tmp_path, doubled))
    assert table.group.tolist() == [2 * y + a for y, a, _ in CELLS]
    assert table.split.tolist() == [s for _, _, s in CELLS]
    assert table.groups[1] == "not Blond_Hair, Male"
    assert table.crop == 178
    assert table.files[0].is_file()
    turned = celeba(tmp_path, target="Male", confounder="Blond_Hair")
    assert turned.group.tolist() == [2 * a + y for y, a, _ in CELLS]


def test_bad_celeba_is_refused(tmp_path):
    def refused(says, kind=ValueError, **given):
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        with pytest.raises(kind, match=says):
            celeba(celeba_folder(folder, size=(4, 4), **given))

    refused("list_attr_celeba.csv, row 13: 000011.jpg is not in", partition=lambda p: p[1:])
    refused(r"partition.csv: x.jpg not in", partition=lambda p: [*p, ["x.jpg", 0]])
    refused("row 14: 000000.jpg was in an earlier row", partition=lambda p: [*p, p[-1]])
    refused("row 2: partition must be one of 0, 1, 2, not '3'", partition=lambda p: [["a.jpg", 3]])
    refused("row 2: Blond_Hair must be one of -1, 1", attributes=[["000000.jpg", 1, 1, 0]])
    with pytest.raises(ValueError, match="no column 'Bald'; there are image_id, Young"):
        celeba(tmp_path / "0", target="Bald")
    with pytest.raises(ValueError, match="both 'Male'"):
        celeba(tmp_path / "0", target="Male")


def manifest_file(folder, header=("filename", "label", "group", "split"), change=None, made=True):
    names = ("train", "val", "test")
    rows = [[f"im/{i}.png", ("cat", "dog")[y], str(9 + a), names[s]]
            for i, (y, a, s) in enumerate(CELLS)]  # fmt: skip
    (folder / "im").mkdir(exist_ok=True)
    for i in range(len(CELLS) if made else 0):
        (folder / "im" / f"{i}.png").touch()
    rows = [list(row) for row in rows]
    if change:
        change(rows)
    return write_csv(folder / "own.csv", header, rows)


def test_a_manifest(tmp_path):
    path = manifest_file(tmp_path)
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())  # as Excel saves it
    table = open_table(path)
    assert table.name == "own"
    assert table.classes == ("cat", "dog")
    assert table.groups == ("9", "10")  # as numbers: 9 before 10
    assert table.label.tolist() == [y for y, _, _ in CELLS]
    assert table.group.tolist() == [a for _, a, _ in CELLS]
    assert table.split.tolist() == [s for _, _, s in CELLS]
    assert table.counts.tolist() == [[2, 2]] * 3
    assert table.files[3] == tmp_path / "im" / "3.png"


def put(row, column, value):
    return lambda rows: rows[row].__setitem__(column, value)


def unknown(*numbers):
    return lambda rows: [rows[i].__setitem__(2, "-1") for i in numbers]


def test_training_rows_may_have_no_group(tmp_path):
    """Of one group in training, or of any."""
    table = manifest(manifest_file(tmp_path, change=unknown(0, 2)))
    assert table.groups == ("9", "10")
    assert table.group[:4].tolist() == [-1, 1, -1, 1]
    assert table.counts.tolist() == [[0, 2], [2, 2], [2, 2]]
    assert table.unknown == 2


def all_labels_alike(rows):
    for row in rows:
        row[1] = "cat"


BAD = [
    (put(3, 0, ""), "own.csv: row 5 has nothing in 'filename'"),
    (put(3, 2, " "), "row 5 has nothing in 'group'"),
    (lambda rows: rows[4].pop(), "row 6 has nothing in 'split'"),
    (put(2, 3, "dev"), r"own.csv, row 4: split must be one of train, .*, not 'dev'"),
    (put(2, 0, "../own.csv"), r"row 4: \.\./own.csv leaves the folder"),
    (put(2, 0, "/etc/hosts"), "row 4: /etc/hosts leaves the folder"),
    (put(2, 0, "im/../../x.png"), "row 4: .* leaves the folder"),
    (put(1, 0, "im/0.png"), r"rows 2 \(train\) and 3 \(train\) both name im/0.png"),
    (put(11, 0, "im//0.png"), r"rows 2 \(train\) and 13 \(test\) both name im/0.png"),
    (all_labels_alike, "the label is 'cat' in every row"),
    (unknown(5), "row 7: the group is -1, .* only training rows .*, and this row is in validation"),
    (put(1, 2, "11"), "'11' has no image in validation; '11' has no image in test"),
    (lambda rows: rows.clear(), "own.csv: it has a header but no rows"),
]


@pytest.mark.parametrize(("change", "says"), BAD)
def test_what_is_wrong_with_a_manifest_is_said(tmp_path, change, says):
    path = manifest_file(tmp_path, change=change)
    with pytest.raises(ValueError, match=says):
        manifest(path)


def test_files_that_are_not_there_are_named(tmp_path):
    path = manifest_file(tmp_path)
    for i in (3, 5):
        (tmp_path / "im" / f"{i}.png").unlink()
    (tmp_path / "im" / "5.png").mkdir()
    with pytest.raises(FileNotFoundError, match=r"2 of its 12 files.*im/3\.png, .*im/5\.png$"):
        manifest(path)
    (tmp_path / "new").mkdir()
    path = manifest_file(tmp_path / "new", made=False)
    with pytest.raises(FileNotFoundError, match=r"12 of its 12 files.*im/2\.png and 9 more"):
        manifest(path)


def test_tables_that_cannot_be_read_are_named(tmp_path):
    path = manifest_file(tmp_path, header=("filename", "label", "set", "split"))
    with pytest.raises(ValueError, match=r"own.csv: it has no column 'group'; there are filename,"):
        manifest(path)
    path = manifest_file(tmp_path, header=("filename", "label", "group", "split", "label"))
    with pytest.raises(ValueError, match="more than one column 'label'"):
        manifest(path)
    path.write_bytes(b"")
    with pytest.raises(ValueError, match=r"own.csv: it is empty"):
        manifest(path)
    path.write_bytes("filename,label,group,split\né.png,1,1,0".encode("latin-1"))
    with pytest.raises(ValueError, match=r"own.csv is not a text file in UTF-8"):
        manifest(path)
    with pytest.raises(FileNotFoundError, match=r"no file .*metadata.csv"):
        waterbirds(tmp_path)
    with pytest.raises(ValueError, match=r"no known layout: it may be a CSV .*; CelebA"):
        open_table(tmp_path)
    with pytest.raises(FileNotFoundError, match="there is no file or folder"):
        open_table(tmp_path / "absent")


def test_bad_waterbirds_are_refused(tmp_path):
    waterbirds_folder(tmp_path, change=put(3, 2, 7))
    with pytest.raises(ValueError, match=r"metadata.csv, row 5: y must be one of 0, 1, not '7'"):
        waterbirds(tmp_path)
    waterbirds_folder(tmp_path, CELLS[:-1])
    with pytest.raises(ValueError, match="'waterbird on water' has no image in test"):
        waterbirds(tmp_path)


# Pixels


def test_an_image_is_decoded_as_pillow_does(tmp_path):
    picture(1, (30, 20)).save(tmp_path / "a.png")
    with Image.open(tmp_path / "a.png") as image:
        whole = image.resize((8, 8), Image.Resampling.BILINEAR)
        middle = image.crop((9, 4, 21, 16)).resize((8, 8), Image.Resampling.BILINEAR)
    np.testing.assert_array_equal(decode(tmp_path / "a.png", None, 8), whole)
    np.testing.assert_array_equal(decode(tmp_path / "a.png", 12, 8), middle)
    with pytest.raises(ImageError, match=r"a.png is 30×20 pixels, too small to cut 21"):
        decode(tmp_path / "a.png", 21, 8)


@pytest.mark.parametrize("mode", ["L", "P", "RGBA", "CMYK", "1"])
def test_images_of_all_modes_become_rgb(tmp_path, mode):
    path = tmp_path / ("a.jpg" if mode == "CMYK" else "a.png")
    picture(1).convert(mode).save(path)
    assert decode(path, None, 8).shape == (8, 8, 3)


def test_a_note_to_turn_the_image_is_ignored(tmp_path):
    note = Image.Exif()
    note[0x0112] = 6  # a quarter turn
    picture(1).save(tmp_path / "turned.png", exif=note)
    picture(1).save(tmp_path / "plain.png")
    np.testing.assert_array_equal(
        decode(tmp_path / "turned.png", None, 8), decode(tmp_path / "plain.png", None, 8)
    )


def cut(path, kind, keep):
    buffer = io.BytesIO()
    picture(1, (60, 60)).save(buffer, kind)
    path.write_bytes(buffer.getvalue()[: int(keep * buffer.tell())])


@pytest.mark.parametrize(
    ("kind", "keep"), [("JPEG", 0.7), ("PNG", 0.5), ("JPEG", 0), ("PNG", 0.01)]
)
def test_damaged_images_are_named(tmp_path, kind, keep):
    cut(tmp_path / "bad.img", kind, keep)
    with pytest.raises(ImageError, match=r"bad\.img cannot be decoded"):
        decode(tmp_path / "bad.img", None, 8)


def expected(table, side):
    """The pixels of a table, by Pillow alone."""
    images = []
    for file in table.files:
        with Image.open(file) as image:
            resized = image.convert("RGB").resize((side, side), Image.Resampling.BILINEAR)
            images.append(np.asarray(resized))
    return np.stack(images)


def cached(folder):
    return sorted(folder.glob("*"))


def test_all_images_are_loaded_and_the_cache_is_used(tmp_path, monkeypatch):
    table = waterbirds(waterbirds_folder(tmp_path / "birds"))
    wanted = expected(table, 16)  # 14 · 256/224
    images = load(table, 14)
    assert images.size == (14, 14)
    np.testing.assert_array_equal(images.pixels, wanted)
    assert images.counts.tolist() == [[1] * 4] * 3
    assert images.rows("validation").tolist() == [4, 5, 6, 7]
    with pytest.raises(ValueError, match="split must be one of"):
        images.rows("dev")

    kept = tmp_path / "cache"
    np.testing.assert_array_equal(load(table, 14, cache=kept).pixels, wanted)
    (file,) = cached(kept)
    assert file.name.startswith("waterbirds-16-")
    with monkeypatch.context() as patch:
        patch.setattr(pixels_module, "decode", lambda *_: pytest.fail("decoded again"))
        again = load(table, 14, cache=kept)
    np.testing.assert_array_equal(again.pixels, wanted)
    assert isinstance(again.pixels, np.memmap)
    assert not again.pixels.flags.writeable
    np.testing.assert_array_equal(np.load(file), wanted)  # an ordinary .npy file

    good = file.read_bytes()
    flipped = bytearray(good)
    flipped[500] ^= 1
    for bad in (good[:-20], good[:50], b"", bytes(flipped), good + b"more"):
        file.unlink()  # what is mapped must not change
        file.write_bytes(bad)
        with pytest.warns(RuntimeWarning, match=rf"{file.name} is damaged"):
            np.testing.assert_array_equal(load(table, 14, cache=kept).pixels, wanted)
        assert file.read_bytes() == good
    assert cached(kept) == [file]

    picture(99).save(table.files[0])
    np.testing.assert_array_equal(load(table, 14, cache=kept).pixels, expected(table, 16))
    assert len(cached(kept)) == 2


def test_a_bad_image_or_a_full_disk_leaves_no_cache(tmp_path, monkeypatch):
    table = waterbirds(waterbirds_folder(tmp_path / "birds"))
    kept = tmp_path / "cache"

    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(pixels_module.os, "fsync", full)
        with pytest.raises(OSError, match=r"cache .* cannot be written: No space left.*another"):
            load(table, 14, cache=kept)
    assert cached(kept) == []
    cut(table.files[7], "PNG", 0.5)
    with pytest.raises(ImageError, match=r"b7\.png cannot be decoded.*\(image 7 of waterbirds"):
        load(table, 14, cache=kept)
    assert cached(kept) == []


def test_celeba_is_cut_before_it_is_resized(tmp_path):
    table = celeba(celeba_folder(tmp_path))
    with Image.open(table.files[2]) as image:
        square = image.crop((0, 20, 178, 198)).resize((9, 9), Image.Resampling.BILINEAR)
    np.testing.assert_array_equal(load(table, 9).pixels[2], square)


def test_what_does_not_fit_is_streamed(tmp_path, monkeypatch):
    table = waterbirds(waterbirds_folder(tmp_path / "birds"))
    wanted = expected(table, 16)
    images = load(table, 14, limit_gb=1e-6)
    assert images.pixels is None
    np.testing.assert_array_equal(images.decoded(np.array([3, 1])), wanted[[3, 1]])
    batches = Batches(np.arange(12), 5, 3)
    whole = list(stream(images, batches, 0, 20))
    assert len(whole) == 20
    for i, batch in enumerate(whole):
        np.testing.assert_array_equal(batch, wanted[batches[i]])
    resumed = list(stream(images, Batches(np.arange(12), 5, 3), 13, 7))
    np.testing.assert_array_equal(resumed, whole[13:])
    np.testing.assert_array_equal(list(stream(load(table, 14), batches, 13, 7)), whole[13:])
    assert list(stream(images, batches, 4, 0)) == []
    # Without grain the processes become threads.
    monkeypatch.setitem(sys.modules, "grain", None)
    monkeypatch.setitem(sys.modules, "grain.python", None)
    np.testing.assert_array_equal(list(stream(images, batches, 13, 7, workers=2)), whole[13:])


# Dominoes


def write_idx(path, array, packed=True):
    sizes = np.array(array.shape, ">u4").tobytes()
    data = bytes((0, 0, 8, array.ndim)) + sizes + array.astype(np.uint8).tobytes()
    path.parent.mkdir(parents=True, exist_ok=True)
    if packed:
        path.with_name(path.name + ".gz").write_bytes(gzip.compress(data, 1))
    else:
        path.write_bytes(data)


def pictures(labels, first):
    """28 × 28 pictures that say their own number, from `first` on, and their label."""
    made = np.zeros((len(labels), 28, 28), np.uint8)
    numbers = first + np.arange(len(labels))
    made[:, 0, 0], made[:, 0, 1], made[:, 0, 2] = numbers // 256, numbers % 256, labels
    return made


def domino_folder(folder):
    """Per class: 60 coats and 50 dresses, 55 zeros and 70 ones to train; half of it to test."""
    for name, sizes in (("fashion-mnist", {4: 60, 3: 50, 7: 5}), ("mnist", {0: 55, 1: 70, 2: 5})):
        for kind, share, first in (("train", 1, 0), ("t10k", 2, 500)):
            labels = np.repeat(list(sizes), [n // share for n in sizes.values()])
            labels = np.random.default_rng(0).permutation(labels)
            made = pictures(labels, first)
            write_idx(folder / name / f"{kind}-images-idx3-ubyte", made, packed=kind == "train")
            write_idx(folder / name / f"{kind}-labels-idx1-ubyte", labels)
    return folder


def test_dominoes_are_exact_and_use_no_picture_twice(tmp_path):
    images = dominoes(domino_folder(tmp_path), 0.9, validation=0.3, seed=4)
    assert isinstance(images, Images)
    assert images.classes == ("coat", "dress")
    assert images.groups == ("coat with 0", "coat with 1", "dress with 0", "dress with 1")
    assert images.size == (64, 32)
    # 50 pictures a class: 35 to train, of which 31.5 ≈ 32 agree, and 15 to validate.
    assert images.counts.tolist() == [[32, 3, 3, 32], [8, 7, 7, 8], [12, 13, 13, 12]]
    pixels = images.pixels
    assert pixels.shape == (150, 64, 32, 3)
    assert pixels.dtype == np.uint8
    assert (pixels == pixels[..., :1]).all()
    for start, kinds, wanted in (
        (2, (0, 1), images.group % 2),
        (34, (4, 3), images.label),
    ):
        number = pixels[:, start, 2, 0].astype(int) * 256 + pixels[:, start, 3, 0]
        assert len(np.unique(number)) == 150
        assert ((number >= 500) == (images.split == 2)).all()
        np.testing.assert_array_equal(pixels[:, start, 4, 0], np.array(kinds)[wanted])
    again, other = (dominoes(tmp_path, 0.9, validation=0.3, seed=s) for s in (4, 5))
    np.testing.assert_array_equal(again.pixels, pixels)
    assert not np.array_equal(other.pixels, pixels)


@pytest.mark.skipif(not (SHARED / "fashion-mnist").exists(), reason="needs MNIST, Fashion-MNIST")
def test_dominoes_of_the_published_pictures():
    images = dominoes(SHARED)
    # 5923 zeros are the fewest: 1185 (20 %) to validate, 4738 to train, 95 % of them 4501.
    assert images.counts.tolist() == [
        [4501, 237, 237, 4501], [592, 593, 593, 592], [490, 490, 490, 490],
    ]  # fmt: skip
    assert images.pixels.shape == (2 * 5923 + 2 * 980, 64, 32, 3)
    border = np.ones((64, 32), bool)
    border[2:30, 2:30] = border[34:62, 2:30] = False
    assert not images.pixels[:, border].any()
    # A one has less ink than a zero.
    ink = images.pixels[:, :32].mean(axis=(1, 2, 3))
    assert ink[images.group % 2 == 0].mean() > 2 * ink[images.group % 2 == 1].mean()


def test_bad_dominoes_are_refused(tmp_path):
    domino_folder(tmp_path)
    for given, says in (
        ({"correlation": 1.2}, "correlation must be a share between 0 and 1, not 1.2"),
        ({"correlation": 1.0}, "group 'coat with 1' is in train.*farther from 0 and 1"),
        ({"validation": 0.0}, "is in validation"),
        ({"classes": (4, 4)}, "classes must be two different numbers"),
        ({"digits": (0, 11)}, "digits must be two different numbers"),
        ({"digits": (0, 9)}, "mnist: no picture of train has the label 9"),
        ({"seed": -1}, "seed must be a whole number ≥ 0"),
    ):
        with pytest.raises(ValueError, match=says):
            dominoes(tmp_path, **given)
    with pytest.raises(FileNotFoundError, match=r"fashion-mnist/train-images-idx3-ubyte\.gz"):
        dominoes(tmp_path / "absent")
    write_idx(tmp_path / "mnist" / "t10k-labels-idx1-ubyte", np.zeros(3))
    with pytest.raises(ValueError, match="mnist: t10k has 3 labels and pictures of shape"):
        dominoes(tmp_path)


# Coloured digits


def coloured_folder(folder, count=200):
    """As many of each digit."""
    digits = np.arange(count) % 10
    write_idx(folder / "train-images-idx3-ubyte", pictures(digits, 0))
    write_idx(folder / "train-labels-idx1-ubyte", digits)
    return folder


def test_coloured_digits_are_exact_and_use_no_picture_twice(tmp_path):
    given = {"sizes": (100, 40, 60), "seed": 3}
    images = colour_mnist(coloured_folder(tmp_path), 0.8, **given)
    assert images.groups[SHIFTED] == "digit 5 to 9 in red"
    assert images.pixels.shape == (200, 28, 28, 3)
    turned = (images.group == SHIFTED) & (images.split > 0)
    upright = images.pixels.copy()
    upright[turned] = np.rot90(upright[turned], k=-1, axes=(1, 2))  # back, clockwise
    inks = upright[:, 0, :3].astype(int)  # number, number, digit
    np.testing.assert_array_equal(inks[:, :, 2], 0)  # no blue
    colour = images.group % 2
    np.testing.assert_array_equal(inks[np.arange(200), :, 1 - colour], 0)
    high, low, digit = inks.max(axis=2).T
    number = 256 * high + low
    assert sorted(number) == list(range(200))
    np.testing.assert_array_equal(digit, number % 10)
    np.testing.assert_array_equal(images.group // 2, images.label)
    for s, agree in enumerate((0.8, 0.5, 0.1)):
        here = images.split == s
        for large in (False, True):
            rows = here & ((digit >= 5) == large)
            assert (images.label[rows] != large).sum() == round(0.25 * rows.sum())
            rows = here & (images.label == large)
            assert (colour[rows] == images.label[rows]).sum() == round(agree * rows.sum())
    # Of the wrong labels of each class some are in either colour.
    wrong = (images.split == 0) & (images.label != (digit >= 5))
    assert set(images.group[wrong]) == {0, 1, 2, 3}
    plain = colour_mnist(tmp_path, 0.8, shift="none", **given)
    np.testing.assert_array_equal(plain.pixels, upright)
    late = colour_mnist(tmp_path, 0.8, shift="test", **given)
    held = images.split == 1
    np.testing.assert_array_equal(late.pixels[held], upright[held])
    np.testing.assert_array_equal(late.pixels[~held], images.pixels[~held])
    other = colour_mnist(tmp_path, 0.8, sizes=(100, 40, 60), seed=4)
    assert not np.array_equal(other.pixels, images.pixels)


@pytest.mark.skipif(not (SHARED / "mnist").exists(), reason="needs MNIST")
def test_coloured_digits_of_the_published_pictures():
    images = colour_mnist(SHARED / "mnist")
    assert images.counts.sum(axis=1).tolist() == [30_000, 10_000, 20_000]
    shares = images.counts[:, [0, 3]].sum(axis=1) / images.counts.sum(axis=1)
    np.testing.assert_allclose(shares, [0.8, 0.5, 0.1], atol=1e-4)


def test_bad_coloured_digits_are_refused(tmp_path):
    coloured_folder(tmp_path)
    for given, says in (
        ({"correlation": -0.1}, "correlation must be a share between 0 and 1"),
        ({"label_noise": 2}, "label_noise must be a share between 0 and 1, not 2"),
        ({"correlation": 1.0}, "group 'digit 0 to 4 in green' is in train.*farther from 0 and 1"),
        ({"shift": "train"}, "shift must be 'held-out' or 'test' or 'none', not 'train'"),
        ({"sizes": (100, 0, 60)}, "the size of validation must be a whole number ≥ 1, not 0"),
        ({"sizes": (100, 60, 60)}, "sizes ask for 220 images, but .* has 200"),
        ({"sizes": (100, 60)}, "sizes must be three numbers"),
        ({"seed": -1}, "seed must be a whole number ≥ 0"),
    ):
        with pytest.raises(ValueError, match=says):
            colour_mnist(tmp_path, **{"sizes": (100, 40, 60), **given})
    with pytest.raises(FileNotFoundError, match=r"train-images-idx3-ubyte\.gz"):
        colour_mnist(tmp_path / "absent")


def test_bad_idx_files_are_named(tmp_path):
    path = tmp_path / "a-idx3-ubyte"
    packed = path.with_name(path.name + ".gz")
    array = np.arange(24).reshape(2, 3, 4)
    write_idx(path, array)
    np.testing.assert_array_equal(read_idx(path, 3), array)
    good = packed.read_bytes()
    for bad in (good[:-12], b"no gzip", b""):
        packed.write_bytes(bad)
        with pytest.raises(ValueError, match=r"a-idx3-ubyte\.gz (cannot be unpacked|starts with)"):
            read_idx(path, 3)
    write_idx(path, array, packed=False)
    np.testing.assert_array_equal(read_idx(path, 3), array)
    with pytest.raises(ValueError, match="starts with 00 00 08 03, not 00 00 08 01"):
        read_idx(path, 1)
    whole = path.read_bytes()
    for bad in (whole[:-1], whole + b"x"):
        path.write_bytes(bad)
        with pytest.raises(ValueError, match=r"says 2 × 3 × 4 and has 2[35] bytes"):
            read_idx(path, 3)


# Augmentation


def noise(*shape, seed=0):
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def test_prepare_normalises_the_middle():
    pixels = noise(2, 8, 7, 3)
    wanted = (pixels[:, 2:6, 1:6] / 255 - np.array(IMAGENET_MEAN)) / np.array(IMAGENET_DEVIATION)
    for dtype, error in ((jnp.float32, 1e-6), (jnp.bfloat16, 8e-3)):
        out = jax.jit(lambda p, d=dtype: prepare(p, (4, 5), dtype=d))(pixels)
        assert out.dtype == dtype
        np.testing.assert_allclose(np.asarray(out, float), wanted, rtol=error, atol=error)
    with pytest.raises(ValueError, match="size is 9×9, but the images are only 8×7"):
        prepare(pixels, (9, 9))


resized = jax.jit(resampled, static_argnums=(6, 7))


def boxes(*numbers):
    """One array for each of top, left, height and width."""
    return [jnp.asarray(column, jnp.float32) for column in zip(*numbers)]


def bilinear(image, top, left, height, width, size):
    """Point by point, without antialiasing."""
    out = np.zeros((*size, 3))
    for i in range(size[0]):
        for j in range(size[1]):
            y = min(max(top + (i + 0.5) * height / size[0] - 0.5, 0), image.shape[0] - 1)
            x = min(max(left + (j + 0.5) * width / size[1] - 0.5, 0), image.shape[1] - 1)
            y0, x0 = int(y), int(x)
            y1, x1 = min(y0 + 1, image.shape[0] - 1), min(x0 + 1, image.shape[1] - 1)
            a, b = y - y0, x - x0
            out[i, j] = (1 - a) * ((1 - b) * image[y0, x0] + b * image[y0, x1]) + a * (
                (1 - b) * image[y1, x0] + b * image[y1, x1]
            )
    return out


def test_crops_are_interpolated():
    pixels = noise(3, 9, 12, 3)
    given = [(0, 0, 7, 9), (1.3, 2.6, 5.5, 8.25), (3, 4, 6, 8)]
    flipped = jnp.array([False, True, False])
    out = np.asarray(resized(pixels, *boxes(*given), flipped, (7, 11)))
    for k, box in enumerate(given):
        wanted = bilinear(pixels[k].astype(float), *box, (7, 11))
        wanted = wanted[:, ::-1] if flipped[k] else wanted
        np.testing.assert_allclose(out[k], wanted, atol=1e-3)
    rough = resized(pixels, *boxes(*given), flipped, (7, 11), jnp.bfloat16)
    np.testing.assert_allclose(np.asarray(rough), out, atol=3)


def test_the_whole_image_is_given_back():
    pixels = noise(2, 6, 5, 3)
    for dtype in (jnp.float32, jnp.bfloat16):
        same = resized(
            pixels, *boxes((0, 0, 6, 5), (0, 0, 6, 5)), jnp.array([False, True]), (6, 5), dtype
        )
        np.testing.assert_array_equal(same[0], pixels[0])
        np.testing.assert_array_equal(same[1], pixels[1][:, ::-1])


def test_what_shrinks_is_averaged_as_pillow_does():
    pixels = noise(1, 20, 16, 3)
    out = resized(pixels, *boxes((2.5, 1, 15, 14)), jnp.array([False]), (6, 6))
    for c in range(3):
        plane = Image.fromarray(pixels[0, :, :, c].astype(np.float32))
        wanted = plane.resize((6, 6), Image.Resampling.BILINEAR, box=(1, 2.5, 15, 17.5))
        np.testing.assert_allclose(out[0, :, :, c], np.asarray(wanted), atol=1e-2)


def test_augmented_images_are_random_parts():
    """Of images whose values are the row and the column, which say the part that was taken."""
    n, side = 600, 32
    rows, columns = np.meshgrid(np.arange(side), np.arange(side), indexing="ij")
    image = np.stack([rows, columns, 0 * rows], axis=-1).astype(np.uint8)
    pixels = jnp.broadcast_to(jnp.asarray(image), (n, side, side, 3))
    run = jax.jit(lambda key: augmented(key, pixels, (side, side))[:, 5:-5:21, 5:-5:21])
    out = np.asarray(run(jax.random.key(0)), float)
    normal = out
    out = 255 * (out * np.array(IMAGENET_DEVIATION) + np.array(IMAGENET_MEAN))
    # Two inner points 21 apart in the output.
    tall = (out[:, 1, 0, 0] - out[:, 0, 0, 0]) / 21 * side
    broad = (out[:, 0, 1, 1] - out[:, 0, 0, 1]) / 21 * side
    assert np.mean(broad < 0) == pytest.approx(0.5, abs=0.07)
    broad = np.abs(broad)
    assert (np.maximum(tall, broad) < side + 0.05).all()
    area, ratio = tall * broad / side**2, broad / tall
    free = np.maximum(tall, broad) < side - 0.05  # nothing was cut
    assert area[free].min() > 0.699
    assert 0.74 < ratio.min() < 0.8
    assert 1.25 < ratio.max() < 1.35
    assert area.max() <= 1.001
    assert np.mean(np.log(ratio)) == pytest.approx(0, abs=0.02)
    np.testing.assert_array_equal(np.asarray(run(jax.random.key(0)), float), normal)
    assert not np.array_equal(np.asarray(run(jax.random.key(1)), float), normal)


def test_augmentation_works_in_either_precision():
    pixels = noise(2, 16, 8, 3)
    run = jax.jit(augmented, static_argnames=("size", "dtype"))
    wide = run(jax.random.key(0), pixels, (12, 6))
    with jax.enable_x64(False):
        narrow = run(jax.random.key(0), pixels, (12, 6))
        half = run(jax.random.key(0), pixels, (12, 6), dtype=jnp.bfloat16)
    assert wide.dtype == narrow.dtype == np.float32
    assert half.dtype == jnp.bfloat16
    np.testing.assert_allclose(wide, narrow, atol=1e-5)
    np.testing.assert_allclose(np.asarray(half, float), np.asarray(wide, float), atol=0.06)
