# SPDX-License-Identifier: Apache-2.0
"""Captions and questions in the files that people have, and what is wrong with some of them."""

import json
import re
from pathlib import Path
from typing import Any

import language_sets
import numpy as np
import pytest
from PIL import Image
from support.json_files import edited

from saccade.core import json_text
from saccade.core.errors import SaccadeError
from saccade.core.json_text import stream_json
from saccade.models.data.image_texts import captioned_split, question_split
from saccade.models.data.options import DataOptions
from saccade.models.data.samples.questions import open_questions
from saccade.models.data.samples.sentences import Sentences
from saccade.models.data.samples.source import DataDescription

NOTHING = DataDescription()


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("language")
    for name in ("vqa", "coco", "tables"):
        getattr(language_sets, name)(place / name)
    return place


# Captions.


@pytest.mark.parametrize(
    "data",
    ("coco", "coco/annotations", "coco/annotations/captions_{train,val}2014.json"),
)
def test_cocos_captions_are_read(sets, data):
    source = Sentences.opened(str(sets / data), NOTHING)
    assert len(source) == 24
    assert source.sentences[0] == ("A red picture.", "This is all red.")
    assert source.split_of.tolist() == [0] * 18 + [1] * 6
    assert source.row_name(18) == "image 100: COCO_val2014_000000000100.jpg"
    assert source.read(18, 10**6)[:2] == b"\xff\xd8"


@pytest.mark.parametrize("name", ("captions.csv", "captions.jsonl"))
def test_tables_of_captions_are_read(sets, name):
    source = Sentences.opened(str(sets / "tables" / name), NOTHING)
    assert len(source) == 24 and source.split_of is None
    assert source.sentences[1] == ("A green picture.", "This is all green.")
    first = 3 if name.endswith("csv") else 2
    assert source.row_name(1) == f"row {first}: photos/COCO_train2014_000000000001.jpg"


def test_karpathys_file_gives_the_splits(tmp_path):
    names = ("train", "restval", "val", "test")
    language_sets.colored(tmp_path / "val2014", "val2014", 4)
    language_sets.write(
        tmp_path / "dataset_coco.json",
        {
            "images": [
                {
                    "filepath": "val2014",
                    "filename": f"COCO_val2014_{100 + place:012}.jpg",
                    "imgid": place,
                    "split": name,
                    "sentences": [{"raw": f"Said {place}. ", "tokens": ["said"]}],
                }
                for place, name in enumerate(names)
            ],
            "dataset": "coco",
        },
    )
    source = Sentences.opened(str(tmp_path), NOTHING)
    assert source.split_of.tolist() == [0, 0, 1, 2]
    assert source.sentences == [(f"Said {place}.",) for place in range(4)]


def test_an_image_is_in_one_drawn_split_only(sets):
    source = Sentences.opened(str(sets / "tables/captions.csv"), NOTHING)
    parts = {
        split: captioned_split(source, "x.csv", split, side_px=8, asked=DataOptions())
        for split in ("train", "validation", "test")
    }
    named = [name for part in parts.values() for name in map(part.named, range(len(part)))]
    assert len(named) == len(set(named)) == 24
    assert [len(part.captions) for part in parts.values()] == [18, 2, 4]
    assert parts["train"].images.shape == (18, 8, 8, 3)
    assert len({part.sha256 for part in parts.values()}) == 3
    again = captioned_split(source, "x.csv", "test", side_px=8, asked=DataOptions())
    assert again.sha256 == parts["test"].sha256
    source.sentences = [("Another.",)] * 24
    other = captioned_split(source, "x.csv", "test", side_px=8, asked=DataOptions())
    assert other.sha256 != again.sha256, "the hash is also that of the captions"


