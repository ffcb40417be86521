# SPDX-License-Identifier: Apache-2.0
"""Slot attention on the user's images: trained without masks, scored with them."""

from pathlib import Path

import masked_sets
import numpy as np
import pytest
from support.models.sizes import TINY

from saccade.core import verbosity
from saccade.core.errors import SaccadeError
from saccade.exporter.evaluation import segmentation
from saccade.exporter.evaluation.evaluate import evaluate
from saccade.exporter.evaluation.evaluated_model import subjects_of_checkpoint
from saccade.exporter.evaluation.tasks import EvaluateOptions
from saccade.models.checkpoint import load
from saccade.models.data.samples.masks import Masks
from saccade.models.scores.ari import adjusted_rand_index
from saccade.models.training.options import TrainOptions
from saccade.models.training.train import train

FIELDS = TINY["slot-attention"] | {"slots": 3, "rounds": 2}


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> str:
    return masked_sets.folders(tmp_path_factory.mktemp("mine"), masked_sets.scenes(20))


@pytest.fixture(scope="module")
def trained(data):
    return load(_trained(data, Path(data).with_name("slots.safetensors")).path)


def _trained(data: str, out: Path, **others):
    return train(
        "slot-attention",
        TrainOptions(out, data=data, set=FIELDS, steps=2, batch=4, side_px=12, **others),
    )


def test_masks_choose_the_step_and_are_kept_for_the_gate(trained, data):
    assert set(trained.card["validation"]) == {"fg_ari", "ari", "negative_mse"}
    assert trained.calibration["masks"].shape == (256, 12, 12)
    assert trained.calibration["masks"].max() == 2
    (row,) = np.flatnonzero((trained.calibration["image"][14:] == trained.calibration["image"][0])
                            .all((1, 2, 3)))[:1]  # fmt: skip
    assert row == 0, "14 training images are repeated, with their masks"
    assert np.array_equal(*trained.calibration["masks"][[0, 14]])


def test_training_needs_no_masks(data, trained, tmp_path, monkeypatch):
    def refuse(*_):
        pytest.fail("a mask was read")

    monkeypatch.setattr(Masks, "_one", refuse)
    alone = _trained(f"{data}/images/a", tmp_path / "a.safetensors")
    assert list(alone.card["validation"]) == ["negative_mse"]
    assert alone.card["task"] == "reconstruction" and "task" not in trained.card
    options = EvaluateOptions(data=f"{data}/images/a", task="reconstruction", budget=("t2",))
    ((score, _),) = [found.scores for found in evaluate(alone.path, options).results]
    assert (score.name, score.n) == ("PSNR", 4)
    assert set(alone.calibration) == {"image"}
    assert alone.card["data_sha256"]["train"] == trained.card["data_sha256"]["train"]
    with pytest.raises(SaccadeError, match="found no masks, with which segmentations are compared"):
        evaluate(alone.path, EvaluateOptions(data=f"{data}/images/a"))


def test_any_split_is_scored(trained, data, monkeypatch):
    monkeypatch.setattr(segmentation, "_CHUNK", 3)
    found = {}
    for split, count in ((None, 4), ("val", 2), ("all", 20)):
        options = EvaluateOptions(data=data, split=split, budget=("t2",))
        (result,) = evaluate(trained.path, options).results
        assert result.split == {"val": "validation"}.get(split, split or "test")
        assert [score.name for score in result.scores] == ["FG-ARI", "ARI", "MSE"]
        assert [score.n for score in result.scores] == [count] * 3
        found[split] = result
    (model,) = subjects_of_checkpoint(trained, ("t2",))
    options = EvaluateOptions(data=data, split="all")
    scenes = segmentation.masked_images(model.images(), options)
    states = segmentation._states(model, options, 20)
    inputs = {"image": np.asarray(scenes.images), "initial_state": states}
    slots = model.component("")(inputs)["masks"].argmax(1)
    expected = adjusted_rand_index(np.asarray(scenes.masks), slots, foreground=True)
    np.testing.assert_allclose(found["all"].samples, expected, atol=1e-6)
    assert found["all"].data_sha256 == scenes.sha256


def test_images_without_objects_are_left_out(trained, data, tmp_path, capsys):
    pairs = masked_sets.scenes(6)
    pairs[2][1][:] = 0
    mine = masked_sets.folders(tmp_path, pairs)
    options = EvaluateOptions(data=mine, split="all", budget=("t2",))
    with verbosity.verbosity():
        (result,) = evaluate(trained.path, options).results
    assert result.scores[0].n == 5 and len(result.samples) == 5
    assert "left out 1 images whose masks show no object" in capsys.readouterr().err
    (model,) = subjects_of_checkpoint(trained, ("t2",))
    samples, _ = segmentation.ari_examples([model], options, np.array([4, 0]))
    images = segmentation.masked_images(model.images(), options).images
    seen = [row for row in range(6) if segmentation.masked_images(model.images(), options)
            .masks[np.array([row])].any()]  # fmt: skip
    assert np.array_equal(samples.images, images[[seen[4], seen[0]]])
    scored = segmentation.masked_segments(model, options)
    assert np.array_equal(scored.images, images[seen])
    assert np.array_equal(scored.states, segmentation._states(model, options, 6)[seen])
    nothing = EvaluateOptions(data=mine, split="all", background=(0, 1, 2))
    with pytest.raises(
        SaccadeError, match=r"no mask of the split all shows an object.*--background"
    ):
        evaluate(trained.path, nothing)
    with pytest.raises(SaccadeError, match="--positions left: only generated scenes have it"):
        evaluate(trained.path, EvaluateOptions(data=mine, positions="left"))


def test_rounds_are_compared_on_the_users_images(trained, data):
    (model,) = subjects_of_checkpoint(trained, ("t2",))
    for mine in (data, f"{data}/images/a"):
        parts = segmentation.segments(model, EvaluateOptions(data=mine), "validation").segments(
            model
        )
        assert parts.owners.shape == (2 if mine == data else 20, 12, 12)
