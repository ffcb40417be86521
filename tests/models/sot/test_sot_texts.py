# SPDX-License-Identifier: Apache-2.0
"""Texts as token states: the file, training on it, scores of what was trained, its graph."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: pip install '.[export]'")

from saccade.errors import SaccadeError  # noqa: E402
from saccade.exporter.evaluation.evaluate import evaluate  # noqa: E402
from saccade.exporter.evaluation.options import EvaluateOptions  # noqa: E402
from saccade.models.checkpoint import load  # noqa: E402
from saccade.models.data.token_states import token_states  # noqa: E402
from saccade.models.training.options import TrainOptions  # noqa: E402
from saccade.models.training.train import train  # noqa: E402

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
        (None, {}, "Pass --data with an .npz of tokens, lengths and labels"),
        ("shapes", {}, "data 'shapes': is not a file"),
        (str(states), {"dim": 8}, "--set dim=8: the data has 10"),
    ):
        with pytest.raises(SaccadeError, match=message):
            train("sot", TrainOptions(out, data=data, set=SMALL | fields))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"tokens": None},
            r"found arrays .*, expected tokens, lengths and labels \(tokens is miss",
        ),
        ({"tokens": np.zeros((TEXTS, MOST, WIDTH))}, "tokens are float64, expected float32"),
        ({"tokens": np.zeros((TEXTS, MOST), np.float32)}, r"expected \(texts, tokens, width"),
        ({"lengths": np.ones(TEXTS)}, r"lengths are float64 \(300,\), expected one whole number"),
        ({"lengths": np.full(TEXTS, 7)}, "lengths range from 7 to 7, expected 1 to 6"),
        ({"lengths": np.zeros(TEXTS, int)}, "lengths range from 0 to 0"),
        ({"lengths": np.full(TEXTS, MOST)}, "NaN or infinity within the length of"),
        ({"labels": np.arange(299)}, r"labels are int64 \(299,\), expected one whole number"),
        ({"labels": np.zeros(TEXTS, int), "class_names": None}, "expected at least two"),
        ({"class_names": np.array(["a", "b"])}, "labels range from 0 to 2, expected 0 to"),
        ({"class_names": np.array([None, 1, 2])}, "not an .npz of plain arrays"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(changes, message, tmp_path):
    path = written(tmp_path / "states.npz", **changes)
    with pytest.raises(SaccadeError, match=message):
        token_states(path, "train")
    path.write_bytes(b"no zip")
    with pytest.raises(SaccadeError, match="of plain arrays"):
        token_states(path, "train")
