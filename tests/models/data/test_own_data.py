# SPDX-License-Identifier: Apache-2.0
"""The user's own samples: equal from every format, read when they are used, refused by row."""

import json
import os
import shutil
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import labelled_sets
import numpy as np
import pytest
from labelled_sets import FORMATS, SPLITS, Sample, add_member, parquet
from PIL import Image

from saccade.core import verbosity
from saccade.core.errors import SaccadeError
from saccade.models.data.datasets import Dataset, load_data, pixel_moments
from saccade.models.data.options import DataOptions
from saccade.models.data.samples import images as image_file
from saccade.models.data.samples.images import Images
from saccade.models.data.samples.source import ClassFolders
from saccade.models.data.splits import drawn_rows, rows_by_split
from saccade.models.preprocessing import Preprocessing

DIGITS = Preprocessing(8, 8, 1, (0.0,), (1.0,))
PHOTOGRAPHS = Preprocessing(16, 24, 3, (0.0,) * 3, (1.0,) * 3)


@pytest.fixture(scope="module")
def digits() -> list[Sample]:
    return labelled_sets.digits()


@pytest.fixture(scope="module")
def photographs() -> list[Sample]:
    return labelled_sets.photographs()


def expected(samples: list[Sample], split: str, preprocessing: Preprocessing) -> np.ndarray:
    from saccade.models.image_decoding import decode

    wanted = preprocessing.wanted()
    return np.stack([decode(one.data, wanted) for one in samples if split in (one.split, "all")])


@pytest.mark.parametrize("form", FORMATS)
def test_every_format_gives_the_same_samples(
    form: str, tmp_path: Path, digits: list[Sample], photographs: list[Sample]
) -> None:
    for name, samples, fitted in (("d", digits, DIGITS), ("p", photographs, PHOTOGRAPHS)):
        (tmp_path / name).mkdir()
        data = FORMATS[form](tmp_path / name, samples)
        for split in (*SPLITS, "all"):
            own = load_data(data, split, preprocessing=fitted)
            assert np.array_equal(own.images, expected(samples, split, fitted))
            written = [one.label for one in samples if split in (one.split, "all")]
            assert [own.class_names[label] for label in own.labels] == written
            assert own.split == split and own.skipped == 0
        assert load_data(data, "val", preprocessing=fitted).split == "validation"


def test_npz_by_the_names_of_others(tmp_path: Path, digits: list[Sample]) -> None:
    data = labelled_sets.medmnist(tmp_path, digits)
    for split in SPLITS:
        own = load_data(data, split, preprocessing=DIGITS)
        assert np.array_equal(own.images, expected(digits, split, DIGITS))
    images, labels = np.zeros((30, 6, 6), np.uint8), np.arange(30, dtype=np.uint8) % 3
    images[20:] = 9
    arrays = {"x_train": images[:20], "y_train": labels[:20]}
    np.savez(tmp_path / "mnist.npz", **arrays, x_test=images[20:], y_test=labels[20:, None])
    parts = [load_data(tmp_path / "mnist.npz", split) for split in SPLITS]
    # A tenth of the training samples is held out, since MNIST has no validation samples.
    assert [len(part.labels) for part in parts] == [18, 2, 10]
    assert parts[2].images.min() == 9 and not parts[0].images.any()


def test_a_held_out_tenth_is_of_the_training_rows() -> None:
    rows = rows_by_split(np.arange(40) // 2 % 2, np.tile([2, 0], 20))
    assert len(rows["validation"]) == 2 and rows["test"].tolist() == list(range(0, 40, 2))
    assert sorted([*rows["train"], *rows["validation"]]) == list(range(1, 40, 2))


GOLDEN = {  # hashes of pixels, labels and names in their order, before other formats were read
    ("mine", "train"): "f6d6698f445a4924",
    ("mine", "validation"): "88992555e4bcd0c2",
    ("mine", "test"): "8fec478b5028dc54",
    ("mine.npz", "train"): "8a68ef72d3a37dba",
    ("mine.npz", "validation"): "7342e9edd933c313",
    ("mine.npz", "test"): "ac458acdc163a925",
}


def test_splits_and_their_order_are_as_ever(tmp_path: Path, monkeypatch) -> None:
    rng = np.random.default_rng(7)
    for index, count in enumerate((11, 12, 13)):
        folder = tmp_path / "mine" / f"kind-{index}"
        folder.mkdir(parents=True)
        for number in range(count):
            width, height = (int(side) for side in rng.integers(20, 40, 2))
            pixels = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / f"{number}.png")
    rng = np.random.default_rng(7)
    images = rng.integers(0, 256, (40, 6, 6), dtype=np.uint8)
    np.savez(tmp_path / "mine.npz", images=images, labels=np.arange(40) % 3)
    for most in (2**20, 0):  # in memory, and from the files
        monkeypatch.setattr(image_file, "KEPT_BYTES", most)
        for (name, split), digest in GOLDEN.items():
            assert load_data(tmp_path / name, split, side_px=16).sha256.startswith(digest)


