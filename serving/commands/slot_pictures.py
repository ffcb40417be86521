# SPDX-License-Identifier: Apache-2.0
"""Pixels and the slots that own them, as PNG files."""

import io

import numpy as np

# Told apart by most eyes, dark and light in turn; more slots than colours begin anew.
COLOURS = (
    *((230, 159, 0), (0, 114, 178), (0, 158, 115), (204, 121, 167), (86, 180, 233)),
    *((213, 94, 0), (240, 228, 66), (102, 51, 0), (153, 153, 153), (51, 34, 136), (34, 34, 34)),
)


def masks_png(owners: np.ndarray) -> bytes:
    """A palette PNG: a pixel's index is its slot.

    Shapes: owners uint8 [h w].
    """
    from PIL import Image

    image = Image.fromarray(np.ascontiguousarray(owners, np.uint8), "P")
    count = int(owners.max()) + 1
    colours = [COLOURS[slot % len(COLOURS)] for slot in range(count)]
    image.putpalette([level for colour in colours for level in colour])
    return _saved(image)


def image_png(pixels: np.ndarray) -> bytes:
    """Pixels as a PNG file.

    Shapes: uint8 [h w c].
    """
    from PIL import Image

    return _saved(Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels))


def _saved(image: object) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")  # type: ignore[attr-defined]
    return file.getvalue()
