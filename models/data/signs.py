# SPDX-License-Identifier: Apache-2.0
"""Road signs near and far: a near one can be read in few pixels, a far one needs all of them."""

import numpy as np
from PIL import Image, ImageDraw

from saccade.core.checks import check_one_of, check_within
from saccade.core.schema import Range
from saccade.models.data.options import keeps_loaded
from saccade.models.image_decoding import ImageInput, fit

SIDE_PX = 80
COUNTS = {"train": 10_000, "validation": 2_000, "test": 10_000}
PICTOGRAMS = {  # five rows of five cells
    "arrow up": "..x../.xxx./x.x.x/..x../..x..",
    "arrow down": "..x../..x../x.x.x/.xxx./..x..",
    "arrow left": "..x../.x.../xxxxx/.x.../..x..",
    "arrow right": "..x../...x./xxxxx/...x./..x..",
    "plus": "..x../..x../xxxxx/..x../..x..",
    "cross": "x...x/.x.x./..x../.x.x./x...x",
    "bar": "...../xxxxx/xxxxx/xxxxx/.....",
    "pause": "xx.xx/xx.xx/xx.xx/xx.xx/xx.xx",
    "frame": "xxxxx/x...x/x...x/x...x/xxxxx",
    "house": "..x../.xxx./xxxxx/.x.x./.x.x.",
    "heart": ".x.x./xxxxx/xxxxx/.xxx./..x..",
    "stairs": "x..../xx.../xxx../xxxx./xxxxx",
    "turn": "xxxx./x..x./x..x./...x./...x.",
    "dead end": "xxxxx/xxxxx/..x../..x../..x..",
    "slope": "xx.../.xx../..xx./...xx/....x",
    "cup": "x...x/x...x/xxxxx/.xxx./..x..",
}
CLASS_NAMES = tuple(PICTOGRAMS)
NEAR, FAR = 0.85, 0.11  # largest and smallest diameter, as shares of the image's side
_SEEDS = {"train": 301, "validation": 302, "test": 303}
_ZOOM = 4  # everything is drawn larger and averaged, so that edges are soft
_LINE = np.linspace(-1, 1, SIDE_PX, dtype=np.float32)
_RIM, _CELL = 0.06, 0.112  # width of the rim and side of a cell, as shares of the diameter
_CORNERS = np.array(((-0.5, -0.5), (0.5, -0.5), (0.5, 0.5), (-0.5, 0.5)))


@keeps_loaded
def signs(split: str, count: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Draw the first `count` signs of a split, the same on every call, and their classes.

    A gray image shows one round sign before splinters, blots and bars. Its pictogram (one of 16),
    place, tilt (up to 12 degrees) and contrast are drawn independently. The logarithm of its
    diameter is uniform, from 0.11 to 0.85 of the side. Light falls off in one direction, and all
    pixels have noise. Every sign has a separate generator, seeded by split and number. Therefore
    samples are independent, and a shorter draw is the beginning of a longer one. Without `count`,
    train has 10,000 signs, validation 2,000, test 10,000.

    Shapes: -> images [n 80 80 1] uint8, labels [n] int64, indices into CLASS_NAMES.
    Raises: SaccadeError for an unknown split, and for a count out of range.
    """
    check_one_of("split", split, _SEEDS)
    total = COUNTS[split] if count is None else count
    check_within("signs: count", total, Range(1))
    return _stacked([sign(np.random.default_rng((_SEEDS[split], row))) for row in range(total)])


def sign_batch(rng: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Draw new signs, for training that never sees one twice.

    Shapes: -> as `signs`.
    """
    return _stacked([sign(rng) for _ in range(count)])


def resized(images: np.ndarray, wanted: ImageInput) -> np.ndarray:
    """Return images in a model's size, as the router prepares image files.

    Shapes: [n h w 1] uint8 -> [n h' w' c] uint8.
    """
    return np.stack([fit(Image.fromarray(image[..., 0]), wanted) for image in images])


def sign(rng: np.random.Generator) -> tuple[np.ndarray, int]:
    """Draw one sign and its class.

    Shapes: -> [80 80 1] uint8.
    """
    side, ground = SIDE_PX * _ZOOM, rng.uniform(60, 190)
    canvas = Image.new("L", (side, side), int(ground))
    pen = ImageDraw.Draw(canvas)
    _draw_clutter(pen, rng, side, ground)
    label = int(rng.integers(len(CLASS_NAMES)))
    _draw_sign(pen, rng, side, PICTOGRAMS[CLASS_NAMES[label]])
    pixels = np.asarray(canvas.reduce(_ZOOM), np.float32)
    across, down = rng.uniform(-25, 25, 2).astype(np.float32)
    noise = np.float32(rng.uniform(2, 14)) * rng.standard_normal(pixels.shape, np.float32)
    lit = pixels + across * _LINE + down * _LINE[:, None] + noise
    return np.rint(lit.clip(0, 255)).astype(np.uint8)[..., None], label


def _stacked(drawn: list[tuple[np.ndarray, int]]) -> tuple[np.ndarray, np.ndarray]:
    images, labels = zip(*drawn, strict=True)
    return np.stack(images), np.array(labels, np.int64)


def _draw_clutter(
    pen: ImageDraw.ImageDraw, rng: np.random.Generator, side: int, ground: float
) -> None:
    """Draw splinters, blots and bent bars, each by three points on a circle."""
    count = int(rng.integers(4, 12))
    angles = rng.uniform(0, 2 * np.pi, (count, 3))
    points = rng.uniform(0.02, 0.2, (count, 1, 1)) * np.stack([np.cos(angles), np.sin(angles)], 2)
    points = side * (rng.uniform(0, 1, (count, 1, 2)) + points)
    boxes = np.concatenate([points.min(1), points.max(1)], 1)
    shades = rng.normal(ground, 50, count).clip(0, 255).astype(int)
    kinds, widths = rng.integers(3, size=count), rng.integers(2, 14, count)
    pieces = (kinds, points.reshape(count, 6), boxes, shades, widths)
    for kind, corners, box, shade, width in zip(*(x.tolist() for x in pieces), strict=True):
        if kind == 0:
            pen.polygon(corners, shade)
        elif kind == 1:
            pen.ellipse(box, shade)
        else:
            pen.line(corners, shade, width)


def _draw_sign(
    pen: ImageDraw.ImageDraw, rng: np.random.Generator, side: int, pictogram: str
) -> None:
    """Draw a light disc with a dark rim, and each dark cell of the tilted pictogram."""
    diameter = side * NEAR * (FAR / NEAR) ** rng.uniform()
    center = rng.uniform(diameter / 2, side - diameter / 2, 2)
    light = rng.uniform(150, 250)
    dark = light - rng.uniform(60, 150)
    for radius, shade in ((0.5, dark), (0.5 - _RIM, light)):
        reach = radius * diameter
        pen.ellipse((*(center - reach), *(center + reach)), int(shade))
    tilt = rng.uniform(-np.pi / 15, np.pi / 15)
    turn = np.array(((np.cos(tilt), np.sin(tilt)), (-np.sin(tilt), np.cos(tilt))))
    rows = pictogram.split("/")
    cells = [(x - 2, y - 2) for y in range(5) for x in range(5) if rows[y][x] == "x"]
    corners = (np.array(cells)[:, None] + _CORNERS) @ turn * _CELL * diameter + center
    for cell in corners.reshape(len(cells), 8).tolist():
        pen.polygon(cell, int(dark))
