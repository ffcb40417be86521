# SPDX-License-Identifier: Apache-2.0
"""Calibration on the user's images: labeled or not, few or many, and what is refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tiny import tiny_nac

from saccade.core.errors import SaccadeError
from saccade.models.checkpoint import load, save
from saccade.models.checkpoint_format import AUTHORS_DATA, header_of
from saccade.models.data.calibration import (
    check_calibrated,
    own_images,
    recalibrated,
    samples_with,
)
from saccade.models.preprocessing import Preprocessing

TAKEN = Preprocessing(8, 8, 1, (0.5,), (0.5,))
LABELS = ("cat", "dog", "owl")


def drawn(folder: Path, count: int, level: int = 0) -> Path:
    """Write this many images, each of its own gray."""
    folder.mkdir(parents=True, exist_ok=True)
    for index in range(count):
        pixels = np.full((10, 12), (level + index) % 256, dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{index:03}.png")
    return folder


def test_images_without_labels(tmp_path: Path) -> None:
    own = own_images(str(drawn(tmp_path / "photos", 300)), TAKEN, LABELS)
    assert own.described == "256 images without labels of photos"
    assert own.labels is None and own.images.shape == (256, 8, 8, 1)
    grays = own.images[:, 0, 0, 0]
    assert len(np.unique(grays)) > 200 and not np.array_equal(grays, np.sort(grays))
    again = own_images(str(tmp_path / "photos"), TAKEN, LABELS)
    assert np.array_equal(own.images, again.images)
    np.savez(tmp_path / "photos.npz", images=own.images[:20])
    from_arrays = own_images(str(tmp_path / "photos.npz"), TAKEN, LABELS)
    assert sorted(from_arrays.images[:, 0, 0, 0]) == sorted(grays[:20])


def test_labels_are_used_if_they_are_the_models(tmp_path: Path) -> None:
    drawn(tmp_path / "pets" / "dog", 40, level=200)
    drawn(tmp_path / "pets" / "cat", 40, level=20)
    own = own_images(str(tmp_path / "pets"), TAKEN, LABELS)
    dogs = own.images[:, 0, 0, 0] >= 200
    assert own.labels is not None and np.array_equal(own.labels, dogs.astype(np.int64))
    assert own.described == f"{len(own.images)} training images with labels of pets"
    other = own_images(str(tmp_path / "pets"), TAKEN, ("car", "bus"))
    assert other.labels is None and "whose labels are not the model's" in other.described


def test_of_data_without_training_images_all_are_used(tmp_path: Path) -> None:
    for split in ("val", "test"):
        drawn(tmp_path / "pets" / split / "dog", 15)
        drawn(tmp_path / "pets" / split / "cat", 15)
    own = own_images(str(tmp_path / "pets"), TAKEN, LABELS)
    assert own.described == "60 images (none of them for training) with labels of pets"


def test_other_inputs_are_as_many_and_old_answers_are_left_out(tmp_path: Path) -> None:
    drawn(tmp_path / "pets" / "dog", 20)
    drawn(tmp_path / "pets" / "cat", 20)
    own = own_images(str(tmp_path / "pets"), TAKEN, LABELS)
    old = {"image": np.zeros((256, 8, 8, 1), np.uint8), "masks": np.zeros(256)}
    alone = samples_with(own, old | {"labels": np.zeros(256, np.int64)})
    assert set(alone) == {"image", "labels"} and np.array_equal(alone["labels"], own.labels)
    asked = samples_with(own, old | {"tokens": np.arange(256)})
    assert set(asked) == {"image", "tokens"}
    assert len(asked["tokens"]) == len(asked["image"]) == len(own.images)
    short = samples_with(own, {"tokens": np.arange(5)})
    assert len(short["tokens"]) == len(short["image"]) == 5


def test_int8_of_a_converted_model_needs_images(tmp_path: Path) -> None:
    checkpoint = tiny_nac(tmp_path / "ours.safetensors")
    check_calibrated(checkpoint.path, checkpoint)  # trained by saccade: its samples are its data
    card = {"data": AUTHORS_DATA, "calibration": "256 generated scenes"}
    converted = rewritten(checkpoint, tmp_path / "theirs.safetensors", card=card)
    with pytest.raises(SaccadeError, match=r"int8 needs images.*generated scenes.*--calibrate-on"):
        check_calibrated(converted.path, header_of(converted.path))
    # A model without images has none to be calibrated on.
    arrays: Any = {"tokens": np.zeros((256, 3), np.int64)}
    texts = rewritten(
        converted, tmp_path / "texts.safetensors", preprocessing=None, calibration=arrays
    )
    check_calibrated(texts.path, header_of(texts.path))
    with pytest.raises(SaccadeError, match="takes no image"):
        recalibrated(texts, "digits", tmp_path / "no.safetensors")

    photos = str(drawn(tmp_path / "photos", 30))
    calibrated, said = recalibrated(converted, photos, tmp_path / "mine.safetensors")
    check_calibrated(calibrated.path, header_of(calibrated.path))
    assert said == "30 images without labels of photos" == calibrated.card["calibration"]
    assert calibrated.card["recalibrated_from_sha256"] == converted.sha256
    assert calibrated.card["calibrated_on"] == {"data": "photos", "samples": 30}
    found = load(calibrated.path)
    assert found.calibration["image"].shape == (30, 8, 8, 1) and "labels" not in found.calibration
    assert {name: value.tolist() for name, value in found.weights.items()} == {
        name: value.tolist() for name, value in converted.weights.items()
    }


def rewritten(checkpoint: Any, path: Path, **changes: Any) -> Any:
    """The checkpoint with other content."""
    names = ("family", "config", "weights", "preprocessing", "labels", "calibration", "card")
    return save(path, **({name: getattr(checkpoint, name) for name in names} | changes))


def broken(folder: Path) -> str:
    drawn(folder / "photos", 20)
    (folder / "photos" / "007.png").write_text("not an image")
    return str(folder / "photos")


def table(folder: Path) -> str:
    (folder / "t.csv").write_text("a,b\n1,2\n")
    return str(folder / "t.csv")


REFUSED: dict[str, tuple[Callable[[Path], str], str]] = {
    "too few": (lambda folder: str(drawn(folder / "few", 15)), "few: found 15 images.*least 16"),
    "nothing there": (lambda folder: str(folder / "none"), "neither a name nor a path"),
    "an empty folder": (lambda folder: str(folder), "no .* in class folders.*may also have images"),
    "a broken image": (broken, r"007\.png: not a JPEG, PNG or WebP"),
    "another table": (table, r"t\.csv: found the columns 'a', 'b'"),
    "arrays of another size": (lambda _: "digits-sum", "the model expects"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refuses(case: str, tmp_path: Path) -> None:
    make, reason = REFUSED[case]
    with pytest.raises(SaccadeError, match=f"(?s){reason}"):
        own_images(make(tmp_path), TAKEN, LABELS)
