# SPDX-License-Identifier: Apache-2.0
"""Question answering from outside: the authors' recorded cases and files, scenes, scores."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from golden_cases import tvmax_vqa as cases
from places import TESTS
from safetensors.torch import load_file

from saccade.core.errors import SaccadeError
from saccade.models.official.conversion import Original
from saccade.models.official.sources.tvmax_vqa import convert
from saccade.models.scores.attention import jensen_shannon, repetition, zero_share
from saccade.models.training.options import TrainOptions
from saccade.models.training.task import with_pixels
from saccade.models.vqa import training
from saccade.models.vqa.model import VQA

GOLDEN = TESTS / "golden" / "tvmax_vqa"


def test_recorded_cases() -> None:
    assert cases.count(GOLDEN) == 16
    assert cases.check(GOLDEN) == []


def test_recorded_cases_can_fail(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN, tmp_path / "tvmax_vqa")
    with np.load(GOLDEN / "model_b.npz") as file:
        data = dict(file)
    data["tvmax/logits"] = data["tvmax_exact/logits"]
    np.savez(tmp_path / "tvmax_vqa" / "model_b.npz", **data)
    failures = cases.check(tmp_path / "tvmax_vqa")
    assert len(failures) == 1
    assert "model_b tvmax: logits" in failures[0]


def _official(**changes: Any) -> Original:
    given = {"MULTI_HEAD": 4, "IMG_FEAT_PAD_SIZE": 80, "grid": [9, 10]}
    official = Original(
        "model.pkl",
        load_file(GOLDEN / "model_b_weights.safetensors"),
        config=given | changes.pop("config", {}),
        labels=tuple(str(index) for index in range(20)),
        attention="tvmax",
    )
    return replace(official, **changes)


def test_a_file_becomes_a_model_with_the_authors_numerics() -> None:
    converted = convert(_official(lam=0.02))
    expected = VQA(converted.config).state_dict()
    assert {name: weight.shape for name, weight in converted.weights.items()} == {
        name: each.shape for name, each in expected.items()
    }
    assert set(converted.names.values()) == set(_official().tensors)
    config = converted.config
    assert (config.solver, config.lam, config.norm) == ("authors", 0.02, "spread")
    assert (config.answer, config.eps, converted.exact.solver) == ("sigmoid", 1e-6, "exact")
    assert convert(_official(attention="softmax")).exact is None


ASKED = {
    "--attention": {"attention": None},
    "--labels FILE": {"labels": None},
    "--labels has 2": {"labels": ("yes", "no")},
    "--vocabulary has 1": {"vocabulary": ("PAD",)},
    "MULTI_HEAD": {"config": {"MULTI_HEAD": None}},
    "HIDDEN_SIZE": {"config": {"HIDDEN_SIZE": 512}},
    "image 'boxes'": {"config": {"image": "boxes"}},
    "unknown key": {"config": {"gird": [9, 9]}},
    "Did you mean grid": {"config": {"gird": [9, 9]}},
    "image is 'pixels'": {"config": {"image": "pixels"}},
    "MULTI_HEADS.* Did you mean MULTI_HEAD": {"config": {"MULTI_HEADS": 4}},
    "not a checkpoint of": {"tensors": {}},
}


@pytest.mark.parametrize("flag", ASKED)
def test_what_a_file_cannot_tell_is_asked_for(flag: str) -> None:
    with pytest.raises(SaccadeError, match=flag):
        convert(_official(**ASKED[flag]))


def test_boxes_take_the_image_layers() -> None:
    converted = convert(_official(config={"image": "boxes"}, attention="sparsemax"))
    model = VQA(converted.config).double()
    model.load_state_dict(converted.weights)
    assert "box_linear.weight" in converted.weights
    assert converted.config.box_attention == "sparsemax"


def test_a_task_trains_scores_and_saves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    extra = training.EXTRA | {
        "scenes": 64,
        "singles": 32,
        "questions": 3,
        "validate_scenes": 20,
        "report_scenes": 260,
    }
    monkeypatch.setattr(training, "QUICK", replace(training.QUICK, extra=extra, batch=8))
    options = TrainOptions(
        tmp_path / "vqa.safetensors",
        set={"attention": "tvmax", "dim": 32, "feature_dim": 32, "layers": 1},
    )
    task = training.task(options)
    batch = with_pixels(task.batch(3, np.random.default_rng(0)))
    again = with_pixels(task.batch(3, np.random.default_rng(0)))
    assert all(torch.equal(batch[name], again[name]) for name in batch)
    optimiser = torch.optim.AdamW(task.model.parameters(), lr=1e-3)
    losses = []
    for _ in range(6):
        loss = task.loss(batch, 3)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(float(loss.detach()))
    assert all(
        parameter.grad is not None
        for parameter in task.model.parameters()
        if parameter.requires_grad
    )
    assert losses[-1] < 0.9 * losses[0]
    task.model.eval()
    with torch.no_grad():
        scores = task.report()
    assert {"top1", "zero_attention"} <= set(scores)
    saved = task.saved()
    assert {len(array) for array in saved["calibration"].values()} == {256}
    assert json.dumps(saved["config"])


def test_an_answer_by_itself_is_learned_by_binary_cross_entropy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    extra = training.EXTRA | {"scenes": 32, "singles": 16, "report_scenes": 8}
    monkeypatch.setattr(training, "QUICK", replace(training.QUICK, extra=extra, batch=8))
    fields = {"answer": "sigmoid", "dim": 32, "feature_dim": 32, "layers": 1}
    task = training.task(TrainOptions(tmp_path / "vqa.safetensors", set=fields))
    batch = with_pixels(task.batch(0, np.random.default_rng(0)))
    logits = task._answers(batch)["logits"].detach().double()
    right = torch.eye(logits.shape[1])[batch["answers"]].double()
    taken = torch.where(right > 0, logits.sigmoid(), 1 - logits.sigmoid())
    expected = -taken.log().sum(1).mean()
    assert float(task.loss(batch, 0).detach()) == pytest.approx(float(expected), rel=1e-5)
    # Several people's answers: each is right to a degree.
    soft = (right + 0.3 * right.roll(1, 1)).clamp(max=1)
    actual = training.answer_loss(logits, soft, "sigmoid")
    added = -0.3 * (right.roll(1, 1) * logits).sum(1).mean()
    assert float(actual) == pytest.approx(float(expected + added))
    optimiser = torch.optim.AdamW(task.model.parameters(), lr=3e-3)
    for _ in range(12):
        optimiser.zero_grad()
        task.loss(batch, 0).backward()
        optimiser.step()
    with torch.no_grad():
        total = task._answers(batch)["probabilities"].sum(1).mean()
    assert 0.5 < float(total) < 2  # one answer is right, not half of all of them


def test_scores_of_attention() -> None:
    maps = np.array([[[0.5, 0.5], [0.0, 0.0]], [[1.0, 0.0], [0.0, 0.0]]])
    assert zero_share(maps).tolist() == [0.5, 0.75]
    valid = np.array([[[True, True], [False, False]]] * 2)
    assert zero_share(maps, valid).tolist() == [0.0, 0.5]
    apart = jensen_shannon(np.eye(3))
    assert apart == pytest.approx(np.log(2))
    assert jensen_shannon(np.ones((3, 4)) / 4) == pytest.approx(0, abs=1e-12)
    assert jensen_shannon(maps) == pytest.approx(jensen_shannon(maps[::-1]))
    with pytest.raises(SaccadeError, match="sum of 1"):
        jensen_shannon(np.ones((2, 2)))


def test_repetition_counts_what_no_reference_repeats() -> None:
    said = ["a", "bowl", "of", "fruit", "and", "a", "bowl", "of", "fruit"]
    assert repetition(said) == pytest.approx(100 * 3 / 9)
    assert repetition(said, [said]) == 0
    references = [["fruit"], ["a", "bowl", "of", "fruit"]]
    assert repetition(said, references) == pytest.approx(100 * 3 / 2.5)
    assert repetition(["a", "red", "red", "ball"]) == pytest.approx(100 * 2 / 4)
    assert repetition([]) == 0
