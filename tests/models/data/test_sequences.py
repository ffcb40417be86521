# SPDX-License-Identifier: Apache-2.0
"""The user's points, texts, tokens, pairs and conditions, from every format; wrong rows."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest

from saccade.core import verbosity
from saccade.core.errors import SaccadeError
from saccade.models.data.listops import Grammar, as_bytes, listops, most_bytes, most_tokens
from saccade.models.data.options import DataOptions
from saccade.models.data.samples.point_clouds import in_unit_sphere
from saccade.models.data.sequences import SampleInputs as Input
from saccade.models.data.sequences import Sequences, sequences

COUNT = 20
TEXTS = [f"{'good' if row % 2 else 'bad'} film number {row}, é" for row in range(COUNT)]
LABELS = ["bad", "good"] * (COUNT // 2)
SPLITS = ["train"] * 12 + ["val"] * 4 + ["test"] * 4
OF_SPLIT = {"train": slice(0, 12), "validation": slice(12, 16), "test": slice(16, 20)}
BYTES, PAIR = Input("bytes"), Input("bytes", 2)


def csv_file(place: Path, **columns: list[str]) -> Path:
    names = ["text", "label", "split"] if not columns else [*columns, "label", "split"]
    texts = list(zip(*(columns or {"text": TEXTS}).values(), strict=True))
    rows = [
        ",".join(f'"{value}"' for value in (*text, label, split))
        for text, label, split in zip(texts, LABELS, SPLITS, strict=True)
    ]
    (place / "mine.csv").write_text("\n".join([",".join(names), *rows]))
    return place / "mine.csv"


def jsonl_file(place: Path) -> Path:
    rows = [
        json.dumps({"sentence": text, "label": label, "split": split})
        for text, label, split in zip(TEXTS, LABELS, SPLITS, strict=True)
    ]
    (place / "mine.jsonl").write_text("\n".join(rows))
    return place / "mine.jsonl"


def parquet_folder(place: Path) -> Path:
    import pyarrow.parquet as pq

    features = {"label": {"names": ["bad", "good"], "_type": "ClassLabel"}}
    for name, part in (
        ("train", slice(0, 12)),
        ("validation", slice(12, 16)),
        ("test", slice(16, 20)),
    ):
        table = pyarrow.table({"text": TEXTS[part], "label": [0, 1] * (len(TEXTS[part]) // 2)})
        info = {"huggingface": json.dumps({"info": {"features": features}})}
        pq.write_table(table.replace_schema_metadata(info), place / f"{name}-00.parquet")
    return place


def text_files(place: Path) -> Path:
    for row, (text, label, split) in enumerate(zip(TEXTS, LABELS, SPLITS, strict=True)):
        folder = place / "texts" / split / label
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{row:03}.txt").write_text(text)
    return place / "texts"


def npz_of_bytes(place: Path) -> Path:
    encoded = [text.encode() for text in TEXTS]
    most = max(map(len, encoded)) + 3
    rows = np.stack([np.frombuffer(one.ljust(most, b"x"), np.uint8) for one in encoded])
    arrays: dict[str, Any] = {"bytes": rows, "lengths": [len(one) for one in encoded]}
    arrays |= {"labels": np.arange(COUNT) % 2, "class_names": ["bad", "good"], "split": SPLITS}
    np.savez(place / "mine.npz", **arrays)
    return place / "mine.npz"


FORMATS: dict[str, Callable[[Path], Path]] = {
    "CSV": csv_file,
    "JSON lines": jsonl_file,
    "Parquet": parquet_folder,
    "text files": text_files,
    "npz": npz_of_bytes,
}


def texts_in(found: Sequences, name: str = "bytes") -> list[str]:
    lengths = found.inputs[name.replace("bytes", "length")]
    rows = zip(found.inputs[name], lengths, strict=True)
    return [bytes(row[:length]).decode() for row, length in rows]


@pytest.mark.parametrize("form", FORMATS)
def test_every_format_gives_the_same_texts(form: str, tmp_path: Path) -> None:
    data = str(FORMATS[form](tmp_path))
    for split, part in OF_SPLIT.items():
        found = sequences(data, split, BYTES)
        written = {*zip(TEXTS[part], LABELS[part], strict=True)}
        named = [found.class_names[label] for label in found.labels]
        assert {*zip(texts_in(found), named, strict=True)} == written and found.split == split
        assert found.inputs["bytes"].dtype == np.uint8 and found.takes.most == found.inputs[
            "bytes"
        ].shape[1] == max(len(text.encode()) for text in TEXTS[part])
        beyond = np.arange(found.takes.most) >= found.inputs["length"][:, None]
        assert not found.inputs["bytes"][beyond].any()
    whole = sequences(data, "held-out", BYTES)
    assert whole.split == "test" and whole.sha256 == sequences(data, "test", BYTES).sha256
    assert len(sequences(data, "all", BYTES).labels) == COUNT


def test_characters_are_those_of_the_training_texts(tmp_path: Path) -> None:
    data = str(csv_file(tmp_path))
    train = sequences(data, "train", Input("characters"))
    words = train.takes.vocabulary
    assert words == tuple(sorted({c for text in TEXTS[:12] for c in text})) and "7" in words
    unseen = sequences(data, "test", Input("characters", most=9, vocabulary=words[:3]))
    expected = [[words[:3].index(c) if c in words[:3] else 3 for c in t[:9]] for t in TEXTS[16:]]
    assert unseen.inputs["characters"].tolist() == expected
    assert unseen.inputs["characters"].dtype == np.int64


def test_pairs_have_two_inputs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    second = [text[::-1] for text in TEXTS]
    for names in (("sentence1", "sentence2"), ("premise", "hypothesis"), ("text_a", "text_b")):
        data = str(csv_file(tmp_path, **dict(zip(names, (TEXTS, second), strict=True))))
        found = sequences(data, "test", PAIR)
        assert texts_in(found) == TEXTS[16:] and texts_in(found, "bytes_b") == second[16:]
    with verbosity.verbosity():
        cut = sequences(data, "test", Input("bytes", 2, most=5))
    assert cut.inputs["length_b"].tolist() == [5] * 4 and cut.inputs["bytes_b"].shape == (4, 5)
    assert "cut 4 of 4 samples to 5 bytes (the longest has 23)" in capsys.readouterr().err
    with pytest.raises(SaccadeError, match="For pairs, pass --set input_sets=2"):
        sequences(str(csv_file(tmp_path, question1=TEXTS, question2=second)), "test", BYTES)


def clouds(place: Path) -> tuple[Path, np.ndarray]:
    """As ModelNet: a folder per class, with the splits in it."""
    rng = np.random.default_rng(0)
    points = rng.normal(5, 3, (6, 9, 6)).astype(np.float32)
    for row in range(6):
        folder = place / "clouds" / ("box", "ball")[row % 2] / ("train" if row < 4 else "test")
        folder.mkdir(parents=True, exist_ok=True)
        if row % 3:
            np.save(folder / f"{row}.npy", points[row])
        else:
            np.savetxt(folder / f"{row}.txt", points[row], delimiter=",")
    return place / "clouds", points


def test_points_from_files_and_arrays(tmp_path: Path) -> None:
    data, points = clouds(tmp_path)
    (data / "box" / "notes.md").touch()
    labels = np.array([1, 0] * 3)
    split = ["train"] * 4 + ["test"] * 2
    np.savez(tmp_path / "a.npz", points=points, labels=labels, split=split)
    names = [f"clouds/{('box', 'ball')[r % 2]}/{split[r]}/{r}" for r in range(6)]
    rows = [
        f"{name}{'.npy' if r % 3 else '.txt'},{labels[r]},{split[r]}"
        for r, name in enumerate(names)
    ]
    (tmp_path / "a.csv").write_text("\n".join(["path,label,split", *rows]))
    order = {str(data): [5, 4], str(tmp_path / "a.npz"): [4, 5], str(tmp_path / "a.csv"): [4, 5]}
    for path, own in order.items():
        found = sequences(path, "test", Input("points"))
        expected = np.stack([in_unit_sphere(points[row])[:, :3] for row in own])
        np.testing.assert_allclose(found.inputs["points"], expected, atol=1e-6)
        assert found.inputs["length"].tolist() == [9, 9]
        assert found.labels.tolist() == labels[own].tolist()
    whole = sequences(str(data), "test", Input("tokens"))
    assert whole.takes.width == 6, "tokens are all columns"
    np.testing.assert_allclose(whole.inputs["tokens"][0][:, 3:], points[5][:, 3:], atol=1e-6)
    few = sequences(str(data), "test", Input("points", most=4)).inputs
    rows_in = (few["points"][0][:, None] == sequences(str(data), "test", Input("points"))
               .inputs["points"][0]).all(-1)  # fmt: skip
    assert few["points"].shape == (2, 4, 3) and rows_in.any(1).all()
    assert np.argmax(rows_in, 1).tolist() != [0, 1, 2, 3], "a choice, not the beginning"
    wide = sequences(str(data), "test", Input("points", most=12)).inputs
    assert wide["points"].shape == (2, 12, 3) and not wide["points"][:, 9:].any()


def arrays(**changes: Any) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    tokens = rng.standard_normal((COUNT, 5, 4)).astype(np.float32)
    condition = rng.standard_normal((COUNT, 3, 2)).astype(np.float32)
    images = rng.integers(0, 256, (COUNT, 6, 6), dtype=np.uint8)
    return {
        "tokens": tokens,
        "tokens_b": -tokens,
        "lengths": np.arange(COUNT) % 5 + 1,
        "lengths_b": np.full(COUNT, 5),
        "condition": condition,
        "condition_lengths": np.arange(COUNT) % 3 + 1,
        "images": images,
        "images_b": 255 - images,
        "points": rng.standard_normal((COUNT, 7, 3)),
        "characters": rng.integers(0, 2, (COUNT, 5)),
        "vocabulary": np.array(["a", "b"]),
        "labels": np.arange(COUNT) % 2,
    } | changes


def npz(place: Path, **changes: Any) -> str:
    kept = {name: value for name, value in arrays(**changes).items() if value is not None}
    np.savez(place / "mine.npz", **kept)
    return str(place / "mine.npz")


def test_arrays_with_conditions_and_pairs(tmp_path: Path) -> None:
    data, own = npz(tmp_path), arrays()
    takes = Input("tokens", conditioned=True)
    rows = np.concatenate([sequences(data, s, takes).inputs["condition"] for s in OF_SPLIT])
    assert len(rows) == COUNT
    every = sequences(data, "all", Input("tokens", 2, conditioned=True)).inputs
    assert set(every) == {
        *("tokens", "tokens_b", "length", "length_b", "condition", "condition_length")
    }
    assert np.array_equal(every["tokens_b"][:, 0], -every["tokens"][:, 0])
    assert sorted(every["condition_length"]) == sorted(own["condition_lengths"])
    beyond = np.arange(3) >= every["condition_length"][:, None]
    assert not every["condition"][beyond].any() and every["condition"][~beyond].all()
    fewer = Input("tokens", conditioned=True, condition_most=2)
    assert sequences(data, "all", fewer).inputs["condition"].shape == (COUNT, 2, 2)
    both = sequences(data, "all", Input("image", 2, image=(6, 6, 1))).inputs
    assert np.array_equal(both["image_b"], 255 - both["image"]) and both["image"].ndim == 4
    letters = sequences(data, "all", Input("characters"))
    assert letters.takes.vocabulary == ("a", "b")


def bad_row(text: str) -> Callable[[Path], str]:
    def write(place: Path) -> str:
        lines = csv_file(place).read_text().splitlines()
        (place / "mine.csv").write_text("\n".join([*lines[:3], text, *lines[3:]]))
        return str(place / "mine.csv")

    return write


def folder_with(name: str, data: bytes) -> Callable[[Path], str]:
    def write(place: Path) -> str:
        folder = clouds(place)[0] if not name.endswith(".txt") else text_files(place)
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
        return str(folder)

    return write


def changed(**changes: Any) -> Callable[[Path], str]:
    return lambda place: npz(place, **changes)


TOKENS, POINTS, GIVEN = (
    Input("tokens"),
    Input("points"),
    Input("tokens", conditioned=True),
)
NAN = np.full((COUNT, 5, 4), np.nan, np.float32)
WRONG: dict[str, tuple[Input, Callable[[Path], str], str]] = {
    "no path": (BYTES, lambda place: "nowhere", "no such path, but the model reads bytes. Pass a"),
    "images": (POINTS, lambda place: __file__, "no points, but the model reads points. Pass a"),
    "no text": (BYTES, bad_row('"",bad,train'), "row 3: found '' in column 'text'"),
    "no label": (BYTES, bad_row('"a",,train'), "row 3: found '' in column 'label'"),
    "a split": (BYTES, bad_row('"a",bad,later'), "row 3: found 'later' in column 'split'"),
    "a column": (BYTES, lambda place: str(csv_file(place, words=TEXTS)), "expected one of texts:"),
    "no rows": (
        BYTES,
        lambda place: (place / "a.csv").write_text("text,label\n") and str(place / "a.csv"),
        "found no rows, expected one per sample",
    ),
    "empty file": (BYTES, folder_with("train/bad/x.txt", b""), "train/bad/x.txt: is empty"),
    "Latin-1": (BYTES, folder_with("train/bad/x.txt", b"\xe9"), "is not UTF-8 text"),
    "half split": (POINTS, folder_with("box/x.npy", b""), "box/x.npy is in no folder of a split"),
    "damaged": (POINTS, folder_with("box/train/x.npy", b"x"), "box/train/x.npy: cannot be read as"),
    "no classes": (POINTS, lambda place: str(place), "found no .* files in class folders"),
    "no points": (POINTS, changed(points=None), "found arrays .*points is missing"),
    "two columns": (POINTS, changed(points=np.ones((COUNT, 7, 2))), "float64 .*x, y, z per p"),
    "no floats": (POINTS, changed(points=np.ones((COUNT, 7, 3), int)), "found int64 .* as points"),
    "NaN": (TOKENS, changed(tokens=NAN), "found NaN or infinity in tokens"),
    "NaN in a pair": (Input("tokens", 2), changed(tokens_b=NAN), "NaN or infinity in tokens_b"),
    "lengths": (Input("tokens", 2), changed(lengths_b=np.full(COUNT, 6)), "lengths_b range from 6"),
    "width": (Input("tokens", width=3), changed(), "tokens have 4 values, expected 3"),
    "no condition": (GIVEN, changed(condition=None), "condition is missing"),
    "condition's shape": (GIVEN, changed(condition=np.ones(COUNT)), "found float64 .* as cond"),
    "condition's NaN": (
        GIVEN, changed(condition=np.full((COUNT, 3, 2), np.inf)), "condition has NaN or infinity",
    ),
    "labels": (TOKENS, changed(labels=np.arange(3)), "found int64 .* as labels"),
    "split names": (Input("characters"), changed(split=["x"] * COUNT), "row 1: found 'x' in col"),
    "vocabulary": (Input("characters"), changed(vocabulary=np.array(["a"] * 2)), "distinct"),
    "other words": (
        Input("characters", vocabulary=("x", "y")), changed(), "is not that of the model",
    ),
    "image size": (Input("image", 2, image=(8, 8, 1)), changed(), r"images are \(6, 6, 1\)"),
    "two sizes": (
        Input("image", 2), changed(images_b=np.zeros((COUNT, 9, 9), np.uint8)), "expected one size",
    ),
    "condition elsewhere": (
        Input("bytes", conditioned=True), lambda place: str(csv_file(place)), "found no conditions",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_wrong_samples_are_refused(case: str, tmp_path: Path) -> None:
    takes, write, words = WRONG[case]
    with pytest.raises(SaccadeError, match=words):
        sequences(write(tmp_path), "train", takes)


def test_unreadable_rows_are_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = folder_with("box/train/x.npy", b"x")(tmp_path)
    with verbosity.verbosity():
        found = sequences(data, "train", POINTS, DataOptions(skip_bad=1))
    assert found.skipped == 1 and len(found.labels) == len(found.inputs["points"]) == 3
    assert "left out 1 of 4 rows of the split train" in capsys.readouterr().err
    (tmp_path / "clouds/box/train/y.npy").write_bytes(b"y")
    with pytest.raises(SaccadeError, match=r"y.npy: .*--skip-bad 1 leaves out at most 1"):
        sequences(data, "train", POINTS, DataOptions(skip_bad=1))


def test_listops_as_text() -> None:
    drawn = listops("test", 50, grammar=Grammar(max_tokens=20))
    read = as_bytes(drawn, most_bytes(20))
    for row in range(50):
        text = bytes(read.characters[row, : read.length[row]]).decode()
        words = text.split(" ")
        assert len(words) == drawn.length[row] and text[0] == "[" and text[-1] == "]"
        ends = np.flatnonzero(read.values[row] >= 0)
        expected = drawn.values[row][drawn.values[row] >= 0]
        assert read.values[row][ends].tolist() == expected.tolist()
        assert {text[end] for end in ends} == {"]"}
    assert read.characters.dtype == np.uint8 and most_tokens(most_bytes(20)) == 20
    lengths = [most_bytes(tokens) for tokens in (4, 7)]
    assert lengths == [len("[MIN 1 2 ]"), len("[MIN [MIN 1 2 ] 2 ]")]
