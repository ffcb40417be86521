# SPDX-License-Identifier: Apache-2.0
"""Slot attention before and in training: the paper's tables, first weights and states, the loss."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from support.models import sizes

from saccade.models.data.tetrominoes import tetromino_batch
from saccade.models.interface import component_named
from saccade.models.scores.ari import adjusted_rand_index
from saccade.models.slot_attention import training
from saccade.models.slot_attention.config import PRESETS, SlotConfig
from saccade.models.slot_attention.decoder import TransposedConv, segmentation
from saccade.models.slot_attention.encoders import SameConv
from saccade.models.slot_attention.model import SlotModel, random_pose
from saccade.models.slot_attention.rounds import Gate, linear
from saccade.models.training.options import TrainOptions
from saccade.models.training.task import with_pixels

TINY = PRESETS["slot-attention-tiny"]
FIELDS = sizes.TINY["slot-attention"] | {"side_px": 14, "positions": "left", "slot_dim": 16}
FIELDS |= {"initial_slots": "gaussian"}


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """A small task whose slots have learned where to begin from."""
    out = tmp_path_factory.mktemp("slots") / "m.safetensors"
    made = training.task(TrainOptions(out=out, set=FIELDS, steps=2, batch=4))
    with torch.no_grad():
        made.model.initial.log_std.copy_(torch.linspace(-1, 1, 16))
    return made


def test_defaults_are_the_papers_tables():
    table_4 = {"rounds": 3, "slot_dim": 64, "qkv_dim": 128, "grid_mlp_dim": 128, "epsilon": 1e-8}
    table_5 = {name: (n,) * 4 for name, n in (("channels", 64), ("kernels", 5), ("strides", 1))}
    starts = {"initial_positions": "uniform", "scale_mean": 0.1, "scale_std": 0.1}
    of_the_code = {"norm_epsilon": 1e-6, "scale_min": 0.001, "scale_max": 2.0}
    known = table_4 | {f"encoder_{name}": value for name, value in table_5.items()}
    known |= starts | of_the_code | {"decoder_channels": (256,) * 5, "decoder_height": 35}
    assert {name: getattr(SlotConfig(), name) for name in known} == known
    clevr = PRESETS["slot-attention-clevr"]
    assert (clevr.encoder_strides, clevr.slots, clevr.scales_factor) == ((2, 2, 1, 1), 11, 5.0)
    for recipe in (training.QUICK, training.SHIPPED):
        assert recipe.betas == (0.9, 0.999) and recipe.weight_decay == 0
    assert training.KINDS["ts-sa"]["scales_factor"] == 5.0


@pytest.mark.parametrize(
    ("layer", "inputs"),
    [
        (lambda: linear(400, 300), 400),
        (lambda: SameConv(16, 200, 5).conv, 16 * 25),
        (lambda: TransposedConv(16, 200, 5, 2).conv, 16 * 25),
    ],
    ids=["linear", "convolution", "transposed"],
)
def test_first_weights_keep_the_variance(layer, inputs):
    """A normal of variance 1 / inputs cut at two of its own deviations."""
    torch.manual_seed(0)
    made = layer()
    scaled = made.weight.detach() * inputs**0.5
    assert scaled.std().item() == pytest.approx(1, abs=0.02) and not made.bias.any()
    assert 2.2 < scaled.abs().max().item() <= 2 / 0.8796


def test_first_weights_of_a_state_turn_it_only():
    for part in Gate(8, 16).state.weight.detach().split(16):
        torch.testing.assert_close(part @ part.mT, torch.eye(16), atol=1e-5, rtol=0)


def test_the_decoders_grid_begins_four_times_as_steep(job):
    usual = SlotModel(job.model.config).decoder.project.weight
    torch.testing.assert_close(job.model.decoder.project.weight, 4 * usual)


def test_training_poses_cover_the_picture():
    drawn = random_pose(replace(TINY, slots=50), np.random.default_rng(0), 80)
    positions, scales = drawn[..., :2], drawn[..., 2:]
    assert drawn.shape == (80, 50, 4) and drawn.dtype == np.float32
    assert -1 <= positions.min() < -0.99 and 0.99 < positions.max() <= 1
    assert positions.mean((0, 1)) == pytest.approx((0, 0), abs=0.03)
    assert positions.std((0, 1)) == pytest.approx((3**-0.5,) * 2, abs=0.02)
    assert scales.mean() == pytest.approx(0.1, abs=5e-3)
    assert scales.std() == pytest.approx(0.1, abs=5e-3)
    assert not np.array_equal(drawn[0], drawn[1]), "each image has its own"
    still = replace(TINY, attention="t-sa", initial_positions="zero")
    assert not random_pose(still, np.random.default_rng(0), 2).any()


def test_gaussian_slots_have_the_width_of_their_rule(job):
    initial, rule = job.model.initial, job.model.rule()
    noise = torch.randn(3, 5, 16, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        actual = initial(noise, torch.zeros(3, 5, 2))
    expected = np.array(rule["mean"]) + np.exp(np.linspace(-1, 1, 16)) * noise.numpy()
    np.testing.assert_allclose(actual[..., :16], expected, atol=1e-5)
    np.testing.assert_allclose(rule["std"], np.exp(np.linspace(-1, 1, 16)), rtol=1e-6)
    assert set(SlotModel(job.model.config).rule()["std"]) == {1.0}


def test_loss_is_summed_over_pixels_and_averaged_over_images(job):
    batch = with_pixels(job.batch(0, np.random.default_rng(0)))
    again = tetromino_batch(np.random.default_rng(0), 4, side_px=14, positions="left")
    assert np.array_equal(batch["images"], again.images)
    with torch.no_grad():
        start = job.model.initial(batch["noise"], batch["pose"])
        painted = job.model(batch["images"], start)[2].reconstruction
        loss = job.loss(batch, 0).item()
    error = np.square(painted.numpy() - again.images / 255)
    assert error.shape == (4, 14, 14, 3) and loss == pytest.approx(error.sum() / 4, rel=1e-4)


def test_validation_scores_every_image_from_its_own_start(job):
    _, images, masks = job.source.validation[0]
    error, segments = training.segmented(job.model, images)
    in_parts = training.segmented(job.model, images, batch=3)
    assert in_parts[0] == pytest.approx(error) and np.array_equal(in_parts[1], segments)
    scores = job.validate()
    assert scores["negative_mse"] == pytest.approx(-error)
    foreground = adjusted_rand_index(masks, segments, foreground=True).mean()
    assert scores["fg_ari"] == pytest.approx(foreground)
    assert scores["ari"] == pytest.approx(adjusted_rand_index(masks, segments).mean())
    assert scores["fg_ari"] != scores["ari"]


def test_worlds_have_a_slot_for_each_object_and_the_background(tmp_path):
    from saccade.models.slot_attention.training import scene_source

    kinds = {"tetrominoes": ("t-sa", 4), "shapes": ("ts-sa", 5)}
    recipe = replace(training.QUICK, extra={"validation": 2})
    for name, (attention, slots) in kinds.items():
        source = scene_source(TrainOptions(out=tmp_path / "m.safetensors", data=name), recipe)
        assert (source.fields["attention"], source.fields["slots"]) == (attention, slots)


def test_what_the_gate_asks_of_masks(job):
    component = component_named(job.model, "")
    masks = np.full((2, 4, 6, 6), 0.25)
    invariant = component.invariants["masks_sum"]
    assert invariant({}, {"masks": masks}, {}) <= 1 < invariant({}, {"masks": masks + 1e-5}, {})
    true = np.zeros((1, 6, 6), np.uint8)
    true[0, :3, :3], true[0, 3:, 3:] = 1, 2
    cut = np.eye(4)[np.arange(36).reshape(1, 6, 6) // 18].transpose(0, 3, 1, 2)
    assert component.score({"masks": cut}, {"masks": true}) == 1.0, "it cuts the background alone"
    assert segmentation(torch.zeros(1, 3, 2, 2)).unique().tolist() == [0], "of equal ones the first"
