# SPDX-License-Identifier: Apache-2.0
"""Scenes of a few colored shapes on a soft background, shared by all families."""

from dataclasses import dataclass, replace

import numpy as np

from saccade.core.checks import check_one_of, check_within
from saccade.core.errors import SaccadeError
from saccade.core.schema import Range

SHAPES = ("circle", "square", "triangle", "cross")
COLOURS = ("red", "green", "blue", "yellow")
SIZES = ("small", "large")
TEXTURES = ("plain", "striped", "dotted")

RADII = (0.2, 0.34)  # of a small and a large object, before a jitter of a tenth
REACH = 1.25  # no shape extends beyond this many radii
_RGB = np.array(
    ((0.86, 0.14, 0.12), (0.12, 0.62, 0.20), (0.14, 0.24, 0.86), (0.95, 0.84, 0.14)), np.float32
)
_DARK = 0.25  # second color of a texture, as a share of the first
_PERIOD = 0.2  # of stripes and dots, in units of the canvas
_DOT_RADIUS = 0.066


@dataclass(frozen=True)
class Layout:
    """Layout of n scenes with up to k objects: indices of words, positions and angles.

    Shapes: each [n k]; `present` marks the entries that are objects. Later ones cover earlier ones.
    Units:  the canvas spans -1 to 1 in rows (down) and columns; angles in radians.
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
    """Return the distance of each point from its object's outline, negative inside it.

    Shapes: shape and radius [m], x and y [m ...] from the center, upright -> [m ...].
    """
    distances = np.empty_like(x)
    for number, outline in enumerate((_circle, _square, _triangle, _cross)):
        rows = np.flatnonzero(shape == number)
        size = radius[rows].reshape(-1, *([1] * (x.ndim - 1)))
        distances[rows] = outline(x[rows], y[rows], size)
    return distances


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
    """Draw the pixels and instance masks of a layout.

    A pixel's share of an object is given by a ramp of one pixel across the outline, which is the
    limit of supersampling. A pixel belongs to the mask of the last object that has half of it.
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
    """Draw a gray with a slight tint that gets lighter in one direction."""
    line = np.linspace(-1, 1, side_px, dtype=np.float32)
    angle = rng.uniform(0, 2 * np.pi, (n, 1, 1)).astype(np.float32)
    slope = np.cos(angle) * line + np.sin(angle) * line[:, None]
    slope = slope * rng.uniform(0, 0.12, (n, 1, 1)).astype(np.float32)
    tint = rng.uniform(0.38, 0.62, (n, 1, 1, 1)) + rng.uniform(-0.05, 0.05, (n, 1, 1, 3))
    return tint.astype(np.float32) + slope[..., None]


COUNTS = {"train": 10_000, "validation": 1_000, "test": 2_000}
POSITIONS = ("anywhere", "left")
LEAST_DISTANCE = 0.85  # of two centers, as a share of the sum of the radii: in 100,000 scenes, at
# least 0.7 of every object was visible
MOST_OBJECTS = 10
_SEEDS = {"train": 101, "validation": 102, "test": 103}
_CHUNK = 64  # scenes per generator
_MOVES, _DRAWS = 20, 200


@dataclass(frozen=True)
class Object:
    """One object in words, and the position of its center.

    Units: row and column from -1 (top, left) to 1 (bottom, right).
    """

    shape: str
    colour: str
    size: str
    texture: str
    row: float
    column: float


@dataclass(frozen=True)
class Scenes:
    """Images with a full description of their content.

    Shapes: images [n s s 3] uint8, masks [n s s] uint8: 0 is background, i + 1 where object i is
            visible.
    """

    images: np.ndarray
    masks: np.ndarray
    objects: tuple[tuple[Object, ...], ...]


