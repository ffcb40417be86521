# SPDX-License-Identifier: Apache-2.0
"""Random changes of training images: of one image, and of a batch with its labels."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageEnhance, ImageOps
from torch.nn import functional as F

from saccade.core.checks import check_once, check_one_of
from saccade.core.errors import SaccadeError
from saccade.models.image_decoding import ImageInput, fit


@dataclass(frozen=True)
class Augmentation:
    """Random changes, drawn separately per image and uniform within plus or minus these limits."""

    shift_px: float = 0.0
    degrees: float = 0.0
    zoom: float = 0.0  # 0.1: from 0.9 to 1.1 times

    def __bool__(self) -> bool:
        """Return whether anything changes."""
        return bool(self.shift_px or self.degrees or self.zoom)

    def times(self, factor: float) -> "Augmentation":
        """Return these changes with all limits multiplied."""
        return Augmentation(self.shift_px * factor, self.degrees * factor, self.zoom * factor)

    def __call__(self, images: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Augment images with bilinear interpolation; pixels from outside an image repeat its edge.

        Shapes: images [n h w c] uint8 -> same.
        """
        return self.by(images, self.draw(len(images), rng))

    def draw(self, count: int, rng: np.random.Generator) -> np.ndarray:
        """Draw the rotation, the zoom and both shifts of each image, as shares of the limits.

        Shapes: -> [4 count].
        """
        return rng.uniform(-1, 1, (4, count)) if self else np.zeros((4, count))

    def by(self, images: np.ndarray, drawn: np.ndarray) -> np.ndarray:
        """Change images by what `draw` returned for them.

        Shapes: images [n h w c] uint8, drawn [4 n] -> images.
        """
        if not self:
            return images
        _, height, width, _ = images.shape
        angle, scale = np.radians(self.degrees) * drawn[0], 1 + self.zoom * drawn[1]
        cosine, sine = (f(angle) / scale for f in (np.cos, np.sin))
        down, right = self.shift_px * drawn[2:]
        # torch counts from -1 to 1 between the centers of the outer pixels.
        y, x = (max(1, side - 1) / 2 for side in (height, width))
        rows = [[cosine, sine * y / x, right / x], [-sine * x / y, cosine, down / y]]
        matrices = torch.from_numpy(np.array(rows).transpose(2, 0, 1))
        pixels = torch.from_numpy(images.transpose(0, 3, 1, 2).astype(np.float64))
        grid = F.affine_grid(matrices, list(pixels.shape), align_corners=True)
        moved = F.grid_sample(pixels, grid, padding_mode="border", align_corners=True)
        return moved.permute(0, 2, 3, 1).round().byte().numpy()


@dataclass(frozen=True)
class AugmentWord:
    """A word of `--augment`: its number if none is given, and what the number means."""

    usual: float
    most: float
    meaning: str


CHANGES = {
    "affine": AugmentWord(1.0, 3.0, "factor on the family's small shifts, rotations and zooms"),
    "crop": AugmentWord(0.08, 1.0, "least share of the image's area"),
    "flip": AugmentWord(0.5, 1.0, "share of the images"),
    "jitter": AugmentWord(0.4, 1.0, "greatest change of brightness, contrast and saturation"),
    "randaugment": AugmentWord(9.0, 10.0, "magnitude"),
    "erasing": AugmentWord(0.25, 1.0, "share of the images"),
}
NO_CHANGE = "none"


