# SPDX-License-Identifier: Apache-2.0
"""A NAC on the user's points, texts, tokens, pairs and conditions: trained, ranked, scored."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from saccade.core.errors import SaccadeError
from saccade.exporter.evaluation import classification
from saccade.exporter.evaluation.evaluate import evaluate
from saccade.exporter.evaluation.evaluated_model import subjects_of_checkpoint
from saccade.exporter.evaluation.tasks import EvaluateOptions
from saccade.models.checkpoint import load
from saccade.models.data.listops import VOCABULARY
from saccade.models.nac import training
from saccade.models.nac.training import listops as nac_listops
from saccade.models.training.options import TrainOptions
from saccade.models.training.train import train

TINY = {"modules": 4, "dim": 8, "code_dim": 4, "ffn_dim": 8, "propagator_layers": 1, "heads": 1}
TINY |= {"signature_dim": 4, "readout_modules": 1, "graph_degree": 2.0}
ROWS = 30


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Arrays of every kind, and a table of texts."""
    place = tmp_path_factory.mktemp("samples")
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (ROWS, 8, 8), dtype=np.uint8)
    np.savez(
        place / "mine.npz",
        tokens=rng.standard_normal((ROWS, 5, 3)).astype(np.float32),
        points=rng.standard_normal((ROWS, 5, 3)).astype(np.float32),
        lengths=np.arange(ROWS) % 5 + 1,
        condition=rng.standard_normal((ROWS, 2, 3)).astype(np.float32),
        images=images,
        images_b=255 - images,
        labels=np.arange(ROWS) % 2,
        class_names=["even", "odd"],
    )
    rows = [f"a b {row},c {row} d,{('even', 'odd')[row % 2]}" for row in range(ROWS)]
    (place / "mine.csv").write_text("\n".join(["text,text_b,label", *rows]))
    lines = "\n".join(["text_a,text_b,label", *rows])
    (place / "pairs.csv").write_text(lines)
    return place


CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "points": ("mine.npz", {"input": "points"}, {"max_tokens": 5, "condition_dim": 0}),
    "tokens": ("mine.npz", {"input": "tokens"}, {"token_dim": 3, "conditional": False}),
    "bytes": ("mine.csv", {"input": "bytes"}, {"max_tokens": 6, "local_layers": 3}),
    "characters": ("mine.csv", {"input": "characters"}, {"vocabulary": tuple(" 0123456789ab")}),
    "pairs": ("pairs.csv", {"input": "bytes", "input_sets": 2}, {"max_tokens": 6}),
    "image pairs": ("mine.npz", {"input_sets": 2}, {"height_px": 8, "channels": 1}),
    "conditions": (
        "mine.npz",
        {"input": "tokens", "conditional": True},
        {"condition_dim": 3, "condition_tokens": 2},
    ),
    "conditioned images": (
        "mine.npz",
        {"conditional": True, "condition_dim": 3},
        {"condition_tokens": 2, "width_px": 8},
    ),
    "its own condition": (
        "mine.csv", {"input": "bytes", "conditional": True}, {"condition_dim": 0},
    ),
    "listops as text": ("listops", {"input": "bytes", "max_tokens": 12}, {"vocabulary": ()}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_every_kind_is_trained_and_scored(
    case: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nac_listops, "FIXED_TRAIN", 64)
    monkeypatch.setattr(nac_listops, "CALIBRATION", 32)
    name, given, decided = CASES[case]
    path = name if name == "listops" else str(data / name)
    out = tmp_path / "nac.safetensors"
    train("nac", TrainOptions(out, data=path, set=TINY | given, steps=2, batch=4))
    checkpoint = load(out)
    config = checkpoint.build().config
    assert {field: getattr(config, field) for field in decided} == decided
    options = EvaluateOptions(data=path, budget=(1,), limit=6)
    (result,) = evaluate(out, options).results
    assert result.scores[0].n == 6 and result.split == "test"
    models = subjects_of_checkpoint(checkpoint, (1,))
    wanted = {spec.name for spec in models[0].component("").inputs}
    assert {*checkpoint.calibration} == wanted | {"labels"}
    if name != "listops":
        assert checkpoint.labels == ("even", "odd") and len(checkpoint.calibration["labels"]) == 256
    samples, answers = classification.labelled_examples(models, options, np.array([1, 0]))
    assert len(answers[0]) == len(samples.truths) == 2
    texts = {"bytes": "a b ", "characters": "a b ", "listops as text": "["}
    if case in texts:
        assert all(text.startswith(texts[case]) for text in samples.questions)


def test_a_batch_is_as_long_as_its_longest_sample(data: Path, tmp_path: Path) -> None:
    options = TrainOptions(
        tmp_path / "m.safetensors",
        data=str(data / "mine.npz"),
        set=TINY | {"input": "tokens", "conditional": True, "condition_dim": 3},
        steps=2,
        batch=3,
    )
    task = training.task(options)
    rng = np.random.default_rng(3)
    rows = np.random.default_rng(3).integers(len(task.training.labels), size=3)
    batch = task.batch(0, rng)
    lengths = task.training.inputs["length"][rows]
    assert batch["tokens"].shape == (3, lengths.max(), 3) and lengths.max() < 5
    assert batch["condition"].shape == (3, 2, 3)
    assert np.array_equal(batch["labels"], task.training.labels[rows])
    logits = task.model.eval()(batch["tokens"], batch["length"], batch["condition"],
                               batch["condition_length"])  # fmt: skip
    loss = torch.nn.functional.cross_entropy(logits, batch["labels"], label_smoothing=0.1)
    task.extra["graph_weight"] = 0.0
    torch.testing.assert_close(task.loss(batch, 0), loss)


def test_what_no_training_could_use_is_refused(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "x.safetensors"
    for path, fields, words in (
        (None, {"input": "bytes"}, "no generated data of this kind. Pass --data with your own"),
        (str(data / "mine.csv"), {"input": "points"}, "column 'label'|expected one of images"),
        (str(data), {"input": "bytes"}, "found no .txt files in class folders"),
        (str(data / "mine.npz"), {"input": "tokens", "token_dim": 4}, "3 values, expected 4"),
        (str(data / "mine.npz"), {"input": "bytes"}, "expected bytes, lengths and labels"),
        ("listops", {"input": "points"}, "--set input=points: listops are expressions"),
        ("listops", {"input_sets": 2}, "--set input_sets=2: listops are single expressions"),
    ):
        with pytest.raises(SaccadeError, match=words):
            train("nac", TrainOptions(out, data=path, set=TINY | fields))
    assert not list(tmp_path.iterdir())


def test_models_of_other_characters_are_not_scored_on_listops(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "nac.safetensors"
    given = TINY | {"input": "characters"}
    train("nac", TrainOptions(out, data=str(data / "mine.csv"), set=given, steps=1, batch=2))
    for name in (None, "listops"):
        with pytest.raises(SaccadeError, match="reads other characters than those of listops"):
            evaluate(out, EvaluateOptions(data=name))
    assert load(out).config["vocabulary"] != list(VOCABULARY)
    bytes_model = tmp_path / "bytes.safetensors"
    given = TINY | {"input": "bytes"}
    train(
        "nac", TrainOptions(bytes_model, data=str(data / "mine.csv"), set=given, steps=1, batch=2)
    )
    with pytest.raises(SaccadeError, match="takes bytes, which saccade cannot generate"):
        evaluate(bytes_model, EvaluateOptions())