TABLES = {
    "image,caption,split|a.png,one,train|a.png,two,val": "row 2: a.png: found the split validation"
    ", but row 1 has the same image in",
    "caption,label|one,1": "the columns 'caption', 'label', expected one of images: path, file",
    "image,label|a.png,1": "the columns 'image', 'label', expected one of captions: sentence",
    "image,caption|a.png,one|a.png, ": "row 2: found ' ' in column 'caption', expected a sentence",
    "image,caption,split|a.png,one,left": "row 1: found 'left' in column 'split', expected one of",
    "image,caption": "found no captions",
}


@pytest.mark.parametrize("rows", TABLES)
def test_wrong_tables_of_captions(tmp_path, rows):
    message = TABLES[rows]
    (tmp_path / "x.csv").write_text(rows.replace("|", "\n"))
    with pytest.raises(SaccadeError, match=re.escape(message)):
        Sentences.opened(str(tmp_path / "x.csv"), NOTHING)


def _instances(value: Any) -> Any:
    for entry in value["annotations"]:
        entry.update(bbox=[0, 0, 1, 1], caption=None)


def _foreign_image(value: Any) -> Any:
    value["annotations"][3]["image_id"] = 777


def _listed_id(value: Any) -> Any:
    value["annotations"][3]["image_id"] = [7]


def _nameless(value: Any) -> Any:
    del value["images"][1]["file_name"]


@pytest.mark.parametrize(
    ("change", "message"),
    (
        (_instances, "annotation 1: found the fields bbox, caption, id, image_id, expected image_"),
        (_foreign_image, "found a caption of image_id 777, which is not among the 18 images"),
        (_listed_id, "annotation 4: found [7] as image_id, expected a whole number"),
        (_nameless, "image 2: found the fields height, id, license, width"),
        (lambda value: {"info": {}}, "found the fields info without images or captions"),
        (lambda value: [value], "images and annotations (found '[', expected {)"),
        (lambda value: {"images": value["images"]}, "found the fields images without"),
    ),
)
def test_wrong_coco_files(sets, tmp_path, change, message):
    path = tmp_path / "captions_train2014.json"
    path.write_bytes((sets / "coco/annotations" / path.name).read_bytes())
    edited(path, change)
    with pytest.raises(SaccadeError, match=re.escape(message)):
        Sentences.opened(str(path), DataDescription(root=sets / "coco"))


def test_captions_without_images_are_refused(sets, tmp_path):
    path = tmp_path / "captions_train2014.json"
    path.write_bytes((sets / "coco/annotations" / path.name).read_bytes())
    with pytest.raises(
        SaccadeError, match=r"found captions, but no images: 'COCO_train2014_0+\.jpg'"
    ):
        Sentences.opened(str(path), NOTHING)
    with pytest.raises(SaccadeError, match="found captions, but no images"):
        Sentences.opened(str(path), DataDescription(root=tmp_path))


def test_images_without_captions_are_counted(sets, tmp_path):
    path = tmp_path / "captions_train2014.json"
    path.write_bytes((sets / "coco/annotations" / path.name).read_bytes())
    edited(path, lambda value: value["annotations"].__delitem__(slice(0, 2)))
    source = Sentences.opened(str(path), DataDescription(root=sets / "coco"))
    assert len(source) == 17
    assert source.notes == (f"{path}: left out 1 images without captions",)


# Questions.


@pytest.mark.parametrize(
    "data",
    (
        "vqa",
        "vqa/v2_{OpenEnded_mscoco_train2014_questions,mscoco_train2014_annotations}.json",
        "vqa/v2_OpenEnded_mscoco_train2014_questions.json",
    ),
)
def test_vqas_questions_are_read(sets, data):
    source = open_questions(str(sets / data), NOTHING)
    both = data == "vqa"
    assert len(source) == (24 if both else 18) and len(source.texts) == 3 * len(source)
    assert source.texts[:2] == ["What color is this?", "Is it red?"]
    assert source.answers(0) == ["red"] * 9 + ["green"], "normalized"
    assert [source.kind(place) for place in range(3)] == ["other", "yes/no", "number"]
    assert source.type_of(2) == "how many"
    assert source.owner[:4].tolist() == [0, 0, 0, 1]
    assert source.row_name(1) == "image 1: COCO_train2014_000000000001.jpg"
    assert set(source.split_of.tolist()) == ({0, 1} if both else {0})