@pytest.fixture
def read(monkeypatch) -> list[int]:
    """The rows whose files were read; nothing fits into memory."""
    rows: list[int] = []

    def counted(source: ClassFolders, row: int, most: int) -> bytes:
        rows.append(row)
        return whole(source, row, most)

    whole = ClassFolders.read
    monkeypatch.setattr(ClassFolders, "read", counted)
    monkeypatch.setattr(image_file, "KEPT_BYTES", 0)
    return rows


def test_images_are_read_when_they_are_used(
    tmp_path: Path, digits: list[Sample], read: list[int]
) -> None:
    data = load_data(labelled_sets.class_folders(tmp_path, digits), "train", preprocessing=DIGITS)
    assert isinstance(data.images, Images) and data.images.shape == (12, 8, 8, 1)
    assert not read, "nothing is read to list them"
    whole = expected(digits, "train", DIGITS)
    assert np.array_equal(data.images[np.array([7, 0, 7])], whole[[7, 0, 7]])
    assert sorted({*read}) == sorted({int(row) for row in data.images.rows[[0, 7]]})
    few = data.first(4)
    # Four of them in a random order, the same for the labels.
    rows = drawn_rows(12, 4)
    assert np.array_equal(np.asarray(few.images), whole[rows]) and len(read) == 6
    assert np.array_equal(few.labels, data.labels[rows])
    data.images.ahead(np.array([9, 10]))
    assert np.array_equal(data.images[np.array([10, 9])], whole[[10, 9]])
    assert len(read) == 8, "what was read ahead is not read again"


def test_a_pass_in_order_reads_each_image_once(
    tmp_path: Path, digits: list[Sample], read: list[int]
) -> None:
    path = labelled_sets.class_folders(tmp_path, digits)
    data = load_data(path, "train", preprocessing=DIGITS)
    batches = [data.images[np.arange(start, start + 4)] for start in (0, 4, 8)]
    assert data.sha256 and sorted(read) == sorted(data.images.rows.tolist())
    again = load_data(path, "train", preprocessing=DIGITS)
    assert again.images[np.array([5, 6])].any()
    assert again.sha256 == data.sha256, "also if others were read before"
    assert pixel_moments(data.images) == pixel_moments(np.concatenate(batches))


def test_an_array_is_filled_block_by_block(
    tmp_path: Path, digits: list[Sample], monkeypatch
) -> None:
    sizes: list[int] = []
    whole = Images._decoded

    def counted(images: Images, places: np.ndarray) -> np.ndarray:
        sizes.append(len(places))
        return whole(images, places)

    monkeypatch.setattr(Images, "_decoded", counted)
    monkeypatch.setattr(image_file, "_BLOCK", 5)
    data = load_data(labelled_sets.class_folders(tmp_path, digits), "train", preprocessing=DIGITS)
    assert sizes == [5, 5, 2] and np.array_equal(data.images, expected(digits, "train", DIGITS))


def test_strays_are_reported(tmp_path: Path, digits: list[Sample], capsys) -> None:
    path = Path(labelled_sets.class_folders(tmp_path, digits))
    for name in ("notes.txt", ".hidden", "train/list.csv", "train/0/a.txt", "test/1/Thumbs.db"):
        (path / name).touch()
    (path / "__MACOSX").mkdir()
    (path / "train" / "0" / "deeper").mkdir()
    (path / "train" / "0" / "000.png").rename(path / "train" / "0" / "deeper" / "000.png")
    with verbosity.verbosity():
        data = load_data(path, "train", preprocessing=DIGITS)
        load_data(path, "test", preprocessing=DIGITS)
    assert len(data.labels) == 12
    said = capsys.readouterr().err
    assert said.count("left out 4 files of another kind, or in no class folder") == 1
    assert "notes.txt" in said and "test/1/Thumbs.db" in said and ".hidden" not in said


