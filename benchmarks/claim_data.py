# SPDX-License-Identifier: Apache-2.0
"""Data that recipes of claims name as `made:NAME`: written once, from generated sets."""

from collections.abc import Callable

import numpy as np
from PIL import Image, ImageDraw, ImageFont
from result_file import BUILD

from saccade.models.data.digits import QUADRANT_PX, QUADRANTS, SIDE_PX, compose, digits
from saccade.models.data.scene_texts import scene_label
from saccade.models.data.shapes import SHAPES, distance, scenes
from saccade.models.data.tetrominoes import COLOURS, PIECES, tetrominoes

FOLDER = BUILD / "claims" / "data"
Arrays = dict[str, np.ndarray]
_PREFIXES = {"train": "train", "validation": "val", "test": "test"}


def made_data(name: str) -> str:
    """Return a name of data, or the path of the file that `made:NAME` stands for."""
    _, made, which = name.partition("made:")
    if not made:
        return name
    path = FOLDER / f"{which}.npz"
    if not path.exists():
        FOLDER.mkdir(parents=True, exist_ok=True)
        np.savez(path, **_MADE[which]())
    return str(path)


def _digits_of(lowest: int, most: int) -> Arrays:
    """Return the digits from `lowest` to `most`, with classes from 0."""
    arrays: Arrays = {}
    for split, prefix in _PREFIXES.items():
        images, labels, _ = digits(split)
        kept = (labels >= lowest) & (labels <= most)
        arrays |= {f"{prefix}_images": images[kept], f"{prefix}_labels": labels[kept] - lowest}
    return arrays


def _shifted_digits() -> Arrays:
    """Return each test digit in three ways that training did not show.

    They are noise, a turn by 25 degrees, and the inverse contrast.
    """
    images, labels, _ = digits("test")
    noise = np.random.default_rng(0).normal(0, 50, images.shape)
    noisy = np.clip(images + noise, 0, 255).round().astype(np.uint8)
    shifted = np.concatenate([noisy, _turned(images, labels)[0], 255 - images])
    return {
        "images": shifted,
        "labels": np.tile(labels, 3),
        "split": np.full(3 * len(labels), "test"),
    }


