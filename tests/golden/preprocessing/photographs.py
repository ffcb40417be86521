# SPDX-License-Identifier: Apache-2.0
"""Photographs of scikit-image, cut to shapes of every kind and written in every format."""

import hashlib
import struct
import sys
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import skimage.data
import sklearn.datasets
from PIL import Image

FOLDER = Path(__file__).parent / "photographs"
SKIMAGE = Path(skimage.data.__file__).parent
SKLEARN = Path(sklearn.datasets.__file__).parent / "images"
CC0 = "CC0 1.0"
PUBLIC = "public domain"
FREE = "no known copyright restrictions"


class Cut(NamedTuple):
    """A photograph of scikit-image and what is taken of it."""

    source: str
    licence: str
    box: tuple[int, int, int, int] | None = None  # left, top, right, bottom
    size: tuple[int, int] | None = None  # width, height
    quality: int | None = None  # of the JPEG; none keeps the package's own file


PHOTOGRAPHS = {
    "astronaut.jpg": Cut("astronaut.png", PUBLIC, (70, 0, 400, 512), quality=85),
    "camera.jpg": Cut("camera.png", CC0, (0, 60, 512, 420), quality=85),
    "cell.png": Cut("cell.png", CC0, (150, 60, 450, 560)),
    "chelsea.jpg": Cut("chelsea.png", CC0, quality=88),
    "clock.png": Cut("clock_motion.png", PUBLIC),
    "coffee.jpg": Cut("coffee.png", CC0, quality=80),
    "coins.png": Cut("coins.png", FREE),
    "gravel.jpg": Cut("gravel.png", CC0, (150, 0, 350, 512), quality=75),
    "hubble.jpg": Cut("hubble_deep_field.jpg", PUBLIC, (0, 0, 1000, 500), (640, 320), 80),
    "ihc.jpg": Cut("ihc.png", FREE, (0, 100, 512, 400), quality=80),
    "retina.jpg": Cut("retina.jpg", CC0, (400, 100, 1000, 1300), quality=75),
    "rocket.jpg": Cut("rocket.jpg", PUBLIC, quality=80),
    "text.png": Cut("text.png", PUBLIC),
}
PACKAGED = {  # read from scikit-learn itself: CC BY 2.0, danielbuechele
    "china.jpg": "CC BY 2.0",
    "flower.jpg": "CC BY 2.0",
}
# Sizes around the model's own, extreme aspects, and fewer pixels than the model takes.
SHAPES = {
    "coffee_225x301.jpg": Cut("coffee.png", CC0, (200, 50, 425, 351), quality=80),
    "coffee_301x225.jpg": Cut("coffee.png", CC0, (150, 90, 451, 315), quality=80),
    "coffee_224x224.jpg": Cut("coffee.png", CC0, (200, 80, 424, 304), quality=80),
    "coffee_224x223.jpg": Cut("coffee.png", CC0, (200, 80, 424, 303), quality=80),
    "coffee_223x224.jpg": Cut("coffee.png", CC0, (200, 80, 423, 304), quality=80),
    "coffee_256x341.jpg": Cut("coffee.png", CC0, (200, 40, 456, 381), quality=80),
    "coffee_320x240.jpg": Cut("coffee.png", CC0, (100, 60, 420, 300), quality=80),
    "rocket_640x32.jpg": Cut("rocket.jpg", PUBLIC, (0, 200, 640, 232), quality=85),
    "astronaut_24x480.jpg": Cut("astronaut.png", PUBLIC, (200, 0, 224, 480), quality=85),
    "chelsea_100x80.jpg": Cut("chelsea.png", CC0, (150, 80, 250, 160), quality=90),
    "chelsea_33x32.png": Cut("chelsea.png", CC0, (150, 80, 183, 112)),
    "chelsea_17x13.png": Cut("chelsea.png", CC0, (160, 100, 177, 113)),
    "chelsea_3x1.png": Cut("chelsea.png", CC0, (160, 100, 163, 101)),
    "chelsea_1x1.png": Cut("chelsea.png", CC0, (160, 100, 161, 101)),
}


