# SPDX-License-Identifier: Apache-2.0
"""Texts as token states: the file, training on it, scores of what was trained, its graph."""

import json
from dataclasses import replace

import numpy as np
import pytest

from saccade.core.errors import SaccadeError
from saccade.exporter.evaluation.evaluate import evaluate
from saccade.exporter.evaluation.tasks import EvaluateOptions
from saccade.models.checkpoint import load
from saccade.models.data import token_states as text_file
from saccade.models.data.samples.source import DataDescription
from saccade.models.data.token_states import token_states
from saccade.models.training.options import TrainOptions
from saccade.models.training.train import train

TEXTS, MOST, WIDTH = 300, 6, 10
SMALL = {"input": "tokens", "m": 4, "n": 4, "pool_heads": 2}


def arrays():
    """Three classes that words tell, one of them by how two channels go together."""
    rng = np.random.default_rng(0)
    labels = np.arange(TEXTS) % 3
    tokens = rng.standard_normal((TEXTS, MOST, WIDTH)).astype(np.float32)
    tokens[labels == 1, :, 0] += 2
    tokens[labels == 2, :, 1] = 2 * tokens[labels == 2, :, 2]
    lengths = rng.integers(2, MOST + 1, TEXTS)
    tokens[np.arange(MOST) >= lengths[:, None]] = np.nan  # it does not count
    names = np.array(["plain", "high", "paired"])
    return {"tokens": tokens, "lengths": lengths, "labels": labels, "class_names": names}


def written(path, **changes):
    np.savez(path, **{k: v for k, v in (arrays() | changes).items() if v is not None})
    return path


@pytest.fixture(scope="module")
def states(tmp_path_factory):
    return written(tmp_path_factory.mktemp("states") / "reviews.npz")


@pytest.fixture(scope="module")
def trained(states):
    fast = {"steps": 120, "batch": 32, "learning_rate": 1e-2}
    out = states.with_name("sot.safetensors")
    return train("sot", TrainOptions(out, data=str(states), set=SMALL, **fast))


def test_splits_are_a_partition_per_class(states):
    parts = {split: token_states(states, split) for split in ("train", "validation", "test")}
    assert {name: len(each.labels) for name, each in parts.items()} == {
        "train": 210,
        "validation": 30,
        "test": 60,
    }
    assert all(np.bincount(each.labels).std() == 0 for each in parts.values())
    first = np.concatenate([each.tokens[:, 0, 3] for each in parts.values()])
    assert len(set(first.tolist())) == TEXTS
    assert len({each.sha256 for each in parts.values()}) == 3
    inside = np.arange(MOST) < parts["test"].length[:, None]
    assert parts["test"].tokens[inside].all() and not parts["test"].tokens[~inside].any()


def test_a_text_classifier_is_trained_and_scored(trained, states):
    checkpoint = load(trained.path)
    assert checkpoint.preprocessing is None and checkpoint.labels == ("plain", "high", "paired")
    assert checkpoint.config["dim"] == WIDTH and checkpoint.config["max_tokens"] == MOST
    assert checkpoint.card["validation_texts"] == 30
    assert checkpoint.calibration["tokens"].shape == (256, MOST, WIDTH)
    for task, least in (("top1", 0.7), ("knn", 0.5), ("probe", 0.6)):
        options = EvaluateOptions(data=str(states), task=task, budget=("exact",))
        (results,) = evaluate(trained.path, options).results
        assert results.scores[0].value > least and len(results.samples) == 60, task
    with pytest.raises(SaccadeError, match="takes token states, which saccade cannot generate"):
        evaluate(trained.path, EvaluateOptions())
    other = written(states.with_name("wide.npz"), tokens=np.zeros((TEXTS, MOST, 3), np.float32))
    with pytest.raises(SaccadeError, match=r"\(6, 3\) \(tokens, width\), expected \(6, 10"):
        evaluate(trained.path, EvaluateOptions(data=str(other)))