def scenes(
    split: str,
    count: int | None = None,
    *,
    seed: int = 0,
    side_px: int = 64,
    objects: tuple[int, int] = (2, 4),
    positions: str = "anywhere",
) -> Scenes:
    """Return the first `count` scenes of a split, the same on every call.

    A scene has `objects[0]` to `objects[1]` objects. Shape (circle, square, triangle, cross),
    color (red, green, blue, yellow), size (radius 0.2 or 0.34 of half the canvas, plus or minus a
    tenth), texture (plain, dark stripes, dark dots), position and a tilt of up to 15 degrees are
    drawn independently. Objects are entirely inside the canvas (with positions `left`: inside its
    left half, except for a corner). Objects whose centers are closer than 0.85 of the sum of their
    radii are moved; if that does not help, they are drawn again, sizes included. The background is
    gray with a slight tint and slope, and everything has noise.
    Every 64 scenes come from a separate generator, seeded by split, `seed` and their number.
    Therefore splits share no scene, a shorter draw is the beginning of a longer one, and `side_px`
    changes the pixels but not the layout. Without `count`, train has 10,000 scenes, validation
    1,000, test 2,000.
    Raises: SaccadeError for an unknown split or positions, and for counts out of range.
    """
    check_one_of("split", split, _SEEDS)
    total = COUNTS[split] if count is None else count
    check_within("scenes: count", total, Range(1))
    chunks = []
    for number in range(-(-total // _CHUNK)):
        rng = np.random.default_rng((_SEEDS[split], seed, number))
        options = {"side_px": side_px, "objects": objects, "positions": positions}
        chunks.append(scene_batch(rng, _CHUNK, **options))  # type: ignore[arg-type]
    return Scenes(
        np.concatenate([chunk.images for chunk in chunks])[:total],
        np.concatenate([chunk.masks for chunk in chunks])[:total],
        tuple(objects for chunk in chunks for objects in chunk.objects)[:total],
    )


def scene_batch(
    rng: np.random.Generator,
    count: int,
    *,
    side_px: int = 64,
    objects: tuple[int, int] = (2, 4),
    positions: str = "anywhere",
) -> Scenes:
    """Draw new scenes from a generator, for training that never sees a scene twice.

    Raises: SaccadeError for values out of range, or if that many objects do not fit.
    """
    _check(side_px, objects, positions)
    number = rng.integers(objects[0], objects[1] + 1, count)
    layout = _layout(rng, number, objects[1], positions)
    images, masks = draw(layout, rng, side_px)
    return Scenes(images, masks, tuple(_in_words(layout, index) for index in range(count)))


def _layout(rng: np.random.Generator, number: np.ndarray, most: int, positions: str) -> Layout:
    layout = _drawn(rng, number, most)
    row, column = _places(rng, layout.radius, positions)
    layout = replace(layout, row=row, column=column)
    for attempt in range(1, _MOVES * _DRAWS):
        crowded = _crowded(layout)
        stuck = crowded.any(1)
        if not stuck.any():
            return layout
        if attempt % _MOVES == 0:
            again = _drawn(rng, number[stuck], most)
            for name, value in vars(again).items():
                getattr(layout, name)[stuck] = value
            crowded[stuck] = True
        row, column = _places(rng, layout.radius[stuck], positions)
        layout.row[stuck] = np.where(crowded[stuck], row, layout.row[stuck])
        layout.column[stuck] = np.where(crowded[stuck], column, layout.column[stuck])
    raise SaccadeError(
        f"scenes: {most} objects do not fit into a canvas with positions '{positions}' without "
        "overlapping. Request fewer objects."
    )


def _crowded(layout: Layout) -> np.ndarray:
    """Return a mask of the objects that are too close to an earlier one."""
    dy = layout.row[:, :, None] - layout.row[:, None]
    dx = layout.column[:, :, None] - layout.column[:, None]
    reach = layout.radius[:, :, None] + layout.radius[:, None]
    close = dy * dy + dx * dx < (LEAST_DISTANCE * reach) ** 2
    both = layout.present[:, :, None] & layout.present[:, None]
    return np.tril(close & both, -1).any(2)


def _drawn(rng: np.random.Generator, number: np.ndarray, most: int) -> Layout:
    shape = (len(number), most)
    size = rng.integers(len(SIZES), size=shape)
    return Layout(
        present=np.arange(most) < number[:, None],
        shape=rng.integers(len(SHAPES), size=shape),
        colour=rng.integers(len(COLOURS), size=shape),
        size=size,
        texture=rng.integers(len(TEXTURES), size=shape),
        row=np.zeros(shape, np.float32),
        column=np.zeros(shape, np.float32),
        radius=(np.array(RADII)[size] * rng.uniform(0.9, 1.1, shape)).astype(np.float32),
        tilt=rng.uniform(-np.pi / 12, np.pi / 12, shape).astype(np.float32),
        grain=rng.uniform(0, np.pi, shape).astype(np.float32),
    )


def _places(
    rng: np.random.Generator, radius: np.ndarray, positions: str
) -> tuple[np.ndarray, np.ndarray]:
    inside = 1 - REACH * radius
    row = rng.uniform(-inside, inside)
    column = rng.uniform(-inside, -radius if positions == "left" else inside)
    return row.astype(np.float32), column.astype(np.float32)


def _in_words(layout: Layout, index: int) -> tuple[Object, ...]:
    return tuple(
        Object(
            SHAPES[layout.shape[index, place]],
            COLOURS[layout.colour[index, place]],
            SIZES[layout.size[index, place]],
            TEXTURES[layout.texture[index, place]],
            float(layout.row[index, place]),
            float(layout.column[index, place]),
        )
        for place in np.flatnonzero(layout.present[index])
    )


def _check(side_px: int, objects: tuple[int, int], positions: str) -> None:
    check_within("scenes: most objects", objects[1], Range(1, MOST_OBJECTS))
    check_within("scenes: least objects", objects[0], Range(1, objects[1]))
    check_within("scenes: side_px", side_px, Range(16, 1024))
    check_one_of("scenes: positions", positions, POSITIONS)
