# SPDX-License-Identifier: Apache-2.0
"""`--shots`: so many training samples of each class, and data that it cannot be used with."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from saccade.core.errors import SaccadeError
from saccade.models.data.datasets import load_data
from saccade.models.data.options import DataOptions
from saccade.models.data.samples import images as image_file
from saccade.models.data.splits import few_of_each
from saccade.models.entry import imported
from saccade.models.families import entry_of
from saccade.models.nac.training.recipes import DIGITS, with_epochs
from saccade.models.training.train import TrainOptions, train


def test_draws_are_per_class_seeded_and_nested() -> None:
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(3), (5, 9, 7)))
    names = ("a", "b", "c")
    few, more = (few_of_each("x", labels, names, shots, seed=1) for shots in (2, 5))
    assert np.bincount(labels[few]).tolist() == [2, 2, 2] and set(few) <= set(more)
    assert few.tolist() == few_of_each("x", labels, names, 2, seed=1).tolist()
    assert few.tolist() != few_of_each("x", labels, names, 2, seed=2).tolist()
    with pytest.raises(SaccadeError, match="found 5 training samples of the class 'a'"):
        few_of_each("x", labels, names, 6, seed=1)


@pytest.mark.parametrize("kept_bytes", [10**9, 0])
def test_every_kind_of_data(kept_bytes: int, tmp_path: Path, monkeypatch: Any) -> None:
    """The same samples, whether they are decoded at once or when they are indexed."""
    from PIL import Image

    monkeypatch.setattr(image_file, "KEPT_BYTES", kept_bytes)
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (24, 8, 8, 1), dtype=np.uint8)
    np.savez(tmp_path / "a.npz", images=pixels, labels=np.arange(24) % 2)
    for index, image in enumerate(pixels):
        place = tmp_path / "folder" / f"class{index % 2}"
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image[..., 0]).save(place / f"{index:02}.png")
    for data in ("digits", str(tmp_path / "a.npz"), str(tmp_path / "folder")):
        asked = DataOptions(shots=3, seed=4)
        few, whole = (load_data(data, "train", side_px=8, asked=one) for one in (asked, None))
        classes = len(few.class_names)
        assert np.bincount(few.labels).tolist() == [3] * classes
        assert few.sha256 != whole.sha256 and len(few.images) == 3 * classes
        known = {image.tobytes() for image in np.asarray(whole.images)}
        assert all(image.tobytes() in known for image in np.asarray(few.images))
        other = load_data(data, "validation", side_px=8, asked=asked)
        assert other.sha256 == load_data(data, "validation", side_px=8).sha256


def test_long_runs_on_few_samples_are_validated_a_hundred_times() -> None:
    assert with_epochs(DIGITS, 20, steps=None).validate_every == 1
    assert with_epochs(DIGITS, 20, steps=1000).validate_every == 10
    assert with_epochs(DIGITS, 998, steps=None).validate_every == 16


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "canvases": ("nac", {"data": "digits-sum"}, "nac cannot choose samples by class"),
    "expressions": ("nac", {"data": "listops"}, "'listops': it draws new ones in each step"),
    "scenes": ("sot", {}, "sot cannot choose samples by class from the data 'shapes'"),
    "none": ("nac", {"data": "digits", "shots": 0}, "--shots: found 0, expected .* at least 1"),
    "too many": ("nac", {"data": "digits", "shots": 200}, "of the class '0'.*Lower --shots"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refuses(case: str, tmp_path: Path) -> None:
    family, changes, words = REFUSED[case]
    options = {"shots": 2, "steps": 1} | changes
    with pytest.raises(SaccadeError, match=words):
        train(family, TrainOptions(tmp_path / "a.safetensors", **options))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("family", ["nac", "sot", "sparo"])
def test_families_that_choose_samples_say_so(family: str, tmp_path: Path) -> None:
    options = TrainOptions(tmp_path / "a.safetensors", data="digits", shots=1)
    torch.manual_seed(0)
    task = imported(entry_of(family).training)(options)
    assert task.shots == 1
    assert task.data_sha256["train"] == load_data("digits", "train", asked=options.asked).sha256
