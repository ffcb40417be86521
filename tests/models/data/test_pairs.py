# SPDX-License-Identifier: Apache-2.0
"""The user's images with sentences, true and false: equal from every format, refused by row."""

import json
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import paired_sets
import pytest
from labelled_sets import SPLITS, add_member, digits, parquet, shards
from paired_sets import FORMATS, Pair

from saccade.core.errors import SaccadeError
from saccade.models.data.datasets import HELD_OUT, load_data
from saccade.models.data.image_texts import (
    CaptionedImages,
    captioned_split,
    has_sentences,
    load_contrasts,
    load_pairs,
)
from saccade.models.data.options import DataOptions
from saccade.models.data.samples import images as image_file
from saccade.models.data.samples.sentences import open_captions
from saccade.models.data.samples.source import DataDescription
from saccade.models.image_decoding import decode
from saccade.models.preprocessing import Preprocessing

SEEN = Preprocessing(16, 16, 3, (0.0,) * 3, (1.0,) * 3)
ASKED = DataOptions()


@pytest.fixture(scope="module")
def pairs() -> list[Pair]:
    return paired_sets.told(10)


def told(pairs: CaptionedImages) -> list[tuple[bytes, tuple[str, ...]]]:
    images = np.asarray(pairs.images)
    return [(image.tobytes(), pairs.texts(place)) for place, image in enumerate(images)]


@pytest.mark.parametrize("form", FORMATS)
def test_every_format_gives_the_same_pairs(form: str, tmp_path: Path, pairs: list[Pair]) -> None:
    data = FORMATS[form](tmp_path, pairs)
    assert has_sentences(data)
    for split in (*SPLITS, "all"):
        own = [one for one in pairs if split in (one.split, "all")]
        found = load_pairs(data, split, ASKED, SEEN)
        assert told(found) == [
            (decode(one.data, SEEN.wanted()).tobytes(), one.texts) for one in own
        ]
        texts, owner = found.spread()
        assert texts == [text for one in own for text in one.texts]
        assert owner.tolist() == [place for place, one in enumerate(own) for _ in one.texts]
        # As the captioner reads them.
        source = open_captions(data, DataDescription())
        images = captioned_split(source, data, split, preprocessing=SEEN, asked=ASKED)
        assert images.captions == [one.texts for one in own]
        assert np.array_equal(images.images, found.images)
    assert load_pairs(data, HELD_OUT, ASKED, SEEN).split == "test"
    few = load_pairs(data, "all", ASKED, SEEN).first(3)
    assert told(few) == told(load_pairs(data, "all", ASKED, SEEN))[:3] and len(few) == 3


