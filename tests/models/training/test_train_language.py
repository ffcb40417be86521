# SPDX-License-Identifier: Apache-2.0
"""From own questions and captions to answers: train, evaluate, export, ask in this process."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import language_sets
import numpy as np
import pytest
import torch
from places import TESTS
from quick_gate import FEW_SAMPLES

from saccade.core.errors import SaccadeError
from saccade.exporter.evaluation.evaluate import evaluate
from saccade.exporter.evaluation.tasks import EvaluateOptions
from saccade.exporter.export import ExportOptions, export
from saccade.models import resnet_sizes
from saccade.models.checkpoint import load
from saccade.models.data.samples import images as image_file
from saccade.models.families import build
from saccade.models.layers.resnet import ResNet
from saccade.models.training.options import TrainOptions
from saccade.models.training.train import train
from saccade.models.vqa import training as vqa_training
from saccade.serving.local.artefact import load_artefact

TINY = {
    "vqa": {"dim": 16, "heads": 2, "layers": 1, "hidden": 16, "pool_dim": 16, "pool_hidden": 16},
    "captioner": {"dim": 16, "hidden_dim": 24, "attention_dim": 8, "embedding_dim": 8},
}
CELLS = {
    "vqa": {"grid": [2, 2], "feature_dim": 8, "word_dim": 8},
    "captioner": {"widths": [8, 8, 8], "feature_dim": 8},
}
PIXELS = {"vqa": 16, "captioner": 16}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("language")
    for name in ("vqa", "coco", "tables"):
        getattr(language_sets, name)(place / name)
    return place


@pytest.fixture(scope="module", autouse=True)
def narrow() -> Iterator[None]:
    """A ResNet-18 with few channels and a block in each stage.

    Not fewer: with less than 16, oneDNN 3.12 (in torch 2.13) writes past its memory in the gradient
    of a strided 1x1 convolution, https://github.com/uxlfoundation/oneDNN/issues/6035.
    """
    blocks = {**resnet_sizes.BLOCKS, "resnet18": (1, 1, 1, 1)}
    with (
        patch.object(resnet_sizes, "WIDTHS", (16, 32, 64, 128)),
        patch.object(resnet_sizes, "BLOCKS", blocks),
    ):
        yield


def options_for(family: str, data: Path, out: Path, **others: Any) -> TrainOptions:
    given = TrainOptions(
        out,
        data=str(data),
        set=TINY[family] | CELLS[family],
        steps=3,
        batch=8,
        side_px=PIXELS[family],
        learning_rate=0.01,
    )
    return replace(given, **others)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file as torchvision's, but narrow."""
    torch.manual_seed(1)
    path = tmp_path_factory.mktemp("weights") / "resnet18-narrow.pth"
    network = ResNet(resnet_sizes.sizes_of("resnet18"), classes=5)
    for name, tensor in network.named_buffers():
        if "var" in name:
            tensor.uniform_(0.5, 2)
    torch.save(network.state_dict(), path)
    return path


def resnet_options(
    family: str, data: Path, out: Path, weights: Path, freeze: tuple[str, ...] = ("trunk",)
) -> TrainOptions:
    given = {"set": TINY[family], "side_px": 64, "trunk": weights, "freeze": freeze}
    return options_for(family, data, out, **given)


# One end to end for each family, through a ResNet. Only captions are exported: a graph of questions
# takes several times as long, and neither the ResNet nor the scores are other code in it.


def test_questions_end_to_end(place: Path, tmp_path: Path, weights: Path) -> None:
    options = resnet_options("vqa", place / "vqa", tmp_path / "vqa.safetensors", weights)
    options = replace(options, steps=6, set={**options.set, "answer": "sigmoid"})
    checkpoint = train("vqa", options)
    card = checkpoint.card
    assert sorted(checkpoint.labels) == sorted(["no", "yes", "1", "red", "green", "blue"])
    assert card["questions"] == {"train": 54, "validation": 18} and card["unknown_answers"] == 0
    assert set(card["accuracy_by_question_type"]) == {"what color is", "is it", "how many"}
    assert {"accuracy_yes_no", "accuracy_number", "accuracy_other"} < set(card["validation"])
    assert f"--trunk {weights.name} --freeze trunk" in card["command"]
    assert card["trunk"]["shape"] == "ResNet of 1-1-1-1 blocks, width 128, 64 x 64 px"
    assert checkpoint.config["encoder"] == "resnet18" and card["frozen"] == ["trunk"]
    stored = torch.load(weights, weights_only=True)
    kept = {name: value for name, value in stored.items() if not name.startswith("fc.")}
    for name, value in kept.items():
        assert checkpoint.weights[f"cells.resnet.{name}"].equal(value), name
    assert checkpoint.preprocessing.mean == resnet_sizes.MEAN

    (scored,) = evaluate(checkpoint.path, EvaluateOptions(data=str(place / "vqa"))).results
    scores = {score.name: score for score in scored.scores}
    assert scores["accuracy"].value == pytest.approx(card["validation"]["accuracy"], abs=1e-6)
    assert scores["accuracy"].n == 18 and scores["type: is it"].n == 6
    assert scores["answer known"].value == 1 and scored.split == "validation"
    kinds = [scores[kind].value for kind in ("yes/no", "number", "other")]
    assert np.mean(kinds) == pytest.approx(scores["accuracy"].value)


