# SPDX-License-Identifier: Apache-2.0
"""Changes of training images: their documented meaning, their words, crops from the originals."""

import io
from collections import Counter

import numpy as np
import pytest
from PIL import Image, ImageEnhance

from saccade.core.errors import SaccadeError
from saccade.models.data import augment as changes
from saccade.models.data.augment import CHANGES, OPS, Augment, Augmentation, ImageMix, crop_box
from saccade.models.data.samples import images as image_file
from saccade.models.preprocessing import Preprocessing

USUAL = Augmentation(shift_px=1, degrees=5, zoom=0.1)


def numbers(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def picture(height: int = 12, width: int = 16, channels: int = 3) -> np.ndarray:
    """An image whose pixels are all different from their neighbors."""
    places = np.arange(height * width * channels).reshape(height, width, channels)
    return (places * 37 % 251).astype(np.uint8)


def test_crops_are_drawn_as_documented() -> None:
    rng, shares, ratios = numbers(), [], []
    for _ in range(1_000):
        top, left, rows, columns = crop_box(300, 400, 0.25, rng)
        assert 0 <= top <= 300 - rows
        assert 0 <= left <= 400 - columns
        shares.append(rows * columns / 120_000)
        ratios.append(columns / rows)
    assert 0.245 <= min(shares) < 0.27
    assert max(shares) > 0.97
    assert min(ratios) >= 0.74
    assert max(ratios) <= 1.35
    # Boxes of at most 9/16 of the area always fit: of these, areas and log ratios are uniform.
    small = np.array(shares) < 0.56
    assert np.mean(np.array(shares)[small]) == pytest.approx(0.405, abs=0.02)
    assert np.quantile(np.log(ratios)[small], 0.25) == pytest.approx(np.log(0.75) / 2, abs=0.03)


@pytest.mark.parametrize(
    ("size", "box"), [((10, 1000), (0, 494, 10, 13)), ((1000, 10), (494, 0, 13, 10))]
)
def test_an_image_without_a_fitting_box_is_cropped_at_its_center(
    size: tuple[int, int], box: tuple[int, int, int, int]
) -> None:
    found = crop_box(*size, 1.0, numbers())
    assert found[2:] == box[2:]
    assert np.abs(np.subtract(found, box)).max() <= 1


def test_each_word_does_what_it_says() -> None:
    image = picture()
    flipped = Augment.of(("flip=1",), USUAL)(image, numbers())
    np.testing.assert_array_equal(flipped, image[:, ::-1])
    drawn = [Augment.of(("flip",), USUAL)(image, numbers(seed)) for seed in range(40)]
    assert 8 < sum((one == image).all() for one in drawn) < 32
    none = Augment.of(("none",), USUAL)(image, numbers())
    np.testing.assert_array_equal(none, image)
    affine = Augment.of(("affine",), USUAL)(image, numbers())
    np.testing.assert_array_equal(affine, USUAL(image[None], numbers())[0])
    assert Augment.of(("affine=2",), USUAL).affine == Augmentation(2, 10, 0.2)
    cropped = Augment.of(("crop",), USUAL)(image, numbers(1))
    top, left, rows, columns = crop_box(12, 16, 0.08, numbers(1))
    part = Image.fromarray(image[top : top + rows, left : left + columns])
    expected = np.asarray(part.resize((16, 12), Image.Resampling.BILINEAR))
    np.testing.assert_array_equal(cropped, expected)


def test_erasing_fills_a_box_with_random_pixels() -> None:
    image = np.full((30, 40, 3), 7, np.uint8)
    areas = []
    for seed in range(60):
        changed = (Augment.of(("erasing=1",), USUAL)(image, numbers(seed)) != image).any(-1)
        rows, columns = (np.flatnonzero(changed.any(axis)) for axis in (1, 0))
        height, width = np.ptp(rows) + 1, np.ptp(columns) + 1
        assert changed.sum() > 0.97 * height * width
        areas.append(height * width / 1200)
        assert 0.25 < height / width < 3.7
    assert 0.015 < min(areas) < 0.06
    assert 0.25 < max(areas) < 0.36
    some = [Augment.of(("erasing",), USUAL)(image, numbers(seed)) for seed in range(80)]
    assert 8 < sum((one != image).any() for one in some) < 35


def test_jitter_changes_brightness_contrast_and_saturation_in_any_order() -> None:
    image, orders = picture(), set()
    for seed in range(12):
        rng = numbers(seed)
        order = rng.permutation(3)
        expected = Image.fromarray(image)
        for index in order:
            kind = (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color)[index]
            expected = kind(expected).enhance(rng.uniform(0.6, 1.4))
        found = Augment.of(("jitter",), USUAL)(image, numbers(seed))
        np.testing.assert_array_equal(found, np.asarray(expected))
        orders.add(tuple(order))
    assert len(orders) > 3


# Levels 0 and 0.9 of timm's `rand-m9-mstd0.5-inc1`, on a gray ramp whose pixel is its column.
RAMP = Image.fromarray(np.tile(np.arange(256, dtype=np.uint8), (8, 1)))
LEVELS = {
    "AutoContrast": (lambda x: x, lambda x: x),
    "Invert": (lambda x: 255 - x, lambda x: 255 - x),
    "Posterize": (lambda x: x & 0xF0, lambda x: x & 0x80),
    "Solarize": (lambda x: x, lambda x: np.where(x >= 26, 255 - x, x)),
    "SolarizeAdd": (lambda x: x, lambda x: np.where(x < 128, np.minimum(x + 99, 255), x)),
    "Brightness": (lambda x: x, lambda x: np.minimum(x * 1.81, 255)),
    "Color": (lambda x: x, lambda x: x),
}


@pytest.mark.parametrize("name", LEVELS)
def test_ops_of_rand_augment(name: str) -> None:
    for level, expected in zip((0.0, 0.9), LEVELS[name], strict=True):
        found = np.asarray(OPS[name](RAMP, level, 1))[0].astype(int)
        np.testing.assert_allclose(found, expected(np.arange(256)), atol=1)


def test_ops_that_move_pixels_reach_as_far_as_documented() -> None:
    ramp = np.arange(256)
    moved = np.asarray(OPS["TranslateX"](RAMP, 1.0, 1))[0]
    np.testing.assert_allclose(moved[:140], ramp[:140] + 115.2, atol=1)
    assert (moved[145:] == 128).all(), "gray where nothing comes from"
    sheared = np.asarray(OPS["ShearX"](RAMP, 1.0, -1)).astype(int)
    assert sheared[7, 100] - sheared[0, 100] == pytest.approx(-0.3 * 7, abs=1)
    dot = np.zeros((41, 41), np.uint8)
    dot[20, 38:] = 255
    turned = np.asarray(OPS["Rotate"](Image.fromarray(dot), 1.0, 1))
    row, column = np.unravel_index(turned.argmax(), turned.shape)
    assert np.degrees(np.arctan2(20 - row, column - 20)) == pytest.approx(30, abs=3)
    color = Image.fromarray(picture(20, 20))
    for name, op in OPS.items():
        assert op(color, 1.0, 1).size == (20, 20), name
        assert op(RAMP, 1.0, -1).mode == "L", name


def test_rand_augment_applies_two_of_all_ops_half_of_the_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[tuple[str, float, int]] = []

    def recorded(name: str) -> changes._Op:
        def op(image: Image.Image, level: float, sign: int) -> Image.Image:
            seen.append((name, level, sign))
            return image

        return op

    monkeypatch.setattr(changes, "OPS", {name: recorded(name) for name in OPS})
    augmented, rng = Augment.of(("randaugment",), USUAL), numbers()
    for _ in range(600):
        augmented(picture(4, 4), rng)
    assert len(seen) == pytest.approx(600, abs=60)
    counts = Counter(name for name, _, _ in seen)
    assert len(counts) == 15
    assert min(counts.values()) > 20
    levels = [level for _, level, _ in seen]
    assert max(levels) <= 1
    assert np.mean(levels) == pytest.approx(0.9, abs=0.01)
    assert np.std(levels) == pytest.approx(0.05, abs=0.01)
    assert np.mean([sign for _, _, sign in seen]) == pytest.approx(0, abs=0.12)


def test_mixup_blends_images_and_labels_alike() -> None:
    images = np.repeat(np.array([0, 100, 200], np.uint8), 16).reshape(3, 4, 4, 1)
    labels = np.array([2, 0, 1])
    mix = ImageMix.draw(4, 4, numbers(3), mixup=0.8, cutmix=0.0)
    found, targets = mix.images(images, images[[2, 0, 1]]), mix.targets(labels, 4)
    rng = numbers(3)
    own = rng.beta(0.8, 0.8)
    one_hot = np.eye(4)[labels]
    np.testing.assert_allclose(targets, own * one_hot + (1 - own) * one_hot[[2, 0, 1]], atol=1e-6)
    np.testing.assert_allclose(found[1, ..., 0], 100 * own, atol=0.51)
    assert found.dtype == np.uint8


def test_cutmix_pastes_a_box_and_counts_its_pixels() -> None:
    images = np.stack([np.full((10, 20, 3), value, np.uint8) for value in (1, 2, 3)])
    labels, shares = np.arange(3), []
    for seed in range(200):
        mix = ImageMix.draw(10, 20, numbers(seed), mixup=0.0, cutmix=1.0)
        found, targets = mix.images(images, images[[2, 0, 1]]), mix.targets(labels, 3)
        pasted = (found != images).any(-1)
        assert (pasted == pasted[0]).all(), "the same box in every image"
        assert (found[0][pasted[0]] == 3).all()
        np.testing.assert_allclose(np.diag(targets), 1 - pasted[0].mean(), atol=1e-6)
        np.testing.assert_allclose(targets.sum(1), 1, atol=1e-6)
        shares.append(pasted[0].mean())
    assert min(shares) < 0.02
    assert max(shares) > 0.6
    assert (images[0] == 1).all(), "the given images stay"


def test_with_both_each_is_drawn_for_half_of_the_batches() -> None:
    drawn = [ImageMix.draw(8, 8, numbers(seed), mixup=0.8, cutmix=1.0) for seed in range(100)]
    assert 35 < sum(mix.box is not None for mix in drawn) < 75


REFUSED = {
    "flop": "--augment is 'flop', expected one of .* Did you mean flip.",
    "crop=2": "--augment crop=2: expected a number above 0 and at most 1 .least share of the",
    "flip=0": "expected a number above 0",
    "jitter=": "expected a number above 0",
    "erasing=nan": "expected a number above 0",
    "randaugment=11": "at most 10",
    "none=1": "Or pass none",
    "flip,flip=0.1": "has flip twice",
    "none,flip": "found none with other changes",
}


@pytest.mark.parametrize("words", REFUSED)
def test_words_that_cannot_be_used(words: str) -> None:
    with pytest.raises(SaccadeError, match=REFUSED[words]):
        Augment.of(tuple(words.split(",")), USUAL)


def test_every_word_works_on_gray_and_color_and_depends_on_its_numbers_only() -> None:
    every = Augment.of(tuple(CHANGES), USUAL)
    for channels in (1, 3):
        image = picture(9, 14, channels)
        first, again, other = (every(image, numbers(seed)) for seed in (1, 1, 2))
        assert first.shape == image.shape
        assert first.dtype == np.uint8
        np.testing.assert_array_equal(first, again)
        assert (first != other).any()


class OneImage:
    """A source of one photograph, 300 x 100 pixels with a fine pattern."""

    class_names = ("one",)
    labels = np.zeros(3, np.int64)

    def __init__(self, exif: bool) -> None:
        pattern = (np.indices((100, 300)).sum(0) % 2 * 255).astype(np.uint8)
        image, data = Image.fromarray(pattern).convert("RGB"), io.BytesIO()
        tags = Image.Exif()
        if exif:
            tags[0x0112] = 6  # turned by 90 degrees
        image.save(data, "PNG", exif=tags)
        self.data, self.reads = data.getvalue(), 0

    def read(self, row: int, most_bytes: int) -> bytes:
        self.reads += 1
        return self.data


@pytest.mark.parametrize("exif", [False, True])
def test_crops_are_cut_from_the_original(exif: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A crop of the resized image would be an even gray: the pattern is finer than its pixels."""
    source = OneImage(exif)
    wanted = Preprocessing(16, 16, 3, (0.0,) * 3, (1.0,) * 3).wanted()
    small = image_file.Images(source, np.arange(3), wanted)  # type: ignore[arg-type]
    assert np.ptp(small[0].astype(int)) < 60
    sizes = []

    def form(image: Image.Image, wanted: object, rng: np.random.Generator) -> np.ndarray:
        sizes.append(image.size)
        # A box of exactly the model's size.
        monkeypatch.setattr(changes, "crop_box", lambda *_: (20, 30, 16, 16))
        return Augment.of(("crop",), USUAL).from_original(image, wanted, rng)  # type: ignore[arg-type]

    source.reads = 0
    originals = image_file.Originals(small)
    for _ in range(2):
        found = originals.each(np.array([0, 2]), form, [numbers(), numbers()])
    for axis in (1, 2):
        assert (np.abs(np.diff(found.astype(int), axis=axis)) == 255).all()
    assert set(sizes) == {(100, 300) if exif else (300, 100)}
    originals.ahead(np.array([0, 1]))
    originals.each(np.array([1]), form, [numbers()])
    assert source.reads == 3, "each row once: those that were used stay in memory"
    monkeypatch.setattr(image_file, "KEPT_BYTES", 0)
    unkept = image_file.Originals(small)
    for _ in range(2):
        unkept.each(np.array([0]), form, [numbers()])
    assert source.reads == 5


def test_an_image_that_two_workers_decode_takes_its_room_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Twice(OneImage):
        """Its first reading waits for another one of the same row."""

        def read(self, row: int, most_bytes: int) -> bytes:
            data = super().read(row, most_bytes)
            if self.reads == 1:
                originals._opened(row)
            return data

    source = Twice(exif=False)
    wanted = Preprocessing(16, 16, 3, (0.0,) * 3, (1.0,) * 3).wanted()
    images = image_file.Images(source, np.arange(3), wanted)  # type: ignore[arg-type]
    monkeypatch.setattr(image_file, "KEPT_BYTES", 2 * 300 * 100 * 3)
    originals = image_file.Originals(images)
    for row in (0, 1, 1):
        originals._opened(row)
    assert source.reads == 3, "twice the first row, once the second"