@dataclass(frozen=True)
class Augment:
    """The changes that `--augment` names, in the order of these fields; 0 leaves one out.

    Source: crop, He et al. 2016 (`RandomResizedCrop` of torchvision); randaugment, Cubuk et al.
            2020, with the ops and ranges of timm's `rand-m9-mstd0.5-inc1`; erasing, Zhong et al.
            2020, with random pixels.
    """

    affine: Augmentation = Augmentation()
    crop: float = 0.0
    flip: float = 0.0
    jitter: float = 0.0
    randaugment: float = 0.0
    erasing: float = 0.0

    @classmethod
    def of(cls, words: Sequence[str], usual: Augmentation) -> "Augment":
        """Read the words of `--augment`; `usual` are the family's small shifts.

        Raises: SaccadeError if a word is unknown or given twice, or a number is out of range.
        """
        numbers = [_word(word) for word in words]
        check_once("--augment", [name for name, _ in numbers])
        given = dict(numbers)
        if NO_CHANGE in given:
            if len(given) > 1:
                raise SaccadeError(
                    f"--augment {','.join(words)}: found {NO_CHANGE} with other changes. Pass "
                    f"{NO_CHANGE} alone, or leave it out."
                )
            return cls()
        affine = usual.times(given.pop("affine", 0.0))
        return cls(affine=affine, **given)

    def __call__(self, pixels: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Change one image.

        Shapes: pixels [h w c] uint8 -> the same.
        """
        pixels = self.affine(pixels[None], rng)[0]
        if self.crop:
            height, width = pixels.shape[:2]
            top, left, rows, columns = crop_box(height, width, self.crop, rng)
            part = _image(pixels).crop((left, top, left + columns, top + rows))
            pixels = _pixels(part.resize((width, height), Image.Resampling.BILINEAR))
        return self._after_crop(pixels, rng)

    def from_original(
        self, image: Image.Image, wanted: ImageInput, rng: np.random.Generator
    ) -> np.ndarray:
        """Change one image whose size is that of its file: the crop is cut from all its pixels.

        Shapes: -> [h w c] uint8, of the model's size.
        """
        box = crop_box(image.height, image.width, self.crop, rng)
        size = (wanted.height_px, wanted.width_px)
        cut = wanted._replace(cut=box, exif=False, resize_mode="squash", resize_px=size)
        pixels = self.affine(fit(image, cut)[None], rng)[0]
        return self._after_crop(pixels, rng)

    def _after_crop(self, pixels: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        if self.flip and rng.random() < self.flip:
            pixels = pixels[:, ::-1]
        if self.jitter or self.randaugment:
            image = _image(pixels)
            if self.jitter:
                image = jittered(image, self.jitter, rng)
            if self.randaugment:
                image = rand_augmented(image, self.randaugment, rng)
            pixels = _pixels(image)
        if self.erasing and rng.random() < self.erasing:
            pixels = erased(pixels, rng)
        return pixels


def _word(word: str) -> tuple[str, float]:
    name, equals, text = word.partition("=")
    if name == NO_CHANGE and not equals:
        return name, 0.0
    check_one_of("--augment", name, CHANGES, f"Or pass {NO_CHANGE}.")
    change = CHANGES[name]
    if not equals:
        return name, change.usual
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number <= change.most:
        raise SaccadeError(
            f"--augment {word}: expected a number above 0 and at most {change.most:g} "
            f"({change.meaning}). Write it like {name}={change.usual:g}, or leave the number out."
        )
    return name, number


def _image(pixels: np.ndarray) -> Image.Image:
    return Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels)


def _pixels(image: Image.Image) -> np.ndarray:
    pixels = np.asarray(image)
    return pixels[..., None] if pixels.ndim == 2 else pixels


ATTEMPTS = 10  # to find a box that fits
CROP_RATIOS = (3 / 4, 4 / 3)  # width by height
ERASED_AREAS, ERASED_RATIOS = (0.02, 1 / 3), (0.3, 3.3)


def crop_box(
    height: int, width: int, least: float, rng: np.random.Generator
) -> tuple[int, int, int, int]:
    """Draw the box of a random resized crop: top, left, height, width.

    Its area is uniform from `least` to 1 of the image's. The logarithm of its aspect ratio is
    uniform. If no box fits, it is the largest one at the center with an allowed ratio.
    """
    box = _drawn_box(height, width, (least, 1.0), CROP_RATIOS, rng)
    if box is not None:
        return box
    narrow, wide = CROP_RATIOS
    rows = min(height, max(1, round(width / narrow)))
    columns = min(width, max(1, round(height * wide)))
    return (height - rows) // 2, (width - columns) // 2, rows, columns


def _drawn_box(
    height: int,
    width: int,
    areas: tuple[float, float],
    ratios: tuple[float, float],
    rng: np.random.Generator,
) -> tuple[int, int, int, int] | None:
    for _ in range(ATTEMPTS):
        area = height * width * rng.uniform(*areas)
        ratio = math.exp(rng.uniform(*np.log(ratios)))
        rows, columns = round(math.sqrt(area / ratio)), round(math.sqrt(area * ratio))
        if 0 < rows <= height and 0 < columns <= width:
            top, left = rng.integers(height - rows + 1), rng.integers(width - columns + 1)
            return int(top), int(left), rows, columns
    return None


def jittered(image: Image.Image, strength: float, rng: np.random.Generator) -> Image.Image:
    """Change brightness, contrast and saturation, in random order, by factors around 1."""
    kinds = (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color)
    for index in rng.permutation(len(kinds)):
        image = kinds[index](image).enhance(rng.uniform(1 - strength, 1 + strength))
    return image


def erased(pixels: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Fill a random box of 2 to 33 % of the area with random pixels.

    Shapes: pixels [h w c] uint8 -> the same.
    """
    height, width = pixels.shape[:2]
    box = _drawn_box(height, width, ERASED_AREAS, ERASED_RATIOS, rng)
    if box is None:
        return pixels
    top, left, rows, columns = box
    pixels = pixels.copy()
    noise = rng.integers(0, 256, (rows, columns, pixels.shape[-1]), dtype=np.uint8)
    pixels[top : top + rows, left : left + columns] = noise
    return pixels


MOST_MAGNITUDE, MAGNITUDE_STD = 10.0, 0.5
OPS_EACH, APPLIED = 2, 0.5  # ops drawn for an image, and the share of them that are applied
_GRAY = 128  # of pixels that come from outside the image


def rand_augmented(image: Image.Image, magnitude: float, rng: np.random.Generator) -> Image.Image:
    """Apply each of two ops, drawn with repetition from OPS, with probability 1/2.

    The magnitude of each is normal around `magnitude`, with a standard deviation of 0.5, limited to
    0 to 10. Its sign is random.
    """
    for name in rng.choice(list(OPS), OPS_EACH):
        applied, sign = rng.random() < APPLIED, rng.choice((-1, 1))
        level = np.clip(rng.normal(magnitude, MAGNITUDE_STD), 0, MOST_MAGNITUDE) / MOST_MAGNITUDE
        if applied:
            image = OPS[name](image, float(level), int(sign))
    return image


_Op = Callable[[Image.Image, float, int], Image.Image]


def _fill(image: Image.Image) -> Any:
    return _GRAY if image.mode == "L" else (_GRAY,) * 3


def _moved(image: Image.Image, *matrix: float) -> Image.Image:
    """Return an image whose pixel (x, y) comes from (a x + b y + c, d x + e y + f)."""
    return image.transform(
        image.size,
        Image.Transform.AFFINE,
        matrix,
        Image.Resampling.BILINEAR,
        fillcolor=_fill(image),
    )


def _enhanced(kind: Any) -> _Op:
    return lambda image, level, sign: kind(image).enhance(1 + 0.9 * sign * level)


def _brightened(image: Image.Image, level: float, sign: int) -> Image.Image:
    added = int(110 * level)
    table = [min(255, value + added) if value < 128 else value for value in range(256)]
    return image.point(table * len(image.getbands()))


def _rotated(image: Image.Image, level: float, sign: int) -> Image.Image:
    return image.rotate(30 * sign * level, Image.Resampling.BILINEAR, fillcolor=_fill(image))


# Level from 0 (mild) to 1, and a sign -> the changed image. Posterize keeps 4 to 1 bits: timm's
# keeps none at level 1, which is black.
OPS: dict[str, _Op] = {
    "AutoContrast": lambda image, level, sign: ImageOps.autocontrast(image),
    "Equalize": lambda image, level, sign: ImageOps.equalize(image),
    "Invert": lambda image, level, sign: ImageOps.invert(image),
    "Rotate": _rotated,
    "Posterize": lambda image, level, sign: ImageOps.posterize(image, max(1, 4 - int(4 * level))),
    "Solarize": lambda image, level, sign: ImageOps.solarize(image, 256 - int(256 * level)),
    "SolarizeAdd": _brightened,
    "Color": _enhanced(ImageEnhance.Color),
    "Contrast": _enhanced(ImageEnhance.Contrast),
    "Brightness": _enhanced(ImageEnhance.Brightness),
    "Sharpness": _enhanced(ImageEnhance.Sharpness),
    "ShearX": lambda image, level, sign: _moved(image, 1, 0.3 * sign * level, 0, 0, 1, 0),
    "ShearY": lambda image, level, sign: _moved(image, 1, 0, 0, 0.3 * sign * level, 1, 0),
    "TranslateX": lambda image, level, sign: _moved(
        image, 1, 0, 0.45 * sign * level * image.width, 0, 1, 0
    ),
    "TranslateY": lambda image, level, sign: _moved(
        image, 1, 0, 0, 0, 1, 0.45 * sign * level * image.height
    ),
}


@dataclass(frozen=True)
class ImageMix:
    """How each image of a batch is mixed with the one before it: `own` is its share.

    With mixup, that of all its pixels; with cutmix, `box` shows the image before.

    Source: Zhang et al. 2018 (mixup); Yun et al. 2019 (cutmix).
    """

    own: float
    box: tuple[slice, slice] | None = None

    @classmethod
    def draw(
        cls, height: int, width: int, rng: np.random.Generator, *, mixup: float, cutmix: float
    ) -> "ImageMix":
        """Draw once of Beta(alpha, alpha); `mixup` and `cutmix` are the alphas.

        If neither is 0, one of the two is drawn.
        """
        cut = cutmix > 0 and (not mixup or rng.random() < 0.5)
        own = float(rng.beta(cutmix, cutmix) if cut else rng.beta(mixup, mixup))
        if not cut:
            return cls(own)
        rows, columns = (_cut_side(length, own, rng) for length in (height, width))
        area = (rows.stop - rows.start) * (columns.stop - columns.start)
        return cls(1 - area / (height * width), (rows, columns))

    def images(self, images: np.ndarray, before: np.ndarray) -> np.ndarray:
        """Shapes: images and those before them [n h w c] uint8 -> the same."""
        if self.box is None:
            blend = self.own * images.astype(np.float32) + (1 - self.own) * before
            return np.rint(blend).astype(np.uint8)
        changed = images.copy()
        changed[:, *self.box] = before[:, *self.box]
        return changed

    def targets(self, labels: np.ndarray, classes: int) -> np.ndarray:
        """Shapes: labels [n] of a whole batch -> [n classes] float32, which sum to 1."""
        one_hot = np.eye(classes, dtype=np.float32)[labels]
        return np.float32(self.own) * one_hot + np.float32(1 - self.own) * np.roll(one_hot, 1, 0)


def _cut_side(length: int, own: float, rng: np.random.Generator) -> slice:
    """Draw a side of a box with 1 - own of the area; what is outside the image is cut off."""
    half, center = int(length * math.sqrt(1 - own)) // 2, int(rng.integers(length))
    return slice(max(0, center - half), min(length, center + half))