@pytest.mark.parametrize("name", ("questions.csv", "questions.jsonl"))
def test_tables_of_questions_are_read(sets, name):
    source = open_questions(str(sets / "tables" / name), NOTHING)
    assert len(source) == 24 and len(source.texts) == 72
    wanted = ["1"] if name.endswith("csv") else ["1"] * 9 + ["2"]
    assert source.answers(2) == wanted
    assert [source.kind(place) for place in range(3)] == ["other", "yes/no", "number"]
    assert source.type_of(0) == ""


def test_all_questions_about_an_image_are_in_its_split(sets):
    source = open_questions(str(sets / "tables/questions.csv"), NOTHING)
    parts = [
        question_split(source, "x.csv", split, side_px=8, asked=DataOptions())
        for split in ("train", "validation", "test")
    ]
    assert [len(part.places) for part in parts] == [54, 6, 12]
    images = [{part.named(place) for place in range(len(part.places))} for part in parts]
    assert sum(map(len, images)) == len(set.union(*images)) == 24
    part = parts[2]
    assert np.bincount(part.owner).tolist() == [3] * 4
    assert part.scores(0) == {source.answers(int(part.places[0]))[0]: 1.0}


def test_files_of_2017_and_names_as_ids_are_found(tmp_path):
    photos = tmp_path / "images/train2017"
    photos.mkdir(parents=True)
    for name in ("000000000007.jpg", "own.jpg"):
        Image.new("RGB", (8, 8)).save(photos / name)
    for ids in ((7, 7), ("own.jpg", "own.jpg")):
        asked = [{"question_id": i, "image_id": ids[i], "question": "What?"} for i in (0, 1)]
        language_sets.write(tmp_path / "questions_train2017.json", {"questions": asked})
        said = [{"question_id": i, "answers": ["dog"]} for i in (0, 1)]
        language_sets.write(tmp_path / "annotations_train2017.json", {"annotations": said})
        source = open_questions(str(tmp_path), NOTHING)
        assert len(source) == 1 and source.read(0, 10**6) and source.kind(0) == "other"


def _answerless(value: Any) -> Any:
    value["annotations"].pop()


def _of_another_set(value: Any) -> Any:
    value["annotations"][2]["question_id"] = 5


def _captions(value: Any) -> Any:
    value["annotations"] = [{"image_id": 1, "caption": "A dog."}]


