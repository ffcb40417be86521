# SPDX-License-Identifier: Apache-2.0
"""Training of a captioner: the paper's sizes, the loss, the order of scenes, what is validated."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from support.models.runs import losses_of

from saccade.core.errors import SaccadeError
from saccade.models.captioner import training
from saccade.models.captioner.config import PRESETS, CaptionerConfig
from saccade.models.captioner.model import Captioner
from saccade.models.checkpoint import load, save
from saccade.models.training.options import TrainOptions
from saccade.models.word_tokens import END, PAD, START

FEW = {"scenes": 256, "singles": 64, "validate_images": 6, "report_images": 8}
SMALL = {"dim": 32, "hidden_dim": 32, "widths": [8, 16, 16], "feature_dim": 16}


@pytest.fixture
def options(tmp_path):
    return TrainOptions(tmp_path / "c.safetensors", set={"attention": "sparsemax", **SMALL})


@pytest.fixture
def job(options, monkeypatch):
    recipe = replace(training.QUICK, extra=training.EXTRA | FEW)
    monkeypatch.setattr(training, "QUICK", recipe)
    return training.task(options)


def test_sizes_are_the_papers():
    paper, ours = PRESETS["captioner-paper"], CaptionerConfig()
    grid = (paper.grid_height, paper.grid_width, paper.feature_dim, paper.dim)
    assert grid == (8, 8, 2048, 512) and paper.encoder == "features"
    assert (paper.hidden_dim, paper.embedding_dim, paper.position) == (512, 256, False)
    for config in (paper, ours):
        assert (config.attention, config.lam, config.tolerance) == ("tvmax", 0.01, 1e-6)
        assert config.beam == 3, "the beam of every score"
    place = Captioner(ours).position.detach()
    assert place.std().item() == pytest.approx(0.3, abs=0.02), "seen beside cells of size 1"


def test_training_lowers_the_loss_and_saves(job, options):
    losses = losses_of(job, 12, 1e-2)
    assert losses[0] > 2.5 and losses[-1] < 0.75 * losses[0]
    scores = job.validate() | job.report()
    assert {"cider", "bleu4", "rouge_l", "true", "zero_attention", "repetition"} <= set(scores)
    save(options.out, family="captioner", weights=job.model.state_dict(), card={}, **job.saved())
    checkpoint = load(options.out)
    assert checkpoint.build().config == job.model.config
    assert checkpoint.calibration["tokens"].shape == (256, 20)


def test_loss_is_the_mean_over_words_and_ends(job):
    batch = job.batch(1_000, np.random.default_rng(0))
    tokens = batch["tokens"].numpy()
    again = job.batch(1_000, np.random.default_rng(0))
    assert all(torch.equal(again[name], value) for name, value in batch.items())
    assert (tokens[:, 0] == START).all() and ((tokens == END).sum(1) == 1).all()
    assert (tokens[:, -1] != PAD).any() and (tokens == PAD).any(), "as wide as the longest"
    job.model.eval()
    with torch.no_grad():
        logits, _ = job.model(batch["images"], batch["tokens"][:, :-1])
        loss = job.loss(batch, 0).item()
    logs = logits.log_softmax(-1).numpy()
    chosen = np.take_along_axis(logs, tokens[:, 1:, None], -1)[..., 0]
    assert loss == pytest.approx(-chosen[tokens[:, 1:] != PAD].mean(), rel=1e-5)


def test_scenes_of_one_object_come_first(job, monkeypatch):
    several, rng = FEW["scenes"], np.random.default_rng(0)
    share = [(job.training.rows(rng, 4_000, at) >= several).mean() for at in (0, 0.25, 0.5, 1)]
    assert share == pytest.approx((1, 0.55, 0.1, 0.1), abs=0.03)
    asked = []
    rows = job.training.rows
    monkeypatch.setattr(job.training, "rows", lambda *a: asked.append(a[2]) or rows(*a))
    job.batch(job.recipe.steps // 2, rng)
    assert asked == [0.5]


def test_validation_is_greedy_and_the_report_searches(job, monkeypatch):
    asked, caption = [], job.model.caption

    def recorded(images, *, beam):
        asked.append((len(images), beam))
        return caption(images, beam=1)

    monkeypatch.setattr(job.model.eval(), "caption", recorded)
    assert set(job.validate()) == {"cider", "true"} and job.report()
    assert asked == [(6, 1), (8, None)], "none: the model's own beam"
    assert {len(reference) for reference in job.references} == {5}


def test_what_the_data_decides_cannot_be_set(job, options):
    with pytest.raises(SaccadeError, match="--data digits"):
        training.task(replace(options, data="digits"))
    for name, value in (("words", "red"), ("max_length", 40)):
        with pytest.raises(SaccadeError, match=f"--set {name}: the captions .* determine it"):
            training.task(replace(options, set={name: value}))
