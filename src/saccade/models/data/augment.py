# SPDX-License-Identifier: Apache-2.0
"""Small random shifts, rotations and zooms of training images."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Augmentation:
    """Random changes, drawn separately per image and uniform within plus or minus these limits."""

    shift_px: float = 0.0
    degrees: float = 0.0
    zoom: float = 0.0  # 0.1: from 0.9 to 1.1 times

    def __call__(self, images: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Augment images with bilinear interpolation; pixels from outside an image repeat its edge.

        Shapes: images [n h w c] uint8 -> same.
        """
        if not (self.shift_px or self.degrees or self.zoom):
            return images
        count, height, width, _ = images.shape
        angle = np.radians(self.degrees) * rng.uniform(-1, 1, count)
        scale = 1 + self.zoom * rng.uniform(-1, 1, count)
        cosine, sine = (f(angle) / scale for f in (np.cos, np.sin))
        shift = self.shift_px * rng.uniform(-1, 1, (2, count))
        row, column = np.mgrid[:height, :width].reshape(2, -1)
        row, column = row - (height - 1) / 2, column - (width - 1) / 2
        y = np.outer(cosine, row) - np.outer(sine, column) + shift[0][:, None] + (height - 1) / 2
        x = np.outer(sine, row) + np.outer(cosine, column) + shift[1][:, None] + (width - 1) / 2
        return _sample(images, y.clip(0, height - 1), x.clip(0, width - 1))


def _sample(images: np.ndarray, y: np.ndarray, x: np.ndarray) -> np.ndarray:
    count, height, width, channels = images.shape
    top = np.minimum(y.astype(np.intp), height - 2) if height > 1 else np.zeros(y.shape, np.intp)
    left = np.minimum(x.astype(np.intp), width - 2) if width > 1 else np.zeros(x.shape, np.intp)
    down, right = (y - top)[..., None], (x - left)[..., None]
    sample = np.arange(count)[:, None]
    below, beside = np.minimum(top + 1, height - 1), np.minimum(left + 1, width - 1)
    upper = images[sample, top, left] * (1 - right) + images[sample, top, beside] * right
    lower = images[sample, below, left] * (1 - right) + images[sample, below, beside] * right
    mixed = upper * (1 - down) + lower * down
    return np.rint(mixed).astype(np.uint8).reshape(count, height, width, channels)
