# SPDX-License-Identifier: Apache-2.0
"""Training two towers on scenes with sentences, and selecting slots of what was trained."""

import math
from dataclasses import replace

import numpy as np
import paired_sets
import pytest
import torch
from support.models.sizes import TOWERS

from saccade.core.errors import SaccadeError
from saccade.models.checkpoint import load
from saccade.models.data.image_texts import load_contrasts
from saccade.models.data.options import DataOptions
from saccade.models.sparo import select as selecting
from saccade.models.sparo import training as sparo
from saccade.models.sparo.ranking import (
    image_slots,
    rank_by_negatives,
    read_selection,
    text_slots,
    with_selection,
)
from saccade.models.sparo.select import SelectOptions, select
from saccade.models.training.options import TrainOptions
from saccade.models.training.task import with_pixels
from saccade.models.training.train import train

TINY = TOWERS | {"height_px": 16, "width_px": 16}


@pytest.fixture(scope="module")
def few(module_patch):
    """A recipe of a few steps on a few small scenes."""
    extra = {"scenes": 300, "validation_images": 40}
    quick = replace(sparo.QUICK, steps=12, batch=24, config=sparo.SMALL | TINY, extra=extra)
    module_patch.setattr(sparo, "QUICK", quick)
    module_patch.setattr(selecting, "_SCENES", 60)


@pytest.fixture(scope="module")
def module_patch():
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@pytest.fixture(scope="module")
def trained(few, tmp_path_factory):
    out = tmp_path_factory.mktemp("trained") / "sparo.safetensors"
    return train("sparo", TrainOptions(out))


def test_the_checkpoint_is_ready_for_export(trained):
    model = load(trained.path).build()
    assert model.config.reduce_depth == 1 and len(model.image.blocks) == 1
    assert sorted(model.slot_order.tolist()) == [0, 1, 2, 3]
    arrays = trained.calibration
    assert arrays["image"].shape == (256, 16, 16, 3) and arrays["image"].dtype == np.uint8
    assert arrays["tokens"].shape == (256, model.config.context_length)
    assert set(np.unique(arrays["labels"])) == set(range(16)) and len(trained.labels) == 16
    assert {"r1", "hard_negatives", "hard_negatives_swap-attribute", "zero_shot_top1"} <= set(
        trained.card["validation"]
    )


@pytest.mark.parametrize("pooling", ["cls", "gap"])
def test_baselines_train_by_the_same_recipe(few, pooling, tmp_path):
    out = tmp_path / "baseline.safetensors"
    model = train("sparo", TrainOptions(out, steps=2, set={"pooling": pooling})).build()
    assert model.config.pooling == pooling and len(model.image.blocks) == 2
    assert [component.outputs for component in model.components()] == [
        ("embedding",),
        ("embedding",),
    ]


def test_the_loss_falls(few, tmp_path):
    task = sparo.SparoTask(TrainOptions(tmp_path / "x.safetensors"))
    batch = with_pixels(task.batch(0, np.random.default_rng(0)))
    optimizer = torch.optim.AdamW(task.model.parameters(), lr=3e-3)
    losses = []
    for step in range(25):
        loss = task.loss(batch, step)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.6 * losses[0]


@pytest.mark.parametrize(("logit_scale", "scale"), [(2.0, math.exp(2)), (9.0, 100)])
@torch.no_grad()
def test_equal_sentences_share_what_is_right(few, tmp_path, logit_scale, scale):
    """That is the same sum as one right answer each: what is equal is equally likely."""
    task = sparo.SparoTask(TrainOptions(tmp_path / "x.safetensors"))
    model = task.model.eval()
    model.logit_scale.fill_(logit_scale)
    batch = with_pixels(task.batch(0, np.random.default_rng(0)))
    batch["tokens"][1] = batch["tokens"][0]
    image, text = model.encode_image(batch["image"]).code, model.encode_text(batch["tokens"]).code
    sentences, shared, single = batch["tokens"].tolist(), 0.0, 0.0
    for logits in (scale * image @ text.mT, scale * text @ image.mT):
        logs = logits.log_softmax(-1)
        single -= logs.diagonal().mean().item() / 2
        for row, own in zip(logs, sentences, strict=True):
            right = [row[at].item() for at, other in enumerate(sentences) if other == own]
            shared -= np.mean(right) / len(sentences) / 2
    assert task.loss(batch, 0).item() == pytest.approx(shared, rel=1e-4)
    assert single == pytest.approx(shared, rel=1e-4)