def test_what_the_training_cannot_use_is_said_at_once(states, tmp_path):
    out = tmp_path / "x.safetensors"
    for data, fields, message in (
        (None, {}, "Pass --data with an .npz, .safetensors or .parquet of tokens"),
        ("shapes", {}, "data 'shapes': is not a file"),
        (str(states), {"dim": 8}, "--set dim=8: the data has 10"),
    ):
        with pytest.raises(SaccadeError, match=message):
            train("sot", TrainOptions(out, data=data, set=SMALL | fields))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": None}, r"found arrays .*, expected tokens, lengths and labels \(tokens is mis"),
        ({"tokens": np.zeros((TEXTS, MOST, WIDTH))}, "float64 .* as tokens, expected float32"),
        ({"tokens": np.zeros((TEXTS, MOST), np.float32)}, r"expected float32 \(texts, tokens, wi"),
        ({"lengths": np.ones(TEXTS)}, r"float64 \(300,\) as lengths, expected one whole n"),
        ({"lengths": np.full(TEXTS, 7)}, "lengths range from 7 to 7, expected 1 to 6"),
        ({"lengths": np.zeros(TEXTS, int)}, "lengths range from 0 to 0"),
        ({"lengths": np.full(TEXTS, MOST)}, "NaN or infinity within the length of"),
        ({"labels": np.arange(299)}, r"found int64 \(299,\) as labels, expected one whole number"),
        ({"labels": np.zeros(TEXTS, int), "class_names": None}, "expected at least two"),
        ({"class_names": np.array(["a", "b"])}, "row 3: found the label '2', expected one of"),
        ({"class_names": np.array([None, 1, 2])}, "cannot be read as an .npz of plain arrays"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(changes, message, tmp_path):
    path = written(tmp_path / "states.npz", **changes)
    with pytest.raises(SaccadeError, match=message):
        token_states(path, "train")
    path.write_bytes(b"no zip")
    with pytest.raises(SaccadeError, match="of plain arrays"):
        token_states(path, "train")


def in_safetensors(path, **changes):
    from safetensors.numpy import save_file

    content = arrays() | changes
    names = content.pop("class_names").tolist()
    save_file(
        {name: np.ascontiguousarray(value) for name, value in content.items() if value is not None},
        path,
        {"class_names": json.dumps(names)},
    )
    return path


def in_parquet(path, **columns):
    import pyarrow as pa
    import pyarrow.parquet as pq

    own = arrays()
    rows = zip(own["tokens"], own["lengths"], strict=True)
    table = {"tokens": [states[:length].tolist() for states, length in rows]}
    table["label"] = own["class_names"][own["labels"]].tolist()
    pq.write_table(pa.table(table | columns), path)
    return path


def with_mask(path, **changes):
    """Padding before and between the tokens of a text, as a tokenizer's mask marks it."""
    own, rng = arrays(), np.random.default_rng(1)
    mask = np.zeros((TEXTS, MOST), np.int64)
    tokens = np.full_like(own["tokens"], np.nan)
    for row, length in enumerate(own["lengths"]):
        places = np.sort(rng.permutation(MOST)[:length])
        mask[row, places], tokens[row, places] = 1, own["tokens"][row, :length]
    return written(path, tokens=tokens, attention_mask=mask, lengths=None, **changes)


FORMS = {"a.safetensors": in_safetensors, "a.parquet": in_parquet, "a.npz": with_mask}


@pytest.mark.parametrize("name", FORMS)
def test_every_format_gives_the_same_states(name, states, tmp_path, monkeypatch):
    path = FORMS[name](tmp_path / name)
    for split in ("train", "test", "held-out"):
        expected = token_states(states, split)
        for most in (2**30, 0):  # in memory, and from the file
            monkeypatch.setattr(text_file, "KEPT_BYTES", most)
            found = token_states(path, split)
            assert isinstance(found.tokens, np.ndarray) == bool(most)
            words = [np.array(own.class_names)[own.labels] for own in (found, expected)]
            if name != "a.parquet":  # names are sorted where the file does not order them
                assert found.sha256 == expected.sha256
                assert np.array_equal(np.asarray(found.tokens), expected.tokens)
            assert {*words[0]} == {*words[1]} and len(words[0]) == len(words[1])
    rows = np.array([5, 0])
    assert np.array_equal(found.tokens[rows], np.asarray(found.tokens)[rows])
    assert np.array_equal(np.asarray(found.tokens[2:4]), np.asarray(found.tokens)[2:4])
    assert np.array_equal(found.tokens[3], np.asarray(found.tokens)[3])


def test_states_in_a_file_are_read_when_they_are_used(tmp_path, monkeypatch):
    """Training does not hold the states of all texts."""
    monkeypatch.setattr(text_file, "KEPT_BYTES", 0)
    most, whole = 0, text_file.StateRows.__getitem__

    def counted(rows, key):
        nonlocal most
        found = whole(rows, key)
        most = max(most, len(found)) if isinstance(found, np.ndarray) else most
        return found

    monkeypatch.setattr(text_file.StateRows, "__getitem__", counted)
    path = in_safetensors(tmp_path / "a.safetensors")
    options = TrainOptions(tmp_path / "m.safetensors", data=str(path), set=SMALL, steps=2, batch=8)
    lazy = train("sot", options)
    (result,) = evaluate(lazy.path, EvaluateOptions(data=str(path), budget=("exact",))).results
    assert 0 < most <= 256 and result.scores[0].n == 60
    monkeypatch.setattr(text_file, "KEPT_BYTES", 2**30)
    other = replace(options, out=tmp_path / "n.safetensors")
    assert (
        train("sot", other)
        .weights["head.class_fc.weight"]
        .equal(lazy.weights["head.class_fc.weight"])
    )


def test_given_splits_are_kept(tmp_path):
    names = ["train"] * 200 + ["test"] * 100
    for path in (
        written(tmp_path / "a.npz", split=np.array(names)),
        in_parquet(tmp_path / "a.parquet", split=names),
    ):
        sizes = [len(token_states(path, split).labels) for split in ("train", "val", "test")]
        assert sizes == [180, 20, 100]
    named = in_parquet(tmp_path / "test-00.parquet")
    assert len(token_states(named, "held-out").labels) == TEXTS


def test_labels_may_be_named(tmp_path):
    (tmp_path / "labels.txt").write_text("a\nb\nc\n")
    given = DataDescription.of(tmp_path / "labels.txt", None)
    assert token_states(written(tmp_path / "a.npz"), "test", given).class_names == ("a", "b", "c")


LISTS = [[[0.0, 1.0]]] * TEXTS
WRONG = {
    "no tensor": ("a.safetensors", {"tokens": None}, "tokens is missing"),
    "no lengths": ("a.safetensors", {"lengths": None}, "expected tokens, lengths and labels .leng"),
    "doubles": ("a.safetensors", {"tokens": np.zeros((9, 2, 2))}, "found float64 .* as tokens"),
    "a mask's shape": (
        "a.npz", {"attention_mask": np.ones((TEXTS, 2)), "lengths": None}, "as attention_mask",
    ),
    "a mask of twos": (
        "a.npz",
        {"attention_mask": np.full((TEXTS, MOST), 2), "lengths": None},
        "expected 0 or 1 for each",
    ),
    "an empty mask": (
        "a.npz",
        {"mask": np.zeros((TEXTS, MOST), int), "lengths": None},
        "lengths range from 0 to 0",
    ),
    "splits": ("a.npz", {"split": np.array(["x"] * TEXTS)}, "row 1: found 'x' in column 'split'"),
    "no list": ("a.parquet", {"tokens": [None, *LISTS[1:]]}, "row 1: found no list of equal"),
    "words": ("a.parquet", {"tokens": [[["a"]]] * TEXTS}, "row 1: tokens are not numbers"),
    "two widths": ("a.parquet", {"tokens": [*LISTS[1:], [[0.0] * 3]]}, "row 300: .* before. Write"),
    "uneven": ("a.parquet", {"tokens": [*LISTS[1:], [[0.0] * 3, [0.0]]]}, "several lengths"),
    "a label": ("a.parquet", {"label": [None] * TEXTS}, "row 1: found None in column 'label'"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_wrong_states_of_other_formats_are_refused(case, tmp_path):
    name, changes, words = WRONG[case]
    write = {**FORMS, "a.npz": written}[name]
    with pytest.raises(SaccadeError, match=words):
        token_states(write(tmp_path / name, **changes), "train")
    (tmp_path / name).write_bytes(b"damaged")
    with pytest.raises(SaccadeError, match=f"{name}: "):
        token_states(tmp_path / name, "train")