@pytest.mark.parametrize(
    ("change", "message"),
    (
        (_answerless, "question 54 (question_id 17002): found no answer in v2_mscoco_train2014"),
        (_of_another_set, "annotation 3: found question_id 5, which v2_OpenEnded"),
        (_captions, "annotation 1: found the fields caption, image_id, expected question_id and"),
        (lambda value: {"info": 1}, "found the fields info, expected VQA's annotations"),
    ),
)
def test_wrong_annotations(sets, tmp_path, change, message):
    for path in (sets / "vqa").glob("*train2014*.json"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    edited(tmp_path / "v2_mscoco_train2014_annotations.json", change)
    with pytest.raises(SaccadeError, match=re.escape(message)):
        open_questions(str(tmp_path), DataDescription(root=sets / "vqa"))


def test_questions_without_annotations(sets, tmp_path):
    names = ("OpenEnded_mscoco_train2014_questions", "mscoco_train2014_annotations")
    asked, answered = (sets / f"vqa/v2_{name}.json" for name in names)
    (tmp_path / asked.name).write_bytes(asked.read_bytes())
    with pytest.raises(SaccadeError, match="without annotations, expected v2_mscoco_train2014_ann"):
        open_questions(str(tmp_path), DataDescription(root=sets / "vqa"))
    (tmp_path / answered.name).write_bytes(answered.read_bytes())
    test = tmp_path / asked.name.replace("train2014", "test2015")
    test.write_bytes(asked.read_bytes())
    source = open_questions(str(tmp_path), DataDescription(root=sets / "vqa"))
    assert len(source) == 18
    assert source.notes == (f"{tmp_path}: left out questions without annotations: {test.name}",)
    (tmp_path / asked.name).unlink()
    test.unlink()
    with pytest.raises(SaccadeError, match="expected also the questions"):
        open_questions(str(tmp_path), NOTHING)


@pytest.mark.parametrize("open_data", (open_questions, Sentences.opened))
def test_no_such_data(tmp_path, open_data):
    with pytest.raises(
        SaccadeError, match=r"--data shaps: found no such file or folder\. Did you mean"
    ):
        open_data("shaps", NOTHING)
    with pytest.raises(SaccadeError, match="found no such file, expected"):
        open_data(str(tmp_path), NOTHING)
    (tmp_path / "x.tar").write_bytes(b"")
    with pytest.raises(SaccadeError, match=r"found x\.tar, expected"):
        open_data(str(tmp_path / "x.tar"), NOTHING)


def test_images_that_cannot_be_read_are_named_and_counted(sets, tmp_path, capsys):
    for path in (sets / "vqa").rglob("*train2014*"):
        target = tmp_path / path.relative_to(sets / "vqa")
        target.mkdir() if path.is_dir() else target.parent.mkdir(exist_ok=True)
        if path.is_file():
            target.write_bytes(path.read_bytes())
    (tmp_path / "train2014/COCO_train2014_000000000004.jpg").unlink()
    (tmp_path / "train2014/COCO_train2014_000000000007.jpg").write_bytes(b"GIF89a")
    source = open_questions(str(tmp_path), NOTHING)
    with pytest.raises(SaccadeError, match=r"image 4: COCO_train2014_0+4\.jpg: no such file in"):
        question_split(source, "vqa", "all", side_px=8, asked=DataOptions())
    part = question_split(source, "vqa", "all", side_px=8, asked=DataOptions(skip_bad=2))
    assert part.skipped == 2 and len(part.places) == 48
    assert "left out 2 of 18 rows" in capsys.readouterr().err


# JSON of any size.


@pytest.mark.parametrize("piece", (1, 3, 2**18))
def test_json_is_read_in_pieces(tmp_path, monkeypatch, piece):
    monkeypatch.setattr(json_text, "_PIECE", piece)
    path = tmp_path / "x.json"
    value = {"a": [1, 23, 'f\u00fc"]}', {"b": [1]}], "c": {"d": 12}, "e": [], "f": 345}
    path.write_text(json.dumps(value, ensure_ascii=False), encoding="utf-8-sig")
    found = [
        ("a", 1),
        ("a", 23),
        ("a", 'f\u00fc"]}'),
        ("a", {"b": [1]}),
        ("c", {"d": 12}),
        ("f", 345),
    ]
    assert list(stream_json(path)) == found


@pytest.mark.parametrize(
    "text",
    (
        *("", "[]", '{"a": [1,]}', '{"a": 1,}', '{"a": [1 2]}', '{"a": 1} 2', '{"a": NaN}'),
        *('{"a": ["\\ud800"]}', "{1: 2}"),
        *('{"a": {"b": 1, "b": 2}}', '{"a": [1', "{" * 10_000, '{"a":' + "[" * 200_000),
    ),
    ids=range(13),
)
def test_damaged_json_is_refused(tmp_path, text):
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(ValueError):
        list(stream_json(tmp_path / "x.json"))


def test_a_value_larger_than_a_line_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(json_text.limits, "TABLE_LINE", 100)
    monkeypatch.setattr(json_text, "_PIECE", 50)
    (tmp_path / "x.json").write_text(json.dumps({"a": ["x" * 60] * 9, "b": "y" * 200}))
    with pytest.raises(ValueError, match="more than 100 characters"):
        list(stream_json(tmp_path / "x.json"))
