# SPDX-License-Identifier: Apache-2.0
"""From the layout of a scene to its pixels: coverage, texture, background, instance masks."""

from dataclasses import dataclass

import numpy as np

SHAPES = ("circle", "square", "triangle", "cross")
COLOURS = ("red", "green", "blue", "yellow")
SIZES = ("small", "large")
TEXTURES = ("plain", "striped", "dotted")

RADII = (0.2, 0.34)  # of a small and a large object, before a jitter of a tenth
REACH = 1.25  # no shape leaves the circle of so many radii
_RGB = np.array(
    ((0.86, 0.14, 0.12), (0.12, 0.62, 0.20), (0.14, 0.24, 0.86), (0.95, 0.84, 0.14)), np.float32
)
_DARK = 0.25  # of the second colour of a texture, as a share of the first
_PERIOD = 0.2  # of stripes and dots, in the units of the canvas
_DOT_RADIUS = 0.066


@dataclass(frozen=True)
class Layout:
    """What is where: numbers of words, places and angles of n scenes with up to k objects.

    Shapes: each [n k]; `present` says which entries are objects. Later ones lie on earlier ones.
    Units:  the canvas reaches from -1 to 1 in rows (down) and columns; angles in radians.
    """

    present: np.ndarray
    shape: np.ndarray
    colour: np.ndarray
    size: np.ndarray
    texture: np.ndarray
    row: np.ndarray
    column: np.ndarray
    radius: np.ndarray
    tilt: np.ndarray
    grain: np.ndarray  # direction of stripes and rows of dots


def distance(shape: np.ndarray, x: np.ndarray, y: np.ndarray, radius: np.ndarray) -> np.ndarray:
    """How far each point is outside its object's outline, below 0 inside it.

    Shapes: shape and radius [m], x and y [m ...] from the centre, upright -> [m ...].
    """
    found = np.empty_like(x)
    for number, outline in enumerate((_circle, _square, _triangle, _cross)):
        rows = np.flatnonzero(shape == number)
        size = radius[rows].reshape(-1, *([1] * (x.ndim - 1)))
        found[rows] = outline(x[rows], y[rows], size)
    return found


def _circle(x: np.ndarray, y: np.ndarray, radius: np.ndarray) -> np.ndarray:
    return np.sqrt(x * x + y * y) - radius


def _square(x: np.ndarray, y: np.ndarray, radius: np.ndarray) -> np.ndarray:
    return np.maximum(abs(x), abs(y)) - 0.87 * radius


def _triangle(x: np.ndarray, y: np.ndarray, radius: np.ndarray) -> np.ndarray:
    slanted = 0.8660254 * abs(x) - 0.5 * y
    return np.maximum(slanted, y) - 0.62 * radius


def _cross(x: np.ndarray, y: np.ndarray, radius: np.ndarray) -> np.ndarray:
    wide = np.maximum(abs(x) - 1.05 * radius, abs(y) - 0.4 * radius)
    return np.minimum(wide, np.maximum(abs(x) - 0.4 * radius, abs(y) - 1.05 * radius))


def draw(layout: Layout, rng: np.random.Generator, side_px: int) -> tuple[np.ndarray, np.ndarray]:
    """Pixels and instance masks of a layout.

    A pixel's share of an object is what a ramp of one pixel across the outline gives, which is
    what supersampling tends to; it belongs to the mask of the last object that has half of it.
    Shapes: -> images [n side side 3] uint8, masks [n side side] uint8, i + 1 for object i.
    """
    n, k = layout.present.shape
    margin = int(np.ceil(REACH * 1.1 * max(RADII) * side_px / 2)) + 1
    colours = _RGB[layout.colour] + rng.uniform(-0.08, 0.08, (n, k, 3)).astype(np.float32)
    canvas = np.zeros((n, side_px + 2 * margin, side_px + 2 * margin, 3), np.float32)
    inner = slice(margin, margin + side_px)
    canvas[:, inner, inner] = _background(n, rng, side_px)
    masks = np.zeros(canvas.shape[:3], np.uint8)
    reach = np.arange(-margin + 1, margin)
    for place in range(k):
        rows = np.flatnonzero(layout.present[:, place])
        one = Layout(**{name: value[rows, place] for name, value in vars(layout).items()})
        top = np.rint((one.row + 1) * side_px / 2).astype(np.int64)
        left = np.rint((one.column + 1) * side_px / 2).astype(np.int64)
        ys, xs = top[:, None] + reach, left[:, None] + reach
        y = ((ys + 0.5) * 2 / side_px - 1 - one.row[:, None])[:, :, None]
        x = ((xs + 0.5) * 2 / side_px - 1 - one.column[:, None])[:, None, :]
        share, shade = _coverage(one, x.astype(np.float32), y.astype(np.float32), 2 / side_px)
        at = rows[:, None, None], ys[:, :, None] + margin, xs[:, None, :] + margin
        paint = shade[..., None] * colours[rows, place][:, None, None]
        canvas[at] += share[..., None] * (paint - canvas[at])
        masks[at] = np.where(share >= 0.5, np.uint8(place + 1), masks[at])
    pixels = canvas[:, inner, inner]
    pixels = pixels + 0.025 * rng.standard_normal(pixels.shape, np.float32)
    images = np.rint(255 * pixels.clip(0, 1)).astype(np.uint8)
    return images, np.ascontiguousarray(masks[:, inner, inner])


def _coverage(
    one: Layout, x: np.ndarray, y: np.ndarray, pixel: float
) -> tuple[np.ndarray, np.ndarray]:
    x, y = np.broadcast_arrays(x, y)
    upright = _turned(x, y, -one.tilt)
    outside = distance(one.shape, *upright, one.radius)
    share = (0.5 - outside / pixel).clip(0, 1)
    shade = np.ones_like(share)
    for number, pattern in ((1, _stripes), (2, _dots)):
        rows = np.flatnonzero(one.texture == number)
        along = _turned(x[rows], y[rows], one.grain[rows])
        dark = (0.5 - pattern(*along) / pixel).clip(0, 1)
        shade[rows] = 1 - (1 - _DARK) * dark
    return share, shade


def _stripes(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return abs(_in_cell(x)) - _PERIOD / 4


def _dots(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return np.sqrt(_in_cell(x) ** 2 + _in_cell(y) ** 2) - _DOT_RADIUS


def _in_cell(x: np.ndarray) -> np.ndarray:
    return x - _PERIOD * np.rint(x / _PERIOD)


def _turned(x: np.ndarray, y: np.ndarray, angle: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    shape = angle.shape + (1,) * (x.ndim - angle.ndim)
    c, s = np.cos(angle).reshape(shape), np.sin(angle).reshape(shape)
    return c * x - s * y, s * x + c * y


def _background(n: int, rng: np.random.Generator, side_px: int) -> np.ndarray:
    """A grey with a slight tint that gets lighter in one direction."""
    line = np.linspace(-1, 1, side_px, dtype=np.float32)
    angle = rng.uniform(0, 2 * np.pi, (n, 1, 1)).astype(np.float32)
    slope = np.cos(angle) * line + np.sin(angle) * line[:, None]
    slope = slope * rng.uniform(0, 0.12, (n, 1, 1)).astype(np.float32)
    tint = rng.uniform(0.38, 0.62, (n, 1, 1, 1)) + rng.uniform(-0.05, 0.05, (n, 1, 1, 3))
    return tint.astype(np.float32) + slope[..., None]