def test_images_that_do_not_fit_are_read_when_they_are_used(
    tmp_path: Path, pairs: list[Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = paired_sets.csv_file(tmp_path, pairs)
    whole = load_pairs(data, "train", ASKED, SEEN)
    monkeypatch.setattr(image_file, "KEPT_BYTES", 0)
    lazy = load_pairs(data, "train", ASKED, SEEN)
    assert isinstance(lazy.images, image_file.Images) and told(lazy) == told(whole)
    assert lazy.sha256 == whole.sha256
    text = Path(data).read_text()
    Path(data).write_text(text.replace(pairs[0].texts[0], "another sentence", 1))
    assert load_pairs(data, "train", ASKED, SEEN).sha256 != whole.sha256


def test_drawn_splits_divide_images_and_not_sentences(tmp_path: Path, pairs: list[Pair]) -> None:
    data = Path(paired_sets.csv_file(tmp_path, pairs))
    lines = [line.rpartition(",")[0] for line in data.read_text().splitlines()]
    data.write_text("\n".join(lines))  # without the column of splits
    parts = [load_pairs(str(data), split, ASKED, SEEN) for split in SPLITS]
    assert [len(part) for part in parts] == [7, 1, 2]
    assert len({image for part in parts for image, _ in told(part)}) == 10
    assert sum(len(part.spread()[0]) for part in parts) == len(lines) - 1


def test_rows_that_cannot_be_read_are_left_out_and_counted(
    tmp_path: Path, pairs: list[Pair], capsys: pytest.CaptureFixture[str]
) -> None:
    data = paired_sets.csv_file(tmp_path, pairs)
    (tmp_path / "images" / "0001.png").unlink()
    found = load_pairs(data, "train", DataOptions(skip_bad=1), SEEN)
    whole = [one.texts for one in pairs if one.split == "train" and one.name != "0001.png"]
    assert [texts for _, texts in told(found)] == whole and found.skipped == 1
    with pytest.raises(SaccadeError, match=r"row 3: images/0001.png: no such file in"):
        load_pairs(data, "train", ASKED, SEEN)
    said = capsys.readouterr().err
    assert "left out 1 of 6 rows of the split train" in said


def test_data_of_classes_has_no_sentences(tmp_path: Path) -> None:
    labelled = shards(tmp_path, digits())
    assert not has_sentences(labelled) and not has_sentences("digits")
    with pytest.raises(
        SaccadeError, match=r"columns '.cls', 'image', expected one of sentences: .t"
    ):
        load_pairs(labelled, "all", ASKED, SEEN)


def test_the_first_file_says_whether_there_are_sentences(tmp_path: Path, pairs: list[Pair]) -> None:
    data = FORMATS["shards"](tmp_path, pairs)
    (tmp_path / "validation-999.tar").write_text("no tar file")
    assert has_sentences(data)


def test_a_text_in_a_shard_counts_before_the_field_of_its_object(tmp_path: Path) -> None:
    (pair,) = paired_sets.told(1)
    for name, texts, members in (
        ("both", ("one", "two"), {".json": '{"caption": "no"}', ".txt": "one\n\n two \n"}),
        ("last", ("one",), {".txt": "one", ".json": '{"caption": "no"}'}),
        ("damaged", ("one",), {".json": "[1", ".txt": "one"}),
        ("object", ("of it",), {".json": '{"caption": "of it", "width": 3}'}),
        ("list", ("a", "b"), {".json": '{"captions": ["a", "b"]}'}),
        ("gaps", ("a",), {".json": '{"captions": ["a", "", " "]}'}),
        ("fields", ("a",), {".json": '{"txt": "no", "caption": "a"}'}),
    ):
        path = tmp_path / f"{name}.tar"
        with tarfile.open(path, "w") as tar:
            add_member(tar, "x.png", pair.data)
            for suffix, text in members.items():
                add_member(tar, f"x{suffix}", text.encode())
        assert has_sentences(str(path))
        assert load_pairs(str(path), "all", ASKED, SEEN).texts(0) == texts


Make = Callable[[Path], str]


def table(*lines: str) -> Make:
    def make(folder: Path) -> str:
        (folder / "a.png").write_bytes(paired_sets.told(1)[0].data)
        (folder / "x.csv").write_text("\n".join(lines))
        return str(folder / "x.csv")

    return make


def shard(**members: str) -> Make:
    def make(folder: Path) -> str:
        with tarfile.open(folder / "x.tar", "w") as tar:
            for suffix, text in members.items():
                add_member(tar, f"a.{suffix}", text.encode())
        return str(folder / "x.tar")

    return make


REFUSED: dict[str, tuple[Make, str]] = {
    "no sentence": (table("image,caption", "a.png,hi", "a.png,"), "row 2.*found '' in column 'cap"),
    "no image": (table("image,caption", "a.png,hi", "b.png,hi"), "row 2: b.png: no such file in"),
    "two splits": (
        table("image,caption,split", "a.png,hi,train", "a.png,ho,test"),
        "row 2: a.png: found the split test, but row 1 has the same image in train",
    ),
    "labels alone": (table("image,label", "a.png,cat"), "found the columns 'image', 'label', expe"),
    "Parquet without sentences": (parquet(image=[b"x"], label=[1]), "expected one of sentences: "),
    "Parquet of a null": (
        parquet(image=[b"x"], caption=[None]),
        "row 1: found None in column 'caption', expected a se",
    ),
    "Parquet of no list": (
        parquet(image=[b"x"], caption=[[]]),
        r"row 1: found \[\] in column 'caption', expected a se",
    ),
    "an empty text": (shard(png="x", txt=" \n "), r"'a': found \[\] in column '.txt', expected a"),
    "an object without": (shard(png="x", json="{}"), "'.json', 'image', expected one of sentences"),
    "no text": (shard(png="x", cls="1"), "columns '.cls', 'image', expected one of sentences: .tx"),
    "no such data": (lambda folder: str(folder / "nothing"), "neither a name nor a path. Pass a"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_used_is_refused_by_row(case: str, tmp_path: Path) -> None:
    make, words = REFUSED[case]
    data = make(tmp_path)
    with pytest.raises(SaccadeError, match=f"(?s){words}"):
        load_pairs(data, "all", ASKED, SEEN)


def test_names_of_classes_are_refused_with_sentences(tmp_path: Path, pairs: list[Pair]) -> None:
    data = paired_sets.csv_file(tmp_path, pairs)
    with pytest.raises(SaccadeError, match=r"--labels names.txt: .* has sentences"):
        load_pairs(data, "all", DataOptions(labels=Path("names.txt")), SEEN)


def test_false_sentences_of_sugarcrepe(tmp_path: Path) -> None:
    folder = paired_sets.negatives(tmp_path)
    whole = load_contrasts(folder, None, ASKED, SEEN, None)
    assert whole.split == "all" and len(whole) == 8 and len(whole.negatives) == 12
    assert set(whole.kinds) == {"add_obj", "replace_att"}
    entries = json.loads((tmp_path / "replace_att.json").read_text())
    own = [place for place, kind in enumerate(whole.kinds) if kind == "replace_att"]
    found = {(whole.captions[place], whole.negatives[place]) for place in own}
    assert found == {(one["caption"], one["negative_caption"]) for one in entries.values()}
    few = load_contrasts(folder, None, ASKED, SEEN, 3)
    assert len(few) == 3 and set(few.owner.tolist()) == {0, 1, 2}
    single = load_contrasts(f"{folder}/add_*.json", "all", ASKED, SEEN, None)
    assert set(single.kinds) == {"add_obj"}


def test_false_sentences_of_a_table(tmp_path: Path) -> None:
    make = table("image,caption,negative_caption,kind", "a.png,hi,ho,one", "a.png,hi,hu,two")
    found = load_contrasts(make(tmp_path), None, ASKED, SEEN, None)
    assert (found.captions, found.negatives, found.kinds) == (
        ["hi", "hi"],
        ["ho", "hu"],
        ["one", "two"],
    )
    assert found.owner.tolist() == [0, 0] and len(found.images) == 1


def sugar(content: object) -> Make:
    def make(folder: Path) -> str:
        (folder / "a.png").write_bytes(paired_sets.told(1)[0].data)
        (folder / "x.json").write_text(json.dumps(content))
        return str(folder / "x.json")

    return make


ONE = {"filename": "a.png", "caption": "hi", "negative_caption": "ho"}
NOT_CONTRASTS: dict[str, tuple[Make, str]] = {
    "pairs": (table("image,caption", "a.png,hi"), "expected one of false sentences: negative_capt"),
    "no false one": (
        sugar({"0": ONE, "1": {**ONE, "negative_caption": ""}}),
        "'1': found '' in col",
    ),
    "no path": (
        sugar({"0": ONE, "1": {**ONE, "filename": "a\0"}}),
        r"'1': found .a.*x00' in column 'filename', expected a path. Correct the row, or remove it",
    ),
    "no such image": (sugar({"0": {**ONE, "filename": "b.png"}}), "no images: 'b.png'"),
    "a list": (sugar([ONE]), "cannot be read"),
    "no objects": (sugar({"0": 3}), "'0': found 3, expected SugarCrepe's objects"),
    "nothing": (sugar({}), "found no rows"),
}


@pytest.mark.parametrize("case", NOT_CONTRASTS)
def test_what_has_no_false_sentences_is_refused(case: str, tmp_path: Path) -> None:
    make, words = NOT_CONTRASTS[case]
    data = make(tmp_path)
    with pytest.raises(SaccadeError, match=words):
        load_contrasts(data, None, ASKED, SEEN, None)


def test_sentences_alone_are_no_labels(tmp_path: Path, pairs: list[Pair]) -> None:
    data = paired_sets.csv_file(tmp_path, pairs)
    with pytest.raises(SaccadeError, match=r"sentences \(caption\) without labels"):
        load_data(data, "all", preprocessing=SEEN)