def test_small_classes_are_taken(tmp_path: Path, digits: list[Sample]) -> None:
    few = [one._replace(split="train") for one in digits if one.split != "train"]
    for sample in few:
        place = tmp_path / sample.label
        place.mkdir(exist_ok=True)
        (place / f"{sample.name}.png").write_bytes(sample.data)
    (tmp_path / "empty").mkdir()
    assert len(load_data(tmp_path, "all", preprocessing=DIGITS).labels) == 6
    parts = [load_data(tmp_path, split, preprocessing=DIGITS) for split in SPLITS]
    assert [len(part.labels) for part in parts] == [4, 1, 1]
    assert parts[0].class_names == ("0", "1", "2", "empty")


def test_labels_name_and_order_the_classes(tmp_path: Path, digits: list[Sample]) -> None:
    (tmp_path / "own.txt").write_text("two\n1\n0\n2\n")
    (tmp_path / "words.txt").write_text("zero\none\ntwo\n")
    asked = DataOptions(labels=tmp_path / "own.txt")
    words = DataOptions(labels=tmp_path / "words.txt")
    for form in ("class folders", "CSV", "shards"):
        (tmp_path / form).mkdir()
        data = FORMATS[form](tmp_path / form, digits)
        own = load_data(data, "test", preprocessing=DIGITS, asked=asked)
        assert own.class_names == ("two", "1", "0", "2") and own.labels.tolist() == [2, 1, 3]
        # No folder or label is called so: the words are those of the numbers, in their order.
        said = load_data(data, "test", preprocessing=DIGITS, asked=words)
        assert [said.class_names[label] for label in said.labels] == ["zero", "one", "two"]


def test_patterns_name_shards(tmp_path: Path, digits: list[Sample], monkeypatch) -> None:
    labelled_sets.shards(tmp_path, digits, per_shard=4)
    whole = load_data(tmp_path, "train", preprocessing=DIGITS)
    for pattern in ("train-{000..002}.tar", "train-*.tar", "train-00{0,1,2}.tar"):
        own = load_data(f"{tmp_path}/{pattern}", "all", preprocessing=DIGITS)
        # None is for validation, so that a tenth of the training samples is.
        assert {image.tobytes() for image in own.images} == {*map(np.ndarray.tobytes, whole.images)}
    for folder, names in (("val", "validation-*"), ("train", "train-*")):
        (tmp_path / folder).mkdir()
        for number, shard in enumerate(sorted(tmp_path.glob(f"{names}.tar"))):
            shutil.copy(shard, tmp_path / folder / f"{number}.tar")
    own = load_data(f"{tmp_path}/{{train,val}}/*.tar", "train", preprocessing=DIGITS)
    assert own.sha256 == whole.sha256, "the folders name the splits"
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SaccadeError, match=r"found no file train-003\.tar"):
        load_data("train-{000..003}.tar", "all", preprocessing=DIGITS)


@pytest.mark.parametrize("form", ["CSV", "Parquet", "JSON lines"])
def test_a_file_is_the_split_that_its_name_says(
    form: str, tmp_path: Path, digits: list[Sample]
) -> None:
    whole = Path(FORMATS[form](tmp_path, digits))
    load_data(whole.rename(tmp_path / f"test{whole.suffix}"), "train", preprocessing=DIGITS)
    if form == "CSV":
        table = tmp_path / "my_test.csv"
        table.write_text((tmp_path / "test.csv").read_text().replace("split", "other"))
        assert len(load_data(table, "held-out", preprocessing=DIGITS).labels) == len(digits)
        with pytest.raises(SaccadeError, match=r"train split is empty .*test 18"):
            load_data(table, "train", preprocessing=DIGITS)
    if form == "Parquet":
        (tmp_path / "hub").mkdir()
        labelled_sets.parquet_folder(tmp_path / "hub", digits)
        own = load_data(f"{tmp_path}/hub/data/train-*.parquet", "train", preprocessing=DIGITS)
        one = tmp_path / "hub/data/validation-00000-of-00001.parquet"
        assert len(own.labels) == 11 and set(own.labels) == {0, 1, 2}
        assert load_data(one, "held-out", preprocessing=DIGITS).split == "validation"


