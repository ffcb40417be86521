# SPDX-License-Identifier: Apache-2.0
"""SPARO from the user's images with sentences, alone or on the towers of a CLIP without slots."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import paired_sets
import pytest
import torch
from support.models.sizes import TOWERS
from tiny_clip import tiny_clip

from saccade.core.errors import SaccadeError, ShapeError
from saccade.exporter.evaluation.evaluate import evaluate
from saccade.exporter.evaluation.tasks import EvaluateOptions
from saccade.models.checkpoint import Checkpoint, load
from saccade.models.official.convert import ConvertOptions, convert
from saccade.models.sparo import training as sparo
from saccade.models.sparo.training import PairsSource
from saccade.models.training.options import TrainOptions
from saccade.models.training.start import load_start, started
from saccade.models.training.task import with_pixels
from saccade.models.training.train import train

SLOTS = {"pooling": "sparo", "slots": 4, "slot_dim": 6}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A table of 30 images, and a recipe of few steps."""
    folder = tmp_path_factory.mktemp("pairs")
    extra = {"scenes": 0, "validation_images": 40}
    quick = replace(sparo.QUICK, steps=2, batch=12, config=sparo.SMALL | TOWERS, extra=extra)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sparo, "QUICK", quick)
        yield paired_sets.csv_file(folder, paired_sets.told(30))


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """A converted CLIP without slots, which reads any text."""
    place = tmp_path_factory.mktemp("clip")
    folder, merges = tiny_clip(place)
    convert("auto", folder, ConvertOptions(place / "clip.safetensors", vocabulary=merges))
    return load(place / "clip.safetensors")


def test_two_towers_are_trained_on_pairs(pairs: str, tmp_path: Path) -> None:
    out = tmp_path / "pairs.safetensors"
    checkpoint = load(train("sparo", TrainOptions(out, data=pairs, side_px=16)).path)
    said = {
        word
        for line in Path(pairs).read_text().splitlines()[1:]
        for word in line.split(",")[1].split()
    }
    assert set(checkpoint.config["words"]) <= said and checkpoint.labels == ()
    assert set(checkpoint.calibration) == {"image", "tokens"}
    assert checkpoint.calibration["image"].shape == (256, 16, 16, 3)
    assert {"r1", "text_r10", "image_r1"} <= set(checkpoint.card["validation"])
    assert checkpoint.card["training_sentences"] == 45
    assert checkpoint.card["task"] == "retrieval", "for the next command"
    assert set(checkpoint.card["data_sha256"]) == {"train", "validation"}
    assert sorted(checkpoint.weights["slot_order"].tolist()) == [0, 1, 2, 3]
    result = evaluate(out, EvaluateOptions(data=pairs, task="retrieval", split="all")).results[0]
    assert [score.name for score in result.scores][2] == "text R@10"
    assert (result.scores[0].n, result.scores[3].n) == (30, 75) and result.split == "all"


def test_a_batch_has_each_image_once_with_one_of_its_sentences(pairs: str, tmp_path: Path) -> None:
    task = sparo.SparoTask(TrainOptions(tmp_path / "x.safetensors", data=pairs, side_px=16))
    assert isinstance(task.source, PairsSource)
    own = task.source.pairs["train"]
    place = {image.tobytes(): index for index, image in enumerate(own.images)}
    rng, told = np.random.default_rng(0), set()
    for step in range(20):
        batch = with_pixels(task.batch(step, rng))
        images = [image.tobytes() for image in batch["image"].numpy()]
        assert len(set(images)) == len(images) == 12
        for image, tokens in zip(images, batch["tokens"].numpy(), strict=True):
            texts = own.texts(place[image])
            row = [text for text in texts if (task.encode([text])[0] == tokens).all()]
            assert row
            told.add(row[0])
    assert told == set(own.spread()[0]), "each sentence is drawn"


