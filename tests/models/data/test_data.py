# SPDX-License-Identifier: Apache-2.0
"""Data sets: the same splits everywhere, and the user's own data refused with a reason."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import labelled_sets
import numpy as np
import pytest
from PIL import Image

from saccade.core.errors import SaccadeError
from saccade.models.data.augment import Augmentation
from saccade.models.data.datasets import load_data
from saccade.models.data.options import DataOptions
from saccade.models.data.splits import calibration_rows, stratified_split
from saccade.models.preprocessing import Preprocessing

DIGITS = Preprocessing(8, 8, 1, (0.0,), (1.0,))


def test_digits_are_split_as_stated() -> None:
    parts = {split: load_data("digits", split) for split in ("train", "validation", "test")}
    assert [len(part.labels) for part in parts.values()] == [998, 200, 599]
    for part in parts.values():
        shares = np.bincount(part.labels) / len(part.labels)
        assert part.images.dtype == np.uint8
        assert part.images.max() == 255
        assert abs(shares - 0.1).max() < 0.01
    assert len({part.sha256 for part in parts.values()}) == 3
    again = load_data("digits", "test", preprocessing=DIGITS)
    assert again.sha256 == parts["test"].sha256


@pytest.mark.parametrize("option", ["labels", "data_root"])
def test_options_of_own_data_are_not_ignored(option) -> None:
    asked = DataOptions(**{option: Path("names.txt")})
    flag = option.replace("_", "-")
    with pytest.raises(SaccadeError, match=rf"--{flag} names.txt: .* but digits is .* Drop it"):
        load_data("digits", "test", asked=asked)


def test_few_images_calibrate_again_and_again() -> None:
    assert len(set(calibration_rows(1_000))) == 256
    few = calibration_rows(10)
    assert len(few) == 256 and set(few) == set(range(10))


def test_splits_are_a_stratified_partition() -> None:
    labels = np.repeat([0, 1, 2], [100, 50, 10])
    parts = stratified_split(labels, validation=16, test=32)
    together = np.sort(np.concatenate(list(parts.values())))
    assert np.array_equal(together, np.arange(160))
    assert [len(parts[name]) for name in ("train", "validation", "test")] == [112, 16, 32]
    assert np.array_equal(np.bincount(labels[parts["test"]]), [20, 10, 2])


def test_canvases_show_digits_of_their_own_split_and_their_sum() -> None:
    for split, count in (("validation", 2_000), ("test", 5_000)):
        canvases, single = load_data("digits-sum", split), load_data("digits", split)
        assert canvases.images.shape == (count, 24, 24, 1)
        value = {
            image.tobytes(): label
            for image, label in zip(single.images, single.labels, strict=True)
        }
        for canvas, label in zip(canvases.images[:200], canvases.labels[:200], strict=True):
            corners = [(y, x) for y in (2, 14) for x in (2, 14)]
            shown = [canvas[y : y + 8, x : x + 8].tobytes() for y, x in corners]
            assert sum(value[digit] for digit in shown) % 10 == label
    assert load_data("digits-sum", "test").sha256 == canvases.sha256


def test_augmentation_is_small_and_optional() -> None:
    images = load_data("digits", "validation").images
    rng = np.random.default_rng(0)
    assert np.array_equal(Augmentation()(images, rng), images)
    assert np.array_equal(Augmentation(shift_px=1e-9)(images, rng), images)
    changed = Augmentation(shift_px=0.7, degrees=12, zoom=0.1)(images, rng)
    assert changed.dtype == np.uint8
    assert 2 < abs(changed.astype(int) - images).mean() < 40
    assert Augmentation(degrees=9)(images[:, :1, :1], rng).shape == (200, 1, 1, 1)


def class_folders(path: Path, *, classes: int = 2, images: int = 10, mode: str = "RGB") -> Path:
    rng = np.random.default_rng(0)
    for index in range(classes):
        (path / f"kind-{index}").mkdir(parents=True)
        for number in range(images):
            pixels = rng.integers(0, 256, (20, 30, 3), dtype=np.uint8)
            file = path / f"kind-{index}" / f"{number}.png"
            Image.fromarray(pixels).convert(mode).save(file)
    return path


def test_folder_of_class_folders(tmp_path: Path) -> None:
    path = class_folders(tmp_path / "mine")
    (path / ".hidden").touch()
    parts = [load_data(path, split) for split in ("train", "validation", "test")]
    assert [len(part.labels) for part in parts] == [14, 2, 4]
    assert parts[0].images.shape[1:] == (32, 32, 3)
    assert parts[0].class_names == ("kind-0", "kind-1")
    assert parts[0].name == "mine"
    fitted = load_data(path, "test", preprocessing=DIGITS)
    assert fitted.images.shape == (4, 8, 8, 1)
    grey = class_folders(tmp_path / "grey", mode="L")
    assert load_data(grey, "train", side_px=16).images.shape[1:] == (16, 16, 1)


def test_odd_images_become_plain_ones(tmp_path: Path) -> None:
    path = class_folders(tmp_path / "mine", mode="L")
    for file in path.glob("kind-0/*.png"):
        Image.new("LA", (9, 9), (0, 0)).save(file)
    for file in path.glob("kind-1/*.png"):
        Image.fromarray(np.full((9, 9), 65535, dtype=np.uint16)).save(file)
    data = load_data(path, "train", preprocessing=DIGITS)
    assert (data.images == 255).all()


def test_a_folders_images_keep_their_shape(tmp_path: Path) -> None:
    path = class_folders(tmp_path / "mine")
    for file in path.glob("*/*.png"):
        # White in the middle square, black beside it: all white once it is cropped.
        wide = np.zeros((20, 60), dtype=np.uint8)
        wide[:, 20:40] = 255
        Image.fromarray(wide).save(file)
    assert load_data(path, "train", side_px=20).images.min() == 255
    squashing = replace(DIGITS, resize_mode="squash")
    squashed = load_data(path, "train", preprocessing=squashing).images
    assert squashed[:, :, 0].max() < 128 < squashed[:, :, 3].min()


def lonely_class(path: Path) -> None:
    class_folders(path, classes=1)


def no_class(path: Path) -> None:
    path.mkdir()


def truncated_image(path: Path) -> None:
    for file in class_folders(path).glob("*/*.png"):
        file.write_bytes(file.read_bytes()[:60])


def animated_image(path: Path) -> None:
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue")]
    for file in class_folders(path).glob("*/*.png"):
        frames[0].save(file, save_all=True, append_images=frames[1:])


def another_format(path: Path) -> None:
    for file in class_folders(path).glob("*/*.png"):
        Image.new("L", (8, 8)).save(file, "GIF")


def of_size(width: int, height: int) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        for file in class_folders(path).glob("*/*.png"):
            Image.new("1", (width, height)).save(file)

    return make


FOLDERS: dict[str, tuple[Callable[[Path], None], str]] = {
    "no class": (no_class, "found no .* files in class folders"),
    "one class": (lonely_class, "found the class kind-0,"),
    "truncated images": (truncated_image, "kind-0.*truncated or corrupt.*save it again"),
    "a GIF by another name": (
        another_format,
        "kind-0/.*not a JPEG, PNG or WebP file.*convert it, or remove it",
    ),
    "animations": (animated_image, "animated with 2 frames, only one is allowed: save one"),
    "single pixels": (of_size(1, 1), "kind-0.*1 x 1 pixels, expected at least 2 pixels per side"),
    "endless strips": (of_size(100_000, 10), "100000 x 10 pixels, at most 16384.*smaller"),
}


@pytest.mark.parametrize("case", FOLDERS)
def test_folder_is_refused(case: str, tmp_path: Path) -> None:
    make, reason = FOLDERS[case]
    make(tmp_path / "mine")
    with pytest.raises(SaccadeError, match=f"(?s){reason}"):
        for split in ("train", "validation", "test"):
            load_data(tmp_path / "mine", split)


IMAGES, LABELS = np.zeros((20, 6, 6), dtype=np.uint8), np.arange(20) % 2
ARRAYS = {
    "no labels": ({"images": IMAGES}, "found arrays .'images'"),
    "floats": ({"images": IMAGES / 2, "labels": LABELS}, "float64 .* as images, expected uint8"),
    "pickled objects": ({"images": IMAGES, "labels": LABELS.astype(object)}, "plain arrays"),
    "flat images": ({"images": IMAGES[:, 0], "labels": LABELS}, "expected uint8 .*n, h, w."),
    "two channels": ({"images": np.stack([IMAGES] * 2, -1), "labels": LABELS}, "expected .*n, h"),
    "a label too few": ({"images": IMAGES, "labels": LABELS[1:]}, "as labels, .* each of the 20 r"),
    "labels with fractions": ({"images": IMAGES, "labels": LABELS / 2}, "whole number"),
    "labels that are spans of time": (
        {"images": IMAGES, "labels": LABELS.astype("m8[s]")},
        "found timedelta64.* as labels",
    ),
    "labels from -1": ({"images": IMAGES, "labels": LABELS - 1}, "row 1: found the label -1"),
    "labels up to 1001": ({"images": IMAGES, "labels": LABELS + 1000}, "found the label 1000"),
    "one class": ({"images": IMAGES, "labels": LABELS * 0}, "found the class 0,"),
    "a name too few": (
        {"images": IMAGES, "labels": LABELS, "class_names": np.array(["a"])},
        "row 2: found the label '1', expected one of the 1 names",
    ),
}


@pytest.mark.parametrize("case", ARRAYS)
def test_npz_is_refused(case: str, tmp_path: Path) -> None:
    arrays, reason = ARRAYS[case]
    np.savez(tmp_path / "mine.npz", **arrays)
    with pytest.raises(SaccadeError, match=f"(?s){reason}"):
        load_data(tmp_path / "mine.npz", "train")


@pytest.mark.parametrize("dtype", ["u1", "i2", "u8", ">i8"])
def test_npz_with_labels_of_any_whole_numbers(dtype: str, tmp_path: Path) -> None:
    np.savez(tmp_path / "mine.npz", images=IMAGES, labels=LABELS.astype(dtype))
    data = load_data(tmp_path / "mine.npz", "train")
    assert data.labels.dtype == np.int64 and np.bincount(data.labels).tolist() == [7, 7]


def test_npz_with_class_names(tmp_path: Path) -> None:
    names = np.array(["cat", "dog"])
    np.savez(tmp_path / "mine.npz", images=IMAGES, labels=LABELS, class_names=names)
    data = load_data(tmp_path / "mine.npz", "test")
    assert data.images.shape == (4, 6, 6, 1)
    assert data.class_names == ("cat", "dog")
    with pytest.raises(SaccadeError, match=r"\(6, 6, 1\).*expects .*\(8, 8, 1\)"):
        load_data(tmp_path / "mine.npz", "test", preprocessing=DIGITS)


@pytest.mark.parametrize("name", ["mnist", "broken.npz", "a.txt"])
def test_unknown_data(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for file in ("broken.npz", "a.txt"):
        Path(file).write_text("hello")
    with pytest.raises(SaccadeError, match=name):
        load_data(name, "train")
    with pytest.raises(SaccadeError, match="split is 'most', expected one of train"):
        load_data("digits", "most")


def test_which_part_is_scored_by_default_is_said(tmp_path, capsys):
    samples = labelled_sets.digits()
    data = labelled_sets.class_folders(tmp_path, samples)
    tests = sum(one.split == "test" for one in samples)
    for split, said in (("held-out", True), ("test", False), ("all", False)):
        load_data(data, split)
        text = f"takes its test part, {tests} of {len(samples)} samples. --split all takes"
        assert (text in capsys.readouterr().err) == said