def test_validation_is_scored_where_there_is_no_test(tmp_path: Path, digits: list[Sample]) -> None:
    path = labelled_sets.class_folders(tmp_path, [one for one in digits if one.split != "test"])
    assert load_data(path, "held-out", preprocessing=DIGITS).split == "validation"
    with pytest.raises(SaccadeError, match=r"test split is empty \(train 12, validation 3, test 0"):
        load_data(path, "test", preprocessing=DIGITS)


def test_a_class_that_only_other_splits_have_is_refused(tmp_path: Path, capsys) -> None:
    lines = ["filename,label,split", "a.png,cat,train", "a.png,dog,train", "a.png,dgo,val"]
    (tmp_path / "x.csv").write_text("\n".join(lines))
    Image.new("L", (8, 8)).save(tmp_path / "a.png")
    with pytest.raises(
        SaccadeError, match=r"class 'dgo' has samples, .* train split. Did you mean dog"
    ):
        load_data(str(tmp_path / "x.csv"), "train")
    assert len(load_data(str(tmp_path / "x.csv"), "validation").labels) == 1
    (tmp_path / "x.csv").write_text("\n".join(lines).replace("dgo", "dog"))
    load_data(str(tmp_path / "x.csv"), "train")
    said = capsys.readouterr().err
    assert "x.csv: 2 classes (cat, dog); samples: 2 train, 1 validation, 0 test" in said


def test_unreadable_rows_are_left_out_and_counted(
    tmp_path: Path, digits: list[Sample], capsys
) -> None:
    data = labelled_sets.csv_file(tmp_path, digits)
    (tmp_path / "images/1/002.png").write_bytes(b"\x89PNG\r\n\x1a\n and no more")
    (tmp_path / "images/2/001.png").unlink()

    def loaded(rows: int) -> Dataset:
        return load_data(data, "train", preprocessing=DIGITS, asked=DataOptions(skip_bad=rows))

    own = loaded(2)
    assert own.skipped == 2 and np.bincount(own.labels).tolist() == [4, 3, 3]
    assert len(own.images) == 10
    said = capsys.readouterr().err
    assert "row 7: images/1/002.png: " in said and "row 10: images/2/001.png: no such file" in said
    with pytest.raises(
        SaccadeError, match=r"row 7: images/1/002.png.*--skip-bad 1 leaves out at mo"
    ):
        loaded(1)
    with pytest.raises(SaccadeError, match=r"row 7: images/1/002.png: .*it. Training, scoring and"):
        loaded(0)


def rows(*lines: str) -> Callable[[Path], str]:
    def make(folder: Path) -> str:
        (folder / "x.csv").write_text("\n".join(lines))
        Image.new("L", (8, 8)).save(folder / "a.png")
        return str(folder / "x.csv")

    return make


def objects(*lines: object) -> Callable[[Path], str]:
    def make(folder: Path) -> str:
        (folder / "x.jsonl").write_text("\n".join(map(json.dumps, lines)))
        return str(folder / "x.jsonl")

    return make


def members(*names: str) -> Callable[[Path], str]:
    def make(folder: Path) -> str:
        with tarfile.open(folder / "x.tar", "w") as tar:
            for name in names:
                add_member(tar, name, b"1")
        return str(folder / "x.tar")

    return make


def arrays(name: str, **values: object) -> Callable[[Path], str]:
    """An .npz of two images, which `name` names."""

    def make(folder: Path) -> str:
        pixels = np.zeros((2, 8, 8), np.uint8)
        np.savez(folder / "x.npz", **{"images": pixels, "labels": np.arange(2)} | values)
        return str(folder / name)

    return make


def two_kinds(folder: Path) -> str:
    parquet(image=[b"1"], label=[1])(folder)
    members("a.png", "a.cls")(folder)
    return str(folder)