@pytest.mark.journey
def test_captions_end_to_end(place: Path, tmp_path: Path, weights: Path) -> None:
    options = resnet_options("captioner", place / "coco", tmp_path / "cap.safetensors", weights)
    options = replace(options, steps=6)
    checkpoint = train("captioner", options)
    words = {"a", "picture", "this", "is", "all", ".", "red", "green", "blue"}
    assert set(checkpoint.config["words"]) == words
    assert checkpoint.config["max_length"] == 5
    assert checkpoint.card["captions"] == 36 and checkpoint.card["validation_images"] == 6
    assert checkpoint.card["own_data"] and checkpoint.card["data"] == "coco"
    exported = export(checkpoint, ExportOptions(tmp_path / "cap"), FEW_SAMPLES)
    (scored,) = evaluate(exported.folder, EvaluateOptions(data=str(place / "coco"))).results
    scores = {score.name: score.value for score in scored.scores}
    assert scores["CIDEr-D"] == pytest.approx(checkpoint.card["validation"]["cider"], abs=1e-5)
    assert "true" not in scores and scored.protocol == "beam 3, 2 references an image"
    photo = place / "coco/val2014/COCO_val2014_000000000100.jpg"
    with load_artefact(exported.folder) as artefact:
        (said,) = artefact.caption([photo])
    assert set(said.text.split()) <= {*checkpoint.config["words"], "?"}


# What the options change.