def main() -> None:
    """Write every photograph; their SHA-256 go to standard output."""
    FOLDER.mkdir(exist_ok=True)
    for name, cut in (PHOTOGRAPHS | SHAPES).items():
        _write_cut(FOLDER / name, cut)
    scene = _chelsea()
    _write_modes(scene)
    _write_rotations(scene)
    for path in sorted(FOLDER.iterdir()):
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        sys.stdout.write(f"{digest}  {path.name}  {path.stat().st_size}\n")


def _write_cut(path: Path, cut: Cut) -> None:
    source = SKIMAGE / cut.source
    if cut == Cut(cut.source, cut.licence):
        path.write_bytes(source.read_bytes())
        return
    with Image.open(source) as image:
        image = image.crop(cut.box) if cut.box else image.copy()
    if cut.size:
        image = image.resize(cut.size, Image.Resampling.LANCZOS)
    options: dict[str, Any] = {} if cut.quality is None else {"quality": cut.quality}
    image.save(path, **options)


def _chelsea() -> Image.Image:
    """A cat's face of 150 x 100 pixels, from which the file formats are written."""
    with Image.open(SKIMAGE / "chelsea.png") as image:
        return image.crop((80, 30, 380, 230)).resize((150, 100), Image.Resampling.LANCZOS)


def _write_modes(scene: Image.Image) -> None:
    width, height = scene.size
    # Opaque at the left, clear at the right: what lies under the clear part must matter.
    ramp = Image.fromarray(np.tile(np.linspace(255, 0, width).astype(np.uint8), (height, 1)))
    clear = scene.copy()
    clear.putalpha(ramp)
    clear.save(FOLDER / "mode_rgba.png")
    clear.save(FOLDER / "mode_rgba.webp", lossless=True)
    grey = scene.convert("L")
    two = grey.copy()
    two.putalpha(ramp)
    two.save(FOLDER / "mode_la.png")
    palette = scene.quantize(64)
    palette.save(FOLDER / "mode_palette.png")
    palette.save(FOLDER / "mode_palette_transparent.png", transparency=palette.getpixel((75, 50)))
    grey.convert("1").save(FOLDER / "mode_1bit.png")
    grey.save(FOLDER / "mode_grey.jpg", quality=85)
    scene.convert("CMYK").save(FOLDER / "mode_cmyk.jpg", quality=85)
    scene.save(FOLDER / "mode_progressive_444.jpg", quality=85, progressive=True, subsampling=0)
    scene.save(FOLDER / "mode_rgb.webp", quality=80)
    levels = np.asarray(scene).astype(np.uint16)
    # A low byte of its own, so that rounding and cutting off differ.
    fine = levels * 256 + (np.arange(levels.size, dtype=np.uint16).reshape(levels.shape) * 37) % 256
    _write_png16(FOLDER / "mode_grey16.png", fine[..., 1])
    _write_png16(FOLDER / "mode_rgb16.png", fine[20:70, 40:115])


def _write_rotations(scene: Image.Image) -> None:
    for orientation in (2, 3, 5, 6, 8):
        tags = Image.Exif()
        tags[0x0112] = orientation
        scene.save(FOLDER / f"exif_{orientation}.jpg", quality=85, exif=tags)
    tags = Image.Exif()
    tags[0x0112] = 6
    scene.save(FOLDER / "exif_6.png", exif=tags)
    scene.save(FOLDER / "exif_6.webp", quality=80, exif=tags)


def _write_png16(path: Path, levels: np.ndarray) -> None:
    """Sixteen bits a channel, which Pillow writes for grey alone."""
    height, width = levels.shape[:2]
    colour = 0 if levels.ndim == 2 else 2
    rows = levels.astype(">u2").reshape(height, -1)
    pixels = b"".join(b"\0" + row.tobytes() for row in rows)
    header = struct.pack(">IIBBBBB", width, height, 16, colour, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(pixels, 9)), (b"IEND", b""))
    body = b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks
    )
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + body)


if __name__ == "__main__":
    main()
