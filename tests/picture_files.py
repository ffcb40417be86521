# SPDX-License-Identifier: Apache-2.0
"""Image files as people have them, none of them square."""

import io
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

ORIENTATION, ROTATED = 0x0112, 6  # the tag of EXIF, and a quarter turn


def png(pixels: np.ndarray | Image.Image, **options: Any) -> bytes:
    """Return a PNG file."""
    image = pixels if isinstance(pixels, Image.Image) else Image.fromarray(pixels)
    file = io.BytesIO()
    image.save(file, "PNG", **options)
    return file.getvalue()


def picture_files(folder: Path) -> list[Path]:
    """Write one image each: rotated by its EXIF, gray, transparent, 16 bits, palette, WebP."""
    rng = np.random.default_rng(11)
    color = Image.fromarray(rng.integers(0, 256, (40, 60, 3), dtype=np.uint8))
    exif = Image.Exif()
    exif[ORIENTATION] = ROTATED
    clear = rng.integers(0, 256, (23, 31, 4), dtype=np.uint8)
    deep = rng.integers(0, 2**16, (29, 17), dtype=np.uint16)
    made = {
        "rotated.jpg": (color, {"exif": exif}),
        "gray.png": (color.convert("L"), {}),
        "gray.jpg": (color.convert("L"), {}),
        "clear.png": (Image.fromarray(clear), {}),
        "deep.png": (Image.fromarray(deep), {}),
        "palette.png": (color.quantize(17), {}),
        "lossless.webp": (color, {"lossless": True}),
        "rotated.png": (color, {"exif": exif}),
    }
    for name, (image, options) in made.items():
        image.save(folder / name, **options)
    return [folder / name for name in made]