def test_files_train_the_same_model_as_memory(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for family, data in (("vqa", "vqa"), ("captioner", "coco")):
        out = tmp_path / f"{family}.safetensors"
        train(family, options_for(family, place / data, out))
        in_memory = out.read_bytes()
        with monkeypatch.context() as changed:
            changed.setattr(image_file, "KEPT_BYTES", 0)
            train(family, options_for(family, place / data, out, force=True))
        assert out.read_bytes() == in_memory


def test_rare_words_and_answers_are_left_out(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = {"most_answers": 3, "most_words": 5, "answer": "sigmoid"}
    options = options_for("vqa", place / "vqa", tmp_path / "x.safetensors")
    task = vqa_training.task(replace(options, set={**options.set, **given}))
    assert task.labels == ("1", "no", "blue") and len(task.vocabulary.words) == 5
    assert task.card["unknown_answers"] == 12 and task._groups[0].tolist() == [0, 1, 2]
    targets = task._targets(np.array([0, 1, 2, 4]))
    assert targets == pytest.approx(np.array([[0, 0, 0], [0, 0.3, 0], [1, 0, 0], [0, 1, 0]]))
    assert "12 of 54 training questions have no answer among the 3" in capsys.readouterr().err
    task = vqa_training.task(replace(options, set={**options.set, **given, "answer": "softmax"}))
    assert task._groups[0].tolist() == [1, 2], "left out"
    assert task._targets(np.array([1, 2])).tolist() == [1, 0]
    batch = task.batch(0, np.random.default_rng(0))
    assert batch["answers"].dtype == torch.int64 and len(batch["images"]) == 8
    for name, value in (("answer_count", 100), ("word_count", 1000)):
        with pytest.raises(SaccadeError, match=f"Lower --set {name}"):
            vqa_training.task(replace(options, set={**options.set, name: value}))
    with pytest.raises(SaccadeError, match="word_count=0: expected a whole number of at least 1"):
        vqa_training.task(replace(options, set={**options.set, "word_count": 0}))


def test_answers_may_be_given(place: Path, tmp_path: Path) -> None:
    listed = tmp_path / "answers.txt"
    listed.write_text("No\nRed\nzebra\n")
    options = options_for("vqa", place / "vqa", tmp_path / "x.safetensors", labels=listed)
    task = vqa_training.task(options)
    assert task.labels == ("No", "Red", "zebra") and task.model.config.answers == 3
    listed.write_text("zebra\nlion\n")
    with pytest.raises(SaccadeError, match="no training question with one of the 2 answers"):
        vqa_training.task(options)


def test_a_trained_model_goes_on_with_its_words(place: Path, tmp_path: Path) -> None:
    first = tmp_path / "first.safetensors"
    train("captioner", options_for("captioner", place / "coco", first))
    other = tmp_path / "captions.csv"
    images = sorted((place / "coco/train2014").iterdir())
    rows = [
        f"{image},A {'zebra' if place == 4 else 'red'} picture"
        for place, image in enumerate(images)
    ]
    other.write_text("\n".join(["image,caption", *rows]) + "\n")
    options = TrainOptions(
        tmp_path / "second.safetensors",
        data=str(other),
        init=first,
        steps=2,
        batch=4,
        data_root=place / "coco",
    )
    with pytest.raises(SaccadeError, match=r"row 5: .*: 'zebra' is not among the 9 words of --i"):
        train("captioner", options)
    again = train("captioner", replace(options, set={"word_count": 2}))
    assert again.config["words"] == load(first).config["words"]
    assert again.card["init"]["name"] == first.stem


@pytest.mark.parametrize(
    ("given", "message"),
    (
        ({"encoder": "resnet18"}, "height_px is 40, expected 32 px for each of 1 cells"),
        ({"encoder": "resnet99"}, "encoder is 'resnet99', expected one of"),
    ),
)
def test_a_resnet_takes_whole_cells(place: Path, tmp_path: Path, given: Any, message: str) -> None:
    for family, data in (("vqa", "vqa"), ("captioner", "coco")):
        options = options_for(
            family, place / data, tmp_path / "x.safetensors", side_px=40, set=given
        )
        with pytest.raises(SaccadeError, match=message):
            train(family, options)


def test_a_resnet_is_a_trunk_like_others(place: Path, tmp_path: Path, weights: Path) -> None:
    """It is trained if it is not frozen, and goes on into another family."""
    out = tmp_path / "x.safetensors"
    tuned = train("captioner", resnet_options("captioner", place / "coco", out, weights, freeze=()))
    stored = torch.load(weights, weights_only=True)
    assert not tuned.weights["convolutions.conv1.weight"].equal(stored["conv1.weight"])
    options = resnet_options("vqa", place / "vqa", tmp_path / "y.safetensors", out)
    asked = train("vqa", replace(options, side_px=32))
    assert asked.preprocessing.height_px == 32, "the run chooses the size"
    for name, value in tuned.weights.items():
        if (inner := name.removeprefix("convolutions.")) != name:
            assert asked.weights[f"cells.resnet.{inner}"].equal(value), name


def test_trunks_of_other_kinds_are_refused(place: Path, tmp_path: Path, weights: Path) -> None:
    out = tmp_path / "x.safetensors"
    options = resnet_options("vqa", place / "vqa", out, weights)
    with pytest.raises(SaccadeError, match=r"--set encoder: the trunk .* \('resnet1"):
        train("vqa", replace(options, set={**TINY["vqa"], "encoder": "resnet50"}))
    with pytest.raises(SaccadeError, match=r"found a ViT of 2 .* takes a ResNet of color"):
        train("vqa", replace(options, trunk=TESTS / "golden" / "hugging_face" / "vit"))
    with pytest.raises(SaccadeError, match="this VQA network has the encoder 'cells', not a ResN"):
        train("vqa", replace(options, trunk=Path("shipped:vqa-shapes")))
    assert not list(tmp_path.iterdir())


def test_folding_keeps_a_resnet(weights: Path) -> None:
    for family, config in (
        ("vqa", {"grid": [2, 2], "height_px": 64, "width_px": 64}),
        ("captioner", {"grid_height": 2, "grid_width": 2, "height_px": 64, "width_px": 64}),
    ):
        model = build(family, {**TINY[family], **config, "encoder": "resnet18", "feature_dim": 128})
        network = next(part for part in model.modules() if isinstance(part, ResNet))
        network.load_state_dict(torch.load(weights, weights_only=True), strict=False)
        model = model.double().eval()
        folded = model.fold()
        assert not any(isinstance(part, torch.nn.BatchNorm2d) for part in folded.modules())
        component, same = model.components()[0], folded.components()[0]
        inputs = {
            spec.name: torch.randint(1, 5 if spec.name == "question" else 255, (2, *spec.shape[1:]))
            for spec in component.inputs
        }
        inputs = {n: v.to(torch.uint8) if n == "image" else v for n, v in inputs.items()}
        for name, value in component.run(**inputs).items():
            torch.testing.assert_close(same.run(**inputs)[name], value, rtol=1e-8, atol=1e-8)
