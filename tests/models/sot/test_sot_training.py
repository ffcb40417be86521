# SPDX-License-Identifier: Apache-2.0
"""The classifier's training task: what it draws, that every head learns by the same recipe."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from support.models.runs import losses_of

from saccade.core.errors import SaccadeError
from saccade.models.data.datasets import load_data
from saccade.models.data.signs import CLASS_NAMES
from saccade.models.sot.training import patch_side, task
from saccade.models.training.options import TrainOptions
from saccade.models.training.task import with_pixels

SMALL = {"dim": 16, "layers": 1, "heads": 2, "mlp_dim": 16, "m": 4, "n": 4, "pool_heads": 2}


def options(tmp_path, data, **changes):
    return TrainOptions(out=tmp_path / "sot.safetensors", data=data, set=SMALL | changes)


@pytest.mark.parametrize(
    ("height", "width", "side"), [(8, 8, 2), (24, 24, 3), (32, 64, 8), (64, 64, 8), (7, 5, 1)]
)
def test_a_patch_is_about_an_eighth_of_the_image(height, width, side):
    assert patch_side(height, width) == side


@pytest.mark.parametrize("fusion", ["sum", "class", "late"])
def test_a_few_steps_lower_the_loss(tmp_path, fusion):
    trained = task(options(tmp_path, "digits", fusion=fusion))
    losses = losses_of(trained, 60, 1e-2)
    assert np.mean(losses[-10:]) < 0.95 * np.mean(losses[:5])
    assert trained.validate()["exact"] > 0.15
    assert set(trained.report()) == {budget.label for budget in trained.model.budgets()}


def test_shapes_are_scenes_of_one_object(tmp_path):
    trained = task(options(tmp_path, None))
    batches = [with_pixels(trained.batch(0, np.random.default_rng(7))) for _ in range(2)]
    assert torch.equal(batches[0]["image"], batches[1]["image"])
    assert tuple(batches[0]["image"].shape) == (64, 48, 48, 3)
    saved = trained.saved()
    assert saved["calibration"]["image"].shape == (256, 48, 48, 3)
    assert len(saved["labels"]) == saved["config"]["classes"] == 16
    assert saved["config"]["patch_px"] == 6


def test_signs_are_new_in_every_batch_and_of_the_wanted_size(tmp_path):
    asked = options(tmp_path, "signs")
    trained = task(replace(asked, side_px=24))
    rng = np.random.default_rng(7)
    images = torch.cat([with_pixels(trained.batch(step, rng))["image"] for step in range(2)])
    assert tuple(images.shape) == (128, 24, 24, 1)
    assert len({image.numpy().tobytes() for image in images}) == 128
    saved = trained.saved()
    assert saved["labels"] == CLASS_NAMES and saved["config"]["patch_px"] == 3
    known = load_data("signs", "validation", preprocessing=saved["preprocessing"])
    held_out = trained.source.validation
    np.testing.assert_array_equal(held_out["image"], known.images[:1_000])
    np.testing.assert_array_equal(held_out["labels"], known.labels[:1_000])


def test_a_field_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(SaccadeError, match="--set: a field is 'depth'"):
        task(options(tmp_path, "digits", depth=3))