def test_words_that_are_rare_or_unknown_are_said(
    pairs: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sparo, "_MOST_WORDS", 5)
    monkeypatch.setattr(sparo, "_MOST_TOKENS", 6)
    options = TrainOptions(tmp_path / "x.safetensors", data=pairs, side_px=16)
    task = sparo.SparoTask(options)
    assert len(task.model.config.words) == 5 and task.model.config.context_length == 6
    assert with_pixels(task.batch(0, np.random.default_rng(0)))["tokens"].shape == (12, 6)
    assert "kept the 5 most frequent of " in capsys.readouterr().err
    sparo.note_unknown_words(["a red zebra"], ("a", "red"))
    said = "1 of the 3 words of the sentences are not among the 2 of --init, which reads"
    assert said in capsys.readouterr().err


def test_a_read_out_is_trained_on_frozen_towers(
    clip: Checkpoint, pairs: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "slots.safetensors"
    options = TrainOptions(
        out, data=pairs, init=clip.path, set=SLOTS, freeze=("image", "text"), batch=8
    )
    child = load(train("sparo", options).path)
    towers = {name for name in clip.weights if name.startswith(("image.", "text."))}
    assert all(torch.equal(child.weights[name], clip.weights[name]) for name in towers)
    new = set(child.card["new_head"])
    assert new == set(child.weights) - towers and "logit_scale" in new
    projections = ["image_pool.project.weight", "text_pool.project.weight"]
    assert sorted(child.card["left_out"]) == projections
    assert child.config["merges"] == clip.config["merges"] and child.config["words"] == []
    assert child.preprocessing == clip.preprocessing
    said = capsys.readouterr().err
    assert f"new: {len(new)} tensors (" in said and "left out of the checkpoint: 2 tensors" in said
    fresh = sparo.SparoTask(started("sparo", options)).model.state_dict()
    moved = [name for name in new if not torch.equal(fresh[name], child.weights[name])]
    assert "image_pool.read_out.query" in moved and "text_pool.read_out.key.weight" in moved


def test_a_clip_is_trained_further_as_it_is(
    clip: Checkpoint, pairs: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = TrainOptions(tmp_path / "x.safetensors", data=pairs, init=clip.path)
    given = started("sparo", options)
    task = sparo.SparoTask(given)
    load_start(task, given)
    weights = task.model.state_dict()
    assert all(torch.equal(weights[name], value) for name, value in clip.weights.items())
    assert (
        "has no slots (pooling cls), and stays so. --set pooling=sparo" in capsys.readouterr().err
    )


def test_blocks_that_the_read_out_replaces_are_left_out(
    clip: Checkpoint, pairs: str, tmp_path: Path
) -> None:
    given = started(
        "sparo",
        TrainOptions(
            tmp_path / "x.safetensors",
            data=pairs,
            init=clip.path,
            set=SLOTS | {"reduce_depth": 1},
        ),
    )
    task = sparo.SparoTask(given)
    load_start(task, given)
    left_out = {name.rpartition("blocks.")[2][:1] for name in task.card["left_out"][2:]}
    blocks = [name for name in task.card["left_out"] if "blocks" in name]
    assert {name.split(".")[2] for name in blocks} == {"1"} and left_out >= {"1"}
    assert torch.equal(
        task.model.state_dict()["image.blocks.0.widen.weight"],
        clip.weights["image.blocks.0.widen.weight"],
    )


def test_other_tensors_still_have_to_fit(clip: Checkpoint, pairs: str, tmp_path: Path) -> None:
    given = TrainOptions(tmp_path / "x.safetensors", data=pairs, init=clip.path)
    with pytest.raises(ShapeError, match=r"image.blocks.0.* found floats \[16, 24\], expected"):
        train("sparo", replace(given, set=SLOTS | {"image_hidden": 32}))
    with pytest.raises(SaccadeError, match=r"--freeze image_pool: .* is new, so it must be"):
        train("sparo", replace(given, set=SLOTS, freeze=("image_pool",)))
    with pytest.raises(SaccadeError, match=r"--labels names.txt: .* has sentences"):
        train("sparo", replace(given, labels=Path("names.txt")))
    assert not list(tmp_path.iterdir())