def odd_name(folder: Path) -> str:
    for name in ("train-0.tar", "more.tar"):
        members("a.png", "a.cls")(folder)
        (folder / "x.tar").rename(folder / name)
    return str(folder)


def cut_tar(folder: Path) -> str:
    path = Path(members("a.png", "a.cls", "b.png", "b.cls")(folder))
    path.write_bytes(path.read_bytes()[:2048])
    return str(path)


def state(content: object) -> Callable[[Path], str]:
    def make(folder: Path) -> str:
        (folder / "state.json").write_text(json.dumps(content))
        return str(folder)

    return make


def pipe(name: str) -> Callable[[Path], str]:
    def make(folder: Path) -> str:
        os.mkfifo(folder / name)
        return str(folder / name)

    return make


def pipe_in_a_folder(folder: Path) -> str:
    state({"_data_files": [{"filename": "x.arrow"}]})(folder)
    os.mkfifo(folder / "x.arrow")
    return str(folder)


def text_file(name: str, text: str = "hello") -> Callable[[Path], str]:
    def make(folder: Path) -> str:
        (folder / name).write_text(text)
        return str(folder / name)

    return make


REFUSED: dict[str, tuple[Callable[[Path], str], str]] = {
    "no file": (rows("path,label", "a.png,x", "b.png,y"), "row 2: b.png: no such file in"),
    "a path that leads out": (rows("path,label", "a.png,x", "../b.png,y"), "row 2.*leads out of"),
    "no column of labels": (rows("path,size", "a.png,3"), "columns 'path', 'size', expected one "),
    "no column of paths": (rows("url,label", "a,3"), "found the columns 'url', 'label', expected"),
    "sentences alone": (rows("path,caption", "a.png,hi"), r"sentences \(caption\) without labels"),
    "an empty label": (rows("path,label", "a.png,x", "a.png,"), "row 2: a.png: found '' in column"),
    "an empty path": (rows("path,label", ",x"), "row 1: found '' in column 'path'"),
    "no such split": (rows("path,label,split", "a.png,x,tset"), "row 1: a.png: found 'tset' in"),
    "a value too many": (rows("path,label", "a.png,x,y"), "row 1: .*found 3 values, expected 2"),
    "no rows": (rows("path,label"), "found no rows"),
    "a label below 0": (rows("path,label", "a.png,0", "a.png,-1"), "row 2: a.png: found the la"),
    "a label out of range": (rows("path,label", "a.png,0", "a.png,7"), "found the label 7, expect"),
    "not text": (rows("path,label", "a\0.png,0"), "row 1: a\0.png|x.csv"),
    "no object": (objects({"path": "a", "label": 1}, 7), "row 2: cannot be read as .*found 7"),
    "a label that is none": (objects({"path": "a", "label": [1]}), r"row 1: a: found \[1\] in col"),
    "a path that is none": (objects({"path": 1, "label": 1}), "row 1: found 1 in column 'path'"),
    "an image without label": (members("a.png"), "x.tar: .*'image', expected one of labels: .cls"),
    "a label without image": (members("a.cls"), "sample 'a' has .cls, expected one image"),
    "mixed members": (
        members("a.png", "a.cls", "b.png", "b.cls", "b.txt"),
        "x.tar: sample 'b' has .cls .png .txt, but the samples before have .cls image",
    ),
    "mixed keys": (members("a.png", "b.png", "a.cls", "b.cls"), "the columns 'image', expected on"),
    "a sample again": (
        members("a.png", "a.cls", "b.png", "b.cls", "a.png", "a.cls"),
        "sample 'a' occurs again",
    ),
    "a label that is no object": (members("a.png", "a.json"), "'.json', 'image', expected one of"),
    "half a tar": (cut_tar, "cannot be read as a tar file .*it has no end"),
    "an empty tar": (members(), "found no rows"),
    "text as a tar": (text_file("x.tar"), "x.tar: .* a tar file .*compressed already"),
    "text as Parquet": (text_file("x.parquet"), "x.parquet: cannot be read as Parquet"),
    "Parquet of other columns": (parquet(a=[1]), "found the columns 'a', expected one of images"),
    "Parquet without a label": (parquet(image=[b""], label=[None]), "row 1: found None in column"),
    "Parquet without bytes": (parquet(image=["a", "b"], label=[0, 1]), "row 1: found str in col"),
    "Parquet and shards": (two_kinds, "found .parquet and .tar files, expected one kind"),
    "a shard of no split": (odd_name, "more.tar has no split in its name, but others have"),
    "a selection": (state({"_indices_data_files": [{}]}), "Call flatten_indices"),
    "files elsewhere": (state({"_data_files": [{"filename": "../x.arrow"}]}), "state.json names"),
    "a state of nothing": (state([]), "state.json names"),
    "a pipe as CSV": (pipe("x.csv"), "found a pipe or device"),
    "a pipe as a shard": (pipe("x.tar"), "found a pipe or device"),
    "a pipe as a table": (
        pipe_in_a_folder,
        r"state.json names \['x.arrow'\], expected .arrow files in the folder",
    ),
    "a cell that is too long": (
        rows("path,label", f"a.png,{'x' * 2**20}x"),
        r"row 1: cannot be read as CSV.*field larger than field limit \(1048576\)",
    ),
    "no header": (text_file("x.csv", ""), "x.csv: .*cannot be read as CSV.*the file is empty"),
    "a pattern of arrays": (arrays("*.npz"), "found .npz files, expected a folder .* Name one of"),
    "a label above all": (
        arrays("x.npz", labels=np.array([0, 2**64 - 1], np.uint64)),
        "x.npz: row 2: found the label 18446744073709551615, expected",
    ),
    "no names": (arrays("x.npz", class_names=np.array([], str)), "class_names, expected distinct"),
    "another suffix": (text_file("x.txt"), "a file of another kind.*folder of class folders"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_used_is_refused_by_row(case: str, tmp_path: Path) -> None:
    make, words = REFUSED[case]
    data = make(tmp_path)
    with pytest.raises(SaccadeError, match=f"(?s){words}") as refused:
        load_data(data, "all", preprocessing=DIGITS)
    assert "\n" not in str(refused.value)


def test_a_long_cell_beside_is_read(tmp_path: Path, digits: list[Sample]) -> None:
    data = rows("path,label,notes", f"a.png,x,{'long' * 50_000}", "a.png,y,")(tmp_path)
    assert load_data(data, "all", preprocessing=DIGITS).labels.tolist() == [0, 1]


def test_labels_that_do_not_fit_are_refused(tmp_path: Path, digits: list[Sample]) -> None:
    (tmp_path / "few.txt").write_text("1\n0\n")
    (tmp_path / "twice.txt").write_text("1\n0\n1\n")
    (tmp_path / "folders").mkdir()
    table = labelled_sets.csv_file(tmp_path, digits)
    folders = labelled_sets.class_folders(tmp_path / "folders", digits)
    for data, name, words in (
        (table, "few.txt", "row 9: images/2/000.png: found the label '2', expected one of the 2 n"),
        (folders, "few.txt", "1 of the 3 class folders .first: '2'. are not in --labels"),
        (table, "twice.txt", "'1' occurs twice"),
    ):
        with pytest.raises(SaccadeError, match=words):
            load_data(data, "test", preprocessing=DIGITS, asked=DataOptions(tmp_path / name))


def test_a_root_of_ones_own(tmp_path: Path, digits: list[Sample]) -> None:
    labelled_sets.csv_file(tmp_path, digits)
    (tmp_path / "lists").mkdir()
    moved = (tmp_path / "mine.csv").rename(tmp_path / "lists" / "mine.csv")
    with pytest.raises(SaccadeError, match=r"no such file in .*lists.*--data-root"):
        load_data(moved, "test", preprocessing=DIGITS)
    asked = DataOptions(data_root=tmp_path)
    assert len(load_data(moved, "test", preprocessing=DIGITS, asked=asked).labels) == 3


def test_preprocessing_of_a_new_model(tmp_path: Path, photographs: list[Sample]) -> None:
    data = labelled_sets.jsonl_file(tmp_path, photographs)
    assert load_data(data, "train", side_px=20).images.shape[1:] == (20, 20, 3)
    fitted = replace(PHOTOGRAPHS, resize_mode="longest")
    padded = load_data(data, "train", preprocessing=fitted).images
    assert (padded[:, 0] == 0).all(axis=(1, 2)).any(), "photographs keep their shape"
