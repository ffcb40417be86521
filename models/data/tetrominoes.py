# SPDX-License-Identifier: Apache-2.0
"""Scenes of three tetrominoes on black: objects that look the same at every position."""

from dataclasses import dataclass

import numpy as np

from saccade.core.checks import check_one_of, check_within
from saccade.core.schema import Range

COUNTS = {"train": 10_000, "validation": 320, "test": 320}
POSITIONS = ("anywhere", "left")
COLOURS = (
    *((255, 0, 0), (0, 255, 0), (0, 0, 255)),
    *((255, 255, 0), (255, 0, 255), (0, 255, 255)),
)
PIECES = 3
_SEEDS = {"train": 201, "validation": 202, "test": 203}
_CHUNK = 64  # scenes per generator: a shorter draw is the beginning of a longer one
_MOST_DRAWS = 200  # of one piece's position, before the scene starts over
_FORMS = ("xxxx", "xx/xx", "xxx/.x.", ".xx/xx.", "xx./.xx", "xxx/x..", "xxx/..x")


@dataclass(frozen=True)
class Tetrominoes:
    """Images and their true segments.

    Shapes: images [n s s 3] uint8, masks [n s s] uint8: 0 background, i + 1 where piece i is.
    """

    images: np.ndarray
    masks: np.ndarray


def tetrominoes(
    split: str,
    count: int | None = None,
    *,
    seed: int = 0,
    side_px: int = 35,
    positions: str = "anywhere",
) -> Tetrominoes:
    """Return the first `count` scenes of a split, the same on every call.

    A scene is black with three pieces that do not overlap. Each piece is one of the 19 tetrominoes
    (seven forms in their different rotations) in one of six full colors (red, green, blue, yellow,
    magenta, cyan). Both are drawn uniformly and independently, so colors repeat. A cell of a piece
    is round(side_px / 7) pixels wide: 5 at 35 px, 3 at 20 and 24 px. A piece's position is drawn
    uniformly from those where it is free and entirely inside the image; with positions `left`,
    also the middle of its box is left of the image's. Every 64 scenes come from a separate
    generator, seeded by split, `seed` and their number, so splits share no generator. Without
    `count`, train has 10,000 scenes, validation and test 320 each.
    Raises: SaccadeError for an unknown split or positions, a count below 1, a side below 14.
    Source: scenes like those of Tetrominoes, Kabra et al. 2019 (Multi-Object Datasets).
    """
    check_one_of("split", split, COUNTS)
    count = COUNTS[split] if count is None else count
    check_within("count", count, Range(1))
    chunks = []
    for start in range(0, count, _CHUNK):
        rng = np.random.default_rng([_SEEDS[split], seed, start // _CHUNK])
        some = tetromino_batch(rng, _CHUNK, side_px=side_px, positions=positions)
        chunks.append(some)
    images = np.concatenate([chunk.images for chunk in chunks])[:count]
    return Tetrominoes(images, np.concatenate([chunk.masks for chunk in chunks])[:count])


def tetromino_batch(
    rng: np.random.Generator, count: int, *, side_px: int = 35, positions: str = "anywhere"
) -> Tetrominoes:
    """Draw new scenes, as `tetrominoes` does.

    Raises: SaccadeError for unknown positions or a side below 14.
    """
    check_one_of("positions", positions, POSITIONS)
    check_within("side_px", side_px, Range(14))
    masks = np.zeros((count, side_px, side_px), dtype=np.uint8)
    palette = np.zeros((count, PIECES + 1, 3), dtype=np.uint8)
    pieces = _pieces(round(side_px / 7))
    for index in range(count):
        chosen = rng.integers(len(pieces), size=PIECES)
        palette[index, 1:] = np.array(COLOURS, dtype=np.uint8)[rng.integers(6, size=PIECES)]
        while not _place(rng, masks[index], [pieces[index] for index in chosen], positions):
            masks[index] = 0
    return Tetrominoes(palette[np.arange(count)[:, None, None], masks], masks)


def _place(
    rng: np.random.Generator, mask: np.ndarray, pieces: list[np.ndarray], positions: str
) -> bool:
    """Draw the pieces into an empty mask; return False if a piece found no free place."""
    side = len(mask)
    for number, piece in enumerate(pieces, 1):
        height, width = piece.shape
        columns = side - width + 1
        if positions == "left":
            columns = (side - width - 1) // 2 + 1  # 2 column + width < side
        for _ in range(_MOST_DRAWS):
            row, column = int(rng.integers(side - height + 1)), int(rng.integers(columns))
            there = mask[row : row + height, column : column + width]
            if not there[piece].any():
                there[piece] = number
                break
        else:
            return False
    return True


def _pieces(cell_px: int) -> list[np.ndarray]:
    """Return the 19 rotated tetrominoes, in pixels."""
    pieces: dict[tuple[tuple[bool, ...], ...], np.ndarray] = {}
    for form in _FORMS:
        cells = np.array([[cell == "x" for cell in row] for row in form.split("/")])
        for turn in range(4):
            turned = np.rot90(cells, turn)
            pieces.setdefault(tuple(map(tuple, turned.tolist())), turned)
    block = np.ones((cell_px, cell_px), dtype=bool)
    return [np.kron(cells, block) for cells in pieces.values()]