_SIDE_PX = 2 * QUADRANT_PX
_MIDDLE = slice((QUADRANT_PX - SIDE_PX) // 2, (QUADRANT_PX + SIDE_PX) // 2)  # of a quadrant


def _single_digits(large: bool) -> Arrays:
    """Return digits 0 to 7 as the shipped circuit never saw them, each in one quadrant or `large`.

    A canvas has the 24 px of digits-sum, whose training digits are in none. In a quadrant, a digit
    is as small as there. Those to train on are the validation split of `digits`: 20 of each class.
    """
    arrays: Arrays = {}
    rng = np.random.default_rng(0)
    parts = {"train": ("validation", slice(None)), "val": ("test", slice(0, 60))}
    for prefix, (split, rows) in (parts | {"test": ("test", slice(60, None))}).items():
        images, labels, _ = digits(split)
        kept = np.flatnonzero(labels < 8)[rows]
        images, labels = images[kept], labels[kept]
        if large:
            images = images.repeat(_SIDE_PX // SIDE_PX, 1).repeat(_SIDE_PX // SIDE_PX, 2)
        else:
            row, column = divmod(rng.integers(QUADRANTS, size=len(images)), 2)
            canvases = np.zeros((len(images), 2, QUADRANT_PX, 2, QUADRANT_PX, 1), np.uint8)
            canvases[np.arange(len(images)), row, _MIDDLE, column, _MIDDLE] = images
            images = canvases.reshape(-1, _SIDE_PX, _SIDE_PX, 1)
        arrays |= {f"{prefix}_images": images, f"{prefix}_labels": labels}
    return arrays


def _placed_digits() -> Arrays:
    """Return digits twice as large at random places of 24 px; each of training at four places."""
    arrays: Arrays = {}
    rng = np.random.default_rng(0)
    for split, prefix in _PREFIXES.items():
        images, labels, _ = digits(split)
        times, side = 4 if split == "train" else 1, 2 * SIDE_PX
        large = np.tile(images.repeat(2, 1).repeat(2, 2), (times, 1, 1, 1))
        canvases = np.zeros((len(large), _SIDE_PX, _SIDE_PX, 1), np.uint8)
        for canvas, digit in zip(canvases, large, strict=True):
            row, column = rng.integers(_SIDE_PX - side + 1, size=2)
            canvas[row : row + side, column : column + side] = digit
        arrays |= {f"{prefix}_images": canvases, f"{prefix}_labels": np.tile(labels, times)}
    return arrays


def _few_scenes(count: int) -> Arrays:
    """Return tetrominoes of 14 px, of which only `count` are for training."""
    arrays: Arrays = {}
    for split, prefix in _PREFIXES.items():
        drawn = tetrominoes(split, count if split == "train" else None, side_px=14)
        arrays |= {f"{prefix}_images": drawn.images, f"{prefix}_masks": drawn.masks}
    return arrays


def _shifted_digits_sum() -> Arrays:
    """Return canvases of four test digits in four ways that training did not show.

    They are noise, digits turned by 25 degrees, the inverse contrast, and printed digits, the
    nearest to another writer here: the source does not say who wrote a digit.
    """
    images, labels, _ = digits("test")
    rng = np.random.default_rng(0)
    written, wanted = (images, labels), []
    for digit_images, digit_labels in (written, _turned(*written), written, _printed()):
        wanted.append(compose(digit_images, digit_labels, 500, rng))
    canvases, counts = (np.stack(parts) for parts in zip(*wanted, strict=True))
    noise = rng.normal(0, 50, canvases[0].shape)
    canvases[0] = np.clip(canvases[0] + noise, 0, 255).round()
    canvases[2] = 255 - canvases[2]
    sums = (counts @ np.arange(10) % 10).ravel()
    return {
        "images": canvases.reshape(-1, *canvases.shape[2:]),
        "labels": sums,
        "split": np.full(len(sums), "test"),
    }


def _turned(images: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    turned = [np.asarray(Image.fromarray(image[..., 0]).rotate(25)) for image in images]
    return np.stack(turned)[..., None], labels


def _printed() -> tuple[np.ndarray, np.ndarray]:
    """Return the ten digits of Pillow's font, as high as the written ones."""
    drawn = np.zeros((10, SIDE_PX, SIDE_PX, 1), np.uint8)
    for digit in range(10):
        picture = Image.new("L", (64, 64))
        ImageDraw.Draw(picture).text((8, 0), str(digit), 255, ImageFont.load_default(48))
        ink = picture.crop(picture.getbbox())
        scaled = ink.resize((round(ink.width * SIDE_PX / ink.height), SIDE_PX))
        left = (SIDE_PX - scaled.width) // 2
        drawn[digit, :, left : left + scaled.width, 0] = np.asarray(scaled)
    return drawn, np.arange(10)


_COUNTS = {"train": 2000, "validation": 300, "test": 1000}  # of solids and reviews


def _solids() -> Arrays:
    """Return 64 points on the surface of one of five solids, turned at random, with some noise."""
    total = sum(_COUNTS.values())
    rng = np.random.default_rng(0)
    labels = rng.integers(5, size=total)
    points = np.empty((total, 64, 3), np.float32)
    for row, kind in enumerate(labels):
        turn, _ = np.linalg.qr(rng.normal(size=(3, 3)))
        points[row] = _on_surface(int(kind), 64, rng) @ turn + rng.normal(0, 0.05, (64, 3))
    return {"points": points, "labels": labels, "split": np.repeat([*_COUNTS], [*_COUNTS.values()])}


def _on_surface(kind: int, count: int, rng: np.random.Generator) -> np.ndarray:
    """Return points on a ball, cube, cylinder, cone or torus, about as large as each other."""
    angle, along = rng.uniform(0, 2 * np.pi, count), rng.uniform(-1, 1, count)
    around = np.stack([np.cos(angle), np.sin(angle)], 1)
    if kind == 0:
        return np.c_[np.sqrt(1 - along[:, None] ** 2) * around, along]
    if kind == 1:
        sides = rng.uniform(-0.8, 0.8, (count, 3))
        sides[np.arange(count), rng.integers(3, size=count)] = 0.8 * np.sign(along)
        return sides
    if kind == 2:  # with its two ends
        end = rng.random(count) < 1 / 3
        reach = np.where(end, np.sqrt(rng.random(count)), 1.0)
        return np.c_[0.8 * reach[:, None] * around, np.where(end, np.sign(along), along)]
    if kind == 3:
        down = np.sqrt(rng.random(count))
        return np.c_[down[:, None] * around, 1 - 2 * down]
    tube = rng.uniform(0, 2 * np.pi, count)
    return np.c_[(0.7 + 0.3 * np.cos(tube))[:, None] * around, 0.3 * np.sin(tube)]


_PARTS = ("acting", "plot", "music", "light", "cast", "end")
_WORDS = (("bad", "dull", "weak", "poor"), ("good", "fine", "great", "warm"))


def _reviews() -> Arrays:
    """Return short reviews as bytes, and whether more of their three judgments are good than bad.

    A "not" turns a judgment into the other one, so that single words do not decide.
    """
    rng = np.random.default_rng(0)
    texts, labels = [], []
    for _ in range(sum(_COUNTS.values())):
        good, turned = rng.integers(2, size=3), rng.integers(2, size=3)
        subjects = rng.permutation(_PARTS)[:3]
        judged = zip(subjects, good, turned, strict=True)
        texts.append(
            "; ".join(
                f"{subject} {'not ' * int(no)}{rng.choice(_WORDS[one ^ no])}"
                for subject, one, no in judged
            ).encode()
        )
        labels.append(int(good.sum() > 1))
    lengths = np.array([len(text) for text in texts])
    rows = [np.frombuffer(text.ljust(int(lengths.max()), b"\0"), np.uint8) for text in texts]
    split = np.repeat([*_COUNTS], [*_COUNTS.values()])
    return {"bytes": np.stack(rows), "lengths": lengths, "labels": np.array(labels), "split": split}


KINDS = ("same", "larger", "even", "small")  # of statements about a pair of digits
_FILLERS, _WORDS_SAID = 12, 6


def _statements() -> Arrays:
    """Return pairs of digits with a statement, and whether it is true.

    A statement has six words, of which one in a random place tells its kind; each kind has two
    such words. All others are fillers.
    """
    rng, parts = np.random.default_rng(0), []
    words = np.eye(2 * len(KINDS) + _FILLERS, dtype=np.float32)
    for split, count in _COUNTS.items():
        images, labels, _ = digits(split)
        rows = rng.integers(len(images), size=(count, 2))
        alike = rng.random(count) < 0.5  # "same" would hardly ever be true otherwise
        kind = rng.integers(len(KINDS), size=count)
        for row in np.flatnonzero(alike & (kind == 0)):
            rows[row, 1] = rng.choice(np.flatnonzero(labels == labels[rows[row, 0]]))
        first, second = labels[rows].T
        small = (first < 3) | (second < 3)
        truth = np.stack([first == second, first > second, (first + second) % 2 == 0, small])
        said = rng.integers(2 * len(KINDS), len(words), (count, _WORDS_SAID))
        said[np.arange(count), rng.integers(_WORDS_SAID, size=count)] = 2 * kind + rng.integers(
            2, size=count
        )
        parts.append(
            {
                "images": images[rows[:, 0]],
                "images_b": images[rows[:, 1]],
                "condition": words[said],
                "labels": truth[kind, np.arange(count)].astype(np.int64),
                "split": np.full(count, split, "<U10"),
            }
        )
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


_SCENES = {"train": 4000, "validation": 200, "test": 1000}


def _small_scenes() -> Arrays:
    """Return scenes of 32 px with one object, by color and shape."""
    arrays: Arrays = {}
    for split, prefix in _PREFIXES.items():
        drawn = scenes(split, _SCENES[split], side_px=32, objects=(1, 1))
        arrays |= {
            f"{prefix}_images": drawn.images,
            f"{prefix}_labels": np.array([scene_label(things) for things in drawn.objects]),
        }
    return arrays


def _sized_scenes(least_px: float, most_px: float, train: int = 64, side: int = 16) -> Arrays:
    """Return scenes of three separate shapes on black whose radii are within these bounds."""
    arrays: Arrays = {}
    for number, (prefix, count) in enumerate({"train": train, "val": 64, "test": 256}.items()):
        rng = np.random.default_rng([301, number])
        palette = np.zeros((count, PIECES + 1, 3), np.uint8)
        palette[:, 1:] = np.array(COLOURS)[rng.integers(len(COLOURS), size=(count, PIECES))]
        masks = np.stack([_separate_shapes(rng, least_px, most_px, side) for _ in range(count)])
        images = palette[np.arange(count)[:, None, None], masks]
        arrays |= {f"{prefix}_images": images, f"{prefix}_masks": masks}
    return arrays


def _separate_shapes(
    rng: np.random.Generator, least_px: float, most_px: float, side: int
) -> np.ndarray:
    """Draw the mask of a scene, its largest shape first; start over where one finds no place."""
    while True:
        mask = np.zeros((side, side), np.uint8)
        for radius in -np.sort(-rng.uniform(least_px, most_px, PIECES)):
            for _ in range(50):
                row, column = rng.uniform(radius, side - radius, 2)
                y, x = np.mgrid[:side, :side] + 0.5
                kind = rng.integers(len(SHAPES), size=1)
                outside = distance(kind, x[None] - column, y[None] - row, np.array([radius]))[0]
                if not mask[outside <= 1].any():  # a pixel between them stays free
                    mask[outside <= 0] = mask.max() + 1
                    break
        if mask.max() == PIECES:
            return mask


_MADE: dict[str, Callable[[], Arrays]] = {
    "digits-shifted": _shifted_digits,
    "digits-0-5": lambda: _digits_of(0, 5),
    "digits-6-9": lambda: _digits_of(6, 9),
    "digits-small": lambda: _single_digits(large=False),
    "digits-large": lambda: _single_digits(large=True),
    "digits-placed": _placed_digits,
    "digits-sum-shifted": _shifted_digits_sum,
    "solids": _solids,
    "reviews": _reviews,
    "statements": _statements,
    "shapes-32": _small_scenes,
    "shapes-middle": lambda: _sized_scenes(1.6, 2.6, train=4_096),
    "shapes-small": lambda: _sized_scenes(1.1, 1.6),
    "shapes-large": lambda: _sized_scenes(2.8, 3.5),
    "tetrominoes-256": lambda: _few_scenes(256),
    "tetrominoes-4096": lambda: _few_scenes(4096),
}