def test_a_users_images_are_told_by_the_names_of_their_classes(few, tmp_path):
    rng = np.random.default_rng(0)
    labels = np.arange(400) % 2
    images = (
        rng.integers(0, 90, (400, 8, 12, 3), dtype=np.uint8)
        + 120 * labels.astype(np.uint8)[:, None, None, None]
    )
    names = np.array(["dark room", "bright room"])
    data = tmp_path / "rooms.npz"
    np.savez(data, images=images, labels=labels, class_names=names)
    sizes = {"height_px": 8, "width_px": 12, "patch_px": 4}
    out = tmp_path / "rooms.safetensors"
    checkpoint = train("sparo", TrainOptions(out, data=str(data), set=sizes, steps=20))
    assert checkpoint.config["words"] == ["a", "bright", "dark", "room"]
    assert checkpoint.card["validation"]["zero_shot_top1"] == 1.0
    assert load(out).build().runtime_metadata()["context_length"] == 5


def test_slots_are_selected_by_accuracy_and_by_masks(trained, tmp_path):
    ranked = select(trained.path, SelectOptions(tmp_path / "a.json"))
    order = ranked.selection["order"]
    assert ranked.scores[order[0]] == max(ranked.scores) and ranked.selection["mask"] is None
    out = tmp_path / "m.json"
    masks = select(trained.path, SelectOptions(out, masks="dimension", epochs=3))
    assert masks.scores[1] >= masks.scores[0]
    selection = read_selection(out)
    assert selection == masks.selection and np.shape(selection["mask"]) == (4, 6)
    model = with_selection(trained.build(), selection, trained.sha256)
    assert model.at(model.budget("0.5")).config.kept == tuple(sorted(selection["order"][:2]))
    with pytest.raises(SaccadeError, match="exists"):
        select(trained.path, SelectOptions(out))


def test_slots_are_selected_by_the_users_false_sentences(trained, tmp_path):
    folder = tmp_path / "negatives"
    folder.mkdir()
    data = paired_sets.negatives(folder, 40)
    out = tmp_path / "n.json"
    ranked = select(trained.path, SelectOptions(out, data=data, by="negatives"))
    model = trained.build()
    told = load_contrasts(data, "validation", DataOptions(), trained.preprocessing, None)
    assert len(told) == 4 and len(told.negatives) >= 4, "a tenth of the images"
    codes = image_slots(model, told.images)[told.owner]
    true, false = (text_slots(model, texts) for texts in (told.captions, told.negatives))
    order, scores = rank_by_negatives(codes, true, false)
    assert ranked.scores == tuple(scores) and read_selection(out)["order"] == order
    (folder / "images").rename(tmp_path / "images")
    (folder / "add_obj.json").unlink()
    options = SelectOptions(out, data=data, masks="slot", epochs=1, force=True)
    with pytest.raises(SaccadeError, match=r"no images: '0\.png'.*--data-root"):
        select(trained.path, replace(options, data_root=folder))
    masked = select(trained.path, replace(options, data_root=tmp_path))
    assert masked.selection["kind"] == "slot" and np.shape(masked.selection["mask"]) == (4,)
    pairs = paired_sets.csv_file(folder, paired_sets.told(5))
    with pytest.raises(SaccadeError, match="expected one of false sentences: negative_caption"):
        select(trained.path, replace(options, data=pairs))
    with pytest.raises(SaccadeError, match="--skip-bad: found -1"):
        SelectOptions(out, skip_bad=-1)
