# SPDX-License-Identifier: Apache-2.0
"""The user's files are read once, however many variants are scored on them."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import labelled_sets
import language_sets
import masked_sets
import numpy as np
import paired_sets
import pytest
import tiny_families
from folder_walk import openings

from saccade.exporter.evaluation.classification import decide
from saccade.exporter.evaluation.evaluate import scores_of
from saccade.exporter.evaluation.evaluated_model import subjects_of_checkpoint
from saccade.exporter.evaluation.tasks import EvaluateOptions
from saccade.models.checkpoint import Checkpoint
from saccade.models.data.datasets import HELD_OUT
from saccade.models.data.options import keeps_loaded, loaded_once
from saccade.models.families import build


def noise(place: Path) -> str:
    return labelled_sets.class_folders(place, labelled_sets.noise())


def states(place: Path) -> str:
    labels = np.arange(20) % 2
    arrays = {"tokens": np.ones((20, 3, 8), np.float32), "lengths": np.full(20, 3)}
    np.savez(place / "states.npz", labels=labels, **arrays)
    return str(place / "states.npz")


def points(place: Path) -> str:
    rng = np.random.default_rng(0)
    clouds = rng.standard_normal((20, 5, 3)).astype(np.float32)
    np.savez(place / "clouds.npz", points=clouds, labels=np.arange(20) % 2)
    return str(place / "clouds.npz")


TEXTS = {
    "input": "tokens", "max_tokens": 3, "dim": 8, "heads": 1, "pool_heads": 2, "m": 2, "n": 2,
    "classes": 2,
}  # fmt: skip
CLOUDS = {
    "input": "points", "max_tokens": 5, "modules": 4, "dim": 8, "propagator_layers": 1, "heads": 1,
    "classes": 2,
}  # fmt: skip
LABELS = {"sot": ("a", "b"), "vqa": ("yes", "no", "1", "red", "green")}
CASES: dict[str, tuple[str, dict[str, Any], Callable[[Path], Any], str | None]] = {
    "images of classes": ("sot", {}, noise, None),
    "neighbors": ("sparo", {}, noise, "knn"),
    "images with sentences": (
        "sparo", {}, lambda place: paired_sets.csv_file(place, paired_sets.told(9)), "retrieval"
    ),
    "false sentences": ("sparo", {}, paired_sets.negatives, "hard-negatives"),
    "masks": (
        "slot-attention", {}, lambda place: masked_sets.folders(place, masked_sets.scenes()), None
    ),
    "images alone": ("slot-attention", {}, noise, "reconstruction"),
    "questions": ("vqa", {}, language_sets.vqa, None),
    "captions": ("captioner", {}, language_sets.coco, None),
    "token states": ("sot", TEXTS, states, None),
    "points": ("nac", CLOUDS, points, None),
}  # fmt: skip


def checkpoint_of(family: str, config: dict[str, Any], path: Path) -> Checkpoint:
    if not config:
        return tiny_families.tiny(family, path)
    model: Any = build(family, config)
    return Checkpoint(
        path, "0" * 64, family, model.config.to_dict(), model.state_dict(), None, ("0", "1"), {}, {}
    )


@pytest.mark.parametrize("case", CASES)
def test_two_variants_read_as_often_as_one(case: str, tmp_path: Path) -> None:
    family, config, write, task = CASES[case]
    checkpoint = checkpoint_of(family, config, tmp_path / "it.safetensors")
    (tmp_path / "data").mkdir()
    data = str(write(tmp_path / "data"))
    (model,) = subjects_of_checkpoint(checkpoint)
    model = replace(model, labels=("0", "1") if config else LABELS.get(family, ()))
    options, counts, results = EvaluateOptions(data, task=task), [], []
    for models in ([model], [model, model]):
        with openings(tmp_path / "data") as opened:
            results.append(scores_of(models, options, lambda: None))
        counts.append(opened)
    assert counts[0] and counts[0] == counts[1]
    first, second = results[1]
    assert first.scores == second.scores == results[0][0].scores
    assert first.data_sha256 == second.data_sha256 == results[0][0].data_sha256


def test_a_policy_is_compared_on_what_was_scored(tmp_path: Path) -> None:
    checkpoint = tiny_families.tiny("sot", tmp_path / "it.safetensors")
    (tmp_path / "data").mkdir()
    data = noise(tmp_path / "data")
    (model,) = subjects_of_checkpoint(checkpoint)
    model = replace(model, labels=("a", "b"))
    with loaded_once():
        (score,) = scores_of([model], EvaluateOptions(data), lambda: None)
        with openings(tmp_path / "data") as opened:
            decider = decide(model, EvaluateOptions(data), HELD_OUT)
    assert not opened and decider.sha256 == score.data_sha256


def test_outside_of_a_block_everything_is_loaded_again() -> None:
    calls = []

    @keeps_loaded
    def loading(name: str, *, split: str) -> object:
        calls.append((name, split))
        return object()

    with loaded_once():
        first = loading("a", split="test")
        with loaded_once():
            assert loading("a", split="test") is first
        assert loading("a", split="test") is first
        assert loading("a", split="train") is not first
    assert loading("a", split="test") is not first
    assert [split for _, split in calls] == ["test", "train", "test"]
