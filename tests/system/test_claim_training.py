# SPDX-License-Identifier: Apache-2.0
"""What claims are trained on and measured by, beyond `saccade train` and `saccade evaluate`."""

import sys
from importlib import import_module
from unittest import mock

import numpy as np
import pytest
import torch
from places import ROOT

from saccade.models.checkpoint import load
from saccade.models.data.scene_texts import ANSWERS, QUESTION_TOKENS, questions
from saccade.models.data.shapes import Scenes, scenes
from saccade.models.families import new_model
from saccade.models.sot.config import SoTConfig
from saccade.models.sot.model import SoT
from saccade.models.sparo.config import SparoConfig
from saccade.models.sparo.model import Sparo

with mock.patch.object(sys, "path", [str(ROOT / "benchmarks"), *sys.path]):
    boxes, dino, measures = map(import_module, ("claim_boxes", "claim_dino", "claim_measures"))

SMALL = {"dim": 8, "word_dim": 4, "heads": 2, "layers": 1, "hidden": 8, "pool_dim": 8}


@pytest.mark.parametrize("fusion", ["class", "visual", "sum"])
def test_grad_cam_weighs_channels_by_what_the_logit_gains(fusion):
    sizes = {"height_px": 16, "width_px": 16, "channels": 3, "mean": (0.5,) * 3, "std": (0.2,) * 3}
    sizes |= {"patch_px": 4, "layers": 2, "dim": 8, "heads": 2, "mlp_dim": 16}
    config = SoTConfig(**sizes, fusion=fusion, pool_heads=2, m=4, n=4)
    model = new_model(SoT, config).double().eval()
    image = torch.from_numpy(scenes("test", 1, side_px=16).images)
    entering = []

    def shifted(channel, by):
        def hook(module, given, normed):
            entering.append(normed.detach())
            more = torch.zeros_like(normed)
            more[:, model.trunk.words_from :, channel] = by
            return normed + more

        own = model.trunk.blocks[-1].norm_attention.register_forward_hook(hook)
        with torch.no_grad():
            logits = model(image)[0]
        own.remove()
        return logits

    best, step = int(shifted(0, 0.0).argmax()), 1e-5
    gains = [(shifted(d, step) - shifted(d, -step))[best] / (2 * step) for d in range(8)]
    words = entering[0][0, model.trunk.words_from :]
    expected = (words @ torch.stack(gains) / len(words)).relu().reshape(4, 4)
    np.testing.assert_allclose(measures.grad_cams(model, image.numpy())[0], expected, atol=1e-7)


def test_boxes_have_the_pixels_and_the_place_of_an_object():
    image, mask = np.zeros((48, 48, 3), np.uint8), np.zeros((48, 48), np.uint8)
    image[8:16, 16:40], mask[8:16, 16:40] = (64, 128, 192), 2  # object 1 is hidden
    given = boxes.features_of(Scenes(image[None], mask[None], ((None, None),)))
    assert given["box_count"].tolist() == [1]
    box = given["boxes"][0, 0].numpy()
    np.testing.assert_allclose(box[:-4].reshape(8, 8, 3), np.tile([-1.0, 0.0, 1.0], (8, 8, 1)))
    np.testing.assert_allclose(box[-4:], np.array([16, 8, 40, 16]) / 48)
    assert not given["boxes"][0, 1:].any()
    cells = given["features"][0].reshape(6, 6, 8, 8, 3)
    assert (cells[1, 2:5] == torch.tensor([-1.0, 0.0, 1.0])).all()
    assert (cells[0] == -2).all()


@pytest.mark.parametrize("image", ["grid", "boxes", "both"])
def test_answers_are_learned_from_boxes_or_cells(tmp_path, image):
    out = tmp_path / "answers.safetensors"
    boxes.answering(
        out, seed=0, steps=2, batch=2, learning_rate=1e-3, scenes_drawn=4,
        set={**SMALL, "image": image},
    )  # fmt: skip
    model, drawn = load(out).build().eval(), scenes("test", 8, side_px=boxes.SIDE)
    given, rng, right = boxes.features_of(drawn), np.random.default_rng(0), []
    for row, objects in enumerate(drawn.objects):
        for one in questions(objects, rng, 4):
            tokens = torch.from_numpy(boxes.WORDS.encode(one.text, QUESTION_TOKENS)[None])
            inputs = {name: value[row][None] for name, value in given.items()}
            best = model.details(question=tokens, **inputs)["logits"].argmax()
            right.append(ANSWERS[best] == one.answer)
    assert boxes.box_answers(out, scenes_drawn=8)["accuracy"] == pytest.approx(np.mean(right))


def test_crops_of_the_whole_image_are_the_image_or_its_mirror():
    draw = torch.Generator().manual_seed(0)
    images = torch.randint(1, 100, (16, 4, 4, 1), generator=draw)
    seen = dino.crops(images, (1.0, 1.0), draw)
    light = (seen.sum((1, 2, 3)) / images.sum((1, 2, 3)))[:, None, None, None]
    plain, mirrored = (
        torch.isclose(seen, one * light, rtol=1e-4).flatten(1).all(1)
        for one in (images, images.flip(2))
    )
    assert (plain ^ mirrored).all() and plain.any() and mirrored.any()
    assert light.min() >= 0.6 and light.max() <= 1.4
    small = dino.crops(torch.arange(64.0).reshape(1, 8, 8, 1), (0.1, 0.1), draw)
    assert small.max() - small.min() < 40


def test_the_teacher_of_a_distillation_is_kept(tmp_path):
    data, out = tmp_path / "images.npz", tmp_path / "teacher.safetensors"
    np.savez(data, train_images=np.random.default_rng(0).integers(0, 255, (8, 8, 8, 1), np.uint8))
    sizes = {"height_px": 8, "width_px": 8, "channels": 1, "mean": (0.5,), "std": (0.2,)}
    sizes |= {"patch_px": 4, "image_width": 8, "image_layers": 1, "image_heads": 2}
    sizes |= {"image_hidden": 8, "pooling": "cls", "embed_dim": 8, "text": False}
    weights = []
    for rate in (0.0, 1e-2):
        dino.self_distilled(
            out, data=str(data), seed=0, steps=3, batch=4, learning_rate=rate, set=sizes
        )
        weights.append(load(out).weights)
    first = new_model(Sparo, SparoConfig(**sizes, seed=0)).state_dict()
    assert all(weights[0][name].equal(value) for name, value in first.items())
    assert not weights[1]["image.patches.weight"].equal(first["image.patches.weight"])
